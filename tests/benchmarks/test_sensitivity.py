"""The ablation over what a drafter feels: metrics made coarse, and what codes replace."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sensitivity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.codecs.sensitivity")


def test_metrics_are_made_coarse(sensitivity: Any) -> None:
    rows = np.random.default_rng(0).standard_normal((40, 12))  # 2 layers of 2 heads of 3
    metric = rows.T @ rows
    assert sensitivity.coarse([metric], "even", 2, 3) is None
    for weights in ("parts", "layers", "heads", "full"):
        (found,) = sensitivity.coarse([metric], weights, 2, 3)
        assert np.trace(found) == pytest.approx(np.trace(metric))
        n_different = {"parts": 1, "layers": 2}.get(weights, 12)
        assert len(np.unique(np.diag(found).round(9))) == n_different
        assert np.count_nonzero(found) == {"heads": 4 * 9, "full": 144}.get(weights, 12)
        if weights == "layers":
            assert found[0, 0] == pytest.approx(np.diag(metric)[:6].mean())
        if weights == "heads":
            np.testing.assert_array_equal(found[3:6, 3:6], metric[3:6, 3:6])


def test_arms_replace_each_value_once(sensitivity: Any) -> None:
    exact, coded = np.zeros((200, 3, 2, 2, 4)), np.ones((200, 3, 2, 2, 4))
    sums = {"": np.zeros_like(exact), "layer": np.zeros_like(exact), "positions": np.zeros_like(exact)}
    for name, replace in sensitivity.arms(3).items():
        values = exact.copy()
        replace(values, coded)
        if name in ("keys", "values"):
            assert values[:, :, :, 0].all() == (name == "keys") != values[:, :, :, 1].any()
        elif name in ("nothing", "all"):
            assert values.mean() == (name == "all")
        if (first := name.split()[0]) in sums:
            sums[first] += values
    assert (sums["layer"] == 1).all()
    assert (sums["positions"] == 1).all()
