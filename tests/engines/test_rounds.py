"""Drafters take as many rounds in vLLM itself as here.

`make test-engines` makes the environment that this test needs.
"""

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from moa_data.evaluation.measure import opening_tokens
from moa_data.evaluation.prompts import load_prompts
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.live import Target
from moa_data.tests.kit import drafters as kit
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.models import write_target

PYTHON = Path(os.environ.get("MOA_DATA_VLLM", "none"))
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON.is_file(), reason="MOA_DATA_VLLM names no Python with vLLM"),
]
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"eagle_input_norm": False},
    "eagle3": {"fused_layers": (0, 1, 2)},
    "dflash": {"block_layers": 2, "block_size": 6},
    "independent": {"independent_width": 128},
    "dspark": {"block_layers": 2, "block_size": 5, "markov_rank": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_and_answers_are_those_of_vllm(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds and answers equal vLLM's, except for DSpark: vLLM's CPU runner refuses it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    engines = importlib.import_module("benchmarks.decoding.engines")
    folder = write_target(tmp_path / "target", num_hidden_layers=3, head_dim=32)
    target, prompts = (
        Target.load(str(folder)),
        write_jsonl(tmp_path / "prompts.jsonl", random_chats(4)),
    )
    texts = opening_tokens(target, load_prompts(prompts).prompts)
    save_drafter(
        kit.teach(kit.build(kind, target.model, **KINDS[kind]), target, texts, 60), tmp_path / kind
    )
    found = engines.measure(
        argparse.Namespace(
            model=str(folder), prompts=str(prompts), drafters=[str(tmp_path / kind)],
            vllm=str(PYTHON), n_prompts=4, max_new_tokens=24, table=None,
        )
    )  # fmt: skip
    (row,) = found["rows"]
    assert row["here_length"] > 1.2
    if kind == "dspark":
        assert "does not support: dspark" in found["errors"][0]["error"]
        return
    # The last round of each answer may differ.
    assert abs(row["here_rounds"] - row["vllm_rounds"]) <= 4, row
    assert row["here_equal"] == row["vllm_equal"] == "4 of 4"
