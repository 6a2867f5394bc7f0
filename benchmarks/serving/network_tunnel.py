"""Two network namespaces joined by TUN devices. A process carries real packets between them.

Packets are delayed, dropped and queued as on a link with the given rate. Programs in the namespaces
use the TCP of the kernel, with its handshake, congestion control, retransmission and back-off::

    with Tunnel(CONDITIONS["4g"]) as tunnel:
        server = tunnel.start(["moa-data", "serve", "--host", tunnel.server_address], "server")
        client = tunnel.start(["curl", f"http://{tunnel.server_address}:8000/health"], "client")
        client.wait()

The figures of ``wired``, ``5g`` and ``4g`` are from the client-server experiments in the paper of
the Mixture of Attentions drafter (arXiv 2410.03804). If the paper gives a ping, which is a round
trip, each direction has half of it as its delay. If the paper gives a delay "a +- b ms", it is used
as netem would use it: each packet of each direction gets a delay from this normal distribution. A
round trip is then about twice as long as the delay.

Needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), /dev/net/tun and iproute2. Nothing of the network is
visible outside the namespaces.
"""

import fcntl
import json
import os
import random
import re
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

Side = Literal["client", "server"]

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _TUNGETIFF = 0x400454CA, 0x800454D2
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_ADDRESSES: dict[Side, str] = {"client": "10.77.0.2", "server": "10.77.0.1"}
_NAME = re.compile(r"moa-(\d+)-[0-9a-f]{8}-(client|server)")
MAX_WAITING_S = 0.25
"""Maximum seconds in the queue of the link. A packet that would wait longer is dropped."""
_MTU = 1 << 16
_BURST = 64
"""Maximum number of packets to read from one device before the other gets its turn."""


