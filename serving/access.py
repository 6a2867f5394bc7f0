"""Who may use a server, and how fast: bearer tokens, rates, web pages of other sites, open connections.

Without tokens, everyone who reaches the server may use it, on a machine with a browser every web page: a form or
text/plain is sent without asking, and a name of the page's own that resolves to 127.0.0.1 makes the answers readable.
So such a server takes only JSON, no foreign ``Origin``, and, on a loopback address, no foreign ``Host``.

uvicorn has no deadline for a request's head, a TLS handshake or a reader, and counts no addresses. Here a connection is
*waiting* until its request has arrived completely, and again when it is answered; meanwhile it is *working*::

    accept -> handshake -> head -> body -> answer -> head -> body -> ...
              '---- waiting ----------'   working   '-- waiting --'
              '------ head_s ----' body_s write_s

Where too many are open, the one that has waited longest gives way to the new one. So connections that send nothing, or
send it slowly, keep nobody out, whatever their number.
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
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import NotAllowed, RequestInvalid
from .api import ApiError
from .config import LimitOptions

_LOG = logging.getLogger(__name__)
_SCHEME = "bearer "
_RETRY_S = 0.1  # seconds without accepting connections where the process may open no more files
# seconds in which the request of a new connection is expected to be read, however busy the process
# is
_YOUNG_S = 1.0
_BURST = 3  # how many times the bound may come at once beyond it, for that long
# seconds after which a reader that takes nothing may lose its place to another request
_STUCK_S = 1.0


def read_tokens(path: str | Path) -> list[str]:
    """Read a file of tokens, one a line; empty lines and those that begin with # are skipped."""
    try:
        lines = [
            line.strip()
            for line in Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestInvalid(
            f"the tokens in {path} cannot be read: {error}. Give a text file."
        ) from error
    if tokens := [line for line in lines if line and not line.startswith("#")]:
        return tokens
    raise RequestInvalid(
        f"{path} holds no token; write one a line, or start without a file of tokens."
    )


class BearerTokens:
    """The tokens with which a server may be used; none lets everybody in."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        # Hashes have one length, so that comparing them shows nothing of a token's.
        self._hashes = [_hash(token) for token in tokens]
        self.is_open = not self._hashes

    def check(self, authorization: Sequence[str]) -> str:
        """Check the values of ``authorization`` headers, in the same time for a wrong token as for a right one.

        Returns what stands for the token's owner, without telling it; empty where everybody is let in.
        """
        if self.is_open:
            return ""
        if len(authorization) > 1:  # a proxy may have checked another one
            raise NotAllowed(
                f"the request has {len(authorization)} authorization headers; send one."
            )
        given = authorization[0] if authorization else ""
        if given[: len(_SCHEME)].lower() != _SCHEME:
            raise NotAllowed("this server asks for a token; send `authorization: Bearer TOKEN`.")
        digest = _hash(given[len(_SCHEME) :].strip())
        # all of them, whichever is right
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        if not any(matches):
            raise NotAllowed("this token is not known here; ask the owner of the server for one.")
        return digest.hex()[:16]


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Rate:
    """A token bucket: so many events a second, and some at once after a rest."""

    def __init__(self, per_second: float, at_once: float) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._left = at_once
        self._since = time.monotonic()

    def take(self) -> float:
        """Count one; returns the seconds to wait before it may be served."""
        now = time.monotonic()
        self._left = min(self._at_once, self._left + (now - self._since) * self._per_second) - 1
        self._since = now
        return max(0.0, -self._left / self._per_second)


class Guard:
    """Middleware of all routes, inside the log's; ``/health`` is answered to everybody.

    Args:
        names: by which the server may be addressed, other than ``localhost`` and addresses, in lower case.
        checks_hosts: whether the ``Host`` of a request has to be one of them.
        checks_pages: whether web pages of other sites are kept out.
    """

    def __init__(
        self, app: ASGIApp, names: frozenset[str], checks_hosts: bool, checks_pages: bool
    ) -> None:
        self._app = app
        self._names = names
        self._checks_hosts = checks_hosts
        self._checks_pages = checks_pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it and close its connection."""
        serve = self._app
        if (error := self._refusal(scope)) is not None:
            scope["moa_data.facts"].error = error.message
            serve = error.response(connection="close")
        await serve(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        names = {name for name, _ in scope["headers"]}
        # a proxy may have believed the other one
        if {b"transfer-encoding", b"content-length"} <= names:
            message = "a request has either a content-length or a transfer-encoding; send one."
            return ApiError(400, message, None, "invalid_request")
        if scope["path"] == "/health":
            return None
        if scope["moa_data.connection"].is_surplus:
            return ApiError(
                503, "too many connections are open; try again later.", None, "overloaded", 1
            )
        return (
            self._refusal_of_page(scope["method"], scope["headers"]) if self._checks_pages else None
        )

    def _refusal_of_page(self, method: str, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        hosts, origins, types = (
            [value.decode("latin-1").lower() for name, value in headers if name == wanted]
            for wanted in (b"host", b"origin", b"content-type")
        )
        foreign = [host for host in hosts if self._checks_hosts and not self._is_own(host)]
        if foreign:
            message = f"this server is not {foreign[0][:120]!r}; address it as 127.0.0.1, or start it with "
            return ApiError(
                403, message + "--allowed-host NAME or a token file.", None, "foreign_host"
            )
        authorities = {origin: origin.partition("://")[2] for origin in origins}
        foreign = [
            origin for origin, authority in authorities.items()
            if authority not in hosts and not (authority and _name_of(authority) in self._names)
        ]  # fmt: skip
        if foreign:
            message = f"web pages of {foreign[0][:120]!r} may not use this server; start it with --allowed-host NAME "
            return ApiError(403, message + "or a token file.", None, "foreign_origin")
        if method == "POST" and [value.partition(";")[0].strip() for value in types] != [
            "application/json"
        ]:
            return ApiError(
                415,
                "send the body as `content-type: application/json`.",
                None,
                "unsupported_media_type",
            )
        return None

    def _is_own(self, host: str) -> bool:
        name = _name_of(host)
        with contextlib.suppress(ValueError):
            return name == "localhost" or name in self._names or bool(ipaddress.ip_address(name))
        return False


def _name_of(authority: str) -> str:
    with contextlib.suppress(ValueError):
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    return ""


class Connection(H11Protocol):
    """One connection, by uvicorn's protocol. Times are of ``time.monotonic()``."""

    def __init__(
        self, pool: "Connections", sock: socket.socket, address: str, **options: Any
    ) -> None:
        super().__init__(**options)
        self.pool = pool
        self.address = address
        self._socket = sock
        self._routes, self.app = self.app, self._answer
        self.is_working = False  # whether a request has arrived completely and is not answered
        self.is_surplus = False  # whether there were too many when it came, all of them working
        self.is_cut = False  # whether the server broke it off
        self.is_malformed = False  # whether its request was refused since the body is not HTTP
        self.has_asked = False  # whether it has ever sent the head of a request
        self.since = time.monotonic()  # from which it waits
        # when its answer has to end; since when its reader takes nothing
        self.ends_s = self.blocked_s = float("inf")
        self._n_active = 0
        self._deadline: asyncio.TimerHandle | None = None

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        super().connection_lost(exc)

    @override
    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, and close the connection; uvicorn calls it for any of them.

        In the body of a request they end this request, whose own answer may have been sent in part or completely.
        """
        if self.cycle is None or self.cycle.response_complete:
            _LOG.warning("%s sent bytes that are not HTTP", self.address)
        else:  # the line of the request says it
            self.is_malformed = not self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work on a request whose head has arrived; one that was sent together with it may begin before its end."""
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
        """Wait for the head of a request."""
        self.is_working = False
        self.ends_s = float("inf")
        self.since = time.monotonic()
        self._set_deadline(self.pool.limits.head_s)

    async def _write(self, writing: Any) -> None:
        """Wait for a reader to have room; one that has none for too long is cut off."""
        if not self.flow.write_paused:  # then nothing waits
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
        """Break it off."""
        self.is_cut = True
        if self.transport is not None:
            self.transport.abort()
        else:  # in the TLS handshake
            with contextlib.suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """Note that it has ended."""
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
        """Count a new connection; where there are too many, those that wait give way."""
        own = {each for each in self.open if each.address == connection.address}
        has_room = self.make_room(own, self.limits.max_connections_each)
        connection.is_surplus = not (
            has_room and self.make_room(self.open, self.limits.max_connections)
        )
        self.open.add(connection)
        connection.wait()

    def make_room(self, crowd: set[Connection], most: int) -> bool:
        """Break off connections that have waited longest, those that never sent a request first.

        Returns whether there is room, or will be as soon as one of those that wait is late.
        """
        n_surplus = len(crowd) + 1 - most
        if n_surplus <= 0:
            return True
        waiting = sorted(
            (each for each in crowd if not each.is_working),
            key=lambda each: (each.has_asked, each.since),
        )
        # The requests of many that come at once have not been read yet, so those of the last second
        # stay, while they
        # are at most some times the bound.
        late = time.monotonic() - (_YOUNG_S if n_surplus <= _BURST * most else 0.0)
        for each in waiting[:n_surplus]:
            if each.since <= late:
                each.abort()
        return bool(waiting)

    def drop_stuck(self) -> bool:
        """Break off the connection whose reader has taken nothing for longest; returns False if all take something."""
        stuck = min(self.open, key=lambda each: each.blocked_s, default=None)
        if stuck is None or time.monotonic() - stuck.blocked_s < _STUCK_S:
            return False
        stuck.abort()
        return True

    # What uvicorn asks of an ``asyncio.Server``, which knows a connection only when its TLS
    # handshake has ended.

    def listen(self, listener: socket.socket, make: Callable[..., Connection], tls: Any) -> None:
        """Accept connections from now on."""
        listener.listen(2048)
        self._tasks.add(asyncio.create_task(self._accept(listener, make, tls)))

    def close(self) -> None:
        """Accept no more."""
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait for the end of that."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(
        self, listener: socket.socket, make: Callable[..., Connection], tls: Any
    ) -> None:
        while True:
            try:
                sock, peer = await asyncio.get_running_loop().sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError:  # too many open files
                self.make_room(self.open, len(self.open))
                await asyncio.sleep(_RETRY_S)
                continue
            task = asyncio.create_task(self._connect(make(self, sock, str(peer[0])), sock, tls))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # let others run, however many connect

    async def _connect(self, connection: Connection, sock: socket.socket, tls: Any) -> None:
        self.add(connection)
        try:
            await connection.loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=tls,
                ssl_handshake_timeout=self.limits.head_s if tls else None,
            )
        except OSError:  # no TLS, or it took too long
            sock.close()
            connection.forget()


class HttpServer(uvicorn.Server):
    """uvicorn with bounded connections, and without signal handlers of its own."""

    def __init__(self, config: uvicorn.Config, limits: LimitOptions) -> None:
        super().__init__(config)
        self._pool = Connections(limits)

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
