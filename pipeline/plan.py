"""The plan of an extraction, made before the first forward: what will be written, where, and what it costs."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..errors import CodecUnknown, Interrupted, NotEnoughMemory, OptionInvalid, StorageUnavailable
from ..machine import free_memory
from ..moa.targets.bundle import load_target_config, target_sizes
from ..moa.targets.live import load_target_tokenizer, pick_device, resolve_model_folder
from ..moa.targets.template import TEMPLATE_TIME, ChatTemplate, parse_template_arguments
from ..storage.backend import open_path
from ..storage.codecs.calibration import MAX_FEATURES
from ..storage.codecs.registry import StoreCodec
from ..storage.commit import committed_bytes
from ..storage.paths import RemotePath, StorePath
from ..storage.plan import plan_counts, plan_parts
from ..storage.schema import (
    ALIGNMENT_TOKENS,
    FieldSpec,
    StoreManifest,
    hidden_field,
    kv_field,
    response_mask_field,
    tokens_field,
)
from ..text import Progress, counted, format_bytes
from .config import DEFAULT_MAX_LENGTH, ActivationSpec, ExtractConfig, parse_activations, resolve_encode_threads
from .dataset import ChatSource, Columns
from .forwards.calibrate import SAMPLE_TOKENS
from .forwards.parts import N_HOST_SLOTS
from .forwards.vllm_source import check_vllm
from .sequences import Sequences, check_counts, read_sequences
from .sources import (
    check_weights,
    pinned_revision,
    sources_record,
    stored_sources,
    tokenizer_identities,
    weight_identities,
)
from .texts import read_texts, texts_origin
from .workers import require_ray


@dataclass(frozen=True)
class ForwardMemory:
    """An upper estimate of the memory of forwards: in the host for all workers, on a device of its own for each."""

    host_bytes: int
    device_bytes: int
    weight_bytes: int
    device: str
    text: str

    def check(self) -> None:
        """Refuse forwards that do not fit in free memory; where it cannot be told, nothing is refused."""
        host = free_memory(), self.host_bytes, "host memory"
        for n_free, n_bytes, place in (host, (free_device_memory(self.device), self.device_bytes, self.device)):
            if n_free is not None and n_bytes > n_free:
                raise NotEnoughMemory(
                    f"The target's forwards need {self.text}. Free in {place} are {format_bytes(n_free)}.",
                    "Free some, take a larger machine, or extract in bfloat16, with smaller batches or fewer workers.",
                )


def forward_memory(
    model_config: Any,
    fields: Sequence[FieldSpec],
    compute_dtype: str,
    batch_tokens: int,
    longest_tokens: int,
    device: str,
    n_workers: int = 1,
) -> ForwardMemory:
    """Compute the memory of a target's forwards from its sizes alone.

    Args:
        fields: what is kept of each token, before compression.
        longest_tokens: tokens of the longest sequence; one longer than ``batch_tokens`` makes a batch of its own.
    """
    sizes, itemsize = target_sizes(model_config), getattr(torch, compute_dtype).itemsize
    kept_bytes = sum(spec.token_bytes for spec in fields)
    n_tokens = max(batch_tokens, longest_tokens)
    weight_bytes = _count_weights(model_config)[1] * itemsize
    # The cache that the forward fills, and the intermediate values of one layer.
    cache = 2 * sizes["n_layers"] * sizes["n_kv_heads"] * sizes["head_dim"]
    layer = 4 * sizes["hidden_size"] + 2 * sizes["n_heads"] * sizes["head_dim"] + 3 * model_config.intermediate_size
    # While they are gathered, kept values are there three times: in the storage dtype, packed, for the finite check.
    forward_bytes = n_tokens * ((cache + layer) * itemsize + 3 * kept_bytes)
    waiting_bytes = N_HOST_SLOTS * n_tokens * kept_bytes
    # Weights are loaded in host memory before they move to a device.
    host_bytes, device_bytes, text = weight_bytes + forward_bytes + waiting_bytes, 0, ""
    if torch.device(device).type == "cuda":
        host_bytes = max(weight_bytes, waiting_bytes)
        device_bytes = weight_bytes + forward_bytes + n_tokens * kept_bytes  # of the batch before, until it is copied
        text = f" and {format_bytes(device_bytes)} on {device}"
    host_bytes *= n_workers
    each = f" for {n_workers} workers" if n_workers > 1 else ""
    text = f"{format_bytes(host_bytes)} of host memory{each}{text}: weights {format_bytes(weight_bytes)} in "
    text += f"{compute_dtype}, batches of {n_tokens:,} tokens"
    return ForwardMemory(host_bytes, device_bytes, weight_bytes, device, text)


def free_device_memory(device: str) -> int | None:
    """Return the free bytes of a CUDA device; None for any other device."""
    return int(torch.cuda.mem_get_info(torch.device(device))[0]) if torch.device(device).type == "cuda" else None


@dataclass(frozen=True)
class ForwardPlan:
    """Which forwards will run, what they give, and what that takes.

    Attributes:
        spec, codec: of the fields to write; a codec that learns has not learned yet.
        table: rows of plan.parquet to run: sequence_id, source_row, n_tokens, n_response_tokens, part, first_token.
        folder, model_config: of the target.
        dtype: dtype in which activations are kept.
        batch_tokens: tokens per forward, padding included.
        uses_cache: whether the forwards fill a key/value cache.
        raw_bytes: field -> bytes before compression.
        stored_bytes: expected bytes on disk, those of target/ included.
        present_bytes: those of ``stored_bytes`` that are there already.
        free_bytes: free bytes on the disk that is written to.
    """

    store: StorePath
    spec: ActivationSpec
    codec: StoreCodec = field(repr=False)
    table: pa.Table = field(repr=False)
    folder: Path
    model_config: Any = field(repr=False)
    device: str
    dtype: str
    compute_dtype: str
    batch_tokens: int
    uses_cache: bool
    n_encode_threads: int
    raw_bytes: Mapping[str, int]
    stored_bytes: int
    free_bytes: int
    present_bytes: int
    memory: ForwardMemory

    @property
    def n_raw_bytes(self) -> int:
        """Bytes of all fields before compression."""
        return sum(self.raw_bytes.values())

    @property
    def disk(self) -> Path:
        """A folder on the disk that is written to."""
        return existing_parent(self.store)

    def check_disk(self) -> None:
        """Refuse a plan that the disk cannot hold; raises StorageUnavailable."""
        needed = max(0, self.stored_bytes - self.present_bytes)
        is_remote = isinstance(self.store, RemotePath)
        if is_remote:  # only shards on their way to the bucket lie on the disk
            needed = min(needed, 2 * self.stored_bytes // max(1, len(set(self.table["part"].to_pylist()))))
        if needed > self.free_bytes:
            # No option is named: `add` and `repair`, which plan like `extract`, have fewer of them.
            less = ", or set TMPDIR to another disk" if is_remote else ""
            raise StorageUnavailable(
                f"This needs about {format_bytes(needed)}, but {self.disk} has {format_bytes(self.free_bytes)} free. "
                f"Free some space{less}."
            )

    def room(self) -> list[str]:
        """Return lines about disk and memory."""
        return [
            f"free disk    {format_bytes(self.free_bytes)} at {self.disk}"
            + (", for shards on their way to the bucket" if isinstance(self.store, RemotePath) else "")
            + (f"; the store already holds {format_bytes(self.present_bytes)}" if self.present_bytes else ""),
            f"memory       {self.memory.text}; free {format_bytes(free_memory() or 0)}",
        ]


@dataclass(frozen=True)
class ExtractPlan(ForwardPlan):
    """What an extraction will do.

    Attributes:
        manifest: content of store.json; of a codec that learns, without what it will learn.
        sequences: the tokens and masks.
        texts_origin: their origin (``texts``); None where only reading all rows tells it.
        keeps_texts: whether the output folder holds them.
        dataset: the dataset, and which split and files of it were read, as text.
    """

    config: ExtractConfig
    manifest: StoreManifest
    sequences: Sequences = field(repr=False)
    texts_origin: Mapping[str, Any] | None = field(repr=False)
    keeps_texts: bool
    dataset: str

    @property
    def n_tokens(self) -> int:
        """Tokens to be stored, without alignment padding."""
        return self.manifest.n_tokens

    def rows_read(self) -> list[str]:
        """Return lines about the rows of the dataset."""
        counts = self.sequences
        rows = counted(counts.n_rows, "row")
        return [
            f"dataset      {self.dataset}: {rows} read",
            f"rejected     {counts.n_rejected:,} of {rows}, {counted(counts.n_duplicates, 'duplicate')} left out",
            *counts.rejection_lines(),
        ]

    def describe(self) -> str:
        """Return the plan as text."""
        storage, target = self.config.storage, self.manifest.target
        n_response = int(self.table["n_response_tokens"].to_numpy().sum())
        lengths = np.sort(self.table["n_tokens"].to_numpy())
        bits = {name: codec.expected_bits for name, codec in self.codec.fields.items() if codec.spec.token_shape}
        lines = [
            f"target       {self.config.model} ({target['architecture']}, {target['n_layers']} layers, "
            f"{target['n_kv_heads']} KV heads of {target['head_dim']}, width {target['hidden_size']})",
            *self.rows_read(),
            f"sequences    {self.manifest.n_sequences:,} ({self.sequences.n_truncated:,} cut at "
            f"{self.config.data.max_length:,} tokens)",
            f"tokens       {self.n_tokens:,} ({n_response:,} in responses), length median "
            f"{int(lengths[len(lengths) // 2]):,}, longest {int(lengths[-1]):,}",
            f"fields       {', '.join(self.raw_bytes)} in {storage.dtype}, codec {storage.codec}",
            f"raw          {format_bytes(self.n_raw_bytes)} ({self.n_raw_bytes / self.n_tokens:,.0f} bytes per token)",
            f"on disk      about {format_bytes(self.stored_bytes)} "
            f"({', '.join(f'{name} {own:.1f} bits per value' for name, own in bits.items())})",
            f"parts        {self.manifest.n_parts:,} of up to {storage.part_tokens:,} tokens",
            *self.room(),
        ]
        if self.codec.learned:
            n_sample = min(self.n_tokens, SAMPLE_TOKENS)
            # Float32 values of the sample, and what they become along the axes that were learned.
            values = sum(math.prod(codec.spec.token_shape) for codec in self.codec.learned.values())
            lines.append(
                f"learn        the forwards of {n_sample:,} tokens before the first part; about "
                f"{format_bytes(6 * n_sample * values)} of disk at {self.disk} meanwhile"
            )
        return "\n".join(lines)


def build_plan(config: ExtractConfig, progress: Progress | None = None, with_weights: bool = False) -> ExtractPlan:
    """Plan an extraction from the dataset and the tokenizer, without running the target or writing anything.

    Args:
        progress: called with (chats done, chats in all, message), then with bytes of hashed weights.
        with_weights: also hash the target's weights, which identifies the store; a Hub target is downloaded.

    Returns:
        The plan; equal inputs give equal plans.

    Raises:
        MoaDataError: the input cannot be used, or does not fit in memory.
    """
    chat_settings = _chat_settings(config)  # refuses what makes no sense before anything is downloaded
    if config.scale.engine == "ray":
        require_ray()
    out = open_path(config.out)
    sources = stored_sources(out)
    revision = pinned_revision(sources, "model", config.model, config.revision)
    folder = resolve_model_folder(config.model, with_weights=False, revision=revision)
    model_config = load_target_config(folder)
    check_weights(folder, is_local=Path(config.model).expanduser().is_dir())
    config, how = _resolve(config, model_config)
    if with_weights:
        folder = resolve_model_folder(config.model, revision=revision)
    tokenizer, sizes = load_target_tokenizer(folder), target_sizes(model_config)
    template = ChatTemplate(tokenizer, chat_settings.get("template_kwargs"), config.model)
    revision = pinned_revision(sources, "dataset", config.dataset, config.data.dataset_revision)
    source = ChatSource(config.dataset, config.data.split, config.data.dataset_config, revision)
    identities = tokenizer_identities(folder, tokenizer)
    origin = texts_origin(source, identities, config, sizes)
    kept = read_texts(out, origin)
    sequences = kept or read_sequences(source, template, config, sizes, progress)
    check_counts(sequences, source, config)
    table = plan_parts(sequences.table(), config.storage.part_tokens, ALIGNMENT_TOKENS)
    counts = plan_counts(table)
    weights = weight_identities(folder, progress) if with_weights else {}
    manifest = StoreManifest(
        fields=how.fields,
        target=sizes,
        identities={**identities, **weights, "dataset.sha256": sequences.dataset_sha256},
        extraction={
            **_extraction(config, how),
            **chat_settings,
            **({"template_time": TEMPLATE_TIME.isoformat()} if sequences.asked_the_time else {}),
            **sources_record(config, folder, source, sources),
        },
        codec=how.codec.describe(),
        alignment_tokens=ALIGNMENT_TOKENS,
        n_sequences=counts["n_sequences"],
        n_parts=counts["n_parts"],
        n_tokens=counts["n_tokens"],
    )
    n_tokens, features = counts["n_tokens"], _feature_bytes(how.codec, sizes)
    return ExtractPlan(
        store=out,
        spec=how.spec,
        codec=how.codec,
        table=table,
        folder=folder,
        model_config=model_config,
        device=how.device,
        dtype=config.storage.dtype,
        compute_dtype=how.compute_dtype,
        batch_tokens=how.batch_tokens,
        uses_cache=how.spec.kv,
        n_encode_threads=resolve_encode_threads(config.forward.encode_threads, config.scale.n_local_workers),
        raw_bytes={item.name: item.token_bytes * n_tokens for item in how.fields},
        stored_bytes=expected_bytes(how.codec, n_tokens) + features + bundle_bytes(model_config, config.target_layers),
        free_bytes=shutil.disk_usage(existing_parent(out)).free,
        present_bytes=committed_bytes(out),
        memory=how.memory,
        config=config,
        manifest=manifest,
        sequences=sequences,
        texts_origin=origin,
        keeps_texts=kept is not None,
        dataset=source.describe(),
    )


@dataclass(frozen=True)
class _Resolved:
    """Settings of a plan with what they leave open decided by target and machine; ``engine`` is None for our own."""

    spec: ActivationSpec
    fields: tuple[FieldSpec, ...]
    codec: StoreCodec
    device: str
    compute_dtype: str
    batch_tokens: int
    engine: Mapping[str, str] | None
    memory: ForwardMemory


def _resolve(config: ExtractConfig, model_config: Any) -> tuple[ExtractConfig, _Resolved]:
    """Decide what is left open, and refuse what cannot run here before weights are downloaded and chats are read."""
    sizes, uses_vllm = target_sizes(model_config), config.forward.source == "vllm"
    spec = parse_activations(config.activations, config.target_layers, sizes["n_layers"])
    n_positions = sizes["max_position_embeddings"]
    if config.data.max_length is None:
        config = config.replaced(max_length=min(DEFAULT_MAX_LENGTH, n_positions - uses_vllm))  # which needs one more
    longest = min(config.data.max_length or DEFAULT_MAX_LENGTH, n_positions)
    engine = check_vllm(model_config, longest) if uses_vllm else None
    # What stays of transformers where vLLM runs the target, its weights for the store, is on the host.
    device = "cpu" if uses_vllm else _pick_device(config)
    is_cpu = torch.device(device).type == "cpu"
    compute_dtype = config.forward.compute_dtype
    if compute_dtype == "auto":
        compute_dtype = "float32" if is_cpu and not uses_vllm else config.storage.dtype
    batch_tokens = config.forward.batch_tokens or (65_536 if uses_vllm else 2048 if is_cpu else 16_384)
    fields = field_specs(spec, sizes, config.storage.dtype)
    try:
        codec = StoreCodec(config.storage.codec, fields)
    except CodecUnknown as error:
        raise OptionInvalid(f"{error} Change --codec.") from error
    if codec.learned and not has_device(device):
        raise OptionInvalid(
            f"Codec {config.storage.codec} learns from forwards on this machine before the first part, and it has no "
            "GPU. Start the command on a machine of the cluster that has one, or choose another --codec."
        )
    n_workers = config.scale.n_local_workers
    memory = forward_memory(model_config, fields, compute_dtype, batch_tokens, longest, device, n_workers)
    if has_device(device):
        memory.check()
    return config, _Resolved(spec, fields, codec, device, compute_dtype, batch_tokens, engine, memory)


@contextmanager
def interruptible(what: str) -> Iterator[None]:
    """Turn Ctrl-C into an :class:`Interrupted` that says what is kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(f"Interrupted {what}. Run the same command again to continue.") from error


