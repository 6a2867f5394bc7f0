"""Trackers beside the run's own files: which entry a run gets, that a resumed one goes on with it, what is missing."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from moa_data.errors import TrainingError
from moa_data.trainer.fit import loggers

from .test_run import run


class Tracker(CSVLogger):
    """Stands in for Lightning's logger of a tracker: writes CSV, and notes what it was made with."""

    made: list[dict[str, Any]] = []

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        self.key = options.get("id") or options.get("run_id") or f"entry-{len(self.made)}"
        super().__init__(options.get("save_dir", "unused"), name="tracked", version="0")

    @property
    def version(self) -> str:
        return str(self.key)

    @property
    def root_dir(self) -> str:
        return str(self.made[0]["folder"])

    def log_hyperparams(self, params: Any = None) -> None:
        self.made[-1]["settings"] = params


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    Tracker.made = []

    def make(**options: Any) -> Tracker:
        logger = Tracker(**options)
        Tracker.made[-1]["folder"] = tmp_path / "tracked"
        return logger

    monkeypatch.setattr(loggers, "WandbLogger", make)
    monkeypatch.setattr(loggers, "MLFlowLogger", make)
    monkeypatch.setattr(loggers, "check_logger", lambda config: None)
    monkeypatch.setattr("moa_data.trainer.fit.run.check_logger", lambda config: None)
    return Tracker.made


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("mlflow", "run_id")])
def test_a_resumed_run_goes_on_with_its_entry(
    store_path: Path, tmp_path: Path, tracker: list[dict[str, Any]], name: str, key: str
) -> None:
    out, more = tmp_path / "a run", {"logger": name, "project": "drafters", "max_steps": 2}
    run(store_path, out, stop_after_steps=1, **more)
    [first] = tracker
    assert first[key] is None
    assert "a run" in first.values()
    assert "drafters" in first.values()
    assert first["settings"]["max_steps"] == 2
    assert json.loads((out / "tracker.json").read_text()) == {name: "entry-1"}
    run(store_path, out, resume=True, **more)
    assert tracker[1][key] == "entry-1"
    rows = list((tmp_path / "tracked").rglob("metrics.csv"))
    assert rows
    assert "train/loss" in rows[0].read_text()


def test_a_missing_package_is_named_before_anything_is_written(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    with pytest.raises(TrainingError, match=r'--logger wandb needs .* not installed: pip install "moa-data\[wandb\]"'):
        run(store_path, tmp_path / "run", logger="wandb")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(loggers, "check_logger", lambda config: None)
    monkeypatch.setattr("moa_data.trainer.fit.run.check_logger", lambda config: None)
    monkeypatch.setattr(loggers, "WandbLogger", CSVLogger)

    def broken(**options: Any) -> None:
        raise ModuleNotFoundError("no module named half_of_it")

    monkeypatch.setattr(loggers, "WandbLogger", broken)
    with pytest.raises(TrainingError, match=r"pip install .* \(no module named half_of_it\)"):
        run(store_path, tmp_path / "run", logger="wandb")

    def refusing(**options: Any) -> None:
        error = type("CommError", (Exception,), {"__module__": "wandb.errors"})
        raise error("no API key configured\nmore lines")

    monkeypatch.setattr(loggers, "WandbLogger", refusing)
    with pytest.raises(TrainingError, match=r"wandb refuses the run: no API key configured$"):
        run(store_path, tmp_path / "run", logger="wandb")


def test_mlflow_needs_a_place(store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "a package")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(TrainingError, match="set MLFLOW_TRACKING_URI"):
        run(store_path, tmp_path / "run", logger="mlflow")
