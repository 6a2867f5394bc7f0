"""Scheduling: which sequences share the next target call, and how many tokens each one reads.

The least recently served sequences come first, so that no sequence waits while another is served
twice. All sequences in prefill share one chunk of tokens per call, so a long prompt delays the
others by no more than this chunk. In this example a chunk has 8 tokens, A and B have prompts of
20 and 5 tokens, and C decodes::

    call        1     2     3     4
    A           4     8    8+     +
    B           4     +     +     +
    C           +     +     +     +

A number says how many tokens of the chunk a sequence gets. A ``+`` marks a call that also reads the
root (the last committed token) of the sequence, and so commits tokens. If only the root is left to
read, the sequence takes nothing from the chunk.

A sequence is scheduled only if it gets KV blocks for all of its tokens. If too few blocks are free,
other sequences are evicted. Sequences without work are evicted first, beginning with the least
recently served one. Then sequences are evicted that were added later than the sequence that needs
blocks, beginning with the youngest. So the oldest sequence always makes progress. An evicted
sequence is prefilled again, in chunks, once there is room.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from ..config import EngineOptions
from .pool import Pool, blocks_for
from .runner import Output
from .sequence import Commit, Sequence, Work

# The sequences in prefill share the chunk of a target call. But each of them may read at least this
# many tokens, because fewer tokens would take the same time.
_MIN_CHUNK = 16


@dataclass(eq=False)
class Scheduled:
    """The tokens of one sequence in a target call, and the results of this target call."""

    sequence: Sequence
    # The number of committed tokens that the target call reads, starting with the first token
    # without KV.
    n_known: int
    # Whether the target call reads the root, the last committed token. Only then does it verify
    # drafts and commit tokens.
    has_root: bool
    # The results of the target call for the sequence.
    output: Output = field(init=False)
    # The tokens whose KV was committed, as ascending indices among the tokens that the target call
    # read for this sequence. Rejected drafts are left out.
    kept: list[int] = field(init=False)
    # The number of drafts that the target call verified.
    n_drafts: int = 0
    # The indices of the accepted drafts, and the token that the target adds to them. None if the
    # drafts are not verified yet, or if the target call does not read the root.
    choice: tuple[list[int], int] | None = None
    # The new tokens of the sequence.
    commit: Commit = field(init=False)


class Scheduler:
    """Plans target calls and distributes the KV blocks among the sequences.

    Args:
        pool: the KV blocks.
        options: limits of the engine.
        max_drafts: largest number of drafts that the server itself makes per sequence and round.
    """

    def __init__(self, pool: Pool, options: EngineOptions, max_drafts: int) -> None:
        self._pool, self._options, self._max_drafts = pool, options, max_drafts
        self._n_served = 0

    def schedule(self, sequences: Collection[Sequence]) -> tuple[list[Scheduled], list[Sequence]]:
        """Plan the next target call.

        Args:
            sequences: all open sequences.

        Returns:
            The scheduled sequences and the evicted sequences. No sequence is scheduled if there is
            nothing to do.
        """
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
        # Variable-length attention on a GPU needs the sequences in the order of their KV blocks.
        scheduled.sort(key=lambda item: item.sequence.kv.first)
        return scheduled, evicted

    def _make_room(
        self,
        sequence: Sequence,
        sequences: Collection[Sequence],
        chosen: list[Sequence],
        evicted: list[Sequence],
    ) -> bool:
        """Reserve blocks for a sequence and its drafts; evict other sequences if necessary.

        Args:
            sequence: the sequence that needs room.
            sequences: all open sequences.
            chosen: sequences that are chosen for the target call already. They are not evicted.
            evicted: list to which the evicted sequences are appended.

        Returns:
            Whether the blocks are reserved. If even evictions would not free enough blocks, the
            result is False, and no sequence is evicted.
        """
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
