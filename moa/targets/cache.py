"""The target's KV cache for decoding.

The rows of a batch may have different lengths. In each row, the drafts come directly after the
committed tokens.

Shapes: B rows, L target layers, N layers whose KV a :class:`ContextCache` stores, H_kv key/value
heads, d head dim, D = 2 * H_kv * d, n tokens of one target call, S slots of the cache, K watched
layers (layers whose outputs are stored for a drafter).

A target call writes the keys and values of its tokens into the slots after the committed tokens of
each row. These tokens are *pending* until ``commit`` is called. The commit moves the accepted
tokens directly behind the committed tokens, and drops the other pending tokens. The cost of a
commit does not depend on the length of the sequence.

In this example, row 0 has 5 committed tokens and row 1 has 3. For each row, a target call processes
four tokens: r, which is not a draft, and three drafts x, y and z. In row 0, r, x and z are
accepted. In row 1, only r is accepted::

    slot                        0 1 2 3 4 5 6 7 8
    row 0 before the call       a b c d e . . . .     lengths [5, 3], n_pending 0
    row 1                       f g h . . . . . .
    row 0 after the call        a b c d e r x y z     lengths [5, 3], n_pending 4
    row 1                       f g h r x y z . .
    row 0 after the commit      a b c d e r x z z     lengths [8, 4], n_pending 0
    row 1                       f g h r x y z . .

The commit is ``commit([[0, 1, 3], [0]])``. Its argument has, for each row, the indices of the
pending tokens to keep. The next target call overwrites the slots at or beyond a row's length, such
as the second z of row 0. The cache keeps all committed tokens, even if the model has a sliding
window.

A static call (``live.StaticCalls``) is a target call that a CUDA graph can replay. A graph cannot
depend on Python values such as the lengths of the rows. So in a static call, tokens attend to all
slots of the buffer, under a mask, and a tensor says to which slots the layers write.
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
    """An interface through which drafters read the target's KV of B rows.

    The target runs in this process or on another machine.
    """

    lengths: list[int]  # For each row, the number of positions whose KV is available.

    def packed(self, starts: Sequence[int], n_tokens: int, first_layer: int = 0) -> Tensor:
        """Pack the KV of n positions of each row: [B, n, L, D].

        The positions of a row start at ``starts[row]``. The result has only the layers from
        ``first_layer`` on.
        """
        ...

    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as two views [B, H_kv, n_slots, d] of the cache.

        The caller may write to slots at or beyond the length of a row.
        """
        ...


