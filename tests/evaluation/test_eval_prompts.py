"""Prompts end before the last assistant message; a line that is no prompt is named, not passed over."""

from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import DatasetError
from moa_data.evaluation.prompts import CHATS, SPEC_BENCH, load_prompts
from moa_data.tests.kit.chats import chat, write_jsonl


def test_a_chat_is_cut_before_its_last_answer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [chat("q1", "a1", "q2", "a2", prompt_id="x", category="math")])
    loaded = load_prompts(path)
    assert loaded.kind == CHATS
    (prompt,) = loaded.prompts
    assert (prompt.prompt_id, prompt.category) == ("x", "math")
    assert [message["content"] for message in prompt.turns[0]] == ["q1", "a1", "q2"]


def test_a_chat_may_end_with_the_question(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [chat("q1"), chat("q1", "a1", "q2")])
    first, second = load_prompts(path).prompts
    assert [message["content"] for message in first.turns[0]] == ["q1"]
    assert [message["content"] for message in second.turns[0]] == ["q1", "a1", "q2"]


def test_sharegpt_roles(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
    (prompt,) = load_prompts(write_jsonl(tmp_path / "p.jsonl", [row])).prompts
    assert prompt.turns == (({"role": "user", "content": "hi"},),)


def test_spec_bench_turns_and_balanced_choice(questions_file: Path) -> None:
    loaded = load_prompts(questions_file, n_prompts=4)
    assert loaded.kind == SPEC_BENCH
    assert loaded.n_in_file == 6
    assert [prompt.category for prompt in loaded.prompts] == ["math", "writing", "qa", "math"]
    assert [len(prompt.turns) for prompt in load_prompts(questions_file).prompts] == [1, 2, 1, 2, 1, 2]


def test_the_first_chats_are_chosen(chats_file: Path) -> None:
    assert [prompt.prompt_id for prompt in load_prompts(chats_file, n_prompts=2).prompts] == ["1", "2"]


def test_every_prompt_has_an_id_of_its_own(tmp_path: Path) -> None:
    def ids(rows: list[Any], n_prompts: int | None = None) -> list[str]:
        return [prompt.prompt_id for prompt in load_prompts(write_jsonl(tmp_path / "p.jsonl", rows), n_prompts).prompts]

    chats = [chat("q", "a", **given) for given in ({"prompt_id": None, "id": "x"}, {"id": None}, {"prompt_id": 0}, {})]
    assert ids(chats) == ["x", "2", "0", "4"]
    questions = [{"question_id": given, "turns": ["q"]} for given in (None, 7, None)]
    assert ids(questions) == ["1", "7", "3"]
    repeated = [chat("q", "a", id=given) for given in ("a", "a", "a#2", "a", "3", None, "a#2", "b")]
    assert ids(repeated) == ["a", "a#3", "a#2", "a#4", "3", "6", "a#2#2", "b"]
    assert ids(repeated, 4) == ids(repeated)[:4]


def test_line_separators_inside_text_do_not_split_a_line(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three"
    (prompt,) = load_prompts(write_jsonl(tmp_path / "p.jsonl", [chat(text, "a")])).prompts
    assert prompt.turns[0][0]["content"] == text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no prompt"),
        (["{broken"], "line 1 is no JSON"),
        (
            [chat("q", "a"), '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"],
            "line 2 is JSON .* nested too deeply",
        ),
        (['{"messages": ' + "9" * 5000 + "}"], r"line 1 is no JSON: .*limit \(4300"),
        ([chat("q", "a", tools="prose")], "line 1: tools is no list"),
        ([chat("q", "a"), "[1]"], "line 2 is a list"),
        ([{"text": "q"}], "line 1: the row has neither messages nor conversations"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], "nothing comes before"),
        ([{"messages": [{"role": "wizard", "content": "a"}]}], "unknown role"),
        ([{"turns": [""]}], "turns must be a list of texts"),
        ([{"turns": "q"}], "turns must be a list of texts"),
        ([chat("q", "a"), {"turns": ["q"]}], "put them into two files"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load_prompts(write_jsonl(tmp_path / "p.jsonl", rows))


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        load_prompts(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="UTF-8"):
        load_prompts(tmp_path / "b.jsonl")


def test_tools_and_the_system_column_are_kept(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    row = chat("q", "a", tools=tools, system="Be brief.")
    (prompt,) = load_prompts(write_jsonl(tmp_path / "p.jsonl", [row])).prompts
    assert prompt.tools == tuple(tools)
    assert [message["role"] for message in prompt.turns[0]] == ["system", "user"]
    assert prompt.system == "Be brief."
