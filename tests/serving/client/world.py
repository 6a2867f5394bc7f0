"""A world for the client's state machine: a language, a server, a network and a drafter.

The server decodes the language. One random generator decides everything, so a run can be repeated.
Messages wait in two queues, one per direction. Every step of the world delivers, computes, drafts
or breaks one thing.
"""

import hashlib
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from moa_data.errors import Disconnected
from moa_data.moa.decoding.tree import TreeShape
from moa_data.serving import moa_v1_pb2 as pb
from moa_data.serving.client.session import (
    AnswerSettings,
    ChosenMode,
    ClientSession,
    Done,
    Event,
    RolledBack,
    SavedAnswer,
    Tokens,
    Verified,
)
from moa_data.serving.detokenizer import Detokenizer

VOCABULARY, EOS = 50, 1
PROMPT = (7, 8, 9, 10)
N_NEW, MAX_OFFLINE = 40, 12
STEPS = ("connect", "draft", "deliver_up", "compute", "deliver_down")
FAULTS = ("cut", "stall", "restart_server", "restart_client", "repeat")


def texts() -> Detokenizer:
    return Detokenizer(lambda tokens: "".join(f"{token} " for token in tokens))


def next_token(tokens: list[int]) -> int:
    """Return the next token of the language.

    Like greedy decoding, it is a function of the last tokens and the position.
    """
    digest = hashlib.blake2b(
        bytes(tokens[-3:]) + len(tokens).to_bytes(2, "big"), digest_size=4
    ).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


def answer(n_tokens: int) -> tuple[list[int], str]:
    """Return the plain decoding of PROMPT, and why it ends."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + n_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            return tokens[len(PROMPT) :], "stop"
    return tokens[len(PROMPT) :], "length"


class Server:
    """Decodes the language for one client. The session survives a cut, but not a restart."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.n_sessions = chance, 0
        self.restart()
        self.connect()

    def connect(self) -> None:
        """Begin a connection without any messages."""
        self.out: list[pb.ServerMessage] = []
        self.is_open, self.running = False, 0
        self.n_context = self.last = 0
        self.waiting: deque[pb.ClientMessage] = deque()

    def restart(self) -> None:
        """Forget the session."""
        self.name, self.max_drafts = "", self.chance.randint(1, 6)
        self.tokens, self.limit, self.finish = list[int](), 0, ""

    def take(self, message: pb.ClientMessage) -> None:
        if message.sequence > self.last:
            self.last = message.sequence
            self.waiting.append(message)

    def tick(self) -> None:
        """Answer a message, decode some tokens of a run, or send some contexts."""
        if self.waiting:
            self._answer(self.waiting.popleft())
        elif self.running and not self.finish and self.chance.random() < 0.7:
            start = len(self.tokens)
            self._decode(1 if self.running == pb.RUN_MODE_PLAIN else self.chance.randint(1, 4))
            self._commit(start)
        elif self.is_open and self.n_context < len(self.tokens) - 1:
            stop = self.chance.randint(self.n_context + 1, len(self.tokens) - 1)
            values = bytes(self.tokens[self.n_context : stop])
            self._say(
                context=pb.Context(
                    start=self.n_context, n_positions=len(values), codec="int8", values=values
                )
            )
            self.n_context = stop

    def _answer(self, message: pb.ClientMessage) -> None:
        kind = message.WhichOneof("body")
        assert self.is_open or kind in ("open", "ping"), "the client opens first"
        if kind == "open":
            self._open(message.open)
        elif kind == "ping":
            self._say(pong=pb.Pong(id=message.ping.id))
        elif kind == "run":
            self.running = message.run.mode
        elif kind == "close":
            self.name = ""
        elif kind == "verify":
            self.running, at, n_accepted = 0, message.verify.start, 0
            for draft in message.verify.tokens[: self.max_drafts]:
                if at == len(self.tokens) and not self.finish and next_token(self.tokens) == draft:
                    self._decode(1)
                if self.tokens[at : at + 1] != [draft]:
                    break
                at, n_accepted = at + 1, n_accepted + 1
            if at == len(self.tokens):
                self._decode(1)
            self._commit(message.verify.start, n_accepted, message.sequence)

    def _open(self, body: pb.Open) -> None:
        known = list(body.tokens)
        assert body.n_prompt == len(PROMPT)
        assert known[: len(PROMPT)] == list(PROMPT)
        was_rebuilt = not self.name or body.session != self.name
        if was_rebuilt:
            self.n_sessions += 1
            self.name, self.tokens, self.finish = f"s{self.n_sessions}", [], ""
            self.limit = body.max_new_tokens + body.n_prompt
        assert self.tokens[: len(known)] == known[: len(self.tokens)], (
            "what is committed never changes"
        )
        self.tokens += known[len(self.tokens) :]
        self.is_open, self.n_context = True, body.n_context
        opened = pb.Opened(
            session=self.name,
            max_drafts=self.max_drafts,
            max_positions=1000,
            was_rebuilt=was_rebuilt,
        )
        self._say(opened=opened)
        if len(self.tokens) > len(known):
            self._commit(len(known))

    def _decode(self, n_tokens: int) -> None:
        for _ in range(n_tokens):
            if self.finish:
                return
            self.tokens.append(next_token(self.tokens))
            is_full = len(self.tokens) == self.limit
            self.finish = "stop" if self.tokens[-1] == EOS else "length" if is_full else ""

    def _commit(self, start: int, n_accepted: int = 0, answers: int = 0) -> None:
        tokens, finish = self.tokens[start:], self.finish
        self._say(
            committed=pb.Committed(
                start=start, tokens=tokens, n_accepted=n_accepted, answers=answers, finish=finish
            )
        )

    def _say(self, **body: Any) -> None:
        self.out.append(pb.ServerMessage(**body))


