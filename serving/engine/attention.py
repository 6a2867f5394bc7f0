"""Attention of a target call over parts of several sequences, each of which sees its own KV.

| device | how |
|---|---|
| CUDA, half precision, chains | one call of FlashAttention for rows of any lengths, which reads the KV as it lies |
| CUDA, else | one padded call over all parts, and a second one for long ones, such as chunks of prompts |
| CPU, float32, single tokens, few heads a group | two calls over parts of like lengths, which read the KV as it lies |
| else | part by part, to views of the KV |

Each call costs some time besides its work, on a GPU more than on a CPU.

Shapes: n tokens of one part, T tokens of all parts, H query heads, H_kv key/value heads, d head dim, S slots.
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
from .steps import Rows, attend_rows, run_layers

try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.10
    varlen = None  # type: ignore[assignment]

ATTENTION = "moa_data_parts"
"""The name of this attention in transformers."""
# A kernel works on blocks of some queries, so that padding short parts to so many tokens costs
# nothing. Long ones are
# padded apart: a step beside a chunk of a prompt must not become as long as that.
_MAX_SHORT = 16
_CPU = torch.device("cpu")
# Heads of a group from which on one product of a group takes less time than products of vectors.
_MANY_HEADS = 5
# Slots of a row of scores are a multiple of this, so that a row's sum is the same whatever rows it
# shares a call with.
_ROW_SLOTS = 16


@dataclass(frozen=True)
class Part:
    """The tokens of one sequence in a call."""

    kv: PooledKV
    tokens: list[int]  # those after its committed KV, then the drafts
    # of each draft, an index into the drafts, -1 for the token before them
    parents: tuple[int, ...] = ()
    # whether logits are wanted, of the last token before the drafts and of each draft
    is_read: bool = True

    @property
    def start(self) -> int:
        """The position of the first token."""
        return self.kv.length

    @property
    def first_slot(self) -> int:
        """The slot of the pool of the first token."""
        return self.kv.first_slot + self.kv.length

    @property
    def n_known(self) -> int:
        """Tokens before the drafts."""
        return len(self.tokens) - len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return list(self.parents) == list(range(-1, len(self.parents) - 1))

    def sees_all(self, window: int | None) -> bool:
        """Whether its only token sees everything."""
        return len(self.tokens) == 1 and (window is None or self.start < window)

    def seen_kv(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """View the keys and the values up to the last token of this part: of each layer [1, H_kv, S, d]."""
        keys, values = self.kv.view(0, self.start + len(self.tokens)).unsqueeze(2)
        return keys.unbind(0), values.unbind(0)

    def positions(self) -> list[int]:
        """List the positions of the tokens; a draft stands one after its parent."""
        root = self.start + self.n_known - 1
        depths = {-1: 0}
        for node, parent in enumerate(self.parents):
            depths[node] = depths[parent] + 1
        return [
            *range(self.start, root + 1),
            *(root + depths[node] for node in range(len(self.parents))),
        ]

    def seen(self) -> NDArray[np.bool_]:
        """Say which tokens of the part each of them sees, itself included: [n, n]."""
        seen = np.tri(len(self.tokens), dtype=np.bool_)
        if not self.is_chain:
            root = self.n_known - 1
            for node, parent in enumerate(self.parents, self.n_known):
                seen[node, self.n_known : node] = seen[root + 1 + parent, self.n_known : node]
        return seen

    def mask(self, positions: list[int], window: int | None, device: torch.device) -> Tensor | None:
        """Say what each token sees, [1, n, S] bool; None where each sees everything."""
        if self.sees_all(window):
            return None
        if self.is_chain:
            return masks.causal_mask(
                to_device([positions], device), self.start + len(self.tokens), window
            )
        return masks.tree_mask([self.start], to_device(self.seen()[None], device), window)


def _pending_slots(parts: Sequence[Part], device: torch.device) -> Tensor:
    """The slots of the pool of all tokens, [T] int64."""
    return to_device(
        [part.first_slot + index for part in parts for index in range(len(part.tokens))], device
    )


class PartsAttention:
    """Writes keys and values of a call to each part's own KV, and attends within each part."""

    def __init__(
        self, parts: Sequence[Part], windows: Sequence[int | None], device: torch.device
    ) -> None:
        self._planes = parts[0].kv.pool.planes
        self._sizes = [len(part.tokens) for part in parts]
        positions = [part.positions() for part in parts]
        # [T] int64
        self.positions = to_device(list(itertools.chain.from_iterable(positions)), device)
        self._pending = _pending_slots(parts, device)
        self._parts: Sequence[Part] = parts
        # By the number of query heads, in which layers may differ; empty where they are of no use.
        self._steps: dict[int, list[_Steps]] = {}
        by_window = {
            window: [
                part.mask(own, window, device) for part, own in zip(parts, positions, strict=True)
            ]
            for window in set(windows)
        }
        self._masks = [by_window[window] for window in windows]
        self._are_steps = all(size == 1 for size in self._sizes) and all(
            mask is None for own in by_window.values() for mask in own
        )

    def run_layers(
        self, n_heads: int, n_kv_heads: int, head_dim: int, scale: float
    ) -> RunLayers | None:
        """Return what runs all layers of such heads in one call, if all parts are steps that are rows alike."""
        n_planes, _, most = self._planes[0][0].shape
        if not self._are_steps or (n_planes, most, most**-0.5) != (n_kv_heads, head_dim, scale):
            return None
        steps = self._steps_of(n_heads, self._planes[0][0].dtype)
        return functools.partial(steps[0].run_layers, self._pending) if len(steps) == 1 else None

    def _steps_of(self, n_heads: int, dtype: torch.dtype) -> "list[_Steps]":
        if n_heads not in self._steps:
            self._steps[n_heads] = _Steps.of(self._parts, n_heads, dtype)
        return self._steps[n_heads]

    @functools.cached_property
    def _seen(self) -> list[tuple[tuple[Tensor, Tensor], ...]]:
        """Of each layer, what each part sees: keys and values, [1, H_kv, S, d]."""
        return list(zip(*(zip(*part.seen_kv(), strict=True) for part in self._parts), strict=True))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer: q [1, H, T, d], k and v [1, H_kv, T, d] -> [1, T, H, d]; see ``attend_plainly``."""
        is_plain = cap is None and sinks is None
        n_kv_heads = k.shape[1]
        width = k.shape[3]
        value_width = v.shape[3]
        if value_width < width:
            v = pad(v, (0, width - value_width))
        planes = self._planes[layer]
        n_planes, _, most = planes[0].shape
        # else other layers have more, or wider ones
        is_whole = n_planes == n_kv_heads and most == width
        for plane, new in zip(planes, (k, v), strict=True):
            (plane if is_whole else plane[:n_kv_heads, :, :width]).index_copy_(
                1, self._pending, new[0]
            )
        if self._are_steps and is_plain and is_whole and value_width == width:
            if steps := self._steps_of(q.shape[1], q.dtype):
                return _Steps.attend_all(steps, layer, q)
            # The heads of a group are queries of one head, and nothing is hidden from them.
            # of each part [1, H_kv, G, d]
            rows = q[0].transpose(0, 1).unflatten(1, (n_kv_heads, -1)).split(1)
            own = [
                scaled_dot_product_attention(row, keys, values)
                for row, (keys, values) in zip(rows, self._seen[layer], strict=True)
            ]
            return torch.cat(own).flatten(1, 2)[None]
        attended = []
        for (keys, values), own_q, mask in zip(
            self._seen[layer], q.split(self._sizes, dim=2), self._masks[layer], strict=True
        ):
            if not is_whole:
                keys = keys[:, :n_kv_heads, :, :width]
                values = values[:, :n_kv_heads, :, :width]
            if is_plain:
                attended.append(attend(own_q, keys, values, mask))
            else:
                attended.append(attend_plainly(own_q, keys, values, mask, cap, sinks))
        together = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
        together = together if value_width == width else together[..., :value_width]
        return together.transpose(1, 2).contiguous()


class _Steps:
    """Parts of one token that sees everything, as rows of a sparse matrix of scores: of each, one a query head.

    PyTorch's attention multiplies matrices, which take most of their time to lay out keys and values for a few queries.
    Here the keys are multiplied where they lie, and an embedding bag adds up the values.
    """

    def __init__(self, parts: Sequence[Part], n_heads: int) -> None:
        pool = parts[0].kv.pool
        self._parts = parts
        self._pool = pool
        n_kv_heads, n_slots = pool.buffer.shape[2:4]
        starts = [part.start for part in parts]
        # [T, 1]
        lasts, firsts = torch.tensor([starts, [part.kv.first_slot for part in parts]]).unsqueeze(2)
        columns = torch.arange(-(-(max(starts) + 1) // _ROW_SLOTS) * _ROW_SLOTS)
        slots = torch.minimum(columns, lasts).add_(firsts)  # [T, S]
        planes = torch.arange(0, n_kv_heads * n_slots, n_slots).repeat_interleave(
            n_heads // n_kv_heads
        )
        # [T * H * S], rows of [H_kv * slots]
        places = (slots.unsqueeze(1) + planes.unsqueeze(1)).flatten()
        stops = torch.arange(0, len(places) + 1, len(columns))
        # to what only fills the row
        added = torch.zeros(slots.shape).masked_fill_(columns > lasts, -torch.inf)
        scores = torch.zeros(len(parts), n_heads, len(columns))  # of the layer at hand
        sparse = torch.sparse_csr_tensor(
            stops,
            places,
            scores.view(-1),
            (len(parts) * n_heads, n_kv_heads * n_slots),
            check_invariants=False,
        )
        self._rows: Rows = scores, sparse, added.unsqueeze(1), places, stops

    @classmethod
    def of(cls, parts: Sequence[Part], n_heads: int, dtype: torch.dtype) -> "list[_Steps]":
        """Make them of all parts together, or of each where rows of a length would be mostly filling.

        None at all where other ways are faster, or the products at single places are not there.
        """
        buffer = parts[0].kv.pool.buffer
        are_few = n_heads < _MANY_HEADS * buffer.shape[2]
        if not (
            are_few
            and buffer.device.type == "cpu"
            and buffer.dtype == dtype == torch.float32
            and _steps_work()
        ):
            return []
        n_seen = [part.start + 1 for part in parts]
        are_alike = len(parts) * max(n_seen) <= 2 * sum(n_seen)
        return [cls(parts, n_heads)] if are_alike else [cls([part], n_heads) for part in parts]

    @staticmethod
    def attend_all(steps: "Sequence[_Steps]", layer: int, q: Tensor) -> Tensor:
        """Attend in one layer with q [1, H, T, d] -> [1, T, H, d]."""
        queries = q[0].transpose(0, 1)
        if len(steps) == 1:
            return steps[0]._attend(layer, queries)[None]
        rows = queries.split([len(one._parts) for one in steps])
        return torch.cat([one._attend(layer, row) for one, row in zip(steps, rows, strict=True)])[
            None
        ]

    def run_layers(
        self, pending: Tensor, x: Tensor, cosines: Tensor, sines: Tensor, weights: Any
    ) -> list[Tensor]:
        """Run all layers of a target, as :data:`.fused.RunLayers` says; ``pending``, [T]: the tokens' slots."""
        return run_layers(
            x, cosines, sines, weights, self._pool.planes, self._pool.rows, pending, self._rows
        )

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        return attend_rows(q, *self._pool.rows[layer], self._rows).view(q.shape)


