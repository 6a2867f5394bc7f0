"""Plan an extraction before its first forward: inputs, sequences, fields and output.

Sequences are divided into parts. Each part is later written and committed as a whole.

``store.json`` identifies the inputs of a store by the content hashes of the target and the dataset.
If the target or the dataset comes from the Hub, ``extraction.sources`` also records the commit.
Later runs load this commit, even if the Hub has a newer one. Local files and folders have no
entry::

    "sources": {
      "model": {"id": "Qwen/Qwen3-8B", "revision": "main", "commit": "b968826d..."},
      "dataset": {"id": "HuggingFaceH4/ultrachat_200k", "revision": "main", "commit": "8049631c..."}
    }
"""

import contextlib
import hashlib
import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..errors import (
    CodecUnknown,
    OptionInvalid,
    StorageUnavailable,
    StoreError,
    StoreMismatch,
    WorkerError,
)
from ..files import parse_object
from ..moa.drafters.advice import Advice, advise
from ..moa.targets.bundle import frozen_weights, hash_target
from ..moa.targets.facts import TargetFacts, load_facts, quantisation_problem
from ..moa.targets.families import empty_model
from ..moa.targets.live import load_target_tokenizer, pick_device, resolve_model_folder
from ..moa.targets.loading import check_vocabulary
from ..moa.targets.model_files import read_config
from ..moa.targets.template import (
    TEMPLATE_TIME,
    ChatTemplate,
    parse_template_arguments,
    template_source,
)
from ..storage.backend import backend_of, open_path
from ..storage.codecs.registry import StoreCodec
from ..storage.commit import committed_bytes, has_parts
from ..storage.paths import StorePath
from ..storage.plan import numbers, plan_counts, plan_parts
from ..storage.read.store import read_manifest
from ..storage.schema import (
    ALIGNMENT_TOKENS,
    KV,
    LATENTS,
    ROTATED_IN_SOME,
    RUNS_NAME,
    StoreManifest,
)
from ..text import SILENT, Progress, counted, format_bytes
from .config import DEFAULT_MAX_LENGTH, ExtractConfig, parse_activations, resolve_encode_threads
from .dataset import ChatSource, Columns
from .estimate import ForwardPlan, WritePlan, field_specs, has_device
from .forwards.calibrate import SAMPLE_TOKENS
from .forwards.vllm_source import check_vllm
from .report import reason_lines
from .sequences import Sequences, check_counts, read_sequences, read_texts, texts_origin

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt",
)  # fmt: skip


class Source(TypedDict):
    """A model or dataset of the Hub."""

    id: str
    revision: str  # the branch, tag or commit that was requested
    commit: str


# Maps "model" and "dataset" to their id, revision and commit on the Hub.
Sources = dict[str, Source]
_SOURCE = TypeAdapter(Source)
_MAIN = "main"


