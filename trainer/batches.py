"""Read sequences of a store into micro-batches, copy them to a device, and decode them there.

The functions, in the order in which they are called::

    fields_read           lists the fields and layers that the drafter of a run reads
    BatchReader.batch     reads and pads the rows of several sequences, still encoded as in the
                          store. On a CPU, it also decodes the rows. For a CUDA device, it starts
                          to copy the rows there, on a separate CUDA stream
    await_copy            makes the CUDA stream of the training step wait for the copy
    Batch.decode          decodes the rows into values, on the device

Shapes: B sequences, T tokens of the longest sequence in the batch, L target layers, D elements of the
KV of one token in one layer, E hidden size of the target.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from ..errors import SelectionInvalid, TrainingError
from ..machine import usable_cores
from ..moa.drafters.registry import drafter_class
from ..moa.drafters.sizes import DrafterSizes
from ..moa.drafters.training import Draws, TrainingInputs
from ..moa.targets.facts import TargetFacts, load_facts
from ..storage.codecs.field import FieldCodec
from ..storage.read.store import (
    ActivationStore,
    layer_indices,
    token_shape,
)
from ..storage.schema import KV, TOKENS
from ..text import add_command
from .config import AnyDrafter, TrainConfig

_LAYER_OUTPUTS = "layer_outputs"
_RESPONSE_MASK = "response_mask"
# Maximum number of decoding threads. 16 threads decode values faster than the bus can transfer them
# to a GPU.
_MAX_THREADS = 16


@dataclass(frozen=True)
class FieldRead:
    """A field of a store that the drafter of a run reads."""

    attribute: str  # Attribute of ``TrainingInputs`` to which the field's values are assigned.
    codec: FieldCodec
    # The layers that are read, as indices along the field's layer axis. The value is None if all
    # layers are read, or if the field does not have a layer axis.
    layers: list[int] | None
    # Indices of this field's layers on the layer axis of ``TrainingInputs.kv``. That axis has the
    # layers that are read from all KV fields. If this field is not a KV field, the tuple is empty.
    positions: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of the field."""
        return self.codec.spec.name

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The shape of the values of one token in the layers that are read."""
        return token_shape(self.codec.spec, self.layers)

    def decode(self, rows: Mapping[str, Tensor], tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Decode the field on the device that holds the rows.

        Args:
            rows: maps the name of each stored array to the rows of this array, [B, n_rows,
                *row_shape].
            tokens: token ids [B, T], which some codecs need for decoding.
            lengths: length of each sequence.

        Returns:
            The values, [B, T, *token_shape], with zeros at the padding.
        """
        dtype: torch.dtype = getattr(torch, self.codec.spec.dtype)
        if self.codec.is_identity:
            # NumPy has no bfloat16, so the store returns bfloat16 values as uint16 with the same
            # bits.
            return rows[self.name].view(dtype)
        shape = (*tokens.shape, *self.token_shape)
        values = torch.zeros(shape, dtype=dtype, device=tokens.device)
        arrays = self.codec.arrays_read(self.layers)
        for index, n_tokens in enumerate(lengths):
            codes = {array.name: rows[array.name][index] for array in arrays}
            codes[TOKENS] = tokens[index]
            values[index, :n_tokens] = self.codec.decode(codes, 0, n_tokens, self.layers)
        return values


def drafter_sizes(
    facts: TargetFacts, settings: AnyDrafter, target: dict[str, str] | None = None
) -> DrafterSizes:
    """Return the sizes of a drafter, which its settings and its target determine.

    Args:
        facts: the facts about the drafter's target.
        settings: settings of the drafter. Settings that are not fields of the returned sizes are
            ignored.
        target: hashes that identify the target.
    """
    config_class = drafter_class(settings.kind).config_class
    names = {item.name for item in fields(config_class)}
    sizes = {name: value for name, value in settings if name in names}
    return config_class.from_target(facts, target, **sizes)


