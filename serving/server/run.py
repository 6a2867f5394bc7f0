"""A server from its start to its end: engine, HTTP and gRPC in one process and one event loop.

A first signal drains: listeners close, requests that come over open connections are refused, answers have a grace
period to end. A second one, or the end of that period, breaks the rest off.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from ..errors import RequestInvalid
from .http import create_app
from .service import Service

_LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_HEADER_BYTES = 1 << 16


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and how long it may take to end.

    Attributes:
        port: of HTTP; 0 for any that is free.
        tls: files of the certificate chain and of its key; None for plain HTTP.
        grace_s: seconds that answers have to end when the server does.
        most_connections: open connections; a further one is answered with 503.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls: tuple[Path, Path] | None = None
    grace_s: float = 30.0
    most_connections: int = 1024


@dataclass(frozen=True)
class Ended:
    """How a server ended.

    Attributes:
        signum: the signal that ended it; None where it was told to end otherwise.
        n_broken_off: answers that had not ended.
    """

    signum: int | None
    n_broken_off: int


class _HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to :class:`ServerRun`."""
        yield


class ServerRun:
    """One run of a server.

    Args:
        on_ready: called with the address once requests are taken.
    """

    def __init__(self, service: Service, listening: Listening, on_ready: Callable[[str], None]) -> None:
        self._service, self._listening, self._on_ready = service, listening, on_ready
        self._signum: int | None = None
        self._n_told = 0
        self._ending = asyncio.Event()

    def end(self, signum: int | None = None) -> None:
        """Drain, or, when called again, break off; to be called in the event loop."""
        self._signum, self._n_told = signum, self._n_told + 1
        self._ending.set()
        if self._n_told > 1:
            self._http.force_exit = True

    async def serve(self) -> Ended:
        """Serve until a signal comes or :meth:`end` is called.

        Raises:
            RequestInvalid: the address cannot be used, or the files of TLS.
        """
        listening, service = self._listening, self._service
        cert, key = listening.tls or (None, None)
        if cert is not None and key is not None:
            check_tls(cert, key)
        listener = bind(listening.host, listening.port)
        app = create_app(service)
        self._http = _HttpServer(
            uvicorn.Config(
                app, http="h11", ws="none", lifespan="off", ssl_certfile=cert, ssl_keyfile=key, log_config=None,
                access_log=False, server_header=False, limit_concurrency=listening.most_connections,
                h11_max_incomplete_event_size=_MOST_HEADER_BYTES, timeout_keep_alive=15,
                timeout_graceful_shutdown=max(1, round(listening.grace_s)),
            )
        )  # fmt: skip
        service.engine.start()
        try:
            with self._signals():
                return await self._until_end(listener)
        finally:
            listener.close()
            service.engine.stop()

    async def _until_end(self, listener: socket.socket) -> Ended:
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        ending = asyncio.create_task(self._ending.wait())
        try:
            while not self._http.started and not serving.done():
                await asyncio.sleep(0.01)
            if self._http.started:
                scheme = "http" if self._listening.tls is None else "https"
                host, port = listener.getsockname()[:2]
                self._on_ready(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            self._service.is_draining = True
            self._http.should_exit = True
            n_before = self._service.metrics.n_in_flight
            _LOG.info("draining: %d requests are being answered", n_before)
            await serving
            n_left = self._service.metrics.n_in_flight
        finally:
            ending.cancel()
        return Ended(self._signum, n_left)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals end the run, where the event loop is in the main thread."""
        loop, known = asyncio.get_running_loop(), []
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before is signal.SIG_IGN:  # as nohup leaves it
                continue
            try:
                loop.add_signal_handler(number, self.end, int(number))
            except (ValueError, RuntimeError):  # another thread
                break
            known.append((number, before))
        try:
            yield
        finally:
            for number, before in known:
                loop.remove_signal_handler(number)
                signal.signal(number, before)


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
            listener.bind((host, port))
        except OSError as error:
            reason = (error.strerror or str(error)).rstrip(".")
            raise RequestInvalid(
                f"cannot listen on {host}, port {port}: {reason}. Choose another --host or --port."
            ) from error
        undo.pop_all()
    listener.setblocking(False)
    return listener


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