@dataclass(frozen=True)
class ExtractPlan(WritePlan):
    """The plan of an extraction: its settings, sequences and manifest, and the needed space."""

    config: ExtractConfig
    manifest: StoreManifest  # Content of store.json. The codec in it may not be fitted to data yet.
    sequences: Sequences = field(repr=False)
    # All inputs that determine the token ids (see the function ``texts_origin``). The value is None
    # if the dataset can only be identified by reading all rows. It is also None if the output
    # folder already holds the tokenised sequences.
    texts_origin: Mapping[str, Any] | None = field(repr=False)
    dataset: str  # text with the dataset's name, its split and the number of files
    template: ChatTemplate = field(repr=False)

    def rows_read(self) -> list[str]:
        """Return lines of text about the rows of the dataset: how many were read and rejected."""
        counts = self.sequences
        rows = counted(counts.n_rows, "row")
        lines = [
            f"dataset      {self.dataset}: {rows} read",
            f"rejected     {counts.n_rejected:,} of {rows}, "
            f"{counted(counts.n_duplicates, 'duplicate')} left out",
            *reason_lines(counts.rejections, counts.examples, " " * 15),
            *counts.beside_lines(),
        ]
        # If a tokenizer has one template for all chats, the two keys below are the same object.
        # The dict then has a single entry, with the name "chat template".
        names = {
            self.template.for_tools([]): "chat template for chats with tools",
            self.template: "chat template",
        }
        for template, name in names.items():
            if not template.end_of_turn:
                lines.append(
                    f"end of turn  The {name} does not mark the end of an answer, so drafters do "
                    "not learn where an answer ends."
                )
            elif not template.text_after_last:
                lines.append(
                    f"end of turn  The {name} writes no end-of-turn token after the last answer "
                    "of a chat, so drafters learn the end of an answer only from earlier turns."
                )
        return lines

    def describe(self) -> str:
        """Return the plan as text."""
        storage = self.config.storage
        target = self.manifest.target
        codec = self.forward.codec
        n_response = int(numbers(self.table, "n_response_tokens").sum())
        lengths = np.sort(numbers(self.table, "n_tokens"))
        bits: list[str] = []
        for name, field_codec in codec.fields.items():
            if field_codec.spec.token_shape:
                bits.append(f"{name} {field_codec.expected_bits:.1f}")
        cached = ""
        if self.forward.facts.has_uniform_kv:
            cached = f" {target['n_kv_heads']} KV heads of {target['head_dim']},"
        lines = [
            f"target       {self.config.model} ({target['architecture']}, {target['n_layers']} "
            f"layers,{cached} width {target['hidden_size']})",
            *self.rows_read(),
            f"sequences    {self.manifest.n_sequences:,} ({self.sequences.n_truncated:,} cut at "
            f"{self.config.data.max_length:,} tokens)",
            f"tokens       {self.n_tokens:,} ({n_response:,} in responses), length median "
            f"{int(lengths[len(lengths) // 2]):,}, longest {int(lengths[-1]):,}",
            f"fields       {', '.join(codec.fields)} in {storage.dtype}, codec {storage.codec}",
            f"bits         at most {', '.join(bits)} per value in the parts",
            f"parts        {self.manifest.n_parts:,} of up to {storage.part_tokens:,} tokens",
            *self.space(),
        ]
        if codec.learned:
            lines.append(self._learn_line())
        folder = self.forward.folder
        if problem := quantisation_problem(read_config(folder), folder):
            lines.append(f"refused      by `extract`: {problem}")
        return "\n".join(lines)

    def _learn_line(self) -> str:
        """Return a line of text about fitting the codec to a sample of the sequences."""
        n_sample = min(self.n_tokens, SAMPLE_TOKENS)
        learned = self.forward.codec.learned.values()
        # While the codec is fitted, the disk holds the values of the sample in float32 (4 bytes
        # each). It also holds the transformed values, called components, in 16 bits (2 bytes each).
        n_values = sum(math.prod(codec.spec.token_shape) for codec in learned)
        return (
            f"learn        before the first part, the target runs over {n_sample:,} tokens to fit "
            f"the codec, which needs about {format_bytes(6 * n_sample * n_values)} of temporary "
            f"disk space at {self.disk}"
        )

    def advice(self) -> list[Advice]:
        """Return advice on the drafters and settings that suit the target and the chats."""
        width = self.forward.facts.cache_width
        is_on_cpu = self.forward.device_type == "cpu" and self.config.forward.source != "vllm"
        return advise(
            self.n_tokens, is_on_cpu, width > 0, 1 + width / self.manifest.target["hidden_size"]
        )


def build_plan(
    config: ExtractConfig, progress: Progress = SILENT, with_weights: bool = False
) -> ExtractPlan:
    """Plan an extraction. The target does not run, and nothing is written.

    Equal inputs give equal plans.

    Args:
        config: the settings of the extraction.
        progress: reports the chats that are tokenised, and then the bytes of weights that are
            hashed.
        with_weights: whether to also hash the target's weights. The store records the hash to
            identify the target. If the target comes from the Hub, the weights are downloaded.
    """
    # Parse ``columns`` and ``template_kwargs`` first, so that mistakes in them are refused before
    # anything is downloaded.
    texts = {
        "columns": Columns.parse(config.data.columns).describe(),
        "template_kwargs": parse_template_arguments(config.data.template_kwargs),
    }
    if config.scale.engine == "ray" and importlib.util.find_spec("ray") is None:
        raise OptionInvalid(
            "`engine=ray` needs Ray, which is not installed. Install it with pip install "
            "'moa-data[ray]'."
        )
    out = open_path(config.out)
    stored = _stored_extraction(out)
    # Use the recorded commits only if the store has parts. A store without parts may be replaced by
    # a store from other inputs.
    sources = recorded_sources(stored) if stored and has_parts(out) else None
    revision = pinned_revision(sources, "model", config.model, config.revision)
    folder = resolve_model_folder(config.model, False, revision)
    config, forward, engine = _plan_forwards(config, folder, with_weights, stored)
    if with_weights:
        folder = resolve_model_folder(config.model, True, revision)
        forward = replace(forward, folder=folder)
        check_vocabulary(folder)
    tokenizer = load_target_tokenizer(folder)
    template = ChatTemplate(tokenizer, texts["template_kwargs"], config.model)
    source = open_dataset(config, sources)
    identities = tokenizer_identities(folder, tokenizer)
    origin = texts_origin(source, identities, config, texts, forward.facts)
    stored_sequences = read_texts(out, origin)
    sequences = stored_sequences or read_sequences(
        source, template, config, forward.facts, progress
    )
    check_counts(sequences, source, config)
    table = plan_parts(sequences.table(), config.storage.part_tokens, ALIGNMENT_TOKENS)
    if with_weights:
        identities |= weight_identities(folder, progress)
    extraction = _extraction(config, forward, engine)
    for name, value in texts.items():
        if value:
            extraction[name] = value
    if sequences.asked_the_time:
        extraction["template_time"] = TEMPLATE_TIME.isoformat()
    manifest = StoreManifest(
        fields=tuple(codec.spec for codec in forward.codec.fields.values()),
        target=forward.facts.sizes,
        identities={**identities, "dataset.sha256": sequences.dataset_sha256},
        conventions=_conventions(forward.facts),
        extraction=extraction | sources_record(config, folder, source, sources),
        codec=forward.codec.describe(),
        **plan_counts(table),
    )
    return ExtractPlan(
        store=out,
        forward=forward,
        table=table,
        bundle_layers=config.target_layers,
        present_bytes=committed_bytes(out),
        config=config,
        manifest=manifest,
        sequences=sequences,
        texts_origin=None if stored_sequences else origin,
        dataset=source.describe(),
        template=template,
    )


