"""The lock of a store in a folder, which processes that write different parts may share.

A process holds ``store.lock`` exclusively while it opens or cleans the store, and while it changes
more than single parts (adds fields or repairs damage). Several processes may share ``store.lock``
while they write parts.

Publishing a part or a document (renaming its files and writing its commit) is protected by a lock
on one byte of ``publish.lock``, if ``store.lock`` is shared. If two processes write the same part,
the second process finds the commit of the first one and deletes its own files. In addition, a
process locks another byte, the claim of the part, while it computes the part, so that other
processes choose different parts. Locks do not determine which parts a store has, only commits do.
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

# Bytes of publish.lock. Each of the first three bytes is the lock of a document that several
# processes may write. From FIRST_PART_BYTE on, there is one byte per part for its publication. From
# _FIRST_CLAIM_BYTE on, there is one byte per part for its claim.
TEXTS_BYTE = 0
CARD_BYTE = 1
BUNDLE_BYTE = 2
FIRST_PART_BYTE = 16
_FIRST_CLAIM_BYTE = 1 << 40
CAN_SHARE = hasattr(fcntl, "F_OFD_SETLKW")
"""Whether the system has byte-range locks that belong to an open file, as Linux has.

On other systems a store is always locked exclusively.
"""

_OPENING = "opens or cleans the store"
"""Note that a process writes to store.lock while it opens or cleans the store.

Other processes that find this note wait for the lock instead of raising an error.
"""
# Seconds for which a process waits for a lock whose file has no note that the holder opens or
# cleans the store. The holder may not have written its note yet.
_GRACE_S = 1.0
_RETRY_S = 0.1


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
        self._path = store / LOCK_NAME
        # Whether this process holds the lock exclusively, so that no other process can write.
        self.is_alone = True
        try:
            self._fd = open_lock(self._path)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            raise read_only(store, error.errno) from error
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
        """Take the lock. Wait while another process opens or cleans the store.

        Args:
            take: function that takes the lock or raises LockHeld.
            waits: if False, raise StoreLocked at once if another process holds the lock.

        Raises:
            StoreLocked: another process holds the lock, and it is neither opening nor cleaning the
                store.
        """
        began_s = time.monotonic()
        while True:
            try:
                return take()
            except LockHeld as held:
                if not waits or (held.note != _OPENING and time.monotonic() - began_s > _GRACE_S):
                    raise StoreLocked(
                        f"{self._store} is being written by {held.holder}. Wait until that process "
                        "ends, or choose another output folder."
                    ) from held
                time.sleep(_RETRY_S)

    def share(self) -> None:
        """Change an exclusive lock to a shared one, so that other processes can write too.

        The lock stays exclusive if the system lacks the byte-range locks that sharing needs.
        """
        if self.is_alone and CAN_SHARE:
            # This change is not atomic: the kernel releases the exclusive lock before it takes the
            # shared one, and another process may take the lock in between.
            self._wait_for(lambda: lock(self._fd, self._path, shared=True))
            self.is_alone = False

    def try_alone(self) -> bool:
        """Try to make a shared lock exclusive.

        If another process also holds the lock, this process releases it and must not write to the
        store any more.

        Returns:
            Whether this process now holds the lock exclusively.
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
        """Lock a byte of ``publish.lock``. Wait while another process or thread holds this byte.

        If this process holds the store's lock exclusively, nothing needs to be locked.
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
        """Claim a part: lock the byte that marks it as being computed.

        Returns:
            A file descriptor that holds the claim until it is closed. It is -1 if the part was not
            claimed, because no other process can write, or because another writer has claimed it.
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
        """Return whether a writer in this or another process has claimed a part.

        A writer may also compute a part that it could not claim.
        """
        if self.is_alone:
            return False
        with suppress(OSError):
            # Open the file for writing too, because F_OFD_GETLK reports locks only for a writable
            # descriptor.
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
