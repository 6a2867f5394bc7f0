"""Questions and answers in columns of their own, and csv files, become the chats that they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import DatasetError, OptionInvalid, StoreMismatch
from moa_data.moa.targets.chat import Chat, RejectReason, UnreadableRow, parse_chat
from moa_data.pipeline.chats.columns import Columns
from moa_data.pipeline.chats.dataset import ChatSource
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan
from moa_data.tests.kit.chats import chat, random_chats, rejected, write_jsonl

ALPACA = {"instruction": "Add.", "input": "1, 2", "output": "3", "text": "### the same in one text"}


def parsed(columns: str, row: Any) -> Chat:
    found = parse_chat(Columns.parse(columns.split(",")).apply(row))
    assert isinstance(found, Chat), found
    return found


def roles_and_texts(found: Chat) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in found.messages]


def turns(*texts: str) -> list[tuple[str, str]]:
    return [(("user", "assistant")[index % 2], text) for index, text in enumerate(texts)]


TRL = {"prompt": chat("a")["messages"], "completion": [{"role": "assistant", "content": "b"}]}
TWICE = {"q1": "1", "a1": "2", "q2": "3", "a2": "4"}


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        ("alpaca", ALPACA, turns("Add.\n\n1, 2", "3")),
        ("alpaca", ALPACA | {"input": ""}, turns("Add.", "3")),
        ("alpaca", ALPACA | {"input": None, "system": "Be brief."}, [("system", "Be brief."), *turns("Add.", "3")]),
        ("prompt-completion", {"prompt": "a", "completion": " b"}, turns("a", " b")),
        ("prompt-completion", TRL, turns("a", "b")),
        ("human=q, gpt=a, system=s", {"q": "1", "a": "2", "s": "3"}, [("system", "3"), *turns("1", "2")]),
        ("user=q1,assistant=a1,user=q2,assistant=a2", TWICE, turns("1", "2", "3", "4")),
        ("messages=dialog", {"dialog": chat("a", "b")["messages"], "messages": 3}, turns("a", "b")),
    ],
)
def test_columns_make_chats(columns: str, row: Any, expected: list[tuple[str, str]]) -> None:
    assert roles_and_texts(parsed(columns, row)) == expected


def test_tools_may_have_a_column_of_another_name() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert parsed("messages=m,tools=t", {"m": chat("a", "b")["messages"], "t": json.dumps(tools)}).tools == tools


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"instruction": "Add.", "output": "3"}, RejectReason.NO_COLUMN, "input; columns: instruction, output"),
        (ALPACA | {"output": ""}, RejectReason.EMPTY_CONTENT, "message 1 (assistant)"),
        (ALPACA | {"output": 3}, RejectReason.EMPTY_CONTENT, "message 1 (assistant)"),
        (ALPACA | {"input": 3}, RejectReason.EMPTY_CONTENT, "message 0 (user)"),
        (UnreadableRow("no csv"), RejectReason.MALFORMED_ROW, "no csv"),
        ([1], RejectReason.MALFORMED_ROW, "got list"),
    ],
)
def test_rows_without_these_columns_are_rejected(row: Any, reason: RejectReason, detail: str) -> None:
    found = Columns.parse(["alpaca"]).apply(row)
    rejected(found if not isinstance(found, (dict, list, UnreadableRow)) else parse_chat(found), reason, detail)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("alpca", "columns has 'alpca', expected ROLE=COLUMN .* or one of alpaca, prompt-completion"),
        ("owner=a", "columns has 'owner=a'"),
        ("user=a", "expected either messages=COLUMN, or columns for both user and assistant"),
        ("user=a,assistant=", "columns has 'assistant='"),
        ("messages=a,user=b,assistant=c", "expected either messages=COLUMN"),
        ("messages=a+b", "messages can only be one column"),
        ("system=a", "expected either messages=COLUMN"),
    ],
)
def test_columns_that_make_no_chat_are_refused(columns: str, message: str) -> None:
    with pytest.raises(OptionInvalid, match=message):
        Columns.parse(columns.split(","))


def write(path: Path, text: str) -> str:
    path.write_bytes(text.encode(errors="surrogateescape"))
    return str(path)


def test_a_csv_file_is_read(tmp_path: Path) -> None:
    text = '\ufeffprompt,completion\r\n"a, ""b""\nc",d\r\n\r\n\u2028,e\r\none\r\n"x"y,z\r\nlast,\udcff\r\n'
    rows = [row for _, row in ChatSource(write(tmp_path / "c.csv", text), None).rows()]
    assert rows[0] == {"prompt": 'a, "b"\nc', "completion": "d"}
    assert rows[1] == {"prompt": "\u2028", "completion": "e"}
    assert rows[2] == UnreadableRow("1 fields for 2 columns")
    assert isinstance(rows[3], UnreadableRow)
    rejected(parse_chat(Columns.parse(["prompt-completion"]).apply(rows[3])), RejectReason.MALFORMED_ROW, "no csv")
    assert rows[4] == {"prompt": "last", "completion": "\udcff"}  # refused as no Unicode
    assert len(rows) == 5
    tabs = write(tmp_path / "c.tsv", "prompt\tcompletion\na, b\tc\n")
    assert [row for _, row in ChatSource(tabs, None).rows()] == [{"prompt": "a, b", "completion": "c"}]
    for text in ("a,a\n1,2\n", '"a"b,c\n'):
        with pytest.raises(DatasetError, match="does not begin with a line of column names"):
            list(ChatSource(write(tmp_path / "bad.csv", text), None).rows())
    assert not list(ChatSource(write(tmp_path / "empty.csv", ""), None).rows())


def test_messages_may_be_json_in_a_cell(tmp_path: Path) -> None:
    cell = json.dumps(chat("a", "b")["messages"]).replace('"', '""')
    (row,) = (row for _, row in ChatSource(write(tmp_path / "c.csv", f'messages\n"{cell}"\n'), None).rows())
    found = parse_chat(row)
    assert isinstance(found, Chat)
    assert roles_and_texts(found) == [("user", "a"), ("assistant", "b")]


def test_a_table_beside_chats_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "statistics.csv", "a,b\n1,2\n")
    assert [file.name for file in ChatSource(str(tmp_path), None).files] == ["statistics.csv"]
    write_jsonl(tmp_path / "chats.jsonl", random_chats(1))
    assert [file.name for file in ChatSource(str(tmp_path), None).files] == ["chats.jsonl"]


def test_the_store_records_the_columns(config: ExtractConfig, chats_file: Path, tmp_path: Path) -> None:
    rows = [{"q": f"question {n}", "a": f"answer {n}"} for n in range(6)]
    write_jsonl(chats_file, rows)
    with pytest.raises(DatasetError, match=r"--columns user=question,assistant=answer, or alpaca or prompt-completion"):
        build_plan(config)
    config = config.replaced(columns="user=q,assistant=a")
    extract(config)
    assert build_plan(config).manifest.extraction["columns"] == {"0.user": "q", "1.assistant": "a"}
    same = write_jsonl(tmp_path / "same.jsonl", [chat(row["q"], row["a"]) for row in rows])
    plain = build_plan(config.replaced(columns=(), dataset=str(same)))
    assert plain.table["sequence_id"].to_pylist() == build_plan(config).table["sequence_id"].to_pylist()
    with pytest.raises(StoreMismatch, match=r"columns"):
        extract(config.replaced(columns="user=a,assistant=q"))
