"""Two network namespaces joined by TUN devices, between which a process carries real packets.

Packets are delayed, dropped and queued as on a link of the given rate, so TCP's own handshake, congestion control,
retransmission and back-off are what a program in there meets::

    with Tunnel(CONDITIONS["4g"]) as tunnel:
        server = tunnel.start(["moa-data", "serve", "--host", tunnel.server_address], "server")
        client = tunnel.start(["curl", f"http://{tunnel.server_address}:8000/health"], "client")
        client.wait()

Figures of ``wired``, ``5g`` and ``4g`` are those that the paper of the Mixture of Attentions drafter (arXiv 2410.03804)
gives for its client-server experiments. A ping is a round trip, so each direction gets half of it. A delay "a +- b ms"
is read as netem, which such figures are options of, reads it: normally distributed, drawn for each packet of each
direction, so that the round trip is about twice as long.

Needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), /dev/net/tun and iproute2. Nothing of it is seen outside the namespaces.
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
"""A packet that would wait longer than this for the rate finds the queue full and is dropped."""
_MTU = 1 << 16
_BURST = 64
"""Packets read of one device before the other gets its turn."""


def unavailable_because() -> str | None:
    """Return what keeps this machine from making a tunnel, as one line, or None."""
    if sys.platform != "linux" or not _TUN.exists():
        return "there is no /dev/net/tun (Linux with the tun module; in a container, --device /dev/net/tun)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` is missing; install iproute2"
    return None


@dataclass(frozen=True)
class Condition:
    """A network whose directions are alike.

    Attributes:
        rate_bits_s: bits per second, headers included; None for no limit.
        delay_ms: mean delay of a packet, one way, without the time that the rate takes.
        jitter_ms: standard deviation of the delay, which is normal, but never below 0. Packets keep their order, as
            on the radio links of 4G and 5G, which hold back what overtook: a burst waits for its slowest packet.
        loss: probability that a packet is lost, each packet for itself.
    """

    rate_bits_s: float | None = None
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0


CONDITIONS = {
    "none": Condition(),  # what this machine does by itself
    "wired": Condition(50e6, 4.5),  # the paper: 50 Mbit/s and a ping (round trip) of 9 ms
    # the paper, whose rate is taken as that of the wired network
    "5g": Condition(50e6, 10.0, 10.0, 0.001),
    # the paper: 20 Mbit/s, 21 +- 19 ms one way, 0.1 % loss
    "4g": Condition(20e6, 21.0, 19.0, 0.001),
    # not of the paper: a far network, a round trip of 100 ms
    "satellite": Condition(20e6, 50.0, 5.0, 0.001),
}
"""Networks by name."""


class Line:
    """When a packet arrives that enters one direction of an emulated network, if it does. Times in seconds.

    Args:
        condition: rate, delay, jitter and loss.
        seed: of delays and losses, which are the same for the same packets in the same order.
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
        """Seconds that a packet which comes now waits until those before it are sent."""
        return max(0.0, self._free_at - now)

    def is_lost(self) -> bool:
        """Decide whether the next packet is lost."""
        return self._loss > 0 and self._random.random() < self._loss

    def arrival(self, now: float, n_bytes: int, extra: float = 0.0) -> float:
        """Send a packet and return when it arrives, not before those that were sent before it."""
        self._free_at = max(now, self._free_at) + n_bytes * self._seconds_per_byte
        delay = (
            max(0.0, self._random.gauss(self._delay, self._jitter)) if self._jitter else self._delay
        )
        self._last_arrival = max(self._last_arrival, self._free_at + delay + extra)
        return self._last_arrival


@dataclass
class PacketCounts:
    """What happened to the packets of one direction."""

    packets: int = 0
    n_bytes: int = 0
    lost: int = 0
    overflowed: int = 0
    cut: int = 0


