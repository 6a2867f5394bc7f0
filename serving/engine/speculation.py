"""Drafts and contexts of one drafter, for all sequences that use it.

A *context* is the data that a client's drafter needs about one position that the target has
processed. The server encodes it from the target's activations.

Shapes: B rows, n tokens, E hidden size, K target layers whose outputs the drafter reads, W numbers
per context.

The sequences that draft together share one drafter state. This state contains the drafter's caches,
and has one row per sequence. The drafter processes all rows of this state together. So if a
sequence does not draft before a target call, its row becomes a separate state. When the sequence
drafts again, its row returns to the shared state. If the drafter first has to process many tokens
of a sequence, as after a prompt, this sequence drafts alone for a round. Otherwise the rows of all
other sequences would be padded to this number of tokens.

A chain of drafts ends early if the drafter is unsure of a draft. If drafts cost more time than they
save, the target decodes without them (``moa.decoding.policy``). For each range of batch sizes (1, 2
to 3, 4 to 7, ... sequences per target call), this is decided separately.
"""

import logging
import math
from collections.abc import Sequence as GenericSequence
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
"""Limit of the number of tokens that the drafter still has to process before it can draft.

Sequences within this limit draft together in one batch, whose caches are the shared state. A
sequence above the limit drafts alone. Otherwise the whole batch would be padded to the number of
tokens of this sequence.
"""


