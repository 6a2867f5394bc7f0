"""Requests to servers: how many at a time, and how much each asks for."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

MAX_REQUESTS = 32
"""Requests that one process has under way at the same time: with 20 ms to the first byte and 8 MiB each, more than a
link of 100 Gbit/s carries."""
REQUEST_BYTES = 8 << 20
"""Longest range of one request, and size of the pieces in which a file is uploaded."""
NOTICE_S = 5.0
"""Time without an answer after which a process says, once, that it waits."""
_log = logging.getLogger(__name__)


def bounded(content: bytes, n_bytes: int, max_bytes: int | None) -> bytes:
    """Return a file's content; ValueError where the file is longer than ``max_bytes``."""
    if max_bytes is not None and n_bytes > max_bytes:
        raise ValueError(f"it has {n_bytes} bytes, at most {max_bytes} are read")
    return content


_pool: tuple[int, ThreadPoolExecutor] | None = None


def requests() -> ThreadPoolExecutor:
    """Return this process's threads that wait for servers."""
    global _pool
    if _pool is None or _pool[0] != os.getpid():
        _pool = (os.getpid(), ThreadPoolExecutor(MAX_REQUESTS, "object-store"))
    return _pool[1]


_waiting: dict[object, tuple[float, str]] = {}
_watcher: threading.Thread | None = None


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Log that the bucket is waited for where the block, a short request and its repetitions, takes long."""
    global _watcher
    if _watcher is None:
        # One thread for all requests: a timer for each would cost as much as some of them.
        _watcher = threading.Thread(target=_watch, name="object-store-watch", daemon=True)
        _watcher.start()
    request = object()
    _waiting[request] = time.monotonic(), url
    try:
        yield
    finally:
        del _waiting[request]


def _watch() -> None:
    while True:
        time.sleep(NOTICE_S / 10)
        for began_s, url in list(_waiting.values()):
            if time.monotonic() - began_s > NOTICE_S:
                _log.warning("waiting for the bucket %s: no answer for %.0f s", url, NOTICE_S)
                return
