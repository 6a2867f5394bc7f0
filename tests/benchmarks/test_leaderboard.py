"""One command enters a drafter in the leaderboard, with every column.

It refuses a drafter with which the target's answers change.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.drafters import build
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_byte_tokenizer, build_text_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def leaderboard(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ModuleType:
    module = benchmark("training.leaderboard")
    table = tmp_path / "leaderboard.json"
    shutil.copy(ROOT / "benchmarks" / "results" / "leaderboard.json", table)
    monkeypatch.setattr(module, "TABLE", table)
    return module


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Return the command line for a random target and a random drafter of blocks of three."""
    tokenizer, model, drafter = build_byte_tokenizer(), tmp_path / "model", tmp_path / "drafter"
    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    build_text_model(vocab_size=len(tokenizer), initializer_range=0.3, **special).save_pretrained(
        model
    )
    tokenizer.save_pretrained(model)
    target = Target.load(str(model), torch.float32, "cpu")
    save_drafter(
        build("dspark", target.model, block_layers=1, block_size=10, markov_rank=4), drafter
    )
    prompts = write_jsonl(
        tmp_path / "chats.jsonl", [chat("hello", "an answer"), chat("why", "an answer")]
    )
    return [
        "leaderboard.py", str(model), str(prompts), str(drafter), "--name", "Random",
        "--target", "tiny",
        "--held-out", str(prompts), "--tokens", "7", "--seconds", "8",
        "--out", str(tmp_path / "out"),
        "--n-prompts", "2", "--batch-size", "2", "--speed-prompts", "1", "--max-new-tokens", "6",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_drafter_enters(
    leaderboard: ModuleType, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", arguments)
    before = json.loads(leaderboard.TABLE.read_text())
    leaderboard.main()
    leaderboard.main()
    after = json.loads(leaderboard.TABLE.read_text())
    assert len(after["rows"]) == len(before["rows"]) + 1, "entered again it takes its own place"
    (row,) = [one for one in after["rows"] if one["target"] == "tiny"]
    shown = {key for part in (after, *after["more"]) for key in part["columns"]}
    assert shown == {key for key in row if key != "command"}
    assert row["tokens"] == 7
    assert row["stop"] in leaderboard.STOPS
    assert all(1 <= row[key][0] <= 11 for key in leaderboard.SHAPES)
    assert 0 <= row["alone"][0] <= 10, "alone, a block ends after ten"
    assert 0 < row["stopped_drafts"] <= 10
    assert len(row["by_position"].split(", ")) == len(leaderboard.POSITIONS)


def test_other_answers_are_refused(
    leaderboard: ModuleType, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {"methods": [{"method": "chain", "n_exact": 1, "n_answers": 2}]}
    monkeypatch.setattr(leaderboard, "kept", lambda config, measure: report)
    monkeypatch.setattr("sys.argv", arguments)
    before = leaderboard.TABLE.read_text()
    with raises_naming(SystemExit, "chain"):
        leaderboard.main()
    assert leaderboard.TABLE.read_text() == before
