"""What a transform codec learns: means, axes and the metric of the next-token distribution."""

import numpy as np
import pytest

from moa_data.storage.codecs import calibration
from moa_data.storage.codecs.calibration import early_means, logit_metric, principal_axes
from moa_data.storage.codecs.coding import EARLY_POSITIONS, mean_rows


def test_subspace_iteration_finds_the_exact_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.standard_normal((60, 5)))[0]
    rows = rng.standard_normal((300, 5)) * np.arange(5, 0, -1) @ axes.T + 0.01 * rng.standard_normal((300, 60))
    rows = rows.astype(np.float32)
    exact = principal_axes(rows)[:, :5]
    monkeypatch.setattr(calibration, "EXACT_WIDTH", 10)
    monkeypatch.setattr(calibration, "MAX_COMPONENTS", 5)
    np.testing.assert_allclose(principal_axes(rows), exact, atol=1e-4)


def test_early_positions_have_their_own_mean() -> None:
    sequences = [np.arange(n * 3, dtype=np.float32).reshape(n, 3) for n in (2, 20, 20)]
    means = early_means(sequences)
    np.testing.assert_allclose(means[:EARLY_POSITIONS], sequences[1][:EARLY_POSITIONS])
    np.testing.assert_allclose(means[-1], sequences[1][EARLY_POSITIONS:].mean(0))
    assert mean_rows(6, 5).tolist() == [6, 7, 8, 8, 8]
    unreached = early_means([np.ones((2, 3), np.float32), 3 * np.ones((2, 3), np.float32)])
    np.testing.assert_allclose(unreached, 2.0)


def test_logit_metric_predicts_the_divergence_of_small_errors() -> None:
    rng = np.random.default_rng(4)
    head = rng.standard_normal((40, 6)).astype(np.float32)
    hidden = rng.standard_normal((500, 6)).astype(np.float32)
    error = (0.02 * rng.standard_normal(hidden.shape)).astype(np.float32)

    def log_softmax(x: np.ndarray) -> np.ndarray:
        logits: np.ndarray = (x @ head.T).astype(np.float64)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        return logits

    p, q = log_softmax(hidden), log_softmax(hidden + error)
    divergence = (np.exp(p) * (p - q)).sum(1).mean()
    metric = logit_metric(hidden, head, batch_tokens=64)
    assert np.einsum("ni,ij,nj->n", error, metric, error).mean() / 2 == pytest.approx(divergence, rel=0.1)
