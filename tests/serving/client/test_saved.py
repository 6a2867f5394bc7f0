"""The file of a session: what is written is read, and nothing else is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import RequestInvalid
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.serving.client.client import SavedAnswer

SAVED = SavedAnswer(
    "s", (5, 6, 7), 2, 40, SamplingConfig(0.5, 0.9), 3, "", ({"role": "user", "content": "Wie geht's? 🙂"},)
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    SAVED.save(tmp_path / "a")
    assert SavedAnswer.load(tmp_path / "a") == SAVED
    later = replace(SAVED, session="t", tokens=(5, 6, 7, 8), finish="stop")
    later.save(tmp_path / "a")
    assert SavedAnswer.load(tmp_path / "a") == later
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 2), ("tokens", []), ("tokens", [1.5, 2, 3]), ("tokens", [-1, 2]), ("n_prompt", 4), ("n_prompt", 0),
        ("max_new_tokens", 0), ("seed", "3"), ("session", None), ("sampling", {"temperature": -1}), ("sampling", 3),
        ("messages", [3]), ("messages", [{"role": 1}]), ("unknown", 1),
    ],
)  # fmt: skip
def test_other_contents_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    SAVED.save(tmp_path / "a")
    values = json.loads((tmp_path / "a").read_text())
    (tmp_path / "a").write_text(json.dumps(values | {key: value}))
    with pytest.raises(RequestInvalid):
        SavedAnswer.load(tmp_path / "a")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("text", "list", "deep", "bytes", "missing", "."):
        with pytest.raises(RequestInvalid):
            SavedAnswer.load(tmp_path / name)
    with pytest.raises(RequestInvalid):
        SAVED.save(tmp_path / "nowhere" / "a")
