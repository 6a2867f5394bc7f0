"""Worker processes without a target: forks that write the parts of a recipe's store, to watch and to kill."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moa_data.pipeline import workers
from moa_data.pipeline.report import Timings
from moa_data.pipeline.workers import WorkOrder, is_done, pending_in_turn
from moa_data.storage.write.store import StoreWriter

from .stores import Recipe


def order_for(store: Path, attempt: str = "other") -> WorkOrder:
    """An order for a worker that loads nothing."""
    return WorkOrder(str(store), None, "", None, "cpu", 1, 1, attempt)


class Forked:
    """A fork of this process, as ``subprocess.Popen`` shows one."""

    stdin = None

    def __init__(self, action: Callable[[], int]) -> None:
        def run() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os._exit(action())

        self._process = multiprocessing.get_context("fork").Process(target=run)
        self._process.start()
        self.pid, self.wait = self._process.pid or 0, self._process.join
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._process.exitcode


@dataclass
class Script:
    """What a forked worker does: ``at_part`` is called with its number and a part, once the part is half written."""

    recipe: Recipe
    at_part: Callable[[int, int], None] = lambda number, part: None

    def __post_init__(self) -> None:
        self.pids: list[int] = []

    def start(self, order: WorkOrder, log: BinaryIO, result: BinaryIO) -> Any:
        """Stand in for ``workers.start_process``."""

        def run() -> int:
            os.dup2(log.fileno(), 2)
            return workers.write_outcome(result.fileno(), lambda: self.work(order))

        process = Forked(run)
        self.pids.append(process.pid)
        return process

    def work(self, order: WorkOrder) -> Timings:
        """Stand in for ``workers.run_worker``."""
        timings = Timings()
        with StoreWriter.join(order.store, order.attempt) as store:
            if order.index == 0:
                write_bundle(store)
            for part in pending_in_turn(store, order.index, order.n_workers):
                if part is None:
                    continue
                with store.part(part) as out:
                    self.recipe.fill(out)
                    self.at_part(order.index, part)
                    out.commit()
                timings.add_part(sum(out.sequences["n_tokens"].to_pylist()), out.was_first)
            if not is_done(store):
                write_bundle(store)
        return timings


def write_bundle(store: StoreWriter) -> None:
    """Write a target bundle of one file, if there is none."""
    if not store.has_target:
        with store.target() as folder:
            (folder / "config.json").write_text("{}")