@dataclass
class Display:
    """The user's display, built only from events."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    n_verified: int = 0
    finish: str = ""
    max_unverified: int = 0

    def show(self, event: Event) -> None:
        assert not self.finish, f"nothing happens behind the end, not {event}"
        if isinstance(event, Tokens):
            assert event.start == len(self.tokens), "tokens are appended"
            assert len(event.tokens) == len(event.texts) == len(event.kinds) > 0
            self.tokens += event.tokens
            self.texts += event.texts
            if event.kinds[0] != "unverified":
                assert self.n_verified == event.start, "verified text has no gap"
                self.n_verified = len(self.tokens)
        elif isinstance(event, Verified):
            assert self.n_verified < event.stop <= len(self.tokens)
            self.n_verified = event.stop
        elif isinstance(event, RolledBack):
            assert self.n_verified == event.stop < len(self.tokens), (
                "only what is not verified is taken back"
            )
            del self.tokens[event.stop :], self.texts[event.stop :]
        elif isinstance(event, Done):
            self.finish = event.reason
        self.max_unverified = max(self.max_unverified, len(self.tokens) - self.n_verified)


class World:
    """The client, the server and the network between them."""

    def __init__(self, seed: int, mode: ChosenMode) -> None:
        self.chance, self.mode = random.Random(seed), mode
        self.accuracy = self.chance.choice((0.0, 0.5, 0.9, 1.0))
        self.server = Server(self.chance)
        self.display, self.contexts = Display(), bytearray()
        self.session = self._session(list(PROMPT), "")
        self.up: deque[pb.ClientMessage] = deque()
        self.down: deque[pb.ServerMessage] = deque()
        self.is_up = False

    def _session(self, tokens: list[int], name: str) -> ClientSession:
        shape = TreeShape(self.chance.randint(1, 6), stop_below=self.chance.choice((0.0, 0.3)))
        settings = AnswerSettings(
            max_offline=MAX_OFFLINE,
            eos_token_ids=frozenset({EOS}),
            mode=self.mode,
            shape=shape,
        )
        saved = SavedAnswer(name, tuple(tokens), len(PROMPT), N_NEW)
        return ClientSession(saved, settings, texts())

    # The actions

    def connect(self) -> None:
        if not self.is_up:
            self.is_up = True
            self.server.connect()
            self.session.link_up()

    def cut(self) -> None:
        """End the connection.

        Messages in flight are lost, also some that the server has just processed.
        """
        if self.is_up:
            for _ in range(self.chance.randint(0, len(self.up))):
                self.server.take(self.up.popleft())
            for _ in range(self.chance.randint(0, 3)):
                self.server.tick()
            self.is_up = False
            self.up.clear()
            self.down.clear()
            self.session.link_down("cut")

    def stall(self) -> None:
        self.session.stall("silence")

    def restart_server(self) -> None:
        self.cut()
        self.server.restart()

    def restart_client(self) -> None:
        """Forget everything but the file on disk.

        It holds the session id and the committed tokens; the newest may be missing.
        """
        self._look()
        self.cut()
        self._look()
        n_saved = self.chance.randint(len(PROMPT), len(self.session.tokens))
        self.display, self.contexts = Display(), bytearray()
        self.session = self._session(self.session.tokens[:n_saved], self.session.session)

    def deliver_up(self) -> None:
        if self.up:
            self.server.take(self.up.popleft())

    def deliver_down(self) -> None:
        if self.down:
            message = self.down.popleft()
            n_before = self.session.n_context
            try:
                self.session.receive(message)
            except Disconnected:
                self.cut()
            if n_new := self.session.n_context - n_before:
                self.contexts += message.context.values[-n_new:]

    def repeat(self) -> None:
        """Deliver a message twice. Repeated tokens and contexts must change nothing."""
        if self.down and self.down[0].WhichOneof("body") in ("committed", "context"):
            self.down.appendleft(self.down[0])
            self.deliver_down()

    def compute(self) -> None:
        if self.is_up:
            self.server.tick()

    def draft(self) -> None:
        """Draft a token, if the session wants one.

        Its accuracy is that of the drafter, which needs contexts most of the time.
        """
        session = self.session
        if session.wants_draft:
            tokens = session.tokens + [draft.token for draft in session.drafts]
            if session.n_context == 0 and self.chance.random() < 0.8:
                session.no_draft()
                return
            is_right = self.chance.random() < self.accuracy
            token = next_token(tokens) if is_right else self.chance.randrange(VOCABULARY)
            session.add_draft(token, self.chance.choice((0.99, 0.9, 0.4)))

    def act(self, action: str) -> None:
        """Perform one action, then check the result."""
        if not self.session.finish or action in ("restart_client", "restart_server"):
            getattr(self, action)()
        self._look()

    def _look(self) -> None:
        for event in self.session.take_events():
            self.display.show(event)
        tokens = self.session.tokens
        assert bytes(self.contexts) == bytes(tokens[: len(self.contexts)]), "contexts have no gaps"
        shown = (
            tokens[len(PROMPT) :]
            + [draft.token for draft in self.session.drafts][: self.session.n_shown]
        )
        assert self.display.tokens == shown
        assert self.session.n_shown <= MAX_OFFLINE
        if self.is_up:
            self.up += self.session.take_messages()
            self.down += self.server.out
        else:
            assert not self.session.take_messages()
        self.server.out.clear()

    def live(self, actions: list[str]) -> None:
        """Perform some actions, then let everything work.

        The answer must end soon, and equal that of plain decoding.
        """
        for action in actions:
            self.act(action)
        for action in STEPS * 4000:
            if self.session.finish:
                break
            self.act(action)
        tokens, reason = answer(N_NEW)
        assert self.session.tokens[len(PROMPT) :] == tokens
        assert self.display.tokens == tokens
        assert "".join(self.display.texts) == "".join(f"{token} " for token in tokens)
        assert self.display.n_verified == len(tokens)
        assert self.session.finish == self.display.finish == reason
