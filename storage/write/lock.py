"""The lock of a store: held by one process alone, or by several that write different parts of it.

``store.lock`` is held alone while a store is opened, cleaned or changed in more than its parts (additions, repairs).
While parts are written it may be shared: each part and document is then published (renamed and committed) under a
byte-range lock of its own in ``publish.lock``, so that of two writers of one part the second finds the first one's
commit. Another byte is locked while a part is computed, so that others begin with other parts. Which parts a store has
is told by commits alone.
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

# Bytes of publish.lock: documents that several processes may want to write, then parts, then claims
# of parts.
TEXTS_BYTE = 0
CARD_BYTE = 1
BUNDLE_BYTE = 2
FIRST_PART_BYTE = 16
_FIRST_CLAIM_BYTE = 1 << 40
CAN_SHARE = hasattr(fcntl, "F_OFD_SETLKW")
"""Whether the system has byte-range locks that belong to an open file, as Linux does; others write alone."""

_OPENING = "opens or cleans the store"
"""Note in store.lock of a process that will share the lock soon, so that others wait for it instead of giving up."""
_GRACE_S = 1.0  # time that a holder has to write its note
_RETRY_S = 0.1


class StoreLock:
    """The lock of a store, held until :meth:`close`.

    Args:
        shares: join those that share the lock, or take it alone and :meth:`share` it once the store is open.
    """

    def __init__(self, store: Path, shares: bool = False) -> None:
        self._store = store
        self._path = store / LOCK_NAME
        self.is_alone = True  # whether no other process can write to the store
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
        """Take a lock as soon as no process is opening the store; StoreLocked where one holds it for longer."""
        began_s = time.monotonic()
        while True:
            try:
                return take()
            except LockHeld as held:
                if not waits or (held.note != _OPENING and time.monotonic() - began_s > _GRACE_S):
                    raise StoreLocked(
                        f"{self._store} is being written by {held.holder}. Wait until it ends, or choose another "
                        "output folder."
                    ) from held
                time.sleep(_RETRY_S)

    def share(self) -> None:
        """Let others write beside this process; nothing changes where the system has no locks for that."""
        if self.is_alone and CAN_SHARE:
            # The kernel frees a lock before it takes the other kind, and another process may take
            # it in between.
            self._wait_for(lambda: lock(self._fd, self._path, shared=True))
            self.is_alone = False

    def try_alone(self) -> bool:
        """Stop sharing if nobody else holds the lock; otherwise it is lost, and nothing may be written any more."""
        if not self.is_alone:
            try:
                lock(self._fd, self._path, note=_OPENING)
                self.is_alone = True
            except LockHeld:
                self.close()
        return self.is_alone

    @contextmanager
    def locked_byte(self, byte: int) -> Iterator[None]:
        """Hold a byte of ``publish.lock``, waiting for the process or thread that holds it."""
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
        """Return a descriptor that says, until it is closed, that a part is computed; -1 where no other must know."""
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
        """Whether a part is being computed at this moment, as far as its writer could tell."""
        if self.is_alone:
            return False
        with suppress(OSError):
            # To be told of locks the descriptor must be writable.
            fd = os.open(self._store / PUBLISH_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _byte_range(_FIRST_CLAIM_BYTE + part))
            finally:
                os.close(fd)
            return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)
        return False

    def close(self) -> None:
        """Free the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_FLOCK = "hhqqi"  # ``struct flock``: kind, what the start counts from, start, length, process


def _byte_range(byte: int) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
