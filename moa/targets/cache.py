"""The target's KV cache for decoding.

The rows of a batch have different lengths. In each row, the drafts follow the committed tokens.

Shapes: B rows, L target layers, N layers whose KV a :class:`ContextCache` stores, H_kv key/value
heads, d head dim, D = 2 * H_kv * d, n tokens of one target call, S slots of the cache, K watched
layers (layers whose outputs are stored for a drafter).

A target call writes the keys and values of its tokens into the slots after the committed tokens of
each row. These tokens are *pending* until ``commit``. It moves the accepted tokens next to the
committed tokens, and drops the other pending tokens. The cost of a commit does not depend on the
length of the sequence.

In this example, row 0 has 5 committed tokens and row 1 has 3. For each row, a target call processes
four tokens: r, which is not a draft, and three drafts x, y and z. Row 0 accepts x and z. Row 1
accepts no draft::

    slot                        0 1 2 3 4 5 6 7 8
    row 0 before the call       a b c d e . . . .     lengths [5, 3], n_pending 0
    row 1                       f g h . . . . . .
    row 0 after the call        a b c d e r x y z     lengths [5, 3], n_pending 4
    row 1                       f g h r x y z . .
    row 0 after the commit      a b c d e r x z z     lengths [8, 4], n_pending 0
    row 1                       f g h r x y z . .

The commit is ``commit([[0, 1, 3], [0]])``: for each row, it gets the indices of the pending tokens
to keep. The next target call overwrites the slots at or beyond a row's length, such as the second z
of row 0. No committed token is dropped, even in models with a sliding window.

A static call (``live.StaticCalls``) is a target call that a CUDA graph can replay. A graph cannot
depend on Python values such as the lengths of the rows. So the layers of a static call attend to
all slots of the buffer, under a mask. The slots to which they write are in a tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
from typing_extensions import override

from ...errors import DrafterError
from ..nn.kv import KVBuffer, slots_after, write_slots
from ..nn.masks import DeviceLengths, added, to_device
from .facts import KVGroup, KVShape

_INITIAL_SLOTS = 256


class KVSource(Protocol):
    """The target's KV of B rows, as drafters read it.

    The target runs in this process or on another machine.
    """

    lengths: list[int]  # For each row, the number of positions whose KV is available.

    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions of each row: [B, n, L, D].

        The positions of a row start at ``starts[row]``. Layers before ``first_layer`` are left out.
        """
        ...

    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values, [B, H_kv, n_slots, d].

        The caller may write to slots at or beyond the length of a row.
        """
        ...


def pack_groups(groups: Sequence[KVGroup], take: Callable[[int], Tensor], first: int = 0) -> Tensor:
    """Pack the KV of layers with different shapes, [..., L, D].

    D is the width of the widest layer. The packed KV of narrower layers is padded with zeros.

    Args:
        groups: groups of the layers that have KV of their own. The layers of a group have keys and
            values of the same shape.
        take: takes the index of a target layer, and returns its KV [..., H_kv, 2, d]. All layers
            have the same H_kv and d, those of a buffer with room for the widest layer. A narrower
            layer uses only the first heads, and the first values of each head.
        first: index of the first layer to pack, among the layers that have KV of their own.
    """
    layers: list[tuple[int, KVShape]] = []
    for group in groups:
        for layer in group.layers:
            layers.append((layer, group.shape))
    layers.sort()
    packed = []
    widest = max(shape.width for _, shape in layers)
    for layer, shape in layers[first:]:
        keys, values = take(layer)[..., : shape.n_heads, :, :].unbind(-2)
        keys_values = torch.cat(
            (keys[..., : shape.key_width], values[..., : shape.value_width]), dim=-1
        )
        packed.append(pad(keys_values.flatten(-2), (0, widest - shape.width)))
    return torch.stack(packed, dim=-2)


# Buffers of released caches, by shape. The next cache of the same shape reuses them. Otherwise each
# generation would have to record its CUDA graphs again, because graphs use fixed addresses.
Buffers = dict[tuple[int, ...], list[Tensor]]


# mypy objects, because the methods `crop` of the two base classes have different signatures.
# transformers never calls `Cache.crop`.
class TargetCache(KVBuffer, Cache):  # type: ignore[misc]
    """The KV cache of L layers and B rows. transformers writes to it.

    If ``buffers`` contains a buffer of the right shape, the cache uses this buffer instead of
    allocating one.
    """

    def __init__(
        self,
        n_layers: int,
        n_rows: int = 1,
        n_slots: int = _INITIAL_SLOTS,
        buffers: Buffers | None = None,
        shapes: Sequence[KVShape | None] | None = None,
        groups: Sequence[KVGroup] = (),
    ) -> None:
        # ``shapes`` and ``groups`` are given only if the layers differ. ``shapes`` has the KV shape
        # of each layer, and None for a layer that has a recurrent state instead of KV. ``groups``
        # has the layers with KV of their own, which do not reuse the KV of another layer.
        KVBuffer.__init__(self, n_rows, n_slots, n_layers)
        self._free = buffers
        self.has_static_buffer = buffers is not None
        # The allocated buffer. If rows have left the batch, `buffer` is a view of its first rows.
        self._whole: Tensor | None = None
        # Number of tokens per row that the last target call wrote, in all its chunks, and that are
        # not committed yet.
        self.n_pending = 0
        # Number of pending tokens that earlier chunks of the current target call wrote.
        self._n_before = 0
        self._is_static = False
        self._groups = groups
        # Decoder layers whose outputs each target call stores in this cache, because the drafter
        # reads them.
        self.watched_layers: tuple[int, ...] = ()
        # The stored outputs of the watched layers, one tensor [B, n, K * E] per chunk of a call.
        self._layer_outputs: list[Tensor] = []
        # The slots to which the current target call writes, as `slots_after` returns them. For a
        # static call, this has the lengths [B, 1] of the rows instead, and the call writes to the
        # slots from there on.
        self._slots: int | Tensor = 0
        # For layers with a recurrent state: their states before the last target call. They are
        # restored if drafts of this call are rejected.
        self._before: list[list[Tensor]] = []
        # For layers with a recurrent state: the tokens of the last target call, [1, n].
        self._tokens = torch.empty(0)
        # Number of accepted tokens that the recurrent states do not include, because the states
        # were restored. The next target call processes these tokens again.
        self._n_again = 0
        layers: list[Any] = []
        self._states: list[LinearAttentionLayer] = []
        for index in range(n_layers):
            if shapes is not None and shapes[index] is None:
                state = LinearAttentionLayer()
                self._states.append(state)
                layers.append(state)
            else:
                layers.append(_Layer(self, index))
        Cache.__init__(self, layers=layers)

    @property
    def n_slots(self) -> int:
        """Number of slots to which queries may attend: those of committed and pending tokens."""
        return max(self.lengths) + self.n_pending

    @property
    def n_seen(self) -> int:
        """Length of the longest row, without the tokens that the target is processing now.

        If a target call runs in several chunks, the tokens of its earlier chunks are included.
        """
        return max(self.lengths) + self._n_before

    @property
    def home(self) -> tuple[Any, ...]:
        """Address, shape and strides of the buffer. If they change, CUDA graphs become invalid."""
        return self.buffer.data_ptr(), self.buffer.shape, self.buffer.stride()

    def take_up(self, tokens: Tensor) -> Tensor:
        """Return the tokens [1, n] that a target call must process, for one row.

        These are usually the given tokens. But layers with a recurrent state cannot drop rejected
        drafts. So if some drafts of a call are rejected, the states from before this call are
        restored. The next call must then process the accepted tokens again, so they are put before
        the given tokens.
        """
        if not self._states:
            return tokens
        if self._n_again:
            self.lengths = [self.lengths[0] - self._n_again]
            tokens = torch.cat((self._tokens[:, : self._n_again], tokens), dim=1)
        self._tokens = tokens
        copies: list[list[Tensor]] = []
        for state in self._states:
            copies.append([tensor.clone() for tensor in _tensors_of(state)])
        self._before = copies
        return tokens

    def begin_call(self, n_tokens: int, device: torch.device, goes_on: bool = False) -> None:
        """Reserve slots for a target call of n tokens per row.

        Args:
            n_tokens: n, the number of tokens per row.
            device: the device of the slot indices.
            goes_on: True for a further chunk of the same call. Its tokens follow the pending tokens
                and attend to them. If false, the pending tokens are dropped.
        """
        self._n_before = self.n_pending if goes_on else 0
        self._layer_outputs = self._layer_outputs if goes_on else []
        self.n_pending = self._n_before + n_tokens
        self._slots = slots_after(added(self.lengths, self._n_before), n_tokens, device)
        self._is_static = False

    def begin_static_call(self, n_tokens: int, lengths: Tensor) -> None:
        """Reserve slots for a target call that a CUDA graph replays.

        A call that is not static must have run before, because it allocates the buffer.

        Args:
            n_tokens: the number of tokens per row, with padding.
            lengths: [B, 1] int64, the number of committed tokens in each row.
        """
        self._n_before = 0
        self.n_pending = n_tokens
        self._layer_outputs = []
        self._is_static = True
        self._slots = lengths
        self.reserve(self.n_slots, self.buffer[0, 0])

    def keep_layer_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Store the outputs [B, n, E] of the :attr:`watched_layers` in a call or a chunk."""
        self._layer_outputs.append(torch.cat(list(outputs), dim=-1))

    def take_layer_outputs(self) -> Tensor:
        """Return and clear the stored outputs of the :attr:`watched_layers`, [B, n, K * E]."""
        if not self._layer_outputs:
            raise DrafterError(
                "the target's last call stored no layer outputs. Call the proposer's begin before "
                "the target call."
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
            is_complete = n_kept == self.n_pending
            for state, before in (
                [] if is_complete else zip(self._states, self._before, strict=True)
            ):
                for tensor, value in zip(_tensors_of(state), before, strict=True):
                    tensor.copy_(value)
            self._n_again = 0 if is_complete else n_kept
        else:
            super().commit(kept)
        self.n_pending = self._n_before = 0

    @override
    @torch.inference_mode()
    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV as :meth:`.KVBuffer.packed` does.

        If the layers differ in shape, only layers with KV of their own are packed, and narrow
        layers are padded with zeros.
        """
        if not self._groups:
            return super().packed(starts, n_tokens, first_layer)

        def take(layer: int) -> Tensor:
            return self._positions(starts, n_tokens, slice(layer, layer + 1))[:, :, 0]

        return pack_groups(self._groups, take, first_layer)

    @torch.inference_mode()
    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only the given rows, in this order, and move them to the start of the buffer."""
        # Do not allocate a smaller buffer. A batch loses its rows one by one, and a new buffer each
        # time would take many times the memory.
        fewer = self.buffer[:, :, : len(rows)]
        fewer.copy_(self.buffer.index_select(2, to_device(rows, fewer.device)))
        super()._set_buffer(fewer)
        self.lengths = [self.lengths[row] for row in rows]

    def release(self) -> None:
        """Return the buffer to ``buffers``. The cache must not be used afterwards."""
        if self._whole is not None and self._free is not None:
            self._free.setdefault(tuple(self._whole.shape), []).append(self._whole)
        self._whole = None
        self._buffer = None
        self._layers = []

    def write_pending(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values [B, H_kv, n, d] of pending tokens into the cache.

        Returns the keys and values of the layer in all slots, [B, H_kv, S, d].
        """
        n_slots = self.n_slots
        slots = self._slots
        if self._is_static:
            # A CUDA graph cannot depend on Python values such as lengths. So compute the slots to
            # write to on the device, and attend to all slots.
            n_slots = self.capacity
            slots = slots + torch.arange(keys.shape[2], device=keys.device)
        like = keys
        if self._groups:
            n_heads = max(group.shape.n_heads for group in self._groups)
            width = max(
                max(group.shape.key_width, group.shape.value_width) for group in self._groups
            )
            like = keys.new_empty(1, n_heads, 1, width)
        self.reserve(n_slots, like)
        all_keys, all_values = self._layers[layer]
        if self._groups:
            # A narrow layer uses only the first heads of its buffer, and the first values of each
            # head. The rest is zero.
            all_keys = all_keys[:, : keys.shape[1], :, : keys.shape[3]]
            all_values = all_values[:, : values.shape[1], :, : values.shape[3]]
        write_slots((all_keys, all_values), keys, values, slots)
        return all_keys[:, :, :n_slots], all_values[:, :, :n_slots]

    @override
    def _allocate(self, shape: Sequence[int], like: Tensor) -> Tensor:
        free = self._free.get(tuple(shape)) if self._free else None
        return free.pop().zero_() if free else like.new_zeros(shape)

    @override
    def _set_buffer(self, buffer: Tensor) -> None:
        self.release()
        self._whole = buffer
        super()._set_buffer(buffer)


def _tensors_of(state: LinearAttentionLayer) -> list[Tensor]:
    tensors = (*state.conv_states.values(), *state.recurrent_states.values())
    return [tensor for tensor in tensors if tensor is not None]


class _Layer(CacheLayerMixin):
    """One layer of the cache, with the interface that transformers expects."""

    is_sliding = False

    def __init__(self, cache: TargetCache, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types here.
        self._cache = cache
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # There is nothing to do, because the cache allocates one buffer for all layers.
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.write_pending(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._cache.n_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # The number of slots, and the position of the token in the first slot.
        return self._cache.n_slots, 0

    def get_max_length(self) -> int:
        # -1 means that the length has no limit.
        return -1


class ContextCache(KVBuffer):
    """The KV of some layers of a remote target, for one sequence.

    The target's machine sends a context for each position to the drafter's machine. A context may
    contain the KV of these layers. The length of the cache is the number of positions whose
    contexts have arrived, even if the contexts contain no KV.
    """

    def __init__(self, layers: Sequence[int] = ()) -> None:
        super().__init__(n_layers=len(layers))
        self._kept = list(layers)

    def extend(self, packed: Tensor, head_dim: int) -> None:
        """Add the next n positions, with the packed KV [n, N * D] of the N stored layers."""
        start = self.lengths[0]
        stop = start + len(packed)
        if self._kept:
            per_layer = packed.unflatten(1, (len(self._kept), -1, 2, head_dim))
            keys_values = per_layer.permute(3, 1, 2, 0, 4)  # [2, N, H_kv, n, d]
            self.reserve(stop, keys_values[0])
            self.buffer[:, :, 0, :, start:stop] = keys_values
        self.lengths = [stop]

    @override
    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        return super().layer_view(self._kept.index(layer), n_slots)


def check_arrived(cache: KVSource, stops: Sequence[int]) -> None:
    """Raise DrafterError if KV (or contexts) that a draft round needs is missing in a row.

    A round needs the KV of all positions before ``stops[row]``.
    """
    for have, stop in zip(cache.lengths, stops, strict=True):
        # DeviceLengths need no check. Only CUDA graphs on the target's machine use them, and on
        # this machine all KV is available.
        if have < stop and not isinstance(stops, DeviceLengths):
            raise DrafterError(
                f"the drafter needs the contexts of positions {have} to {stop - 1}, which have not "
                f"arrived yet. Begin the round at token {have}, and feed the known tokens after it "
                "as levels."
            )
