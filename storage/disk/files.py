"""Opens stores by path or URL, and reads their files by position, several at once and in blocks."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import numpy as np

from ..documents import open_regular, read_bounded, relative_name
from ..paths import RemotePath, Stat, StorePath
from .bucket import bucket_at
from .checking import MISSING
from .open_files import ReadHandle
from .requests import REQUEST_BYTES, requests

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def open_path(path_or_url: str | os.PathLike[str] | StorePath) -> StorePath:
    """Return the folder of a store.

    Args:
        path_or_url: a path, a ``file://`` URL, or the URL of an object store (``s3://``, ``gs://``, ``az://``) or, to
            read from, of any protocol that fsspec has (``hf://``).
    """
    if isinstance(path_or_url, RemotePath):
        return path_or_url
    text = os.fspath(path_or_url)
    if not _URL.match(text):
        return Path(text).expanduser()
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return RemotePath(bucket_at(text))


class LocalFile:
    """A file of which byte ranges are read; safe in threads and after a fork, for ``pread`` shares no position.

    It is opened when bytes are wanted, which raises FileNotFoundError if it is gone (see ``open_files``).

    Args:
        path: the file. It is closed when this object is garbage.

    Raises:
        StoreDamaged: it is no regular file, when it is read.
    """

    max_read_bytes = 512 << 10
    """Longest useful read: what is read should still be in the core's cache when it is decoded."""
    is_remote = False
    # The kernel cuts one request for read-ahead at the device's largest transfer, and drops the rest.
    _prefetch_bytes = 512 << 10

    def __init__(self, path: Path) -> None:
        self._handle = ReadHandle(path)
        weakref.finalize(self, self._handle.close)

    @property
    def n_bytes(self) -> int:
        """The size of the file."""
        fd = self._handle.take()
        try:
            return os.fstat(fd).st_size
        finally:
            self._handle.give_back()

    def read_into(self, offset: int, buffer: np.ndarray) -> int:
        """Fill ``buffer`` (uint8) with the bytes from ``offset`` on; return how many there were."""
        n_read = 0
        fd = self._handle.take()
        try:
            while n_read < len(buffer) and (got := os.preadv(fd, [buffer[n_read:].data], offset + n_read)):
                n_read += got
        finally:
            self._handle.give_back()
        return n_read

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the kernel to read bytes [start, stop) ahead; returns at once."""
        if not hasattr(os, "posix_fadvise"):
            return
        fd = self._handle.take()
        try:
            for at in range(start, stop, self._prefetch_bytes):
                os.posix_fadvise(fd, at, min(self._prefetch_bytes, stop - at), os.POSIX_FADV_WILLNEED)
        finally:
            self._handle.give_back()


class Piece(NamedTuple):
    """Bytes [start, stop) of a file that has ``n_bytes``, known by an identity that no other content has."""

    identity: str
    n_bytes: int
    start: int
    stop: int


Fetch = Callable[[Sequence[tuple[int, int, int]]], Sequence[memoryview]]
"""Fetches ranges: (position of a piece among those that are asked for, start, stop) each."""


class RangeCache(Protocol):
    """What keeps bytes of remote files (``read_cache``)."""

    def read(self, pieces: Sequence[Piece], fetch: Fetch) -> list[memoryview]:
        """Return the bytes of pieces, fetching what is not kept."""
        ...


class CachedAs(NamedTuple):
    """A cache, and what identifies the content of a file in it."""

    cache: RangeCache
    identity: str


class RemoteFile:
    """A remote file of which byte ranges are read, one request each."""

    max_read_bytes = REQUEST_BYTES
    is_remote = True

    def __init__(self, path: RemotePath, n_bytes: int | None = None, cached: CachedAs | None = None) -> None:
        self.path = path
        self.cached = cached
        self._n_bytes = n_bytes

    @property
    def n_bytes(self) -> int:
        """The size of the file, as it was given or as the server says."""
        return self.path.stat().st_size if self._n_bytes is None else self._n_bytes

    def read_into(self, offset: int, buffer: np.ndarray) -> int:
        """Fill ``buffer`` (uint8) with the bytes from ``offset`` on; return how many there were."""
        data = fetch_ranges([(self, offset, offset + len(buffer))])[0]
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def prefetch(self, start: int, stop: int) -> None:
        """Do nothing: a remote file has no page cache to fill."""


def open_file(path: StorePath, n_bytes: int | None = None, cached: CachedAs | None = None) -> LocalFile | RemoteFile:
    """Return a file of a store for reading by position; it need not exist before bytes of it are read.

    Args:
        n_bytes: its size, which a remote file is then not asked for.
        cached: keeps on a disk what is read of a remote file.
    """
    return RemoteFile(path, n_bytes, cached) if isinstance(path, RemotePath) else LocalFile(path)


def fetch_ranges(ranges: Sequence[tuple[RemoteFile, int, int]]) -> list[memoryview]:
    """Fetch byte ranges [start, stop) of remote files of one store, all requests under way at the same time.

    Raises:
        FileNotFoundError: a file is gone; the message is its URL.
        StorageUnavailable: a range cannot be read.
    """
    bucket = ranges[0][0].path.bucket
    cached = ranges[0][0].cached  # a store has one cache for all of its shards
    if cached is None:
        return bucket.read_ranges([(file.path.key, start, stop) for file, start, stop in ranges])
    pieces = [
        Piece(file.cached.identity if file.cached else str(file.path), file.n_bytes, start, stop)
        for file, start, stop in ranges
    ]
    return cached.cache.read(
        pieces, lambda wanted: bucket.read_ranges([(ranges[i][0].path.key, start, stop) for i, start, stop in wanted])
    )


def reads_of(paths: Iterable[StorePath]) -> Iterator[tuple[StorePath, Callable[[], bytes]]]:
    """Yield documents with what reads each, as :func:`read_bounded` does; remote ones are read ahead, all at once."""
    paths = list(paths)
    ahead = [requests().submit(read_bounded, path) if isinstance(path, RemotePath) else None for path in paths]
    for path, future in zip(paths, ahead, strict=True):
        yield path, partial(read_bounded, path) if future is None else future.result


def names_in(folder: StorePath) -> list[str]:
    """Return the names of the files and folders in a folder, sorted; none where there is no such folder."""
    if isinstance(folder, RemotePath):
        return sorted({name.partition("/")[0] for name in folder.names()})
    try:
        return sorted(os.listdir(folder))
    except MISSING:
        return []


def sizes_of(store: StorePath) -> Callable[[StorePath], Stat | os.stat_result]:
    """Return what tells a file's size: of a remote store from one listing, and by asking for what that lacks."""
    if not isinstance(store, RemotePath):
        return lambda path: path.stat()
    listing = store.bucket.find(store.key)

    def look(path: StorePath) -> Stat | os.stat_result:
        known = listing.get(path.key) if isinstance(path, RemotePath) else None
        return path.stat() if known is None else Stat(known.n_bytes)

    return look


_BLOCKS_AHEAD = 4


def blocks_of(path: StorePath, block_bytes: int = 8 << 20) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a whole file in order; of a remote one several blocks are on their way at a time.

    Raises:
        StoreDamaged: it is no regular file.
        OSError: it cannot be read.
    """
    if not isinstance(path, RemotePath):
        with open(open_regular(path), "rb", buffering=0) as file:
            while block := file.read(block_bytes):
                yield block
        return
    n_bytes, bucket, key = path.stat().st_size, path.bucket, path.key
    blocks = [(key, at, min(at + block_bytes, n_bytes)) for at in range(0, n_bytes, block_bytes)]
    for first in range(0, len(blocks), _BLOCKS_AHEAD):
        yield from bucket.read_ranges(blocks[first : first + _BLOCKS_AHEAD])


def download(folder: StorePath, target: Path, names: Iterable[str] | None = None) -> None:
    """Copy files below a folder into a local one; a name that leads out of it raises ValueError.

    Args:
        names: files below the folder; None for all of a remote one.
    """
    if names is None:
        names = folder.names() if isinstance(folder, RemotePath) else ()
    for name in names:
        local = target / relative_name(name)
        local.parent.mkdir(parents=True, exist_ok=True)
        with open(local, "wb") as file:
            for block in blocks_of(folder / name):
                file.write(block)


_scratch = threading.local()


def scratch_bytes(name: str, n_bytes: int) -> np.ndarray:
    """Return this thread's reusable uint8 buffer of that name, cut to ``n_bytes``."""
    buffer: np.ndarray | None = getattr(_scratch, name, None)
    if buffer is None or len(buffer) < n_bytes:
        buffer = np.empty(n_bytes, np.uint8)
        setattr(_scratch, name, buffer)
    return buffer[:n_bytes]
