"""EAGLE drafter (Li et al., ICML 2024, arXiv 2401.15077; trees of EAGLE-2, arXiv 2406.16858): one decoder layer.

Shapes: B batch, T tokens, Q queries, P loss positions, E target width, S slots (T - 1), K fused layers, b nodes of one
level.

    [embedding of token t+1 ; hidden state of token t] -> linear 2E -> E -> decoder layer(s) -> feature of token t+1

Hidden states are the target's AFTER its final norm, what transformers gives as ``hidden_states[-1]`` and the store as
``hidden/last``: the LM head turns them, and the features that stand for them, into logits with no norm in between. The
official code has the same convention (``train/eagle.py``).

Embeddings are some fifty times smaller than these, and a drafter learns late to read them; so they are scaled first,
which the published drafter lacks and which a linear layer with other weights does as well: exports have it in these.

Slot t of the drafter's cache is made from the hidden state of position t and the token at t+1, and its RoPE position is
t. In slots before the root's the hidden states are the target's own; after it they are the drafter's, and each round
computes those of accepted tokens again.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...errors import DrafterError
from ..nn.layers import DecoderBlock, Rotary
from ..targets.bundle import FrozenTarget
from ..targets.cache import ContextCache, KVSource
from . import training
from .base import DraftedFeatures, Drafter, DraftLevel
from .caches import LayerState, causal_features, stacked
from .sizes import DrafterSizes, LayerSizes
from .training import Draws, LossTerms, TrainingInputs, TrainingStep


class FeatureState(LayerState):
    """Slots made from the target's own states, and ``last``, the newest that was fed of each row [1, ...]."""

    def __init__(self, n_rows: int, n_layers: int) -> None:
        super().__init__(n_rows, n_layers)
        self.last: list[Tensor | None] = [None] * n_rows

    @override
    def fresh_rows(self, committed: Sequence[list[int]]) -> tuple[list[list[int]], Tensor | None]:
        fresh = []
        for row, (parts, last) in enumerate(zip(self.fresh, self.last, strict=True)):
            if not parts:  # the root is fed again
                if last is None:
                    raise DrafterError(
                        "nothing of the target has been observed: give its states before drafting."
                    )
                self.n_true[row] -= 1
                parts = (last,)
            fresh.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        self.fresh = [()] * len(fresh)
        self.last = [states[-1:] for states in fresh]
        texts = zip(committed, self.n_true, fresh, strict=True)
        return [row[start + 1 : start + 1 + len(states)] for row, start, states in texts], stacked(
            fresh
        )


class FeatureDrafter(Drafter):
    """What EAGLE and EAGLE-3 share: layers fed with the token at t+1 and the feature of t, then with their outputs."""

    by_graph = True
    rotary: Rotary

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
    def drafted_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws
    ) -> DraftedFeatures:
        # All rounds at once, step by step: each step is fed with the features of the one before.
        drafted, context = training.draft_rounds(inputs.response_mask, draws)
        context = context[:, 1:]  # [B, S]: the last slot of the target's that a query sees
        slots = torch.arange(context.shape[1], device=context.device)
        # 0 for the root's slot, -1 for none
        step = torch.where(drafted[:, 1:], slots - context, -1)
        embeddings = frozen.embed(inputs.tokens[:, 1:])
        joined = self.join(
            embeddings, self.true_features(self.target_states(inputs)[:, :-1].to(embeddings.dtype))
        )
        true_keys_values = []
        features = joined
        rotation = self.rotary(slots[None, :])
        causal = (slots[None, :] <= slots[:, None])[None]
        for block in self.blocks:
            true_keys_values.append(block.keys_values(features, rotation))
            features = block(features, rotation, *true_keys_values[-1], causal)
        features = self.fed_back(features)
        own_keys_values = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in true_keys_values]
        rows = torch.arange(len(step), device=step.device)[:, None]
        for index in range(1, int(step.max()) + 1):
            queries, valid = training.loss_queries(step == index)
            limit = context.gather(1, queries)[..., None]
            # [B, Q, 2S]
            seen = torch.cat(
                (slots <= limit, (slots > limit) & (slots <= queries[..., None])), dim=-1
            )
            x = self.join(
                training.at_queries(embeddings, queries),
                training.at_queries(features, (queries - 1).clamp(min=0)),
            )
            at = rows.expand_as(queries)[valid], queries[valid]
            rotation = self.rotary(queries)
            for block, true, own in zip(
                self.blocks, true_keys_values, own_keys_values, strict=True
            ):
                for buffer, new in zip(own, block.keys_values(x, rotation), strict=True):
                    buffer[at[0], :, at[1]] = new.transpose(1, 2)[valid].to(buffer.dtype)
                keys, values = (torch.cat(pair, dim=2) for pair in zip(true, own, strict=True))
                x = block(x, rotation, keys, values, seen)
            features[at] = self.fed_back(x)[valid].to(features.dtype)
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
        committed: Sequence[list[int]],
        cache: KVSource,
    ) -> Tensor:
        # Slots up to the root's come from the target's own states; those of accepted drafts are
        # computed again.
        tokens, hidden, counts = state.take_round(committed, frozen.lm_head_weight.device)
        assert hidden is not None  # [B, n, E or K * E]
        x = self.join(frozen.embed(tokens), self.true_features(hidden.to(self.dtype)))
        return self.fed_back(state.feed_committed(self.blocks, self.rotary, x, counts)[0])

    @override
    def draft_level(
        self, state: FeatureState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource
    ) -> Tensor:
        x = self.join(frozen.embed(level.tokens), level.parent_features)
        return self.fed_back(state.feed_level(self.blocks, self.rotary, x, level))


