"""Access to a server: bearer tokens, rate limits, foreign web pages, open connections.

Everyone who can reach a server without bearer tokens may use it. If a browser runs on the server's
machine, every web page in this browser can reach the server: a browser sends a form or text/plain
to any address, without asking the server first for permission. If the host name of a page resolves
to 127.0.0.1, the page can even read the answers. So a server without tokens accepts only JSON, and
refuses web pages of other sites by the ``Origin`` header. On a loopback address, it also refuses
other host names in the ``Host`` header.

This module adds deadlines to uvicorn, which has none for a request's head, a TLS handshake or a
slow reader. It also counts connections per address. A connection is *waiting* until its request has
arrived completely, and again after the answer. In between it is *working*. ``head_s``, ``body_s``
and ``write_s`` are the deadlines::

    accept -> handshake -> head -> body -> answer -> head -> body -> ...
              '---- waiting ----------'   working   '-- waiting --'
              '------ head_s ----' body_s write_s

If too many connections are open, a new connection replaces the connection that has waited longest.
So any number of connections that send nothing, or send slowly, cannot block other connections.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import NotAllowed, RequestInvalid
from .api import ApiError
from .config import LimitOptions

_LOG = logging.getLogger(__name__)
_SCHEME = "bearer "
# Pause in seconds before the next connection is accepted, if the process has too many open files.
_RETRY_S = 0.1
# A connection is *young* for this many seconds after it began to wait for a request. Young
# connections are not closed to make room for others, because a busy process may not have read their
# requests yet.
_YOUNG_S = 1.0
# A young connection has waited for less than ``_YOUNG_S`` seconds for its request. Young
# connections may exceed a limit on connections, by at most the limit times this number.
_BURST = 3
# If a client reads nothing of its answer for this many seconds, the server may drop the client's
# connection to make room for another request.
_STUCK_S = 1.0


def read_tokens(path: str | Path) -> list[str]:
    """Read a file of bearer tokens, one per line.

    Empty lines and lines that start with # are skipped.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestInvalid(
            f"the token file {path} cannot be read: {error}. Give a text file with one token per "
            "line as `token_file`."
        ) from error
    tokens: list[str] = []
    for line in text.splitlines():
        token = line.strip()
        if token and not token.startswith("#"):
            tokens.append(token)
    if tokens:
        return tokens
    raise RequestInvalid(
        f"the token file {path} contains no access token. Write one token per line into it, or leave out "
        "`token_file` if no token is needed."
    )


