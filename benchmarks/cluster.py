"""Simulates extractions by many workers: stragglers, preemption, a bucket with limited bandwidth. Nothing is computed.

A worker starts (boots, loads the target), takes lots of parts as ``pipeline.workers.ray_data`` cuts them, and writes a
part while it computes the next one, at most one ahead. Its parts take what the slower takes of the forwards, at an
assumed rate, and the encoding, at the rate that benchmarks/results/encoding.json has for one thread. Workers that write
at once share the bucket equally, up to the link of each. A preempted worker loses what it has not committed; another
one starts in its place, and gets its lot.

    python benchmarks/cluster.py [--tokens 2.4e9] [--stored-bytes 10000] [--bucket 10e9] [--out FOLDER]
"""

import argparse
import heapq
import json
import random
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from records import RESULTS, add_out_option, settings_of, write_record

from moa_data.pipeline.workers.ray_data import cut_lots

WORKERS = (1, 8, 64, 1024)
_AHEAD = 1
"""Parts that are computed while another one is written."""


@dataclass(frozen=True)
class Job:
    """What is simulated.

    Attributes:
        part_s: seconds of a part's forwards and encoding on a usual worker.
        part_bytes: bytes of a part as they are stored.
        start_s: seconds until a worker takes its first lot.
        link: bytes a second that one worker can write.
        bucket: bytes a second that all together can.
        slow_every: every so many workers one is a straggler; 0 for none.
        slow_times: how many times longer it takes.
        preempted_every_s: mean seconds of a worker's life, at random; 0 for no end.
        replaced_s: seconds until another one boots in its place.
    """

    n_workers: int
    n_parts: int
    part_s: float
    part_bytes: float
    start_s: float = 120.0
    link: float = 1e9
    bucket: float = float("inf")
    slow_every: int = 0
    slow_times: float = 3.0
    preempted_every_s: float = 0.0
    replaced_s: float = 180.0

    @property
    def ideal_s(self) -> float:
        """Seconds of the computing alone, divided among workers that are there from the start."""
        return self.part_s * self.n_parts / self.n_workers


@dataclass
class _Worker:
    number: int
    life: int = 0
    lot: deque[int] = field(default_factory=deque)
    computing: int | None = None
    waiting: deque[int] = field(default_factory=deque)
    writing: int | None = None


class _Bucket:
    """Writes that share a bandwidth equally; a write is known by its worker and the worker's life.

    ``_served`` counts the bytes that each write would have got since the beginning, so that a write ends when it
    reaches a value that is known when it begins, whoever comes and goes meanwhile.
    """

    def __init__(self, link: float, bucket: float) -> None:
        self._link, self._bucket = link, bucket
        self._served, self._at_s = 0.0, 0.0
        self._ends: list[tuple[float, int, int]] = []
        self._open: set[tuple[int, int]] = set()

    @property
    def _rate(self) -> float:
        return min(self._link, self._bucket / len(self._open))

    def _pass(self, now_s: float) -> None:
        if self._open:
            self._served += self._rate * (now_s - self._at_s)
        self._at_s = now_s

    def begin(self, now_s: float, worker: int, life: int, n_bytes: float) -> None:
        self._pass(now_s)
        self._open.add((worker, life))
        heapq.heappush(self._ends, (self._served + n_bytes, worker, life))

    def drop(self, now_s: float, worker: int, life: int) -> None:
        self._pass(now_s)
        self._open.discard((worker, life))

    def next_end(self) -> float:
        """The moment at which the next write ends, if none begins before."""
        while self._ends and self._ends[0][1:] not in self._open:
            heapq.heappop(self._ends)
        return self._at_s + (self._ends[0][0] - self._served) / self._rate if self._ends else float("inf")

    def end(self, now_s: float) -> int:
        """End that write; returns its worker."""
        self._pass(now_s)
        _, worker, life = heapq.heappop(self._ends)
        self._open.remove((worker, life))
        return worker


