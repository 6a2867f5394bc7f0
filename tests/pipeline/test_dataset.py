"""Files, splits and columns of a dataset become the chats that they are, in order; splits are never mixed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moa_data.errors import DatasetError, OptionInvalid, StoreMismatch
from moa_data.moa.targets.chat import Chat, RejectReason, UnreadableRow, parse_chat
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.dataset import ChatSource, Columns
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan
from moa_data.tests.kit.chats import chat, rejected, write_jsonl

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]


@pytest.mark.parametrize(
    "row",
    [{"messages": CHAT, "prompt_id": "x"}, SHAREGPT, {"messages": [CHAT[0], {"role": "assistant", "content": PARTS}]}],
)
def test_chats_of_every_form_are_read(row: Any) -> None:
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
        (UnreadableRow("no JSON"), RejectReason.MALFORMED_ROW, "no JSON"),
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
        ("user=a", "expected either messages=COLUMN, or columns for both user and assistant"),
        ("messages=a,user=b,assistant=c", "expected either messages=COLUMN"),
        ("messages=a+b", "messages can only be one column"),
    ],
)
def test_columns_that_make_no_chat_are_refused(columns: str, message: str) -> None:
    with pytest.raises(OptionInvalid, match=message):
        Columns.parse(columns.split(","))


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


datasets = pytest.importorskip("datasets")


def folder(path: Path, names: Sequence[str]) -> str:
    """Files with one row each, which says where it stands."""
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps({"at": name}) + "\n")
    return str(path)


def read(dataset: str, split: str | None) -> list[str]:
    return [row["at"] for _, row in ChatSource(dataset, split).rows()]


HUB = ["data/train_sft-00000-of-00002-a3e.jsonl", "data/train_sft-00001-of-00002-b4f.jsonl",
       "data/test_sft-00000-of-00001-c5a.jsonl"]  # fmt: skip
LAYOUTS = [
    (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"], "train", "test"),
    (HUB, "train_sft", "test_sft"),
    (["default/train/0000.jsonl", "default/train/0001.jsonl", "default/test/0000.jsonl"], "train", "test"),
    (["chats_train.jsonl", "chats_eval.jsonl"], "train", "eval"),
    (["data/cooking-00000-of-00001.jsonl", "data/travel-00000-of-00001.jsonl"], "cooking", "travel"),
    (["trainset.jsonl", "testset.jsonl"], "trainset", "testset"),
    (["trainSet.jsonl", "testSet.jsonl"], "trainSet", "testSet"),
    (["chats_heldout.jsonl", "chats_train.jsonl"], "train", "heldout"),
    (["x-train_sft-00000-of-00002.jsonl", "x-train_gen-00000-of-00001.jsonl"], "train_sft", "train_gen"),
]


@pytest.mark.parametrize(("names", "one", "other"), LAYOUTS)
def test_a_folder_of_splits_gives_one_of_them_or_names_them(
    tmp_path: Path, names: list[str], one: str, other: str
) -> None:
    dataset = folder(tmp_path, names)
    wanted = sorted(name for name in names if one in name)
    assert read(dataset, one) == wanted
    assert read(dataset, other) == sorted(name for name in names if other in name)
    with pytest.raises(DatasetError, match=rf"splits .*{other}.* called 'nope'\. Choose one with --split"):
        ChatSource(dataset, "nope")
    if one == "train_sft":
        assert read(dataset, None) == wanted
    else:
        with pytest.raises(DatasetError, match=r"none that is called 'train_sft' \(the default\)"):
            ChatSource(dataset, None)


def test_files_that_look_like_no_split_are_one_dataset(tmp_path: Path) -> None:
    names = ["a.jsonl", "chats-1.jsonl", "chats-2.jsonl", "contest.jsonl", "more/latest-00000-of-00002.jsonl"]
    dataset = folder(tmp_path, names)
    assert read(dataset, None) == names
    assert ChatSource(dataset, None).describe() == dataset
    assert read(dataset, "more") == names[-1:]  # a folder of that very name


def test_the_only_split_is_the_default_and_is_named(tmp_path: Path) -> None:
    names = ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    dataset = folder(tmp_path, names)
    assert read(dataset, None) == names
    assert ChatSource(dataset, None).describe() == f"{dataset}, split train"
    with pytest.raises(DatasetError, match=r"holds the split train \(2 files\), and none that is called 'train_sft'"):
        ChatSource(dataset, "train_sft")


def test_files_of_no_split_beside_a_split_are_neither_mixed_in_nor_picked(tmp_path: Path) -> None:
    dataset = folder(tmp_path, ["train.jsonl", "statistics.jsonl"])
    assert read(dataset, "train") == ["train.jsonl"]
    assert ChatSource(dataset, "train").describe() == f"{dataset}, split train (1 of 2 files)"
    with pytest.raises(DatasetError, match=r"split train \(1 file\), beside 1 file of no split, and none"):
        ChatSource(dataset, None)


def test_a_name_that_covers_two_splits_is_refused(tmp_path: Path) -> None:
    dataset = folder(tmp_path, ["cooking/train.jsonl", "cooking/test.jsonl"])
    with pytest.raises(DatasetError, match=r"splits test .*, train .*, and none that is called 'cooking'"):
        ChatSource(dataset, "cooking")


def saved(path: Path, *names: str) -> Any:
    dataset = datasets.Dataset.from_list([{"at": name} for name in names])
    dataset.save_to_disk(path)
    return datasets.load_from_disk(path)


def test_a_cache_of_map_in_a_saved_dataset_is_not_read(tmp_path: Path) -> None:
    loaded = saved(tmp_path / "saved", "a", "b")
    loaded.map(lambda row: {"at": row["at"].upper()})
    assert list((tmp_path / "saved").glob("cache-*.arrow"))
    assert read(str(tmp_path / "saved"), None) == ["a", "b"]


def test_a_saved_dictionary_of_splits_is_read_by_split(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    parts = {name: datasets.Dataset.from_list([{"at": name}]) for name in ("cooking", "travel")}
    datasets.DatasetDict(parts).save_to_disk(path)
    datasets.load_from_disk(path)["cooking"].map(lambda row: {"at": "mapped"})
    assert read(str(path), "cooking") == ["cooking"]
    assert ChatSource(str(path), "travel").describe() == f"{path}, split travel (1 of 2 files)"
    for split in (None, "nope"):
        with pytest.raises(DatasetError, match=r"splits cooking \(1 file\), travel \(1 file\)"):
            ChatSource(str(path), split)
