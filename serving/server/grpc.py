"""The gRPC server of ``moa.v1``: one bidirectional stream a drafting session, docs/serving.md explains the exchange.

Three layers: a *stream* reads messages and writes those of its outbox; a *session* (``sessions``) is the text, which
outlives its streams; the engine computes. Whatever comes in, from garbage to too much, ends at most its own stream,
with a :class:`Failure` and the gRPC status that goes with it.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ...errors import DrafterError, MoaDataError, NotAllowed, Overloaded, ProtocolMismatch, RequestInvalid, ServingError
from ...text import first_line
from ..engine.engine import Engine
from ..engine.sequence import Request
from ..protocol import moa_v1_pb2 as pb
from .access import BearerTokens, Rate
from .handshake import Identities, read_open
from .outbox import Outbox
from .sessions import Client, Session

_LOG = logging.getLogger(__name__)

_CODES: dict[type[MoaDataError], str] = {
    Overloaded: "overloaded", RequestInvalid: "invalid", NotAllowed: "not_allowed", ProtocolMismatch: "mismatch",
    DrafterError: "invalid",
}  # fmt: skip
_SILENT_S = 10.0
"""Seconds after which a session of which nothing is heard, and that takes nothing, may give way to another."""
STATUSES = {
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED, "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "not_allowed": grpc.StatusCode.UNAUTHENTICATED, "mismatch": grpc.StatusCode.FAILED_PRECONDITION,
    "unavailable": grpc.StatusCode.UNAVAILABLE, "idle": grpc.StatusCode.DEADLINE_EXCEEDED,
    "internal": grpc.StatusCode.INTERNAL,
}  # fmt: skip
"""Code of a failure that ends a stream -> the stream's status."""


@dataclass(frozen=True)
class DraftingSettings:
    """Bounds of the server.

    Attributes:
        port: 0 for any free one.
        most_sessions: sessions of all clients, with a stream or without.
        most_sessions_each: of one bearer token, or of one address where there are no tokens.
        most_message_bytes: of a message from a client.
        messages_per_s: of one stream; more are read later. As many may come at once.
        open_s: seconds in which a stream must open its session.
        idle_s: seconds after which a session of which nothing was heard is forgotten.
        keepalive_s: seconds of silence after which a connection is tried, and again until it ends.
        take_s: seconds in which a client has to take the next message.
        most_open_connections: TCP connections; further ones are closed at once.
    """

    host: str = "127.0.0.1"
    port: int = 8001
    most_sessions: int = 256
    most_sessions_each: int = 64
    most_message_bytes: int = 1 << 20
    messages_per_s: float = 200.0
    open_s: float = 10.0
    idle_s: float = 600.0
    keepalive_s: float = 20.0
    take_s: float = 60.0
    most_open_connections: int = 8192


@dataclass
class DraftingCounts:
    """What the server has done and holds.

    Attributes:
        n_streams: open streams.
        n_opened: sessions that were opened anew.
        n_resumed: times that a session was taken up again.
        n_rebuilt: those of them whose text had to be read again.
        n_messages: messages from clients, by kind.
        n_failures: failures told to clients, by code.
    """

    n_sessions: int = 0
    n_streams: int = 0
    n_opened: int = 0
    n_resumed: int = 0
    n_rebuilt: int = 0
    n_messages: Counter[str] = field(default_factory=Counter)
    n_failures: Counter[str] = field(default_factory=Counter)
    n_bytes_in: int = 0
    n_bytes_out: int = 0


class _Stream:
    """One stream of one client."""

    def __init__(self) -> None:
        self.client, self.outbox = Client("", ""), Outbox()
        self.session: Session | None = None
        self.last_sequence = 0


