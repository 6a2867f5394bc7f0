"""The independent drafter keeps the contract; its loss is the definition, and it reads nothing of the target."""

import pytest
import torch
import torch.nn.functional as F

from moa_data.errors import DrafterError
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.independent import IndependentSizes
from moa_data.moa.drafters.training import LossWeights, TrainingInputs, TrainingStep
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
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
    logits = drafter(tokens) @ drafter.embed_tokens.weight.T
    teacher = frozen.logits(inputs.hidden).softmax(dim=-1)
    expected = F.cross_entropy(logits[response], teacher[response], reduction="sum") / 13
    goal = torch.autograd.grad(expected, list(drafter.parameters()))
    terms = drafter.objective(frozen, TrainingStep(inputs, NO_DRAWS, LossWeights(forward_kl=1.0), 13))
    torch.testing.assert_close(terms.total, expected)
    for got, want in zip(torch.autograd.grad(terms.total, list(drafter.parameters())), goal, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert terms.n_positions == 13
    assert terms.feature is None


def test_nothing_of_the_target_is_looked_at() -> None:
    target = Target(build_model(num_hidden_layers=2))
    drafter = build_independent(target.model)
    session = DrafterProposer(target, drafter)
    session.begin(target.new_cache())
    before = session.propose([[5, 6, 7, 8]], TreeShape(3, 2, 6)).tokens
    other = Target(build_model(seed=5, num_hidden_layers=2))
    session = DrafterProposer(other, drafter)
    session.begin(other.new_cache())
    session.observe(torch.randn(1, 3, 48), [range(3)])
    assert torch.equal(session.propose([[5, 6, 7, 8]], TreeShape(3, 2, 6)).tokens, before)


def test_sizes() -> None:
    config = build_model(hidden_size=384, num_attention_heads=6, intermediate_size=1024).config
    sizes = IndependentSizes.from_target(config)
    assert (sizes.independent_width, sizes.independent_mlp_width, sizes.independent_layers) == (192, 512, 2)
    assert (sizes.own_block.n_heads, sizes.own_block.head_dim) == (4, 48)
    narrow = IndependentSizes.from_target(config, independent_width=6)
    assert (narrow.own_block.n_heads, narrow.own_block.head_dim) == (3, 2)
    with pytest.raises(DrafterError, match="independent_width"):
        IndependentSizes.from_target(config, independent_width=33)
    with pytest.raises(DrafterError, match="independent_layers"):
        IndependentSizes.from_target(config, independent_layers=0)
