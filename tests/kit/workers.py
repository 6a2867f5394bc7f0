"""Worker processes without a target: forks that write the parts of a recipe's store.

Tests watch and kill them.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from moa_data.errors import WorkerError
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.report import Timings
from moa_data.pipeline.workers import LOG_NAME, TIMINGS_NAME, Worker, is_done, pending_in_turn
from moa_data.storage.write.store import StoreWriter

from .stores import Recipe


def workers_of(store: Path, n_workers: int) -> list[Worker]:
    """Return workers that load no target."""
    config = ExtractConfig.of(model="model", dataset="chats", out=str(store))
    return [Worker(config, index, n_workers) for index in range(n_workers)]


class Forked:
    """A fork of this process, with the interface of ``subprocess.Popen``."""

    stdin = None

    def __init__(self, action: Callable[[], int]) -> None:
        def run() -> None:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                code = action()
            except KeyboardInterrupt:
                code = 128 + signal.SIGTERM
            os._exit(code)

        self._process = multiprocessing.get_context("fork").Process(target=run)
        self._process.start()
        self.pid = self._process.pid or 0
        self.terminate = self._process.terminate
        self.kill = self._process.kill

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the process, and return its exit code, or None if it still runs."""
        self._process.join(timeout)
        return self._process.exitcode


@dataclass
class Script:
    """What a forked worker does.

    Attributes:
        at_part: called with the worker's number and a part once the part is half written.
    """

    recipe: Recipe
    at_part: Callable[[int, int], None] = lambda number, part: None

    def __post_init__(self) -> None:
        self.pids: list[int] = []

    def start(self, worker: Worker, folder: Path, n_threads: int) -> Forked:
        """Stand in for ``workers.start_command``."""

        def run() -> int:
            with (folder / LOG_NAME).open("wb") as log:
                os.dup2(log.fileno(), 2)
            try:
                timings = self.work(worker)
            except Exception as error:  # noqa: BLE001  (as the command line does)
                os.write(2, f"Error: {error}\n".encode())
                return WorkerError.exit_code
            (folder / TIMINGS_NAME).write_text(json.dumps(asdict(timings)))
            return 0

        process = Forked(run)
        self.pids.append(process.pid)
        return process

    def work(self, worker: Worker) -> Timings:
        """Do the work of a worker's command."""
        timings = Timings()
        with open_recipe(Path(worker.config.out), self.recipe) as store:
            if worker.index == 0:
                write_bundle(store)
            for part in pending_in_turn(store, worker.index, worker.n_workers):
                if part is None:
                    continue
                with store.part(part) as out:
                    self.recipe.fill(out)
                    self.at_part(worker.index, part)
                    out.commit()
                timings.add_part(sum(out.sequences["n_tokens"].to_pylist()), out.was_first)
            if not is_done(store):
                write_bundle(store)
        return timings


def open_recipe(path: Path, recipe: Recipe) -> StoreWriter:
    """Create a recipe's store, or join the processes that write it."""
    return StoreWriter.create_or_resume(path, recipe.manifest, recipe.plan, shares=True)


def write_bundle(store: StoreWriter) -> None:
    """Write a target bundle of one file, if the store has none."""
    if not store.has_target:
        with store.target() as folder:
            (folder / "config.json").write_text("{}")