class DraftingService:
    """Serves streams, and keeps the sessions.

    Attributes:
        counts: what happened so far.
    """

    def __init__(
        self, engine: Engine, identities: Identities, settings: DraftingSettings, tokens: BearerTokens
    ) -> None:
        self.counts = DraftingCounts()
        self._engine, self._identities, self._settings, self._tokens = engine, identities, settings, tokens
        self._sessions: dict[str, Session] = {}
        self._streams: set[_Stream] = set()
        self._is_draining = False

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Serve one stream, until either side ends it."""
        stream = _Stream()
        self._streams.add(stream)
        self.counts.n_streams = len(self._streams)
        reader = asyncio.create_task(self._read(stream, requests, context))
        try:
            while (message := await stream.outbox.next()) is not None:
                data = message.SerializeToString()
                async with asyncio.timeout(self._settings.take_s):
                    await context.write(data)
                self.counts.n_bytes_out += len(data)
                if stream.session is not None:
                    stream.session.used_s = time.monotonic()
                    stream.session.update_hold()
        except TimeoutError as error:
            await _abandon(context, f"nothing was read for {self._settings.take_s:g} s; open the session again.")
            raise asyncio.CancelledError from error  # for grpc the stream has been broken off
        finally:
            reader.cancel()
            self._leave(stream)
        if (failure := stream.outbox.failure) is not None:
            self.counts.n_failures[failure.code] += 1
            await context.abort(STATUSES[failure.code], failure.message)

    async def sweep(self) -> None:
        """Forget sessions of which nothing has been heard for too long; runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self._settings.idle_s / 4))
            late = time.monotonic() - self._settings.idle_s
            for session in [each for each in self._sessions.values() if each.used_s < late]:
                session.send_failure(
                    "idle", f"nothing was heard for {self._settings.idle_s:g} s; open the session again.", ends=True
                )
                self._forget(session)

    async def drain(self, seconds: float) -> None:
        """Take up nothing more, and let what is being done end within some seconds."""
        self._is_draining = True
        end = time.monotonic() + seconds
        while self._streams and time.monotonic() < end:
            for stream in self._streams:
                if stream.session is None or stream.session.is_idle:
                    self._tell_end(stream)
            await asyncio.sleep(0.02)
        for stream in self._streams:
            self._tell_end(stream)

    # Reading

    async def _read(self, stream: _Stream, requests: AsyncIterator[bytes], context: Any) -> None:
        """Take a stream's messages; whatever they are, only this stream may end of it."""
        try:
            stream.client = self._client(context)
            await self._take_messages(stream, requests)
        except MoaDataError as error:
            stream.outbox.fail(_code(error), str(error), ends=True)
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 - other streams must go on
            _LOG.exception("a stream failed")
            stream.outbox.fail("internal", "the server failed; open the session again.", ends=True)

    def _client(self, context: Any) -> Client:
        """Find whose stream it is; the bearer token is checked."""
        metadata = context.invocation_metadata() or ()
        owner = self._tokens.check([str(value) for name, value in metadata if name == "authorization"])
        return Client(owner, context.peer().rpartition(":")[0])

    async def _take_messages(self, stream: _Stream, requests: AsyncIterator[bytes]) -> None:
        late = asyncio.get_running_loop().call_later(self._settings.open_s, self._end_unopened, stream)
        rate = Rate(self._settings.messages_per_s, self._settings.messages_per_s)
        try:
            async for data in requests:
                self.counts.n_bytes_in += len(data)
                if wait := rate.take():
                    await asyncio.sleep(wait)
                await stream.outbox.wait_for_room()
                await self._take(stream, _parsed(data))
        finally:
            late.cancel()
        # The client says nothing more; it may still read the answers.
        if stream.session is None:
            stream.outbox.close()
        elif stream.session.outbox is stream.outbox:
            stream.session.end_when_idle()

    def _end_unopened(self, stream: _Stream) -> None:
        if stream.session is None:
            stream.outbox.fail("idle", f"no session was opened within {self._settings.open_s:g} s.", ends=True)

    async def _take(self, stream: _Stream, message: pb.ClientMessage) -> None:
        if message.sequence <= stream.last_sequence:
            return  # sent again
        stream.last_sequence = message.sequence
        kind, session = message.WhichOneof("body"), stream.session
        self.counts.n_messages[kind or "unknown"] += 1
        if kind == "ping":
            stream.outbox.put(pb.ServerMessage(pong=pb.Pong(id=message.ping.id)))
        elif kind == "open" and session is None:
            await self._open(stream, message.open)
        elif session is None:
            raise RequestInvalid("the session is not open; send Open first.")
        elif session.outbox is not stream.outbox:
            return  # another stream has taken the session up
        elif kind == "close":
            self._forget(session)
            stream.outbox.close()
        elif kind in ("run", "verify", "pause"):
            try:
                session.take(message.sequence, getattr(message, kind))
            except (Overloaded, RequestInvalid) as error:
                self.counts.n_failures[_code(error)] += 1
                session.send_failure(_code(error), str(error), answers=message.sequence)
        else:
            what = "the session is open already" if kind == "open" else "the message is of no known kind"
            session.send_failure("invalid", f"{what}; it is ignored.", answers=message.sequence)
        if session is not None:
            session.used_s = time.monotonic()

    # Sessions

    async def _open(self, stream: _Stream, body: pb.Open) -> None:
        if self._is_draining:
            self._tell_end(stream)
            return
        request = read_open(body, self._identities, self._engine.drafters)
        known = self._sessions.get(body.session)
        if known is None or known.client.owner != stream.client.owner:
            session = self._new_session(stream.client, request)
            self._answer_open(stream, session, body, request, was_rebuilt=bool(body.session))
            return
        async with known.taking_up:
            was_rebuilt = await self._take_up(known, request)
            self._answer_open(stream, known, body, request, was_rebuilt)

    def _answer_open(
        self, stream: _Stream, session: Session, body: pb.Open, request: Request, was_rebuilt: bool
    ) -> None:
        """Attach a session to its new stream."""
        engine = self._engine
        width = engine.drafters[request.drafter].context_width if request.drafter and request.wants_context else 0
        opened = pb.Opened(
            session=session.id, n_committed=len(session.tokens), context_width=width, was_rebuilt=was_rebuilt,
            most_drafts=engine.limits.max_drafts, most_positions=engine.target.max_positions,
            identities=pb.Identities(
                target=self._identities.target, tokenizer=self._identities.tokenizer,
                drafter=self._identities.drafters.get(request.drafter or "", ""),
            ),
        )  # fmt: skip
        stream.session, session.used_s = session, time.monotonic()
        stream.outbox.put(pb.ServerMessage(opened=opened))
        session.attach(stream.outbox, len(body.tokens))
        if width and request.n_context >= session.contexts.first:
            stream.outbox.send_contexts(session.contexts, body.codec, request.n_context, width)

    async def _take_up(self, known: Session, request: Request) -> bool:
        """Take a session from its stream, if it has one; returns whether its text must be read again."""
        known.check_text(request)
        known.send_failure("invalid", "another stream has taken the session up.", ends=True)
        known.detach()
        await known.wait_until_idle()
        self.counts.n_resumed += 1
        if self._sessions.get(known.id) is not known:
            raise Overloaded("the session was forgotten just now; open it again.")
        known.check_text(request)  # the engine may have gone on meanwhile
        if not known.must_rebuild(request):
            return False
        self.counts.n_rebuilt += 1
        known.begin_anew(request)
        return True

    def _new_session(self, client: Client, request: Request) -> Session:
        own = [session for session in self._sessions.values() if session.client.name == client.name]
        if len(own) >= self._settings.most_sessions_each:
            self._make_room(own)
        if len(self._sessions) >= self._settings.most_sessions:
            self._make_room(list(self._sessions.values()))
        try:
            loop = asyncio.get_running_loop()
            session = Session(secrets.token_urlsafe(), client, self._engine, request, loop, self._forget)
        except Overloaded:
            # The engine forgets a text between two calls, so the room is for whoever tries again.
            self._make_room(list(self._sessions.values()))
            raise
        self._sessions[session.id] = session
        self.counts.n_opened += 1
        self.counts.n_sessions = len(self._sessions)
        return session

    def _make_room(self, sessions: list[Session]) -> None:
        """Forget the session that has been without a stream for longest, else the one whose stream has been silent.

        Raises:
            Overloaded: all are used.
        """
        late = time.monotonic() - _SILENT_S
        silent = [
            session for session in sessions
            if session.outbox is None or (session.used_s < late and (session.is_idle or session.outbox.is_full))
        ]  # fmt: skip
        if not silent:
            raise Overloaded(f"{len(sessions)} sessions are open, which is the most; close one, or try again later.")
        session = min(silent, key=lambda session: (session.outbox is not None, session.used_s))
        session.send_failure("unavailable", "the session gave way to another; open it again.", ends=True)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        session.close()
        self._sessions.pop(session.id, None)
        self.counts.n_sessions = len(self._sessions)

    def _leave(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        self.counts.n_streams = len(self._streams)
        session = stream.session
        if session is not None and session.outbox is stream.outbox:
            session.detach()

    def _tell_end(self, stream: _Stream) -> None:
        stream.outbox.fail("unavailable", "the server is going down; open the session again later.", ends=True)


async def _abandon(context: Any, message: str) -> None:
    """Give a client that reads nothing the status that it gets when it does; not to be waited for."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await context.abort(STATUSES["idle"], message)


def _parsed(data: bytes) -> pb.ClientMessage:
    try:
        message: pb.ClientMessage = pb.ClientMessage.FromString(data)
    except DecodeError as error:
        raise RequestInvalid(f"these {len(data)} bytes are no message of moa.v1; check the client.") from error
    return message


def _code(error: MoaDataError) -> str:
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), "internal")


class DraftingServer:
    """A running server.

    Attributes:
        port: where it listens.
        service: what it serves.
    """

    def __init__(self, server: Any, port: int, service: DraftingService) -> None:
        self.port, self.service = port, service
        self._server = server
        self._sweeper = asyncio.create_task(service.sweep())

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take up nothing more, let what is being done end within some seconds, and stop."""
        await self.service.drain(grace_s)
        await self._server.stop(1.0)
        self._sweeper.cancel()


async def serve_grpc(
    engine: Engine,
    identities: Identities,
    settings: DraftingSettings | None = None,
    tokens: BearerTokens | None = None,
    credentials: Any = None,
) -> DraftingServer:
    """Start to serve in the running event loop.

    Args:
        engine: started.
        tokens: who may use the server; None for everybody.
        credentials: ``grpc.ServerCredentials`` for TLS; None for none.

    Raises:
        ServingError: the port is in use.
    """
    settings = settings or DraftingSettings()
    service = DraftingService(engine, identities, settings, tokens or BearerTokens())
    keepalive_ms = round(settings.keepalive_s * 1000)
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.most_message_bytes),
            ("grpc.max_concurrent_streams", 2 * settings.most_sessions_each),  # of one connection
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            ("grpc.http2.ping_timeout_ms", keepalive_ms),  # else a connection that swallows pings lives a minute more
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.server_handshake_timeout_ms", round(settings.open_s * 1000)),
            ("grpc.max_connection_idle_ms", round(min(settings.idle_s, 60) * 1000)),  # none is open
            ("grpc.max_allowed_incoming_connections", settings.most_open_connections),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),  # clients may try the connection, too
            ("grpc.so_reuseport", 0),  # a port in use is an error
        ],
        # Twice the sessions: one that is taken up again has two streams for a moment.
        maximum_concurrent_rpcs=2 * settings.most_sessions,
    )
    # Bytes, which are parsed here: grpc would end the stream as if the server had failed.
    handler = grpc.stream_stream_rpc_method_handler(service.serve)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("moa.v1.Drafting", {"Session": handler}),))
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.port}"
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ServingError(f"cannot listen on {address}: {first_line(error)}. Choose another port.") from error
    await server.start()
    return DraftingServer(server, port, service)
