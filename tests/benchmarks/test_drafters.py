"""The drafters that are compared have equal weights, and the target they are compared on is laid out as told."""

import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from moa_data.moa.drafters.registry import drafter_class

ROOT = Path(__file__).parents[2]
N_WEIGHTS = 1_890_000


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_drafters_have_equal_weights() -> None:
    target = LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1152, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    drafters = importlib.import_module("benchmarks.training.drafters")
    for name, (_, settings) in (drafters.DRAFTERS | drafters.ABLATIONS).items():
        kind = drafter_class(settings["drafter"])
        sizes: Any = kind.config_class
        given = {key: value for key, value in settings.items() if key in sizes.__dataclass_fields__}
        drafter = kind(sizes.from_target(target, **given))
        n_weights = sum(weight.numel() for weight in drafter.parameters())
        assert abs(n_weights / N_WEIGHTS - 1) < 0.015, f"{name}: {n_weights:,}"


def test_chats_are_laid_out(tmp_path: Path) -> None:
    target = importlib.import_module("benchmarks.training.target")

    def chats(name: str, n: int) -> Path:
        rows = [{"messages": [{"role": "user", "content": f"{name} {i} \u2028 ?"}]} for i in range(n)]
        target.write_chats(tmp_path / name, rows)
        return tmp_path / name

    options = Namespace(
        out=tmp_path, train=[chats("a", 30), chats("b", 10)], test=[chats("c", 1), chats("d", 3)], seed=0
    )
    train = target.lay_out(options)
    assert target.lay_out(options) == train
    held_out = target.chats(tmp_path / "held_out.jsonl")
    assert len(held_out) == 2
    texts = sorted(row["messages"][0]["content"] for row in train + held_out)
    assert texts == sorted(row["messages"][0]["content"] for name in "ab" for row in target.chats(tmp_path / name)), (
        "each chat is in one of the two"
    )
    written = [row["messages"][0]["content"][:3] for row in target.chats(tmp_path / "test.jsonl")]
    assert written == ["c 0", "d 0", "d 1", "d 2"], "the files of test chats in turns"
