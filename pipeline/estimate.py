"""How the target will be run, and what that takes: memory, disk and hours.

For the hours three batches of the plan run through a target with the real one's widths and random weights, so that
only its config.json has to be there, and the loop of the extraction writes to a temporary store on the output's disk.
"""

import copy
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..errors import NotEnoughMemory, TargetError
from ..files import check_room, nearest_folder
from ..machine import free_memory
from ..moa.targets import families
from ..moa.targets.live import Target
from ..storage.codecs.calibration import MAX_FEATURES
from ..storage.codecs.registry import LOSSLESS, StoreCodec
from ..storage.paths import RemotePath, StorePath
from ..storage.plan import column, numbers, plan_parts
from ..storage.schema import (
    ALIGNMENT_TOKENS,
    KV,
    TOKENS,
    FieldSpec,
    StoreManifest,
    hidden_field,
    kv_field,
    kv_group_field,
    response_mask_field,
    tokens_field,
)
from ..storage.write.store import StoreWriter
from ..text import Progress, activation_name, first_line, format_bytes, format_hours
from .config import ActivationSpec
from .forwards.calibrate import calibrate, learning_on
from .forwards.capture import capture
from .forwards.parts import N_HOST_SLOTS, Forwards, batches, run_parts
from .report import Timings

_N_BATCHES = 3
_MAX_WEIGHTS = 250_000_000
"""Weights of the timed target on a CPU: one layer of Llama-3-8B has 218 million, which take a second to draw."""
_MAX_PRODUCTS = 1e11  # multiplications of one timed forward on a CPU: about two seconds of slow cores


def field_specs(
    spec: ActivationSpec, sizes: Mapping[str, Any], dtype: str, groups: Sequence[families.KVGroup] = ()
) -> tuple[FieldSpec, ...]:
    """Return the store's fields for a specification of activations; ``groups`` are those of a target's layers."""
    is_rotated = all(one.is_rotated for one in groups)
    kv = [kv_field(sizes["n_layers"], sizes["n_kv_heads"], sizes["head_dim"], dtype, is_rotated)] if spec.kv else []
    if spec.kv and spec.kv_fields != (KV,):
        kv = [kv_group_field(one.field, one.layers, *one.shape, dtype) for one in groups if one.field in spec.kv_fields]
    states = [name.removeprefix("hidden/") for name in spec.fields if activation_name(name) != KV]
    hidden = [hidden_field(name, sizes["hidden_size"], dtype) for name in states]
    return (tokens_field(), response_mask_field(), *kv, *hidden)


def has_device(device: str) -> bool:
    """Whether this machine has a device; the workers of a cluster may have what it lacks."""
    return torch.device(device).type != "cuda" or torch.cuda.is_available()


def free_device_memory(device: str) -> int | None:
    """Return the free bytes of a CUDA device; None for any other device."""
    return int(torch.cuda.mem_get_info(torch.device(device))[0]) if torch.device(device).type == "cuda" else None


