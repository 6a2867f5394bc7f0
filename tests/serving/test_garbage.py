"""A fault of a client is at most one line in the log, whatever bytes it sends.

Many faults become a count.
"""

import contextlib
import io
import json
import logging
import random
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moa_data.moa.targets.live import Target
from moa_data.serving.metrics import JsonLines, bound_repeats
from moa_data.tests.kit.attackers import HTTP2_PREFACE, connect, head_of, wait_for_end
from moa_data.tests.kit.certificates import make_certificates
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.serving import LiveServer, text_target, wait_for

from .drafting import Server

COMPLETIONS = "/v1/completions"
BAD_CHUNK = b"5\r\nhello\r\nZZ\r\n"


def chunked(target: str) -> bytes:
    return (
        f"{target} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n".encode()
        + (b"transfer-encoding: chunked\r\n\r\n")
    )


def client_hello() -> bytes:
    """Return the first bytes of a TLS handshake."""
    incoming = ssl.MemoryBIO()
    outgoing = ssl.MemoryBIO()
    handshake = ssl.create_default_context().wrap_bio(
        incoming, outgoing, server_hostname="localhost"
    )
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing.read()


GARBAGE: dict[str, list[bytes]] = {
    "a bad chunk of a check": [chunked("GET /health") + BAD_CHUNK],
    "a bad chunk of an unknown path": [chunked("PUT //") + BAD_CHUNK],
    "a bad chunk of a request": [chunked(f"POST {COMPLETIONS}") + BAD_CHUNK],
    "a bad chunk that comes late": [chunked("GET /health"), BAD_CHUNK],
    "a bad chunk of a refused request": [chunked("GET /nowhere"), b"5\r\nhello\r\n", b"ZZ\r\n"],
    "a bad chunk after a whole request": [
        b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
        chunked("GET /health") + BAD_CHUNK,
    ],
    "a huge chunk size": [chunked("GET /health") + b"f" * 40 + b"\r\n"],
    "two lengths that differ": [
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n"
    ],
    "no host": [b"GET /health HTTP/1.1\r\n\r\n"],
    "a host that is not one": [b"GET /nowhere HTTP/1.1\r\nhost: [\r\n\r\n"],
    "a path that is not one": [b"GET http://[ HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"],
    "a path of bytes": [b"GET /%ff%fe%00\xff HTTP/1.1\r\nhost: a\r\n\r\n"],
    "names and values of bytes": [
        b"GET /health HTTP/1.1\r\nhost: a\r\nx: \xff\xfe\r\n\xff: a\r\n\r\n"
    ],
    "an upgrade": [
        b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\n"
        b"upgrade: websocket\r\nsec-websocket-key: x\r\n\r\n"
    ],
    "another version": [b"GET / HTTP/7.9\r\nhost: a\r\n\r\n"],
    "HTTP/0.9": [b"GET /\r\n"],
    "HTTP/2": [HTTP2_PREFACE, b"\xff" * 500],
    "half of a TLS handshake": [client_hello()[:40]],
    "a TLS handshake": [client_hello(), b"\x16\x03\x01\x00\x05hello"],
    "an alert of TLS": [b"\x15\x03\x01\x00\x02\x02\x28"],
    "noise": [random.Random(1).randbytes(9000), random.Random(2).randbytes(9000)],
    "zeros": [bytes(70_000)],
    "an oversized head": [b"GET /health HTTP/1.1\r\nx: " + b"a" * 200_000],
    "a head without an end": [b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 30_000],
    "a short body": [head_of(COMPLETIONS, 100) + b"{"],
    "a long body": [head_of(COMPLETIONS, 2) + b"{}" + b"x" * 1000],
    "a body that is not JSON": [head_of(COMPLETIONS, 4) + b"\xff\xfe\x00{"],
}
LATE_S = 0.1
"""Seconds for which a client waits for an answer that may not come."""


@pytest.fixture(scope="module")
def target() -> Target:
    return text_target()


@pytest.fixture(scope="module")
def server(target: Target) -> Iterator[Server]:
    with Server(target, {"moa": build_drafter(target.model)}) as live:
        yield live


@pytest.fixture(scope="module")
def tls_server(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = make_certificates(tmp_path_factory.mktemp("tls"))[1]
    with Server(
        target, {"moa": build_drafter(target.model)}, tokens=["secret"], **settings
    ) as live:
        yield live


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def throw(
    address: tuple[str, int], pieces: list[bytes], resets: bool, tls: ssl.SSLContext | None = None
) -> None:
    """Send bytes; then wait a moment for an answer, or reset the connection."""
    with contextlib.suppress(OSError), connect(address, tls) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.02)
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        else:
            connection.settimeout(LATE_S)
            wait_for_end(connection)


