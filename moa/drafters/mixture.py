"""Mixture of Attentions drafter (Zimmer et al., ICLR 2025, arXiv 2410.03804): training forward and decoding step.

Shapes: B batch, T tokens, Q drafted positions (queries), L target layers, H_kv target KV heads, d target head dim,
D = 2 * H_kv * d, E target width, V vocabulary, N target layers used for inference, b nodes of one level, n tokens of
one call.

    KV of all layers [B, T, L, D] -> layer self-attention -> mean over layers -> linear -> memory [B, T, E]
    tokens -> embeddings -> causal self-attention -> cross-attention to the memory
           -> (last N target layers, final norm) -> LM head

Training runs many draft rounds at once: position i sees the memory up to its last context position s(i), exactly what a
draft step sees after the verification that ended at s(i). Both paths call the same blocks. In a text of nine tokens
whose response begins at 3, with a step bound of 4, tokens 5, 6, 7 are one round: 0 to 4 are verified, 5 is the root::

    position                                3      5      6      7
    draft step of decoding               root   root  level 1  level 2
    self-attention: embeddings of        0..3   0..5   0..6   0..7      in a staircase row 3, 5, 5..6, 5..7
    cross-attention: memory of           0..2   0..4   0..4   0..4
      and, where it sees drafts, of         3      5   5..6   5..7      what self-attention made of them
    target layers: the target's KV of    0..2   0..4   0..4   0..4
      and the drafter's own KV of           3      5   5..6   5..7
    predicts token                          4      6      7      8

With ``cross_attention_drafts``, which is not the paper's, the cross-attention sees the drafts of the round behind the
memory; in the paper a draft knows those before it only as embeddings, and the further from the last verified position,
the less it agrees with the target. What the memory is made of stands in :mod:`.layer_memory`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from ...errors import DrafterError
from ..nn import losses, masks
from ..nn.kv import KVBuffer, positions_behind
from ..nn.layers import DecoderBlock, Rotary, Rotation
from ..targets.bundle import FrozenTarget
from ..targets.cache import ContextCache, KVSource
from .base import DraftedFeatures, Drafter, DraftLevel
from .layer_memory import LayerMemory, read_kv_layers
from .mixture_sizes import MoASizes
from .rounds import Draws, Rounds, at_queries
from .sizes import DrafterSizes
from .target_layers import drafted_target_layers, mixed_target_layers
from .training import LossTerms, Reads, TrainingInputs, TrainingStep, distillation, loss_scale


class MoADraftState:
    """The drafter's caches of B rows while decoding.

    Attributes:
        self_attention: keys and values of the verified tokens, then of this round's drafts in the order of feeding.
        memory: cross-attention keys and values of the positions that have target KV; behind them, where the drafter
            looks at them, of this round's drafts.
        drafts_in_memory: whether the memory gets the drafts too.
        n_fed: tokens of this round's tree that were fed, the root included.
    """

    def __init__(self, n_rows: int = 1, drafts_in_memory: bool = False) -> None:
        self.self_attention = KVBuffer(n_rows)
        self.memory = KVBuffer(n_rows)
        self.drafts_in_memory = drafts_in_memory
        self.n_fed = 0

    def forget_drafts(self) -> None:
        """End the round: keep the verified positions and, in self-attention, the root, which has been verified."""
        if not self.n_fed:
            return
        # Behind the last root lie nodes in the order of feeding, accepted ones among others. Encoding the accepted
        # ones again is two projections of a few tokens, cheaper than finding out which are in place already.
        self.self_attention.crop([length - self.n_fed + 1 for length in self.self_attention.lengths])
        if self.drafts_in_memory:
            self.memory.crop([length - self.n_fed for length in self.memory.lengths])
        self.n_fed = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.self_attention.select_rows(rows)
        self.memory.select_rows(rows)

    def take_rows(self, rows: Sequence[int]) -> "MoADraftState":
        """Copy these rows, in this order, to a state of their own."""
        self.forget_drafts()
        taken = MoADraftState(0, self.drafts_in_memory)
        taken.self_attention = self.self_attention.take_rows(rows)
        taken.memory = self.memory.take_rows(rows)
        return taken

    def add_rows(self, other: "MoADraftState") -> None:
        """Append the rows of another state."""
        for state in (self, other):  # their rounds may be of different lengths
            state.forget_drafts()
        self.self_attention.add_rows(other.self_attention)
        self.memory.add_rows(other.memory)


class _Fed(NamedTuple):
    """Tokens that a draft step feeds, and what they see."""

    positions: Tensor
    """[B, b] int64."""
    rotation: Rotation
    before: list[int]
    """Verified tokens of each row."""
    seen: Tensor
    """[B, b, n] bool, which of the tokens fed in this round each of them sees."""
    mask: Tensor | None
    """[B, b, S] bool, ``seen`` behind the verified tokens; None where there is nothing to mask."""


@dataclass
class DrafterOutputs:
    """Outputs of the training forward at the queries [B, Q]."""

    self_attention: Tensor
    """[B, Q, E]."""
    cross_attention: Tensor
    """[B, Q, E]."""
    entering: Tensor
    """[B, Q, E], what enters the last N layers: the cross-attention's output."""
    leaving: Tensor
    """[B, Q, E], what leaves them, before the final norm; equals ``entering`` when N = 0."""
    features: Tensor
    """[B, Q, E], what the LM head sees."""


