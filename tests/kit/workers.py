"""Worker processes without a target: forks of a script that write the parts of a recipe's store, to direct and kill."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from moa_data.pipeline.forwards.parts import Outcome, Timings
from moa_data.pipeline.workers.local import _Process
from moa_data.pipeline.workers.messages import Asking, Computed, Done, Ended, Failed, Loading, Piece, Start
from moa_data.pipeline.workers.work import BUNDLE, WorkOrder, is_pending
from moa_data.storage.write.store import StoreWriter

from .stores import Recipe


def order_for(store: Any, number: int = 0) -> WorkOrder:
    """An order for a worker that loads nothing; its number is where it says how much it loads."""
    return WorkOrder(str(store), "", "", None, number, "cpu", 1, 1)


class Forked:
    """A fork of this process, as ``subprocess.Popen`` shows one."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                action()
                os._exit(0)
            finally:
                os._exit(70)

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """Its exit code."""
        while self.poll() is None:
            time.sleep(0.001)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Script:
    """What a forked worker does: ``at_part`` is called with its number and a part, once the part is half written."""

    recipe: Recipe
    at_part: Callable[[int, int], None] = lambda number, part: None

    def start(self, order: WorkOrder) -> _Process:
        """Stand in for ``_Process.start``."""
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)

        def run() -> None:
            ours.close()
            os.dup2(log.fileno(), 2)
            self._work(Connection(theirs.fileno()))

        process: Any = Forked(run)
        theirs.close()
        worker = _Process(process, Connection(ours.detach()), f"attempt-{order.n_weight_bytes}", log)
        worker.send(Start(order, worker.attempt))
        return worker

    def _work(self, connection: Connection) -> None:
        start: Start = connection.recv()
        number = start.order.n_weight_bytes
        connection.send(Loading(number))
        n_tokens = 0
        with StoreWriter.join(start.order.store, start.attempt) as store:
            while (piece := self._asked(connection)) is not None:
                if piece == BUNDLE:
                    with store.target() as folder:
                        (folder / "config.json").write_text("{}")
                    connection.send(Done(piece, Outcome.WRITTEN))
                    continue
                assert is_pending(store, piece)
                out = store.part(piece)
                try:
                    self.recipe.fill(out)
                    n_tokens += sum(out.sequences["n_tokens"].to_pylist())
                    connection.send(Computed(n_tokens))
                    self.at_part(number, piece)
                except ValueError as error:
                    out.discard()
                    connection.send(Failed(error))
                    return
                out.commit()
                connection.send(Done(piece, Outcome.WRITTEN if out.was_first else Outcome.LATE))
        connection.send(Ended(Timings(n_tokens=n_tokens, extract_s=number)))

    @staticmethod
    def _asked(connection: Connection) -> int | None:
        connection.send(Asking())
        message: Piece = connection.recv()
        return message.piece
