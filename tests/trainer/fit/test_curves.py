"""The picture of a run: each panel shows one quantity, by its name."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from moa_data.trainer.fit import curves


def test_training_and_validation_divergence_have_panels_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.csv").write_text(
        "step,train/forward_kl,val/kl,val/top1_agreement\n9,4.5,,\n9,,0.13,0.9\n", encoding="utf-8"
    )
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    curves.plot_curves(tmp_path, tmp_path / "curves.png")
    (figure,) = figures
    shown = {axis.get_title(): [list(line.get_ydata()) for line in axis.lines] for axis in figure.axes}
    monkeypatch.undo()
    plt.close(figure)
    for value in (4.5, 0.13, 0.9):
        (title,) = (title for title, lines in shown.items() if [value] in lines)
        assert len(shown[title]) == 1
        assert "entropy" in title or value == 0.9
