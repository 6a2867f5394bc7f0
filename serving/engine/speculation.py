"""Drafts and contexts of one drafter, for all sequences that name it.

Shapes: B rows, n tokens, E width, K watched layers, W numbers of a context.

The drafter's caches of the sequences that draft together are the rows of one state. A sequence that does something else
in a call leaves it and keeps its row for itself; one that comes back joins, after a round alone where it has much to
catch up with, as after a prompt: in a batch all rows would be padded to its length. Chains are cut where the drafter
itself is unsure, and replaced by plain steps where they do not pay (``moa.decoding.policy``), which is judged for each
power of two of sequences that share a call.
"""

import logging
import math
from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...moa.decoding.policy import AutoPolicy, ShapePolicy
from ...moa.decoding.proposer import DrafterProposer
from ...moa.decoding.sampling import ChainChoice
from ...moa.decoding.tree import TreeShape
from ...moa.drafters.base import Drafter
from ...moa.drafters.caches import stacked
from ...moa.nn.masks import to_device
from ...moa.targets.bundle import FrozenTarget
from .pool import BLOCK_TOKENS, PooledKV
from .runner import Output
from .scheduler import Scheduled
from .sequence import Sequence

_LOG = logging.getLogger(__name__)
_MAX_CATCH_UP = 64
"""Tokens that a row may have to catch up with in a batch."""


