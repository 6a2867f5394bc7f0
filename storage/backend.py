"""Reads and writes the files of a store: whole files, and byte ranges of shards.

A store is in a local folder, or below a prefix of a bucket (``object_store.ObjectStore``).
:func:`open_path` converts a path or URL to a path object. :func:`backend_of` returns an object
that reads and writes the file or folder at a path. The object is a :class:`LocalBackend` or a
``RemotePath``. Both have the same methods.
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
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import google_crc32c
import numpy as np

from .. import files
from ..errors import MoaDataError, StorageUnavailable
from .paths import RemotePath, StoreLike, StorePath
from .requests import REQUEST_BYTES

MISSING = (FileNotFoundError, NotADirectoryError)
"""Errors that mean 'no such file'. Any other OSError means that the file could not be checked."""
MAX_OPEN_FILES = 128
"""Upper bound on the number of files that readers hold open at once.

By default, macOS allows a process to open twice this number of files. Other systems allow more.
"""
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def open_path(path_or_url: StoreLike) -> StorePath:
    """Convert a path or URL of a store to a path object.

    Args:
        path_or_url: a path, a ``file://`` URL, or an ``s3://``, ``gs://`` or ``az://`` URL.
    """
    if isinstance(path_or_url, RemotePath):
        return path_or_url
    text = os.fspath(path_or_url)
    if not _URL.match(text):
        return Path(text).expanduser()
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    # Import ``object_store`` only for remote stores, because importing obstore takes 0.1 s.
    from .object_store import ObjectStore

    return RemotePath(ObjectStore(text))


@dataclass(frozen=True)
class LocalBackend:
    """Reads and writes one file or folder of a local store.

    ``RemotePath`` has the same methods for object stores. A method raises one of the errors in
    ``MISSING`` if the file does not exist. It raises StorageUnavailable or another OSError if it
    cannot determine whether the file exists.
    """

    path: Path
    uploads = False
    """Whether the store is in a bucket.

    In a bucket, a new file is uploaded under a temporary name, and the server copies the upload to
    the final name.

    In a local folder, a new file is written under a temporary name, and renamed while the store is
    locked.
    """

    def exists(self) -> bool:
        """Whether a file or folder exists at this path.

        Raises:
            OSError: the file system cannot tell whether the path exists. In this case,
                ``Path.exists`` would return False.
        """
        try:
            self.path.stat()
        except MISSING:
            return False
        return True

    def read(self, max_bytes: int = files.MAX_JSON_BYTES) -> bytes:
        """Return the content of the file at this path.

        Raises:
            ValueError: the file is longer than ``max_bytes`` or not a regular file. Nothing was
                read.
        """
        return files.read_bounded(self.path, max_bytes)

    def start_read(self) -> Callable[[], bytes]:
        """Return a function that returns the content of the file at this path.

        If the file is in a bucket, the download starts now in the background. The function waits
        until the download is complete.
        """
        return self.read

    def blocks(self, block_bytes: int = REQUEST_BYTES) -> Iterator[bytes]:
        """Yield the bytes of the file at this path in order, in blocks of at most ``block_bytes``.

        Blocks of a remote file are fetched in parallel.
        """
        with open(files.open_regular(self.path), "rb", buffering=0) as file:
            while block := file.read(block_bytes):
                yield block

    def put(self, data: bytes) -> None:
        """Replace the file at this path.

        After a crash, the file has either the old or the new content.
        """
        files.write_atomic(self.path, data)

    def put_if_absent(self, data: bytes) -> bool:
        """Write a file to this path only if the path does not exist yet.

        Returns:
            Whether the content of the file is now ``data``. This is also true if another writer has
            written the same content.
        """
        path = self.path
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{files.PARTIAL_SUFFIX}")
        with files.disk_full_guard(path):
            try:
                files.write_file(temporary, data)
                try:
                    # Create the new file as a hard link to the temporary file. Unlike a rename,
                    # creating a link never replaces an existing file.
                    os.link(temporary, path)
                except FileExistsError:
                    raise
                # Any other OSError means that the file system has no hard links. In that case,
                # check whether the file exists, and then rename. No other writer can create the
                # file in between, because this process holds the store's lock.
                except OSError:
                    if path.exists():
                        raise FileExistsError(path) from None
                    os.replace(temporary, path)
            except FileExistsError:
                return self._holds(data)
            finally:
                temporary.unlink(missing_ok=True)
            files.fsync_directory(path.parent)
        return True

    def replace(self, old: bytes, new: bytes) -> bool:
        """Replace the file at this path if its content is ``old``.

        Returns:
            Whether the content of the file is now ``new``.
        """
        # The comparison and the replacement together are not atomic. No other writer can change the
        # file in between, because this process holds the store's lock.
        if not self._holds(old):
            return False
        files.write_atomic(self.path, new)
        return True

    def _holds(self, data: bytes) -> bool:
        n_bytes = len(data)
        return self.path.stat().st_size == n_bytes and self.read(n_bytes) == data

    def move_in(self, local: Path) -> None:
        """Move a local file to this path durably.

        For an object store, the file is uploaded, and the local file stays.

        Raises:
            StorageUnavailable: the uploaded file does not have the size of the local file.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.fsync_directory(self.path.parent.parent)
        with open(local, "rb") as file:
            os.fsync(file.fileno())
        os.rename(local, self.path)

    def remove_files(self, names: Iterable[str]) -> None:
        """Delete files below this folder. Files that do not exist are skipped.

        Args:
            names: names of the files, relative to this folder.
        """
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def make_folder(self) -> None:
        """Create this folder and its missing parents. For an object store, nothing is done."""
        self.path.mkdir(parents=True, exist_ok=True)

    def sync_names(self) -> None:
        """Sync this folder, so that a crash does not undo the creation or deletion of its files.

        In an object store, every change is durable at once, so nothing is done.
        """
        files.fsync_directory(self.path)

    def names_in(self) -> list[str]:
        """Return the sorted names of the files and folders in this folder.

        The list is empty if this folder does not exist.
        """
        try:
            return sorted(os.listdir(self.path))
        except MISSING:
            return []

    def names_below(self) -> list[str]:
        """Return the sorted names of all files below this folder, relative to this folder.

        In a bucket, the list may be out of date.
        """
        names_in_tree: list[str] = []
        if self.path.is_dir():
            for root, _, names in files.walk(self.path):
                for name in names:
                    names_in_tree.append((root / name).relative_to(self.path).as_posix())
        return sorted(names_in_tree)

    def listed_sizes(self) -> dict[str, int]:
        """Return name -> size in bytes for all files below this folder, with one request.

        Only a remote folder can be listed in this way. For a local folder, the result is empty, and
        the caller has to call ``stat`` for each file.
        """
        return {}

    def local_folder(self) -> Path:
        """Return an existing local folder. New files are first written to the disk of this folder.

        For a local path, the result is the path itself or its nearest parent that exists. For a
        path in a bucket, the result is the system's folder for temporary files, because new files
        are written there before they are uploaded.
        """
        return files.nearest_folder(self.path.expanduser())


