"""The logs of a run: the time of training and of waiting, figures, curves, entries in trackers."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensorboard.summary.writer import event_file_writer

from moa_data.errors import StorageUnavailable, TrainingError
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.disks import tmpfs
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.runs import run, settings
from moa_data.trainer import callbacks, checkpoints, data, fit
from moa_data.trainer.batches import BatchReader
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.fit import read_metrics, train
from moa_data.trainer.step import DrafterModule


def test_writing_checkpoints_is_no_waiting_for_data(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this test's clock, a micro-batch takes one second and a checkpoint or a drafter 100.

    Reading takes no time.
    """
    clock = [0.0]

    def taking(seconds: Any, real: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            clock[0] += seconds
            return real(*args, **kwargs)

        return timed

    for module in (callbacks, data):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(L.Trainer, "save_checkpoint", taking(100, L.Trainer.save_checkpoint))
    monkeypatch.setattr(callbacks, "write_drafter", taking(100, checkpoints.write_drafter))
    monkeypatch.setattr(DrafterModule, "training_step", taking(1, DrafterModule.training_step))
    settings = {
        "drafter": "eagle",
        "max_steps": 4,
        "micro_batch_size": 4,
        "checkpoint_every": 1,
        "validate_every": 2,
        "log_every": 1,
    }
    report = run(store_path, tmp_path / "run", **settings)
    assert clock[0] > 400
    assert (report.data_wait_share, report.tokens_per_s) == (0, report.n_tokens / 8)
    logged = read_metrics(tmp_path / "run")
    assert [value for _, value in logged["train/data_wait_share"]] == [0] * 4
    assert sum(2 * value for _, value in logged["train/tokens_per_s"]) == pytest.approx(
        report.n_tokens
    )


def test_waiting_is_the_time_until_a_batch_comes(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, settings = [0.0], TrainConfig.of(store="", out="", batch_size=4)
    monkeypatch.setattr(data, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    store = ActivationStore(store_path)
    reader = BatchReader(store, settings, torch.device("cpu"))
    stream = data.TrainingStream(reader, np.arange(len(store)), 9, 0, 1)

    def slowly(batches: Any) -> Iterator[Any]:
        for batch in batches:
            clock[0] += 3
            yield batch

    real = data._read_ahead
    monkeypatch.setattr(data, "_read_ahead", lambda *args: slowly(real(*args)))
    iterator = iter(stream)
    for _ in range(2):
        next(iterator)
        clock[0] += 10
    assert (stream.wait_s, stream.asked_s) == (6, 13)


def test_a_report_without_validation_is_valid_json(store_path: Path, tmp_path: Path) -> None:
    def refuse(constant: Any) -> None:
        raise AssertionError(f"{constant} is no JSON")

    settings = {"drafter": "eagle", "max_steps": 2, "validation_fraction": 0.0}
    report = run(store_path, tmp_path / "run", **settings)
    facts = json.loads((tmp_path / "run" / "report.json").read_text(), parse_constant=refuse)
    assert (
        facts["best_expected_acceptance_length"] is report.best_expected_acceptance_length is None
    )
    assert facts["tokens_per_s"] == report.tokens_per_s > 0
    (tmp_path / "run" / "report.json").unlink()
    again = run(store_path, tmp_path / "run", **settings, resume=True)
    facts = json.loads((tmp_path / "run" / "report.json").read_text(), parse_constant=refuse)
    assert facts["tokens_per_s"] is facts["data_wait_share"] is again.tokens_per_s is None
    assert (tmp_path / "run" / "drafter").is_dir()


def test_steps_are_reported_once_each(store_path: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    config = settings(
        store_path, tmp_path / "run", drafter="eagle", max_steps=3, micro_batch_size=2,
        validate_every=2, log_every=1,
    )  # fmt: skip
    train(config, progress=progress_to(lambda *state: told.append(state)))
    assert {total for _, total, _ in told} == {3}
    steps = [done for done, _, _ in told]
    assert steps == sorted(steps)
    assert set(steps) == {0, 1, 2, 3}
    assert (0, 3, "train, micro-batch 1 of 4") in told
    assert any("validation 1 of" in message for _, _, message in told)
    assert "loss" in told[-1][2]
    assert "expected acceptance length" in told[-1][2]
    assert "tok/s" in told[-1][2]


@pytest.mark.parametrize(("name", "made"), [("wandb", "WandbLogger"), ("mlflow", "MLFlowLogger")])
def test_a_run_is_logged_to_a_tracker(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, made: str
) -> None:
    options: dict[str, Any] = {}
    params: dict[str, Any] = {}

    class Tracker(CSVLogger):
        def __init__(self, **given: Any) -> None:
            options.update(given)
            super().__init__(tmp_path / "tracked")

        def log_hyperparams(self, given: Any = None) -> None:
            params.update(given)

    monkeypatch.setattr(fit, made, Tracker)
    run(
        store_path,
        tmp_path / "a run",
        logger=name,
        project="drafters",
        drafter="eagle",
        max_steps=1,
    )
    assert {"a run", "drafters"} <= set(options.values())
    assert params["max_steps"] == 1
    [rows] = (tmp_path / "tracked").rglob("metrics.csv")
    assert "train/loss" in rows.read_text()


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("no wandb"), RuntimeError("no API key configured\nmore")]
)
def test_a_tracker_that_cannot_be_used_is_one_line(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(**options: Any) -> None:
        raise error

    monkeypatch.setattr(fit, "WandbLogger", broken)
    with pytest.raises(TrainingError) as refusal:
        run(store_path, tmp_path / "run", logger="wandb")
    assert str(error).splitlines()[0] in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("n_inodes", range(6, 12))
def test_a_log_that_cannot_be_written_prints_no_traceback(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_inodes: int
) -> None:
    """The folder of the run needs more inodes than the disk has."""
    tracebacks: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    out = tmp_path / "disk" / "run"
    with (
        tmpfs(out.parent, f"size=200m,nr_inodes={n_inodes}"),
        raises_naming(StorageUnavailable, out, "No space left"),
    ):
        run(store_path, out, drafter="eagle", max_steps=2)
    for thread in threading.enumerate():
        if isinstance(thread, event_file_writer._AsyncWriterThread) and thread.exception:
            thread.join()
    assert not tracebacks


@pytest.mark.draws
def test_training_and_validation_divergence_have_panels_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.csv").write_text(
        "step,train/forward_kl,val/kl,val/top1_agreement\n9,4.5,,\n9,,0.13,0.9\n", encoding="utf-8"
    )
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    fit.plot_curves(tmp_path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    (figure,) = figures
    shown = {
        axis.get_title(): [list(line.get_ydata()) for line in axis.lines] for axis in figure.axes
    }
    monkeypatch.undo()
    plt.close(figure)
    for value in (4.5, 0.13, 0.9):
        (title,) = (title for title, lines in shown.items() if [value] in lines)
        assert len(shown[title]) == 1
        assert "entropy" in title or value == 0.9


def test_torn_lines_and_what_is_no_figure_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics-000.csv").write_bytes(b"step,train/loss\r\n0,2.5\r\n1,1.5\r\n,1")
    lines = [
        b"step,train/loss",
        b"2,1.25",
        b"1,\xff\xfe",
        b"x,1.5",
        b"\0\0\0",
        b"3,1,9",
        b"inf,3",
        b"",
    ]
    (tmp_path / "metrics.csv").write_bytes(b"\r\n".join(lines))
    assert fit.read_metrics(tmp_path) == {"train/loss": [(0, 2.5), (1, 1.5), (2, 1.25), (3, 1.0)]}


def test_earlier_figures_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "metrics-001.csv").write_text("earlier")  # The first earlier file was removed.
    (tmp_path / "metrics.csv").write_text("now")
    fit.keep_earlier_metrics(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "metrics-001.csv": "earlier",
        "metrics-002.csv": "now",
    }
