"""Networks by name: rate, delay, jitter and loss of each condition.

Figures of ``wired``, ``5g`` and ``4g`` are those that the paper of the Mixture of Attentions drafter (arXiv 2410.03804)
gives for its client-server experiments. A ping is a round trip, so each direction gets half of it. A delay "a +- b ms"
is read as netem, which such figures are options of, reads it: normally distributed, drawn for each packet of each
direction, so that the round trip is about twice as long.
"""

import random
from dataclasses import dataclass


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
    "5g": Condition(50e6, 10.0, 10.0, 0.001),  # the paper, whose rate is taken as that of the wired network
    "4g": Condition(20e6, 21.0, 19.0, 0.001),  # the paper: 20 Mbit/s, 21 +- 19 ms one way, 0.1 % loss
    "satellite": Condition(20e6, 50.0, 5.0, 0.001),  # not of the paper: a far network, a round trip of 100 ms
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
        self._delay, self._jitter, self._loss = condition.delay_ms / 1e3, condition.jitter_ms / 1e3, condition.loss
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
        delay = max(0.0, self._random.gauss(self._delay, self._jitter)) if self._jitter else self._delay
        self._last_arrival = max(self._last_arrival, self._free_at + delay + extra)
        return self._last_arrival
