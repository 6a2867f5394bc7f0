"""The locks of a store in a folder. Several processes may write different parts of one store.

Every lock is an empty file that is locked as a whole (``flock``). The system releases a lock when
the process that holds it ends in any way::

    store.lock                held while a process writes to the store. Processes that extract share
                              this lock. A process that changes more than single parts (adds fields
                              or repairs damage) holds it exclusively.
    opening.lock              held while a process takes ``store.lock``. The first process that
                              extracts holds it until it has created the store or deleted
                              uncommitted files. Other processes that extract wait for it.
    locks/part-00007.lock     held while a process computes part 7, so that other processes choose
                              other parts
    locks/publish-00007.lock  held while a process renames the files of part 7 and writes its commit
    locks/card.lock           held while a process writes the dataset card. There are similar locks
                              for ``texts.arrow`` and ``target/``.

Only commits determine which parts a store has. If two processes compute the same part in spite of
the locks, the second process finds the commit of the first one and deletes its own files.

A lock file must not be deleted while a process waits for it. That process would get the lock of the
deleted file, while the next process creates and locks a new file. Both processes would then write
at the same time. Three rules prevent this:

- ``store.lock`` is never deleted.
- Files in ``locks/`` are opened only while ``store.lock`` is held, and deleted only while it is
  held exclusively.
- ``opening.lock`` is deleted by the process that holds it. A process that has waited for
  ``opening.lock`` then checks that the file still exists (``files.lock_file``).
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

# Number of seconds for which a process keeps trying to share ``store.lock``. When a process is
# killed, the kernel may release its ``opening.lock`` shortly before its ``store.lock``. In between,
# the next process finds ``store.lock`` still locked, and must try again.
_GRACE_S = 1.0
_RETRY_S = 0.05  # Seconds between two attempts to take ``store.lock``.


class StoreLock:
    """The lock of a store. A process holds the lock until :meth:`close`.

    Args:
        store: the store's folder.
        shares: whether to share the lock with other processes. If no other process holds the lock,
            this process first takes it exclusively. The caller then opens the store and calls
            :meth:`share`.

    Raises:
        StoreLocked: another process holds the lock.
    """

    def __init__(self, store: Path, shares: bool = False) -> None:
        self._store = store
        # Whether this process holds the lock exclusively. If so, no other process can write.
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
        """Call ``take`` to take the lock. If the lock is held, try again for ``for_s`` seconds."""
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
            # If ``opening.lock`` cannot be deleted, ignore the error. The remaining file does no
            # harm.
            with suppress(OSError):
                os.unlink(self._store / OPENING_NAME)
        finally:
            os.close(self._opening_fd)
            self._opening_fd = -1

    def share(self) -> None:
        """Change an exclusive lock to a shared one, so that other processes can write too."""
        if self.is_alone:
            # The change is not atomic: the kernel releases the exclusive lock before it takes the
            # shared lock. No other process can take the lock in between, because this process holds
            # ``opening.lock``.
            self._lock(shared=True)
            self._end_opening()

    def try_alone(self, waits_s: float = 0.0) -> bool:
        """Try to make a shared lock exclusive.

        If other processes still share the lock after ``waits_s`` seconds, this process releases the
        lock, and must not write to the store any more.

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
        """Release the store's lock."""
        # Release ``store.lock`` first. Otherwise the next process could get ``opening.lock`` and
        # then find ``store.lock`` still held.
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._end_opening()
