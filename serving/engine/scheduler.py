"""Chooses which sequences share the next target call, and how many tokens each reads; knows no tensors.

The sequences that were served longest ago come first, so that none waits while another is served twice, as long as the
memory lasts. All that read prompts share one chunk of tokens a call, so that a long prompt delays the others by no more
than that chunk::

    call        1     2     3     4      8 tokens a chunk; A and B have prompts of 20 and 5 tokens, C decodes
    A           4     8    8+     +      +: reads the root too, and commits tokens
    B           4     +     +     +      a sequence that has only its root to read takes nothing of the chunk
    C           +     +     +     +

A sequence is scheduled only with blocks for its whole text. Where too few are free, sequences without work lose theirs,
the least recently served first, then those that came after it, the youngest first; the oldest always makes progress. A
sequence that lost its blocks reads its text again, in chunks, when there is room.
"""

from collections.abc import Collection
from dataclasses import dataclass

from .kv import KVPool, blocks_for, held_blocks
from .sequence import Sequence, Work

_MIN_CHUNK = 16
"""Tokens that each sequence reads at least: a call with fewer costs the same."""


@dataclass(frozen=True)
class Scheduled:
    """The tokens of one sequence in a target call."""

    sequence: Sequence
    n_known: int  # committed tokens that it reads
    has_root: bool  # whether the root is the last of them, so that drafts are verified and tokens committed


class Scheduler:
    """Plans target calls.

    Args:
        max_sequences: sequences that share a call at most.
        prefill_chunk: tokens that those with missing tokens read in a call, together.
        max_drafts: drafts that the server's own drafting makes at most.
    """

    def __init__(self, pool: KVPool, max_sequences: int, prefill_chunk: int, max_drafts: int) -> None:
        self._pool, self._max_sequences = pool, max_sequences
        self._prefill_chunk, self._max_drafts = prefill_chunk, max_drafts
        self._n_served = 0

    def schedule(self, sequences: Collection[Sequence]) -> tuple[list[Scheduled], list[Sequence]]:
        """Plan the next call; returns its tokens, none if there is nothing to do, and who lost its KV for it."""
        runnable = sorted((s for s in sequences if s.is_runnable), key=lambda s: (s.last_served, s.id))
        chosen: list[Sequence] = []
        evicted: list[Sequence] = []
        for sequence in runnable:
            if len(chosen) == self._max_sequences:
                break
            if self._make_room(sequence, sequences, chosen, evicted):
                chosen.append(sequence)
        n_reading = sum(s.n_missing > 0 for s in chosen)
        chunk = max(_MIN_CHUNK, self._prefill_chunk // max(1, n_reading))
        scheduled = []
        for sequence in chosen:
            self._n_served += 1
            sequence.last_served = self._n_served
            n_known = min(sequence.n_missing + 1, chunk)
            scheduled.append(Scheduled(sequence, n_known, n_known == sequence.n_missing + 1))
        return scheduled, evicted

    def _make_room(
        self, sequence: Sequence, sequences: Collection[Sequence], chosen: list[Sequence], evicted: list[Sequence]
    ) -> bool:
        """Reserve blocks for a text and its drafts, those of others if need be; False if there are not enough."""
        n_drafts = self._max_drafts if sequence.work is Work.SPECULATE else len(sequence.drafts)
        n_slots = len(sequence.tokens) + n_drafts
        if self._pool.reserve(sequence.kv, n_slots):
            return True
        n_wanted = blocks_for(n_slots) - held_blocks(sequence.kv) - self._pool.n_free
        holders = [s for s in sequences if s.kv.capacity and s is not sequence]
        idle = sorted((s for s in holders if not s.is_runnable), key=lambda s: s.last_served)
        younger = [s for s in holders if s.is_runnable and s.id > sequence.id and s not in chosen]
        victims = []
        for other in idle + sorted(younger, key=lambda s: -s.id):
            if n_wanted <= 0:
                break
            victims.append(other)
            n_wanted -= held_blocks(other.kv)
        if n_wanted > 0:
            return False
        for other in victims:
            self._pool.evict(other.kv)
        evicted += victims
        return self._pool.reserve(sequence.kv, n_slots)
