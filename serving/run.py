"""A server from its start to its end: engine, HTTP and gRPC in one process and one event loop.

A first signal drains: answers have a grace period to end, new work is refused, and drafting sessions are told to come
back later. Meanwhile connections are still accepted, so that ``/health`` can tell load balancers. The listener closes
when the last answer has ended. A second signal, or the end of the period, breaks the rest off.
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
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import uvicorn

from ..errors import RequestInvalid
from .access import HttpServer
from .grpc import DraftingServer, Identities
from .http import Service

OnReady = Callable[[str, str | None], None]
_LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_HEADER_BYTES = 1 << 16
_MAX_FILES = 1 << 16
# Text that waits in the kernel for each reader: some hundreds of tokens, enough for any line.
_SEND_BUFFER_BYTES = 1 << 16


class ServerRun:
    """One run of a server.

    ``on_ready`` is called with the addresses of HTTP and gRPC once requests are taken. Without identities, which
    drafting clients compare, gRPC is off, and its address is None.
    """

    def __init__(
        self, service: Service, on_ready: OnReady, identities: Identities | None = None
    ) -> None:
        self._service = service
        self._config = service.config
        self._on_ready = on_ready
        self._identities = identities
        # the signal that ended it; None where :meth:`end` was called without one
        self.signum: int | None = None
        self.drafting: DraftingServer | None = None  # that of gRPC
        self._ending = asyncio.Event()
        self._breaking_off = asyncio.Event()

    def end(self, signum: int | None = None) -> None:
        """Drain, or, when called again, break off; to be called in the event loop."""
        self.signum = signum
        if self._ending.is_set():
            self._breaking_off.set()
        self._ending.set()

    async def serve(self) -> None:
        """Serve until a signal comes or :meth:`end` is called; ServingError where an address cannot be used."""
        engine = self._service.engine
        with bind(self._config.host, self._config.port) as listener, self._signals():
            http = self._http(listener)
            engine.start()
            try:
                await self._start_drafting()
                serving = asyncio.create_task(http.serve(sockets=[listener]))
                while not http.started and not serving.done():
                    await asyncio.sleep(0.01)
                if http.started:
                    host, port = listener.getsockname()[:2]
                    shown = f"[{host}]" if ":" in host else host
                    scheme = "https" if self._config.tls else "http"
                    self._on_ready(
                        f"{scheme}://{shown}:{port}",
                        f"{shown}:{self.drafting.port}" if self.drafting else None,
                    )
                    await _first_of(serving, self._ending.wait())
                await self._drain(http, serving)
            finally:
                if self.drafting is not None:
                    await self.drafting.stop()
                engine.stop()

    def _http(self, listener: socket.socket) -> HttpServer:
        config = self._config
        service = self._service
        names = frozenset(name.lower() for name in config.allowed_host)
        app = service.app(names, checks_hosts=ip_address(listener.getsockname()[0]).is_loopback)
        cert, key = config.tls or (None, None)
        settings = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", ssl_certfile=cert, ssl_keyfile=key,
            log_config=None, log_level=logging.ERROR, access_log=False, server_header=False,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES, timeout_keep_alive=max(1, round(service.limits.head_s)),
        )  # fmt: skip
        return HttpServer(settings, service.limits)

    async def _start_drafting(self) -> None:
        config = self._config
        service = self._service
        if self._identities is None or config.grpc_port is None:
            return
        credentials = None
        if config.tls is not None:
            cert, key = (file.read_bytes() for file in config.tls)
            credentials = grpc.ssl_server_credentials([(key, cert)])
        server = DraftingServer(service.engine, self._identities, config, service.tokens)
        await server.start(config.host, config.grpc_port, credentials)
        self.drafting = server
        service.metrics.counts.append(lambda: server.counts)

    async def _drain(self, http: HttpServer, serving: asyncio.Task[None]) -> None:
        """Let what is being done end, or break it off."""
        self._service.is_draining = True
        # later requests are refused, so nobody waits for them
        answering = list(http.server_state.tasks)
        _LOG.info("draining: %d requests are being answered", self._service.metrics.n_in_flight)
        asyncio.get_running_loop().call_later(self._config.grace_s, self._breaking_off.set)
        work: list[asyncio.Future[None]] = list(answering)
        if self.drafting is not None:
            work.append(asyncio.ensure_future(self.drafting.stop(self._config.grace_s)))
        rest = asyncio.gather(*work, return_exceptions=True)
        await _first_of(rest, self._breaking_off.wait())
        rest.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await rest
        http.should_exit = True  # the listener and idle connections close
        await _first_of(serving, self._breaking_off.wait())
        http.force_exit = True
        await serving

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals end the run, where the event loop is in the main thread."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            # Not by loop.add_signal_handler, which would replace the wakeup descriptor that
            # commands/signals.py reads.
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
    """Bind a socket to an address; RequestInvalid where it cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        both = family == socket.AF_INET6 and host == "::"  # all addresses, those of IPv4 too
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0].rstrip(".")
        raise RequestInvalid(
            f"cannot listen on {host}, port {port}: {reason}. Choose another --host or --port."
        ) from error
    # Connections inherit it. By itself the kernel would take megabytes for a reader that does not
    # read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setblocking(False)
    return listener


def raise_file_limit() -> None:
    """Let the process open as many files as it may: each connection is one, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_tls(cert: Path, key: Path) -> None:
    """Refuse files that cannot be read or do not belong together with RequestInvalid."""
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
