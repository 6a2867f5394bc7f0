"""Computes how long several workers take for an extraction, from what one is measured to take, and how many pay.

Workers have a device, a writer's thread and a share of their machine's cores each; all of them share the disk or bucket
that the store is on. A part is the unit of work, so that some worker does a whole part more than others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..text import format_hours

FORWARD, COPY, ENCODE, WRITE, DISK, CORES = "forward", "copy", "encode", "write", "disk", "cores"
"""Stages of an extraction, and the cores that they share on a CPU."""

_NEAR_ENOUGH = 1.05
"""More workers pay until the time is within 5 % of the shortest that any number reaches."""
_MOST_WORKERS = 4096


@dataclass(frozen=True)
class Scaling:
    """What the time of an extraction by several workers is computed from.

    Attributes:
        seconds: stage -> seconds that one worker alone on a machine takes for all parts.
        n_parts: parts of the plan.
        n_cores: cores of a machine.
        most_here: workers that a machine holds; further ones are on machines like it.
        encode_threads: threads that encode, given; None for each worker's share of the cores.
        most_encode_threads: most threads of such a share.
        out_s: seconds in which the disk or bucket takes all bytes from all workers together, where that is more than
            what one worker is measured to write; None where it is not known to be.
    """

    seconds: Mapping[str, float]
    n_parts: int
    n_cores: int
    most_here: int
    encode_threads: int | None
    most_encode_threads: int
    out_s: float | None = None

    def stages(self, n_workers: int) -> dict[str, float]:
        """Compute the seconds of each stage with so many workers, as if it were alone."""
        here = min(n_workers, self.most_here)
        n_machines = math.ceil(n_workers / here)
        share = math.ceil(self.n_parts / n_workers) / self.n_parts
        found = {stage: self.seconds[stage] * share for stage in (FORWARD, COPY, WRITE)}
        found[ENCODE] = self.seconds[ENCODE] * share * self._threads(1) / self._threads(here)
        one = self.seconds[DISK]
        found[DISK] = one if self.out_s is None else max(one * share, self.out_s)
        if CORES in self.seconds:
            found[CORES] = self.seconds[CORES] / n_machines
        return found

    def total_s(self, n_workers: int) -> float:
        """Compute the seconds of the whole, those of its slowest stage."""
        return max(self.stages(n_workers).values())

    def slowest(self, n_workers: int) -> str:
        """Return the stage that all others wait for."""
        stages = self.stages(n_workers)
        return max(stages, key=lambda stage: stages[stage])

    def enough(self) -> int:
        """Return the number of workers from which on more of them make the whole at most 5 % shorter."""
        counts = range(1, min(self.n_parts, _MOST_WORKERS) + 1)
        totals = [self.total_s(n) for n in counts]
        return next(n for n, total in zip(counts, totals, strict=True) if total <= _NEAR_ENOUGH * min(totals))

    def describe(self, n_workers: int) -> str:
        """Return as text what this many workers, and some fewer, take, and how many pay."""
        each = ", ".join(f"{n}: {format_hours(self.total_s(n))}" for n in _steps(n_workers))
        return f"workers      {each}\n             {self._advice()}"

    def _advice(self) -> str:
        enough = self.enough()
        binds = {
            DISK: "the disk of --out is full then, and a faster one or another codec would go on",
            CORES: "the cores of this machine are busy then, and more machines (--engine ray) would go on",
            ENCODE: "each encodes on fewer cores then",
        }
        if enough >= min(self.n_parts, _MOST_WORKERS):
            return f"up to {enough:,} of them pay" + (", as many as there are parts" if enough == self.n_parts else "")
        smaller = "parts are the unit of work, and smaller ones (--part-tokens) would go on"
        return f"more than {enough:,} hardly pay: {binds.get(self.slowest(enough + 1), smaller)}"

    def _threads(self, n_here: int) -> int:
        return self.encode_threads or max(1, min(self.n_cores // n_here, self.most_encode_threads))


def _steps(n_workers: int) -> Iterable[int]:
    """Return 1, 2, 4, ... and the number itself."""
    return [*(2**power for power in range(n_workers.bit_length()) if 2**power < n_workers), n_workers]
