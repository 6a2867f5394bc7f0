"""Text of an answer that comes token by token: detokenized, taken back, and cut at stop strings."""

from collections.abc import Callable, Sequence

# Tokens after which text that ends inside a character is shown as it is: no character has that many
# bytes.
_LONGEST = 16


class Detokenizer:
    """The text of an answer that grows by tokens and may shrink again; ``decode`` leaves special tokens out."""

    # What a token adds depends on those before it: a byte may complete a character, and some
    # tokenizers drop the space
    # of a text's first word. So each step decodes the tokens since the last one that ended a text,
    # with and without the
    # new token, and no earlier ones.

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        # Of each token: where the window that it was decoded in begins, and where the tokens that
        # are not shown begin.
        self._windows: list[tuple[int, int]] = [(0, 0)]

    def append(self, token: int) -> str:
        """Add a token; returns the text that it adds, empty while a character is not complete."""
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
        """Take back all but the first tokens."""
        del self._tokens[n_tokens:], self._windows[n_tokens + 1 :]

    @property
    def rest(self) -> str:
        """What the last tokens would show that are not part of the text, because a character is not complete."""
        first, shown = self._windows[-1]
        return self._decode(self._tokens[first:])[len(self._decode(self._tokens[first:shown])) :]


class StopStrings:
    """Cuts a text that comes in pieces at the first of some stop strings that ends after so many pieces."""

    def __init__(self, stops: Sequence[str], n_before: int = 0) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._n_before = n_before
        self.is_found = False  # nothing is passed on from then on

    def push(self, text: str) -> str:
        """Take the next piece; returns what can be passed on, without an end that may begin a stop string."""
        if self.is_found or not self._stops:
            return "" if self.is_found else text
        n_held = len(self._held)
        text = self._held + text
        ends = (
            (text.find(stop, max(0, n_held + 1 - len(stop))), len(stop)) for stop in self._stops
        )
        found = [(at + n, at) for at, n in ends if at >= 0]
        self._n_before -= 1
        # the one that is complete first; of those that end together the longest
        if found and self._n_before < 0:
            self.is_found = True
            self._held = ""
            return text[: min(found)[1]]
        n_free = min(_possible_start(text, stop) for stop in self._stops)
        self._held = text[n_free:]
        return text[:n_free]

    def rest(self) -> str:
        """Return what was held back, when the text has ended."""
        return self._held


def _possible_start(text: str, stop: str) -> int:
    """Find where a stop string may begin whose end has not come; the length of the text if nowhere."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
