"""A proxy for an S3 server that injects network and server faults drawn from a seed."""

import http.client
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

RATES = {
    "late": 0.05,
    "reset before": 0.03,
    "reset after": 0.05,
    "slow down": 0.05,
    "conflict": 0.15,
    "torn answer": 0.05,
    "torn upload": 0.03,
    "stale list": 0.3,
}
"""Probability of each fault, among the requests that it applies to."""
_LATE_S = 0.2
_REFUSALS = {"slow down": (503, "SlowDown"), "conflict": (409, "ConditionalRequestConflict")}
_SKIPPED = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Faults:
    """Chooses the fault of each request, and counts the faults of each kind."""

    def __init__(self, seed: int, rates: Mapping[str, float] = RATES) -> None:
        self.rates, self.counts = dict(rates), Counter[str]()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.lists: dict[str, bytes] = {}

    def pick(self, method: str, is_conditional: bool, is_list: bool) -> str:
        """Return the name of a fault, or an empty string for none."""
        able = {
            "torn answer": method == "GET" and not is_list,
            "torn upload": method == "PUT",
            "conflict": is_conditional,
            "stale list": is_list,
        }
        with self._lock:
            for name, rate in self.rates.items():
                if able.get(name, True) and self._random.random() < rate:
                    self.counts[name] += 1
                    return name
        return ""


def _handler(upstream: tuple[str, int], faults: Faults) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_list = self.command == "GET" and "list-type" in parse_qs(urlsplit(self.path).query)
            is_conditional = any(name in self.headers for name in ("If-None-Match", "If-Match"))
            fault = faults.pick(self.command, is_conditional, is_list)
            if fault in _REFUSALS:
                status, code = _REFUSALS[fault]
                content = (
                    f"<Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
                )
                self._answer(status, [("Content-Type", "application/xml")], content)
                return
            if fault == "late":
                time.sleep(_LATE_S)
            if fault != "reset before":
                with closing(http.client.HTTPConnection(*upstream, timeout=60)) as connection:
                    self._ask(
                        connection,
                        body[: len(body) // 2] if fault == "torn upload" else body,
                        len(body),
                    )
                    if fault != "torn upload":
                        answer = connection.getresponse()
                        status, headers, content = answer.status, answer.getheaders(), answer.read()
            if fault in ("reset before", "torn upload"):
                self._reset()
                return
            if is_list and status == 200:
                older = faults.lists.get(self.path)
                faults.lists[self.path] = content
                content = older if fault == "stale list" and older is not None else content
            if fault == "reset after":
                self._reset()
            else:
                self._answer(
                    status, headers, content, is_torn=fault == "torn answer" and len(content) > 1
                )

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay

        def _ask(self, connection: http.client.HTTPConnection, body: bytes, announced: int) -> None:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():  # the signature covers the host header too
                if name.lower() not in _SKIPPED:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(announced))
            connection.endheaders(body)

        def _answer(
            self, status: int, headers: list[tuple[str, str]], content: bytes, is_torn: bool = False
        ) -> None:
            self.send_response(status)
            lengths = [value for name, value in headers if name.lower() == "content-length"]
            for name, value in headers:
                if name.lower() not in _SKIPPED:
                    self.send_header(name, value)
            is_head = self.command == "HEAD"
            self.send_header(
                "Content-Length", lengths[0] if is_head and lengths else str(len(content))
            )
            self.end_headers()
            if not is_head:
                self.wfile.write(content[: len(content) // 2] if is_torn else content)
            if is_torn:
                self._reset()

        def _reset(self) -> None:
            self.close_connection = True
            # Lingering for 0 seconds makes closing the socket send a reset.
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()

        def handle(self) -> None:
            try:
                super().handle()
            except (OSError, ValueError):  # either side reset the connection
                self.close_connection = True

        def finish(self) -> None:
            with suppress(OSError, ValueError):
                super().finish()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client disconnected, or the upstream server was killed


@contextmanager
def faulty(endpoint: str, faults: Faults) -> Iterator[str]:
    """Run a proxy for a server, and yield the proxy's endpoint."""
    upstream = urlsplit(endpoint)
    assert upstream.hostname
    assert upstream.port
    server = _Server(("127.0.0.1", 0), _handler((upstream.hostname, upstream.port), faults))
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
