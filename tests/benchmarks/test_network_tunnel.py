"""Emulated networks keep to rate, delay, jitter and loss; real packets between two namespaces need root."""

import os
import signal
import statistics
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
def conditions(benchmark: Callable[[str], ModuleType]) -> Any:
    return benchmark("serving.network_tunnel")


@pytest.fixture
def tunnels(conditions: Any) -> Iterator[Any]:
    if (reason := conditions.unavailable_because()) is not None:
        pytest.skip(reason)
    yield conditions
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


def test_a_line_keeps_to_what_was_asked_for(conditions: Any) -> None:
    def delays(**settings: Any) -> list[float]:
        line = conditions.Line(conditions.Condition(**settings), seed=3)
        return [line.arrival(float(at), 100) - at for at in range(4000)]  # sent too far apart to meet

    found = delays(delay_ms=100, jitter_ms=20)
    assert statistics.mean(found) == pytest.approx(0.1, rel=0.02)
    assert statistics.stdev(found) == pytest.approx(0.02, rel=0.05)
    assert found == delays(delay_ms=100, jitter_ms=20)
    assert min(delays(delay_ms=10, jitter_ms=10)) >= 0
    line = conditions.Line(conditions.Condition(rate_bits_s=8e6, loss=0.05), seed=0)
    assert [line.arrival(0.0, 1000) for _ in range(3)] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert line.waiting(0.0) == pytest.approx(3e-3)
    assert 430 < sum(line.is_lost() for _ in range(10_000)) < 570
    line = conditions.Line(conditions.CONDITIONS["4g"], seed=1)
    arrivals = [line.arrival(n * 1e-4, 100) for n in range(500)]
    assert arrivals == sorted(arrivals), "packets keep their order"


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


def test_what_a_killed_tunnel_left_is_swept(tunnels: Any) -> None:
    code = (
        "from benchmarks.serving.network_tunnel import Condition, Tunnel\n"
        "print(Tunnel(Condition()).namespaces['client'], flush=True)\ninput()\n"
    )
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        namespace = program.stdout.readline().strip()
        program.kill()
    assert Path("/run/netns", namespace).exists()
    tunnels.sweep()
    assert not Path("/run/netns", namespace).exists()
