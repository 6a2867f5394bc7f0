"""A process's hold on a store: alone, or beside others that write other parts of it.

``store.lock`` is held alone by whoever opens a store for writing, who may then delete what no commit lists; and by
whoever changes more than parts (additions, repairs). Extraction goes on beside others: each part and document is then
published (renamed and committed) under a slot of its own in ``publish.lock``, so that of two writers of one part the
second finds the first one's commit and gives way. Another slot is held while a part is written, so that others begin
with other parts; who has none left writes it all the same, as the one who holds it may be slow.

What a store holds is told by commits alone. Locks only keep two from publishing the same thing at the same moment, and
a store from being cleaned while somebody writes to it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ...errors import StoreLocked
from ..disk.durable import read_only
from ..disk.locking import (
    CAN_LOCK_SLOTS,
    LockHeld,
    lock_again_alone,
    lock_again_beside_others,
    lock_beside_others,
    lock_file,
    lock_slot,
    slot_is_held,
    try_slot,
)
from ..names import LOCK_NAME, PUBLISH_NAME

_Result = TypeVar("_Result")

TEXTS_SLOT, CARD_SLOT, BUNDLE_SLOT, _FIRST_PART_SLOT = 0, 1, 2, 16
"""Slots of ``publish.lock``: of each document that several may want to write, and of part 0."""
_FIRST_CLAIM_SLOT = 1 << 40
"""Slot that is held while part 0 is written: a hint for others to begin with other parts, nothing more."""

_BRIEFLY = ", for a moment"
"""Note of a holder that opens the store or cleans it, so that others who share wait instead of giving up."""
_GRACE_S = 1.0
"""Time that a holder has to write its note."""
_RETRY_S = 0.1


def part_slot(part: int) -> int:
    """Return the slot under which a part is published."""
    return _FIRST_PART_SLOT + part


class StoreLock:
    """The lock of a store, held from :meth:`take` or :meth:`join` to :meth:`close`.

    Attributes:
        is_alone: whether no other process can write to the store.
        joined: whether others were there when it was locked.
    """

    def __init__(self, store: Path, fd: int, is_alone: bool) -> None:
        self.is_alone, self.joined = is_alone, not is_alone
        self._store = store
        self._fd = fd

    @classmethod
    def take(cls, store: Path, shares: bool = False) -> StoreLock:
        """Lock a store alone; one who shares may find others who do, and is then beside them.

        Args:
            shares: whether the caller will :meth:`share` the lock once the store is open; waits for others who are
                opening the store to do the same.

        Raises:
            StoreLocked: another process holds it.
            StorageUnavailable: no right to write there.
            StorageUnavailable: the file system has no locks.
            StoreDamaged: the lock's file is a symbolic link.
        """
        if not (shares and CAN_LOCK_SLOTS):
            try:
                return cls(store, _locked(store, alone=True), True)
            except LockHeld as held:
                raise _store_locked(store, held) from held
        return _patiently(store, lambda: cls._take_or_join(store))

    @classmethod
    def _take_or_join(cls, store: Path) -> StoreLock:
        try:
            return cls(store, _locked(store, alone=True, note=_BRIEFLY), True)
        except LockHeld:
            return cls(store, _locked(store, alone=False), False)

    @classmethod
    def join(cls, store: Path) -> StoreLock:
        """Lock a store beside others; raises as :meth:`take`."""
        return _patiently(store, lambda: cls(store, _locked(store, alone=False), False))

    def share(self) -> None:
        """Let others write beside this process; returns at once where the system has no locks for that."""
        if self.is_alone and CAN_LOCK_SLOTS:
            # In the gap between the two locks another process may take it.
            _patiently(self._store, lambda: lock_again_beside_others(self._fd, self._store / LOCK_NAME))
            self.is_alone = False

    def try_alone(self) -> bool:
        """Stop sharing if nobody else holds the lock now; otherwise it is lost, and nothing may be written any more."""
        if not self.is_alone:
            try:
                lock_again_alone(self._fd, self._store / LOCK_NAME, _BRIEFLY)
                self.is_alone = True
            except LockHeld:
                self.close()
        return self.is_alone

    @contextmanager
    def publishing(self, slot: int) -> Iterator[None]:
        """Keep others from publishing the same part or document meanwhile."""
        if self.is_alone:
            yield
            return
        with lock_slot(self._store / PUBLISH_NAME, slot):
            yield

    def claim(self, part: int) -> int:
        """Tell others that a part is being written.

        Returns:
            A descriptor that says so until it is closed; -1 where nobody needs to be told, or another one says it.
        """
        held = None if self.is_alone else try_slot(self._store / PUBLISH_NAME, _FIRST_CLAIM_SLOT + part)
        return -1 if held is None else held

    def is_claimed(self, part: int) -> bool:
        """Whether a part is being written at this moment, as far as its writer could tell."""
        return not self.is_alone and slot_is_held(self._store / PUBLISH_NAME, _FIRST_CLAIM_SLOT + part)

    def close(self) -> None:
        """Let go of the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _locked(store: Path, alone: bool, note: str = "") -> int:
    path = store / LOCK_NAME
    try:
        return lock_file(path, note) if alone else lock_beside_others(path)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise read_only(store, error) from error


def _patiently(store: Path, lock: Callable[[], _Result]) -> _Result:
    """Lock as soon as no other process has the store for a moment; raises StoreLocked where one keeps it."""
    began_s = time.monotonic()
    while True:
        try:
            return lock()
        except LockHeld as held:
            if not held.holder.endswith(_BRIEFLY) and time.monotonic() - began_s > _GRACE_S:
                raise _store_locked(store, held) from held
            time.sleep(_RETRY_S)


def _store_locked(store: Path, held: LockHeld) -> StoreLocked:
    return StoreLocked(
        f"{store} is being written by {held.holder.removesuffix(_BRIEFLY)}. Wait until it ends, or choose another "
        "output folder."
    )