def _plan_forwards(
    config: ExtractConfig, folder: Path, with_weights: bool, stored: Mapping[str, Any]
) -> tuple[ExtractConfig, ForwardPlan, Mapping[str, str] | None]:
    """Choose the settings that are not given. Refuse targets and settings that are not supported.

    This function runs before weights are downloaded and chats are read.

    Args:
        config: the settings of the extraction.
        folder: the target's folder.
        with_weights: whether the target's weights must be available.
        stored: the entry ``extraction`` of the store's manifest; empty for a new store.

    Returns:
        The settings with all chosen values, the plan of the forwards, and a dict with the name and
        version of vLLM. If transformers runs the target, the dict is None.
    """
    facts = load_facts(folder, with_weights)
    # Refuse a target if drafters do not support its LM head. Families with a KV cache need no check,
    # because their LM heads are known to be supported.
    if not facts.family.keeps_kv:
        frozen_weights(empty_model(facts.config))
    uses_vllm = config.forward.source == "vllm"
    kv_fields = tuple(group.field for group in facts.kv_groups)
    spec = parse_activations(config.activations, config.target_layers, facts.n_layers, kv_fields)
    if spec.kv:
        facts.check_kv()
    if config.target_layers:
        # This call raises an error if no drafter can use the target's last layers.
        facts.layer_sizes()
    if spec.kv and uses_vllm and kv_fields != (KV,):
        raise OptionInvalid(
            f"Layers of {facts.model_type} cache keys and values in different ways, which "
            "`source=vllm` does not support. Leave out `source=vllm`, or extract only hidden "
            "states (`activations=hidden:last`)."
        )
    n_positions = facts.max_position_embeddings
    # Leave room for one more token, because vLLM appends a sampled token to each sequence.
    max_length = config.data.max_length or min(DEFAULT_MAX_LENGTH, n_positions - uses_vllm)
    config = config.replaced(max_length=max_length)
    longest = min(max_length, n_positions)
    engine = check_vllm(facts, longest) if uses_vllm else None
    # If vLLM runs the target, transformers also loads the target on the CPU, to copy weights to the
    # store and to compute the final norm.
    device = "cpu" if uses_vllm else _pick_device(config)
    is_cpu = torch.device(device).type == "cpu"
    try:
        codec = StoreCodec(config.storage.codec, field_specs(spec, facts, config.storage.dtype))
    except CodecUnknown as error:
        raise OptionInvalid(f"{error} Change `codec`.") from error
    if codec.learned and not has_device(device):
        raise OptionInvalid(
            f"Codec {config.storage.codec} is fitted to activations that this machine computes "
            "before the first part is written, but this machine has no GPU. Start the command on a "
            "machine of the cluster that has a GPU, or choose another `codec`."
        )
    forward = ForwardPlan(
        folder=folder,
        facts=facts,
        spec=spec,
        codec=codec,
        device=device,
        dtype=config.storage.dtype,
        compute_dtype=_choose_compute_dtype(config, device, stored),
        batch_tokens=config.forward.batch_tokens
        or (65_536 if uses_vllm else 2048 if is_cpu else 16_384),
        longest_tokens=longest,
        uses_cache=spec.kv,
        n_encode_threads=resolve_encode_threads(
            config.forward.encode_threads, config.scale.n_local_workers
        ),
        n_workers=config.scale.n_local_workers,
    )
    if with_weights and has_device(device):
        forward.check_memory()
    return config, forward, engine


