"""Who chooses the shape of each round's drafts: nobody, or measured costs and acceptance and what this answer shows.

Costs are measured once, for a moment, on a few prompts; the machine, the context and the text then differ. So the
policy times its own rounds and counts its own accepted drafts, and corrects three things:

- how much more a round with drafts takes than it should, compared with the plain rounds beside it. Only neighbours are
  compared: a machine that gets slower for a minute slows both.
- how well the drafter does on answers of late, against the prompts that acceptance was counted on.
- how well it does on this answer.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .shape_costs import MARGIN, AcceptanceLog, DecodingCosts, candidates
from .tree import Shape, TreeShape

_PRIOR_ROUNDS, _LEAST_PRIOR_ROUNDS = 12.0, 1.0
"""Rounds of an answer that other answers weigh as much as, at its beginning and at the end of a long one. What a round
commits scatters as widely as its mean: with fewer, three bad rounds, as answers often begin, make a bad drafter."""
_FADE_PRIOR = 0.98
"""What is left of the weight of other answers after a round with drafts."""
_FADE, _FADE_PLAIN = 0.98, 0.99
"""What is left of an answer's evidence after a round with drafts, and after a plain one."""
_N_PAIRS, _N_SURE = 15, 3
"""Pairs of neighbouring rounds that are remembered, and how many outweigh the costs that were measured."""
_DRAFTED_IN_A_ROW = {False: 6, True: 48}
"""Rounds with drafts after which a plain one is timed, before and after there are pairs enough."""
_FORGET_EVERY = 64
"""Plain rounds in a row after which the oldest pair no longer counts: what slowed drafts down then may be over."""
_N_ANSWERS = 8
"""Answers that are remembered; the prompts of the measurement count as one of them until they are forgotten."""


class ShapePolicy(Protocol):
    """Chooses the shape of each round's drafts."""

    def begin(self, n_prompt_tokens: int, max_new_tokens: int) -> None:
        """Forget what was, at the beginning of a generation.

        Args:
            n_prompt_tokens: of the longest row.
            max_new_tokens: most tokens that a row may get.
        """
        ...

    def next_shape(self) -> Shape | None:
        """Of the next round; None for a plain decoding step."""
        ...

    def observe(self, n_drafts: int, accepted: Sequence[Sequence[int]], round_s: float, is_cut: bool) -> None:
        """Learn from the round that has just ended.

        Args:
            n_drafts: of each row.
            accepted: the accepted nodes of each row.
            round_s: seconds of drafting and verifying.
            is_cut: the shape lost levels, because no row had use for so many drafts.
        """
        ...


@dataclass(frozen=True)
class FixedShape:
    """A policy that has made up its mind.

    Attributes:
        shape: of every round; None for plain decoding.
    """

    shape: Shape | None

    def begin(self, n_prompt_tokens: int, max_new_tokens: int) -> None:
        """There is nothing to forget."""

    def next_shape(self) -> Shape | None:
        """Always the same."""
        return self.shape

    def observe(self, n_drafts: int, accepted: Sequence[Sequence[int]], round_s: float, is_cut: bool) -> None:
        """Nothing is learned."""


