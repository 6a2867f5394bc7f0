"""Options that take a part of Mixture of Attentions or of its training away."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.tests.kit.runs import last_state, run, settings
from moa_data.trainer.config import PRESETS
from moa_data.trainer.data import draw, sum_loss_weights

PAPER = PRESETS["paper"]["drafter"]


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_attention": False, "target_layer_inference": 1},
        {"layer_stride": 2, "target_layer_inference": 1},
        {"step_bound": False},
        {"step_bound_min": 4, "step_bound_max": 4},
        {"on_policy": False, "target_layer_inference": 1},
        PAPER,
    ],
    ids=str,
)
def test_each_variant_trains(store_path: Path, tmp_path: Path, changes: Any) -> None:
    report = run(store_path, tmp_path / "run", max_steps=3, micro_batch_size=4, validate_every=3, **changes)
    assert report.best_expected_acceptance_length >= 1
    assert all(torch.isfinite(weight).all() for weight in last_state(tmp_path / "run")["state_dict"].values())
    drafter = load_drafter(tmp_path / "run")
    assert drafter.config.layer_attention == changes.get("layer_attention", True)
    assert drafter.config.cross_attention_drafts == changes.get("cross_attention_drafts", True)
    assert drafter.config.layer_groups == changes.get("layer_groups", 2)
    assert drafter.config.unrotated_keys == changes.get("unrotated_keys", True)


def test_draws_of_each_variant(store_path: Path) -> None:
    response = torch.ones(8, 30, dtype=torch.bool)
    response[:, :5] = False
    usual = settings(store_path)
    assert draw(usual, 0, 10).staircase_rows.any()
    unbounded = draw(settings(store_path, step_bound=False), 0, 10)
    assert unbounded.step_bound is None
    assert torch.equal(unbounded.staircase_rows, draw(usual, 0, 10).staircase_rows)
    forced = draw(settings(store_path, on_policy=False), 0, 10)
    assert (forced.on_policy_weight, forced.teacher_forced_weight) == (0.0, 1.0)
    assert not forced.staircase_rows.any()
    for changes in ({"step_bound": False, "teacher_forced_weight": 0.0}, {"on_policy": False}):
        config = settings(store_path, **changes)
        assert sum_loss_weights(response, draw(config, 0, 10), config) == 8 * 25
    paper = settings(store_path, **PAPER)
    on_policy = sum_loss_weights(response, draw(paper, 0, 10), paper)
    assert on_policy < 8 * 25
    assert sum_loss_weights(response, draw(usual, 0, 10), usual) == on_policy + 8 * 25
    both = settings(store_path, teacher_forced_weight=0.5)
    assert sum_loss_weights(response, draw(both, 0, 10), both) == on_policy + 0.5 * 8 * 25
