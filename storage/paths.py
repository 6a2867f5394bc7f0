"""The paths of stores: in a folder (``Path``) or below a prefix of an object store (:class:`RemotePath`)."""

import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol, TypeVar

# longest range of one request to a server, and size of the blocks in which a file is uploaded
REQUEST_BYTES = 8 << 20
MAX_REQUESTS = 32
"""Requests that one process has under way at the same time: with 20 ms to the first byte and 8 MiB each, more than a
link of 100 Gbit/s carries."""


class Entry(NamedTuple):
    """What a listing says of a file."""

    n_bytes: int
    modified: datetime | None


class Backend(Protocol):
    """A prefix of an object store, which has no renames: files are uploaded in blocks, and copied by the server.

    Every method raises FileNotFoundError for a file that is not there; StorageUnavailable where it cannot be told.
    """

    url: str

    def list_files(self, folder: str) -> dict[str, Entry]:
        """Return all files at or below a folder by their names; the list may be older than the files."""

    def size(self, name: str) -> int:
        """Return the bytes of a file, as it is now."""

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return a whole file; ValueError, with nothing read, where it is longer than ``max_bytes``."""

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[memoryview]:
        """Return bytes [start, stop) of files; a range that reaches beyond a file's end gives what there is."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a file that must not exist; returns whether it holds ``data`` now, also where another writer put it."""

    def replace(self, name: str, old: bytes, new: bytes) -> bool:
        """Write a file that must hold ``old``; returns whether it holds ``new`` now."""

    def put(self, name: str, data: bytes | Path) -> None:
        """Write a file, or replace it, in one step; with the content of a local one where ``data`` is its path."""

    def copy(self, source: str, target: str, n_bytes: int) -> None:
        """Write a file, or replace it, in one step, with the content of another one, which has ``n_bytes``."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that are not there are passed over."""


class Stat(NamedTuple):
    """What ``Path.stat`` says of a file, as far as it is known of a remote one."""

    st_size: int
    st_mode: int = stat.S_IFREG


class RemotePath:
    """A file or folder in an object store, named in the way of ``Path``; the store itself has an empty key."""

    def __init__(self, backend: Backend, key: str = "") -> None:
        self.backend = backend
        self.key = key

    def __truediv__(self, name: str | PurePosixPath) -> "RemotePath":
        return RemotePath(self.backend, f"{self.key}/{name}".strip("/"))

    def __str__(self) -> str:
        return f"{self.backend.url}/{self.key}".rstrip("/")

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        """The last step of the path."""
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The folder around it; of the store itself, the store."""
        return RemotePath(self.backend, self.key.rpartition("/")[0])

    def stat(self) -> Stat:
        """Return the size; FileNotFoundError if the file does not exist."""
        return Stat(self.backend.size(self.key))

    def exists(self) -> bool:
        """Whether there is such a file, or a file below it."""
        try:
            self.stat()
        except FileNotFoundError:
            return bool(self.backend.list_files(self.key))
        return True

    def sizes(self) -> dict[str, int]:
        """Return the names of all files below it, relative to it and sorted -> bytes."""
        start = f"{self.key}/" if self.key else ""
        found = sorted(self.backend.list_files(self.key).items())
        return {
            name[len(start) :]: entry.n_bytes for name, entry in found if name.startswith(start)
        }

    def names(self) -> list[str]:
        """Return the names of all files below it, relative to it and sorted."""
        return list(self.sizes())

    def read_bytes(self) -> bytes:
        """Return the file's content."""
        return self.backend.read(self.key)


StorePath = Path | RemotePath  # a store, or a file or folder of one
# the type of a path of which another one of the same kind is made
AnyPath = TypeVar("AnyPath", bound=StorePath)


def name_below(folder: StorePath, path: StorePath) -> str:
    """Return the name of a file below a folder, relative to it; ValueError where it lies elsewhere."""
    return PurePosixPath(str(path)).relative_to(str(folder)).as_posix()


def requests() -> ThreadPoolExecutor:
    """Return this process's threads that wait for servers."""
    return threads("object-store", MAX_REQUESTS)


def threads(name: str, n_threads: int) -> ThreadPoolExecutor:
    """Return this process's threads of that name; they start on first use, and anew after a fork."""
    # Two threads that meet here make two pools; the threads of the one that loses end with their
    # work.
    if (key := (name, os.getpid())) not in _pools:
        _pools[key] = ThreadPoolExecutor(n_threads, name)
    return _pools[key]


_pools: dict[tuple[str, int], ThreadPoolExecutor] = {}