class Simulation:
    """One run of a job; equal seeds give equal runs.

    Attributes:
        now_s: seconds since the beginning.
        n_lost: parts that were computed or written, in whole or in part, and lost to a preemption.
    """

    def __init__(self, job: Job, seed: int = 0) -> None:
        self.now_s, self.n_lost, self._n_left = 0.0, 0, job.n_parts
        self._job, self._random = job, random.Random(seed)
        self._lots = deque(deque(lot) for lot in cut_lots(range(job.n_parts), job.n_workers))
        self._workers = [_Worker(number) for number in range(job.n_workers)]
        self._bucket = _Bucket(job.link, job.bucket)
        self._events: list[tuple[float, int, str, int, int]] = []
        self._idle: list[_Worker] = []
        self._n_events = 0
        for worker in self._workers:
            self._begin_life(worker, job.start_s)

    def run(self) -> float:
        """Run until all parts have their commits; returns the seconds."""
        while self._n_left:
            at_s = self._events[0][0] if self._events else float("inf")
            end_s = self._bucket.next_end()
            if end_s <= at_s:
                self.now_s = end_s
                self._written(self._workers[self._bucket.end(end_s)])
                continue
            self.now_s, _, what, number, life = heapq.heappop(self._events)
            if (worker := self._workers[number]).life == life:
                getattr(self, what)(worker)
        return self.now_s

    def _at(self, delay_s: float, what: str, worker: _Worker) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._n_events, what, worker.number, worker.life))

    def _begin_life(self, worker: _Worker, start_s: float) -> None:
        self._at(start_s, "_take_lot", worker)
        if self._job.preempted_every_s:
            self._at(self._random.expovariate(1 / self._job.preempted_every_s), "_preempt", worker)

    def _take_lot(self, worker: _Worker) -> None:
        if self._lots:
            worker.lot = self._lots.popleft()
            self._compute(worker)
        else:
            self._idle.append(worker)

    def _compute(self, worker: _Worker) -> None:
        if worker.lot and worker.computing is None and len(worker.waiting) < _AHEAD:
            worker.computing = worker.lot.popleft()
            every = self._job.slow_every
            is_slow = every and worker.number % every == every - 1
            self._at(self._job.part_s * (self._job.slow_times if is_slow else 1.0), "_computed", worker)

    def _computed(self, worker: _Worker) -> None:
        assert worker.computing is not None
        worker.waiting.append(worker.computing)
        worker.computing = None
        self._write(worker)
        self._compute(worker)

    def _write(self, worker: _Worker) -> None:
        if worker.writing is None and worker.waiting:
            worker.writing = worker.waiting.popleft()
            self._bucket.begin(self.now_s, worker.number, worker.life, self._job.part_bytes)

    def _written(self, worker: _Worker) -> None:
        worker.writing = None
        self._n_left -= 1
        self._write(worker)
        self._compute(worker)
        if worker.writing is None and worker.computing is None and not worker.lot:
            self._take_lot(worker)

    def _preempt(self, worker: _Worker) -> None:
        self._bucket.drop(self.now_s, worker.number, worker.life)
        begun = [part for part in (worker.writing, *worker.waiting, worker.computing) if part is not None]
        self.n_lost += len(begun)
        if left := deque([*begun, *worker.lot]):
            self._lots.appendleft(left)
        if worker in self._idle:
            self._idle.remove(worker)
        worker.life += 1
        worker.lot, worker.waiting, worker.writing, worker.computing = deque(), deque(), None, None
        self._begin_life(worker, self._job.replaced_s + self._job.start_s)
        while self._idle and self._lots:
            self._take_lot(self._idle.pop())


def cases(job: Job, bucket: float) -> dict[str, Job]:
    """Return what may befall a job, by name."""
    return {
        "all alike": job,
        "every 8th three times slower": replace(job, slow_every=8),
        "each preempted once an hour": replace(job, preempted_every_s=3600.0),
        f"a bucket of {bucket / 1e9:g} GB/s": replace(job, bucket=bucket),
        "all of these": replace(job, slow_every=8, preempted_every_s=3600.0, bucket=bucket),
    }


def encode_rate() -> float:
    """Read the raw bytes a second that one thread encodes losslessly, as they were measured."""
    rows = json.loads((RESULTS / "encoding.json").read_text())["rows"]
    row = next(row for row in rows if row["codec"] == "lossless" and row["what"].startswith("chunks"))
    return float(row["one"]) * 1e9


def simulate(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all cases with all numbers of workers; returns rows of the table."""
    n_parts = max(1, round(options.tokens / options.part_tokens))
    token_s = max(1 / options.tokens_per_s, options.raw_bytes / (options.cores * encode_rate()))
    rows = []
    for n_workers in options.workers:
        job = Job(n_workers, n_parts, options.part_tokens * token_s, options.part_tokens * options.stored_bytes)
        for name, case in cases(job, options.bucket).items():
            run = Simulation(case, options.seed)
            seconds = run.run()
            rows.append(
                {
                    "workers": n_workers,
                    "case": name,
                    "hours": seconds / 3600,
                    "of_ideal": job.ideal_s / seconds,
                    "lost": 100 * run.n_lost / n_parts,
                }
            )
    return rows


def main() -> None:
    """Simulate, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=2.4e9, help="default: ten times UltraChat")
    parser.add_argument("--part-tokens", type=int, default=65_536)
    parser.add_argument("--raw-bytes", type=float, default=139_264.0, help="bytes of a token before encoding")
    parser.add_argument("--stored-bytes", type=float, default=10_000.0, help="bytes of a token as it is stored")
    parser.add_argument("--tokens-per-s", type=float, default=25_000.0, help="forwards of one worker; an assumption")
    parser.add_argument("--cores", type=int, default=8, help="cores that encode in each worker")
    parser.add_argument("--bucket", type=float, default=10e9, help="bytes a second of all workers together")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--seed", type=int, default=0)
    add_out_option(parser)
    options = parser.parse_args()
    rows = simulate(options)
    for row in rows:
        print(
            f"{row['workers']:5d} {row['case']:30s} {row['hours']:8.2f} h  {row['of_ideal']:.2f}  {row['lost']:.2f} %"
        )
    print(write_record(Path(options.out), "cluster", {"settings": settings_of(options), "rows": rows}))


if __name__ == "__main__":
    main()