class Speculation:
    """One drafter and its caches of all sequences that name it; no shape means ``auto``."""

    def __init__(
        self, name: str, frozen: FrozenTarget, drafter: Drafter, shape: TreeShape | None
    ) -> None:
        self._name = name
        self.drafter = drafter
        self._proposer = DrafterProposer(frozen, drafter)
        max_depth = self._proposer.max_depth
        self._shape = shape if shape is None or max_depth is None else shape.cut(max_depth)
        self._observes = type(drafter).observe is not Drafter.observe
        # Contexts that are encoded for clients then spare the drafter work of its own.
        self.reuses_contexts = (
            drafter.context_needs_kv and type(drafter).reuse_context is not Drafter.reuse_context
        )
        self._apart: dict[int, Any] = {}  # sequence -> its own row
        self._together: list[int] = []  # the sequences of the rows of the state
        self._state: Any = None
        # sequence -> tokens of its text when it was last drafted for
        self._n_drafted_at: dict[int, int] = {}
        self._policies: dict[int, ShapePolicy] = {}

    def begin(self, sequence: Sequence) -> None:
        """Start a sequence without KV, also one that was known."""
        self.forget(sequence)
        self._apart[sequence.id] = self.drafter.new_state(1)

    def forget(self, sequence: Sequence) -> None:
        """Drop the caches of a sequence, if there are any."""
        self._apart.pop(sequence.id, None)
        self._n_drafted_at.pop(sequence.id, None)
        if sequence.id in self._together:
            self._keep([id_ for id_ in self._together if id_ != sequence.id])

    def abandon(self, sequences: Rows[Sequence]) -> None:
        """Drop all caches of the state and of these sequences after a failure, and decode these plainly."""
        self._state = None
        self._together = []
        for sequence in sequences:
            self.forget(sequence)
            sequence.is_draftable = False
            sequence.drafts = ()
            sequence.parents = ()

    # Drafts

    def gather(self, sequences: Rows[Sequence]) -> None:
        """Make these the sequences that draft in this call; all have KV up to their roots."""
        texts = {sequence.id: len(sequence.tokens) for sequence in sequences}
        for id_ in [id_ for id_ in self._together if id_ not in texts]:
            self._apart[id_] = self._state.take_rows([self._together.index(id_)])
        self._keep([id_ for id_ in self._together if id_ in texts])
        for id_, n_tokens in texts.items():
            if id_ not in self._n_drafted_at:
                self._policy(len(texts)).begin()
                self._n_drafted_at[id_] = 0
            if id_ in self._together or n_tokens - self._n_drafted_at[id_] > _MAX_CATCH_UP:
                continue
            row = self._apart.pop(id_)
            if self._state is None:
                self._state = row
            else:
                self._state.add_rows(row)
            self._together.append(id_)

    def draft(self, sequences: Rows[Sequence]) -> None:
        """Set the drafts of the gathered sequences, none where plain steps are better."""
        for sequence in sequences:
            sequence.drafts = sequence.parents = ()
        shape = self._policy(len(sequences)).next_shape()
        # the target adds a token
        max_depth = max(sequence.n_remaining for sequence in sequences) - 1
        if shape is None or max_depth < 1:
            return
        shape = shape.cut(max_depth)
        by_id = {sequence.id: sequence for sequence in sequences}
        if self._together:
            self._draft_rows([by_id[id_] for id_ in self._together], self._state, shape)
        for sequence in sequences:
            if sequence.id in self._apart:
                self._draft_rows([sequence], self._apart[sequence.id], shape)

    def _draft_rows(self, rows: Rows[Sequence], state: Any, shape: TreeShape) -> None:
        cache = JoinedKV([sequence.kv for sequence in rows])
        choice = ChainChoice([sequence.text for sequence in rows])
        self._proposer.resume(cache, state, choice)
        tree = self._proposer.propose([sequence.tokens for sequence in rows], shape)
        # With tokens and parents it comes to the host which drafts the drafter is unsure of.
        unsure: Rows[Rows[int]] = [()] * len(rows)
        if shape.stop_below and tree.scores is not None:
            unsure = tree.on_host_with((tree.scores < math.log(shape.stop_below)).long())
        for row, sequence in enumerate(rows):
            length = sequence.n_remaining - 1 if shape.is_chain else tree.n_nodes
            if 1 in unsure[row]:
                length = min(length, 1 + unsure[row].index(1))
            tokens, parents = (of_rows[row][:length] for of_rows in tree.on_host)
            sequence.drafts = tuple(tokens)
            sequence.parents = tuple(parents)
            self._n_drafted_at[sequence.id] = len(sequence.tokens)

    def states(self, output: Output) -> Tensor:
        """Select what the drafter sees of a call, which may have watched more layers: [n, E] or [n, K * E]."""
        if not self.drafter.observed_layers:
            return output.hidden
        return torch.cat([output.layers[layer] for layer in self.drafter.observed_layers], dim=-1)

    def observe(self, served: Rows[Scheduled]) -> None:
        """Hand over the results of a call; the gathered sequences are all among them."""
        if not self._observes:
            return
        by_id = {one.sequence.id: one for one in served}
        if self._together:
            rows = [by_id[id_] for id_ in self._together]
            hidden = stacked([self.states(one.output) for one in rows])
            self.drafter.observe(self._state, hidden, [one.kept for one in rows])
        for id_, one in by_id.items():
            if id_ in self._apart:
                self.drafter.observe(self._apart[id_], self.states(one.output)[None], [one.kept])

    def judge(self, rounds: Rows[Scheduled], round_s: float) -> None:
        """Let the policy learn from a round of the gathered sequences, which took so many seconds."""
        n_committed = sum(len(one.commit.tokens) for one in rounds) / len(rounds)
        policy = self._policy(len(rounds))
        was_off = policy.is_off
        policy.observe(sum(one.n_drafts for one in rounds), n_committed, round_s)
        if policy.is_off == was_off:
            return
        fewest = 1 << (len(rounds).bit_length() - 1)
        texts = f"{fewest} to {2 * fewest - 1} texts" if fewest > 1 else "1 text"
        if policy.is_off:
            _LOG.info(
                "drafter %s stops in calls over %s: its drafts cost more than they gain",
                self._name,
                texts,
            )
        else:
            _LOG.info("drafter %s drafts again in calls over %s", self._name, texts)

    def _keep(self, ids: list[int]) -> None:
        if not ids:
            self._state = None
        elif ids != self._together:
            self._state.select_rows([self._together.index(id_) for id_ in ids])
        self._together = ids

    def _policy(self, n_sequences: int) -> ShapePolicy:
        size = n_sequences.bit_length()
        if size not in self._policies:
            shape = self._shape
            self._policies[size] = (
                ShapePolicy(shape) if shape else AutoPolicy(max_depth=self._proposer.max_depth)
            )
        return self._policies[size]

    # Contexts, for clients that draft with this drafter

    def encode_contexts(self, sequences: Rows[Sequence]) -> dict[int, tuple[Tensor, int]]:
        """Encode what the target has read of these sequences; all have some.

        Returns the new contexts [n, W] of each by its id, and the position of the first.
        """
        counts = [sequence.n_unencoded for sequence in sequences]
        # [n, E]
        hidden = torch.cat([part for sequence in sequences for part in sequence.unencoded])
        spans = [
            (sequence, sequence.n_context, n) for sequence, n in zip(sequences, counts, strict=True)
        ]
        positions = to_device(
            [at for _, first, n in spans for at in range(first, first + n)], hidden.device
        )
        kv = None
        if self.drafter.context_needs_kv:
            slots = [
                s.kv.first_slot + index
                for s, first, n in spans
                for index in range(first, first + n)
            ]
            kv = sequences[0].kv.pool.packed(to_device(slots, hidden.device))
        contexts = self.drafter.encode_context(hidden, kv, positions).split(counts)
        for (sequence, first, n), context in zip(spans, contexts, strict=True):
            sequence.n_context = first + n
            sequence.unencoded.clear()
            sequence.encoded.append(context)
        return {
            s.id: (context, first) for (s, first, _), context in zip(spans, contexts, strict=True)
        }

    def reuse(self, by_id: dict[int, tuple[Tensor, int]]) -> None:
        """Give the drafter's own caches what :meth:`encode_contexts` has made."""
        nothing = next(iter(by_id.values()))[0][:0], 0
        together = [by_id.get(id_, nothing) for id_ in self._together]
        batches = [(self._state, together)] if any(len(context) for context, _ in together) else []
        batches += [(self._apart[id_], [row]) for id_, row in by_id.items() if id_ in self._apart]
        for state, rows in batches:
            padded = stacked([context for context, _ in rows])
            counts = [len(context) for context, _ in rows]
            self.drafter.reuse_context(state, padded, [start for _, start in rows], counts)


