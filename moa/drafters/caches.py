"""What drafters keep of a generation: caches of B rows, and the causal layers that fill them.

Shapes: B rows, S slots, Q queries, E width, H_kv key/value heads, d head dim, b nodes of one level, n tokens of one
call.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from ..nn import masks
from ..nn.attention import expand_heads
from ..nn.kv import KVBuffer, positions_from, slots_after, write_slots
from ..nn.layers import DecoderBlock, Rotary, Rotation
from ..nn.masks import added, are_alike, to_device
from .base import DraftLevel
from .training import at_queries

KeysValues = tuple[Tensor, Tensor]  # keys and values, each [B, H_kv, S, d]
Fresh = tuple[Tensor, Tensor | None, list[int]]
"""What a round begins with: tokens [B, n] int64, states of the target [B, n, ...] or None, how many of n are real."""


class RowState:
    """A drafter's caches of B rows while decoding.

    Attributes are a :class:`KVBuffer`, a tuple of them, a list with an entry a row, a tensor [B, ...], or a number.
    """

    def forget_drafts(self) -> None:
        """End the round: keep what is committed; by default nothing else is there."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for name, value in vars(self).items():
            setattr(self, name, _taken(value, rows))

    def take_rows(self, rows: Sequence[int]) -> Self:
        """Copy these rows, in this order, to a state of their own; the round ends."""
        self.forget_drafts()
        taken = copy.copy(self)
        taken.select_rows(rows)
        return taken

    def add_rows(self, other: Self) -> None:
        """Append the rows of another state of the same drafter, which must not be used afterwards; the round ends."""
        self.forget_drafts()
        other.forget_drafts()  # their rounds may be of different lengths
        for name, value in vars(self).items():
            setattr(self, name, _joined(value, getattr(other, name)))


def _taken(value: Any, rows: Sequence[int]) -> Any:
    if isinstance(value, KVBuffer):
        return value.take_rows(rows)
    if isinstance(value, tuple):
        return tuple(buffer.take_rows(rows) for buffer in value)
    if isinstance(value, list):
        return [value[row] for row in rows]
    return value[to_device(rows, value.device)] if isinstance(value, Tensor) else value


def _joined(value: Any, more: Any) -> Any:
    if isinstance(value, KVBuffer):
        value.add_rows(more)
    if isinstance(value, tuple):
        for buffer, other in zip(value, more, strict=True):
            buffer.add_rows(other)
    if isinstance(value, list):
        return value + more
    return torch.cat((value, more)) if isinstance(value, Tensor) else value


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Put rows of tokens into one tensor [B, n] int64, right padded with 0."""
    width = max(map(len, rows))
    return to_device([[*row, *[0] * (width - len(row))] for row in rows], device)


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Put rows [n, ...] into one tensor [B, n, ...], right padded with any of them, by as few kernels for many rows."""
    counts = [len(row) for row in rows]
    if len(set(counts)) == 1:
        return torch.stack(list(rows))
    stops = itertools.accumulate(counts)
    starts = [stop - count for stop, count in zip(stops, counts, strict=True)]
    places = [
        min(start + index, sum(counts) - 1) for start in starts for index in range(max(counts))
    ]
    together = torch.cat(list(rows))
    placed = together.index_select(0, to_device(places, together.device))
    return placed.view(len(rows), -1, *placed.shape[1:])


