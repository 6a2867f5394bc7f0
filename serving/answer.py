"""The text of one answer on its way from the engine's thread to a reader in the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from ..errors import ServingError
from .detokenizer import Detokenizer
from .engine.engine import Engine
from .engine.sequence import Commit, Request, Work

# Commits that wait for a reader when its sequence is held, and when it is released.
_HOLD_AT, _RELEASE_AT = 64, 8


class AnswerText:
    """The text of one request, piece by piece.

    Args:
        decode: turns token ids into text, without special tokens.

    Attributes:
        n_tokens: tokens that the engine has made.
        finish_reason: ``stop``, ``length`` or ``deadline`` when the answer has ended.
        first_s: seconds from the request to its first token; None before.

    Raises:
        RequestInvalid: the engine cannot serve the request.
        Overloaded: it takes no more.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        work: Work,
        stops: Sequence[str],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._commits: deque[Commit] = deque()
        self._has_come, self._is_held = asyncio.Event(), False
        self._error: ServingError | None = None
        self._text, self._stops = Detokenizer(decode), StopStrings(stops)
        self._began = time.perf_counter()
        self.n_tokens, self.finish_reason = 0, ""
        self.first_s: float | None = None
        # The engine calls both from its thread.
        self._id: int | None = engine.add(
            request,
            lambda commit: self._hand_over(self._arrive, commit),
            lambda error: self._hand_over(self._fail, error),
        )
        engine.set_work(self._id, work)

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text as it comes, each piece not empty.

        Raises:
            ServingError: the engine failed with this text.
        """
        while not self.finish_reason:
            await self._has_come.wait()
            if self._error is not None:
                raise self._error
            while self._commits and not self.finish_reason:
                if piece := self._take(self._commits.popleft()):
                    yield piece
            if not self._commits:
                self._has_come.clear()
            if self._is_held and len(self._commits) <= _RELEASE_AT:
                self._hold(False)

    async def whole(self) -> str:
        """Wait for the end, and return the text; raises as :meth:`pieces`."""
        return "".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Free the sequence; the answer has ended, or its reader has gone."""
        if self._id is not None:
            self._engine.remove(self._id)
            self._id = None

    def _take(self, commit: Commit) -> str:
        """Take the tokens of one call up to a stop string; returns the text that they add."""
        if commit.tokens and self.first_s is None:
            self.first_s = time.perf_counter() - self._began
        text = ""
        for token in commit.tokens:
            self.n_tokens += 1
            text += self._stops.push(self._text.append(token))
            if self._stops.is_found:
                self.finish_reason = "stop"
                return text
        self.finish_reason = commit.finish
        return text + self._stops.rest() if commit.finish else text

    def _hold(self, is_held: bool) -> None:
        if self._id is not None:
            self._is_held = is_held
            self._engine.hold(self._id, is_held)

    def _hand_over(self, take: Callable[..., None], what: Commit | ServingError) -> None:
        self._loop.call_soon_threadsafe(take, what)

    def _arrive(self, commit: Commit) -> None:
        self._commits.append(commit)
        self._has_come.set()
        if len(self._commits) >= _HOLD_AT and not self._is_held:
            self._hold(True)

    def _fail(self, error: ServingError) -> None:
        self._error = error
        self._has_come.set()


class StopStrings:
    """Passes a text that comes in pieces on, up to the first stop string.

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

    Attributes:
        length: of the longest end of the text that is a beginning of the string ``wanted``.
    """

    def __init__(self, wanted: str) -> None:
        self.wanted, self.length = wanted, 0
        # Length of a match -> length of the longest shorter one that ends at the same place. It grows with the matches,
        # so that a long string costs nothing before it begins to match.
        self._shorter = [0, 0]

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
