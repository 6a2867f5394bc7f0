"""What training runs say of themselves, and a warning where drafters were not trained alike."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from moa_data.errors import OptionInvalid
from moa_data.evaluation.config import EvalConfig
from moa_data.evaluation.drafters import drafter_facts, training_differences
from moa_data.evaluation.run import evaluate
from moa_data.moa.formats.checkpoint import load_drafter

STORE: dict[str, Any] = {"n_sequences": 60, "codec": "lossless", "dataset.sha256": "ab" * 32}
SETTINGS: dict[str, Any] = {"store": "/somewhere", "batch_size": 8, "optimizer": "muon", "seed": 0}


def as_run(drafter: Path, folder: Path, store: dict[str, Any] = STORE, **report: Any) -> Path:
    """A folder like those of ``moa-data train``."""
    shutil.copytree(drafter, folder / "drafter")
    values = {"n_steps": 340, "n_tokens": 100, "n_tokens_total": 5000, "n_bytes_read": 7_000_000}
    values |= {"best_expected_acceptance_length": 3.25} | report
    (folder / "report.json").write_text(json.dumps(values))
    (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS | {"out": str(folder)}))
    (folder / "store.json").write_text(json.dumps(store))
    return folder


def test_a_report_sets_the_cost_of_training_beside_speed(
    target_folder: Path, drafter_folder: Path, chats_file: Path, tmp_path: Path
) -> None:
    runs = [as_run(drafter_folder, tmp_path / "one"), as_run(drafter_folder, tmp_path / "other")]
    out = tmp_path / "out" / "report.json"
    config = EvalConfig(
        model=str(target_folder), prompts=str(chats_file), drafter=tuple(map(str, runs)), out=str(out), n_prompts=2,
        method=("plain", "chain", "tree"), max_new_tokens=6, draft_length=2, tree="2x2x3", device="cpu", warmup=0,
    )  # fmt: skip
    assert evaluate(config).warnings == []
    written = json.loads(out.read_text())
    assert [facts["n_tokens"] for facts in written["drafters"].values()] == [5000, 5000]
    assert [(pair["method"], pair["drafter"], pair["over"]) for pair in written["pairs"]] == [
        ("chain", "other", "one"), ("tree", "other", "one"),
    ]  # fmt: skip
    assert all(pair["acceptance_length"] == 1.0 for pair in written["pairs"])
    text = out.with_suffix(".md").read_text()
    assert "| one | moa |" in text
    assert "| 340 | 5,000 | 7 MB | " in text
    assert "All were trained alike" in text
    assert "| over one | acceptance length | tokens/s |" in text
    assert "| chain other | 1.00 (1.00-1.00) |" in text
    (runs[1] / "report.json").write_text(json.dumps({"n_steps": 3}))
    assert evaluate(config).warnings == ["steps differ: one 340, other 3"]
    text = out.with_suffix(".md").read_text()
    assert "Not trained alike, so differences are not the drafters' alone:\n\n- steps differ: one 340" in text


def test_differences_are_named() -> None:
    def facts(**values: Any) -> dict[str, Any]:
        return {"n_steps": 340, "n_tokens": 5000, "store": STORE, "settings": SETTINGS} | values

    assert training_differences({"a": facts(), "b": facts()}) == []
    assert training_differences({"a": facts(), "b": facts(n_steps=2400)}) == ["steps differ: a 340, b 2,400"]
    older = {name: value for name, value in STORE.items() if name != "codec"}
    assert training_differences({"a": facts(), "b": facts(store=older)}) == [], "an older run did not record the codec"
    found = training_differences(
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
        (found,) = training_differences({"a": facts(**{name: value}), "b": facts(**{name: other})})
        assert found.startswith(f"settings differ in {name}: a ")
    (found,) = training_differences(
        {"a": facts(drafter={"forward_kl_weight": 0.1}), "b": facts(drafter={"forward_kl_weight": 0.2})}
    )
    assert found.startswith("settings differ in forward_kl_weight: a ")
    (found,) = training_differences({"a": facts(decay_steps=None), "b": facts(decay_steps=-1)})
    assert found == "settings differ in decay_steps: a None, b -1"
    assert training_differences({"a": facts(), "b": facts(decay_steps=-1)}) == [], "an older run did not record it"
    assert (
        training_differences({"a": facts(drafter={"eagle_layers": 1}), "b": facts(drafter={"eagle_layers": 2})}) == []
    )
    for name in ("reader_threads", "micro_batch_size"):
        assert training_differences({"a": facts(**{name: 1}), "b": facts(**{name: 2})}) == []


def test_what_a_folder_says(drafter_folder: Path, tmp_path: Path) -> None:
    drafter = load_drafter(drafter_folder)
    bare = drafter_facts(drafter_folder, drafter)
    assert (bare.n_steps, bare.n_tokens, bare.settings, bare.store) == (None, None, {}, {})
    run = as_run(drafter_folder, tmp_path / "run")
    assert drafter_facts(run / "drafter", drafter).n_steps == 340
    old: dict[str, Any] = {"n_steps": 3, "n_tokens": 100, "best_expected_acceptance_length": float("-inf")}
    (run / "report.json").write_text(json.dumps(old))
    facts = drafter_facts(run, drafter)
    assert (facts.n_tokens, facts.n_bytes_read) == (100, None)
    (run / "run.yaml").write_text("[1, 2]")
    with pytest.raises(OptionInvalid, match=r"run\.yaml holds a list, expected a mapping"):
        drafter_facts(run, drafter)
