"""GLIDE keeps the contract; training blocks are draft rounds."""

import pytest
import torch

from moa_data.moa.drafters.glide import block_context
from moa_data.moa.drafters.training import Draws, TrainingStep
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import (
    batch_with,
    build_glide,
    weight_of_positions,
)
from moa_data.tests.kit.families import build_family
from moa_data.tests.kit.models import build_model

from .contract import ONE, ROUNDS, WINDOW, DrafterContract, assert_steps_equal_training


class TestGlide(DrafterContract):
    kind = "glide"
    learns_in = 12
    family, speed_shape = WINDOW, ONE


@pytest.mark.parametrize(
    ("family", "attended"),
    [("deepseek_v3", (3, 1, 16, 8)), ("gemma4_text", (1, 1, 24, 24)), ("smollm3", (3, 2, 16, 16))],
)
def test_the_last_layer_with_keys_of_its_own(family: str, attended: tuple[int, ...]) -> None:
    """Training and decoding compute the same for last layers of special forms.

    They have latent KV, sizes unlike other layers', or keys without rotation.
    """
    target = Target(build_family(family))
    drafter = build_glide(target.model)
    assert drafter.config.attended == attended
    assert_steps_equal_training(target, drafter, ROUNDS["bounded"])


def test_blocks_begin_at_the_offset() -> None:
    positions = torch.arange(9).expand(3, -1)
    got = block_context(positions, 3, torch.tensor([1, 0, 7]))
    assert got[0].tolist() == [-3, 0, 0, 0, 3, 3, 3, 6, 6]
    assert got[1].tolist() == [-1, -1, -1, 2, 2, 2, 5, 5, 5]
    assert torch.equal(got[2], got[0]), "an offset counts modulo the size of a block"
    assert torch.equal(block_context(positions, 3), got[1].expand(3, -1))


def test_a_position_learns_from_the_blocks_before_it_alone() -> None:
    """The loss sees no more of the target's KV than decoding does.

    The feature loss is reported but not trained on.
    """
    model = build_model()
    frozen, drafter = FrozenTarget.from_model(model), build_glide(model, block_size=4)
    inputs = batch_with(drafter, model, (2, 20), (0, 0, 3), (1, 13, 16))
    assert inputs.kv is not None
    inputs.kv.requires_grad_(True)
    draws = Draws(None, torch.zeros(2, dtype=torch.bool), torch.tensor([0, 3]))
    step = TrainingStep(inputs, draws)
    terms = drafter.objective(frozen, step)
    (gradient,) = torch.autograd.grad(terms["loss"], inputs.kv)
    is_used = gradient.abs().sum(dim=(-1, -2)) > 0
    assert torch.equal(is_used[0], torch.arange(20) == 0), "after position 0 begins the first round"
    assert torch.equal(is_used[1], torch.arange(20) < 15), "15 begins a block of its own"
    assert weight_of_positions(drafter, frozen, step) == pytest.approx(2 + 3)
    assert terms["loss"].item() == pytest.approx(0.1 * terms["forward_kl"].item())
    assert terms["feature_loss"].item() > 0