def _choose_compute_dtype(config: ExtractConfig, device: str, stored: Mapping[str, Any]) -> str:
    """Return the dtype in which the target computes."""
    if config.forward.compute_dtype != "auto":
        return config.forward.compute_dtype
    kind = torch.device(device).type
    dtype = config.storage.dtype
    # An existing store keeps its recorded dtype, so that the user need not repeat the option.
    if stored.get("device") == kind and stored.get("compute_dtype") in (
        "float32",
        "bfloat16",
        "float16",
    ):
        return str(stored["compute_dtype"])
    if kind != "cpu" or config.forward.source == "vllm":
        return dtype
    # Use float32 even on a CPU with fast bfloat16, so that a store does not depend on the kind of
    # CPU.
    return "float32"


def _pick_device(config: ExtractConfig) -> str:
    """Return the device on which the target runs.

    With Ray, the workers may run on machines with GPUs even if this machine has none. So the setting
    ``gpus_per_worker``, if it is given, decides between CPU and GPU.
    """
    wanted = config.forward.device
    n_gpus = config.scale.gpus_per_worker
    if config.scale.engine == "ray" and n_gpus is not None:
        if (wanted == "cpu" and n_gpus) or (wanted not in ("auto", "cpu") and not n_gpus):
            raise OptionInvalid(
                f"`device={wanted}` and `gpus_per_worker={n_gpus:g}` contradict each other. Leave "
                "out one of the two options."
            )
        return "cuda" if n_gpus else "cpu"
    return pick_device(wanted)


