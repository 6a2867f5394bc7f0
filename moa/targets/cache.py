"""The target's KV while decoding: one preallocated tensor, rows of different lengths, drafts beyond the committed part.

Shapes: B rows, L target layers, H_kv key/value heads, d head dim, n tokens of one call, S slots, K watched layers.

Slot i of a row holds the token at position i once it is committed. A call writes its tokens behind the committed part
of each row (they are *pending*); :meth:`TargetCache.commit` moves the accepted ones next to it and forgets the rest,
which costs nothing proportional to the context. Two rows of 5 and 3 committed tokens verify a root r and three drafts
x, y, z, of which the first row accepts x and z, the second one none::

    slot                        0 1 2 3 4 5 6 7 8
    row 0 before the call       a b c d e . . . .     lengths [5, 3], n_pending 0
    row 1                       f g h . . . . . .
    row 0 after the call        a b c d e r x y z     lengths [5, 3], n_pending 4: slots 5..8 of row 0, 3..6 of row 1
    row 1                       f g h r x y z . .
    row 0 after the commit      a b c d e r x z z     lengths [8, 4], n_pending 0: commit([[0, 1, 3], [0]])
    row 1                       f g h r x y z . .     what lies behind a length is written over by the next call

Nothing committed is ever dropped, also in models with a sliding window. In a static call (``static_calls``) a layer
sees all slots of the buffer, and only tensors say where its tokens stand.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import DrafterError

_INITIAL_SLOTS = 256


class KVSource(Protocol):
    """The target's KV of B rows as drafters read it: of a live target, or of what has arrived from one."""

    lengths: list[int]
    """Positions of each row whose KV is here."""

    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions of each row, see :meth:`TargetCache.packed`: [B, n, L, D]."""
        ...

    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """View a layer, which may be written to behind the lengths: keys and values [B, H_kv, n_slots, d]."""
        ...


class Buffers:
    """Buffers of caches that were released, kept for the next ones of their shape.

    A CUDA graph reads and writes fixed addresses, so a generation in a new buffer would record all graphs again.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, ...], list[Tensor]] = {}

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Hand out a buffer of a shape with any contents, a new one if none is free."""
        free = self._free.get(tuple(shape))
        return free.pop() if free else like.new_empty(shape)

    def give_back(self, buffer: Tensor) -> None:
        """Take back a buffer, which the caller must not use afterwards."""
        self._free.setdefault(tuple(buffer.shape), []).append(buffer)


class TargetCache(Cache):
    """The KV of L layers for B rows.

    Args:
        n_slots: slots that are allocated at first; the buffer grows by doubling.
        buffers: where buffers come from and go to; None for new ones.

    Attributes:
        lengths: committed tokens of each row.
        n_pending: tokens per row written by the last call, all its chunks, and not yet committed.
        watched_layers: decoder layers whose outputs each call leaves here, for :meth:`take_layer_outputs`.
    """

    def __init__(
        self, n_layers: int, n_rows: int = 1, n_slots: int = _INITIAL_SLOTS, buffers: Buffers | None = None
    ) -> None:
        self._buffers = buffers or Buffers()
        self.lengths: list[int] = [0] * n_rows
        self.n_pending = 0
        self._n_before = 0  # of the pending tokens, those of earlier chunks of one call
        self._n_layers, self._initial_slots = n_layers, n_slots
        self._is_static = False
        self._buffer: Tensor | None = None  # [2, L, B, H_kv, capacity, d]
        self.watched_layers: tuple[int, ...] = ()
        self._layer_outputs: list[Tensor] = []  # [B, n, K * E] of each chunk of a call
        self._slots: Tensor | None = None  # [B, n] of the pending tokens; None while all rows have one length
        super().__init__(layers=[_Layer(self, layer) for layer in range(n_layers)])

    @property
    def n_slots(self) -> int:
        """The slots that a query may see: committed and pending ones of the longest row."""
        return max(self.lengths) + self.n_pending

    @property
    def n_seen(self) -> int:
        """The tokens of the longest row before the present call, or the present chunk of it."""
        return max(self.lengths) + self._n_before

    def begin_call(self, n_tokens: int, device: torch.device, goes_on: bool = False) -> None:
        """Reserve slots for a call of n tokens per row.

        Args:
            goes_on: the tokens follow the pending ones, which are seen as if committed; else those are forgotten.
        """
        self._n_before = self.n_pending if goes_on else 0
        if not goes_on:
            self._layer_outputs = []
        self.n_pending = self._n_before + n_tokens
        self._slots, self._is_static = None, False
        if len(set(self.lengths)) > 1:
            starts = torch.tensor(self.lengths, device=device) + self._n_before
            self._slots = starts[:, None] + torch.arange(n_tokens, device=device)  # [B, n]

    def begin_static_call(self, n_tokens: int, device: torch.device) -> None:
        """Reserve slots as :meth:`begin_call`, behind a prompt, for a graph that serves rows of any length."""
        assert self._buffer is not None
        self._n_before, self.n_pending, self._is_static = 0, n_tokens, True
        self._layer_outputs = []
        self._slots = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(n_tokens, device=device)
        self._reserve(self.n_slots, self._buffer[0, 0])

    @property
    def capacity(self) -> int:
        """The number of slots that are allocated."""
        return 0 if self._buffer is None else self._buffer.shape[4]

    def keep_layer_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Keep what the :attr:`watched_layers` gave for the tokens of a call or a chunk of one: K times [B, n, E]."""
        self._layer_outputs.append(torch.cat(list(outputs), dim=-1))

    def take_layer_outputs(self) -> Tensor:
        """Hand over the outputs of the :attr:`watched_layers` for all tokens of the last call, [B, n, K * E]."""
        if not self._layer_outputs:
            raise DrafterError("the target's last call kept no layer outputs; begin with the proposer before the call.")
        outputs, self._layer_outputs = torch.cat(self._layer_outputs, dim=1), []
        return outputs

    @torch.inference_mode()
    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep some of the pending tokens of each row, in order; the others are forgotten.

        Args:
            kept: per row the indices of the tokens to keep, ascending.
        """
        assert self._buffer is not None
        for row, indices in enumerate(kept):
            start = self.lengths[row]
            if list(indices) != list(range(len(indices))):
                source = torch.tensor([start + index for index in indices], device=self._buffer.device)
                own = self._buffer[:, :, row]  # [2, L, H_kv, capacity, d]
                own[:, :, :, start : start + len(indices)] = own[:, :, :, source]
            self.lengths[row] = start + len(indices)
        self.n_pending = self._n_before = 0

    @torch.inference_mode()
    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions of each row for the drafter (``kv.pack_kv``).

        Args:
            starts: first position of each row.
            n_tokens: n; positions beyond a row's length hold anything.
            first_layer: first layer to pack, of all up to the last.

        Returns:
            [B, n, L, D].
        """
        assert self._buffer is not None
        self._reserve(max(starts) + n_tokens, self._buffer[0, 0])
        buffer = self._buffer[:, first_layer:]
        if len(set(starts)) == 1:
            part = buffer[:, :, :, :, starts[0] : starts[0] + n_tokens]  # [2, L, B, H_kv, n, d]
            return part.permute(2, 4, 1, 3, 0, 5).flatten(3)
        device = buffer.device
        slots = torch.tensor(starts, device=device)[:, None] + torch.arange(n_tokens, device=device)
        rows = torch.arange(len(starts), device=device)[:, None]
        picked = buffer[:, :, rows, :, slots]  # [B, n, 2, L, H_kv, d]: indexed axes come first
        return picked.permute(0, 1, 3, 4, 2, 5).flatten(3)

    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """View keys and values [B, H_kv, n_slots, d] of a layer, which may be written to behind the committed part."""
        assert self._buffer is not None
        self._reserve(n_slots, self._buffer[0, 0])
        return self._buffer[0, layer, :, :, :n_slots], self._buffer[1, layer, :, :, :n_slots]

    @torch.inference_mode()
    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        assert self._buffer is not None
        shape = list(self._buffer.shape)
        shape[2] = len(rows)
        fewer = self._buffers.take(shape, self._buffer)
        torch.index_select(self._buffer, 2, torch.tensor(list(rows), device=fewer.device), out=fewer)
        self._place(fewer)
        self.lengths = [self.lengths[row] for row in rows]

    def release(self) -> None:
        """Give the buffer back; the cache must not be used afterwards."""
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the pending keys and values [B, H_kv, n, d] of a layer in place; returns all [B, H_kv, S, d]."""
        if self._is_static:
            assert self._buffer is not None
            assert self._slots is not None
            all_keys, all_values = self._buffer[0, layer], self._buffer[1, layer]
            rows = torch.arange(all_keys.shape[0], device=keys.device)[:, None]
            all_keys[rows, :, self._slots] = keys.transpose(1, 2)
            all_values[rows, :, self._slots] = values.transpose(1, 2)
            return all_keys, all_values
        n_tokens = self.n_pending - self._n_before
        if keys.shape[2] != n_tokens:
            raise DrafterError(f"the cache expects {n_tokens} tokens, got {keys.shape[2]}; call begin_call first.")
        self._reserve(self.n_slots, keys)
        assert self._buffer is not None
        pair = self._buffer[:, layer]  # [2, B, H_kv, capacity, d]
        if self._slots is None:
            start = self.lengths[0] + self._n_before
            pair[0, :, :, start : start + n_tokens] = keys
            pair[1, :, :, start : start + n_tokens] = values
        else:
            rows = torch.arange(len(self.lengths), device=keys.device)[:, None]
            pair[0][rows, :, self._slots] = keys.transpose(1, 2).to(pair.dtype)
            pair[1][rows, :, self._slots] = values.transpose(1, 2).to(pair.dtype)
        return pair[0, :, :, : self.n_slots], pair[1, :, :, : self.n_slots]

    def _reserve(self, n_slots: int, like: Tensor) -> None:
        """Grow the buffer by doubling. New slots are zero: a masked slot must not hold NaN."""
        if self._buffer is not None and n_slots <= self._buffer.shape[4]:
            return
        capacity = self._initial_slots
        while capacity < n_slots:
            capacity *= 2
        shape = (2, self._n_layers, len(self.lengths), like.shape[1], capacity, like.shape[3])
        grown = self._buffers.take(shape, like).zero_()
        if self._buffer is not None:
            grown[:, :, :, :, : self._buffer.shape[4]] = self._buffer
        self._place(grown)

    def _place(self, buffer: Tensor) -> None:
        self.release()
        self._buffer = buffer
        # A CUDA graph may write to it only where it stays.
        torch._dynamo.mark_static_address(buffer)


class _Layer(CacheLayerMixin):
    """One layer of the cache as transformers sees it."""

    is_sliding = False

    def __init__(self, cache: TargetCache, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of transformers
        self._cache, self._layer = cache, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the cache allocates for all layers."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the call's keys and values; returns all of the layer's."""
        return self._cache.write(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        """Count the tokens of the longest row before the call."""
        return self._cache.n_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots, and the offset of the first one."""
        return self._cache.n_slots, 0

    def get_max_length(self) -> int:
        """Return -1: there is no bound."""
        return -1
