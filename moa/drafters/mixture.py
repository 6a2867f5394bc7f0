"""Mixture of Attentions drafter (Zimmer et al., ICLR 2025, arXiv 2410.03804).

Shapes: B batch, T tokens, Q drafted positions (queries), L target layers, H_kv target KV heads,
d target head dim, D = 2 * H_kv * d, E target width, V vocabulary, N last target layers that
features pass through, b nodes of one level, n tokens of one call.

    KV of all layers [B, T, L, D] -> layer self-attention -> mean over layers -> linear
                                  -> encoded KV [B, T, E]
    tokens -> embeddings -> causal self-attention -> cross-attention to encoded KV
           -> (last N target layers, final norm) -> LM head

Training runs many draft rounds at once. Each position sees the same tokens and KV as in a draft
step of decoding. In the example, a sequence of nine tokens has a response that starts at position
3. The step bound (the length of a round) is 4, so every fourth position counts as verified and is
not drafted. Tokens 5, 6 and 7 are one round. For this round, tokens 0 to 4 are verified, and token
5 is the root::

    position                                3      5      6      7
    draft step of decoding               root   root  level 1  level 2
    self-attention: embeddings of        0..3   0..5   0..6   0..7      staircase: 3, 5, 5..6, 5..7
    cross-attention: encoded KV of       0..2   0..4   0..4   0..4
      and, if it sees drafts,               3      5   5..6   5..7      outputs of self-attention
    target layers: the target's KV of    0..2   0..4   0..4   0..4
      and the drafter's own KV of           3      5   5..6   5..7
    predicts token                          4      6      7      8

Some rows of a batch are *staircase rows* (see ``masks``). In a staircase row, self-attention sees
only the tokens of the round.

In the paper, cross-attention does not see the drafts of a round. A draft sees the earlier drafts of
its round only as embeddings in self-attention, and the last drafts of a round agree less often with
the target. With ``cross_attention_drafts``, which is not in the paper, cross-attention also sees
the drafts of the round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ..nn import losses, masks
from ..nn.kv import KVBuffer, positions_from, unpack_kv
from ..nn.layers import DecoderBlock
from ..targets.bundle import FrozenTarget
from ..targets.cache import KVSource
from ..targets.facts import TargetFacts
from .base import CommittedTokens, DraftedFeatures, Drafter, DraftLevel
from .caches import Fed, LayerState, concatenated, lengths_mask, write_after
from .kv_encoder import KVEncoder, KVEncoderSizes
from .sizes import Flag, Size, SizeOrZero, largest_divisor, multiple_of_32
from .training import (
    Draws,
    LossTerms,
    Reads,
    Rounds,
    TrainingInputs,
    TrainingStep,
    at_queries,
    distillation,
    true_indices,
)


@dataclass(frozen=True, kw_only=True)
class MoASizes(KVEncoderSizes):
    """The sizes of a Mixture of Attentions drafter, and the hashes that identify its target."""

    kind = "moa"

    self_attention_kv_heads: Size  # Number of KV heads of the causal self-attention.
    self_attention_mlp_width: Size  # MLP width of the causal self-attention.
    cross_attention_kv_heads: Size  # Number of KV heads of the cross-attention.
    # MLP width of the cross-attention.
    cross_attention_mlp_width: Size
    # N, the number of the target's last layers that the drafted features pass through.
    target_layer_inference: SizeOrZero = 0
    cross_attention_drafts: Flag = True
    """True if cross-attention sees the tokens of the current draft round in addition to the encoded
    KV. In the Mixture of Attentions paper, cross-attention sees the encoded KV only."""

    @override
    def problems(self) -> Iterator[str]:
        yield from self.kv_head_problems("self_attention_kv_heads", "cross_attention_kv_heads")
        yield from self.encoder_problems()
        n_last = self.target_layer_inference
        n_layers = self.n_layers
        if n_last > n_layers:
            yield (
                f"target_layer_inference is {n_last}, expected at most {n_layers}, the number of "
                "target layers"
            )

    @property
    @override
    def reads(self) -> Reads:
        n_last = self.target_layer_inference
        layers = self.read_kv_layers
        # The last N target layers attend to their own KV, so the KV of all N layers must be read.
        # The KV encoder always reads the last target layer, but not always all of the last N
        # layers.
        if n_last > 1 and layers is not None:
            layers = None if self.layer_attention else tuple(range(-n_last, 0))
        return Reads(True, layers, self.n_layers - n_last - 1 if n_last else None)

    @classmethod
    @override
    def defaults(cls, facts: TargetFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        """Choose sizes in the same proportions as the MoA authors' drafter for Llama-3-8B."""
        half_kv_heads = largest_divisor(facts.n_heads, max(1, facts.n_kv_heads // 2))
        narrow = multiple_of_32(facts.mlp_width * 3 / 7)
        return {
            "self_attention_kv_heads": half_kv_heads,
            "self_attention_mlp_width": narrow,
            "cross_attention_kv_heads": half_kv_heads,
            "cross_attention_mlp_width": narrow,
        } | cls.encoder_defaults(facts, given)


class MoADraftState(LayerState):
    """The caches of the self-attention and of the cross-attention.

    ``encoded`` is the cache of the cross-attention. This cache has one slot for each verified
    position. If ``has_drafts`` is true, the slots of the current round's tokens follow.
    """

    def __init__(self, n_rows: int, has_drafts: bool) -> None:
        super().__init__(n_rows, 1)
        self.encoded = KVBuffer(n_rows)
        self.has_drafts = has_drafts

    @override
    def forget_drafts(self) -> None:
        if self.n_fed and self.has_drafts:
            self.encoded.crop([length - self.n_fed for length in self.encoded.lengths])
        super().forget_drafts()


class MoADrafter(KVEncoder, Drafter):
    """The trained weights: layer self-attention, linear layer, self-attention, cross-attention."""

    config_class = MoASizes
    config: MoASizes
    by_graph = drafts_remotely = context_needs_kv = True

    def __init__(self, config: MoASizes) -> None:
        super().__init__(config)
        self_sizes = config.block(
            config.self_attention_kv_heads, config.self_attention_mlp_width, config.qkv_bias
        )
        cross_sizes = config.block(
            config.cross_attention_kv_heads, config.cross_attention_mlp_width, qkv_bias=False
        )
        self.self_attention = DecoderBlock(self_sizes)
        self.cross_attention = DecoderBlock(cross_sizes)
        self.rotary = config.rotary()
        self.build_encoder()
        self.context_layers = tuple(
            range(config.n_layers - config.target_layer_inference, config.n_layers)
        )
        self.context_width = self.sent_width + len(self.context_layers) * config.kv_width

    @property
    @override
    def blocks(self) -> list[DecoderBlock]:
        return [self.self_attention, self.cross_attention]

    @classmethod
    @override
    def loss_positions(cls, response_mask: Tensor, draws: Draws) -> Tensor:
        weighted: list[Tensor] = []
        for weight, drafted, _ in draws.passes(response_mask):
            weighted.append(weight * drafted)
        return torch.stack(weighted).sum(dim=0)

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch (section 3 of the Mixture of Attentions paper).

        See lines 107-275 of ``train/moa_spec.py`` in the MoA authors' code.
        """
        inputs = step.inputs
        rounds = Rounds.packed(step.draws, step.inputs.response_mask.bool())
        return self.losses(
            frozen, step, rounds, *self(frozen, inputs.tokens, inputs.required_kv(), rounds)
        )

    def forward(
        self, frozen: FrozenTarget, tokens: Tensor, kv: Tensor, rounds: Rounds
    ) -> tuple[Tensor, Tensor]:
        """Run many draft rounds at once over sequences [B, T] with packed target KV [B, T, L, D].

        Returns:
            The input of the target's last N layers, and the features that these layers and the
            final norm compute from it, [B, Q, E] each. If N is 0, both are the same tensor.
        """
        n_tokens = tokens.shape[1]
        positions = masks.positions_of(tokens)[None, :]  # [1, T], the same positions for all rows.
        queries = rounds.queries
        context = rounds.context

        encoded = self.encode_kv(kv, positions)  # The encoded KV, [B, T, E].

        # Self-attention
        rotation = self.rotary(positions)
        query_rotation = self.rotary(queries)
        embeddings = frozen.embed(tokens)
        keys, values = self.self_attention.keys_values(embeddings, rotation)
        self_mask = masks.self_attention_mask(queries, context, rounds.staircase, n_tokens)
        # Outputs of self-attention at the queries: [B, Q, E]
        x1 = self.self_attention(
            at_queries(embeddings, queries), query_rotation, keys, values, self_mask
        )

        # Cross-attention
        verified = self.cross_attention.keys_values(encoded, rotation)
        if self.config.cross_attention_drafts:
            append = partial(concatenated, verified)
            mask = masks.round_mask(queries, context, rounds.pass_index, n_tokens)
            x2 = self.cross_attention.attend_cached(x1, query_rotation, append, mask)
        else:
            mask = masks.Mask.up_to(context, n_tokens)
            x2 = self.cross_attention(x1, query_rotation, *verified, mask)

        # Run the features through the last layers of the target.
        if not self.config.target_layer_inference:
            return x2, x2
        return x2, frozen.norm(run_target_layers(frozen, x2, kv, rounds))

    def losses(
        self,
        frozen: FrozenTarget,
        step: TrainingStep,
        rounds: Rounds,
        entering: Tensor,
        features: Tensor,
    ) -> LossTerms:
        """Compute the losses of the two outputs of :meth:`forward`."""
        inputs = step.inputs
        indices = true_indices(rounds.weights > 0)
        weights = rounds.weights[indices]  # Loss weights, [P].
        scale = step.scale(weights.sum())
        features = features[indices]  # Features, [P, E].
        hidden = at_queries(inputs.hidden, rounds.queries)[indices]  # Target states, [P, E].
        if step.weights.d_pace is not None:
            labels = inputs.tokens[
                indices[0], (rounds.queries[indices] + 1).clamp(max=inputs.tokens.shape[1] - 1)
            ]
            wrong = losses.chunked_cross_entropy(
                features, labels, frozen.lm_head_weight, cap=frozen.logit_cap
            )
            weights = weights * rounds.d_pace(wrong, indices, step.weights.d_pace)
        teachers = None
        if step.draws.on_policy_weight and step.draws.teacher_forced_weight:
            # The on-policy pass and the teacher-forced pass may draft for the same position. The
            # target's distribution is then the same for both drafts, so compute it only once.
            teachers = indices[0] * inputs.tokens.shape[1] + rounds.queries[indices]
        kl, feature = distillation(
            frozen, features, hidden, scale, step.weights.divergence, weights, teachers
        )
        terms = {"forward_kl": kl, "feature_loss": feature}
        feature_term = feature
        if self.config.target_layer_inference:
            # If N is above 0, ``MoASizes.reads`` requests the input of the last N layers, so the
            # batch contains it.
            assert inputs.entering_hidden is not None
            goal = at_queries(inputs.entering_hidden, rounds.queries)[indices]
            terms["entering_feature_loss"] = (
                losses.feature_loss(entering[indices], goal) * weights
            ).sum() * scale
            # The feature losses before and after the last N layers have the same weight.
            feature_term = 0.5 * feature + 0.5 * terms["entering_feature_loss"]
        total = step.weights.forward_kl * kl + step.weights.feature * feature_term
        return {"loss": total, **terms}

    @override
    def drafted_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws
    ) -> DraftedFeatures:
        rounds = Rounds.packed(draws, inputs.response_mask)
        _, features = self(frozen, inputs.tokens, inputs.required_kv(), rounds)
        return DraftedFeatures(rounds.queries, rounds.drafted, features)

    @override
    def new_state(self, n_rows: int) -> MoADraftState:
        return MoADraftState(n_rows, self.config.cross_attention_drafts)

    @override
    def draft_root(
        self,
        state: MoADraftState,
        frozen: FrozenTarget,
        committed: CommittedTokens,
        cache: KVSource,
    ) -> Tensor:
        state.forget_drafts()
        tokens, _, counts = state.take_round(committed, frozen.lm_head_weight.device)
        n_before = masks.added(masks.added(state.n_true, counts), -1)
        n_new = masks.added(n_before, state.encoded.lengths, sign=-1)
        if max(n_new):
            self.append_encoded(
                state, self.encode_cached(cache, state.encoded.lengths, n_new), n_new
            )
        x, fed = state.feed_committed(
            [self.self_attention], self.rotary, frozen.embed(tokens), counts
        )
        return self._attend_to_target(state, frozen, x, fed, cache)

    @override
    def draft_level(
        self, state: MoADraftState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource
    ) -> Tensor:
        fed = state.begin_level(self.rotary, level)
        x = frozen.embed(level.tokens)
        x = self.self_attention.attend_cached(x, fed.rotation, state.slots[0].append, fed.mask)
        return self._attend_to_target(state, frozen, x, fed, cache)

    @override
    def append_encoded(
        self, state: MoADraftState, encoded: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        rotation = self.rotary(
            positions_from(state.encoded.lengths, encoded.shape[1], encoded.device)
        )
        state.encoded.append(*self.cross_attention.keys_values(encoded, rotation), counts)

    @override
    def encoded_lengths(self, state: MoADraftState) -> list[int]:
        return state.encoded.lengths

    def _attend_to_target(
        self, state: MoADraftState, frozen: FrozenTarget, x: Tensor, fed: Fed, cache: KVSource
    ) -> Tensor:
        """Compute features [B, b, E] from the outputs of self-attention x [B, b, E]."""
        if self.config.cross_attention_drafts:
            x = self.cross_attention.attend_cached(x, fed.rotation, state.encoded.append, fed.mask)
        else:
            lengths = state.encoded.lengths
            encoded = state.encoded.layer_view(0, max(lengths))
            x = self.cross_attention(x, fed.rotation, *encoded, lengths_mask(lengths, x.device))
        n_layers = self.config.target_layer_inference
        if not n_layers:
            return x
        by_window: dict[int | None, Tensor | None] = {None: fed.mask}
        for window in set(frozen.windows) - {None}:
            by_window[window] = masks.tree_mask(fed.before, fed.seen, window)
        n_slots = max(fed.before) + state.n_fed
        rotation = frozen.rotary(fed.positions)
        layers = range(self.config.n_layers)[-n_layers:]
        for layer, block, window in zip(layers, frozen.blocks, frozen.windows, strict=True):
            append = partial(write_after, cache.layer_view(layer, n_slots), fed.before, state.n_fed)
            x = block.attend_cached(x, rotation, append, by_window[window])
        return frozen.norm(x)


def run_target_layers(frozen: FrozenTarget, x: Tensor, kv: Tensor, rounds: Rounds) -> Tensor:
    """Run the features x [B, Q, E] of many rounds through the target's last N decoder layers.

    As in decoding, a query sees the target's own KV up to the last verified position of its round,
    and after it the KV of the drafted features of its round. ``kv`` [B, T, n, D] contains the KV of
    n layers, which include the last N layers.
    """
    queries = rounds.queries
    context = rounds.context
    n_keys = kv.shape[1]
    by_window: dict[int | None, masks.Mask] = {}
    for window in set(frozen.windows):
        by_window[window] = masks.round_mask(queries, context, rounds.pass_index, n_keys, window)
    rotation = frozen.rotary(queries)
    first = kv.shape[2] - frozen.n_layers
    for offset, (layer, window) in enumerate(zip(frozen.blocks, frozen.windows, strict=True)):
        target = unpack_kv(kv[:, :, first + offset].to(x.dtype), layer.self_attn.n_kv_heads)
        x = layer.attend_cached(x, rotation, partial(concatenated, target), by_window[window])
    return x
