"""One thread that encodes and writes behind the forwards, fed through a bounded queue."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from ..storage.write.part import PartWriter
from .capture import HostCapture

Task = Callable[[], None]


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
        """Queue a task, waiting for room.

        Raises:
            BaseException: what an earlier task raised.
        """
        self._raise_error()
        self._queue.put(task)

    def finish(self) -> None:
        """Wait for all tasks and end the thread.

        Raises:
            BaseException: what a task raised.
        """
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def abort(self) -> None:
        """Let the running task end, skip the others and end the thread."""
        self._stopping = True
        while self._thread.is_alive():
            try:
                self._queue.put(None, timeout=0.1)
                self._thread.join()
            except queue.Full:
                continue

    def _raise_error(self) -> None:
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


class PartSink(Protocol):
    """What takes parts: a store that is written, or fields that are added to one."""

    def part_sequences(self, part: int) -> pa.Table:
        """Return the plan's rows of one part."""

    def part(self, part: int) -> PartWriter:
        """Open a part for writing; the writer's ``fields`` say what it takes."""


class PartTasks:
    """The tasks of one part: open, write batches, commit; and its disposal.

    Args:
        store: takes the part.
        part: number of the part.
    """

    def __init__(self, store: PartSink, part: int) -> None:
        self._store = store
        self._number = part
        self._writer: PartWriter | None = None

    def open(self) -> None:
        """Start writing the part."""
        self._writer = self._store.part(self._number)

    def write(
        self,
        capture: HostCapture,
        first_tokens: Sequence[int],
        texts: Sequence[tuple[np.ndarray, np.ndarray]],
        names: Sequence[str],
    ) -> None:
        """Check one batch and write those of its fields that the part takes.

        Args:
            capture: the batch's activations.
            first_tokens: position of each sequence on the part's token axis.
            texts: tokens (int32) and response mask (uint8) of each sequence.
            names: what to call each sequence in an error.

        Raises:
            NonFiniteActivation: a value is NaN or infinite.
            StoreError: the store cannot take it, e.g. the disk is full.
        """
        assert self._writer is not None
        capture.wait()
        capture.check_finite(names)
        wanted = self._writer.fields
        for index, (first, (tokens, mask)) in enumerate(zip(first_tokens, texts, strict=True)):
            for field, values in (("tokens", tokens), ("response_mask", mask)):
                if field in wanted:
                    self._writer.write(field, first, values)
            for field in (name for name in capture.plain_fields if name in wanted):
                self._writer.write(field, first, capture.array(field, index))
            for field in (name for name in capture.codecs if name in wanted):
                self._writer.write_codes(field, first, len(tokens), capture.codes(field, index))

    def commit(self) -> None:
        """Make the part exist."""
        assert self._writer is not None
        self._writer.commit()
        self._writer = None

    def discard(self) -> None:
        """Delete the part, unless it was committed; call it when no task of it runs any more."""
        if self._writer is not None:
            self._writer.discard()
            self._writer = None