@functools.cache
def _steps_work() -> bool:
    """Whether this build of PyTorch has the products at single places, and they are right."""
    # Sparse tensors may change with versions, of which PyTorch warns once a process, so they are
    # tried.
    pool = Pool(
        3 * BLOCK_TOKENS, {"n_layers": 1, "n_kv_heads": 2, "head_dim": 4}, torch.float32, _CPU
    )
    parts = []
    pool.buffer.fill_(torch.nan)
    generator = torch.Generator().manual_seed(0)
    try:
        for length in (21, 3):
            pool.reserve(kv := PooledKV(pool), 1)
            kv.view(0, length + 1).normal_(generator=generator)
            kv.length = length
            parts.append(Part(kv, [0]))
        q = torch.randn(1, 6, 2, 4, generator=generator)
        keys_values = (part.seen_kv() for part in parts)
        one = [
            attend(own, keys[0], values[0], None)
            for own, (keys, values) in zip(q.split(1, dim=2), keys_values, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _Steps.attend_all([_Steps(parts, 6)], 0, q)
        return torch.allclose(found, torch.cat(one, dim=2).transpose(1, 2), rtol=1e-4, atol=1e-5)
    except (RuntimeError, AttributeError, TypeError):
        return False


class JoinedAttention:
    """What :class:`PartsAttention` computes, by as many kernels whatever the number of parts."""

    def __init__(
        self,
        parts: Sequence[Part],
        windows: Sequence[int | None],
        n_heads: int,
        device: torch.device,
    ) -> None:
        self._buffer = parts[0].kv.pool.buffer
        self._windows = windows
        self._n_heads = n_heads
        sizes = [len(part.tokens) for part in parts]
        firsts = [
            stop - size for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True)
        ]
        # [T] int64
        self.positions = to_device([at for part in parts for at in part.positions()], device)
        self._pending = _pending_slots(parts, device)
        is_ragged = _takes_ragged(parts, n_heads) and not any(
            isinstance(window, masks.Chunk) for window in windows
        )
        self._ragged = _Ragged(parts, device) if is_ragged else None
        if self._ragged is not None:
            return
        self._batches: list[_Batch] = []
        places, n_places = [0] * sum(sizes), 0  # of each token among those of the padded calls
        for is_long in (False, True):
            rows = [row for row, size in enumerate(sizes) if (size > _MAX_SHORT) == is_long]
            if not rows:
                continue
            own = [parts[row] for row in rows]
            self._batches.append(_Batch(own, [firsts[row] for row in rows], set(windows), n_heads))
            for row in rows:
                places[firsts[row] : firsts[row] + sizes[row]] = range(
                    n_places, n_places + sizes[row]
                )
                n_places += max(sizes[row] for row in rows)
        order = torch.arange(n_heads, device=device).view(-1, self._buffer.shape[2]).T  # [H_kv, G]
        # [T * H]
        self._places = (to_device(places, device)[:, None] * n_heads + order.flatten()).flatten()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in one layer: q [1, H, T, d], k and v [1, H_kv, T, d] -> [1, T, H, d]."""
        kv = self._buffer[:, layer]  # [2, H_kv, slots, d]
        kv[0].index_copy_(1, self._pending, k[0])
        kv[1].index_copy_(1, self._pending, v[0])
        if self._ragged is not None:
            return self._ragged.attend(q, kv, self._windows[layer])
        queries = q.transpose(1, 2).flatten(0, 2)  # [T * H, d]
        attended = [batch.attend(queries, kv, self._windows[layer]) for batch in self._batches]
        together = attended[0] if len(attended) == 1 else torch.cat(attended)
        return together.index_select(0, self._places).view(1, -1, self._n_heads, q.shape[3])


class _Ragged:
    """Parts that are chains as rows of any lengths of one call, in the order of their slots."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        sizes = [len(part.tokens) for part in parts]
        seen = [part.start + len(part.tokens) for part in parts]
        self._longest = max(sizes), max(seen)
        stops = [0, *itertools.accumulate(sizes)]
        slots = [*(part.kv.first_slot for part in parts), parts[0].kv.pool.buffer.shape[3]]
        self._stops, self._slots, self._seen = (
            to_device(x, device, torch.int32) for x in (stops, slots, seen)
        )

    def attend(self, q: Tensor, kv: Tensor, window: int | None) -> Tensor:
        """Attend with q [1, H, T, d] to a layer's kv [2, H_kv, slots, d] -> [1, T, H, d]."""
        q, k, v = (x.transpose(0, 1) for x in (q[0], kv[0], kv[1]))
        attended: Any = varlen.varlen_attn(
            q, k, v, self._stops, self._slots, *self._longest, window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1], seqused_k=self._seen,
        )  # fmt: skip
        together: Tensor = attended[None]
        return together


