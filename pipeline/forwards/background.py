"""A thread that writes one batch while the target computes the next, fed through a bounded queue."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Task = Callable[[], object]


class BackgroundWriter:
    """Runs tasks in order on a thread of its own.

    After a failure the remaining tasks are skipped, so that `submit` never waits for a thread that has given up; the
    error is raised by the next `submit` or by `finish`.

    Args:
        depth: tasks that may wait; each holds the activations of a batch.

    Attributes:
        busy_s: seconds of CPU that the thread has spent.
    """

    def __init__(self, depth: int = 2) -> None:
        self._queue: queue.Queue[Task | None] = queue.Queue(maxsize=depth)
        self._error: BaseException | None = None
        self.busy_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="activation-writer", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queue a task, waiting for room; raises what an earlier task raised."""
        self.check()
        self._queue.put(task)

    def finish(self) -> None:
        """Wait for all tasks and end the thread."""
        self._queue.put(None)
        self._thread.join()
        self.check()

    def abort(self) -> None:
        """Let the running task end, skip the others and end the thread."""
        self._stopping = True
        while self._thread.is_alive():
            try:
                self._queue.put(None, timeout=0.1)
                self._thread.join()
            except queue.Full:
                continue

    def check(self) -> None:
        """Raise what a task has raised."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            if self._stopping or self._error is not None:
                continue
            try:
                task()
            except BaseException as error:  # noqa: BLE001  (raised again in the main thread)
                self._error = error
            self.busy_s = time.thread_time()