def fields_read(store: ActivationStore, config: TrainConfig) -> list[FieldRead]:
    """List the fields that the drafter of a run reads, besides tokens and response masks.

    If the KV of the target's layers has different shapes, the store has several KV fields. Only
    those with layers that the drafter reads are listed.

    Raises:
        SelectionInvalid: the store lacks one of the fields.
    """
    n_layers = int(store.manifest.target["n_layers"])
    n_last = config.target_layer_inference
    if n_last >= n_layers:
        raise TrainingError(
            f"`target_layer_inference` is {n_last}, but it must be below the number of the "
            f"target's layers, {n_layers}. Lower `target_layer_inference`."
        )
    if n_last:
        # If the target is not supported, raise an error about that first. Otherwise, the error
        # would be about missing fields, and adding the fields would not help.
        load_facts(store.target_path).layer_sizes()
    reads = drafter_sizes(load_facts(store.target_path), config.drafter).reads
    kv_layers = _kv_layers_read(store, reads.kv_layers) if reads.kv else {}
    wanted = [(KV, name) for name in kv_layers]
    for attribute, name in reads.fields.items():
        if attribute != KV or not kv_layers:
            wanted.append((attribute, name))
    for layer in reads.outputs:
        wanted.append((_LAYER_OUTPUTS, f"hidden/layer_{layer}"))
    missing = [name for _, name in wanted if name not in store.fields]
    if missing:
        advice = f"Add them with {add_command(str(store.path), missing, n_last)}"
        if origin := store.manifest.extraction.get("imported_from"):
            advice = (
                f"A store that was imported from {origin} cannot get more fields, so extract a new "
                "store with these fields"
            )
        raise SelectionInvalid(
            f"{store.path} lacks the fields {', '.join(missing)}, which this drafter reads. "
            f"{advice}, or train another `drafter`."
        )
    fields_of_drafter: list[FieldRead] = []
    for attribute, name in wanted:
        layers = kv_layers.get(name, {})
        indices = layer_indices(store.fields[name], list(layers.values()) or None)
        codec = store.codec.fields[name]
        fields_of_drafter.append(FieldRead(attribute, codec, indices, tuple(layers)))
    return fields_of_drafter


def _kv_layers_read(
    store: ActivationStore, chosen: Sequence[int] | None
) -> dict[str, dict[int, int]]:
    """Choose the layers that the drafter reads from each KV field of the store.

    A target may store its layers 0 and 2 in the field ``kv/a``, and its layers 1 and 3 in ``kv/b``.
    If the drafter reads the layers 2 and 3, ``TrainingInputs.kv`` has these two layers in this
    order. Layer 2 is index 0 of the input and index 1 of ``kv/a``, so the result is
    ``{"kv/a": {0: 1}, "kv/b": {1: 1}}``.

    Args:
        store: the store.
        chosen: the layers that the drafter reads, as indices into the list of layers with stored
            KV. If the argument is None, the drafter reads all of them.

    Returns:
        A dict from the name of each KV field to a dict of its layers. The inner dict maps the
        layer's index in ``TrainingInputs.kv`` to the layer's index in the field. If the store has
        no KV, the result is empty.
    """
    # One tuple per layer with stored KV: the number of the layer in the target, the name of its
    # field, and its index along the layer axis of the field.
    stored: list[tuple[int, str, int]] = []
    for name, spec in store.fields.items():
        if name.split("/")[0] == KV:
            for index, layer in enumerate(spec.layer_numbers):
                stored.append((layer, name, index))
    if not stored:
        return {}
    stored.sort()
    # In some targets, only some layers have KV of their own. The indices in ``chosen`` count only
    # these layers.
    read = stored if chosen is None else [stored[layer] for layer in chosen]
    layers: dict[str, dict[int, int]] = {}
    for position, (_, name, index) in enumerate(read):
        layers.setdefault(name, {})[position] = index
    return layers


