"""The target's KV while decoding: rows of different lengths, drafts after the committed part.

Shapes: B rows, L target layers, N layers that are kept, H_kv key/value heads, d head dim, D = 2 * H_kv * d, n tokens of
one call, S slots, K watched layers.

A call writes its tokens after the committed part of each row (they are *pending*); ``commit`` moves the accepted ones
next to it and forgets the rest, which costs nothing proportional to the context. Two rows of 5 and 3 committed tokens
verify a root r and three drafts x, y, z, of which the first row accepts x and z, the second one none::

    slot                        0 1 2 3 4 5 6 7 8
    row 0 before the call       a b c d e . . . .     lengths [5, 3], n_pending 0
    row 1                       f g h . . . . . .
    row 0 after the call        a b c d e r x y z     lengths [5, 3], n_pending 4: slots 5..8 of row 0, 3..6 of row 1
    row 1                       f g h r x y z . .
    row 0 after the commit      a b c d e r x z z     lengths [8, 4], n_pending 0: commit([[0, 1, 3], [0]])
    row 1                       f g h r x y z . .     slots at or beyond a length are overwritten by the next call

Nothing committed is dropped, also in models with a sliding window. In a static call (``live.StaticCalls``) a layer sees
all slots of the buffer, and only tensors say where its tokens stand.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
from typing_extensions import override

from ...errors import DrafterError
from ..nn.kv import KVBuffer, slots_after, unpack_kv, write_slots
from ..nn.masks import DeviceLengths, added, to_device
from .families import KVGroup, KVShape

_INITIAL_SLOTS = 256


class KVSource(Protocol):
    """The target's KV of B rows as drafters read it: of a live target, or of what has arrived from one."""

    lengths: list[int]  # positions of each row whose KV is here

    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions of each row, see :meth:`.KVBuffer.packed`: [B, n, L, D]."""
        ...

    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """View a layer, which may be written to after the lengths: keys and values [B, H_kv, n_slots, d]."""
        ...


def pack_groups(groups: Sequence[KVGroup], take: Callable[[int], Tensor], first: int = 0) -> Tensor:
    """Pack the KV of layers that are not alike, narrower ones padded with zeros: [..., L, D].

    Args:
        take: target layer -> its KV in a buffer as wide as the widest, [..., H_kv, 2, d].
        first: the first one to pack, of those that have KV.
    """
    layers = sorted((layer, group.shape) for group in groups for layer in group.layers)
    made = []
    widest = max(shape.width for _, shape in layers)
    for layer, shape in layers[first:]:
        keys, values = take(layer)[..., : shape.n_heads, :, :].unbind(-2)
        both = torch.cat((keys[..., : shape.key_width], values[..., : shape.value_width]), dim=-1)
        made.append(pad(both.flatten(-2), (0, widest - shape.width)))
    return torch.stack(made, dim=-2)


# Released buffers by shape, for the next caches of that shape: a CUDA graph reads and writes fixed
# addresses, so a
# generation in a new buffer would record all graphs again.
Buffers = dict[tuple[int, ...], list[Tensor]]


class TargetCache(KVBuffer, Cache):  # type: ignore[misc]  # both have a `crop`; transformers never calls its own here
    """The KV of L layers for B rows, which transformers writes to; with ``buffers``, in released ones."""

    def __init__(
        self,
        n_layers: int,
        n_rows: int = 1,
        n_slots: int = _INITIAL_SLOTS,
        buffers: Buffers | None = None,
        shapes: Sequence[KVShape | None] | None = None,
        groups: Sequence[KVGroup] = (),
    ) -> None:
        # ``shapes`` are of layers that are not alike, None of those that carry a state in place of
        # KV; ``groups`` of
        # those that have KV of their own.
        KVBuffer.__init__(self, n_rows, n_slots, n_layers)
        self._free = buffers
        self.stays_in_place = buffers is not None
        # the allocated buffer, of which `buffer` is the rows that are left
        self._whole: Tensor | None = None
        # tokens per row written by the last call, all its chunks, and not yet committed
        self.n_pending = 0
        self._n_before = 0  # of the pending tokens, those of earlier chunks of one call
        self._is_static = False
        self._shapes = shapes
        self._groups = groups
        # decoder layers whose outputs each call leaves here
        self.watched_layers: tuple[int, ...] = ()
        self._layer_outputs: list[Tensor] = []  # [B, n, K * E] of each chunk of a call
        # of a call or chunk, by slots_after; of a static call the lengths [B, 1]
        self._slots: int | Tensor = 0
        # the states before the last call, where it may be taken back
        self._before: list[list[Tensor]] = []
        self._tokens = torch.empty(0)  # of the last call, [1, n], where layers carry a state
        # tokens of the call that an earlier one had, and whose states were taken back
        self._n_again = 0
        stateful = [shapes is not None and shapes[layer] is None for layer in range(n_layers)]
        layers: list[Any] = [
            LinearAttentionLayer() if one else _Layer(self, i) for i, one in enumerate(stateful)
        ]
        self._states = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
        Cache.__init__(self, layers=layers)

    @property
    def n_slots(self) -> int:
        """The slots that a query may see: committed and pending ones of the longest row."""
        return max(self.lengths) + self.n_pending

    @property
    def n_seen(self) -> int:
        """The tokens of the longest row before the present call, or the present chunk of it."""
        return max(self.lengths) + self._n_before

    @property
    def home(self) -> tuple[Any, ...]:
        """Address, shape and strides of the buffer. A CUDA graph that reads or writes it is valid for these alone."""
        return self.buffer.data_ptr(), self.buffer.shape, self.buffer.stride()

    def take_up(self, tokens: Tensor) -> Tensor:
        """Put before the tokens [1, n] of a call those that were accepted and whose states were taken back.

        Layers that carry a state can't forget rejected drafts: after a call of which some were rejected, the states are
        those before it, and the next one begins with what it accepted.
        """
        if not self._states:
            return tokens
        if self._n_again:
            self.lengths = [self.lengths[0] - self._n_again]
            tokens = torch.cat((self._tokens[:, : self._n_again], tokens), dim=1)
        self._tokens = tokens
        self._before = [[x.clone() for x in _tensors_of(state)] for state in self._states]
        return tokens

    def begin_call(self, n_tokens: int, device: torch.device, goes_on: bool = False) -> None:
        """Reserve slots for a call of n tokens per row.

        ``goes_on``: the tokens follow the pending ones, which are seen as if committed; else those are forgotten.
        """
        self._n_before = self.n_pending if goes_on else 0
        self._layer_outputs = self._layer_outputs if goes_on else []
        self.n_pending = self._n_before + n_tokens
        self._slots = slots_after(added(self.lengths, self._n_before), n_tokens, device)
        self._is_static = False

    def begin_static_call(self, n_tokens: int, lengths: Tensor) -> None:
        """Reserve slots as :meth:`begin_call`, after a prompt, for a graph that serves rows of any lengths [B, 1]."""
        self._n_before = 0
        self.n_pending = n_tokens
        self._layer_outputs = []
        self._is_static = True
        self._slots = lengths
        self.reserve(self.n_slots, self.buffer[0, 0])

    def keep_layer_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Keep what the :attr:`watched_layers` gave for the tokens of a call or a chunk of one: K times [B, n, E]."""
        self._layer_outputs.append(torch.cat(list(outputs), dim=-1))

    def take_layer_outputs(self) -> Tensor:
        """Hand over the outputs of the :attr:`watched_layers` for all tokens of the last call, [B, n, K * E]."""
        if not self._layer_outputs:
            raise DrafterError(
                "the target's last call kept no layer outputs; begin with the proposer before the call."
            )
        outputs = torch.cat(self._layer_outputs, dim=1)
        self._layer_outputs = []
        return outputs[:, self._n_again :]

    @override
    @torch.inference_mode()
    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        if self._states:
            n_kept = self._n_again + len(kept[0])
            super().commit([range(n_kept)])
            is_whole = n_kept == self.n_pending
            for state, before in [] if is_whole else zip(self._states, self._before, strict=True):
                for tensor, value in zip(_tensors_of(state), before, strict=True):
                    tensor.copy_(value)
            self._n_again = 0 if is_whole else n_kept
        else:
            super().commit(kept)
        self.n_pending = self._n_before = 0

    @override
    @torch.inference_mode()
    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack as :meth:`.KVBuffer.packed` does; of layers that are not alike those with KV, narrow ones padded."""
        if self._shapes is None:
            return super().packed(starts, n_tokens, first_layer)

        def take(layer: int) -> Tensor:
            return self._positions(starts, n_tokens, slice(layer, layer + 1))[:, :, 0]

        return pack_groups(self._groups, take, first_layer)

    @torch.inference_mode()
    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order, at the beginning of the same buffer."""
        # A buffer for each number of rows that a batch shrinks through would take many times the
        # first one's memory.
        fewer = self.buffer[:, :, : len(rows)]
        fewer.copy_(self.buffer.index_select(2, to_device(rows, fewer.device)))
        super()._place(fewer)
        self.lengths = [self.lengths[row] for row in rows]

    def release(self) -> None:
        """Give the buffer back; the cache must not be used afterwards."""
        if self._whole is not None and self._free is not None:
            self._free.setdefault(tuple(self._whole.shape), []).append(self._whole)
        self._whole = None
        self._buffer = None
        self._layers = []

    def write_pending(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the pending keys and values [B, H_kv, n, d] of a layer in place; returns all [B, H_kv, S, d]."""
        if self._is_static:
            # Written out: a graph must not depend on the Python values that other calls look at.
            view = self.buffer[0, layer], self.buffer[1, layer]
            write_slots(
                view, keys, values, self._slots + torch.arange(keys.shape[2], device=keys.device)
            )
            return view
        n_slots = self.n_slots
        if self._shapes is None:
            self.reserve(n_slots, keys)
            write_slots(self._layers[layer], keys, values, self._slots)
            return self.layer_view(layer, n_slots)
        own = [shape for shape in self._shapes if shape is not None]
        most = (
            max(shape.n_heads for shape in own),
            max(max(shape.key_width, shape.value_width) for shape in own),
        )
        self.reserve(n_slots, keys.new_empty(1, most[0], 1, most[1]))
        write_slots(
            self._layers[layer], _widened(keys, *most), _widened(values, *most), self._slots
        )
        all_keys, all_values = self.layer_view(layer, n_slots)
        return all_keys[:, : keys.shape[1], :, : keys.shape[3]], all_values[
            :, : keys.shape[1], :, : values.shape[3]
        ]

    @override
    def _allocate(self, shape: Sequence[int], like: Tensor) -> Tensor:
        free = self._free.get(tuple(shape)) if self._free else None
        return free.pop().zero_() if free else like.new_zeros(shape)

    @override
    def _place(self, buffer: Tensor) -> None:
        self.release()
        self._whole = buffer
        super()._place(buffer)


def _widened(x: Tensor, n_heads: int, width: int) -> Tensor:
    return pad(x, (0, width - x.shape[3], 0, 0, 0, n_heads - x.shape[1]))


def _tensors_of(state: LinearAttentionLayer) -> list[Tensor]:
    found = (*state.conv_states.values(), *state.recurrent_states.values())
    return [tensor for tensor in found if tensor is not None]


class _Layer(CacheLayerMixin):
    """One layer of the cache as transformers sees it."""

    is_sliding = False

    def __init__(self, cache: TargetCache, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of transformers
        self._cache = cache
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # the cache allocates for all layers

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.write_pending(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._cache.n_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.n_slots, 0  # the offset of the first one

    def get_max_length(self) -> int:
        return -1  # unbounded


class ContextCache(KVBuffer):
    """The KV of some layers of a target on another machine, as the contexts of one text bring it.

    Its only length counts the positions whose contexts have arrived, also where no layer is kept.
    """

    def __init__(self, layers: Sequence[int] = ()) -> None:
        super().__init__(n_layers=len(layers))
        self._kept = list(layers)

    def extend(self, n_tokens: int, packed: Tensor | None, n_kv_heads: int) -> None:
        """Add the next n positions, with the packed KV [n, N, D] of the kept layers; None where N is 0."""
        start = self.lengths[0]
        if packed is not None:
            keys, values = unpack_kv(packed.transpose(0, 1), n_kv_heads)  # [N, H_kv, n, d]
            self.reserve(start + n_tokens, keys)
            self.buffer[0, :, 0, :, start : start + n_tokens] = keys
            self.buffer[1, :, 0, :, start : start + n_tokens] = values
        self.lengths = [start + n_tokens]

    @override
    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        return super().layer_view(self._kept.index(layer), n_slots)


def check_arrived(cache: KVSource, stops: Sequence[int]) -> None:
    """Refuse a round where the KV, or the contexts, of a row's positions before its stop are not all here."""
    for have, stop in zip(cache.lengths, stops, strict=True):
        if have < stop and not isinstance(stops, DeviceLengths):  # graphs run beside the target
            raise DrafterError(
                f"the contexts of positions {have} to {stop - 1} have not arrived; begin the round at token {have}, "
                "and feed the known tokens after it as levels."
            )
