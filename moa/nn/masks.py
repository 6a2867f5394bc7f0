"""Attention masks. In training, masks are defined by rules. In decoding, masks are tensors.

During training, the positions of a sequence simulate draft rounds. A *drafted* position is treated
as if the target had not processed it yet, so the drafter must not see the target's KV of this
position. All other positions are *context*: they count as verified. With a step bound e, every e-th
position of a response is context, as if a verification ended there. For e = 4 and a response that
starts at position 3::

    position       0 1 2 3 4 5 6 7 8        s(i) = last context position <= i
    drafted        . . . x . x x x .        (offset 0: 4 and 8 are context)
    s(i)           0 1 2 2 4 4 4 4 8

    cross-attention of 6: keys 0..4
    self-attention of 6:  keys 0..6, or 5..6 in a staircase row

Some rows of a batch are *staircase rows*. In a staircase row, the self-attention of a drafted
position sees only the drafted positions of its own round.

In the functions, ``queries`` [B, Q] int64 are positions, ``last_context_of_query`` [B, Q] int64 has
s(i) for each query, and ``n_keys`` is T.

Shapes: B batch, T tokens, Q queries, S keys or cache slots, P pending tokens (the tokens that a
decoding call processes). Masks are bool; True means that a query may attend to a key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class Chunk(int):
    """The chunk size of chunked attention, in which a token sees only tokens of its own chunk.

    Chunks start at the multiples of this number. Functions with an argument ``window`` take either
    a Chunk or a plain int. A plain int is the size of a sliding window.
    """


def to_device(
    values: Sequence[Any] | NDArray[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy numbers from the host to a device without waiting for the device."""
    if isinstance(values, DeviceLengths):
        return values.real
    made = torch.tensor(values, dtype=dtype)
    # Pin the memory. A copy from memory that is not pinned would wait until the device has done all
    # queued work.
    return (
        made.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else made.to(device)
    )


class DeviceLengths(list[int]):
    """Lengths of B rows for CUDA graphs.

    This class is a list, but the numbers in the list are not the lengths. They are upper bounds of
    the lengths, and are used only to choose shapes. The lengths themselves are on the device, in
    the tensor :attr:`real`, from which a replay of a graph reads them.
    """

    def __init__(self, most: int, real: Tensor) -> None:
        super().__init__([most] * len(real))
        self.real = real  # [B] int64, the lengths on the device.


def added(lengths: Sequence[int], more: Sequence[int] | int, sign: int = 1) -> list[int]:
    """Compute ``lengths + sign * more`` for each row.

    ``more`` is one number for all rows, or a list with a number per row.
    """
    every = [more] * len(lengths) if isinstance(more, int) else more
    if isinstance(lengths, DeviceLengths):
        real = more if isinstance(more, int) else to_device(more, lengths.real.device)
        return DeviceLengths(lengths[0] + sign * every[0], lengths.real + sign * real)
    return [length + sign * other for length, other in zip(lengths, every, strict=True)]


def are_alike(lengths: Sequence[int]) -> bool:
    """Whether all lengths are the same. The result is false for :class:`DeviceLengths`."""
    return not isinstance(lengths, DeviceLengths) and len(set(lengths)) == 1


def positions_of(x: Tensor) -> Tensor:
    """List the positions 0 to T - 1 of the tokens of x [B, T, ...]: [T] int64."""
    return torch.arange(x.shape[1], device=x.device)


def drafted_positions(
    response_mask: Tensor, step_bound: Tensor | None, offset: Tensor | None = None
) -> Tensor:
    """Find the drafted positions of training sequences: [B, T] bool.

    All other positions are context. See lines 123-131 of ``train/moa_spec.py`` in the MoA authors'
    code.

    Args:
        response_mask: [B, T], non-zero on response tokens.
        step_bound: [B] integer, the step bound e of each row. A position i is context if
            ``(i - offset) % e == 0``. If None, all positions of responses are drafted.
        offset: [B] integer, the offset of each row. If None, all offsets are 0.
    """
    drafted = response_mask.bool()
    if step_bound is None:
        return drafted
    index = positions_of(drafted)[None, :]
    if offset is not None:
        index = index - offset[:, None]
    return drafted & (index % step_bound[:, None] != 0)


def last_context(drafted: Tensor) -> Tensor:
    """Find s(i), the last context position at or before i: [B, T] int64.

    The result is 0 if no such position exists (lines 157-162 of ``train/moa_spec.py`` in the MoA
    authors' code).
    """
    index = positions_of(drafted).expand_as(drafted)
    return torch.where(drafted, 0, index).cummax(dim=1).values


