"""How much of a large intermediate is made at once; the one place that says so."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Limits:
    """Bytes of intermediates that exist in parts."""

    logits_bytes: int = 1 << 26
    """Float32 logits of one chunk of a loss, unless that made more chunks than ``losses.MOST_CHUNKS``."""
    score_bytes: int = 1 << 27
    """Attention scores of EAGLE-3's own steps; more are made in parts, of rows and then of queries."""
    watched: list[int] | None = None
    """Where each loss notes the bytes of a chunk's logits, while a trial runs."""


LIMITS = Limits()


@contextmanager
def smallest_parts() -> Iterator[list[int]]:
    """Make parts small, so that a short sequence shows what a long one keeps; gives the bytes of chunks of logits."""
    before = LIMITS.logits_bytes, LIMITS.score_bytes
    LIMITS.logits_bytes, LIMITS.score_bytes, LIMITS.watched = 1, 1 << 16, []
    try:
        yield LIMITS.watched
    finally:
        LIMITS.logits_bytes, LIMITS.score_bytes = before
        LIMITS.watched = None
