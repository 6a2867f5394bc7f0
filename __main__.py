"""Starts the command line: what the console script ``moa-data`` and ``python -m moa_data`` run.

It imports next to nothing itself, so that a signal ends every moment of a command alike, the imports included.
"""

import contextlib
import os
import resource
import sys
import threading

from .commands.signals import ignore_signals, interruption_code, raise_signals
from .machine import is_first_process

_M_ARENA_MAX = -8  # of malloc.h


def main() -> None:
    """Run the command line; Ctrl-C, SIGTERM and SIGHUP give one line and an exit code, and are never lost."""
    done = "before anything was done"
    try:
        raise_signals()
        _open_standard_streams()
        _check_threads()
        from .cli import main as command_line

        done = "at its very end"
        command_line()
    except KeyboardInterrupt as interrupt:
        ignore_signals()
        if is_first_process():
            sys.stderr.write(f"Error: interrupted {done}. Run the same command again.\n")
        sys.exit(interruption_code(interrupt))
    except SystemExit as end:
        ignore_signals()
        if end.code == 2 and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            os._exit(2)  # libraries that ran out of memory crash when they are taken down, with another exit code
        raise
    except MemoryError:
        sys.stderr.write("Error: out of memory, too little even to say where. Raise the limit (ulimit -v).\n")
        sys.exit(2)
    finally:
        ignore_signals()


def _open_standard_streams() -> None:
    """Give streams that were closed to the null device.

    Otherwise the next file that is opened gets the number of standard output, and what a library prints lands in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    # Python has set those to None.
    sys.stdin = sys.stdin or os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _check_threads() -> None:
    """Exit with code 2 where too few threads can be started for the libraries.

    They would end the process themselves: libgomp with exit code 1, OpenBLAS with a SIGINT, both with another meaning.
    A child tries, so that this process keeps the address space that threads would reserve in it.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    n_cores = int(chosen) if chosen.isdecimal() else len(os.sched_getaffinity(0))
    # OpenBLAS has a pool, and libgomp one for each thread that computes: the main, autograd's and the one that reads.
    n_threads = 4 * n_cores + 16
    try:
        child = os.fork()
        if child == 0:
            ignore_signals()  # they are the parent's
            try:
                os._exit(not _can_start(n_threads))
            finally:
                os._exit(1)
        failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except OSError:
        failed = 1
    if failed:
        sys.stderr.write(
            f"Error: this process can't start the {n_threads} threads that may be needed with {n_cores} in a pool. "
            "Raise the limit of processes (ulimit -u, or the container's) or of memory (ulimit -v), or set "
            "OMP_NUM_THREADS=1.\n"
        )
        sys.exit(2)


def _can_start(n_threads: int) -> bool:
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        # One malloc arena: glibc reserves 64 MiB of address space for each further one, and does without where it must.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    end = threading.Event()
    try:
        for _ in range(n_threads):
            threading.Thread(target=end.wait, daemon=True).start()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main()
