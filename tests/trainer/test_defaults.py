"""Defaults of settings: how they follow from target and data, and how they are reported.

A run records them.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from moa_data.commands.views import run_plan_view, train_view
from moa_data.errors import OutputOccupied
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.command import run as run_command
from moa_data.tests.kit.errors import raises_naming
from moa_data.trainer import data as data_module
from moa_data.trainer.config import PRESETS, TrainConfig
from moa_data.trainer.data import StoreDataModule, has_own_answers
from moa_data.trainer.defaults import (
    CHOOSABLE,
    RunFacts,
    choose_settings,
    choose_validation_fraction,
    is_open,
    schedule_warnings,
)
from moa_data.trainer.fit import plan_run, read_metrics, train
from moa_data.trainer.step import validation_metrics

TOY = RunFacts(hidden_size=384, n_sequences=2720, n_tokens=570_000)
REAL = RunFacts(hidden_size=576, n_sequences=430, n_tokens=100_000)
LARGE = RunFacts(hidden_size=4096, n_sequences=200_000, n_tokens=100_000_000)


def config_of(**given: Any) -> TrainConfig:
    return TrainConfig.of(store="store", out="out", accelerator="cpu", **given)


def chosen_for(facts: RunFacts, **given: Any) -> dict[str, Any]:
    return choose_settings(config_of(**given), facts)[0].named()


def test_a_large_target_with_much_data_gets_what_is_published() -> None:
    found = chosen_for(LARGE)
    expected = {
        "epochs": 1, "optimizer": "adamw", "learning_rate": 3e-5, "peak_multiplier": 20,
        "warmup_steps": 50, "decay_steps": 6250, "batch_size": 32,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("given", [{"max_steps": 340}, {"epochs": 4}, {}])
def test_a_toy_gets_the_preset_small(given: dict[str, Any]) -> None:
    preset = TrainConfig.of(store="store", out="out", **PRESETS["small"])
    small = choose_settings(preset.replaced(accelerator="cpu", **given), TOY)[0]
    assert choose_settings(config_of(**given), TOY)[0].named() == small.named()


def test_few_tokens_are_seen_several_times_in_small_steps() -> None:
    for n_tokens in (20_000, 48_000, 100_000, 500_000):
        facts = RunFacts(576, n_tokens // 220, n_tokens)
        found = chosen_for(facts)
        n_steps = found["epochs"] * (facts.n_sequences // found["batch_size"])
        assert 100 <= n_steps <= 1000
        assert found["optimizer"] == "muon"
        assert found["decay_steps"] == -1
    assert chosen_for(REAL)["epochs"] == 10
    assert chosen_for(REAL, epochs=1)["batch_size"] == 2


@pytest.mark.parametrize("facts", [TOY, REAL, LARGE])
@pytest.mark.parametrize(
    "given", [{}, {"epochs": 0.1}, {"epochs": 40}, {"max_steps": 1}, {"max_steps": 100_000}]
)
def test_what_is_chosen_fits_the_length_of_the_run(facts: RunFacts, given: dict[str, Any]) -> None:
    config, _ = choose_settings(config_of(**given), facts)
    steps_per_epoch = facts.n_sequences // config.named()["batch_size"]
    n_steps = config.schedule.n_steps(steps_per_epoch)
    assert not any(
        "warm-up" in warning or "rate" in warning
        for warning in schedule_warnings(config, steps_per_epoch)
    )
    assert 10 * config.named()["warmup_steps"] <= max(n_steps, 0)
    assert n_steps // config.named()["validate_every"] >= min(10, n_steps)
    assert n_steps // config.named()["log_every"] >= min(20, n_steps)


# This default depends on the tokens of the responses, and is chosen only for large vocabularies.
VOCABULARY = {"draft_vocabulary"}
GIVEN = {
    "epochs": 3.0, "max_steps": 77, "optimizer": "adamw", "learning_rate": 7e-5,
    "matrix_learning_rate": 7e-3,
    "peak_multiplier": 3.0, "warmup_steps": 7, "decay_steps": 70, "batch_size": 3,
    "validation_fraction": 0.5, "validate_every": 9, "log_every": 6,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(CHOOSABLE) - VOCABULARY))
@pytest.mark.parametrize("facts", [TOY, LARGE])
def test_what_is_given_stays(name: str, facts: RunFacts) -> None:
    config, chosen = choose_settings(config_of(**{name: GIVEN[name]}), facts)
    assert config.named()[name] == GIVEN[name]
    assert name not in {setting.name for setting in chosen}
    assert all(setting.why for setting in chosen)


def test_muon_for_a_large_target_keeps_the_rates_that_suit_it() -> None:
    found = chosen_for(LARGE, optimizer="muon")
    assert (found["learning_rate"], found["matrix_learning_rate"], found["peak_multiplier"]) == (
        1e-4,
        2e-3,
        10,
    )


def test_a_batch_divides_over_the_devices_and_is_no_larger_than_the_split() -> None:
    assert chosen_for(RunFacts(576, 430, 100_000, n_devices=6))["batch_size"] == 12
    assert chosen_for(RunFacts(576, 3, 600), max_steps=9)["batch_size"] == 3
    assert chosen_for(RunFacts(576, 1, 200))["batch_size"] == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_steps": 54, "warmup_steps": 50}, ["warm-up takes 50 of 54"]),
        (
            {"max_steps": 6, "warmup_steps": 50, "decay_steps": 6},
            ["6 steps are too few", "warm-up takes 6 of 6"],
        ),
        ({"max_steps": 60, "warmup_steps": 20, "decay_steps": 6}, ["the learning rate drops"]),
        ({"max_steps": 60, "decay_steps": 600}, ["reaches its final value at step 600"]),
        ({"max_steps": 60, "decay_steps": 600, "peak_multiplier": 1}, []),
        ({"max_steps": 60, "decay_steps": 0, "peak_multiplier": 1}, []),
        ({"max_steps": 60}, []),
    ],
)
def test_a_schedule_that_does_not_fit_is_told(given: dict[str, Any], words: list[str]) -> None:
    config, _ = choose_settings(config_of(**given), REAL)
    found = schedule_warnings(config, REAL.n_sequences // config.named()["batch_size"])
    assert len(found) == len(words)
    assert all(word in warning for word, warning in zip(words, found, strict=True))
    assert not any("\n" in warning for warning in found)


@pytest.mark.parametrize(
    ("n_sequences", "n_positions", "fraction"),
    [
        (221, 130, 0.2),
        (430, 130, 0.125),
        (221, 2000, 0.02),
        (100, 10, 0.2),
        (2000, 130, 0.027),
        (1_000_000, 300, 0.02),
    ],
)
def test_enough_is_held_out(n_sequences: int, n_positions: int, fraction: float) -> None:
    choice = choose_validation_fraction(n_sequences, n_sequences * n_positions)
    assert choice.name == "validation_fraction"
    assert choice.value == fraction


def test_a_run_without_settings_records_what_it_chose_and_can_be_resumed(
    store_path: Path, tmp_path: Path
) -> None:
    config = config_of(max_steps=21, drafter="eagle", draft_length=3).replaced(
        store=str(store_path), out=str(tmp_path / "run"), batch_size=4
    )
    report = train(config.replaced(stop_after_steps=10))
    recorded = TrainConfig(**yaml.safe_load((tmp_path / "run" / "run.yaml").read_text()))
    unset = {name for name in CHOOSABLE if is_open(recorded.named()[name])}
    assert unset == {"epochs"} | VOCABULARY
    assert recorded.schedule.warmup_steps == 2
    report = train(config.replaced(resume=True))
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics["train/loss"]) >= 20
    assert 10 <= len(metrics["val/kl"]) <= 11
    widths = [width for _, width in metrics["val/expected_acceptance_half_width"]]
    assert report.best_half_width in [pytest.approx(width) for width in widths]
    assert report.n_validation_sequences > 0
    assert (
        json.loads((tmp_path / "run" / "report.json").read_text())["best_half_width"]
        == report.best_half_width
    )
    shown = _printed(train_view(report))
    assert "±" in next(
        line for line in shown.splitlines() if line.startswith("best expected acceptance length")
    )
    with raises_naming(OutputOccupied, config.out, "learning_rate", 0.5):
        train(config.replaced(resume=True, learning_rate=0.5))


def _printed(view: Any) -> str:
    console = Console(width=200)
    with console.capture() as shown:
        console.print(view)
    return shown.get()


def test_a_plan_shows_what_was_chosen_and_why(store_path: Path, tmp_path: Path) -> None:
    plan = plan_run(
        config_of(learning_rate=1e-3).replaced(store=str(store_path), out=str(tmp_path / "run"))
    )
    shown = _printed(run_plan_view(plan))
    names = {setting.name for setting in plan.chosen}
    assert names == set(CHOOSABLE) - {"max_steps", "learning_rate"} - VOCABULARY
    for setting in plan.chosen:
        assert setting.name in shown
        assert setting.why in shown
    assert f"{plan.n_validation_sequences} sequences" in shown
    assert "not known whether the target wrote the answers" in shown
    assert not (tmp_path / "run").exists()


def test_the_command_warns_of_a_schedule_that_does_not_fit(
    store_path: Path, tmp_path: Path
) -> None:
    own = [
        str(store_path),
        "--out",
        str(tmp_path / "run"),
        "--max-steps",
        "40",
        "--warmup-steps",
        "39",
        "--dry-run",
    ]
    result = run_command("train", *own)
    assert result.exit_code == 0
    assert "warning: the warm-up takes 39 of 40 steps" in result.stderr


def test_a_cpu_takes_no_more_tokens_at_once_than_are_faster(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ActivationStore(store_path)
    longest = int(store.lengths.max())

    def sizes(**given: Any) -> list[int]:
        config = config_of(batch_size=8, validation_fraction=0.0, **given).replaced(
            store=str(store_path)
        )
        return StoreDataModule(store, config).micro_batch_sizes(8)

    assert sizes() == [8, 4, 2, 1]
    monkeypatch.setattr(data_module, "CPU_MICRO_BATCH_TOKENS", 3 * longest)
    assert sizes() == [2, 1]
    assert sizes(micro_batch_size=4) == [4]
    monkeypatch.setattr(data_module, "CPU_MICRO_BATCH_TOKENS", 1)
    assert sizes() == [1]
    monkeypatch.setattr(data_module, "trains_on_cpu", lambda machine: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert sizes() == [8, 4, 2, 1]


@pytest.mark.parametrize(
    ("recorded", "is_own"), [("ab" * 32, True), ("cd" * 32, False), (None, False)]
)
def test_answers_are_the_targets_own_where_a_record_says_so(
    tmp_path: Path, recorded: Any, is_own: bool
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "20260101T000000.000000Z.json").write_text(
        json.dumps({"answers_by": recorded})
    )
    (tmp_path / "runs" / "20260102T000000.000000Z.json").write_text("torn")
    manifest = SimpleNamespace(identities={"target.weights_sha256": "ab" * 32})
    store: Any = SimpleNamespace(path=tmp_path, manifest=manifest)
    assert has_own_answers(store) is is_own


def test_the_interval_is_that_of_a_ratio_over_sequences() -> None:
    random = np.random.default_rng(0)
    rounds = random.integers(1, 20, 64).astype(float)
    tokens = rounds * 2 + random.normal(0, 1, 64) * np.sqrt(rounds)

    def row(index: int, part: slice) -> list[float]:
        c, r = tokens[part], rounds[part]
        return [index, 0.0, 0.0, 1.0, c.sum(), 0.0, r.sum(), c @ c, c @ r, r @ r, len(c)]

    metrics = validation_metrics([row(0, slice(0, 30)), row(1, slice(30, 64))])
    drawn = random.integers(0, 64, (4000, 64))
    lengths = tokens[drawn].sum(axis=1) / rounds[drawn].sum(axis=1)
    assert metrics["expected_acceptance_half_width"] == pytest.approx(1.96 * lengths.std(), rel=0.1)
    assert math.isnan(validation_metrics([row(0, slice(0, 1))])["expected_acceptance_half_width"])
