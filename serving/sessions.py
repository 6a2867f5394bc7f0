"""Drafting sessions: the engine decodes one sequence per session when the client requests it.

A *sequence* is the tokens of one prompt and its answer. A *stream* is one gRPC call, in which
client and server exchange messages. If the connection is lost, the session continues on the
client's next stream. A *context* is the data that the client's drafter reads about one position of
the sequence.

This module runs in the event loop. Commits (the results of target calls) come from the engine's
thread. Messages are processed in order, one at a time, because the meaning of a message depends on
the tokens that are committed when it is processed. The states of a session::

    idle        the engine has nothing to do for the session
    verifying   the engine works on one Verify message, and its next commit answers the message
    running     the engine decodes, and each commit is sent
    stopping    the engine was told to stop, and confirms this after its last commit

Messages to send are queued in the :class:`Stream`. The contexts are kept in the session, in its
:class:`ContextLog`, and the stream reads them from there. So if the connection is lost, the next
stream can continue with the contexts that the client lacks.

Shapes: n positions, W numbers of a context.
"""

import asyncio
import enum
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import Overloaded, RequestInvalid
from . import moa_v1_pb2 as pb
from .engine.engine import Engine
from .engine.sequence import Commit, Request, Work
from .post import call_in
from .wire import bytes_per_position, encode, n_common

# Maximum number of messages of one client that wait for the engine. A client that drafts ahead
# sends two messages before it gets an answer.
_MAX_PENDING = 16
_RUNS = {pb.RUN_MODE_PLAIN: Work.PLAIN, pb.RUN_MODE_SPECULATE: Work.SPECULATE}
# Maximum bytes of contexts (data for the client's drafter) in one message. Other messages wait
# while such a message is sent, which takes 3 ms at 20 Mbit/s.
_CHUNK_BYTES = 8192
# If this many messages wait to be sent to a client, the client counts as a slow reader, and its
# sequence is paused.
_MAX_MESSAGES = 64
# If this many bytes of contexts (data for the client's drafter) wait to be sent, the client counts
# as a slow reader, too. The number is high, so that the many contexts of a prompt do not pause the
# decoding of the answer.
_MAX_UNSENT = 32 << 20
# Maximum bytes of contexts (data for the client's drafter) that the server keeps after it has sent
# them. If the connection is lost, some of these contexts have not arrived, and the server sends
# them again.
_MAX_KEPT = 4 << 20


_State = enum.Enum("_State", "IDLE VERIFYING RUNNING STOPPING")


