"""Ends a text at the first stop string, wherever tokens begin and end."""

from collections.abc import Sequence


class StopStrings:
    """Passes on a text that comes in pieces, up to the first stop string.

    The end of the text so far is held back while it may be the beginning of a stop string.

    Attributes:
        is_found: whether a stop string has come; nothing is passed on from then on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.is_found = False

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be passed on."""
        if self.is_found:
            return ""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_found, self._held = True, ""
            return text[: min(found)]
        n_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def rest(self) -> str:
        """Return what was held back, when the text has ended."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that is a beginning of a stop string, and not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
