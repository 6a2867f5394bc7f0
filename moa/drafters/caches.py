"""The state of a drafter during a generation: its caches, and functions that fill them.

Shapes: B rows, S slots, Q queries, E width, H_kv key/value heads, d head dim, b nodes of one level,
n tokens of one call.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ..nn import masks
from ..nn.attention import expand_heads
from ..nn.kv import KVBuffer, positions_from, slots_after, write_slots
from ..nn.layers import DecoderBlock, KeysValues, Rotary, Rotation
from ..nn.masks import added, are_alike, to_device
from .base import CommittedTokens, DraftLevel
from .training import at_queries

Fresh = tuple[Tensor, Tensor | None, list[int]]
"""Three values for the tokens that a round feeds first: the tokens [B, n] int64, the target's
states for them [B, n, ...] or None, and for each row the number of tokens that are not padding.
"""


class RowState:
    """The caches of a drafter for the B rows of a batch.

    Subclasses add attributes. Each attribute is a :class:`KVBuffer`, a tuple of such buffers, a
    list with one entry per row, a tensor [B, ...], or a number.
    """

    def forget_drafts(self) -> None:
        """End the round, and drop everything that is not committed.

        By default there is nothing to drop.
        """

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only the given rows of the batch, in the given order."""
        for name, value in vars(self).items():
            setattr(self, name, _taken(value, rows))

    def take_rows(self, rows: Sequence[int]) -> Self:
        """Copy the given rows, in the given order, to a new state. This ends the round."""
        self.forget_drafts()
        taken = copy.copy(self)
        taken.select_rows(rows)
        return taken

    def add_rows(self, other: Self) -> None:
        """Append the rows of another state of the same drafter. This ends the round.

        The other state must not be used afterwards.
        """
        self.forget_drafts()
        # End the other state's round too. If the rounds of the two states have fed different
        # numbers of drafts, the rows cannot be appended.
        other.forget_drafts()
        for name, value in vars(self).items():
            setattr(self, name, _concatenated(value, getattr(other, name)))


def _taken(value: Any, rows: Sequence[int]) -> Any:
    if isinstance(value, KVBuffer):
        return value.take_rows(rows)
    if isinstance(value, tuple):
        return tuple(buffer.take_rows(rows) for buffer in value)
    if isinstance(value, list):
        return [value[row] for row in rows]
    return value[to_device(rows, value.device)] if isinstance(value, Tensor) else value


def _concatenated(value: Any, more: Any) -> Any:
    if isinstance(value, KVBuffer):
        value.add_rows(more)
    if isinstance(value, tuple):
        for buffer, other in zip(value, more, strict=True):
            buffer.add_rows(other)
    if isinstance(value, list):
        return value + more
    return torch.cat((value, more)) if isinstance(value, Tensor) else value


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Stack rows of tokens into one tensor [B, n] int64, right padded with 0."""
    columns = list(itertools.zip_longest(*rows, fillvalue=0))
    return to_device(np.array(columns).T, device)


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows of different lengths n into one tensor [B, max n, ...].

    The rows are padded on the right with arbitrary values. The number of launched kernels does not
    depend on the number of rows.
    """
    counts = [len(row) for row in rows]
    if len(set(counts)) == 1:
        return torch.stack(list(rows))
    rows_in_order = torch.cat(list(rows))
    width = max(counts)
    last = sum(counts) - 1
    starts = list(itertools.accumulate(counts[:-1], initial=0))
    # [B, max n]. ``rows_in_order`` has the items of all rows, one row after another. For each row,
    # ``indices`` has the indices of its items, followed by arbitrary indices as padding.
    indices = np.minimum(np.add.outer(starts, np.arange(width)), last)
    chosen = rows_in_order.index_select(0, to_device(indices.ravel(), rows_in_order.device))
    return chosen.view(*indices.shape, *rows_in_order.shape[1:])


