"""Training from the store alone: no target, exact resume, longer runs, refusals.

The drafter gets better.
"""

import builtins
import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from moa_data.errors import DrafterError, Interrupted, OutputOccupied, RunWarning, TrainingError
from moa_data.moa.drafters import vocabulary
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.formats.checkpoint import load_drafter, save_drafter
from moa_data.moa.targets.facts import TargetFacts
from moa_data.pipeline.recode import recode
from moa_data.tests.kit.command import TRAIN, refused
from moa_data.tests.kit.command import run as run_command
from moa_data.tests.kit.drafters import build
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.runs import assert_same_weights, last_state, run
from moa_data.tests.kit.runs import settings as run_settings
from moa_data.tests.kit.training import build_store
from moa_data.trainer import callbacks
from moa_data.trainer.checkpoints import initial_drafter, read_checkpoint
from moa_data.trainer.config import Eagle3Settings
from moa_data.trainer.fit import read_metrics, train
from moa_data.trainer.step import DrafterModule


def test_it_learns_and_leaves_everything_behind(store_path: Path, tmp_path: Path) -> None:
    report = run(store_path, tmp_path / "run", max_steps=20, validate_every=5, learning_rate=2e-3)
    out = tmp_path / "run"
    metrics = {name: [value for _, value in points] for name, points in read_metrics(out).items()}
    assert metrics["val/kl"][-1] < 0.8 * metrics["val/kl"][0]
    assert {"train/feature_loss", "train/tokens_per_s", "train/data_wait_share"} <= metrics.keys()
    assert last_state(out)["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(2e-3)
    assert metrics["val/top1_agreement"][-1] > metrics["val/top1_agreement"][0] + 0.05
    assert report.best_expected_acceptance_length == pytest.approx(
        max(metrics["val/expected_acceptance_length"])
    )
    assert report.n_steps == 20
    assert report.n_pending_parts == 0
    assert 0 <= report.data_wait_share < 1
    for name in (
        "curves.png",
        "metrics.csv",
        "run.yaml",
        "provenance.json",
        "checkpoints/best.ckpt",
        "drafter",
    ):
        assert (out / name).exists(), name
    assert list((out / "tensorboard").glob("events*"))
    drafter = load_drafter(out)
    assert drafter.config.target == {"weights_sha256": "ab" * 32}
    assert json.loads((out / "report.json").read_text())["n_parameters"] == report.n_parameters
    assert not any("frozen" in key for key in last_state(out)["state_dict"])


def test_no_target_is_ever_loaded(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training works while the target's classes cannot be imported.

    That includes target layer inference.
    """
    real_import = builtins.__import__

    def guarded(name: Any, *args: Any, **kwargs: Any) -> Any:
        assert "modeling_llama" not in name, "training must not import the target's class"
        return real_import(name, *args, **kwargs)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("training must not load a model")

    monkeypatch.setattr(builtins, "__import__", guarded)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", refuse)
    assert run(store_path, tmp_path / "run", max_steps=3, target_layer_inference=1).n_steps == 3


@pytest.mark.slow
def test_resume_with_another_accumulation(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, validations and the log still end with whole batches.

    The same holds for another number of devices.
    """
    settings = {"drafter": "eagle", "max_steps": 14, "checkpoint_every": 5}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(store_path, whole, **settings)
    run(store_path, parts, **settings, stop_after_steps=5)
    monkeypatch.setattr("moa_data.trainer.callbacks.free_memory", lambda: 1)
    real, steps = DrafterModule.training_step, []

    def recording(module: Any, batch: Any, index: Any) -> Any:
        steps.append(module.global_step)
        return real(module, batch, index)

    monkeypatch.setattr(DrafterModule, "training_step", recording)
    with pytest.warns(RunWarning):
        run(store_path, parts, **settings, resume=True)
    assert Counter(steps) == dict.fromkeys(range(5, 14), 8)
    one, other = read_metrics(whole), read_metrics(parts)
    for name in ("train/loss", "val/kl"):
        assert [step for step, _ in one[name]] == [step for step, _ in other[name]]
    assert [step for step, _ in one["val/kl"]] == [5, 11, 13]
    assert_same_weights(whole, parts, rtol=1e-3, atol=2e-4)


@pytest.mark.usefixtures("heeded_signals")
def test_the_last_step_is_validated(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: Any
) -> None:
    """The interval need not divide the run, and Ctrl-C may interrupt that validation."""
    settings = {"drafter": "eagle", "max_steps": 7, "validate_every": 5, "micro_batch_size": 4}
    report = run(store_path, tmp_path / "whole", **settings)
    lengths = read_metrics(tmp_path / "whole")["val/expected_acceptance_length"]
    assert [step for step, _ in lengths] == [4, 6], "metrics count steps from 0"
    values = [value for _, value in lengths]
    assert report.best_expected_acceptance_length == pytest.approx(max(values))
    assert report.metrics["val/expected_acceptance_length"] == pytest.approx(values[1])
    best = read_checkpoint(tmp_path / "whole" / "checkpoints" / "best.ckpt")
    assert best["global_step"] == (7 if values[1] > values[0] else 5)
    exported = load_drafter(tmp_path / "whole").state_dict()
    saved = {name.removeprefix("drafter."): value for name, value in best["state_dict"].items()}
    torch.testing.assert_close(dict(exported), saved, rtol=0, atol=0)

    run(store_path, tmp_path / "parts", **settings, stop_after_steps=6)
    assert [step for step, _ in read_metrics(tmp_path / "parts")["val/kl"]] == [4], (
        "a run to go on with has no end yet"
    )
    strike(DrafterModule, "on_validation_epoch_start", 1, signal.SIGINT)
    with raises_naming(Interrupted, "step 7", "`resume`"):
        run(store_path, tmp_path / "parts", **settings, resume=True)
    monkeypatch.undo()
    again = run(store_path, tmp_path / "parts", **settings, resume=True)
    assert again.best_expected_acceptance_length == report.best_expected_acceptance_length
    torch.testing.assert_close(
        exported, load_drafter(tmp_path / "parts").state_dict(), rtol=0, atol=0
    )
    assert (
        read_metrics(tmp_path / "parts")["val/kl"][-1][1]
        == read_metrics(tmp_path / "whole")["val/kl"][-1][1]
    )
    facts = json.loads((tmp_path / "parts" / "report.json").read_text())
    assert (facts["n_steps"], facts["metrics"]["val/kl"]) == (7, report.metrics["val/kl"])
    assert facts["tokens_per_s"] > 0, "speed is that of an invocation that trained"
    whole, parts = last_state(tmp_path / "whole"), last_state(tmp_path / "parts")
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    assert (
        parts["optimizer_states"][0]["state"].keys() == whole["optimizer_states"][0]["state"].keys()
    )
    assert run(store_path, tmp_path / "parts", **settings, resume=True).metrics == {}, (
        "nothing is left to do"
    )


@pytest.mark.usefixtures("heeded_signals")
def test_a_validation_that_did_not_end_is_done_again(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: Any
) -> None:
    """A kill leaves a checkpoint without the validation of its step; Ctrl-C interrupts one."""
    settings = {"drafter": "eagle", "max_steps": 4, "validate_every": 2, "checkpoint_every": 2}
    settings["micro_batch_size"] = 4
    run(store_path, tmp_path / "whole", **settings)
    real = callbacks.Saves.on_validation_end

    def before(self: Any, trainer: Any, module: Any) -> None:
        shutil.copyfile(tmp_path / "parts" / "checkpoints" / "last.ckpt", tmp_path / "before.ckpt")
        real(self, trainer, module)

    monkeypatch.setattr(callbacks.Saves, "on_validation_end", before)
    run(store_path, tmp_path / "parts", **settings, stop_after_steps=2)
    monkeypatch.undo()
    (tmp_path / "before.ckpt").replace(tmp_path / "parts" / "checkpoints" / "last.ckpt")
    for _ in range(2):
        strike(DrafterModule, "on_validation_epoch_start", 1, signal.SIGINT)
        with raises_naming(Interrupted, "step 2", "`resume`"):
            run(store_path, tmp_path / "parts", **settings, resume=True)
        monkeypatch.undo()
    (tmp_path / "parts" / "metrics-000.csv").unlink()
    run(store_path, tmp_path / "parts", **settings, resume=True)
    one, other = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts")
    assert [step for step, _ in one["val/kl"]] == [1, 3]
    for name in ("val/kl", "val/expected_acceptance_length"):
        assert one[name] == other[name]
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_refusals(store_path: Path, tmp_path: Path) -> None:
    run(store_path, tmp_path / "run", max_steps=2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (OutputOccupied, "run", {}),
        (OutputOccupied, "run", {"batch_size": 4, "resume": True}),
        (OutputOccupied, "other", {}),
        (TrainingError, "none", {"resume": True}),
        (TrainingError, "big", {"batch_size": 500}),
        (TrainingError, "deep", {"target_layer_inference": 3}),
        (TrainingError, "micro", {"micro_batch_size": 3}),
    ]
    for error, name, changes in cases:
        with pytest.raises(error):
            run(store_path, tmp_path / name, max_steps=2, **changes)
    assert not any((tmp_path / name).exists() for name in ("none", "big", "deep")), (
        "a refusal leaves nothing behind"
    )


def test_only_one_training_in_a_folder(store_path: Path, tmp_path: Path) -> None:
    """A second process is refused while the first one lives.

    A killed process leaves its lock file, but not the lock.
    """
    settings = {"drafter": "eagle", "max_steps": 4, "validation_fraction": 0.0}
    run(store_path, tmp_path / "run", **settings, stop_after_steps=2)
    hold = "import sys, time; from moa_data.files import lock_file; from pathlib import Path\n"
    hold += "lock = lock_file(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    (tmp_path / "new").mkdir()
    for name, resume in (("run", True), ("new", False)):
        out = tmp_path / name
        command = [sys.executable, "-c", hold, str(out / "run.lock")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
            with raises_naming(OutputOccupied, out, other.pid):
                run(store_path, out, **settings, resume=resume)
            assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
            other.kill()
        assert run(store_path, out, **settings, resume=resume).n_steps == 4


@pytest.mark.parametrize("gradient_clip", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_stops_the_run(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gradient_clip: float
) -> None:
    real = MoADrafter.objective

    def broken(*args: Any, **kwargs: Any) -> Any:
        terms = real(*args, **kwargs)
        return terms | {"loss": terms["loss"] * torch.inf}

    monkeypatch.setattr(MoADrafter, "objective", broken)
    with raises_naming(TrainingError, "step 0", "learning_rate"):
        run(store_path, tmp_path / "run", max_steps=2, gradient_clip=gradient_clip)


def test_resume_refuses_another_store_and_damaged_records(store_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = {"drafter": "eagle", "max_steps": 2, "validation_fraction": 0.0}
    run(store_path, out, **settings, stop_after_steps=1)
    other = build_store(tmp_path / "other", n_sequences=12)
    recode(store_path, "int8", tmp_path / "coded")
    for store, changed in ((other, "n_sequences"), (tmp_path / "coded", "codec")):
        with raises_naming(OutputOccupied, out, changed):
            run(store, out, **settings, resume=True)
    moved = store_path.parent / "alias"
    moved.symlink_to(store_path)
    damages = {"store.json": ("{", "[1]", "null"), "run.yaml": ("[1]", "optimizer: [", "store: s")}
    for name, texts in damages.items():
        content = (out / name).read_text()
        for text in texts:
            (out / name).write_text(text)
            with raises_naming(TrainingError, out / name):
                run(moved, out, **settings, resume=True)
        (out / name).write_text(content)
    assert run(moved, out, **settings, resume=True).n_steps == 2


# A run that continues beyond its end, or starts with the weights of another run


@pytest.mark.slow
def test_a_longer_run_equals_one_that_was_that_long_from_the_start(
    store_path: Path, tmp_path: Path
) -> None:
    settings = {"drafter": "eagle", "decay_steps": 6}
    run(store_path, tmp_path / "whole", max_steps=8, **settings)
    run(store_path, tmp_path / "parts", max_steps=4, **settings)
    report = run(store_path, tmp_path / "parts", max_steps=8, resume=True, **settings)
    assert report.n_steps == 8
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    with raises_naming(OutputOccupied, tmp_path / "parts", 8, 7):
        run(store_path, tmp_path / "parts", max_steps=7, resume=True, **settings)


def test_a_rate_that_falls_until_the_end_is_not_stretched(store_path: Path, tmp_path: Path) -> None:
    """The steps already taken would have needed other rates.

    The error names two ways to continue, and both work.
    """
    out, unvalidated = tmp_path / "run", {"validation_fraction": 0.0, "drafter": "eagle"}
    run(store_path, out, max_steps=4, **unvalidated)
    with raises_naming(
        OutputOccupied, out, "step 4", "step 8", "`decay_steps=4`", "`init_from="
    ) as refusal:
        run(store_path, out, max_steps=8, resume=True, **unvalidated)
    assert str(out) in str(refusal.value)
    longer = run(store_path, out, max_steps=6, decay_steps=4, resume=True, **unvalidated)
    assert longer.n_steps == 6
    assert last_state(out)["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(1e-3)
    anew = run(store_path, tmp_path / "new", max_steps=1, init_from=str(out), **unvalidated)
    assert anew.n_steps == 1


def test_weights_are_taken_and_nothing_else(store_path: Path, tmp_path: Path) -> None:
    run(store_path, tmp_path / "first", drafter="eagle", max_steps=3)
    # A rate of almost 0 keeps the initial weights.
    still = {
        "drafter": "eagle",
        "learning_rate": 1e-30,
        "max_steps": 2,
        "validation_fraction": 0.0,
        "init_from": str(tmp_path / "first"),
    }
    run(store_path, tmp_path / "second", stop_after_steps=1, seed=7, **still)
    first, second = load_drafter(tmp_path / "first"), load_drafter(tmp_path / "second")
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    state = last_state(tmp_path / "second")
    assert state["global_step"] == 1
    assert {
        float(moments["step"]) for moments in state["optimizer_states"][0]["state"].values()
    } == {1.0}
    shutil.rmtree(tmp_path / "first")
    assert run(store_path, tmp_path / "second", resume=True, seed=7, **still).n_steps == 2, (
        "it asks for them no more"
    )


def test_weights_of_another_drafter_are_refused(store_path: Path, tmp_path: Path) -> None:
    run(store_path, tmp_path / "first", max_steps=1)
    first = str(tmp_path / "first")
    with raises_naming(TrainingError, first, "kind moa", "kind eagle", "`drafter=moa`"):
        run(store_path, tmp_path / "other", max_steps=1, drafter="eagle", init_from=first)
    other = {"max_steps": 1, "layer_groups": 1, "unrotated_keys": False, "init_from": first}
    with raises_naming(TrainingError, first, "`layer_groups=2`", "`unrotated_keys=true`"):
        run(store_path, tmp_path / "other", **other)
    with raises_naming(DrafterError, tmp_path / "nope"):
        run(store_path, tmp_path / "other", max_steps=1, init_from=str(tmp_path / "nope"))
    run(store_path, tmp_path / "few", max_steps=1, init_from=first, draft_vocabulary=20)
    assert len(load_drafter(tmp_path / "few").config.draft_tokens) == 20
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("drafter", [pytest.param("moa", marks=pytest.mark.slow), "eagle3"])
def test_the_draft_vocabulary_is_chosen_by_default(
    store_of_all: Path, tmp_path: Path, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "drafter": drafter, "max_steps": 1, "decay_steps": 1, "validation_fraction": 0.0
    }  # fmt: skip
    if drafter == "eagle3":
        settings["fused_layers"] = (0, 1)
    run(store_of_all, tmp_path / "small", **settings)
    small = load_drafter(tmp_path / "small")
    assert small.config.draft_vocabulary in (0, small.config.vocab_size), (
        "the vocabulary of the target is small"
    )
    monkeypatch.setattr(vocabulary, "_FEWEST_TOKENS", 1)
    monkeypatch.setattr(vocabulary, "_SMALLEST_CHOICE", 16)
    monkeypatch.setattr(vocabulary, "_LEAST_GAIN", 0.0)
    plans: list[Any] = []
    train(run_settings(store_of_all, tmp_path / "large", **settings), announce=plans.append)
    (chosen,) = [setting for setting in plans[0].chosen if setting.name == "draft_vocabulary"]
    assert chosen.value in (16, 32, 64)
    assert load_drafter(tmp_path / "large").config.draft_vocabulary == chosen.value
    recorded = yaml.safe_load((tmp_path / "large" / "run.yaml").read_text())
    assert recorded["drafter"]["draft_vocabulary"] == chosen.value
    assert (
        run(store_of_all, tmp_path / "large", **settings | {"max_steps": 2}, resume=True).n_steps
        == 2
    )
    run(store_of_all, tmp_path / "all", draft_vocabulary="all", **settings)
    assert not load_drafter(tmp_path / "all").config.draft_tokens
    assert load_drafter(tmp_path / "all").config.draft_vocabulary == small.config.vocab_size


def test_norms_that_no_option_sets_are_refused_with_their_names(tmp_path: Path) -> None:
    model, settings = build_model(), Eagle3Settings()
    fresh, other = (build("eagle3", model, norm_before_residual=flag) for flag in (False, True))
    save_drafter(other, tmp_path)
    with raises_naming(TrainingError, tmp_path, "norm_before_residual", "init_from"):
        initial_drafter(str(tmp_path), fresh, settings, TargetFacts.of_model(model).sizes)


def test_resume_needs_no_setting_twice(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded settings apply, flags win over them, and the recorded store path is absolute."""
    monkeypatch.chdir(room)
    options = ("--preset", "small", "--drafter", "eagle", "--set", "schedule.decay_steps=2", *TRAIN)
    begun = run_command(
        "train", "store", "--out", tmp_path / "run", *options, "--stop-after-steps", "1"
    )
    assert begun.exit_code == 0, begun.output
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["store"] == str(
        room / "store"
    )
    monkeypatch.chdir(tmp_path)
    again = run_command("train", "--out", "run", "--resume")
    assert again.exit_code == 0, again.output
    assert last_state(tmp_path / "run")["global_step"] == 2
    assert run_command("train", "--out", "run", "--resume", "--epochs", "1").exit_code == 0
    assert last_state(tmp_path / "run")["global_step"] > 2
    refused(
        run_command("train", "--out", "run", "--resume", "--batch-size", "4"),
        "batch_size was 2 and is now 4",
    )
