"""Threads that encode the chunks of a part beside the thread that writes them, and one that waits for the disk.

zstd, blosc and NumPy's copies release the GIL, so threads are enough. The bytes are the same with any number of them:
chunks reach the shard in the order in which they were given.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import numpy as np

from .chunk import encode_chunk

_Result = TypeVar("_Result")

_AHEAD_PER_THREAD = 4
"""Tasks that wait for each thread: with fewer, threads wait where tasks take unequal time; more only hold memory."""


class EncodePool:
    """Encodes chunks on threads.

    Args:
        n_threads: threads that encode; with 0 the caller's own thread encodes at once.

    Attributes:
        n_ahead: tasks that may be under way in one shard before its writer waits for the oldest; this bounds memory.
        busy_s: seconds of CPU that encoding has taken, over all threads.
    """

    def __init__(self, n_threads: int = 0) -> None:
        self.n_threads = n_threads
        self.n_ahead = _AHEAD_PER_THREAD * n_threads
        self.busy_s = 0.0
        self._counting = threading.Lock()
        self._encoders = ThreadPoolExecutor(n_threads, "encode") if n_threads else None
        # Waiting for the disk takes a thread of its own: an encoder that waits encodes nothing.
        self._syncer = ThreadPoolExecutor(1, "sync") if n_threads else None

    def encode(self, chunks: Sequence[np.ndarray]) -> Future[list[bytes]]:
        """Start encoding chunks; their values must not change until the future is done."""
        return _start(self._encoders, lambda: self._encode(chunks))

    def sync(self, task: Callable[[], None]) -> Future[None]:
        """Start a task that waits for the disk; such tasks run one after the other."""
        return _start(self._syncer, task)

    def close(self) -> None:
        """Drop the tasks that wait, whose futures raise CancelledError, and end the threads."""
        for executor in (self._encoders, self._syncer):
            if executor is not None:
                # A sync closes its file, so it is never dropped.
                executor.shutdown(wait=True, cancel_futures=executor is self._encoders)

    def _encode(self, chunks: Sequence[np.ndarray]) -> list[bytes]:
        began_s = time.thread_time()
        encoded = [encode_chunk(chunk) for chunk in chunks]
        with self._counting:
            self.busy_s += time.thread_time() - began_s
        return encoded

    def __enter__(self) -> EncodePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start(executor: ThreadPoolExecutor | None, task: Callable[[], _Result]) -> Future[_Result]:
    if executor is not None:
        return executor.submit(task)
    done: Future[_Result] = Future()
    done.set_result(task())
    return done
