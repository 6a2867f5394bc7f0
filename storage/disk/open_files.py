"""The files that are being read: few of them are open at a time, however many there are.

A reader that kept every file open would take what others in the process need, and fail where the limit (``ulimit -n``)
is low. So a file is opened when bytes of it are wanted and stays open as long as there is room; then the one that was
opened first is closed.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path

from ..documents import open_regular

MAX_OPEN_FILES = 256
"""Files held open at once where the process may open enough of them."""

_SHARE = 4
"""Readers take one part in so many of what the process may open; libraries, loaders and writers need the rest."""


def max_open_files() -> int:
    """Return how many files are held open at most; the process may change its limit at any time."""
    n_allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if n_allowed == resource.RLIM_INFINITY else max(1, min(MAX_OPEN_FILES, n_allowed // _SHARE))


class ReadHandle:
    """A file that is open only while there is room for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_users = 0

    def take(self) -> int:
        """Return the file's descriptor, which stays open until :meth:`give_back`; safe in threads and after a fork.

        Raises:
            FileNotFoundError: no such file.
            StoreDamaged: it is no regular file.
            OSError: it cannot be opened.
        """
        with _lock:
            fd = _fds.get(self)
            if fd is not None:
                self.n_users += 1
                return fd
        opened = _open(self.path)
        with _lock:
            fd = _fds.setdefault(self, opened)  # another thread may have been faster
            self.n_users += 1
            _close_idle(max_open_files())
        if fd != opened:
            os.close(opened)
        return fd

    def give_back(self) -> None:
        """Say that the descriptor is not used any more."""
        with _lock:
            self.n_users -= 1

    def close(self) -> None:
        """Close the file if it is open. Nobody may be using it."""
        # Without the lock: this runs in finalizers, at any moment. Whoever takes an entry out closes its descriptor.
        fd = _fds.pop(self, -1)
        if fd >= 0:
            os.close(fd)


_fds: dict[ReadHandle, int] = {}
"""Descriptors of the files that are open, in the order in which they were opened."""
_lock = threading.Lock()


def _open(path: Path) -> int:
    try:
        return open_regular(path)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    with _lock:
        _close_idle(0)
    return open_regular(path)


def _close_idle(n_kept: int) -> None:
    """Close files that nobody uses, the first opened first, until so many are open."""
    n_surplus = len(_fds) - n_kept
    for handle in list(_fds) if n_surplus > 0 else ():
        if n_surplus <= 0:
            return
        if not handle.n_users:
            handle.close()
            n_surplus -= 1


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
