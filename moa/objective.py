"""What training objectives are made of, and the objective of Mixture of Attentions.

Shapes: B batch, T tokens, Q queries, P loss positions, L target layers, D packed KV width, E target width.

Two forms of :func:`moa_objective`. ``inference`` (default) puts loss exactly on the positions that decoding can reach,
and lets drafted features see the target's own KV of verified positions in target layer inference. ``official`` repeats
the released code: context positions inside a response, which see their own KV, carry loss too, and target layer
inference overwrites them in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import losses, masks
from .bundle import FrozenTarget
from .errors import DrafterError

if TYPE_CHECKING:
    from .model import DrafterOutputs, MoADrafter


@dataclass
class TrainingInputs:
    """One mini-batch of stored activations, right padded."""

    tokens: Tensor
    """[B, T] int64."""
    response_mask: Tensor
    """[B, T], non-zero on response tokens (position i predicts token i + 1)."""
    kv: Tensor | None
    """[B, T, L, D], keys (after RoPE) and values of all layers, or of those that the drafter reads (``kv_layers``);
    None for a drafter that does not need them."""
    hidden: Tensor
    """[B, T, E], target hidden state after the final norm."""
    entering_hidden: Tensor | None = None
    """[B, T, E], hidden state that enters the last N target layers; needed when N > 0."""
    layer_outputs: tuple[Tensor, ...] = ()
    """[B, T, E] each, outputs of the decoder layers that the drafter reads (``needed_layers``), before any norm."""


@dataclass
class Draws:
    """The random draws of one step, per row."""

    step_bound: Tensor | None
    """[B] int64, see :func:`masks.drafted_positions`; None for no bound."""
    staircase_rows: Tensor
    """[B] bool, see :func:`masks.self_attention_mask`."""
    offset: Tensor | None = None
    """[B] int64, phase of the step bound; None for 0."""
    noise_seeds: tuple[int, ...] = ()
    """One per row, of the noise on the target's hidden states; empty for no noise."""
    noise_width: float = 0.0
    """The noise is uniform in plus or minus half of this."""
    on_policy_weight: float = 1.0
    """Of a position in the pass that trains what draft rounds see; 0 leaves the pass out."""
    teacher_forced_weight: float = 0.0
    """Of a position in the pass in which each one is the first draft of its own round and sees the target's activations
    up to its predecessor, whatever the step bound: what the paper calls standard training. 0 leaves it out."""

    def passes(self, response_mask: Tensor) -> list[tuple[float, Tensor, Tensor]]:
        """The passes over response masks [B, T] whose weight is above 0, on-policy before teacher-forced.

        Returns:
            Weight, drafted positions [B, T] bool, last context position of each [B, T] int64.
        """
        found = []
        if self.on_policy_weight:
            drafted = masks.drafted_positions(response_mask, self.step_bound, self.offset)
            found.append((self.on_policy_weight, drafted, masks.last_context(drafted)))
        if self.teacher_forced_weight:
            found.append((self.teacher_forced_weight, *masks.teacher_forced_positions(response_mask)))
        return found

    def position_weights(self, response_mask: Tensor) -> Tensor:
        """Weight of each position in the loss, of response masks [B, T], all passes together: [B, T] float32."""
        return torch.stack([weight * drafted for weight, drafted, _ in self.passes(response_mask)]).sum(dim=0)


@dataclass
class Rounds:
    """The draft rounds that a step trains: positions to draft for, and what each of them sees."""

    queries: Tensor
    """[B, Q] int64, positions."""
    context: Tensor
    """[B, Q] int64, last position whose target activations the query sees."""
    drafted: Tensor
    """[B, Q] bool; the others are padding, or context positions in the official form."""
    weights: Tensor
    """[B, Q] float32 in the loss, 0 for no part in it."""
    staircase: Tensor
    """[B, Q] bool, see :func:`masks.self_attention_mask`."""
    pass_index: Tensor
    """[Q] int64; queries of different passes do not see each other."""

    @classmethod
    def packed(cls, draws: Draws, response_mask: Tensor) -> Rounds:
        """The drafted positions of all passes over response masks [B, T], those of a pass packed to the left."""
        parts: list[dict[str, Tensor]] = []
        for index, (weight, drafted, context) in enumerate(draws.passes(response_mask)):
            queries, valid = loss_queries(drafted)
            # With one token to a round the drafted block would be the token itself.
            own_block = draws.staircase_rows[:, None] & (index == 0 and draws.on_policy_weight > 0)
            parts.append(
                {
                    "queries": queries,
                    "context": context.gather(1, queries),
                    "drafted": valid,
                    "weights": weight * valid,
                    "staircase": own_block.expand_as(valid),
                    "pass_index": torch.full_like(queries[0], index),
                }
            )
        return cls(**{name: torch.cat([part[name] for part in parts], dim=-1) for name in parts[0]})

    @classmethod
    def everywhere(cls, draws: Draws, response_mask: Tensor) -> Rounds:
        """Every position of the on-policy pass, with loss on the whole response, as the official code has it."""
        drafted = masks.drafted_positions(response_mask, draws.step_bound, draws.offset)
        queries = torch.arange(drafted.shape[1], device=drafted.device).expand_as(drafted)
        return cls(
            queries,
            masks.last_context(drafted),
            drafted,
            response_mask.bool().float(),
            draws.staircase_rows[:, None].expand_as(drafted),
            torch.zeros_like(queries[0]),
        )


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms; the defaults are the paper's Table 6."""

    forward_kl: float = 0.1
    feature: float = 1.0


DEFAULT_WEIGHTS = LossWeights()


@dataclass
class LossTerms:
    """Scalars of one mini-batch, each a sum over loss positions divided by the denominator."""

    total: Tensor
    forward_kl: Tensor
    feature: Tensor | None
    """Of the features; None for a drafter whose features are not compared with hidden states."""
    n_positions: int
    entering_feature: Tensor | None = None
    """Of the features that enter the target's last layers; None without target layer inference."""


def loss_queries(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions where a mask is set, packed to the left.

    Args:
        mask: [B, T] bool.

    Returns:
        queries [B, Q] int64 (position 0 where a row has fewer than Q) and valid [B, Q] bool; Q >= 1.
    """
    n_queries = max(1, int(mask.sum(dim=1).max()))
    order = torch.argsort(mask.int(), dim=1, descending=True, stable=True)[:, :n_queries]
    valid = mask.gather(1, order)
    return torch.where(valid, order, 0), valid


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


def loss_scale(n_positions: float, denominator: float | None) -> float:
    """What sums over loss positions are multiplied by; without a denominator the official 1 / (positions + 1e-5)."""
    return 1.0 / (denominator if denominator is not None else n_positions + 1e-5)


def distillation(
    frozen: FrozenTarget, features: Tensor, hidden: Tensor, scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The two terms that all drafters share, forward KL and feature loss.

    Args:
        frozen: target pieces.
        features: [P, E], the drafter's.
        hidden: [P, E], the target's.
        scale: of all positions or, [P], of each.

    Returns:
        Sums over the scaled positions.
    """
    kl = losses.chunked_forward_kl(features, hidden, frozen.lm_head_weight)
    return (kl * scale).sum(), (losses.feature_loss(features, hidden) * scale).sum()


def at_queries(x: Tensor, queries: Tensor) -> Tensor:
    """X [B, T, E] at queries [B, Q] -> [B, Q, E]."""
    return x.gather(1, queries[..., None].expand(-1, -1, x.shape[-1]))
