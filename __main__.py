"""Starts the command line: what the console script ``moa-data`` and ``python -m moa_data`` run.

It imports next to nothing itself, so that Ctrl-C ends every moment of a command alike, the imports included.
"""

import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

RAISE_AGAIN_S = 0.05


def main() -> None:
    """Run the command line; Ctrl-C gives one line and exit code 130, and is never lost."""
    sys.unraisablehook = _interrupt_again
    try:
        from .cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.stderr.write("Error: interrupted before anything was done. Run the same command again.\n")
        sys.exit(130)
    finally:
        # The outcome is decided; another Ctrl-C could only put a traceback behind it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt_again(unraisable: "UnraisableHookArgs") -> None:
    """Raise a Ctrl-C again that arrived inside a destructor or a weak reference's callback, where Python drops it."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    # To the very thread: a signal that another thread takes does not wake the main one from a sleep.
    timer = threading.Timer(RAISE_AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