class ServerSession:
    """The server's side of a session: one sequence, and the client's requests for it.

    Args:
        opener: the stream on which the client opened the session.
        engine: the engine that decodes the sequence.
        request: the client's prompt and settings.
        on_lost: a function that is called if the engine fails to decode the sequence.
    """

    def __init__(
        self,
        opener: "Stream",
        engine: Engine,
        request: Request,
        on_lost: Callable[["ServerSession"], None],
    ) -> None:
        self.id = secrets.token_urlsafe()
        self.owner = opener.owner
        self.counted_by = opener.counted_by
        # The time (``time.monotonic()``) of the last message from or to the client. The gRPC server
        # sets it.
        self.used_s = 0.0
        self.stream: Stream | None = None
        # A stream holds this lock while it resumes the session, so that no other stream resumes it
        # at the same time.
        self.resuming = asyncio.Lock()
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        # Three numbers about the Verify message that the engine works on. The first is the number
        # of the message. The second is the position of the first draft in the message. The third
        # counts the drafts that were already committed when the server processed the message.
        self._asked = (0, 0, 0)
        self._state = _State.IDLE
        self._tag = 0
        self._pending: deque[tuple[int, pb.Run | pb.Verify]] = deque()
        self._is_held = self._ends_when_idle = False
        # This event is set while the engine has no work for the session.
        self.stopped = asyncio.Event()
        self.stopped.set()
        # Number of tokens that the client has, including tokens that are still on their way.
        self._n_sent = 0
        self.begin(request)

    def begin(self, request: Request) -> None:
        """Add the sequence to the engine. It is idle until a message of the client is processed."""
        self._sequence_id: int | None = self._engine.add(request, self._hand_commit)
        self.request = request
        self.tokens = list(request.tokens)
        self.finish = ""
        self.contexts = ContextLog(request.n_context)

    def restart(self, request: Request) -> None:
        """Add the sequence to the engine again, so that the engine prefills it again.

        No stream may be attached to the session.
        """
        before = self._sequence_id
        self.begin(replace(request, tokens=max(tuple(self.tokens), request.tokens, key=len)))
        if before is not None:
            self._engine.remove(before)

    # The methods below concern the stream.

    def check_text(self, request: Request) -> None:
        """Raise RequestInvalid if a client's request to resume this session does not match it.

        The request must have the same settings and the same prompt as the session. It may have
        fewer or more tokens than the session. The shorter of the two must be the beginning of the
        longer one.
        """
        # If the server has lost the session, it has no tokens to compare with the client's tokens.
        # Then the client's tokens become the sequence of a new session.
        known = self.request
        n_both = min(len(self.tokens), len(request.tokens))
        settings = (known.n_prompt, known.max_new_tokens, known.sampling, known.seed)
        requested = (request.n_prompt, request.max_new_tokens, request.sampling, request.seed)
        if (
            settings != requested
            or n_both < known.n_prompt
            or list(request.tokens[:n_both]) != self.tokens[:n_both]
        ):
            raise RequestInvalid(
                "the session cannot be resumed, because its prompt, settings or tokens differ "
                "from those of the request; open a new session."
            )

    def must_rebuild(self, request: Request) -> bool:
        """Return whether the sequence must be prefilled again when a client resumes the session.

        This is necessary if the client needs contexts (data for its drafter) that the server no
        longer has, or if the client has more tokens than the session.
        """
        if self.finish:
            return False
        lacks_contexts = request.wants_context and (
            not self.request.wants_context
            or self.request.drafter != request.drafter
            or request.n_context < self.contexts.first
        )
        return lacks_contexts or len(request.tokens) > len(self.tokens)

    def attach(self, stream: "Stream", n_known: int) -> None:
        """Send all further messages to this stream. First send the tokens that the client lacks.

        Args:
            stream: the stream.
            n_known: number of tokens that the client has.
        """
        self.stream = stream
        self._n_sent = n_known
        self._ends_when_idle = False
        if n_known < len(self.tokens) or self.finish:
            self._send_tokens()

    def detach(self) -> None:
        """Detach from the stream, drop pending messages, and stop the engine."""
        self.stream = None
        self._pending.clear()
        self.update_hold()
        self._stop()

    def end_when_idle(self) -> None:
        """Close the stream as soon as all messages of the client are answered."""
        self._ends_when_idle = True
        self._continue()

    def take(self, sequence: int, body: pb.Run | pb.Verify) -> None:
        """Queue a message of the client. It is processed after all earlier messages.

        Args:
            sequence: the number of the message.
            body: the message.

        Raises:
            Overloaded, RequestInvalid: the message is refused.
        """
        if self._sequence_id is None and not self.finish:
            return  # The engine has failed to decode the sequence, and a Failure message was sent.
        if not self.request.n_prompt <= body.start <= len(self.tokens):
            raise RequestInvalid(
                f"start is position {body.start} of the sequence, expected a position from "
                f"{self.request.n_prompt} (the end of the prompt) to {len(self.tokens)} (the end "
                "of the session's tokens). Open the session again with the tokens that you have."
            )
        if isinstance(body, pb.Run) and body.mode not in _RUNS:
            raise RequestInvalid(
                f"the mode of the Run message is {body.mode}, expected RUN_MODE_PLAIN or "
                "RUN_MODE_SPECULATE."
            )
        if len(self._pending) >= _MAX_PENDING:
            raise Overloaded(
                f"{_MAX_PENDING} messages of this session are not answered yet, which is the "
                "limit; wait for the answers."
            )
        self._pending.append((sequence, body))
        if self._state is _State.RUNNING:
            self._stop()
        self._continue()

    def update_hold(self) -> None:
        """Pause the sequence in the engine while the client reads slowly. Otherwise resume it."""
        is_full = self.stream is not None and self.stream.is_full
        if self._sequence_id is not None and is_full != self._is_held:
            self._engine.hold(self._sequence_id, is_full)
        self._is_held = is_full

    def close(self) -> None:
        """Remove the sequence from the engine."""
        if self._sequence_id is not None:
            self._engine.remove(self._sequence_id)
            self._sequence_id = None
        self._pending.clear()
        self._set_state(_State.IDLE)

    # The methods below process messages of the client.

    def _continue(self) -> None:
        while self._state is _State.IDLE and self._pending:
            sequence, body = self._pending.popleft()
            if isinstance(body, pb.Verify):
                self._verify(sequence, body)
            else:
                self._run(body)
        if self._state is _State.IDLE and self._ends_when_idle and self.stream is not None:
            self.stream.close()

    def _verify(self, sequence: int, body: pb.Verify) -> None:
        drafts = body.tokens
        known = self.tokens[body.start :]
        n_agreed = n_common(drafts, known)
        if n_agreed < len(known) or self.finish:
            self._send_tokens(body.start, n_agreed, sequence)
            return
        try:
            self._start(_State.VERIFYING, Work.VERIFY, drafts[n_agreed:])
            self._asked = (sequence, body.start, n_agreed)
        except RequestInvalid as error:
            self.send_failure("invalid", str(error), answers=sequence)

    def _run(self, body: pb.Run) -> None:
        if self.finish or self._n_sent < len(self.tokens):
            self._send_tokens()
        if not self.finish:
            self._start(_State.RUNNING, _RUNS[body.mode])

    def _stop(self) -> None:
        if self._state in (_State.RUNNING, _State.VERIFYING):
            self._start(_State.STOPPING, Work.IDLE)

    def _start(self, state: _State, work: Work, drafts: Sequence[int] = ()) -> None:
        assert self._sequence_id is not None
        self._tag += 1
        self._engine.set_work(self._sequence_id, work, drafts, self._tag)
        self._set_state(state)

    def _set_state(self, state: _State) -> None:
        self._state = state
        self.stopped.set() if state is _State.IDLE else self.stopped.clear()

    def _hand_commit(self, commit: Commit) -> None:  # The engine's thread calls this method.
        # Copy the contexts (data for the client's drafter) to the host here, in the engine's
        # thread. So the event loop never waits for a GPU.
        if commit.context is not None:
            commit = replace(commit, context=commit.context.to("cpu", torch.bfloat16))
        call_in(self._loop, self._take_commit, commit)

    def _take_commit(self, commit: Commit) -> None:
        if commit.sequence_id != self._sequence_id:
            return  # Ignore the commit of a sequence that was removed meanwhile.
        if commit.error is not None:
            self._sequence_id = None
            # Do not send the details of the error to the client. Only the server's log contains
            # them.
            self.send_failure(
                "internal",
                "the server failed while it decoded this session; open the session again.",
                ends=True,
            )
            self._on_lost(self)  # This callback of the gRPC server closes the session.
            return
        if commit.context is not None:
            self.contexts.append(commit.context_start, commit.context)
        self.tokens += commit.tokens
        if commit.finish:
            self.finish = commit.finish
            self._engine.remove(commit.sequence_id)
            self._sequence_id = None
        # Whether the target has read the whole prompt, so that all contexts of the prompt (data for
        # the client's drafter) exist. Contexts are not sent earlier, because on a slow network they
        # would delay the first tokens of the answer.
        is_read = commit.context is not None and self.contexts.stop == len(self.tokens) - 1
        if commit.tokens or commit.finish or is_read:
            self.contexts.release()
            if self.stream is not None:
                self.stream.wake()
        if commit.tokens or commit.finish:
            if self._state is _State.VERIFYING:
                sequence, start, n_agreed = self._asked
                self._send_tokens(start, n_agreed + commit.n_accepted, sequence, commit)
                self._set_state(_State.IDLE)
            else:
                self._send_tokens(commit.start, commit.n_accepted, commit=commit)
        if commit.finish or (self._state is _State.STOPPING and commit.answers == self._tag):
            self._set_state(_State.IDLE)
        self.update_hold()
        self._continue()

    # The methods below send messages to the client.

    def _send_tokens(
        self,
        start: int | None = None,
        n_accepted: int = 0,
        answers: int = 0,
        commit: Commit | None = None,
    ) -> None:
        """Send the tokens from position ``start`` on. By default, send all unsent tokens."""
        if self.stream is None:
            return
        start = self._n_sent if start is None else start
        committed = pb.Committed(
            start=start,
            tokens=self.tokens[start:],
            n_accepted=n_accepted,
            answers=answers,
            finish=self.finish,
        )
        if commit is not None:
            committed.call_us = _microseconds(commit.call_s)
            committed.queue_us = _microseconds(commit.queue_s)
        self._n_sent = len(self.tokens)
        self.stream.put(pb.ServerMessage(committed=committed))

    def send_failure(self, code: str, message: str, ends: bool = False, answers: int = 0) -> None:
        """Report a failure to the client, if a stream is attached."""
        if self.stream is not None:
            self.stream.fail(code, message, ends, answers)