def token_bytes(store: ActivationStore, config: TrainConfig) -> int:
    """Return the size in bytes of the decoded activations that the drafter reads for one token."""
    n_bytes = 0
    for item in fields_read(store, config):
        n_bytes += math.prod(item.token_shape) * item.codec.spec.storage_dtype.itemsize
    return n_bytes


@dataclass
class Batch:
    """One micro-batch of training or validation sequences, and facts about it, such as its size."""

    # The inputs of the drafter. They contain activations only after :meth:`decode` has decoded the
    # fields in ``stored``.
    inputs: TrainingInputs
    draws: Draws  # Random choices for the sequences, such as the lengths of their draft rounds.
    # The loss is a sum over positions, divided by this number. The number is the same for all
    # micro-batches of a step, so that each position of the step has the same weight.
    denominator: float = 1.0
    n_tokens: int = 0  # Number of tokens without padding.
    # All devices process one micro-batch each at the same time. This is the number of tokens in all
    # these micro-batches, without padding.
    n_tokens_of_all: int = 0
    n_bytes_read: int = 0
    # Index of the batch. Training micro-batches are counted within one step and one device.
    # Validation batches are counted over all devices.
    index: int = 0
    n_parts: int = 1  # Number of micro-batches in the step on this device.
    # CUDA event that is recorded when the batch has been copied to the device. If there is no copy
    # to wait for, the value is None.
    copied: torch.cuda.Event | None = None
    stored: tuple[FieldRead, ...] = ()  # Fields that are not decoded yet.
    # Maps the name of each stored array of the fields in ``stored`` to the rows of this array, [B,
    # n_rows, *row_shape].
    rows: dict[str, Tensor] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()  # Length of each sequence.
    # Width to which the KV of all layers is padded if the layers have different widths. If all
    # layers have the same width, the value is 0.
    kv_width: int = 0

    def to(self, device: torch.device, **kwargs: Any) -> "Batch":
        """Copy the batch to a device."""
        copied: Batch = apply_to_collection(
            self, Tensor, Tensor.to, device, allow_frozen=True, **kwargs
        )
        return copied

    @torch.no_grad()
    def decode(self) -> "Batch":
        """Decode the stored fields on the device that holds them."""
        if not self.stored:
            return self
        values: dict[str, Tensor] = {}
        kv: list[tuple[tuple[int, ...], Tensor]] = []
        layer_outputs: list[Tensor] = []
        for item in self.stored:
            decoded = item.decode(self.rows, self.inputs.tokens, self.lengths)
            if item.attribute == KV:
                kv.append((item.positions, decoded.flatten(3)))
            elif item.attribute == _LAYER_OUTPUTS:
                layer_outputs.append(decoded)
            else:
                values[item.attribute] = decoded
        if kv:
            values[KV] = _pack_layers(kv, self.kv_width)
        inputs = replace(self.inputs, **values, layer_outputs=tuple(layer_outputs))
        return replace(self, inputs=inputs, stored=(), rows={})


def _pack_layers(parts: list[tuple[tuple[int, ...], Tensor]], width: int) -> Tensor:
    """Pack the KV of layers with different widths into one tensor, [B, T, L, D].

    Args:
        parts: pairs (indices, KV). Each pair is for several layers of the same width: their indices
            on axis L, and their KV [B, T, n_layers, width of these layers].
        width: packed width D. The KV of narrower layers is padded with zeros. The width is 0 if all
            layers have the same width.
    """
    first = parts[0][1]
    if len(parts) == 1 and first.shape[3] >= width:
        return first
    n_layers = sum(len(positions) for positions, _ in parts)
    packed = first.new_zeros(*first.shape[:2], n_layers, width)
    for positions, layers in parts:
        for position, layer in zip(positions, layers.unbind(2), strict=True):
            packed[:, :, position, : layer.shape[2]] = layer
    return packed


