"""Batches as a training step sees them: read from a store in threads, copied to the device, decoded there.

::

    BatchReader.read      byte ranges of all sequences -> padded tensors on reused memory
    BatchReader.deliver   CPU: decode; CUDA: start the copy on a stream of its own
    await_copy            the step's stream waits for the copy
    Batch.decode          codes -> values, on the device

Shapes: B sequences, T tokens (longest of the batch), L target layers, D packed KV width, E target width.
"""

import math
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DrafterError, SelectionInvalid, TrainingError
from ..moa.drafters.registry import drafter_class
from ..moa.drafters.training import Draws, Reads, TrainingInputs
from ..storage.codecs.field import FieldCodec
from ..storage.read.store import ActivationStore, layer_indices, row_shape, shared_arrays, token_shape
from ..storage.schema import TOKENS, StoredArray
from ..text import add_command
from .config import TrainConfig, default_drafters

LAYER_OUTPUTS = "layer_outputs"
"""The attribute of ``TrainingInputs`` that is made of several fields: ``layer_outputs.0`` and so on."""
_KEPT_BATCH_BYTES = 1 << 30
"""Batches up to this size leave their buffers to the next one."""
_COUNTED_SEQUENCES = 256  # read at once to count their tokens
_HELD_BATCHES = 2  # that Lightning holds: the one in use, and the next
_MAX_THREADS = 16  # decode more than the bus to a GPU takes
_ALIGNMENT_BYTES = 64
_TEXT_FIELDS = ("tokens", "response_mask")
_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class EncodedField:
    """A field as the store holds it, for all sequences of a micro-batch."""

    codec: FieldCodec
    """The field's codec."""
    rows: dict[str, Tensor]
    """Stored array -> [B, n_rows, *row_shape]."""
    n_tokens: tuple[int, ...]
    """Length of each sequence."""
    dtype: torch.dtype
    """Dtype of the decoded values."""
    layers: list[int] | None = None
    """The layers that the rows hold, of a field that has layers; None for all."""

    def decode(self, tokens: Tensor) -> Tensor:
        """Decode on the device of the rows: [B, T, *token_shape], zero after the end of each sequence.

        Args:
            tokens: int [B, T], the token ids, for codecs that predict from them.
        """
        device = next(iter(self.rows.values())).device
        shape = (len(self.n_tokens), max(self.n_tokens), *token_shape(self.codec.spec, self.layers))
        values = torch.zeros(shape, dtype=self.dtype, device=device)
        for index, n_tokens in enumerate(self.n_tokens):
            own = {name: rows[index] for name, rows in self.rows.items()} | {TOKENS: tokens[index]}
            values[index, :n_tokens] = self.codec.decode(own, 0, n_tokens, self.layers)
        return values


@dataclass
class Batch:
    """One micro-batch."""

    inputs: TrainingInputs
    """Right-padded activations."""
    draws: Draws
    """Step bounds and staircase rows, already drawn."""
    denominator: float
    """The divisor of sums over loss positions, which weighs unequal micro-batches and devices by their positions."""
    n_tokens: int
    """Real tokens, without padding."""
    n_tokens_of_all: int = 0
    """Those of the micro-batches that all devices take at the same time."""
    n_bytes_read: int = 0
    """Bytes of the store that were read for it."""
    index: int = 0
    """Number of a micro-batch within its step on this device; number of a validation batch over all devices."""
    n_parts: int = 1
    """Micro-batches of the step on this device."""
    copied: torch.cuda.Event | None = None
    """Done when the batch has arrived on its device; None where there is nothing to wait for."""
    encoded: dict[str, EncodedField] = field(default_factory=dict)
    """Attribute of ``inputs`` -> what it will be decoded from; until then the attribute is an empty tensor."""

    def to(self, device: torch.device, **kwargs: Any) -> "Batch":
        """Copy the batch to a device."""
        copied: Batch = map_tensors(self, lambda tensor: tensor.to(device, **kwargs))
        return copied

    @torch.no_grad()
    def decode(self) -> "Batch":
        """Decode what is encoded, on the device where it is."""
        if not self.encoded:
            return self
        decoded = {name: item.decode(self.inputs.tokens) for name, item in self.encoded.items()}
        if "kv" in decoded:
            decoded["kv"] = decoded["kv"].flatten(3)  # heads, keys and values in one row, as drafters pack them
        layers = tuple(
            decoded.pop(f"{LAYER_OUTPUTS}.{index}", states) for index, states in enumerate(self.inputs.layer_outputs)
        )
        return replace(self, inputs=replace(self.inputs, **decoded, layer_outputs=layers), encoded={})


