"""Requests to servers: how many at a time, and how much each asks for."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

MAX_REQUESTS = 32
"""Requests that one process has under way at the same time: with 20 ms to the first byte and 8 MiB each, more than a
link of 100 Gbit/s carries."""
REQUEST_BYTES = 8 << 20
"""Longest range of one request, and size of the pieces in which a file is uploaded."""


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
