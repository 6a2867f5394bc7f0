"""Plan the forwards of the target, and estimate their memory, disk space and time.

A forward runs the target on one batch of sequences. A store consists of parts and of the folder
``target/``. A part is a range of sequences that is written and committed as a whole. The folder
``target/`` contains the target's config, tokenizer, embeddings, final norm and LM head.

To estimate the time, three batches of the plan are run through a test model. This model has random
weights and the target's widths, so it can be made from the target's config.json alone. The code of
the extraction writes the activations to a temporary store on the disk of the planned store.
"""

import copy
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..errors import NotEnoughMemory, TargetError
from ..files import check_room
from ..machine import free_memory, resident_memory
from ..moa.targets.facts import TargetFacts
from ..moa.targets.live import Target
from ..storage.backend import backend_of
from ..storage.codecs.calibration import MAX_COMPONENTS, MAX_FEATURES
from ..storage.codecs.registry import LOSSLESS, StoreCodec
from ..storage.codecs.transform import KV_FEATURES, TransformCodec
from ..storage.paths import StorePath
from ..storage.plan import column, numbers, plan_parts
from ..storage.schema import (
    ALIGNMENT_TOKENS,
    KV,
    SPEED_TEST_PREFIX,
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
from ..text import SILENT, Progress, first_line, format_bytes, format_hours, format_range
from .config import ActivationSpec
from .forwards.calibrate import SAMPLE_TOKENS, calibrate, learning_on
from .forwards.parts import N_HOST_BATCHES, CaptureSettings, Forwards, batches, run_parts
from .report import Timings
from .sequences import TokensAndMask

_N_BATCHES = 3
# Lower and upper bound of the size of a store's parts, as multiples of the expected size of the
# encoded activations. The upper bound includes alignment, indexes and metadata.
_LEAST_STORED_SHARE = 0.9
_MOST_STORED_SHARE = 1.06
# Sizes in bytes. The first number is the size of a token in texts.arrow. The second number is the
# size of a sequence's other data, in texts.arrow and plan.parquet together.
_TEXT_BYTES, _ROW_BYTES = 5, 200
# Total size of manifests, commit files, records of runs and the dataset card.
_RECORD_BYTES = 100_000
# Memory of the encoding and writing threads, with the libraries that these threads load.
_THREAD_BYTES = 200 << 20
# Upper bound of the host memory of CUDA's libraries.
_CUDA_LIBRARY_BYTES = 3 << 30
# Uncertainty of the estimated time. Each of the three test batches predicts a time. In measurements,
# a run took at most the longest predicted time multiplied by 1.2, and at least the shortest
# predicted time divided by 1.2.
_TIME_SHARE = 1.2
_MAX_WEIGHTS = 250_000_000
"""Maximum number of weights in the timed model on a CPU.

The weights are random, and drawing 218 million random numbers takes a second. One layer of
Llama-3-8B has this number of weights.
"""
# Maximum number of multiplications in a timed forward on a CPU. Slow cores need about two seconds
# for this number.
_MAX_PRODUCTS = 1e11


def field_specs(
    spec: ActivationSpec,
    facts: TargetFacts,
    dtype: str,
) -> tuple[FieldSpec, ...]:
    """Return the specs of a store's fields.

    Args:
        spec: the activations to store.
        facts: the sizes and other properties of the target.
        dtype: dtype of the stored activations.
    """
    groups = {group.field: group for group in facts.kv_groups}
    specs = [tokens_field(), response_mask_field()]
    for name in spec.fields:
        if name == KV:
            specs.append(
                kv_field(
                    facts.n_layers,
                    facts.n_kv_heads,
                    facts.head_dim,
                    dtype,
                    facts.family.rotates_all,
                )
            )
        elif name in groups:
            group = groups[name]
            specs.append(kv_group_field(name, group.layers, *group.shape, dtype))
        else:
            specs.append(hidden_field(name.removeprefix("hidden/"), facts.hidden_size, dtype))
    return tuple(specs)


def has_device(device: str) -> bool:
    """Whether this machine has the device.

    With Ray, the workers may run on other machines. It is enough if those machines have the device.
    """
    return torch.device(device).type != "cuda" or torch.cuda.is_available()


def free_device_memory(device: str) -> int | None:
    """Return the free bytes of a CUDA device. For any other device, return None."""
    return (
        int(torch.cuda.mem_get_info(torch.device(device))[0])
        if torch.device(device).type == "cuda"
        else None
    )


@dataclass(frozen=True)
class ForwardPlan(CaptureSettings):
    """Settings of the target's forwards, and estimates of the memory that the forwards need.

    The attribute ``codec`` may be a codec that is not yet fitted to data.
    """

    folder: Path
    facts: TargetFacts = field(repr=False)
    device: str
    compute_dtype: str
    longest_tokens: int  # number of tokens in the longest sequence
    n_workers: int = 1  # number of worker processes that run in parallel on this machine

    @property
    def device_type(self) -> str:
        """Type of the device that runs the target, such as cpu or cuda."""
        return torch.device(self.device).type

    @property
    def weight_bytes(self) -> int:
        """Size of the target's weights without biases, in bytes."""
        facts = self.facts
        layer_weights = facts.n_layers * _layer_weights(facts)
        n_weights = _embedding_weights(facts) + layer_weights + facts.hidden_size
        return int(n_weights * getattr(torch, self.compute_dtype).itemsize)

    @property
    def kept_bytes(self) -> int:
        """Number of bytes per token of all fields together, before encoding."""
        return sum(codec.spec.token_bytes for codec in self.codec.fields.values())

    @property
    def memory_bytes(self) -> tuple[int, int]:
        """Estimated upper bounds of the memory that the forwards need, in bytes.

        The first number is for the host memory of all worker processes together. The second number
        is for the device memory of one worker process.
        """
        facts = self.facts
        itemsize = getattr(torch, self.compute_dtype).itemsize
        kept_bytes = self.kept_bytes
        n_tokens = max(self.batch_tokens, self.longest_tokens)
        # Number of intermediate values that one layer computes per token.
        layer = 4 * facts.hidden_size + 2 * facts.n_heads * facts.head_dim + 3 * facts.mlp_width
        # While activations are gathered, memory holds three copies: the values in the storage
        # dtype, the same values packed into one tensor, and a temporary tensor that is used to
        # check that all values are finite.
        forward_bytes = n_tokens * ((facts.cache_width + layer) * itemsize + 3 * kept_bytes)
        waiting_bytes = N_HOST_BATCHES * n_tokens * kept_bytes
        host_bytes = self.weight_bytes + forward_bytes + waiting_bytes
        device_bytes = 0
        if self.device_type == "cuda":
            # The weights are loaded to host memory, moved to the device, and freed on the host.
            # Batches are queued in host memory only after that. So host memory never holds the
            # weights and the queued batches together, and needs the larger of their sizes.
            host_bytes = max(self.weight_bytes, waiting_bytes)
            # The activations of the previous batch stay on the device until they have been copied
            # to the host. So add the size of a second batch of activations.
            device_bytes = self.weight_bytes + forward_bytes + n_tokens * kept_bytes
        return host_bytes * self.n_workers, device_bytes

    def host_range(self, n_batch_tokens: int) -> tuple[int, int]:
        """Return a lower and an upper bound of the host memory of an extraction, in bytes.

        The bounds cover all processes of the extraction on this machine. They include Python and
        the libraries that the processes load.

        Args:
            n_batch_tokens: number of tokens in the plan's largest batch, padding included.
        """
        host_bytes, device_bytes = self.memory_bytes
        least_bytes = n_batch_tokens * self.kept_bytes + (0 if device_bytes else self.weight_bytes)
        # While 16-bit weights are converted to float32, memory holds the converted weights and the
        # memory-mapped weight files. The files have half the size of the converted weights.
        most_bytes = host_bytes // self.n_workers + self.weight_bytes // 2
        most_bytes += _CUDA_LIBRARY_BYTES if device_bytes else _THREAD_BYTES
        # A codec is fitted to the keys or the values of one group of layers at a time. Meanwhile, three
        # float32 arrays of the same size are in memory: the values of the sample, the values minus
        # their means, and the values transformed to components.
        most_width = 0
        for codec in self.codec.learned.values():
            for group in codec.groups:
                most_width = max(most_width, len(group) * codec.layer_width)
        most_bytes += 3 * 4 * SAMPLE_TOKENS * most_width
        # With a single worker, the process of the command does the work itself. With several workers,
        # the command is one more process besides the workers.
        program_bytes = resident_memory() * (self.n_workers + (self.n_workers > 1))
        return (
            program_bytes + self.n_workers * least_bytes,
            program_bytes + self.n_workers * most_bytes,
        )

    @property
    def _needs(self) -> str:
        """A text that says what needs the memory: the weights, and the batches of each worker."""
        per_worker = f", for each of {self.n_workers} workers" if self.n_workers > 1 else ""
        return (
            f"weights of {format_bytes(self.weight_bytes)} in {self.compute_dtype}, batches of "
            f"{max(self.batch_tokens, self.longest_tokens):,} tokens{per_worker}"
        )

    def describe_memory(self, n_batch_tokens: int) -> str:
        """Return the memory of an extraction as text; see :meth:`host_range`."""
        host = format_range(*self.host_range(n_batch_tokens), format_bytes)
        device_bytes = self.memory_bytes[1]
        device = f" and up to {format_bytes(device_bytes)} on {self.device}" if device_bytes else ""
        return f"{host} of host memory{device}, for {self._needs}, Python and its libraries"

    def check_memory(self) -> None:
        """Refuse a plan whose forwards need more memory than is free.

        If the system does not report how much memory is free, nothing is refused.

        Raises:
            NotEnoughMemory: the free host or device memory is too small.
        """
        free = (free_memory(), "host memory"), (free_device_memory(self.device), self.device)
        for n_bytes, (n_free, memory_name) in zip(self.memory_bytes, free, strict=True):
            if n_free is not None and n_bytes > n_free:
                raise NotEnoughMemory(
                    f"Running the target needs {format_bytes(n_bytes)} of {memory_name} "
                    f"({self._needs}), but only {format_bytes(n_free)} of {memory_name} are free.",
                    "Free some memory, or use a larger machine. Extracting in bfloat16, with "
                    "smaller batches or with fewer workers needs less memory.",
                )

    def load_target(self, progress: Progress = SILENT) -> Target:
        """Load the target and return it. Progress is counted in bytes of weights."""
        loading = progress.of("load the target", "B")
        loading(0, self.weight_bytes)
        target = Target.load(str(self.folder), getattr(torch, self.compute_dtype), self.device)
        loading(self.weight_bytes, self.weight_bytes)
        return target


@dataclass(frozen=True)
class WritePlan:
    """The sequences of a plan, and the disk space that their activations need in a store."""

    store: StorePath
    forward: ForwardPlan
    # The rows of plan.parquet for the sequences that the target will process. The table has the
    # columns sequence_id, source_row, n_tokens, n_response_tokens, part and first_token.
    table: pa.Table = field(repr=False)
    # Number of decoder layers to write to the store's folder target/. If the folder is not written,
    # the value is None.
    bundle_layers: int | None
    present_bytes: int  # number of bytes of the store that are on disk already

    @property
    def n_tokens(self) -> int:
        """Number of tokens to run through the target, without alignment padding."""
        return int(numbers(self.table, "n_tokens").sum(dtype=np.int64))

    @property
    def raw_bytes(self) -> int:
        """Size of all fields before compression, in bytes."""
        return self.n_tokens * self.forward.kept_bytes

    @property
    def disk_ranges(self) -> dict[str, tuple[int, int]]:
        """Lower and upper bounds of the sizes of the store's parts, its folders and its other files.

        The dict maps a text such as ``parts`` or ``target/`` to the two bounds in bytes.
        """
        facts = self.forward.facts
        codec = self.forward.codec
        bits = sum(
            field_codec.expected_bits * math.prod(field_codec.spec.token_shape)
            for field_codec in codec.fields.values()
        )
        n_bytes = bits / 8 * self.n_tokens
        ranges = {"parts": (int(_LEAST_STORED_SHARE * n_bytes), int(_MOST_STORED_SHARE * n_bytes))}
        if self.bundle_layers is not None:
            n_weights = 2 * facts.vocab_size * facts.hidden_size + facts.hidden_size
            n_weights += self.bundle_layers * _layer_weights(facts)
            least = _stored_itemsize(facts) * n_weights
            tokenizer_bytes = sum(
                file.stat().st_size for file in self.forward.folder.glob("tokenizer*")
            )
            ranges["target/"] = least, least + 3 * tokenizer_bytes + _RECORD_BYTES
        if codec.learned:
            basis_bytes = 0
            for learned_codec in codec.learned.values():
                basis_bytes += _most_basis_bytes(learned_codec, facts)
            ranges["codec/"] = 0, basis_bytes
        n_bytes = _TEXT_BYTES * self.n_tokens + _ROW_BYTES * len(self.table) + _RECORD_BYTES
        ranges["other files"] = 0, n_bytes
        return ranges

    def describe_disk(self) -> str:
        """Return a text about the expected size of the store on disk."""
        least_bytes = 0
        components: list[str] = []
        for name, (low, high) in self.disk_ranges.items():
            least_bytes += low
            components.append(f"{name} {format_range(low, high, format_bytes)}")
        total = format_range(least_bytes, self.stored_bytes, format_bytes)
        return f"{total}: {', '.join(components)}"

    @property
    def stored_bytes(self) -> int:
        """Estimated upper bound of the size of the store on disk, in bytes."""
        return sum(upper_bytes for _, upper_bytes in self.disk_ranges.values())

    @property
    def disk(self) -> Path:
        """Path of a folder that exists already and is on the disk of the planned store."""
        return backend_of(self.store).local_folder()

    def check_disk(self) -> None:
        """Refuse a plan if the disk does not have enough free space for it."""
        needed = max(0, self.stored_bytes - self.present_bytes)
        # The commands `add` and `repair` also call this method. They do not have all options of
        # `extract`, so the advice must not name an option.
        advice = "Free some space."
        # For a remote store, the local disk needs room only for shards that are being uploaded.
        if backend_of(self.store).uploads:
            needed = min(needed, 2 * self.stored_bytes // max(1, len(self.table["part"].unique())))
            advice = "Free some space, or set TMPDIR to another disk."
        check_room(self.disk, needed, advice)

    def learn(
        self,
        target: Target,
        lengths: np.ndarray,
        tokens_of: Callable[[int], np.ndarray],
        progress: Progress,
    ) -> None:
        """Run the target over a sample of the sequences, and fit the codec to the activations.

        Args:
            lengths: number of tokens of each sequence.
            tokens_of: maps the index of a sequence to its token ids.
        """
        forward = self.forward

        def read(row: int) -> dict[str, np.ndarray]:
            tokens = tokens_of(row)
            captured = forward.capture(target, [tokens])
            # Refuse infinities and NaNs here. Codecs refuse them too, but the advice in their error
            # does not help if the target overflows.
            captured.check_finite([f"{row} of the plan"])
            arrays: dict[str, np.ndarray] = {}
            for name, values in captured.fields.items():
                arrays[name] = values[0].float().cpu().numpy()
            arrays[TOKENS] = tokens
            return arrays

        lm_head = target.model.get_output_embeddings().weight
        embeddings = target.model.get_input_embeddings().get_parameter("weight")
        learning = learning_on(forward.device, self.disk, progress)
        calibrate(forward.codec, lengths, read, target.facts, lm_head, embeddings, learning)

    def space(self) -> list[str]:
        """Return lines of text about the bytes to write, the free disk space and the memory."""
        batched = batches_of(self.table, self.forward.batch_tokens)
        n_batch_tokens = max(map(_padded_tokens, batched), default=0)
        free_disk = f"{format_bytes(shutil.disk_usage(self.disk).free)} at {self.disk}"
        if backend_of(self.store).uploads:
            free_disk += ", for shards that are being uploaded"
        if self.present_bytes:
            free_disk += f"; the store already holds {format_bytes(self.present_bytes)}"
        return [
            f"raw          {format_bytes(self.raw_bytes)} ({self.forward.kept_bytes:,} bytes per "
            "token)",
            f"on disk      {self.describe_disk()}",
            f"free disk    {free_disk}",
            f"memory       {self.forward.describe_memory(n_batch_tokens)}; free "
            f"{format_bytes(free_memory() or 0)}",
        ]


def estimate(plan: WritePlan) -> tuple[float, float]:
    """Estimate the time of a plan by running three of its batches. This takes some seconds.

    The batches are those with the shortest, the median and the longest sequences. A model with
    random weights takes the place of the target.

    Returns:
        Lower and upper estimate of the plan's time in seconds.
    """
    forward = plan.forward
    batched = batches_of(plan.table, plan.forward.batch_tokens)
    batched.sort(key=lambda batch: int(numbers(batch, "n_tokens").max()))
    most_tokens = max(int(numbers(batch, "n_tokens").sum()) for batch in batched)
    target = Target(_random_target(forward, most_tokens + 1))
    facts = target.facts
    layers = {min(layer, facts.n_layers - 1) for layer in forward.spec.layers}
    spec = replace(
        forward.spec,
        layers=tuple(sorted(layers)),
        kv_fields=tuple(group.field for group in facts.kv_groups),
    )
    # A codec that must be fitted to data cannot encode yet. Time the lossless codec in its place,
    # because both are about equally fast.
    name = LOSSLESS if forward.codec.learned else forward.codec.name
    codec = StoreCodec(name, field_specs(spec, facts, forward.dtype))
    timed_forward = replace(forward, spec=spec, codec=codec)
    n_padded = sum(map(_padded_tokens, batched))
    chosen = np.linspace(0, len(batched) - 1, _N_BATCHES).round().astype(int).tolist()
    # On a GPU, a batch is encoded and written during the forward of the next batch. So the lower
    # estimate counts either the forward or the encoding and writing, whichever takes longer.
    is_parallel = forward.device_type == "cuda"
    seconds: list[tuple[float, float]] = []
    for index in [chosen[0], *chosen]:
        table = batched[index]
        if forward.device_type == "cpu":
            table = _cut(table, facts)
        texts = _made_texts(table)
        timed = _run(Forwards(timed_forward, target, texts.__getitem__), table, plan.disk)
        scale = n_padded / timed.n_padded_tokens * forward.facts.n_layers / facts.n_layers
        slower_s = max(timed.forward_s, timed.extract_s - timed.forward_s)
        seconds.append(
            (scale * (slower_s if is_parallel else timed.extract_s), scale * timed.extract_s)
        )
    least_s, most_s = zip(*seconds[1:], strict=True)  # Leave out the first run, a warm-up.
    return min(least_s) / _TIME_SHARE, max(most_s) * _TIME_SHARE


def describe_estimate(plan: WritePlan, n_workers: int = 1) -> str:
    """Return a text with the estimated time of a plan.

    Args:
        n_workers: number of workers that share the plan, each with its own device or machine.
    """
    try:
        least_s, most_s = estimate(plan)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, TargetError) as error:
        if plan.forward.facts.family.keeps_kv:
            raise
        # The modelling code of some families fails with random weights or a reduced number of
        # layers. Report that the time was not measured.
        return (
            "time         not measured, because a test model with random weights failed "
            f"({first_line(error)})"
        )
    lines = [
        f"time         {format_range(least_s, most_s, format_hours)} to run the target, encode "
        "and write"
    ]
    if n_workers > 1:
        shares = format_range(least_s / n_workers, most_s / n_workers, format_hours)
        lines.append(
            f"workers      {n_workers} in parallel take {shares}, if the disk is fast enough"
        )
    return "\n".join(lines)


def _made_texts(table: pa.Table) -> dict[str, TokensAndMask]:
    """Generate token ids and response masks for rows of the plan.

    No token occurs twice. Repeated tokens would give repeated activations, which do not compress
    like those of real text.
    """
    texts: dict[str, TokensAndMask] = {}
    start = 0
    for row in table.to_pylist():
        tokens = np.arange(start, start + row["n_tokens"], dtype=np.int32)
        texts[row["sequence_id"]] = tokens, np.zeros(len(tokens), np.uint8)
        start += len(tokens)
    return texts


def _padded_tokens(batch: pa.Table) -> int:
    return len(batch) * int(numbers(batch, "n_tokens").max())


def _most_basis_bytes(codec: TransformCodec, facts: TargetFacts) -> int:
    """Return an upper bound of the size of a codec's learned parameters, in bytes.

    The codec transforms values to components, which are coordinates along learned axes. It also
    predicts values from other values and from features of the tokens. So the parameters are the
    axes, the prediction weights and the token features, all in float16. The bound assumes the
    largest case, in two respects. First, the codec weighs errors with a matrix, so it stores each
    axis twice: once for encoding and once for decoding. Second, every component gets bits. The axis
    of a component without bits would not be stored.
    """
    n_features = KV_FEATURES + MAX_FEATURES + facts.hidden_size
    n_values = facts.vocab_size * min(facts.hidden_size, MAX_FEATURES) * codec.needs_tokens
    for group in codec.groups:
        width = len(group) * codec.layer_width
        n_values += codec.n_parts * width * (2 * min(width, MAX_COMPONENTS) + n_features)
    return 2 * n_values


def _stored_itemsize(facts: TargetFacts) -> int:
    """Return the bytes per weight in the files of a target."""
    dtype = getattr(facts.config, "dtype", None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 4


def batches_of(table: pa.Table, batch_tokens: int) -> list[pa.Table]:
    """Return all batches of a plan, in the order in which the target runs them."""
    bounds = np.flatnonzero(np.diff(numbers(table, "part"), prepend=-1, append=-1)).tolist()
    batched: list[pa.Table] = []
    for start, stop in pairwise(bounds):
        batched.extend(batches(table.slice(start, stop - start), batch_tokens))
    return batched


def _embedding_weights(facts: TargetFacts) -> int:
    """Return the number of weights in the target's token embeddings and LM head together."""
    # Some configs do not have the attribute ``tie_word_embeddings``.
    is_tied = getattr(facts.config, "tie_word_embeddings", False)
    return (1 if is_tied else 2) * facts.vocab_size * facts.hidden_size


def _layer_weights(facts: TargetFacts) -> int:
    """Return the number of weights in a decoder layer, averaged over layers if they differ."""
    if not facts.family.has_llama_layers:
        return (facts.n_weights - _embedding_weights(facts)) // facts.n_layers
    heads = 2 * (facts.n_heads + facts.n_kv_heads)
    return facts.hidden_size * (heads * facts.head_dim + 3 * facts.mlp_width + 2)


def _random_target(forward: ForwardPlan, n_tokens: int) -> Any:
    """Make a model with random weights and the target's widths. On a CPU, it may have fewer layers.

    Args:
        n_tokens: vocabulary size of the model. It should exceed the number of tokens in a batch, so
            that no token has to occur twice. Repeated tokens would give repeated activations, which
            do not compress like those of real text.
    """
    from transformers import AutoModelForCausalLM

    facts = forward.facts
    config = copy.deepcopy(facts.config)
    config.vocab_size = n_tokens
    config.pad_token_id = 0
    if forward.device_type == "cpu":
        config.num_hidden_layers = max(
            1, min(facts.n_layers, _MAX_WEIGHTS // _layer_weights(facts))
        )
    n_layers = config.num_hidden_layers
    if n_layers < facts.n_layers and getattr(config, "num_kv_shared_layers", 0):
        # In some families, the last layers reuse the KV of earlier layers. The config contains the
        # number of these last layers, which may be too large for the reduced model. So switch the
        # reuse off.
        config.num_kv_shared_layers = 0
    kinds = getattr(config, "layer_types", None) or ()
    # A target may have several kinds of layers, such as layers with a sliding window. The reduced
    # model gets the kinds of the target's first layers. But it needs at least one layer with KV, and
    # in families with recurrent layers only the last layer is sure to have KV. So in these families,
    # the reduced model gets the kinds of the target's last layers.
    if len(kinds) > n_layers:
        config.layer_types = kinds[-n_layers:] if facts.family.carries_state else kinds[:n_layers]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=facts.attention,
            trust_remote_code=False,
            dtype=getattr(torch, forward.compute_dtype),
        )
    model = model.to_empty(device=forward.device).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, weight.shape[1] ** -0.5)
        else:
            weight.fill_(1.0)
    # Initialise the buffers. Unlike weights, buffers must not be random. For example, the buffers of
    # the rotary embedding are computed from the config.
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)
    return model


