"""Write, lock and read local files safely, and parse foreign JSON within limits."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .errors import DrafterError, MoaDataError, NotEnoughMemory, StorageUnavailable, StoreDamaged
from .text import first_line, format_bytes

# Suffix of files and folders that are being written. After a crash they can be deleted.
PARTIAL_SUFFIX = ".partial"
# Mode of a new file, before the umask is applied.
FILE_MODE = 0o666
# Maximum length of a JSON document. The commit of a part has about 100 bytes per file.
MAX_JSON_BYTES = 16 << 20
MAX_WHOLE_NUMBER = 1 << 48
"""Maximum count in a document. Sums and products of a few counts fit into 64 bits or are Python
integers."""
FULL_DISK_ADVICE = (
    "What was finished is safe. Free some space and run the same command again: it continues with "
    "what is missing."
)
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors caused by a wrong path or a damaged file.
_ABOUT_THE_PATH = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# How libraries with their own errors write the number of a system error: Rust's, then Python's and
# Arrow's.
_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
# Texts of libraries that omit the number.
_ERROR_WORDS = {
    "no space left on device": errno.ENOSPC, "disk quota exceeded": errno.EDQUOT,
    "file too large": errno.EFBIG, "read-only file system": errno.EROFS,
    "disk is full": errno.ENOSPC, "pytorchstreamwriter failed": errno.EIO,
}  # fmt: skip
_ASK_FOR_RIGHTS = "Give yourself the rights to it, or choose another path."
_LOOK_AT_DISK = (
    "What was finished is safe. Check the disk or the mount, and run the same command again."
)
# Advice for system errors that are about the machine, whatever the operation was.
_ADVICE = {
    errno.ENOSPC: FULL_DISK_ADVICE,
    errno.EDQUOT: FULL_DISK_ADVICE,
    errno.EFBIG: (
        "What was finished is safe. Raise the limit of file sizes (ulimit -f), or choose another "
        "file system."
    ),
    errno.EROFS: _ASK_FOR_RIGHTS,
    errno.EACCES: _ASK_FOR_RIGHTS,
    errno.EPERM: _ASK_FOR_RIGHTS,
    errno.EIO: _LOOK_AT_DISK,
    errno.ESTALE: _LOOK_AT_DISK,
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the limit of open files of the system, or end other programs.",
}
# Errors that mean that a lock is held. Some network file systems report EACCES.
_HELD_ERRNOS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


# Writing


def write_all(fd: int, data: bytes | memoryview) -> int:
    """Write every byte of ``data`` to a file descriptor and return the number of bytes."""
    view = memoryview(data).cast("B")
    n_bytes = len(view)
    while view:
        view = view[os.write(fd, view) :]
    return n_bytes


def fsync_directory(path: Path) -> None:
    """Make renames and new names inside a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Create and sync a file, not atomically; a symbolic link at the path is refused."""
    fd = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
    )
    try:
        with naming(path):
            write_all(fd, data)
            os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file atomically: after a crash it is either unchanged or complete."""
    with replacing(path) as partial:
        write_file(partial, data)


@contextmanager
def replacing(path: Path, advice: str = FULL_DISK_ADVICE) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces ``path`` atomically when the block ends.

    The block must write and sync the temporary file.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with disk_full_guard(path, advice):
        try:
            with naming(path):
                yield partial
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        # Without this, the rename itself could be lost in a power failure.
        fsync_directory(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to a system error that has none, such as one of a write to a descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield (folder, names of folders, names of files) of a tree from the top.

    Unlike ``os.walk`` by default, this raises an error for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=refuse):
        yield Path(root), folders, names


@contextmanager
def disk_full_guard(path: object, advice: str = FULL_DISK_ADVICE) -> Iterator[None]:
    """Turn a full disk, an exhausted quota or a read-only file system into one line with advice."""
    try:
        yield
    except MoaDataError:
        raise
    except Exception as error:  # Libraries may wrap the system error.
        cause = system_error(error)
        if cause is not None and cause.errno == errno.EROFS:
            raise read_only(cause.filename or path, cause) from error
        if cause is None or cause.errno not in _FULL_ERRNOS:
            raise
        advice = _ADVICE[errno.EFBIG] if cause.errno == errno.EFBIG else advice
        raise StorageUnavailable(
            f"No space left while writing {path} ({os.strerror(cause.errno)}). {advice}"
        ) from error


