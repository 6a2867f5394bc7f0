"""What a plan says an extraction takes is what it then takes, and what it leaves open is chosen for the machine."""

from pathlib import Path
from typing import Any

import pytest

from moa_data.pipeline import plan as plan_module
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan
from moa_data.storage.read.store import read_manifest
from moa_data.storage.schema import commit_path
from moa_data.tests.kit.hostile import change_json


@pytest.mark.parametrize(
    ("is_fast", "weights", "dtype", "expected"),
    [
        (True, "bfloat16", "bfloat16", "bfloat16"),
        (False, "bfloat16", "bfloat16", "float32"),
        (True, "float32", "bfloat16", "float32"),  # rounded weights would be another target
        (True, "bfloat16", "float32", "float32"),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_that_is_fast(
    config: ExtractConfig, model: Path, monkeypatch: Any, is_fast: bool, weights: str, dtype: str, expected: str
) -> None:
    monkeypatch.setattr(plan_module, "has_fast_bfloat16", lambda: is_fast)
    change_json(model / "config.json", dtype=weights)
    plan = build_plan(config.replaced(model=str(model), compute_dtype="auto", dtype=dtype))
    assert plan.forward.compute_dtype == plan.manifest.extraction["compute_dtype"] == expected


def test_an_extraction_goes_on_in_its_dtype_on_another_kind_of_cpu(config: ExtractConfig, monkeypatch: Any) -> None:
    monkeypatch.setattr(plan_module, "has_fast_bfloat16", lambda: True)
    config = config.replaced(compute_dtype="auto")
    extract(config)
    commit_path(Path(config.out), 1).unlink()
    monkeypatch.setattr(plan_module, "has_fast_bfloat16", lambda: False)
    assert extract(config).n_parts_done == 1
    assert read_manifest(Path(config.out)).extraction["compute_dtype"] == "bfloat16"
