"""Check, write, lock and read local files safely, and parse JSON within limits."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .errors import (
    DrafterError,
    MoaDataError,
    NotEnoughMemory,
    OutputOccupied,
    StorageUnavailable,
    StoreDamaged,
)
from .text import first_line, format_bytes

# While a file or folder is being written, its name has this suffix. After a crash, files and
# folders that still have this suffix can be deleted.
PARTIAL_SUFFIX = ".partial"
# Permission bits of a new file, before the umask is applied.
FILE_MODE = 0o666
# Maximum size in bytes of a JSON file. A larger file is not read. The largest JSON files are the
# commits of parts, which have about 100 bytes for each file of the part.
MAX_JSON_BYTES = 16 << 20
MAX_WHOLE_NUMBER = 1 << 48
"""Largest count that is accepted in a JSON document.

Counts are added and multiplied. With this limit, the results of most of these computations fit into
64-bit integers. All other computations use Python integers, which cannot overflow.
"""
FULL_DISK_ADVICE = (
    "All finished work is saved. Free some space and run the same command again: it continues "
    "with the rest."
)
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Numbers of system errors that are caused by a wrong path or a damaged file, not by the machine.
# EINVAL and EOVERFLOW are raised, for example, if a library reads a truncated file and seeks to an
# offset that does not exist.
_ABOUT_THE_PATH = (
    None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EOVERFLOW,
)  # fmt: skip
# Matches the number of a system error in a message. Some libraries raise an exception of their own
# for a system error, and write the number into its message. Rust libraries write "(os error 28)",
# Python and Arrow write "[Errno 28]".
_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
# Some messages of libraries describe a system error only in words. This dict maps the words to the
# number of the error.
_ERROR_WORDS = {
    "no space left on device": errno.ENOSPC, "disk quota exceeded": errno.EDQUOT,
    "file too large": errno.EFBIG, "read-only file system": errno.EROFS,
    "disk is full": errno.ENOSPC, "pytorchstreamwriter failed": errno.EIO,
}  # fmt: skip
_ASK_FOR_RIGHTS = "Give yourself the rights to use this path, or choose another path."
_LOOK_AT_DISK = (
    "All finished work is saved. Check the disk or the mount, and run the same command again."
)
# Maps the number of a system error to advice for the user. These errors are caused by the state of
# the machine, for example a full disk.
_ADVICE = {
    errno.ENOSPC: FULL_DISK_ADVICE,
    errno.EDQUOT: FULL_DISK_ADVICE,
    errno.EFBIG: (
        "All finished work is saved. Raise the limit of file sizes (ulimit -f), or choose another "
        "file system."
    ),
    errno.EROFS: _ASK_FOR_RIGHTS,
    errno.EACCES: _ASK_FOR_RIGHTS,
    errno.EPERM: _ASK_FOR_RIGHTS,
    errno.EIO: _LOOK_AT_DISK,
    errno.ESTALE: _LOOK_AT_DISK,
    errno.EMFILE: "Raise the limit of open files (ulimit -n), and run the same command again.",
    errno.ENFILE: (
        "Raise the system's limit of open files, or end other programs. Then run the same command "
        "again."
    ),
}
# Numbers of the system errors that flock raises if another process holds the lock. On some network
# file systems, this is EACCES.
_HELD_ERRNOS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


# Writing


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte of ``data`` to a file descriptor."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def fsync_directory(path: Path) -> None:
    """Sync a folder, so that files that were created or renamed in it survive a crash."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write and sync a file. The write is not atomic.

    Raises:
        OSError: the path is a symbolic link, or the file cannot be written.
    """
    fd = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
    )
    try:
        with naming(path):
            write_all(fd, data)
            os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes, advice: str = FULL_DISK_ADVICE) -> None:
    """Replace a file atomically: after a crash, the file has either its old or its new content."""
    with replacing(path, advice) as partial:
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
        # Sync the folder. Otherwise, a power failure could undo the rename.
        fsync_directory(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """If a system error in the ``with`` block does not contain a path, add ``path`` to it.

    For example, the error of a write to a file descriptor does not contain the path of the file.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def walk(folder: Path, follows_links: bool = False) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield (folder, names of subfolders, names of files) for each folder of a tree, top down.

    If a folder cannot be listed, an OSError is raised. ``os.walk`` would skip the folder instead.

    Args:
        follows_links: whether to enter folders that are symbolic links.
    """

    def refuse(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=follows_links):
        yield Path(root), folders, names


@contextmanager
def disk_full_guard(path: object, advice: str = FULL_DISK_ADVICE) -> Iterator[None]:
    """Convert errors of a full disk, full quota or read-only file system to StorageUnavailable.

    Args:
        path: the path that the ``with`` block writes. It is used in the message.
        advice: what the user can do if no space is left.
    """
    try:
        yield
    except MoaDataError:
        raise
    # Catch every exception: a library may have wrapped the system error in its own exception.
    except Exception as error:
        cause = system_error(error)
        if cause is not None and cause.errno == errno.EROFS:
            raise read_only(cause.filename or path, errno.EROFS) from error
        if cause is None or cause.errno not in _FULL_ERRNOS:
            raise
        advice = _ADVICE[errno.EFBIG] if cause.errno == errno.EFBIG else advice
        raise StorageUnavailable(
            f"{path} cannot be written ({os.strerror(cause.errno)}). {advice}"
        ) from error


def system_error(error: BaseException | None) -> OSError | None:
    """Return the system error (OSError) that caused an exception, or None.

    The exception itself is checked first, then its causes one by one, until an OSError is found. An
    OSError for a wrong path or a damaged file does not count. A library may have turned the system
    error into an exception of its own. If the message of this exception contains the number of the
    system error or describes the system error in words, the result is a new OSError with this
    number.
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
    for words, number in _ERROR_WORDS.items():
        if words in lower:
            return number
    return None


