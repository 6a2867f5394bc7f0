"""Attention masks as pure functions: rules over indices for training (:class:`Mask`), tensors for decoding.

Shapes: B batch, T tokens, Q query rows, S keys or cache slots, P pending tokens. Masks are bool, True = may attend.
``queries`` are positions and ``last_context_of_query`` is s(i) of each (below), both [B, Q] int64; ``n_keys`` is T.

A *drafted* position has no target KV when the drafter reaches it; all others are *context*. With step bound e, every
e-th position of a response becomes context again, as after a verification. For e = 4 and a response from position 3
on::

    position       0 1 2 3 4 5 6 7 8        s(i) = last context position <= i
    drafted        . . . x . x x x .        (offset 0: 4 and 8 are context)
    s(i)           0 1 2 2 4 4 4 4 8

    cross-attention of 6: keys 0..4         self-attention of 6: keys 0..6, or 5..6 in a staircase row
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class Chunk(int):
    """A window that begins at each multiple of so many tokens, in place of so many before each token."""


def to_device(
    values: Sequence[Any] | NDArray[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy numbers of the host, such as lengths, to a device without waiting for it."""
    if isinstance(values, DeviceLengths):
        return values.real
    made = torch.tensor(values, dtype=dtype)
    # A copy from memory that is not pinned would wait until the device has done all that it was
    # asked for before.
    return (
        made.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else made.to(device)
    )


class DeviceLengths(list[int]):
    """Lengths of B rows that only the device knows; as a list, for shapes, what none of them is above."""

    def __init__(self, most: int, real: Tensor) -> None:
        super().__init__([most] * len(real))
        self.real = real  # [B] int64


def added(lengths: Sequence[int], more: Sequence[int] | int, sign: int = 1) -> list[int]:
    """Add to the lengths of rows, or subtract with -1, those of others or a number."""
    if isinstance(lengths, DeviceLengths):
        most, real = (
            (more, more)
            if isinstance(more, int)
            else (more[0], to_device(more, lengths.real.device))
        )
        return DeviceLengths(lengths[0] + sign * most, lengths.real + sign * real)
    every = [more] * len(lengths) if isinstance(more, int) else more
    return [length + sign * other for length, other in zip(lengths, every, strict=True)]


def are_alike(lengths: Sequence[int]) -> bool:
    """Whether the host knows that all lengths are the same."""
    return not isinstance(lengths, DeviceLengths) and len(set(lengths)) == 1


def drafted_positions(
    response_mask: Tensor, step_bound: Tensor | None, offset: Tensor | None = None
) -> Tensor:
    """Find the positions that the drafter reaches without target KV (official ``train/moa_spec.py``, lines 123-131).

    Args:
        response_mask: [B, T], non-zero on response tokens.
        step_bound: [B] integer e; positions with (i - offset) % e == 0 are context. None: no bound.
        offset: [B] integer; zeros where None.
    """
    drafted = response_mask.bool()
    if step_bound is None:
        return drafted
    index = torch.arange(drafted.shape[1], device=drafted.device)[None, :]
    if offset is not None:
        index = index - offset[:, None]
    return drafted & (index % step_bound[:, None] != 0)


def last_context(drafted: Tensor) -> Tensor:
    """Find s(i) [B, T] int64, the last context position at or before i, 0 where there is none (lines 157-162)."""
    index = torch.arange(drafted.shape[1], device=drafted.device).expand_as(drafted)
    return torch.where(drafted, 0, index).cummax(dim=1).values