class Speculation:
    """One drafter, and its caches for all sequences that use this drafter.

    Args:
        name: name of the drafter, for log messages.
        frozen: the target's weights that the drafter needs.
        drafter: the drafter.
        shape: shape of the drafts. If it is None, a policy chooses the number of drafts (``auto``).
    """

    def __init__(
        self, name: str, frozen: FrozenTarget, drafter: Drafter, shape: TreeShape | None
    ) -> None:
        self._name = name
        self.drafter = drafter
        self._proposer = DrafterProposer(frozen, drafter)
        max_depth = self._proposer.max_depth
        self._shape = shape if shape is None or max_depth is None else shape.cut(max_depth)
        self._observes = type(drafter).observe is not Drafter.observe
        # Whether the server's drafts can reuse contexts (data for clients' drafters) that the
        # drafter has encoded for clients.
        self.reuses_contexts = (
            drafter.context_needs_kv and type(drafter).reuse_context is not Drafter.reuse_context
        )
        # Maps the id of each sequence that is not in the shared state to the drafter's caches of
        # this sequence.
        self._apart: dict[int, Any] = {}
        # The ids of the sequences in the shared state, in the order of its rows.
        self._together: list[int] = []
        # The shared state: the drafter's caches of all sequences that draft in one batch. It is
        # None if there are no such sequences.
        self._state: Any = None
        # Sequence id -> the number of tokens that the sequence had when it last got drafts.
        self._n_drafted_at: dict[int, int] = {}
        # One policy per bit length of the number of sequences in a target call. So calls over 2 and
        # 3 sequences share a policy, and so do calls over 4 to 7 sequences.
        self._policies: dict[int, ShapePolicy] = {}

    def begin(self, sequence: Sequence) -> None:
        """Create empty drafter caches for a sequence without target KV, and drop its old caches."""
        self.forget(sequence)
        self._apart[sequence.id] = self.drafter.new_state(1)

    def forget(self, sequence: Sequence) -> None:
        """Drop the caches of a sequence, if it has any."""
        self._apart.pop(sequence.id, None)
        self._n_drafted_at.pop(sequence.id, None)
        if sequence.id in self._together:
            self._keep([id_ for id_ in self._together if id_ != sequence.id])

    def abandon(self, sequences: GenericSequence[Sequence]) -> None:
        """Handle a failure of the drafter: drop its caches, and stop drafting for some sequences.

        All sequences in the shared state (the caches of the sequences that draft in one batch) lose
        their caches, because the failure may have damaged any row.

        Args:
            sequences: sequences that get no more drafts. They lose their caches even if they are
                not in the shared state.
        """
        self._state = None
        self._together = []
        for sequence in sequences:
            self.forget(sequence)
            sequence.is_draftable = False
            sequence.drafts = ()
            sequence.parents = ()

    # The methods below draft tokens on the server.

    def gather(self, sequences: GenericSequence[Sequence]) -> None:
        """Move the sequences that draft now to the shared state, and all others out of it.

        The shared state is the drafter's caches for all sequences that draft in one batch. A
        sequence drafts alone, outside of the shared state, if the drafter still has to process many
        of its tokens.

        Args:
            sequences: the sequences that draft. Each of their tokens has target KV, except the last
                one (the root).
        """
        lengths = {sequence.id: len(sequence.tokens) for sequence in sequences}
        for id_ in [id_ for id_ in self._together if id_ not in lengths]:
            self._apart[id_] = self._state.take_rows([self._together.index(id_)])
        self._keep([id_ for id_ in self._together if id_ in lengths])
        for id_, n_tokens in lengths.items():
            if id_ not in self._n_drafted_at:
                self._policy(len(lengths)).begin()
                self._n_drafted_at[id_] = 0
            if id_ in self._together or n_tokens - self._n_drafted_at[id_] > _MAX_CATCH_UP:
                continue
            row = self._apart.pop(id_)
            if self._state is None:
                self._state = row
            else:
                self._state.add_rows(row)
            self._together.append(id_)

    def draft(self, sequences: GenericSequence[Sequence]) -> None:
        """Draft for the sequences that were passed to the last :meth:`gather`.

        The policy may stop drafting for some time. Then the sequences get no drafts.
        """
        for sequence in sequences:
            sequence.drafts = sequence.parents = ()
        shape = self._policy(len(sequences)).next_shape()
        # The target adds one token to the accepted drafts. So a sequence that may get n more tokens
        # needs at most n - 1 drafts. Here n is the maximum over all sequences.
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

    def _draft_rows(self, rows: GenericSequence[Sequence], state: Any, shape: TreeShape) -> None:
        cache = BatchedKV([sequence.kv for sequence in rows])
        choice = ChainChoice([sequence.sampling_state for sequence in rows])
        self._proposer.resume(cache, state, choice)
        tree = self._proposer.propose([sequence.tokens for sequence in rows], shape)
        # Flag the drafts that the drafter is unsure of. The flags are copied to the host together
        # with the tokens and parents of the drafts, because each copy waits for the GPU.
        unsure: GenericSequence[GenericSequence[int]] = [()] * len(rows)
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
        """Return the target's hidden states that the drafter reads for the n tokens of a segment.

        Args:
            output: results of a target call for the segment. They may also contain outputs of
                layers that only other drafters read.

        Returns:
            The last hidden states [n, E], or the concatenated outputs [n, K * E] of the K layers
            that the drafter reads.
        """
        if not self.drafter.observed_layers:
            return output.hidden
        return torch.cat([output.layers[layer] for layer in self.drafter.observed_layers], dim=-1)

    def observe(self, served: GenericSequence[Scheduled]) -> None:
        """Pass the results of a target call to the drafter.

        Args:
            served: the results of sequences that use the drafter. All sequences in the shared state
                must be among them, because the drafter processes their rows together.
        """
        if not self._observes:
            return
        by_id = {item.sequence.id: item for item in served}
        if self._together:
            rows = [by_id[id_] for id_ in self._together]
            hidden = stacked([self.states(item.output) for item in rows])
            self.drafter.observe(self._state, hidden, [item.kept for item in rows])
        for id_, item in by_id.items():
            if id_ in self._apart:
                self.drafter.observe(self._apart[id_], self.states(item.output)[None], [item.kept])

    def judge(self, rounds: GenericSequence[Scheduled], round_s: float) -> None:
        """Report a round to the policy, which chooses the number of drafts of later rounds.

        The report has the number of committed tokens, and the duration of the round.

        Args:
            rounds: the results of the target call for the sequences that could get drafts.
            round_s: duration of drafting and target call in seconds.
        """
        n_committed = sum(len(item.commit.tokens) for item in rounds) / len(rounds)
        policy = self._policy(len(rounds))
        was_off = policy.is_off
        policy.observe(sum(item.n_drafts for item in rounds), n_committed, round_s)
        if policy.is_off == was_off:
            return
        fewest = 1 << (len(rounds).bit_length() - 1)
        texts = f"{fewest} to {2 * fewest - 1} sequences" if fewest > 1 else "1 sequence"
        if policy.is_off:
            _LOG.info(
                "the drafter %s makes no drafts while the target processes %s at once, because "
                "drafting costs more time than it saves",
                self._name,
                texts,
            )
        else:
            _LOG.info(
                "the drafter %s makes drafts again while the target processes %s at once",
                self._name,
                texts,
            )

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

    # The methods below encode contexts for clients that draft with this drafter.

    def encode_contexts(
        self, sequences: GenericSequence[Sequence]
    ) -> dict[int, tuple[Tensor, int]]:
        """Encode the contexts of all positions that have a hidden state, but no context yet.

        A context is the data that a client's drafter needs about one position.

        Args:
            sequences: sequences that have such positions.

        Returns:
            Sequence id -> the new contexts [n, W], and the position of the first context.
        """
        counts = [sequence.n_unencoded for sequence in sequences]
        # The target's hidden states of all positions to encode, [n, E].
        hidden = torch.cat([states for sequence in sequences for states in sequence.unencoded])
        spans = [
            (sequence, sequence.n_context, n) for sequence, n in zip(sequences, counts, strict=True)
        ]
        positions = to_device(
            [position for _, first, n in spans for position in range(first, first + n)],
            hidden.device,
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
        """Put contexts (data that was encoded for clients) into the drafter's caches.

        When the drafter drafts on the server, it need not encode these positions again.

        Args:
            by_id: the result of :meth:`encode_contexts`.
        """
        no_context = next(iter(by_id.values()))[0][:0], 0
        together = [by_id.get(id_, no_context) for id_ in self._together]
        batches = [(self._state, together)] if any(len(context) for context, _ in together) else []
        batches += [(self._apart[id_], [row]) for id_, row in by_id.items() if id_ in self._apart]
        for state, rows in batches:
            padded = stacked([context for context, _ in rows])
            counts = [len(context) for context, _ in rows]
            self.drafter.reuse_context(state, padded, [start for _, start in rows], counts)


class BatchedKV:
    """The KV of B sequences as a drafter reads it for one round.

    This class implements :class:`~moa_data.moa.targets.cache.KVSource`. If the drafter writes KV,
    it writes to copies, after the committed slots. So the KV of the sequences does not change.
    """

    def __init__(self, rows: GenericSequence[PooledKV]) -> None:
        # ``lengths`` has the number of committed positions of each row.
        self._rows, self.lengths = rows, [kv.length for kv in rows]
        # Layer -> a copy of the KV of all rows in this layer, [2, B, H_kv, S, d].
        self._copies: dict[int, Tensor] = {}

    def packed(self, starts: GenericSequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions of each row: [B, n, L, D] (L layers, D numbers of a layer).

        Args:
            starts: the first position of each row. A position at or beyond the length of a row gets
                the KV of the row's last committed position.
            n_tokens: the number of positions per row.
            first_layer: the first layer to pack.
        """
        packed = self._rows[0].pool.packed(self._slots(starts, n_tokens), first_layer)
        return packed.reshape(len(self._rows), n_tokens, *packed.shape[1:])

    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values, [B, H_kv, n_slots, d].

        The drafter may write to the slots at or beyond the length of a row.
        """
        copy = self._copies.get(layer)
        if copy is None:
            # Leave room for the drafts of a typical round. Otherwise the KV would be copied again
            # when the drafter adds its drafts.
            slots = self._slots([0] * len(self._rows), n_slots + BLOCK_TOKENS)
            rows = self._rows[0].pool.buffer[:, layer].index_select(2, slots)
            copy = rows.unflatten(2, (len(self._rows), -1)).transpose(1, 2)
        elif copy.shape[3] < n_slots:
            copy = pad(copy, (0, 0, 0, n_slots + BLOCK_TOKENS - copy.shape[3]))
        self._copies[layer] = copy
        return copy[0, :, :, :n_slots], copy[1, :, :, :n_slots]

    def _slots(self, starts: GenericSequence[int], n_tokens: int) -> Tensor:
        """Return the slots of n consecutive positions of each row, [B * n] int64.

        A position at or beyond the length of a row gets the slot of the row's last committed
        position.
        """
        slots = []
        for kv, start in zip(self._rows, starts, strict=True):
            last = kv.first_slot + max(0, kv.length - 1)
            slots += [min(kv.first_slot + start + index, last) for index in range(n_tokens)]
        return to_device(slots, self._rows[0].pool.buffer.device)
