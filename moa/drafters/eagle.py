"""EAGLE drafter (Li et al., ICML 2024, arXiv 2401.15077; trees of EAGLE-2, arXiv 2406.16858): one decoder layer.

Shapes: B batch, T tokens, Q queries, E target width, b nodes of one level, n tokens of one call, S slots.

    [embedding of token t+1 ; hidden state of token t] -> linear 2E -> E -> decoder layer(s) -> feature of token t+1

Hidden states are the target's AFTER its final norm, what transformers gives as ``hidden_states[-1]`` and the store as
``hidden/last``: the LM head turns them, and the features that stand for them, into logits with no norm in between. The
official code has the same convention (``train/eagle.py``).

Slot t of the drafter's cache is made from the hidden state of position t and the token at t+1, and its RoPE position is
t. In slots before the root's the hidden states are the target's own; behind it they are the drafter's, and each round
makes those of accepted tokens anew.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from ..nn.layers import DecoderBlock, Rotary
from ..target.bundle import FrozenTarget, target_sizes
from .causal_layers import causal_features
from .feature import FeatureDrafter
from .rounds import Draws, at_queries, loss_queries
from .sizes import DrafterSizes, target_facts
from .training import DEFAULT_WEIGHTS, LossTerms, LossWeights, TrainingInputs, distillation, loss_scale


@dataclass(frozen=True, kw_only=True)
class EagleSizes(DrafterSizes):
    """Everything needed to rebuild an EAGLE drafter and to know which target it belongs to."""

    kind: ClassVar[str] = "eagle"

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
    def from_target(cls, config: Any, target: dict[str, str] | None = None, **sizes: Any) -> Self:
        """One layer of the target's own shape where not given otherwise; see :meth:`DrafterSizes.from_target`."""
        defaults = {
            "self_attention_kv_heads": target_sizes(config)["n_kv_heads"],
            "self_attention_mlp_width": config.intermediate_size,
        }
        given = {name: value for name, value in sizes.items() if value is not None}
        return cls(**target_facts(config, target), **(defaults | given))


class EagleDrafter(FeatureDrafter):
    """The trained part: the linear layer that joins token and hidden state, and the decoder layers."""

    kind: ClassVar[str] = EagleSizes.kind
    config_class: ClassVar[type[DrafterSizes]] = EagleSizes
    training_options: ClassVar[frozenset[str]] = frozenset({"feature_noise", "feature_weight", "official_quirks"})
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
    def blocks(self) -> list[DecoderBlock]:
        """:attr:`layers` with their type."""
        return cast(list[DecoderBlock], list(self.layers))

    @classmethod
    def needs(cls, n_layers: int, target_layer_inference: int) -> dict[str, str]:
        """The last hidden state alone."""
        return {"hidden": "hidden/last"}

    def join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings of tokens t+1 and hidden states of tokens t, each [..., E] -> input of the layers [..., E]."""
        joined = self.fc(torch.cat((embeddings, hidden), dim=-1))
        return joined.to(embeddings.dtype)  # under autocast the residual stream keeps its precision

    def forward(self, joined: Tensor, queries: Tensor | None = None) -> Tensor:
        """The layers over whole sequences.

        Args:
            joined: [B, S, E], slots 0..S-1.
            queries: [B, Q] int64 slots to compute features for; None = all.

        Returns:
            [B, Q, E]: of slot t the feature of token t+1.
        """
        return causal_features(self.blocks, self.rotary, joined, queries)

    def objective(
        self,
        frozen: FrozenTarget,
        inputs: TrainingInputs,
        draws: Draws,
        weights: LossWeights = DEFAULT_WEIGHTS,
        official: bool = False,
        denominator: float | None = None,
    ) -> LossTerms:
        """Loss of one mini-batch, see :func:`eagle_objective`; the noise is drawn from the seeds of the draws."""
        noise = _draw_noise(draws, inputs.hidden, 2 if official else 1)
        return eagle_objective(self, frozen, inputs, weights, noise, official, denominator)


def eagle_objective(
    drafter: EagleDrafter,
    frozen: FrozenTarget,
    inputs: TrainingInputs,
    weights: LossWeights = DEFAULT_WEIGHTS,
    noise: Tensor | None = None,
    official: bool = False,
    denominator: float | None = None,
) -> LossTerms:
    """Loss of one mini-batch (EAGLE section 3.2 with the weights of the MoA paper; official ``train/eagle.py``).

    Args:
        drafter: trained part.
        frozen: target pieces.
        inputs: stored activations; only tokens, response mask and hidden states are looked at.
        weights: of the terms.
        noise: [1 or 2, B, T, E], added to the hidden states and, where there is a second one, to the embeddings; None
            for none.
        official: the noise is added in place, to the targets of both terms too (``train/eagle.py``, lines 104-105).
        denominator: what the sums are divided by; the number of loss positions (+ 1e-5) where None.
    """
    embeddings = frozen.embed(inputs.tokens)[:, 1:]
    hidden = inputs.hidden.to(embeddings.dtype)
    noisy = hidden
    if noise is not None:
        noisy = hidden + noise[0]
        if len(noise) > 1:
            embeddings = embeddings + noise[1][:, 1:]
    queries, valid = loss_queries(inputs.response_mask[:, 1:].bool())
    features = drafter(drafter.join(embeddings, noisy[:, :-1]), queries)[valid]  # [P, E]
    goal = at_queries((noisy if official else hidden)[:, 1:], queries)[valid]
    n_positions = int(valid.sum())
    kl, feature = distillation(frozen, features, goal, loss_scale(n_positions, denominator))
    return LossTerms(weights.forward_kl * kl + weights.feature * feature, kl, feature, n_positions)


def _draw_noise(draws: Draws, hidden: Tensor, n_streams: int) -> Tensor | None:
    """Uniform noise [n_streams, B, T, E] in plus or minus half the width; each row has its own seed."""
    if not draws.noise_seeds or not draws.noise_width:
        return None
    rows = []
    for seed in draws.noise_seeds:
        generator = torch.Generator(hidden.device).manual_seed(seed)
        # Tokens first, so that what a token gets does not depend on the padding behind it.
        shape = hidden.shape[1], n_streams, hidden.shape[2]
        rows.append(torch.rand(shape, generator=generator, device=hidden.device))
    return (torch.stack(rows) - 0.5).permute(2, 0, 1, 3) * draws.noise_width
