"""Reports state facts about training runs and warn if drafters were trained differently."""

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
from moa_data.tests.kit.errors import raises_naming
from moa_data.trainer.config import CHANGE_NO_RESULT, TrainConfig

STORE: dict[str, Any] = {"n_sequences": 60, "codec": "lossless", "dataset.sha256": "ab" * 32}
SETTINGS: dict[str, Any] = {"store": "/somewhere", "batch_size": 8, "optimizer": "muon", "seed": 0}


def as_run(drafter: Path, folder: Path) -> Path:
    """Copy a drafter into a folder like those of ``moa-data train``."""
    shutil.copytree(drafter, folder / "drafter")
    values = {"n_steps": 340, "n_tokens": 100, "n_tokens_total": 5000, "n_bytes_read": 7_000_000}
    (folder / "report.json").write_text(json.dumps(values))
    (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS | {"out": str(folder)}))
    (folder / "store.json").write_text(json.dumps(STORE))
    return folder


def test_a_report_lists_the_cost_of_training(
    config: EvalConfig, drafter_folder: Path, tmp_path: Path
) -> None:
    runs, out = (
        [as_run(drafter_folder, tmp_path / name) for name in ("one", "other")],
        Path(config.out),
    )
    config = config.replaced(
        drafter=tuple(map(str, runs)),
        n_prompts=2,
        method=("plain", "chain", "tree"),
        draft_length=2,
        tree="2x2x3",
    )
    assert evaluate(config).warnings == []
    written = json.loads(out.read_text())
    assert [facts["n_tokens"] for facts in written["drafters"].values()] == [5000, 5000]
    assert [(pair["method"], pair["drafter"], pair["over"]) for pair in written["pairs"]] == [
        ("chain", "other", "one"), ("tree", "other", "one"),
    ]  # fmt: skip
    assert all(pair["acceptance_length"] == 1.0 for pair in written["pairs"])
    text = out.with_suffix(".md").read_text()
    for line in (
        "| one | moa |", "| 340 | 5,000 | 7 MB |", "All drafters were trained in the same way",
        "| over one | acceptance length | tokens/s |", "| chain other | 1.00 (1.00-1.00) |",
    ):  # fmt: skip
        assert line in text
    (runs[1] / "report.json").write_text(json.dumps({"n_steps": 3}))
    config = config.replaced(n_prompts=1, method=("plain", "chain"))
    assert evaluate(config).warnings == ["the numbers of training steps differ (one 340, other 3)"]
    assert (
        "differences between them:\n\n- the numbers of training steps differ (one 340"
        in out.with_suffix(".md").read_text()
    )


def facts(**changed: Any) -> dict[str, Any]:
    return {"n_steps": 340, "n_tokens": 5000, "store": STORE, "settings": SETTINGS} | changed


def test_differences_are_named() -> None:
    assert (
        training_differences({"a": facts(), "b": facts()})
        == training_differences({"a": facts()})
        == []
    )
    older = {name: value for name, value in STORE.items() if name != "codec"}
    assert training_differences({"a": facts(), "b": facts(store=older)}) == [], (
        "an older run did not record the codec"
    )
    other = facts(
        n_tokens=7,
        store=STORE | {"codec": "int8"},
        settings=SETTINGS | {"batch_size": 4, "store": "x"},
    )
    unknown = facts(settings={}, store={}, n_steps=None)
    assert training_differences({"a": facts(), "b": other, "c": unknown}) == [
        "it is unknown how c was trained, because its folder contains no training run",
        "the numbers of training tokens differ (a 5,000, b 7)",
        "the stores differ in codec (a lossless, b int8)",
        "the settings differ in batch_size (a 8, b 4)",
    ]


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        ({"precision": "32-true"}, {"precision": "bf16"}, "precision (a 32-true, b bf16)"),
        (
            {"optimizer": {"kind": "muon"}}, {"optimizer": {"kind": "adamw"}},
            "optimizer (a muon, b adamw)",
        ),
        ({"data": {"draft_length": 5}}, {"data": {"draft_length": 2}}, "draft_length (a 5, b 2)"),
        (
            {"drafter": {"forward_kl_weight": 0.1}}, {"drafter": {"forward_kl_weight": 0.2}},
            "forward_kl_weight (a 0.1, b 0.2)",
        ),
        ({"decay_steps": None}, {"decay_steps": -1}, "decay_steps (a None, b -1)"),
        ({}, {"decay_steps": -1}, None),  # an older run did not record decay_steps
        ({"drafter": {"eagle_layers": 1}}, {"drafter": {"eagle_layers": 2}}, None),
        ({"reader_threads": 1}, {"reader_threads": 2}, None),
        (
            {"record": {"logger": None, "project": "a"}},
            {"record": {"logger": "wandb", "project": "b"}}, None,
        ),
        (
            {"data": {"cache_dir": None, "cache_gb": None}},
            {"data": {"cache_dir": "/c", "cache_gb": 5.0}}, None,
        ),
        ({"machine": {"num_nodes": 1}}, {"machine": {"num_nodes": 2}}, None),
    ],
)  # fmt: skip
def test_every_setting_that_changes_a_result_is_compared(
    one: dict[str, Any], other: dict[str, Any], line: str | None
) -> None:
    found = training_differences(
        {"a": facts(settings=SETTINGS | one), "b": facts(settings=SETTINGS | other)}
    )
    assert found == ([f"the settings differ in {line}"] if line else [])


def test_every_setting_that_changes_no_result_is_one_of_a_run_and_is_not_compared() -> None:
    names = {setting.name for setting in TrainConfig.settings()}
    assert names >= CHANGE_NO_RESULT
    for name in CHANGE_NO_RESULT:
        one, other = (facts(settings=SETTINGS | {name: value}) for value in ("a", "b"))
        assert training_differences({"a": one, "b": other}) == [], name


def test_what_a_folder_says(drafter_folder: Path, tmp_path: Path) -> None:
    drafter = load_drafter(drafter_folder)
    bare = drafter_facts(drafter_folder, drafter)
    assert [bare[name] for name in ("n_steps", "n_tokens", "settings", "store")] == [
        None,
        None,
        {},
        {},
    ]
    run = as_run(drafter_folder, tmp_path / "run")
    assert drafter_facts(run / "drafter", drafter)["n_steps"] == 340
    (run / "report.json").write_text(json.dumps({"n_steps": 3, "n_tokens": 100}))
    old = drafter_facts(run, drafter)
    assert (old["n_tokens"], old["n_bytes_read"]) == (100, None)
    for text, reason in (
        ("[]", "expected an object with names"),
        ("- [a, 1]", "expected an object with names"),
        ("", "expected an object with names"),
        ("a: 1\nb: [", "line 2, column"),
    ):
        (run / "run.yaml").write_text(text)
        with raises_naming(OptionInvalid, run / "run.yaml", reason):
            drafter_facts(run, drafter)
    (run / "report.json").write_text("[]")
    with raises_naming(OptionInvalid, run / "report.json", "expected an object with names"):
        drafter_facts(run, drafter)
