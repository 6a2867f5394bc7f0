"""Local files: written whole and synced, locked, read within limits; and foreign JSON parsed without surprises."""

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

# suffix of files and folders that are being written; after a crash they are rubbish
PARTIAL_SUFFIX = ".partial"
FILE_MODE = 0o666  # rights of a new file, from which the umask takes some, as for any other program
# longest JSON document that is parsed; a commit of a part has about 100 bytes per file
MAX_JSON_BYTES = 16 << 20
MAX_WHOLE_NUMBER = 1 << 48
"""Largest count that a document may hold; sums and products of a few of them still fit 64 bits or are Python's."""
FULL_DISK_ADVICE = (
    "What was finished is safe. Free some space and run the same command again: it continues with "
    "what is missing."
)
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# errors that a wrong path or damaged file explains
_ABOUT_THE_PATH = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# How libraries that raise errors of their own write the number of a system error: Rust's, then
# Python's and Arrow's.
_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
# Words of libraries that leave the number out.
_ERROR_WORDS = {
    "no space left on device": errno.ENOSPC, "disk quota exceeded": errno.EDQUOT, "file too large": errno.EFBIG,
    "read-only file system": errno.EROFS, "disk is full": errno.ENOSPC, "pytorchstreamwriter failed": errno.EIO,
}  # fmt: skip
_ASK_FOR_RIGHTS = "Give yourself the rights to it, or choose another path."
_LOOK_AT_DISK = (
    "What was finished is safe. Check the disk or the mount, and run the same command again."
)
# What to do about a system error that says something about the machine, whatever was being done.
_ADVICE = {
    errno.ENOSPC: FULL_DISK_ADVICE,
    errno.EDQUOT: FULL_DISK_ADVICE,
    errno.EFBIG: "What was finished is safe. Raise the limit of file sizes (ulimit -f), or choose another file system.",
    errno.EROFS: _ASK_FOR_RIGHTS,
    errno.EACCES: _ASK_FOR_RIGHTS,
    errno.EPERM: _ASK_FOR_RIGHTS,
    errno.EIO: _LOOK_AT_DISK,
    errno.ESTALE: _LOOK_AT_DISK,
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the limit of open files of the system, or end other programs.",
}
# EACCES on some network file systems
_HELD_ERRNOS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


# Writing


def write_all(fd: int, data: bytes | memoryview) -> int:
    """Write every byte of ``data`` to a file descriptor and return their number."""
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
    """Create and sync a file, not atomically; a link in its place is refused."""
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
    """Replace a file: after a crash at any moment it is either as before or complete."""
    with replacing(path) as partial:
        write_file(partial, data)


@contextmanager
def replacing(path: Path, advice: str = FULL_DISK_ADVICE) -> Iterator[Path]:
    """Yield where to write a file, which must be synced when the block ends and then replaces ``path`` in one step."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with disk_full_guard(path, advice):
        try:
            with naming(path):
                yield partial
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        # Without it the rename itself may be lost with the power.
        fsync_directory(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an error of the system that does not, as that of a write to a descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield (folder, names of folders, names of files) of a tree from the top; ``os.walk`` skips what it can't list."""

    def refuse(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=refuse):
        yield Path(root), folders, names


