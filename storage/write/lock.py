"""The locks of a store in a folder. Several processes may write different parts of one store.

Every lock is an empty file that is locked as a whole (``flock``). The system releases a lock when
the process that holds it ends in any way::

    store.lock                held while a process writes to the store. A process that extracts
                              shares it with others. A process that changes more than single parts
                              (adds fields or repairs damage) holds it exclusively.
    opening.lock              held while a process takes ``store.lock``. If no other process writes,
                              a process that extracts keeps it until it has created or cleaned the
                              store, and other processes that extract wait for it.
    locks/part-00007.lock     held while a process computes part 7, so that other processes choose
                              other parts
    locks/publish-00007.lock  held while a process renames the files of part 7 and writes its commit
    locks/card.lock           held while a process writes the dataset card, for example

If two processes compute the same part, the second one finds the commit of the first one and deletes
its own files. Locks do not determine which parts a store has, only commits do.

A lock file that is deleted while a process waits for it no longer keeps processes apart, because
the next process creates and locks another file. So the files in ``locks/`` are only opened while
``store.lock`` is held, and only deleted while ``store.lock`` is held exclusively. ``store.lock`` is
never deleted. ``opening.lock`` is deleted by its holder, and a process that has waited for it
checks that the file still exists (``files.lock_file``).
"""

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from ...errors import StoreLocked
from ...files import LockHeld, lock, lock_file, open_lock, read_only
from ..schema import LOCK_NAME, LOCKS_NAME, OPENING_NAME

# Seconds for which a process that wants to share the lock tries again before it is refused. When a
# process is killed, the kernel may release ``opening.lock`` shortly before ``store.lock``.
_GRACE_S = 1.0
_RETRY_S = 0.05  # Seconds between two attempts to take the lock.


class StoreLock:
    """The lock of a store. It is held until :meth:`close`.

    Args:
        store: the store's folder.
        shares: whether to join processes that already share the lock. If there are none, the lock
            is taken exclusively, and the caller calls :meth:`share` after it has opened the store.

    Raises:
        StoreLocked: another process holds the lock.
    """

    def __init__(self, store: Path, shares: bool = False) -> None:
        self._store = store
        # Whether this process holds the lock exclusively, so that no other process can write.
        self.is_alone = False
        self._fd = -1
        self._opening_fd = -1
        try:
            self._fd = open_lock(store / LOCK_NAME)
            self._begin_opening()
            take = partial(self._lock_alone_or_beside, shares)
            self._retry(take, _GRACE_S if shares else 0.0)
            if not shares or not self.is_alone:
                self._end_opening()
        except BaseException as error:
            self.close()
            number = getattr(error, "errno", None)
            if number in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise read_only(store, number) from error
            raise

    def _lock_alone_or_beside(self, shares: bool) -> None:
        try:
            self._lock(shared=False)
        except StoreLocked:
            if not shares:
                raise
            self._lock(shared=True)

    def _lock(self, shared: bool) -> None:
        try:
            lock(self._fd, self._store / LOCK_NAME, shared=shared)
        except LockHeld as held:
            raise StoreLocked(
                f"{self._store} is being written by {held.holder}. Wait until that process ends, "
                "or choose another output folder."
            ) from held
        self.is_alone = not shared

    def _retry(self, take: Callable[[], None], for_s: float) -> None:
        """Call ``take``, which takes the lock, until it succeeds, at most for ``for_s`` seconds."""
        until_s = time.monotonic() + for_s
        while True:
            try:
                return take()
            except StoreLocked:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(_RETRY_S)

    def _begin_opening(self) -> None:
        self._opening_fd = lock_file(self._store / OPENING_NAME, waits=True)

    def _end_opening(self) -> None:
        if self._opening_fd < 0:
            return
        try:
            # A file that cannot be deleted does no harm.
            with suppress(OSError):
                os.unlink(self._store / OPENING_NAME)
        finally:
            os.close(self._opening_fd)
            self._opening_fd = -1

    def share(self) -> None:
        """Change an exclusive lock to a shared one, so that other processes can write too."""
        if self.is_alone:
            # This change is not atomic: the kernel releases the exclusive lock before it takes the
            # shared one. ``opening.lock`` keeps other processes away in between.
            self._lock(shared=True)
            self._end_opening()

    def try_alone(self, waits_s: float = 0.0) -> bool:
        """Try to make a shared lock exclusive.

        If another process also holds the lock, this process releases it and must not write to the
        store any more.

        Args:
            waits_s: number of seconds to wait for other processes to release the lock.

        Returns:
            Whether this process now holds the lock exclusively.
        """
        if self.is_alone or self._fd < 0:
            return self.is_alone
        self._begin_opening()
        try:
            self._retry(partial(self._lock, shared=False), waits_s)
        except StoreLocked:
            self.close()
        return self.is_alone

    def hold(self, name: str, waits: bool = True) -> IO[Any]:
        """Lock a file in ``locks/``. This process must hold the store's lock.

        Args:
            name: name of the lock.
            waits: whether to wait while another process or thread holds this lock.

        Returns:
            The file of the lock. Closing it releases the lock.

        Raises:
            LockHeld: the lock is held, and ``waits`` is False.
        """
        folder = self._store / LOCKS_NAME
        folder.mkdir(exist_ok=True)
        return open(lock_file(folder / f"{name}.lock", waits))

    def close(self) -> None:
        """Release the lock."""
        # Release ``store.lock`` first: the next holder of ``opening.lock`` must not find it held.
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._end_opening()