@dataclass(frozen=True, kw_only=True)
class EagleSizes(LayerSizes):
    """The sizes of an EAGLE drafter, and the identity of its target."""

    kind: ClassVar[str] = "eagle"

    eagle_layers: int = 1  # decoder layers
    eagle_input_norm: bool = True
    """The first layer has a norm before its attention, as in the MoA authors' EAGLE; the EAGLE authors' has none."""
    eagle_fc_bias: bool = False
    """The linear layer that joins token and hidden state has a bias, as in some of the EAGLE authors' checkpoints."""
    eagle_embedding_scale: float = 1.0
    """What embeddings are multiplied with there, 1 as published; 0 until a new drafter has met its target."""

    @override
    def problems(self) -> Iterator[str]:
        yield from super().problems()
        # others would be rounded in an export
        if math.frexp(self.eagle_embedding_scale)[0] not in (0.0, 0.5):
            yield "eagle_embedding_scale must be a power of two"


class EagleDrafter(FeatureDrafter):
    """The trained part: the linear layer that joins token and hidden state, and the decoder layers."""

    config_class: ClassVar[type[DrafterSizes]] = EagleSizes
    config: EagleSizes
    drafts_remotely = True

    def __init__(self, config: EagleSizes) -> None:
        super().__init__(config)
        self.context_width = config.hidden_size
        first = replace(config.layer, input_norm=config.eagle_input_norm)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.eagle_fc_bias)
        self.layers = nn.ModuleList(
            DecoderBlock(config.layer if i else first) for i in range(config.eagle_layers)
        )
        self.rotary = config.rotary()

    @override
    def adopt(self, frozen: FrozenTarget, count_tokens: Callable[[], Tensor]) -> None:
        """Choose a scale that brings embeddings to the size of hidden states, whose root mean square is about 1.

        A power of two, by which an export multiplies weights exactly.
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
    def join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        if (scale := self.config.eagle_embedding_scale) != 1:
            embeddings = embeddings * scale
        joined: Tensor = self.fc(torch.cat((embeddings, hidden), dim=-1))
        return joined.to(embeddings.dtype)  # under autocast the residual stream keeps its precision

    @override
    def _make_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        return hidden

    @override
    def _take_context(self, state: FeatureState, cache: ContextCache, context: Tensor) -> None:
        state.fresh[0] = (*state.fresh[0], context)
        cache.extend(len(context), None, 0)

    def forward(self, joined: Tensor, queries: Tensor) -> Tensor:
        """Run the layers over slots [B, S, E] for some of them, [B, Q]; slot t gives the feature of token t+1."""
        return causal_features(self.blocks, self.rotary, joined, queries)

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch (EAGLE section 3.2 with the weights of the MoA paper)."""
        inputs = step.inputs
        weights = step.weights
        embeddings = frozen.embed(inputs.tokens)[:, 1:]
        hidden = inputs.hidden.to(embeddings.dtype)
        noise = _draw_noise(step.draws, inputs.hidden)
        seen = hidden if noise is None else hidden + noise
        queries, valid = training.loss_queries(inputs.response_mask[:, 1:].bool())
        at = training.places(valid)
        features = self(self.join(embeddings, seen[:, :-1]), queries)[at]  # [P, E]
        goal = training.at_queries(hidden[:, 1:], queries)[at]
        kl, feature = training.distillation(
            frozen, features, goal, step.scale(len(features)), weights.divergence
        )
        return LossTerms(
            weights.forward_kl * kl + weights.feature * feature, kl, feature, len(features)
        )


def _draw_noise(draws: Draws, hidden: Tensor) -> Tensor | None:
    """Draw uniform noise [B, T, E] in plus or minus half the width; each row has its own seed."""
    if not draws.seeds or not draws.noise_width:
        return None
    rows = []
    for seed in draws.seeds:
        # What a token gets does not depend on the padding after it, for the tokens come first.
        generator = torch.Generator(hidden.device).manual_seed(seed)
        rows.append(torch.rand(hidden.shape[1:], generator=generator, device=hidden.device))
    return (torch.stack(rows) - 0.5) * draws.noise_width
