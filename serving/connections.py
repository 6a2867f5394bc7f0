"""The open connections of the HTTP server: how many there are, and how long each may take.

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
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import LimitOptions

_ACCEPTS_AT_ONCE = 64
# Seconds without accepting connections where the process may open no more files.
_RETRY_S = 0.1
# Seconds in which the request of a new connection is expected to be read, however busy the process is.
_YOUNG_S = 1.0
# How many times the bound may come at once beyond it, for that long.
_BURST = 3
# Seconds after which a reader that takes nothing may lose its place to another request.
_STUCK_S = 1.0


class Connection:
    """One connection.

    Attributes:
        is_surplus: whether there were too many when it came, all of them working.
        is_cut: whether the server broke it off.
        has_asked: whether it has ever sent the head of a request.
        since: time, as of ``time.monotonic``, from which it waits.
        ends_s: time, as of ``time.monotonic``, at which its answer has to end.
    """

    def __init__(self, book: "Connections", sock: socket.socket, address: str) -> None:
        self.book, self.address = book, address
        self.transport: asyncio.Transport | None = None
        self.is_working = self.is_surplus = self.is_cut = False
        self.ends_s, self.blocked_s = float("inf"), float("inf")
        self._socket, self.has_asked, self._n_active, self.since = sock, False, 0, time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """Wait for the head of a request."""
        self.is_working, self.ends_s, self.since = False, float("inf"), time.monotonic()
        self._set_deadline(self.book.limits.head_s)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Work on a request whose head has arrived; one that was sent together with it may begin before its end."""
        self.has_asked, self._n_active = True, self._n_active + 1
        self._set_deadline(None)
        try:
            yield
        finally:
            self._n_active -= 1
            if not self._n_active:
                self.wait()

    async def write(self, writing: Any) -> None:
        """Wait for a reader to have room; one that has none for too long is cut off."""
        now = time.monotonic()
        self.blocked_s = now
        try:
            async with asyncio.timeout(max(0.0, min(self.book.limits.write_s, self.ends_s - now))):
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
        else:
            with contextlib.suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Note that it has ended."""
        self._set_deadline(None)
        self.book.remove(self)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if seconds is not None and self in self.book.open:
            self._deadline = self._loop.call_later(seconds, self.abort)


class Connections:
    """All open connections of a server."""

    def __init__(self, limits: LimitOptions) -> None:
        self.limits = limits
        self.open: set[Connection] = set()
        self._of_address: dict[str, set[Connection]] = {}

    def add(self, sock: socket.socket, address: str) -> Connection:
        """Count a new connection; where there are too many, those that wait give way."""
        own, limits = self._of_address.setdefault(address, set()), self.limits
        has_room = self.make_room(own, limits.most_connections_each)
        has_room = has_room and self.make_room(self.open, limits.most_connections)
        connection = Connection(self, sock, address)
        connection.is_surplus = not has_room
        self.open.add(connection)
        self._of_address.setdefault(address, set()).add(connection)
        connection.wait()
        return connection

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        self.open.discard(connection)
        own = self._of_address.get(connection.address, set())
        own.discard(connection)
        if not own:
            self._of_address.pop(connection.address, None)

    def make_room(self, crowd: set[Connection], most: int) -> bool:
        """Break off connections that have waited longest, those that never sent a request first.

        The requests of many that come at once have not been read yet, so those of the last second stay, while they are
        no more than some times the bound.

        Returns:
            Whether there is room, or will be as soon as one of those that wait is late.
        """
        n_surplus = len(crowd) + 1 - most
        if n_surplus <= 0:
            return True
        waiting = sorted((each for each in crowd if not each.is_working), key=lambda each: (each.has_asked, each.since))
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


class _Protocol(H11Protocol):
    """uvicorn's protocol, whose requests are bounded by their connection."""

    def __init__(self, connection: Connection, **options: Any) -> None:
        super().__init__(**options)
        self._connection, self._app = connection, self.app
        self.app = self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let the connection be broken off from now on by its transport."""
        self._connection.transport = transport
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._connection.close()
        super().connection_lost(exc)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        connection = self._connection
        scope["moa_data.connection"] = connection

        async def receive_and_note() -> Any:
            message = await receive()
            connection.is_working = not message.get("more_body", False)
            return message

        with connection.answering():
            await self._app(scope, receive_and_note, lambda message: connection.write(send(message)))


class HttpServer(uvicorn.Server):
    """uvicorn with bounded connections, and without signal handlers of its own."""

    def __init__(self, config: uvicorn.Config, limits: LimitOptions) -> None:
        super().__init__(config)
        self.book = Connections(limits)

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Install no handlers: the code that runs the server has its own."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections of listening sockets."""
        await self.lifespan.startup()
        options = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        make = partial(_Protocol, **options)
        self.servers: list[Any] = [_Acceptor(listener, make, self.config.ssl, self.book) for listener in sockets or ()]
        self.started = True


class _Acceptor:
    """Accepts the connections of a listening socket; what ``asyncio.Server`` is to uvicorn."""

    def __init__(self, listener: socket.socket, make: Callable[..., _Protocol], tls: Any, book: Connections) -> None:
        self._listener, self._make, self._tls, self._book = listener, make, tls, book
        self._loop, self._tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        listener.listen(2048)
        self._resume()

    def close(self) -> None:
        """Accept nothing more, and give up handshakes."""
        self._loop.remove_reader(self._listener)
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait for the handshakes that were given up."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # too many open files
                self._book.make_room(self._book.open, len(self._book.open))
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_RETRY_S, self._resume)
                return
            sock.setblocking(False)
            task = self._loop.create_task(self._connect(sock, str(peer[0])))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, sock: socket.socket, address: str) -> None:
        connection, handshake_s = self._book.add(sock, address), self._book.limits.head_s if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                partial(self._make, connection), sock, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
        except OSError:  # no TLS, or it took too long
            sock.close()
            connection.close()
