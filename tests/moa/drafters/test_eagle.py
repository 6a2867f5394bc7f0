"""EAGLE keeps the contract; its loss lies on the response, its noise belongs to the row."""

import pytest
import torch

from moa_data.errors import DrafterError
from moa_data.moa.drafters.training import Draws, TrainingInputs, TrainingStep
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import NO_DRAWS, build, build_eagle
from moa_data.tests.kit.models import SIZES, build_model

from .contract import DrafterContract


class TestEagle(DrafterContract):
    kind = "eagle"
    close = 5e-5
    export_sizes = {name: {} for name in ("eagle", "vllm-eagle", "sglang-eagle", "moa-eagle")}


@pytest.mark.slow
class TestTwoLayers(DrafterContract):
    """Other programs get it without the first norm, which they lack."""

    kind = "eagle"
    close = 2e-4
    sizes = {"eagle_layers": 2, "self_attention_kv_heads": 1}
    export_sizes = {name: {"eagle_input_norm": False} for name in ("eagle", "vllm-eagle", "sglang-eagle")}


def test_loss_lies_on_the_response_alone() -> None:
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_eagle(model)
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 20))
    response = torch.zeros_like(tokens, dtype=torch.bool)
    response[0, 6:20] = response[1, 0:12] = True
    hidden = model.model(tokens).last_hidden_state.requires_grad_(True)
    terms = drafter.objective(frozen, TrainingStep(TrainingInputs(tokens, response, None, hidden), NO_DRAWS))
    (gradient,) = torch.autograd.grad(terms.total, hidden)
    is_used = gradient.abs().sum(dim=-1) > 0
    assert is_used[0].all()
    assert torch.equal(is_used[1], torch.arange(20) < 12), "nothing after the response is read"
    assert terms.n_positions == 14 + 11, "nothing precedes the first position"


def test_noise_is_the_rows_own() -> None:
    """It spoils what the drafter sees, not what it learns, and does not depend on the padding."""
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_eagle(model)
    tokens = torch.randint(4, SIZES["vocab_size"], (2, 20))
    hidden = model.model(tokens).last_hidden_state

    def loss(seeds: tuple[int, ...], rows: slice, width: float = 0.2) -> float:
        inputs = TrainingInputs(tokens[rows], torch.ones_like(tokens[rows]), None, hidden[rows])
        draws = Draws(None, torch.zeros(2, dtype=torch.bool), None, seeds, width)
        return float(drafter.objective(frozen, TrainingStep(inputs, draws, denominator=1.0)).total.detach())

    both = slice(0, 2)
    assert loss((5, 6), both) == loss((5, 6), both) != loss((5, 7), both)
    assert loss((5, 6), both) == pytest.approx(loss((5,), slice(0, 1)) + loss((6,), slice(1, 2)), rel=1e-5)
    assert loss((), both) == loss((5, 6), both, width=0.0) != loss((5, 6), both)


@pytest.mark.parametrize("kind", ["eagle", "dspark"])
def test_drafting_before_the_target_was_observed_is_refused(kind: str) -> None:
    target = Target(build_model())
    drafter, cache = build(kind, target.model), target.new_cache()
    with pytest.raises(DrafterError):
        drafter.draft_root(drafter.new_state(1), FrozenTarget.from_model(target.model), [[5, 6, 7]], cache)
