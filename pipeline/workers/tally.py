"""Counts what is done of a store's plan, by whichever process, for one line of progress and for the report."""

from __future__ import annotations

import threading
import time

import numpy as np
import pyarrow as pa

from ...storage.write.store import StoreWriter
from ...text import Progress
from ..forwards.parts import Outcome

_LOOK_EVERY_S = 2.0
"""Seconds between two looks at the commits of other processes; a folder of commits may be on a network."""


class Tally:
    """What is done of a store's plan: parts by their commits, and tokens on their way in this run's workers.

    Args:
        plan: rows of plan.parquet.
        progress: called with (tokens done, tokens of the plan, message).

    Attributes:
        tokens: tokens of each part.
        n_before_tokens: tokens of the parts that were committed when the count began.
        n_parts: parts whose commit is from this run.
        n_late: parts that this run had written when the commit of another one was there already.
        n_own_tokens: tokens of the parts that this run has written, those of ``n_late`` included.
    """

    def __init__(self, store: StoreWriter, plan: pa.Table, progress: Progress | None) -> None:
        self._store = store
        self._progress = progress
        lengths = plan["n_tokens"].to_numpy().astype(np.int64)
        self.tokens = np.bincount(plan["part"].to_numpy(), lengths, store.n_parts).astype(np.int64)
        self.n_parts = self.n_late = self.n_own_tokens = 0
        self._committed = set(store.committed_parts())
        self.n_before_tokens = self._tokens_of(self._committed)
        self._counting = threading.Lock()
        self._looked_s = time.monotonic()
        self._most = 0
        self._told: tuple[int, str] | None = None

    def note(self, piece: int, outcome: Outcome) -> None:
        """Count a piece of work that has its commit."""
        if piece < 0:
            return
        with self._counting:
            self.n_parts += outcome is Outcome.WRITTEN
            self.n_late += outcome is Outcome.LATE
            self.n_own_tokens += int(self.tokens[piece]) * (outcome is not Outcome.FOUND)
            self._committed.add(piece)

    def tell(self, n_computed: int, workers: str = "") -> None:
        """Report progress.

        Args:
            n_computed: tokens that this run has computed, those of written parts included.
            workers: who works, for the message.
        """
        if self._progress is None:
            return
        with self._counting:
            if self._store.is_shared and time.monotonic() > self._looked_s + _LOOK_EVERY_S:
                self._look()
            self._told = n_computed, workers
            total, on_the_way = int(self.tokens.sum()), max(0, n_computed - self.n_own_tokens)
            # Never back: a worker may be lost with what it had computed, or another run be faster with a part.
            self._most = max(self._most, min(total, self._tokens_of(self._committed) + on_the_way))
            n_done = len(self._committed)
        self._progress(self._most, total, f"extract {n_done}/{self._store.n_parts} parts{workers}")

    def finish(self) -> None:
        """Report the end as the commits tell it, if anything was reported."""
        with self._counting:
            self._look()
        if self._told is not None:
            self.tell(*self._told)

    def _look(self) -> None:
        self._committed |= set(self._store.committed_parts())
        self._looked_s = time.monotonic()

    def pass_on(self, done: int, total: int, message: str) -> None:
        """Report another phase."""
        if self._progress is not None:
            self._progress(done, total, message)

    def _tokens_of(self, parts: set[int]) -> int:
        return int(self.tokens[list(parts)].sum())
