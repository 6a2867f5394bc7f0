"""Independent drafter: a small Llama that learns from the target.

Leviathan et al., ICML 2023, arXiv 2211.17192.

Shapes: B rows, T tokens, Q queries, W drafter width, E target width, V vocabulary of the target, b
nodes of one level.

    token -> own embedding -> decoder layer(s) -> norm -> features
          -> own LM head, which is the embedding matrix (tied)

In training and in decoding, the drafter reads only tokens. The drafter and the target have only the
vocabulary, the positions and the rotary embedding in common. The drafter learns the target's
next-token distribution (DistillSpec, arXiv 2310.08461, with forward KL). The drafter's features
have the width W, so they cannot be used in place of the target's hidden states.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from ..nn import losses
from ..nn.layers import DecoderBlock, DecoderBlockSizes, RMSNorm, Rotary
from ..targets.bundle import FrozenTarget
from ..targets.cache import KVSource
from ..targets.facts import TargetFacts
from .base import CommittedTokens, DraftedFeatures, Drafter, DraftLevel
from .caches import LayerState, causal_features
from .sizes import DrafterSizes, Size, largest_divisor, multiple_of_32
from .training import (
    Draws,
    LossTerms,
    TrainingInputs,
    TrainingStep,
    at_queries,
    loss_queries,
    round_queries,
    true_indices,
)


@dataclass(frozen=True, kw_only=True)
class IndependentSizes(DrafterSizes):
    """The sizes of an independent drafter, and the hashes that identify its target."""

    kind = "independent"

    independent_width: Size  # W, the drafter's width.
    independent_mlp_width: Size  # MLP width of each layer.
    independent_layers: Size = 2  # Number of decoder layers.

    @override
    def problems(self) -> Iterator[str]:
        if self.independent_width % 2:
            yield f"independent_width is {self.independent_width}, expected an even number"

    @classmethod
    @override
    def defaults(cls, facts: TargetFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        width = given.get("independent_width", multiple_of_32(facts.hidden_size / 2))
        narrow = multiple_of_32(width * facts.mlp_width / facts.hidden_size)
        return {"independent_width": width, "independent_mlp_width": narrow}

    @property
    def own_head_dim(self) -> int:
        """The drafter's head dim.

        It is the largest even divisor of W that exceeds neither W / 4 nor the target's head dim.
        """
        limit = max(2, min(self.head_dim, self.independent_width // 4))
        return 2 * largest_divisor(self.independent_width // 2, limit // 2)

    @property
    def own_block(self) -> DecoderBlockSizes:
        """Sizes of each layer. Each layer has as many KV heads as query heads."""
        n_heads = self.independent_width // self.own_head_dim
        return DecoderBlockSizes(
            self.independent_width,
            n_heads,
            n_heads,
            self.own_head_dim,
            self.independent_mlp_width,
            self.norm_eps,
        )


class IndependentDrafter(Drafter):
    """The trained model: embeddings, decoder layers and final norm."""

    config_class = IndependentSizes
    config: IndependentSizes
    by_graph = drafts_remotely = True
    context_width = 0
    uses_target_head = False

    def __init__(self, config: IndependentSizes) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.independent_width)
        self.layers = nn.ModuleList(
            DecoderBlock(config.own_block) for _ in range(config.independent_layers)
        )
        self.norm = RMSNorm(config.independent_width, eps=config.norm_eps)
        self.rotary = Rotary(
            config.own_head_dim, config.rope_parameters, config.max_position_embeddings
        )

    @classmethod
    @override
    def loss_positions(cls, response_mask: Tensor, draws: Draws) -> Tensor:
        return response_mask.bool()

    def forward(self, tokens: Tensor, queries: Tensor) -> Tensor:
        """Run the model over tokens [B, T], and return features [B, Q, W] at positions [B, Q]."""
        return self.norm(
            causal_features(self.blocks, self.rotary, self.embed_tokens(tokens), queries)
        )

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch: the forward KL to the target's distribution."""
        inputs = step.inputs
        queries, valid = loss_queries(inputs.response_mask.bool())
        indices = true_indices(valid)
        features = self(inputs.tokens, queries)[indices]  # Features, [P, W].
        goal = at_queries(inputs.hidden, queries)[indices]  # Target states, [P, E].
        total, _ = losses.chunked_losses(
            features[:, None], goal, frozen.lm_head_weight, features.new_ones(len(features), 1, 1),
            own_head=self.embed_tokens.weight, divergence=step.weights.divergence,
            cap=frozen.logit_cap,
        )  # fmt: skip
        mean = total * step.scale(len(features))
        return {"loss": step.weights.forward_kl * mean, "forward_kl": mean}

    @override
    def drafted_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws
    ) -> DraftedFeatures:
        # The model reads only tokens, so its features do not depend on where draft rounds start.
        queries, valid, _ = round_queries(inputs.response_mask, draws, first=0)
        return DraftedFeatures(queries, valid, self(inputs.tokens, queries))

    @override
    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        return self.over_all_tokens(self.own_logits(features))

    @property
    @override
    def own_head(self) -> Tensor:
        return self.embed_tokens.weight

    @override
    def new_state(self, n_rows: int) -> LayerState:
        return LayerState(n_rows, self.config.independent_layers)

    @override
    def draft_root(
        self,
        state: LayerState,
        frozen: FrozenTarget,
        committed: CommittedTokens,
        cache: KVSource,
    ) -> Tensor:
        tokens, _, counts = state.take_round(committed, self.embed_tokens.weight.device)
        x, _ = state.feed_committed(self.blocks, self.rotary, self.embed_tokens(tokens), counts)
        return self.norm(x)

    @override
    def draft_level(
        self, state: LayerState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource
    ) -> Tensor:
        x = state.feed_level(self.blocks, self.rotary, self.embed_tokens(level.tokens), level)
        return self.norm(x)
