"""Target KV of single sequences, in blocks of tokens out of one bounded pool.

Shapes: L target layers, H_kv key/value heads, d head dim, D = 2 * H_kv * d, n tokens, S slots.

Each sequence has a buffer of its own, a whole number of blocks long, so that attention reads it as it lies: gathering
blocks that are scattered over one large buffer costs as much again as attending to them (8 sequences of 250 tokens, one
CPU core). The pool counts blocks and allocates no more than its bound; a buffer that grows is copied.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_TOKENS = 32
"""Tokens of a block. Copying a buffer each time that it grows by a block costs a thirty-second of a read of it a token,
and half a block is unused in each sequence."""


class KVPool:
    """The bound on KV memory.

    Args:
        n_tokens: positions of all sequences together, rounded up to a whole block.

    Attributes:
        n_blocks: blocks that there are.
        n_used: blocks that sequences have.
    """

    def __init__(
        self, n_tokens: int, n_layers: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.n_blocks, self.n_used = blocks_for(n_tokens), 0
        self._n_layers, self._n_kv_heads, self._head_dim = n_layers, n_kv_heads, head_dim
        self._dtype, self._device = dtype, device

    @property
    def n_free(self) -> int:
        """Blocks that nobody has."""
        return self.n_blocks - self.n_used

    def new(self) -> "SequenceKV":
        """Make the KV of a sequence, without any block yet."""
        empty = torch.empty(self._n_layers, 2, self._n_kv_heads, 0, self._head_dim, dtype=self._dtype)
        return SequenceKV(empty.to(self._device))

    def reserve(self, kv: "SequenceKV", n_slots: int) -> bool:
        """Give a sequence blocks for so many tokens in all; returns False, and does nothing, if too few are free."""
        n_more = blocks_for(n_slots) - kv.n_blocks
        if n_more > self.n_free:
            return False
        if n_more > 0:
            kv.grow(kv.n_blocks + n_more)
            self.n_used += n_more
        return True

    def evict(self, kv: "SequenceKV") -> None:
        """Take all blocks of a sequence, and forget what they hold."""
        self.n_used -= kv.n_blocks
        kv.clear()


def blocks_for(n_tokens: int) -> int:
    """The number of blocks that hold so many tokens."""
    return -(-n_tokens // BLOCK_TOKENS)


class SequenceKV:
    """Keys and values of one sequence: committed ones, and behind them the pending ones of the present call.

    Attributes:
        length: committed tokens; slot i holds the token at position i.
        n_blocks: blocks that it has.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer  # [L, 2, H_kv, S, d]
        self.length, self.n_blocks = 0, 0

    def grow(self, n_blocks: int) -> None:
        """Move to a longer buffer. New slots are zero: a masked slot must not hold NaN."""
        shape = list(self._buffer.shape)
        shape[3] = n_blocks * BLOCK_TOKENS
        grown = self._buffer.new_zeros(shape)
        grown[:, :, :, : self.length] = self._buffer[:, :, :, : self.length]
        self._buffer, self.n_blocks = grown, n_blocks

    def clear(self) -> None:
        """Give up the buffer."""
        self._buffer = self._buffer[:, :, :, :0].clone()
        self.length, self.n_blocks = 0, 0

    def pending(self, n_tokens: int) -> tuple[Tensor, ...]:
        """View the slots behind the committed ones: for each layer [2, H_kv, n, d]."""
        return self._buffer[:, :, :, self.length : self.length + n_tokens].unbind()

    def seen(self, n_tokens: int) -> tuple[Tensor, ...]:
        """View the committed slots and n pending ones: for each layer [2, H_kv, length + n, d]."""
        return self._buffer[:, :, :, : self.length + n_tokens].unbind()

    def commit(self, kept: Sequence[int]) -> None:
        """Keep some of the pending tokens, given by ascending indices; the others are forgotten."""
        if list(kept) != list(range(len(kept))):
            source = torch.tensor([self.length + index for index in kept], device=self._buffer.device)
            self._buffer[:, :, :, self.length : self.length + len(kept)] = self._buffer[:, :, :, source]
        self.length += len(kept)

    def packed(self, start: int, n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions (``moa.nn.kv.pack_kv``), of the layers from one on: [n, L, D]; zero beyond S."""
        part = self._buffer[first_layer:, :, :, start : start + n_tokens]  # [L, 2, H_kv, n, d]
        packed = part.permute(3, 0, 2, 1, 4).flatten(2)
        missing = n_tokens - packed.shape[0]
        return torch.cat((packed, packed.new_zeros(missing, *packed.shape[1:]))) if missing > 0 else packed

    def layer(self, layer: int) -> Tensor:
        """View the committed slots of a layer: [2, H_kv, length, d]."""
        return self._buffer[layer, :, :, : self.length]


class JoinedKV:
    """The KV of B sequences as a drafter reads it for one round (the form of ``moa.targets.cache.TargetCache``).

    What the drafter writes behind the committed slots goes to a copy and never to the sequences.

    Attributes:
        lengths: committed tokens of each row.
    """

    def __init__(self, rows: Sequence[SequenceKV]) -> None:
        self._rows = rows
        self.lengths = [kv.length for kv in rows]
        self._copies: dict[int, Tensor] = {}  # layer -> [2, B, H_kv, S, d]

    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions of each row from its start on: [B, n, L, D]; anything beyond a row's length."""
        return torch.stack(
            [kv.packed(start, n_tokens, first_layer) for kv, start in zip(self._rows, starts, strict=True)]
        )

    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """View keys and values [B, H_kv, n_slots, d] of a layer, which may be written to behind the committed part."""
        copy = self._copies.get(layer)
        if copy is None or copy.shape[3] < n_slots:
            first = self._rows[0].layer(layer)
            # Room for a usual round, so that its levels need no second copy.
            grown = first.new_zeros(2, len(self._rows), first.shape[1], n_slots + BLOCK_TOKENS, first.shape[3])
            if copy is not None:
                grown[:, :, :, : copy.shape[3]] = copy
            else:
                for row, kv in enumerate(self._rows):
                    grown[:, row, :, : kv.length] = kv.layer(layer)
            self._copies[layer] = copy = grown
        return copy[0, :, :, :n_slots], copy[1, :, :, :n_slots]
