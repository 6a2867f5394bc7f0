"""Resources of this machine, within the limits of this process: cores and memory.

Standard library only, so that every package can import it.
"""

import contextlib
import ctypes
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_HUGE_PAGE = 1 << 21
_TWO_GIB_LESS_ONE = 2**31 - 1


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_first_process() -> bool:
    """Return whether this is the first of the processes that torchrun, SLURM or Lightning started.

    Only the first process prints messages and writes files.
    """
    # torchrun's RANK counts over all machines. Under SLURM, each machine may run one torchrun,
    # whose processes all have the machine's SLURM rank. Without either, Lightning numbers the
    # machines and the devices of a machine separately.
    names = ("RANK",) if "RANK" in os.environ else ("SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")
    return all(os.environ.get(name, "0") == "0" for name in names)


def free_memory() -> int | None:
    """Return the bytes that this process can allocate without swapping; None if unknown.

    The limits of its control groups are respected. The page cache counts as free.
    """
    free = [
        _kilobytes(Path("/proc/meminfo"), "MemAvailable"),
        *_left_in_cgroups(Path("/proc/self/cgroup"), _CGROUPS),
    ]
    return min((n_bytes for n_bytes in free if n_bytes is not None), default=None)


def resident_memory() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        n_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return n_pages * os.sysconf("SC_PAGE_SIZE")


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; 0 if it is not reported."""
    return _kilobytes(Path("/proc/self/status"), "VmHWM") or 0


def has_fast_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the CPU multiplies bfloat16 in hardware.

    Any other CPU is slower in bfloat16 than in float32.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _kilobytes(file: Path, name: str) -> int | None:
    """Read a line such as ``MemAvailable:  20 kB`` of a kernel file, and return bytes."""
    try:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return int(lines[name].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _left_in_cgroups(membership: Path, root: Path) -> list[int]:
    """Return the memory left within each limit of the process's control group and its parents."""
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
    """Return the memory left within one limit without the page cache; empty without a limit."""
    try:
        # If memory is not limited, cgroup version 2 has "max", which raises ValueError here, and
        # version 1 a number larger than any memory.
        n_limit, n_used = int(limit.read_text()), int(usage.read_text())
        counts = dict(line.split() for line in statistics.read_text().splitlines())
        return [max(0, n_limit - n_used + int(counts.get(cache, 0)))]
    except (OSError, ValueError):
        return []


def fix_sums() -> None:
    """Make MKL sum in one order for any number of threads, unless the user set ``MKL_CBWR``.

    Otherwise products of a few rows on a CPU differ in the last bits between one thread and two.
    MKL reads the variable at its first product, so call this before. It costs no measurable time.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def keep_freed_memory() -> None:
    """Ask glibc, if it is used, to keep large freed blocks instead of returning them to the system.

    Returned blocks would soon be allocated and page-faulted again. Page faults cost 17-33 % of a
    training step on a CPU, and a fifth of the speed of two encoding threads.
    """
    with contextlib.suppress(OSError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _TWO_GIB_LESS_ONE)


def use_huge_pages() -> None:
    """Ask Linux for huge pages for the large memory blocks of this process; takes seconds per GB.

    A call of a few tokens reads every weight once. With pages of 4 KiB, a core reads only two
    thirds as many bytes per second from memory: serving a small target on a CPU takes 5-7 % longer.
    """
    with contextlib.suppress(OSError):
        madvise = ctypes.CDLL("libc.so.6").madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, _, _, inode, *name = line.split()
            start, stop = (int(address, 16) for address in addresses.split("-"))
            if (
                permissions == "rw-p"
                and inode == "0"
                and name in ([], ["[heap]"])
                and stop - start >= _HUGE_PAGE
            ):
                # Request huge pages for memory that is allocated later, then collapse the existing
                # pages.
                for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                    madvise(start, stop - start, advice)
