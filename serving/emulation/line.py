"""When a packet arrives that enters one direction of an emulated network, if it does."""

import random

from .conditions import Direction


class Line:
    """One direction of a network; the same for real packets and for pieces of a TCP stream. Times in seconds.

    Args:
        direction: rate, delay, jitter and loss.
        seed: of delays and losses, which are the same for the same packets in the same order.
    """

    def __init__(self, direction: Direction, seed: int) -> None:
        self._seconds_per_byte = 0.0 if direction.rate_bits_s is None else 8 / direction.rate_bits_s
        self._delay, self._jitter, self._loss = direction.delay_ms / 1e3, direction.jitter_ms / 1e3, direction.loss
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
