"""The gRPC server of ``moa.v1``, the protocol in docs/protocol.md.

A *stream* is one gRPC call, which carries messages in both directions. A *session* (see
``sessions``) is one sequence, a prompt and its answer, which the engine decodes for a client that
drafts. A session has one stream at a time. If the connection is lost, the session continues on the
client's next stream. An invalid message can end only the stream on which it arrives. The server
then sends a ``Failure`` message and the matching gRPC status.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
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
from .sessions import ServerSession, Stream
from .wire import ERRORS, PROTOCOL, STATUSES, check_codec

_LOG = logging.getLogger(__name__)

# Maximum number of open connections. Further connections are closed at once.
_MAX_CONNECTIONS = 8192
# If the client of a session has neither sent nor read anything for this many seconds, a new session
# may replace this session.
_SILENT_S = 10.0


@dataclass(frozen=True)
class Identities:
    """Hashes of target, tokenizer and drafters, computed by the module ``wire``.

    An empty hash counts as equal to every other hash.
    """

    target: str = ""
    tokenizer: str = ""
    # Drafter name -> hash. The first drafter is used for clients that name no drafter.
    drafters: Mapping[str, str] = field(default_factory=dict)

    def check(self, body: pb.Open) -> None:
        """Raise ProtocolMismatch if a client's protocol, target or tokenizer differs."""
        if body.protocol != PROTOCOL:
            raise ProtocolMismatch(
                f"the client uses version {body.protocol} of the drafting protocol, but this "
                f"server uses version {PROTOCOL}; install the same release of moa-data on both."
            )
        client = body.identities
        for part, theirs, ours in (
            ("target", client.target, self.target), ("tokenizer", client.tokenizer, self.tokenizer)
        ):  # fmt: skip
            if theirs and ours and theirs != ours:
                raise ProtocolMismatch(
                    f"the client's {part} (hash {theirs[:12]}) differs from the server's {part} "
                    f"(hash {ours[:12]}); use the same {part} on both sides."
                )

    def drafter(self, identity: str) -> str:
        """Return the name of the server's drafter that is the same as a client's drafter.

        The server's drafter encodes contexts for the client. A context is the data that the
        client's drafter reads about one position.

        Args:
            identity: the hash of the client's drafter. If it is empty, the first drafter is
                returned.
        """
        if not self.drafters:
            raise RequestInvalid(
                "the client's drafter needs activations of the target, but this server has no "
                "drafter and therefore does not send any; start the server as `moa-data serve "
                "--drafter DRAFTER` with the client's drafter."
            )
        for name, known_identity in self.drafters.items():
            if not identity or not known_identity or known_identity == identity:
                return name
        known = ", ".join(known_identity[:12] for known_identity in self.drafters.values())
        raise ProtocolMismatch(
            f"the client's drafter (hash {identity[:12]}) is not a drafter of this server (hashes: "
            f"{known}); use the same drafter on both sides."
        )


@dataclass
class DraftingCounts:
    """Counters and gauges of the gRPC server."""

    n_sessions: int = count(
        "moa_drafting_sessions", "Open sessions of clients that draft, connected or not.", True
    )
    n_streams: int = count(
        "moa_drafting_streams", "Open gRPC streams (connections of sessions).", True
    )
    n_opened: int = count("moa_drafting_opened", "Number of sessions that were opened.")
    n_resumed: int = count(
        "moa_drafting_resumed", "Number of times that a client resumed a session."
    )
    n_rebuilt: int = count(
        "moa_drafting_rebuilt",
        "Number of times that a resumed session had to be prefilled again.",
    )
    n_messages: Counter[str] = count(  # noqa: RUF009
        "moa_drafting_messages", "Number of messages from clients, by kind.", labels=("kind",)
    )
    n_failures: Counter[str] = count(  # noqa: RUF009
        "moa_drafting_failures", "Number of errors sent to clients, by code.", labels=("code",)
    )
    n_bytes_in: int = count("moa_drafting_bytes_in", "Bytes of messages from clients.")
    n_bytes_out: int = count("moa_drafting_bytes_out", "Bytes of messages to clients.")


