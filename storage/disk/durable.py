"""Writes that survive a crash: whole, synced, renamed into place; and checksums of what was written."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import google_crc32c
import numpy as np

from ...errors import StorageUnavailable
from ...text import format_bytes
from ..paths import RemotePath, StorePath
from .files import blocks_of

PARTIAL_SUFFIX = ".partial"
"""Suffix of files and folders that are being written; whatever carries it after a crash is rubbish."""

_TAKEN_AS_THEY_ARE = (bytes, np.ndarray)
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GO_ON = (
    "Parts committed so far are safe. Free some space and run the same command again: it goes on with the first part "
    "that is missing."
)


def crc32c(data: bytes | bytearray | memoryview | np.ndarray, crc: int = 0) -> int:
    """Extend a CRC-32C (Castagnoli) checksum.

    Args:
        data: contiguous bytes; an array is taken as its bytes.
        crc: checksum of what came before.
    """
    # The C extension takes bytes and arrays but neither memoryview nor bytearray.
    plain = data if isinstance(data, _TAKEN_AS_THEY_ARE) else np.frombuffer(data, np.uint8)
    return int(google_crc32c.extend(crc, plain))


def file_crc32(path: StorePath, block_bytes: int = 8 << 20) -> int:
    """Return the CRC-32 of a whole file, as ``zlib.crc32`` computes it.

    Not CRC-32C: a shard is made of pieces that end with their own CRC-32C, and a CRC of such pieces depends on their
    lengths alone. It would not notice a shard in the place of another.

    Raises:
        StoreDamaged: it is no regular file.
        OSError: the file cannot be read.
    """
    crc = 0
    for block in blocks_of(path, block_bytes):
        crc = zlib.crc32(block, crc)
    return crc


def write_all(fd: int, data: bytes | memoryview) -> int:
    """Write every byte of ``data`` to a file descriptor and return their number."""
    view = memoryview(data).cast("B")
    n_bytes = len(view)
    while view:
        view = view[os.write(fd, view) :]
    return n_bytes


def fsync_directory(path: StorePath) -> None:
    """Make renames and new names inside a folder durable; in a bucket they are."""
    if isinstance(path, RemotePath):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield (folder, names of folders, names of files) of a tree from the top; ``os.walk`` skips what it can't list."""

    def refuse(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=refuse):
        yield Path(root), folders, names


def write_file(path: Path, data: bytes) -> None:
    """Create and sync a file (not atomic: for folders renamed as a whole); a link in its place is not followed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: StorePath, data: bytes) -> None:
    """Replace a file: after a crash at any moment it is either as before or complete."""
    if isinstance(path, RemotePath):
        path.bucket.put(path.key, data)
        return
    with replacing(path) as partial:
        write_file(partial, data)


def write_new(path: StorePath, data: bytes) -> bool:
    """Write a file that is not there yet; returns False where a bucket holds another one, which then stays.

    On a disk nobody else may write it at this moment; in a bucket others may.
    """
    if isinstance(path, RemotePath):
        return path.bucket.create(path.key, data)
    write_atomic(path, data)
    return True


def replace_file(path: StorePath, old: bytes, new: bytes) -> bool:
    """Replace a file that holds ``old``; returns False where one in a bucket does not, which then stays."""
    if isinstance(path, RemotePath):
        return path.bucket.replace(path.key, old, new)
    write_atomic(path, new)
    return True


def remove_file(path: StorePath) -> None:
    """Delete a file if it is there."""
    if isinstance(path, RemotePath):
        path.bucket.delete([path.key])
    else:
        path.unlink(missing_ok=True)


def make_folder(path: StorePath) -> None:
    """Make a folder and those around it, where they are missing; a bucket needs none."""
    if isinstance(path, Path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def replacing(path: Path, advice: str = _GO_ON) -> Iterator[Path]:
    """Yield where to write a file, which must be synced when the block ends, and then replaces ``path`` in one step.

    Args:
        path: after a crash at any moment it is either as before or complete.
        advice: what to do when the disk is full.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with disk_full_guard(path, advice):
        try:
            yield partial
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        fsync_directory(path.parent)


@contextmanager
def disk_full_guard(path: StorePath, advice: str = _GO_ON) -> Iterator[None]:
    """Turn "no space left" (or an exhausted quota) into :class:`StorageUnavailable` with advice.

    A file system that is read-only becomes :class:`StorageUnavailable`.
    """
    try:
        yield
    except StorageUnavailable:
        raise
    except OSError as error:
        if error.errno == errno.EROFS:
            raise read_only(error.filename or path, error) from error
        if error.errno not in _FULL_ERRNOS:
            raise
        raise StorageUnavailable(
            f"No space left while writing {path} ({os.strerror(error.errno)}). {advice}"
        ) from error


def read_only(path: StorePath | str, error: OSError) -> StorageUnavailable:
    """Return the error for a folder that cannot be written."""
    return StorageUnavailable(
        f"{path} cannot be written ({os.strerror(error.errno or errno.EROFS)}). Give yourself the right to write "
        "there, or choose another output folder."
    )


def check_room(folder: StorePath, n_bytes: int = 0, advice: str = _GO_ON) -> None:
    """Refuse a folder, which may be missing, that cannot be written or whose disk has less room; no bucket is asked.

    Raises:
        StorageUnavailable: it cannot be written.
        StorageUnavailable: no room.
    """
    if isinstance(folder, RemotePath):
        return
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):  # also for root, where the file system is read-only
        status = os.statvfs(there)
        raise read_only(folder, OSError(errno.EROFS if status.f_flag & os.ST_RDONLY else errno.EACCES, ""))
    if (n_free := shutil.disk_usage(there).free) < n_bytes:
        raise StorageUnavailable(
            f"{folder} needs about {format_bytes(n_bytes)}, its disk has {format_bytes(n_free)} free. {advice}"
        )
