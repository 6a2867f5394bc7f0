"""Run the target over a batch of sequences and copy the requested activations to the host.

Shapes: B sequences, T tokens of the longest sequence, L decoder layers, H_kv key/value heads, d
head dim, E width.

Sequences are padded on the right. Attention is causal, so no token of a sequence attends to the
padding, and no mask is needed. Values computed at padding positions are discarded.

A device copies asynchronously only to pinned memory. Pinned memory is slow to allocate and is never
returned to the system. Each batch in flight therefore uses a slot, a set of pinned buffers that is
reused by later batches::

    main thread    forward 4 | forward 5 | forward 6 |
    copy stream      copy 3  |   copy 4  |   copy 5  |      waits only for the forward
    writer thread    write 2 |   write 3 |   write 4 |      waits for the copy, releases the slot

A slot belongs to one batch until the writer has encoded the entire batch. If a slot were reused
earlier, the device would overwrite values that the writer is still reading.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import TargetError
from ...moa.nn.kv import cache_layers, new_cache, pack_kv
from ...moa.targets.facts import TargetFacts
from ...moa.targets.families import layer_outputs, text_model
from ...moa.targets.live import mark_moment, seconds_between
from ...storage.codecs.registry import StoreCodec
from ...storage.schema import StoredArray
from ..config import ActivationSpec


class HostSlots:
    """Pinned host memory for ``n_slots`` batches in flight, filled on a separate CUDA stream."""

    def __init__(self, device: torch.device, n_slots: int) -> None:
        self._device = device
        self.free = deque[HostSlot]()
        for _ in range(n_slots):
            self.free.append(HostSlot(self))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def allocate(self, n_bytes: int) -> Tensor:
        """Allocate pinned host memory, uint8 [n_bytes]."""
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], float]:
        """Queue copies, given as (source, target), behind all work queued on the device so far.

        Returns:
            A function that waits for the copies and returns their duration in seconds.
        """
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            began = mark_moment(self._device)
            for source, target in copies:
                target.copy_(source, non_blocking=True)
                # Without this call, the allocator could reuse the source's memory before the copy
                # is done.
                source.record_stream(self._stream)
            return partial(seconds_between, began, mark_moment(self._device))


class HostSlot:
    """Pinned memory for the copies of one batch at a time.

    ``wait`` waits for the copies and returns their duration in seconds.
    """

    def __init__(self, slots: HostSlots) -> None:
        self._slots = slots
        self._buffers: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.wait: Callable[[], float] = lambda: 0.0

    def reserve(self, source: Tensor) -> Tensor:
        """Reserve host memory for a copy of a tensor.

        Returns:
            An unfilled host tensor with the shape and dtype of the source.
        """
        index = len(self._copies)
        n_bytes = source.numel() * source.element_size()
        if index == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[index].numel() < n_bytes:
            # torch's allocator rounds pinned memory up to a power of two anyway. Ask for that size,
            # so that larger batches can use all of the buffer.
            self._buffers[index] = self._slots.allocate(1 << (n_bytes - 1).bit_length())
        target = self._buffers[index][:n_bytes].view(source.dtype).view(source.shape)
        self._copies.append((source, target))
        return target

    def start(self) -> None:
        """Start the copies of all tensors passed to :meth:`reserve`."""
        self.wait = self._slots.copy(self._copies)

    def release(self) -> None:
        """Free the slot for another batch. The values in the slot must not be read afterwards."""
        self.wait()  # A copy still in progress would overwrite values of the next batch.
        self._copies.clear()
        self._slots.free.append(self)


@dataclass(frozen=True)
class Capture:
    """Activations of one batch, on the target's device or, after :meth:`to_host`, on the host."""

    n_tokens: tuple[int, ...]  # Length of each sequence, without padding.
    # Token ids, int64 [B, T], on the device. Values beyond a sequence's length are arbitrary.
    tokens: Tensor
    # Maps each field to bool [B, L] for kv, or bool [B, 1] for hidden states: whether all values of
    # the sequence are finite.
    finite: dict[str, Tensor]
    # Maps each field that is not encoded to its values, [B, T, *token_shape]. kv is
    # [B, T, L, H_kv, 2, d] with keys after RoPE. hidden/last and hidden/layer_k are [B, T, E].
    fields: dict[str, Tensor]
    # Maps each encoded field to its stored arrays, and each stored array to the concatenated rows
    # of all sequences, [n_rows, *row_shape].
    codes: dict[str, dict[StoredArray, Tensor]] = field(default_factory=dict)
    # Maps each field of keys and values to the target's layers along the field's layer axis.
    layers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # Pinned memory that the values are copied to; None if they were not copied asynchronously.
    slot: HostSlot | None = None

    def encode(self, codec: StoreCodec, names: Sequence[str]) -> "Capture":
        """Encode fields with the store's codec, on the device. Lossless fields are not encoded.

        Args:
            codec: the codec of the store.
            names: names of the sequences, for error messages.
        """
        plain: dict[str, Tensor] = {}
        lossy_names: list[str] = []
        for name, activations in self.fields.items():
            if codec.fields[name].is_identity:
                plain[name] = activations
            else:
                lossy_names.append(name)
        codecs = codec.only(lossy_names)
        if not codecs.fields:
            return self
        self.check_finite(names)
        codes: dict[str, dict[StoredArray, Tensor]] = {}
        with torch.inference_mode():
            encoded: list[dict[str, dict[str, Any]]] = []
            for index, n_tokens in enumerate(self.n_tokens):
                values: dict[str, Tensor] = {}
                for name in codecs.fields:
                    values[name] = self.fields[name][index, :n_tokens]
                tokens = self.tokens[index, :n_tokens]
                encoded.append(codecs.encode(values, tokens, is_finite=True))
            for name, field_codec in codecs.fields.items():
                codes[name] = {}
                for array in field_codec.arrays:
                    rows_of_sequences = [rows[name][array.name] for rows in encoded]
                    codes[name][array] = _concatenate(rows_of_sequences)
        return replace(self, fields=plain, codes=codes)

    def to_host(self, slots: HostSlots | None = None) -> "Capture":
        """Copy the values to host memory.

        Args:
            slots: pinned memory for an asynchronous copy. The caller must call `wait` before it
                reads the values. None copies synchronously.

        Raises:
            IndexError: no slot is free.
        """
        if slots is None:
            return self._mapped(Tensor.cpu)
        slot = slots.free.popleft()
        copies = self._mapped(slot.reserve)
        slot.start()
        return replace(copies, slot=slot)

    def _mapped(self, move: Callable[[Tensor], Tensor]) -> "Capture":
        finite = _each_moved(self.finite, move)
        fields = _each_moved(self.fields, move)
        codes: dict[str, dict[StoredArray, Tensor]] = {}
        for name, rows_by_array in self.codes.items():
            codes[name] = _each_moved(rows_by_array, move)
        return replace(self, finite=finite, fields=fields, codes=codes)

    def wait(self) -> float:
        """Wait for the copies and return their duration in seconds."""
        return 0.0 if self.slot is None else self.slot.wait()

    def release(self) -> None:
        """Release the pinned memory. The values must not be read afterwards."""
        if self.slot is not None:
            self.slot.release()

    def check_finite(self, names: Sequence[str]) -> None:
        """Refuse NaN and infinity. The error names the first such sequence, field and layer."""
        for name, flags in self.finite.items():
            if not bool(flags.all()):
                index, layer = (~flags).nonzero()[0].tolist()
                where = (
                    f"{name} of layer {self.layers[name][layer]}" if name in self.layers else name
                )
                raise TargetError(
                    f"Sequence {names[index]}: {where} holds NaN or infinity, so the target "
                    "overflows in its data type. Choose bfloat16 or float32 for --dtype and "
                    "--compute-dtype; the range of float16 is smaller."
                )

    def rows(self, name: str, index: int) -> np.ndarray | dict[str, np.ndarray]:
        """Return the values of one field of one sequence, for ``PartWriter.write``.

        The values must be in host memory.

        Returns:
            For a field that is not encoded, its values, [n_tokens, *token_shape] in the storage
            dtype (uint16 for bfloat16). For an encoded field, a dict from stored array to its rows.
        """
        if name in self.fields:
            values = self.fields[name][index, : self.n_tokens[index]]
            return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
        rows_by_array = {}
        for array, rows in self.codes[name].items():
            start = sum(array.n_rows(n_tokens) for n_tokens in self.n_tokens[:index])
            rows_by_array[array.name] = rows[
                start : start + array.n_rows(self.n_tokens[index])
            ].numpy()
        return rows_by_array


