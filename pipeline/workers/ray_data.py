"""Directs workers with Ray Data, on one machine or all of a cluster that share a disk.

The store's list of commits is the only truth about what is done: list the commits, subtract them from the plan, submit
what is left, and again until nothing is. So it does not matter what becomes of actors, machines, rows or this process.
Pieces are submitted in lots: many at first, so that a worker seldom waits for the end of a write before its next
forward, and single ones at the end, so that a slow worker keeps nobody waiting for long.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from ...errors import OptionInvalid, WorkerError
from ...machine import usable_cores
from ...storage.paths import RemotePath
from ...storage.write.store import StoreWriter
from ...text import first_line
from ..config import ScaleSettings
from ..forwards.parts import Timings
from .ray_actor import PIECE, LotReport, RayWorker, forget_lives
from .tally import Tally
from .work import BUNDLE, WorkOrder, is_pending, pieces_of

_MOST_IN_A_LOT = 8
_LOTS_PER_WORKER = 2
"""Lots that each worker could have of what is left: the more, the smaller are lots, and the wait at the end."""
_TELL_EVERY_S = 1.0
_PATIENCE_S = 600.0
"""Time without any commit after which parts that another run has begun are done here too."""
_LEAVE_S = 1.5
"""Time for actors to end after the run; a command that a signal ends has ``CLEANUP_S`` (commands/signals.py) in all."""
_OBJECT_STORE_BYTES = 128 << 20
"""Object store of a Ray that is started here; rows of some hundred bytes are all that goes through it."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else the thread of rows starts another Ray when an interrupt has ended this one
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",  # as Ray does by itself for one that it starts, but then with a word about it
}
_END = object()


def require_ray() -> None:
    """Refuse the engine where Ray is not installed; raises OptionInvalid."""
    if importlib.util.find_spec("ray") is None:
        raise OptionInvalid("--engine ray needs Ray, which is not installed: pip install 'moa-data[ray]'.")


