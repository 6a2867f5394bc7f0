"""The gRPC server of ``moa.v1``: one bidirectional stream a drafting session, see docs/protocol.md.

A *stream* carries messages both ways; a *session* (``sessions``) is the text, which outlives its streams; the engine
computes. Whatever comes in ends at most its own stream, with a :class:`Failure` and the gRPC status
that goes with it.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ..errors import (
    DrafterError,
    MoaDataError,
    Overloaded,
    ProtocolMismatch,
    RequestInvalid,
    ServingError,
)
from ..moa.decoding.sampling import SamplingConfig
from ..text import first_line
from . import moa_v1_pb2 as pb
from .access import BearerTokens, Rate
from .config import ServeConfig
from .engine.engine import Engine, count
from .engine.sequence import Request
from .sessions import DraftingSession, Stream
from .wire import ERRORS, PROTOCOL, STATUSES, check_codec

_LOG = logging.getLogger(__name__)

_MAX_CONNECTIONS = 8192  # open connections; further ones are closed at once
# Seconds after which a session of which nothing is heard, and that takes nothing, may give way to
# another.
_SILENT_S = 10.0


@dataclass(frozen=True)
class Identities:
    """Hashes of what the server has, see ``wire``; empty ones are not compared."""

    target: str = ""
    tokenizer: str = ""
    # by name; the first drafts for clients that name none
    drafters: Mapping[str, str] = field(default_factory=dict)

    def check(self, body: pb.Open) -> None:
        """Raise ProtocolMismatch for an Open of another protocol, target or tokenizer."""
        if body.protocol != PROTOCOL:
            raise ProtocolMismatch(
                f"the client speaks protocol {body.protocol}, this server {PROTOCOL}; install the same release on both."
            )
        given = body.identities
        for what, theirs, own in (
            ("target", given.target, self.target), ("tokenizer", given.tokenizer, self.tokenizer)
        ):  # fmt: skip
            if theirs and own and theirs != own:
                raise ProtocolMismatch(
                    f"the client's {what} is {theirs[:12]}, the server's {own[:12]}; use the same {what} on both sides."
                )

    def drafter(self, identity: str) -> str:
        """Find the drafter whose contexts a client wants, by default the first."""
        if not self.drafters:
            raise RequestInvalid(
                "this server has no drafter, and the client's needs what one sees of the target; start "
                "`moa-data serve` with --drafter and the drafter of the client."
            )
        for name, own in self.drafters.items():
            if not identity or not own or own == identity:
                return name
        known = ", ".join(own[:12] for own in self.drafters.values())
        raise ProtocolMismatch(
            f"the client's drafter is {identity[:12]}, the server has {known}; use the same drafter on both sides."
        )


@dataclass
class DraftingCounts:
    """What the server has done and holds."""

    n_sessions: int = count(
        "moa_drafting_sessions", "Drafting sessions, with a stream or without.", True
    )
    n_streams: int = count("moa_drafting_streams", "Open streams.", True)
    n_opened: int = count("moa_drafting_opened", "Sessions that were opened.")
    n_resumed: int = count("moa_drafting_resumed", "Times that a session was resumed.")
    n_rebuilt: int = count(
        "moa_drafting_rebuilt", "Times that a resumed text had to be read again."
    )
    n_messages: Counter[str] = count(  # noqa: RUF009
        "moa_drafting_messages", "Messages of clients by kind.", labels=("kind",)
    )
    n_failures: Counter[str] = count(  # noqa: RUF009
        "moa_drafting_failures", "Failures told to clients by code.", labels=("code",)
    )
    n_bytes_in: int = count("moa_drafting_bytes_in", "Bytes of messages from clients.")
    n_bytes_out: int = count("moa_drafting_bytes_out", "Bytes of messages to clients.")


class DraftingServer:
    """Serves streams, and keeps the sessions."""

    def __init__(
        self, engine: Engine, identities: Identities, config: ServeConfig, tokens: BearerTokens
    ) -> None:
        self.port = 0
        self.counts = DraftingCounts()
        self._engine = engine
        self._identities = identities
        self._tokens = tokens
        self._settings = config.drafting
        self._limits = config.limits
        self._sessions: dict[str, DraftingSession] = {}
        self._streams: set[Stream] = set()
        self._is_draining = False

    async def start(self, host: str = "127.0.0.1", port: int = 0, credentials: Any = None) -> None:
        """Serve in the running event loop from now on; port 0 is any free one, ``credentials`` are for TLS."""
        settings = self._settings
        keepalive_ms = round(self._settings.keepalive_s * 1000)
        self._server = server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._limits.max_body_bytes),
                # of one connection
                ("grpc.max_concurrent_streams", 2 * settings.max_sessions_each),
                ("grpc.keepalive_time_ms", keepalive_ms),
                ("grpc.keepalive_timeout_ms", keepalive_ms),
                # else one that swallows pings stays for a minute
                ("grpc.http2.ping_timeout_ms", keepalive_ms),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.server_handshake_timeout_ms", round(self._limits.head_s * 1000)),
                # none is open
                ("grpc.max_connection_idle_ms", round(min(settings.idle_s, 60) * 1000)),
                ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
                # clients may try the connection, too
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
                ("grpc.so_reuseport", 0),  # a port in use is an error
            ],
            # Twice the sessions: one that is resumed has two streams for a moment.
            maximum_concurrent_rpcs=2 * settings.max_sessions,
        )
        # Bytes, which are parsed here: grpc would end the stream as if the server had failed.
        methods = {"Session": grpc.stream_stream_rpc_method_handler(self._serve)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("moa.v1.Drafting", methods),)
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = (
                server.add_secure_port(address, credentials)
                if credentials
                else server.add_insecure_port(address)
            )
        except RuntimeError as error:
            raise ServingError(
                f"cannot listen on {address}: {first_line(error)}. Choose another port."
            ) from error
        await server.start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take up nothing more, let what is being done end within some seconds, and stop."""
        self._is_draining = True
        end = time.monotonic() + grace_s
        while self._streams and time.monotonic() < end:
            for stream in self._streams:
                if stream.session is None or stream.session.stopped.is_set():
                    _end(stream)
            await asyncio.sleep(0.02)
        for stream in self._streams:
            _end(stream)
        await self._server.stop(1.0)
        self._sweeper.cancel()

    async def _serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        stream = Stream()
        self._streams.add(stream)
        self.counts.n_streams = len(self._streams)
        reader = asyncio.create_task(self._read(stream, requests, context))
        try:
            while (message := await stream.next()) is not None:
                data = message.SerializeToString()
                async with asyncio.timeout(self._limits.write_s):
                    await context.write(data)
                self.counts.n_bytes_out += len(data)
                if stream.session is not None:
                    stream.session.used_s = time.monotonic()
                    stream.session.update_hold()
        except TimeoutError as error:
            # a client that reads nothing gets its status when it does
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    message_ = (
                        f"nothing was read for {self._limits.write_s:g} s; open the session again."
                    )
                    await context.abort(STATUSES["idle"], message_)
            raise asyncio.CancelledError from error  # for grpc the stream has been broken off
        finally:
            reader.cancel()
            self._streams.discard(stream)
            self.counts.n_streams = len(self._streams)
            if stream.session is not None and stream.session.stream is stream:
                stream.session.detach()
        if (failure := stream.failure) is not None:
            self.counts.n_failures[failure.code] += 1
            await context.abort(STATUSES[failure.code], failure.message)

    async def _sweep(self) -> None:
        idle_s = self._settings.idle_s
        while True:
            await asyncio.sleep(min(5.0, idle_s / 4))
            late = time.monotonic() - idle_s
            for session in [each for each in self._sessions.values() if each.used_s < late]:
                session.send_failure(
                    "idle",
                    f"nothing was heard for {idle_s:g} s; open the session again.",
                    ends=True,
                )
                self._forget(session)

    # Reading

    async def _read(self, stream: Stream, requests: AsyncIterator[bytes], context: Any) -> None:
        open_s = self._limits.head_s

        def end_unopened() -> None:
            if stream.session is None:
                stream.fail("idle", f"no session was opened within {open_s:g} s.", ends=True)

        late = asyncio.get_running_loop().call_later(open_s, end_unopened)
        try:
            metadata = context.invocation_metadata() or ()
            stream.owner = self._tokens.check(
                [str(value) for name, value in metadata if name == "authorization"]
            )
            stream.counted_by = stream.owner or context.peer().rpartition(":")[0]
            await self._take_messages(stream, requests)
        except MoaDataError as error:
            stream.fail(_code(error), str(error), ends=True)
        except Exception:  # noqa: BLE001 - other streams must not end of it
            _LOG.exception("a stream failed")
            stream.fail("internal", "the server failed; open the session again.", ends=True)
        finally:
            late.cancel()

    async def _take_messages(self, stream: Stream, requests: AsyncIterator[bytes]) -> None:
        rate = Rate(self._settings.messages_per_s, self._settings.messages_per_s)
        async for data in requests:
            self.counts.n_bytes_in += len(data)
            if wait := rate.take():
                await asyncio.sleep(wait)
            await stream.has_room.wait()
            try:
                message = pb.ClientMessage.FromString(data)
            except DecodeError as error:
                raise RequestInvalid(
                    f"these {len(data)} bytes are not a message of moa.v1; check the client."
                ) from error
            await self._take(stream, message)
        # The client says nothing more; it may still read the answers.
        if stream.session is None:
            stream.close()
        elif stream.session.stream is stream:
            stream.session.end_when_idle()

    async def _take(self, stream: Stream, message: pb.ClientMessage) -> None:
        if message.sequence <= stream.last_sequence:
            return  # sent again
        stream.last_sequence = message.sequence
        kind = message.WhichOneof("body")
        session = stream.session
        self.counts.n_messages[kind or "unknown"] += 1
        if kind == "ping":
            stream.put(pb.ServerMessage(pong=pb.Pong(id=message.ping.id)))
        elif kind == "open" and session is None:
            await self._open(stream, message.open)
        elif session is None:
            raise RequestInvalid("the session is not open; send Open first.")
        elif session.stream is not stream:
            return  # another stream has resumed the session
        elif kind == "close":
            self._forget(session)
            stream.close()
        elif kind in ("run", "verify"):
            try:
                session.take(message.sequence, getattr(message, kind))
            except (Overloaded, RequestInvalid) as error:
                self.counts.n_failures[_code(error)] += 1
                session.send_failure(_code(error), str(error), answers=message.sequence)
        else:
            what = (
                "the session is open already"
                if kind == "open"
                else "the message is of no known kind"
            )
            session.send_failure("invalid", f"{what}; it is ignored.", answers=message.sequence)
        if session is not None:
            session.used_s = time.monotonic()

    # Sessions

    async def _open(self, stream: Stream, body: pb.Open) -> None:
        if self._is_draining:
            _end(stream)
            return
        request = self._request(body)
        known = self._sessions.get(body.session)
        if known is None or known.owner != stream.owner:
            session = self._new_session(stream, request)
            self._answer_open(stream, session, body, request, was_rebuilt=bool(body.session))
            return
        async with known.resuming:
            was_rebuilt = await self._resume(known, request)
            self._answer_open(stream, known, body, request, was_rebuilt)

    def _request(self, body: pb.Open) -> Request:
        self._identities.check(body)
        drafter = next(iter(self._identities.drafters), None)
        wants_context = False
        if body.codec:
            check_codec(body.codec)
            drafter = self._identities.drafter(body.identities.drafter)
            wants_context = self._engine.drafters[drafter].context_width != 0
        given = body.sampling
        sampling = SamplingConfig(
            given.temperature, given.top_p or 1.0, given.top_k, given.repetition_penalty or 1.0
        )
        return Request(
            tuple(body.tokens), body.n_prompt, body.max_new_tokens, sampling, given.seed, drafter, wants_context,
            body.n_context,
        )  # fmt: skip

    def _answer_open(
        self,
        stream: Stream,
        session: DraftingSession,
        body: pb.Open,
        request: Request,
        was_rebuilt: bool,
    ) -> None:
        engine = self._engine
        own = self._identities
        width = (
            engine.drafters[request.drafter].context_width
            if request.drafter and request.wants_context
            else 0
        )
        drafter = own.drafters.get(request.drafter or "", "")
        opened = pb.Opened(
            session=session.id, n_committed=len(session.tokens), context_width=width, was_rebuilt=was_rebuilt,
            max_drafts=engine.max_drafts, max_positions=engine.target.max_positions,
            identities=pb.Identities(target=own.target, tokenizer=own.tokenizer, drafter=drafter),
        )  # fmt: skip
        stream.session = session
        session.used_s = time.monotonic()
        stream.put(pb.ServerMessage(opened=opened))
        session.attach(stream, len(body.tokens))
        if width and request.n_context >= session.contexts.first:
            stream.send_contexts(session.contexts, body.codec, request.n_context, width)

    async def _resume(self, known: DraftingSession, request: Request) -> bool:
        """Take a session from its stream, if it has one; returns whether its text must be read again."""
        known.check_text(request)
        known.send_failure("invalid", "another stream has resumed the session.", ends=True)
        known.detach()
        await known.stopped.wait()
        self.counts.n_resumed += 1
        if self._sessions.get(known.id) is not known:
            raise Overloaded("the session was forgotten just now; open it again.")
        known.check_text(request)  # the engine may have added tokens meanwhile
        if not known.must_rebuild(request):
            return False
        self.counts.n_rebuilt += 1
        known.restart(request)
        return True

    def _new_session(self, stream: Stream, request: Request) -> DraftingSession:
        own = [
            session
            for session in self._sessions.values()
            if session.counted_by == stream.counted_by
        ]
        if len(own) >= self._settings.max_sessions_each:
            self._make_room(own)
        if len(self._sessions) >= self._settings.max_sessions:
            self._make_room(list(self._sessions.values()))
        try:
            session = DraftingSession(stream, self._engine, request, self._forget)
        except Overloaded:
            # The engine forgets a text between two calls, so the room is for the next attempt.
            self._make_room(list(self._sessions.values()))
            raise
        self._sessions[session.id] = session
        self.counts.n_opened += 1
        self.counts.n_sessions = len(self._sessions)
        return session

    def _make_room(self, sessions: list[DraftingSession]) -> None:
        """Forget the session that has been without a stream for longest, else the one whose stream has been silent."""
        late = time.monotonic() - _SILENT_S
        silent = [
            each for each in sessions
            if each.stream is None or (each.used_s < late and (each.stopped.is_set() or each.stream.is_full))
        ]  # fmt: skip
        if not silent:
            raise Overloaded(
                f"{len(sessions)} sessions are open, which is the most; close one, or try again later."
            )
        session = min(silent, key=lambda session: (session.stream is not None, session.used_s))
        session.send_failure(
            "unavailable", "the session gave way to another; open it again.", ends=True
        )
        self._forget(session)

    def _forget(self, session: DraftingSession) -> None:
        session.close()
        self._sessions.pop(session.id, None)
        self.counts.n_sessions = len(self._sessions)


def _end(stream: Stream) -> None:
    stream.fail("unavailable", "the server is going down; open the session again later.", ends=True)


def _code(error: MoaDataError) -> str:
    if isinstance(error, DrafterError):  # of sampling settings
        return "invalid"
    return next((code for code, kind in ERRORS.items() if isinstance(error, kind)), "internal")