def machine_trouble(error: BaseException) -> StorageUnavailable | None:
    """If the state of the machine caused an exception, return an error with advice.

    For example, the disk is full, rights are missing, or a limit is exceeded. For an exception with
    any other cause, return None.
    """
    cause = system_error(error)
    if cause is None or cause.errno not in _ADVICE:
        return None
    path = cause.filename if cause.filename is not None else "A file"
    reason = os.strerror(cause.errno)
    return StorageUnavailable(f"{path} cannot be used ({reason}).", _ADVICE[cause.errno])


def read_only(path: object, number: int) -> StorageUnavailable:
    """Return the error to raise for a path that cannot be written.

    ``number`` is the number of the system error, such as EROFS or EACCES.
    """
    return StorageUnavailable(
        f"{path} cannot be written ({os.strerror(number)}). Give yourself the "
        "right to write there, or choose another output folder."
    )


def nearest_folder(path: Path) -> Path:
    """Return the path itself if it exists, otherwise its closest parent folder that exists.

    The result is an absolute path.
    """
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_room(folder: object, n_bytes: int = 0, advice: str = FULL_DISK_ADVICE) -> None:
    """Raise an error if a folder cannot be written, or the disk has less than ``n_bytes`` free.

    The folder may be missing. If ``folder`` is not a ``Path``, it is in an object store, which has
    no size limit, and nothing is checked.
    """
    if not isinstance(folder, Path):
        return
    there = nearest_folder(folder)
    # On a read-only file system, os.access returns False for root too.
    if not os.access(there, os.W_OK):
        is_read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        raise read_only(folder, errno.EROFS if is_read_only else errno.EACCES)
    if (n_free := shutil.disk_usage(there).free) < n_bytes:
        raise StorageUnavailable(
            f"Writing to {folder} takes about {format_bytes(n_bytes)} of disk space, but only "
            f"{format_bytes(n_free)} are free. {advice}"
        )


# Outputs of earlier commands


