"""Hostile and broken clients of a server, written with plain sockets, for tests and the soak."""

import json
import random
import socket
import ssl
from collections.abc import Sequence
from typing import Any

Address = tuple[str, int]

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def head_of(path: str, n_bytes: int, *more: str) -> bytes:
    """Return the head of a POST request that announces a body of ``n_bytes``."""
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *more]
    return "\r\n".join([*lines, f"content-length: {n_bytes}", "", ""]).encode()


def post(path: str, body: Any, *more: str) -> bytes:
    """Return a complete POST request with a JSON body."""
    content = json.dumps(body).encode()
    return head_of(path, len(content), *more) + content


def connect(
    address: Address, tls: ssl.SSLContext | None = None, receive_buffer: int = 0
) -> socket.socket:
    """Open a connection. A small receive buffer makes the client a slow reader."""
    connection = socket.socket()
    if receive_buffer:  # must be set before the TCP handshake agrees on a window
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect(address)
    return tls.wrap_socket(connection, server_hostname=address[0]) if tls else connection


def never_read(
    address: Address, request: bytes, tls: ssl.SSLContext | None = None
) -> socket.socket:
    """Request a stream and never read from it."""
    connection = connect(address, tls, receive_buffer=4096)
    connection.sendall(request)
    return connection


def stay_silent(address: Address, n: int, said: bytes = b"") -> list[socket.socket]:
    """Open connections that send ``said`` and then stay silent."""
    connections = [connect(address) for _ in range(n)]
    for connection in connections:
        connection.sendall(said)
    return connections


def leave_in_body(
    address: Address, path: str, resets: bool = False, tls: ssl.SSLContext | None = None
) -> None:
    """Disconnect in the middle of a request's body."""
    with connect(address, tls) as connection:
        connection.sendall(head_of(path, 1000) + b'{"model": "')
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")


def wait_for_end(connection: socket.socket) -> bytes:
    """Read a connection until the other side closes it."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except (ConnectionError, ssl.SSLError):
        pass
    return found


def long_text(chance: random.Random, n_chars: int) -> str:
    """Return a text of random words that a tokenizer has not seen before."""
    words = (
        "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(n_chars // 8)
    )
    return " ".join(words)


WRONG_BODIES: tuple[dict[str, Any], ...] = (
    {"messages": [1] * 9_000}, {"messages": [{}] * 20_000}, {"messages": [{}] * 200_000},
    {"stop": [1] * 200_000},
)  # fmt: skip
"""Request fields with so many wrong items that reporting an error for each would take seconds."""


def foreign_pages() -> Sequence[tuple[dict[str, str], int]]:
    """Return headers that browsers send for pages of other sites, each with the expected status."""
    json_type = {"content-type": "application/json"}
    return (
        (json_type | {"host": "rebound.example:8000"}, 403),
        (json_type | {"origin": "https://evil.example"}, 403),
        (json_type | {"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
    )
