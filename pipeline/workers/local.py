"""Directs worker processes of this machine: hands out pieces of work one by one, and takes back those of the dead.

No worker has a share of its own: whoever is free gets the next piece that has no commit, so that a slow worker does
less, and what a killed one had in flight is done by the others. Other runs on the same store, here or elsewhere, need
not be known: before a piece is handed out the store is asked for its commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import IO

from ...errors import WorkerError
from ...storage.parts.shard import new_attempt
from ...storage.write.store import StoreWriter
from ..forwards.parts import Outcome, Timings
from .messages import Asking, Computed, Done, Ended, Failed, Loading, Piece, Start
from .tally import Tally
from .work import BUNDLE, WorkOrder, is_pending, pieces_of

_BOOT = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[3])
from moa_data.pipeline.workers.process import main
sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
"""
_TELL_EVERY_S = 1.0
_LEAVE_S = 2.0
"""Time that a worker has to discard its part when it is told to end; then it is killed, and its files are removed here.

Less than the three seconds that an interrupted command has.
"""
_SIGNAL_EVERY_S = 1.0


@dataclass
class _Process:
    """A worker process.

    Attributes:
        pieces: what it was given and has not committed.
        is_asking: whether it waits for a piece.
        n_tokens: tokens that it has computed, of which ``n_done_tokens`` are in parts that have their commit.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    attempt: str
    log: IO[bytes]
    pieces: list[int] = field(default_factory=list)
    is_asking: bool = False
    is_done: bool = False
    n_loaded_bytes: int = 0
    n_tokens: int = 0
    n_done_tokens: int = 0

    @classmethod
    def start(cls, order: WorkOrder) -> _Process:
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        environment = os.environ | ({"OMP_NUM_THREADS": str(order.n_threads)} if order.n_threads else {})
        arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()], env=environment,
            )  # fmt: skip
        worker = cls(process, Connection(ours.detach()), new_attempt(), log)
        worker.send(Start(order, worker.attempt))
        return worker

    def send(self, message: object) -> None:
        """Send a message; one to a dead worker is lost, as its end is noticed by reading."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def describe_end(self) -> str:
        """Say how the process ended, with the last line that it wrote."""
        code = self.process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            how += ", which the kernel sends where memory runs out"
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4096))
        lines = self.log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return how + (f": {last}" if last else "")

    def close(self) -> None:
        self.connection.close()
        self.log.close()


class LocalWorkers:
    """Worker processes on one store.

    Args:
        orders: one for each worker.
        store: opened and shared by this process, which writes no parts itself.

    Attributes:
        timings: what the workers spent, together.
        lost: how each worker that was lost has ended.
    """

    def __init__(self, orders: Sequence[WorkOrder], store: StoreWriter, tally: Tally) -> None:
        self.timings, self.lost = Timings(), list[str]()
        self._orders = orders
        self._store = store
        self._tally = tally
        self._left = deque(pieces_of(store))
        self._claimed: deque[int] = deque()
        self._workers: list[_Process] = []

    @property
    def n_workers(self) -> int:
        """Worker processes that were started."""
        return len(self._orders)

    def run(self) -> None:
        """Start the workers, and direct them until every piece has a commit.

        Raises:
            WorkerError: none is left, and there is work to do.
            Exception: what one of them raised; the others were told to end.
        """
        try:
            self._tell()
            self._workers = [_Process.start(order) for order in self._orders]
            while not all(worker.is_done for worker in self._workers):
                self._hand_out()
                self._listen()
                self._tell()
        finally:
            self._stop()

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.is_asking and (piece := self._next()) is not None:
                worker.pieces.append(piece)
                worker.is_asking = False
                worker.send(Piece(piece))
        busy = [worker for worker in self._workers if worker.pieces]
        if (
            not busy and not self._left and not self._claimed
        ):  # else a busy one may be killed, and its pieces are to be done
            for worker in self._workers:
                if worker.is_asking:
                    worker.is_asking = False
                    worker.send(Piece(None))

    def _next(self) -> int | None:
        """Return a piece that has no commit; one that another run works on only where nothing else is left."""
        while self._left or self._claimed:
            piece = (self._left or self._claimed).popleft()
            if not is_pending(self._store, piece):
                continue
            if self._left and piece != BUNDLE and self._store.is_claimed(piece):
                self._claimed.append(piece)
            else:
                return piece
        return None

    def _listen(self) -> None:
        alive = {worker.connection: worker for worker in self._workers if not worker.is_done}
        for connection in wait(list(alive), timeout=_TELL_EVERY_S):
            worker = alive[connection]  # type: ignore[index]  # wait returns what it was given
            try:
                self._take(worker, worker.connection.recv())
            except (EOFError, ConnectionResetError):
                self._bury(worker)

    def _take(self, worker: _Process, message: object) -> None:
        if isinstance(message, Asking):
            worker.is_asking = True
        elif isinstance(message, Computed):
            worker.n_tokens = message.n_tokens
        elif isinstance(message, Loading):
            worker.n_loaded_bytes = message.done
        elif isinstance(message, Done):
            worker.pieces.remove(message.piece)
            is_own = message.piece != BUNDLE and message.outcome is not Outcome.FOUND
            worker.n_done_tokens += int(self._tally.tokens[message.piece]) * is_own
            self._tally.note(message.piece, message.outcome)
        elif isinstance(message, Ended):
            worker.is_done = True
            self.timings += message.timings
        elif isinstance(message, Failed):
            raise message.error

    def _bury(self, worker: _Process) -> None:
        """Give what a dead worker had in flight to the others."""
        worker.is_done = True
        self.lost.append(worker.describe_end())
        self._store.remove_attempt(worker.attempt)
        self._left.extendleft(reversed(worker.pieces))
        worker.pieces = []
        left = [piece for piece in (*self._left, *self._claimed) if is_pending(self._store, piece)]
        if left and all(other.is_done for other in self._workers):
            raise WorkerError(
                f"No worker is left, of {len(self._workers)}; the last one ended by {self.lost[-1]}. What was "
                "committed is kept: run the same command again to go on, with fewer --workers if memory ran out."
            )

    def _tell(self) -> None:
        if not any(worker.n_tokens for worker in self._workers):
            n_bytes = sum(order.n_weight_bytes for order in self._orders)
            n_loaded = sum(worker.n_loaded_bytes for worker in self._workers)
            self._tally.pass_on(n_loaded, n_bytes, f"load the target, {self.n_workers} workers")
            return
        # What a dead one had on its way is lost.
        computed = [worker.n_done_tokens if worker.is_done else worker.n_tokens for worker in self._workers]
        n_lost = len(self.lost)
        left = f"{self.n_workers - n_lost} of {self.n_workers} workers left" if n_lost else f"{self.n_workers} workers"
        self._tally.tell(sum(computed), f", {left}")

    def _stop(self) -> None:
        """End the workers that are still there, which discard what they have not committed."""
        told_s, began_s = 0.0, time.monotonic()
        try:
            while any(worker.process.poll() is None for worker in self._workers):
                now_s = time.monotonic()
                if now_s > began_s + _LEAVE_S:
                    break
                if now_s > told_s + _SIGNAL_EVERY_S:  # again and again: one that falls into a destructor is dropped
                    for worker in self._workers:
                        if not worker.is_done:
                            worker.process.terminate()
                    told_s = now_s
                time.sleep(0.02)
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.wait()
                worker.close()
                self._store.remove_attempt(worker.attempt)
