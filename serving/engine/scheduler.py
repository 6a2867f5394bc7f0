"""Chooses which sequences share the next target call, and how many tokens each reads, within a bound on KV memory.

The sequences that were served longest ago come first, so that none waits while another is served twice. All that read
prompts share one chunk of tokens a call, so that a long prompt delays the others by no more than that chunk::

    call        1     2     3     4      8 tokens a chunk; A and B have prompts of 20 and 5 tokens, C decodes
    A           4     8    8+     +      +: reads the root too, and commits tokens
    B           4     +     +     +      a sequence that has only its root to read takes nothing of the chunk
    C           +     +     +     +

A sequence is scheduled only with blocks for its whole text. Where too few are free, sequences without work lose theirs,
the least recently served first, then those that came after it, the youngest first; the oldest always makes progress. A
sequence that lost its blocks reads its text again, in chunks, when there is room.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from ..config import EngineOptions
from .pool import Pool, blocks_for
from .runner import Output
from .sequence import Commit, Sequence, Work

# Tokens that each sequence reads at least: a call with fewer costs the same.
_MIN_CHUNK = 16


@dataclass(eq=False)
class Scheduled:
    """The tokens of one sequence in a target call, and what the call gave it."""

    sequence: Sequence
    n_known: int  # committed tokens that it reads
    # whether the root is the last of them, so that drafts are verified and tokens committed
    has_root: bool
    output: Output = field(init=False)
    kept: list[int] = field(init=False)  # the tokens of its part that got KV, in order
    n_drafts: int = 0
    choice: tuple[list[int], int] | None = None  # accepted drafts and next token, of sampled texts
    commit: Commit = field(init=False)


class Scheduler:
    """Plans target calls, and shares the blocks of the KV among all sequences."""

    def __init__(self, pool: Pool, options: EngineOptions, max_drafts: int) -> None:
        # the last of the server's own drafts
        self._pool, self._options, self._max_drafts = pool, options, max_drafts
        self._n_served = 0

    def schedule(self, sequences: Collection[Sequence]) -> tuple[list[Scheduled], list[Sequence]]:
        """Plan the next call; returns its tokens, none if there is nothing to do, and who lost its KV for it."""
        runnable = sorted(
            (s for s in sequences if s.is_runnable), key=lambda s: (s.last_served, s.id)
        )
        chosen: list[Sequence] = []
        evicted: list[Sequence] = []
        for sequence in runnable:
            if len(chosen) == self._options.max_sequences:
                break
            if self._make_room(sequence, sequences, chosen, evicted):
                chosen.append(sequence)
        n_reading = sum(s.n_missing > 0 for s in chosen)
        chunk = max(_MIN_CHUNK, self._options.prefill_chunk // max(1, n_reading))
        scheduled = []
        for sequence in chosen:
            self._n_served += 1
            sequence.last_served = self._n_served
            n_known = min(sequence.n_missing + 1, chunk)
            scheduled.append(Scheduled(sequence, n_known, n_known == sequence.n_missing + 1))
        scheduled.sort(key=lambda one: one.sequence.kv.first)  # as attention wants them on a GPU
        return scheduled, evicted

    def _make_room(
        self,
        sequence: Sequence,
        sequences: Collection[Sequence],
        chosen: list[Sequence],
        evicted: list[Sequence],
    ) -> bool:
        """Reserve blocks for a text and its drafts, those of others if need be; False if there are not enough."""
        n_drafts = self._max_drafts if sequence.work is Work.SPECULATE else len(sequence.drafts)
        n_blocks = blocks_for(len(sequence.tokens) + n_drafts)
        if n_blocks <= sequence.kv.n_blocks:
            return True
        n_wanted = n_blocks - sequence.kv.n_blocks - (self._pool.n_blocks - self._pool.n_used)
        victims = []
        if n_wanted > 0:
            holders = [s for s in sequences if s.kv.n_blocks and s is not sequence]
            idle = sorted((s for s in holders if not s.is_runnable), key=lambda s: s.last_served)
            younger = [
                s for s in holders if s.is_runnable and s.id > sequence.id and s not in chosen
            ]
            for other in idle + sorted(younger, key=lambda s: -s.id):
                if n_wanted <= 0:
                    break
                victims.append(other)
                n_wanted -= other.kv.n_blocks
        if n_wanted > 0:
            return False
        for other in victims:
            self._pool.free(other.kv)
        evicted += victims
        self._pool.reserve(sequence.kv, n_blocks)
        return True
