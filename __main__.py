"""Entry point of the console script ``moa-data`` and of ``python -m moa_data``.

This module installs the signal handlers before it imports the other modules. The imports take
seconds, and a signal that arrives during the imports must be handled, too.
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
    except SystemExit as end:  # Every command raises SystemExit with its exit code.
        code = end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt as interrupt:
        # While ``commands.console`` runs the command, it handles signals itself. This signal arrived
        # just before or just after the command.
        end_command()
        sys.stderr.write("Error: interrupted. Run the same command again.\n")
        code = interruption_code(interrupt) or 0
    sys.exit(decide(code))


def _open_standard_streams() -> None:
    """Open the null device for standard streams that are closed.

    If standard output is closed, for example, the next file that is opened gets the descriptor of
    standard output. If a library then printed text, the text would be written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The null device gets the lowest free descriptor, which is ``number``.
            os.open(os.devnull, os.O_RDWR)
    # If a standard stream was closed, Python has set it to None.
    sys.stdin = sys.stdin or os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


if __name__ == "__main__":
    main()
