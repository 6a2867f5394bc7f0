"""A lock that dies with its holder: ``flock`` on a file, which names the process that holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from ..errors import LinkRefused, LocksUnsupported
from .durable import disk_full_guard

_HELD_ERRNOS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What ``flock`` says where another process holds the lock; EACCES does on some network file systems."""


class LockHeld(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def lock_file(path: Path) -> int:
    """Lock a file, made if missing, for this process.

    Returns:
        The file descriptor that holds the lock until it is closed; the kernel closes it when the process ends, however
        it ends. The file stays.

    Raises:
        LockHeld: by another process, or by this one through another descriptor.
        LocksUnsupported: the file system refuses to lock.
        LinkRefused: the file is a symbolic link.
        OSError: the file cannot be opened for writing.
        DiskFull: no room for the process's name.
    """
    try:
        # Read and write access: flock on NFS is a byte-range lock, which needs a writable descriptor. No link: the file
        # is written to, and the one behind a link is somebody else's.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
        raise LinkRefused(f"{path} is a symbolic link, expected a file. Delete the link and try again.") from error
    try:
        _flock(fd, path)
        with disk_full_guard(path):
            os.ftruncate(fd, 0)
            os.write(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except BaseException:
        os.close(fd)
        raise
    return fd


def _flock(fd: int, path: Path) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno in _HELD_ERRNOS:
                raise LockHeld(os.read(fd, 200).decode(errors="replace").strip() or "another process") from error
            raise LocksUnsupported(
                f"{path} cannot be locked ({os.strerror(error.errno or 0)}), and without a lock two processes could "
                f"write to {path.parent} at the same time. Put that folder on a file system with locks, or mount this "
                "one with them (NFS: without nolock, with its lock service running)."
            ) from error
        return