@dataclass
class Mask:
    """Rule of what each query sees: indices of a row, a query and a key, which broadcast -> bool.

    One rule serves the dense mask and kernels that evaluate it block by block; each part counts its keys from 0.
    """

    n_rows: int
    n_queries: int
    # number of keys and rule of each
    parts: tuple[tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]], ...]
    device: torch.device
    block_mask: Any = None  # the mask in FlexAttention's form, once it is needed

    @classmethod
    def up_to(cls, last_seen: Tensor, n_keys: int) -> "Mask":
        """Let each query see the keys up to its ``last_seen``, [B or 1, Q] int64, such as s(i) (official line 210)."""
        n_rows, n_queries = last_seen.shape

        def rule(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return key <= last_seen[row, query]

        return cls(n_rows, n_queries, ((n_keys, rule),), last_seen.device)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, queries and keys."""
        return self.n_rows, self.n_queries, sum(n_keys for n_keys, _ in self.parts)

    def sees(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query sees a key; keys are counted over all parts."""
        (n_keys, rule), *others = self.parts
        seen = rule(row, query, key.clamp(max=n_keys - 1)) & (key < n_keys)
        for n_more, rule in others:
            inside = (key >= n_keys) & (key < n_keys + n_more)
            seen = seen | (inside & rule(row, query, (key - n_keys).clamp(0, n_more - 1)))
            n_keys += n_more
        return seen

    @cached_property
    def dense(self) -> Tensor:
        """The mask as a tensor, [B or 1, Q, S] bool."""
        row = torch.arange(self.n_rows, device=self.device)[:, None, None]
        query = torch.arange(self.n_queries, device=self.device)[:, None]
        parts = [
            rule(row, query, torch.arange(n_keys, device=self.device))
            for n_keys, rule in self.parts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def self_attention_mask(
    queries: Tensor, last_context_of_query: Tensor, staircase: Tensor, n_keys: int
) -> Mask:
    """Mask self-attention: causal; queries with ``staircase`` see only the drafted block and themselves (169-193)."""
    staircase = staircase.expand_as(queries)

    def rule(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = queries[row, query]
        block = (key > last_context_of_query[row, query]) | (key == position)
        return (key <= position) & (block | ~staircase[row, query])

    n_rows, n_queries = queries.shape
    return Mask(n_rows, n_queries, ((n_keys, rule),), queries.device)


def round_mask(
    queries: Tensor,
    last_context_of_query: Tensor,
    pass_index: Tensor | None,
    n_keys: int,
    window: int | None = None,
) -> Mask:
    """Let drafted queries see verified positions, T keys, and after these the queries of their round up to themselves.

    Args:
        pass_index: [Q] int64, queries of different passes share no rounds; None where there is one pass.
        window: positions that a sliding-window layer looks back, itself included; None for no bound.
    """
    context = last_context_of_query

    def verified(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # A context query is its own drafted key too, so it must not see its verified position a
        # second time.
        position = queries[row, query]
        seen = (key <= context[row, query]) & (key != position)
        return seen if window is None else seen & _reaches(position, key, window)

    def drafted(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = queries[row, query]
        other = queries[row, key]
        seen = (
            (context[row, query] == context[row, key])
            & (other <= position)
            & (other > context[row, key])
        )
        if pass_index is not None:
            seen = seen & (pass_index[query] == pass_index[key])
        # padding too, so that no row is empty: its softmax would be NaN
        seen = seen | (query == key)
        return seen if window is None else seen & _reaches(position, other, window)

    n_rows, n_queries = queries.shape
    return Mask(n_rows, n_queries, ((n_keys, verified), (n_queries, drafted)), queries.device)


def staircase_drop_probability(progress: float) -> float:
    """The probability that a row is NOT a staircase row: linear from 0 to 1 at ``progress`` 0.5 (official 137-140)."""
    return min(1.0, 2.0 * progress)


def tree_mask(lengths: Sequence[int], seen: Tensor, window: int | None = None) -> Tensor:
    """Let the pending tokens of a decoding call see a row's committed slots and, after these, their ancestors.

    Args:
        lengths: committed slots of each of B rows.
        seen: [B, Q, P] bool, which pending tokens the last Q of P pending tokens see, themselves included.
        window: as for :func:`round_mask`.

    Returns:
        [B, Q, max(lengths) + P] bool.
    """
    n_pending = seen.shape[2]
    device = seen.device
    n_slots = max(lengths) + n_pending
    if not are_alike(lengths):
        return tree_mask_after(to_device(lengths, device)[:, None], seen, n_slots, window)
    committed = torch.ones(*seen.shape[:2], lengths[0], dtype=torch.bool, device=device)
    return _within(window, torch.cat((committed, seen), dim=2))


def tree_mask_after(
    lengths: Tensor, seen: Tensor, n_slots: int, window: int | None = None
) -> Tensor:
    """Compute :func:`tree_mask` for so many slots, by tensors alone, after lengths [B, 1] int64: [B, Q, S] bool."""
    n_pending = seen.shape[2]
    index = torch.arange(n_slots, device=seen.device) - lengths  # [B, S]
    inside = (index >= 0) & (index < n_pending)
    pending = index.clamp(0, n_pending - 1)[:, None, :].expand(-1, seen.shape[1], -1)
    return _within(window, (index < 0)[:, None, :] | (inside[:, None, :] & seen.gather(2, pending)))


def _within(window: int | None, mask: Tensor) -> Tensor:
    if window is None:
        return mask
    # The position of a token is the number of tokens that it sees, less itself.
    return mask & _reaches(mask.sum(dim=2, keepdim=True) - 1, mask.cumsum(dim=2) - 1, window)


def causal_mask(positions: Tensor, n_slots: int, window: int | None = None) -> Tensor:
    """Mask a run of tokens at positions [B, Q] in a cache whose slot i holds the token at position i: [B, Q, S]."""
    slots = torch.arange(n_slots, device=positions.device)
    seen = positions[..., None] >= slots
    return seen if window is None else seen & _reaches(positions[..., None], slots, window)


def _reaches(query: Tensor, key: Tensor, window: int) -> Tensor:
    return query // window == key // window if isinstance(window, Chunk) else query - key < window