def lengths_mask(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """Let every query see the first slots of its row, so many: [B, 1, S] bool; None where rows have equally many."""
    if are_alike(lengths):
        return None
    slots = torch.arange(max(lengths), device=device)
    return (slots < to_device(lengths, device)[:, None])[:, None, :]


def concatenated(first: KeysValues, keys: Tensor, values: Tensor) -> KeysValues:
    """Append keys and values [B, H, S, d], of as many heads or fewer, to others, in their own dtype."""
    if keys.shape[1] < (n_heads := first[0].shape[1]):
        keys = expand_heads(keys, n_heads)
        values = expand_heads(values, n_heads)
    return torch.cat((first[0].to(keys.dtype), keys), dim=2), torch.cat(
        (first[1].to(values.dtype), values), dim=2
    )


def write_after(
    view: KeysValues, before: Sequence[int], n_fed: int, keys: Tensor, values: Tensor
) -> KeysValues:
    """Write a drafter's newest keys and values after the target's verified ones [B, H_kv, S, d], in place.

    The target's next call overwrites these slots. Of each row so many tokens are verified ``before`` the ``n_fed`` ones
    of this round, the newest included.
    """
    n_new = keys.shape[2]
    # Calls of longer rows, or over the whole cache, later read these slots under a mask, which
    # stops no NaN.
    keys = keys.nan_to_num()
    values = values.nan_to_num()
    write_slots(view, keys, values, slots_after(added(before, n_fed - n_new), n_new, keys.device))
    return view


def causal_features(
    blocks: Sequence[DecoderBlock], rotary: Rotary, x: Tensor, queries: Tensor
) -> Tensor:
    """Run causal layers over x [B, S, E], slot t at position t: features of queries [B, Q]."""
    slots = torch.arange(x.shape[1], device=x.device)
    rotation = rotary(slots[None, :])
    causal = masks.Mask.up_to(slots[None], len(slots))
    *before, last = blocks
    for block in before:
        x = block.attend_self(x, rotation, causal)
    keys, values = last.keys_values(x, rotation)
    seen = masks.Mask.up_to(queries, len(slots))
    features: Tensor = last(at_queries(x, queries), rotary(queries), keys, values, seen)
    return features


class Fed(NamedTuple):
    """Where the tokens stand that a draft step feeds, and what they see."""

    positions: Tensor  # [B or 1, b] int64
    rotation: Rotation  # of these positions, by the drafter
    before: list[int]  # verified tokens of each row
    seen: Tensor  # [B, b, n] bool, which of the tokens fed in this round each of them sees
    # [B, b, S] bool, ``seen`` after the verified tokens; None where nothing is masked
    mask: Tensor | None


class LayerState(RowState):
    """Keys and values of a drafter's causal layers."""

    def __init__(self, n_rows: int, n_layers: int) -> None:
        # Of each layer: committed slots, then those of this round's tree in the order of feeding.
        self.slots = tuple(KVBuffer(n_rows) for _ in range(n_layers))
        self.n_true = [0] * n_rows  # committed slots of each row
        self.n_fed = 0  # slots of this round's tree, the root's included
        # Per row the target's states [n, ...] of committed positions that no layer has been fed
        # with.
        self.fresh: list[tuple[Tensor, ...]] = [()] * n_rows
        self.given: Fresh | None = None

    @override
    def forget_drafts(self) -> None:
        # Accepted drafts lie among others, in the order of feeding. Encoding them again is two
        # projections of a few
        # tokens, cheaper than finding out which are in place already.
        for buffer in self.slots:
            buffer.crop(self.n_true)
        self.n_fed = 0

    def observe(
        self,
        states: Tensor,
        kept: Sequence[Sequence[int]],
        make: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Keep the target's states [B, n, ...] of committed tokens, or what is made of them, until they are fed."""
        places = [
            row * states.shape[1] + index for row, indices in enumerate(kept) for index in indices
        ]
        own = states.flatten(0, 1).index_select(0, to_device(places, states.device))
        made = own if make is None else make(own)
        for row, new in enumerate(made.split([len(indices) for indices in kept])):
            self.fresh[row] = (*self.fresh[row], new)

    def fresh_rows(self, committed: Sequence[list[int]]) -> tuple[list[list[int]], Tensor | None]:
        """Take the committed tokens that the slots lack, and the target's states [B, n, ...] that are fed with them."""
        # The root is fed again in each round: where it stands, the cache may hold a draft that was
        # rejected there.
        self.n_true = [
            min(n, len(tokens) - 1) for tokens, n in zip(committed, self.n_true, strict=True)
        ]
        return [tokens[n:] for tokens, n in zip(committed, self.n_true, strict=True)], None

    def take_round(self, committed: Sequence[list[int]], device: torch.device) -> Fresh:
        """Put :meth:`fresh_rows` on the device; in a graph these are :attr:`given`, and nothing is committed."""
        if self.given is not None:
            return self.given
        tokens, states = self.fresh_rows(committed)
        return padded(tokens, device), states, [len(row) for row in tokens]

    def feed_committed(
        self,
        blocks: Sequence[DecoderBlock],
        rotary: Rotary,
        x: Tensor,  # [B, n, E], right padded
        counts: Sequence[int],  # per row how many of the n are real, at least 1
        # what the last layer computes, if not its ``forward``
        last: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, Fed]:
        """Feed what was committed since the last round up to the root, in place of what was drafted.

        Returns:
            Features of the root [B, 1, E], and where it stands.
        """
        device = x.device
        before = self.n_true
        n_new = max(counts)
        rotation = rotary(positions_from(before, n_new, device), x.dtype)
        self.n_true = added(before, counts)
        self.n_fed = 1
        is_alone = last is None and len(counts) == 1 and are_alike(counts)
        for index, (block, slots) in enumerate(zip(blocks, self.slots, strict=True)):
            slots.crop(before)
            is_last = index == len(self.slots) - 1
            if is_last and is_alone:
                x = block.attend_last(x, rotation, partial(slots.append, counts=counts))
                break
            keys, values = slots.append(*block.keys_values(x, rotation), counts)
            if is_last:
                break
            mask = None
            if len(counts) > 1 or n_new > 1:
                causal = (
                    torch.ones(n_new, n_new, dtype=torch.bool, device=device)
                    .tril()
                    .expand(len(counts), -1, -1)
                )
                mask = masks.tree_mask(before, causal)[..., : keys.shape[2]]
            x = block(x, rotation, keys, values, mask)
        before = added(self.n_true, -1)
        seen = torch.ones(len(counts), 1, 1, dtype=torch.bool, device=device)
        mask = None if len(counts) == 1 and are_alike(before) else masks.tree_mask(before, seen)
        positions = positions_from(before, 1, device)
        root = Fed(positions, rotary(positions, x.dtype), before, seen, mask)
        if is_alone:
            return x, root
        # Of the last layer only the root's feature is wanted.
        x = (
            x[:, -1:]
            if are_alike(counts)
            else at_queries(x, to_device(counts, device)[:, None] - 1)
        )
        return (last or block)(x, root.rotation, keys, values, mask), root

    def begin_level(self, rotary: Rotary, level: DraftLevel) -> Fed:
        """Count the nodes of one level as fed; the caller appends their keys and values."""
        n_nodes = level.tokens.shape[1]
        before = added(self.n_true, -1)
        self.n_fed += n_nodes
        # All nodes of a level stand at one position.
        positions = to_device(added(before, level.depth), level.tokens.device)[:, None].expand(
            -1, n_nodes
        )
        is_chain_alone = len(before) == 1 and self.n_fed == level.depth + 1 and are_alike(before)
        mask = None if is_chain_alone else masks.tree_mask(before, level.seen)
        return Fed(
            positions, rotary(positions, level.parent_features.dtype), before, level.seen, mask
        )

    def feed_level(
        self, blocks: Sequence[DecoderBlock], rotary: Rotary, x: Tensor, level: DraftLevel
    ) -> Tensor:
        """Feed the nodes of one level, given as x [B, b, E]; returns their features [B, b, E]."""
        fed = self.begin_level(rotary, level)
        for block, slots in zip(blocks, self.slots, strict=True):
            x = block.attend_cached(x, fed.rotation, slots.append, fed.mask)
        return x
