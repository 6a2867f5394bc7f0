"""Turns tokens into text one by one, and takes the last ones back."""

from collections.abc import Callable, Sequence

# Tokens after which text that ends inside a character is shown as it is: no character has that many bytes.
_LONGEST = 16


class Detokenizer:
    """The text of an answer that grows by tokens and may shrink again.

    What a token adds depends on those before it: a byte may complete a character, and some tokenizers drop the space of
    a text's first word. So each step decodes the tokens since the last one that ended a text, with and without the new
    token; the rest of the text is not looked at.

    Args:
        decode: turns token ids into text, without special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        # Of each token: where the window that it was decoded in begins, and where the tokens that are not shown begin.
        self._windows: list[tuple[int, int]] = [(0, 0)]
        self._texts: list[str] = []

    def append(self, token: int) -> str:
        """Add a token; returns the text that it adds, empty while a character is not complete."""
        self._tokens.append(token)
        first, shown = self._windows[-1]
        before = self._decode(self._tokens[first:shown])
        after = self._decode(self._tokens[first:])
        if after.endswith("\ufffd") and len(self._tokens) - shown < _LONGEST:
            text = ""
            self._windows.append((first, shown))
        else:
            text = after[len(before) :]
            self._windows.append((shown, len(self._tokens)))
        self._texts.append(text)
        return text

    def truncate(self, n_tokens: int) -> None:
        """Take back all but the first tokens."""
        del self._tokens[n_tokens:], self._texts[n_tokens:], self._windows[n_tokens + 1 :]

    @property
    def text(self) -> str:
        """The text of all tokens; a last character that is not complete is left out."""
        return "".join(self._texts)

    @property
    def rest(self) -> str:
        """What the last tokens would show that are not part of the text, because a character is not complete."""
        first, shown = self._windows[-1]
        return self._decode(self._tokens[first:])[len(self._decode(self._tokens[first:shown])) :]
