"""Real packets between two namespaces are delayed, limited, lost and cut as asked for; needs root."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import ServingError
from moa_data.serving.emulation import tunnel as tunnels
from moa_data.serving.emulation.conditions import Condition, Direction, symmetric
from moa_data.serving.emulation.tunnel import Tunnel, sweep, unavailable_because

PORT = 7000
UDP_SERVER = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    s.bind(("10.77.0.1", 7000))
    print("ready", flush=True)
    seen = []
    while (got := s.recvfrom(2048))[0] != b"end":
        seen.append(int(got[0]))
        s.sendto(got[0], got[1])
print(seen)
"""
UDP_CLIENT = """
import json, socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    s.settimeout(1.0)
    s.connect(("10.77.0.1", 7000))
    sent, times = {}, {}
    def take():
        n = int(s.recv(2048))
        times[n] = time.perf_counter() - sent[n]
    for n in range(int(sys.argv[1])):  # then all answers fit into the buffer
        sent[n] = time.perf_counter()
        s.send(b"%d" % n)
        time.sleep(5e-4)
    try:
        while len(times) < len(sent):
            take()
    except TimeoutError:
        pass
    try:
        for _ in range(20):  # some may be lost
            s.send(b"end")
    except ConnectionRefusedError:
        pass  # the server has ended
print(json.dumps([list(times), list(times.values())]))
"""
TCP_SERVER = """
import socket
with socket.create_server(("10.77.0.1", 7000)) as s:
    print("ready", flush=True)
    while True:
        c, _ = s.accept()
        with c:
            while data := c.recv(1 << 16):
                c.sendall(data)
"""
TCP_CLIENT = """
import hashlib, socket, sys, threading, time
data = bytes(range(256)) * int(sys.argv[1])
with socket.create_connection(("10.77.0.1", 7000)) as s:
    print("connected", flush=True)
    input()
    start = time.perf_counter()
    sender = threading.Thread(target=s.sendall, args=(data,))
    sender.start()
    back = bytearray()
    while len(back) < len(data):
        back += s.recv(1 << 16)
    print(bytes(back) == data, time.perf_counter() - start)
"""

# Asks about this machine when the tests are collected, for not a single namespace can be made without these.
pytestmark = pytest.mark.skipif(unavailable_because() is not None, reason=str(unavailable_because()))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert f"moa-{os.getpid()}-" not in subprocess.check_output(["ip", "netns", "list"], text=True)


def start_python(tunnel: Tunnel, side: Any, code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start code in a namespace, and wait for its first line if it is a server."""
    command = [sys.executable, "-S", "-c", code, *map(str, arguments)]
    program = tunnel.start(command, side, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if side == "server":
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
    return program


def answer(program: subprocess.Popen[str], said: str = "") -> str:
    """Wait for a program's end and return what it wrote."""
    out, _ = program.communicate(said, timeout=100)
    assert program.returncode == 0
    return out


def udp(condition: Condition, n: int) -> tuple[list[int], list[int], list[float], dict[Any, Any]]:
    """Numbers that the server got, numbers that came back, their round trips in s, and the tunnel's own counts."""
    with Tunnel(condition, seed=5) as tunnel:
        server = start_python(tunnel, "server", UDP_SERVER)
        back, times = json.loads(answer(start_python(tunnel, "client", UDP_CLIENT, n)))
        return json.loads(answer(server)), back, times, tunnel.counts()


def test_round_trips_are_those_asked_for() -> None:
    seen, back, times, _ = udp(symmetric("slow", delay_ms=15, jitter_ms=5), 300)
    assert seen == back == list(range(300))  # in order, in spite of the jitter
    # A busy machine makes them longer, never shorter: bounds from above take the best of many.
    assert sorted(times)[150] >= 0.028
    assert 0.01 < min(times) < 0.1


def test_as_many_packets_are_lost_as_asked_for_and_counted() -> None:
    seen, back, _, counts = udp(Condition("bad", Direction(loss=0.1), Direction(loss=0.05)), 2000)
    assert 1700 < len(seen) < 1890
    assert 0.02 < 1 - len(back) / len(seen) < 0.08
    assert counts["down"].lost == len(seen) - len(back)
    assert 0 <= counts["up"].lost - (2000 - len(seen)) <= 20  # of the 20 packets that say the end


def test_tcp_keeps_to_the_rate_and_loses_nothing() -> None:
    rate, n = 8e6, 1000
    with Tunnel(Condition("narrow", Direction(rate, 2), Direction(None, 2, 0, 0.002))) as tunnel:
        start_python(tunnel, "server", TCP_SERVER)
        is_equal, seconds = answer(start_python(tunnel, "client", TCP_CLIENT, n), "go\n").split()[1:]
        counts = tunnel.counts()
    least = 256 * n * 8 / rate
    assert is_equal == "True"
    assert least <= float(seconds) < 20 * least
    assert 256 * n < counts["up"].n_bytes < 2 * 256 * n


def test_tcp_survives_a_cut() -> None:
    with Tunnel(symmetric("near", delay_ms=1)) as tunnel:
        start_python(tunnel, "server", TCP_SERVER)
        client = start_python(tunnel, "client", TCP_CLIENT, 10)
        assert client.stdout is not None
        assert client.stdin is not None
        assert client.stdout.readline() == "connected\n"
        tunnel.cut()
        passed = tunnel.counts()
        client.stdin.write("go\n")
        client.stdin.flush()
        time.sleep(0.5)
        counts = tunnel.counts()
        assert counts["up"].cut > 0
        assert counts["up"].packets == passed["up"].packets
        tunnel.mend()
        assert answer(client).split()[0] == "True"


def test_programs_are_killed_with_the_tunnel() -> None:
    with Tunnel(symmetric("none")) as tunnel:
        server = start_python(tunnel, "server", TCP_SERVER)
        assert server.poll() is None
    assert server.returncode == -signal.SIGKILL


def test_what_a_killed_tunnel_left_is_swept() -> None:
    code = (
        "from moa_data.serving.emulation.conditions import NONE\n"
        "from moa_data.serving.emulation.tunnel import Tunnel\n"
        "tunnel = Tunnel(NONE)\n"
        "sleeper = tunnel.start(['sleep', '600'], 'client')\n"
        "print(tunnel.namespaces['client'], sleeper.pid, tunnel._shuttle.pid, flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        namespace, sleeper, shuttle = program.stdout.readline().split()
        program.kill()
    assert Path("/run/netns", namespace).exists()
    sweep()
    assert not Path("/run/netns", namespace).exists()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in (sleeper, shuttle)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(sleeper)
    assert not is_running(shuttle)


def is_running(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_dead_shuttle_is_told() -> None:
    with Tunnel(symmetric("none")) as tunnel:
        tunnel._shuttle.kill()
        with pytest.raises(ServingError, match=r"has ended\. Make a new tunnel"):
            tunnel.cut()


def test_a_user_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ServingError, match=r"need root\. Use the TCP proxy"):
        Tunnel(symmetric("none"))


def test_a_namespace_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnels, "_ADDRESSES", {"client": "10.77.0.2", "server": "no address"})
    with pytest.raises(ServingError, match=r"`ip .* address add no address/24 .* failed"):
        Tunnel(symmetric("none"))