def _pick_device(config: ExtractConfig) -> str:
    """Return the device of the forward; the GPUs of Ray's workers may be on other machines than this one."""
    wanted, n_gpus = config.forward.device, config.scale.gpus_per_worker
    if config.scale.engine == "ray" and n_gpus is not None:
        if (wanted == "cpu" and n_gpus) or (wanted not in ("auto", "cpu") and not n_gpus):
            raise OptionInvalid(f"--device {wanted} and --gpus-per-worker {n_gpus:g} disagree. Leave out one of them.")
        return "cuda" if n_gpus else "cpu"
    return pick_device(wanted)


def has_device(device: str) -> bool:
    """Whether this machine has a device; the workers of a cluster may have what it lacks."""
    return torch.device(device).type != "cuda" or torch.cuda.is_available()


def field_specs(spec: ActivationSpec, sizes: Mapping[str, Any], dtype: str) -> tuple[FieldSpec, ...]:
    """Return the store's fields for a specification of activations."""
    fields = [tokens_field(), response_mask_field()]
    if spec.kv:
        fields.append(kv_field(sizes["n_layers"], sizes["n_kv_heads"], sizes["head_dim"], dtype))
    for name in spec.hidden_fields:
        fields.append(hidden_field(name.removeprefix("hidden/"), sizes["hidden_size"], dtype))
    return tuple(fields)


