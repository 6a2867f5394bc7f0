"""A running server: engine, HTTP and gRPC in one process and one event loop.

The first signal drains the server: running answers may continue for a grace period, new requests
are refused, and clients of drafting sessions are asked to come back later. Connections are still
accepted meanwhile, so that load balancers can query ``/health``. The listening socket closes when
the last answer has ended. A second signal, or the end of the grace period, aborts the answers that
are left.
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
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import grpc
import uvicorn

from ..errors import RequestInvalid
from .access import HttpServer
from .grpc import DraftingServer, Identities
from .http import Service, first_of

OnReady = Callable[[str, str | None], None]
_LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_HEADER_BYTES = 1 << 16
_MAX_FILES = 1 << 16
# Size in bytes of the kernel's send buffer of each connection. A buffer of this size holds the text
# of hundreds of tokens.
_SEND_BUFFER_BYTES = 1 << 16


class ServerRun:
    """One run of a server.

    Args:
        service: the HTTP service.
        on_ready: a function that is called as soon as the server accepts requests. Its arguments
            are the address of HTTP, and the address of gRPC (None if gRPC is off).
        identities: hashes by which drafting clients check that they have the server's target,
            tokenizer and drafter. If it is None, gRPC is off.
    """

    def __init__(
        self, service: Service, on_ready: OnReady, identities: Identities | None = None
    ) -> None:
        self._service = service
        self._config = service.config
        self._on_ready = on_ready
        self._identities = identities
        # The number of the signal that ended the run. None if the run has not ended, or if
        # :meth:`end` was called without a signal.
        self.signum: int | None = None
        self.drafting: DraftingServer | None = None  # The gRPC server.
        self._ending = asyncio.Event()
        self._breaking_off = asyncio.Event()

    def end(self, signum: int | None = None) -> None:
        """Drain the server. A second call aborts running answers. Call this in the event loop."""
        self.signum = signum
        if self._ending.is_set():
            self._breaking_off.set()
        self._ending.set()

    async def serve(self) -> None:
        """Serve until a signal arrives or :meth:`end` is called.

        Raises:
            ServingError: an address cannot be used.
        """
        engine = self._service.engine
        with bind(self._config.host, self._config.port) as listener, self._signals():
            http = self._http(listener)
            engine.start()
            try:
                await self._start_drafting()
                serving = asyncio.create_task(http.serve(sockets=[listener]))
                await first_of(serving, http.has_started.wait())
                host, port = listener.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                scheme = "https" if self._config.tls else "http"
                self._on_ready(
                    f"{scheme}://{shown}:{port}",
                    f"{shown}:{self.drafting.port}" if self.drafting else None,
                )
                await first_of(serving, self._ending.wait())
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
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_keep_alive=max(1, round(service.limits.head_s)),
        )  # fmt: skip
        return HttpServer(settings, service.limits)

    async def _start_drafting(self) -> None:
        config = self._config
        service = self._service
        if self._identities is None or config.grpc_port is None:
            return
        credentials = None
        if config.tls is not None:
            cert_file, key_file = config.tls
            cert = cert_file.read_bytes()
            key = key_file.read_bytes()
            credentials = grpc.ssl_server_credentials([(key, cert)])
        server = DraftingServer(service.engine, self._identities, config, service.tokens)
        await server.start(config.host, config.grpc_port, credentials)
        self.drafting = server
        service.metrics.counts.append(lambda: server.counts)

    async def _drain(self, http: HttpServer, serving: asyncio.Task[None]) -> None:
        """Wait for running answers up to the grace period, abort the rest, and close the server."""
        self._service.is_draining = True
        # Wait only for the current requests, because later requests are refused.
        work: list[asyncio.Future[None]] = list(http.server_state.tasks)
        _LOG.info(
            "the server is shutting down; %d requests are still being answered, and have up to "
            "%g s to end",
            self._service.metrics.n_in_flight,
            self._config.grace_s,
        )
        asyncio.get_running_loop().call_later(self._config.grace_s, self._breaking_off.set)
        if self.drafting is not None:
            work.append(asyncio.ensure_future(self.drafting.stop(self._config.grace_s)))
        rest = asyncio.gather(*work, return_exceptions=True)
        await first_of(rest, self._breaking_off.wait())
        rest.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await rest
        # Close the listening socket and idle connections.
        http.should_exit = True
        await first_of(serving, self._breaking_off.wait())
        http.force_exit = True
        await serving

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals end the run. Python allows this only in the main thread."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            # Don't use loop.add_signal_handler: it would replace the wakeup descriptor that
            # commands/signals.py reads.
            end = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, self.end)
            for number in _SIGNALS:
                # Do not handle a signal that is ignored at the start. For example, nohup starts the
                # server with SIGHUP ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, lambda signum, _frame: end(signum))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address. Raise RequestInvalid if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # ``::`` means all addresses, including IPv4.
        both = family == socket.AF_INET6 and host == "::"
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0].rstrip(".")
        raise RequestInvalid(
            f"the server cannot listen on {host}, port {port}: {reason}. Choose another `host` or "
            "`port`."
        ) from error
    # Connections inherit the send buffer's size from this socket. By default the kernel would
    # buffer megabytes of text for a client that does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setblocking(False)
    return listener


def raise_file_limit() -> None:
    """Raise the soft limit of open files, which is usually 1,024.

    Each connection counts as an open file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_tls(cert: Path, key: Path) -> None:
    """Raise RequestInvalid if the TLS certificate or its key cannot be read, or do not match."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise RequestInvalid(
            f"`tls_cert={cert}` and `tls_key={key}` cannot be used for TLS: {error}. Give a "
            "certificate chain and its private key as PEM files."
        ) from error