def check_log(server: Server, log: pytest.LogCaptureFixture, most: int) -> None:
    """Check that the log has no traceback, and at most some lines."""
    wait_for(lambda: not server.service.metrics.n_in_flight)
    time.sleep(0.02)  # A request is logged after its answer.
    assert not [record.getMessage() for record in log.records if record.exc_info]
    assert len([record for record in log.records if record.name != "httpx2"]) <= most, log.text


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_a_line_for_each_fault(
    name: str, server: Server, log: pytest.LogCaptureFixture
) -> None:
    for resets in (False, True):
        throw(server.endpoint, GARBAGE[name], resets)
    check_log(server, log, most=2 * len(GARBAGE[name]))


def test_a_request_whose_body_is_malformed_is_logged_as_refused(
    target: Target, log: pytest.LogCaptureFixture
) -> None:
    with LiveServer(target) as server:
        for path in ("GET /health", f"POST {COMPLETIONS}"):
            with connect(server.endpoint) as connection:
                connection.sendall(chunked(path) + BAD_CHUNK)
                assert wait_for_end(connection).startswith(b"HTTP/1.1 400 ")
    # Other servers may still be logging the requests of earlier tests in their own threads.
    records = [record for record in log.records if record.thread == server.thread_id]
    assert [vars(record)["facts"]["status"] for record in records if "facts" in vars(record)] == [
        400,
        400,
    ]


WITHIN_TLS = [
    "a bad chunk of a check",
    "a host that is not one",
    "noise",
    "no host",
    "a short body",
    "a TLS handshake",
]


def test_garbage_on_and_within_tls(tls_server: Server, log: pytest.LogCaptureFixture) -> None:
    for name in (
        "half of a TLS handshake",
        "a TLS handshake",
        "an alert of TLS",
        "noise",
        "no host",
        "zeros",
    ):
        for resets in (False, True):
            throw(tls_server.endpoint, GARBAGE[name], resets)
    tls = ssl.create_default_context()
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    for name in WITHIN_TLS:
        for resets in (False, True):
            throw(tls_server.endpoint, GARBAGE[name], resets, tls)
    with connect(tls_server.endpoint, tls) as wrapped:
        wrapped.sendall(b"GET /hea")
        with socket.socket(fileno=wrapped.detach()) as raw:
            raw.sendall(b"\x17\x03\x03\x00\x05hello")  # This record cannot be decrypted.
    check_log(tls_server, log, most=24)


def test_garbage_on_the_port_of_grpc(
    server: Server, log: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    names = (
        "half of a TLS handshake",
        "a TLS handshake",
        "an alert of TLS",
        "noise",
        "no host",
        "zeros",
        "HTTP/2",
    )
    for name in names:
        for resets in (False, True):
            throw(("127.0.0.1", server.port), GARBAGE[name], resets)
    check_log(server, log, most=0)
    assert capfd.readouterr().err == ""


def record_of(line: int, message: str, status: int | None = None) -> logging.LogRecord:
    record = logging.LogRecord("name", logging.WARNING, "file.py", line, message, None, None)
    if status is not None:
        vars(record)["facts"] = {"request": message, "status": status}
    return record


def test_repeated_lines_become_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("moa_data.serving.metrics.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(bound_repeats(most=5, window_s=60.0))
    handler.setFormatter(JsonLines())

    def lines_of(line: int, n: int, status: int | None = None) -> list[dict[str, Any]]:
        start = stream.tell()
        for number in range(n):
            handler.handle(record_of(line, f"10.0.0.{number} did it", status))
        return [json.loads(text) for text in stream.getvalue()[start:].splitlines()]

    assert [line["message"] for line in lines_of(1, 100)] == [
        f"10.0.0.{number} did it" for number in range(5)
    ]
    assert len(lines_of(2, 50, status=400)) == 5
    assert len(lines_of(2, 3, status=404)) == 3
    assert len(lines_of(2, 70, status=200)) == 70
    now[0] += 30
    assert not lines_of(1, 10)
    now[0] += 31
    assert [line.get("left_out") for line in lines_of(1, 7)] == [105, None, None, None, None]
    assert [line.get("left_out") for line in lines_of(2, 1, status=400)] == [45]
    assert "left_out" not in lines_of(2, 1, status=404)[0]
