"""The KV cache of all sequences: one tensor, allocated at the start and divided into blocks.

The blocks of a sequence are contiguous, so attention on a CPU can read the KV through a view.
Gathering scattered blocks would take as long as the attention itself (measured with 8 sequences of
250 tokens on one core). A new sequence starts in the middle of the largest gap, and grows into the
free blocks on its right. If these are used up, its neighbours move as little as necessary::

    blocks            0 1 2 3 4 5 6 7 8 9
    A, B, C           A A . B B . . C C .     4 blocks are free
    B grows by three  A A . B B B B B C C     C moves by one block
    A grows by one    A A A B B B B B C C     no block is free: more growth needs an eviction

The pool allocates no memory after the start, so growing sequences cannot exhaust the memory of the
device.

A *slot* holds the keys and values of one token.

Shapes: L layers, H_kv key/value heads, d head dim, S slots in all blocks together, n positions.
``D = 2 * H_kv * d`` is the size of the KV of one position in one layer.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...errors import NotEnoughMemory
from ...machine import free_memory
from ...moa.nn.masks import to_device
from ...moa.targets.cache import pack_groups
from ...moa.targets.facts import KVGroup
from ...text import first_line, format_bytes

BLOCK_TOKENS = 32
"""Number of slots in a block. On average, half of a sequence's last block stays unused."""


