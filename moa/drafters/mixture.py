"""Mixture of Attentions drafter (Zimmer et al., ICLR 2025, arXiv 2410.03804): training forward and decoding step.

Shapes: B batch, T tokens, Q drafted positions (queries), L target layers, H_kv target KV heads, d target head dim,
D = 2 * H_kv * d, E target width, V vocabulary, N target layers used for inference.

    KV of all layers [B, T, L, D] -> layer self-attention -> mean over layers -> linear -> memory [B, T, E]
    tokens -> embeddings -> causal self-attention -> cross-attention to the memory
           -> (last N target layers, final norm) -> LM head

With ``cross_attention_drafts`` the cross-attention sees, behind the memory, what self-attention made of the round's
drafts. In the paper's form a draft knows those before it only as embeddings, and the further from the last verified
position, the less it agrees with the target.

With several ``layer_groups`` the mean of each goes into the linear layer on its own: one mean has D numbers for all
that L layers know, fewer than E in targets with few KV heads.

With ``unrotated_keys`` the memory is made from the target's keys as they were before RoPE. Layer self-attention looks
at one position at a time and isn't told which, so that after RoPE the same content looks different everywhere.

Training runs many draft rounds at once: position i sees the memory up to its last context position s(i), exactly what a
draft step sees after the verification that ended at s(i). Both paths call the same blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..errors import DrafterError
from ..nn import losses, masks
from ..nn.kv import KVBuffer, positions_behind, rotate_packed_keys
from ..nn.layers import DecoderBlock, Rotary, Rotation
from ..target.bundle import FrozenTarget
from ..target.cache import TargetCache
from .base import DraftedFeatures, Drafter
from .mixture_sizes import MoASizes
from .rounds import Draws, Rounds, at_queries
from .sizes import DrafterSizes
from .target_layers import drafted_target_layers, mixed_target_layers, recomputed_target_layers
from .training import DEFAULT_WEIGHTS, LossTerms, LossWeights, TrainingInputs, distillation, loss_scale

TargetLayersKV = Callable[[int], list[tuple[Tensor, Tensor]]]
"""n_slots -> per layer used for inference, keys and values [B, H_kv, n_slots, d]: views of the target's cache, verified
positions first, writable behind them."""

_MOST_POSITIONS = 1 << 13
"""Whose layers attend to each other at once. CUDA kernels of attention take no more than 65,535 sequences, and a long
prompt would need L times its length in rows of the MLP's width."""


class MoADraftState:
    """The drafter's caches of B rows while decoding.

    Attributes:
        self_attention: of the verified tokens, then of this round's drafts in the order of feeding.
        memory: cross-attention keys and values of the positions that have target KV; behind them, where the drafter
            looks at them, of this round's drafts.
        n_fed: tokens of this round's tree that were fed, the root included.
    """

    def __init__(self, n_rows: int = 1) -> None:
        self.self_attention = KVBuffer(n_rows)
        self.memory = KVBuffer(n_rows)
        self.n_fed = 0

    def forget_drafts(self, in_memory: bool) -> None:
        """End the round: keep the verified positions and, of self-attention, the root, which is verified by now.

        Args:
            in_memory: the memory has the drafts too.
        """
        if not self.n_fed:
            return
        # Behind the last root lie nodes in the order of feeding, those accepted among others. Encoding the accepted
        # ones anew is two projections of a few tokens; which of them stand where they belong is not worth asking.
        self.self_attention.crop([length - self.n_fed + 1 for length in self.self_attention.lengths])
        if in_memory:
            self.memory.crop([length - self.n_fed for length in self.memory.lengths])
        self.n_fed = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.self_attention.select_rows(rows)
        self.memory.select_rows(rows)


@dataclass
class DrafterOutputs:
    """What the training forward gives, for the queries [B, Q] it was asked for."""

    memory: Tensor
    """[B, T, E], the projection that cross-attention attends to."""
    self_attention: Tensor
    """[B, Q, E]."""
    cross_attention: Tensor
    """[B, Q, E]; with target layer inference this is regressed onto the hidden state that enters the last N layers."""
    target_layers_input: Tensor
    """[B, Q, E]; differs from cross_attention only under the official overwriting of context positions."""
    target_layers_output: Tensor
    """[B, Q, E], before the final norm; the cross-attention itself when N = 0."""
    features: Tensor
    """[B, Q, E], what the LM head sees."""


