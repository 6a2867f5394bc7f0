"""Choose, order, draw and read the training and validation sequences of a run.

::

    StoreDataModule       training and validation sequences of a store
    TrainingStream        order and random draws of each step; reads micro-batches ahead in a thread
    BatchReader.read      byte ranges of all sequences -> padded tensors in reused memory
    BatchReader.batch     CPU: decode; CUDA: start the copy on its own stream
    await_copy            the step's stream waits for the copy
    Batch.decode          codes -> values, on the device

Batch k of a run is a pure function of the store, the settings and k, so a resumed run sees the same
batches as an uninterrupted run. Micro-batches that are read ahead take at most ``prefetch_mb``
together. The trainer holds two more micro-batches. Free buffers that are kept for reuse stay within
the same bounds.

A batch holds the sequences of one optimizer step on all devices. It is divided into micro-batches,
each of which one device processes in one forward. The draws of a step are its random numbers.

Shapes: B sequences, T tokens of the longest sequence in the batch, L target layers, D packed KV
width, E target width, V vocabulary size.
"""

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from ..errors import SelectionInvalid, TrainingError
from ..files import parse_object
from ..moa.drafters.registry import drafter_class
from ..moa.drafters.training import BlockDraws, Draws, Reads, TrainingInputs, draw_anchors
from ..moa.nn import masks
from ..moa.targets.facts import load_facts
from ..storage.backend import backend_of
from ..storage.codecs.field import FieldCodec
from ..storage.plan import numbers
from ..storage.read.store import (
    ActivationStore,
    layer_indices,
    row_shape,
    shared_arrays,
    token_shape,
)
from ..storage.schema import ANSWERS_BY, KV, RUNS_NAME, TOKENS
from ..text import add_command
from .config import AnyDrafter, BlockSettings, MachineSettings, RoundSettings, TrainConfig, known
from .defaults import CPU_MICRO_BATCH_TOKENS, RunFacts, choose_settings, choose_validation_fraction

# Attribute of ``TrainingInputs`` that is read from several fields of the store. Each field has a
# numbered name: ``layer_outputs.0`` and so on.
_LAYER_OUTPUTS = "layer_outputs"
# Number of sequences that are read at once to count their tokens.
_COUNTED_SEQUENCES = 256
# Maximum number of sequences whose tokens are counted. A larger store is sampled evenly.
_MOST_COUNTED = 1 << 16
# Maximum number of decoding threads. 16 threads decode more than the bus to a GPU can transfer.
_MAX_THREADS = 16
# Number of batches in a group of sequences that is sorted by length. Larger groups give less
# padding, but mix the data less.
_GROUPED_BATCHES = 32
_TEXT_FIELDS = ("tokens", "response_mask")
_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class EncodedField:
    """One field of the sequences of a micro-batch, still encoded as in the store."""

    codec: FieldCodec
    rows: dict[str, Tensor]  # Maps the name of each stored array to [B, n_rows, *row_shape].
    n_tokens: tuple[int, ...]  # Length of each sequence.
    dtype: torch.dtype  # Dtype of the decoded values.
    # Layers that ``rows`` holds. None if ``rows`` holds all layers or the field has no layer axis.
    layers: list[int] | None = None

    def decode(self, tokens: Tensor) -> Tensor:
        """Decode the field on the device that holds the rows.

        Args:
            tokens: token ids [B, T], which some codecs need for decoding.

        Returns:
            The values, [B, T, *token_shape], with zeros at the padding.
        """
        device = next(iter(self.rows.values())).device
        shape = (len(self.n_tokens), max(self.n_tokens), *token_shape(self.codec.spec, self.layers))
        values = torch.zeros(shape, dtype=self.dtype, device=device)
        for index, n_tokens in enumerate(self.n_tokens):
            arrays = {name: rows[index] for name, rows in self.rows.items()} | {
                TOKENS: tokens[index]
            }
            values[index, :n_tokens] = self.codec.decode(arrays, 0, n_tokens, self.layers)
        return values


@dataclass
class GroupedKV:
    """KV of a micro-batch, in several fields because the target's layers have different shapes."""

    # Maps each KV field to the values of the layers that are read, [B, T, *token_shape].
    parts: dict[str, Tensor | EncodedField]
    # Maps each KV field to the indices of its layers on axis L of the tensor that :meth:`decode`
    # returns.
    layer_indices: dict[str, list[int]]
    width: int  # Packed width of the widest layer, D.

    def decode(self, tokens: Tensor) -> Tensor:
        """Decode all fields and pack them into one tensor, on the device that holds the values.

        Args:
            tokens: token ids [B, T], which some codecs need for decoding.

        Returns:
            Packed KV, [B, T, L, D]. Layers with less width are padded with zeros.
        """
        values: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            values[name] = part if isinstance(part, Tensor) else part.decode(tokens)
        first = next(iter(values.values()))
        packed = first.new_zeros(
            *first.shape[:2], sum(map(len, self.layer_indices.values())), self.width
        )
        for name, layers in values.items():
            for index, layer in zip(
                self.layer_indices[name], layers.flatten(3).unbind(2), strict=True
            ):
                packed[:, :, index, : layer.shape[2]] = layer
        return packed