@dataclass(frozen=True)
class ForwardPlan:
    """How the target will be run, and which activations are kept."""

    folder: Path
    model_config: Any = field(repr=False)
    spec: ActivationSpec
    codec: StoreCodec = field(repr=False)  # one that learns has not learned yet
    device: str
    dtype: str  # dtype in which activations are kept
    compute_dtype: str
    batch_tokens: int  # tokens per forward, padding included; a longer sequence makes a batch of its own
    longest_tokens: int
    uses_cache: bool  # whether the forwards fill a key/value cache
    n_encode_threads: int
    n_workers: int = 1  # processes of this machine that run them at once

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's weights, but for biases."""
        config = self.model_config
        embeddings = _embedding_weights(config)
        n_weights = embeddings + config.num_hidden_layers * _layer_weights(config) + config.hidden_size
        return int(n_weights * getattr(torch, self.compute_dtype).itemsize)

    @property
    def memory_bytes(self) -> tuple[int, int]:
        """An upper estimate of the memory, from sizes alone: in the host for all workers, on the device of each."""
        config, itemsize = self.model_config, getattr(torch, self.compute_dtype).itemsize
        sizes = families.target_sizes(config)
        kept_bytes = sum(codec.spec.token_bytes for codec in self.codec.fields.values())
        n_tokens = max(self.batch_tokens, self.longest_tokens)
        # The cache that the forward fills, and the intermediate values of one layer.
        cache = sum(len(one.layers) * one.shape.width for one in families.kv_groups(config))
        layer = 4 * sizes["hidden_size"] + 2 * sizes["n_heads"] * sizes["head_dim"] + 3 * families.mlp_width(config)
        # While gathered, kept values are there three times: in the storage dtype, packed, for the finite check.
        forward_bytes = n_tokens * ((cache + layer) * itemsize + 3 * kept_bytes)
        waiting_bytes = N_HOST_SLOTS * n_tokens * kept_bytes
        # Weights are loaded in host memory before they move to a device.
        host_bytes, device_bytes = self.weight_bytes + forward_bytes + waiting_bytes, 0
        if torch.device(self.device).type == "cuda":
            host_bytes = max(self.weight_bytes, waiting_bytes)
            # With the values of the batch before, until they are copied.
            device_bytes = self.weight_bytes + forward_bytes + n_tokens * kept_bytes
        return host_bytes * self.n_workers, device_bytes

    def describe_memory(self) -> str:
        """Return the memory that forwards need as text."""
        host_bytes, device_bytes = self.memory_bytes
        each = f" for {self.n_workers} workers" if self.n_workers > 1 else ""
        on_device = f" and {format_bytes(device_bytes)} on {self.device}" if device_bytes else ""
        return (
            f"{format_bytes(host_bytes)} of host memory{each}{on_device}: weights {format_bytes(self.weight_bytes)} in "
            f"{self.compute_dtype}, batches of {max(self.batch_tokens, self.longest_tokens):,} tokens"
        )

    def check_memory(self) -> None:
        """Refuse forwards that do not fit in free memory; where it cannot be told, nothing is refused."""
        free = (free_memory(), "host memory"), (free_device_memory(self.device), self.device)
        for n_bytes, (n_free, place) in zip(self.memory_bytes, free, strict=True):
            if n_free is not None and n_bytes > n_free:
                raise NotEnoughMemory(
                    f"The target's forwards need {self.describe_memory()}. Free in {place} are {format_bytes(n_free)}.",
                    "Free some, take a larger machine, or extract in bfloat16, with smaller batches or fewer workers.",
                )

    def load_target(self, progress: Progress | None = None) -> Target:
        """Load the target; progress is told the bytes of its weights."""
        tell = progress or (lambda *_: None)
        tell(0, self.weight_bytes, "load the target")
        target = Target.load(str(self.folder), getattr(torch, self.compute_dtype), self.device)
        tell(self.weight_bytes, self.weight_bytes, "load the target")
        return target

    def forwards(
        self, target: Target, codec: StoreCodec, text: Callable[[str], tuple[np.ndarray, np.ndarray]]
    ) -> Forwards:
        """Return what runs the loaded target; ``text`` gives tokens and response mask of a sequence id."""
        return Forwards(
            target=target,
            spec=self.spec,
            codec=codec,
            dtype=getattr(torch, self.dtype),
            batch_tokens=self.batch_tokens,
            uses_cache=self.uses_cache,
            text=text,
            n_encode_threads=self.n_encode_threads,
        )


