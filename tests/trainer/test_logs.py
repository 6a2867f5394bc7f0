"""What a run writes for people: figures, their picture, and its entry in a tracker."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from lightning.pytorch.loggers import CSVLogger

from moa_data.errors import TrainingError
from moa_data.tests.kit.runs import run
from moa_data.trainer import fit


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
    run(store_path, tmp_path / "a run", logger=name, project="drafters", max_steps=1)
    assert {"a run", "drafters"} <= set(options.values())
    assert params["max_steps"] == 1
    [rows] = (tmp_path / "tracked").rglob("metrics.csv")
    assert "train/loss" in rows.read_text()


@pytest.mark.parametrize("error", [ModuleNotFoundError("no wandb"), RuntimeError("no API key configured\nmore")])
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
    (figure,) = figures
    shown = {axis.get_title(): [list(line.get_ydata()) for line in axis.lines] for axis in figure.axes}
    monkeypatch.undo()
    plt.close(figure)
    for value in (4.5, 0.13, 0.9):
        (title,) = (title for title, lines in shown.items() if [value] in lines)
        assert len(shown[title]) == 1
        assert "entropy" in title or value == 0.9


def test_torn_lines_and_what_is_no_figure_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics-000.csv").write_bytes(b"step,train/loss\r\n0,2.5\r\n1,1.5\r\n,1")
    lines = [b"step,train/loss", b"2,1.25", b"1,\xff\xfe", b"x,1.5", b"\0\0\0", b"3,1,9", b"inf,3", b""]
    (tmp_path / "metrics.csv").write_bytes(b"\r\n".join(lines))
    assert fit.read_metrics(tmp_path) == {"train/loss": [(0, 2.5), (1, 1.5), (2, 1.25), (3, 1.0)]}


def test_earlier_figures_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "metrics-001.csv").write_text("earlier")  # the first one was taken away
    (tmp_path / "metrics.csv").write_text("now")
    fit.keep_earlier_metrics(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "metrics-001.csv": "earlier",
        "metrics-002.csv": "now",
    }
