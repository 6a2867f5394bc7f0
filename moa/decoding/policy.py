"""Draft-shape policies: one shape for all rounds, or ``auto``, a chain, or plain decoding where chains fail.

``auto`` drafts chains that end where the drafter itself is unsure. Rounds are measured in plain steps, the time of a
target call over one token, so that a temporarily slow machine changes nothing:

    gain = tokens committed - seconds of the round / seconds of a plain step

    round   drafts   committed    ms   gain   lost   savings        a plain step takes 10 ms; savings were 20
      1     chain        5        30   +2.0    0.0    22.0
      2     chain        1        26   -1.6    1.6    20.4
      3     chain        1        24   -1.4    3.0    19.0
      4     chain        4        28   +1.2    1.8    20.2
     ...    chain        1        25   -1.5   12.3     9.5          this answer has lost more than PATIENCE
     ...    none         1        10    0.0   12.3     9.5          plain; each step pays 1 / MEASURE_EVERY back

Two sums are kept in that unit. ``lost`` is what an answer has lost since its best moment: above ``PATIENCE`` it is
decoded plainly. ``savings`` are the gains of drafts over all answers, at most four times ``PATIENCE``: new answers get
drafts while they are above 0, so that drafts which always fail cost no more than the plain steps pay back.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from typing_extensions import override

from .tree import TreeShape

# The fastest of all chains and trees on one CPU core, where a draft costs a fifth to a third of a
# target call.
AUTO_SHAPE = TreeShape(10, stop_below=0.2)
# Plain steps that an answer may lose before it is decoded plainly. The gains of a good drafter's
# rounds scatter by 2
# steps about a mean of 1 or more: a smaller number gives up good drafters, a larger one loses more
# where drafts fail.
PATIENCE = 12.0
# A plain step is timed after this many rounds with drafts, and this many plain steps pay back the
# loss of one step.
# Each costs about 1 %; 64 costs 2 % where drafts fail, 256 learns late that a machine has become
# slower.
MEASURE_EVERY = 128


class ShapePolicy:
    """Chooses the shape of each round's drafts: here always the same one, None for plain decoding.

    ``is_off`` is whether drafts were given up because they cost more than they gain.
    """

    is_off = False

    def __init__(self, shape: TreeShape | None = None) -> None:
        self._shape = shape

    def begin(self) -> None:
        """Start a generation."""

    def next_shape(self) -> TreeShape | None:
        """Choose the shape of the next round's drafts; None for a plain decoding step."""
        return self._shape

    def observe(self, n_drafts: int, n_committed: float, round_s: float) -> None:
        """Learn from a round: drafts of each row, the mean of the tokens that rows committed, and its seconds."""


class AutoPolicy(ShapePolicy):
    """Drafts chains while they pay, else decodes plainly; remembers what it learned over generations.

    Args:
        is_drawn: whether tokens are sampled: chains then cannot stop by their probability, and are half as long.
        max_depth: levels that the drafter can make; None for any number.
    """

    def __init__(self, is_drawn: bool = False, max_depth: int | None = None) -> None:
        shape = TreeShape(AUTO_SHAPE.depth // 2) if is_drawn else AUTO_SHAPE
        super().__init__(shape if max_depth is None else shape.cut(max_depth))
        self._plain_s: deque[float] = deque(maxlen=3)
        self._n_since_plain = 0
        self._savings = PATIENCE
        self._lost = 0.0
        self._has_drafted = False

    @override
    def begin(self) -> None:
        self._lost = 0.0
        self._has_drafted = False

    @override
    def next_shape(self) -> TreeShape | None:
        # The more is lost, the sooner a plain step is timed: the machine may be slower, not the
        # drafts worse.
        if len(self._plain_s) < 3 or self._n_since_plain >= MEASURE_EVERY * (
            1 - self._lost / PATIENCE
        ):
            return None
        return self._shape if self._savings > 0 and self._lost < PATIENCE else None

    @override
    def observe(self, n_drafts: int, n_committed: float, round_s: float) -> None:
        if not n_drafts:
            self._plain_s.append(round_s)
            self._n_since_plain = 0
            gain = 1 / MEASURE_EVERY
        else:
            self._n_since_plain += 1
            gain = n_committed - round_s / median(self._plain_s or [round_s])
        self._savings = min(4 * PATIENCE, self._savings + gain)
        # In its first round the drafter also reads the prompt, which says nothing of the rounds to
        # come.
        if not n_drafts or self._has_drafted:
            self._lost = max(0.0, self._lost - gain)
        self._has_drafted = self._has_drafted or n_drafts > 0
        if self._savings <= 0 or self._lost >= PATIENCE:
            self.is_off = True
        elif self._savings > PATIENCE / 2:  # Below that drafts are only tried now and then.
            self.is_off = False

    def describe(self, runs: Sequence[Any]) -> str:
        """Say how many target calls of generations, which count them as ``DecodeStats``, verified its drafts."""
        n_drafted = sum(run.n_drafted_calls for run in runs)
        n_calls = sum(run.n_target_calls for run in runs)
        return (
            f"chains {self._shape} in {n_drafted:,} of {n_calls:,} target calls, else plain steps"
        )
