"""The table of drafters in other engines: rounds, quoted refusals, and rows of earlier runs."""

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


@pytest.mark.slow
def test_rounds_are_those_of_transformers_and_a_refusal_is_quoted(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = write_target(tmp_path / "target", num_hidden_layers=3), tmp_path / "engines.json"
    prompts = write_jsonl(tmp_path / "prompts.jsonl", random_chats(2))
    save_drafter(
        kit.build("dflash", Target.load(str(folder)).model, block_layers=1, block_size=6),
        tmp_path / "dflash",
    )
    (refusing := tmp_path / "python").write_text(
        "#!/bin/sh\necho 'ValueError: no such method' >&2; exit 1\n"
    )
    refusing.chmod(0o755)
    options = f"--vllm {refusing} --n-prompts 2 --max-new-tokens 12 --table {file} --out {tmp_path}"
    monkeypatch.setattr(
        "sys.argv",
        ["engines", str(folder), str(prompts), str(tmp_path / "dflash"), *options.split()],
    )
    engines.main()
    table = json.loads(file.read_text())
    (row,) = table["rows"]
    assert row["here_rounds"] - row["transformers_rounds"] in range(3)
    assert row["here_equal"] == row["transformers_equal"] == "2 of 2"
    assert row["vllm_rounds"] == "refused"
    assert "vllm_length" not in row
    assert table["caveats"][-1] == "vLLM refuses `dflash` with this error: *no such method*"
    assert table["columns"]["transformers_rounds"]["title"].startswith("Rounds, transformers 5.")
    # Rows of drafters that are not measured again stay, with their texts.
    engines.write_table(file, [{"drafter": "eagle", "here_rounds": 3}], {"vllm": "9"}, [])
    again = json.loads(file.read_text())
    assert again["rows"] == [{"drafter": "eagle", "here_rounds": 3}, row]
    assert again["caveats"] == table["caveats"]
    engines.write_table(file, [{"drafter": "dflash", "here_rounds": 4}], {}, [])
    assert json.loads(file.read_text())["caveats"] == table["caveats"][:-1]