class Tunnel:
    """A client's and a server's network namespace with an emulated network between them.

    The server's address is the same in each tunnel; tunnels do not see each other.

    Args:
        condition: the network.
        seed: of delays and losses.

    Raises:
        RuntimeError: this machine, or this user, cannot make one.
    """

    server_address = _ADDRESSES["server"]
    client_address = _ADDRESSES["client"]

    def __init__(self, condition: Condition, seed: int = 0) -> None:
        reason = unavailable_because()
        if reason is not None:
            raise RuntimeError(f"No network namespaces: {reason}.")
        sweep()
        name = f"moa-{os.getpid()}-{secrets.token_hex(4)}"
        self.namespaces: dict[Side, str] = {"client": f"{name}-client", "server": f"{name}-server"}
        self._programs: list[subprocess.Popen[Any]] = []
        with ExitStack() as undo:
            undo.callback(self._delete_namespaces)
            devices = [undo.enter_context(_device()) for _ in _ADDRESSES]
            for device, (side, address) in zip(devices, _ADDRESSES.items(), strict=True):
                _place(device, self.namespaces[side], address)
            self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._control.close)
            settings = {"condition": asdict(condition), "seed": seed}
            fds = [other.fileno(), *(device.fileno() for device in devices)]
            arguments = [sys.executable, "-m", __spec__.name, *map(str, fds), json.dumps(settings)]
            with other:
                self._shuttle = subprocess.Popen(arguments, pass_fds=fds, stdin=subprocess.DEVNULL)
            for device in devices:
                # the shuttle's are the only ones now: when it ends, the devices vanish
                device.close()
            undo.callback(self._shuttle.wait)
            undo.callback(self._control.close)  # which ends it
            undo.callback(self._end_programs)
            self.counts()  # it carries packets from here on
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self, arguments: Sequence[str], side: Side, **options: Any) -> subprocess.Popen[Any]:
        """Start a program in a namespace; it is killed with the tunnel if it still runs.

        Args:
            arguments: the program and its arguments; what returns is its process, not that of a helper.
            side: whose namespace.
            options: of ``subprocess.Popen``.
        """
        command = ["ip", "netns", "exec", self.namespaces[side], *arguments]
        program = subprocess.Popen(command, **options)
        self._programs.append(program)
        return program

    def cut(self) -> None:
        """Lose every packet from now on, and those on their way."""
        self._ask("cut")

    def restore(self) -> None:
        """Carry packets again; connections come back when TCP sends again, which it does ever more rarely."""
        self._ask("restore")

    def counts(self) -> dict[Literal["up", "down"], PacketCounts]:
        """What happened to packets of each direction so far; bytes are those of IP packets, headers included."""
        return self._ask("counts")

    def close(self) -> None:
        """Kill what runs in the namespaces and delete them."""
        self._undo.close()

    def _ask(self, verb: str) -> dict[Literal["up", "down"], PacketCounts]:
        answer = b""
        with suppress(ConnectionError):
            self._control.send(verb.encode())
            answer = self._control.recv(4096)
        if not answer:
            raise RuntimeError("The process that carries the packets has ended. Make a new tunnel.")
        counts = json.loads(answer)
        return {"up": PacketCounts(**counts["up"]), "down": PacketCounts(**counts["down"])}

    def _end_programs(self) -> None:
        for program in self._programs:
            with program:  # closes its pipes
                program.kill()

    def _delete_namespaces(self) -> None:
        for namespace in self.namespaces.values():
            _delete(namespace)


def sweep() -> None:
    """Delete namespaces whose tunnel was killed, and end what still runs in them."""
    for line in _ip("netns", "list").splitlines():
        found = _NAME.match(line)
        if found and not Path(f"/proc/{found[1]}").exists():
            _delete(found[0])


@contextmanager
def _device() -> Iterator[BinaryIO]:
    """Make a TUN device; it vanishes with the last descriptor of it."""
    with _TUN.open("r+b", buffering=0) as file:
        try:
            fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"moa%d", _IFF_TUN | _IFF_NO_PI))
        except OSError as error:
            raise RuntimeError(f"No TUN device: {error}.") from error
        yield file


def _place(device: BinaryIO, namespace: str, address: str) -> None:
    """Make a namespace and move a device there, with this address."""
    name = fcntl.ioctl(device, _TUNGETIFF, bytes(40))[:16].rstrip(b"\0").decode()
    _ip("netns", "add", namespace)
    _ip("link", "set", name, "netns", namespace)
    _ip("-n", namespace, "address", "add", f"{address}/24", "dev", name)
    for link in ("lo", name):
        _ip("-n", namespace, "link", "set", link, "up")


def _delete(namespace: str) -> None:
    """Delete a namespace, if it exists, and kill what runs in it."""
    if not Path("/run/netns", namespace).exists():
        return
    for pid in _ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> str:
    """Run iproute2's command and return what it says."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}. Is this a full root?"
        )
    return done.stdout


# The process that carries packets between the two devices. It is handed both of them and one end of
# a socket; when the other end is closed, whatever the reason, it ends and the devices vanish with
# it.


class _Carrier:
    """One direction: reads packets of a device and writes them to the other when they arrive."""

    def __init__(self, source: int, sink: int, condition: Condition, seed: int) -> None:
        self.source, self.counts = source, PacketCounts()
        self._sink, self._line = sink, Line(condition, seed)
        self._flying: deque[tuple[float, bytes]] = deque()

    def take(self, is_cut: bool) -> None:
        """Read what the device has; lose what the network loses."""
        for _ in range(_BURST):
            try:
                packet = os.read(self.source, _MTU)
            except BlockingIOError:
                return
            now = time.monotonic()
            if packet[0] >> 4 != 4:  # the kernel's own chatter of IPv6
                continue
            if is_cut:
                self.counts.cut += 1
            elif self._line.waiting(now) > MAX_WAITING_S:
                self.counts.overflowed += 1
            else:
                # A lost packet was sent: it takes its share of the rate.
                arrival, is_lost = self._line.arrival(now, len(packet)), self._line.is_lost()
                if is_lost:
                    self.counts.lost += 1
                else:
                    self._flying.append((arrival, packet))

    def deliver(self) -> float | None:
        """Write what has arrived; returns the seconds until the next packet does, None if there is none."""
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
        """Lose what is on its way."""
        self.counts.cut += len(self._flying)
        self._flying.clear()


def carry(
    control: socket.socket, client: int, server: int, condition: Condition, seed: int
) -> None:
    """Carry packets until the control socket is closed.

    Each message of the control socket is a verb, ``cut``, ``restore`` or ``counts``, and is answered by the counts of
    both directions as JSON.
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
    """Carry packets as a process of its own; settings are the condition and the seed as JSON."""
    with suppress(PermissionError):  # a packet that is carried late is a wrong measurement
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    values = json.loads(settings)
    for device in (client, server):
        os.set_blocking(device, False)
    with socket.socket(fileno=control_fd) as control:
        carry(control, client, server, Condition(**values["condition"]), values["seed"])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
