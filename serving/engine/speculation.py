"""Drafts of the server's own: one drafter, for all sequences that speculate with it at once.

Shapes: B rows, n tokens, E width, K watched layers.

The drafter's caches of the sequences that draft together are the rows of one state. A sequence that does something else
in a call, or waits, leaves it and keeps its row for itself; one that comes joins. Whoever was decoded without drafts in
between loses nothing: a drafter catches up with what was committed, from the sequence's KV or from the hidden states of
each call, which are handed to it whatever the sequence does. Who has much to catch up with, as behind a prompt, drafts
one round alone before it joins: in a batch all rows would be padded to its length.

Chains are cut where the drafter itself is unsure, and give way to plain steps where they do not pay
(``moa.decoding.policy``); that depends on how many sequences share a call, so each power of two has its own judgement.
"""

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...moa.decoding.coupling import ChainChoice, Text
from ...moa.decoding.policy import AutoPolicy, FixedShape, ShapePolicy
from ...moa.decoding.proposer import DrafterProposer
from ...moa.decoding.tree import DraftTree, Shape, TreeShape
from ...moa.drafters.base import Drafter
from ...moa.targets.live import Target
from .kv import JoinedKV
from .sequence import Sequence

_MOST_BEHIND = 64
"""Tokens that a row may have to catch up with in a batch."""


@dataclass(frozen=True)
class Seen:
    """What a target call gave for one sequence.

    Attributes:
        hidden: [n, E], or [n, K * E] of the layers that the drafter watches.
        kept: which of the n tokens were committed, in order.
    """

    sequence: Sequence
    hidden: Tensor
    kept: list[int]


class Speculation:
    """One drafter and its caches of all sequences that name it.

    Args:
        shape: shape of the drafts; None for chains that give way to plain steps.

    Attributes:
        reuses_contexts: whether contexts that are encoded for clients spare the drafter work of its own.
    """

    def __init__(self, target: Target, drafter: Drafter, shape: Shape | None) -> None:
        self.drafter = drafter
        self._proposer = DrafterProposer(target, drafter)
        most = self._proposer.max_depth
        self._shape = shape if shape is None or most is None else shape.cut(most)
        self._observes = type(drafter).observe is not Drafter.observe
        self.reuses_contexts = drafter.context_needs_kv and type(drafter).reuse_context is not Drafter.reuse_context
        self._apart: dict[int, Any] = {}  # sequence -> its own row
        self._together: list[int] = []  # the sequences of the rows of the state
        self._state: Any = None
        self._n_drafted_at: dict[int, int] = {}  # sequence -> tokens of its text when it was last drafted for
        self._policies: dict[int, ShapePolicy] = {}

    @property
    def frozen(self) -> Any:
        """The target's weights that the drafter needs."""
        return self._proposer.frozen

    def begin(self, sequence: Sequence) -> None:
        """Start with a sequence without KV, anew where it had been known."""
        self.forget(sequence)
        self._apart[sequence.id] = self.drafter.new_state(1)

    def forget(self, sequence: Sequence) -> None:
        """Drop the caches of a sequence, if there are any."""
        self._apart.pop(sequence.id, None)
        self._n_drafted_at.pop(sequence.id, None)
        if sequence.id in self._together:
            self._keep([id_ for id_ in self._together if id_ != sequence.id])

    def abandon(self, sequences: Rows[Sequence]) -> None:
        """Drop the caches of the gathered sequences, whatever state a failure has left them in."""
        self._state, self._together = None, []
        for sequence in sequences:
            self.forget(sequence)

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
            if id_ in self._together or n_tokens - self._n_drafted_at[id_] > _MOST_BEHIND:
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
        most = max(sequence.n_remaining for sequence in sequences) - 1  # the target adds a token
        if shape is None or most < 1:
            return
        shape = shape.cut(most)
        by_id = {sequence.id: sequence for sequence in sequences}
        if self._together:
            self._draft_rows([by_id[id_] for id_ in self._together], self._state, shape)
        for sequence in sequences:
            if sequence.id in self._apart:
                self._draft_rows([sequence], self._apart[sequence.id], shape)

    def _draft_rows(self, rows: Rows[Sequence], state: Any, shape: Shape) -> None:
        cache = JoinedKV([sequence.kv for sequence in rows])
        choice = ChainChoice([Text(s.tokens, s.request.sampling, s.request.seed) for s in rows])
        self._proposer.resume(cache, state, choice)
        tree = self._proposer.propose([sequence.tokens for sequence in rows], shape)
        for row, sequence in enumerate(rows):
            sequence.drafts, sequence.parents = _cut(tree, row, shape, sequence.n_remaining - 1)
            self._n_drafted_at[sequence.id] = len(sequence.tokens)

    def observe(self, seen: Rows[Seen]) -> None:
        """Hand over what a call gave; the gathered sequences are all among them."""
        if not self._observes:
            return
        by_id = {one.sequence.id: one for one in seen}
        if self._together:
            rows = [by_id[id_] for id_ in self._together]
            hidden = nn.utils.rnn.pad_sequence([one.hidden for one in rows], batch_first=True)
            self.drafter.observe(self._state, hidden, [one.kept for one in rows])
        for id_, one in by_id.items():
            if id_ in self._apart:
                self.drafter.observe(self._apart[id_], one.hidden[None], [one.kept])

    def reuse_contexts(self, sequences: Rows[Sequence], contexts: Rows[Tensor]) -> None:
        """Hand over contexts [n, W] that were encoded for the clients of these sequences, behind ``n_context``."""
        if not self.reuses_contexts:
            return
        by_id = {
            sequence.id: (context, sequence.n_context) for sequence, context in zip(sequences, contexts, strict=True)
        }
        nothing = contexts[0][:0], 0
        rows = [by_id.get(id_, nothing) for id_ in self._together]
        if any(len(context) for context, _ in rows):
            self._reuse(self._state, rows)
        for id_, row in by_id.items():
            if id_ in self._apart:
                self._reuse(self._apart[id_], [row])

    def _reuse(self, state: Any, rows: Rows[tuple[Tensor, int]]) -> None:
        padded = nn.utils.rnn.pad_sequence([context for context, _ in rows], batch_first=True)
        self.drafter.reuse_context(state, padded, [start for _, start in rows], [len(context) for context, _ in rows])

    def judge(self, n_sequences: int, n_drafts: int, n_committed: int, round_s: float) -> None:
        """Learn from a round of the gathered sequences: their drafts and committed tokens, and the seconds it took."""
        self._policy(n_sequences).observe(n_drafts, n_committed / n_sequences, round_s)

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
            self._policies[size] = FixedShape(shape) if shape else AutoPolicy(max_depth=self._proposer.max_depth)
        return self._policies[size]


def _cut(tree: DraftTree, row: int, shape: Shape, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut a row's drafts: a chain to what the sequence still needs, and behind the draft at which it became unsure.

    Returns:
        Tokens and parents.
    """
    tokens, parents = (rows[row] for rows in tree.on_host)
    if isinstance(shape, TreeShape) and shape.is_chain:
        length = min(len(tokens), most)
        if shape.stop_below and tree.scores is not None:
            is_unsure = (tree.scores[row] < math.log(shape.stop_below)).tolist()
            length = min(length, 1 + is_unsure.index(True) if True in is_unsure else length)
        tokens, parents = tokens[:length], parents[:length]
    return tuple(tokens), tuple(parents)