def unavailable_because() -> str | None:
    """Return why this machine cannot make a tunnel, as one line, or None if it can."""
    if sys.platform != "linux" or not _TUN.exists():
        return (
            "the device /dev/net/tun is missing (it needs Linux with the module tun, and in a "
            "container the option --device /dev/net/tun)"
        )
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` is missing; install iproute2"
    return None


@dataclass(frozen=True)
class Condition:
    """A network with the same condition in both directions.

    Attributes:
        rate_bits_s: Bits per second, headers included. If the value is None, there is no limit.
        delay_ms: Mean one-way delay of a packet. The time to transmit the packet at the given rate
            is added to it.
        jitter_ms: Standard deviation of the delay, which is normally distributed but never below 0.
            Packets keep their order, as on the radio links of 4G and 5G: a packet with a small
            delay waits for the packets before it. A burst thus waits for its slowest packet.
        loss: Probability that a packet is lost, independently of other packets.
    """

    rate_bits_s: float | None = None
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0


CONDITIONS = {
    # No emulated limits, only the speed of this machine.
    "none": Condition(),
    # Paper: 50 Mbit/s and a ping (round trip) of 9 ms.
    "wired": Condition(50e6, 4.5),
    # Paper, except for the rate. It is assumed to be the rate of the wired network.
    "5g": Condition(50e6, 10.0, 10.0, 0.001),
    # Paper: 20 Mbit/s, 21 +- 19 ms one way, 0.1 % loss.
    "4g": Condition(20e6, 21.0, 19.0, 0.001),
    # Not in the paper: a distant network with a round trip of 100 ms.
    "satellite": Condition(20e6, 50.0, 5.0, 0.001),
}
"""Networks by name."""


class Line:
    """One direction of an emulated network. It computes when packets arrive and which are lost.

    Times are in seconds.

    Args:
        condition: Rate, delay, jitter and loss.
        seed: Seed of the random delays and losses. With the same seed, equal packets in equal order
            have equal delays and losses.
    """

    def __init__(self, condition: Condition, seed: int) -> None:
        self._seconds_per_byte = 0.0 if condition.rate_bits_s is None else 8 / condition.rate_bits_s
        self._delay, self._jitter, self._loss = (
            condition.delay_ms / 1e3,
            condition.jitter_ms / 1e3,
            condition.loss,
        )
        self._random = random.Random(seed)
        self._free_at = self._last_arrival = 0.0

    def waiting(self, now: float) -> float:
        """Return how many seconds a packet sent now waits for the packets before it."""
        return max(0.0, self._free_at - now)

    def is_lost(self) -> bool:
        """Decide whether the next packet is lost."""
        return self._loss > 0 and self._random.random() < self._loss

    def arrival(self, now: float, n_bytes: int, extra: float = 0.0) -> float:
        """Send a packet and return its arrival time, never before that of earlier packets."""
        self._free_at = max(now, self._free_at) + n_bytes * self._seconds_per_byte
        delay = (
            max(0.0, self._random.gauss(self._delay, self._jitter)) if self._jitter else self._delay
        )
        self._last_arrival = max(self._last_arrival, self._free_at + delay + extra)
        return self._last_arrival


@dataclass
class PacketCounts:
    """Number of packets and bytes in one direction, and number of packets lost for each reason."""

    packets: int = 0
    n_bytes: int = 0
    lost: int = 0
    overflowed: int = 0
    cut: int = 0


class Tunnel:
    """The network namespaces of a client and a server, with an emulated network between them.

    The server's address is the same in each tunnel. Tunnels do not see each other.

    Args:
        condition: Condition of the network.
        seed: Seed of delays and losses.

    Raises:
        RuntimeError: This machine or this user cannot make a tunnel.
    """

    server_address = _ADDRESSES["server"]
    client_address = _ADDRESSES["client"]

    def __init__(self, condition: Condition, seed: int = 0) -> None:
        reason = unavailable_because()
        if reason is not None:
            raise RuntimeError(f"This machine cannot emulate a network, because {reason}.")
        sweep()
        name = f"moa-{os.getpid()}-{secrets.token_hex(4)}"
        self.namespaces: dict[Side, str] = {"client": f"{name}-client", "server": f"{name}-server"}
        self._programs: list[subprocess.Popen[Any]] = []
        with ExitStack() as undo:
            undo.callback(self._delete_namespaces)
            devices = [undo.enter_context(_device()) for _ in _ADDRESSES]
            for device, (side, address) in zip(devices, _ADDRESSES.items(), strict=True):
                _move_to_namespace(device, self.namespaces[side], address)
            self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._control.close)
            settings = {"condition": asdict(condition), "seed": seed}
            fds = [other.fileno(), *(device.fileno() for device in devices)]
            arguments = [sys.executable, "-m", __spec__.name, *map(str, fds), json.dumps(settings)]
            with other:
                self._shuttle = subprocess.Popen(arguments, pass_fds=fds, stdin=subprocess.DEVNULL)
            for device in devices:
                # Only the shuttle process has the devices open now. They vanish when it ends.
                device.close()
            undo.callback(self._shuttle.wait)
            undo.callback(self._control.close)  # Closing the socket ends the shuttle.
            undo.callback(self._end_programs)
            self.counts()  # The shuttle has answered, so it carries packets from now on.
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self, arguments: Sequence[str], side: Side, **options: Any) -> subprocess.Popen[Any]:
        """Start a program in a namespace. Closing the tunnel kills it if it still runs.

        Args:
            arguments: The program and its arguments. The returned process is the program itself,
                without a helper process.
            side: The namespace to run it in.
            options: Options of ``subprocess.Popen``.
        """
        command = ["ip", "netns", "exec", self.namespaces[side], *arguments]
        program = subprocess.Popen(command, **options)
        self._programs.append(program)
        return program

    def cut(self) -> None:
        """Lose every packet from now on, and those in flight."""
        self._ask("cut")

    def restore(self) -> None:
        """Carry packets again.

        Connections recover when TCP sends again, which it does at growing intervals.
        """
        self._ask("restore")

    def counts(self) -> dict[Literal["up", "down"], PacketCounts]:
        """Return the packet counts of each direction so far.

        Bytes are those of IP packets, headers included.
        """
        return self._ask("counts")

    def close(self) -> None:
        """Kill all programs in the namespaces and delete the namespaces."""
        self._undo.close()

    def _ask(self, verb: str) -> dict[Literal["up", "down"], PacketCounts]:
        answer = b""
        with suppress(ConnectionError):
            self._control.send(verb.encode())
            answer = self._control.recv(4096)
        if not answer:
            raise RuntimeError(
                "The process that carries the packets of the emulated network has ended. Make a "
                "new tunnel."
            )
        counts = json.loads(answer)
        return {"up": PacketCounts(**counts["up"]), "down": PacketCounts(**counts["down"])}

    def _end_programs(self) -> None:
        for program in self._programs:
            with program:  # The context closes its pipes.
                program.kill()

    def _delete_namespaces(self) -> None:
        for namespace in self.namespaces.values():
            _delete(namespace)


def sweep() -> None:
    """Delete namespaces of tunnels that were killed, and kill the programs in them."""
    for line in _ip("netns", "list").splitlines():
        found = _NAME.match(line)
        if found and not Path(f"/proc/{found[1]}").exists():
            _delete(found[0])


@contextmanager
def _device() -> Iterator[BinaryIO]:
    """Make a TUN device. It vanishes when its last descriptor is closed."""
    with _TUN.open("r+b", buffering=0) as file:
        try:
            fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"moa%d", _IFF_TUN | _IFF_NO_PI))
        except OSError as error:
            raise RuntimeError(f"A TUN device cannot be made ({error}).") from error
        yield file


def _move_to_namespace(device: BinaryIO, namespace: str, address: str) -> None:
    """Make a namespace and move a device there, with this address."""
    name = fcntl.ioctl(device, _TUNGETIFF, bytes(40))[:16].rstrip(b"\0").decode()
    _ip("netns", "add", namespace)
    _ip("link", "set", name, "netns", namespace)
    _ip("-n", namespace, "address", "add", f"{address}/24", "dev", name)
    for link in ("lo", name):
        _ip("-n", namespace, "link", "set", link, "up")


def _delete(namespace: str) -> None:
    """Kill all programs in a namespace and delete it, if it exists."""
    if not Path("/run/netns", namespace).exists():
        return
    for pid in _ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> str:
    """Run iproute2's command and return its output."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"`ip {' '.join(arguments)}` failed ({done.stderr.strip()}). Run it as root with all capabilities."
        )
    return done.stdout


# The rest of this module runs in the process that carries packets between the two devices. The
# process inherits both devices and one end of a socket. When the other end of the socket is closed
# for any reason, the process ends and the devices vanish.


class _Carrier:
    """One direction: reads packets from one device, and writes them to the other on arrival."""

    def __init__(self, source: int, sink: int, condition: Condition, seed: int) -> None:
        self.source, self.counts = source, PacketCounts()
        self._sink, self._line = sink, Line(condition, seed)
        self._flying: deque[tuple[float, bytes]] = deque()

    def take(self, is_cut: bool) -> None:
        """Read the packets of the device, and drop those that the network loses."""
        for _ in range(_BURST):
            try:
                packet = os.read(self.source, _MTU)
            except BlockingIOError:
                return
            now = time.monotonic()
            if packet[0] >> 4 != 4:  # Ignore IPv6 packets, which the kernel sends by itself.
                continue
            if is_cut:
                self.counts.cut += 1
            elif self._line.waiting(now) > MAX_WAITING_S:
                self.counts.overflowed += 1
            else:
                # A lost packet is also transmitted, so other packets have to wait for it.
                arrival, is_lost = self._line.arrival(now, len(packet)), self._line.is_lost()
                if is_lost:
                    self.counts.lost += 1
                else:
                    self._flying.append((arrival, packet))

    def deliver(self) -> float | None:
        """Write the packets that have arrived.

        Returns the seconds until the next packet arrives, or None if no packet is in flight.
        """
        while self._flying:
            arrival, packet = self._flying[0]
            left = arrival - time.monotonic()
            if left > 0:
                return left
            self._flying.popleft()
            os.write(self._sink, packet)
            self.counts.packets += 1
            self.counts.n_bytes += len(packet)
        return None

    def drop(self) -> None:
        """Lose all packets in flight."""
        self.counts.cut += len(self._flying)
        self._flying.clear()


def carry(
    control: socket.socket, client: int, server: int, condition: Condition, seed: int
) -> None:
    """Carry packets until the control socket is closed.

    Each message of the control socket is a verb: ``cut``, ``restore`` or ``counts``. The answer
    holds the counts of both directions as JSON.
    """
    carriers = {
        "up": _Carrier(client, server, condition, 2 * seed),
        "down": _Carrier(server, client, condition, 2 * seed + 1),
    }
    is_cut = False
    while True:
        lefts = [left for carrier in carriers.values() if (left := carrier.deliver()) is not None]
        ready, _, _ = select.select(
            [control.fileno(), client, server], [], [], min(lefts, default=None)
        )
        if control.fileno() in ready:
            verb = control.recv(64)
            if not verb:
                return
            if verb != b"counts":
                is_cut = verb == b"cut"
            for carrier in carriers.values():
                if is_cut:
                    carrier.drop()
            control.send(
                json.dumps(
                    {way: asdict(carrier.counts) for way, carrier in carriers.items()}
                ).encode()
            )
        for carrier in carriers.values():
            if carrier.source in ready:
                carrier.take(is_cut)


def main(control_fd: int, client: int, server: int, settings: str) -> None:
    """Carry packets as a separate process. The settings are condition and seed as JSON."""
    # Ask for a high priority, because a packet that is carried late distorts the measurement.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    values = json.loads(settings)
    for device in (client, server):
        os.set_blocking(device, False)
    with socket.socket(fileno=control_fd) as control:
        carry(control, client, server, Condition(**values["condition"]), values["seed"])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
