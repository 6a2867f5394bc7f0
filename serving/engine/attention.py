"""Attention of one target call over several sequences. Each sequence attends to its own KV only.

A *segment* is the tokens of one sequence in a target call.

| case | method |
|---|---|
| CUDA, half precision, chains | one call of variable-length FlashAttention, without copying KV |
| CUDA, otherwise | one padded call for short segments, one for long segments (prompt chunks) |
| CPU, float32, single tokens, few query heads per key head | two sparse operations, no copy of KV |
| otherwise | one call per segment, on views of the KV |

In the table, a call is a call of PyTorch's attention function. Each call of this function has a
fixed cost. On a GPU this cost is high, so the segments share one or two calls.

A *slot* of the KV cache holds the key and value of one token.

Shapes: n tokens of one segment, T tokens of all segments, H query heads, H_kv key/value heads, d
head dim, S slots.
"""

import functools
import itertools
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from ...moa.nn import masks
from ...moa.nn.attention import attend, attend_plainly
from ...moa.nn.masks import to_device
from ...moa.targets.fused import RunLayers
from ...text import first_line
from .pool import BLOCK_TOKENS, Pool, PooledKV
from .steps import SparseBuffers, attend_sparse, run_layers

try:
    from torch.nn.attention import varlen
except ImportError:
    # PyTorch versions before 2.10 have no module for variable-length attention. Then other methods
    # are used.
    varlen = None  # type: ignore[assignment]

ATTENTION = "moa_data_segments"
"""The name under which transformers finds the attention of this module."""

# Maximum number of tokens of a short segment. On a GPU, short segments are padded to a common
# length and share one attention call. This padding costs nothing, because a kernel processes
# queries in blocks. Longer segments share another call. If all segments shared one call, a segment
# with a single token could be padded to the length of a prompt chunk.
_MAX_SHORT = 16
_CPU = torch.device("cpu")
# :class:`_Steps` computes separate vector products for each query head. If at least this many query
# heads share a key head, one matrix product for all of them is faster.
_MANY_HEADS = 5
# The number of attention scores of a token is padded to a multiple of this number, so that the CPU
# adds up the scores in whole vector registers. Longer sequences in the same target call only cause
# more padding, which adds zeros to the sum. So the rounding errors of the sum do not depend on the
# other sequences.
_ROW_SLOTS = 16


@dataclass(frozen=True)
class Segment:
    """The tokens of one sequence in a target call."""

    kv: PooledKV
    # The tokens that the target call reads: committed tokens that have no KV yet, then the drafts.
    tokens: list[int]
    # For each draft, the index of its parent among the drafts. -1 stands for the token before the
    # drafts.
    parents: tuple[int, ...] = ()
    # Whether to return the logits of the last token before the drafts, and of each draft.
    is_read: bool = True

    @property
    def start(self) -> int:
        """The position of the segment's first token."""
        return self.kv.length

    @property
    def first_slot(self) -> int:
        """The index of the slot of the segment's first token, among all slots of the pool."""
        return self.kv.first_slot + self.kv.length

    @property
    def n_known(self) -> int:
        """The number of committed tokens in the segment. They come before the drafts."""
        return len(self.tokens) - len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether the tokens of the segment are a chain, and not a tree with branches."""
        return list(self.parents) == list(range(-1, len(self.parents) - 1))

    def sees_all(self, window: int | None) -> bool:
        """Return whether the segment is a single token that sees all tokens before it.

        If it is, its attention needs no mask.

        Args:
            window: the size of a layer's sliding window or attention chunk; None if it has full
                attention.
        """
        return len(self.tokens) == 1 and (window is None or self.start < window)

    def seen_kv(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return views of the keys and values of each layer, up to the last token of the segment.

        Each view has the shape [1, H_kv, S, d].
        """
        keys, values = self.kv.view(0, self.start + len(self.tokens)).unsqueeze(2)
        return keys.unbind(0), values.unbind(0)

    def positions(self) -> list[int]:
        """Return each token's position. The position of a draft is its parent's position + 1."""
        root = self.start + self.n_known - 1
        depths = {-1: 0}
        for node, parent in enumerate(self.parents):
            depths[node] = depths[parent] + 1
        return [
            *range(self.start, root + 1),
            *(root + depths[node] for node in range(len(self.parents))),
        ]

    def seen(self) -> NDArray[np.bool_]:
        """Return which tokens of the segment each token sees, including itself: [n, n] bool."""
        seen = np.tri(len(self.tokens), dtype=np.bool_)
        if not self.is_chain:
            root = self.n_known - 1
            for node, parent in enumerate(self.parents, self.n_known):
                seen[node, self.n_known : node] = seen[root + 1 + parent, self.n_known : node]
        return seen

    def mask(self, positions: list[int], window: int | None, device: torch.device) -> Tensor | None:
        """Return which slots each token sees, [1, n, S] bool. None if all tokens see all slots."""
        if self.sees_all(window):
            return None
        if self.is_chain:
            return masks.causal_mask(
                to_device([positions], device), self.start + len(self.tokens), window
            )
        return masks.tree_mask([self.start], to_device(self.seen()[None], device), window)