class MoADrafter(Drafter):
    """The trained part: layer self-attention, projection, self-attention, cross-attention."""

    kind: ClassVar[str] = MoASizes.kind
    config_class: ClassVar[type[DrafterSizes]] = MoASizes
    training_options: ClassVar[frozenset[str]] = frozenset(
        {
            "step_bound", "step_bound_min", "step_bound_max", "on_policy", "teacher_forced_weight", "staircase",
            "feature_weight", "official_quirks",
        }
    )  # fmt: skip
    config: MoASizes

    def __init__(self, config: MoASizes) -> None:
        super().__init__()
        self.config = config
        self.self_attention = DecoderBlock(config.self_attention)
        self.cross_attention = DecoderBlock(config.cross_attention)
        if config.layer_attention:
            self.layer_self_attention = DecoderBlock(config.layer_self_attention)
        n_means = config.layer_groups if config.layer_attention else 1
        self.kv_to_hidden = nn.Linear(n_means * config.kv_width, config.hidden_size, bias=True)
        rope = config.rope_parameters, config.max_position_embeddings
        self.rotary = Rotary(config.head_dim, *rope)
        self.layer_rotary = Rotary(config.layer_attention_head_dim, *rope)

    @classmethod
    def needs(cls, n_layers: int, target_layer_inference: int) -> dict[str, str]:
        """KV of all layers, the last hidden state and, for N > 0, the one that enters the last N layers."""
        entering = {}
        if target_layer_inference:
            entering["entering_hidden"] = f"hidden/layer_{n_layers - target_layer_inference - 1}"
        return {"kv": "kv", "hidden": "hidden/last"} | entering

    @classmethod
    def layers_read(cls, target_layer_inference: int, layer_attention: bool) -> tuple[int, ...] | None:
        """All, or without layer self-attention the last one and those that target layer inference attends to."""
        return None if layer_attention else tuple(range(-max(1, target_layer_inference), 0))

    @classmethod
    def loss_positions(cls, response_mask: Tensor, draws: Draws, official: bool) -> Tensor:
        """Drafted positions by their weight; all of the response in the official form."""
        return response_mask.bool() if official else draws.position_weights(response_mask)

    def objective(
        self,
        frozen: FrozenTarget,
        inputs: TrainingInputs,
        draws: Draws,
        weights: LossWeights = DEFAULT_WEIGHTS,
        official: bool = False,
        denominator: float | None = None,
    ) -> LossTerms:
        """Loss of one mini-batch, see :func:`objective.moa_objective`."""
        return moa_objective(self, frozen, inputs, draws, weights, official, denominator)[0]

    def drafted_features(self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws) -> DraftedFeatures:
        """The training forward, which is bounded as draft rounds are."""
        if inputs.kv is None:
            raise DrafterError("Mixture of Attentions needs the target's keys and values; read them with the batch.")
        rounds = Rounds.packed(draws, inputs.response_mask)
        outputs = self(frozen, inputs.tokens, inputs.kv, rounds)
        return DraftedFeatures(rounds.queries, rounds.drafted, outputs.features)

    def encode_layers(self, kv: Tensor) -> Tensor:
        """Layer self-attention, bidirectional, RoPE position = layer index: [B, T, L, D] -> [B, T, L, D]."""
        out = self.layer_self_attention.attend_self(kv.flatten(0, 1), self._layer_rotation(kv), mask=None)
        return out.unflatten(0, kv.shape[:2])

    def encode_memory(self, kv: Tensor, positions: Tensor | None = None) -> Tensor:
        """What cross-attention attends to: kv_to_hidden of the mean of :meth:`encode_layers`.

        With several ``layer_groups`` it is kv_to_hidden of their means side by side, without layer self-attention of
        the last layer; with ``unrotated_keys`` the keys are those before RoPE.

        Args:
            kv: [B, T, L, D]; fewer layers will do without layer self-attention, the last one being there.
            positions: [B or 1, T] int64, where the keys of ``kv`` were rotated to; None for 0 to T - 1.

        Returns:
            [B, T, E].
        """
        if not self.config.layer_attention:
            kv = kv[:, :, -1:]
        if positions is None:
            positions = torch.arange(kv.shape[1], device=kv.device)[None, :]
        rotation = self._layer_rotation(kv)
        summaries = []  # [n, G * D] each, G groups of layers
        at = positions.expand(len(kv), -1).flatten().split(_MOST_POSITIONS)
        for part, where in zip(kv.flatten(0, 1).split(_MOST_POSITIONS), at, strict=True):
            if self.config.unrotated_keys:
                part = rotate_packed_keys(part, self.rotary.inverse(where))
            if self.config.layer_attention:
                means = self.layer_self_attention.attend_self_means(part, rotation, self.config.layer_groups)
                summaries.append(means.flatten(1))
            else:
                summaries.append(part[:, 0])
        summary = summaries[0] if len(summaries) == 1 else torch.cat(summaries)
        return self.kv_to_hidden(summary).unflatten(0, kv.shape[:2])

    def _layer_rotation(self, kv: Tensor) -> Rotation:
        return self.layer_rotary(torch.arange(kv.shape[2], device=kv.device)[None, :])

    def forward(
        self,
        frozen: FrozenTarget,
        tokens: Tensor,
        kv: Tensor,
        rounds: Rounds,
        overwrite_context: Tensor | None = None,
    ) -> DrafterOutputs:
        """Teacher-forced forward of many draft rounds.

        Args:
            frozen: target pieces, with at least N layers.
            tokens: [B, T] int64, right padded.
            kv: [B, T, L, D], packed target KV.
            rounds: positions to compute features for, and what they see.
            overwrite_context: [B, T, E] target hidden state that enters the last N layers. Given: the official form of
                target layer inference, where context positions are overwritten with it and the layers recompute all
                keys from their input (needs :meth:`Rounds.everywhere`). None: drafted positions attend to the target's
                own KV of verified positions, as in decoding.

        Returns:
            All intermediates, see :class:`DrafterOutputs`.
        """
        n_tokens = tokens.shape[1]
        positions = torch.arange(n_tokens, device=tokens.device)[None, :]  # [1, T]
        queries, context = rounds.queries, rounds.context

        memory = self.encode_memory(kv, positions)  # [B, T, E]

        rotation = self.rotary(positions)
        query_rotation = self.rotary(queries)
        embeddings = frozen.embed(tokens)
        query_embeddings = embeddings.gather(1, queries[..., None].expand(-1, -1, embeddings.shape[-1]))  # [B, Q, E]
        keys, values = self.self_attention.keys_values(embeddings, rotation)
        self_mask = masks.self_attention_mask(queries, context, rounds.staircase, n_tokens)
        x1 = self.self_attention(query_embeddings, query_rotation, keys, values, self_mask)

        verified = self.cross_attention.keys_values(memory, rotation)
        if self.config.cross_attention_drafts:
            behind = partial(_concatenated, verified)
            mask = masks.round_mask(queries, context, rounds.pass_index, n_tokens)
            x2 = self.cross_attention.attend_behind(x1, query_rotation, behind, mask)
        else:
            mask = masks.cross_attention_mask(context, n_tokens)
            x2 = self.cross_attention(x1, query_rotation, *verified, mask)

        entering = x2
        if self.config.target_layer_inference and overwrite_context is not None:
            entering = torch.where(rounds.drafted[..., None], x2, overwrite_context.to(x2.dtype))
            leaving = recomputed_target_layers(frozen, entering, positions)
        elif self.config.target_layer_inference:
            leaving = mixed_target_layers(frozen, entering, kv, rounds)
        else:
            leaving = x2
        features = frozen.norm(leaving) if self.config.target_layer_inference else leaving
        return DrafterOutputs(memory, x1, x2, entering, leaving, features)

    def new_state(self, n_rows: int) -> MoADraftState:
        """Empty caches of B rows."""
        return MoADraftState(n_rows)

    def root_features(
        self, state: MoADraftState, frozen: FrozenTarget, committed: Sequence[list[int]], cache: TargetCache
    ) -> Tensor:
        """Encode the target KV that came since the last round; feed the tokens not yet fed, up to the root."""
        state.forget_drafts(self.config.cross_attention_drafts)
        n_verified = [len(tokens) - 1 for tokens in committed]
        counts = [n - length for n, length in zip(n_verified, state.memory.lengths, strict=True)]
        if max(counts):
            first_layer = 0 if self.config.layer_attention else self.config.n_layers - 1
            kv = cache.packed(state.memory.lengths, max(counts), first_layer)
            self.extend_memory(state, kv.to(self.dtype), counts)
        state.self_attention.crop(n_verified)
        fresh = [tokens[n:] for tokens, n in zip(committed, state.self_attention.lengths, strict=True)]
        n_fresh = [len(tokens) for tokens in fresh]
        padded = torch.tensor(
            [tokens + [0] * (max(n_fresh) - len(tokens)) for tokens in fresh], device=frozen.lm_head_weight.device
        )
        same = len(set(n_fresh)) == 1
        return self.draft_root(state, frozen, padded, self._layers_kv(cache), None if same else n_fresh)

    def level_features(
        self,
        state: MoADraftState,
        frozen: FrozenTarget,
        tokens: Tensor,
        parent_features: Tensor,
        seen: Tensor,
        level: int,
        cache: TargetCache,
    ) -> Tensor:
        """Feed the nodes of one level; what was drafted before them is in the caches."""
        return self.draft_level(state, frozen, tokens, seen, level, self._layers_kv(cache))

    def _layers_kv(self, cache: TargetCache) -> TargetLayersKV:
        layers = range(self.config.n_layers - self.config.target_layer_inference, self.config.n_layers)
        return lambda n_slots: [cache.layer_view(layer, n_slots) for layer in layers]

    def extend_memory(self, state: MoADraftState, kv: Tensor, counts: Sequence[int] | None = None) -> None:
        """Encode newly verified positions and append them to the cross-attention cache.

        Args:
            state: caches of B rows.
            kv: [B, n, L, D], packed target KV of the next n positions of each row.
            counts: how many of the n positions of each row are real; None for all.
        """
        positions = positions_behind(state.memory.lengths, kv.shape[1], kv.device)
        memory = self.encode_memory(kv, positions)  # [B, n, E]
        state.memory.append(*self.cross_attention.keys_values(memory, self.rotary(positions)), counts)

    def draft_root(
        self,
        state: MoADraftState,
        frozen: FrozenTarget,
        tokens: Tensor,
        target_kv: TargetLayersKV | None = None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """First draft step of a round: feed the tokens not yet fed, up to the root.

        The root is fed anew in each round: where it stands, the cache may hold a draft that was rejected there. So call
        :meth:`MoADraftState.forget_drafts`, and crop ``state.self_attention`` to the verified tokens, first.

        Args:
            state: caches of B rows.
            frozen: target pieces.
            tokens: [B, n] int64, the next tokens from position ``state.self_attention.lengths`` on; the last real one
                of each row is the root.
            target_kv: keys and values of the last N target layers; None when N = 0.
            counts: how many of the n tokens of each row are real; None for all.

        Returns:
            Features of the root [B, 1, E]: of the first drafted token.
        """
        positions = positions_behind(state.self_attention.lengths, tokens.shape[1], tokens.device)
        rotation = self.rotary(positions)
        embeddings = frozen.embed(tokens)
        state.self_attention.append(*self.self_attention.keys_values(embeddings, rotation), counts)
        state.n_fed = 1
        if counts is None:
            root, at = embeddings[:, -1:], positions[:, -1:]
        else:
            last = torch.tensor(counts, device=tokens.device)[:, None] - 1  # [B, 1]
            root = embeddings.gather(1, last[..., None].expand(-1, -1, embeddings.shape[-1]))
            at = positions.expand(len(counts), -1).gather(1, last)
        seen = torch.ones(tokens.shape[0], 1, 1, dtype=torch.bool, device=tokens.device)
        before = [length - 1 for length in state.self_attention.lengths]
        mask = None if len(before) == 1 else masks.tree_mask(before, seen)
        rotation = self.rotary(at)
        x = self.self_attention(root, rotation, *state.self_attention.view(), mask)
        return self._attend_to_target(state, frozen, x, at, rotation, before, seen, mask, target_kv)

    def draft_level(
        self,
        state: MoADraftState,
        frozen: FrozenTarget,
        tokens: Tensor,
        seen: Tensor,
        level: int,
        target_kv: TargetLayersKV | None = None,
    ) -> Tensor:
        """Later draft step of a round: feed the nodes of one level of the tree.

        Args:
            state: caches of B rows.
            frozen: target pieces.
            tokens: [B, b] int64, nodes of this level.
            seen: [B, b, n] bool, which of the n tokens fed in this round each node sees: the root first, then all nodes
                level by level, itself included.
            level: of these nodes, 1 for the children of the root.
            target_kv: as for :meth:`draft_root`.

        Returns:
            Features of the nodes [B, b, E]: of their children.
        """
        before = [length - state.n_fed for length in state.self_attention.lengths]
        first = torch.tensor(before, device=tokens.device)[:, None] + level
        positions = first.expand(-1, tokens.shape[1])  # [B, b]: a level stands at one position
        state.n_fed += tokens.shape[1]
        is_chain_alone = len(before) == 1 and state.n_fed == level + 1
        mask = None if is_chain_alone else masks.tree_mask(before, seen)
        rotation = self.rotary(positions)
        x = self.self_attention.attend_behind(frozen.embed(tokens), rotation, state.self_attention.append, mask)
        return self._attend_to_target(state, frozen, x, positions, rotation, before, seen, mask, target_kv)

    def _attend_to_target(
        self,
        state: MoADraftState,
        frozen: FrozenTarget,
        x: Tensor,
        positions: Tensor,
        rotation: Rotation,
        before: Sequence[int],
        seen: Tensor,
        mask: Tensor | None,
        target_kv: TargetLayersKV | None,
    ) -> Tensor:
        """Features of fed tokens behind the self-attention, x [B, b, E] at positions [B, b].

        ``before`` are the verified tokens of each row, ``mask`` is what the tokens see of them and of each other.
        """
        if self.config.cross_attention_drafts:
            x = self.cross_attention.attend_behind(x, rotation, state.memory.append, mask)
        else:
            memory_mask = None
            if len(set(state.memory.lengths)) > 1:
                slots = torch.arange(max(state.memory.lengths), device=x.device)
                memory_mask = (slots < torch.tensor(state.memory.lengths, device=x.device)[:, None])[:, None, :]
            x = self.cross_attention(x, rotation, *state.memory.view(), mask=memory_mask)
        if not self.config.target_layer_inference:
            return x
        assert target_kv is not None
        by_window = {
            window: mask if window is None else masks.tree_mask(before, seen, window) for window in set(frozen.windows)
        }
        views = target_kv(max(before) + state.n_fed)
        return frozen.norm(drafted_target_layers(frozen, x, positions, views, before, state.n_fed, by_window))


def _concatenated(first: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H_kv, S, d] behind the first ones."""
    return torch.cat((first[0], keys), dim=2), torch.cat((first[1], values), dim=2)


def moa_objective(
    drafter: MoADrafter,
    frozen: FrozenTarget,
    inputs: TrainingInputs,
    draws: Draws,
    weights: LossWeights = DEFAULT_WEIGHTS,
    official: bool = False,
    denominator: float | None = None,
) -> tuple[LossTerms, DrafterOutputs]:
    """Loss of one mini-batch (paper section 3; official ``train/moa_spec.py``, lines 107-275).

    total = forward_kl weight * forward_kl + feature weight * feature, where with target layer inference the feature
    term is the mean of the losses after and before the last N layers.

    Args:
        drafter: trained part.
        frozen: target pieces.
        inputs: stored activations.
        draws: random draws of this step.
        weights: of the terms.
        official: repeat the official code's treatment of context positions inside a response.
        denominator: what the sums are divided by; the weights of the loss positions (+ 1e-5) where None.

    Raises:
        DrafterError: target layer inference without ``entering_hidden``.
    """
    if inputs.kv is None:
        raise DrafterError("Mixture of Attentions needs the target's keys and values, which this batch does not have.")
    if drafter.config.target_layer_inference and inputs.entering_hidden is None:
        layer = drafter.config.n_layers - drafter.config.target_layer_inference - 1
        raise DrafterError(f"target layer inference needs the hidden state after layer {layer}.")
    response = inputs.response_mask.bool()
    rounds = Rounds.everywhere(draws, response) if official else Rounds.packed(draws, response)
    outputs = drafter(
        frozen,
        inputs.tokens,
        inputs.kv,
        rounds,
        overwrite_context=inputs.entering_hidden if official else None,
    )
    valid = rounds.weights > 0
    weights_of = rounds.weights[valid]  # [P]
    scale = weights_of * loss_scale(float(weights_of.sum()), denominator)
    features = outputs.features[valid]  # [P, E]
    hidden = at_queries(inputs.hidden, rounds.queries)[valid]  # [P, E]
    kl, feature = distillation(frozen, features, hidden, scale)
    entering, feature_term = None, feature
    if inputs.entering_hidden is not None and drafter.config.target_layer_inference:
        goal = at_queries(inputs.entering_hidden, rounds.queries)[valid]
        entering = (losses.feature_loss(outputs.target_layers_input[valid], goal) * scale).sum()
        feature_term = 0.5 * feature + 0.5 * entering
    total = weights.forward_kl * kl + weights.feature * feature_term
    return LossTerms(total, kl, feature, len(features), entering), outputs
