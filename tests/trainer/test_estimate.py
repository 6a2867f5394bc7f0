"""A training run takes what its dry run estimates.

Making the estimate changes no bit of the run.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.machine import peak_memory
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.tests.kit.runs import BASE
from moa_data.tests.kit.variants import quick
from moa_data.trainer.config import DRAFTER, TrainConfig
from moa_data.trainer.fit import plan_run, train


def config_of(store: Path, out: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.of(store=str(store), out=str(out), **(BASE | {"max_steps": 3} | changes))


@pytest.mark.parametrize(
    ("drafter", "changes"),
    [("eagle", {}), ("moa", {"optimizer": "muon"}), ("eagle", {"validation_fraction": 0.0})],
)
def test_a_run_takes_the_planned_disk(
    store_of_all: Path, tmp_path: Path, drafter: str, changes: dict[str, Any]
) -> None:
    config = config_of(store_of_all, tmp_path / "run", drafter=drafter, **changes)
    plan = plan_run(config)
    assert not (tmp_path / "run").exists()
    report = train(config)
    assert report.n_steps == plan.n_steps
    n_bytes = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    least, most = plan.cost.disk_bytes
    assert least <= n_bytes <= most
    assert plan.cost.seconds is not None
    least_s, most_s = plan.cost.seconds
    assert 0 < least_s < most_s


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset"
)
def test_a_run_takes_the_planned_memory(store_of_all: Path, tmp_path: Path) -> None:
    config = config_of(store_of_all, tmp_path / "run", drafter="moa")
    Path("/proc/self/clear_refs").write_text("5")
    plan = plan_run(config)
    train(config)
    assert plan.cost.memory_bytes is not None
    least, most = plan.cost.memory_bytes
    assert least <= peak_memory() <= most


@pytest.mark.parametrize("optimizer", quick(["adamw", "muon"], ["muon"]))
def test_a_plan_before_a_run_changes_no_weight(
    store_of_all: Path, tmp_path: Path, optimizer: str
) -> None:
    changes = {"optimizer": optimizer, "drafter": "eagle", "max_steps": 3, "feature_noise": 0.2}
    plans: list[Any] = []
    train(config_of(store_of_all, tmp_path / "silent", **changes))
    train(config_of(store_of_all, tmp_path / "announced", **changes), announce=plans.append)
    assert plans[0].cost.seconds is not None
    silent, announced = (
        load_drafter(tmp_path / name / DRAFTER).state_dict() for name in ("silent", "announced")
    )
    assert all(torch.equal(weight, announced[name]) for name, weight in silent.items())


def test_on_an_accelerator_only_a_dry_run_measures(
    store_of_all: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """A run of several processes would let all others wait for the first one's measurement."""
    monkeypatch.setattr("moa_data.trainer.fit.trains_on_cpu", lambda _: False)
    plans: list[Any] = []
    train(
        config_of(store_of_all, tmp_path / "run", drafter="eagle", max_steps=1),
        announce=plans.append,
    )
    assert (plans[0].cost.seconds, plans[0].cost.memory_bytes) == (None, None)


def test_a_longer_run_takes_longer(
    store_of_all: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seconds per token
    monkeypatch.setattr("moa_data.trainer.estimate._measure", lambda *_: ([1.0, 3.0, 2.0], 1000))
    changes: dict[str, Any] = {"drafter": "eagle", "validation_fraction": 0.0}
    short, long = (
        plan_run(config_of(store_of_all, tmp_path / "run", max_steps=n_steps, **changes))
        for n_steps in (10, 20)
    )
    assert short.cost.seconds is not None
    assert long.cost.seconds is not None
    for index in (0, 1):
        assert long.cost.seconds[index] == pytest.approx(2 * short.cost.seconds[index])
    n_tokens = 10 * 8 * short.n_tokens_per_epoch / short.n_sequences
    assert short.cost.seconds == pytest.approx((n_tokens / 1.25, 1.25 * 3 * n_tokens))
    assert short.cost.memory_bytes == (900, 1500)
