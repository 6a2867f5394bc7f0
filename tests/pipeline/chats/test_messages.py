"""Every row gives a chat or a counted reason; every local format gives the same rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moa_data.errors import DatasetError
from moa_data.moa.targets.chat import Chat, Rejection, RejectReason, parse_chat
from moa_data.pipeline.chats.dataset import ChatSource
from moa_data.tests.kit.chats import rejected

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def test_messages_are_kept_as_they_are() -> None:
    messages = [{"role": "system", "content": " be kind "}, *CHAT]
    assert parse_chat({"messages": messages, "prompt_id": "x"}) == Chat(messages)


def test_sharegpt_roles_are_translated() -> None:
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    assert parse_chat(row) == Chat(CHAT)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    row = {"messages": [CHAT[0], {"role": "assistant", "content": parts}]}
    assert parse_chat(row) == Chat(CHAT)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("no JSON: bad", RejectReason.MALFORMED_ROW),
        (None, RejectReason.MALFORMED_ROW),
        ({"text": "hi"}, RejectReason.NO_MESSAGES),
        ({"messages": "hi"}, RejectReason.MALFORMED_MESSAGES),
        ({"messages": []}, RejectReason.MALFORMED_MESSAGES),
        ({"messages": ["hi"]}, RejectReason.MALFORMED_MESSAGES),
        ({"messages": [{"content": "hi"}]}, RejectReason.MALFORMED_MESSAGES),
        ({"messages": [{"role": "robot", "content": "hi"}]}, RejectReason.UNKNOWN_ROLE),
        ({"messages": [{"role": "user", "content": " "}]}, RejectReason.EMPTY_CONTENT),
        ({"messages": [{"role": "user", "content": None}]}, RejectReason.EMPTY_CONTENT),
        ({"messages": [{"role": "user", "content": []}]}, RejectReason.EMPTY_CONTENT),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, RejectReason.NON_TEXT_PART),
        ({"messages": [{"role": "user", "content": "hi"}]}, RejectReason.NO_RESPONSE),
    ],
)
def test_unusable_rows_are_rejected_with_their_reason(row: Any, reason: RejectReason) -> None:
    rejected(parse_chat(row), reason)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".feather":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".feather"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = [{"messages": CHAT}, {"messages": [*CHAT, *CHAT]}]
    path = tmp_path / f"chats{suffix}"
    write_rows(path, rows)
    assert list(ChatSource(str(path), "train").rows()) == list(enumerate(rows))


def test_a_malformed_line_is_one_malformed_row(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n{broken\n\n[1, 2]\n")
    chats = [parse_chat(row) for _, row in ChatSource(str(path), "train").rows()]
    assert chats[0] == Chat(CHAT)
    assert [chat.reason for chat in chats[1:] if isinstance(chat, Rejection)] == [RejectReason.MALFORMED_ROW] * 2


def test_identity_changes_with_one_byte_but_not_with_the_place(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / f"{folder}.jsonl", [{"messages": CHAT}])
    first, second = (ChatSource(str(tmp_path / name / f"{name}.jsonl"), "train").identity() for name in "ab")
    assert first == second
    (tmp_path / "b" / "b.jsonl").write_text((tmp_path / "b" / "b.jsonl").read_text().replace("hello", "hallo"))
    assert ChatSource(str(tmp_path / "b" / "b.jsonl"), "train").identity() != first


def test_missing_and_foreign_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"does not exist\. Give a file, a folder or a hub id"):
        ChatSource(str(tmp_path / "nothing.jsonl"), "train")
    with pytest.raises(DatasetError, match=r"holds no \.jsonl, .* file"):
        ChatSource(str(tmp_path), "train")
    (tmp_path / "chats.txt").write_text("hi")
    with pytest.raises(DatasetError, match=r"has the suffix '\.txt', expected one of"):
        ChatSource(str(tmp_path / "chats.txt"), "train")
    (tmp_path / "chats.parquet").write_text("hi")
    with pytest.raises(DatasetError, match="is no readable parquet file"):
        list(ChatSource(str(tmp_path / "chats.parquet"), "train").rows())
