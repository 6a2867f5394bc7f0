"""A worker as Ray Data calls it: with a lot of pieces of work at a time, of which it returns one small row.

It loads the target in its first call and keeps it. Shards go from its memory to the store; no activation enters Ray's
object store.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import WorkerError
from ...storage.disk.durable import PARTIAL_SUFFIX
from ...storage.disk.files import open_path
from ...storage.names import RUNS_NAME
from ...storage.paths import RemotePath, StorePath
from ...storage.write.store import StoreWriter
from ..config import core_share, resolve_encode_threads
from ..forwards.parts import Outcome, Timings
from .messages import is_of_device, portable
from .work import BUNDLE, Worker, WorkOrder

PIECE, REPORT = "piece", "report"
"""Columns of what a worker is given, an int64 for each piece, and of what it returns, one text for all."""
_DEVICE_FAILED = 70
_LIVES_SUFFIX = f".lives{PARTIAL_SUFFIX}"
_MOST_LIVES = 5
"""Lives of an actor in a row that may end before they are done with a lot; machines are seldom lost so often."""


@dataclass(frozen=True)
class LotReport:
    """What became of a lot; its row is a text of some hundred bytes, whatever the size of the parts.

    Attributes:
        worker: name of the worker's life; after a restart it has another one.
        host: the machine that it runs on.
        is_restarted: whether Ray has started it anew, as its process or machine was lost.
        outcomes: piece -> what became of it; pieces that another run was at are missing.
        timings: what the worker has spent so far, with all its lots.
        error: pickled, an error that ends the run; empty if there was none.
    """

    worker: str
    host: str
    is_restarted: bool
    outcomes: Mapping[int, Outcome]
    timings: Timings
    error: bytes = b""

    def row(self) -> dict[str, np.ndarray]:
        """Return the report as a batch of one row."""
        fields = asdict(self) | {
            "outcomes": {str(piece): outcome.value for piece, outcome in self.outcomes.items()},
            "error": base64.b64encode(self.error).decode(),
        }
        return {REPORT: np.array([json.dumps(fields)], dtype=object)}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> LotReport:
        """Read a row."""
        fields = json.loads(row[REPORT])
        return cls(
            worker=fields["worker"],
            host=fields["host"],
            is_restarted=fields["is_restarted"],
            outcomes={int(piece): Outcome(value) for piece, value in fields["outcomes"].items()},
            timings=Timings(**fields["timings"]),
            error=base64.b64decode(fields["error"]),
        )


class RayWorker:
    """The class that Ray Data makes once an actor, and calls with each lot.

    Args:
        order: what to do; its threads are left to the machine that the actor finds itself on.
        run: name of the run, with which the names of its unfinished files begin.
        needs: what Ray sets aside for an actor: CPU and, on accelerators, GPU.
        encode_threads: threads that encode; None for the worker's share of the machine's cores.
    """

    def __init__(self, order: WorkOrder, run: str, needs: Mapping[str, float], encode_threads: int | None) -> None:
        self._order, self._run, self._needs, self._encode_threads = order, run, needs, encode_threads
        self._worker: Worker | None = None
        self._spent = Timings()

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Do the pieces of a lot that nobody has done or is at; returns the row of its report."""
        import ray

        context = ray.get_runtime_context()
        outcomes: dict[int, Outcome] = {}
        error = b""
        try:
            with self._joined(context, batch[PIECE]) as worker:
                began_s, claimed = time.perf_counter(), worker.store.is_claimed
                free = [piece for piece in batch[PIECE].tolist() if piece == BUNDLE or not claimed(piece)]
                worker.run(free, lambda: None, outcomes.__setitem__)
            worker.timings.extract_s = self._spent.extract_s + time.perf_counter() - began_s
            self._spent += worker.timings
            _forget(self._lives(context))
        except Exception as failure:  # noqa: BLE001  (the driver raises it)
            if is_of_device(failure):
                os._exit(_DEVICE_FAILED)  # as a kill would: Ray starts the actor anew, on another device
            error = pickle.dumps(portable(failure))
        name = self._worker.store.attempt if self._worker else ""
        restarted = bool(context.was_current_actor_reconstructed)
        return LotReport(name, socket.gethostname(), restarted, outcomes, self._spent, error).row()

    def _joined(self, context: Any, lot: np.ndarray) -> Worker:
        """Return the worker, with the store joined for one lot: an idle actor keeps nobody from cleaning the store."""
        if self._worker is None:
            self._count_life(context, lot)
            self._worker = self._start(context)
        else:
            store = StoreWriter.join(self._order.store, self._worker.store.attempt)
            self._worker = replace(self._worker, store=store, timings=Timings())
        return self._worker

    def _lives(self, context: Any) -> StorePath:
        """Return a file with a byte for each life of the actor that ended before it was done with a lot."""
        store, name = open_path(self._order.store), f"{self._run}-{context.get_actor_id()[:12]}{_LIVES_SUFFIX}"
        return store / name if isinstance(store, Path) else store / RUNS_NAME / name

    def _count_life(self, context: Any, lot: np.ndarray) -> None:
        """Refuse one more life where a lot ends each of them, which Ray would go on with for ever."""
        if _count(self._lives(context)) > _MOST_LIVES:
            raise WorkerError(
                f"A worker on {socket.gethostname()} has ended {_MOST_LIVES} times in a row at the same work (parts "
                f"{', '.join(map(str, lot.tolist()))}), as it does when memory runs out. What was committed is kept: "
                "mend it and run the same command again to go on."
            )

    def _start(self, context: Any) -> Worker:
        """Join the store and load the target, and delete what an earlier life of this actor left unfinished."""
        actor = f"{self._run}-{context.get_actor_id()[:12]}"
        n_here = actors_that_fit(_resources_of(context.get_node_id()), self._needs)
        order = replace(
            self._order,
            n_threads=core_share(n_here),
            n_encode_threads=resolve_encode_threads(self._encode_threads, n_here),
        )
        worker = Worker.start(order, f"{actor}-{secrets.token_hex(2)}")
        worker.store.remove_attempt(f"{actor}-*")
        return worker


def _count(path: StorePath) -> int:
    """Add a byte to a file that one actor alone writes; returns how many there are."""
    if isinstance(path, Path):
        with open(path, "ab") as file:
            file.write(b".")
            return file.tell()
    content = path.read_bytes() if path.exists() else b""
    path.bucket.put(path.key, content + b".")
    return len(content) + 1


def _forget(path: StorePath) -> None:
    if isinstance(path, Path):
        path.unlink(missing_ok=True)
    else:
        path.bucket.delete([path.key])


def forget_lives(store: RemotePath, run: str) -> None:
    """Delete the counts of a run's actors in a bucket, where nothing sweeps unfinished files."""
    left = [name for name in (store / RUNS_NAME).names() if name.startswith(f"{run}-") and name.endswith(_LIVES_SUFFIX)]
    store.bucket.delete([(store / RUNS_NAME / name).key for name in left])


def actors_that_fit(resources: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many actors with these needs a machine can hold, which share its cores; at least one."""
    return max(1, int(min(resources.get(name, 0.0) // need for name, need in needs.items() if need)))


def _resources_of(node: str) -> Mapping[str, float]:
    import ray

    found: Mapping[str, float] = next((item["Resources"] for item in ray.nodes() if item["NodeID"] == node), {})
    return found
