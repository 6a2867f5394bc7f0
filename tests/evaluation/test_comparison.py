"""Runs compared: what they say of themselves beside what was measured, and a warning where they were not alike."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from moa_data.errors import OptionInvalid
from moa_data.evaluation.comparison import KIND, differences
from moa_data.evaluation.config import CompareConfig
from moa_data.evaluation.drafters import drafter_facts
from moa_data.evaluation.errors import EvaluationError
from moa_data.evaluation.run import compare
from moa_data.evaluation.statistics import ratio_with_interval, relative_with_interval
from moa_data.moa.formats.checkpoint import load_drafter

STORE = {"n_sequences": 60, "codec": "lossless", "dataset.sha256": "ab" * 32}
SETTINGS = {"store": "/somewhere", "batch_size": 8, "optimizer": "muon", "seed": 0}


def as_run(drafter: Path, folder: Path, store: dict[str, Any] = STORE, **report: Any) -> Path:
    """A folder like those of ``moa-data train``."""
    shutil.copytree(drafter, folder / "drafter")
    values = {"n_steps": 340, "n_tokens": 100, "n_tokens_total": 5000, "n_bytes_read": 7_000_000}
    values |= {"best_expected_acceptance_length": 3.25} | report
    (folder / "report.json").write_text(json.dumps(values))
    (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS | {"out": str(folder)}))
    (folder / "store.json").write_text(json.dumps(store))
    return folder


def config(target_folder: Path, chats_file: Path, out: Path, *runs: Path) -> CompareConfig:
    return CompareConfig(
        runs=tuple(map(str, runs)),
        model=str(target_folder),
        prompts=str(chats_file),
        out=str(out),
        n_prompts=2,
        max_new_tokens=6,
        draft_length=2,
        tree="2x2x3",
        batch_size=2,
        device="cpu",
        warmup=0,
    )


@pytest.mark.draws
def test_a_comparison_and_its_files(
    target_folder: Path, drafter_folder: Path, chats_file: Path, tmp_path: Path
) -> None:
    one = as_run(drafter_folder, tmp_path / "one")
    other = as_run(drafter_folder, tmp_path / "other", n_steps=340)
    out = tmp_path / "out" / "comparison.json"
    report = compare(config(target_folder, chats_file, out, one, other))
    assert report.warnings == []
    written = json.loads(out.read_text())
    assert written["kind"] == KIND
    assert written == json.loads(json.dumps(report.to_json()))
    assert [run["name"] for run in written["runs"]] == ["one", "other"]
    first, second = written["runs"]
    assert (first["n_tokens"], first["n_bytes_read"]) == (5000, 7_000_000)
    for method in ("chain", "tree"):
        summary = report.evaluation.method(f"{method} one")
        assert first[method]["acceptance_length"] == second[method]["acceptance_length"] == summary.acceptance_length
        assert first[method]["draft_ms_per_draft"] * summary.n_drafted == pytest.approx(1e3 * summary.draft_s)
    pairs = written["evaluation"]["pairs"]
    assert [(pair["method"], pair["drafter"], pair["over"]) for pair in pairs] == [
        ("chain", "other", "one"), ("tree", "other", "one"),
    ]  # fmt: skip
    assert all(pair["acceptance_length"] == 1.0 for pair in pairs)
    text = out.with_suffix(".md").read_text()
    assert "| over one | acceptance length | tokens/s |" in text
    assert "| chain other | 1.00 (1.00-1.00) |" in text
    assert "| one | moa |" in text
    assert "7 MB" in text
    assert "All were trained alike" in text
    for name in ("comparison.png", "comparison_acceptance.png", "comparison_speed.png"):
        assert (out.parent / name).read_bytes().startswith(b"\x89PNG")


def test_differences_are_named() -> None:
    def facts(**values: Any) -> dict[str, Any]:
        return {"n_steps": 340, "n_tokens": 5000, "store": STORE, "settings": SETTINGS} | values

    assert differences({"a": facts(), "b": facts()}) == []
    assert differences({"a": facts(), "b": facts(n_steps=2400)}) == ["steps differ: a 340, b 2,400"]
    older = {name: value for name, value in STORE.items() if name != "codec"}
    assert differences({"a": facts(), "b": facts(store=older)}) == [], "an older run did not record the codec"
    found = differences(
        {
            "a": facts(),
            "b": facts(
                n_tokens=7, store=STORE | {"codec": "int8"}, settings=SETTINGS | {"batch_size": 4, "store": "x"}
            ),
            "c": facts(settings={}, store={}, n_steps=None),
        }
    )
    assert found == [
        "c: its folder holds no training run, so nothing says how it was trained",
        "training tokens differ: a 5,000, b 7",
        "stores differ in codec: a lossless, b int8",
        "settings differ in batch_size: a 8, b 4",
    ]


def test_every_setting_that_changes_a_result_is_compared() -> None:
    def facts(**settings: Any) -> dict[str, Any]:
        return {"n_steps": 340, "n_tokens": 5000, "store": STORE, "settings": SETTINGS | settings}

    for name, value, other in (
        ("precision", "32-true", "bf16-mixed"), ("weight_decay", 0.0, 0.1), ("gradient_clip", 1.0, 0.0),
        ("validation_fraction", 0.02, 0.5), ("validate_every", 100, 7),
        ("draft_length", 5, 2), ("validation_sequences", 64, 8),
    ):  # fmt: skip
        (found,) = differences({"a": facts(**{name: value}), "b": facts(**{name: other})})
        assert found.startswith(f"settings differ in {name}: a ")
    (found,) = differences(
        {"a": facts(drafter={"official_quirks": False}), "b": facts(drafter={"official_quirks": True})}
    )
    assert found.startswith("settings differ in official_quirks: a ")
    (found,) = differences({"a": facts(decay_steps=None), "b": facts(decay_steps=-1)})
    assert found == "settings differ in decay_steps: a None, b -1"
    assert differences({"a": facts(), "b": facts(decay_steps=-1)}) == [], "an older run did not record it"
    assert differences({"a": facts(drafter={"eagle_layers": 1}), "b": facts(drafter={"eagle_layers": 2})}) == []
    for name in ("reader_threads", "micro_batch_size"):
        assert differences({"a": facts(**{name: 1}), "b": facts(**{name: 2})}) == []


def test_what_a_folder_says(drafter_folder: Path, tmp_path: Path) -> None:
    drafter = load_drafter(drafter_folder)
    bare = drafter_facts(drafter_folder, drafter)
    assert (bare.n_steps, bare.n_tokens, bare.settings, bare.store) == (None, None, {}, {})
    run = as_run(drafter_folder, tmp_path / "run")
    assert drafter_facts(run / "drafter", drafter).n_steps == 340
    old = {"n_steps": 3, "n_tokens": 100, "best_expected_acceptance_length": float("-inf")}
    (run / "report.json").write_text(json.dumps(old))
    facts = drafter_facts(run, drafter)
    assert (facts.n_tokens, facts.n_bytes_read, facts.expected_acceptance_length) == (100, None, None)
    (run / "run.yaml").write_text("[1, 2]")
    with pytest.raises(EvaluationError, match=r"run\.yaml holds a list, expected a mapping"):
        drafter_facts(run, drafter)


def test_refusals(target_folder: Path, chats_file: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match="no run is given"):
        compare(config(target_folder, chats_file, tmp_path / "out.json"))
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(EvaluationError, match="not a moa-data comparison report"):
        compare(config(target_folder, chats_file, other, tmp_path))


def test_ratios_of_sums() -> None:
    prompts = ["a", "a", "b", "c"]
    values = [(1.0, 2.0), (3.0, 2.0), (2.0, 4.0), (0.0, 0.0)]
    ratio, interval = ratio_with_interval(prompts, values)
    assert ratio == 6 / 8
    assert interval == (0.5, 1.0), "two prompts with ratios of 1 and 1/2"
    assert ratio_with_interval(["a"], [(1.0, 2.0)]) == (0.5, None)
    assert ratio_with_interval(["a"], [(0.0, 0.0)]) == ratio_with_interval([], []) == (None, None)
    relative, bounds = relative_with_interval(["a", "b"], [(4.0, 2.0, 1.0, 1.0), (8.0, 2.0, 2.0, 1.0)])
    assert relative == 2.0
    assert bounds == (2.0, 2.0), "each prompt is twice its baseline, whichever is drawn"
