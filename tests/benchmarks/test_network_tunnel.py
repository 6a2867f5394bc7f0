"""A connection between two namespaces survives a cut of the emulated network.

The test needs root.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TCP_SERVER = """
import socket
with socket.create_server(("10.77.0.1", 7000)) as s:
    print("ready", flush=True)
    c, _ = s.accept()
    with c:
        while data := c.recv(1 << 16):
            c.sendall(data)
"""
TCP_CLIENT = """
import socket
with socket.create_connection(("10.77.0.1", 7000)) as s:
    print("connected", flush=True)
    input()
    s.sendall(bytes(10_000))
    n = 0
    while n < 10_000:
        n += len(s.recv(1 << 16))
    print(n)
"""


@pytest.fixture
def tunnels(benchmark: Callable[[str], ModuleType]) -> Iterator[Any]:
    module = benchmark("serving.network_tunnel")
    if (reason := module.unavailable_because()) is not None:
        pytest.skip(reason)
    yield module
    assert f"moa-{os.getpid()}-" not in subprocess.check_output(["ip", "netns", "list"], text=True)


def start(tunnel: Any, side: str, code: str) -> "subprocess.Popen[str]":
    """Start code in a namespace, and wait for its first line."""
    pipe = subprocess.PIPE
    program: subprocess.Popen[str] = tunnel.start(
        [sys.executable, "-S", "-c", code], side, stdin=pipe, stdout=pipe, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() in ("ready\n", "connected\n")
    return program


def test_tcp_survives_a_cut(tunnels: Any) -> None:
    with tunnels.Tunnel(tunnels.Condition(delay_ms=1)) as tunnel:
        server, client = start(tunnel, "server", TCP_SERVER), start(tunnel, "client", TCP_CLIENT)
        tunnel.cut()
        client.stdin.write("go\n")  # type: ignore[union-attr]
        client.stdin.flush()  # type: ignore[union-attr]
        while not tunnel.counts()["up"].cut:
            assert client.poll() is None
        tunnel.restore()
        assert client.communicate(timeout=60)[0] == "10000\n"
        tunnel._shuttle.kill()
        with pytest.raises(RuntimeError):
            tunnel.cut()
        sleeper = tunnel.start(["sleep", "600"], "client")
    assert server.wait(20) is not None
    assert sleeper.returncode == -signal.SIGKILL, "what runs in a namespace ends with it"
