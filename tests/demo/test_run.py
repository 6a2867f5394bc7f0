"""The demo runs end to end with tiny settings.

It reuses finished phases, resumes, and refuses folders with other content.
"""

import json
from pathlib import Path

import pytest

from moa_data.demo import run, serving
from moa_data.demo.config import DemoConfig
from moa_data.demo.run import run_demo
from moa_data.errors import Interrupted, OptionInvalid, OutputOccupied
from moa_data.tests.kit.command import DEMO
from moa_data.tests.kit.errors import raises_naming

from .conftest import Interrupt

TINY = DemoConfig.of(**DEMO)
PHASES = ("corpus", "target", "extract", "train", "eval", "serve")


def test_all_phases_then_reuse_then_refusal(
    tmp_path: Path, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CUT_S", 0.3)
    config = TINY.replaced(out=str(tmp_path / "demo"))

    with (
        interrupt("evaluate"),
        raises_naming(Interrupted, "eval", "(corpus, target, extract, train)"),
    ):
        run_demo(config)
    first = run_demo(config, provenance={"argv": ["demo"]})
    assert first.reused == PHASES[:4]
    assert first.phases["eval"]["acceptance_length"] >= 1.0
    assert first.phases["eval"]["n_exact"] == first.phases["eval"]["n_answers"]
    assert first.phases["serve"]["is_equal"]
    assert first.phases["extract"]["bytes_per_token"] > 0
    for picture in ("serving.png", "drafter/curves.png", "eval/report.png"):
        assert (first.folder / picture).read_bytes().startswith(b"\x89PNG")
    assert "tokens per target call" in first.describe()
    log = (first.folder / "serve.log").read_text().splitlines()
    others = {line for line in log if not line.startswith("{")}
    finishing = "The command finishes what it has started; press Ctrl-C again to stop at once."
    stopped = "The server has stopped. All answers were complete."
    assert others <= {"", finishing, stopped}, "lines of libraries"

    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    assert run_demo(config).reused == PHASES
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == before

    with raises_naming(OutputOccupied, first.folder, "seed", 0, 7):
        run_demo(config.replaced(seed=7))
    (first.folder / "demo.json").write_text("{")
    with raises_naming(OutputOccupied, first.folder / "demo.json"):
        run_demo(config)


def test_a_start_that_was_killed_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo.json.partial").write_text("{")
    monkeypatch.setattr(run, "_corpus", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_demo(TINY.replaced(out=str(tmp_path)))
    assert json.loads((tmp_path / "demo.json").read_text())["phases"] == {}


def test_all_unusable_settings_are_named_together() -> None:
    with raises_naming(OptionInvalid, "seed", -1, "target_steps", 0):
        TINY.replaced(target_steps=0, seed=-1)
    with raises_naming(OptionInvalid, "n_store_chats", 100, "n_heads", 3, "n_eval_prompts", 9):
        TINY.replaced(n_store_chats=100, n_heads=3, n_eval_prompts=9)
