"""The KV of all sequences: one tensor that is allocated when the engine starts, of which each holds blocks in a row.

Blocks in a row are a view, so that attention on a CPU reads a sequence as it lies: gathering blocks that are scattered
costs as much again as attending to them (8 sequences of 250 tokens, one core). A sequence begins in the middle of the
largest gap and grows into what is left of it; where that is used up, its neighbours move as far as they must::

    blocks            0 1 2 3 4 5 6 7 8 9
    A, B, C           A A . B B . . C C .     4 blocks are free
    B grows by three  A A . B B B B B C C     C moves by one
    A grows by one    A A A B B B B B C C     all are held: another can have some only when a sequence loses its own

Nothing is allocated after the start, so that no text can take the memory of another.

Shapes: L layers, H_kv key/value heads, d head dim, S slots of all blocks, n positions, D = 2 * H_kv * d.
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
from ...moa.targets.families import KVGroup
from ...text import first_line, format_bytes

BLOCK_TOKENS = 32
"""Slots of a block: half a block is unused in each sequence."""


def blocks_for(n_tokens: int) -> int:
    """The number of blocks that hold so many tokens."""
    return -(-n_tokens // BLOCK_TOKENS)


class Pool:
    """Blocks for at least ``n_tokens`` positions of a target of some sizes."""

    def __init__(
        self,
        n_tokens: int,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[KVGroup] = (),
    ) -> None:
        self._groups = groups  # of layers that are not alike
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
            # Linux grants any memory, and kills the process that writes to more than there is.
            if device.type == "cpu" and n_bytes > (n_free := free_memory() or n_bytes):
                raise RuntimeError(f"{format_bytes(n_free)} are free")
            # Zeros are written, so that the memory is taken now and not as texts come.
            # [2, L, H_kv, S, d], keys after RoPE
            self.buffer = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise NotEnoughMemory(
                f"the keys and values of {n_tokens:,} tokens take {format_bytes(n_bytes)}, which {device.type} memory "
                f"cannot hold ({first_line(error)}).",
                "Give a smaller --kv-tokens.",
            ) from error
        self._held: list[PooledKV] = []  # in the order of their blocks

    @functools.cached_property
    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """The keys [d, H_kv * S] and the values [H_kv * S, d] of each layer; those of a head follow each other."""
        keys, values = self.buffer.flatten(2, 3)
        return list(zip(keys.transpose(1, 2), values, strict=True))

    @functools.cached_property
    def planes(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and the values of each layer, [H_kv, S, d]."""
        return list(zip(*self.buffer, strict=True))

    @property
    def n_used(self) -> int:
        """The blocks that sequences hold."""
        return sum(kv.n_blocks for kv in tuple(self._held))

    def reserve(self, kv: "PooledKV", n_blocks: int) -> None:
        """Let a sequence have so many blocks, no fewer than it has; as many more have to be free."""
        if not kv.n_blocks:
            stops = [0, *(other.first + other.n_blocks for other in self._held)]
            starts = [*(other.first for other in self._held), self.n_blocks]
            gaps = [start - stop for start, stop in zip(starts, stops, strict=True)]
            place = gaps.index(max(gaps))
            kv.first = stops[place] + max(0, gaps[place] - n_blocks) // 2
            self._held.insert(place, kv)
        kv.n_blocks = n_blocks
        targets = []
        stop = 0
        n_after = sum(other.n_blocks for other in self._held)
        for other in self._held:  # no further than they must, and so that those after it still fit
            first = min(max(stop, other.first), self.n_blocks - n_after)
            targets.append((other, first))
            stop = first + other.n_blocks
            n_after = n_after - other.n_blocks
        # In this order none is written where another one still lies.
        for other, first in targets:
            if first < other.first:
                self._move(other, first)
        for other, first in reversed(targets):
            if first > other.first:
                self._move(other, first)

    def free(self, kv: "PooledKV") -> None:
        """Take all blocks of a sequence, and forget what they hold."""
        if kv.n_blocks:
            self._held.remove(kv)
        kv.first = kv.n_blocks = kv.length = 0

    def packed(self, slots: Tensor, first_layer: int = 0) -> Tensor:
        """Pack the KV of n slots, [n] int64 (:func:`~moa_data.moa.nn.kv.pack_kv`), from a layer on: [n, L, D]."""
        if self._groups:
            layers = self.buffer.permute(1, 3, 2, 0, 4)  # [L, S, H_kv, 2, d]
            return pack_groups(
                self._groups, lambda layer: layers[layer].index_select(0, slots), first_layer
            )
        return self.buffer[:, first_layer:].permute(3, 1, 2, 0, 4).index_select(0, slots).flatten(2)

    def _move(self, kv: "PooledKV", first: int) -> None:
        """Move a sequence to blocks from another one on, which may be its own in part."""
        before = kv.first * BLOCK_TOKENS
        after = first * BLOCK_TOKENS
        step = abs(after - before)  # of so many slots none is written before it is read
        starts = range(0, kv.length, step)
        for start in starts if after < before else reversed(starts):
            n_slots = min(step, kv.length - start)
            moved = self.buffer.narrow(3, before + start, n_slots)
            self.buffer.narrow(3, after + start, n_slots).copy_(moved)
        kv.first = first


class PooledKV:
    """The KV of one sequence: slot i, counted from its first block on, holds the token at position i."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.first = 0
        self.n_blocks = 0
        # positions that are committed; later slots hold anything, and the next call writes there
        self.length = 0

    @property
    def first_slot(self) -> int:
        """The slot of position 0, among all of the pool's."""
        return self.first * BLOCK_TOKENS

    def view(self, start: int, stop: int) -> Tensor:
        """View the KV of positions: [2, L, H_kv, n, d]."""
        return self.pool.buffer[:, :, :, self.first_slot + start : self.first_slot + stop]

    def commit(self, kept: Sequence[int]) -> None:
        """Keep some of the tokens after the committed ones, given by ascending indices; the others are forgotten."""
        n_kept = len(kept)
        start = self.length
        if list(kept) != list(range(n_kept)):
            pending = self.view(start, start + kept[-1] + 1)
            with torch.inference_mode():
                pending[:, :, :, :n_kept] = pending.index_select(3, to_device(kept, pending.device))
        self.length = start + n_kept
