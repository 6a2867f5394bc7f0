"""A server from its start to its end: engine, HTTP and gRPC in one process and one event loop.

A first signal drains: listeners close, requests that come over open connections are refused, answers have a grace
period to end, and drafting sessions are told to come back later. A second one, or the end of that period, breaks the
rest off.
"""

import asyncio
import contextlib
import functools
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import uvicorn

from ...errors import RequestInvalid
from .connections import ConnectionLimits, HttpServer
from .grpc import DraftingServer, DraftingSettings, serve_grpc
from .guard import Sites
from .handshake import Identities
from .http import create_app
from .service import Service

_LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_HEADER_BYTES = 1 << 16
_MOST_FILES = 1 << 16
_SEND_BUFFER_BYTES = 1 << 16
"""Text that waits in the kernel for each reader: some hundreds of tokens, enough for any line."""


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and how long it may take to end.

    Attributes:
        port: of HTTP; 0 for any that is free.
        tls: files of the certificate chain and of its key; None for plain HTTP.
        grace_s: seconds that answers have to end when the server does.
        allowed_hosts: names by which a server without tokens may be addressed, besides ``host`` and addresses.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls: tuple[Path, Path] | None = None
    grace_s: float = 30.0
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a server ended.

    Attributes:
        signum: the signal that ended it; None where it was told to end otherwise.
        n_broken_off: answers that had not ended.
    """

    signum: int | None
    n_broken_off: int


@dataclass(frozen=True)
class Drafting:
    """What the gRPC server needs beside the engine; its address is that of HTTP with another port."""

    identities: Identities
    settings: DraftingSettings


class ServerRun:
    """One run of a server.

    Args:
        on_ready: called with the addresses of HTTP and gRPC once requests are taken; the latter may be None.
        drafting: None for no gRPC.
    """

    def __init__(
        self,
        service: Service,
        listening: Listening,
        on_ready: Callable[[str, str | None], None],
        drafting: Drafting | None = None,
    ) -> None:
        self._service, self._listening, self._on_ready, self._drafting = service, listening, on_ready, drafting
        self._signum: int | None = None
        self._ending, self._breaking_off = asyncio.Event(), asyncio.Event()

    def end(self, signum: int | None = None) -> None:
        """Drain, or, when called again, break off; to be called in the event loop."""
        self._signum = signum
        if self._ending.is_set():
            self._breaking_off.set()
        self._ending.set()

    async def serve(self) -> Ended:
        """Serve until a signal comes or :meth:`end` is called.

        Raises:
            ServingError: an address cannot be used, or the files of TLS.
        """
        service = self._service
        with bind(self._listening.host, self._listening.port) as listener, self._signals():
            http = self._http(listener)
            service.engine.start()
            drafting: DraftingServer | None = None
            serving: asyncio.Task[None] | None = None
            try:
                drafting = await self._start_drafting()
                serving = asyncio.create_task(http.serve(sockets=[listener]))
                while not http.started and not serving.done():
                    await asyncio.sleep(0.01)
                if http.started:
                    self._tell_addresses(listener, drafting)
                    await _first_of(serving, self._ending.wait())
                return await self._drain(http, serving, drafting)
            finally:
                if drafting is not None:
                    await drafting.stop()
                service.engine.stop()

    def _http(self, listener: socket.socket) -> HttpServer:
        listening = self._listening
        sites = Sites(
            frozenset(name.lower() for name in (listening.host, *listening.allowed_hosts)),
            ip_address(listener.getsockname()[0]).is_loopback,
            self._service.tokens.is_open,
        )
        cert, key = listening.tls or (None, None)
        if cert is not None and key is not None:
            check_tls(cert, key)
        config = uvicorn.Config(
            create_app(self._service, sites), http="h11", ws="none", lifespan="off", ssl_certfile=cert,
            ssl_keyfile=key, log_config=None, access_log=False, server_header=False,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            timeout_keep_alive=max(1, round(listening.connections.head_s)),
            timeout_graceful_shutdown=max(1, round(listening.grace_s)),
        )  # fmt: skip
        return HttpServer(config, listening.connections)

    async def _start_drafting(self) -> DraftingServer | None:
        if self._drafting is None:
            return None
        credentials = None
        if self._listening.tls is not None:
            cert, key = (file.read_bytes() for file in self._listening.tls)
            credentials = grpc.ssl_server_credentials([(key, cert)])
        service, settings = self._service, replace(self._drafting.settings, host=self._listening.host)
        server = await serve_grpc(service.engine, self._drafting.identities, settings, service.tokens, credentials)
        service.metrics.add_drafting(server.service.counts)
        return server

    def _tell_addresses(self, listener: socket.socket, drafting: DraftingServer | None) -> None:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self._listening.tls is None else "https"
        self._on_ready(f"{scheme}://{shown}:{port}", f"{shown}:{drafting.port}" if drafting else None)

    async def _drain(self, http: HttpServer, serving: asyncio.Task[None], drafting: DraftingServer | None) -> Ended:
        """Let what is being done end, or break it off."""
        self._service.is_draining = True
        http.should_exit = True
        _LOG.info("draining: %d requests are being answered", self._service.metrics.n_in_flight)
        tasks = [serving]
        if drafting is not None:
            tasks.append(asyncio.create_task(drafting.stop(self._listening.grace_s)))
        await _first_of(asyncio.gather(*tasks), self._breaking_off.wait())
        http.force_exit = True
        for task in tasks[1:]:
            task.cancel()
        await serving
        rest = list(http.server_state.tasks)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        return Ended(self._signum, self._service.metrics.n_broken_off)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals end the run, where the event loop is in the main thread."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            # Not by loop.add_signal_handler, which would replace the wakeup descriptor that commands/signals.py reads.
            end = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, self.end)
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
                    before[number] = signal.signal(number, lambda signum, _frame: end(signum))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """Listen on an address.

    Raises:
        RequestInvalid: it cannot be used.
    """
    with contextlib.ExitStack() as undo:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it. By itself the kernel would take megabytes for a reader that does not read.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            listener.bind((host, port))
        except OSError as error:
            reason = (error.strerror or str(error)).rstrip(".")
            raise RequestInvalid(
                f"cannot listen on {host}, port {port}: {reason}. Choose another --host or --port."
            ) from error
        undo.pop_all()
    listener.setblocking(False)
    return listener


def raise_file_limit() -> None:
    """Let the process open as many files as it may: each connection is one, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_tls(cert: Path, key: Path) -> None:
    """Refuse files that make no TLS server.

    Raises:
        RequestInvalid: one of them cannot be read, or they do not belong together.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise RequestInvalid(
            f"{cert} and {key} make no TLS server: {error}. Give a certificate chain and its key, both PEM."
        ) from error


async def _first_of(work: asyncio.Future[Any], event: Coroutine[Any, Any, Any]) -> None:
    """Wait for some work or for an event; errors of the work are raised."""
    waiting = asyncio.ensure_future(event)
    try:
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        waiting.cancel()
