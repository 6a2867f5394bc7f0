"""Detokenize an answer token by token, roll it back, and cut it at stop strings."""

from collections.abc import Callable, Sequence

# If the text ends with an incomplete character, the text of the last tokens is held back until the
# character is complete. If the character is still incomplete after this many tokens, the text is
# returned anyway. These tokens have more bytes than any character, so their bytes must be invalid.
_LONGEST = 16


class Detokenizer:
    """The text of an answer that grows token by token and can be rolled back.

    ``decode`` turns tokens into text. It must skip special tokens.
    """

    # The text of a token depends on the tokens before it. For example, the token may have the last
    # byte of a character, and some tokenizers drop the space before the first word of a text. So
    # each step decodes a window of the last tokens twice, with and without the new token. The
    # difference is the new text. The window begins after a token at which the text was complete.
    # The tokens before the window are not decoded again.

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        # Item n describes the state after n tokens. It is a pair: the index at which the window of
        # the next token begins, and the number of tokens whose text was returned.
        self._windows: list[tuple[int, int]] = [(0, 0)]

    def append(self, token: int) -> str:
        """Add a token, and return the new text. It is empty while a character is incomplete."""
        self._tokens.append(token)
        first, shown = self._windows[-1]
        before = self._decode(self._tokens[first:shown])
        after = self._decode(self._tokens[first:])
        if after.endswith("\ufffd") and len(self._tokens) - shown < _LONGEST:
            self._windows.append((first, shown))
            return ""
        self._windows.append((shown, len(self._tokens)))
        return after[len(before) :]

    def truncate(self, n_tokens: int) -> None:
        """Remove all tokens except the first ``n_tokens``."""
        del self._tokens[n_tokens:], self._windows[n_tokens + 1 :]

    @property
    def rest(self) -> str:
        """The text of the last tokens that is held back because a character is incomplete."""
        first, shown = self._windows[-1]
        return self._decode(self._tokens[first:])[len(self._decode(self._tokens[first:shown])) :]


class StopStrings:
    """Cuts a text at its first stop string. The text arrives in pieces.

    Args:
        stops: the stop strings.
        n_before: a stop string is ignored if it ends in one of the first ``n_before`` pieces. This
            guarantees a minimum length of the answer.
    """

    def __init__(self, stops: Sequence[str], n_before: int = 0) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._n_before = n_before
        # Whether a stop string was found. The text after the stop string is not passed on.
        self.is_found = False

    def push(self, text: str) -> str:
        """Take the next piece of the text. Return the text that cannot be part of a stop string.

        The end of the text is held back if a stop string may begin there.
        """
        if self.is_found or not self._stops:
            return "" if self.is_found else text
        n_held = len(self._held)
        text = self._held + text
        # For each stop string that occurs in the text, the list has a pair: the end and the start
        # of the first occurrence.
        matches: list[tuple[int, int]] = []
        for stop in self._stops:
            start = text.find(stop, max(0, n_held + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), start))
        self._n_before -= 1
        # Cut at the stop string that ends first. If several end at the same character, cut at the
        # longest.
        if matches and self._n_before < 0:
            self.is_found = True
            self._held = ""
            return text[: min(matches)[1]]
        n_free = min(_possible_start(text, stop) for stop in self._stops)
        self._held = text[n_free:]
        return text[:n_free]

    def rest(self) -> str:
        """Return the text that is held back. Call this when the answer has ended."""
        return self._held


def _possible_start(text: str, stop: str) -> int:
    """Return the first index at which the rest of the text is the beginning of the stop string.

    If no such index exists, return the length of the text.
    """
    for start in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[start:]):
            return start
    return len(text)