@dataclass
class Mask:
    """An attention mask, defined by rules that decide whether a query sees a key.

    A rule is a function of three index tensors: the row of the batch, the query and the key. The
    rule broadcasts these tensors, and returns a bool tensor, true where the query sees the key. The
    keys can be a concatenation of several parts, for example the target's keys and the drafter's
    keys. Each part then has its own rule, in which the first key of the part has the index 0.
    :attr:`dense` evaluates the rules for all scores at once. FlexAttention evaluates the rules in
    its kernels, block by block.
    """

    # [B or 1, Q]. Only the shape and the device of this tensor are used.
    queries: Tensor
    # One entry for each part of the keys: the number of keys in the part, and the part's rule.
    parts: tuple[tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]], ...]
    block_mask: Any = None  # FlexAttention's block mask. It is created when it is first needed.

    @classmethod
    def up_to(cls, last_seen: Tensor, n_keys: int) -> "Mask":
        """Make a mask in which each query sees all keys up to a given key.

        Args:
            last_seen: [B or 1, Q] int64, the last key that each query sees. For example, this is
                the query's last context position s(i).
            n_keys: Number of keys.
        """

        def rule(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return key <= last_seen[row, query]

        return cls(last_seen, ((n_keys, rule),))

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of rows, queries and keys."""
        n_rows, n_queries = self.queries.shape
        return n_rows, n_queries, sum(n_keys for n_keys, _ in self.parts)

    def sees(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether a query sees a key. ``key`` is an index into the keys of all parts."""
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
        device = self.queries.device
        row = torch.arange(len(self.queries), device=device)[:, None, None]
        query = positions_of(self.queries)[:, None]
        parts = [
            rule(row, query, torch.arange(n_keys, device=device)) for n_keys, rule in self.parts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


AnyMask = Mask | Tensor | None
"""A mask that says which keys each query may attend to. It is a :class:`Mask` of rules, or a bool
tensor [B or 1, Q, S]. It is None if each query may attend to all keys.
"""


def self_attention_mask(
    queries: Tensor, last_context_of_query: Tensor, staircase: Tensor, n_keys: int
) -> Mask:
    """Make the causal mask of self-attention.

    A query sees itself and all earlier positions. If ``staircase`` is true for a query, it sees
    only itself and the drafted positions of its own round. See lines 169-193 of
    ``train/moa_spec.py`` in the MoA authors' code.
    """
    staircase = staircase.expand_as(queries)

    def rule(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = queries[row, query]
        block = (key > last_context_of_query[row, query]) | (key == position)
        return (key <= position) & (block | ~staircase[row, query])

    return Mask(queries, ((n_keys, rule),))


def round_mask(
    queries: Tensor,
    last_context_of_query: Tensor,
    pass_index: Tensor | None,
    n_keys: int,
    window: int | None = None,
) -> Mask:
    """Make the mask of queries that see verified positions, and the drafts of their own round.

    The keys of the T positions come first, followed by the keys of the Q queries. A query sees the
    verified positions before its round, the earlier queries of its round, and itself.

    Args:
        queries: [B, Q] int64, position of each query.
        last_context_of_query: [B, Q] int64, last context position s(i) of each query.
        pass_index: [Q] int64, the index of the pass to which each query belongs. Training can make
            two passes over a batch, and queries of different passes do not see each other. If None,
            there is a single pass.
        n_keys: T, the number of keys of verified positions.
        window: Number of positions that a sliding-window layer sees, including the query's own
            position, or a :class:`Chunk`. None for no limit.
    """
    context = last_context_of_query

    def verified(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Each query sees its own position among the drafted keys. So a query at a context position
        # must not see the same position again among the verified keys.
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
        # Each query sees itself, even if it is padding. A softmax over no keys would be NaN.
        seen = seen | (query == key)
        return seen if window is None else seen & _reaches(position, other, window)

    return Mask(queries, ((n_keys, verified), (queries.shape[1], drafted)))


def staircase_drop_probability(progress: float) -> float:
    """Compute the probability that a row of a training batch is NOT a staircase row.

    ``progress`` is the finished share of the training, from 0 to 1. The probability grows linearly
    from 0, and reaches 1 in the middle of the training (lines 137-140 of ``train/moa_spec.py`` in
    the MoA authors' code).
    """
    return min(1.0, 2.0 * progress)


def tree_mask(lengths: Sequence[int], seen: Tensor, window: int | None = None) -> Tensor:
    """Make the mask of tokens that see the committed tokens of their row, and their ancestors.

    The pending tokens are the tokens that a decoding call processes: the root and the drafts. In
    the KV cache, the P pending tokens of a row follow its committed tokens.

    Args:
        lengths: Number of committed slots of each of the B rows.
        seen: [B, Q, P] bool, true if one of the last Q pending tokens sees one of the P pending
            tokens. A token sees itself and its ancestors.
        window: Number of positions that a sliding-window layer sees, including the token's own
            position, or a :class:`Chunk`. None for no limit.

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
    """Compute the mask of :func:`tree_mask` for lengths in a tensor: [B, Q, n_slots] bool.

    Args:
        lengths: [B, 1] int64, number of committed tokens of each row.
        seen: [B, Q, P] bool, true if a query sees a pending token, as in :func:`tree_mask`.
        n_slots: Number of slots of the KV cache that the mask covers.
        window: Size of a sliding window, or a :class:`Chunk`. If None, a token can see all
            positions before it.
    """
    n_pending = seen.shape[2]
    # [B, S]. For each slot, the index of its token among the pending tokens. The index of a
    # committed token is negative.
    index = torch.arange(n_slots, device=seen.device) - lengths
    inside = (index >= 0) & (index < n_pending)
    pending = index.clamp(0, n_pending - 1)[:, None, :].expand(-1, seen.shape[1], -1)
    return _within(window, (index < 0)[:, None, :] | (inside[:, None, :] & seen.gather(2, pending)))


def _within(window: int | None, mask: Tensor) -> Tensor:
    if window is None:
        return mask
    # Without a window, a token sees exactly its ancestors and itself. So the position of a token is
    # the number of tokens that it sees, minus one.
    return mask & _reaches(mask.sum(dim=2, keepdim=True) - 1, mask.cumsum(dim=2) - 1, window)


def causal_mask(positions: Tensor, n_slots: int, window: int | None = None) -> Tensor:
    """Make the causal mask [B, Q, n_slots] of tokens at positions [B, Q] in a KV cache.

    Slot i of the cache holds the token at position i.
    """
    slots = torch.arange(n_slots, device=positions.device)
    seen = positions[..., None] >= slots
    return seen if window is None else seen & _reaches(positions[..., None], slots, window)


def _reaches(query: Tensor, key: Tensor, window: int) -> Tensor:
    return query // window == key // window if isinstance(window, Chunk) else query - key < window