class DraftingServer:
    """Serves the gRPC streams of all clients, and keeps their sessions."""

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
        self._sessions: dict[str, ServerSession] = {}
        self._streams: set[Stream] = set()
        self._is_draining = False

    async def start(self, host: str = "127.0.0.1", port: int = 0, credentials: Any = None) -> None:
        """Start serving in the running event loop.

        Args:
            host: address to listen on.
            port: port to listen on. If it is 0, any free port is used.
            credentials: gRPC credentials for TLS.
        """
        settings = self._settings
        keepalive_ms = round(self._settings.keepalive_s * 1000)
        self._server = server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._limits.max_body_bytes),
                # Maximum number of streams of one connection.
                ("grpc.max_concurrent_streams", 2 * settings.max_sessions_each),
                ("grpc.keepalive_time_ms", keepalive_ms),
                ("grpc.keepalive_timeout_ms", keepalive_ms),
                # Without this setting, a connection that does not answer pings stays open for a
                # minute.
                ("grpc.http2.ping_timeout_ms", keepalive_ms),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.server_handshake_timeout_ms", round(self._limits.head_s * 1000)),
                # Time after which a connection without streams is closed.
                ("grpc.max_connection_idle_ms", round(min(settings.idle_s, 60) * 1000)),
                ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
                # Clients may send pings to the server, too, but at most one per second.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
                # Raise an error if the port is already used. By default, two servers could share
                # it.
                ("grpc.so_reuseport", 0),
            ],
            # Allow twice as many streams as sessions, because a session has two streams for a
            # moment while it is resumed.
            maximum_concurrent_rpcs=2 * settings.max_sessions,
        )
        # Messages are received as bytes and parsed here. If grpc parsed them, a malformed message
        # would end the stream as if the server had failed.
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
                f"the gRPC server cannot listen on {address}: {first_line(error)}. Choose another "
                "`grpc_port`."
            ) from error
        await server.start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new sessions, wait up to ``grace_s`` seconds for running work to end, and stop."""
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
            # The client has read nothing for too long. Try for one second to send a gRPC status
            # that says so. The status arrives only if the client reads again.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    message_ = (
                        f"the client has read nothing for {self._limits.write_s:g} s, so the "
                        "server disconnects it; open the session again."
                    )
                    await context.abort(STATUSES["idle"], message_)
            # The stream must end, even if the status was not sent. grpc treats a CancelledError as
            # a cancelled stream.
            raise asyncio.CancelledError from error
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
            unused = [session for session in self._sessions.values() if session.used_s < late]
            for session in unused:
                session.send_failure(
                    "idle",
                    f"the server removed the session, because it was not used for {idle_s:g} s; "
                    "open it again.",
                    ends=True,
                )
                self._forget(session)

    # The methods below read messages.

    async def _read(self, stream: Stream, requests: AsyncIterator[bytes], context: Any) -> None:
        open_s = self._limits.head_s

        def end_unopened() -> None:
            if stream.session is None:
                stream.fail(
                    "idle",
                    f"the client opened no session within {open_s:g} s; connect again and open one "
                    "at once.",
                    ends=True,
                )

        late = asyncio.get_running_loop().call_later(open_s, end_unopened)
        try:
            metadata = context.invocation_metadata() or ()
            authorization = [str(value) for name, value in metadata if name == "authorization"]
            stream.owner = self._tokens.check(authorization)
            stream.counted_by = stream.owner or context.peer().rpartition(":")[0]
            await self._take_messages(stream, requests)
        except MoaDataError as error:
            stream.fail(_code(error), str(error), ends=True)
        except Exception:  # noqa: BLE001 - other streams must go on
            _LOG.exception("the gRPC stream of a client failed")
            stream.fail(
                "internal",
                "the server failed while it processed a message; open the session again.",
                ends=True,
            )
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
                    f"a message of {len(data)} bytes is not a ClientMessage of the protocol "
                    "moa.v1; correct the client."
                ) from error
            await self._take(stream, message)
        # The client has closed its side of the stream, but may still read answers. If the stream
        # has a session, close the stream only after all messages of the client are answered.
        if stream.session is None:
            stream.close()
        elif stream.session.stream is stream:
            stream.session.end_when_idle()

    async def _take(self, stream: Stream, message: pb.ClientMessage) -> None:
        if message.sequence <= stream.last_sequence:
            # Ignore the message. It is a repeat, because a message with this number or a higher one
            # has already arrived.
            return
        stream.last_sequence = message.sequence
        kind = message.WhichOneof("body")
        session = stream.session
        self.counts.n_messages[kind or "unknown"] += 1
        if kind == "ping":
            stream.put(pb.ServerMessage(pong=pb.Pong(id=message.ping.id)))
        elif kind == "open" and session is None:
            await self._open(stream, message.open)
        elif session is None:
            raise RequestInvalid("the session is not open yet; send an Open message first.")
        elif session.stream is not stream:
            return  # Ignore the message, because another stream has resumed the session.
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
            reason = (
                "the session is already open"
                if kind == "open"
                else "this server does not know its kind"
            )
            session.send_failure(
                "invalid",
                f"the server ignored message {message.sequence}, because {reason}.",
                answers=message.sequence,
            )
        if session is not None:
            session.used_s = time.monotonic()

    # The methods below open, resume and remove sessions.

    async def _open(self, stream: Stream, body: pb.Open) -> None:
        if self._is_draining:
            _end(stream)
            return
        request = self._request(body)
        known = self._sessions.get(body.session)
        if known is None or known.owner != stream.owner:
            session = self._new_session(stream, request)
            self._reply_to_open(stream, session, body, request, was_rebuilt=bool(body.session))
            return
        async with known.resuming:
            was_rebuilt = await self._resume(known, request)
            self._reply_to_open(stream, known, body, request, was_rebuilt)

    def _request(self, body: pb.Open) -> Request:
        self._identities.check(body)
        drafter = next(iter(self._identities.drafters), None)
        wants_context = False
        if body.codec:
            check_codec(body.codec)
            drafter = self._identities.drafter(body.identities.drafter)
            wants_context = self._engine.drafters[drafter].context_width != 0
        settings = body.sampling
        sampling = SamplingConfig(
            settings.temperature,
            settings.top_p or 1.0,
            settings.top_k,
            settings.repetition_penalty or 1.0,
        )
        return Request(
            tuple(body.tokens), body.n_prompt, body.max_new_tokens, sampling, settings.seed,
            drafter, wants_context, body.n_context,
        )  # fmt: skip

    def _reply_to_open(
        self,
        stream: Stream,
        session: ServerSession,
        body: pb.Open,
        request: Request,
        was_rebuilt: bool,
    ) -> None:
        engine = self._engine
        known = self._identities
        width = (
            engine.drafters[request.drafter].context_width
            if request.drafter and request.wants_context
            else 0
        )
        drafter = known.drafters.get(request.drafter or "", "")
        opened = pb.Opened(
            session=session.id, n_committed=len(session.tokens), context_width=width,
            was_rebuilt=was_rebuilt, max_drafts=engine.max_drafts,
            max_positions=engine.target.max_positions,
            identities=pb.Identities(
                target=known.target, tokenizer=known.tokenizer, drafter=drafter
            ),
        )  # fmt: skip
        stream.session = session
        session.used_s = time.monotonic()
        stream.put(pb.ServerMessage(opened=opened))
        session.attach(stream, len(body.tokens))
        if width and request.n_context >= session.contexts.first:
            stream.send_contexts(session.contexts, body.codec, request.n_context, width)

    async def _resume(self, known: ServerSession, request: Request) -> bool:
        """Prepare a session for another stream: detach the old stream, and stop the engine's work.

        Returns:
            Whether the session's sequence was added to the engine again, and so is prefilled again.
        """
        known.check_text(request)
        known.send_failure("invalid", "another connection has resumed this session.", ends=True)
        known.detach()
        await known.stopped.wait()
        self.counts.n_resumed += 1
        if self._sessions.get(known.id) is not known:
            raise Overloaded(
                "the server removed the session while the client resumed it; open it again."
            )
        # Compare the tokens of the client and of the session again, because the engine may have
        # added tokens since the first comparison.
        known.check_text(request)
        if not known.must_rebuild(request):
            return False
        self.counts.n_rebuilt += 1
        known.restart(request)
        return True

    def _new_session(self, stream: Stream, request: Request) -> ServerSession:
        client_sessions = [
            session
            for session in self._sessions.values()
            if session.counted_by == stream.counted_by
        ]
        if len(client_sessions) >= self._settings.max_sessions_each:
            self._make_room(client_sessions)
        if len(self._sessions) >= self._settings.max_sessions:
            self._make_room(self._sessions.values())
        try:
            session = ServerSession(stream, self._engine, request, self._forget)
        except Overloaded:
            # The present attempt to open a session fails. Remove another session, so that the
            # client's next attempt can succeed. The engine removes the sequence of this session
            # only between two target calls.
            self._make_room(self._sessions.values())
            raise
        self._sessions[session.id] = session
        self.counts.n_opened += 1
        self.counts.n_sessions = len(self._sessions)
        return session

    def _make_room(self, sessions: Collection[ServerSession]) -> None:
        """Remove one unused session.

        A session is unused if it has no stream. A session with a stream is unused if its client has
        been silent for ``_SILENT_S`` seconds, and the engine is idle or the client reads slowly. If
        several sessions are unused, those without a stream come first, and then the session whose
        client has been silent for the longest time.

        Raises:
            Overloaded: all sessions are in use.
        """
        late = time.monotonic() - _SILENT_S
        silent: list[ServerSession] = []
        for other in sessions:
            is_stuck = other.stream is not None and (other.stopped.is_set() or other.stream.is_full)
            if other.stream is None or (is_stuck and other.used_s < late):
                silent.append(other)
        if not silent:
            raise Overloaded(
                f"{len(sessions)} sessions are open, which is the limit; close a session, or try "
                "again later."
            )
        session = min(silent, key=lambda session: (session.stream is not None, session.used_s))
        session.send_failure(
            "unavailable",
            "the server removed the session to make room for another one; open it again.",
            ends=True,
        )
        self._forget(session)

    def _forget(self, session: ServerSession) -> None:
        session.close()
        self._sessions.pop(session.id, None)
        self.counts.n_sessions = len(self._sessions)


def _end(stream: Stream) -> None:
    stream.fail(
        "unavailable", "the server is shutting down; open the session again later.", ends=True
    )


def _code(error: MoaDataError) -> str:
    # A DrafterError means that the client's sampling settings are invalid, so its code is
    # "invalid".
    if isinstance(error, DrafterError):
        return "invalid"
    for code, kind in ERRORS.items():
        if isinstance(error, kind):
            return code
    return "internal"
