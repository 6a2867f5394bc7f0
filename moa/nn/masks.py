"""Attention masks as pure functions: rules over indices for training, tensors for decoding.

A *drafted* position has no target KV when the drafter reaches it. All other positions are
*context*. With a step bound e, every e-th position of a response becomes context again, as it does
after a verification. For e = 4 and a response that starts at position 3::

    position       0 1 2 3 4 5 6 7 8        s(i) = last context position <= i
    drafted        . . . x . x x x .        (offset 0: 4 and 8 are context)
    s(i)           0 1 2 2 4 4 4 4 8

    cross-attention of 6: keys 0..4
    self-attention of 6:  keys 0..6, or 5..6 in a staircase row

The arguments ``queries`` are positions, ``last_context_of_query`` is s(i) of each query, both
[B, Q] int64, and ``n_keys`` is T.

Shapes: B batch, T tokens, Q query rows, S keys or cache slots, P pending tokens. Masks are bool;
True means that a query may attend to a key.
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

    Each multiple of this number starts a chunk. Elsewhere in this module, a window that is a plain
    int is a sliding window.
    """


def to_device(
    values: Sequence[Any] | NDArray[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy numbers of the host, such as lengths, to a device without synchronizing with it."""
    if isinstance(values, DeviceLengths):
        return values.real
    made = torch.tensor(values, dtype=dtype)
    # A copy from memory that is not pinned would wait for all work that was queued on the device
    # before.
    return (
        made.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else made.to(device)
    )


class DeviceLengths(list[int]):
    """Lengths of B rows that only the device knows, in ``real``.

    The values of the list are upper bounds, which are used for shapes only.
    """

    def __init__(self, most: int, real: Tensor) -> None:
        super().__init__([most] * len(real))
        self.real = real  # [B] int64


def added(lengths: Sequence[int], more: Sequence[int] | int, sign: int = 1) -> list[int]:
    """Compute ``lengths + sign * more`` for each row.

    ``more`` is one number for all rows, or a number per row.
    """
    if isinstance(lengths, DeviceLengths):
        upper_bound, real = (
            (more, more)
            if isinstance(more, int)
            else (more[0], to_device(more, lengths.real.device))
        )
        return DeviceLengths(lengths[0] + sign * upper_bound, lengths.real + sign * real)
    every = [more] * len(lengths) if isinstance(more, int) else more
    return [length + sign * other for length, other in zip(lengths, every, strict=True)]


def are_alike(lengths: Sequence[int]) -> bool:
    """Whether the host knows that all lengths are the same."""
    return not isinstance(lengths, DeviceLengths) and len(set(lengths)) == 1


def drafted_positions(
    response_mask: Tensor, step_bound: Tensor | None, offset: Tensor | None = None
) -> Tensor:
    """Find the drafted positions, see above: [B, T] bool.

    The official code is ``train/moa_spec.py``, lines 123-131.

    Args:
        response_mask: [B, T], non-zero on response tokens.
        step_bound: [B] integer e. Positions with (i - offset) % e == 0 are context. None for no
            bound.
        offset: [B] integer. None for zeros.
    """
    drafted = response_mask.bool()
    if step_bound is None:
        return drafted
    index = torch.arange(drafted.shape[1], device=drafted.device)[None, :]
    if offset is not None:
        index = index - offset[:, None]
    return drafted & (index % step_bound[:, None] != 0)


def last_context(drafted: Tensor) -> Tensor:
    """Find s(i), the last context position at or before i: [B, T] int64.

    It is 0 if no such position exists (official lines 157-162).
    """
    index = torch.arange(drafted.shape[1], device=drafted.device).expand_as(drafted)
    return torch.where(drafted, 0, index).cummax(dim=1).values


@dataclass
class Mask:
    """An attention mask, defined by a rule that tells whether a query sees a key.

    A rule takes indices of a row, a query and a key, which broadcast, and returns bool. The same
    rule serves the dense mask and the kernels that evaluate it block by block. The keys of a mask
    are the keys of its parts, one part after the other. Each part counts its keys from 0.
    """

    n_rows: int
    n_queries: int
    # Number of keys, and rule, of each part.
    parts: tuple[tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]], ...]
    device: torch.device
    block_mask: Any = None  # FlexAttention's block mask, which is created when it is needed.

    @classmethod
    def up_to(cls, last_seen: Tensor, n_keys: int) -> "Mask":
        """Let each query see the keys up to a position, such as s(i) (official line 210).

        Args:
            last_seen: [B or 1, Q] int64, the last key that each query sees.
            n_keys: Number of keys.
        """
        n_rows, n_queries = last_seen.shape

        def rule(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return key <= last_seen[row, query]

        return cls(n_rows, n_queries, ((n_keys, rule),), last_seen.device)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, queries and keys."""
        return self.n_rows, self.n_queries, sum(n_keys for n_keys, _ in self.parts)

    def sees(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query sees a key, with keys counted over all parts."""
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
    """Make the causal mask of self-attention (official lines 169-193).

    Queries with ``staircase`` see only their drafted block and themselves.
    """
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
    """Let drafted queries see the verified positions, and earlier queries of the same round.

    The keys are the T positions, then the Q queries. A query also sees itself.

    Args:
        queries: See the module.
        last_context_of_query: See the module.
        pass_index: [Q] int64. Queries of different passes do not see each other. None for one pass.
        n_keys: See the module.
        window: Number of positions that a sliding-window layer sees, the query's own included, or a
            :class:`Chunk`. None for no limit.
    """
    context = last_context_of_query

    def verified(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # A context query already sees itself among the drafted keys, so it must not see its
        # verified position too.
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
        # Padding queries see themselves too, because the softmax of an empty row would be NaN.
        seen = seen | (query == key)
        return seen if window is None else seen & _reaches(position, other, window)

    n_rows, n_queries = queries.shape
    return Mask(n_rows, n_queries, ((n_keys, verified), (n_queries, drafted)), queries.device)


def staircase_drop_probability(progress: float) -> float:
    """Compute the probability that a row is NOT a staircase row.

    It grows linearly from 0 to 1, which it reaches at ``progress`` 0.5 (official lines 137-140).
    """
    return min(1.0, 2.0 * progress)


def tree_mask(lengths: Sequence[int], seen: Tensor, window: int | None = None) -> Tensor:
    """Let pending tokens of a decoding call see their row's committed slots and their ancestors.

    The P pending tokens are in the slots after the committed ones.

    Args:
        lengths: Number of committed slots of each of B rows.
        seen: [B, Q, P] bool. For the last Q pending tokens, which pending tokens each of them sees,
            itself included.
        window: See :func:`round_mask`.

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
    """Compute :func:`tree_mask` for lengths that are on the device: [B, Q, n_slots] bool.

    Args:
        lengths: [B, 1] int64.
        seen: See :func:`tree_mask`.
        n_slots: Number of slots of the mask.
        window: See :func:`round_mask`.
    """
    n_pending = seen.shape[2]
    index = torch.arange(n_slots, device=seen.device) - lengths  # [B, S]
    inside = (index >= 0) & (index < n_pending)
    pending = index.clamp(0, n_pending - 1)[:, None, :].expand(-1, seen.shape[1], -1)
    return _within(window, (index < 0)[:, None, :] | (inside[:, None, :] & seen.gather(2, pending)))


def _within(window: int | None, mask: Tensor) -> Tensor:
    if window is None:
        return mask
    # The position of a token is the number of tokens that it sees, without itself.
    return mask & _reaches(mask.sum(dim=2, keepdim=True) - 1, mask.cumsum(dim=2) - 1, window)


def causal_mask(positions: Tensor, n_slots: int, window: int | None = None) -> Tensor:
    """Make the causal mask of tokens at positions [B, Q] in a cache: [B, Q, n_slots].

    Slot i of the cache holds the token at position i.
    """
    slots = torch.arange(n_slots, device=positions.device)
    seen = positions[..., None] >= slots
    return seen if window is None else seen & _reaches(positions[..., None], slots, window)


def _reaches(query: Tensor, key: Tensor, window: int) -> Tensor:
    return query // window == key // window if isinstance(window, Chunk) else query - key < window