def _extraction(config: ExtractConfig, how: _Resolved) -> dict[str, Any]:
    """Return the settings that shape the data; batches change the last bits of a forward, so they are among them."""
    engine = {"engine": how.engine, "attention": "paged", "device": "cuda"} if how.engine else {}
    return {
        "activations": list(how.spec.fields),
        "attention": "sdpa",
        "batch_tokens": how.batch_tokens,
        "bos": "one BOS where the model has one, as the chat template or the tokenizer sets it",
        "compute_dtype": how.compute_dtype,
        "device": torch.device(how.device).type,
        "dtype": config.storage.dtype,
        "max_length": config.data.max_length,
        "max_sequences": config.data.max_sequences,
        "part_tokens": config.storage.part_tokens,
        "target_layers": config.target_layers,
        "truncation": "right, tokens and mask together",
    } | engine


def _chat_settings(config: ExtractConfig) -> dict[str, Any]:
    """Return the settings that shape the texts, where they are given: columns, arguments of the template."""
    settings = {
        "columns": Columns.parse(config.data.columns).describe(),
        "template_kwargs": parse_template_arguments(config.data.template_kwargs),
    }
    return {name: value for name, value in settings.items() if value}


def expected_bytes(codec: StoreCodec, n_tokens: int) -> int:
    """Return the expected bytes of parts, with 3 % for alignment padding, indexes and metadata."""
    bits = sum(field.expected_bits * math.prod(field.spec.token_shape) for field in codec.fields.values())
    return int(1.03 * bits / 8 * n_tokens)


