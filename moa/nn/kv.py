"""Keys and values: their packed layout in stores and drafters, and the KV cache of decoding.

Shapes: B rows, T tokens, n positions, L layers, H_kv key/value heads, d head dim,
D = 2 * H_kv * d, S slots.

For each token and layer, the packed layout is ``[k_0 v_0 k_1 v_1 ...]`` over the KV heads, with
keys after RoPE (lines 117-119 of ``moa_spec/models/train/moa_spec.py`` in the MoA authors' code).
The field ``kv`` of an activation store, ``[T, L, H_kv, 2, d]``, has the same order of values. So
the last three axes of this field can be merged into the packed layout without a copy.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from ...errors import DrafterError
from .layers import KeysValues, Rotation, rotate
from .masks import DeviceLengths, added, are_alike, to_device


def pack_kv(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Pack the keys (after RoPE) and values of L layers, each [B, H_kv, T, d]: [B, T, L, D]."""
    # One tensor [B, H_kv, T, 2d] per layer, with each head's key next to its value.
    per_layer = [torch.cat((k, v), dim=-1) for k, v in zip(keys, values, strict=True)]
    stacked = torch.stack(per_layer, dim=1)  # Shape: [B, L, H_kv, T, 2d].
    return stacked.permute(0, 3, 1, 2, 4).flatten(3)  # The result is [B, T, L, D].


def unpack_kv(packed: Tensor, n_kv_heads: int) -> KeysValues:
    """Split the packed KV [B, T, D] of one layer into keys and values.

    Returns:
        Views of the keys and of the values, each [B, H_kv, T, d].
    """
    # Shape [2, B, H_kv, T, d]; index 0 of the first axis has the keys, index 1 the values.
    per_head = packed.unflatten(-1, (n_kv_heads, 2, -1)).permute(3, 0, 2, 1, 4)
    return per_head[0], per_head[1]


