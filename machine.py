"""Cores and memory that this process may use, and settings that make memory accesses faster.

This module imports only the standard library, so that every package can import it.
"""

import contextlib
import ctypes
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_HUGE_PAGE = 1 << 21
_TWO_GIB_LESS_ONE = 2**31 - 1


def usable_cores() -> int:
    """Return the number of CPU cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_first_process() -> bool:
    """Return whether this is the first of the processes that torchrun, SLURM or Lightning started.

    If the process was not started by any of these programs, the result is true. Only the first
    process prints messages and writes files.
    """
    # torchrun sets RANK to the number of the process, counted over all machines. SLURM may start
    # one torchrun per machine. All processes of a machine then have the same SLURM rank, so the
    # SLURM rank is ignored if RANK is set. Without torchrun and SLURM, Lightning sets NODE_RANK
    # (number of the machine) and LOCAL_RANK (number of the device on the machine).
    names = ("RANK",) if "RANK" in os.environ else ("SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")
    return all(os.environ.get(name, "0") == "0" for name in names)


def free_memory() -> int | None:
    """Return the number of bytes that this process can allocate without swapping.

    The limits of the process's control groups (cgroups) are respected. The page cache counts as
    free. The result is None if the system does not report the free memory.
    """
    free = [
        _kilobytes(Path("/proc/meminfo"), "MemAvailable"),
        *_left_in_cgroups(Path("/proc/self/cgroup"), _CGROUPS),
    ]
    return min((n_bytes for n_bytes in free if n_bytes is not None), default=None)


def resident_memory() -> int:
    """Return the resident memory of this process in bytes, or 0 if the system does not report it."""
    return _kilobytes(Path("/proc/self/status"), "VmRSS") or 0


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes, or 0 if it is unknown."""
    return _kilobytes(Path("/proc/self/status"), "VmHWM") or 0


def _kilobytes(file: Path, name: str) -> int | None:
    """Read a size from a line of a kernel file, such as ``MemAvailable:  20 kB``, in bytes.

    The result is None if the file or the line does not exist.
    """
    try:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return int(lines[name].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _left_in_cgroups(membership: Path, root: Path) -> list[int]:
    """Return a list of numbers: the bytes that are left within each memory limit of this process.

    A process is in a control group (cgroup), which may be inside other control groups. The memory
    limits of all these groups apply to the process, so all of them are included.

    Args:
        membership: the file that lists the control groups of the process.
        root: the folder in which control groups are mounted.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return []
    left = []
    for _, controllers, group in lines:
        if controllers == "":
            top = root
            limit = "memory.max"
            usage = "memory.current"
            cache = "file"
        elif "memory" in controllers.split(","):
            top = root / "memory"
            limit = "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
            cache = "total_cache"
        else:
            continue
        folder = top / group.lstrip("/")
        while folder.is_relative_to(top):
            left += _left_in(folder / limit, folder / usage, folder / "memory.stat", cache)
            folder = folder.parent
    return left


def _left_in(limit: Path, usage: Path, statistics: Path, cache: str) -> list[int]:
    """Return a list with a single number: the bytes that are left within one memory limit.

    The page cache counts as free. If memory is not limited, the list is empty.
    """
    try:
        # If memory is not limited, the limit file of cgroup version 2 contains "max". Converting
        # this text to an integer raises ValueError. The limit file of version 1 then contains a
        # number larger than any memory, so the result is also larger and limits nothing.
        n_limit, n_used = int(limit.read_text()), int(usage.read_text())
        counts = dict(line.split() for line in statistics.read_text().splitlines())
        return [max(0, n_limit - n_used + int(counts.get(cache, 0)))]
    except (OSError, ValueError):
        return []


def fix_sums() -> None:
    """Make the results of MKL independent of the number of threads.

    MKL adds the terms of a product in an order that depends on the number of threads. For matrix
    products of a few rows, one thread and two threads then give results that differ in the last
    bits. This function sets the environment variable ``MKL_CBWR``, unless the user has set it. Call
    the function before the first matrix product, at which MKL reads the variable. The setting costs
    no measurable time.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def keep_freed_memory() -> None:
    """Ask glibc to keep large freed blocks instead of returning them to the system.

    Returned memory would soon be allocated again, which causes page faults. These page faults take
    17-33 % of the time of a training step on a CPU, and make two encoding threads slower by a
    fifth. If the C library is not glibc, this function does nothing.
    """
    with contextlib.suppress(OSError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _TWO_GIB_LESS_ONE)


def use_huge_pages() -> None:
    """Ask Linux to use huge pages for the large memory blocks of this process.

    A forward call of the target for a few tokens reads every weight once. With pages of 4 KiB
    instead of huge pages, a core reads only two thirds as many bytes per second from memory, and
    serving a small target on a CPU takes 5-7 % longer. This function takes several seconds per GB.
    """
    with contextlib.suppress(OSError):
        madvise = ctypes.CDLL("libc.so.6").madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, _, _, inode, *name = line.split()
            first, last = addresses.split("-")
            start = int(first, 16)
            stop = int(last, 16)
            if (
                permissions == "rw-p"
                and inode == "0"
                and name in ([], ["[heap]"])
                and stop - start >= _HUGE_PAGE
            ):
                # Request huge pages for memory that is allocated later. Then merge the existing
                # small pages into huge pages.
                for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                    madvise(start, stop - start, advice)