def _microseconds(seconds: float) -> int:
    """Convert seconds to microseconds. The result is limited to the range of a uint32 field."""
    return min(round(max(0.0, seconds) * 1e6), (1 << 32) - 1)


class ContextLog:
    """Contexts of one sequence, by position. The log keeps all unsent and the newest sent contexts.

    A context is the data that the client's drafter reads about one position.
    """

    def __init__(self, start: int) -> None:
        # ``first`` is the position of the first context in the log. Only contexts before position
        # ``released`` may be sent.
        self.first = self.released = start
        # The context of each position from ``first`` on: W numbers in bfloat16, on the host.
        self._rows: list[Tensor] = []

    @property
    def stop(self) -> int:
        """The position after the last position in the log."""
        return self.first + len(self._rows)

    def append(self, start: int, context: Tensor) -> None:
        """Append contexts [n, W] of n consecutive positions, beginning with ``start``.

        Positions that are in the log already are skipped.
        """
        assert start <= self.stop
        self._rows += context[self.stop - start :].unbind()

    def release(self) -> None:
        """Allow all contexts in the log to be sent."""
        # Contexts are not sent at the time when they are appended. The contexts of a prompt are
        # computed before the first token of the answer. On a slow network, sending these contexts
        # would delay this token.
        self.released = self.stop

    def n_unsent_bytes(self, sent: int) -> int:
        """Return the number of bytes of contexts that may be sent, from position ``sent`` on."""
        return max(0, self.released - sent) * self._row_bytes

    def read(self, start: int, n: int) -> Tensor:
        """Return up to n contexts that may be sent, [n, W], from position ``start`` on.

        This position must be in the log.
        """
        return torch.stack(
            self._rows[start - self.first : min(start + n, self.released) - self.first]
        )

    def drop_sent(self, sent: int) -> None:
        """Drop contexts before position ``sent``, except the newest ``_MAX_KEPT`` bytes of them."""
        n_useless = max(0, sent - self.first - _MAX_KEPT // max(1, self._row_bytes))
        del self._rows[:n_useless]
        self.first += n_useless

    @property
    def _row_bytes(self) -> int:
        return 2 * len(self._rows[0]) if self._rows else 0


class Stream:
    """One stream, and the messages that are queued for its client.

    Contexts (data for the client's drafter) are not in the queue. They are sent only if no message
    is queued.
    """

    # A stream is full if its client reads slowly. While a stream is full, decoding is paused, and
    # the server reads no more messages of the client.

    def __init__(self) -> None:
        # An identifier of the client's bearer token. Empty if the server has no bearer tokens.
        self.owner = ""
        # The limit on sessions per client identifies a client by this text. It is the owner of the
        # bearer token, or the address of the connection if the server has no bearer tokens.
        self.counted_by = ""
        self.session: ServerSession | None = None
        self.last_sequence = 0  # Number of the last message received.
        self.failure: pb.Failure | None = None  # The failure that ended the stream.
        self._replies: deque[pb.ServerMessage] = deque()
        self._contexts: ContextLog | None = None
        self._codec = ""
        self._n_context = 0
        self._chunk = 1
        self._is_closed = False
        self._changed = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()

    def send_contexts(self, contexts: ContextLog, codec: str, n_context: int, width: int) -> None:
        """Send the contexts of a sequence as soon as the engine has computed them.

        Args:
            contexts: the contexts of the sequence.
            codec: the encoding of contexts in messages.
            n_context: the number of contexts that the client has. This is also the position of the
                first context to send.
            width: the size of a context, W.
        """
        self._contexts = contexts
        self._codec = codec
        self._n_context = n_context
        self._chunk = max(1, _CHUNK_BYTES // bytes_per_position(codec, width))
        self.wake()

    def put(self, message: pb.ServerMessage) -> None:
        """Queue a message to the client, unless the stream is closed."""
        if not self._is_closed:
            self._replies.append(message)
        self.wake()

    def fail(self, code: str, message: str, ends: bool = False, answers: int = 0) -> None:
        """Queue a Failure message. If ``ends`` is true, close the stream after it."""
        if self._is_closed:
            return
        failure = pb.Failure(code=code, message=message, ends=ends, answers=answers)
        self.put(pb.ServerMessage(failure=failure))
        if ends:
            self.failure = failure
            self._contexts = None
            self.close()

    def close(self) -> None:
        """Close the stream. Messages in the queue are still sent."""
        self._is_closed = True
        self.wake()

    def wake(self) -> None:
        """Wake the coroutine that sends messages, after a change such as new contexts."""
        self._changed.set()
        if self.is_full:
            self.has_room.clear()

    @property
    def is_full(self) -> bool:
        """Whether the client reads slowly, so that too many messages or contexts are unsent."""
        unsent = self._contexts.n_unsent_bytes(self._n_context) if self._contexts is not None else 0
        return len(self._replies) >= _MAX_MESSAGES or unsent >= _MAX_UNSENT

    async def next(self) -> pb.ServerMessage | None:
        """Wait for the next message to send.

        Return None if the stream is closed and nothing is left.
        """
        while (message := self._take()) is None and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        if not self.is_full:
            self.has_room.set()
        return message

    def _take(self) -> pb.ServerMessage | None:
        if self._replies:
            return self._replies.popleft()
        if self._contexts is None or self._n_context >= self._contexts.released:
            return None
        part = self._contexts.read(self._n_context, self._chunk)
        values = encode(self._codec, part)
        context = pb.Context(
            start=self._n_context, n_positions=len(part), codec=self._codec, values=values
        )
        self._n_context += len(part)
        self._contexts.drop_sent(self._n_context)
        return pb.ServerMessage(context=context)
