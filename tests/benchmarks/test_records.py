"""Options, figures and record of a benchmark.

A file of results says where its figures come from.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moa_data.tests.kit.errors import raises_naming


def record(
    records: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, **found: Any
) -> Path:
    """Write a record; by default it names a commit and a clean checkout."""
    known = (
        records.collect_provenance() | {"git_sha": "0123456789abcdef", "git_dirty": False} | found
    )
    monkeypatch.setattr(records, "collect_provenance", lambda: known)
    path: Path = records.write_record(folder, "speed", {"figures": {"mb_per_s": 1.0}})
    return path


def test_a_file_of_results_names_each_commit_and_machine_once(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = benchmark("kit.records")
    path = record(records, tmp_path, monkeypatch)
    written = json.loads(path.read_text())
    assert written["figures"] == {"mb_per_s": 1.0}
    assert written["provenance"]["memory_gib"] > 0
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    table = {"title": "Speed", "rows": [{"speed": "1 µs"}]}
    (tmp_path / "results/speed.json").write_text(json.dumps(table))
    options = argparse.Namespace(name="speed", records=[path, path])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda _: options)
    records.main()
    records.main()
    noted = json.loads((tmp_path / "results/speed.json").read_text())
    assert noted["rows"] == table["rows"]
    (source,) = noted["sources"]
    assert source["commit"] == "0123456789ab"
    text = benchmark("pages.tables").source_text(source)
    assert text.startswith(f"Code: commit 0123456789ab, {source['day']}, torch {source['torch']}, ")


@pytest.mark.parametrize("found", [{"git_dirty": True}, {"git_sha": None, "git_dirty": None}])
def test_code_that_no_commit_holds_is_no_source(
    benchmark: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, Any],
) -> None:
    records = benchmark("kit.records")
    path = record(records, tmp_path, monkeypatch, **found)
    with raises_naming(ValueError, path):
        records.sources([path])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {"figures": {"seen": vars(options) | {}}}


def test_options_have_the_types_of_their_defaults(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = benchmark("kit.harness")
    words = ["STORE", "a", "b", "--n-prompts", "3", "--rates", "1", "2", "--folder", "x", "--fast"]
    monkeypatch.setattr(sys, "argv", ["measure.py", *words, "--out", str(tmp_path)])
    options = {
        "n_prompts": 8,
        "rates": [0.5],
        "folder": Path,
        "fast": False,
        "kind": {"choices": ["eagle"]},
    }
    seen = harness.run(
        lambda given: f"kind-{given.n_prompts}", measure, "store", "runs+", **options
    )["figures"]["seen"]
    assert seen == {
        "store": "STORE", "runs": ["a", "b"], "n_prompts": 3, "rates": [1.0, 2.0],
        "folder": Path("x"), "fast": True, "kind": None, "out": tmp_path,
    }  # fmt: skip
    (file,) = tmp_path.glob("kind-3-*.json")
    record = json.loads(file.read_text())
    assert record["figures"]["seen"]["folder"] == record["settings"]["folder"] == "x"
    assert record["provenance"]["n_cpus"]