def _pending_slots(segments: Sequence[Segment], device: torch.device) -> Tensor:
    """Return the index of each token's slot in the pool, [T] int64."""
    return to_device(
        [
            segment.first_slot + index
            for segment in segments
            for index in range(len(segment.tokens))
        ],
        device,
    )


class SegmentAttention:
    """Writes the new keys and values of each sequence to its KV, and computes the attention.

    Args:
        segments: the segments of the target call.
        windows: for each layer, the size of its sliding window or attention chunk; None if it has
            full attention.
        device: device of the target.
    """

    def __init__(
        self, segments: Sequence[Segment], windows: Sequence[int | None], device: torch.device
    ) -> None:
        self._planes = segments[0].kv.pool.planes
        self._sizes = [len(segment.tokens) for segment in segments]
        positions = [segment.positions() for segment in segments]
        # The positions of all tokens, [T] int64.
        self.positions = to_device(list(itertools.chain.from_iterable(positions)), device)
        self._pending = _pending_slots(segments, device)
        self._segments: Sequence[Segment] = segments
        # Number of query heads -> a list of :class:`_Steps` objects, which compute the attention of
        # all layers with this number of query heads. The list is empty if another method is faster
        # for these layers.
        self._steps: dict[int, list[_Steps]] = {}
        by_window = {
            window: [
                segment.mask(segment_positions, window, device)
                for segment, segment_positions in zip(segments, positions, strict=True)
            ]
            for window in set(windows)
        }
        self._masks = [by_window[window] for window in windows]
        self._are_steps = all(size == 1 for size in self._sizes) and all(
            mask is None for window_masks in by_window.values() for mask in window_masks
        )

    def run_layers(
        self, n_heads: int, n_kv_heads: int, head_dim: int, scale: float
    ) -> RunLayers | None:
        """Return a function that runs all layers of the target at once, or None.

        The function exists under three conditions. All segments are single tokens that need no
        mask. One sparse matrix holds the scores of all segments. Every layer has as many key/value
        heads, and the same head dim, as the buffer of the KV cache.

        Args:
            n_heads: query heads of each layer.
            n_kv_heads: key/value heads of each layer.
            head_dim: head dimension of each layer.
            scale: factor of the attention scores.
        """
        n_planes, _, max_head_dim = self._planes[0][0].shape
        if not self._are_steps or (n_planes, max_head_dim, max_head_dim**-0.5) != (
            n_kv_heads,
            head_dim,
            scale,
        ):
            return None
        steps = self._steps_of(n_heads, self._planes[0][0].dtype)
        return functools.partial(steps[0].run_layers, self._pending) if len(steps) == 1 else None

    def _steps_of(self, n_heads: int, dtype: torch.dtype) -> "list[_Steps]":
        if n_heads not in self._steps:
            self._steps[n_heads] = _Steps.of(self._segments, n_heads, dtype)
        return self._steps[n_heads]

    @functools.cached_property
    def _seen(self) -> list[tuple[tuple[Tensor, Tensor], ...]]:
        """Item [layer][segment] has the keys and values of the segment, each [1, H_kv, S, d]."""
        return list(
            zip(*(zip(*segment.seen_kv(), strict=True) for segment in self._segments), strict=True)
        )

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values of one layer to the KV, and compute its attention.

        Args:
            layer: index of the layer.
            q: [1, H, T, d], the queries of all tokens.
            k: [1, H_kv, T, d], the keys of all tokens.
            v: [1, H_kv, T, d], the values of all tokens. The head dim of values may be smaller than
                the head dim of keys.
            cap: soft cap; see :func:`~moa_data.moa.nn.attention.attend_plainly`.
            sinks: attention sinks; see :func:`~moa_data.moa.nn.attention.attend_plainly`.

        Returns:
            The attention output [1, T, H, d].
        """
        is_plain = cap is None and sinks is None
        n_kv_heads = k.shape[1]
        width = k.shape[3]
        value_width = v.shape[3]
        if value_width < width:
            v = pad(v, (0, width - value_width))
        planes = self._planes[layer]
        n_planes, _, max_head_dim = planes[0].shape
        # The KV buffer has room for the largest number of heads and the largest head dim of all
        # layers. If the present layer is smaller, it uses only a part of the buffer.
        is_whole = n_planes == n_kv_heads and max_head_dim == width
        for plane, new in zip(planes, (k, v), strict=True):
            (plane if is_whole else plane[:n_kv_heads, :, :width]).index_copy_(
                1, self._pending, new[0]
            )
        if self._are_steps and is_plain and is_whole and value_width == width:
            if steps := self._steps_of(q.shape[1], q.dtype):
                return _Steps.attend_all(steps, layer, q)
            # Treat the G query heads that share a key head as G queries of this key head. These
            # queries need no mask. The shape of each item of ``rows`` is [1, H_kv, G, d].
            rows = q[0].transpose(0, 1).unflatten(1, (n_kv_heads, -1)).split(1)
            outputs = [
                scaled_dot_product_attention(row, keys, values)
                for row, (keys, values) in zip(rows, self._seen[layer], strict=True)
            ]
            return torch.cat(outputs).flatten(1, 2)[None]
        attended = []
        for (keys, values), segment_q, mask in zip(
            self._seen[layer], q.split(self._sizes, dim=2), self._masks[layer], strict=True
        ):
            if not is_whole:
                keys = keys[:, :n_kv_heads, :, :width]
                values = values[:, :n_kv_heads, :, :width]
            if is_plain:
                attended.append(attend(segment_q, keys, values, mask))
            else:
                attended.append(attend_plainly(segment_q, keys, values, mask, cap, sinks))
        output = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
        output = output if value_width == width else output[..., :value_width]
        return output.transpose(1, 2).contiguous()


class _Steps:
    """Computes attention for segments with one token each, if they need no mask.

    PyTorch's attention uses dense matrix products. With few queries, these products spend most of
    their time on rearranging keys and values. This class instead stores the scores of all queries
    in a sparse matrix. The matrix has one row per segment and query head. It has one column per key
    in the KV cache, but only the keys of the row's sequence have scores. PyTorch's sparse product
    reads these keys in place. PyTorch's ``embedding_bag`` then computes the weighted sum of the
    values.
    """

    def __init__(self, segments: Sequence[Segment], n_heads: int) -> None:
        pool = segments[0].kv.pool
        self._segments = segments
        self._pool = pool
        n_kv_heads, n_slots = pool.buffer.shape[2:4]
        starts = [segment.start for segment in segments]
        # ``lasts`` and ``firsts`` have the shape [T, 1]. ``lasts`` contains the position of each
        # segment's token. ``firsts`` contains the pool slot that holds position 0 of each sequence.
        lasts, firsts = torch.tensor(
            [starts, [segment.kv.first_slot for segment in segments]]
        ).unsqueeze(2)
        columns = torch.arange(-(-(max(starts) + 1) // _ROW_SLOTS) * _ROW_SLOTS)
        slots = torch.minimum(columns, lasts).add_(firsts)  # The shape of ``slots`` is [T, S].
        planes = torch.arange(0, n_kv_heads * n_slots, n_slots).repeat_interleave(
            n_heads // n_kv_heads
        )
        # [T * H * S] int64. For each score, it contains the index of the score's key among the keys
        # of all heads and pool slots.
        key_indices = (slots.unsqueeze(1) + planes.unsqueeze(1)).flatten()
        stops = torch.arange(0, len(key_indices) + 1, len(columns))
        # Each row is padded to S slots. The additive mask hides the padding.
        added = torch.zeros(slots.shape).masked_fill_(columns > lasts, -torch.inf)
        # The values of the sparse matrix use the memory of the scores. Each layer overwrites this
        # memory.
        scores = torch.zeros(len(segments), n_heads, len(columns))
        sparse = torch.sparse_csr_tensor(
            stops,
            key_indices,
            scores.view(-1),
            (len(segments) * n_heads, n_kv_heads * n_slots),
            check_invariants=False,
        )
        self._buffers: SparseBuffers = scores, sparse, added.unsqueeze(1), key_indices, stops

    @classmethod
    def of(cls, segments: Sequence[Segment], n_heads: int, dtype: torch.dtype) -> "list[_Steps]":
        """Create one object for all segments, or one object per segment.

        One object for all segments pads their rows to a common length. If the lengths of the
        sequences differ much, most of the scores would be padding. Then each segment gets its own
        object.

        Returns:
            The objects. The list is empty if another method is faster, or if PyTorch's sparse
            products do not work.
        """
        buffer = segments[0].kv.pool.buffer
        are_few = n_heads < _MANY_HEADS * buffer.shape[2]
        if not (
            are_few
            and buffer.device.type == "cpu"
            and buffer.dtype == dtype == torch.float32
            and _steps_work()
        ):
            return []
        n_seen = [segment.start + 1 for segment in segments]
        are_alike = len(segments) * max(n_seen) <= 2 * sum(n_seen)
        return (
            [cls(segments, n_heads)]
            if are_alike
            else [cls([segment], n_heads) for segment in segments]
        )

    @staticmethod
    def attend_all(steps: "Sequence[_Steps]", layer: int, q: Tensor) -> Tensor:
        """Compute the attention [1, T, H, d] of one layer for queries q [1, H, T, d]."""
        queries = q[0].transpose(0, 1)
        if len(steps) == 1:
            return steps[0]._attend(layer, queries)[None]
        rows = queries.split([len(step._segments) for step in steps])
        return torch.cat([step._attend(layer, row) for step, row in zip(steps, rows, strict=True)])[
            None
        ]

    def run_layers(
        self, pending: Tensor, x: Tensor, cosines: Tensor, sines: Tensor, weights: Any
    ) -> list[Tensor]:
        """Run all layers of a target over the tokens of all segments (:func:`.run_layers`)."""
        return run_layers(
            x,
            cosines,
            sines,
            weights,
            self._pool.planes,
            self._pool.by_slot,
            pending,
            self._buffers,
        )

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        return attend_sparse(q, *self._pool.by_slot[layer], self._buffers).view(q.shape)


@functools.cache
def _steps_work() -> bool:
    """Return whether this PyTorch build has sparse products that give the right results."""
    # PyTorch's sparse tensors are in beta and may change. So compare their result with plain
    # attention. PyTorch also warns about the beta, once per process. Hide this warning.
    pool = Pool(
        3 * BLOCK_TOKENS, {"n_layers": 1, "n_kv_heads": 2, "head_dim": 4}, torch.float32, _CPU
    )
    segments = []
    pool.buffer.fill_(torch.nan)
    generator = torch.Generator().manual_seed(0)
    try:
        for length in (21, 3):
            pool.reserve(kv := PooledKV(pool), 1)
            kv.view(0, length + 1).normal_(generator=generator)
            kv.length = length
            segments.append(Segment(kv, [0]))
        q = torch.randn(1, 6, 2, 4, generator=generator)
        keys_values = (segment.seen_kv() for segment in segments)
        expected = [
            attend(segment_q, keys[0], values[0], None)
            for segment_q, (keys, values) in zip(q.split(1, dim=2), keys_values, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = _Steps.attend_all([_Steps(segments, 6)], 0, q)
        return torch.allclose(
            output, torch.cat(expected, dim=2).transpose(1, 2), rtol=1e-4, atol=1e-5
        )
    except (RuntimeError, AttributeError, TypeError):
        return False


class BatchedAttention:
    """Computes the same as :class:`SegmentAttention`, with a fixed number of GPU kernels.

    The number of kernels that SegmentAttention launches grows with the number of segments.

    Args:
        segments: the segments of the target call.
        windows: for each layer, the size of its sliding window or attention chunk; None if it has
            full attention.
        n_heads: query heads of each layer.
        device: device of the target.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        windows: Sequence[int | None],
        n_heads: int,
        device: torch.device,
    ) -> None:
        self._buffer = segments[0].kv.pool.buffer
        self._windows = windows
        self._n_heads = n_heads
        sizes = [len(segment.tokens) for segment in segments]
        firsts = [
            stop - size for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True)
        ]
        # The positions of all tokens, [T] int64.
        self.positions = to_device(
            [position for segment in segments for position in segment.positions()], device
        )
        self._pending = _pending_slots(segments, device)
        is_ragged = _takes_ragged(segments, n_heads) and not any(
            isinstance(window, masks.Chunk) for window in windows
        )
        self._ragged = _Ragged(segments, device) if is_ragged else None
        if self._ragged is not None:
            return
        self._batches: list[_Batch] = []
        # For each token, ``token_indices`` has its index in the concatenated outputs of the padded
        # attention calls.
        token_indices, n_indices = [0] * sum(sizes), 0
        for is_long in (False, True):
            rows = [row for row, size in enumerate(sizes) if (size > _MAX_SHORT) == is_long]
            if not rows:
                continue
            batch_segments = [segments[row] for row in rows]
            self._batches.append(
                _Batch(batch_segments, [firsts[row] for row in rows], set(windows), n_heads)
            )
            for row in rows:
                token_indices[firsts[row] : firsts[row] + sizes[row]] = range(
                    n_indices, n_indices + sizes[row]
                )
                n_indices += max(sizes[row] for row in rows)
        # G query heads share a key head. In the output of a :class:`_Batch`, query head ``i * G +
        # j`` of a token is at index ``j * H_kv + i``. ``order`` [H_kv, G] contains these indices.
        order = torch.arange(n_heads, device=device).view(-1, self._buffer.shape[2]).T
        # [T * H] int64. For each query head of each token, it contains the row of this head in the
        # concatenated outputs of all batches.
        self._output_indices = (
            to_device(token_indices, device)[:, None] * n_heads + order.flatten()
        ).flatten()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new keys and values of one layer to the KV, and compute its attention.

        Args:
            layer: index of the layer.
            q: [1, H, T, d], the queries of all tokens.
            k: [1, H_kv, T, d], the keys of all tokens.
            v: [1, H_kv, T, d], the values of all tokens.

        Returns:
            The attention output [1, T, H, d].
        """
        kv = self._buffer[:, layer]  # The shape of ``kv`` is [2, H_kv, slots, d].
        kv[0].index_copy_(1, self._pending, k[0])
        kv[1].index_copy_(1, self._pending, v[0])
        if self._ragged is not None:
            return self._ragged.attend(q, kv, self._windows[layer])
        queries = q.transpose(1, 2).flatten(0, 2)  # The shape of ``queries`` is [T * H, d].
        attended = [batch.attend(queries, kv, self._windows[layer]) for batch in self._batches]
        output = attended[0] if len(attended) == 1 else torch.cat(attended)
        return output.index_select(0, self._output_indices).view(1, -1, self._n_heads, q.shape[3])


class _Ragged:
    """Computes the attention of several sequences by one call of variable-length FlashAttention.

    Each segment must be a chain of tokens. FlashAttention gets the first slot of each sequence as
    an offset into the KV. The offsets must ascend, so the segments must be in the order of their
    slots.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        sizes = [len(segment.tokens) for segment in segments]
        seen = [segment.start + len(segment.tokens) for segment in segments]
        self._longest = max(sizes), max(seen)
        stops = [0, *itertools.accumulate(sizes)]
        slots = [
            *(segment.kv.first_slot for segment in segments),
            segments[0].kv.pool.buffer.shape[3],
        ]
        self._stops, self._slots, self._seen = (
            to_device(x, device, torch.int32) for x in (stops, slots, seen)
        )

    def attend(self, q: Tensor, kv: Tensor, window: int | None) -> Tensor:
        """Compute the attention of q [1, H, T, d] to a layer's kv [2, H_kv, slots, d].

        Returns:
            The attention output [1, T, H, d].
        """
        q, k, v = (x.transpose(0, 1) for x in (q[0], kv[0], kv[1]))
        attended: Any = varlen.varlen_attn(
            q,
            k,
            v,
            self._stops,
            self._slots,
            *self._longest,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
            seqused_k=self._seen,
        )
        output: Tensor = attended[None]
        return output


