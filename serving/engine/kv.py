"""Target KV of single sequences, in blocks of tokens out of one bounded pool.

Shapes: L target layers, H_kv key/value heads, d head dim, D = 2 * H_kv * d, n tokens, S slots.

Each sequence has a buffer of its own, a whole number of blocks long, so that attention reads it as it lies: gathering
blocks that are scattered over one large buffer costs as much again as attending to them (8 sequences of 250 tokens, one
CPU core). The pool counts blocks and allocates no more than its bound; a buffer that grows is copied.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...moa.nn.kv import KVBuffer
from ...moa.targets.live import Target

BLOCK_TOKENS = 32
"""Tokens of a block. Copying a buffer each time that it grows by a block costs a thirty-second of a read of it a token,
and half a block is unused in each sequence."""


class KVPool:
    """The bound on KV memory.

    Args:
        n_tokens: positions of all sequences together, rounded up to a whole block.

    Attributes:
        n_blocks: blocks in total.
        n_used: blocks that sequences have.
    """

    def __init__(self, n_tokens: int, target: Target) -> None:
        self.n_blocks, self.n_used = blocks_for(n_tokens), 0
        sizes, model = target.sizes, target.model
        self._n_layers: int = sizes["n_layers"]
        shape = 1, sizes["n_kv_heads"], 0, sizes["head_dim"]
        self._like = torch.empty(shape, dtype=model.dtype, device=target.device)

    @property
    def n_free(self) -> int:
        """Blocks that no sequence has."""
        return self.n_blocks - self.n_used

    def new(self) -> KVBuffer:
        """Make the KV of a sequence, without any block yet."""
        return KVBuffer(n_layers=self._n_layers)

    def reserve(self, kv: KVBuffer, n_slots: int) -> bool:
        """Give a sequence blocks for so many tokens in all; returns False, and does nothing, if too few are free."""
        n_more = blocks_for(n_slots) - held_blocks(kv)
        if n_more > self.n_free:
            return False
        if n_more > 0:
            kv.resize(kv.capacity + n_more * BLOCK_TOKENS, self._like)
            self.n_used += n_more
        return True

    def evict(self, kv: KVBuffer) -> None:
        """Take all blocks of a sequence, and forget what they hold."""
        self.n_used -= held_blocks(kv)
        kv.clear()


def blocks_for(n_tokens: int) -> int:
    """The number of blocks that hold so many tokens."""
    return -(-n_tokens // BLOCK_TOKENS)


def held_blocks(kv: KVBuffer) -> int:
    """The number of blocks that a sequence has."""
    return kv.capacity // BLOCK_TOKENS


class JoinedKV:
    """The KV of B sequences as a drafter reads it for one round (:class:`~moa_data.moa.targets.cache.KVSource`).

    The drafter writes after the committed slots of copies, never to the sequences.

    Attributes:
        lengths: committed tokens of each row.
    """

    def __init__(self, rows: Sequence[KVBuffer]) -> None:
        self._rows, self.lengths = rows, [kv.lengths[0] for kv in rows]
        self._copies: dict[int, Tensor] = {}  # layer -> [2, B, H_kv, S, d]

    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions of each row from its start on, zero beyond a row's length: [B, n, L, D]."""
        rows = []
        for kv, start in zip(self._rows, starts, strict=True):
            own = kv.packed([start], min(n_tokens, kv.capacity - start), first_layer)  # would grow beyond its blocks
            rows.append(F.pad(own, (0, 0, 0, 0, 0, n_tokens - own.shape[1])))
        return torch.cat(rows)

    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """View keys and values [B, H_kv, n_slots, d] of a layer, which may be written to after the committed part."""
        copy = self._copies.get(layer)
        if copy is None or copy.shape[3] < n_slots:
            like = self._rows[0].buffer
            # Room for a usual round, so that its levels need no second copy.
            grown = like.new_zeros(2, len(self._rows), like.shape[3], n_slots + BLOCK_TOKENS, like.shape[5])
            if copy is not None:
                grown[:, :, :, : copy.shape[3]] = copy
            else:
                for row, (kv, length) in enumerate(zip(self._rows, self.lengths, strict=True)):
                    grown[:, row, :, :length] = kv.buffer[:, layer, 0, :, :length]
            self._copies[layer] = copy = grown
        return copy[0, :, :, :n_slots], copy[1, :, :, :n_slots]