@dataclass(frozen=True)
class WritePlan:
    """What forwards will write to a store, and what that takes on disk."""

    store: StorePath
    forward: ForwardPlan
    # Rows of plan.parquet to run: sequence_id, source_row, n_tokens, n_response_tokens, part, first_token.
    table: pa.Table = field(repr=False)
    bundle_layers: int | None  # decoder layers in target/ if it is to be written, else None
    present_bytes: int  # bytes of ``stored_bytes`` that are there already

    @property
    def n_tokens(self) -> int:
        """Tokens to run, without alignment padding."""
        return int(numbers(self.table, "n_tokens").sum(dtype=np.int64))

    @property
    def raw_bytes(self) -> int:
        """Bytes of all fields before compression."""
        return self.n_tokens * sum(codec.spec.token_bytes for codec in self.forward.codec.fields.values())

    @property
    def stored_bytes(self) -> int:
        """Expected bytes on disk: parts, the features of tokens in half precision, and target/."""
        config, fields = self.forward.model_config, self.forward.codec.fields.values()
        bits = sum(codec.expected_bits * math.prod(codec.spec.token_shape) for codec in fields)
        n_bytes = int(1.03 * bits / 8 * self.n_tokens)  # with 3 % for alignment padding, indexes and metadata
        if any(codec.needs_tokens for codec in fields):
            n_bytes += 2 * config.vocab_size * min(config.hidden_size, MAX_FEATURES)
        if self.bundle_layers is not None:
            frozen = 2 * config.vocab_size * config.hidden_size + config.hidden_size
            dtype = getattr(config, "dtype", None)
            itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 4
            n_bytes += itemsize * (frozen + self.bundle_layers * _layer_weights(config))
        return n_bytes

    @property
    def disk(self) -> Path:
        """A folder on the disk that is written to."""
        return existing_parent(self.store)

    def check_disk(self) -> None:
        """Refuse a plan that the disk cannot hold."""
        needed = max(0, self.stored_bytes - self.present_bytes)
        # No option is named: `add` and `repair`, which plan like `extract`, have fewer of them.
        advice = "Free some space."
        if isinstance(self.store, RemotePath):  # only shards on their way to the bucket lie on the disk
            needed = min(needed, 2 * self.stored_bytes // max(1, len(self.table["part"].unique())))
            advice = "Free some space, or set TMPDIR to another disk."
        check_room(self.disk, needed, advice)

    def learn(
        self,
        target: Target,
        lengths: np.ndarray,
        tokens_of: Callable[[int], np.ndarray],
        progress: Progress | None,
    ) -> None:
        """Let the codec learn from forwards over a sample of sequences; ``tokens_of`` maps a row to its token ids."""
        forward, model = self.forward, target.model

        def read(row: int) -> dict[str, np.ndarray]:
            tokens = tokens_of(row)
            fields = capture(model, [tokens], forward.spec, getattr(torch, forward.dtype), forward.uses_cache).fields
            return {name: values[0].float().cpu().numpy() for name, values in fields.items()} | {TOKENS: tokens}

        lm_head = model.get_output_embeddings().weight
        embeddings = model.get_input_embeddings().get_parameter("weight")
        learning = learning_on(forward.device, self.disk, progress)
        calibrate(forward.codec, lengths, read, model.config, lm_head, embeddings, learning)

    def room(self) -> list[str]:
        """Return lines about disk and memory."""
        return [
            f"free disk    {format_bytes(shutil.disk_usage(self.disk).free)} at {self.disk}"
            + (", for shards on their way to the bucket" if isinstance(self.store, RemotePath) else "")
            + (f"; the store already holds {format_bytes(self.present_bytes)}" if self.present_bytes else ""),
            f"memory       {self.forward.describe_memory()}; free {format_bytes(free_memory() or 0)}",
        ]


def existing_parent(path: StorePath) -> Path:
    """Return the path, or the nearest folder above it that exists; where it is remote, the one for temporary files."""
    if isinstance(path, RemotePath):
        return Path(tempfile.gettempdir())
    return nearest_folder(path.expanduser())


def estimate(plan: WritePlan) -> Timings:
    """Run three batches of a plan, which takes some seconds, and return what all of them are estimated to take."""
    forward, batched = plan.forward, batches_of(plan.table, plan.forward.batch_tokens)
    lengths = [numbers(batch, "n_tokens") for batch in batched]
    model = _random_target(forward, max(int(batch.sum()) for batch in lengths) + 1)
    n_layers = int(model.config.num_hidden_layers)
    groups = families.kv_groups(model.config)
    spec = replace(
        forward.spec,
        layers=tuple(sorted({min(layer, n_layers - 1) for layer in forward.spec.layers})),
        kv_fields=tuple(one.field for one in groups),
    )
    forward = replace(forward, spec=spec)
    chosen = np.linspace(0, len(batched) - 1, min(_N_BATCHES, len(batched))).round().astype(int).tolist()
    table = pa.concat_tables(_cut(batched[index], model.config, forward.device) for index in chosen)
    timed = numbers(table, "n_tokens")
    ends = np.cumsum(timed) % (int(model.config.vocab_size) - int(timed.max()) + 1) + timed
    texts = {
        key: (np.arange(end - n, end, dtype=np.int32), np.zeros(n, np.uint8))
        for key, n, end in zip(table["sequence_id"].to_pylist(), timed.tolist(), ends.tolist(), strict=True)
    }
    # A codec that learns cannot encode before it has learned; lossless takes about as long.
    name = LOSSLESS if forward.codec.learned else forward.codec.name
    codec = StoreCodec(name, field_specs(spec, families.target_sizes(model.config), forward.dtype, groups))
    forwards = forward.forwards(Target(model), codec, texts.__getitem__)
    forwards.capture([next(iter(texts.values()))[0]])  # the first forward warms up
    found = _run(forwards, table, plan.disk)
    n_padded = sum(len(batch) * int(batch.max()) for batch in lengths)
    scale = n_padded / found.n_padded_tokens * plan.forward.model_config.num_hidden_layers / n_layers
    return Timings(forward_s=scale * found.forward_s, extract_s=scale * found.extract_s)


def describe_estimate(plan: WritePlan, n_workers: int = 1) -> str:
    """Return the estimate of a plan as text; workers share the parts, each with a device or machine of its own."""
    try:
        found = estimate(plan)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, TargetError) as error:
        if families.family_of(plan.forward.model_config).keeps_kv:
            raise
        # Of code that is not ours, which not all weights and sizes suit.
        return f"time         not measured, as a model of random weights failed: {first_line(error)}"
    lines = [
        f"time         about {format_hours(found.extract_s)}: forwards {format_hours(found.forward_s)}, waiting for "
        f"encoding and writing {format_hours(found.extract_s - found.forward_s)}"
    ]
    if n_workers > 1:
        lines.append(
            f"workers      {n_workers} take about {format_hours(found.extract_s / n_workers)} if the disk keeps up"
        )
    return "\n".join(lines)


