"""A run that goes on beyond its end, or starts from the weights of another."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from moa_data.errors import DrafterError, OutputOccupied, TrainingError
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.tests.kit.command import TRAIN, refused
from moa_data.tests.kit.command import run as run_command
from moa_data.tests.kit.runs import assert_same_weights, last_state, run


def test_a_longer_run_equals_one_that_was_that_long_from_the_start(store_path: Path, tmp_path: Path) -> None:
    settings = {"drafter": "eagle", "decay_steps": 6}
    run(store_path, tmp_path / "whole", max_steps=8, **settings)
    run(store_path, tmp_path / "parts", max_steps=4, **settings)
    report = run(store_path, tmp_path / "parts", max_steps=8, resume=True, **settings)
    assert report.n_steps == 8
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    with pytest.raises(OutputOccupied, match="has taken 8 steps, more than the 7"):
        run(store_path, tmp_path / "parts", max_steps=7, resume=True, **settings)


def test_a_rate_that_falls_until_the_end_is_not_stretched(store_path: Path, tmp_path: Path) -> None:
    """Its earlier steps would have been taken at other rates; the two ways on are named, and both are ways."""
    out = tmp_path / "run"
    run(store_path, out, max_steps=4)
    with pytest.raises(OutputOccupied, match=r"falls until step 4, not 8.*--decay-steps 4 .*--init-from") as refusal:
        run(store_path, out, max_steps=8, resume=True)
    assert str(out) in str(refusal.value)
    assert run(store_path, out, max_steps=6, decay_steps=4, resume=True).n_steps == 6
    assert last_state(out)["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(1e-3)
    assert run(store_path, tmp_path / "new", max_steps=1, init_from=str(out)).n_steps == 1


def test_weights_are_taken_and_nothing_else(store_path: Path, tmp_path: Path) -> None:
    run(store_path, tmp_path / "first", max_steps=3)
    # A rate of next to nothing leaves the weights where they start.
    still = {"learning_rate": 1e-30, "max_steps": 2, "validation_fraction": 0.0, "init_from": str(tmp_path / "first")}
    run(store_path, tmp_path / "second", stop_after_steps=1, seed=7, **still)
    first, second = load_drafter(tmp_path / "first"), load_drafter(tmp_path / "second")
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    state = last_state(tmp_path / "second")
    assert state["global_step"] == 1
    assert {float(moments["step"]) for moments in state["optimizer_states"][0]["state"].values()} == {1.0}
    shutil.rmtree(tmp_path / "first")
    assert run(store_path, tmp_path / "second", resume=True, seed=7, **still).n_steps == 2, "it asks for them no more"


def test_weights_of_another_drafter_are_refused(store_path: Path, tmp_path: Path) -> None:
    run(store_path, tmp_path / "first", max_steps=1)
    first = str(tmp_path / "first")
    with pytest.raises(TrainingError, match=r"kind moa, this run trains eagle. Give --drafter moa\."):
        run(store_path, tmp_path / "other", max_steps=1, drafter="eagle", init_from=first)
    other = {"max_steps": 1, "layer_groups": 1, "unrotated_keys": False, "init_from": first}
    with pytest.raises(TrainingError, match=r"--set drafter.layer_groups=2 --set drafter.unrotated_keys=true"):
        run(store_path, tmp_path / "other", **other)
    with pytest.raises(DrafterError, match="does not exist"):
        run(store_path, tmp_path / "other", max_steps=1, init_from=str(tmp_path / "nope"))
    assert not (tmp_path / "other").exists()


def test_resume_needs_no_setting_twice(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run recorded counts, its store in whatever folder the command is given, and flags win over it."""
    monkeypatch.chdir(room)
    options = ("--preset", "small", "--drafter", "eagle", "--set", "schedule.decay_steps=2", *TRAIN)
    begun = run_command("train", "store", "--out", tmp_path / "run", *options, "--stop-after-steps", "1")
    assert begun.exit_code == 0, begun.output
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["store"] == str(room / "store")
    monkeypatch.chdir(tmp_path)
    again = run_command("train", "--out", "run", "--resume")
    assert again.exit_code == 0, again.output
    assert last_state(tmp_path / "run")["global_step"] == 2
    assert run_command("train", "--out", "run", "--resume", "--epochs", "1").exit_code == 0
    assert last_state(tmp_path / "run")["global_step"] > 2
    refused(run_command("train", "--out", "run", "--resume", "--batch-size", "4"), "batch_size was 2, now 4")
