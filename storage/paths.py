"""Paths of stores: local paths (``Path``), and paths in a bucket (:class:`RemotePath`)."""

import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from ..errors import StorageUnavailable
from ..files import MAX_JSON_BYTES
from .requests import REQUEST_BYTES, requests

if TYPE_CHECKING:
    from .object_store import ObjectStore

# Number of blocks of one file that are fetched in parallel.
_BLOCKS_AHEAD = 4


class Stat(NamedTuple):
    """The result of :meth:`RemotePath.stat`. Only the size of a remote file is known."""

    st_size: int
    st_mode: int = stat.S_IFREG


class RemotePath:
    """The path of a file or folder in an object store.

    The class has two sets of methods. The methods of the first set have the names and meanings of
    methods of ``pathlib.Path``. The methods of the second set read and write the file or folder.
    ``backend.LocalBackend`` has the same methods and documents them. The ``key`` is the path of the
    file or folder relative to the store. It is empty for the store itself.
    """

    uploads = True

    def __init__(self, bucket: "ObjectStore", key: str = "") -> None:
        self.bucket = bucket
        self.key = key

    def __truediv__(self, name: str | PurePosixPath) -> "RemotePath":
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
        """The last component of the path."""
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The parent folder. The parent of the store's own path is this path itself."""
        return RemotePath(self.bucket, self.key.rpartition("/")[0])

    def stat(self) -> Stat:
        """Return the size of the file at this path.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        return Stat(self.bucket.size(self.key))

    def exists(self) -> bool:
        """Whether this is the path of a file, or of a folder with at least one file below it."""
        try:
            self.stat()
        except FileNotFoundError:
            return bool(self.bucket.list_files(self.key))
        return True

    def listed_sizes(self) -> dict[str, int]:
        """Return name -> size in bytes, for each file below this path, sorted by name.

        Names are relative to this path.
        """
        start = f"{self.key}/" if self.key else ""
        entries = sorted(self.bucket.list_files(self.key).items())
        return {
            name[len(start) :]: entry.n_bytes for name, entry in entries if name.startswith(start)
        }

    def names_below(self) -> list[str]:
        """Return the sorted names of all files below this path, relative to this path."""
        return list(self.listed_sizes())

    def read_bytes(self) -> bytes:
        """Return the content of the file at this path."""
        return self.bucket.read(self.key)

    def names_in(self) -> list[str]:  # noqa: D102  (LocalBackend)
        return sorted({name.partition("/")[0] for name in self.names_below()})

    def read(self, max_bytes: int = MAX_JSON_BYTES) -> bytes:  # noqa: D102
        return self.bucket.read(self.key, max_bytes)

    def start_read(self) -> Callable[[], bytes]:  # noqa: D102
        return requests().submit(self.read).result

    def blocks(self, block_bytes: int = REQUEST_BYTES) -> Iterator[memoryview]:  # noqa: D102
        n_bytes = self.stat().st_size
        ranges = [
            (self.key, start, min(start + block_bytes, n_bytes))
            for start in range(0, n_bytes, block_bytes)
        ]
        for first in range(0, len(ranges), _BLOCKS_AHEAD):
            yield from self.bucket.read_ranges(ranges[first : first + _BLOCKS_AHEAD])

    def put(self, data: bytes) -> None:  # noqa: D102
        self.bucket.put(self.key, data)

    def put_if_absent(self, data: bytes) -> bool:  # noqa: D102
        return self.bucket.put_if_absent(self.key, data)

    def replace(self, old: bytes, new: bytes) -> bool:  # noqa: D102
        return self.bucket.replace(self.key, old, new)

    def move_in(self, local: Path) -> None:  # noqa: D102
        self.bucket.put(self.key, local)
        expected = local.stat().st_size
        got = self.stat().st_size
        if got != expected:
            raise StorageUnavailable(
                f"{self} has {got} bytes, although {expected} bytes were uploaded. Run the same "
                "command again."
            )

    def remove_files(self, names: Iterable[str]) -> None:  # noqa: D102
        self.bucket.delete((self / name).key for name in names)

    def make_folder(self) -> None:  # noqa: D102
        pass

    def sync_names(self) -> None:  # noqa: D102
        pass

    def local_folder(self) -> Path:  # noqa: D102
        return Path(tempfile.gettempdir())


# The path of a store, or of a file or folder in a store.
StorePath = Path | RemotePath
# Types that functions accept as the path or URL of a store. ``open_path`` converts them.
StoreLike = str | os.PathLike[str] | StorePath


def name_below(folder: StorePath, path: StorePath) -> str:
    """Return the name of a file relative to a folder.

    Raises:
        ValueError: the file is not below the folder.
    """
    return PurePosixPath(str(path)).relative_to(str(folder)).as_posix()
