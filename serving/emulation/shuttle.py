"""The process that carries IP packets between two TUN devices, as an emulated network would.

Started by :class:`.tunnel.Tunnel`, which hands it both devices and one end of a socket; when the other end is closed,
whatever the reason, the process ends and the devices vanish with it.
"""

import json
import os
import select
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass

from .conditions import Direction
from .line import Line

MOST_WAITING_S = 0.25
"""A packet that would wait longer than this for the rate finds the queue full and is dropped."""
_MTU = 1 << 16
_BURST = 64
"""Packets read of one device before the other gets its turn."""


@dataclass
class Counts:
    """What happened to the packets of one direction."""

    packets: int = 0
    n_bytes: int = 0
    lost: int = 0
    overflowed: int = 0
    cut: int = 0


class _Carrier:
    """One direction: reads packets of a device and writes them to the other when they arrive."""

    def __init__(self, source: int, sink: int, direction: Direction, seed: int) -> None:
        self.source, self.counts = source, Counts()
        self._sink, self._line = sink, Line(direction, seed)
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
            elif self._line.waiting(now) > MOST_WAITING_S:
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


def carry(control: socket.socket, client: int, server: int, up: Direction, down: Direction, seed: int) -> None:
    """Carry packets until the control socket is closed.

    Each message of the control socket is a verb, ``cut``, ``mend`` or ``counts``, and is answered by the counts of both
    directions as JSON.
    """
    carriers = {"up": _Carrier(client, server, up, 2 * seed), "down": _Carrier(server, client, down, 2 * seed + 1)}
    is_cut = False
    while True:
        lefts = [left for carrier in carriers.values() if (left := carrier.deliver()) is not None]
        ready, _, _ = select.select([control.fileno(), client, server], [], [], min(lefts, default=None))
        if control.fileno() in ready:
            verb = control.recv(64)
            if not verb:
                return
            if verb != b"counts":
                is_cut = verb == b"cut"
            for carrier in carriers.values():
                if is_cut:
                    carrier.drop()
            control.send(json.dumps({way: asdict(carrier.counts) for way, carrier in carriers.items()}).encode())
        for carrier in carriers.values():
            if carrier.source in ready:
                carrier.take(is_cut)


def main(control_fd: int, client: int, server: int, settings: str) -> None:
    """Run as a process; settings are the directions and the seed as JSON."""
    with suppress(PermissionError):  # a packet that is carried late is a wrong measurement
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    values = json.loads(settings)
    for device in (client, server):
        os.set_blocking(device, False)
    with socket.socket(fileno=control_fd) as control:
        carry(control, client, server, Direction(**values["up"]), Direction(**values["down"]), values["seed"])