def backend_of(path: StorePath) -> LocalBackend | RemotePath:
    """Return the object that reads and writes a file or folder.

    For a local path, the result is a new ``LocalBackend``. A ``RemotePath`` is returned unchanged,
    because it has the methods of a backend itself.
    """
    return path if isinstance(path, RemotePath) else LocalBackend(path)


# Functions for local and remote files


def reads_of(paths: Iterable[StorePath]) -> list[tuple[StorePath, Callable[[], bytes]]]:
    """Return a list with a pair for each path: the path, and a function that reads its file.

    The function returns the content of the file. Remote files are already being fetched in parallel
    in the background.
    """
    return [(path, backend_of(path).start_read()) for path in paths]


def download(folder: StorePath, target: Path, names: Iterable[str]) -> None:
    """Copy files below a folder into a local folder.

    Raises:
        ValueError: a name leads out of the folder.
    """
    for name in names:
        local = target / files.relative_name(name)
        local.parent.mkdir(parents=True, exist_ok=True)
        with open(local, "wb") as file:
            for block in backend_of(folder / name).blocks():
                file.write(block)


def crc32c(data: bytes | bytearray | memoryview | np.ndarray, crc: int = 0) -> int:
    """Return the CRC-32C (Castagnoli) checksum of contiguous bytes or a NumPy array.

    If the data continues earlier data, ``crc`` is the checksum of the earlier data. The result is
    then the checksum of both together.
    """
    # The C extension accepts only bytes and NumPy arrays. So make a NumPy array of any other data.
    plain = data if isinstance(data, bytes | np.ndarray) else np.frombuffer(data, np.uint8)
    return int(google_crc32c.extend(crc, plain))