def _takes_ragged(parts: Sequence[Part], n_heads: int) -> bool:
    buffer = parts[0].kv.pool.buffer
    slots = [part.kv.first_slot for part in parts]
    if not all(part.is_chain for part in parts) or slots != sorted(slots):
        return False
    return _ragged_works(buffer.device, buffer.dtype, n_heads, buffer.shape[2], buffer.shape[4])


@functools.cache
def _ragged_works(
    device: torch.device, dtype: torch.dtype, n_heads: int, n_kv_heads: int, head_dim: int
) -> bool:
    """Whether FlashAttention for rows of any lengths agrees with attention part by part on this machine."""
    # Its arguments change from version to version of torch, so it is tried.
    if varlen is None or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        windows = (None, 7)
        sizes = {"n_layers": 2, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
        pool = Pool(5 * BLOCK_TOKENS, sizes, dtype, device)
        parts = []
        pool.buffer.fill_(torch.nan)
        for start, n_tokens in ((21, 5), (0, 11), (9, 1)):
            pool.reserve(kv := PooledKV(pool), 1)
            kv.view(0, start).normal_()
            kv.length = start
            parts.append(Part(kv, [0] * n_tokens))
        parts.sort(key=lambda part: part.first_slot)
        shapes = [(1, heads, 17, head_dim) for heads in (n_heads, n_kv_heads, n_kv_heads)]
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        plain, own = PartsAttention(parts, windows, device), _Ragged(parts, device)
        for layer, window in enumerate(windows):
            expected = plain.attend(layer, q, k, v)
            torch.testing.assert_close(
                own.attend(q, pool.buffer[:, layer], window), expected, rtol=0.05, atol=0.05
            )
    except Exception as error:  # noqa: BLE001 - whatever it is means no
        text = f"served texts are padded for attention, as torch's varlen_attn fails here: {first_line(error):.200}"
        warnings.warn(text, stacklevel=2)
        return False
    return True


class _Batch:
    """Parts as B rows of one padded call: n tokens, S slots, and G query heads for each of H_kv.

    The heads of a group are queries of one head, so that no keys are copied for them::

        queries of a row and key head    token 0: heads 0 .. G - 1    token 1: heads 0 .. G - 1    ...
    """

    def __init__(
        self,
        parts: Sequence[Part],
        firsts: Sequence[int],
        windows: Collection[int | None],
        n_heads: int,
    ) -> None:
        # ``firsts`` are the places of the parts' first tokens in the call.
        buffer = parts[0].kv.pool.buffer
        device = buffer.device
        n_kv_heads = buffer.shape[2]
        n_tokens = max(len(part.tokens) for part in parts)
        n_slots = max(part.start for part in parts) + n_tokens
        self._parts = parts
        self._n_rows = len(parts)
        self._n_kv_heads = n_kv_heads
        # A part's last token stands for padding too, among queries as among slots: others hold
        # anything, also NaN.
        lasts = [len(part.tokens) - 1 for part in parts]
        tokens = [
            [first + min(index, last) for index in range(n_tokens)]
            for first, last in zip(firsts, lasts, strict=True)
        ]
        heads = torch.arange(n_heads, device=device).view(n_kv_heads, 1, -1)
        # [B * H_kv * n * G], rows of [T * H]
        self._queries = (to_device(tokens, device)[:, None, :, None] * n_heads + heads).flatten()
        if len(parts) > 1:
            n_slots = -(-n_slots // 8) * 8  # as kernels want masks
            bounds = [
                (part.kv.first_slot, part.first_slot + last)
                for part, last in zip(parts, lasts, strict=True)
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
        """Make what is added to the scores, 0 or -inf, [B, n * G, S]; None where all is seen."""
        if self._n_rows == 1 and self._parts[0].sees_all(window):
            return None
        # padding sees itself
        seen = np.tile(np.eye(n_tokens, dtype=np.bool_), (self._n_rows, 1, 1))
        for row, part in enumerate(self._parts):
            seen[row, : len(part.tokens), : len(part.tokens)] = part.seen()
        mask = masks.tree_mask(
            [part.start for part in self._parts], to_device(seen, buffer.device), window
        )
        hidden = ~pad(mask, (0, self._n_slots - mask.shape[2]))
        added = torch.zeros_like(hidden, dtype=buffer.dtype).masked_fill_(hidden, -torch.inf)
        return added.repeat_interleave(n_group, dim=1)

    def attend(self, queries: Tensor, kv: Tensor, window: int | None) -> Tensor:
        """Attend with queries [T * H, d] to a layer's kv [2, H_kv, slots, d] -> [B * n * G * H_kv, d]."""
        q = queries.index_select(0, self._queries).view(
            self._n_rows, self._n_kv_heads, -1, queries.shape[1]
        )
        if self._n_rows == 1:
            first = self._parts[0].kv.first_slot
            rows = kv[:, None, :, first : first + self._n_slots]  # [2, 1, H_kv, S, d]
        else:
            rows = kv.index_select(2, self._slots).unflatten(2, (self._n_rows, -1)).transpose(1, 2)
        return attend(q, rows[0], rows[1], self._scores[window]).transpose(1, 2).flatten(0, 2)


def _parts_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as transformers asks for it; the call's own comes with the keyword arguments."""
    attention: PartsAttention | JoinedAttention = kwargs["parts_attention"]
    plain_scale = query.shape[3] ** -0.5
    scale = kwargs.get("scaling")
    if scale is not None and scale != plain_scale:
        query = query * (scale / plain_scale)
    cap = kwargs.get("softcap")
    sinks = kwargs.get("s_aux")
    if cap is None and sinks is None:
        return attention.attend(module.layer_idx, query, key, value), None
    assert isinstance(attention, PartsAttention)  # the runner gives such families no other
    return attention.attend(module.layer_idx, query, key, value, cap, sinks), None


AttentionInterface.register(ATTENTION, _parts_attention)