def map_tensors(item: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a batch or a checkpoint, at any depth."""
    if isinstance(item, Tensor):
        return function(item)
    if isinstance(item, dict):
        return {name: map_tensors(value, function) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(map_tensors(value, function) for value in item)
    if isinstance(item, Batch | TrainingInputs | Draws | EncodedField):
        return replace(item, **{one.name: map_tensors(getattr(item, one.name), function) for one in fields(item)})
    return item


class BufferPool:
    """Host memory for batches, used again: fresh memory costs a page fault per 4 KiB, pinned memory more.

    A buffer comes back when the last tensor on it is gone. Nothing waits here: the caller bounds how much is in use by
    bounding what is read ahead.

    Args:
        max_bytes: free buffers are dropped once all buffers together, in use and free, exceed this.
        pin_memory: whether memory is page-locked, which a GPU copies from at full speed.
    """

    def __init__(self, max_bytes: int, pin_memory: bool = False) -> None:
        self._max_bytes, self._pin_memory = max_bytes, pin_memory
        self._free: list[np.ndarray] = []
        self._in_use: dict[int, int] = {}
        # Filled by destructors, which may run at any moment and in any thread: appending takes no lock.
        self._returned: deque[np.ndarray] = deque()
        self.n_allocations = 0
        """Times that memory was asked from the system."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes in use and free."""
        return sum(self._in_use.values()) + sum(len(buffer) for buffer in self._free)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor with arbitrary content; its memory is free again once no tensor shares it."""
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        buffer = self._find(n_bytes)
        self._in_use[id(buffer)] = len(buffer)
        # torch keeps this view alive as long as the storage, whatever shares it; so its end is the end of the use.
        view = buffer[:n_bytes]
        weakref.finalize(view, self._returned.append, buffer).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def _find(self, n_bytes: int) -> np.ndarray:
        """Return the smallest free buffer that is large enough but not twice so, or a new one."""
        while self._returned:
            buffer = self._returned.popleft()
            del self._in_use[id(buffer)]
            self._free.append(buffer)
        self._free.sort(key=len)  # so that the first that fits wastes least
        for i, buffer in enumerate(self._free):
            if n_bytes <= len(buffer) <= 2 * max(n_bytes, _ALIGNMENT_BYTES):
                return self._free.pop(i)
        new_bytes = -(-max(n_bytes, 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        # The smallest go first: long batches come back, and a large buffer serves them and no shorter one.
        while self._free and self.allocated_bytes + new_bytes > self._max_bytes:
            self._free.pop(0)
        self.n_allocations += 1
        return torch.empty(new_bytes, dtype=torch.uint8, pin_memory=self._pin_memory).numpy()


class SideCopies:
    """Copies batches to a CUDA device on a stream of its own, and keeps the host's memory until each copy is done.

    A copy that does not block reads its source later. Buffers of a pool are free again when nothing refers to them, so
    without a reference held here the next batch would overwrite one that is being copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._held: deque[tuple[torch.cuda.Event, Batch]] = deque()

    def start(self, batch: Batch) -> Batch:
        """Start copying a batch; call :func:`await_copy` before using it."""
        while self._held and self._held[0][0].query():
            self._held.popleft()
        with torch.cuda.stream(self._stream):
            moved, done = batch.to(self._device, non_blocking=True), torch.cuda.Event()
            done.record(self._stream)
        self._held.append((done, batch))
        return replace(moved, copied=done)


def await_copy(batch: Batch) -> Batch:
    """Have the current stream of a batch's device wait until the batch has arrived; the host does not wait."""
    if batch.copied is None:
        return batch
    stream = torch.cuda.current_stream(batch.inputs.tokens.device)
    stream.wait_event(batch.copied)

    def keep(tensor: Tensor) -> Tensor:
        tensor.record_stream(stream)  # or the allocator gives its memory away before this stream is done with it
        return tensor

    map_tensors(batch, keep)
    return replace(batch, copied=None)


def read_fields(reads: Reads) -> dict[str, str]:
    """Return the fields to read, by the attribute of ``TrainingInputs`` that they become, layer outputs numbered."""
    outputs = {f"{LAYER_OUTPUTS}.{index}": f"hidden/layer_{layer}" for index, layer in enumerate(reads.outputs)}
    return reads.fields | outputs


def _reads(store: ActivationStore, drafter: Any) -> Reads:
    return drafter_class(drafter.kind).reads(int(store.manifest.target["n_layers"]), drafter)


def needed_fields(store: ActivationStore, config: TrainConfig) -> dict[str, str]:
    """List the fields that the drafter is trained on, as :func:`read_fields`.

    Raises:
        SelectionInvalid: the store lacks one; the message names the command that adds it.
        TrainingError: N is not below the target's number of layers.
    """
    n_layers, n_last = int(store.manifest.target["n_layers"]), config.target_layer_inference
    if n_last >= n_layers:
        raise TrainingError(
            f"target_layer_inference ({n_last}) must be below the target's {n_layers} layers; lower it."
        )
    needed = read_fields(_reads(store, config.drafter))
    missing = [name for name in needed.values() if name not in store.fields]
    if missing:
        how = f"add with {add_command(str(store.path), missing, n_last)}"
        if origin := store.manifest.extraction.get("imported_from"):
            how = f"nothing can be added to a store that was imported from {origin}, so extract one with all fields"
        trainable = _trainable_kinds(store)
        others = f", or train another drafter on what there is: --drafter {' or '.join(trainable)}" if trainable else ""
        raise SelectionInvalid(f"{store.path} lacks {', '.join(missing)}; {how}{others}.")
    return needed


def _trainable_kinds(store: ActivationStore) -> list[str]:
    """List the kinds of drafters that a store has all fields for, at their default settings."""
    kinds: list[str] = []
    for settings in default_drafters():
        try:
            if set(read_fields(_reads(store, settings)).values()) <= set(store.fields):
                kinds.append(settings.kind)
        except DrafterError:  # the target is too small for the default
            continue
    return kinds


def needed_layers(store: ActivationStore, config: TrainConfig, name: str) -> list[int] | None:
    """List the layers of a field that the drafter is trained on; None for all, or where the field has none."""
    spec = store.fields[name]
    return layer_indices(spec, _reads(store, config.drafter).kv_layers if spec.layer_axis == 1 else None)


def sequence_bytes(store: ActivationStore, config: TrainConfig, n_tokens: int) -> int:
    """Count the bytes of one sequence's activations, padded to ``n_tokens``."""
    specs = [(store.fields[name], needed_layers(store, config, name)) for name in needed_fields(store, config).values()]
    values = [(math.prod(token_shape(spec, layers)), spec.storage_dtype.itemsize) for spec, layers in specs]
    return int(n_tokens) * sum(n_values * n_bytes for n_values, n_bytes in values)


class BatchReader:
    """Reads given sequences of a store into right-padded batches, on reused memory.

    Args:
        device: the device that trains. On the CPU the thread that reads also decodes; another device decodes for
            itself, so that only codes travel to it.
        n_ranks: processes that read on this machine and share its cores.
    """

    def __init__(self, store: ActivationStore, config: TrainConfig, device: torch.device, n_ranks: int = 1) -> None:
        self.store, self.config = store, config
        n_own = len(os.sched_getaffinity(0)) // n_ranks
        self.n_threads = config.data.reader_threads or max(1, min(_MAX_THREADS, n_own))
        self._decodes = device.type == "cpu"
        self._copies = SideCopies(device) if device.type == "cuda" else None
        self._fields = needed_fields(store, config)
        self._kv_layers = _reads(store, config.drafter).kv_layers
        self._layers = {name: needed_layers(store, config, name) for name in self._fields.values()}
        self._token_bytes = sequence_bytes(store, config, 1)
        largest = max(self._token_bytes * int(store.lengths.max(initial=0)), _KEPT_BATCH_BYTES)
        self._buffers = BufferPool(
            (config.data.prefetch_mb << 20) + _HELD_BATCHES * largest, pin_memory=device.type == "cuda"
        )

    def read(
        self, sequences: np.ndarray, lengths: np.ndarray, response: Tensor | None = None
    ) -> tuple[TrainingInputs, dict[str, EncodedField]]:
        """Read sequences with the given token counts; padding is zero.

        Args:
            response: bool [B, at least T], their response masks; None to read them too.

        Returns:
            The inputs, and the fields that are not decoded yet, by attribute of the inputs (see ``Batch.encoded``).
        """
        n_rows, n_tokens = len(sequences), int(lengths.max())
        codecs = [(self.store.codec.fields[name], layers) for name, layers in self._layers.items()]
        plain = {codec.spec.name for codec, _ in codecs if codec.is_identity}
        buffers = {
            array.name: self._buffer(array, row_shape(array, indices), array.name in plain, n_rows, n_tokens)
            for array, indices in shared_arrays(codecs).items()
        }
        out = {name: _as_stored(buffer) for name, buffer in buffers.items()}
        # The masks of a whole step are read before its first micro-batch, for the divisor of the loss.
        names = _TEXT_FIELDS if response is None else ("tokens",)
        text = {name: np.empty((n_rows, n_tokens), self.store.fields[name].storage_dtype) for name in names}
        self.store.read_batch(
            sequences,
            [*names, *self._fields.values()],
            out=out | text,
            layers=self._kv_layers,
            n_threads=self.n_threads,
            decoded=False,  # codes travel to the device, which decodes faster than the host
        )
        encoded = {}
        for attribute, name in self._fields.items():
            codec, layers = self.store.codec.fields[name], self._layers[name]
            if not codec.is_identity:
                rows = {array.name: buffers[array.name] for array in codec.arrays_read(layers)}
                dtype = _TORCH_DTYPES[codec.spec.dtype]
                encoded[attribute] = EncodedField(codec, rows, tuple(lengths.tolist()), dtype, layers)
                buffers[name] = torch.empty(0)
        if response is None:
            response = torch.from_numpy(text["response_mask"]).bool()
        read = {attribute: buffers[name] for attribute, name in self._fields.items()}
        inputs = TrainingInputs(
            tokens=torch.from_numpy(text["tokens"]).long(),
            response_mask=response[:, :n_tokens].contiguous(),
            kv=read["kv"].flatten(3) if "kv" in read and "kv" not in encoded else read.get("kv"),
            hidden=read["hidden"],
            entering_hidden=read.get("entering_hidden"),
            layer_outputs=tuple(states for name, states in read.items() if name.startswith(LAYER_OUTPUTS)),
        )
        return inputs, encoded

    def deliver(self, batch: Batch) -> Batch:
        """Decode a batch on the CPU, or start its copy to a CUDA device."""
        if self._decodes:
            return batch.decode()
        return batch if self._copies is None else self._copies.start(batch)

    def response_masks(self, sequences: np.ndarray) -> Tensor:
        """Read the response masks of sequences, padded with False: bool [B, T]."""
        return torch.from_numpy(self.store.read_batch(sequences, "response_mask")["response_mask"]).bool()

    def count_response_tokens(self, sequences: np.ndarray) -> Tensor:
        """Count how often each token of the vocabulary occurs in the responses of sequences: int64 [V]."""
        counts = np.zeros(int(self.store.manifest.target["vocab_size"]), np.int64)
        # In parts, or the tokens of a large store would be in memory at once.
        for part in np.array_split(sequences, -(-len(sequences) // _COUNTED_SEQUENCES) or 1):
            read = self.store.read_batch(part, list(_TEXT_FIELDS))
            counts += np.bincount(read["tokens"][read["response_mask"] != 0], minlength=len(counts))
        return torch.from_numpy(counts)

    def n_bytes(self, lengths: np.ndarray) -> int:
        """Count the bytes of activations in a batch of sequences with these token counts."""
        return len(lengths) * self._token_bytes * int(lengths.max())

    def _buffer(
        self, array: StoredArray, row_shape: tuple[int, ...], is_field: bool, n_sequences: int, n_tokens: int
    ) -> Tensor:
        dtype = _TORCH_DTYPES[array.logical_dtype] if is_field else getattr(torch, array.dtype)
        return self._buffers.take((n_sequences, array.n_rows(n_tokens), *row_shape), dtype)


def _as_stored(buffer: Tensor) -> np.ndarray:
    """View a buffer in the stored dtype; numpy has no bfloat16, the store keeps its bits as uint16."""
    return buffer.view(torch.uint16).numpy() if buffer.dtype == torch.bfloat16 else buffer.numpy()
