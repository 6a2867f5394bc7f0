"""Drafters that are fed the next token with the feature before it, then with their own features: EAGLE and EAGLE-3.

Shapes: B batch, T tokens, S slots (T - 1), Q queries, E target width, K fused layers, b nodes of one level.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...errors import DrafterError
from ..nn import masks
from ..nn.layers import DecoderBlock, Rotary
from ..targets.bundle import FrozenTarget
from ..targets.cache import KVSource
from .base import DraftedFeatures, Drafter, DraftLevel
from .causal_layers import LayerCaches
from .rounds import Draws, at_queries, loss_queries
from .training import TrainingInputs


class FeatureState(LayerCaches):
    """The drafter's caches of B rows while decoding; committed slots are made from the target's own hidden states.

    Attributes:
        fresh: per row the target's states [n, E or K * E] of the committed positions from ``n_true`` on.
        last: per row the newest of those that were fed, [1, E or K * E]; None before the first.
    """

    def __init__(self, n_rows: int, n_layers: int) -> None:
        super().__init__(n_rows, n_layers)
        self.fresh: list[list[Tensor]] = [[] for _ in range(n_rows)]
        self.last: list[Tensor | None] = [None] * n_rows

    @override
    def select_rows(self, rows: Sequence[int]) -> None:
        super().select_rows(rows)
        self.fresh = [self.fresh[row] for row in rows]
        self.last = [self.last[row] for row in rows]

    def take_fresh(self) -> list[Tensor]:
        """Hand over the states of the slots to feed; where there is none, those of the root's slot once more."""
        found = []
        for row, parts in enumerate(self.fresh):
            last = self.last[row]
            if not parts and last is None:
                raise DrafterError("nothing of the target has been observed: give its states before drafting.")
            if not parts and last is not None:
                self.n_true[row] -= 1
                parts = [last]
            found.append(torch.cat(parts))
        self.fresh, self.last = [[] for _ in found], [states[-1:] for states in found]
        return found

    @override
    def take_rows(self, rows: Sequence[int]) -> Self:
        taken = super().take_rows(rows)
        taken.fresh = [list(self.fresh[row]) for row in rows]
        taken.last = [self.last[row] for row in rows]
        return taken

    @override
    def add_rows(self, other: Self) -> None:
        super().add_rows(other)
        self.fresh = self.fresh + other.fresh
        self.last = self.last + other.last


class FeatureDrafter(Drafter):
    """What EAGLE and EAGLE-3 share: layers fed with the token at t+1 and the feature of t, then with their outputs."""

    rotary: Rotary

    @property
    @abstractmethod
    def blocks(self) -> list[DecoderBlock]:
        """The decoder layers in order; the first one takes what :meth:`join` gives."""

    @abstractmethod
    def join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Make the layers' input from embeddings of tokens t+1 and features of tokens t, each [..., E]."""

    def target_states(self, inputs: TrainingInputs) -> Tensor:
        """Pick what the drafter sees of the target, as :meth:`observe` gets it: here the last hidden state."""
        return inputs.hidden

    def true_features(self, states: Tensor) -> Tensor:
        """Turn :meth:`target_states` into features [..., E] in place of the drafter's own; here they are the same."""
        return states

    def fed_back(self, outputs: Tensor) -> Tensor:
        """Turn outputs of the layers [..., E] into the features that are fed back; here they are the same."""
        return outputs

    @override
    def drafted_features(self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws) -> DraftedFeatures:
        # All rounds at once, step by step: each step is fed with the features of the one before.
        drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound, draws.offset)
        drafted[:, 0] = False
        context = masks.last_context(drafted)[:, 1:]  # [B, S]: the last slot of the target's that a query sees
        slots = torch.arange(context.shape[1], device=context.device)
        step = torch.where(drafted[:, 1:], slots - context, -1)  # 0 for the root's slot, -1 for none
        embeddings = frozen.embed(inputs.tokens[:, 1:])
        joined = self.join(embeddings, self.true_features(self.target_states(inputs)[:, :-1].to(embeddings.dtype)))
        true_keys_values, features = [], joined
        rotation, causal = self.rotary(slots[None, :]), (slots[None, :] <= slots[:, None])[None]
        for block in self.blocks:
            true_keys_values.append(block.keys_values(features, rotation))
            features = block(features, rotation, *true_keys_values[-1], causal)
        features = self.fed_back(features)
        own_keys_values = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in true_keys_values]
        rows = torch.arange(len(step), device=step.device)[:, None]
        for index in range(1, int(step.max()) + 1):
            queries, valid = loss_queries(step == index)
            limit = context.gather(1, queries)[..., None]
            seen = torch.cat((slots <= limit, (slots > limit) & (slots <= queries[..., None])), dim=-1)  # [B, Q, 2S]
            x = self.join(at_queries(embeddings, queries), at_queries(features, (queries - 1).clamp(min=0)))
            at = rows.expand_as(queries)[valid], queries[valid]
            rotation = self.rotary(queries)
            for block, true, own in zip(self.blocks, true_keys_values, own_keys_values, strict=True):
                for buffer, new in zip(own, block.keys_values(x, rotation), strict=True):
                    buffer[at[0], :, at[1]] = new.transpose(1, 2)[valid].to(buffer.dtype)
                keys, values = (torch.cat(pair, dim=2) for pair in zip(true, own, strict=True))
                x = block(x, rotation, keys, values, seen)
            features[at] = self.fed_back(x)[valid].to(features.dtype)
        queries, valid = loss_queries(drafted)
        return DraftedFeatures(queries, valid, at_queries(features, (queries - 1).clamp(min=0)))

    @override
    def new_state(self, n_rows: int) -> FeatureState:
        return FeatureState(n_rows, len(self.blocks))

    @override
    def observe(self, state: FeatureState, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        for row, indices in enumerate(kept):
            state.fresh[row].append(hidden[row, torch.tensor(list(indices), device=hidden.device)])

    @override
    def draft_root(
        self, state: FeatureState, frozen: FrozenTarget, committed: Sequence[list[int]], cache: KVSource
    ) -> Tensor:
        # Slots up to the root's are made from the target's own states, also those of accepted drafts, made anew.
        device = frozen.lm_head_weight.device
        fresh = state.take_fresh()
        counts = [len(hidden) for hidden in fresh]
        tokens = torch.zeros(len(fresh), max(counts), dtype=torch.int64, device=device)
        for row, (start, count) in enumerate(zip(state.n_true, counts, strict=True)):
            tokens[row, :count] = torch.tensor(committed[row][start + 1 : start + 1 + count])
        hidden = nn.utils.rnn.pad_sequence(fresh, batch_first=True).to(self.dtype)  # [B, n, E or K * E]
        x = self.join(frozen.embed(tokens), self.true_features(hidden))
        return self.fed_back(state.feed_committed(self.blocks, self.rotary, x, counts))

    @override
    def draft_level(self, state: FeatureState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource) -> Tensor:
        x = self.join(frozen.embed(level.tokens), level.parent_features)
        return self.fed_back(state.feed_level(self.blocks, self.rotary, x, level.seen, level.depth))
