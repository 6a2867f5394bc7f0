"""What the released code computes differently, built on this package's own blocks.

docs/decisions/0001 explains why the package differs. File names and line numbers are those of
``moa_spec/models`` in huawei-noah/HEBO, branch ``mixture-of-attentions``.
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
from moa_data.moa.nn.layers import no_cache
from moa_data.moa.targets.bundle import FrozenTarget

NO_DRAWS = Draws(None, torch.zeros(1, dtype=torch.bool))


def everywhere(draws: Draws, response_mask: Tensor) -> Rounds:
    """Draw rounds of every position, also of the context, which sees its own KV.

    The loss covers the whole response.
    """
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
    """Replace context positions before target layer inference, and recompute all keys.

    Keys are computed from the replaced stream. Its context positions become the target's own hidden
    states (``train/moa_spec.py``, lines 223-251).

    Returns:
        The input of the last layers, their output, and the features.
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
        leaving = layer.attend_cached(leaving, frozen.rotary(positions[None]), no_cache, causal)
    return entering, leaving, frozen.norm(leaving)


def eagle_objective(
    drafter: EagleDrafter, frozen: FrozenTarget, inputs: TrainingInputs, noise: Tensor
) -> LossTerms:
    """Add noise [2, B, T, E] to hidden states and embeddings in place.

    In the released code this also spoils the targets of both loss terms. See ``train/eagle.py``,
    lines 104-105.
    """
    embeddings = frozen.embed(inputs.tokens) + noise[1]
    with patch.object(frozen, "embed", lambda tokens: embeddings):
        return drafter.objective(
            frozen, TrainingStep(replace(inputs, hidden=inputs.hidden + noise[0]), NO_DRAWS)
        )


def glide_features(
    drafter: GlideDrafter, frozen: FrozenTarget, inputs: TrainingInputs
) -> tuple[Tensor, Tensor]:
    """Return features of all positions [B, T, E], and the mask of what each position sees.

    Blocks begin at 0, and the first block attends to all keys equally. See ``train/glide.py``,
    lines 145-147. The target's keys are rotated a second time (``train/cross_attention.py``, lines
    241-242).
    """
    assert inputs.kv is not None
    n_tokens = inputs.tokens.shape[1]
    positions = torch.arange(n_tokens)[None]
    seen = masks.Mask.up_to(block_context(positions, drafter.config.block_size), n_tokens).dense
    # The lowest float32 is added to the scores and absorbs them. Fused kernels compute wrong
    # gradients for a query without visible keys, because they also lose the logarithm of the number
    # of keys.
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with sdpa_kernel(SDPBackend.MATH):
        return drafter(
            frozen, inputs.tokens, rotated_twice(drafter, inputs.kv), added, positions
        ), seen


def rotated_twice(drafter: GlideDrafter, kv: Tensor) -> Tensor:
    """Rotate the keys of KV's last layer [1, T, L, D] once more; return them as [1, T, 1, D]."""
    return rotate_packed_keys(kv[0, :, -1:], drafter.rotary(torch.arange(kv.shape[1])))[None]


def glide_objective(frozen: FrozenTarget, inputs: TrainingInputs, features: Tensor) -> LossTerms:
    """Compute the forward KL on the whole response, position 0 included."""
    response = inputs.response_mask.bool()
    n_positions = int(response.sum())
    kl, feature = distillation(
        frozen, features[response], inputs.hidden[response], 1 / (n_positions + 1e-5)
    )
    return {"loss": 0.1 * kl, "forward_kl": kl, "feature_loss": feature}
