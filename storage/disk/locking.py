"""Locks that die with their holder: ``flock`` on a file, which names the process that holds it, and slots of a file."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import StorageUnavailable, StoreDamaged
from .durable import disk_full_guard

_HELD_ERRNOS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What ``flock`` says where another process holds the lock; EACCES does on some network file systems."""


class LockHeld(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def lock_file(path: Path, note: str = "") -> int:
    """Lock a file, made if missing, for this process alone.

    Args:
        note: what the process does with it, for those who find it locked.

    Returns:
        The file descriptor that holds the lock until it is closed; the kernel closes it when the process ends, however
        it ends. The file stays.

    Raises:
        LockHeld: by another process, or by this one through another descriptor.
        StorageUnavailable: the file system refuses to lock.
        StoreDamaged: the file is a symbolic link.
        OSError: the file cannot be opened for writing.
        StorageUnavailable: no room for the process's name.
    """
    fd = _open(path)
    try:
        _flock(fd, path, fcntl.LOCK_EX)
        _write_name(fd, path, note)
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_beside_others(path: Path) -> int:
    """Lock a file against those who want it alone, beside others who do the same; returns as :func:`lock_file`.

    Raises:
        LockHeld: another process has it alone.
        StorageUnavailable, StoreDamaged, OSError: as for :func:`lock_file`.
    """
    fd = _open(path)
    try:
        _flock(fd, path, fcntl.LOCK_SH)
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_again_beside_others(fd: int, path: Path) -> None:
    """Turn a lock that was taken alone into one that is held beside others.

    Raises:
        LockHeld: another process holds it. The kernel lets go of a lock before it takes the other one, so that this
            process then holds none.
    """
    _flock(fd, path, fcntl.LOCK_SH)


def lock_again_alone(fd: int, path: Path, note: str = "") -> None:
    """Turn a lock that is held beside others into one that is held alone; raises as the opposite does."""
    _flock(fd, path, fcntl.LOCK_EX)
    _write_name(fd, path, note)


CAN_LOCK_SLOTS = hasattr(fcntl, "F_OFD_SETLKW")
"""Whether the system has the locks that :func:`lock_slot` takes; Linux has."""


@contextmanager
def lock_slot(path: Path, slot: int) -> Iterator[None]:
    """Hold one slot of a file, made if missing, waiting for whoever holds it; other slots are others' business.

    A slot is a byte that need not exist. These locks belong to the open file, not to the process, so that threads keep
    each other out too.

    Raises:
        StorageUnavailable: the file system refuses to lock.
        StoreDamaged: the file is a symbolic link.
        OSError: the file cannot be opened for writing.
    """
    fd = _open(path)
    try:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _slot_request(slot))
        except OSError as error:
            raise _unsupported(path, error) from error
        yield
    finally:
        os.close(fd)


def try_slot(path: Path, slot: int) -> int | None:
    """Take a slot of a file if it is free; returns the descriptor that holds it until it is closed, else None."""
    fd = _open(path)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _slot_request(slot))
    except OSError:
        os.close(fd)
        return None
    return fd


def slot_is_held(path: Path, slot: int) -> bool:
    """Whether somebody holds a slot of a file at this moment."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)  # to be told of locks the file must be writable
    except OSError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _slot_request(slot))
    except OSError:
        return False
    finally:
        os.close(fd)
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


_FLOCK = "hhqqi"
"""``struct flock``: kind, what the start counts from, start, length, process."""


def _slot_request(slot: int) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)


@contextmanager
def lock_waiting(path: Path) -> Iterator[int]:
    """Hold a file, made if missing, waiting for whoever holds it; yields its descriptor.

    Raises:
        StorageUnavailable: the file system refuses to lock.
        StoreDamaged: the file is a symbolic link.
        OSError: the file cannot be opened for writing.
    """
    fd = _open(path)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            raise _unsupported(path, error) from error
        yield fd
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    try:
        # Read and write access: flock on NFS is a byte-range lock, which needs a writable descriptor. No link: the file
        # is written to, and the one behind a link is somebody else's.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
        raise StoreDamaged(f"{path} is a symbolic link, expected a file. Delete the link and try again.") from error


def _write_name(fd: int, path: Path, note: str) -> None:
    with disk_full_guard(path):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}{note}\n".encode(), 0)


def _flock(fd: int, path: Path, operation: int) -> None:
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno in _HELD_ERRNOS:
                raise LockHeld(os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process") from error
            raise _unsupported(path, error) from error
        return


def _unsupported(path: Path, error: OSError) -> StorageUnavailable:
    return StorageUnavailable(
        f"{path} cannot be locked ({os.strerror(error.errno or 0)}), and without a lock two processes could write to "
        f"{path.parent} at the same time. Put that folder on a file system with locks, or mount this one with them "
        "(NFS: without nolock, with its lock service running)."
    )
