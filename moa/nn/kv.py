"""Packed KV tensors, made from a transformers cache too, and a growing KV buffer.

Shapes: B batch, T tokens, n positions, L target layers, H_kv key/value heads, d head dim, D = 2 * H_kv * d,
S slots.
The packed layout is, per token and layer, ``[k_0 v_0 k_1 v_1 ...]`` over the KV heads, keys after RoPE (official
``moa_spec/models/train/moa_spec.py``, lines 117-119). The activation store's ``kv`` field ``[T, L, H_kv, 2, d]`` is the
same layout before the last three axes are merged, so packing it is a view.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from ...errors import DrafterError
from .layers import Rotation, rotate


def pack_kv(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Pack the KV of all layers for the drafter.

    Args:
        keys: L tensors [B, H_kv, T, d], after RoPE.
        values: L tensors [B, H_kv, T, d].

    Returns:
        [B, T, L, D], the input's dtype.
    """
    per_layer = [torch.cat((k, v), dim=-1) for k, v in zip(keys, values, strict=True)]  # [B, H_kv, T, 2d]
    stacked = torch.stack(per_layer, dim=1)  # [B, L, H_kv, T, 2d]
    return stacked.permute(0, 3, 1, 2, 4).flatten(3)  # [B, T, L, D]


def unpack_kv(packed: Tensor, n_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Undo :func:`pack_kv` for one layer.

    Args:
        packed: [B, T, D].

    Returns:
        Keys and values, each [B, H_kv, T, d] (views).
    """
    per_head = packed.unflatten(-1, (n_kv_heads, 2, -1)).permute(3, 0, 2, 1, 4)  # [2, B, H_kv, T, d]
    return per_head[0], per_head[1]


def rotate_packed_keys(packed: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the keys of packed KV and leave the values; with the inverse rotation the keys are those before RoPE.

    Args:
        packed: [n, L, D], of n positions.
        rotation: cos and signed sin of these positions, each [n, d].

    Returns:
        [n, L, D], the input's dtype.
    """
    cos, sin = rotation
    keys, values = packed.unflatten(-1, (-1, 2, cos.shape[-1])).unbind(-2)  # [n, L, H_kv, d]
    rotated = rotate(keys.permute(1, 2, 0, 3), (cos[None], sin[None])).permute(2, 0, 1, 3)
    return torch.stack((rotated, values), dim=-2).flatten(-3)


def new_cache() -> DynamicCache:
    """Make an empty target cache that keeps every position, also for sliding-window layers.

    A cache built from the model's config drops keys outside the window, and a drafter needs all of them.
    """
    return DynamicCache()


def cache_layers(cache: DynamicCache) -> tuple[list[Tensor], list[Tensor]]:
    """List keys and values of every layer, each [B, H_kv, T, d], keys after RoPE, without a copy."""
    layers: list[Any] = list(cache.layers)
    return [layer.keys for layer in layers], [layer.values for layer in layers]


def cache_kv(cache: DynamicCache, start: int, stop: int) -> Tensor:
    """Pack the KV of the positions start..stop-1: [B, stop - start, L, D]."""
    keys, values = cache_layers(cache)
    return pack_kv([k[:, :, start:stop] for k in keys], [v[:, :, start:stop] for v in values])


class KVBuffer:
    """Keys and values of B rows of different lengths; appending costs nothing proportional to the length.

    Args:
        initial_capacity: slots allocated at first; grows by doubling.

    Attributes:
        lengths: tokens of each row.
    """

    def __init__(self, n_rows: int = 1, initial_capacity: int = 256) -> None:
        self.lengths = [0] * n_rows
        self._capacity = initial_capacity
        self._buffer: Tensor | None = None  # [2, B, H_kv, capacity, d]

    def append(self, keys: Tensor, values: Tensor, counts: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Add keys and values behind each row.

        Args:
            keys: [B, H_kv, n, d].
            values: [B, H_kv, n, d].
            counts: how many of the n tokens of each row are real; None for all.

        Returns:
            Views of all slots, each [B, H_kv, S, d] with S = max(lengths); slots beyond a row's length hold anything.
        """
        n_tokens = keys.shape[2]
        self._reserve(max(self.lengths) + n_tokens, keys)
        assert self._buffer is not None
        if len(set(self.lengths)) == 1:
            start = self.lengths[0]
            self._buffer[0, :, :, start : start + n_tokens] = keys
            self._buffer[1, :, :, start : start + n_tokens] = values
        else:
            starts = torch.tensor(self.lengths, device=keys.device)
            slots = starts[:, None] + torch.arange(n_tokens, device=keys.device)  # [B, n]
            rows = torch.arange(len(self.lengths), device=keys.device)[:, None]
            self._buffer[0][rows, :, slots] = keys.transpose(1, 2)
            self._buffer[1][rows, :, slots] = values.transpose(1, 2)
        counts = counts or [n_tokens] * len(self.lengths)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return self.view()

    def view(self) -> tuple[Tensor, Tensor]:
        """View all keys and values, each [B, H_kv, max(lengths), d]."""
        if self._buffer is None:
            raise DrafterError("the drafter's cache is empty: extend it before attending to it.")
        n_slots = max(self.lengths)
        return self._buffer[0, :, :, :n_slots], self._buffer[1, :, :, :n_slots]

    def row_slots(self, row: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """View the first n slots of a row, each [1, H_kv, n, d]; those behind its length may be written to."""
        if self._buffer is None:
            raise DrafterError("the drafter's cache is empty: extend it before attending to it.")
        self._reserve(n_slots, self._buffer[0])
        return self._buffer[0, row : row + 1, :, :n_slots], self._buffer[1, row : row + 1, :, :n_slots]

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget what lies at or beyond each of the given positions."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        if self._buffer is not None:
            self._buffer = self._buffer[:, list(rows)]

    def take_rows(self, rows: Sequence[int]) -> "KVBuffer":
        """Copy these rows, in this order, to a buffer of their own."""
        taken = KVBuffer(0, self._capacity)
        taken.lengths = [self.lengths[row] for row in rows]
        if self._buffer is not None:
            taken._buffer = self._buffer[:, list(rows)]  # indexing copies
        return taken

    def add_rows(self, other: "KVBuffer") -> None:
        """Append the rows of another buffer of the same heads behind its own."""
        # A side without keys yet has no tensor; it gets one of the other's form.
        for empty, full in ((self, other), (other, self)):
            if empty._buffer is None and full._buffer is not None:
                heads, _, head_dim = full._buffer.shape[2:]
                empty._buffer = full._buffer.new_zeros(2, len(empty.lengths), heads, empty._capacity, head_dim)
        if self._buffer is not None and other._buffer is not None:
            self._reserve(other._capacity, self._buffer[0])
            behind = F.pad(other._buffer, (0, 0, 0, self._capacity - other._capacity))
            self._buffer = torch.cat((self._buffer, behind), dim=1)
        else:
            self._capacity = max(self._capacity, other._capacity)
        self.lengths = self.lengths + other.lengths

    def _reserve(self, n_slots: int, like: Tensor) -> None:
        """Grow by doubling. New slots are zero: a masked slot must not hold NaN."""
        if self._buffer is not None and n_slots <= self._capacity:
            return
        while self._capacity < n_slots:
            self._capacity *= 2
        batch, heads, _, head_dim = like.shape
        grown = like.new_zeros(2, batch, heads, self._capacity, head_dim)
        if self._buffer is not None:
            grown[:, :, :, : self._buffer.shape[3]] = self._buffer
        self._buffer = grown


def positions_behind(starts: Sequence[int], n_tokens: int, device: torch.device) -> Tensor:
    """List the positions of n tokens from each row's start: [B, n] int64, or [1, n] where all rows start alike."""
    starts = starts[:1] if len(set(starts)) == 1 else starts
    return torch.tensor(starts, device=device)[:, None] + torch.arange(n_tokens, device=device)