def pack_groups(groups: Sequence[KVGroup], take: Callable[[int], Tensor], first: int = 0) -> Tensor:
    """Pack the KV of layers into one tensor [..., L, D], if the layers have KV of different shapes.

    D is the width of the widest layer. The packed KV of narrower layers is padded with zeros.

    Args:
        groups: all layers that have KV of their own, in groups. The layers of a group have keys and
            values of the same shape.
        take: a function that takes the index of a target layer, and returns the KV of this layer,
            [..., H_kv, 2, d]. H_kv and d are the same for all layers, large enough for the widest
            layer. A narrower layer uses only the first heads, and only the first values of each
            head.
        first: the number of layers to leave out at the start. Only layers that have KV of their own
            are counted.
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


# Shape of a buffer -> the buffers of this shape that released caches have given back. The next
# cache of the same shape takes one of them. CUDA graphs work only with fixed addresses. So if each
# generation had a new buffer, it would have to record its graphs again.
Buffers = dict[tuple[int, ...], list[Tensor]]


# mypy objects, because the methods `crop` of the two base classes have different signatures.
# transformers never calls `Cache.crop`, so `KVBuffer.crop` may replace it.
class TargetCache(KVBuffer, Cache):  # type: ignore[misc]
    """A KV cache of L layers and B rows, to which the attention layers of transformers write.

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
        # ``shapes`` and ``groups`` are given only if the KV of layers differs in shape. ``shapes``
        # has the KV shape of each layer, or None for a layer that has a recurrent state instead of
        # KV. ``groups`` has the layers with KV of their own. The other layers have a recurrent
        # state, or reuse the KV of another layer.
        KVBuffer.__init__(self, n_rows, n_slots, n_layers)
        self._free = buffers
        self.has_static_buffer = buffers is not None
        # The buffer that was allocated. If rows have left the batch, `buffer` is a view of the
        # first rows of this buffer.
        self._whole: Tensor | None = None
        # Number of pending tokens per row. The last target call wrote these tokens, in one or
        # several chunks, and they are not committed yet.
        self.n_pending = 0
        # Number of pending tokens per row that earlier chunks of the current target call wrote.
        self._n_before = 0
        self._is_static = False
        self._groups = groups
        # Decoder layers whose outputs a drafter reads. Each target call stores these outputs in
        # this cache.
        self.watched_layers: tuple[int, ...] = ()
        # The stored outputs of the watched layers, one tensor [B, n, K * E] per chunk of a target
        # call.
        self._layer_outputs: list[Tensor] = []
        # The slots to which the current target call writes, as `slots_after` returns them. For a
        # static call, this is a tensor [B, 1] with the lengths of the rows. A static call writes to
        # the slots from this length on.
        self._slots: int | Tensor = 0
        # For each layer with a recurrent state: a copy of the state before the last target call. If
        # drafts of this call are rejected, the state is restored from the copy.
        self._before: list[list[Tensor]] = []
        # The tokens of the last target call, [1, n]. They are stored only if layers have a
        # recurrent state.
        self._tokens = torch.empty(0)
        # Number of accepted tokens that are missing in the recurrent states, because the states were
        # restored after drafts had been rejected. The next target call processes these tokens
        # again.
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
        """Number of slots with committed or pending tokens in the longest row.

        Queries attend only to these slots.
        """
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
        """Return the tokens [1, n] that the next target call must process.

        ``tokens`` are the tokens that the caller wants to process. Usually the result is the same
        tokens. But a recurrent state cannot drop rejected drafts. So if some drafts of a call are
        rejected, the state from before this call is restored. The next call must then process the
        accepted tokens of this call again, so they are put before the given tokens. In models with
        recurrent states, the batch has one row.
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
            goes_on: true for a further chunk of the same target call. The tokens of the chunk
                follow the pending tokens and attend to them. If false, the pending tokens are
                dropped.
        """
        self._n_before = self.n_pending if goes_on else 0
        self._layer_outputs = self._layer_outputs if goes_on else []
        self.n_pending = self._n_before + n_tokens
        self._slots = slots_after(added(self.lengths, self._n_before), n_tokens, device)
        self._is_static = False

    def begin_static_call(self, n_tokens: int, lengths: Tensor) -> None:
        """Reserve slots for a target call that a CUDA graph replays.

        Another call, which is not static, must have run before, because only such a call allocates
        the buffer.

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
        """Store the outputs [B, n, E] that the :attr:`watched_layers` had in a call or chunk."""
        self._layer_outputs.append(torch.cat(list(outputs), dim=-1))

    def take_layer_outputs(self) -> Tensor:
        """Return the stored outputs [B, n, K * E] of :attr:`watched_layers`, and clear them."""
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

        If the KV of layers differs in shape, only layers with KV of their own are packed, and the
        KV of narrow layers is padded with zeros.
        """
        if not self._groups:
            return super().packed(starts, n_tokens, first_layer)

        def take(layer: int) -> Tensor:
            return self._positions(starts, n_tokens, slice(layer, layer + 1))[:, :, 0]

        return pack_groups(self._groups, take, first_layer)

    @torch.inference_mode()
    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only the given rows, in this order, and move them to the start of the buffer."""
        # Use the first rows of the old buffer instead of a smaller new buffer. A batch loses its
        # rows one by one. With a new buffer each time, all the buffers together would take many
        # times the memory.
        fewer = self.buffer[:, :, : len(rows)]
        fewer.copy_(self.buffer.index_select(2, to_device(rows, fewer.device)))
        super()._set_buffer(fewer)
        self.lengths = [self.lengths[row] for row in rows]

    def release(self) -> None:
        """Give the buffer back to ``buffers``, so that other caches can use the buffer.

        This cache must not be used afterwards.
        """
        if self._whole is not None and self._free is not None:
            self._free.setdefault(tuple(self._whole.shape), []).append(self._whole)
        self._whole = None
        self._buffer = None
        self._layers = []

    def write_pending(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values [B, H_kv, n, d] that a layer computed for pending tokens.

        Returns the keys and values [B, H_kv, S, d] of this layer for all S slots.
        """
        n_slots = self.n_slots
        slots = self._slots
        if self._is_static:
            # A CUDA graph cannot depend on Python values such as lengths. So in a static call,
            # compute on the device to which slots to write, and return all slots of the buffer.
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
            # A narrow layer uses only the first heads of its buffer, and only the first values of
            # each head. The rest of the buffer is zero.
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
        # A layer need not allocate anything, because the cache allocates one buffer for all layers.
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.write_pending(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._cache.n_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Return the number of slots that queries see, and the position of the token in the first
        # slot.
        return self._cache.n_slots, 0

    def get_max_length(self) -> int:
        # transformers reads -1 as an unlimited length.
        return -1


class ContextCache(KVBuffer):
    """A drafter's cache of the KV of some target layers for one sequence, if the target is remote.

    The target's machine sends one context for each position to the drafter's machine. A context may
    contain the KV of these layers. The length of the cache is the number of positions for which a
    context has arrived, even if the contexts contain no KV.
    """

    def __init__(self, layers: Sequence[int] = ()) -> None:
        super().__init__(n_layers=len(layers))
        self._kept = list(layers)

    def extend(self, packed: Tensor, head_dim: int) -> None:
        """Add the packed KV [n, N * D] of the next n positions for the N stored layers."""
        start = self.lengths[0]
        stop = start + len(packed)
        if self._kept:
            per_layer = packed.unflatten(1, (len(self._kept), -1, 2, head_dim))
            keys_values = per_layer.permute(3, 1, 2, 0, 4)  # `keys_values` is [2, N, H_kv, n, d].
            self.reserve(stop, keys_values[0])
            self.buffer[:, :, 0, :, start:stop] = keys_values
        self.lengths = [stop]

    @override
    def layer_view(self, layer: int, n_slots: int) -> tuple[Tensor, Tensor]:
        return super().layer_view(self._kept.index(layer), n_slots)


def check_arrived(cache: KVSource, stops: Sequence[int]) -> None:
    """Raise DrafterError if a row lacks KV or contexts that a draft round needs.

    In each row, a round needs the KV and contexts of all positions before ``stops[row]``.
    """
    for have, stop in zip(cache.lengths, stops, strict=True):
        # If ``stops`` are DeviceLengths, this check is not needed: only CUDA graphs on the target's
        # machine use DeviceLengths, and on the target's machine all KV is available.
        if have < stop and not isinstance(stops, DeviceLengths):
            raise DrafterError(
                f"the drafter needs the contexts of positions {have} to {stop - 1}, which have not "
                f"arrived yet. Begin the round at token {have}, and feed the known tokens after it "
                "as levels."
            )
