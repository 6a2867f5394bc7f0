"""What drafters keep of a generation: caches by row, and the causal layers and self-attention that fill them.

Shapes: B rows, T tokens, S slots, Q queries, E width, H_kv key/value heads, d head dim, b nodes of one level, n tokens
of one call.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from ..nn import masks
from ..nn.attention import expand_heads
from ..nn.kv import KVBuffer, positions_behind
from ..nn.layers import DecoderBlock, Rotary, Rotation
from ..targets.bundle import FrozenTarget
from .base import DraftLevel
from .training import at_queries

KeysValues = tuple[Tensor, Tensor]
"""Keys and values, each [B, H_kv, S, d]."""


class RowState:
    """A drafter's caches of B rows while decoding.

    Attributes are of one kind each: a :class:`KVBuffer`, a tuple of them (a layer each), a list with an entry a row, a
    tensor [B, ...], or a number of all rows.
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
    return value[list(rows)] if isinstance(value, Tensor) else value


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
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)


def lengths_mask(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """Let every query see the first slots of its row, so many: [B, 1, S] bool; None where rows have equally many."""
    if len(set(lengths)) == 1:
        return None
    slots = torch.arange(max(lengths), device=device)
    return (slots < torch.tensor(lengths, device=device)[:, None])[:, None, :]


def concatenated(first: KeysValues, keys: Tensor, values: Tensor) -> KeysValues:
    """Append keys and values [B, H, S, d], of as many heads or fewer, to others, in their own dtype."""
    if keys.shape[1] < (n_heads := first[0].shape[1]):
        keys, values = expand_heads(keys, n_heads), expand_heads(values, n_heads)
    return torch.cat((first[0].to(keys.dtype), keys), dim=2), torch.cat((first[1].to(values.dtype), values), dim=2)


def write_behind(
    view: KeysValues, before: Sequence[int], n_fed: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Write a drafter's keys and values of the newest tokens after the target's verified ones, in place.

    Nothing is copied of the context; the target's next call writes over these slots.

    Args:
        view: keys and values [B, H_kv, S, d] of the target's cache.
        before: verified tokens of each row.
        n_fed: tokens of this round that were fed, the newest included.
    """
    n_new = keys.shape[2]
    # Calls of longer rows, or over the whole cache, later read these slots under a mask, which stops no NaN.
    keys, values = keys.nan_to_num(), values.nan_to_num()
    for row, length in enumerate(before):
        stop = length + n_fed
        view[0][row, :, stop - n_new : stop] = keys[row]
        view[1][row, :, stop - n_new : stop] = values[row]
    return view


# Drafters whose self-attention reads embeddings of tokens


class Fed(NamedTuple):
    """Tokens that a draft step feeds, and what they see."""

    embeddings: Tensor  # [B, b, E]
    positions: Tensor  # [B or 1, b] int64
    rotation: Rotation
    before: list[int]  # verified tokens of each row
    seen: Tensor  # [B, b, n] bool, which of the tokens fed in this round each of them sees
    mask: Tensor | None  # [B, b, S] bool, ``seen`` after the verified tokens; None where nothing is masked


class TokenState(RowState):
    """The cache of a self-attention over the embeddings of tokens.

    Attributes:
        self_attention: keys and values of the verified tokens, then of this round's drafts in the order of feeding.
        n_fed: tokens of this round's tree that were fed, the root included.
    """

    def __init__(self, n_rows: int) -> None:
        self.self_attention = KVBuffer(n_rows)
        self.n_fed = 0

    @override
    def forget_drafts(self) -> None:
        # Behind the last root lie nodes in the order of feeding, accepted ones among others. Encoding the accepted
        # ones again is two projections of a few tokens, cheaper than finding out which are in place already.
        if self.n_fed:
            self.self_attention.crop([length - self.n_fed + 1 for length in self.self_attention.lengths])
            self.n_fed = 0

    def feed_committed(
        self, block: DecoderBlock, rotary: Rotary, frozen: FrozenTarget, committed: Sequence[list[int]]
    ) -> Fed:
        """Begin a round: append what was committed to the cache, the root included; returns the root."""
        before, own = [len(tokens) - 1 for tokens in committed], self.self_attention
        device = frozen.lm_head_weight.device
        # The root is fed anew in each round: where it stands, the cache may hold a draft that was rejected there.
        own.crop(before)
        fresh = [tokens[n:] for tokens, n in zip(committed, own.lengths, strict=True)]
        counts = [len(tokens) for tokens in fresh]
        positions = positions_behind(own.lengths, max(counts), device)
        embeddings = frozen.embed(padded(fresh, device))  # [B, n, E]
        own.append(*block.keys_values(embeddings, rotary(positions)), counts)
        self.n_fed = 1
        if len(set(counts)) == 1:
            root, at = embeddings[:, -1:], positions[:, -1:]
        else:
            last = torch.tensor(counts, device=device)[:, None] - 1  # [B, 1]
            root, at = at_queries(embeddings, last), positions.expand(len(counts), -1).gather(1, last)
        seen = torch.ones(len(counts), 1, 1, dtype=torch.bool, device=device)
        mask = None if len(counts) == 1 else masks.tree_mask(before, seen)
        return Fed(root, at, rotary(at), before, seen, mask)

    def feed_level(self, rotary: Rotary, frozen: FrozenTarget, level: DraftLevel) -> Fed:
        """Prepare the nodes of one level; the caller appends their keys and values."""
        n_nodes = level.tokens.shape[1]
        before = [length - self.n_fed for length in self.self_attention.lengths]
        first = torch.tensor(before, device=level.tokens.device)[:, None] + level.depth
        positions = first.expand(-1, n_nodes)  # [B, b]: a level stands at one position
        self.n_fed += n_nodes
        is_chain_alone = len(before) == 1 and self.n_fed == level.depth + 1
        mask = None if is_chain_alone else masks.tree_mask(before, level.seen)
        return Fed(frozen.embed(level.tokens), positions, rotary(positions), before, level.seen, mask)


# Drafters with causal layers over one stream of slots


def causal_features(blocks: Sequence[DecoderBlock], rotary: Rotary, x: Tensor, queries: Tensor | None = None) -> Tensor:
    """Run layers over whole sequences x [B, S, E]; slot t stands at position t.

    Args:
        queries: [B, Q] int64 slots to compute features for; None = all.

    Returns:
        [B, Q, E], outputs of the last layer.
    """
    slots = torch.arange(x.shape[1], device=x.device)
    rotation = rotary(slots[None, :])
    causal = masks.Mask.up_to(slots[None], len(slots))
    if queries is None:
        queries = slots.expand(x.shape[0], -1)
    *before, last = blocks
    for block in before:
        x = block.attend_self(x, rotation, causal)
    keys, values = last.keys_values(x, rotation)
    seen = masks.Mask.up_to(queries, len(slots))
    features: Tensor = last(at_queries(x, queries), rotary(queries), keys, values, seen)
    return features


class LayerState(RowState):
    """Keys and values of causal layers.

    Attributes:
        slots: of each layer.
        n_true: committed slots of each row; they come first.
        n_fed: slots of this round's tree, the root's included.
    """

    def __init__(self, n_rows: int, n_layers: int) -> None:
        self.slots = tuple(KVBuffer(n_rows) for _ in range(n_layers))
        self.n_true = [0] * n_rows
        self.n_fed = 0

    @override
    def forget_drafts(self) -> None:
        for buffer in self.slots:
            buffer.crop(self.n_true)

    def feed_committed(
        self, blocks: Sequence[DecoderBlock], rotary: Rotary, x: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """Feed what was committed since the last round up to the root, in place of what was drafted.

        Args:
            x: [B, n, E], right padded.
            counts: per row how many of the n are real, at least 1.

        Returns:
            Features of the root, the last real one of each row: [B, 1, E].
        """
        device, before, is_alone = x.device, self.n_true, len(counts) == 1
        positions = positions_behind(before, max(counts), device).expand(len(counts), -1)
        causal = torch.ones(max(counts), max(counts), dtype=torch.bool, device=device).tril()
        causal = causal.expand(len(counts), -1, -1)  # [B, n, n]
        last = torch.tensor(counts, device=device)[:, None] - 1  # [B, 1]
        self.n_true = [start + count for start, count in zip(before, counts, strict=True)]
        self.n_fed = 1
        n_slots = max(self.n_true)
        for index, (block, slots) in enumerate(zip(blocks, self.slots, strict=True)):
            slots.crop(before)
            rotation = rotary(positions)
            keys, values = slots.append(*block.keys_values(x, rotation), counts)
            queries = causal
            if index == len(self.slots) - 1:  # only the root's feature is wanted
                x, rotation = at_queries(x, last), rotary(positions.gather(1, last))  # [B, 1, E]
                queries = at_queries(causal, last)
            needs_no_mask = is_alone and queries.shape[1] == 1
            mask = None if needs_no_mask else masks.tree_mask(before, queries)[..., :n_slots]
            x = block(x, rotation, keys, values, mask)
        return x

    def feed_level(self, blocks: Sequence[DecoderBlock], rotary: Rotary, x: Tensor, seen: Tensor, depth: int) -> Tensor:
        """Feed the nodes x [B, b, E] of one level, see :class:`~.base.DraftLevel`; returns their features [B, b, E]."""
        first = torch.tensor(self.n_true, device=x.device)[:, None] + depth - 1
        rotation = rotary(first.expand(-1, x.shape[1]))  # a level stands at one position
        self.n_fed += x.shape[1]
        is_chain_alone = len(x) == 1 and self.n_fed == depth + 1
        mask = None if is_chain_alone else masks.tree_mask([n - 1 for n in self.n_true], seen)
        for block, slots in zip(blocks, self.slots, strict=True):
            x = block.attend_behind(x, rotation, slots.append, mask)
        return x
