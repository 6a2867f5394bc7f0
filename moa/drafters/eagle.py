"""EAGLE drafter (Li et al., ICML 2024, arXiv 2401.15077; trees of EAGLE-2, arXiv 2406.16858): one decoder layer.

Shapes: B batch, T tokens, Q queries, P loss positions, E target width, S slots.

    [embedding of token t+1 ; hidden state of token t] -> linear 2E -> E -> decoder layer(s) -> feature of token t+1

Hidden states are the target's AFTER its final norm, what transformers gives as ``hidden_states[-1]`` and the store as
``hidden/last``: the LM head turns them, and the features that stand for them, into logits with no norm in between. The
official code has the same convention (``train/eagle.py``).

Slot t of the drafter's cache is made from the hidden state of position t and the token at t+1, and its RoPE position is
t. In slots before the root's the hidden states are the target's own; behind it they are the drafter's, and each round
makes those of accepted tokens anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..nn.layers import DecoderBlock, Rotary
from ..targets.bundle import FrozenTarget, target_sizes
from ..targets.cache import ContextCache
from .causal_layers import causal_features
from .feature import FeatureDrafter, FeatureState
from .rounds import Draws, at_queries, loss_queries
from .sizes import DrafterSizes
from .training import LossTerms, TrainingStep, distillation, loss_scale


@dataclass(frozen=True, kw_only=True)
class EagleSizes(DrafterSizes):
    """Everything needed to rebuild an EAGLE drafter and to know which target it belongs to."""

    kind: ClassVar[str] = "eagle"
    module_counts: ClassVar[tuple[str, ...]] = ("eagle_layers",)

    self_attention_kv_heads: int
    """KV heads of each layer."""
    self_attention_mlp_width: int
    """MLP width of each layer."""
    eagle_layers: int = 1
    """Decoder layers."""
    eagle_input_norm: bool = True
    """The first layer has a norm before its attention, as in the MoA authors' EAGLE; the EAGLE authors' has none."""
    eagle_fc_bias: bool = False
    """The linear layer that joins token and hidden state has a bias, as in some of the EAGLE authors' checkpoints."""

    def __post_init__(self) -> None:
        self.check_kv_heads("self_attention_kv_heads")
        self.check_at_least_one("eagle_layers")

    @classmethod
    @override
    def defaults(cls, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "self_attention_kv_heads": target_sizes(config)["n_kv_heads"],
            "self_attention_mlp_width": config.intermediate_size,
        }


class EagleDrafter(FeatureDrafter):
    """The trained part: the linear layer that joins token and hidden state, and the decoder layers."""

    kind: ClassVar[str] = EagleSizes.kind
    config_class: ClassVar[type[DrafterSizes]] = EagleSizes
    config: EagleSizes

    def __init__(self, config: EagleSizes) -> None:
        super().__init__()
        self.config = config
        sizes = config.block(config.self_attention_kv_heads, config.self_attention_mlp_width, config.qkv_bias)
        first = replace(sizes, input_norm=config.eagle_input_norm)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.eagle_fc_bias)
        self.layers = nn.ModuleList(DecoderBlock(sizes if i else first) for i in range(config.eagle_layers))
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    @property
    @override
    def blocks(self) -> list[DecoderBlock]:
        return cast(list[DecoderBlock], list(self.layers))

    @override
    def join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        joined: Tensor = self.fc(torch.cat((embeddings, hidden), dim=-1))
        return joined.to(embeddings.dtype)  # under autocast the residual stream keeps its precision

    @property
    @override
    def context_width(self) -> int | None:
        return self.config.hidden_size

    @override
    def _make_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        return hidden

    @override
    def _take_context(self, state: FeatureState, cache: ContextCache, context: Tensor) -> None:
        state.fresh[0].append(context)
        cache.extend(len(context), None, 0)

    def forward(self, joined: Tensor, queries: Tensor | None = None) -> Tensor:
        """Run the layers over whole sequences; slot t gives the feature of token t+1.

        Args:
            joined: [B, S, E], slots 0..S-1.
            queries: [B, Q] int64 slots to compute features for; None = all.

        Returns:
            [B, Q, E].
        """
        return causal_features(self.blocks, self.rotary, joined, queries)

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch (EAGLE section 3.2 with the weights of the MoA paper)."""
        inputs, weights = step.inputs, step.weights
        embeddings = frozen.embed(inputs.tokens)[:, 1:]
        hidden = inputs.hidden.to(embeddings.dtype)
        noise = _draw_noise(step.draws, inputs.hidden)
        seen = hidden if noise is None else hidden + noise
        queries, valid = loss_queries(inputs.response_mask[:, 1:].bool())
        features = self(self.join(embeddings, seen[:, :-1]), queries)[valid]  # [P, E]
        goal = at_queries(hidden[:, 1:], queries)[valid]
        n_positions = int(valid.sum())
        scale = loss_scale(n_positions, step.denominator)
        kl, feature = distillation(frozen, features, goal, scale, step.weights.divergence)
        return LossTerms(weights.forward_kl * kl + weights.feature * feature, kl, feature, n_positions)


def _draw_noise(draws: Draws, hidden: Tensor) -> Tensor | None:
    """Draw uniform noise [B, T, E] in plus or minus half the width; each row has its own seed."""
    if not draws.seeds or not draws.noise_width:
        return None
    rows = []
    for seed in draws.seeds:
        # What a token gets does not depend on the padding behind it, for the tokens come first.
        generator = torch.Generator(hidden.device).manual_seed(seed)
        rows.append(torch.rand(hidden.shape[1:], generator=generator, device=hidden.device))
    return (torch.stack(rows) - 0.5) * draws.noise_width