def _each_moved(
    tensors: Mapping[Any, Tensor], move: Callable[[Tensor], Tensor]
) -> dict[Any, Tensor]:
    """Return a dict with the same keys, in which each tensor is replaced by ``move(tensor)``."""
    return {key: move(tensor) for key, tensor in tensors.items()}


def _concatenate(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along axis 0.

    torch has few kernels for uint16, so uint16 tensors are viewed as int16 for this.
    """
    if rows[0].dtype == torch.uint16:
        return torch.cat([part.view(torch.int16) for part in rows]).view(torch.uint16)
    return torch.cat(list(rows))


def capture(
    model: Any,
    sequences: Sequence[np.ndarray],
    spec: ActivationSpec,
    dtype: torch.dtype,
    uses_cache: bool | None = None,
) -> Capture:
    """Run the target over a batch and collect the requested activations.

    Up to rounding, the activations of a sequence do not depend on the rest of the batch.

    Args:
        model: transformers causal LM in evaluation mode; its LM head is not run.
        sequences: B arrays of token ids, int32 [n_tokens].
        spec: the activations to keep.
        dtype: dtype of the kept activations.
        uses_cache: whether the forward fills a KV cache even if keys and values are not kept. With
            a KV cache, torch may choose other attention kernels, which change the last bits.
    """
    input_ids, valid = padded_tokens(sequences, model.device)
    facts = TargetFacts.of_model(model)
    cache = None
    if spec.kv or uses_cache:
        cache = new_cache([shape is None for shape in facts.kv_shapes])
    fields: dict[str, Tensor] = {}
    with torch.inference_mode(), layer_outputs(model, spec.layers) as outputs:
        last = text_model(model)(
            input_ids=input_ids, past_key_values=cache, use_cache=cache is not None
        ).last_hidden_state
        if cache is not None and spec.kv:
            for group in facts.kv_groups:
                keys, values = cache_layers(cache, group.layers)
                # Keys and values of the L layers of the group, [B, T, L, D]. D is the number of key
                # and value elements of all heads together.
                packed = pack_kv(
                    [key.to(dtype) for key in keys], [value.to(dtype) for value in values]
                )
                is_equal = group.shape.key_width == group.shape.value_width
                heads = (group.shape.n_heads, 2, -1) if is_equal else (group.shape.n_heads, -1)
                # Split the heads: [B, T, L, H_kv, 2, d], with 2 for key and value. If key and value
                # have different widths, they stay side by side on one axis: [B, T, L, H_kv, d_key +
                # d_value].
                fields[group.field] = packed.unflatten(-1, heads)
        if spec.last:
            fields["hidden/last"] = last.to(dtype)
        for layer in spec.layers:
            fields[f"hidden/layer_{layer}"] = outputs[layer].to(dtype)
        finite = finite_rows(fields, valid)
    layers = {group.field: group.layers for group in facts.kv_groups}
    return Capture(tuple(map(len, sequences)), input_ids, finite, fields, layers=layers)


def padded_tokens(sequences: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Stack B sequences of token ids, padded on the right with copies of their last token.

    The padding is not a pad token, because transformers warns if it finds pad tokens.

    Returns:
        Token ids, int64 [B, T], and a mask that is false at the padding, bool [B, T].
    """
    lengths = np.array([len(tokens) for tokens in sequences])
    width = lengths.max()
    padded = [np.pad(tokens, (0, width - len(tokens)), mode="edge") for tokens in sequences]
    valid = np.arange(width) < lengths[:, None]
    ids = torch.from_numpy(np.stack(padded).astype(np.int64))
    return ids.to(device), torch.from_numpy(valid).to(device)


def finite_rows(fields: Mapping[str, Tensor], valid: Tensor) -> dict[str, Tensor]:
    """Check whether all values at the valid tokens of each sequence are finite.

    Args:
        fields: maps each field to its values, [B, T, E], or [B, T, L, ...] with a layer axis.
        valid: bool [B, T], false at the padding.

    Returns:
        A dict from field to bool [B, L], or [B, 1] without a layer axis.
    """
    finite: dict[str, Tensor] = {}
    for name, values in fields.items():
        n_layers = values.shape[2] if values.dim() > 3 else 1
        # `x * 0` is NaN for each x that is not finite and 0 otherwise, and a sum with a NaN is NaN.
        # This is cheap and needs no large bool array.
        # The probe has one sum per sequence, token and layer: [B, T, L].
        probe = (values * 0).flatten(2).unflatten(-1, (n_layers, -1)).sum(-1)
        finite[name] = (torch.isfinite(probe) | ~valid[..., None]).all(1)
    return finite
