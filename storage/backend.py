"""Reads and writes the files of a store wherever it lies: whole files, and byte ranges of shards.

Each function does for a folder what an ``object_store.ObjectStore`` does for a bucket: it raises FileNotFoundError for
a file that is not there; StorageUnavailable, or another OSError, where that cannot be told.
"""

import errno
import os
import re
import secrets
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import google_crc32c
import numpy as np

from .. import files
from ..errors import MoaDataError, StorageUnavailable
from .paths import REQUEST_BYTES, RemotePath, StorePath, requests

MISSING = (FileNotFoundError, NotADirectoryError)
"""What the system raises if a file does not exist. Any other refusal says nothing about the file."""
MAX_OPEN_FILES = 128
"""Files that readers hold open at once; half of the least that a process may open by default (macOS)."""
_BLOCKS_AHEAD = 4
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def open_path(path_or_url: str | os.PathLike[str] | StorePath) -> StorePath:
    """Return the path of a store given as a path, a ``file://`` URL, or an ``s3://``, ``gs://`` or ``az://`` URL."""
    if isinstance(path_or_url, RemotePath):
        return path_or_url
    text = os.fspath(path_or_url)
    if not _URL.match(text):
        return Path(text).expanduser()
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    # Loaded when there is such a store: obstore takes a tenth of a second.
    from .object_store import ObjectStore

    return RemotePath(ObjectStore(text))


# Whole files


def exists(path: StorePath) -> bool:
    """Whether there is such a file or folder; OSError where it cannot be told (``Path.exists`` says no)."""
    if isinstance(path, RemotePath):
        return path.exists()
    try:
        path.stat()
    except MISSING:
        return False
    return True


def read_file(path: StorePath, max_bytes: int = files.MAX_JSON_BYTES) -> bytes:
    """Return a file's content; ValueError, with nothing read, where it is longer or no regular file."""
    if isinstance(path, RemotePath):
        return path.backend.read(path.key, max_bytes)
    return files.read_bounded(path, max_bytes)


def put(path: StorePath, data: bytes) -> None:
    """Replace a file: after a crash at any moment it is either as before or complete."""
    if isinstance(path, RemotePath):
        path.backend.put(path.key, data)
    else:
        files.write_atomic(path, data)


def put_if_absent(path: StorePath, data: bytes) -> bool:
    """Write a file that must not exist; returns whether it holds ``data`` now, also where another writer put it."""
    if isinstance(path, RemotePath):
        return path.backend.put_if_absent(path.key, data)
    own = path.with_name(f"{path.name}.{secrets.token_hex(4)}{files.PARTIAL_SUFFIX}")
    with files.disk_full_guard(path):
        try:
            files.write_file(own, data)
            try:
                os.link(own, path)  # unlike a rename it never replaces a file
            except FileExistsError:
                raise
            # a file system without hard links; the store's lock keeps other writers out
            except OSError:
                if path.exists():
                    raise FileExistsError(path) from None
                os.replace(own, path)
        except FileExistsError:
            return _holds(path, data)
        finally:
            own.unlink(missing_ok=True)
        files.fsync_directory(path.parent)
    return True


def replace_file(path: StorePath, old: bytes, new: bytes) -> bool:
    """Replace a file that must hold ``old``; returns whether it holds ``new`` now."""
    if isinstance(path, RemotePath):
        return path.backend.replace(path.key, old, new)
    # Not atomic against other writers, whom the store's lock keeps out.
    if not _holds(path, old):
        return False
    files.write_atomic(path, new)
    return True


def _holds(path: Path, data: bytes) -> bool:
    return path.stat().st_size == len(data) and files.read_bounded(path, len(data)) == data


def remove_files(*paths: StorePath) -> None:
    """Delete files of one store; those that are not there are passed over."""
    remote = [path for path in paths if isinstance(path, RemotePath)]
    if remote:
        remote[0].backend.delete(path.key for path in remote)
    for path in paths:
        if isinstance(path, Path):
            path.unlink(missing_ok=True)


def make_folder(path: StorePath) -> None:
    """Make a folder and those around it, where they are missing; an object store needs none."""
    if isinstance(path, Path):
        path.mkdir(parents=True, exist_ok=True)


def sync_names(folder: StorePath) -> None:
    """Make new and deleted names inside a folder durable; in an object store they are."""
    if isinstance(folder, Path):
        files.fsync_directory(folder)


def names_in(folder: StorePath) -> list[str]:
    """Return the names of the files and folders in a folder, sorted; none if the folder does not exist."""
    if isinstance(folder, RemotePath):
        return sorted({name.partition("/")[0] for name in folder.names()})
    try:
        return sorted(os.listdir(folder))
    except MISSING:
        return []


def names_below(folder: StorePath) -> list[str]:
    """Return the names of all files below a folder, relative to it; a bucket's list may be older than its files."""
    if isinstance(folder, RemotePath):
        return folder.names()
    found = (
        (root / name for root, _, names in files.walk(folder) for name in names)
        if folder.is_dir()
        else ()
    )
    return sorted(path.relative_to(folder).as_posix() for path in found)


def reads_of(paths: Iterable[StorePath]) -> Iterator[tuple[StorePath, Callable[[], bytes]]]:
    """Yield documents with what reads each; remote ones are read ahead, all at once."""
    paths = list(paths)
    ahead = [
        requests().submit(read_file, path) if isinstance(path, RemotePath) else None
        for path in paths
    ]
    for path, future in zip(paths, ahead, strict=True):
        yield path, partial(read_file, path) if future is None else future.result


