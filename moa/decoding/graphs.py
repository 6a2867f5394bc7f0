"""Draft greedy chains with CUDA graphs.

Without a graph, the host launches hundreds of kernels for a chain of five drafts. With a graph, one
launch runs all of them.

Each replay of a graph runs the recorded kernels with the recorded addresses and shapes, and runs no
Python code. Therefore:

- The drafter's caches stay at fixed addresses.
- Attention reads all slots of a cache in every round, because shapes cannot change. A slot holds
  the key and value of one token. A mask hides the slots that are not filled.
- The lengths of the caches change in every round, so they are tensors on the device
  (:class:`.masks.DeviceLengths`) and not Python integers.

Shapes: B rows, N tokens that the drafter processes at the start of a round (right padded), S slots
of a cache.
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

# A function that drafts chains and returns them. Its argument is the drafter's state, which already
# holds the tokens of the round in tensors on the device.
Record = Callable[[LayerState], DraftTree]


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    # [B, N + 2 + n] int64, for a drafter with n cache buffers. Each replay reads this tensor. A row
    # has, in this order: the N tokens of the round; how many of these tokens are not padding; how
    # many committed tokens the caches held before the round; and the length of each of the n
    # buffers before the round.
    numbers: Tensor
    # [B, N, ...], the target's hidden states of the N tokens. Each replay reads them. None if the
    # drafter needs no hidden states.
    states: Tensor | None
    # [B, depth] int64, the drafted tokens. Each replay overwrites them.
    drafts: Tensor


class ChainGraphs:
    """Records and replays the CUDA graphs of a drafter.

    There is one graph for each combination of three things: the number of rows, the shape of the
    drafts, and the buffer of the target's cache.
    """

    def __init__(self) -> None:
        # Cache buffers whose addresses do not change. The graphs read and write these addresses, so
        # the drafter's caches are moved to these buffers. The axes of a buffer are: keys or values,
        # layer, row, KV head, slot, head dim.
        self._homes: list[Tensor] = []
        self._graphs: dict[tuple[Any, ...], _Graph] = {}

    def run(
        self,
        state: LayerState,
        cache: TargetCache,
        committed: Sequence[list[int]],
        shape: TreeShape,
        record: Record,
    ) -> Tensor | None:
        """Draft chains by replaying a CUDA graph. The graph is recorded when it is first needed.

        Args:
            state: the drafter's caches and lengths for all rows.
            cache: the target's cache, whose buffer stays at the same address.
            committed: for each row, the tokens of the prompt and of the answer so far.
            shape: the shape of the chains.
            record: the function that drafts the chains. Its kernels are recorded as the graph.

        Returns:
            Drafts [B, depth] int64. None if no graph can draft this round. For example, the first
            round of a generation feeds the whole prompt, which has too many tokens.
        """
        # N, the number of tokens to feed. The previous round committed at most ``depth + 1``
        # tokens: all drafts of its chain and one bonus token. The caches of some drafters end one
        # token before the root of the previous round. These drafters feed one more token, so N is
        # ``depth + 2``.
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
            numbers_on_device = numbers.to(cache.buffer.device)
            self._graphs[key] = _recorded(
                numbers_on_device, room, n_new, n_slots - shape.depth, state, record
            )
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
        """Move the drafter's caches to buffers at fixed addresses, as the graphs need.

        If these buffers have too few rows, or another number of slots than ``n_slots``, new buffers
        are allocated, and all graphs are dropped.
        """
        shapes = [(*buffer.buffer.shape[:4], n_slots, buffer.buffer.shape[5]) for buffer in buffers]
        if (
            not self._homes
            or self._homes[0].shape[4] != n_slots
            or self._homes[0].shape[2] < shapes[0][2]
        ):
            self._graphs.clear()
            self._homes = [
                source.buffer.new_zeros(shape)
                for source, shape in zip(buffers, shapes, strict=True)
            ]
        for buffer, home in zip(buffers, self._homes, strict=True):
            # If the batch has fewer rows than the fixed buffers, use the first rows of the buffers.
            home_rows = home[:, :, : len(buffer.lengths)]
            if buffer.buffer.data_ptr() != home_rows.data_ptr():
                buffer.resize(n_slots, home_rows[0, 0], home_rows.zero_())


def _recorded(
    numbers: Tensor, states: Tensor | None, n_new: int, most: int, state: LayerState, record: Record
) -> _Graph:
    """Record the drafting of a round as a CUDA graph.

    Args:
        numbers: the tokens and lengths of the round, as in :class:`_Graph`. Replays read this
            tensor, so its address must not change.
        states: the hidden states of the tokens, as in :class:`_Graph`. Replays read this tensor,
            so its address must not change.
        n_new: N, the number of tokens that the drafter processes at the start of a round, with
            padding.
        most: upper bound of the number of committed tokens of a row, including the N new tokens.
        state: the drafter's state, which is copied and not changed.
        record: the function that drafts the chains. Its kernels are recorded as the graph.
    """
    device = numbers.device
    # ``counts`` [B] says how many of the N tokens are not padding, and ``before`` [B] how many
    # committed tokens the caches held before the round. ``lengths`` has one tensor [B] per buffer.
    counts, before, *lengths = numbers[:, n_new:].unbind(1)

    def begun() -> LayerState:
        state_of_graph = copy.copy(state)
        state_of_graph.given = numbers[:, :n_new], states, DeviceLengths(n_new, counts)
        state_of_graph.n_true = DeviceLengths(most - n_new, before)
        state_of_graph.slots = tuple(copy.copy(buffer) for buffer in state.slots)
        vars(state_of_graph).update(
            {
                name: copy.copy(value)
                for name, value in vars(state).items()
                if isinstance(value, KVBuffer)
            }
        )
        for buffer, length in zip(_buffers(state_of_graph), lengths, strict=True):
            buffer.lengths = DeviceLengths(
                most - n_new - (buffer not in state_of_graph.slots), length
            )
        return state_of_graph

    graph, drafts = recorded(lambda: record(begun()).tokens, device)
    return _Graph(graph, numbers, states, drafts)


def _buffers(state: LayerState) -> list[KVBuffer]:
    """List the cache buffers of a state.

    The list starts with the buffers in ``state.slots``. All other buffers of the state follow.
    Between rounds, a buffer in ``state.slots`` contains the committed tokens up to and including
    the root. The other buffers end one token before the root.
    """
    return [*state.slots, *(value for value in vars(state).values() if isinstance(value, KVBuffer))]
