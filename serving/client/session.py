"""The state machine of one answer: committed tokens, drafts, and requests to the server.

The state machine has no I/O and no clock; only :class:`SavedAnswer` reads and writes a file. Its
inputs are messages of the server, drafts, and changes of the link (the connection to the server).
Its outputs are messages to send, and events. So tests can try inputs in any order. Positions count
from 0 over prompt and answer. In this example, a bar separates committed tokens from drafts::

    prompt    committed answer     drafts
    The cat | sat on             | the  mat    .    It     link up, mode client: the first two are
                                   ~~~~~~~~~               being verified, the next one guesses the
                                                           bonus token
    The cat | sat on the rug     |                         the server commits "the rug": one draft
                                                           agreed, the others are wrong

    The cat | sat on             | the  mat    .    It     link down, mode offline: all drafts are
                                   ?????????????????       shown as unverified
    The cat | sat on             | the  mat    .    It     link up again: one Verify for all drafts
    The cat | sat on the rug     |                         "the" was right (Verified), "mat . It" is
                                                           taken back (RolledBack), "rug" comes from
                                                           the server (Tokens)

Whatever the network does, each token is committed once. This works because each message of the
server states the position of its first token, so the client can skip tokens that it already has.
On a new connection, the client first sends all committed tokens. When a connection ends, its
unanswered requests are dropped.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from ...config import Count, Natural
from ...errors import Disconnected, RequestInvalid
from ...files import read_bounded, write_atomic
from ...moa.decoding.sampling import GREEDY, SamplingConfig
from ...moa.decoding.tree import TreeShape
from ...text import counted
from .. import moa_v1_pb2 as pb
from ..detokenizer import Detokenizer
from ..wire import ERRORS, PROTOCOL, n_common

# The events below are for programs that show or measure the answer: a terminal, a web page, a
# benchmark. In events, index 0 is the first token of the answer.

ChosenMode = Literal["server", "client"]
"""Who drafts while there is a network.

``server``: the server drafts, verifies and streams. ``client``: the client drafts ahead while the
server verifies."""
Mode = Literal["server", "client", "offline"]
"""How tokens are made at present. The mode is ``offline`` while only the client's drafter makes
tokens, because the server does not answer. Otherwise it is the :data:`ChosenMode` of the answer."""

Kind = Literal["streamed", "accepted", "bonus", "unverified"]
"""The origin of a token.

``streamed``: the server decoded it by itself. ``accepted``: the client drafted it, and the target
agreed. ``bonus``: the target added it after the accepted drafts. ``unverified``: the client drafted
it, and it is not verified yet."""


@dataclass(frozen=True)
class Tokens:
    """Tokens that were appended to the answer, from index ``start`` on.

    ``texts`` has the text that each token adds, which may be empty.
    """

    start: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    kinds: tuple[Kind, ...]


@dataclass(frozen=True)
class Verified:
    """The unverified tokens before index ``stop`` of the answer turned out to be right."""

    stop: int


@dataclass(frozen=True)
class RolledBack:
    """The tokens from index ``stop`` on are taken back, because the target disagrees with them."""

    stop: int


@dataclass(frozen=True)
class LinkChanged:
    """The connection was lost or restored."""

    up: bool
    reason: str = ""


@dataclass(frozen=True)
class ModeChanged:
    """The mode has changed. The following tokens are made in the new mode."""

    mode: Mode
    reason: str


@dataclass(frozen=True)
class Stats:
    """Measurements of the answer so far.

    Times are in milliseconds. A time is None before its first measurement.
    """

    n_tokens: int
    n_target_calls: int
    n_rolled_back: int
    tokens_per_s: float
    acceptance_length: float | None
    round_trip_ms: float | None
    verify_ms: float | None
    draft_ms: float | None
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class Done:
    """The answer has ended: ``stop`` (end of sequence) or ``length`` (maximum number of tokens)."""

    reason: str


Event = Tokens | Verified | RolledBack | LinkChanged | ModeChanged | Stats | Done
OnEvent = Callable[[Event], None]


def as_json(event: Event) -> dict[str, Any]:
    """Return an event as a JSON object whose ``type`` is the name of its class."""
    return {"type": type(event).__name__} | asdict(event)


SENT_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
"""The sampling settings that the protocol supports."""
# The usual shapes of the chains that a client drafts: for greedy decoding, and for sampling.
GREEDY_SHAPE, SAMPLED_SHAPE = TreeShape(10, stop_below=0.2), TreeShape(5)


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class SavedAnswer:
    """One answer and the conversation before it, in a form that can be saved to a file."""

    # The id that the server gave to the session. Empty before the server has opened the session.
    session: str
    # The prompt and the committed tokens of the answer. Tokens that were committed after the last
    # save are not in the file. The server sends these tokens again. If it does not have them any
    # more, it computes them again.
    tokens: tuple[Natural, ...]
    n_prompt: Count
    max_new_tokens: Count
    sampling: SamplingConfig = GREEDY
    seed: int = 0
    finish: str = ""  # The reason why the answer ended; empty while it continues.
    # The chat messages of the prompt, with role and content. Empty if the prompt was given as token
    # ids.
    messages: tuple[dict[str, str], ...] = ()
    version: Literal[1] = 1

    def save(self, path: str | Path) -> None:
        """Write the file atomically: after a kill, it has either its old or its new content."""
        try:
            write_atomic(Path(path), _SAVED.dump_json(self))
        except OSError as error:
            reason = error.strerror or error
            raise RequestInvalid(
                f"the conversation cannot be saved in {path}: {reason}. Choose another file."
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that :meth:`save` wrote; raises RequestInvalid for any other file."""
        try:
            saved: Self = _SAVED.validate_json(read_bounded(Path(path)))
            if saved.n_prompt > len(saved.tokens):
                raise ValueError("n_prompt is larger than the number of tokens")
        except OSError as error:
            raise RequestInvalid(
                f"the saved conversation {path} cannot be read ({error.strerror}). Check the path."
            ) from error
        # Pydantic and SamplingConfig raise ValueError for invalid values in the file.
        except ValueError as error:
            raise RequestInvalid(
                f"{path} is not a file in which this release of moa-data has saved a conversation. "
                "Give another file, or start a new conversation."
            ) from error
        return saved


