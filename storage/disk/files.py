"""Where a store's bytes come from: a local folder, or any file system that fsspec knows, read by position.

A local store is a ``pathlib.Path``. A remote one is a :class:`RemotePath`, which has those methods of ``Path`` that
reading uses; so the rest of the reader does not tell them apart.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

import numpy as np

from ..documents import MAX_DOCUMENT_BYTES, relative_name
from ..errors import StoreNotFound
from .open_files import ReadHandle

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def open_path(path_or_url: str | os.PathLike[str]) -> Path:
    """Return the folder of a store.

    Args:
        path_or_url: a path, a ``file://`` URL, or a URL of any protocol that fsspec has (``s3://``, ``hf://``, ...).

    Returns:
        A ``Path``, or a :class:`RemotePath` in its place.
    """
    if isinstance(path_or_url, RemotePath):
        return cast(Path, path_or_url)
    text = os.fspath(path_or_url)
    if not _URL.match(text):
        return Path(text)
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return cast(Path, RemotePath(_RemoteRoot(text.rstrip("/")), ""))


class LocalFile:
    """A file of which byte ranges are read; safe in threads and after a fork, for ``pread`` shares no position.

    It is opened when bytes are wanted, which raises FileNotFoundError if it is gone (see ``open_files``).

    Args:
        path: the file. It is closed when this object is garbage.

    Raises:
        ShardCorrupt: it is no regular file, when it is read.
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


class _RemoteRoot:
    """The file system behind a URL: made anew in each process, with one listing of all files."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._per_process: tuple[int, AbstractFileSystem, str] | None = None
        self._sizes: dict[str, int] | None = None
        self._contents: dict[str, bytes] = {}

    def __reduce__(self) -> tuple[type[_RemoteRoot], tuple[str]]:
        return (_RemoteRoot, (self.url,))

    def connect(self) -> tuple[AbstractFileSystem, str]:
        """Return this process's file system and the root's path on it; StoreNotFound if fsspec lacks the protocol."""
        from fsspec.core import url_to_fs

        if self._per_process is None or self._per_process[0] != os.getpid():
            try:
                filesystem, root = url_to_fs(self.url)
            except (ImportError, ValueError) as error:
                raise StoreNotFound(f"{self.url} cannot be opened as a store: {error}") from error
            self._per_process = (os.getpid(), filesystem, str(root).rstrip("/"))
        return self._per_process[1:]

    def sizes(self) -> dict[str, int]:
        """Return path below the root -> bytes, of every file; listed once."""
        if self._sizes is None:
            filesystem, root = self.connect()
            found = filesystem.find(root, detail=True)
            if any(item["size"] is None for item in found.values()):  # of HTTP: each file would have to be asked for
                raise StoreNotFound(
                    f"{self.url} lists its files without their sizes, so it cannot be read as a store. Copy it to a "
                    "disk, or give its s3://, gs:// or hf:// URL."
                )
            self._sizes = {name[len(root) :].strip("/"): int(item["size"]) for name, item in found.items()}
        return self._sizes

    def read(self, key: str) -> bytes:
        """Return a whole file's content."""
        if key in self._contents:
            return self._contents[key]
        filesystem, root = self.connect()
        return bytes(filesystem.cat_file(f"{root}/{key}"))

    def preload(self, keys: Iterable[str]) -> None:
        """Fetch documents at once, so that reading them one by one needs no further round trip."""
        filesystem, root = self.connect()
        wanted = [
            f"{root}/{key}" for key in keys if self.sizes().get(key, MAX_DOCUMENT_BYTES + 1) <= MAX_DOCUMENT_BYTES
        ]
        if not wanted:
            return
        found = filesystem.cat(wanted, on_error="omit")
        for name, content in found.items() if isinstance(found, dict) else ():
            self._contents[name[len(root) :].strip("/")] = bytes(content)


class _Stat(NamedTuple):
    st_size: int
    st_mode: int = stat.S_IFREG


class RemotePath:
    """A file or folder of a remote store, with the ``Path`` methods that reading uses; the store itself has no key."""

    def __init__(self, root: _RemoteRoot, key: str) -> None:
        self.root, self.key = root, key

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.root, f"{self.key}/{name}".strip("/"))

    def __str__(self) -> str:
        return f"{self.root.url}/{self.key}".rstrip("/")

    __repr__ = __fspath__ = __str__

    def read_bytes(self) -> bytes:
        """Return the file's content."""
        return self.root.read(self.key)

    def exists(self) -> bool:
        """Whether there is such a file, or a file below it."""
        return self.key in self.root.sizes() or self.is_dir()

    def is_dir(self) -> bool:
        """Whether there is a file below it."""
        folder = f"{self.key}/" if self.key else ""
        return any(name.startswith(folder) for name in self.root.sizes())

    def stat(self) -> _Stat:
        """Return the size."""
        if self.key not in self.root.sizes():
            raise FileNotFoundError(f"{self} does not exist")
        return _Stat(self.root.sizes()[self.key])

    def download(self, folder: Path) -> None:
        """Copy every file below this path into a local folder; a name that leads out of it raises ValueError."""
        filesystem, root = self.root.connect()
        for name in self.root.sizes():
            if name.startswith(f"{self.key}/"):
                target = folder / relative_name(name[len(self.key) + 1 :])
                target.parent.mkdir(parents=True, exist_ok=True)
                filesystem.get_file(f"{root}/{name}", str(target))


class RemoteFile:
    """A remote file of which byte ranges are read, one request each."""

    max_read_bytes = 8 << 20
    is_remote = True

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self.n_bytes = path.stat().st_size

    def read_into(self, offset: int, buffer: np.ndarray) -> int:
        """Fill ``buffer`` (uint8) with the bytes from ``offset`` on; return how many there were."""
        data = fetch_ranges([(self, offset, offset + len(buffer))])[0]
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def prefetch(self, start: int, stop: int) -> None:
        """Do nothing: a remote file has no page cache to fill."""


def open_file(path: Path) -> LocalFile | RemoteFile:
    """Return a file of a store for reading by position; only a remote one must exist now (FileNotFoundError)."""
    return RemoteFile(path) if isinstance(path, RemotePath) else LocalFile(path)


def fetch_ranges(ranges: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
    """Fetch byte ranges [start, stop) of remote files of one store, all requests under way at the same time.

    Raises:
        OSError: a range cannot be read; FileNotFoundError, with the file's URL, where it is gone.
    """
    filesystem, root = ranges[0][0].path.root.connect()
    names = [f"{root}/{file.path.key}" for file, _, _ in ranges]
    starts, stops = [start for _, start, _ in ranges], [stop for _, _, stop in ranges]
    found: list[Any] = filesystem.cat_ranges(names, starts, stops, on_error="return")
    for (file, start, _), data in zip(ranges, found, strict=True):
        if isinstance(data, FileNotFoundError):
            raise FileNotFoundError(str(file.path)) from data
        if isinstance(data, Exception):
            raise OSError(f"{file.path} cannot be read at byte {start}: {data}") from data
    return [bytes(data) for data in found]


_scratch = threading.local()


def scratch_bytes(name: str, n_bytes: int) -> np.ndarray:
    """Return this thread's reusable uint8 buffer of that name, cut to ``n_bytes``."""
    buffer: np.ndarray | None = getattr(_scratch, name, None)
    if buffer is None or len(buffer) < n_bytes:
        buffer = np.empty(n_bytes, np.uint8)
        setattr(_scratch, name, buffer)
    return buffer[:n_bytes]
