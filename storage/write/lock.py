"""The lock of a store. It is exclusive, or shared by processes that write different parts.

``store.lock`` is held exclusively while a store is opened or cleaned, and for changes that concern
more than single parts (additions of fields, repairs). It may be shared while parts are written.

Writers that share it publish each part and document, by renames and a commit, under a byte-range
lock in ``publish.lock``. If two processes write the same part, the second one finds the commit of
the first. Another byte, the part's claim, is locked while a part is computed, so that other
processes choose other parts. Only commits determine which parts a store has, not locks.
"""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import StoreLocked
from ...files import LockHeld, lock, no_locks, open_lock, read_only
from ..schema import LOCK_NAME, PUBLISH_NAME

# Bytes of publish.lock. The first ones lock documents that several processes may write. They are
# followed by one byte for publishing each part, and one byte for the claim of each part.
TEXTS_BYTE = 0
CARD_BYTE = 1
BUNDLE_BYTE = 2
FIRST_PART_BYTE = 16
_FIRST_CLAIM_BYTE = 1 << 40
CAN_SHARE = hasattr(fcntl, "F_OFD_SETLKW")
"""Whether the system has byte-range locks that belong to an open file (Linux has them).

Without them a store is always locked exclusively.
"""

_OPENING = "opens or cleans the store"
"""Note that a process writes to store.lock if it will soon share the lock.

Other processes that find this note wait instead of failing.
"""
_GRACE_S = 1.0  # Time in which a process that has taken the lock must write its note.
_RETRY_S = 0.1


class StoreLock:
    """The lock of a store. It is held until :meth:`close`.

    Args:
        store: the store's folder.
        shares: join the processes that already share the lock. If there are none, take the lock
            exclusively; the caller then calls :meth:`share` after it has opened the store.

    Raises:
        StoreLocked: another process holds the lock.
    """

    def __init__(self, store: Path, shares: bool = False) -> None:
        self._store = store
        self._path = store / LOCK_NAME
        self.is_alone = True  # Whether the lock is exclusive, so that no other process can write.
        try:
            self._fd = open_lock(self._path)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            raise read_only(store, error) from error
        try:
            if shares and CAN_SHARE:
                self._wait_for(self._lock_alone_or_beside)
            else:
                self._wait_for(lambda: lock(self._fd, self._path), waits=False)
        except BaseException:
            self.close()
            raise

    def _lock_alone_or_beside(self) -> None:
        try:
            lock(self._fd, self._path, note=_OPENING)
        except LockHeld:
            lock(self._fd, self._path, shared=True)
            self.is_alone = False

    def _wait_for(self, take: Callable[[], None], waits: bool = True) -> None:
        """Take a lock. If another process is opening the store, wait until it has finished.

        Args:
            take: takes the lock, or raises LockHeld.
            waits: if False, raise StoreLocked at once if another process holds the lock.

        Raises:
            StoreLocked: another process holds the lock for another purpose than opening the store.
        """
        began_s = time.monotonic()
        while True:
            try:
                return take()
            except LockHeld as held:
                if not waits or (held.note != _OPENING and time.monotonic() - began_s > _GRACE_S):
                    raise StoreLocked(
                        f"{self._store} is being written by {held.holder}. Wait until it ends, or "
                        "choose another output folder."
                    ) from held
                time.sleep(_RETRY_S)

    def share(self) -> None:
        """Let other processes write to the store too.

        If the system has no byte-range locks for this, the lock stays exclusive.
        """
        if self.is_alone and CAN_SHARE:
            # Changing the kind of a lock is not atomic: the kernel frees the old lock first, so
            # that another process may take it in between.
            self._wait_for(lambda: lock(self._fd, self._path, shared=True))
            self.is_alone = False

    def try_alone(self) -> bool:
        """Try to make a shared lock exclusive.

        If another process also holds the lock, this process loses it and must not write any more.

        Returns:
            Whether the lock is exclusive now.
        """
        if not self.is_alone:
            try:
                lock(self._fd, self._path, note=_OPENING)
                self.is_alone = True
            except LockHeld:
                self.close()
        return self.is_alone

    @contextmanager
    def locked_byte(self, byte: int) -> Iterator[None]:
        """Lock a byte of ``publish.lock``. Wait if another process or thread holds it.

        Under an exclusive store lock this does nothing.
        """
        if self.is_alone:
            yield
            return
        path = self._store / PUBLISH_NAME
        fd = open_lock(path)
        try:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _byte_range(byte))
            except OSError as error:
                raise no_locks(path, error) from error
            yield
        finally:
            os.close(fd)

    def claim(self, part: int) -> int:
        """Mark a part as being computed.

        Returns:
            A file descriptor that holds the claim until it is closed. It is -1 without a claim,
            because no other process can write or another writer has claimed the part.
        """
        if self.is_alone:
            return -1
        fd = open_lock(self._store / PUBLISH_NAME)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte_range(_FIRST_CLAIM_BYTE + part))
        except OSError:
            os.close(fd)
            return -1
        return fd

    def is_claimed(self, part: int) -> bool:
        """Return whether a writer, which may be in this process, has claimed a part.

        A part may also be computed without a claim, because claims are best effort.
        """
        if self.is_alone:
            return False
        with suppress(OSError):
            # F_OFD_GETLK reports locks only for a writable descriptor.
            fd = os.open(self._store / PUBLISH_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                lock_state = fcntl.fcntl(
                    fd, fcntl.F_OFD_GETLK, _byte_range(_FIRST_CLAIM_BYTE + part)
                )
            finally:
                os.close(fd)
            return bool(struct.unpack(_FLOCK, lock_state)[0] != fcntl.F_UNLCK)
        return False

    def close(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_FLOCK = "hhqqi"  # Layout of ``struct flock``: l_type, l_whence, l_start, l_len, l_pid.


def _byte_range(byte: int) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
