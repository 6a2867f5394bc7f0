"""What the released code does otherwise than this package, on top of the package's own blocks.

Why the package differs is told in docs/decisions/0001. File names and lines are those of ``moa_spec/models`` in
huawei-noah/HEBO, branch ``mixture-of-attentions``.
"""

from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from moa_data.moa.drafters.eagle import EagleDrafter
from moa_data.moa.drafters.glide import GlideDrafter, block_context
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.drafters.training import (
    Draws,
    LossTerms,
    Rounds,
    TrainingInputs,
    TrainingStep,
    distillation,
)
from moa_data.moa.nn import masks
from moa_data.moa.nn.kv import rotate_packed_keys
from moa_data.moa.targets.bundle import FrozenTarget

NO_DRAWS = Draws(None, torch.zeros(1, dtype=torch.bool))


def everywhere(draws: Draws, response_mask: Tensor) -> Rounds:
    """Rounds of every position, context too, which sees its own KV; loss lies on the whole response."""
    drafted = masks.drafted_positions(response_mask, draws.step_bound, draws.offset)
    queries = torch.arange(drafted.shape[1]).expand_as(drafted)
    return Rounds(
        queries,
        masks.last_context(drafted),
        drafted,
        response_mask.bool().float(),
        draws.staircase_rows[:, None].expand_as(drafted),
        torch.zeros_like(queries[0]),
    )


def moa_forward(
    drafter: MoADrafter, frozen: FrozenTarget, inputs: TrainingInputs, rounds: Rounds
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite context positions before target layer inference, and make all keys anew from that stream.

    They are overwritten with the target's own hidden state (``train/moa_spec.py``, lines 223-251). Returns what enters
    the last layers, what leaves them, and features.
    """
    entering, features = drafter(frozen, inputs.tokens, inputs.kv, rounds)
    if inputs.entering_hidden is None:
        return entering, entering, features
    entering = torch.where(rounds.drafted[..., None], entering, inputs.entering_hidden)
    positions = torch.arange(entering.shape[1])
    causal = (positions[None, :] <= positions[:, None])[None]
    assert set(frozen.windows) == {None}, "the released code knows no windows"
    leaving = entering
    for layer in frozen.blocks:
        leaving = layer.attend_self(leaving, frozen.rotary(positions[None]), causal)
    return entering, leaving, frozen.norm(leaving)


def eagle_objective(
    drafter: EagleDrafter, frozen: FrozenTarget, inputs: TrainingInputs, noise: Tensor
) -> LossTerms:
    """Add noise [2, B, T, E] to hidden states and embeddings in place, which spoils the goals of both terms too.

    See ``train/eagle.py``, lines 104-105.
    """
    embeddings = frozen.embed(inputs.tokens) + noise[1]
    with patch.object(frozen, "embed", lambda tokens: embeddings):
        return drafter.objective(
            frozen, TrainingStep(replace(inputs, hidden=inputs.hidden + noise[0]), NO_DRAWS)
        )


def glide_features(
    drafter: GlideDrafter, frozen: FrozenTarget, inputs: TrainingInputs
) -> tuple[Tensor, Tensor]:
    """Features of all positions [B, T, E], and what each sees: blocks begin at 0, the first attends to all keys alike.

    See ``train/glide.py``, lines 145-147. The target's keys are rotated a second time (``train/cross_attention.py``,
    lines 241-242).
    """
    assert inputs.kv is not None
    n_tokens = inputs.tokens.shape[1]
    positions = torch.arange(n_tokens)[None]
    seen = masks.Mask.up_to(block_context(positions, drafter.config.block_size), n_tokens).dense
    # The least number is added to the scores, beside which they are lost. Fused kernels get the
    # gradients of a query without a key wrong: with the scores the logarithm of how many keys there
    # are is lost too.
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with sdpa_kernel(SDPBackend.MATH):
        return drafter(
            frozen, inputs.tokens, rotated_twice(drafter, inputs.kv), added, positions
        ), seen


def rotated_twice(drafter: GlideDrafter, kv: Tensor) -> Tensor:
    """The last layer of KV [1, T, L, D] with keys rotated once more, [1, T, 1, D]."""
    return rotate_packed_keys(kv[0, :, -1:], drafter.rotary(torch.arange(kv.shape[1])))[None]


def glide_objective(frozen: FrozenTarget, inputs: TrainingInputs, features: Tensor) -> LossTerms:
    """Forward KL on the whole response, position 0 included."""
    response = inputs.response_mask.bool()
    n_positions = int(response.sum())
    kl, feature = distillation(
        frozen, features[response], inputs.hidden[response], 1 / (n_positions + 1e-5)
    )
    return LossTerms(0.1 * kl, kl, feature.detach(), n_positions)