class MoADrafter(LayerMemory, Drafter):
    """The trained part: layer self-attention, projection, self-attention, cross-attention."""

    kind: ClassVar[str] = MoASizes.kind
    config_class: ClassVar[type[DrafterSizes]] = MoASizes
    config: MoASizes

    def __init__(self, config: MoASizes) -> None:
        super().__init__()
        self.config = config
        self.self_attention = DecoderBlock(config.self_attention)
        self.cross_attention = DecoderBlock(config.cross_attention)
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_position_embeddings)
        self.build_memory()

    @classmethod
    @override
    def reads(cls, n_layers: int, settings: Any) -> Reads:
        n_last = settings.target_layer_inference
        layers = read_kv_layers(settings, n_layers)
        if n_last > 1 and layers is not None:  # those that target layer inference attends to, besides the last
            layers = None if settings.layer_attention else tuple(range(-n_last, 0))
        return Reads(True, layers, n_layers - n_last - 1 if n_last else None)

    @classmethod
    @override
    def loss_positions(cls, response_mask: Tensor, draws: Draws) -> Tensor:
        return draws.position_weights(response_mask)

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch (paper section 3; official ``train/moa_spec.py``, lines 107-275)."""
        rounds = Rounds.packed(step.draws, step.inputs.response_mask.bool())
        return self.losses(frozen, step, rounds, self._forward(frozen, step.inputs, rounds))

    def forward(self, frozen: FrozenTarget, tokens: Tensor, kv: Tensor, rounds: Rounds) -> DrafterOutputs:
        """Run many draft rounds at once, fed with the text.

        Args:
            frozen: target weights, with at least N layers.
            tokens: [B, T] int64, right padded.
            kv: [B, T, L, D], packed target KV.
        """
        n_tokens = tokens.shape[1]
        positions = torch.arange(n_tokens, device=tokens.device)[None, :]  # [1, T]
        queries, context = rounds.queries, rounds.context

        # Layer self-attention
        memory = self.encode_memory(kv, positions)  # [B, T, E]

        # Self-attention
        rotation = self.rotary(positions)
        query_rotation = self.rotary(queries)
        embeddings = frozen.embed(tokens)
        keys, values = self.self_attention.keys_values(embeddings, rotation)
        self_mask = masks.self_attention_mask(queries, context, rounds.staircase, n_tokens)
        x1 = self.self_attention(at_queries(embeddings, queries), query_rotation, keys, values, self_mask)  # [B, Q, E]

        # Cross-attention
        verified = self.cross_attention.keys_values(memory, rotation)
        if self.config.cross_attention_drafts:
            behind = partial(_concatenated, verified)
            mask = masks.round_mask(queries, context, rounds.pass_index, n_tokens)
            x2 = self.cross_attention.attend_behind(x1, query_rotation, behind, mask)
        else:
            mask = masks.cross_attention_mask(context, n_tokens)
            x2 = self.cross_attention(x1, query_rotation, *verified, mask)

        # Target layers
        if not self.config.target_layer_inference:
            return DrafterOutputs(x1, x2, x2, x2, x2)
        leaving = mixed_target_layers(frozen, x2, kv, rounds)
        return DrafterOutputs(x1, x2, x2, leaving, frozen.norm(leaving))

    def losses(self, frozen: FrozenTarget, step: TrainingStep, rounds: Rounds, outputs: DrafterOutputs) -> LossTerms:
        """Compare features with the target's at the loss positions of some rounds.

        total = forward_kl weight * forward_kl + feature weight * feature, where with target layer inference the feature
        term is the mean of the losses after and before the last N layers.
        """
        inputs, n_layers = step.inputs, self.config.target_layer_inference
        if n_layers and inputs.entering_hidden is None:
            layer = self.config.n_layers - n_layers - 1
            raise DrafterError(f"target layer inference needs the hidden state after layer {layer}.")
        valid = rounds.weights > 0
        weights_of = rounds.weights[valid]  # [P]
        scale = weights_of * loss_scale(float(weights_of.sum()), step.denominator)
        features = outputs.features[valid]  # [P, E]
        hidden = at_queries(inputs.hidden, rounds.queries)[valid]  # [P, E]
        kl, feature = distillation(frozen, features, hidden, scale, step.weights.divergence)
        entering, feature_term = None, feature
        if n_layers and inputs.entering_hidden is not None:
            goal = at_queries(inputs.entering_hidden, rounds.queries)[valid]
            entering = (losses.feature_loss(outputs.entering[valid], goal) * scale).sum()
            feature_term = 0.5 * feature + 0.5 * entering
        total = step.weights.forward_kl * kl + step.weights.feature * feature_term
        return LossTerms(total, kl, feature, len(features), entering)

    @override
    def drafted_features(self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws) -> DraftedFeatures:
        rounds = Rounds.packed(draws, inputs.response_mask)
        return DraftedFeatures(rounds.queries, rounds.drafted, self._forward(frozen, inputs, rounds).features)

    def _forward(self, frozen: FrozenTarget, inputs: TrainingInputs, rounds: Rounds) -> "DrafterOutputs":
        if inputs.kv is None:
            raise DrafterError("Mixture of Attentions needs the target's keys and values; read them with the batch.")
        outputs: DrafterOutputs = self(frozen, inputs.tokens, inputs.kv, rounds)
        return outputs

    @override
    def new_state(self, n_rows: int) -> MoADraftState:
        return MoADraftState(n_rows, self.config.cross_attention_drafts)

    @override
    def draft_root(
        self, state: MoADraftState, frozen: FrozenTarget, committed: Sequence[list[int]], cache: KVSource
    ) -> Tensor:
        state.forget_drafts()
        n_verified = [len(tokens) - 1 for tokens in committed]
        self._remember(state, n_verified, cache)
        # The root is fed anew in each round: where it stands, the cache may hold a draft that was rejected there.
        own = state.self_attention
        own.crop(n_verified)
        fresh = [tokens[n:] for tokens, n in zip(committed, own.lengths, strict=True)]
        counts = [len(tokens) for tokens in fresh]
        device = frozen.lm_head_weight.device
        tokens = torch.tensor([row + [0] * (max(counts) - len(row)) for row in fresh], device=device)  # [B, n]
        positions = positions_behind(own.lengths, max(counts), device)
        embeddings = frozen.embed(tokens)
        own.append(*self.self_attention.keys_values(embeddings, self.rotary(positions)), counts)
        state.n_fed = 1
        if len(set(counts)) == 1:
            root, at = embeddings[:, -1:], positions[:, -1:]
        else:
            last = torch.tensor(counts, device=device)[:, None] - 1  # [B, 1]
            root, at = at_queries(embeddings, last), positions.expand(len(counts), -1).gather(1, last)
        seen = torch.ones(len(counts), 1, 1, dtype=torch.bool, device=device)
        mask = None if len(counts) == 1 else masks.tree_mask(n_verified, seen)
        fed = _Fed(at, self.rotary(at), n_verified, seen, mask)
        x = self.self_attention(root, fed.rotation, *own.view(), mask)
        return self._attend_to_target(state, frozen, x, fed, cache)

    @override
    def draft_level(self, state: MoADraftState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource) -> Tensor:
        before = [length - state.n_fed for length in state.self_attention.lengths]
        first = torch.tensor(before, device=level.tokens.device)[:, None] + level.depth
        positions = first.expand(-1, level.tokens.shape[1])  # [B, b]: a level stands at one position
        state.n_fed += level.tokens.shape[1]
        is_chain_alone = len(before) == 1 and state.n_fed == level.depth + 1
        mask = None if is_chain_alone else masks.tree_mask(before, level.seen)
        fed = _Fed(positions, self.rotary(positions), before, level.seen, mask)
        embeddings = frozen.embed(level.tokens)
        x = self.self_attention.attend_behind(embeddings, fed.rotation, state.self_attention.append, mask)
        return self._attend_to_target(state, frozen, x, fed, cache)

    def extend_memory(self, state: MoADraftState, kv: Tensor, counts: Sequence[int] | None = None) -> None:
        """Encode newly verified positions and append them to the cross-attention cache.

        Args:
            kv: [B, n, L, D], packed target KV of the next n positions of each row.
            counts: how many of the n positions of each row are real; None for all.
        """
        positions = positions_behind(state.memory.lengths, kv.shape[1], kv.device)
        self._append_memory(state, self.encode_memory(kv, positions), positions, counts)

    def _append_memory(
        self, state: MoADraftState, memory: Tensor, positions: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        """Put memory [B, n, E] of some positions behind the cross-attention cache."""
        state.memory.append(*self.cross_attention.keys_values(memory, self.rotary(positions)), counts)

    @property
    @override
    def context_width(self) -> int | None:
        return self.sent_width + self.config.target_layer_inference * self.config.kv_width

    @property
    @override
    def context_needs_kv(self) -> bool:
        return True

    @override
    def _make_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        assert kv is not None
        own = self.sent_memory(kv, positions)
        n_layers = self.config.target_layer_inference
        layers = kv[:, kv.shape[1] - n_layers :].flatten(1)  # [n, N * D]
        return torch.cat((own, layers.to(own.dtype)), dim=1)

    @override
    def _take_context(self, state: MoADraftState, cache: ContextCache, context: Tensor) -> None:
        state.forget_drafts()
        kv_width, n_layers = self.config.kv_width, self.config.target_layer_inference
        layers = context[:, context.shape[1] - n_layers * kv_width :]
        self._extend_memory_by(state, context[None])
        n_kv_heads = kv_width // (2 * self.config.head_dim)
        cache.extend(len(context), layers.unflatten(1, (n_layers, kv_width)) if n_layers else None, n_kv_heads)

    @override
    def reuse_context(
        self, state: MoADraftState, contexts: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        state.forget_drafts()
        rows = zip(state.memory.lengths, starts, counts, strict=True)
        fitting = [count if length == start else 0 for length, start, count in rows]
        if any(fitting):
            self._extend_memory_by(state, contexts, fitting)

    def _extend_memory_by(self, state: MoADraftState, contexts: Tensor, counts: Sequence[int] | None = None) -> None:
        """Append the memory of the next n positions of each row, from their contexts [B, n, W]."""
        memory = self.received_memory(contexts[..., : self.sent_width])
        positions = positions_behind(state.memory.lengths, contexts.shape[1], contexts.device)
        self._append_memory(state, memory, positions, counts)

    def _remember(self, state: MoADraftState, n_verified: Sequence[int], cache: KVSource) -> None:
        """Bring the memory up to the verified positions of each row."""
        counts = [n - length for n, length in zip(n_verified, state.memory.lengths, strict=True)]
        if max(counts):
            first_layer = 0 if self.config.layer_attention else self.config.n_layers - 1
            kv = cache.packed(state.memory.lengths, max(counts), first_layer)
            self.extend_memory(state, kv.to(self.dtype), counts)

    def _attend_to_target(
        self, state: MoADraftState, frozen: FrozenTarget, x: Tensor, fed: _Fed, cache: KVSource
    ) -> Tensor:
        """Turn what self-attention gave for fed tokens, x [B, b, E], into their features [B, b, E]."""
        if self.config.cross_attention_drafts:
            x = self.cross_attention.attend_behind(x, fed.rotation, state.memory.append, fed.mask)
        else:
            memory_mask = None
            if len(set(state.memory.lengths)) > 1:
                slots = torch.arange(max(state.memory.lengths), device=x.device)
                memory_mask = (slots < torch.tensor(state.memory.lengths, device=x.device)[:, None])[:, None, :]
            x = self.cross_attention(x, fed.rotation, *state.memory.view(), mask=memory_mask)
        n_layers = self.config.target_layer_inference
        if not n_layers:
            return x
        by_window = {
            window: fed.mask if window is None else masks.tree_mask(fed.before, fed.seen, window)
            for window in set(frozen.windows)
        }
        n_slots = max(fed.before) + state.n_fed
        views = [cache.layer_view(layer, n_slots) for layer in range(self.config.n_layers)[-n_layers:]]
        x = drafted_target_layers(frozen, x, fed.positions, views, fed.before, state.n_fed, by_window)
        features: Tensor = frozen.norm(x)
        return features


def _concatenated(first: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Put keys and values [B, H_kv, S, d] behind the first ones."""
    return torch.cat((first[0], keys), dim=2), torch.cat((first[1], values), dim=2)
