"""Limits on the bytes of large intermediates, which are computed in parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Limits:
    """Most bytes of a part of each intermediate."""

    logits_bytes: int = 1 << 26
    """Float32 logits of one chunk of a loss, unless that made more chunks than ``losses.MOST_CHUNKS``."""
    score_bytes: int = 1 << 27
    """Attention scores of EAGLE-3's own steps; more are made in parts, of rows and then of queries."""
    watched: list[int] | None = None
    """List to which each loss adds the bytes of a chunk's logits, while a trial runs; else None."""


LIMITS = Limits()


@contextmanager
def smallest_parts() -> Iterator[list[int]]:
    """Make parts small, so that the memory of a short sequence predicts that of a long one.

    Yields:
        The bytes of each chunk of logits, added as losses run.
    """
    before = LIMITS.logits_bytes, LIMITS.score_bytes
    LIMITS.logits_bytes, LIMITS.score_bytes, LIMITS.watched = 1, 1 << 12, []
    try:
        yield LIMITS.watched
    finally:
        LIMITS.logits_bytes, LIMITS.score_bytes = before
        LIMITS.watched = None