def system_error(error: BaseException | None) -> OSError | None:
    """Find the system error that caused an error.

    It is the error itself, one of its causes, or is recognized in the text of a library's error.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno not in _ABOUT_THE_PATH:
            return error
        number = _error_number(str(error))
        if number not in _ABOUT_THE_PATH:
            return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


def _error_number(text: str) -> int | None:
    if (match := _ERROR_NUMBER.search(text)) is not None:
        return int(match[1] or match[2])
    lower = text.lower()
    return next((number for words, number in _ERROR_WORDS.items() if words in lower), None)


def machine_trouble(error: BaseException) -> StorageUnavailable | None:
    """Return an error for a problem with the disk, rights or limits of the machine, with advice.

    Returns None for any other error.
    """
    cause = system_error(error)
    if cause is None or cause.errno not in _ADVICE:
        return None
    path = cause.filename if cause.filename is not None else "a file"
    return StorageUnavailable(f"{path}: {os.strerror(cause.errno)}.", _ADVICE[cause.errno])


def read_only(path: object, error: OSError) -> StorageUnavailable:
    """Return the error for a folder that cannot be written."""
    return StorageUnavailable(
        f"{path} cannot be written ({os.strerror(error.errno or errno.EROFS)}). Give yourself the "
        "right to write there, or choose another output folder."
    )


def nearest_folder(path: Path) -> Path:
    """Return the path, or its closest parent folder that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_room(folder: object, n_bytes: int = 0, advice: str = FULL_DISK_ADVICE) -> None:
    """Refuse a folder that cannot be written or whose disk has too little room.

    The folder need not exist. An object store has no such limit, so nothing is checked for anything
    but a ``Path``.
    """
    if not isinstance(folder, Path):
        return
    there = nearest_folder(folder)
    # On a read-only file system this check fails for root too.
    if not os.access(there, os.W_OK):
        status = os.statvfs(there)
        raise read_only(
            folder, OSError(errno.EROFS if status.f_flag & os.ST_RDONLY else errno.EACCES, "")
        )
    if (n_free := shutil.disk_usage(there).free) < n_bytes:
        raise StorageUnavailable(
            f"{folder} needs about {format_bytes(n_bytes)}, its disk has {format_bytes(n_free)} "
            f"free. {advice}"
        )


# Locking uses flock directly: a store needs shared locks and the name of the holder, and the
# filelock package has neither.


class LockHeld(Exception):
    """Another process holds the lock; the error has its name and its note about the purpose."""

    def __init__(self, holder: str, note: str = "") -> None:
        super().__init__(holder)
        self.holder = holder
        self.note = note


def open_lock(path: Path) -> int:
    """Open the file of a lock, creating it if it is missing.

    A symbolic link is refused, because it may lead to somebody else's file.
    """
    try:
        # Readable and writable: on NFS, flock is a byte-range lock, which needs a writable
        # descriptor.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
        raise StoreDamaged(
            f"{path} is a symbolic link, expected a file. Delete the link and try again."
        ) from error


