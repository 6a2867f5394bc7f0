"""Shows an answer while it comes: all of it on a terminal, where text is rewritten, elsewhere what is verified."""

import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.cells import cell_len

from ..text import printable
from .console import out

if TYPE_CHECKING:
    from ..serving.client.session import Event, Stats

_STYLES = {"accepted": "\x1b[32m", "bonus": "", "streamed": "", "unverified": "\x1b[2m"}
"""Drafts that the target agreed with are green, its own tokens plain, and what it has not seen yet is dim."""
_RESET, _ERASE_BELOW = "\x1b[0m", "\x1b[J"
_TAB = "    "


def moves_cursor() -> bool:
    """Whether standard output is a terminal on which text can be rewritten."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


class PlainAnswer:
    """Writes what is verified, as soon as it is: nothing has to be taken back in a pipe or a file."""

    def __init__(self) -> None:
        self._unverified: list[str] = []
        self._n_verified = 0

    def note(self, event: "Event") -> None:
        """Show an event."""
        from ..serving.client.session import RolledBack, Tokens, Verified

        if isinstance(event, Tokens):
            self._unverified += event.texts
            if "unverified" not in event.kinds:
                self._write(len(self._unverified))
        elif isinstance(event, Verified):
            self._write(event.stop - self._n_verified)
        elif isinstance(event, RolledBack):
            del self._unverified[event.stop - self._n_verified :]

    def end(self) -> None:
        """End the last line."""
        out.print()

    def _write(self, n_tokens: int) -> None:
        out.print("".join(self._unverified[:n_tokens]), end="")
        sys.stdout.flush()
        del self._unverified[:n_tokens]
        self._n_verified += n_tokens


class TerminalAnswer:
    """Writes on a terminal, and rewrites from the first token that changes; below stands a line of figures.

    Lines are broken here, never by the terminal, so that it is known where each token stands: how many rows and columns
    behind the beginning of the answer. The cursor moves by differences of these, which scrolling does not change.

    Args:
        write: writes text with control sequences; None for standard output.
        size: columns and rows; None for those of the terminal.
    """

    def __init__(
        self, write: Callable[[str], None] | None = None, size: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        self._write, self._size = write or out.write, size or _terminal_size
        self._texts: list[str] = []
        self._kinds: list[str] = []
        self._starts: list[tuple[int, int]] = [(0, 0)]  # row and column of each token, and of the end
        self._mode = "connecting"
        self._stats: Stats | None = None
        self._status, self._has_status = "", False

    def note(self, event: "Event") -> None:
        """Show an event."""
        from ..serving.client.session import LinkChanged, ModeChanged, RolledBack, Stats, Tokens, Verified

        if isinstance(event, Tokens):
            self._texts += event.texts
            self._kinds += event.kinds
            self._rewrite(event.start)
        elif isinstance(event, Verified):
            first = self._kinds.index("unverified")
            self._kinds[first : event.stop] = ["accepted"] * (event.stop - first)
            self._rewrite(first)
        elif isinstance(event, RolledBack):
            del self._texts[event.stop :], self._kinds[event.stop :]
            self._rewrite(event.stop)
        elif isinstance(event, Stats):
            self._stats = event
            self._show_status()
        elif isinstance(event, ModeChanged):
            self._mode = f"offline, {event.reason.rstrip('.')}" if event.mode == "offline" else event.mode
            self._show_status()
        elif isinstance(event, LinkChanged):
            self._show_status()

    def end(self) -> None:
        """Leave the answer and its figures as they are, and the cursor below."""
        self._clear_status()
        self._write(f"\r\n{_STYLES['unverified']}{self._status}{_RESET}\r\n")

    def _rewrite(self, first: int) -> None:
        """Write all tokens from one on anew."""
        _, height = self._size()
        end = self._starts[-1]
        top = end[0] - (height - 4)  # what has left the screen cannot be written again
        while first < len(self._texts) and self._starts[first][0] < top:
            first += 1
        start = max(self._starts[first], (top, 0))
        self._clear_status()
        parts = [self._move(end, start), _ERASE_BELOW]
        self._starts[first:] = [start]
        for text, kind in zip(self._texts[first:], self._kinds[first:], strict=True):
            shown, end = self._broken(text, self._starts[-1])
            self._starts.append(end)
            style = _STYLES[kind]
            parts.append(f"{style}{shown}{_RESET}" if style and shown else shown)
        self._write("".join(parts))
        self._show_status()

    def _broken(self, text: str, start: tuple[int, int]) -> tuple[str, tuple[int, int]]:
        """Break a text into lines of the terminal's width; returns it, and where it ends."""
        width, _ = self._size()
        (row, column), parts = start, list[str]()
        for character in printable(text).replace("\t", _TAB):
            n_cells = cell_len(character)
            if character == "\n" or column + n_cells >= width:
                row, column = row + 1, 0
                parts.append("\r\n")
                if character == "\n":
                    continue
            parts.append(character)
            column += n_cells
        return "".join(parts), (row, column)

    def _move(self, at: tuple[int, int], to: tuple[int, int]) -> str:
        up = f"\x1b[{at[0] - to[0]}A" if at[0] > to[0] else ""
        right = f"\x1b[{to[1]}C" if to[1] else ""
        return f"\r{up}{right}"

    def _show_status(self) -> None:
        """Write the line of figures, two rows below the text, and go back to the end of the text."""
        self._clear_status()
        parts = [self._mode]
        if (stats := self._stats) is not None and stats.n_tokens:
            parts.append(f"{stats.tokens_per_s:.1f} tokens/s")
            if stats.round_trip_ms is not None:
                parts.append(f"round trip {stats.round_trip_ms:.1f} ms")
            if stats.acceptance_length is not None:
                parts.append(f"{stats.acceptance_length:.2f} tokens a call")
            if stats.n_rolled_back:
                parts.append(f"{stats.n_rolled_back} taken back")
        width, _ = self._size()
        self._status = printable(" | ".join(parts))[: width - 1].rstrip()
        row, column = self._starts[-1]
        line = f"{_STYLES['unverified']}{self._status}{_RESET}"
        self._write(f"\r\n\r\n{line}{self._move((row + 2, 0), (row, column))}")
        self._has_status = True

    def _clear_status(self) -> None:
        if self._has_status:
            self._write(_ERASE_BELOW)
            self._has_status = False


def _terminal_size() -> tuple[int, int]:
    columns, rows = shutil.get_terminal_size()
    return max(columns, 20), max(rows, 4)