def rotate_packed_keys(packed: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the keys of packed KV [n, L, D]. The values stay unchanged.

    ``rotation`` is cos and signed sin, each [n, d]. If ``rotation`` is the inverse of RoPE, the
    result contains the keys before RoPE.
    """
    cos, sin = rotation
    # Keys and values are [n, L, H_kv, d] each.
    keys, values = packed.unflatten(-1, (-1, 2, cos.shape[-1])).unbind(-2)
    rotated = rotate(keys.permute(1, 2, 0, 3), (cos[None], sin[None])).permute(2, 0, 1, 3)
    return torch.stack((rotated, values), dim=-2).flatten(-3)


def new_cache(has_state: Sequence[bool] = ()) -> Cache:
    """Make an empty transformers cache that keeps all positions.

    Args:
        has_state: One bool per layer, true if the layer has a recurrent state instead of keys and
            values. Empty if all layers have keys and values.
    """
    # Do not build the cache from the model's config, because that cache would drop keys outside a
    # sliding window. Drafters need the keys of all positions.
    if any(has_state):
        layers: list[Any] = []
        for is_recurrent in has_state:
            layers.append(LinearAttentionLayer() if is_recurrent else DynamicLayer())
        return Cache(layers=layers)
    return DynamicCache()


def cache_layers(
    cache: Cache, chosen: Sequence[int] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """List the keys and the values of layers of a transformers cache, without copying them.

    Each tensor is [B, H_kv, T, d]. ``chosen`` are the indices of the layers. By default, all layers
    are listed.
    """
    every: list[Any] = list(cache.layers)
    layers = every if chosen is None else [every[layer] for layer in chosen]
    return [layer.keys for layer in layers], [layer.values for layer in layers]


class KVBuffer:
    """A KV cache of L layers and B rows. The rows can have different ``lengths``.

    All keys and values are in one tensor. A slot is the memory for the key and value of one token.
    Slot i of a row holds the token at position i. If there are too few slots, their number is
    doubled. The slots at or beyond a row's length hold undefined values, and later tokens overwrite
    them. So rejected drafts are dropped by reducing the length, without copying any memory.
    """

    def __init__(self, n_rows: int = 1, n_slots: int = 256, n_layers: int = 1) -> None:
        self.lengths = [0] * n_rows
        self._n_layers = n_layers
        self._initial_slots = n_slots
        # [2, L, B, H_kv, S, d]: all keys, then all values.
        self._buffer: Tensor | None = None
        # Views of the buffer, [B, H_kv, S, d] per layer. They are made only once, because each
        # tensor operation adds to the time of a draft step.
        self._layers: list[KeysValues] = []

    @property
    def buffer(self) -> Tensor:
        """The tensor of all keys and values, [2, L, B, H_kv, S, d]."""
        if self._buffer is None:
            raise DrafterError("the cache is empty. Extend it before attending to it.")
        return self._buffer

    @property
    def capacity(self) -> int:
        """S, the number of allocated slots per row. A slot holds the key and value of one token."""
        return 0 if self._buffer is None else self._buffer.shape[4]

    def append(
        self, keys: Tensor, values: Tensor, counts: Sequence[int] | None = None
    ) -> KeysValues:
        """Append keys and values to each row of a cache with a single layer.

        Args:
            keys: [B, H_kv, n, d].
            values: [B, H_kv, n, d].
            counts: For each row, the number of its n tokens that are not padding. If None, no token
                is padding.

        Returns:
            All keys and values, [B, H_kv, max(lengths), d].
        """
        n_tokens = keys.shape[2]
        self.reserve(max(self.lengths) + n_tokens, keys)
        write_slots(self._layers[0], keys, values, slots_after(self.lengths, n_tokens, keys.device))
        self.lengths = added(self.lengths, counts or n_tokens)
        return self.layer_view(0, max(self.lengths))

    def layer_view(self, layer: int, n_slots: int) -> KeysValues:
        """View the keys and values [B, H_kv, n_slots, d] of a layer.

        The view shares its memory with the cache. The caller may write to slots at or beyond a
        row's length, because later tokens overwrite them.
        """
        if n_slots > self.capacity or self._buffer is None:
            self.reserve(n_slots, self.buffer[0, 0])
        keys, values = self._layers[layer]
        return keys[:, :, :n_slots], values[:, :, :n_slots]

    @torch.inference_mode()
    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep some of the new tokens in each row, and drop the others.

        New tokens are in the slots after the row's length. The tokens to keep are moved to the
        first of these slots, and the length grows by their number.

        Args:
            kept: For each row, the ascending indices of the new tokens to keep. The first new token
                has the index 0.
        """
        for row, indices in enumerate(kept):
            start = self.lengths[row]
            if list(indices) != list(range(len(indices))):
                row_buffer = self.buffer[:, :, row]  # The row's KV, [2, L, H_kv, S, d].
                source = to_device([start + index for index in indices], row_buffer.device)
                row_buffer[:, :, :, start : start + len(indices)] = row_buffer[:, :, :, source]
            self.lengths[row] = start + len(indices)

    def crop(self, lengths: Sequence[int]) -> None:
        """Shorten each row to the given length, unless the row is shorter."""
        self.lengths = (
            lengths if isinstance(lengths, DeviceLengths) else [*map(min, self.lengths, lengths)]
        )

    @torch.inference_mode()
    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n consecutive positions of each row as :func:`pack_kv` does: [B, n, L, D].

        The first of the n positions of a row is ``starts[row]``. Layers before ``first_layer`` are
        left out.
        """
        return self._positions(starts, n_tokens, slice(first_layer, None)).flatten(3)

    def _positions(self, starts: Sequence[int], n_tokens: int, layers: slice) -> Tensor:
        """Take the KV of n positions of each row in some layers: [B, n, L, H_kv, 2, d]."""
        # If some of the positions are beyond a row's length, their values are undefined, and the
        # caller drops them.
        if max(starts) + n_tokens > self.capacity:
            self.reserve(max(starts) + n_tokens, self.buffer[0, 0])
        buffer = self.buffer[:, layers]
        if are_alike(starts):
            # [2, L, B, H_kv, n, d], the keys and values of the n positions.
            part = buffer[:, :, :, :, starts[0] : starts[0] + n_tokens]
            return part.permute(2, 4, 1, 3, 0, 5)
        slots = positions_from(starts, n_tokens, buffer.device)
        rows = torch.arange(len(starts), device=buffer.device)[:, None]
        # [B, n, 2, L, H_kv, d]: PyTorch puts the indexed axes first.
        picked = buffer[:, :, rows, :, slots]
        return picked.permute(0, 1, 3, 4, 2, 5)

    def take_rows(self, rows: Sequence[int]) -> Self:
        """Copy the given rows, in the given order, to a new cache."""
        taken = copy.copy(self)
        taken.lengths = [self.lengths[row] for row in rows]
        if self._buffer is not None:
            taken._set_buffer(self._buffer.index_select(2, to_device(rows, self._buffer.device)))
        return taken

    def add_rows(self, other: "KVBuffer") -> None:
        """Append the rows of another cache.

        Both caches must have the same number of heads and the same head dim. The other cache must
        not be used afterwards.
        """
        full = other._buffer if self._buffer is None else self._buffer
        if full is not None:
            n_slots = max(self.capacity, other.capacity)
            self.resize(n_slots, full[0, 0])
            other.resize(n_slots, full[0, 0])
            self._set_buffer(torch.cat((self.buffer, other.buffer), dim=2))
        self.lengths = self.lengths + other.lengths

    def reserve(self, n_slots: int, like: Tensor) -> None:
        """Double the number of slots until there are at least ``n_slots``.

        Args:
            n_slots: Number of slots needed.
            like: A tensor [B, H_kv, n, d]. A new buffer gets the dtype, the device, the number of
                heads and the head dim of this tensor.
        """
        if self._buffer is not None and n_slots <= self._buffer.shape[4]:
            return
        capacity = self._initial_slots
        while capacity < n_slots:
            capacity *= 2
        self.resize(capacity, like)

    def resize(self, n_slots: int, like: Tensor, into: Tensor | None = None) -> None:
        """Move to a new buffer of ``n_slots`` slots, or to the buffer ``into``.

        New slots are filled with zeros. Attention reads these slots under a mask, but even a masked
        NaN would make the result of attention NaN.
        """
        shape = (2, self._n_layers, len(self.lengths), like.shape[1], n_slots, like.shape[3])
        grown = self._allocate(shape, like) if into is None else into
        if self._buffer is not None:
            grown[:, :, :, :, : self._buffer.shape[4]] = self._buffer[:, :, :, :, :n_slots]
        self._set_buffer(grown)

    # CUDA graphs need a buffer whose address does not change. Subclasses with such a buffer
    # override the next two methods.

    def _allocate(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_zeros(shape)

    def _set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._layers = list(zip(buffer[0].unbind(), buffer[1].unbind(), strict=True))


def slots_after(lengths: Sequence[int], n_tokens: int, device: torch.device) -> int | Tensor:
    """Return the slots of n new tokens in each row. These slots follow the row's last token.

    Returns:
        The first slot if all rows have the same length, otherwise the slots of all tokens, [B, n]
        int64.
    """
    return lengths[0] if are_alike(lengths) else positions_from(lengths, n_tokens, device)


def write_slots(view: KeysValues, keys: Tensor, values: Tensor, slots: int | Tensor) -> None:
    """Write keys and values [B, H_kv, n, d] of new tokens into the cache of one layer.

    ``view`` is the cache of the layer: the keys and values of all slots, each [B, H_kv, S, d].
    ``slots`` is either an int or a tensor, as :func:`slots_after` returns it. An int is the first
    of n consecutive slots in all rows. A tensor [B, n] int64 has the slots of each row.
    """
    all_keys, all_values = view
    if isinstance(slots, int):
        stop = slots + keys.shape[2]
        all_keys[:, :, slots:stop] = keys
        all_values[:, :, slots:stop] = values
        return
    rows = torch.arange(len(slots), device=keys.device)[:, None]
    all_keys[rows, :, slots] = keys.transpose(1, 2).to(all_keys.dtype)
    all_values[rows, :, slots] = values.transpose(1, 2).to(all_keys.dtype)


def positions_from(starts: Sequence[int], n_tokens: int, device: torch.device) -> Tensor:
    """List the positions of n consecutive tokens of each row. Each row has its own first position.

    Returns:
        [B, n] int64, or [1, n] if all rows have the same start.
    """
    starts = starts[:1] if are_alike(starts) else starts
    return to_device(starts, device)[:, None] + torch.arange(n_tokens, device=device)
