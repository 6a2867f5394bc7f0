"""Ends a text at the first stop string, wherever tokens begin and end."""

from collections.abc import Sequence


class StopStrings:
    """Passes on a text that comes in pieces, up to the first stop string.

    The end of the text so far is held back while it may be the beginning of a stop string.

    Attributes:
        is_found: whether a stop string has come; nothing is passed on from then on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matches = [_Match(stop) for stop in stops]
        self._held, self._n_held = "", 0  # a stop string, and how much of its beginning is held back
        self.is_found = False

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be passed on."""
        if self.is_found or not self._matches:
            return "" if self.is_found else text
        for n_taken, char in enumerate(text, 1):
            if found := [match.length for match in self._matches if match.is_completed_by(char)]:
                self.is_found = True
                return self._beginning(text, self._n_held + n_taken - max(found))
        longest = max(self._matches, key=lambda match: match.length)
        passed_on = self._beginning(text, self._n_held + len(text) - longest.length)
        self._held, self._n_held = longest.wanted, longest.length
        return passed_on

    def rest(self) -> str:
        """Return what was held back, when the text has ended."""
        n_held, self._n_held = self._n_held, 0
        return "" if self.is_found else self._held[:n_held]

    def _beginning(self, text: str, n: int) -> str:
        """The first characters of what is held back and a piece, without copying the rest."""
        return self._held[:n] if n <= self._n_held else self._held[: self._n_held] + text[: n - self._n_held]


class _Match:
    """Searches a text for one string by Knuth, Morris and Pratt: a few steps a character, however long the string.

    The table grows with the matches, so that a long string costs nothing before it begins to match.

    Attributes:
        wanted: the string.
        length: of the longest end of the text that is a beginning of the string.
    """

    def __init__(self, wanted: str) -> None:
        self.wanted, self.length = wanted, 0
        self._shorter = [0, 0]  # length of a match -> length of the longest shorter one that ends at the same place

    def is_completed_by(self, char: str) -> bool:
        """Take the next character; returns whether the string ends there."""
        self.length = self._extended(self.length, char)
        if self.length == len(self._shorter):
            self._shorter.append(self._extended(self._shorter[-1], char))
        return self.length == len(self.wanted)

    def _extended(self, length: int, char: str) -> int:
        while length and self.wanted[length] != char:
            length = self._shorter[length]
        return length + (self.wanted[length] == char)
