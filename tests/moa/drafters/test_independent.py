"""The independent drafter keeps the contract; its loss is as defined and reads no activations."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moa_data.moa.drafters.caches import causal_features
from moa_data.moa.drafters.training import LossWeights, TrainingStep
from moa_data.moa.nn import masks
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.tests.kit.drafters import (
    NO_DRAWS,
    assert_loss,
    batch_with,
    build_independent,
    weight_of_positions,
)
from moa_data.tests.kit.models import build_model

from .contract import CHAIN, WINDOW, DrafterContract


class TestIndependent(DrafterContract):
    kind = "independent"
    learns_in = 12
    family, speed_shape = WINDOW, CHAIN


@pytest.mark.slow
class TestThreeLayers(DrafterContract):
    kind = "independent"
    sizes = {"independent_layers": 3, "independent_width": 24}


def test_loss_and_gradient_equal_a_plain_reference() -> None:
    """The loss equals the definition of the forward KL.

    The tied embedding gets the gradients of both of its uses.
    """
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_independent(model)
    inputs = batch_with(drafter, model, (2, 15), (0, 6, 15), (1, 0, 4))
    response = inputs.response_mask
    logits = drafter(inputs.tokens, torch.arange(15).expand(2, -1)) @ drafter.embed_tokens.weight.T
    teacher = frozen.logits(inputs.hidden).softmax(dim=-1)
    expected = F.cross_entropy(logits[response], teacher[response], reduction="sum") / 13
    step = TrainingStep(inputs, NO_DRAWS, LossWeights(forward_kl=1.0), 13)
    assert_loss(drafter, frozen, step, expected)
    assert weight_of_positions(drafter, frozen, step) == pytest.approx(13)


def test_training_can_be_repeated_bit_for_bit() -> None:
    """The gradients of the input of the projections are added in a fixed order."""
    drafter: Any = build_independent(build_model())
    x = torch.randn(2, 20, drafter.config.independent_width, requires_grad=True)
    queries = torch.arange(20).expand(2, -1)
    rotation = drafter.rotary(queries[:1])
    causal = masks.Mask.up_to(queries[:1], 20)
    first, last = drafter.layers
    normed = first.normed(x)
    keys, values = first.self_attn.keys_values(normed, rotation)
    attended = first.self_attn(first.self_attn.queries(normed, rotation), keys, values, causal)
    middle = first.finish(x, attended)
    expected = causal_features([last], drafter.rotary, middle, queries)
    got = causal_features(drafter.layers, drafter.rotary, x, queries)
    pair = [torch.autograd.grad(features.square().sum(), x)[0] for features in (got, expected)]
    assert torch.equal(*pair)
