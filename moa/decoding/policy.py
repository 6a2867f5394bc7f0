"""Policies that choose the shape of the drafts in each round.

A fixed policy uses one shape for all rounds. ``auto`` drafts chains, and falls back to plain
decoding if chains cost more time than they save.

The chains of ``auto`` end early if the drafter gives its own drafts a low probability. The policy
compares each round with plain steps. A plain step is a target call over one token, and commits one
token. The gain of a round is the number of plain steps that it saves:

    gain = tokens committed - seconds of the round / seconds of a plain step

If the whole machine becomes slower, rounds and plain steps take longer by the same factor, so the
gain does not change. The policy keeps two sums of gains:

- ``lost`` says how far the total gain of the current generation is below its highest value so far.
  While ``lost`` is at or above ``PATIENCE`` (12 plain steps), the generation is decoded plainly.
- ``savings`` is the total gain over all generations, limited to four times ``PATIENCE``. A new
  policy starts with ``PATIENCE``. Drafts are used only while ``savings`` is above 0.

Example of a generation, with ``savings`` of 20 from earlier generations:

    round   drafts   committed    ms   gain   lost   savings     (a plain step takes 10 ms)
      0                                        0.0    20.0
      1     chain        5        30   +2.0    0.0    22.0
      2     chain        1        26   -1.6    1.6    20.4
      3     chain        1        24   -1.4    3.0    19.0
      4     chain        4        28   +1.2    1.8    20.2
     ...    chain        1        25   -1.5   12.3     9.5       lost exceeds PATIENCE
     ...    none         1        10    0.0   12.3     9.5       a plain step

Each plain step lowers ``lost`` and raises ``savings`` by ``1 / MEASURE_EVERY`` (1 / 128). So drafts
that always fail can lose only the initial ``savings``, plus what the plain steps have added to it.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from typing_extensions import override

from .tree import TreeShape

# The shape that was fastest in measurements on one CPU core. The measured drafters needed a fifth
# to a third of the time of a target call for each draft.
AUTO_SHAPE = TreeShape(10, stop_below=0.2)
# Limit of the time that drafts may lose in one generation, as a number of plain steps. Beyond this
# limit, the generation is decoded plainly. With a good drafter, a round gains 1 plain step or more
# on average, and gains vary by 2 plain steps. With a smaller limit, good drafters would be stopped
# after a few unlucky rounds. With a larger limit, drafts that fail would lose more time.
PATIENCE = 12.0
# This number has two uses. While drafts save time, a plain step is run after this number of rounds,
# to measure the time of plain steps again. While drafts do not save time, they are tried again now
# and then: for each run of this number of plain steps, the tries may lose the time of one plain
# step. Each use costs about 1 % of the time. With the value 64, drafts that fail would cost 2 %.
# With the value 256, the policy would notice too late that the machine has become slower.
MEASURE_EVERY = 128


class ShapePolicy:
    """Chooses the shape of each round's drafts. This base class always chooses the same shape.

    If the shape is None, decoding is plain. ``is_off`` is true while the policy has stopped using
    drafts, because they cost more time than they save.
    """

    is_off = False

    def __init__(self, shape: TreeShape | None = None) -> None:
        self._shape = shape

    def begin(self) -> None:
        """Start a generation."""

    def next_shape(self) -> TreeShape | None:
        """Choose the shape of the next round's drafts, or None for a plain decoding step."""
        return self._shape

    def observe(self, n_drafts: int, n_committed: float, round_s: float) -> None:
        """Update the estimates with the result of a round.

        Args:
            n_drafts: number of drafts of each row; 0 for a plain step.
            n_committed: mean number of tokens committed per row.
            round_s: seconds that the round took.
        """


class AutoPolicy(ShapePolicy):
    """Drafts chains while chains save time, otherwise decodes plainly.

    The policy keeps its estimate of the saved time from one generation to the next.

    Args:
        is_drawn: True if tokens are sampled. Chains of sampled tokens cannot end early at a low
            probability, so their length is halved.
        max_depth: maximum number of levels that the drafter can draft. None if the drafter can
            draft any number.
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
        # Rounds with drafts are compared with the measured time of a plain step. If the machine has
        # become slower since this measurement, drafts seem to lose time although they do not. So
        # the measurement is repeated, and it is repeated sooner if drafts seem to lose time.
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
        # Do not count the first round with drafts in ``lost``. In this round the drafter also
        # processes the prompt, so the round takes longer than later rounds.
        if not n_drafts or self._has_drafted:
            self._lost = max(0.0, self._lost - gain)
        self._has_drafted = self._has_drafted or n_drafts > 0
        if self._savings <= 0 or self._lost >= PATIENCE:
            self.is_off = True
        # While drafts lose time, they are still tried now and then, whenever plain steps have
        # raised the savings above 0. So savings above 0 do not yet show that drafts save time. Set
        # ``is_off`` back to false only if the savings exceed half of ``PATIENCE``.
        elif self._savings > PATIENCE / 2:
            self.is_off = False

    def describe(self, runs: Sequence[Any]) -> str:
        """Describe in one sentence how many of the target calls verified drafts.

        Args:
            runs: statistics of the generations that used this policy. Each item has the counters of
                ``DecodeStats``.
        """
        n_drafted = sum(run.n_drafted_calls for run in runs)
        n_calls = sum(run.n_target_calls for run in runs)
        return (
            f"{n_drafted:,} of {n_calls:,} target calls verified a chain of drafts (of the shape "
            f"{self._shape}). The other calls had no drafts"
        )