_SAVED: TypeAdapter[Any] = TypeAdapter(SavedAnswer)


@dataclass(frozen=True)
class AnswerSettings:
    """Settings of the drafting of one answer, with the limits for drafting without a server."""

    # The encoding of the contexts (data for the drafter) that the server sends. If this text is
    # empty, the server sends no contexts.
    codec: str = "int8"
    max_offline: int = 64  # While offline, the client shows at most this many unverified tokens.
    # While offline, the client stops drafting when the product of the drafter's probabilities since
    # the last verified token falls below this limit. Further tokens would almost surely be wrong.
    offline_below: float = 0.01
    eos_token_ids: frozenset[int] = frozenset()
    mode: Mode = "server"
    # The shape of the chains of drafts that are verified. If it is None, ``GREEDY_SHAPE`` or
    # ``SAMPLED_SHAPE`` is used.
    shape: TreeShape | None = None
    identities: pb.Identities = field(default_factory=pb.Identities)


@dataclass(frozen=True)
class Draft:
    """A drafted token, and the probability that it is right if all earlier drafts are right."""

    token: int
    probability: float


class ClientSession:
    """The client's side of a session: one answer, from its prompt to its end.

    Args:
        saved: the answer so far, with its prompt.
        settings: how the answer is drafted.
        texts: a detokenizer that has no tokens yet.
        n_context: the number of positions whose contexts (data of the target) the drafter has. The
            attribute ``n_context`` continues this count. If :meth:`receive` increases this
            attribute by n, the last n contexts in the received message are new.
    """

    def __init__(
        self,
        saved: SavedAnswer,
        settings: AnswerSettings,
        texts: Detokenizer,
        n_context: int = 0,
    ) -> None:
        self.tokens = list(saved.tokens)
        self.n_prompt = saved.n_prompt
        self.settings = settings
        self.session = saved.session
        self._saved = saved
        self.mode = settings.mode
        usual_shape = SAMPLED_SHAPE if saved.sampling.temperature else GREEDY_SHAPE
        self.shape = settings.shape or usual_shape
        # The drafts after the committed tokens. The first ``n_shown`` of them are shown as
        # unverified. The first ``n_asked`` of them are being verified.
        self.drafts: deque[Draft] = deque()
        self.n_shown = self.n_asked = 0
        self.n_context = n_context
        self.finish = ""  # The reason why the answer ended; empty while it continues.
        # ``n_calls`` counts target calls that committed tokens. ``n_chains`` counts verified chains
        # of drafts, and ``n_chain_tokens`` counts the tokens that these verifications committed.
        # ``n_rolled_back`` counts shown tokens that were taken back.
        self.n_calls = self.n_chains = self.n_chain_tokens = self.n_rolled_back = 0
        self._texts = texts
        self._outbox: list[pb.ClientMessage] = []
        self._events: list[Event] = []
        self._sequence = 0
        # ``_is_up``: whether there is a connection. ``is_opened``: whether the server has opened
        # the session on this connection.
        self._is_up = self.is_opened = False
        self.was_opened = False  # Whether this or an earlier connection has opened the session.
        # ``is_offline``: whether the client writes without the server. ``_is_stuck``: whether the
        # drafter needs more tokens or contexts before it can draft again.
        self.is_offline = self._is_stuck = False
        self._has_paused = False  # Whether an event has reported that offline drafting pauses.
        # The number of the Verify message that is not answered yet; 0 if all are answered.
        self._awaited = 0
        self._is_running = False  # Whether the server decodes and streams by itself.
        self._max_drafts = 1
        self._max_positions = 1 << 31
        if answer := self.tokens[self.n_prompt :]:
            self._emit_tokens(0, answer, ["accepted"] * len(answer))
        self._end_if_complete()

    # The methods below take the inputs of the state machine.

    def link_up(self) -> None:
        """Handle a new connection: open the session with the known tokens, then request more."""
        self._drop_requests()
        self._is_up = True
        self._sequence = 0
        settings = self.settings
        self._send(
            open=pb.Open(
                protocol=PROTOCOL, session=self.session, identities=settings.identities,
                tokens=self.tokens, n_prompt=self.n_prompt,
                max_new_tokens=self._saved.max_new_tokens, codec=settings.codec, n_context=self.n_context,
                sampling=pb.Sampling(
                    **{name: getattr(self._saved.sampling, name) for name in SENT_SAMPLING},
                    seed=self._saved.seed,
                ),
            )
        )  # fmt: skip
        # Send the next request at once. Waiting for the server's Opened message would cost a round
        # trip.
        self._proceed()

    def link_down(self, reason: str) -> None:
        """Handle the loss of the connection: drop unanswered requests, and go offline."""
        was_opened = self.is_opened
        self._drop_requests()
        self._is_up = False
        if was_opened and not self.finish:
            self._events.append(LinkChanged(False, reason))
        self.stall(reason)

    def stall(self, reason: str) -> None:
        """Go offline, because the server is silent.

        The next message of the server ends the offline mode.
        """
        if self.is_offline or self.finish or not self.was_opened:
            return
        self.is_offline = True
        self._is_stuck = False
        self._has_paused = False
        self._events.append(ModeChanged("offline", reason))
        while len(self.drafts) > self.settings.max_offline:
            self.drafts.pop()
        self._show()
        self._emit_pause()

    def add_draft(self, token: int, probability: float) -> None:
        """Add the draft that :attr:`wants_draft` requested."""
        self.drafts.append(Draft(token, probability))
        if self.is_offline:
            self._show()
            self._emit_pause()
        self._proceed()

    def no_draft(self) -> None:
        """Stop drafting until more tokens or contexts arrive.

        The client calls this if its drafter cannot draft, because it lacks contexts (data of the
        target).
        """
        self._is_stuck = True
        self._emit_pause()
        self._proceed()

    def receive(self, message: pb.ServerMessage) -> None:
        """Handle a message of the current connection.

        Raises:
            Disconnected: the message is invalid, or the server ended the stream. The caller should
                reconnect.
            Overloaded: the caller should reconnect after some time.
            ServingError: another error that the server reports.
        """
        kind = message.WhichOneof("body")
        if self.finish:
            return
        if kind == "opened":
            self._open(message.opened)
        elif kind == "failure":
            text = (
                message.failure.message
                or f"the server reported the error {message.failure.code!r} without a reason."
            )
            raise ERRORS.get(message.failure.code, Disconnected)(text)
        elif not self.is_opened:
            raise Disconnected(
                f"the server sent {kind or 'an empty message'} before it had opened the session."
            )
        if self.is_offline and self.is_opened:
            self.is_offline = False
            self._events.append(ModeChanged(self.mode, "the server answers again"))
        if kind == "committed":
            self._commit(message.committed)
        elif kind == "context":
            self._take_context(message.context)
        self._proceed()

    # The methods below return the outputs of the state machine.

    @property
    def wants_draft(self) -> bool:
        """Whether another draft would be useful now."""
        if self.finish or self._is_stuck or self._is_end_drafted:
            return False
        n_drafts = len(self.drafts)
        n_left = self._n_left
        if self.is_offline:
            settings = self.settings
            return (
                n_drafts < min(n_left, settings.max_offline)
                and self._probability() >= settings.offline_below
            )
        if self.mode == "server" or not self._is_up or self.n_shown:
            return False
        # Draft ahead while the server verifies earlier drafts. The first new draft is a guess of
        # the token that the target will add after the earlier drafts.
        if self._awaited:
            return n_drafts < min(n_left - 1, self.n_asked + 1 + self.shape.depth)
        return not self._is_chain_complete()

    def take_messages(self) -> list[pb.ClientMessage]:
        """Return the messages to send, in order. Each message is returned only once."""
        messages = self._outbox
        self._outbox = []
        return messages

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events = self._events
        self._events = []
        return events

    def ping(self, number: int) -> None:
        """Ask the server for a Pong message.

        The Pong message gives the time of a round trip, and shows that the server is alive.
        """
        if self._is_up:
            self._send(ping=pb.Ping(id=number))

    def close(self) -> None:
        """Tell the server to forget the session."""
        if self._is_up:
            self._send(close=pb.Close())

    # The methods below handle the messages that :meth:`receive` gets.

    def _open(self, opened: pb.Opened) -> None:
        self.session = opened.session
        self.is_opened = True
        self._max_drafts = max(1, opened.max_drafts)
        self._max_positions = opened.max_positions or self._max_positions
        self._events.append(LinkChanged(True))
        if not self.was_opened:
            self._events.append(ModeChanged(self.mode, "the session is open"))
        self.was_opened = True

    def _commit(self, message: pb.Committed) -> None:
        known = len(self.tokens) - message.start
        tokens = list(message.tokens)
        if known < 0:
            raise Disconnected(
                f"the server has skipped tokens, because its message starts at index "
                f"{message.start}, but the client has only {len(self.tokens)} tokens."
            )
        if tokens[:known] != self.tokens[message.start : message.start + len(tokens)]:
            raise Disconnected(
                "the server has changed tokens that it had sent before, because its message that "
                f"starts at index {message.start} differs from them."
            )
        if message.answers and message.answers == self._awaited:
            if self.n_asked:
                self.n_chains += 1
                self.n_chain_tokens += len(tokens)
            self._awaited = self.n_asked = 0
        if new := tokens[known:]:
            self.n_calls += 1
            self._is_stuck = False
            if message.answers:
                n_accepted = max(0, message.n_accepted - known)
                kinds: list[Kind] = [
                    "accepted" if index < n_accepted else "bonus" for index in range(len(new))
                ]
            else:
                kinds = ["streamed" for _ in new]
            self._append(new, kinds)
        if message.finish:
            self._end(message.finish)

    def _take_context(self, context: pb.Context) -> None:
        n_known = self.n_context - context.start
        if n_known < 0 or context.start + context.n_positions > len(self.tokens):
            raise Disconnected(
                "the server sent contexts (activations for the drafter) for "
                f"{context.n_positions} positions from position {context.start} on, but the client "
                f"has contexts of {self.n_context} positions and {len(self.tokens)} tokens. "
                "Contexts must follow each other without a gap, and belong to known tokens."
            )
        if n_known < context.n_positions:
            self.n_context = context.start + context.n_positions
            self._is_stuck = False

    def saved(self) -> SavedAnswer:
        """Return the answer so far."""
        return replace(
            self._saved, session=self.session, tokens=tuple(self.tokens), finish=self.finish
        )

    # The methods below concern the sequence and its drafts.

    @property
    def n_answer(self) -> int:
        """The number of committed tokens of the answer."""
        return len(self.tokens) - self.n_prompt

    @property
    def draft_tokens(self) -> list[int]:
        """The tokens of all drafts."""
        return [draft.token for draft in self.drafts]

    @property
    def _is_end_drafted(self) -> bool:
        """Whether the last draft ends the answer."""
        return bool(self.drafts) and self.drafts[-1].token in self.settings.eos_token_ids

    @property
    def _n_left(self) -> int:
        return min(self.n_prompt + self._saved.max_new_tokens, self._max_positions) - len(
            self.tokens
        )

    def _append(self, new: list[int], kinds: list[Kind]) -> None:
        """Commit tokens of the server.

        Take back the first draft that differs from the committed tokens, and all later drafts.
        """
        n_agreed = n_common(new, self.draft_tokens)
        n_seen = min(n_agreed, self.n_shown)
        for _ in range(n_agreed):
            self.drafts.popleft()
        self.n_shown -= n_seen
        self.n_asked = max(0, self.n_asked - n_agreed)
        self.tokens += new[:n_seen]
        if n_seen:
            self._events.append(Verified(self.n_answer))
        if n_agreed < len(new):
            self._take_back()
        if rest := new[n_seen:]:
            start = self.n_answer
            self.tokens += rest
            self._emit_tokens(start, rest, kinds[n_seen:])

    def _take_back(self) -> None:
        """Drop all drafts, and emit RolledBack if some of them were shown."""
        if self.n_shown:
            stop = self.n_answer
            self._texts.truncate(stop)
            self.n_rolled_back += self.n_shown
            self._events.append(RolledBack(stop))
        self.drafts.clear()
        self.n_shown = self.n_asked = 0

    def _show(self) -> None:
        if hidden := self.draft_tokens[self.n_shown :]:
            start = self.n_answer + self.n_shown
            self.n_shown = len(self.drafts)
            self._emit_tokens(start, hidden, ["unverified"] * len(hidden))

    def _emit_pause(self) -> None:
        """If offline drafting pauses, emit one event that says why."""
        if not self.is_offline or self._has_paused or self.wants_draft:
            return
        self._has_paused = True
        n_drafts = len(self.drafts)
        if n_drafts >= self._n_left or self._is_end_drafted:
            why = "the draft of the answer is complete"
        elif n_drafts >= self.settings.max_offline:
            why = "the limit of unverified tokens is reached"
        elif self._is_stuck:
            why = "the drafter needs activations of the target from the server"
        else:
            why = "the drafter is too unsure of the next token"
        self._events.append(
            ModeChanged("offline", f"paused after {counted(n_drafts, 'unverified token')}: {why}")
        )

    def _emit_tokens(self, start: int, tokens: Sequence[int], kinds: Sequence[Kind]) -> None:
        texts = tuple(self._texts.append(token) for token in tokens)
        self._events.append(Tokens(start, tuple(tokens), texts, tuple(kinds)))

    def _end(self, reason: str) -> None:
        self._take_back()
        self.finish = reason
        self._events.append(Done(reason))

    def _end_if_complete(self) -> None:
        """End an answer at once if its saved tokens already are the whole answer."""
        answer = self.tokens[self.n_prompt :]
        if answer and answer[-1] in self.settings.eos_token_ids:
            self._end("stop")
        elif len(answer) >= self._saved.max_new_tokens:
            self._end("length")

    # The methods below send requests to the server.

    def _drop_requests(self) -> None:
        """Forget the unanswered requests of a connection, and mark the session as not open."""
        self.is_opened = False
        self._awaited = 0
        self.n_asked = 0
        self._is_running = False
        self._outbox.clear()

    def _proceed(self) -> None:
        """Send the next request to the server, unless an earlier request is still unanswered."""
        if not self._is_up or self.finish or self._awaited or self._is_running:
            return
        # First let the target verify all tokens that were shown offline. Then the server streams
        # again.
        if self.n_shown:
            self._verify()
        elif self.mode == "server":
            self._is_running = True
            self._send(run=pb.Run(start=len(self.tokens), mode=pb.RUN_MODE_SPECULATE))
        elif self._is_chain_complete() or self._is_stuck:
            self._verify()

    def _verify(self) -> None:
        """Request one target call that verifies the drafts.

        The last token of the answer needs no draft, because the target call adds one token itself.
        """
        n_asked = min(len(self.drafts), self._max_drafts, max(0, self._n_left - 1))
        tokens = self.draft_tokens[:n_asked]
        self._awaited = self._send(verify=pb.Verify(start=len(self.tokens), tokens=tokens))
        self.n_asked = n_asked

    def _is_chain_complete(self) -> bool:
        if len(self.drafts) >= min(self.shape.depth, self._max_drafts, self._n_left - 1):
            return True
        return self._is_end_drafted or self._probability() < self.shape.stop_below

    def _probability(self) -> float:
        return math.prod(draft.probability for draft in self.drafts)

    def _send(self, **body: object) -> int:
        self._sequence += 1
        self._outbox.append(
            pb.ClientMessage(sequence=self._sequence, **body)  # type: ignore[arg-type]
        )
        return self._sequence
