"""The Python client: answers chats with a drafter here and a target on a server.

::

    with DraftingClient("127.0.0.1:8001", "runs/moa", "store/target") as client:
        answer = client.chat([{"role": "user", "content": "Why is the sky blue?"}])
    print(answer.text)

One thread does all of an answer (:class:`_Turn`), one small thing at a time: what has arrived is looked at between two
drafted tokens, so that a message of the server waits for half a draft on average.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from ...config import Count
from ...errors import (
    Disconnected,
    DrafterError,
    NotAllowed,
    Overloaded,
    ProtocolMismatch,
    RequestInvalid,
    ServingError,
)
from ...files import read_bounded, write_atomic
from ...moa.decoding.sampling import GREEDY, SamplingConfig
from ...moa.targets.chat_tokens import prompt_tokens
from .. import moa_v1_pb2 as pb
from ..detokenizer import Detokenizer
from ..wire import check_codec, decode, drafter_identity, target_identity, tokenizer_identity
from .drafting import DraftingModel, TextDrafter
from .link import Link, LinkEvent
from .session import (
    GREEDY_SHAPE,
    SAMPLED_SHAPE,
    SENT_SAMPLING,
    AnswerSettings,
    ChosenMode,
    Done,
    OnEvent,
    Session,
    Stats,
)

MODES: tuple[str, ...] = get_args(ChosenMode)
_SAVE_EVERY_S = 1.0
_PING_EVERY_S = 0.25
_LOOK_EVERY_S = 0.1  # how long to wait for the network before looking at the time again
_STATS_EVERY_S = 0.25
# Contexts after which they are put into the drafter's caches while the server streams. Fewer can
# wait until something
# is drafted: many at once take little longer than a few.
_WARM_EVERY = 256
_FAR = 32  # tokens without contexts at which the client drafts nothing while the server is there
_OVERLOADED_WAIT_S = 1.0
# connections in a row that end because what came made no sense, without a token in between
_MAX_SENSELESS = 8


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a client waits for the network."""

    connect_s: float = 10.0  # for the first answer of a server; then the call fails
    # without a message, beyond two round trips, after which the client writes offline
    silence_s: float = 0.5
    dead_s: float = 5.0  # without a message, after which another connection is made


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]  # the end-of-sequence token included where there is one
    finish: str  # stop or length
    stats: Stats


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class SavedAnswer:
    """One answer, complete or not, in its conversation, as a file that outlives the process."""

    session: str  # id that the server gave; empty for none
    # The prompt and what of the answer is committed. Newer ones are known to the server, or
    # computed again.
    tokens: tuple[Annotated[int, Field(ge=0)], ...]
    n_prompt: Count
    max_new_tokens: Count
    sampling: SamplingConfig = GREEDY
    seed: int = 0
    finish: str = ""  # why the answer ended; empty while it has not
    # up to the prompt, with role and content; empty for bare tokens
    messages: tuple[dict[str, str], ...] = ()
    version: Annotated[int, Field(ge=1, le=1)] = 1

    def save(self, path: str | Path) -> None:
        """Replace the file, so that a kill at any moment leaves the last state or the one before."""
        try:
            write_atomic(Path(path), _SAVED.dump_json(self))
        except OSError as error:
            reason = error.strerror or error
            raise RequestInvalid(
                f"the session cannot be saved in {path}: {reason}; give another."
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that :meth:`save` wrote; RequestInvalid for any other."""
        try:
            saved: Self = _SAVED.validate_json(read_bounded(Path(path)))
            if saved.n_prompt > len(saved.tokens):
                raise ValueError("the prompt is longer than the text")
        except OSError as error:
            raise RequestInvalid(f"{path} cannot be read: {error.strerror}.") from error
        except ValueError as error:  # pydantic's, and those of sampling
            raise RequestInvalid(
                f"{path} is not a saved session of this version; start a new one."
            ) from error
        return saved


_SAVED: TypeAdapter[Any] = TypeAdapter(SavedAnswer)


class DraftingClient:
    """Answers, one at a time.

    Holds a drafter and the frozen weights of its target, never the target. Every answer is that of plain decoding on
    the server, token for token, whatever the network does meanwhile.

    Args:
        server: ``HOST:PORT`` of the server's gRPC port, or ``https://HOST:PORT`` for TLS.
        drafter: a run of ``moa-data train``, a folder with a drafter, or a loaded one, which clients may share.
        bundle: a store or its folder target/; None for the store that the run was trained from.
        token: the server's bearer token; empty for none.
        ca: file of a certificate authority, for TLS; None for the system's.
        mode: ``server``, which drafts and streams, or ``client``: drafts are made here, ahead of the server's answers.
        codec: of the drafter's contexts on the wire: bf16, int8 or int4. Changes what is accepted, never the text.
        max_offline: tokens that are shown without a server.
        offline_below: without a server the client stops where what it drafted is less likely than this to be right.
        session_file: kept up to date with the present answer, for :meth:`resume`; None for none.
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
            raise RequestInvalid(f"{mode!r} is not a mode; expected one of {', '.join(MODES)}.")
        if max_offline < 0 or not 0 <= offline_below < 1:
            raise RequestInvalid(
                f"max_offline is {max_offline}, offline_below {offline_below}; give 0 or more, below 1."
            )
        check_codec(codec)
        self.mode = mode
        self.session_file = session_file
        self.timeouts = timeouts or Timeouts()
        self.model = (
            drafter if isinstance(drafter, DraftingModel) else DraftingModel.load(drafter, bundle)
        )
        self._codec = codec
        self._max_offline = max_offline
        self._offline_below = offline_below
        self.drafter = TextDrafter(self.model)
        self._identities = pb.Identities(
            target=target_identity(self.model.drafter.config.target),
            tokenizer=tokenizer_identity(self.model.tokenizer),
            drafter=drafter_identity(self.model.drafter),
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
        """Answer a chat of messages with ``role`` and ``content``; ``on_event`` is called in this thread.

        The seed decides, with the position, each sampled token.
        """
        chat: list[Any] = [dict(message) for message in messages]
        assert self.model.template is not None
        settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "sampling": sampling,
            "seed": seed,
        }
        return self.complete(
            prompt_tokens(self.model.template, chat), **settings, on_event=on_event, messages=chat
        )

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
        """Continue a text of token ids, see :meth:`chat`; the session file gets the messages that it stands for."""
        if not tokens or max_new_tokens < 1:
            raise RequestInvalid(
                "an answer needs a prompt of at least one token, and room for one; give both."
            )
        saved = SavedAnswer(
            "", tuple(tokens), len(tokens), max_new_tokens, sampling, seed, "", tuple(messages)
        )
        return self.resume(saved, on_event)

    def resume(self, saved: SavedAnswer, on_event: OnEvent | None = None) -> Answer:
        """Continue an answer that another process began; events begin with what it has so far."""
        if not -(2**63) <= saved.seed < 2**63:
            raise DrafterError(f"seed must be from -2^63 to 2^63 - 1, got {saved.seed}.")
        sent = {name: getattr(saved.sampling, name) for name in SENT_SAMPLING}
        if SamplingConfig(**sent) != saved.sampling:
            raise RequestInvalid(
                f"drafting sessions know {', '.join(sent)} of sampling; leave other settings out."
            )
        settings = AnswerSettings(
            saved.max_new_tokens, saved.sampling, saved.seed, self._codec if self.drafter.width else "",
            max_offline=self._max_offline, offline_below=self._offline_below, eos_token_ids=self.model.eos_token_ids,
            mode=self.mode, shape=SAMPLED_SHAPE if saved.sampling.temperature else GREEDY_SHAPE,
            identities=self._identities,
        )  # fmt: skip
        n_context = self.drafter.begin(saved.tokens, saved.sampling, saved.seed)
        texts = Detokenizer(self.text_of)
        session = Session(saved.tokens, saved.n_prompt, settings, texts, saved.session, n_context)
        turn = _Turn(self, session, saved, on_event)
        turn.run()
        answer = tuple(session.tokens[session.n_prompt :])
        return Answer(self.text_of(answer), answer, session.finish, turn.stats())

    def text_of(self, tokens: Sequence[int]) -> str:
        """Decode tokens of an answer, without special ones."""
        if self.model.tokenizer is None:
            return ""
        return str(self.model.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def cut(self) -> None:
        """Close the connection and make none, as if the network were gone; may be called from any thread."""
        self.link.cut()

    def restore(self) -> None:
        """Connect again after :meth:`cut`; may be called from any thread."""
        self.link.restore()

    def close(self) -> None:
        """End the connection."""
        self.link.close()


class _Turn:
    """One answer: moves messages between link and session, drafts where that helps, and measures."""

    def __init__(
        self, client: DraftingClient, session: Session, saved: SavedAnswer, on_event: OnEvent | None
    ) -> None:
        self._drafter = client.drafter
        self._link = client.link
        self._timeouts = client.timeouts
        self._session = session
        self._on_event = on_event or (lambda event: None)
        self._saved = saved
        self._file = client.session_file
        self._bytes_before = (self._link.bytes_up, self._link.bytes_down)
        self._stream = 0  # number of the link's stream, 0 for none
        self._pings: dict[int, float] = {}
        self._n_pings = self._n_senseless = 0
        self._heard_s = self._pinged_s = self._told_s = self._saved_s = 0.0
        self._contexts_due_s = 0.0
        # when the first tokens came, and how many
        self._first_token: tuple[float, int] | None = None
        self._error: ServingError = Disconnected(f"{self._link.address} did not answer.")
        # Smoothed seconds of a round trip, a target call and drafting a token; None before the
        # first measurement.
        self._round_trip_s: float | None = None
        self._verify_s: float | None = None
        self._draft_s: float | None = None

    def run(self) -> None:
        """Run until the answer has ended; ServingError where the server refuses it, or was not reached in time."""
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
        """Sum up what was measured so far."""
        session = self._session
        n_tokens = len(session.tokens) - session.n_prompt
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
            n_tokens=n_tokens, n_target_calls=session.n_calls, n_rolled_back=session.n_rolled_back, tokens_per_s=rate,
            acceptance_length=counts[0] / counts[1] if counts[1] else None, round_trip_ms=_ms(self._round_trip_s),
            verify_ms=_ms(self._verify_s), draft_ms=_ms(self._draft_s),
            bytes_up=self._link.bytes_up - self._bytes_before[0],
            bytes_down=self._link.bytes_down - self._bytes_before[1],
        )  # fmt: skip

    # Events of the link

    def _handle(self, event: LinkEvent) -> None:
        if event.error is not None:
            if event.stream in (0, self._stream):
                if isinstance(event.error, NotAllowed | RequestInvalid | ProtocolMismatch):
                    raise event.error  # another connection would be refused as well
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
        n_before = len(session.tokens)
        try:
            session.receive(message)
        except Overloaded as error:
            self._reconnect(error, _OVERLOADED_WAIT_S)
        except Disconnected as error:
            self._n_senseless += 1
            if self._n_senseless > _MAX_SENSELESS:
                raise
            self._reconnect(error)
        if (n_new := len(session.tokens) - n_before) > 0:
            self._measure(message.committed, at_s, n_new)
        for context, n_known in session.take_contexts():
            rows = decode(context.codec, context.values, context.n_positions, self._drafter.width)
            self._drafter.receive(rows[n_known:])

    def _measure(self, committed: pb.Committed, at_s: float, n_new: int) -> None:
        self._n_senseless = 0
        if self._first_token is None:
            self._first_token = (at_s, n_new)
        if call_s := (committed.call_us + committed.queue_us) / 1e6:
            self._verify_s = _smoothed(self._verify_s, call_s)
        # Contexts follow at once: waiting for them is faster than feeding the tokens they stand for
        # level by level.
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
        """Ping, notice silence, and give up where no server answers the first time."""
        now = time.monotonic()
        session = self._session
        timeouts = self._timeouts
        if not self._stream:
            if not session.was_opened and now - self._lost_s > timeouts.connect_s:
                raise self._error
            return
        silent_s = now - self._heard_s
        if silent_s > timeouts.dead_s:
            self._reconnect(
                Disconnected(
                    f"nothing was heard of {self._link.address} for {timeouts.dead_s:g} s."
                )
            )
            return
        if silent_s > timeouts.silence_s + 2 * (self._round_trip_s or 0.0):
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
        session = self._session
        is_fresh = not session.is_offline and not session.drafts
        waits = is_fresh and 0 < self._n_lacking <= _FAR and time.monotonic() < self._contexts_due_s
        return session.wants_draft and not waits

    def _draft(self) -> None:
        session = self._session
        drafter = self._drafter
        if session.wants_draft and self._n_lacking > _FAR and not session.is_offline:
            # those of a long prompt are on their way: to feed it level by level takes longer
            session.no_draft()
        if self._can_draft():
            began_s = time.perf_counter()
            draft = drafter.next(session.tokens, [draft.token for draft in session.drafts])
            if draft is not None:
                self._draft_s = _smoothed(self._draft_s, time.perf_counter() - began_s)
                session.add_draft(draft.token, draft.probability)
            elif not drafter.is_catching_up:
                session.no_draft()
        elif not session.wants_draft and drafter.n_pending >= _WARM_EVERY and not session.drafts:
            drafter.warm(session.tokens)

    # What goes out

    def _flush(self) -> None:
        if messages := self._session.take_messages():
            self._link.send(self._stream, messages)
        events = self._session.take_events()
        now = time.monotonic()
        if events and now - self._saved_s > _SAVE_EVERY_S:
            self._save()
        for event in events:
            if isinstance(event, Done):  # the last statistics sum up
                self._on_event(self.stats())
            self._on_event(event)
        if now - self._told_s > _STATS_EVERY_S and not self._session.finish:
            self._told_s = now
            self._on_event(self.stats())

    def _save(self) -> None:
        if self._file is not None:
            self._saved_s, session = time.monotonic(), self._session
            tokens = tuple(session.tokens)
            replace(
                self._saved, session=session.session, tokens=tokens, finish=session.finish
            ).save(self._file)


def _smoothed(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + (seconds - before) / 8


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
