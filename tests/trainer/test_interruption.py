"""Signals at every moment of a training run.

The state is saved, one line says how to continue, and nothing is lost.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from moa_data.errors import Interrupted
from moa_data.tests.kit.runs import assert_same_run, settings
from moa_data.trainer import checkpoints, fit, muon
from moa_data.trainer import data as data
from moa_data.trainer.step import DrafterModule

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals"),
    pytest.mark.usefixtures("heeded_signals")
]  # fmt: skip

SETTINGS: dict[str, Any] = {
    "optimizer": "muon", "micro_batch_size": 4, "max_steps": 8, "checkpoint_every": 4,
    "drafter": "eagle",
}  # fmt: skip
STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def train(store: Any, out: Any, **changes: Any) -> Any:
    return fit.train(settings(store, out, **(SETTINGS | changes)))


def test_a_signal_in_each_phase(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: Any
) -> None:
    """A run that is stopped in each phase in turn equals an uninterrupted run."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(store_path, whole)
    phases = [
        (data.StoreDataModule, "train_dataloader", 1, signal.SIGTERM, 0),  # before the first step
        (data.TrainingStream, "_read", 2, signal.SIGHUP, 0),  # in the reading thread
        # At this call, some matrices of the step are updated and others are not.
        (muon, "orthogonalize", 5, signal.SIGTERM, 1),
        (DrafterModule, "training_step", 3, signal.SIGINT, 2),
        (checkpoints, "write_tensors", 1, signal.SIGHUP, 4),
        (DrafterModule, "validation_step", 2, signal.SIGTERM, 6),
        (data.ValidationBatches, "_read", 1, signal.SIGINT, 6),
        (L.Trainer, "save_checkpoint", 3, signal.SIGTERM, 8),  # after the last step
        (fit, "plot_curves", 1, signal.SIGINT, 8),
    ]
    before = {signum: signal.getsignal(signum) for signum in STOPS}
    for index, (owner, name, n_th, signum, step) in enumerate(phases):
        strike(owner, name, n_th, signum)
        with pytest.raises(Interrupted) as stop:
            train(store_path, parts, resume=index > 0)
        monkeypatch.undo()
        advice = "Continue with the same command and `resume`."
        assert str(stop.value) == f"stopped at step {step} after saving its state. {advice}", name
        assert stop.value.signum == signum, name
        assert {signum: signal.getsignal(signum) for signum in STOPS} == before, (
            "handlers are given back"
        )
    assert train(store_path, parts, resume=True).n_steps == 8
    assert_same_run(whole, parts)
    assert json.loads((parts / "report.json").read_text())["n_steps"] == 8


def test_a_second_ctrl_c_ends_at_once(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signals come in a step that does not end, so only the earlier checkpoint is left."""
    real, calls = DrafterModule.training_step, []

    def stuck(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 12:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(calls) == 12, "as often as shells and launchers pass one on"
            monkeypatch.setattr("moa_data.trainer.callbacks.REPEAT_S", 0.01)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        return real(*args)

    monkeypatch.setattr(DrafterModule, "training_step", stuck)
    with pytest.raises(
        Interrupted, match=r"stopped without saving\. Continue from the checkpoint of step 4"
    ):
        train(store_path, tmp_path / "run")
    monkeypatch.undo()
    assert train(store_path, tmp_path / "run", resume=True).n_steps == 8


def test_ignored_signals_stay_ignored(store_path: Path, tmp_path: Path, strike: Any) -> None:
    """The run starts with SIGHUP ignored, as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        strike(DrafterModule, "training_step", 3, signal.SIGHUP)
        assert train(store_path, tmp_path / "run", max_steps=3).n_steps == 3
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_before_the_first_checkpoint_the_line_says_so(
    store_path: Path, tmp_path: Path, strike: Any
) -> None:
    strike(fit, "build_module", 1, signal.SIGINT)
    with pytest.raises(
        Interrupted, match=r"stopped before the first checkpoint\. Run the same command"
    ):
        train(store_path, tmp_path / "run")


def command(store: Any, out: Any, *more: Any) -> Any:
    """Return the arguments of a run that takes some seconds."""
    changes = (
        SETTINGS | {"max_steps": 120, "validate_every": 20, "checkpoint_every": 10} | dict(more)
    )
    file = Path(out).with_suffix(".yaml")
    file.write_text(settings(store, out, **changes).to_yaml())
    return ["-m", "moa_data", "train", "--config", str(file)]


def start(arguments: Any) -> Any:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, **pipes, start_new_session=True)


def said(stderr: Any) -> Any:
    return [line for line in stderr.replace("\r", "\n").splitlines() if line.startswith("Error: ")]


def go_on(out: Any) -> Any:
    return ["--resume"] if (out / "checkpoints" / "last.ckpt").is_file() else []


def processes_of(out: Any) -> Any:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_bytes())
    return [text for text in found if str(out).encode() in text]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_two_processes_stop_alike(store_path: Path, tmp_path: Path, launcher: str) -> None:
    """Send signals to the first process, to its group, and to torchrun.

    All processes end, and only one of them prints the line.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = (("devices", 2), ("micro_batch_size", 2))
    prefix = [sys.executable]
    if launcher == "torchrun":
        prefix += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    begun = time.monotonic()
    assert (
        subprocess.run(
            [*prefix, *command(store_path, whole, *more)], capture_output=True
        ).returncode
        == 0
    )
    seconds, rng = time.monotonic() - begun, random.Random(1)
    n_spoke = 0
    ways = [(signum, to_group) for to_group in (False, True) for signum in STOPS] * 2
    for signum, to_group in ways:
        if (parts / "report.json").is_file():
            break
        with start([*prefix, *command(store_path, parts, *more), *go_on(parts)]) as process:
            try:
                process.wait(rng.uniform(0.4, 0.9) * seconds)
            except subprocess.TimeoutExpired:
                (os.killpg if to_group else os.kill)(process.pid, signum)
            _, stderr = process.communicate(timeout=300)
        if process.returncode:
            # Before the first line of the program, Python itself handles a signal. torchrun's
            # imports take seconds.
            begun_at_all = (
                process.returncode != -signum if launcher == "lightning" else bool(said(stderr))
            )
            if launcher == "lightning" and begun_at_all:
                assert process.returncode == STOPS[signum], stderr
            if begun_at_all:
                [line] = said(stderr)
                assert "ame command" in line, stderr
                n_spoke += 1
            # torchrun prints a traceback of its own.
            assert "Traceback" not in stderr or launcher == "torchrun"
        deadline = time.monotonic() + 30
        while processes_of(parts) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not processes_of(parts)
    assert n_spoke
    done = subprocess.run(
        [*prefix, *command(store_path, parts, *more), *go_on(parts)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, parts)