def listed_sizes(folder: StorePath) -> dict[str, int]:
    """Return the files below a folder of a bucket -> bytes, by one request; none of a local one, to be asked for."""
    return folder.sizes() if isinstance(folder, RemotePath) else {}


def blocks_of(path: StorePath, block_bytes: int = REQUEST_BYTES) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a whole file in order; of a remote one several blocks are on their way at a time."""
    if not isinstance(path, RemotePath):
        with open(files.open_regular(path), "rb", buffering=0) as file:
            while block := file.read(block_bytes):
                yield block
        return
    n_bytes = path.stat().st_size
    key = path.key
    blocks = [(key, at, min(at + block_bytes, n_bytes)) for at in range(0, n_bytes, block_bytes)]
    for first in range(0, len(blocks), _BLOCKS_AHEAD):
        yield from path.backend.read_ranges(blocks[first : first + _BLOCKS_AHEAD])


def download(folder: StorePath, target: Path, names: Iterable[str]) -> None:
    """Copy files below a folder into a local one; a name that leads out of it raises ValueError."""
    for name in names:
        local = target / files.relative_name(name)
        local.parent.mkdir(parents=True, exist_ok=True)
        with open(local, "wb") as file:
            for block in blocks_of(folder / name):
                file.write(block)


def crc32c(data: bytes | bytearray | memoryview | np.ndarray, crc: int = 0) -> int:
    """Extend a CRC-32C (Castagnoli) checksum by contiguous bytes; an array is taken as its bytes."""
    # The C extension takes bytes and arrays but neither memoryview nor bytearray.
    plain = data if isinstance(data, bytes | np.ndarray) else np.frombuffer(data, np.uint8)
    return int(google_crc32c.extend(crc, plain))


def file_crc32(path: StorePath) -> int:
    """Return the CRC-32 of a whole file, as ``zlib.crc32`` computes it."""
    # Not CRC-32C: the chunks of a shard end with their own CRC-32C, and a CRC of such chunks
    # depends on their lengths
    # alone. It would not notice a shard in the place of another.
    crc = 0
    for block in blocks_of(path):
        crc = zlib.crc32(block, crc)
    return crc


# Errors of the machine are not damage: nothing may be deleted because of them.


def reason(error: OSError | MemoryError) -> str:
    """Return in words why something could not be checked."""
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return os.strerror(error.errno) if error.errno else str(error)


def check_incomplete(
    store: StorePath, path: str, error: OSError | MemoryError, n_files: int = 1
) -> StorageUnavailable:
    """Return the error for what could not be checked; ``path``, the first file, is absolute or in the store."""
    what = path if n_files == 1 else f"{n_files} files, the first of them {path},"
    return StorageUnavailable(
        f"{store}: {what} could not be checked ({reason(error)}), which says nothing about damage, so nothing was "
        "deleted. Check the rights to read, the disk or mount, and `ulimit -n`, then run the same command again."
    )


@contextmanager
def check_guard(store: StorePath) -> Iterator[None]:
    """Turn an I/O error while a store is looked at into :class:`StorageUnavailable`."""
    try:
        yield
    except MoaDataError:  # each says what to do
        raise
    except (OSError, MemoryError) as error:
        named = None if isinstance(error, MemoryError) else error.filename
        raise check_incomplete(store, str(named or "a file"), error) from error


# Byte ranges of shards


class _Descriptor:
    """A descriptor that is closed when nobody uses it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


_opened: "deque[weakref.ref[LocalFile]]" = deque()
"""Files in the order in which they were opened: beyond MAX_OPEN_FILES the first one closes. A deque needs no lock."""


class LocalFile:
    """A file of which byte ranges are read; safe in threads and after a fork, for ``pread`` shares no position.

    It is opened when bytes are wanted, and closed while there are too many, or when this object is garbage.
    """

    max_read_bytes = 512 << 10
    """Longest useful read: what is read should still be in the core's cache when it is decoded."""
    # The kernel cuts one request for read-ahead at the device's largest transfer, and drops the
    # rest.
    _prefetch_bytes = 512 << 10

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: _Descriptor | None = None

    def _open(self) -> _Descriptor:
        """Return the descriptor, which stays open as long as the caller holds it."""
        found = self._descriptor
        if found is None:
            found = self._descriptor = _Descriptor(files.open_regular(self._path))
            _opened.append(weakref.ref(self))
            if len(_opened) > MAX_OPEN_FILES and (oldest := _opened.popleft()()) is not None:
                oldest._descriptor = None
        return found

    def read_into(self, offset: int, buffer: np.ndarray) -> int:
        """Fill ``buffer`` (uint8) with the bytes from ``offset`` on; return how many there were."""
        n_read = 0
        file = self._open()
        while n_read < len(buffer) and (
            got := os.preadv(file.fd, [buffer[n_read:].data], offset + n_read)
        ):
            n_read += got
        return n_read

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the kernel to read bytes [start, stop) ahead; returns at once."""
        if hasattr(os, "posix_fadvise"):
            file = self._open()
            for at in range(start, stop, self._prefetch_bytes):
                os.posix_fadvise(
                    file.fd, at, min(self._prefetch_bytes, stop - at), os.POSIX_FADV_WILLNEED
                )


_scratch = threading.local()


def scratch_bytes(name: str, n_bytes: int) -> np.ndarray:
    """Return this thread's reusable uint8 buffer of that name, cut to ``n_bytes``."""
    buffer: np.ndarray | None = getattr(_scratch, name, None)
    if buffer is None or len(buffer) < n_bytes:
        buffer = np.empty(n_bytes, np.uint8)
        setattr(_scratch, name, buffer)
    return buffer[:n_bytes]
