"""Decoder layers with causal self-attention over one stream of slots, in training and in decoding.

Shapes: B rows, S slots, Q queries, E width, b nodes of one level, n tokens of one call.
"""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ..nn import masks
from ..nn.kv import KVBuffer, positions_behind
from ..nn.layers import DecoderBlock, Rotary
from .rounds import at_queries


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


class LayerCaches:
    """Keys and values of causal layers of B rows while decoding.

    Attributes:
        n_true: committed slots of each row; they come first.
        n_fed: slots of this round's tree, the root's included.
    """

    def __init__(self, n_rows: int, n_layers: int) -> None:
        self.slots = [KVBuffer(n_rows) for _ in range(n_layers)]
        self.n_true = [0] * n_rows
        self.n_fed = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for buffer in self.slots:
            buffer.select_rows(rows)
        self.n_true = [self.n_true[row] for row in rows]

    def take_rows(self, rows: Sequence[int]) -> Self:
        """Copy these rows, in this order, to a state of their own."""
        taken = copy.copy(self)
        taken.slots = [buffer.take_rows(rows) for buffer in self.slots]
        taken.n_true = [self.n_true[row] for row in rows]
        return taken

    def add_rows(self, other: Self) -> None:
        """Append the rows of another state."""
        for state in (self, other):  # their rounds may be of different lengths
            for buffer in state.slots:
                buffer.crop(state.n_true)
        for buffer, more in zip(self.slots, other.slots, strict=True):
            buffer.add_rows(more)
        self.n_true = self.n_true + other.n_true

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
