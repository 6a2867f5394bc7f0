"""Starts the command line: what the console script ``moa-data`` and ``python -m moa_data`` run.

It imports next to nothing itself, so that a signal ends every moment of a command alike, the imports included.
"""

import os
import sys

from .commands.signals import begin_command, decide, end_command, interruption_code, watch_signals


def main() -> None:
    """Run the command line and exit."""
    _open_standard_streams()
    watch_signals()
    from .cli import main as command_line

    try:
        begin_command()
        command_line()
        code = 0
    except SystemExit as end:  # as every command ends, with its exit code
        code = end.code if isinstance(end.code, int) else 0
    # came before or after what the command line handles itself
    except KeyboardInterrupt as interrupt:
        end_command()
        sys.stderr.write("Error: interrupted. Run the same command again.\n")
        code = interruption_code(interrupt) or 0
    sys.exit(decide(code))


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


if __name__ == "__main__":
    main()