def lengths_mask(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """Build a mask [B, 1, S] bool: queries see the first ``lengths[row]`` slots of their row.

    If all lengths are equal, no mask is needed, and the result is None.
    """
    if are_alike(lengths):
        return None
    slots = torch.arange(max(lengths), device=device)
    return (slots < to_device(lengths, device)[:, None])[:, None, :]


def concatenated(first: KeysValues, keys: Tensor, values: Tensor) -> KeysValues:
    """Append new keys and values to those in ``first``. All tensors are [B, heads, S, d].

    ``first`` is converted to the dtype of the new keys and values. If ``first`` has more heads than
    the new keys and values, the new heads are repeated until both numbers of heads are equal.
    """
    if keys.shape[1] < (n_heads := first[0].shape[1]):
        keys = expand_heads(keys, n_heads)
        values = expand_heads(values, n_heads)
    return torch.cat((first[0].to(keys.dtype), keys), dim=2), torch.cat(
        (first[1].to(values.dtype), values), dim=2
    )


def write_after(
    view: KeysValues, before: Sequence[int], n_fed: int, keys: Tensor, values: Tensor
) -> KeysValues:
    """Write the drafter's keys and values into the target's cache, after the verified tokens.

    The drafter attends to the target's KV and to its own KV. If both are in the same tensor, the
    target's cache need not be copied. The next target call overwrites the slots that this function
    writes.

    Args:
        view: the target's keys and values of one layer, [B, H_kv, S, d] each.
        before: for each row, the number of verified tokens before this round.
        n_fed: number of tokens that this round has fed to the drafter, including the n newest.
        keys: the newest keys [B, H_kv, n, d].
        values: the newest values [B, H_kv, n, d].
    """
    n_new = keys.shape[2]
    # Replace NaN in the new keys and values. Later calls may read their slots under a mask, but
    # even a masked NaN would make the result of attention NaN.
    keys = keys.nan_to_num()
    values = values.nan_to_num()
    write_slots(view, keys, values, slots_after(added(before, n_fed - n_new), n_new, keys.device))
    return view


def causal_features(
    blocks: Sequence[DecoderBlock], rotary: Rotary, x: Tensor, queries: Tensor
) -> Tensor:
    """Run causal layers over x [B, S, E] at positions 0 to S - 1.

    Returns the features of queries [B, Q].
    """
    slots = masks.positions_of(x)
    rotation = rotary(slots[None, :])
    causal = masks.Mask.up_to(slots[None], len(slots))
    *before, last = blocks
    for block in before:
        normed = block.normed(x)
        # Always compute keys and values before queries. The order of the next two lines determines
        # the order in which autograd sums the gradients of ``normed``, and training must be
        # repeatable bit for bit.
        keys, values = block.self_attn.keys_values(normed, rotation)
        own_queries = block.self_attn.queries(normed, rotation)
        x = block.finish(x, block.self_attn(own_queries, keys, values, causal))
    keys, values = last.keys_values(x, rotation)
    seen = masks.Mask.up_to(queries, len(slots))
    features: Tensor = last(at_queries(x, queries), rotary(queries), keys, values, seen)
    return features


class Fed(NamedTuple):
    """Positions and masks of the tokens that one call of the drafter processes."""

    # [B or 1, 1] int64. All tokens of a row have the same position, because they are either the
    # root or the nodes of one level. There is a single entry if this position is the same in all
    # rows.
    positions: Tensor
    rotation: Rotation  # The drafter's rotary embedding at ``positions``.
    before: list[int]  # Number of verified tokens of each row.
    # [B, b, n] bool, true if a token of the call sees a token of the round. The call processes b
    # tokens. The round has fed n tokens, including these b tokens.
    seen: Tensor
    # [B, b, S] bool, true if a token of the call sees a slot of the cache. The slots of verified
    # tokens come first, followed by the slots of the n tokens in ``seen``. None if all tokens see
    # the whole cache.
    mask: Tensor | None


class LayerState(RowState):
    """Caches with the keys and values of a drafter's causal layers."""

    def __init__(self, n_rows: int, n_layers: int) -> None:
        # One buffer per layer. It contains the slots of committed tokens, followed by the slots of
        # this round's drafts in the order in which they were fed.
        self.slots = tuple(KVBuffer(n_rows) for _ in range(n_layers))
        self.n_true = [0] * n_rows  # Number of slots of each row that hold committed tokens.
        # Number of tokens of each row that this round has fed, including the root.
        self.n_fed = 0
        # For each row, tensors [n, ...] with the target's states of committed positions that have
        # not been fed to the layers yet.
        self.fresh: list[tuple[Tensor, ...]] = [()] * n_rows
        # Set only while a CUDA graph is being recorded: the tensors from which replays of the graph
        # read the tokens and states of a round.
        self.given: Fresh | None = None

    @override
    def forget_drafts(self) -> None:
        # Drop the slots of all drafts, even of accepted ones, because the slots of rejected drafts
        # may be between them. The next round feeds the accepted drafts again. This costs the K and
        # V projections of a few tokens, which is cheaper than moving their slots.
        for buffer in self.slots:
            buffer.crop(self.n_true)
        self.n_fed = 0

    def observe(
        self,
        states: Tensor,
        kept: Sequence[Sequence[int]],
        make: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Store the target's states [B, n, ...] of committed tokens for the next draft round.

        If ``make`` is given, it transforms the states before they are stored.
        """
        counts: list[int] = []
        indices_in_batch: list[int] = []
        for row, indices in enumerate(kept):
            counts.append(len(indices))
            for index in indices:
                indices_in_batch.append(row * states.shape[1] + index)
        committed_states = states.flatten(0, 1).index_select(
            0, to_device(indices_in_batch, states.device)
        )
        made = committed_states if make is None else make(committed_states)
        for row, new in enumerate(made.split(counts)):
            self.fresh[row] = (*self.fresh[row], new)

    def fresh_rows(self, committed: CommittedTokens) -> tuple[list[list[int]], Tensor | None]:
        """Return the committed tokens without a slot, and the target's states for these tokens.

        The states are [B, n, ...], or None if the layers read only tokens.
        """
        starts: list[int] = []
        fresh_tokens: list[list[int]] = []
        for tokens, n_slots in zip(committed, self.n_true, strict=True):
            # Always feed the root, even if it was fed before: the slot of the root may contain a
            # rejected draft.
            start = min(n_slots, len(tokens) - 1)
            starts.append(start)
            fresh_tokens.append(tokens[start:])
        self.n_true = starts
        return fresh_tokens, None

    def take_round(self, committed: CommittedTokens, device: torch.device) -> Fresh:
        """Return the tokens and states of :meth:`fresh_rows` as tensors on the device.

        While a CUDA graph is recorded, return :attr:`given` instead.
        """
        if self.given is not None:
            return self.given
        tokens, states = self.fresh_rows(committed)
        return padded(tokens, device), states, [len(row) for row in tokens]

    def feed_committed(
        self,
        blocks: Sequence[DecoderBlock],
        rotary: Rotary,
        x: Tensor,  # The input of the layers, [B, n, E], right padded.
        # Number of real tokens of each row, at least 1.
        counts: Sequence[int],
        # A function that computes the last layer. If it is None, the layer's ``forward`` is called.
        last: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, Fed]:
        """Feed the tokens that were committed since the last round, up to the root.

        The slots of these tokens replace the slots of the last round's drafts.

        Returns:
            Features of the root [B, 1, E], and the root's position and mask.
        """
        before = self.n_true
        positions = positions_from(before, max(counts), x.device)
        rotation = rotary(positions, x.dtype)
        self.n_true = added(before, counts)
        self.n_fed = 1
        for slots in self.slots:
            slots.crop(before)
        *earlier, (last_block, last_slots) = zip(blocks, self.slots, strict=True)
        for block, slots in earlier:
            keys, values = slots.append(*block.keys_values(x, rotation), counts)
            has_one_token = len(counts) == 1 and x.shape[1] == 1
            mask = None if has_one_token else masks.causal_mask(positions, keys.shape[2])
            x = block(x, rotation, keys, values, mask)
        # Only the features of the root are needed, so the last layer computes only the features of
        # the root.
        seen = torch.ones(len(counts), 1, 1, dtype=torch.bool, device=x.device)
        root = self._fed(rotary, x.dtype, 0, seen)
        if last is None and len(counts) == 1 and are_alike(counts):
            append = partial(last_slots.append, counts=counts)
            return last_block.attend_last(x, rotation, append), root
        keys, values = last_slots.append(*last_block.keys_values(x, rotation), counts)
        x = (
            x[:, -1:]
            if are_alike(counts)
            else at_queries(x, to_device(counts, x.device)[:, None] - 1)
        )
        return (last or last_block)(x, root.rotation, keys, values, root.mask), root

    def begin_level(self, rotary: Rotary, level: DraftLevel) -> Fed:
        """Count the nodes of one level as fed, and return their positions and masks.

        The caller must then append the keys and values of the nodes to the caches.
        """
        self.n_fed += level.tokens.shape[1]
        return self._fed(rotary, level.parent_features.dtype, level.depth, level.seen)

    def _fed(self, rotary: Rotary, dtype: torch.dtype, depth: int, seen: Tensor) -> Fed:
        before = added(self.n_true, -1)
        # All nodes of a level have the same position in the sequence.
        positions = positions_from(added(before, depth), 1, seen.device)
        is_chain_alone = len(before) == 1 and self.n_fed == depth + 1 and are_alike(before)
        mask = None if is_chain_alone else masks.tree_mask(before, seen)
        return Fed(positions, rotary(positions, dtype), before, seen, mask)

    def feed_level(
        self, blocks: Sequence[DecoderBlock], rotary: Rotary, x: Tensor, level: DraftLevel
    ) -> Tensor:
        """Feed the nodes of one level, x [B, b, E], and return their features [B, b, E]."""
        fed = self.begin_level(rotary, level)
        for block, slots in zip(blocks, self.slots, strict=True):
            x = block.attend_cached(x, fed.rotation, slots.append, fed.mask)
        return x