def batches_of(table: pa.Table, batch_tokens: int) -> list[pa.Table]:
    """Return every batch of a plan, in the order in which they are computed."""
    bounds = np.flatnonzero(np.diff(numbers(table, "part"), prepend=-1, append=-1)).tolist()
    parts = [table.slice(start, stop - start) for start, stop in pairwise(bounds)]
    return [batch for part in parts for batch in batches(part, batch_tokens)]


def _embedding_weights(config: Any) -> int:
    """Count the weights of the embeddings and of the LM head."""
    is_tied = getattr(config, "tie_word_embeddings", False)  # which some configs don't have
    return int((1 if is_tied else 2) * config.vocab_size * config.hidden_size)


def _layer_weights(config: Any) -> int:
    """Count the weights of a decoder layer, the mean where they differ."""
    sizes = families.target_sizes(config)
    if not families.family_of(config).has_llama_layers:
        return int((families.count_weights(config) - _embedding_weights(config)) // sizes["n_layers"])
    heads = 2 * (sizes["n_heads"] + sizes["n_kv_heads"])
    return int(sizes["hidden_size"] * (heads * sizes["head_dim"] + 3 * config.intermediate_size + 2))


def _random_target(forward: ForwardPlan, n_tokens: int) -> Any:
    """Make a model of the target's widths with random weights, on a CPU of fewer layers.

    ``n_tokens``: entries of its vocabulary, one for each token of a batch: equal tokens would give equal values, which
    encode differently.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(forward.model_config)
    config.vocab_size, config.pad_token_id = n_tokens, 0
    if torch.device(forward.device).type == "cpu":
        config.num_hidden_layers = max(1, min(config.num_hidden_layers, _MAX_WEIGHTS // _layer_weights(config)))
    n_layers = config.num_hidden_layers
    if n_layers < forward.model_config.num_hidden_layers and getattr(config, "num_kv_shared_layers", 0):
        config.num_kv_shared_layers = 0  # those whose KV they share may be among the others
    kinds = getattr(config, "layer_types", None) or ()
    if len(kinds) > n_layers:  # where layers carry states the last has KV
        config.layer_types = kinds[-n_layers:] if families.family_of(config).carries_state else kinds[:n_layers]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=families.attention_of(config),
            trust_remote_code=False,
            dtype=getattr(torch, forward.compute_dtype),
        )
    model = model.to_empty(device=forward.device).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, weight.shape[1] ** -0.5)
        else:
            weight.fill_(1.0)
    # Buffers must not be random: those of the rotation are computed from the config, as on loading.
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            model._init_weights(module)
    return model


def _cut(batch: pa.Table, config: Any, device: str) -> pa.Table:
    """Return a batch, on a CPU cut to what it computes in a moment."""
    if torch.device(device).type != "cpu":
        return batch
    most = max(64, int(_MAX_PRODUCTS / (_layer_weights(config) * config.num_hidden_layers)))
    lengths = numbers(batch, "n_tokens")
    batch = batch.slice(0, max(1, most // int(lengths.max())))
    at = batch.schema.get_field_index("n_tokens")
    return batch.set_column(at, "n_tokens", column(np.minimum(lengths[: len(batch)], most).astype(np.int32)))


def _run(forwards: Forwards, sequences: pa.Table, disk: Path) -> Timings:
    n_tokens = int(numbers(sequences, "n_tokens").sum())
    table = plan_parts(sequences, 2 * ALIGNMENT_TOKENS * n_tokens, ALIGNMENT_TOKENS)
    fields = tuple(codec.spec for codec in forwards.codec.fields.values())
    manifest = StoreManifest(fields, {}, {}, {}, len(table), 1, n_tokens, forwards.codec.describe())
    timings = Timings()
    with (
        tempfile.TemporaryDirectory(prefix=".moa-data-speed-", dir=disk) as folder,
        StoreWriter.create_or_resume(Path(folder) / "store", manifest, table) as store,
    ):
        run_parts(forwards, store, [0], timings)
    return timings
