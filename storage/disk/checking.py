"""Telling what is missing from what the machine keeps us from seeing.

A file is missing where the system says that there is none. Any other refusal (too many open files, no right to read, a
disk or a server that does not answer, no memory) says nothing about the file, and nothing may be deleted because of it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import MoaDataError, StorageUnavailable
from ..paths import RemotePath, StorePath

MISSING = (FileNotFoundError, NotADirectoryError)
"""What the system raises where there is no such file."""

_ADVICE = {
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "Close programs that hold many files open",
    errno.EACCES: "Give yourself the right to read it",
    errno.EPERM: "Give yourself the right to read it",
    errno.ELOOP: "Mend the symbolic link",
    errno.ENOMEM: "Free some memory",
}


def exists(path: StorePath) -> bool:
    """Whether there is such a file or folder; OSError where it cannot be told (``Path.exists`` says no)."""
    if isinstance(path, RemotePath):
        return path.exists()
    try:
        path.stat()
    except MISSING:
        return False
    return True


def reason(error: OSError | MemoryError) -> str:
    """Return in words why something could not be checked."""
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return os.strerror(error.errno) if error.errno else str(error)


def check_incomplete(store: StorePath, path: str, error: OSError | MemoryError, n_files: int = 1) -> StorageUnavailable:
    """Return the error for what could not be checked; ``path``, the first file, is absolute or in the store."""
    code = errno.ENOMEM if isinstance(error, MemoryError) else error.errno or 0
    advice = _ADVICE.get(code, "Check the disk, or the mount of the network file system")
    what = path if n_files == 1 else f"{n_files} files, the first of them {path},"
    return StorageUnavailable(
        f"{store}: {what} could not be checked ({reason(error)}), which says nothing about damage, so nothing was "
        f"deleted. {advice}, then run the same command again."
    )


@contextmanager
def check_guard(store: StorePath) -> Iterator[None]:
    """Turn what the machine refuses while a store is looked at into :class:`StorageUnavailable`."""
    try:
        yield
    except MoaDataError:  # each says what to do
        raise
    except (OSError, MemoryError) as error:
        named = None if isinstance(error, MemoryError) else error.filename
        raise check_incomplete(store, str(named or "a file"), error) from error
