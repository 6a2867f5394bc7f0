"""Entry point of the console script ``moa-data`` and of ``python -m moa_data``.

This module imports almost nothing at first, so that signals are already handled while a command
imports its modules.
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
    except SystemExit as end:  # Every command ends with SystemExit and its exit code.
        code = end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt as interrupt:
        # The signal came outside the code in ``commands.console`` that handles interruptions.
        end_command()
        sys.stderr.write("Error: interrupted. Run the same command again.\n")
        code = interruption_code(interrupt) or 0
    sys.exit(decide(code))


def _open_standard_streams() -> None:
    """Open the null device for standard streams that are closed.

    Otherwise the next file that is opened would get the number of the closed stream, for example of
    standard output, and text printed by a library would be written into this file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The system assigns the lowest free number: this one.
    # Python sets closed standard streams to None.
    sys.stdin = sys.stdin or os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


if __name__ == "__main__":
    main()
