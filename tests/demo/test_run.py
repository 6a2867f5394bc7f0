"""The demo runs end to end on tiny settings, reuses finished phases, resumes, and refuses foreign folders."""

import json
from pathlib import Path
from typing import Any

import pytest

from moa_data.demo import run
from moa_data.demo.config import DemoConfig
from moa_data.demo.run import run_demo
from moa_data.demo.state import PHASES, DemoState
from moa_data.errors import Interrupted, OptionInvalid
from moa_data.tests.kit.command import DEMO

TINY = DemoConfig.of(**DEMO)


@pytest.mark.draws
def test_all_phases_then_reuse_then_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TINY.replaced(out=str(tmp_path / "demo"))
    real_eval = run._Run.run_eval

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run._Run, "run_eval", interrupted)
    with pytest.raises(Interrupted, match=r"in the eval phase; run the same command again, .*extract, train\)$"):
        run_demo(config)
    monkeypatch.setattr(run._Run, "run_eval", real_eval)

    first = run_demo(config, provenance={"argv": ["demo"]})
    assert first.reused == ("corpus", "target", "extract", "train")
    assert first.acceptance_length >= 1.0
    assert first.identical
    assert first.bytes_per_token > 0
    text = first.report.read_text()
    for picture in ("target", "drafter", "bytes_per_token", "speed"):
        assert f"figures/{picture}.png" in text
        assert (first.folder / "figures" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert "kv" in text
    assert "tokens per target call" in first.describe()

    report_written = first.report.stat().st_mtime_ns
    second = run_demo(config)
    assert second.reused == PHASES
    assert second.report.stat().st_mtime_ns == report_written

    with pytest.raises(OptionInvalid, match="other settings: seed is 7, was 0"):
        run_demo(config.replaced(seed=7))


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionInvalid, match="not empty and holds no demo"):
        run_demo(TINY.replaced(out=str(tmp_path)))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_start_that_was_killed_begins_again(tmp_path: Path) -> None:
    config = TINY.replaced(out=str(tmp_path / "demo"))
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "demo.json.partial").write_text("{")
    assert DemoState.open(config).phases == {}
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["demo.json"]


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    config = TINY.replaced(out=str(tmp_path / "demo"))
    state = DemoState.open(config)
    state.finish("corpus", 1.0, {})
    assert json.loads((tmp_path / "demo" / "demo.json").read_text())["phases"]["corpus"]["seconds"] == 1.0
    (tmp_path / "demo" / "demo.json").write_text("{")
    with pytest.raises(OptionInvalid, match=r"demo\.json cannot be read"):
        DemoState.open(config)


def test_all_unusable_settings_are_named_together() -> None:
    with pytest.raises(OptionInvalid, match=r"seed is -1, .*n_store_chats is 100, expected at most.*target_steps is 0"):
        TINY.replaced(target_steps=0, n_store_chats=100, seed=-1)
