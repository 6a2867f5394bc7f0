"""What a run writes: its entry in a tracker, also when it is resumed; figures, and their picture."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from lightning.pytorch.loggers import CSVLogger

from moa_data.errors import TrainingError
from moa_data.tests.kit.runs import run
from moa_data.trainer import logs


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

    monkeypatch.setattr(logs, "WandbLogger", make)
    monkeypatch.setattr(logs, "MLFlowLogger", make)
    monkeypatch.setattr(logs, "check_logger", lambda config: None)
    monkeypatch.setattr("moa_data.trainer.fit.check_logger", lambda config: None)
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
    monkeypatch.setattr(logs, "check_logger", lambda config: None)
    monkeypatch.setattr("moa_data.trainer.fit.check_logger", lambda config: None)
    monkeypatch.setattr(logs, "WandbLogger", CSVLogger)

    def broken(**options: Any) -> None:
        raise ModuleNotFoundError("no module named half_of_it")

    monkeypatch.setattr(logs, "WandbLogger", broken)
    with pytest.raises(TrainingError, match=r"pip install .* \(no module named half_of_it\)"):
        run(store_path, tmp_path / "run", logger="wandb")

    def refusing(**options: Any) -> None:
        error = type("CommError", (Exception,), {"__module__": "wandb.errors"})
        raise error("no API key configured\nmore lines")

    monkeypatch.setattr(logs, "WandbLogger", refusing)
    with pytest.raises(TrainingError, match=r"wandb refuses the run: no API key configured$"):
        run(store_path, tmp_path / "run", logger="wandb")


def test_mlflow_needs_a_place(store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "a package")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(TrainingError, match="set MLFLOW_TRACKING_URI"):
        run(store_path, tmp_path / "run", logger="mlflow")


def test_training_and_validation_divergence_have_panels_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.csv").write_text(
        "step,train/forward_kl,val/kl,val/top1_agreement\n9,4.5,,\n9,,0.13,0.9\n", encoding="utf-8"
    )
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    logs.plot_curves(tmp_path, tmp_path / "curves.png")
    (figure,) = figures
    shown = {axis.get_title(): [list(line.get_ydata()) for line in axis.lines] for axis in figure.axes}
    monkeypatch.undo()
    plt.close(figure)
    for value in (4.5, 0.13, 0.9):
        (title,) = (title for title, lines in shown.items() if [value] in lines)
        assert len(shown[title]) == 1
        assert "entropy" in title or value == 0.9


def test_a_torn_line_of_figures_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics-000.csv").write_bytes(b"step,train/loss\r\n0,2.5\r\n1,1.5\r\n,1")
    (tmp_path / "metrics.csv").write_bytes(b"step,train/loss\r\n2,1.25\r\n")
    assert logs.read_metrics(tmp_path) == {"train/loss": [(0, 2.5), (1, 1.5), (2, 1.25)]}


def test_what_is_no_figure_is_left_out(tmp_path: Path) -> None:
    lines = [b"step,train/loss", b"0,2.5", b"1,\xff\xfe", b"x,1.5", b"\0\0\0", b"2,1,9", b"inf,3", b""]
    (tmp_path / "metrics.csv").write_bytes(b"\r\n".join(lines))
    assert logs.read_metrics(tmp_path) == {"train/loss": [(0, 2.5), (2, 1.0)]}


def test_earlier_figures_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "metrics-001.csv").write_text("earlier")  # the first one was taken away
    (tmp_path / "metrics.csv").write_text("now")
    logs.keep_earlier_metrics(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "metrics-001.csv": "earlier",
        "metrics-002.csv": "now",
    }
