"""Runs one answer: moves messages between link and session, drafts where that is of use, and measures.

One thread does all of it, one small thing at a time: what has arrived is looked at between two drafted tokens, so that
an answer of the server waits for half a draft on average.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import Disconnected, NotAllowed, Overloaded, ProtocolMismatch, RequestInvalid, ServingError
from ..protocol.codecs import decode
from .drafting import TextDrafter
from .events import Done, Event, Stats
from .link import Arrival, Down, Happening, Link, Up
from .policy import ModePolicy
from .session import Session

_PING_EVERY_S = 0.25
_LOOK_EVERY_S = 0.1
"""How long to wait for the network before looking at the time again."""
_STATS_EVERY_S = 0.25
_WARM_EVERY = 256
"""Contexts after which they are put into the drafter's caches while the server streams. Fewer can wait until something
is drafted: many at once take little longer than a few."""
_FAR = 32
"""Tokens without contexts at which the client drafts nothing while the server is there."""
_COMPARE_EVERY = 24
"""Fewest tokens of a stream between two chains that are drafted to be compared with it."""
_OVERLOADED_WAIT_S = 1.0
_MOST_SENSELESS = 8
"""Connections in a row that end because what came made no sense, without a token in between."""
_HOPELESS = (NotAllowed, RequestInvalid, ProtocolMismatch)
"""Errors that another connection does not mend."""


@dataclass(frozen=True)
class Patience:
    """How long the client waits for the network, in seconds.

    Attributes:
        connect_s: for the first answer of a server; then the call fails.
        silence_s: of a connection that should bring something, and two round trips; then the client goes on alone.
        dead_s: of silence; then the connection is made anew.
        give_up_s: without a server, after which the call fails; None for no end.
    """

    connect_s: float = 10.0
    silence_s: float = 0.5
    dead_s: float = 5.0
    give_up_s: float | None = None


@dataclass
class _Comparison:
    """A chain that was drafted to be compared with what the server streams."""

    start: int
    """Tokens before it."""
    drafts: list[int] = field(default_factory=list)
    probability: float = 1.0
    is_complete: bool = False


class Exchange:
    """One answer.

    Args:
        chooses: whether the policy chooses the mode; else it only measures.
        on_event: called with each event, in the thread of :meth:`run`.
        on_progress: called whenever the session may have changed.
    """

    def __init__(
        self,
        session: Session,
        drafter: TextDrafter,
        link: Link,
        policy: ModePolicy,
        patience: Patience,
        chooses: bool,
        on_event: Callable[[Event], None],
        on_progress: Callable[[Session], None],
    ) -> None:
        self._session, self._drafter, self._link, self._policy = session, drafter, link, policy
        self._patience, self._chooses = patience, chooses
        self._on_event, self._on_progress = on_event, on_progress
        self._bytes_before = (link.bytes_up, link.bytes_down)
        self._stream = 0
        self._pings: dict[int, float] = {}
        self._n_pings = self._n_senseless = 0
        self._is_first_commit = True
        self._asked_s = self._heard_s = self._pinged_s = self._told_s = 0.0
        self._contexts_due_s = 0.0
        self._first_token: tuple[float, int] | None = None  # when the first tokens came, and how many
        self._comparison: _Comparison | None = None
        self._next_comparison = 0
        self._error: ServingError = Disconnected(f"{link.address} did not answer.")

    def run(self) -> None:
        """Run until the answer has ended.

        Raises:
            ServingError: the server refuses it, or could not be reached in time.
        """
        session = self._session
        self._lost_s = self._began_s = time.monotonic()
        self._policy.begin()
        self._link.begin()
        try:
            while not session.finish:
                for happening in self._link.take(0.0 if self._can_draft() else _LOOK_EVERY_S):
                    self._handle(happening)
                self._look_after_link()
                self._draft()
                self._flush()
            session.close()
            self._flush()
        finally:
            self._link.end()

    def stats(self) -> Stats:
        """Sum up what was measured so far."""
        session, policy = self._session, self._policy
        n_tokens, rate = len(session.tokens) - session.n_prompt, 0.0
        if self._first_token is not None and (seconds := time.monotonic() - self._first_token[0]) > 0:
            rate = (n_tokens - self._first_token[1]) / seconds
        counts = (session.n_chain_tokens, session.n_chains) if session.n_chains else (n_tokens, session.n_calls)
        return Stats(
            n_tokens=n_tokens, n_target_calls=session.n_calls, n_rolled_back=session.n_rolled_back, tokens_per_s=rate,
            acceptance_length=counts[0] / counts[1] if counts[1] else None, round_trip_ms=_ms(policy.round_trip_s),
            verify_ms=_ms(policy.verify_s), draft_ms=_ms(policy.draft_s),
            bytes_up=self._link.bytes_up - self._bytes_before[0],
            bytes_down=self._link.bytes_down - self._bytes_before[1],
        )  # fmt: skip

    # What happens

    def _handle(self, happening: Happening) -> None:
        if isinstance(happening, Up):
            self._stream, self._heard_s, self._pinged_s = happening.stream, time.monotonic(), 0.0
            self._pings.clear()
            self._is_first_commit = True
            self._session.link_up()
            self._flush()
        elif isinstance(happening, Down):
            if isinstance(happening.error, _HOPELESS) and happening.stream in (0, self._stream):
                raise happening.error
            if happening.stream in (0, self._stream):
                self._lose(happening.error)
        elif happening.stream == self._stream:
            self._heard_s = happening.at_s
            self._take(happening)

    def _take(self, arrival: Arrival) -> None:
        message = arrival.message
        kind = message.WhichOneof("body")
        if kind == "pong" and (sent_s := self._pings.pop(message.pong.id, None)) is not None:
            self._policy.observe_round_trip(arrival.at_s - sent_s)
        try:
            if kind == "committed":
                self._commit(arrival)
            else:
                self._session.receive(message)
        except Overloaded as error:
            self._reconnect(error, _OVERLOADED_WAIT_S)
        except Disconnected as error:
            self._n_senseless += 1
            if self._n_senseless > _MOST_SENSELESS:
                raise
            self._reconnect(error)
        if kind == "opened":
            self._policy.limit_drafts(message.opened.most_drafts)
        for part in self._session.take_parts():
            context = decode(part.codec, part.values, part.n_positions, self._drafter.width)
            self._drafter.receive(context[part.n_known :])

    def _commit(self, arrival: Arrival) -> None:
        session, policy, committed = self._session, self._policy, arrival.message.committed
        n_before, n_asked = len(session.tokens), session.n_asked
        is_usual = not (session.n_shown or session.is_alone or self._is_first_commit)
        is_answer = bool(committed.answers) and n_asked > 0
        session.receive(arrival.message)
        n_new = len(session.tokens) - n_before
        if not n_new:
            return
        self._n_senseless, self._is_first_commit = 0, False
        if self._first_token is None:
            self._first_token = (arrival.at_s, n_new)
        call_s = (committed.call_us + committed.queue_us) / 1e6
        if is_answer:
            policy.observe_drafts(n_asked, min(n_asked, committed.n_accepted))
            policy.observe_round_trip(max(0.0, arrival.at_s - self._asked_s - call_s))
        if not is_usual:
            policy.begin()
        elif committed.answers:
            policy.observe_chain(arrival.at_s, n_new, call_s)
        else:
            policy.observe_streamed(n_new, call_s, committed.draft_us / 1e6)
        self._compare()
        if self._chooses and not session.finish:
            session.set_mode(policy.choose(self._n_lacking <= _FAR), policy.reason)
        session.shape = policy.shape()
        # Contexts come right behind: to wait for them is better than to feed what they stand for level by level.
        self._contexts_due_s = time.monotonic() + self._n_lacking * (policy.draft_s or 0.001)

    def _lose(self, error: ServingError) -> None:
        """Go on without a stream."""
        if self._stream:
            self._lost_s = time.monotonic()
        self._stream, self._error = 0, error
        self._session.link_down(str(error))
        self._policy.begin()

    def _reconnect(self, error: ServingError, wait_s: float = 0.0) -> None:
        self._link.reconnect(str(error), wait_s)
        self._lose(error)

    def _look_after_link(self) -> None:
        """Ping, notice silence, and give up in the end."""
        now, session, patience = time.monotonic(), self._session, self._patience
        if not self._stream:
            limit_s = patience.give_up_s if session.was_opened else patience.connect_s
            if limit_s is not None and now - self._lost_s > limit_s:
                raise self._error
            return
        silent_s = now - self._heard_s
        if silent_s > patience.dead_s:
            self._reconnect(Disconnected(f"nothing was heard of {self._link.address} for {patience.dead_s:g} s."))
            return
        if silent_s > patience.silence_s + 2 * (self._policy.round_trip_s or 0.0):
            session.stall(f"nothing was heard of {self._link.address} for {silent_s:.1f} s.")
        if now - self._pinged_s > _PING_EVERY_S and session.is_opened:
            self._n_pings += 1
            self._pings[self._n_pings], self._pinged_s = now, now
            session.ping(self._n_pings)

    # Drafting

    @property
    def _n_lacking(self) -> int:
        """Committed tokens before the root whose contexts have not arrived."""
        return len(self._session.tokens) - 1 - self._drafter.n_context if self._drafter.width else 0

    def _can_draft(self) -> bool:
        if self._session.wants_draft:
            return not self._waits_for_contexts()
        return self._comparison is not None and not self._comparison.is_complete

    def _waits_for_contexts(self) -> bool:
        is_fresh = not self._session.is_alone and not self._session.drafts
        return is_fresh and 0 < self._n_lacking <= _FAR and time.monotonic() < self._contexts_due_s

    def _draft(self) -> None:
        """Draft one token, or make the drafter ready for it."""
        session, drafter = self._session, self._drafter
        if session.wants_draft:
            if self._n_lacking > _FAR and not session.is_alone:
                session.no_draft()  # those of a long prompt are on their way: to feed it level by level takes longer
            if not session.wants_draft or self._waits_for_contexts():
                return
            began_s = time.perf_counter()
            draft = drafter.next(session.tokens, [draft.token for draft in session.drafts])
            if draft is not None:
                self._policy.observe_draft(time.perf_counter() - began_s)
                session.add_draft(draft.token, draft.probability)
            elif not drafter.is_catching_up:
                session.no_draft()
        elif session.is_streaming and self._chooses:
            self._extend_comparison()
        elif drafter.n_pending >= _WARM_EVERY and not session.drafts:
            drafter.warm(session.tokens)

    def _extend_comparison(self) -> None:
        session, drafter = self._session, self._drafter
        if self._comparison is None:
            is_due = len(session.tokens) >= self._next_comparison and self._policy.wants_comparison
            if is_due and self._n_lacking <= _FAR:
                self._next_comparison = len(session.tokens) + _COMPARE_EVERY
                self._comparison = _Comparison(len(session.tokens))
            return
        chain, shape = self._comparison, session.shape
        if chain.is_complete:
            return
        began_s = time.perf_counter()
        draft = drafter.next(session.tokens[: chain.start], chain.drafts)
        if draft is not None:
            self._policy.observe_draft(time.perf_counter() - began_s, is_compared=True)
            chain.drafts.append(draft.token)
            chain.probability *= draft.probability
        is_long = len(chain.drafts) >= shape.depth or chain.probability < shape.stop_below
        chain.is_complete = is_long or (draft is None and not drafter.is_catching_up)
        self._compare()

    def _compare(self) -> None:
        """See how many drafts of a chain were right, as soon as that is known."""
        if (chain := self._comparison) is None or not chain.is_complete:
            return
        came = self._session.tokens[chain.start : chain.start + len(chain.drafts)]
        n_agreed = 0
        while n_agreed < len(came) and came[n_agreed] == chain.drafts[n_agreed]:
            n_agreed += 1
        if n_agreed < len(came) or len(came) == len(chain.drafts):
            self._policy.observe_drafts(len(chain.drafts), n_agreed)
            self._comparison = None

    # What goes out

    def _flush(self) -> None:
        """Send messages and tell events."""
        if messages := self._session.take_messages():
            if any(message.WhichOneof("body") == "verify" for message in messages):
                self._asked_s = time.monotonic()
            self._link.send(self._stream, messages)
        events = self._session.take_events()
        if events:
            self._on_progress(self._session)
        now = time.monotonic()
        for event in events:
            if isinstance(event, Done):  # what comes last sums up
                self._on_event(self.stats())
            self._on_event(event)
        if now - self._told_s > _STATS_EVERY_S and not self._session.finish:
            self._told_s = now
            self._on_event(self.stats())


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
