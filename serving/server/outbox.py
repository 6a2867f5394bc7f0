"""What is to be sent on one stream: answers at once, contexts of drafters behind them, both within bounds.

Shapes: n positions, W numbers of a context.
"""

import asyncio
from collections import deque

import torch
from torch import Tensor

from ..protocol import moa_v1_pb2 as pb
from ..protocol.wire import bytes_per_position, encode

_PIECE_BYTES = 8192
"""Contexts sent at once. A piece on its way delays the answer behind it: by 3 ms at 20 Mbit/s."""
_MOST_MESSAGES = 64
"""Answers that wait to be sent, at which their reader is slow."""
_MOST_UNSENT = 32 << 20
"""Bytes of contexts that wait to be sent, likewise. Those of a prompt are many, and must not stop its answer."""
_MOST_KEPT = 4 << 20
"""Bytes of contexts that are kept when they were sent: a cut takes with it what was on its way."""


class ContextLog:
    """The contexts of one text, in order: those that wait to be sent, and the newest of those that were.

    Args:
        start: position of the first one to come.

    Attributes:
        first: position of the first that is here.
        stop: position behind the last one.
        released: position behind the last one that may be sent.
    """

    def __init__(self, start: int) -> None:
        self.first = self.stop = self.released = start
        self._rows: Tensor | None = None  # [capacity, W] bfloat16 on the host; row i is of position first + i

    def append(self, start: int, context: Tensor) -> None:
        """Add contexts [n, W] of the positions from ``start`` on; those that are here already are skipped."""
        assert start <= self.stop
        fresh = context[self.stop - start :]
        n_here, n_rows = self.stop - self.first, self.stop - self.first + len(fresh)
        if self._rows is None or n_rows > len(self._rows):
            grown = torch.empty(2 * n_rows, fresh.shape[1], dtype=torch.bfloat16)
            if self._rows is not None:
                grown[:n_here] = self._rows[:n_here]
            self._rows = grown
        self._rows[n_here:n_rows] = fresh
        self.stop += len(fresh)

    def release(self) -> None:
        """Let all that is here be sent.

        The contexts of a prompt come before the first token of its answer, and would fill a slow network by then.
        """
        self.released = self.stop

    def n_unsent_bytes(self, sent: int) -> int:
        """Count the bytes of the released positions from ``sent`` on."""
        return max(0, self.released - sent) * self._row_bytes

    def read(self, start: int, most: int) -> Tensor:
        """Return up to so many released contexts from a position on, which must be here: [n, W]."""
        assert self._rows is not None
        return self._rows[start - self.first : min(start + most, self.released) - self.first]

    def drop_sent(self, sent: int) -> None:
        """Forget the oldest of the contexts before a position, but not the newest of them."""
        n_useless = sent - self.first - _MOST_KEPT // max(1, self._row_bytes)
        if self._rows is not None and n_useless > (self.stop - self.first) // 2:  # seldom, for the rest is copied
            self._rows = self._rows[n_useless : self.stop - self.first].clone()
            self.first += n_useless

    @property
    def _row_bytes(self) -> int:
        return 0 if self._rows is None else 2 * self._rows.shape[1]


class Outbox:
    """Messages of one stream.

    Answers overtake contexts. It is *full* when its reader is slow: then the text's decoding is to be held, and nothing
    more to be read from the client.

    Attributes:
        failure: what ended the stream; None otherwise.
    """

    def __init__(self) -> None:
        self.failure: pb.Failure | None = None
        self._answers: deque[pb.ServerMessage] = deque()
        self._contexts: ContextLog | None = None
        self._codec, self._n_context, self._piece = "", 0, 1
        self._sequence = 0
        self._is_closed = False
        self._changed, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()

    def send_contexts(self, contexts: ContextLog, codec: str, n_context: int, width: int) -> None:
        """Send the contexts of a text from a position on, as they come."""
        self._contexts, self._codec, self._n_context = contexts, codec, n_context
        self._piece = max(1, _PIECE_BYTES // bytes_per_position(codec, width))
        self.wake()

    def put(self, message: pb.ServerMessage) -> None:
        """Add an answer, unless it is closed."""
        if not self._is_closed:
            self._answers.append(message)
        self.wake()

    def fail(self, code: str, message: str, ends: bool = False, answers: int = 0) -> None:
        """Say what went wrong; ``ends`` closes the outbox, once."""
        if self._is_closed:
            return
        failure = pb.Failure(code=code, message=message, ends=ends, answers=answers)
        self.put(pb.ServerMessage(failure=failure))
        if ends:
            self.failure = failure
            self._contexts = None
            self.close()

    def close(self) -> None:
        """Add nothing more; what is here is still sent."""
        self._is_closed = True
        self.wake()

    def wake(self) -> None:
        """Look again: contexts were released."""
        self._changed.set()
        if self.is_full:
            self._has_room.clear()

    @property
    def is_full(self) -> bool:
        """Whether the reader is slow."""
        unsent = self._contexts.n_unsent_bytes(self._n_context) if self._contexts is not None else 0
        return len(self._answers) >= _MOST_MESSAGES or unsent >= _MOST_UNSENT

    async def wait_for_room(self) -> None:
        """Wait until it is not full."""
        await self._has_room.wait()

    async def next(self) -> pb.ServerMessage | None:
        """Wait for the next message to send; None when it is closed and empty."""
        while True:
            message = self._take()
            if message is not None or self._is_closed:
                break
            self._changed.clear()
            await self._changed.wait()
        if message is not None:
            self._sequence += 1
            message.sequence = self._sequence
        if not self.is_full:
            self._has_room.set()
        return message

    def _take(self) -> pb.ServerMessage | None:
        if self._answers:
            return self._answers.popleft()
        if self._contexts is None or self._n_context >= self._contexts.released:
            return None
        part = self._contexts.read(self._n_context, self._piece)
        values = encode(self._codec, part)
        context = pb.Context(start=self._n_context, n_positions=len(part), codec=self._codec, values=values)
        self._n_context += len(part)
        self._contexts.drop_sent(self._n_context)
        return pb.ServerMessage(context=context)
