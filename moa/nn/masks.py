"""Attention masks of drafter training as pure functions; every random draw is an argument.

Shapes: B batch, T tokens, Q query rows. Masks are bool, True = may attend. ``queries`` are positions and
``last_context_of_query`` is s(i) of each (below), both [B, Q] int64; ``n_keys`` is T.

A *drafted* position has no target KV when the drafter reaches it; all others are *context*. With step bound e,
every e-th position of a response becomes context again, as after a verification. For e = 4 and a
response from position 3 on::

    position       0 1 2 3 4 5 6 7 8        s(i) = last context position <= i
    drafted        . . . x . x x x .        (offset 0: 4 and 8 are context)
    s(i)           0 1 2 2 4 4 4 4 8

    cross-attention of 6: keys 0..4         self-attention of 6: keys 0..6, or 5..6 in a staircase row
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def drafted_positions(response_mask: Tensor, step_bound: Tensor | None, offset: Tensor | None = None) -> Tensor:
    """Find the positions that the drafter reaches without target KV (official ``train/moa_spec.py``, lines 123-131).

    Args:
        response_mask: [B, T], non-zero on response tokens.
        step_bound: [B] integer e; positions with (i - offset) % e == 0 are context. None: no bound.
        offset: [B] integer; zeros where None.

    Returns:
        [B, T] bool.
    """
    drafted = response_mask.bool()
    if step_bound is None:
        return drafted
    index = torch.arange(drafted.shape[1], device=drafted.device)[None, :]
    if offset is not None:
        index = index - offset[:, None]
    return drafted & (index % step_bound[:, None] != 0)


def teacher_forced_positions(response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out the rounds of standard training: each position as if all before it had just been verified.

    Returns:
        Which positions are drafted, [B, T] bool: the response, without position 0, before which there is nothing; and
        the last context position that each one sees, [B, T] int64.
    """
    drafted = response_mask.bool().clone()
    drafted[:, :1] = False
    index = torch.arange(drafted.shape[1], device=drafted.device)
    return drafted, (index - 1).clamp(min=0).expand_as(drafted)


def last_context(drafted: Tensor) -> Tensor:
    """Find s(i) [B, T] int64, the last context position at or before i, 0 where there is none (lines 157-162)."""
    index = torch.arange(drafted.shape[1], device=drafted.device).expand_as(drafted)
    return torch.where(drafted, 0, index).cummax(dim=1).values


def cross_attention_mask(last_context_of_query: Tensor, n_keys: int) -> Tensor:
    """Step-bounded cross-attention: keys up to s(i), [B, Q, T] bool (official line 210)."""
    key = torch.arange(n_keys, device=last_context_of_query.device)
    return key <= last_context_of_query[..., None]


def self_attention_mask(queries: Tensor, last_context_of_query: Tensor, staircase: Tensor, n_keys: int) -> Tensor:
    """Causal self-attention; of staircase queries only the drafted block and the query itself (official 169-193).

    Returns [B, Q, T] bool.

    Args:
        staircase: [B, Q] or [B, 1] bool.
    """
    key = torch.arange(n_keys, device=queries.device)
    query = queries[..., None]
    causal = key <= query
    block = (key > last_context_of_query[..., None]) | (key == query)
    return causal & (block | ~staircase[..., None])


def drafted_block_mask(queries: Tensor, last_context_of_query: Tensor, pass_index: Tensor | None = None) -> Tensor:
    """Say which drafted queries of one row share a block, for layers over drafted features.

    Args:
        pass_index: [Q] int64, queries of different passes do not share blocks; None where there is one pass.

    Returns:
        [B, Q, Q] bool: key k is in the block of query q and not after it. Duplicated (padding) queries see
        themselves alone, so no row is empty.
    """
    same_block = last_context_of_query[:, :, None] == last_context_of_query[:, None, :]
    allowed = same_block & (queries[:, None, :] <= queries[:, :, None])
    if pass_index is not None:
        allowed &= pass_index[:, None] == pass_index[None, :]
    in_block = (queries > last_context_of_query)[:, None, :]
    self_only = torch.eye(queries.shape[1], dtype=torch.bool, device=queries.device)
    return (allowed & in_block) | self_only


def round_mask(queries: Tensor, last_context_of_query: Tensor, pass_index: Tensor | None, n_keys: int) -> Tensor:
    """Say what drafted queries see of verified positions and, behind these, of each other.

    Returns:
        [B, Q, T + Q] bool.
    """
    # A context query is its own drafted key too, so it must not see its verified position a second time.
    key = torch.arange(n_keys, device=queries.device)
    verified = cross_attention_mask(last_context_of_query, n_keys) & (key != queries[..., None])
    return torch.cat((verified, drafted_block_mask(queries, last_context_of_query, pass_index)), dim=-1)


def staircase_drop_probability(progress: float) -> float:
    """Give the probability that a row is NOT a staircase row (official lines 137-140).

    It is linear from 0 at the start to 1 at half of training (``progress`` 0.5), then 1.
    """
    return min(1.0, 2.0 * progress)


def tree_mask(lengths: Sequence[int], seen: Tensor, window: int | None = None) -> Tensor:
    """Say what the pending tokens of a decoding call see: all committed slots, and their ancestors among the pending.

    Slot i of a row holds the committed token at position i; the pending tokens stand behind the row's committed part.

    Args:
        lengths: committed slots of each of B rows.
        seen: [B, Q, P] bool, for the last Q of P pending tokens which pending tokens they see, themselves included.
        window: positions that a sliding-window layer looks back, itself included; None for no bound.

    Returns:
        [B, Q, max(lengths) + P] bool.
    """
    n_pending, device = seen.shape[2], seen.device
    n_slots = max(lengths) + n_pending
    if len(set(lengths)) == 1:
        committed = torch.ones(*seen.shape[:2], lengths[0], dtype=torch.bool, device=device)
        mask = torch.cat((committed, seen), dim=2)
    else:
        index = torch.arange(n_slots, device=device) - torch.tensor(lengths, device=device)[:, None]  # [B, S]
        inside = (index >= 0) & (index < n_pending)
        pending = index.clamp(0, n_pending - 1)[:, None, :].expand(-1, seen.shape[1], -1)
        mask = (index < 0)[:, None, :] | (inside[:, None, :] & seen.gather(2, pending))
    if window is None:
        return mask
    # The position of a token is the number of tokens that it sees, less itself.
    return mask & (mask.sum(dim=2, keepdim=True) - mask.cumsum(dim=2) < window)


def causal_mask(positions: Tensor, n_slots: int, window: int | None = None) -> Tensor:
    """Say what a run of tokens sees in a cache whose slot i holds the token at position i.

    Args:
        positions: [B, Q] int64, of the run's tokens.
        n_slots: S.
        window: as for :func:`tree_mask`.

    Returns:
        [B, Q, S] bool.
    """
    distance = positions[..., None] - torch.arange(n_slots, device=positions.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
