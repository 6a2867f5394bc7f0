"""The options, the figures and the record of a benchmark come from one place."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.kit.harness")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {"figures": {"seen": vars(options) | {}}}


def test_options_have_the_types_of_their_defaults(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "STORE",
        "a",
        "b",
        "--n-prompts",
        "3",
        "--rates",
        "1",
        "2",
        "--folder",
        "x",
        "--fast",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["measure.py", *words])
    options = {"n_prompts": 8, "rates": [0.5], "folder": Path, "fast": False, "kind": {"choices": ["eagle"]}}
    seen = harness.run(lambda given: f"kind-{given.n_prompts}", measure, "store", "runs+", **options)["figures"]["seen"]
    assert seen == {
        "store": "STORE", "runs": ["a", "b"], "n_prompts": 3, "rates": [1.0, 2.0], "folder": Path("x"), "fast": True,
        "kind": None, "out": tmp_path,
    }  # fmt: skip
    (file,) = tmp_path.glob("kind-3-*.json")
    record = json.loads(file.read_text())
    assert record["figures"]["seen"]["folder"] == record["settings"]["folder"] == "x"
    assert record["provenance"]["n_cpus"]
    assert str(file) in capsys.readouterr().out


def test_work_takes_turns_after_a_call_that_does_not_count(harness: Any) -> None:
    calls: list[str] = []
    taken = harness.in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 2, "b": 2}
    assert harness.quartiles([1, 2, 3, 4, 5]) == [3, 2, 4]
    assert harness.medians([{"x": 1}, {"x": 5}, {"x": 2}]) == {"x": 2}
