"""The TCP proxy forwards every byte in order, as late as asked, and is cut at exact bytes."""

import hashlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from moa_data.serving.emulation.conditions import NONE, Condition, Direction, symmetric
from moa_data.serving.emulation.proxy import HEADER_BYTES, RETRANSMISSION_S, SEGMENT_BYTES, Proxy


class EchoServer:
    """Sends back what it gets, on a port of this machine, and notes what came."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()
        self.received, self.n_ended, self.n_reset = bytearray(), 0, 0
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._echo, args=(connection,)))
                self._threads[-1].start()

    def _echo(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(1 << 16):
                self.received += data
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            self.n_ended += 1
        except OSError:
            self.n_reset += 1

    def close(self) -> None:
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with closing(EchoServer()) as server:
        yield server


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=20)


def receive(connection: socket.socket, n_bytes: int) -> bytes:
    """Read exactly so many bytes, or what comes before the end."""
    data = bytearray()
    while len(data) < n_bytes and (more := connection.recv(n_bytes - len(data))):
        data += more
    return bytes(data)


def receive_to_the_end(connection: socket.socket) -> tuple[bytes, bool]:
    """Read what comes before the end, and whether that was a reset."""
    data = bytearray()
    try:
        while more := connection.recv(1 << 16):
            data += more
    except ConnectionResetError:
        return bytes(data), True
    return bytes(data), False


def is_refused(proxy: Proxy) -> bool:
    """Whether a new connection is reset, which may come before or after it counts as made."""
    try:
        with connect(proxy) as connection:
            return receive_to_the_end(connection) == (b"", True)
    except ConnectionResetError:
        return True


def exchange(connection: socket.socket, data: bytes) -> float:
    """Send data, wait for its echo, and return the seconds that this took."""
    start = time.perf_counter()
    connection.sendall(data)
    assert receive(connection, len(data)) == data
    return time.perf_counter() - start


@pytest.mark.parametrize(
    "condition",
    [NONE, symmetric("bad", 200e6, 2.0, 2.0, 0.002), Condition("lopsided", Direction(100e6), Direction(None, 5, 1))],
    ids=lambda condition: condition.name,
)
def test_nothing_is_lost_or_reordered(server: EchoServer, condition: Condition) -> None:
    data = random.Random(0).randbytes(700_001)
    with Proxy(server.address, condition) as proxy, connect(proxy) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        back = receive(connection, len(data))
        sender.join()
        assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()
        assert (proxy.bytes_up, proxy.bytes_down, proxy.n_connections) == (len(data), len(data), 1)


def test_small_messages_take_the_round_trip(server: EchoServer) -> None:
    with Proxy(server.address, symmetric("slow", delay_ms=25)) as proxy, connect(proxy) as connection:
        times = [exchange(connection, b"ping") for _ in range(8)]
    assert min(times) >= 0.05
    assert min(times[1:]) < 0.15


def test_the_first_byte_waits_for_the_handshake(server: EchoServer) -> None:
    with Proxy(server.address, symmetric("slow", delay_ms=25)) as proxy, connect(proxy) as connection:
        assert exchange(connection, b"ping") >= 0.1


def test_the_rate_bounds_what_all_connections_get(server: EchoServer) -> None:
    rate, data = 8e6, bytes(50_000)
    with Proxy(server.address, Condition("narrow", Direction(rate), Direction())) as proxy, ExitStack() as stack:
        connections = [stack.enter_context(connect(proxy)) for _ in range(4)]
        start = time.perf_counter()
        for connection in connections:
            connection.sendall(data)
        for connection in connections:
            assert len(receive(connection, len(data))) == len(data)
        seconds = time.perf_counter() - start
    least = 4 * len(data) * 8 / rate * (1 + HEADER_BYTES / SEGMENT_BYTES)
    assert least * 0.95 < seconds < 10 * least


def test_a_lost_segment_comes_late(server: EchoServer) -> None:
    bad = Condition("bad", Direction(loss=1.0), Direction())
    with Proxy(server.address, bad) as proxy, connect(proxy) as connection:
        assert exchange(connection, b"ping") >= RETRANSMISSION_S


def test_ends_are_forwarded_one_way_at_a_time(server: EchoServer) -> None:
    with Proxy(server.address, symmetric("slow", delay_ms=2)) as proxy, connect(proxy) as connection:
        connection.sendall(b"last words")
        connection.shutdown(socket.SHUT_WR)
        assert receive(connection, 100) == b"last words"
    assert server.n_ended == 1


def test_a_reset_is_forwarded(server: EchoServer) -> None:
    with Proxy(server.address) as proxy:
        connection = connect(proxy)
        exchange(connection, b"ping")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        deadline = time.monotonic() + 10
        while server.n_reset == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert server.n_reset == 1


def test_a_cut_is_silent_and_what_it_held_comes_when_mended(server: EchoServer) -> None:
    with Proxy(server.address) as proxy, connect(proxy) as connection:
        exchange(connection, b"before")
        proxy.cut()
        connection.sendall(b"during")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        with connect(proxy) as late:  # a connection made during the cut
            late.sendall(b"late")
            assert proxy.is_cut
            assert bytes(server.received) == b"before"
            proxy.mend()
            connection.settimeout(20)
            assert receive(connection, 6) == b"during"
            assert receive(late, 4) == b"late"


def test_a_connection_closed_during_a_cut_stays_half_open_on_the_other_side(server: EchoServer) -> None:
    with Proxy(server.address) as proxy:
        connection = connect(proxy)
        exchange(connection, b"ping")
        proxy.cut()
        connection.close()
        time.sleep(0.1)
        assert server.n_ended == server.n_reset == 0
        proxy.mend()
        deadline = time.monotonic() + 10
        while server.n_ended + server.n_reset == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.n_ended + server.n_reset == 1


def test_stranded_connections_are_silent_for_ever_and_new_ones_work(server: EchoServer) -> None:
    with Proxy(server.address) as proxy:
        connection = connect(proxy)
        exchange(connection, b"ping")
        proxy.strand()
        connection.sendall(b"in vain")
        connection.close()
        with connect(proxy) as other:
            exchange(other, b"pong")
            assert server.n_ended == server.n_reset == 0
            assert bytes(server.received) == b"pingpong"
        deadline = time.monotonic() + 10
        while server.n_ended == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (server.n_ended, server.n_reset) == (1, 0)
    deadline = time.monotonic() + 10
    while server.n_reset == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.n_reset == 1, "the proxy's end is the connection's"


def test_a_cut_with_reset_ends_connections_and_refuses_new_ones(server: EchoServer) -> None:
    with Proxy(server.address) as proxy, connect(proxy) as connection:
        exchange(connection, b"ping")
        proxy.cut(reset=True)
        assert receive_to_the_end(connection) == (b"", True)
        assert is_refused(proxy)
        proxy.mend()
        with connect(proxy) as again:
            exchange(again, b"ping")


@pytest.mark.parametrize("n_bytes", [0, 1, 7, SEGMENT_BYTES, SEGMENT_BYTES + 1, 40_000])
@pytest.mark.parametrize("reset", [False, True], ids=["silent", "reset"])
def test_cut_after_lets_exactly_so_many_bytes_up(server: EchoServer, n_bytes: int, reset: bool) -> None:
    data = random.Random(1).randbytes(50_000)
    with Proxy(server.address) as proxy, connect(proxy) as connection:
        exchange(connection, b"ping")
        proxy.cut_after(n_bytes, "up", reset)
        with suppress(ConnectionError):
            connection.sendall(data)
        assert proxy.wait_cut(20)
        assert proxy.bytes_up == 4 + n_bytes
        if not reset:
            proxy.mend()
            assert receive(connection, len(data)) == data
    server.close()
    assert server.received == b"ping" + data[: n_bytes if reset else None]


@pytest.mark.parametrize("n_bytes", [1, SEGMENT_BYTES + 1, 40_000])
def test_cut_after_lets_exactly_so_many_bytes_down(server: EchoServer, n_bytes: int) -> None:
    data = random.Random(1).randbytes(50_000)
    with Proxy(server.address) as proxy, connect(proxy) as connection:
        exchange(connection, b"ping")
        proxy.cut_after(n_bytes, "down", reset=True)
        with suppress(ConnectionError):
            connection.sendall(data)
        assert receive_to_the_end(connection)[0] == data[:n_bytes]
        assert proxy.wait_cut(20)


def test_a_server_that_is_not_there_resets_its_clients() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with Proxy(address) as proxy:
        assert is_refused(proxy)


def test_a_hundred_connections_at_once(server: EchoServer) -> None:
    with Proxy(server.address, symmetric("near", delay_ms=1)) as proxy, ExitStack() as stack:
        connections = [stack.enter_context(connect(proxy)) for _ in range(100)]
        for n, connection in enumerate(connections):
            connection.sendall(b"%03d" % n)
        assert [receive(connection, 3) for connection in connections] == [b"%03d" % n for n in range(100)]


def test_closing_ends_the_thread_in_the_middle_of_everything(server: EchoServer) -> None:
    proxy = Proxy(server.address, symmetric("slow", delay_ms=500))
    with connect(proxy) as connection:
        connection.sendall(bytes(10_000))
        proxy.cut()
        proxy.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "proxy"]
        proxy.close()