class AdaptivePolicy:
    """The fastest shape round by round.

    An answer on which the drafter fails is soon decoded plainly. There the memory of its failure fades, so that it is
    tried again; and a prompt that takes the drafter longer to read than its drafts would save, in an answer as long as
    those before, is decoded plainly altogether.

    Args:
        costs: of the parts of a round.
        log: of acceptance on typical prompts.
        is_drawn: whether chains are drawn from the drafter's distribution.
    """

    def __init__(self, costs: DecodingCosts, log: AcceptanceLog, is_drawn: bool = False) -> None:
        self._costs, self._shapes = costs, candidates(is_drawn, log.widest)
        self._accepted = np.array([log.committed(shape) - 1.0 for shape in self._shapes])
        self._round_s = np.array([costs.round_s(shape, log.n_drafts(shape)) for shape in self._shapes])
        self._surcharge = _Surcharge()
        self._answers = deque([(_PRIOR_ROUNDS, 1.0)], maxlen=_N_ANSWERS)  # weight, accepted over expected
        self._answers_n_tokens: deque[float] = deque(maxlen=_N_ANSWERS)
        self._n_tokens = 0.0  # of this answer
        self._n_drafted_rounds = 0  # since the last plain one, over all answers
        self._n_plain_rounds = 0  # since the last one with drafts, likewise
        self._answer_expected = 0.0
        self.begin(0, 1)

    def begin(self, n_prompt_tokens: int, max_new_tokens: int) -> None:
        """Start an answer from what is known of others."""
        self._remember_answer()
        self._n_rounds, self._seen, self._expected = 0.0, 0.0, 0.0
        self._n_prior_rounds = _PRIOR_ROUNDS
        self._answer_n_rounds, self._answer_seen, self._answer_expected = 0, 0.0, 0.0
        self._chosen: int | None = None
        self._n_unread = n_prompt_tokens
        self._surcharge.forget_neighbour()
        saved_s = self._costs.round_s(None) - 1.0 / float(self._speeds(self._typical).max())
        # A first answer may be short: reading must pay within a quarter of what it may have.
        n_tokens = max_new_tokens / 4
        if self._answers_n_tokens:
            n_tokens = min(max_new_tokens, sum(self._answers_n_tokens) / len(self._answers_n_tokens))
        self._drafts = saved_s * n_tokens > self._costs.prompt_token_s * n_prompt_tokens

    def next_shape(self) -> TreeShape | None:
        """The shape with the best expected speed; None for a plain step."""
        self._chosen = None
        if not self._drafts:
            return None
        if self._n_rounds and self._n_drafted_rounds >= _DRAFTED_IN_A_ROW[self._surcharge.is_sure]:
            return None
        own = self._seen / self._expected if self._expected else 1.0
        n_prior = self._n_prior_rounds
        scale = (self._n_rounds * own + n_prior * self._typical) / (self._n_rounds + n_prior)
        speeds = self._speeds(scale)
        best = int(speeds.argmax())
        if speeds[best] * self._costs.round_s(None) > MARGIN:
            self._chosen = best
            return self._shapes[best]
        return None

    def observe(self, n_drafts: int, accepted: Sequence[Sequence[int]], round_s: float, is_cut: bool = False) -> None:
        """Compare with what was expected of the shape.

        Args:
            n_drafts: of each row.
            accepted: the accepted nodes of each row.
            round_s: seconds of the round.
            is_cut: the shape lost levels at the end of an answer, so that nothing was expected of what was drafted.
        """
        seen = float(np.mean([len(nodes) for nodes in accepted]))
        self._n_tokens += 1.0 + seen
        if is_cut:
            self._n_unread = 0 if n_drafts else self._n_unread + 1
            self._surcharge.forget_neighbour()
            return
        if self._chosen is None:
            self._n_rounds *= _FADE_PLAIN
            self._n_unread += 1
            self._n_drafted_rounds = 0
            self._n_plain_rounds += 1
            if self._n_plain_rounds % _FORGET_EVERY == 0:
                self._surcharge.forget_oldest()
            self._surcharge.observe_plain(round_s / self._costs.round_s(None))
            return
        # Beside its drafts, the drafter has read what was decoded without it.
        shape = self._shapes[self._chosen]
        expected_s = self._costs.round_s(shape, n_drafts if shape.is_chain else None)
        expected_s += self._costs.prompt_token_s * max(0, self._n_unread)
        if self._n_rounds:
            self._surcharge.observe_drafted(round_s / expected_s)
        self._n_unread = 0
        self._n_drafted_rounds, self._n_plain_rounds = self._n_drafted_rounds + 1, 0
        expected = float(self._accepted[self._chosen])
        self._n_rounds = self._n_rounds * _FADE + 1.0
        self._n_prior_rounds = max(_LEAST_PRIOR_ROUNDS, self._n_prior_rounds * _FADE_PRIOR)
        self._seen = self._seen * _FADE + seen
        self._expected = self._expected * _FADE + expected
        self._answer_n_rounds += 1
        self._answer_seen, self._answer_expected = self._answer_seen + seen, self._answer_expected + expected

    @property
    def _typical(self) -> float:
        return sum(weight * ratio for weight, ratio in self._answers) / sum(weight for weight, _ in self._answers)

    def _speeds(self, scale: float) -> np.ndarray:
        """Tokens per second of each shape, where acceptance is this many times that of the measurement."""
        return (1.0 + scale * self._accepted) / (self._round_s * self._surcharge.factor)

    def _remember_answer(self) -> None:
        if self._answer_expected:
            weight = min(self._answer_n_rounds, _PRIOR_ROUNDS)
            self._answers.append((weight, self._answer_seen / self._answer_expected))
        elif self._n_tokens and self._typical < 1.0:
            # Decoded plainly from end to end: nothing was learned, and what was known is an answer older.
            self._answers.append((_PRIOR_ROUNDS, (1.0 + self._typical) / 2))
        if self._n_tokens:
            self._answers_n_tokens.append(self._n_tokens)
        self._n_tokens = 0.0


class _Surcharge:
    """How many times longer a round with drafts takes than it should, where a plain round is right by definition."""

    def __init__(self) -> None:
        self._pairs: deque[float] = deque(maxlen=_N_PAIRS)  # logarithms
        self.forget_neighbour()

    def forget_neighbour(self) -> None:
        """The next round does not follow the last one."""
        self._plain: float | None = None
        self._drafted: float | None = None

    def forget_oldest(self) -> None:
        """Let go of the pair that is longest ago."""
        if self._pairs:
            self._pairs.popleft()

    def observe_plain(self, ratio: float) -> None:
        """Take note of a plain round, by its seconds over the expected ones."""
        if self._drafted is not None:
            self._pairs.append(math.log(self._drafted / ratio))
        self._plain, self._drafted = ratio, None

    def observe_drafted(self, ratio: float) -> None:
        """Take note of a round with drafts, likewise."""
        if self._plain is not None:
            self._pairs.append(math.log(ratio / self._plain))
        self._plain, self._drafted = None, ratio

    @property
    def is_sure(self) -> bool:
        """Whether there are pairs enough to forget the measurement."""
        return len(self._pairs) >= _N_SURE

    @property
    def factor(self) -> float:
        """The median pair; what was measured counts as the pairs that are lacking."""
        pairs = [*self._pairs, *[0.0] * (_N_SURE - len(self._pairs))]
        return math.exp(float(np.median(pairs)))
