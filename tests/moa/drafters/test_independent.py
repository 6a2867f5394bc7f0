"""The independent drafter keeps the contract; its loss is the definition, and it reads nothing of the target."""

import pytest
import torch
import torch.nn.functional as F

from moa_data.moa.drafters.training import LossWeights, TrainingInputs, TrainingStep
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.tests.kit.drafters import NO_DRAWS, build_independent
from moa_data.tests.kit.models import SIZES, build_model

from .contract import DrafterContract


class TestIndependent(DrafterContract):
    kind = "independent"


@pytest.mark.slow
class TestThreeLayers(DrafterContract):
    kind = "independent"
    sizes = {"independent_layers": 3, "independent_width": 24}


def test_loss_and_gradient_equal_a_plain_reference() -> None:
    """The loss beside the definition of the forward KL; the tied embedding gets both of its gradients."""
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_independent(model)
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 15))
    response = torch.zeros_like(tokens, dtype=torch.bool)
    response[0, 6:15] = response[1, 0:4] = True
    inputs = TrainingInputs(tokens, response, None, model.model(tokens).last_hidden_state)
    logits = drafter(tokens, torch.arange(15).expand(2, -1)) @ drafter.embed_tokens.weight.T
    teacher = frozen.logits(inputs.hidden).softmax(dim=-1)
    expected = F.cross_entropy(logits[response], teacher[response], reduction="sum") / 13
    goal = torch.autograd.grad(expected, list(drafter.parameters()))
    terms = drafter.objective(frozen, TrainingStep(inputs, NO_DRAWS, LossWeights(forward_kl=1.0), 13))
    torch.testing.assert_close(terms.total, expected)
    for got, want in zip(torch.autograd.grad(terms.total, list(drafter.parameters())), goal, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert terms.n_positions == 13
    assert terms.feature is None