def refuse_other_files(folder: Path, kind: str = "", leftovers: Collection[str] = ()) -> None:
    """Refuse an output folder with files that the command can neither continue nor replace.

    Args:
        folder: the output folder. It may be missing or empty.
        kind: words for an output that the command could continue, such as "a training run". The
            error message contains these words. The caller has already checked that the folder does
            not hold such an output. If the command never continues an earlier output, the argument
            is empty.
        leftovers: names of files that a killed command may have left. They may be replaced.

    Raises:
        OutputOccupied: the path is not a folder, or the folder holds other files.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputOccupied(
            f"{folder} is {kind_of(folder)}, expected a folder. Choose another output folder."
        )
    if set(os.listdir(folder)) <= set(leftovers):
        return
    expected = f"neither an empty folder nor {kind}" if kind else "not an empty folder"
    raise OutputOccupied(
        f"{folder} is {expected}. Choose another output folder, or empty this one."
    )


def refuse_other_inputs(
    out: Path,
    recorded: Mapping[str, Any],
    current: Mapping[str, Any],
    free_to_change: Collection[str] = (),
    advice: str = "Give the same settings as before, or choose another `out`.",
) -> None:
    """Refuse to continue an output that was started with other inputs.

    Args:
        out: the output folder or file, for the message.
        recorded: maps the name of each input to its value when the output was started. A missing
            name counts as None.
        current: maps the name of each input to its value in this command. Only these names are
            compared.
        free_to_change: names of inputs that may differ.
        advice: what the user can do.

    Raises:
        OutputOccupied: an input differs. The message lists both values of every such input.
    """
    changes: list[str] = []
    for name, value in current.items():
        earlier = recorded.get(name)
        if value != earlier and name not in free_to_change:
            changes.append(f"{name} was {earlier!r} and is now {value!r}")
    if changes:
        raise OutputOccupied(
            f"{out} was started with other settings ({'; '.join(changes)}). {advice}"
        )


# Locks use flock directly. A store needs shared locks, and error messages that name the process
# that holds a lock. The filelock package has no shared locks and does not name that process.


class LockHeld(Exception):
    """Another process holds the lock. ``holder`` is the name of that process."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def open_lock(path: Path) -> int:
    """Open the file of a lock. Create the file if it does not exist.

    Raises:
        StoreDamaged: the path is a symbolic link, which could lead to the file of another user.
    """
    try:
        # Open the file for reading and writing. On NFS, flock takes a byte-range lock, and an
        # exclusive byte-range lock needs a writable descriptor.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
        raise StoreDamaged(
            f"{path} is a symbolic link, but a lock file must be a regular file. Delete the link, "
            "and run the same command again."
        ) from error