def _cut(batch: pa.Table, facts: TargetFacts) -> pa.Table:
    """Limit a batch so that its forward takes about two seconds on a CPU.

    If the batch is too large, the result has fewer sequences, and if necessary shorter ones.
    """
    max_tokens = max(64, int(_MAX_PRODUCTS / (_layer_weights(facts) * facts.n_layers)))
    lengths = numbers(batch, "n_tokens")
    batch = batch.slice(0, max(1, max_tokens // int(lengths.max())))
    column_index = batch.schema.get_field_index("n_tokens")
    return batch.set_column(
        column_index,
        "n_tokens",
        column(np.minimum(lengths[: len(batch)], max_tokens).astype(np.int32)),
    )


def _run(forwards: Forwards, sequences: pa.Table, disk: Path) -> Timings:
    n_tokens = int(numbers(sequences, "n_tokens").sum())
    table = plan_parts(sequences, 2 * ALIGNMENT_TOKENS * n_tokens, ALIGNMENT_TOKENS)
    codec = forwards.settings.codec
    fields = tuple(field_codec.spec for field_codec in codec.fields.values())
    manifest = StoreManifest(fields, {}, {}, {}, len(table), 1, n_tokens, codec.describe())
    timings = Timings()
    with (
        tempfile.TemporaryDirectory(prefix=SPEED_TEST_PREFIX, dir=disk) as folder,
        StoreWriter.create_or_resume(Path(folder) / "store", manifest, table) as store,
    ):
        run_parts(forwards, store, [0], timings)
    return timings