def file_crc32(path: StorePath) -> int:
    """Return the CRC-32 of a whole file, as ``zlib.crc32`` computes it."""
    # CRC-32C would not detect that two shards were swapped. Each chunk of a shard ends with its own
    # CRC-32C, and the CRC-32C of any data that ends in this way is the same constant. So the
    # CRC-32C of a whole shard would depend only on the lengths of its chunks. CRC-32 does not have
    # this problem.
    crc = 0
    for block in backend_of(path).blocks():
        crc = zlib.crc32(block, crc)
    return crc


# If a file cannot be checked because of an I/O error or a lack of memory, the file may be
# undamaged. So no file may be deleted after such an error.


def reason(error: OSError | MemoryError) -> str:
    """Describe an I/O error or a MemoryError in the words of the operating system."""
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return os.strerror(error.errno) if error.errno else str(error)


def check_incomplete(
    store: StoreLike, path: str, error: OSError | MemoryError
) -> StorageUnavailable:
    """Return the StorageUnavailable error to raise if a file could not be checked.

    Args:
        store: the store that contains the file.
        path: the file, as an absolute path or a name inside the store.
        error: the error that prevented the check.
    """
    return StorageUnavailable(
        f"{path} could not be checked ({reason(error)}), so it is unknown whether {store} is "
        "damaged. Nothing was deleted. Check the read permissions, the disk or mount, "
        "and the limit of open files (`ulimit -n`), then run the same command again."
    )


@contextmanager
def check_guard(store: StorePath) -> Iterator[None]:
    """In a ``with`` block that checks a store, replace I/O errors by StorageUnavailable."""
    try:
        yield
    # Do not convert errors of moa_data, because they already say what the user can do.
    except MoaDataError:
        raise
    except (OSError, MemoryError) as error:
        file_name = None if isinstance(error, MemoryError) else error.filename
        raise check_incomplete(store, str(file_name or "A file"), error) from error


# Byte ranges of shards


class _Descriptor:
    """A file descriptor. It is closed when this object is garbage collected."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


_opened: "deque[weakref.ref[LocalFile]]" = deque()
"""The open files of this process. The file that was opened first comes first.

If more than MAX_OPEN_FILES files are open, the first file is closed. The operations of a deque are
atomic, so no lock is needed.
"""


class LocalFile:
    """Reads byte ranges of a local file.

    Threads and forked processes may share a LocalFile, because ``pread`` does not use the file
    position. The file is opened on first use. It is closed when too many files are open, or when
    this object is garbage collected. If a closed file is used again, it is opened again.
    """

    max_read_bytes = 512 << 10
    """Largest number of bytes that one read should return.

    The data of a longer read would not fit into the CPU cache, and decoding data from memory takes
    longer.
    """
    # Largest number of bytes of one read-ahead request. The kernel truncates a request that exceeds
    # the largest transfer of the disk. So a longer range is split into several requests.
    _prefetch_bytes = 512 << 10

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: _Descriptor | None = None

    def _open(self) -> _Descriptor:
        """Return an open descriptor of this file. It stays open while the caller refers to it."""
        descriptor = self._descriptor
        if descriptor is None:
            descriptor = self._descriptor = _Descriptor(files.open_regular(self._path))
            _opened.append(weakref.ref(self))
            if len(_opened) > MAX_OPEN_FILES and (oldest := _opened.popleft()()) is not None:
                oldest._descriptor = None
        return descriptor

    def read_into(self, offset: int, buffer: np.ndarray) -> int:
        """Fill ``buffer`` (uint8) with the bytes of this file from ``offset`` on.

        Returns:
            The number of bytes read. It is less than ``len(buffer)`` at the end of the file.
        """
        n_read = 0
        file = self._open()
        while n_read < len(buffer) and (
            got := os.preadv(file.fd, [buffer[n_read:].data], offset + n_read)
        ):
            n_read += got
        return n_read

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the kernel to load bytes [start, stop) into the page cache. Return immediately."""
        if hasattr(os, "posix_fadvise"):
            file = self._open()
            for first in range(start, stop, self._prefetch_bytes):
                os.posix_fadvise(
                    file.fd, first, min(self._prefetch_bytes, stop - first), os.POSIX_FADV_WILLNEED
                )


_scratch = threading.local()


def scratch_bytes(name: str, n_bytes: int) -> np.ndarray:
    """Return a scratch buffer, uint8 [n_bytes], whose content is arbitrary.

    Each thread has one buffer per ``name``. All calls of a thread with the same name return the
    same memory.
    """
    buffer: np.ndarray | None = getattr(_scratch, name, None)
    if buffer is None or len(buffer) < n_bytes:
        buffer = np.empty(n_bytes, np.uint8)
        setattr(_scratch, name, buffer)
    return buffer[:n_bytes]
