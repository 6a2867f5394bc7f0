"""The Python client: answers chats with a local drafter and a target on a server.

::

    with DraftingClient("127.0.0.1:8001", "runs/moa", "store/target") as client:
        answer = client.chat([{"role": "user", "content": "Why is the sky blue?"}])
    print(answer.text)

One thread makes the whole answer (:class:`_Turn`) in small steps. After each drafted token, it
handles the messages that have arrived. So a message of the server waits, on average, for half the
time of a draft.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

from ...errors import (
    Disconnected,
    DrafterError,
    NotAllowed,
    Overloaded,
    ProtocolMismatch,
    RequestInvalid,
    ServingError,
)
from ...moa.decoding.sampling import GREEDY, SamplingConfig
from ...moa.targets.chat_tokens import prompt_tokens
from .. import moa_v1_pb2 as pb
from ..detokenizer import Detokenizer
from ..wire import check_codec, decode, drafter_identity, target_identity, tokenizer_identity
from .drafting import DraftingModel, SequenceDrafter
from .link import Link, LinkEvent
from .session import (
    SENT_SAMPLING,
    AnswerSettings,
    ChosenMode,
    ClientSession,
    Done,
    OnEvent,
    SavedAnswer,
    Stats,
)

MODES: tuple[str, ...] = get_args(ChosenMode)
_SAVE_EVERY_S = 1.0
_PING_EVERY_S = 0.25
# The client waits at most this many seconds for a message. Then it checks the timeouts again.
_LOOK_EVERY_S = 0.1
_STATS_EVERY_S = 0.25
# A context is what the drafter reads about one position that the target has processed. While the
# server streams, contexts are put into the drafter's caches as soon as this many have arrived.
# Fewer contexts wait until a draft is needed, because adding many takes little longer than adding a
# few.
_WARM_EVERY = 256
# If contexts (data for the drafter) are missing for more tokens than this, the client waits for the
# contexts before it drafts. It does not wait if the server cannot be reached.
_FAR = 32
_OVERLOADED_WAIT_S = 1.0
# After an invalid message, the client connects again. It gives up if more than this many messages
# in succession are invalid, without a new token between them.
_MAX_SENSELESS = 8


@dataclass(frozen=True)
class Timeouts:
    """Timeouts for the network, in seconds."""

    # The answer fails if no server has opened the session within this time.
    connect_s: float = 10.0
    # If no message of the server arrives for this time plus two round trips, the client goes
    # offline.
    silence_s: float = 0.5
    # If no message of the server arrives for this time, the client connects again.
    dead_s: float = 5.0


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    # If the answer ends with an end-of-sequence token, this token is included.
    tokens: tuple[int, ...]
    finish: str  # Why the answer ended: "stop" or "length".
    stats: Stats


class DraftingClient:
    """Answers prompts, one at a time, with the target on a server.

    The client has a drafter and a few frozen weights of the target, such as its LM head, but never
    the whole target. Every answer is the same, token for token, as with plain decoding on the
    server, whatever the network does meanwhile.

    Args:
        server: ``HOST:PORT`` of the server's gRPC port, or ``https://HOST:PORT`` for TLS.
        drafter: a run of ``moa-data train``, the folder of a drafter, or a loaded drafter, which
            several clients may share.
        bundle: a store or its folder target/, which has the frozen weights. By default the store
            that the run was trained from.
        token: the server's bearer token. Empty if the server needs none.
        ca: the file of a certificate authority, for TLS. By default the system's authorities are
            used.
        mode: ``server``: the server drafts and streams. ``client``: the client drafts ahead of the
            server's answers.
        codec: how the server encodes the data for the drafter: bf16, int8 or int4. It changes how
            many drafts are accepted, never the text.
        max_offline: the largest number of unverified tokens that are shown without a server.
        offline_below: without a server, drafting stops when the estimated probability that all
            drafts are right falls below this limit.
        timeouts: timeouts of the network. If it is None, the defaults of :class:`Timeouts` apply.
        session_file: a file that is kept up to date with the current answer, so that
            :meth:`resume` can continue it. If it is None, no file is written.
    """

    def __init__(
        self,
        server: str,
        drafter: str | Path | DraftingModel,
        bundle: str | Path | None = None,
        *,
        token: str = "",
        ca: str | Path | None = None,
        mode: ChosenMode = "server",
        codec: str = "int8",
        max_offline: int = 64,
        offline_below: float = 0.01,
        timeouts: Timeouts | None = None,
        session_file: str | Path | None = None,
    ) -> None:
        if mode not in MODES:
            raise RequestInvalid(f"mode is {mode!r}, expected one of {', '.join(MODES)}.")
        if max_offline < 0 or not 0 <= offline_below < 1:
            raise RequestInvalid(
                f"max_offline is {max_offline}, expected 0 or more; offline_below is "
                f"{offline_below}, expected at least 0 and below 1."
            )
        check_codec(codec)
        self.session_file = session_file
        self.timeouts = timeouts or Timeouts()
        self.model = (
            drafter if isinstance(drafter, DraftingModel) else DraftingModel.load(drafter, bundle)
        )
        self.drafter = SequenceDrafter(self.model)
        self._settings = AnswerSettings(
            codec=codec if self.drafter.width else "",
            max_offline=max_offline,
            offline_below=offline_below,
            eos_token_ids=self.model.eos_token_ids,
            mode=mode,
            identities=pb.Identities(
                target=target_identity(self.model.drafter.config.target),
                tokenizer=tokenizer_identity(self.model.tokenizer),
                drafter=drafter_identity(self.model.drafter),
            ),
        )
        self.link = Link(server, token, ca)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingConfig = GREEDY,
        seed: int = 0,
        on_event: OnEvent | None = None,
    ) -> Answer:
        """Answer a chat.

        Args:
            messages: the messages, with ``role`` and ``content``.
            max_new_tokens: the largest number of tokens of the answer.
            sampling: the sampling settings.
            seed: the seed for sampling. Each sampled token depends on the seed and on its position.
            on_event: a function that is called with each event, in this thread.
        """
        chat: list[Any] = [dict(message) for message in messages]
        assert self.model.template is not None
        return self.complete(
            prompt_tokens(self.model.template, chat), max_new_tokens=max_new_tokens,
            sampling=sampling, seed=seed, on_event=on_event, messages=chat,
        )  # fmt: skip

    def complete(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingConfig = GREEDY,
        seed: int = 0,
        on_event: OnEvent | None = None,
        messages: Sequence[Any] = (),
    ) -> Answer:
        """Continue a prompt of token ids. Other arguments are as in :meth:`chat`.

        ``messages`` are the chat messages that the prompt was made from. The session file records
        them.
        """
        if not tokens or max_new_tokens < 1:
            raise RequestInvalid(
                "the prompt must have at least one token, and max_new_tokens must be at least 1."
            )
        saved = SavedAnswer(
            "", tuple(tokens), len(tokens), max_new_tokens, sampling, seed, "", tuple(messages)
        )
        return self.resume(saved, on_event)

    def resume(self, saved: SavedAnswer, on_event: OnEvent | None = None) -> Answer:
        """Continue a saved answer. The first event contains the tokens of the saved answer."""
        if not -(2**63) <= saved.seed < 2**63:
            raise DrafterError(f"seed is {saved.seed}, expected a number from -2^63 to 2^63 - 1.")
        sent = {name: getattr(saved.sampling, name) for name in SENT_SAMPLING}
        if SamplingConfig(**sent) != saved.sampling:
            raise RequestInvalid(
                "of all sampling settings, a server for clients that draft supports only "
                f"{', '.join(sent)}; leave out the other ones."
            )
        n_context = self.drafter.begin(saved.tokens, saved.sampling, saved.seed)
        session = ClientSession(saved, self._settings, Detokenizer(self.text_of), n_context)
        turn = _Turn(self, session, on_event)
        turn.run()
        answer = tuple(session.tokens[session.n_prompt :])
        return Answer(self.text_of(answer), answer, session.finish, turn.stats())

    def text_of(self, tokens: Sequence[int]) -> str:
        """Decode tokens of an answer, leaving out special tokens."""
        if self.model.tokenizer is None:
            return ""
        return str(self.model.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def cut(self) -> None:
        """Disconnect until :meth:`restore`, as if there were no network.

        Any thread may call this method.
        """
        self.link.cut()

    def restore(self) -> None:
        """Connect again after :meth:`cut`. Any thread may call this method."""
        self.link.restore()

    def close(self) -> None:
        """End the connection."""
        self.link.close()


class _Turn:
    """Makes one answer.

    It passes messages between the link (the connection to the server) and the session. It also
    drafts tokens if the session wants drafts, and measures times.
    """

    def __init__(
        self, client: DraftingClient, session: ClientSession, on_event: OnEvent | None
    ) -> None:
        self._drafter = client.drafter
        self._link = client.link
        self._timeouts = client.timeouts
        self._session = session
        self._on_event = on_event or (lambda event: None)
        self._file = client.session_file
        self._bytes_before = (self._link.bytes_up, self._link.bytes_down)
        self._stream = 0  # The number of the link's current stream, or 0 without a stream.
        self._pings: dict[int, float] = {}
        self._n_pings = self._n_senseless = 0
        self._heard_s = self._pinged_s = self._told_s = self._saved_s = 0.0
        self._contexts_due_s = 0.0
        # A pair: the time at which the first new tokens arrived, and the number of these tokens.
        self._first_token: tuple[float, int] | None = None
        self._error: ServingError = Disconnected(
            f"the server {self._link.address} did not answer. Check the address, and whether the "
            "server runs."
        )
        # Moving averages of three durations in seconds: a round trip, a target call with its
        # waiting time, and drafting one token. None before the first measurement.
        self._round_trip_s: float | None = None
        self._verify_s: float | None = None
        self._draft_s: float | None = None

    def run(self) -> None:
        """Run until the answer has ended.

        Raises:
            ServingError: the server refuses the answer, or was not reached in time.
        """
        session = self._session
        self._lost_s = time.monotonic()
        self._link.begin()
        try:
            while not session.finish:
                for event in self._link.take(0.0 if self._can_draft() else _LOOK_EVERY_S):
                    self._handle(event)
                self._look_after_link()
                self._draft()
                self._flush()
            session.close()
            self._flush()
        finally:
            self._link.end()
            self._save()

    def stats(self) -> Stats:
        """Return the measurements of the answer so far."""
        session = self._session
        n_tokens = session.n_answer
        rate = 0.0
        if (
            self._first_token is not None
            and (seconds := time.monotonic() - self._first_token[0]) > 0
        ):
            rate = (n_tokens - self._first_token[1]) / seconds
        counts = (
            (session.n_chain_tokens, session.n_chains)
            if session.n_chains
            else (n_tokens, session.n_calls)
        )
        return Stats(
            n_tokens=n_tokens, n_target_calls=session.n_calls, n_rolled_back=session.n_rolled_back,
            tokens_per_s=rate, acceptance_length=counts[0] / counts[1] if counts[1] else None,
            round_trip_ms=_ms(self._round_trip_s), verify_ms=_ms(self._verify_s),
            draft_ms=_ms(self._draft_s),
            bytes_up=self._link.bytes_up - self._bytes_before[0],
            bytes_down=self._link.bytes_down - self._bytes_before[1],
        )  # fmt: skip

    # The methods below handle events of the link (the connection to the server).

    def _handle(self, event: LinkEvent) -> None:
        if event.error is not None:
            if event.stream in (0, self._stream):
                if isinstance(event.error, NotAllowed | RequestInvalid | ProtocolMismatch):
                    # Do not reconnect, because the server would refuse another connection for the
                    # same reason.
                    raise event.error
                self._lose(event.error)
        elif event.message is None:
            self._stream = event.stream
            self._heard_s = event.at_s
            self._pinged_s = 0.0
            self._pings.clear()
            self._session.link_up()
            self._flush()
        elif event.stream == self._stream:
            self._heard_s = event.at_s
            self._receive(event.message, event.at_s)

    def _receive(self, message: pb.ServerMessage, at_s: float) -> None:
        session = self._session
        kind = message.WhichOneof("body")
        if kind == "pong" and (sent_s := self._pings.pop(message.pong.id, None)) is not None:
            self._round_trip_s = _smoothed(self._round_trip_s, at_s - sent_s)
        n_tokens_before = len(session.tokens)
        n_contexts_before = session.n_context
        try:
            session.receive(message)
        except Overloaded as error:
            self._reconnect(error, _OVERLOADED_WAIT_S)
        except Disconnected as error:
            self._n_senseless += 1
            if self._n_senseless > _MAX_SENSELESS:
                raise
            self._reconnect(error)
        if (n_new := len(session.tokens) - n_tokens_before) > 0:
            self._measure(message.committed, at_s, n_new)
        if (n_new := session.n_context - n_contexts_before) > 0:
            context = message.context
            rows = decode(context.codec, context.values, context.n_positions, self._drafter.width)
            self._drafter.receive(rows[-n_new:])

    def _measure(self, committed: pb.Committed, at_s: float, n_new: int) -> None:
        self._n_senseless = 0
        if self._first_token is None:
            self._first_token = (at_s, n_new)
        if call_s := (committed.call_us + committed.queue_us) / 1e6:
            self._verify_s = _smoothed(self._verify_s, call_s)
        # The contexts of new tokens (data for the drafter) arrive soon after the tokens. Waiting
        # for the contexts is faster than letting the drafter process the new tokens one by one
        # without contexts.
        self._contexts_due_s = time.monotonic() + self._n_lacking * (self._draft_s or 0.001)

    def _lose(self, error: ServingError) -> None:
        if self._stream:
            self._lost_s = time.monotonic()
        self._stream = 0
        self._error = error
        self._session.link_down(str(error))

    def _reconnect(self, error: ServingError, wait_s: float = 0.0) -> None:
        self._link.reconnect(str(error), wait_s)
        self._lose(error)

    def _look_after_link(self) -> None:
        """Send pings, and check the timeouts.

        If the server is silent, the client goes offline or connects again. If no server has opened
        the session in time, the answer fails.
        """
        now = time.monotonic()
        session = self._session
        timeouts = self._timeouts
        if not self._stream:
            if not session.was_opened and now - self._lost_s > timeouts.connect_s:
                raise self._error
            return
        silent_s = now - self._heard_s
        reason = f"the server {self._link.address} has sent nothing for {silent_s:.1f} s."
        if silent_s > timeouts.dead_s:
            self._reconnect(Disconnected(reason))
            return
        if silent_s > timeouts.silence_s + 2 * (self._round_trip_s or 0.0):
            session.stall(reason)
        if now - self._pinged_s > _PING_EVERY_S and session.is_opened:
            self._n_pings += 1
            self._pings[self._n_pings], self._pinged_s = now, now
            session.ping(self._n_pings)

    # The methods below decide whether to draft, and draft tokens.

    @property
    def _n_lacking(self) -> int:
        """The number of committed tokens whose contexts have not arrived.

        A context is the data that the drafter reads about one position. The last committed token is
        not counted, because the target has not processed it yet.
        """
        return len(self._session.tokens) - 1 - self._drafter.n_context if self._drafter.width else 0

    def _can_draft(self) -> bool:
        session = self._session
        is_fresh = not session.is_offline and not session.drafts
        waits = is_fresh and 0 < self._n_lacking <= _FAR and time.monotonic() < self._contexts_due_s
        return session.wants_draft and not waits

    def _draft(self) -> None:
        session = self._session
        drafter = self._drafter
        if session.wants_draft and self._n_lacking > _FAR and not session.is_offline:
            # The contexts of a long prompt (data for the drafter) are on their way. Do not draft
            # before they arrive. Waiting is faster than letting the drafter process the tokens of
            # the prompt one by one without contexts.
            session.no_draft()
        if self._can_draft():
            began_s = time.perf_counter()
            draft = drafter.next(session.tokens, session.draft_tokens)
            if draft is not None:
                self._draft_s = _smoothed(self._draft_s, time.perf_counter() - began_s)
                session.add_draft(draft.token, draft.probability)
            elif not drafter.is_catching_up:
                session.no_draft()
        elif not session.wants_draft and drafter.n_pending >= _WARM_EVERY and not session.drafts:
            drafter.warm(session.tokens)

    # The methods below send messages to the server, and pass events to the caller.

    def _flush(self) -> None:
        if messages := self._session.take_messages():
            self._link.send(self._stream, messages)
        events = self._session.take_events()
        now = time.monotonic()
        if events and now - self._saved_s > _SAVE_EVERY_S:
            self._save()
        for event in events:
            # Report the final statistics before the event that ends the answer.
            if isinstance(event, Done):
                self._on_event(self.stats())
            self._on_event(event)
        if now - self._told_s > _STATS_EVERY_S and not self._session.finish:
            self._told_s = now
            self._on_event(self.stats())

    def _save(self) -> None:
        if self._file is not None:
            self._saved_s = time.monotonic()
            self._session.saved().save(self._file)


def _smoothed(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + (seconds - before) / 8


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
