"""Prompts end before the last assistant message; a row that is not a prompt is an error."""

from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import DatasetError
from moa_data.evaluation.prompts import CHATS, SPEC_BENCH, PromptFile, load_prompts
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.errors import raises_naming

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def load(folder: Path, rows: list[Any], n_prompts: int | None = None) -> PromptFile:
    return load_prompts(write_jsonl(folder / "p.jsonl", rows), n_prompts)


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        (chat("q1", "a1", "q2", "a2"), ["q1", "a1", "q2"]),
        (chat("q1"), ["q1"]),
        (chat("q1", "a1", "q2"), ["q1", "a1", "q2"]),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            ["hi"],
        ),
        (chat("one\u2028two\u0085three", "a"), ["one\u2028two\u0085three"]),
        (chat("q", "a", tools=TOOLS, system="Be brief."), ["Be brief.", "q"]),
    ],
)
def test_a_chat_is_cut_before_its_last_answer(
    tmp_path: Path, row: dict[str, Any], texts: list[str]
) -> None:
    loaded = load(tmp_path, [row | {"prompt_id": "x", "category": "math"}])
    (prompt,) = loaded.prompts
    assert (loaded.kind, prompt.prompt_id, prompt.category) == (CHATS, "x", "math")
    assert [message["content"] for message in prompt.turns[0]] == texts
    assert prompt.tools == (tuple(TOOLS) if "tools" in row else None)


def test_spec_bench_turns_and_balanced_choice(questions_file: Path) -> None:
    loaded = load_prompts(questions_file, n_prompts=4)
    assert (loaded.kind, loaded.n_in_file) == (SPEC_BENCH, 6)
    assert [prompt.category for prompt in loaded.prompts] == ["math", "writing", "qa", "math"]
    for n_prompts in (None, 6):
        prompts = load_prompts(questions_file, n_prompts).prompts
        assert [len(prompt.turns) for prompt in prompts] == [1, 2, 1, 2, 1, 2]


def test_every_prompt_has_an_id_of_its_own(tmp_path: Path) -> None:
    def ids(rows: list[Any], n_prompts: int | None = None) -> list[str]:
        return [prompt.prompt_id for prompt in load(tmp_path, rows, n_prompts).prompts]

    chats = [
        chat("q", "a", **given)
        for given in ({"prompt_id": None, "id": "x"}, {"id": None}, {"prompt_id": 0}, {})
    ]
    assert ids(chats) == ["x", "2", "0", "4"]
    questions = [{"question_id": given, "turns": ["q"]} for given in (None, 7, None)]
    assert ids(questions) == ["1", "7", "3"]
    repeated = [chat("q", "a", id=given) for given in ("a", "a", "a#2", "a", "3", None, "a#2", "b")]
    assert ids(repeated) == ["a", "a#3", "a#2", "a#4", "3", "6", "a#2#2", "b"]
    assert ids(repeated, 4) == ids(repeated)[:4]


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        ([], ()),
        (["{broken"], ("row 1",)),
        ([chat("q", "a"), '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"], ("row 2",)),
        (['{"messages": ' + "9" * 5000 + "}"], ("row 1",)),
        ([chat("q", "a", tools="prose")], ("row 1",)),
        ([chat("q", "a"), "[1]"], ("row 2",)),
        ([{"text": "q"}], ("row 1",)),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], ("row 1",)),
        ([{"messages": [{"role": "wizard", "content": "a"}]}], ("row 1",)),
        *(([{"turns": given}], ("row 1",)) for given in ([""], "q")),
        ([chat("q", "a"), {"turns": ["q"]}], ("row 2",)),
    ],
)
def test_a_row_that_is_no_prompt_is_named(
    tmp_path: Path, rows: list[Any], facts: tuple[str, ...]
) -> None:
    with raises_naming(DatasetError, tmp_path / "p.jsonl", *facts):
        load(tmp_path, rows)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("none.jsonl", "b.jsonl", ""):
        with raises_naming(DatasetError, tmp_path / name):
            load_prompts(tmp_path / name)
