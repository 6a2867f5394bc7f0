"""A lock that dies with its holder: ``flock`` on a file, which names the process that holds it."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from .durable import disk_full_guard


class LockHeld(Exception):
    """Another process holds the lock.

    Attributes:
        holder: that process, for messages.
    """

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
        OSError: the file cannot be opened for writing.
        DiskFull: no room for the process's name.
    """
    # Read and write access: flock on NFS is a byte-range lock, which needs a writable descriptor.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(fd, 200).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise LockHeld(holder) from error
    try:
        with disk_full_guard(path):
            os.ftruncate(fd, 0)
            os.write(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except BaseException:
        os.close(fd)
        raise
    return fd
