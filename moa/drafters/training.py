"""Inputs and outputs of training objectives, and the loss terms that drafters share.

Shapes: B batch, T tokens, P loss positions, L target layers, D packed KV width, E target width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..nn import losses
from ..targets.bundle import FrozenTarget
from .rounds import Draws


@dataclass(frozen=True)
class Reads:
    """What training reads of a store besides tokens, response masks and the last hidden state.

    Attributes:
        kv: whether it reads the target's KV.
        kv_layers: of which layers, ascending, negative ones counted from the last; None for all.
        entering_layer: the layer whose output enters the last N target layers; None where that is not read.
        outputs: decoder layers whose outputs become ``TrainingInputs.layer_outputs``.
    """

    kv: bool = False
    kv_layers: tuple[int, ...] | None = None
    entering_layer: int | None = None
    outputs: tuple[int, ...] = ()

    @property
    def fields(self) -> dict[str, str]:
        """Attribute of :class:`TrainingInputs` -> field of the store, without the outputs of layers."""
        found = {"kv": "kv"} if self.kv else {}
        found["hidden"] = "hidden/last"
        if self.entering_layer is not None:
            found["entering_hidden"] = f"hidden/layer_{self.entering_layer}"
        return found


@dataclass
class TrainingInputs:
    """One mini-batch of stored activations, right padded."""

    tokens: Tensor
    """[B, T] int64."""
    response_mask: Tensor
    """[B, T], non-zero on response tokens (position i predicts token i + 1)."""
    kv: Tensor | None
    """[B, T, L, D], keys (after RoPE) and values of all layers, or of those that the drafter reads (:class:`Reads`);
    None for a drafter that does not need them."""
    hidden: Tensor
    """[B, T, E], target hidden state after the final norm."""
    entering_hidden: Tensor | None = None
    """[B, T, E], hidden state that enters the last N target layers; needed when N > 0."""
    layer_outputs: tuple[Tensor, ...] = ()
    """[B, T, E] each, outputs of the decoder layers that the drafter reads (:class:`Reads`), before any norm."""


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms; the defaults are those of the papers, of forward KL and feature MoA's Table 6."""

    forward_kl: float = 0.1
    feature: float = 1.0
    cross_entropy: float = 0.1
    """Of block-parallel drafters, as the two below: to the tokens of the text."""
    l1: float = 0.9
    """The L1 distance of drafter's and target's distributions."""
    confidence: float = 1.0
    """The binary cross-entropy of the confidence head."""
    divergence: losses.Divergence = losses.KL
    """What takes the place of the forward KL in its term."""

    @classmethod
    def of(cls, settings: Any) -> "LossWeights":
        """Make the weights that the settings of a drafter in training call for."""
        divergence = losses.Divergence(settings.divergence, settings.lk_decay)
        return cls(**settings.loss_weights(), divergence=divergence)


@dataclass(frozen=True)
class TrainingStep:
    """A mini-batch, the random draws that go with it, and how its loss is weighed."""

    inputs: TrainingInputs
    draws: Draws
    weights: LossWeights = LossWeights()
    denominator: float | None = None
    """Divisor of sums over loss positions; None for their number (or weight) + 1e-5."""


@dataclass
class LossTerms:
    """Scalars of one mini-batch, each a sum over loss positions divided by the denominator.

    The forward KL is what takes its place, where another divergence is trained.
    """

    total: Tensor
    forward_kl: Tensor
    feature: Tensor | None
    """The feature loss; None for a drafter whose features are not compared with hidden states."""
    n_positions: int
    entering_feature: Tensor | None = None
    """The feature loss before the target's last layers; None without target layer inference."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Further terms by name, for logs."""


def loss_scale(n_positions: float, denominator: float | None) -> float:
    """The factor of sums over loss positions; without a denominator 1 / (positions + 1e-5), as in the released code."""
    return 1.0 / (denominator if denominator is not None else n_positions + 1e-5)


def distillation(
    frozen: FrozenTarget,
    features: Tensor,
    hidden: Tensor,
    scale: float | Tensor,
    divergence: losses.Divergence = losses.KL,
) -> tuple[Tensor, Tensor]:
    """Sum the two loss terms that drafters share, forward KL and feature loss, over positions: two scalars.

    Args:
        features: [P, E], the drafter's.
        hidden: [P, E], the target's.
        scale: factor of all positions, or [P], of each.
        divergence: takes the place of the forward KL.
    """
    kl = losses.chunked_forward_kl(features, hidden, frozen.lm_head_weight, divergence=divergence)
    return (kl * scale).sum(), (losses.feature_loss(features, hidden) * scale).sum()