def lock(fd: int, path: Path, shared: bool = False, waits: bool = False) -> None:
    """Take a lock, or change a lock between shared and exclusive.

    Args:
        fd: file descriptor that :func:`open_lock` returned. The lock is released when the
            descriptor is closed or the process ends. The file is not deleted.
        path: the file of the lock, for messages.
        shared: whether to take a shared lock instead of an exclusive one.
        waits: whether to wait until other processes have released the lock.

    Raises:
        LockHeld: another process or descriptor holds the lock. If a lock that ``fd`` already held
            was to be changed between shared and exclusive, ``fd`` has lost this lock.
        StorageUnavailable: the file system does not support locks, or it is full. If it is full,
            the name of this process cannot be written to the file.
    """
    try:
        fcntl.flock(
            fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB)
        )
    except OSError as error:
        if error.errno not in _HELD_ERRNOS:
            raise no_locks(path, error) from error
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip().partition("\n")[0]
        raise LockHeld(holder or "another process") from error
    if not shared:
        with disk_full_guard(path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def lock_file(path: Path, waits: bool = False) -> int:
    """Lock a file exclusively. Create the file if it does not exist.

    Returns:
        The descriptor that holds the lock until it is closed.
    """
    while True:
        fd = open_lock(path)
        try:
            lock(fd, path, waits=waits)
            # The previous holder may have deleted the file before it released the lock. A lock on
            # the deleted file has no effect, because the next process creates and locks a new file.
            exists = os.fstat(fd).st_nlink > 0
        except BaseException:
            os.close(fd)
            raise
        if exists:
            return fd
        os.close(fd)


def no_locks(path: Path, error: OSError) -> StorageUnavailable:
    """Return the error to raise if a file system does not support locks."""
    return StorageUnavailable(
        f"{path} cannot be locked ({os.strerror(error.errno or 0)}). Without locks, two processes "
        f"could write to {path.parent} at the same time. Use a file system that supports locks. "
        "For NFS, mount it without the option nolock and run its lock service."
    )


# Reading files that may be damaged or malicious


def open_regular(path: Path) -> int:
    """Open a regular local file for reading, and return its descriptor.

    FIFOs and devices are refused: opening a FIFO could block forever, and a device may have no end.

    Raises:
        StoreDamaged: the path is not a regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        # If the path is a socket, opening it fails with one of these two errors.
        if error.errno not in (errno.ENXIO, errno.EOPNOTSUPP):
            raise
        raise StoreDamaged(f"{path} is a socket or device, but must be a regular file") from error
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise StoreDamaged(f"{path} is {_KINDS.get(kind, 'a device')}, but must be a regular file")
    return fd


def kind_of(path: Path) -> str:
    """Return the kind of file at a path for messages, such as "a file", "a folder" or "a FIFO"."""
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, which does not exist"
    return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "a device")


def read_bounded(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        ValueError: the file is longer than ``max_bytes`` or not a regular file. Nothing was read.
    """
    with open(open_regular(path), "rb") as file:
        check_length(n_bytes := os.fstat(file.fileno()).st_size, max_bytes)
        return file.read(n_bytes)


def check_length(n_bytes: int, max_bytes: int | None) -> None:
    """Raise ValueError if ``n_bytes``, the size of a file, is greater than ``max_bytes``."""
    if max_bytes is not None and n_bytes > max_bytes:
        raise ValueError(
            f"it is too large: it has {n_bytes} bytes, but the limit is {max_bytes} bytes"
        )


def parse_object(text: bytes | str, allows_infinity: bool = False) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        text: the JSON text.
        allows_infinity: whether the numbers ``Infinity`` and ``-Infinity`` are allowed.

    Raises:
        ValueError: the text is not a JSON object, is too long or nested too deeply, or contains NaN
            or an infinite number that is not allowed.
    """
    check_length(len(text), MAX_JSON_BYTES)
    try:
        document = json.loads(text, parse_constant=partial(_parse_constant, allows_infinity))
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(
            f"it contains a JSON value of the type {type(document).__name__}, expected a JSON object"
        )
    return document


def whole_number(value: object, name: str, low: int = 0) -> int:
    """Check that a value is an integer from ``low`` to MAX_WHOLE_NUMBER, and return the value.

    Raises:
        ValueError: the value is anything else. The message contains ``name``.
    """
    if type(value) is not int or not low <= value <= MAX_WHOLE_NUMBER:
        raise ValueError(
            f"{name} is {_shown(value)}, expected a whole number from {low} to {MAX_WHOLE_NUMBER}"
        )
    return value


def relative_name(name: object) -> str:
    """Check that a name is a relative path that stays inside its folder, and return the name.

    Raises:
        ValueError: the name is absolute, too long or not a string, or one of its components is
            empty, ``.`` or ``..``.
    """
    if not isinstance(name, str) or "\0" in name or len(name) > 1024:
        raise ValueError(f"{_shown(name)} is not a relative path of at most 1,024 characters")
    for step in name.split("/"):
        if step in ("", ".", "..") or len(step.encode()) > 255:
            raise ValueError(f"{_shown(name)} is not a relative path without . and ..")
    return name


def _parse_constant(allows_infinity: bool, name: str) -> float:
    if name == "NaN" or not allows_infinity:
        raise ValueError(f"the number {name} is not allowed")
    return float(name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def parsing(
    trouble: str, error_class: type[Exception], advice: str = "Restore the file from a copy."
) -> Iterator[None]:
    """Convert any error of a library that parses a file to ``error_class`` with a one-line message.

    A system error is raised unchanged, because it does not mean that the file is damaged. If the
    system error has no file name, ``trouble`` is stored as its file name. For a MemoryError,
    NotEnoughMemory is raised.

    Args:
        trouble: the operation that failed, for the message, such as "cannot read FILE".
        error_class: class of the error to raise.
        advice: what the user can do.
    """
    # All exceptions are caught here, so the `with` block should contain only the call of the
    # library. For a malformed file, transformers raises nearly every builtin error, and tokenizers
    # raises a plain Exception.
    try:
        yield
    except (DrafterError, NotEnoughMemory, StorageUnavailable, error_class):
        raise
    except MemoryError as error:
        raise NotEnoughMemory(
            f"{trouble}. Either the memory is too small, or the file is damaged "
            f"({first_line(error)}). {advice}"
        ) from error
    except Exception as error:
        if (cause := system_error(error)) is not None:
            # The message that a command prints begins with the file name in the error. If the error
            # has no file name, use ``trouble``, which contains the name.
            if cause.filename is None:
                cause.filename = trouble
            raise cause from error
        reason = (
            f"it lacks {first_line(error)}" if isinstance(error, KeyError) else first_line(error)
        )
        raise error_class(f"{trouble} ({reason.rstrip('.')}). {advice}") from error
