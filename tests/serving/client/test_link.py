"""The connection alone: opened, closed and opened again, with tokens and TLS."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from moa_data.errors import Disconnected, NotAllowed, ProtocolMismatch, RequestInvalid, ServingError
from moa_data.serving import moa_v1_pb2 as pb
from moa_data.serving.client.link import Link, LinkEvent
from moa_data.tests.kit.certificates import Authority, make_certificates
from moa_data.tests.kit.proxy import Proxy

from ..drafting import Server
from .room import target

OPEN = pb.ClientMessage(
    sequence=1, open=pb.Open(protocol=1, tokens=[5, 6], n_prompt=2, max_new_tokens=4)
)
PING = pb.ClientMessage(sequence=2, ping=pb.Ping(id=7))
CLOSE = pb.ClientMessage(sequence=3, close=pb.Close())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(target()) as running:
        yield running


@pytest.fixture
def links() -> Iterator[Any]:
    """Returns a function that makes links; they are closed at the end of the test."""
    made: list[Link] = []

    def make(*arguments: Any) -> Link:
        made.append(Link(*arguments))
        return made[-1]

    yield make
    for link in made:
        link.close()


def wait_for(link: Link, kind: str) -> LinkEvent:
    """Return the first event of a kind, and skip those before it."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for event in link.take(0.1):
            if kind == ("down" if event.error else "received" if event.message else "up"):
                return event
    raise AssertionError(f"no {kind}")


def error_of(link: Link) -> ServingError:
    """Open a session, and return the error that ends the link."""
    link.begin()
    while True:
        for event in link.take(30.0):
            if event.error is not None:
                return event.error
            link.send(event.stream, [OPEN] if event.message is None else [])


def test_the_next_stream_uses_the_connection(server: Server, links: Any) -> None:
    """Each answer has a stream, and all share a connection, so only the first has a handshake."""
    with Proxy(server.port) as proxy:
        link = links(proxy.address)
        for number in (1, 2, 3):
            link.begin()
            up = wait_for(link, "up")
            assert up.stream == number
            link.send(up.stream, [OPEN])
            wait_for(link, "received")
            link.send(up.stream, [CLOSE])
            link.end()
        assert proxy.n_connections == 1


def test_what_was_meant_for_another_stream_is_not_sent(server: Server, links: Any) -> None:
    link = links(server.grpc_address)
    link.begin()
    first = wait_for(link, "up").stream
    link.send(first, [OPEN])
    wait_for(link, "received")
    link.reconnect("because")
    assert str(wait_for(link, "down").error) == "because"
    second = wait_for(link, "up").stream
    assert second != first
    n_bytes = link.bytes_up
    link.send(first, [PING])
    assert link.bytes_up == n_bytes
    link.send(second, [OPEN])
    assert wait_for(link, "received").stream == second


def test_closes_while_it_waits(links: Any) -> None:
    """One server does not exist, the other one is silent."""
    for address in ("127.0.0.1:1", "192.0.2.1:80"):
        link = links(address)
        link.begin()
        began = time.monotonic()
        link.close()
        assert time.monotonic() - began < 10, "an attempt to connect takes 20 seconds"


def test_a_server_that_is_no_drafting_server(links: Any) -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    error = error_of(links(f"127.0.0.1:{port}"))
    other.stop(None).wait()
    assert isinstance(error, ProtocolMismatch)
    assert "moa.v1" in str(error)


def test_tls_with_an_authority_of_ones_own(links: Any, tmp_path: Path) -> None:
    ca, tls = make_certificates(tmp_path)
    for name, one in {"other": Authority("other"), "alike": Authority()}.items():
        (tmp_path / f"{name}.pem").write_bytes(one.certificate)
    with Server(target(), tokens=["t"], **tls) as guarded:
        address = f"localhost:{guarded.port}"
        link = links(address, "t", ca)
        link.begin()
        link.send(wait_for(link, "up").stream, [OPEN])
        opened = wait_for(link, "received").message
        assert opened is not None
        assert opened.WhichOneof("body") == "opened"
        for name in ("other", "alike"):
            error = error_of(links(address, "t", tmp_path / f"{name}.pem"))
            assert isinstance(error, ProtocolMismatch)
            assert "`ca`" in str(error)
        assert isinstance(error_of(links(address, "wrong", ca)), NotAllowed)
        assert isinstance(error_of(links(address)), Disconnected), "without TLS"
    with Server(target()) as plain:
        error = error_of(links(f"localhost:{plain.port}", "", ca))
        assert isinstance(error, ProtocolMismatch)
        assert "does not use TLS" in str(error)


def test_files_that_are_no_authority(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("hello")
    for name in ("ca.pem", "none"):
        with pytest.raises(RequestInvalid):
            Link("localhost:1", "", tmp_path / name)


def test_a_port_that_speaks_http_alone_is_named_as_such(links: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):  # The listener is closed at the end of the test.
                # Serve the connection, and those that look for the reason of its failure.
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        error = error_of(links(f"127.0.0.1:{listener.getsockname()[1]}"))
    assert isinstance(error, ProtocolMismatch)
    assert "8001" in str(error)
