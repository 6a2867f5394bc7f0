"""Where a store lies: in a folder of this machine (``Path``), or below a prefix of a bucket (:class:`RemotePath`).

Both name files and folders in one way, so that the rest of ``storage`` does not tell them apart; what is done to the
files behind the names goes through the functions of ``disk``.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol, TypeVar


class Entry(NamedTuple):
    """What a listing says of a file."""

    n_bytes: int
    modified: datetime | None


class Bucket(Protocol):
    """All that is asked of an object store; names are relative to the store's URL.

    Every method raises FileNotFoundError for a file that is not there, and StorageUnavailable where the server cannot
    be asked, or refuses.
    """

    url: str

    def find(self, folder: str = "") -> dict[str, Entry]:
        """Return all files at or below a folder, which may lag behind what was written."""
        ...

    def size(self, name: str) -> int:
        """Return the bytes of a file, as it is now."""
        ...

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return a whole file; ValueError, with nothing read, where it is longer than ``max_bytes``."""
        ...

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[memoryview]:
        """Return bytes [start, stop) of files, all requests under way together; ranges may end behind a file's end."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not exist; returns whether this call made it.

        An answer that was lost on the way is asked for: where the file holds ``data``, this call made it.
        """
        ...

    def replace(self, name: str, old: bytes, new: bytes) -> bool:
        """Write a file that must hold ``old``; returns whether it held it, as for :meth:`create`."""
        ...

    def put(self, name: str, data: bytes | Path | Iterable[bytes]) -> None:
        """Write a file, or replace it, in one step; a file's content or an iterable goes up in pieces as it comes."""
        ...

    def copy(self, source: str, target: str, n_bytes: int) -> None:
        """Write a file, or replace it, in one step with the content of another one, which has ``n_bytes``."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that are not there are passed over."""
        ...


class Stat(NamedTuple):
    """What ``Path.stat`` says of a file, as far as it is known of a remote one."""

    st_size: int
    st_mode: int = stat.S_IFREG


class RemotePath:
    """A file or folder of a remote store, named in the way of ``Path``; the store itself has an empty key."""

    def __init__(self, bucket: Bucket, key: str = "") -> None:
        self.bucket, self.key = bucket, key

    def __truediv__(self, name: str | PurePosixPath) -> RemotePath:
        return RemotePath(self.bucket, f"{self.key}/{name}".strip("/"))

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.key}".rstrip("/")

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
    def parent(self) -> RemotePath:
        """The folder around it; of the store itself, the store."""
        return RemotePath(self.bucket, self.key.rpartition("/")[0])

    def stat(self) -> Stat:
        """Return the size; FileNotFoundError where there is no such file."""
        return Stat(self.bucket.size(self.key))

    def exists(self) -> bool:
        """Whether there is such a file, or a file below it."""
        try:
            self.stat()
        except FileNotFoundError:
            return self.is_dir()
        return True

    def is_dir(self) -> bool:
        """Whether there is a file below it."""
        return bool(self.bucket.find(self.key))

    def names(self) -> list[str]:
        """Return the names of all files below it, relative to it."""
        start = f"{self.key}/" if self.key else ""
        return [name[len(start) :] for name in sorted(self.bucket.find(self.key)) if name.startswith(start)]

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        """Return the file's content; ValueError, with nothing read, where it is longer than ``max_bytes``."""
        return self.bucket.read(self.key, max_bytes)


StorePath = Path | RemotePath
"""A store, or a file or folder of one."""

AnyPath = TypeVar("AnyPath", bound=StorePath)
"""The type of a path of which another one of the same kind is made."""


def name_below(folder: StorePath, path: StorePath) -> str:
    """Return the name of a file below a folder, relative to it; ValueError where it lies elsewhere."""
    return PurePosixPath(str(path)).relative_to(str(folder)).as_posix()