class JoinedKV:
    """The KV of B sequences as a drafter reads it for one round (:class:`~moa_data.moa.targets.cache.KVSource`).

    The drafter writes after the committed slots of copies, never to the sequences.
    """

    def __init__(self, rows: Rows[PooledKV]) -> None:
        self._rows, self.lengths = rows, [kv.length for kv in rows]  # committed tokens of each row
        self._copies: dict[int, Tensor] = {}  # layer -> [2, B, H_kv, S, d]

    def packed(self, starts: Rows[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions of each row from its start on, the last one's beyond its length: [B, n, L, D]."""
        packed = self._rows[0].pool.packed(self._slots(starts, n_tokens), first_layer)
        return packed.reshape(len(self._rows), n_tokens, *packed.shape[1:])

    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """View keys and values [B, H_kv, n_slots, d] of a layer, which may be written to after the committed part."""
        copy = self._copies.get(layer)
        if copy is None:
            # Room for a usual round, so that its levels need no second copy.
            slots = self._slots([0] * len(self._rows), n_slots + BLOCK_TOKENS)
            rows = self._rows[0].pool.buffer[:, layer].index_select(2, slots)
            copy = rows.unflatten(2, (len(self._rows), -1)).transpose(1, 2)
        elif copy.shape[3] < n_slots:
            copy = pad(copy, (0, 0, 0, n_slots + BLOCK_TOKENS - copy.shape[3]))
        self._copies[layer] = copy
        return copy[0, :, :, :n_slots], copy[1, :, :, :n_slots]

    def _slots(self, starts: Rows[int], n_tokens: int) -> Tensor:
        """Find the slots of n positions of each row from its start on, that of the last one beyond it: [B * n]."""
        slots = []
        for kv, start in zip(self._rows, starts, strict=True):
            last = kv.first_slot + max(0, kv.length - 1)
            slots += [min(kv.first_slot + start + index, last) for index in range(n_tokens)]
        return to_device(slots, self._rows[0].pool.buffer.device)
