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

Shapes: H_kv key/value heads, d head dim.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from ...moa.nn.kv import KVBuffer
from ...moa.targets.live import Target
from ..config import EngineOptions
from .runner import Output
from .sequence import Commit, Sequence, Work

# Copying a buffer each time that it grows by a block costs a thirty-second of a read of it a token, and half a block is
# unused in each sequence.
BLOCK_TOKENS = 32
# Tokens that each sequence reads at least: a call with fewer costs the same.
_MIN_CHUNK = 16


def blocks_for(n_tokens: int) -> int:
    """The number of blocks that hold so many tokens."""
    return -(-n_tokens // BLOCK_TOKENS)


def held_blocks(kv: KVBuffer) -> int:
    """The number of blocks that a sequence has."""
    return kv.capacity // BLOCK_TOKENS


@dataclass(eq=False)
class Scheduled:
    """The tokens of one sequence in a target call, and what the call gave it."""

    sequence: Sequence
    n_known: int  # committed tokens that it reads
    has_root: bool  # whether the root is the last of them, so that drafts are verified and tokens committed
    output: Output = field(init=False)
    kept: list[int] = field(init=False)  # the tokens of its part that got KV, in order
    n_drafts: int = 0
    commit: Commit = field(init=False)


class Scheduler:
    """Plans target calls, and bounds the KV of all sequences together, counted in blocks of tokens."""

    # Each sequence has a buffer of its own, so that attention reads it as it lies: gathering blocks that are scattered
    # over one large buffer costs as much again as attending to them (8 sequences of 250 tokens, one CPU core).

    def __init__(self, target: Target, options: EngineOptions, max_drafts: int) -> None:
        self.n_blocks, self.n_used, sizes = blocks_for(options.kv_tokens), 0, target.sizes
        shape = 1, sizes["n_kv_heads"], 0, sizes["head_dim"]
        self._like = torch.empty(shape, dtype=target.model.dtype, device=target.device)
        self._options, self._max_drafts = options, max_drafts  # the latter of the server's own drafts
        self._n_served = 0

    def evict(self, kv: KVBuffer) -> None:
        """Take all blocks of a sequence, and forget what they hold."""
        self.n_used -= held_blocks(kv)
        kv.clear()

    def schedule(self, sequences: Collection[Sequence]) -> tuple[list[Scheduled], list[Sequence]]:
        """Plan the next call; returns its tokens, none if there is nothing to do, and who lost its KV for it."""
        runnable = sorted((s for s in sequences if s.is_runnable), key=lambda s: (s.last_served, s.id))
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
        return scheduled, evicted

    def _make_room(
        self, sequence: Sequence, sequences: Collection[Sequence], chosen: list[Sequence], evicted: list[Sequence]
    ) -> bool:
        """Reserve blocks for a text and its drafts, those of others if need be; False if there are not enough."""
        n_drafts = self._max_drafts if sequence.work is Work.SPECULATE else len(sequence.drafts)
        n_more = blocks_for(len(sequence.tokens) + n_drafts) - held_blocks(sequence.kv)
        n_wanted = n_more - (self.n_blocks - self.n_used)
        victims = []
        if n_wanted > 0:
            holders = [s for s in sequences if s.kv.capacity and s is not sequence]
            idle = sorted((s for s in holders if not s.is_runnable), key=lambda s: s.last_served)
            younger = [s for s in holders if s.is_runnable and s.id > sequence.id and s not in chosen]
            for other in idle + sorted(younger, key=lambda s: -s.id):
                if n_wanted <= 0:
                    break
                victims.append(other)
                n_wanted -= held_blocks(other.kv)
        if n_wanted > 0:
            return False
        for other in victims:
            self.evict(other.kv)
        evicted += victims
        if n_more > 0:
            sequence.kv.resize(sequence.kv.capacity + n_more * BLOCK_TOKENS, self._like)
            self.n_used += n_more
        return True
