"""One answer on its way from the engine's thread to a reader in the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from ...errors import ServingError
from ..detokenizer import Detokenizer
from ..engine.engine import Engine
from ..engine.sequence import Commit, Request, Work
from .stop_strings import StopStrings

_HOLD_AT, _GO_ON_AT = 64, 8
"""Commits that wait for a reader when its sequence is held, and when it goes on."""


class Answer:
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
        self._id: int | None = engine.add(request, self._hand_commit, self._hand_error)
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
            if self._is_held and len(self._commits) <= _GO_ON_AT:
                self._hold(False)

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

    # In the engine's thread

    def _hand_commit(self, commit: Commit) -> None:
        self._loop.call_soon_threadsafe(self._arrive, commit)

    def _hand_error(self, error: ServingError) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    # In the event loop

    def _arrive(self, commit: Commit) -> None:
        self._commits.append(commit)
        self._has_come.set()
        if len(self._commits) >= _HOLD_AT and not self._is_held:
            self._hold(True)

    def _fail(self, error: ServingError) -> None:
        self._error = error
        self._has_come.set()