@dataclass
class Batch:
    """One micro-batch of training or validation sequences, with facts about its step."""

    inputs: TrainingInputs
    draws: Draws
    # Divisor of the loss, which is summed over loss positions. All micro-batches of a step have the
    # same divisor, so that each loss position of the step has the same weight.
    denominator: float = 1.0
    n_tokens: int = 0  # Number of tokens without padding.
    # Number of tokens in this micro-batch and in those that the other devices process at the same
    # time.
    n_tokens_of_all: int = 0
    n_bytes_read: int = 0
    # Index of a training micro-batch among those of its step on this device, or index of a
    # validation batch among those of all devices.
    index: int = 0
    n_parts: int = 1  # Number of micro-batches in the step on this device.
    # CUDA event that ends the copy of the batch to the device. None if there is no copy to wait
    # for.
    copied: torch.cuda.Event | None = None
    # Maps attributes of ``inputs`` to the EncodedField or GroupedKV from which the attributes are
    # decoded later. Until they are decoded, these attributes are empty tensors.
    encoded: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device, **kwargs: Any) -> "Batch":
        """Copy the batch to a device."""
        copied: Batch = map_tensors(self, lambda tensor: tensor.to(device, **kwargs))
        return copied

    @torch.no_grad()
    def decode(self) -> "Batch":
        """Decode the encoded fields on the device that holds them."""
        if not self.encoded:
            return self
        decoded = {name: item.decode(self.inputs.tokens) for name, item in self.encoded.items()}
        if "kv" in decoded:
            # Drafters expect the heads, keys and values of a layer packed in one axis of width D.
            decoded["kv"] = decoded["kv"].flatten(3)
        layers: list[Tensor] = []
        for index, states in enumerate(self.inputs.layer_outputs):
            layers.append(decoded.pop(f"{_LAYER_OUTPUTS}.{index}", states))
        inputs = replace(self.inputs, **decoded, layer_outputs=tuple(layers))
        return replace(self, inputs=inputs, encoded={})


