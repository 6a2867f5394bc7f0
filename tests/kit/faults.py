"""A proxy in front of an S3 server that fails as networks and servers do, by the numbers of a seeded generator."""

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
"""Share of the requests that a fault may meet which it does meet."""
_LATE_S = 0.2
_REFUSALS = {"slow down": (503, "SlowDown"), "conflict": (409, "ConditionalRequestConflict")}
_SKIPPED = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Faults:
    """Which fault the next request meets, and how many of each there were."""

    def __init__(self, seed: int, rates: Mapping[str, float] = RATES) -> None:
        self.rates, self.counts = dict(rates), Counter[str]()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.lists: dict[str, bytes] = {}

    def pick(self, method: str, is_conditional: bool, is_list: bool) -> str:
        """Return a fault, or an empty text for none."""
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
            for name, value in self.headers.items():  # the host too, which the signature covers
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
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # on, for no time: the peer gets a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()

        def handle(self) -> None:
            try:
                super().handle()
            except (OSError, ValueError):  # a connection that was reset, by either side
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
        pass  # a client that went away, or an upstream that was killed


@contextmanager
def faulty(endpoint: str, faults: Faults) -> Iterator[str]:
    """Run a proxy in front of a server; yields its endpoint."""
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
