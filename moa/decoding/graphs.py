"""Rounds of greedy chains as CUDA graphs: the host launches one where a chain of five drafts takes hundreds of kernels.

A graph repeats its kernels at the same addresses with the same shapes. So the caches stay where they are, keys and
values find their slots by lengths on the device (:class:`.masks.DeviceLengths`), and attention reads as many slots in
every round, under a mask. Shapes: B rows, N tokens that a round begins with, S slots.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..drafters.caches import LayerState
from ..nn.graphs import recorded
from ..nn.kv import KVBuffer
from ..nn.masks import DeviceLengths, added
from ..targets.cache import TargetCache
from .tree import DraftTree, TreeShape

# drafts from a state whose round has begun on the device
Record = Callable[[LayerState], DraftTree]


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    # [B, N + 2 + buffers] int64: the tokens of each row, how many, and the lengths before them
    numbers: Tensor
    states: Tensor | None  # [B, N, ...], the target's, of drafters that take any
    drafts: Tensor  # [B, depth] int64, which each run overwrites


class ChainGraphs:
    """The graphs of a drafter, one for each number of rows, shape of the drafts, and home of the target's cache."""

    def __init__(self) -> None:
        self._homes: list[Tensor] = []  # of the buffers of states, [2, L, B, H_kv, S, d] each
        self._graphs: dict[tuple[Any, ...], _Graph] = {}

    def run(
        self,
        state: LayerState,
        cache: TargetCache,
        committed: Sequence[list[int]],
        shape: TreeShape,
        record: Record,
    ) -> Tensor | None:
        """Draft chains [B, depth] int64; None for a round that no graph is made for, such as the first of a text."""
        # One more than a chain and its bonus: the slots of some drafters end before the root.
        n_new = shape.depth + 2
        n_slots = cache.capacity
        buffers = _buffers(state)
        lacking = max(len(tokens) - n for tokens, n in zip(committed, state.n_true, strict=True))
        is_long = max(map(len, committed)) + n_new + shape.depth > n_slots
        if lacking > n_new or is_long or not all(buffer.capacity for buffer in buffers):
            return None
        state.forget_drafts()
        self._settle(buffers, n_slots)
        tokens, states = state.fresh_rows(committed)
        columns = (
            [len(new) for new in tokens],
            state.n_true,
            *(buffer.lengths for buffer in buffers),
        )
        rows = zip(
            [new + [0] * (n_new - len(new)) for new in tokens],
            zip(*columns, strict=True),
            strict=True,
        )
        numbers = torch.tensor([[*new, *lengths] for new, lengths in rows]).pin_memory()
        key = len(committed), shape, cache.home
        if key not in self._graphs:
            room = (
                None if states is None else states.new_zeros(len(states), n_new, *states.shape[2:])
            )
            place = numbers.to(cache.buffer.device)
            self._graphs[key] = _recorded(place, room, n_new, n_slots - shape.depth, state, record)
        graph = self._graphs[key]
        graph.numbers.copy_(numbers, non_blocking=True)
        if graph.states is not None and states is not None:
            graph.states[:, : states.shape[1]] = states
        graph.graph.replay()
        state.n_true = added(state.n_true, columns[0])
        for buffer in buffers:
            buffer.lengths = added(state.n_true, 0 if buffer in state.slots else -1)
        return graph.drafts.clone()

    def _settle(self, buffers: Sequence[KVBuffer], n_slots: int) -> None:
        """Move what a state holds to where the graphs find it, which are forgotten where that takes another place."""
        shapes = [(*buffer.buffer.shape[:4], n_slots, buffer.buffer.shape[5]) for buffer in buffers]
        if (
            not self._homes
            or self._homes[0].shape[4] != n_slots
            or self._homes[0].shape[2] < shapes[0][2]
        ):
            self._graphs.clear()
            self._homes = [
                one.buffer.new_zeros(shape) for one, shape in zip(buffers, shapes, strict=True)
            ]
        for buffer, home in zip(buffers, self._homes, strict=True):
            place = home[:, :, : len(buffer.lengths)]  # a batch that shrinks stays at the beginning
            if buffer.buffer.data_ptr() != place.data_ptr():
                buffer.resize(n_slots, place[0, 0], place.zero_())


def _recorded(
    numbers: Tensor, states: Tensor | None, n_new: int, most: int, state: LayerState, record: Record
) -> _Graph:
    """Record a round that begins with N of these numbers, for up to so many committed tokens."""
    device, (counts, before, *lengths) = numbers.device, numbers[:, n_new:].unbind(1)  # [B] each

    def begun() -> LayerState:
        own = copy.copy(state)
        own.given = numbers[:, :n_new], states, DeviceLengths(n_new, counts)
        own.n_true = DeviceLengths(most - n_new, before)
        own.slots = tuple(copy.copy(buffer) for buffer in state.slots)
        vars(own).update(
            {name: copy.copy(one) for name, one in vars(state).items() if isinstance(one, KVBuffer)}
        )
        for buffer, length in zip(_buffers(own), lengths, strict=True):
            buffer.lengths = DeviceLengths(most - n_new - (buffer not in own.slots), length)
        return own

    graph, drafts = recorded(lambda: record(begun()).tokens, device)
    return _Graph(graph, numbers, states, drafts)


def _buffers(state: LayerState) -> list[KVBuffer]:
    """List the buffers of a state: of its slots, and those that end before the root."""
    return [*state.slots, *(value for value in vars(state).values() if isinstance(value, KVBuffer))]