def _feature_bytes(codec: StoreCodec, sizes: Mapping[str, Any]) -> int:
    """Return the bytes of the token features in half precision, where keys and values are predicted from them."""
    if not any(field.needs_tokens for field in codec.fields.values()):
        return 0
    return 2 * int(sizes["vocab_size"]) * min(int(sizes["hidden_size"]), MAX_FEATURES)


def _count_weights(model_config: Any) -> tuple[int, int]:
    """Count the weights of all decoder layers, and of the whole target; shared ones count once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa", trust_remote_code=False)
    layers = sum(weight.numel() for weight in model.model.layers.parameters())
    return layers, sum(weight.numel() for weight in model.parameters())


def bundle_bytes(model_config: Any, target_layers: int) -> int:
    """Return the bytes of the target bundle that keeps this many decoder layers."""
    frozen = 2 * model_config.vocab_size * model_config.hidden_size + model_config.hidden_size
    layers = _count_weights(model_config)[0] * target_layers // model_config.num_hidden_layers
    dtype = getattr(model_config, "dtype", None)
    return int(frozen + layers) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 4)


def existing_parent(path: StorePath) -> Path:
    """Return the path, or the nearest folder above it that exists; where it is remote, the one for temporary files."""
    if isinstance(path, RemotePath):
        return Path(tempfile.gettempdir())
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path
