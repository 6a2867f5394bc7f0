"""Figures of a run: what counts as training and what as waiting for data, and how they are written."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.runs import run, settings
from moa_data.trainer import callbacks, checkpoints
from moa_data.trainer import data as data
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.data import BatchReader
from moa_data.trainer.fit import read_metrics, train
from moa_data.trainer.step import DrafterModule


def test_writing_checkpoints_is_no_waiting_for_data(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a micro-batch takes a second, a checkpoint or a drafter a hundred, and reading no time."""
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
    settings = {"max_steps": 4, "micro_batch_size": 4, "checkpoint_every": 1, "validate_every": 2, "log_every": 1}
    report = run(store_path, tmp_path / "run", **settings)
    assert clock[0] > 400
    assert (report.data_wait_share, report.tokens_per_s) == (0, report.n_tokens / 8)
    logged = read_metrics(tmp_path / "run")
    assert [value for _, value in logged["train/data_wait_share"]] == [0] * 4
    assert sum(2 * value for _, value in logged["train/tokens_per_s"]) == pytest.approx(report.n_tokens)


def test_waiting_is_the_time_until_a_batch_comes(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, settings = [0.0], TrainConfig.of(store="", out="", batch_size=4)
    monkeypatch.setattr(data, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    store = ActivationStore(store_path)
    reader = BatchReader(store, settings, torch.device("cpu"))
    stream = data.TrainingStream(reader, np.arange(len(store)), store.lengths.astype(np.int64), 9, 0, 1)

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

    report = run(store_path, tmp_path / "run", max_steps=2, validation_fraction=0.0)
    facts = json.loads((tmp_path / "run" / "report.json").read_text(), parse_constant=refuse)
    assert facts["best_expected_acceptance_length"] is report.best_expected_acceptance_length is None
    assert facts["tokens_per_s"] == report.tokens_per_s > 0
    (tmp_path / "run" / "report.json").unlink()
    again = run(store_path, tmp_path / "run", max_steps=2, validation_fraction=0.0, resume=True)
    facts = json.loads((tmp_path / "run" / "report.json").read_text(), parse_constant=refuse)
    assert facts["tokens_per_s"] is facts["data_wait_share"] is again.tokens_per_s is None
    assert (tmp_path / "run" / "drafter").is_dir()


def test_steps_are_reported_once_each(store_path: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    config = settings(store_path, tmp_path / "run", max_steps=3, micro_batch_size=2, validate_every=2, log_every=1)
    train(config, progress=lambda *state: told.append(state))
    assert {total for _, total, _ in told} == {3}
    steps = [done for done, _, _ in told]
    assert steps == sorted(steps)
    assert set(steps) == {0, 1, 2, 3}
    assert (0, 3, "train, micro-batch 1 of 4") in told
    assert any("validation 1 of" in message for _, _, message in told)
    assert "loss" in told[-1][2]
    assert "expected acceptance length" in told[-1][2]
    assert "tok/s" in told[-1][2]
