"""EAGLE keeps the contract; its loss covers the response, and its noise depends on the row."""

import pytest
import torch

from moa_data.errors import DrafterError
from moa_data.moa.drafters.training import Draws, TrainingInputs, TrainingStep
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import (
    NO_DRAWS,
    batch_with,
    build,
    build_eagle,
    weight_of_positions,
)
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_model

from .contract import CHAIN, DrafterContract, one_row


class TestEagle(DrafterContract):
    kind = "eagle"
    learns_in = 16
    shape = sampled_shape = CHAIN
    close = 5e-5


@pytest.mark.slow
class TestTwoLayers(DrafterContract):
    kind = "eagle"
    close = 2e-4
    sizes = {"eagle_layers": 2, "self_attention_kv_heads": 1}


def test_embeddings_are_scaled_to_the_size_of_hidden_states() -> None:
    """A scale of 0 chooses the power of two that fits; the default is 1.

    A scale has the same effect as multiplying the weights that are applied to embeddings.
    """
    model = build_model()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 0.03)
    frozen, drafter, plain = (
        FrozenTarget.from_model(model),
        build_eagle(model, eagle_embedding_scale=0.0),
        build_eagle(model),
    )
    assert drafter.config.eagle_embedding_scale == 32.0  # near 1 / 0.03 = 33.3
    assert plain.config.eagle_embedding_scale == 1.0
    embeddings, hidden = frozen.embed(torch.arange(9)), torch.randn(9, model.config.hidden_size)
    with torch.no_grad():
        plain.fc.weight[:, : model.config.hidden_size] *= 32.0
    assert torch.equal(drafter.combine(embeddings, hidden), plain.combine(embeddings, hidden))
    for wrong in (-1.0, 30.0):
        with raises_naming(DrafterError, "eagle_embedding_scale"):
            build_eagle(model, eagle_embedding_scale=wrong)


def test_loss_lies_on_the_response_alone() -> None:
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_eagle(model)
    inputs = batch_with(drafter, model, (2, 20), (0, 6, 20), (1, 0, 12))
    inputs.hidden.requires_grad_(True)
    step = TrainingStep(inputs, NO_DRAWS)
    (gradient,) = torch.autograd.grad(drafter.objective(frozen, step)["loss"], inputs.hidden)
    is_used = gradient.abs().sum(dim=-1) > 0
    assert is_used[0].all()
    assert torch.equal(is_used[1], torch.arange(20) < 12), "nothing after the response is read"
    assert weight_of_positions(drafter, frozen, step) == pytest.approx(14 + 11), (
        "nothing precedes the first position"
    )


def test_noise_is_the_rows_own() -> None:
    """Noise changes the drafter's inputs, not its labels, and does not depend on padding."""
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_eagle(model)
    both = batch_with(drafter, model, (2, 20), (0, 0, 20), (1, 0, 20))

    def loss(seeds: tuple[int, ...], inputs: TrainingInputs = both, width: float = 0.2) -> float:
        draws = Draws(None, torch.zeros(2, dtype=torch.bool), None, seeds, width)
        return float(
            drafter.objective(frozen, TrainingStep(inputs, draws, denominator=1.0))["loss"].detach()
        )

    assert loss((5, 6)) == loss((5, 6)) != loss((5, 7))
    alone = loss((5,), one_row(both, 0, 20)) + loss((6,), one_row(both, 1, 20))
    assert loss((5, 6)) == pytest.approx(alone, rel=1e-5)
    assert loss(()) == loss((5, 6), width=0.0) != loss((5, 6))


@pytest.mark.parametrize("kind", ["eagle", "dspark"])
def test_drafting_before_the_target_was_observed_is_refused(kind: str) -> None:
    target = Target(build_model())
    drafter, cache = build(kind, target.model), target.new_cache()
    with pytest.raises(DrafterError):
        drafter.draft_root(
            drafter.new_state(1), FrozenTarget.from_model(target.model), [[5, 6, 7]], cache
        )
