"""Limits and thread pools of requests to object stores, and the entries of file listings."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import NamedTuple

# Largest number of bytes that one request to a server reads. The blocks of an upload have the same
# size.
REQUEST_BYTES = 8 << 20
MAX_REQUESTS = 32
"""Upper bound on the number of concurrent requests of one process.

With 8 MiB per request and 20 ms to the first byte, this number of requests saturates a link of 100
Gbit/s.
"""


class Entry(NamedTuple):
    """Size and modification time of a file in a listing of a bucket."""

    n_bytes: int
    modified: datetime | None


def requests() -> ThreadPoolExecutor:
    """Return the thread pool of this process for requests to servers."""
    return threads("object-store", MAX_REQUESTS)


def threads(name: str, n_threads: int) -> ThreadPoolExecutor:
    """Return the thread pool that has this name in this process.

    The threads of the pool start on first use. After a fork, the child process gets a new pool.
    """
    # If two threads call this function at the same time, they may create two pools. Only one of
    # them stays in `_pools`. This does no harm: the threads of the other pool end when their work
    # is done.
    if (key := (name, os.getpid())) not in _pools:
        _pools[key] = ThreadPoolExecutor(n_threads, name)
    return _pools[key]


_pools: dict[tuple[str, int], ThreadPoolExecutor] = {}