def blocks_for(n_tokens: int) -> int:
    """Return the number of blocks that ``n_tokens`` tokens need."""
    return -(-n_tokens // BLOCK_TOKENS)


class Pool:
    """All blocks of the KV cache. They have room for the KV of at least ``n_tokens`` positions.

    Raises NotEnoughMemory if the device cannot hold the blocks.

    Args:
        n_tokens: number of positions of all sequences together.
        sizes: ``n_layers``, ``n_kv_heads`` and ``head_dim`` of the target.
        dtype: dtype of the KV.
        device: device of the KV.
        groups: the target's layers, grouped by KV shape. Empty if all layers have the same shape.
    """

    def __init__(
        self,
        n_tokens: int,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[KVGroup] = (),
    ) -> None:
        # The target's layers, grouped by KV shape. Empty if all layers have the same KV shape.
        self._groups = groups
        self.n_blocks = blocks_for(n_tokens)
        shape = (
            2,
            sizes["n_layers"],
            sizes["n_kv_heads"],
            self.n_blocks * BLOCK_TOKENS,
            sizes["head_dim"],
        )
        n_bytes = math.prod(shape) * dtype.itemsize
        try:
            # Linux grants an allocation that is larger than the free memory. It kills the process
            # later, when the process writes to this memory. So compare with the free memory first.
            if device.type == "cpu" and n_bytes > (n_free := free_memory() or n_bytes):
                raise RuntimeError(f"only {format_bytes(n_free)} of memory are free")
            # Keys (after RoPE) and values, [2, L, H_kv, S, d]. Writing zeros makes the system
            # provide the memory now, not while requests arrive.
            self.buffer = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise NotEnoughMemory(
                f"a KV cache of {n_tokens:,} tokens takes {format_bytes(n_bytes)}, more than the "
                f"memory of the {device.type} device can hold ({first_line(error)}).",
                "Lower `kv_tokens`.",
            ) from error
        self._held: list[PooledKV] = []  # Sequences that hold blocks, in the order of the blocks.

    @functools.cached_property
    def by_slot(self) -> list[tuple[Tensor, Tensor]]:
        """For each layer, its keys [d, H_kv * S] and its values [H_kv * S, d].

        All slots of one head come before the slots of the next head.
        """
        keys, values = self.buffer.flatten(2, 3)
        return list(zip(keys.transpose(1, 2), values, strict=True))

    @functools.cached_property
    def planes(self) -> list[tuple[Tensor, Tensor]]:
        """For each layer, its keys [H_kv, S, d] and its values [H_kv, S, d]."""
        return list(zip(*self.buffer, strict=True))

    @property
    def n_used(self) -> int:
        """The number of blocks that sequences hold."""
        return sum(kv.n_blocks for kv in tuple(self._held))

    def reserve(self, kv: "PooledKV", n_blocks: int) -> None:
        """Grow a sequence to ``n_blocks`` blocks. Move other sequences that are in the way.

        Args:
            kv: the KV of the sequence.
            n_blocks: the new number of blocks, at least the present number. The pool must have
                enough free blocks for the difference.
        """
        if not kv.n_blocks:
            stops = [0, *(other.first + other.n_blocks for other in self._held)]
            starts = [*(other.first for other in self._held), self.n_blocks]
            gaps = [start - stop for start, stop in zip(starts, stops, strict=True)]
            index = gaps.index(max(gaps))
            kv.first = stops[index] + max(0, gaps[index] - n_blocks) // 2
            self._held.insert(index, kv)
        kv.n_blocks = n_blocks
        targets = []
        stop = 0
        n_after = sum(other.n_blocks for other in self._held)
        # Move each sequence as little as possible: to the right if a sequence before it needs room,
        # and to the left only if the sequences after it would not fit otherwise.
        for other in self._held:
            first = min(max(stop, other.first), self.n_blocks - n_after)
            targets.append((other, first))
            stop = first + other.n_blocks
            n_after = n_after - other.n_blocks
        # No move may overwrite blocks of a sequence that has not moved yet. So first move sequences
        # to the left, beginning with the leftmost one. Then move sequences to the right, beginning
        # with the rightmost one.
        for other, first in targets:
            if first < other.first:
                self._move(other, first)
        for other, first in reversed(targets):
            if first > other.first:
                self._move(other, first)

    def free(self, kv: "PooledKV") -> None:
        """Release all blocks of a sequence. Its KV is lost."""
        if kv.n_blocks:
            self._held.remove(kv)
        kv.first = kv.n_blocks = kv.length = 0

    def packed(self, slots: Tensor, first_layer: int = 0) -> Tensor:
        """Return the KV of n slots, [n, L, D], packed as by :func:`~moa_data.moa.nn.kv.pack_kv`.

        Args:
            slots: [n] int64, indices among all slots of the pool.
            first_layer: the first layer to pack.
        """
        if self._groups:
            # The shape of ``layers`` is [L, S, H_kv, 2, d].
            layers = self.buffer.permute(1, 3, 2, 0, 4)
            return pack_groups(
                self._groups, lambda layer: layers[layer].index_select(0, slots), first_layer
            )
        return self.buffer[:, first_layer:].permute(3, 1, 2, 0, 4).index_select(0, slots).flatten(2)

    def _move(self, kv: "PooledKV", first: int) -> None:
        """Move a sequence to start at block ``first``. Its old and new blocks may overlap."""
        before = kv.first * BLOCK_TOKENS
        after = first * BLOCK_TOKENS
        # The old and new slots may overlap. Copy at most ``step`` slots at a time, so that no copy
        # overwrites a slot that must still be read.
        step = abs(after - before)
        starts = range(0, kv.length, step)
        for start in starts if after < before else reversed(starts):
            n_slots = min(step, kv.length - start)
            moved = self.buffer.narrow(3, before + start, n_slots)
            self.buffer.narrow(3, after + start, n_slots).copy_(moved)
        kv.first = first


class PooledKV:
    """The KV of one sequence.

    Slot i of the sequence, counted from its first block, holds the key and value of position i.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.first = 0
        self.n_blocks = 0
        # The number of committed positions. The slots after them hold arbitrary values. The next
        # target call writes to these slots.
        self.length = 0

    @property
    def first_slot(self) -> int:
        """The index of the slot of position 0, among all slots of the pool."""
        return self.first * BLOCK_TOKENS

    def view(self, start: int, stop: int) -> Tensor:
        """Return a view of the KV of positions ``start`` to ``stop - 1``: [2, L, H_kv, n, d]."""
        return self.pool.buffer[:, :, :, self.first_slot + start : self.first_slot + stop]

    def commit(self, kept: Sequence[int]) -> None:
        """Commit the KV of some pending tokens, and discard the KV of the other pending tokens.

        The pending tokens are the tokens that the last target call read. The target call wrote
        their KV after the committed KV.

        Args:
            kept: ascending indices of the pending tokens to commit. 0 is the first pending token.
        """
        n_kept = len(kept)
        start = self.length
        if list(kept) != list(range(n_kept)):
            pending = self.view(start, start + kept[-1] + 1)
            with torch.inference_mode():
                pending[:, :, :, :n_kept] = pending.index_select(3, to_device(kept, pending.device))
        self.length = start + n_kept