def lock(fd: int, path: Path, shared: bool = False, note: str = "", waits: bool = False) -> None:
    """Take a lock, or change a held one; the kernel releases it when the process ends.

    Args:
        fd: from :func:`open_lock`; closing it releases the lock. The file remains.
        path: the file of the lock, for messages.
        shared: take a shared lock, not an exclusive one.
        note: one line for processes that find it locked.
        waits: wait until other processes have released the lock.

    Raises:
        LockHeld: another descriptor holds the lock. A lock that was to be changed is then lost.
        StorageUnavailable: the file system does not support locks, or has no room for the name of
            this process.
    """
    try:
        fcntl.flock(
            fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB)
        )
    except OSError as error:
        if error.errno not in _HELD_ERRNOS:
            raise no_locks(path, error) from error
        holder, _, holder_note = (
            os.pread(fd, 200, 0).decode(errors="replace").strip().partition("\n")
        )
        raise LockHeld(holder or "another process", holder_note) from error
    if not shared:
        with disk_full_guard(path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n{note}\n".encode(), 0)


def lock_file(path: Path, waits: bool = False) -> int:
    """Lock a file exclusively.

    Returns:
        The descriptor that holds the lock until it is closed.
    """
    fd = open_lock(path)
    try:
        lock(fd, path, waits=waits)
    except BaseException:
        os.close(fd)
        raise
    return fd


def no_locks(path: Path, error: OSError) -> StorageUnavailable:
    """Return the error for a file system that does not support locks."""
    return StorageUnavailable(
        f"{path} cannot be locked ({os.strerror(error.errno or 0)}), and without a lock two "
        f"processes could write to {path.parent} at the same time. Put that folder on a file "
        "system with locks, or mount this one with them (NFS: without nolock, with its lock "
        "service running)."
    )


# Reading files that may be damaged or malicious


def open_regular(path: Path) -> int:
    """Open a local file for reading and return its descriptor; StoreDamaged if it is not regular.

    Opening a FIFO would block and a device has no end, so both are refused before reading.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EOPNOTSUPP):  # The errors for a socket.
            raise
        raise StoreDamaged(f"{path} is a socket or device, expected a regular file") from error
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise StoreDamaged(f"{path} is {_KINDS.get(kind, 'a device')}, expected a regular file")
    return fd


def kind_of(path: Path) -> str:
    """Return what a path is: "a file", "a folder", "a FIFO", "a socket" or "a device"."""
    return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "a device")


def read_bounded(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a file; ValueError before reading if it is too long or not regular."""
    with open(open_regular(path), "rb") as file:
        check_length(n_bytes := os.fstat(file.fileno()).st_size, max_bytes)
        return file.read(n_bytes)


def check_length(n_bytes: int, max_bytes: int | None) -> None:
    """Refuse a file that is longer than ``max_bytes``; raises ValueError."""
    if max_bytes is not None and n_bytes > max_bytes:
        raise ValueError(f"it has {n_bytes} bytes, at most {max_bytes} are read")


def read_object(path: Path, allows_infinity: bool = False) -> dict[str, Any]:
    """Read a file with one JSON object; the ValueError for anything else is one line."""
    return parse_object(read_bounded(path), allows_infinity)


def parse_object(text: bytes | str, allows_infinity: bool = False) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: it is not an object, too long, nested too deeply, or has NaN or (unless allowed)
            Infinity.
    """
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"{len(text)} bytes, at most {MAX_JSON_BYTES} are read")
    try:
        document = json.loads(text, parse_constant=partial(_parse_constant, allows_infinity))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"a JSON {type(document).__name__}, expected an object")
    return document


def whole_number(value: object, name: str, low: int = 0, high: int = MAX_WHOLE_NUMBER) -> int:
    """Check and return a whole number of a document; ValueError for anything else."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {_shown(value)}, expected a whole number from {low} to {high}")
    return value


def whole_numbers(value: object, name: str) -> tuple[int, ...]:
    """Check and return a list of at most 16 positive whole numbers of a document."""
    if not isinstance(value, list) or len(value) > 16:
        raise ValueError(f"{name} is {_shown(value)}, expected a list of at most 16 numbers")
    return tuple(whole_number(item, name, 1) for item in value)


def relative_name(name: object) -> str:
    """Check and return the name of a file below a folder.

    Raises:
        ValueError: it is absolute, or has empty, ``.`` or ``..`` steps.
    """
    if not isinstance(name, str) or "\0" in name or len(name) > 1024:
        raise ValueError(f"{_shown(name)} is not a relative path")
    if any(step in ("", ".", "..") or len(step.encode()) > 255 for step in name.split("/")):
        raise ValueError(f"{_shown(name)} is not a relative path")
    return name


def mapping(value: object, name: str) -> Mapping[str, Any]:
    """Check and return an object inside a document."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_shown(value)}, expected an object")
    return value


def _parse_constant(allows_infinity: bool, name: str) -> float:
    if name == "NaN" or not allows_infinity:
        raise ValueError(f"the number {name}")
    return float(name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def parsing(
    trouble: str, error_class: type[Exception], advice: str = "Restore the file."
) -> Iterator[None]:
    """Turn any error of a library that parses a file into a one-line ``error_class``.

    System errors pass unchanged, because they say nothing about the file. For an error of missing
    memory the file is named.

    Args:
        trouble: what failed, such as "cannot read FILE".
        error_class: class of the error to raise.
        advice: what to do.
    """
    # Wrap only the library's own call: for a malformed file, transformers raises nearly every
    # builtin error and tokenizers a plain Exception.
    try:
        yield
    except (DrafterError, NotEnoughMemory, StorageUnavailable, error_class):
        raise
    except MemoryError as error:
        raise NotEnoughMemory(
            f"{trouble}, or there is too little memory ({first_line(error)}). {advice}"
        ) from error
    except Exception as error:
        if (cause := system_error(error)) is not None:
            raise cause from error
        reason = (
            f"it lacks {first_line(error)}" if isinstance(error, KeyError) else first_line(error)
        )
        raise error_class(f"{trouble} ({reason.rstrip('.')}). {advice}") from error