def _takes_ragged(segments: Sequence[Segment], n_heads: int) -> bool:
    buffer = segments[0].kv.pool.buffer
    slots = [segment.kv.first_slot for segment in segments]
    if not all(segment.is_chain for segment in segments) or slots != sorted(slots):
        return False
    return _ragged_works(buffer.device, buffer.dtype, n_heads, buffer.shape[2], buffer.shape[4])


@functools.cache
def _ragged_works(
    device: torch.device, dtype: torch.dtype, n_heads: int, n_kv_heads: int, head_dim: int
) -> bool:
    """Return whether variable-length FlashAttention gives the right result on this machine."""
    # The arguments of this function differ between versions of PyTorch. So compare its result with
    # the attention of each segment alone.
    if varlen is None or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        windows = (None, 7)
        sizes = {"n_layers": 2, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
        pool = Pool(5 * BLOCK_TOKENS, sizes, dtype, device)
        segments = []
        pool.buffer.fill_(torch.nan)
        for start, n_tokens in ((21, 5), (0, 11), (9, 1)):
            pool.reserve(kv := PooledKV(pool), 1)
            kv.view(0, start).normal_()
            kv.length = start
            segments.append(Segment(kv, [0] * n_tokens))
        segments.sort(key=lambda segment: segment.first_slot)
        shapes = [(1, heads, 17, head_dim) for heads in (n_heads, n_kv_heads, n_kv_heads)]
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        plain, ragged = SegmentAttention(segments, windows, device), _Ragged(segments, device)
        for layer, window in enumerate(windows):
            expected = plain.attend(layer, q, k, v)
            torch.testing.assert_close(
                ragged.attend(q, pool.buffer[:, layer], window), expected, rtol=0.05, atol=0.05
            )
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything
        text = (
            f"PyTorch's varlen_attn does not work on this machine ({first_line(error):.200}). "
            "Attention therefore pads the sequences of a target call to a common length, which is "
            "slower."
        )
        warnings.warn(text, stacklevel=2)
        return False
    return True


class _Batch:
    """Computes the attention of B segments by one call of the attention kernel.

    Each segment is padded to n tokens and S slots, because one call needs equal sizes.

    G query heads share a key head. They are treated as G queries of this key head, so that the keys
    need not be copied for each query head. For one segment and key head, the queries are::

        token 0: heads 0 .. G - 1    token 1: heads 0 .. G - 1    ...
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        firsts: Sequence[int],
        windows: Collection[int | None],
        n_heads: int,
    ) -> None:
        # ``firsts`` has the index of each segment's first token among all tokens of the target
        # call.
        buffer = segments[0].kv.pool.buffer
        device = buffer.device
        n_kv_heads = buffer.shape[2]
        n_tokens = max(len(segment.tokens) for segment in segments)
        n_slots = max(segment.start for segment in segments) + n_tokens
        self._segments = segments
        self._n_rows = len(segments)
        self._n_kv_heads = n_kv_heads
        # Unused slots may hold any value, even NaN. So pad queries and slots with copies of the
        # segment's last token.
        lasts = [len(segment.tokens) - 1 for segment in segments]
        tokens = [
            [first + min(index, last) for index in range(n_tokens)]
            for first, last in zip(firsts, lasts, strict=True)
        ]
        heads = torch.arange(n_heads, device=device).view(n_kv_heads, 1, -1)
        # [B * H_kv * n * G] int64. For each query of the batch, it contains the index of this query
        # among the T * H queries of the target call.
        self._queries = (to_device(tokens, device)[:, None, :, None] * n_heads + heads).flatten()
        if len(segments) > 1:
            n_slots = -(-n_slots // 8) * 8  # Kernels need a mask width that is a multiple of 8.
            bounds = [
                (segment.kv.first_slot, segment.first_slot + last)
                for segment, last in zip(segments, lasts, strict=True)
            ]
            first_slots, last_slots = to_device(bounds, device).split(1, dim=1)
            self._slots = torch.minimum(
                first_slots + torch.arange(n_slots, device=device), last_slots
            ).flatten()
        self._n_slots = n_slots
        self._scores = {
            window: self._added(window, n_tokens, n_heads // n_kv_heads, buffer)
            for window in windows
        }

    def _added(
        self, window: int | None, n_tokens: int, n_group: int, buffer: Tensor
    ) -> Tensor | None:
        """Return the additive mask (0 or -inf), [B, n * G, S]. None if nothing is masked."""
        if self._n_rows == 1 and self._segments[0].sees_all(window):
            return None
        # Start with true on the diagonal, so that each padding token sees itself. If a token saw
        # nothing, its output would be NaN.
        seen = np.tile(np.eye(n_tokens, dtype=np.bool_), (self._n_rows, 1, 1))
        for row, segment in enumerate(self._segments):
            seen[row, : len(segment.tokens), : len(segment.tokens)] = segment.seen()
        mask = masks.tree_mask(
            [segment.start for segment in self._segments], to_device(seen, buffer.device), window
        )
        hidden = ~pad(mask, (0, self._n_slots - mask.shape[2]))
        added = torch.zeros_like(hidden, dtype=buffer.dtype).masked_fill_(hidden, -torch.inf)
        return added.repeat_interleave(n_group, dim=1)

    def attend(self, queries: Tensor, kv: Tensor, window: int | None) -> Tensor:
        """Compute the attention of queries [T * H, d] to a layer's kv [2, H_kv, slots, d].

        Returns:
            The attention output [B * n * G * H_kv, d].
        """
        q = queries.index_select(0, self._queries).view(
            self._n_rows, self._n_kv_heads, -1, queries.shape[1]
        )
        if self._n_rows == 1:
            first = self._segments[0].kv.first_slot
            # The shape of ``rows`` is [2, 1, H_kv, S, d].
            rows = kv[:, None, :, first : first + self._n_slots]
        else:
            rows = kv.index_select(2, self._slots).unflatten(2, (self._n_rows, -1)).transpose(1, 2)
        return attend(q, rows[0], rows[1], self._scores[window]).transpose(1, 2).flatten(0, 2)


def _segment_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention. transformers calls this function through its attention interface.

    The runner passes the object that computes the attention as the keyword argument
    ``segment_attention``.
    """
    attention: SegmentAttention | BatchedAttention = kwargs["segment_attention"]
    plain_scale = query.shape[3] ** -0.5
    scale = kwargs.get("scaling")
    if scale is not None and scale != plain_scale:
        query = query * (scale / plain_scale)
    cap = kwargs.get("softcap")
    sinks = kwargs.get("s_aux")
    if cap is None and sinks is None:
        return attention.attend(module.layer_idx, query, key, value), None
    # BatchedAttention has neither soft caps nor sinks. The runner uses it only for model families
    # that need neither.
    assert isinstance(attention, SegmentAttention)
    return attention.attend(module.layer_idx, query, key, value, cap, sinks), None


AttentionInterface.register(ATTENTION, _segment_attention)