@contextmanager
def disk_full_guard(path: object, advice: str = FULL_DISK_ADVICE) -> Iterator[None]:
    """Turn a full disk, an exhausted quota and a read-only file system into one line with advice."""
    try:
        yield
    except MoaDataError:
        raise
    except Exception as error:  # also what libraries make of it
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
    """Find the system error behind an error: the error itself, one of its causes, or what a library says of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno not in _ABOUT_THE_PATH:
            return error
        number = _error_number(str(error))
        if number not in _ABOUT_THE_PATH:
            return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


def _error_number(text: str) -> int | None:
    if (found := _ERROR_NUMBER.search(text)) is not None:
        return int(found[1] or found[2])
    lower = text.lower()
    return next((number for words, number in _ERROR_WORDS.items() if words in lower), None)


def machine_trouble(error: BaseException) -> StorageUnavailable | None:
    """Return an error that says which disk, rights or limits stopped the work, and what to do; None for any other."""
    cause = system_error(error)
    if cause is None or cause.errno not in _ADVICE:
        return None
    path = cause.filename if cause.filename is not None else "a file"
    return StorageUnavailable(f"{path}: {os.strerror(cause.errno)}.", _ADVICE[cause.errno])


def read_only(path: object, error: OSError) -> StorageUnavailable:
    """Return the error for a folder that cannot be written."""
    return StorageUnavailable(
        f"{path} cannot be written ({os.strerror(error.errno or errno.EROFS)}). Give yourself the right to write "
        "there, or choose another output folder."
    )


def nearest_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_room(folder: object, n_bytes: int = 0, advice: str = FULL_DISK_ADVICE) -> None:
    """Refuse a folder, which may be missing, that cannot be written or whose disk has less room.

    An object store has no such limit: for anything but a ``Path`` nothing is done.
    """
    if not isinstance(folder, Path):
        return
    there = nearest_folder(folder)
    if not os.access(there, os.W_OK):  # root, too, is refused where the file system is read-only
        status = os.statvfs(there)
        raise read_only(
            folder, OSError(errno.EROFS if status.f_flag & os.ST_RDONLY else errno.EACCES, "")
        )
    if (n_free := shutil.disk_usage(there).free) < n_bytes:
        raise StorageUnavailable(
            f"{folder} needs about {format_bytes(n_bytes)}, its disk has {format_bytes(n_free)} free. {advice}"
        )


# Locking: filelock has exclusive locks only and no name of the holder, and a store needs both;
# flock gives them.


class LockHeld(Exception):
    """Another process holds the lock: who it is, and what it said it does with the lock."""

    def __init__(self, holder: str, note: str = "") -> None:
        super().__init__(holder)
        self.holder = holder
        self.note = note


def open_lock(path: Path) -> int:
    """Open a lock's file, made if missing; a link is refused, as the file behind it is somebody else's."""
    try:
        # Readable and writable: flock on NFS is a byte-range lock, which needs a writable
        # descriptor.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
        raise StoreDamaged(
            f"{path} is a symbolic link, expected a file. Delete the link and try again."
        ) from error


def lock(fd: int, path: Path, shared: bool = False, note: str = "", waits: bool = False) -> None:
    """Take a lock, or change one that is held; the kernel frees it when the process ends.

    Args:
        fd: from :func:`open_lock`; closing it frees the lock. The file stays.
        note: one line, for those who find it locked.
        waits: wait until others have freed the lock.

    Raises:
        LockHeld: by another descriptor. A lock that was to be changed is then lost.
        StorageUnavailable: the file system has no locks, or no room for the process's name.
    """
    try:
        fcntl.flock(
            fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB)
        )
    except OSError as error:
        if error.errno not in _HELD_ERRNOS:
            raise no_locks(path, error) from error
        holder, _, said = os.pread(fd, 200, 0).decode(errors="replace").strip().partition("\n")
        raise LockHeld(holder or "another process", said) from error
    if not shared:
        with disk_full_guard(path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n{note}\n".encode(), 0)


def lock_file(path: Path, waits: bool = False) -> int:
    """Lock a file for this process alone; returns the descriptor that holds it until it is closed."""
    fd = open_lock(path)
    try:
        lock(fd, path, waits=waits)
    except BaseException:
        os.close(fd)
        raise
    return fd


def no_locks(path: Path, error: OSError) -> StorageUnavailable:
    """Return the error for a file system without locks."""
    return StorageUnavailable(
        f"{path} cannot be locked ({os.strerror(error.errno or 0)}), and without a lock two processes could write to "
        f"{path.parent} at the same time. Put that folder on a file system with locks, or mount this one with them "
        "(NFS: without nolock, with its lock service running)."
    )


# Reading what may be damaged or hostile


def open_regular(path: Path) -> int:
    """Open a local file for reading and return its descriptor; StoreDamaged for what is not a regular file.

    A FIFO would be waited for and a device has no end, so both are refused before anything is read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EOPNOTSUPP):  # what a socket gives
            raise
        raise StoreDamaged(f"{path} is a socket or device, expected a regular file") from error
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise StoreDamaged(f"{path} is {_KINDS.get(kind, 'a device')}, expected a regular file")
    return fd


def kind_of(path: Path) -> str:
    """Name the kind of a path that exists: "a file", "a folder", "a FIFO", "a socket" or "a device"."""
    return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "a device")


def read_bounded(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a file; ValueError, with nothing read, where it is longer or no regular file."""
    with open(open_regular(path), "rb") as file:
        check_length(n_bytes := os.fstat(file.fileno()).st_size, max_bytes)
        return file.read(n_bytes)


def check_length(n_bytes: int, max_bytes: int | None) -> None:
    """Refuse a file that is longer than ``max_bytes``; raises ValueError."""
    if max_bytes is not None and n_bytes > max_bytes:
        raise ValueError(f"it has {n_bytes} bytes, at most {max_bytes} are read")


def read_object(path: Path, allows_infinity: bool = False) -> dict[str, Any]:
    """Read a file that holds one JSON object; ValueError says in a line what else it is."""
    return parse_object(read_bounded(path), allows_infinity)


def parse_object(text: bytes | str, allows_infinity: bool = False) -> dict[str, Any]:
    """Parse a JSON object, neither too long nor nested too deeply, without NaN and Infinity; else ValueError."""
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
    """Return a whole number of a document; ValueError for anything else."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {_shown(value)}, expected a whole number from {low} to {high}")
    return value


def whole_numbers(value: object, name: str) -> tuple[int, ...]:
    """Return a list of at most 16 positive whole numbers of a document."""
    if not isinstance(value, list) or len(value) > 16:
        raise ValueError(f"{name} is {_shown(value)}, expected a list of at most 16 numbers")
    return tuple(whole_number(item, name, 1) for item in value)


def relative_name(name: object) -> str:
    """Return the name of a file below a folder; ValueError if absolute, or with empty, ``.`` or ``..`` steps."""
    if not isinstance(name, str) or "\0" in name or len(name) > 1024:
        raise ValueError(f"{_shown(name)} is not a relative path")
    if any(step in ("", ".", "..") or len(step.encode()) > 255 for step in name.split("/")):
        raise ValueError(f"{_shown(name)} is not a relative path")
    return name


def mapping(value: object, name: str) -> Mapping[str, Any]:
    """Return an object inside a document."""
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
    """Turn whatever a library raises while it parses a file into ``error_class``, in one line.

    Errors of the system pass, as they say nothing about the file; of missing memory the file is named. ``trouble`` is
    what went wrong if it raises, such as "cannot read FILE".
    """
    # Wrap the library's own call and nothing else: for a malformed file transformers raises nearly
    # every builtin type,
    # tokenizers a plain Exception.
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