def _extraction(
    config: ExtractConfig, forward: ForwardPlan, engine: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return the settings that determine the stored values.

    The batch size is included, because the last bits of the values depend on it.
    """
    of_engine = {"engine": engine, "attention": "paged", "device": "cuda"} if engine else {}
    return {
        "activations": list(forward.spec.fields),
        "attention": forward.facts.attention,
        "batch_tokens": forward.batch_tokens,
        "bos": "one BOS where the model has one, as the chat template or the tokenizer sets it",
        "compute_dtype": forward.compute_dtype,
        "device": forward.device_type,
        "dtype": forward.dtype,
        "max_length": config.data.max_length,
        "max_sequences": config.data.max_sequences,
        "part_tokens": config.storage.part_tokens,
        "target_layers": config.target_layers,
        "truncation": "right, tokens and mask together",
    } | of_engine


def _conventions(facts: TargetFacts) -> Mapping[str, str]:
    """Return notes on how the target's keys and values differ from Llama's.

    If they do not differ, the result is empty.
    """
    if any(group.field == "kv/latent" for group in facts.kv_groups):
        return LATENTS
    return {} if facts.family.rotates_all else ROTATED_IN_SOME


def recorded_sources(extraction: Mapping[str, Any]) -> Sources:
    """Return the Hub ids and commits that ``sources`` in a manifest's ``extraction`` records.

    A malformed entry is left out.
    """
    sources: Sources = {}
    recorded = extraction.get("sources")
    for kind, entry in recorded.items() if isinstance(recorded, Mapping) else ():
        with contextlib.suppress(ValidationError):
            sources[kind] = _SOURCE.validate_python(entry)
    return sources


def _stored_extraction(store: StorePath) -> Mapping[str, Any]:
    """Return the entry ``extraction`` of a store's manifest.

    The result is empty if the manifest does not exist or cannot be read.
    """
    try:
        return read_manifest(store).extraction
    except StorageUnavailable:
        raise
    except (StoreError, OSError):
        return {}


def pinned_revision(
    sources: Sources | None, kind: str, name: str, revision: str | None
) -> str | None:
    """Return the revision of a model or dataset to load.

    If the store records a commit for the requested revision, the result is this commit. Otherwise,
    it is the requested revision.

    Args:
        sources: the Hub ids and commits that the store records. The argument is None if the store
            does not exist or has no committed parts.
        kind: ``model`` or ``dataset``.
        name: hub id of the model or dataset.
        revision: the requested branch, tag or commit. If the argument is None, it is the branch
            main.
    """
    entry = (sources or {}).get(kind)
    if (
        entry
        and entry["id"] == name
        and (revision or _MAIN) in (entry["revision"], entry["commit"])
    ):
        return entry["commit"]
    return revision


def find_same_target(
    model: str, store: StorePath, stored: StoreManifest, progress: Progress = SILENT
) -> Path:
    """Return the folder of a target, and check that a store was made with this target.

    Args:
        model: a folder, a GGUF file or a hub id.
        store: the store, for error messages.
        stored: the store's manifest.
        progress: reports the bytes of weights that are hashed.

    Raises:
        StoreMismatch: the target has other weights or another config.
    """
    sources = recorded_sources(stored.extraction)
    folder = resolve_model_folder(model, True, pinned_revision(sources, "model", model, None))
    check_identities(store, stored.identities, weight_identities(folder, progress))
    return folder


def open_dataset(config: ExtractConfig, sources: Sources | None) -> ChatSource:
    """Open the dataset of an extraction.

    If ``sources`` records the commit of a Hub dataset, this commit is read.
    """
    revision = pinned_revision(sources, "dataset", config.dataset, config.data.dataset_revision)
    return ChatSource(config.dataset, config.data.split, config.data.dataset_config, revision)


def sources_record(
    config: ExtractConfig, folder: Path, dataset: ChatSource, before: Sources | None
) -> dict[str, Any]:
    """Return the entry ``sources`` for a manifest's ``extraction``.

    The entry contains the Hub id, revision and commit of the model and of the dataset. A new store
    gets the current values. An existing store keeps its recorded values, with one exception: if the
    commit of the model or dataset has changed, its current values replace the recorded ones. If an
    existing store does not record the model or dataset, nothing is added, because the content
    hashes already show whether the model or dataset has changed.

    Args:
        config: the settings of the extraction.
        folder: the model's folder. In the cache of the Hub, the folder's name is the commit.
        dataset: the dataset of the extraction.
        before: the entry that an existing store records, or None for a new store.
    """
    current: Sources = {}
    if not Path(config.model).expanduser().exists():
        current["model"] = Source(
            id=config.model, revision=config.revision or _MAIN, commit=folder.name
        )
    if dataset.commit:
        revision = config.data.dataset_revision or _MAIN
        current["dataset"] = Source(id=config.dataset, revision=revision, commit=dataset.commit)
    recorded = current if before is None else dict(before)
    for kind, source in current.items():
        if kind in recorded and recorded[kind]["commit"] != source["commit"]:
            recorded[kind] = source
    return {"sources": recorded} if recorded else {}


def weight_identities(folder: Path, progress: Progress = SILENT) -> dict[str, str]:
    """Return the hashes ``target.weights_sha256`` and ``target.config_sha256`` of a target."""
    return {f"target.{key}": value for key, value in hash_target(folder, progress).items()}


def tokenizer_identities(folder: Path, tokenizer: Any) -> dict[str, str]:
    """Return the hashes of the tokenizer and of its chat template.

    Their keys are ``tokenizer.sha256`` and ``template.sha256``.
    """
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode())
            digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    template = hashlib.sha256(template_source(tokenizer).encode()).hexdigest()
    return {"tokenizer.sha256": digest.hexdigest(), "template.sha256": template}


def check_identities(store: StorePath, stored: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Compare the hashes of the current inputs with the hashes in a store's manifest.

    Hashes that are missing in the manifest are not compared.

    Args:
        store: the store, for the error message.
        stored: the hashes in the store's manifest.
        found: the hashes of the current inputs.

    Raises:
        StoreMismatch: a hash differs.
    """
    changes: dict[str, tuple[str, str]] = {}
    for key, value in found.items():
        if stored.get(key, value) != value:
            changes[f"identities.{key}"] = stored[key], value
    if changes:
        raise StoreMismatch(str(store), changes, "Give the `model` that the store was made with.")


def recorded_config(store: StorePath) -> ExtractConfig:
    """Return the settings of the store's last finished extraction.

    Raises:
        WorkerError: the store has no readable record of an extraction.
    """
    runs = store / RUNS_NAME
    setting_names = {setting.name for setting in ExtractConfig.settings()}
    records = [name for name in backend_of(runs).names_in() if name.endswith(".json")]
    for record in sorted(records, reverse=True):
        try:
            settings = parse_object(backend_of(runs / record).read())["config"]
            known = {name: value for name, value in settings.items() if name in setting_names}
            return ExtractConfig.of(**known)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    raise WorkerError(
        f"{runs} has no record of a finished extraction, so the settings of the store are not "
        "known. To write the missing parts of the store, repeat the command that made it. To rewrite "
        f"damaged parts too, first run `moa-data repair {json.dumps(str(store))} --drop`."
    )