def start_copy(batch: Batch, stream: torch.cuda.Stream) -> Batch:
    """Start copying a batch from pinned memory to a device, on a separate stream.

    Call :func:`await_copy` before using the copy.
    """
    # The caller may discard ``batch`` while the copy is running. PyTorch does not reuse pinned
    # memory before all copies from it are done.
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

    def keep(tensor: Tensor) -> None:
        # The tensor was allocated on the copy stream. Without this call, the allocator could reuse
        # the memory of the tensor before the work that is queued on the current stream has read the
        # tensor.
        tensor.record_stream(stream)

    apply_to_collection(batch, Tensor, keep, allow_frozen=True)
    return replace(batch, copied=None)


class BatchReader:
    """Reads sequences of a store into right-padded batches for a training device."""

    def __init__(
        self, store: ActivationStore, config: TrainConfig, device: torch.device, n_ranks: int = 1
    ) -> None:
        self.store = store
        self.config = config
        # ``n_ranks`` processes on this machine share its cores. Each of them uses the same number
        # of cores.
        n_cores = usable_cores() // n_ranks
        self.n_threads = config.data.reader_threads or max(1, min(_MAX_THREADS, n_cores))
        # If training runs on the CPU, the reading thread also decodes. To any other device, the
        # values are copied while they are still encoded and thus smaller. The device decodes them.
        self._decodes = device.type == "cpu"
        # For a GPU, read into pinned memory, from which copies run at full speed. Use a separate
        # CUDA stream for the copies, so that they overlap with other work of the GPU.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fields = fields_read(store, config)
        self._layers = {item.name: item.layers for item in self._fields if item.layers is not None}
        self._token_bytes = token_bytes(store, config)

    def batch(
        self,
        sequences: np.ndarray,
        draws: Draws,
        response: Tensor | None = None,
        **facts: Any,
    ) -> Batch:
        """Read a micro-batch. On a CPU, decode it. For a CUDA device, start copying it there.

        Args:
            sequences: indices of the sequences.
            draws: random choices for the sequences, such as the lengths of their draft rounds.
            response: response masks of the sequences, bool [B, at least T]. If the argument is
                None, they are read from the store.
            facts: values of other attributes of the `Batch`.
        """
        lengths = self.store.lengths[sequences]
        names = [TOKENS] if response is not None else [TOKENS, _RESPONSE_MASK]
        arrays = self.store.read_batch(
            sequences,
            [*names, *(item.name for item in self._fields)],
            layers=self._layers,
            n_threads=self.n_threads,
            # Do not decode the fields here. ``Batch.decode`` decodes them on the device, which is
            # faster than the host.
            decoded=False,
            allocate=self._allocate,
        )
        rows = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tokens = rows.pop(TOKENS).long()
        if response is None:
            response = rows.pop(_RESPONSE_MASK).bool()
        inputs = TrainingInputs(
            tokens=tokens,
            response_mask=response[:, : tokens.shape[1]].contiguous(),
            kv=None,
            hidden=torch.empty(0),
        )
        batch = Batch(
            inputs,
            draws,
            n_tokens=int(lengths.sum()),
            stored=tuple(self._fields),
            rows=rows,
            lengths=tuple(lengths.tolist()),
            kv_width=int(self.store.manifest.target.get("kv_width", 0)),
            **facts,
        )
        if self._decodes:
            return batch.decode()
        return batch if self._copies is None else start_copy(batch, self._copies)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new NumPy array that shares the memory of a PyTorch tensor.

        For a CUDA device, the memory is pinned. NumPy itself cannot allocate pinned memory.
        """
        is_pinned = self._copies is not None
        return torch.empty(shape, dtype=getattr(torch, dtype.name), pin_memory=is_pinned).numpy()

    def response_masks(self, sequences: np.ndarray) -> Tensor:
        """Read the response masks of B sequences, and pad them with False to bool [B, T]."""
        masks = self.store.read_batch(sequences, _RESPONSE_MASK)[_RESPONSE_MASK]
        return torch.from_numpy(masks).bool()

    def n_bytes(self, sequences: np.ndarray) -> int:
        """Return the size in bytes of the decoded activations of these sequences, with padding."""
        return len(sequences) * self._token_bytes * int(self.store.lengths[sequences].max())
