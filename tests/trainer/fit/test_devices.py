"""Two devices give what one gives: the loss of whole steps, the validation, and the weights up to rounding."""

import subprocess
import sys
from pathlib import Path

import pytest

from moa_data.trainer.fit.curves import read_metrics

from .test_run import assert_same_weights, settings


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moa", "medusa"])
def test_two_processes_log_what_one_logs(store_path: Path, tmp_path: Path, kind: str) -> None:
    """With micro-batches of 2, of which each process has two; 3 validation batches are dealt to two processes."""
    more = {"drafter": kind, "max_steps": 4, "validate_every": 2, "log_every": 1, "micro_batch_size": 2}
    running = []
    for n_devices in (1, 2):
        out = tmp_path / str(n_devices)
        out.with_suffix(".yaml").write_text(settings(store_path, out, devices=n_devices, **more).to_yaml())
        command = [sys.executable, "-m", "moa_data", "train", "--config", str(out.with_suffix(".yaml"))]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for process in running:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        assert "sync_dist" not in stderr
    one, two = read_metrics(tmp_path / "1"), read_metrics(tmp_path / "2")
    assert {step for step, _ in two["train/loss"]} == {0, 1, 2, 3}
    for name in ("train/loss", "train/forward_kl"):
        assert [v for _, v in two[name]] == pytest.approx([v for _, v in one[name]], rel=1e-5)
    # The weights at a validation differ by the rounding of the steps before.
    assert [v for _, v in two["val/kl"]] == pytest.approx([v for _, v in one["val/kl"]], rel=1e-5)
    assert two["val/expected_acceptance_length"] == one["val/expected_acceptance_length"]
    assert_same_weights(tmp_path / "1", tmp_path / "2", rtol=1e-3, atol=2e-5)