def map_tensors(item: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a batch or a checkpoint, at any depth."""
    if isinstance(item, Tensor):
        return function(item)
    if isinstance(item, dict):
        return {name: map_tensors(value, function) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(map_tensors(value, function) for value in item)
    if isinstance(item, Batch | TrainingInputs | Draws | BlockDraws | EncodedField | GroupedKV):
        mapped: dict[str, Any] = {}
        for attribute in fields(item):
            mapped[attribute.name] = map_tensors(getattr(item, attribute.name), function)
        return replace(item, **mapped)
    return item


def start_copy(batch: Batch, stream: torch.cuda.Stream) -> Batch:
    """Start copying a batch from pinned memory to a device, on a separate stream.

    Call :func:`await_copy` before using the copy.
    """
    # No reference to the pinned memory is needed, because torch does not reuse pinned memory before
    # the copies from it are done.
    with torch.cuda.stream(stream):
        moved = batch.to(stream.device, non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
    return replace(moved, copied=done)


def await_copy(batch: Batch) -> Batch:
    """Make the current stream of the device wait until a batch has been copied to the device.

    The host is not blocked.
    """
    if batch.copied is None:
        return batch
    stream = torch.cuda.current_stream(batch.inputs.tokens.device)
    stream.wait_event(batch.copied)

    def keep(tensor: Tensor) -> Tensor:
        # Without this call, the allocator could reuse the tensor's memory before the work queued on
        # this stream is done.
        tensor.record_stream(stream)
        return tensor

    map_tensors(batch, keep)
    return replace(batch, copied=None)


def target_identity(store: ActivationStore) -> dict[str, str]:
    """Return the hashes by which a store identifies its target, such as ``weights_sha256``."""
    hashes: dict[str, str] = {}
    for name, value in store.manifest.identities.items():
        if name.startswith("target."):
            hashes[name.removeprefix("target.")] = str(value)
    return hashes


def has_own_answers(store: ActivationStore) -> bool:
    """Return whether the store records that its target wrote the answers itself."""
    weights = target_identity(store).get("weights_sha256")
    runs = store.path / RUNS_NAME
    for name in backend_of(runs).names_in():
        with contextlib.suppress(OSError, ValueError):
            if weights and parse_object(backend_of(runs / name).read()).get(ANSWERS_BY) == weights:
                return True
    return False


def read_fields(reads: Reads) -> dict[str, str]:
    """Map attributes of ``TrainingInputs`` to fields of a store.

    Layer outputs, which come from several fields, are mapped as ``layer_outputs.0`` and so on.
    """
    field_names = dict(reads.fields)
    for index, layer in enumerate(reads.outputs):
        field_names[f"{_LAYER_OUTPUTS}.{index}"] = f"hidden/layer_{layer}"
    return field_names


def _reads(store: ActivationStore, drafter: Any) -> Reads:
    kind = drafter_class(drafter.kind)
    n_layers = int(store.manifest.target["n_layers"])
    reads = kind.reads(n_layers, drafter)
    n_with_kv = len(_kv_layers(store))
    # In some targets, only some layers have KV of their own. Then ``kv_layers`` must be indices
    # among these layers, not among all layers.
    if reads.kv and n_with_kv not in (0, n_layers):
        return replace(reads, kv_layers=kind.reads(n_with_kv, drafter).kv_layers)
    return reads


def _kv_layers(store: ActivationStore) -> list[tuple[int, str, int]]:
    """List (layer, field, index along the field's layer axis) of all layers with stored KV.

    The layers are ascending.
    """
    layers: list[tuple[int, str, int]] = []
    for name, spec in store.fields.items():
        if name.split("/")[0] != KV:
            continue
        for index, layer in enumerate(spec.layer_numbers):
            layers.append((layer, spec.name, index))
    return sorted(layers)


def _kv_read(store: ActivationStore, reads: Reads) -> dict[str, list[tuple[int, int]]]:
    """Map each KV field that the drafter reads to the layers that are read from this field.

    Each layer is a pair: its position among all layers that are read, and its index along the
    field's layer axis.
    """
    all_layers = _kv_layers(store)
    layers_of = dict[str, list[tuple[int, int]]]()
    chosen = all_layers
    if all_layers and reads.kv_layers is not None:
        chosen = [all_layers[layer] for layer in reads.kv_layers]
    for position, (_, name, index) in enumerate(chosen if reads.kv else []):
        layers_of.setdefault(name, []).append((position, index))
    return layers_of


def needed_fields(store: ActivationStore, config: TrainConfig) -> dict[str, str]:
    """Map attributes of ``TrainingInputs`` to the fields that the drafter of a run needs.

    Layer outputs are mapped as ``layer_outputs.0`` and so on. KV in several fields is mapped as
    ``kv.0``, ``kv.1`` and so on.

    Raises:
        SelectionInvalid: the store lacks one of the fields.
    """
    n_layers = int(store.manifest.target["n_layers"])
    n_last = config.target_layer_inference
    if n_last >= n_layers:
        raise TrainingError(
            f"target_layer_inference is {n_last}, but it must be below the number of the target's "
            f"layers, {n_layers}; lower --target-layer-inference."
        )
    if n_last:
        # Refuse an unsupported target first. Otherwise, the error would be about missing fields.
        load_facts(store.target_path).layer_sizes()
    reads = _reads(store, config.drafter)
    needed = read_fields(reads)
    kv = _kv_read(store, reads)
    # If the target's layers have different shapes, their KV is in several fields.
    if kv:
        is_single = len({name for _, name, _ in _kv_layers(store)}) == 1
        kv_fields: dict[str, str] = {}
        for index, name in enumerate(kv):
            kv_fields[KV if is_single else f"{KV}.{index}"] = name
        needed.pop(KV, None)
        needed = kv_fields | needed
    missing = [name for name in needed.values() if name not in store.fields]
    if missing:
        advice = f"add them with {add_command(str(store.path), missing, n_last)}"
        if origin := store.manifest.extraction.get("imported_from"):
            advice = (
                f"nothing can be added to a store that was imported from {origin}, so extract a "
                "new store with these fields"
            )
        raise SelectionInvalid(
            f"{store.path} lacks the fields {', '.join(missing)}, which this drafter reads; "
            f"{advice}, or train another --drafter."
        )
    return needed


def needed_layers(store: ActivationStore, config: TrainConfig, name: str) -> list[int] | None:
    """Return the indices of the layers that the drafter reads from a field.

    The result is None if all layers are read or the field has no layer axis.
    """
    spec = store.fields[name]
    layers = _kv_read(store, _reads(store, config.drafter)).get(name)
    return layer_indices(spec, None if layers is None else [index for _, index in layers])


def sequence_bytes(store: ActivationStore, config: TrainConfig, n_tokens: int) -> int:
    """Return the total size of the activations that the drafter reads for ``n_tokens`` tokens."""
    token_bytes = 0
    for name in needed_fields(store, config).values():
        spec = store.fields[name]
        n_values = math.prod(token_shape(spec, needed_layers(store, config, name)))
        token_bytes += n_values * spec.storage_dtype.itemsize
    return int(n_tokens) * token_bytes


class BatchReader:
    """Reads sequences of a store into right-padded batches for a training device."""

    def __init__(
        self, store: ActivationStore, config: TrainConfig, device: torch.device, n_ranks: int = 1
    ) -> None:
        self.store = store
        self.config = config
        # The n_ranks processes on this machine share its cores.
        n_cores = len(os.sched_getaffinity(0)) // n_ranks
        self.n_threads = config.data.reader_threads or max(1, min(_MAX_THREADS, n_cores))
        # If training runs on the CPU, the reading thread also decodes. For any other device,
        # encoded values are transferred, which are smaller, and the device decodes them.
        self._decodes = device.type == "cpu"
        # For a GPU, read into pinned memory, from which copies run at full speed. Use a separate
        # CUDA stream for the copies, so that they overlap with other work of the GPU.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fields = needed_fields(store, config)
        kv_layers = _kv_read(store, _reads(store, config.drafter))
        self._kv_layer_indices: dict[str, list[int]] = {}
        for name, layers in kv_layers.items():
            self._kv_layer_indices[name] = [position for position, _ in layers]
        self._layers = {name: needed_layers(store, config, name) for name in self._fields.values()}
        self._token_bytes = sequence_bytes(store, config, 1)

    def read(
        self, sequences: np.ndarray, lengths: np.ndarray, response: Tensor | None = None
    ) -> tuple[TrainingInputs, dict[str, Any]]:
        """Read sequences from the store into tensors, padded with zeros.

        Args:
            sequences: indices of the sequences.
            lengths: number of tokens of each sequence.
            response: response masks of the sequences, bool [B, at least T]. None reads them from
                the store.

        Returns:
            The inputs, and the fields that are still encoded (see ``Batch.encoded``).
        """
        n_rows = len(sequences)
        n_tokens = int(lengths.max())
        buffers, out = self._buffers(n_rows, n_tokens)
        # The caller usually has the response masks, because the divisor of the loss depends on the
        # response masks of the entire step.
        names = _TEXT_FIELDS if response is None else ("tokens",)
        text: dict[str, np.ndarray] = {}
        for name in names:
            text[name] = np.empty((n_rows, n_tokens), self.store.fields[name].storage_dtype)
        self.store.read_batch(
            sequences,
            [*names, *self._fields.values()],
            out=out | text,
            layers={name: layers for name, layers in self._layers.items() if layers is not None},
            n_threads=self.n_threads,
            # Read encoded fields without decoding them. The device decodes faster than the host.
            decoded=False,
        )
        encoded: dict[str, Any] = {}
        for attribute, name in self._fields.items():
            codec = self.store.codec.fields[name]
            layers = self._layers[name]
            if not codec.is_identity:
                rows = {array.name: buffers[array.name] for array in codec.arrays_read(layers)}
                dtype = _TORCH_DTYPES[codec.spec.dtype]
                encoded[attribute] = EncodedField(
                    codec, rows, tuple(lengths.tolist()), dtype, layers
                )
                buffers[name] = torch.empty(0)
        read = {attribute: buffers[name] for attribute, name in self._fields.items()}
        kv_parts: dict[str, Any] = {}
        for attribute, name in self._fields.items():
            if attribute.startswith(f"{KV}."):
                kv_parts[name] = encoded.pop(attribute, read[attribute])
        if kv_parts:
            encoded[KV] = GroupedKV(
                kv_parts, self._kv_layer_indices, int(self.store.manifest.target["kv_width"])
            )
            read[KV] = torch.empty(0)
        if response is None:
            response = torch.from_numpy(text["response_mask"]).bool()
        inputs = TrainingInputs(
            tokens=torch.from_numpy(text["tokens"]).long(),
            response_mask=response[:, :n_tokens].contiguous(),
            kv=read[KV].flatten(3) if KV in read and KV not in encoded else read.get(KV),
            hidden=read["hidden"],
            entering_hidden=read.get("entering_hidden"),
            layer_outputs=tuple(
                states for name, states in read.items() if name.startswith(_LAYER_OUTPUTS)
            ),
        )
        return inputs, encoded

    def _buffers(
        self, n_rows: int, n_tokens: int
    ) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
        """Allocate a tensor for each stored array that is read, and the NumPy view of the tensor.

        Both are returned by the name of the stored array.
        """
        codecs = [(self.store.codec.fields[name], layers) for name, layers in self._layers.items()]
        plain = {codec.spec.name for codec, _ in codecs if codec.is_identity}
        buffers: dict[str, Tensor] = {}
        views: dict[str, np.ndarray] = {}
        for array, indices in shared_arrays(codecs).items():
            dtype = (
                _TORCH_DTYPES[array.logical_dtype]
                if array.name in plain
                else getattr(torch, array.dtype)
            )
            shape = (n_rows, array.n_rows(n_tokens), *row_shape(array, indices))
            buffer = torch.empty(shape, dtype=dtype, pin_memory=self._copies is not None)
            buffers[array.name] = buffer
            # NumPy has no bfloat16, so the store keeps the bits of bfloat16 values as uint16.
            views[array.name] = (
                buffer.view(torch.uint16) if dtype == torch.bfloat16 else buffer
            ).numpy()
        return buffers, views

    def batch(
        self,
        sequences: np.ndarray,
        lengths: np.ndarray,
        draws: Draws,
        response: Tensor | None = None,
        **facts: Any,
    ) -> Batch:
        """Read a micro-batch. On a CPU, decode it. For a CUDA device, start copying it there.

        Args:
            sequences: indices of the sequences.
            lengths: number of tokens of each sequence.
            draws: random numbers of the sequences.
            response: response masks of the sequences, bool [B, at least T]. None reads them from
                the store.
            facts: further attributes of `Batch`.
        """
        inputs, encoded = self.read(sequences, lengths, response)
        batch = Batch(inputs, draws, n_tokens=int(lengths.sum()), encoded=encoded, **facts)
        if self._decodes:
            return batch.decode()
        return batch if self._copies is None else start_copy(batch, self._copies)

    def response_masks(self, sequences: np.ndarray) -> Tensor:
        """Read the response masks of sequences, bool [B, T], padded with False."""
        return torch.from_numpy(
            self.store.read_batch(sequences, "response_mask")["response_mask"]
        ).bool()

    def count_response_tokens(self, sequences: np.ndarray) -> Tensor:
        """Count how often each token id occurs in the responses of sequences, int64 [V].

        If there are more than ``_MOST_COUNTED`` sequences, only a sample of them is counted.
        """
        counts = np.zeros(int(self.store.manifest.target["vocab_size"]), np.int64)
        sequences = sequences[:: 1 + len(sequences) // _MOST_COUNTED]
        # Read few sequences at a time, because all tokens of a large store may not fit into memory.
        for part in np.array_split(sequences, -(-len(sequences) // _COUNTED_SEQUENCES) or 1):
            read = self.store.read_batch(part, list(_TEXT_FIELDS))
            counts += np.bincount(read["tokens"][read["response_mask"] != 0], minlength=len(counts))
        return torch.from_numpy(counts)

    def n_bytes(self, lengths: np.ndarray) -> int:
        """Return the size in bytes of the padded activations of sequences with these lengths."""
        return len(lengths) * self._token_bytes * int(lengths.max())


def split_sequences(
    sequence_ids: list[str], validation_fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Split sequences into training and validation sequences.

    Returns:
        The indices of the training sequences and of the validation sequences, ascending.
    """
    # The split depends only on the content hash of each sequence, so a sequence stays in the same
    # split if the dataset is reordered or grows. The first 32 bits of the hash are uniform enough,
    # and a float represents a 32-bit number exactly.
    points = np.array([int(sequence_id[:8], 16) / 2**32 for sequence_id in sequence_ids])
    held_out = points < validation_fraction
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def epoch_order(n_tokens: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Divide the sequences of one epoch into batches in random order.

    The sequences of a batch have similar lengths. If the number of sequences is not a multiple of
    the batch size, the remaining sequences, which are chosen at random, are left out.

    Args:
        n_tokens: number of tokens of each sequence.

    Returns:
        Indices into ``n_tokens``, [n_batches, batch_size].
    """
    random = np.random.default_rng([seed, epoch])
    n_batches = len(n_tokens) // batch_size
    # Leave out the sequences that do not fill a batch before the order is sorted by length. If this
    # were done afterwards, the longest sequences would be left out.
    order = random.permutation(len(n_tokens))[: n_batches * batch_size]
    group = batch_size * _GROUPED_BATCHES
    parts: list[np.ndarray] = []
    for start in range(0, len(order), group):
        part = order[start : start + group]
        # Use a stable sort, so that the order of sequences with equal length does not depend on the
        # sorting algorithm.
        parts.append(part[np.argsort(n_tokens[part], kind="stable")])
    order = np.concatenate(parts).reshape(n_batches, batch_size)
    return order[random.permutation(n_batches)]


def draw(config: TrainConfig, step: int, max_steps: int) -> Draws:
    """Draw the random numbers of one optimizer step. They depend only on settings and step."""
    # Each step has its own generator, so that the draws of earlier steps are not needed to draw for
    # step k. Runs with different seeds have different generators in every step.
    generator = torch.Generator().manual_seed((config.seed << 32) + step)
    rows = known(config.data.batch_size)
    # Draw the numbers for draft rounds even if the drafter does not train on rounds, so that all
    # kinds of drafters get the same noise seeds, which are drawn last.
    rounds = config.drafter if isinstance(config.drafter, RoundSettings) else RoundSettings()
    step_bound = torch.randint(
        rounds.step_bound_min, rounds.step_bound_max + 1, (rows,), generator=generator
    )
    phase = torch.rand(rows, generator=generator)
    dropped = torch.rand(rows, generator=generator) < masks.staircase_drop_probability(
        step / max_steps
    )
    has_staircase = rounds.staircase and rounds.on_policy
    return Draws(
        step_bound=step_bound if rounds.step_bound else None,
        staircase_rows=~dropped if has_staircase else torch.zeros(rows, dtype=torch.bool),
        offset=(phase * step_bound).long(),
        seeds=tuple(torch.randint(1 << 62, (rows,), generator=generator).tolist()),
        noise_width=getattr(config.drafter, "feature_noise", 0.0),
        on_policy_weight=float(rounds.on_policy),
        teacher_forced_weight=rounds.teacher_forced_weight if rounds.on_policy else 1.0,
        blocks=_blocks(config.drafter),
    )


def _blocks(drafter: AnyDrafter) -> BlockDraws:
    if not isinstance(drafter, BlockSettings):
        return BlockDraws()
    n_drafts = drafter.block_size if drafter.sample_from_anchor else drafter.block_size - 1
    return BlockDraws(
        n_drafts, drafter.anchors, drafter.decay() if drafter.position_weights == "decay" else 0.0
    )


def rows_of(draws: Draws, rows: Tensor) -> Draws:
    """Select the draws of some sequences (rows) of a step."""
    return replace(
        draws,
        step_bound=None if draws.step_bound is None else draws.step_bound[rows],
        staircase_rows=draws.staircase_rows[rows],
        offset=None if draws.offset is None else draws.offset[rows],
        seeds=tuple(draws.seeds[row] for row in rows.tolist()),
    )


def with_anchors(draws: Draws, response: Tensor, config: TrainConfig) -> Draws:
    """Draw anchors, the positions at which a block drafter starts its blocks of drafts.

    Other drafters have no anchors, and their draws are returned unchanged. The drafter's objective
    could draw the same anchors on the device, but would have to synchronize with the device.

    Args:
        draws: the draws of a micro-batch.
        response: response masks [B, T] on the host.
        config: the settings of the run.
    """
    if not isinstance(config.drafter, BlockSettings):
        return draws
    anchors, valid = draw_anchors(response, draws)
    return replace(draws, blocks=replace(draws.blocks, anchors=torch.where(valid, anchors, -1)))


def sum_loss_weights(response: Tensor, draws: Draws, config: TrainConfig) -> float:
    """Sum the loss weights of the positions in response masks [B, T]; the default weight is 1."""
    return float(drafter_class(config.drafter.kind).loss_positions(response, draws).sum())


def trains_on_cpu(machine: MachineSettings) -> bool:
    """Return whether a run with these settings trains on the CPU."""
    return machine.accelerator == "cpu" or (
        machine.accelerator == "auto" and not torch.cuda.is_available()
    )


def count_devices(machine: MachineSettings) -> int:
    """Return the number of devices that a run with these settings uses on all machines."""
    n_devices = 1 if trains_on_cpu(machine) else max(1, torch.cuda.device_count())
    return machine.num_nodes * (n_devices if machine.devices == "auto" else int(machine.devices))


def device_share(config: TrainConfig, n_ranks: int) -> int:
    """Return the number of sequences of a step that each device processes.

    Raises:
        TrainingError: the batch size is not a multiple of the number of devices, or the micro-batch
            size does not divide each device's share.
    """
    share, rest = divmod(known(config.data.batch_size), n_ranks)
    if rest:
        raise TrainingError(
            f"--batch-size {config.data.batch_size} is not a multiple of the {n_ranks} devices. "
            "Choose a multiple of this number."
        )
    if share % (config.data.micro_batch_size or share):
        raise TrainingError(
            f"--micro-batch-size {config.data.micro_batch_size} does not divide the {share} "
            "sequences that each device processes per step. Choose a divisor of this number."
        )
    return share


def _read_ahead(
    reads: Iterator[tuple[int, Callable[[], Batch]]], max_batches: int, max_bytes: int
) -> Iterator[Batch]:
    """Yield batches while a thread reads the next ones.

    Args:
        reads: for each batch, its size in bytes and the function that reads it.
        max_batches, max_bytes: maximum number and total size of batches that are read ahead. At
            least one batch is read ahead, whatever its size.
    """
    # Limit the reading thread to one OpenMP thread. If there were more OpenMP threads than cores,
    # OpenMP would let the threads of the forward sleep at each barrier, which costs up to 5 % of a
    # step.
    with ThreadPoolExecutor(1, "read-ahead", torch.set_num_threads, (1,)) as pool:
        pending: deque[tuple[int, Future[Batch]]] = deque()
        ahead_bytes = 0
        waiting = next(reads, None)
        while waiting or pending:
            while waiting and (
                not pending
                or (len(pending) < max_batches and ahead_bytes + waiting[0] <= max_bytes)
            ):
                pending.append((waiting[0], pool.submit(waiting[1])))
                ahead_bytes += waiting[0]
                waiting = next(reads, None)
            n_bytes, batch = pending.popleft()
            ahead_bytes -= n_bytes
            yield batch.result()


@dataclass
class _Step:
    """The sequences and random numbers of one optimizer step, divided into micro-batches."""

    rows: np.ndarray  # Indices of all training sequences in the step, on all devices.
    draws: Draws  # Random choices of the loss (such as anchors) for all sequences in ``rows``.
    # For each micro-batch of this device, the indices into ``rows`` of its sequences.
    parts: list[np.ndarray]
    # Response masks of all sequences in ``rows``, bool [B, T]. None until the first micro-batch is
    # read.
    response: Tensor | None = None
    # Divisor of the loss of each micro-batch. It is computed from the response masks.
    denominator: float = 1.0


class TrainingStream:
    """Endless stream of the micro-batches of one device. A thread reads them ahead of the trainer.

    Args:
        reader: reads the micro-batches.
        sequences, lengths: indices in the store, and number of tokens, of each training sequence.
        max_steps: number of steps of the run. Some random draws depend on the progress of the run.
        rank, n_ranks: rank of this process, and number of processes.
        micro_batch: number of sequences per micro-batch. None takes the number in the settings. If
            there is none, a micro-batch has all sequences of a step on this device.
    """

    def __init__(
        self,
        reader: BatchReader,
        sequences: np.ndarray,
        lengths: np.ndarray,
        max_steps: int,
        rank: int,
        n_ranks: int,
        micro_batch: int | None = None,
    ) -> None:
        config = reader.config
        self._reader = reader
        self._sequences = sequences
        self._lengths = lengths
        self._max_steps = max_steps
        self._rank = rank
        self._n_ranks = n_ranks
        self._micro = micro_batch or config.data.micro_batch_size or device_share(config, n_ranks)
        self._epoch_order: tuple[int, np.ndarray] | None = None
        self._steps_per_epoch = len(sequences) // known(config.data.batch_size)
        self.start_step = 0  # Index of the first optimizer step in the stream.
        self.wait_s = 0.0  # Seconds that the trainer has waited for micro-batches.
        # ``time.perf_counter()`` at the trainer's last request for a micro-batch.
        self.asked_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        data = self._reader.config.data
        batches = _read_ahead(self._reads(), data.prefetch_batches, data.prefetch_mb << 20)
        while True:
            self.asked_s = time.perf_counter()
            batch = next(batches)
            self.wait_s += time.perf_counter() - self.asked_s
            yield batch

    def micro_batch(self, rows: np.ndarray) -> Batch:
        """Read a micro-batch of the given sequences, as if it were a complete step.

        Args:
            rows: indices of the sequences among the training sequences.
        """
        draws = rows_of(draw(self._reader.config, 0, self._max_steps), torch.arange(len(rows)))
        return self._read(_Step(rows, draws, [np.arange(len(rows))]), 0)

    def _reads(self) -> Iterator[tuple[int, Callable[[], Batch]]]:
        step = self.start_step
        while True:
            plan = self._plan(step)
            for index, part in enumerate(plan.parts):
                yield (
                    self._reader.n_bytes(self._lengths[plan.rows[part]]),
                    partial(self._read, plan, index),
                )
            step += 1

    def _plan(self, step: int) -> _Step:
        config = self._reader.config
        epoch, index = divmod(step, self._steps_per_epoch)
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = epoch_order(self._lengths, known(config.data.batch_size), config.seed, epoch)
            self._epoch_order = epoch, order
        # Deal the sequences of the batch to the devices round-robin. Neighbours in the batch have
        # similar lengths, so all devices get about the same work.
        mine = np.arange(self._rank, known(config.data.batch_size), self._n_ranks)
        parts = [mine[start : start + self._micro] for start in range(0, len(mine), self._micro)]
        return _Step(self._epoch_order[1][index], draw(config, step, self._max_steps), parts)

    def _read(self, plan: _Step, index: int) -> Batch:
        """Read one micro-batch of a step. Only the read-ahead thread calls this method."""
        part = plan.parts[index]
        n_bytes_before = self._reader.store.n_bytes_read
        if plan.response is None:
            plan.response = self._reader.response_masks(self._sequences[plan.rows])
            total = sum_loss_weights(plan.response, plan.draws, self._reader.config)
            # Lightning averages the loss over micro-batches and devices. For this average to be the
            # mean over all loss positions of the step, the divisor of each micro-batch is the
            # number of loss positions divided by the number of micro-batches on all devices.
            plan.denominator = (total or 1.0) / (len(plan.parts) * self._n_ranks)
        rows = plan.rows[part]
        at_once = self._micro * self._n_ranks
        response = plan.response[part]
        batch = self._reader.batch(
            self._sequences[rows],
            self._lengths[rows],
            with_anchors(
                rows_of(plan.draws, torch.from_numpy(part)), response, self._reader.config
            ),
            response,
            denominator=plan.denominator,
            n_tokens_of_all=int(
                self._lengths[plan.rows[index * at_once : (index + 1) * at_once]].sum()
            ),
            index=index,
            n_parts=len(plan.parts),
        )
        return replace(batch, n_bytes_read=self._reader.store.n_bytes_read - n_bytes_before)


class ValidationBatches:
    """One device's validation batches, sorted by sequence length. A thread reads them ahead."""

    def __init__(
        self,
        reader: BatchReader,
        sequences: np.ndarray,
        lengths: np.ndarray,
        size: int,
        rank: int = 0,
        n_ranks: int = 1,
    ) -> None:
        self._reader = reader
        self._sequences = sequences
        self._lengths = lengths
        self._size = size
        n_batches = -(-len(sequences) // size)
        # The batches are the same for any number of devices, so that the metrics do not depend on
        # that number. They are dealt round-robin. Every device must get the same number of batches,
        # because all devices synchronize between two batches. To fill up, several devices get the
        # last batch. Its index is the same on all of them, so it is counted once.
        self._numbers = [min(turn + rank, n_batches - 1) for turn in range(0, n_batches, n_ranks)]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Batch]:
        data = self._reader.config.data
        reads = (
            (self._reader.n_bytes(self._lengths[self._rows(n)]), partial(self._read, n))
            for n in self._numbers
        )
        return _read_ahead(reads, data.prefetch_batches, data.prefetch_mb << 20)

    def _rows(self, number: int) -> slice:
        return slice(number * self._size, (number + 1) * self._size)

    def _read(self, number: int) -> Batch:
        rows = self._rows(number)
        n_steps = self._reader.config.validation.draft_length + 1
        # The phase of a sequence sets the positions at which its draft rounds start. Phases are not
        # random, so that every validation has the same rounds.
        phase = torch.arange(len(self._sequences))[rows] % n_steps
        draws = Draws(
            torch.full_like(phase, n_steps), torch.zeros_like(phase, dtype=torch.bool), phase
        )
        return self._reader.batch(self._sequences[rows], self._lengths[rows], draws, index=number)


class StoreDataModule(L.LightningDataModule):
    """Training and validation batches of a store.

    The constructor also chooses the settings of the run that were not given.
    """

    def __init__(self, store: ActivationStore, config: TrainConfig) -> None:
        super().__init__()
        table = store.sequences
        self.lengths = numbers(table, "n_tokens").astype(np.int64)
        responses = numbers(table, "n_response_tokens")
        split = choose_validation_fraction(len(responses), int(responses.sum()))
        if is_split_open := config.validation.validation_fraction is None:
            config = config.replaced(validation_fraction=split.value)
        fraction = known(config.validation.validation_fraction)
        train, held_out = split_sequences(table["sequence_id"].to_pylist(), fraction)
        self.train_sequences = train
        # Leave out sequences whose responses are too short for one complete draft round.
        usable = held_out[responses[held_out] > config.validation.draft_length]
        self.validation_sequences = usable[: config.validation.validation_sequences]
        self.n_validation_positions = int(responses[self.validation_sequences].sum())
        if len(train) and not responses[train].any():
            raise TrainingError(
                f"{store.path}: the response masks of all {len(train)} training sequences are "
                "zero, so there is nothing to learn. Make the store from chats with answers."
            )
        facts = RunFacts(
            hidden_size=int(store.manifest.target["hidden_size"]),
            n_sequences=len(train),
            n_tokens=int(self.lengths[train].sum()),
            n_devices=count_devices(config.machine),
        )
        config, chosen = choose_settings(config, facts)
        self.chosen = [*chosen, split] if is_split_open else chosen
        batch_size = known(config.data.batch_size)
        self.store = store
        self.config = config
        # Number of sequences per forward on one device. It is the batch size until trial steps have
        # chosen a micro-batch size.
        self.micro_batch = config.data.micro_batch_size or batch_size
        if len(train) < batch_size:
            raise TrainingError(
                f"{store.path} has {len(train)} committed training sequences, too few for a batch "
                f"of {batch_size}; extract more sequences, or lower --batch-size."
            )
        needed_fields(store, config)
        self.steps_per_epoch = len(train) // batch_size
        self.max_steps = config.schedule.n_steps(self.steps_per_epoch)

    def train_dataloader(self) -> TrainingStream:
        """Create the stream of micro-batches from the trainer's current step on."""
        trainer, reader = self._reader()
        lengths = self.lengths[self.train_sequences]
        ranks = (trainer.global_rank, trainer.world_size)
        stream = TrainingStream(
            reader, self.train_sequences, lengths, self.max_steps, *ranks, self.micro_batch
        )
        stream.start_step = trainer.global_step
        return stream

    def val_dataloader(self) -> ValidationBatches:
        """Create the validation batches of this process's device."""
        trainer, reader = self._reader()
        chosen = self.validation_sequences
        chosen = chosen[np.argsort(self.lengths[chosen], kind="stable")]
        ranks = (trainer.global_rank, trainer.world_size)
        return ValidationBatches(reader, chosen, self.lengths[chosen], self.micro_batch, *ranks)

    def _reader(self) -> tuple[L.Trainer, BatchReader]:
        trainer = self.trainer
        assert trainer is not None
        return trainer, BatchReader(
            self.store, self.config, trainer.strategy.root_device, trainer.num_devices
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Wait for the copy of a batch, and decode it on the training device."""
        return await_copy(batch).decode()

    def micro_batch_sizes(self, share: int) -> list[int]:
        """List the micro-batch sizes to try, largest first.

        Args:
            share: number of sequences of a step on each device.
        """
        if fixed_size := self.config.data.micro_batch_size:
            return [fixed_size]
        sizes = [size for size in range(share, 0, -1) if share % size == 0]
        if not trains_on_cpu(self.config.machine):
            return sizes
        longest = int(self.lengths[self.train_sequences].max())
        return [size for size in sizes if size * longest <= CPU_MICRO_BATCH_TOKENS] or [1]

    def longest_sequence(self) -> TrainingInputs:
        """Read the longest training sequence into CPU memory, as inputs [1, T, ...]."""
        index = self.train_sequences[np.argmax(self.lengths[self.train_sequences])][None]
        reader = BatchReader(self.store, self.config, torch.device("cpu"))
        return reader.batch(
            index, self.lengths[index], Draws(None, torch.zeros(1, dtype=torch.bool))
        ).inputs
