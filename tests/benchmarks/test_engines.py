"""The table of drafters in other engines: what is counted, what is said of one that refuses, and where it stands."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.live import Target
from moa_data.tests.kit import drafters as kit
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.models import write_target


@pytest.fixture
def engines(benchmark: Callable[[str], ModuleType]) -> Any:
    return benchmark("decoding.engines")


def test_rounds_are_those_of_transformers_and_a_refusal_is_quoted(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_target(tmp_path / "target", num_hidden_layers=3)
    target = Target.load(str(folder))
    prompts = write_jsonl(tmp_path / "prompts.jsonl", random_chats(2))
    kinds = {"independent": {}, "dflash": {"block_layers": 1, "block_size": 6, "sample_from_anchor": False}}
    for kind, sizes in kinds.items():
        save_drafter(kit.build(kind, target.model, **sizes), tmp_path / kind)
    (refusing := tmp_path / "python").write_text("#!/bin/sh\necho 'ValueError: no such method' >&2; exit 1\n")
    refusing.chmod(0o755)
    words = [str(folder), str(prompts), *(str(tmp_path / kind) for kind in kinds)]
    words += (
        f"--vllm {refusing} --n-prompts 2 --max-new-tokens 12 --table {tmp_path}/engines.json --out {tmp_path}".split()
    )
    monkeypatch.setattr("sys.argv", ["engines", *words])
    engines.main()
    table = json.loads((tmp_path / "engines.json").read_text())
    for row in table["rows"]:
        assert row["here_rounds"] - row["transformers_rounds"] in range(-1, 3)
        assert row["here_equal"] == row["transformers_equal"] == "2 of 2"
        assert row["vllm_rounds"] == "refused"
        assert "vllm_length" not in row
    assert "Of `dflash` vLLM says: *no such method*" in table["caveats"]
    engines.write_table(tmp_path / "engines.json", [{"drafter": "dflash", "here_rounds": 3}], {"vllm": "9"}, [])
    again = json.loads((tmp_path / "engines.json").read_text())
    assert again["rows"] == [{"drafter": "dflash", "here_rounds": 3}, table["rows"][1]]
    assert [text for text in again["caveats"] if "says" in text] == ["Of `independent` vLLM says: *no such method*"]
    assert table["columns"]["transformers_rounds"]["title"].startswith("Rounds, transformers 5.")
