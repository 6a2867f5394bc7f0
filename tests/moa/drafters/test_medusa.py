"""Medusa keeps the contract; heads begin as the target's and are each trained one step further."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moa_data.moa.drafters.medusa import HEAD_DECAY, MedusaDrafter, MedusaSizes
from moa_data.moa.drafters.training import LossWeights, TrainingInputs, TrainingStep
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.facts import TargetFacts
from moa_data.tests.kit.drafters import (
    NO_DRAWS,
    assert_loss,
    batch_with,
    build_medusa,
    weight_of_positions,
)
from moa_data.tests.kit.models import build_model

from .contract import DrafterContract


class TestMedusa(DrafterContract):
    kind = "medusa"
    draws_weights = False


@pytest.mark.slow
class TestTwoLayersPerHead(DrafterContract):
    kind = "medusa"
    sizes = {"medusa_layers": 2}
    draws_weights = False


@torch.no_grad()
def test_untrained_heads_say_what_the_target_says() -> None:
    model = build_model()
    drafter, hidden = (
        MedusaDrafter(MedusaSizes.from_target(TargetFacts.of_model(model), medusa_layers=2)),
        torch.randn(3, 48),
    )
    drafter.initialize()
    assert len(drafter.heads) == 6
    for head in drafter.heads:
        torch.testing.assert_close(head(hidden), hidden)


def plain_loss(drafter: Any, frozen: FrozenTarget, inputs: TrainingInputs) -> Tensor:
    """Compute the loss by its definition, position by position.

    Head k at position t learns the target's distribution at t + k, within one response.
    """
    response, n_heads = inputs.response_mask.bool(), len(drafter.heads)
    total, share = torch.zeros(()), sum(HEAD_DECAY**k for k in range(1, n_heads + 1))
    n_positions = int(response[:, 1:].sum())
    for row in range(len(response)):
        for k, head in enumerate(drafter.heads, start=1):
            for t in range(response.shape[1] - k):
                if response[row, t + 1 : t + k + 1].all():
                    teacher = frozen.logits(inputs.hidden[row, t + k]).softmax(dim=-1)
                    learned = frozen.logits(head(inputs.hidden[row, t]))
                    total = total + HEAD_DECAY**k * F.cross_entropy(learned, teacher)
    return total / share / (n_positions + 1e-5)


@pytest.mark.parametrize(
    ("n_heads", "responses"),
    [(4, [(0, 2, 6), (0, 9, 14), (1, 0, 3), (2, 3, 4)]), (6, [(0, 0, 3), (1, 0, 3)])],
)
def test_loss_and_gradient_equal_a_plain_reference(
    n_heads: int, responses: list[tuple[int, int, int]]
) -> None:
    """Some rows have two responses, rows shorter than the reach of the heads, or padding."""
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_medusa(model, medusa_heads=n_heads)
    inputs = batch_with(drafter, model, (3, max(stop for *_, stop in responses)), *responses)
    step = TrainingStep(inputs, NO_DRAWS, LossWeights(forward_kl=1.0))
    assert_loss(drafter, frozen, step, plain_loss(drafter, frozen, inputs))
    n_positions = int(inputs.response_mask[:, 1:].sum())
    assert weight_of_positions(drafter, frozen, step) == pytest.approx(n_positions)


@torch.no_grad()
def test_one_distribution_serves_a_level() -> None:
    """The shared logits of a level equal the logits of each of its nodes."""
    model = build_model()
    drafter, frozen = build_medusa(model), FrozenTarget.from_model(model)
    for features in (torch.randn(2, 1, 48).expand(-1, 5, -1), torch.randn(2, 5, 48)):
        torch.testing.assert_close(
            drafter.draft_logits(frozen, features), frozen.logits(features.contiguous())
        )
