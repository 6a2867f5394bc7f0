"""Growing keys and values of one drafter block while decoding.

Shapes: B rows, H_kv key/value heads, d head dim, n new tokens, S slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import DrafterError


class KVBuffer:
    """Keys and values of B rows of different lengths; appending costs nothing proportional to the length.

    Args:
        n_rows: B.
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
        """All keys and values, each [B, H_kv, max(lengths), d]."""
        if self._buffer is None:
            raise DrafterError("the drafter's cache is empty: extend it before attending to it.")
        n_slots = max(self.lengths)
        return self._buffer[0, :, :, :n_slots], self._buffer[1, :, :, :n_slots]

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget what lies at or beyond each of the given positions."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        if self._buffer is not None:
            self._buffer = self._buffer[:, list(rows)]

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
    """Positions of n tokens behind each row's start: [B, n], or [1, n] where all rows start alike."""
    starts = starts[:1] if len(set(starts)) == 1 else starts
    return torch.tensor(starts, device=device)[:, None] + torch.arange(n_tokens, device=device)
