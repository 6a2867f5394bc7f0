"""Every stage runs at the widths of Llama-3-8B. Two of its layers are enough to show that."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moa_data.moa.drafters.registry import DRAFTERS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_layers_at_the_real_widths(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.store.real_shape", str(tmp_path), "--layers", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = tmp_path.glob("real-shape-*.json")
    stages = {stage["name"]: stage for stage in json.loads(record.read_text())["stages"]}
    assert {"plan", "extract", "verify", "audit", *(f"train {kind}" for kind in DRAFTERS)} < set(
        stages
    )
    assert all(0 < stage["peak_gb"] < 24 for stage in stages.values())
    answers = [
        line.partition(" in ")[0]
        for line in (tmp_path / "generate-with-each.log").read_text().splitlines()
    ]
    tokens = {
        kind: answer for kind, _, answer in (line.partition(": ") for line in answers if line)
    }
    assert set(DRAFTERS) <= set(tokens)
    # A drafter changes the speed, never the answer.
    assert len({tokens[kind] for kind in DRAFTERS}) == 1
