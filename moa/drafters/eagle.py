"""EAGLE drafter: one decoder layer that predicts the target's next hidden state.

Li et al., ICML 2024, arXiv 2401.15077, with the draft trees of EAGLE-2, arXiv 2406.16858.

Shapes: B batch, T tokens, Q queries, P loss positions, E target width, S slots (T - 1), K fused
target layers (EAGLE-3), b nodes of one level.

    [embedding of token t+1 ; hidden state of token t] -> linear 2E -> E -> decoder layer(s)
                                                       -> feature of token t+1

Hidden states are the target's states AFTER its final norm. In transformers they are
``hidden_states[-1]``, in the store they are ``hidden/last``. The LM head turns hidden states and
features into logits without another norm. The MoA authors' code does the same (``train/eagle.py``).

The values of embeddings are about fifty times smaller than the values of hidden states, so a
drafter would learn to use the embeddings only after long training. Therefore the embeddings are
multiplied by a scale first. The published drafter has no scale. Exports multiply the weights of the
linear layer by the scale, which gives the same results.

Slot t of the drafter's cache is computed from the hidden state of position t and the token at t+1.
The RoPE position of the slot is t. The slots up to the slot of the root are computed from the
target's hidden states. In later slots, the drafter's own features take the place of hidden states.
When drafts are accepted, the next round computes their slots again from the target's hidden states.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ...errors import DrafterError
from ..nn import masks
from ..nn.kv import write_slots
from ..nn.layers import DecoderBlock, Rotary
from ..targets.bundle import FrozenTarget
from ..targets.cache import KVSource
from . import training
from .base import CommittedTokens, DraftedFeatures, Drafter, DraftLevel
from .caches import LayerState, causal_features, stacked
from .sizes import Flag, LayerSizes, Number, Size
from .training import Draws, LossTerms, TrainingInputs, TrainingStep


class FeatureState(LayerState):
    """The drafter's caches of B sequences. Their slots are computed from the target's states.

    ``last`` is a list with one tensor per sequence: the newest target state of the sequence,
    [1, ...]. The entry is None until the sequence has a target state.
    """

    def __init__(self, n_rows: int, n_layers: int) -> None:
        super().__init__(n_rows, n_layers)
        self.last: list[Tensor | None] = [None] * n_rows

    @override
    def fresh_rows(self, committed: CommittedTokens) -> tuple[list[list[int]], Tensor | None]:
        fresh_states: list[Tensor] = []
        fresh_tokens: list[list[int]] = []
        for row, tokens in enumerate(committed):
            parts = self.fresh[row]
            # If there are no new target states, this round has the same root as the last round.
            # Feed the root again, with the newest target state.
            if not parts:
                if (last := self.last[row]) is None:
                    raise DrafterError(
                        "the drafter has no hidden states of the target. Pass them to `observe` "
                        "before drafting."
                    )
                self.n_true[row] -= 1
                parts = (last,)
            states = parts[0] if len(parts) == 1 else torch.cat(parts)
            start = self.n_true[row] + 1
            fresh_states.append(states)
            fresh_tokens.append(tokens[start : start + len(states)])
            self.last[row] = states[-1:]
        self.fresh = [()] * len(committed)
        return fresh_tokens, stacked(fresh_states)


class FeatureDrafter(Drafter):
    """The common part of EAGLE and EAGLE-3.

    The layers read the token at position t+1 and the feature of position t. If position t was
    drafted, its feature is the drafter's own output.
    """

    by_graph = True
    rotary: Rotary

    @abstractmethod
    def combine(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Make the input of the layers from embeddings [..., E] and features [..., E].

        The embeddings belong to the tokens t+1, and the features to the positions t.
        """

    def target_states(self, inputs: TrainingInputs) -> Tensor:
        """Return the target states of a training batch.

        These are the states that :meth:`observe` receives in decoding, by default the last hidden
        states.
        """
        return inputs.hidden

    def true_features(self, states: Tensor) -> Tensor:
        """Convert :meth:`target_states` to features [..., E]; by default return them unchanged."""
        return states

    def true_inputs(self, frozen: FrozenTarget, inputs: TrainingInputs) -> tuple[Tensor, Tensor]:
        """Compute the input of the layers from the target states of a training batch.

        Returns:
            Embeddings of the tokens, and the input of the layers, both [B, S, ...]. Slot t belongs
            to the token at position t + 1.
        """
        embeddings = frozen.embed(inputs.tokens[:, 1:])
        hidden = self.target_states(inputs)[:, :-1].to(embeddings.dtype)
        return embeddings, self.combine(embeddings, self.true_features(hidden))

    def fed_back(self, outputs: Tensor) -> Tensor:
        """Convert outputs of the layers [..., E] to the next features; by default unchanged."""
        return outputs

    @override
    def drafted_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws
    ) -> DraftedFeatures:
        # Run all rounds of all sequences together, one level after another, because each level
        # reads the features that the previous level has computed.
        drafted, context = training.draft_rounds(inputs.response_mask, draws)
        # [B, S]. Each slot belongs to a draft round. The entry of the slot is the last slot that
        # this round sees among the slots that were made from target states.
        context = context[:, 1:]
        slots = masks.positions_of(context)
        # [B, S], the draft level of each slot. It is 0 for the slot of a root, and -1 for slots
        # that are not drafted.
        step = torch.where(drafted[:, 1:], slots - context, -1)
        embeddings, features = self.true_inputs(frozen, inputs)
        # The keys and values of each layer, [B, H_kv, 2S, d]. The first S slots are made from
        # target states, and the last S slots from features of the drafter.
        keys_values = []
        rotation = self.rotary(slots[None, :])
        causal = masks.causal_mask(slots[None, :], len(slots))
        for block in self.blocks:
            keys, values = block.keys_values(features, rotation)
            features = block(features, rotation, keys, values, causal)
            own_slots = (0, 0, 0, len(slots))
            keys_values.append((F.pad(keys, own_slots), F.pad(values, own_slots)))
        features = self.fed_back(features)
        rows = torch.arange(len(step), device=step.device)[:, None]
        for index in range(1, int(step.max()) + 1):
            queries, valid = training.loss_queries(step == index)
            limit = context.gather(1, queries)[..., None]
            # [B, Q, 2S], true if a query sees a slot. The S slots made from target states come
            # first, followed by the S slots made from features of the drafter.
            seen = torch.cat(
                (slots <= limit, (slots > limit) & (slots <= queries[..., None])), dim=-1
            )
            x = self.combine(
                training.at_queries(embeddings, queries),
                training.at_queries(features, (queries - 1).clamp(min=0)),
            )
            rotation = self.rotary(queries)
            for block, view in zip(self.blocks, keys_values, strict=True):
                # Queries that are padding write to the drafter's slot 0, which no query sees.
                write_slots(view, *block.keys_values(x, rotation), len(slots) + queries)
                x = block(x, rotation, *view, seen)
            cells = rows.expand_as(queries)[valid], queries[valid]
            features[cells] = self.fed_back(x)[valid].to(features.dtype)
        queries, valid = training.loss_queries(drafted)
        return DraftedFeatures(
            queries, valid, training.at_queries(features, (queries - 1).clamp(min=0))
        )

    @override
    def new_state(self, n_rows: int) -> FeatureState:
        return FeatureState(n_rows, len(self.blocks))

    @override
    def observe(self, state: FeatureState, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        state.observe(hidden, kept)

    @override
    def draft_root(
        self,
        state: FeatureState,
        frozen: FrozenTarget,
        committed: CommittedTokens,
        cache: KVSource,
    ) -> Tensor:
        # Compute the slots up to the root from target states. This includes the slots of accepted
        # drafts, which the last round computed from the drafter's own features.
        tokens, hidden, counts = state.take_round(committed, frozen.lm_head_weight.device)
        assert hidden is not None  # Target states, [B, n, E or K * E].
        x = self.combine(frozen.embed(tokens), self.true_features(hidden.to(self.dtype)))
        return self.fed_back(state.feed_committed(self.blocks, self.rotary, x, counts)[0])

    @override
    def draft_level(
        self, state: FeatureState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource
    ) -> Tensor:
        x = self.combine(frozen.embed(level.tokens), level.parent_features)
        return self.fed_back(state.feed_level(self.blocks, self.rotary, x, level))


@dataclass(frozen=True, kw_only=True)
class EagleSizes(LayerSizes):
    """The sizes of an EAGLE drafter, and the hashes that identify its target."""

    kind = "eagle"

    eagle_layers: Size = 1  # Number of decoder layers.
    eagle_input_norm: Flag = True
    """True if the first layer has a norm before its attention. The MoA authors' EAGLE has this
    norm, but the EAGLE authors' code does not have it."""
    eagle_fc_bias: Flag = False
    """True if the linear layer before the decoder layers has a bias, as in some checkpoints of the
    EAGLE authors."""
    eagle_embedding_scale: Number = 1.0
    """Factor by which embeddings are multiplied before the linear layer. It is 1 in the published
    drafter. 0 means that the factor of a new drafter has not been chosen yet."""

    @override
    def problems(self) -> Iterator[str]:
        yield from super().problems()
        # An export multiplies weights by the scale. The products are exact only if the scale is a
        # power of two. So refuse other scales.
        if math.frexp(self.eagle_embedding_scale)[0] not in (0.0, 0.5):
            yield "eagle_embedding_scale must be a power of two"


class EagleDrafter(FeatureDrafter):
    """The trained weights: a linear layer, and decoder layers.

    The input of the linear layer is the embedding of a token, concatenated with a hidden state.
    """

    config_class = EagleSizes
    config: EagleSizes
    drafts_remotely = True

    def __init__(self, config: EagleSizes) -> None:
        super().__init__(config)
        self.context_width = config.hidden_size
        first = replace(config.layer, input_norm=config.eagle_input_norm)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.eagle_fc_bias)
        self.layers = nn.ModuleList([DecoderBlock(first)])
        for _ in range(1, config.eagle_layers):
            self.layers.append(DecoderBlock(config.layer))
        self.rotary = config.rotary()

    @override
    def adopt(self, frozen: FrozenTarget, count_tokens: Callable[[], Tensor]) -> None:
        """Choose the scale that makes embeddings as large as hidden states.

        The root mean square of hidden states is about 1. The scale is a power of two, so that an
        export can multiply weights by the scale without rounding.
        """
        super().adopt(frozen, count_tokens)
        if self.config.eagle_embedding_scale == 0:
            parts = torch.arange(self.config.vocab_size, device=frozen.lm_head_weight.device).split(
                1 << 13
            )
            square = sum(float(frozen.embed(tokens).double().square().sum()) for tokens in parts)
            size = math.sqrt(square / (self.config.vocab_size * self.config.hidden_size))
            self.config = replace(self.config, eagle_embedding_scale=2.0 ** -round(math.log2(size)))

    @override
    def combine(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        if (scale := self.config.eagle_embedding_scale) != 1:
            embeddings = embeddings * scale
        combined: Tensor = self.fc(torch.cat((embeddings, hidden), dim=-1))
        # Under autocast, the result of ``fc`` has a lower precision than the embeddings. Convert
        # the result back, so that the residual stream has the dtype of the embeddings.
        return combined.to(embeddings.dtype)

    @override
    def _make_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        return hidden

    @override
    def _take_context(self, state: FeatureState, context: Tensor) -> Tensor:
        state.fresh[0] = (*state.fresh[0], context)
        return context[:, :0]

    def forward(self, combined: Tensor, queries: Tensor) -> Tensor:
        """Run the layers over all slots [B, S, E], and return the features [B, Q, E] of some slots.

        ``queries`` [B, Q] are the indices of these slots. Slot t gives the feature of position t+1.
        """
        return causal_features(self.blocks, self.rotary, combined, queries)

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch.

        The loss terms are from section 3.2 of the EAGLE paper, and their weights from the Mixture
        of Attentions paper.
        """
        inputs = step.inputs
        weights = step.weights
        embeddings = frozen.embed(inputs.tokens)[:, 1:]
        hidden = inputs.hidden.to(embeddings.dtype)
        noise = _draw_noise(step.draws, inputs.hidden)
        seen = hidden if noise is None else hidden + noise
        queries, valid = training.loss_queries(inputs.response_mask[:, 1:].bool())
        indices = training.true_indices(valid)
        # The features of the P loss positions, [P, E].
        features = self(self.combine(embeddings, seen[:, :-1]), queries)[indices]
        goal = training.at_queries(hidden[:, 1:], queries)[indices]
        kl, feature = training.distillation(
            frozen, features, goal, step.scale(len(features)), weights.divergence
        )
        total = weights.forward_kl * kl + weights.feature * feature
        return {"loss": total, "forward_kl": kl, "feature_loss": feature}


def _draw_noise(draws: Draws, hidden: Tensor) -> Tensor | None:
    """Draw uniform noise [B, T, E] between ``-noise_width / 2`` and ``noise_width / 2``.

    Each row has its own seed.
    """
    if not draws.seeds or not draws.noise_width:
        return None
    rows = []
    for seed in draws.seeds:
        # The random numbers of a row are drawn in the order of its positions, and padding comes
        # last. So the noise of real tokens does not depend on the amount of padding.
        generator = torch.Generator(hidden.device).manual_seed(seed)
        rows.append(torch.rand(hidden.shape[1:], generator=generator, device=hidden.device))
    return (torch.stack(rows) - 0.5) * draws.noise_width