def cut_lots(pieces: Sequence[int], n_workers: int) -> list[list[int]]:
    """Cut pieces into lots, in order: as large as leaves every worker some of the rest (guided self-scheduling)."""
    lots, left = [], list(pieces)
    while left:
        size = max(1, min(_MOST_IN_A_LOT, len(left) // (_LOTS_PER_WORKER * n_workers)))
        lots.append(left[:size])
        left = left[size:]
    return lots


class RayWorkers:
    """Workers on one store that Ray Data starts, starts anew where they are lost, and hands lots to.

    Args:
        order: what each worker is told.
        store: opened and shared by this process, which writes no parts itself.
        encode_threads: threads that encode in each worker; None for its share of its machine's cores.

    Attributes:
        timings: what the workers spent, together.
        lost: a line for each worker that Ray started anew, and each time that it gave up.
    """

    def __init__(
        self, order: WorkOrder, store: StoreWriter, tally: Tally, scale: ScaleSettings, encode_threads: int | None
    ) -> None:
        self.timings, self.lost = Timings(), list[str]()
        self._order, self._store, self._tally, self._scale = order, store, tally, scale
        gpus = 0.0 if order.device == "cpu" else scale.gpus_per_worker or 1.0
        self._needs = {"CPU": float(scale.cpus_per_worker), "GPU": gpus}
        self._encode_threads = encode_threads
        self._spent: dict[str, Timings] = {}

    @property
    def n_workers(self) -> int:
        """Workers that have done something."""
        return len(self._spent)

    def run(self) -> None:
        """Submit what has no commit until everything has one.

        Raises:
            WorkerError: Ray could not go on, and no piece was done since the last time.
            Exception: what a worker raised; the others are ended.
        """
        try:
            with _connected(self._scale, self._needs["CPU"]):
                while pieces := pieces_of(self._store):
                    free = self._wait_for_free(pieces)
                    if free:
                        self._submit(free)
        finally:
            self._leave()
            self.timings = sum(self._spent.values(), Timings())

    def _wait_for_free(self, pieces: Sequence[int]) -> list[int]:
        """Return the pieces that no other run is at, once there are some, or all when nothing has moved for long."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + _PATIENCE_S:
            left = [piece for piece in pieces if is_pending(self._store, piece)]
            free = [piece for piece in left if piece == BUNDLE or not self._store.is_claimed(piece)]
            if free or len(left) < len(pieces):
                return free
            self._tell(", waiting for another run's")
            time.sleep(_TELL_EVERY_S)
        return list(pieces)

    def _submit(self, pieces: Sequence[int]) -> None:
        """Let the workers do these pieces."""
        rows: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._pass_rows, args=(pieces, rows), daemon=True).start()
        while (row := self._next(rows)) is not _END:
            if isinstance(row, BaseException):
                if not any(is_pending(self._store, piece) for piece in pieces):
                    return  # what failed came after the last commit
                self.lost.append(f"Ray gave up: {first_line(row)}")
                if all(is_pending(self._store, piece) for piece in pieces):
                    raise WorkerError(
                        f"Ray's workers end before they have done anything: {_cause(row)}. What was committed is kept: "
                        "mend it and run the same command again to go on."
                    ) from row
                return
            self._take(LotReport.of(row))

    def _next(self, rows: queue.SimpleQueue[Any]) -> Any:
        """Wait for a row, and tell how far the work is meanwhile: here signals are heard, within Ray not always."""
        while True:
            try:
                return rows.get(timeout=_TELL_EVERY_S)
            except queue.Empty:
                self._tell()

    def _pass_rows(self, pieces: Sequence[int], rows: queue.SimpleQueue[Any]) -> None:
        """Pass on the rows of a data set of lots, then an error or the end; on a thread of its own."""
        try:
            for row in self._lots(pieces).iter_rows():
                rows.put(row)
            rows.put(_END)
        except BaseException as error:  # noqa: BLE001  (Ray's are of many kinds; the main thread judges)
            rows.put(error)

    def _lots(self, pieces: Sequence[int]) -> Any:
        """Return the data set whose rows are the reports of lots."""
        import ray.data

        lots = cut_lots(pieces, self._scale.n_workers)
        most = min(self._scale.n_workers, len(lots))
        pool = ray.data.ActorPoolStrategy(
            min_size=min(self._scale.fewest_workers, most), max_size=most, max_tasks_in_flight_per_actor=1
        )
        # Ray gives a lot again to the next life of its actor, without end: see ``RayWorker`` for lots that kill it.
        return ray.data.from_arrow([pa.table({PIECE: pa.array(lot, pa.int64())}) for lot in lots]).map_batches(
            RayWorker,
            fn_constructor_args=(self._order, self._store.attempt, self._needs, self._encode_threads),
            batch_size=None,
            compute=pool,
            num_cpus=self._needs["CPU"],
            num_gpus=self._needs["GPU"],
        )

    def _take(self, report: LotReport) -> None:
        if report.error:
            raise pickle.loads(report.error)
        if report.is_restarted and report.worker not in self._spent:
            self.lost.append(f"started anew on {report.host}")
        self._spent[report.worker] = report.timings
        for piece, outcome in report.outcomes.items():
            self._tally.note(piece, outcome)
        self._tell()

    def _tell(self, note: str = "") -> None:
        who = f", {self.n_workers} workers of Ray" if self._spent else ", Ray starts its workers"
        self._tally.tell(self._tally.n_own_tokens, who + note)

    def _leave(self) -> None:
        """Delete what the actors left unfinished, once they write no more."""
        parts = self._store.pending_parts()
        until_s = time.monotonic() + _LEAVE_S
        while any(map(self._store.is_claimed, parts)) and time.monotonic() < until_s:
            time.sleep(0.05)
        self._store.remove_attempt(f"{self._store.attempt}-*")
        if isinstance(self._store.path, RemotePath):
            forget_lives(self._store.path, self._store.attempt)


@contextmanager
def _connected(scale: ScaleSettings, n_cpus: float) -> Iterator[None]:
    """Connect this process to Ray, or start a Ray of its own; quietly, and leaving signals to the command."""
    address = scale.address or os.environ.get("RAY_ADDRESS")
    for name, value in _QUIET.items():
        if name != "RAY_AUTH_MODE" or not address:
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        raise OptionInvalid("This process is connected to Ray already. Call ray.shutdown() first.")
    own: dict[str, Any] = {
        "include_dashboard": False,
        "num_cpus": max(usable_cores(), math.ceil(scale.n_workers * n_cpus)),
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            configure_logging=False,
            namespace="moa-data",
            **({} if address else own),
        )
    except ConnectionError as error:
        raise OptionInvalid(
            f"No Ray cluster is found at {address}: {first_line(error)}. Start one with `ray start --head`, or leave "
            "out --address."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    try:
        _quieten()
        yield
    finally:
        ray.shutdown()


def _quieten() -> None:
    """Keep Ray Data from drawing bars and writing logs between the lines of progress, and let its pool grow."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.issue_detectors_config.detectors = []
    # A worker has one lot at a time, so the pool is never used more than fully: that must be enough to grow.
    context.autoscaling_config.actor_pool_util_upscaling_threshold = 1.0
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            handler.setLevel(logging.CRITICAL + 1)


def _cause(error: BaseException) -> str:
    """Return the last line of what Ray reports, which names the error in the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