class BearerTokens:
    """The bearer tokens that give access to a server. If there are none, everybody has access."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        # Compare hashes instead of tokens. All hashes have the same length, so the time of a
        # comparison reveals nothing about the length of a token.
        self._hashes = [_hash(token) for token in tokens]
        self.is_open = not self._hashes

    def check(self, authorization: Sequence[str]) -> str:
        """Check the values of a request's ``authorization`` headers, in constant time.

        Returns:
            An identifier of the token's owner that does not reveal the token. Empty if the server
            has no tokens.
        """
        if self.is_open:
            return ""
        # Refuse several ``authorization`` headers, because a proxy may have checked only one of
        # them.
        if len(authorization) > 1:
            raise NotAllowed(
                f"the request has {len(authorization)} authorization headers; send only one."
            )
        header = authorization[0] if authorization else ""
        if header[: len(_SCHEME)].lower() != _SCHEME:
            raise NotAllowed(
                "this server requires a token; send the header `authorization: Bearer TOKEN`, or "
                "run `moa-data chat --token-file FILE`."
            )
        digest = _hash(header[len(_SCHEME) :].strip())
        # Compare with all tokens, so that the time does not depend on which token matches.
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        if not any(matches):
            raise NotAllowed(
                "the token that was sent is not valid for this server; ask the owner of the server "
                "for a valid one."
            )
        return digest.hex()[:16]


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Rate:
    """Limits the rate of events, such as requests, with a token bucket.

    In the long run, at most ``per_second`` events per second are served. After a pause, up to
    ``at_once`` events are served immediately.
    """

    def __init__(self, per_second: float, at_once: float) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._left = at_once
        self._since = time.monotonic()

    def take(self) -> float:
        """Count one event. Return how many seconds to wait before this event may be served."""
        now = time.monotonic()
        self._left = min(self._at_once, self._left + (now - self._since) * self._per_second) - 1
        self._since = now
        return max(0.0, -self._left / self._per_second)


@dataclass(frozen=True)
class Guard:
    """Middleware of all routes. It refuses foreign web pages, and connections above the limit.

    ``/health`` is open to everybody. The request log wraps this middleware, so the log also
    contains the refused requests.

    Args:
        app: the application.
        names: allowed host names of the server in lower case, besides ``localhost`` and IP
            addresses.
        checks_hosts: whether the ``Host`` header of a request must have an allowed name.
        checks_pages: whether web pages of other sites are refused.
    """

    app: ASGIApp
    names: frozenset[str]
    checks_hosts: bool
    checks_pages: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it and close its connection."""
        serve = self.app
        if (error := self._refusal(scope)) is not None:
            scope["moa_data.facts"].error = error.message
            serve = error.response(connection="close")
        await serve(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        # If a request has the headers ``content-length`` and ``transfer-encoding``, a proxy and
        # this server could disagree about the end of the request (request smuggling). So refuse the
        # request.
        if "transfer-encoding" in headers and "content-length" in headers:
            message = (
                "the request has both the header content-length and the header transfer-encoding; "
                "send only one of them."
            )
            return ApiError(400, message, None, "invalid_request")
        if scope["path"] == "/health":
            return None
        if scope["moa_data.connection"].is_surplus:
            return ApiError(
                503,
                "the server has too many open connections; try again later.",
                None,
                "overloaded",
                1,
            )
        return self._refusal_of_page(scope["method"], headers) if self.checks_pages else None

    def _refusal_of_page(self, method: str, headers: Headers) -> ApiError | None:
        hosts = list(map(str.lower, headers.getlist("host")))
        for host in hosts:
            if self.checks_hosts and not self._is_own(host):
                message = (
                    f"{host[:120]!r} is not an allowed host name of this server. Use the server's "
                    "IP address instead, or start the server as `moa-data serve "
                    "--allowed-host NAME` or `moa-data serve --token-file FILE`."
                )
                return ApiError(403, message, None, "foreign_host")
        for origin in map(str.lower, headers.getlist("origin")):
            authority = origin.partition("://")[2]
            is_allowed = bool(authority) and _name_of(authority) in self.names
            if authority not in hosts and not is_allowed:
                message = (
                    f"web pages of {origin[:120]!r} may not use this server. To allow them, start "
                    "the server as `moa-data serve --allowed-host NAME` or `moa-data serve "
                    "--token-file FILE`."
                )
                return ApiError(403, message, None, "foreign_origin")
        types = headers.getlist("content-type")
        media_types = [value.lower().partition(";")[0].strip() for value in types]
        if method == "POST" and media_types != ["application/json"]:
            return ApiError(
                415,
                "the body must be JSON; send the header `content-type: application/json`.",
                None,
                "unsupported_media_type",
            )
        return None

    def _is_own(self, host: str) -> bool:
        name = _name_of(host)
        with contextlib.suppress(ValueError):
            return name == "localhost" or name in self.names or bool(ipaddress.ip_address(name))
        return False


def _name_of(authority: str) -> str:
    with contextlib.suppress(ValueError):
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    return ""


class Connection(H11Protocol):
    """A client's connection to the HTTP server, based on uvicorn's class for HTTP/1.1.

    All points in time are values of ``time.monotonic()``.
    """

    def __init__(
        self, pool: "Connections", sock: socket.socket, address: str, **options: Any
    ) -> None:
        super().__init__(**options)
        self.pool = pool
        self.address = address
        self._socket = sock
        self._routes, self.app = self.app, self._respond
        # Whether a request has arrived completely and is not answered yet.
        self.is_working = False
        # Whether this connection exceeds a limit on connections. If it does, its requests are
        # refused. A new connection exceeds a limit only if all other connections are working.
        # Otherwise a waiting connection is closed to make room for the new one.
        self.is_surplus = False
        self.is_cut = False  # Whether the server aborted the connection.
        # Whether the present request was refused because its body is not HTTP.
        self.is_malformed = False
        self.has_asked = False  # Whether the client has ever sent the head of a request.
        self.since = time.monotonic()  # Time at which the connection began to wait for a request.
        # ``ends_s`` is the time at which the present answer must be complete. It is infinity if the
        # answer has no deadline. ``blocked_s`` is the time at which the server began to wait for
        # the client to read more of the answer. It is infinity while the server is not waiting.
        self.ends_s = self.blocked_s = float("inf")
        self._n_active = 0
        self._deadline: asyncio.TimerHandle | None = None

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        super().connection_lost(exc)

    @override
    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are not HTTP with the status 400, and close the connection.

        uvicorn calls this method. If the invalid bytes are in the body of a request, the server
        stops processing the request, even if parts of the answer were sent already.
        """
        if self.cycle is None or self.cycle.response_complete:
            _LOG.warning(
                "client %s sent bytes that are not HTTP; its connection was closed", self.address
            )
        else:
            # Nothing is logged here, because the log line of the request reports the malformed
            # body.
            self.is_malformed = not self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose head has arrived.

        HTTP pipelining allows a client to send the next request early. So this request may start
        before the previous one has ended.
        """
        scope["moa_data.connection"] = self

        async def receive_and_note() -> Any:
            message = await receive()
            self.is_working = not message.get("more_body", False)
            return message

        self.has_asked, self._n_active = True, self._n_active + 1
        self._set_deadline(None)
        try:
            await self._routes(scope, receive_and_note, lambda message: self._write(send(message)))
        finally:
            self._n_active -= 1
            if not self._n_active:
                self.wait()

    def wait(self) -> None:
        """Mark the connection as waiting, and set the deadline for the head of the next request."""
        self.is_working = False
        self.ends_s = float("inf")
        self.since = time.monotonic()
        self._set_deadline(self.pool.limits.head_s)

    async def _write(self, writing: Any) -> None:
        """Write to the client. Abort the connection if the client reads nothing for too long."""
        # If the send buffer has room, writing does not wait for the client.
        if not self.flow.write_paused:
            await writing
            return
        now = time.monotonic()
        self.blocked_s = now
        try:
            async with asyncio.timeout(max(0.0, min(self.pool.limits.write_s, self.ends_s - now))):
                await writing
        except TimeoutError:
            self.abort()
        finally:
            self.blocked_s = float("inf")

    def abort(self) -> None:
        """Abort the connection."""
        self.is_cut = True
        if self.transport is not None:
            self.transport.abort()
        else:  # During the TLS handshake, there is no transport yet. So shut down the socket.
            # The socket may be closed already, which is not an error.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """Remove this connection from the server's open connections."""
        self._set_deadline(None)
        self.pool.open.discard(self)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if seconds is not None and self in self.pool.open:
            self._deadline = self.loop.call_later(seconds, self.abort)


class Connections:
    """All open connections of a server."""

    def __init__(self, limits: LimitOptions) -> None:
        self.limits = limits
        self.open: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, connection: Connection) -> None:
        """Add a new connection. If there are too many, abort waiting connections."""
        same_address = {other for other in self.open if other.address == connection.address}
        has_room = self.make_room(same_address, self.limits.max_connections_each)
        connection.is_surplus = not (
            has_room and self.make_room(self.open, self.limits.max_connections)
        )
        self.open.add(connection)
        connection.wait()

    def make_room(self, crowd: set[Connection], most: int) -> bool:
        """Abort waiting connections, if necessary, so that one more connection fits into a limit.

        Connections that never sent a request are aborted first. Then connections are aborted that
        have waited longest.

        Args:
            crowd: the open connections to which the limit applies.
            most: the limit.

        Returns:
            Whether one more connection may be opened. The result is also True if only young
            connections wait. Young connections are not aborted, so the new connection exceeds the
            limit.
        """
        n_surplus = len(crowd) + 1 - most
        if n_surplus <= 0:
            return True
        waiting = sorted(
            (connection for connection in crowd if not connection.is_working),
            key=lambda connection: (connection.has_asked, connection.since),
        )
        # If many connections arrive at once, they wait only because this process has not read their
        # requests yet. So keep connections that are younger than ``_YOUNG_S``, unless the number of
        # connections exceeds the limit by more than ``_BURST`` times the limit.
        late = time.monotonic() - (_YOUNG_S if n_surplus <= _BURST * most else 0.0)
        for connection in waiting[:n_surplus]:
            if connection.since <= late:
                connection.abort()
        return bool(waiting)

    def drop_stuck(self) -> bool:
        """Abort the connection whose client has read nothing for the longest time.

        Returns:
            Whether a connection was aborted. The result is False if all clients read their answers.
        """
        stuck = min(self.open, key=lambda connection: connection.blocked_s, default=None)
        if stuck is None or time.monotonic() - stuck.blocked_s < _STUCK_S:
            return False
        stuck.abort()
        return True

    # uvicorn normally uses the class ``asyncio.Server``. With it, a connection would not be counted
    # before the end of its TLS handshake. So the next three methods do the work of
    # ``asyncio.Server``.

    def listen(self, listener: socket.socket, make: Callable[..., Connection], tls: Any) -> None:
        """Start accepting connections on a listening socket."""
        listener.listen(2048)
        self._tasks.add(asyncio.create_task(self._accept(listener, make, tls)))

    def close(self) -> None:
        """Stop accepting connections."""
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the server has stopped accepting connections."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(
        self, listener: socket.socket, make: Callable[..., Connection], tls: Any
    ) -> None:
        while True:
            try:
                sock, peer = await asyncio.get_running_loop().sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError:
                # The connection was not accepted, because the process has too many open files.
                # Close a waiting connection if possible, and try again after a pause.
                self.make_room(self.open, len(self.open))
                await asyncio.sleep(_RETRY_S)
                continue
            task = asyncio.create_task(self._connect(make(self, sock, str(peer[0])), sock, tls))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # Let other tasks run, even if new connections arrive all the time.
            await asyncio.sleep(0)

    async def _connect(self, connection: Connection, sock: socket.socket, tls: Any) -> None:
        self.add(connection)
        try:
            await connection.loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=tls,
                ssl_handshake_timeout=self.limits.head_s if tls else None,
            )
        except OSError:  # The TLS handshake failed or took too long. Drop the connection.
            sock.close()
            connection.forget()


class HttpServer(uvicorn.Server):
    """uvicorn with a limit on connections, and without its own signal handlers."""

    def __init__(self, config: uvicorn.Config, limits: LimitOptions) -> None:
        super().__init__(config)
        self._pool = Connections(limits)
        self.has_started = asyncio.Event()

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        for listener in sockets or ():
            self._pool.listen(
                listener, partial(Connection, config=self.config, **state), self.config.ssl
            )
        self.servers: list[Any] = [self._pool]
        self.started = True
        self.has_started.set()
