"""Files, splits and columns of a dataset are read as chats. A bad row is counted as one row."""

import errno
import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moa_data.errors import DatasetError, OptionInvalid, StoreMismatch
from moa_data.moa.targets.chat import (
    Chat,
    Rejection,
    RejectReason,
    parse_chat,
    parse_prompt,
)
from moa_data.pipeline import dataset as dataset_module
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.dataset import ChatSource, Columns, read_jsonl, writer_of_answers
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import ExtractPlan, build_plan
from moa_data.storage.plan import plan_bytes
from moa_data.tests.kit.chats import chat, random_chats, rejected, write_jsonl
from moa_data.tests.kit.errors import raises_naming

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def asks(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]


def test_a_key_that_comes_twice_makes_a_row_unreadable(tmp_path: Path) -> None:
    """Otherwise one of the two values would be lost."""
    good = json.dumps({"messages": CHAT})
    lines = [good, good[:-1] + ', "messages": []}', '{"messages": [{"role": "user", "role": "x"}]}']
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert [isinstance(row, Rejection) for row in read_jsonl(path)] == [False, True, True]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": CHAT, "prompt_id": "x"}, None),
        (SHAREGPT, None),
        ("no JSON: bad", RejectReason.MALFORMED_ROW),
        (None, RejectReason.MALFORMED_ROW),
        ({"text": "hi"}, RejectReason.NO_MESSAGES),
        ({"messages": "hi"}, RejectReason.MALFORMED_MESSAGES),
        ({"messages": []}, RejectReason.MALFORMED_MESSAGES),
        ({"messages": ["hi"]}, RejectReason.MALFORMED_MESSAGES),
        ({"messages": [{"content": "hi"}]}, RejectReason.MALFORMED_MESSAGES),
        ({"messages": [{"role": "robot", "content": "hi"}]}, RejectReason.UNKNOWN_ROLE),
        (asks(" "), RejectReason.EMPTY_CONTENT),
        (asks(None), RejectReason.EMPTY_CONTENT),
        (asks([]), RejectReason.EMPTY_CONTENT),
        (asks([{"type": "image"}]), RejectReason.NON_TEXT_PART),
        (asks([{"type": "reasoning", "text": "hm"}, *PARTS]), RejectReason.NON_TEXT_PART),
        (asks("hi"), RejectReason.NO_RESPONSE),
    ],
)
def test_rows_are_chats_or_rejected_with_their_reason(
    row: Any, expected: RejectReason | None
) -> None:
    found = parse_chat(row)
    if expected is None:
        assert found == Chat(CHAT)
    else:
        rejected(found, expected)


def test_parts_of_a_content_stay_in_training_data_and_become_one_text_in_prompts() -> None:
    row = {"messages": [CHAT[0], {"role": "assistant", "content": PARTS}]}
    assert parse_chat(row) == Chat([CHAT[0], {"role": "assistant", "content": PARTS}])
    assert parse_prompt(row) == Chat([CHAT[0], {"role": "assistant", "content": "hel\nlo"}])


def test_questions_of_spec_bench_are_prompts_and_other_columns_named_turns_are_not_read() -> None:
    asked = [{"role": "user", "content": text} for text in ("one?", "two?")]
    assert parse_prompt({"question_id": 81, "turns": ["one?", "two?"]}) == Chat(
        asked, asks_each=True
    )
    assert parse_prompt({"messages": CHAT, "turns": 1}) == Chat(CHAT)
    for turns in ([], "one?", ["one?", " "], [3], None):
        rejected(parse_prompt({"turns": turns}), RejectReason.MALFORMED_TURNS)


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [chat("Hi")])
    (tmp_path / "README.md").write_text("notes")
    assert len(list(ChatSource(str(tmp_path), None).rows())) == 1
    packed = gzip.compress((tmp_path / "a.jsonl").read_bytes())
    for name in ("b.jsonl.gz", "b.jsonlines", "b.csv", "b.jsonl.lz4"):
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(DatasetError) as caught:
            ChatSource(str(tmp_path), None)
        assert f"holds {name}, " in str(caught.value)
        (tmp_path / name).unlink()


def test_what_an_object_says_of_all_rows_is_not_dropped(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    content: dict[str, Any] = {"version": "1", "data": [chat("Hi")]}
    file.write_text(json.dumps(content))
    assert len(list(ChatSource(str(file), None).rows())) == 1
    for key in ("system", "systemPrompt", "history"):
        file.write_text(json.dumps(content | {key: "You are a pirate."}))
        with pytest.raises(DatasetError) as caught:
            list(ChatSource(str(file), None).rows())
        assert f"only the rows in 'data' are read. Put {key!r} into" in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_encodings_of_other_programs_give_the_same_rows(
    tmp_path: Path, encoding: str, suffix: str
) -> None:
    rows = [{"messages": chat(f"Ω ਊ {number}", "十 ਁਂ")["messages"]} for number in range(5)]
    text = json.dumps(rows, ensure_ascii=False)
    if suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    path = tmp_path / f"chats{suffix}"
    path.write_bytes(text.encode(encoding))
    assert [row for _, row in ChatSource(str(path), None).rows()] == rows
    path.write_bytes(text.encode(encoding)[:-3])  # The end of a download is missing.
    with (
        pytest.raises(DatasetError) if encoding.startswith(("utf-16", "utf-32")) else nullcontext()
    ):
        assert [row for _, row in ChatSource(str(path), None).rows()] != rows


def test_utf_16_in_the_midst_of_utf_8_is_a_bad_row(tmp_path: Path) -> None:
    """PowerShell's >> appends such text to a file."""
    line = json.dumps({"messages": CHAT}) + "\n"
    path = tmp_path / "chats.jsonl"
    path.write_bytes(line.encode() + line.encode("utf-16-le") + b"\n" + line.encode())
    kinds = [type(row) for _, row in ChatSource(str(path), None).rows()]
    assert kinds[0] is dict
    assert kinds[-1] is dict
    assert set(kinds[1:-1]) == {Rejection}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_keys_that_arrow_adds_are_dropped_in_every_column(tmp_path: Path, suffix: str) -> None:
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": [{"z": 2}]}}]
    rows: list[Any] = []
    for call in calls:
        answer = {
            "role": "assistant",
            "content": "a",
            "tool_calls": [{"type": "function", "function": call}],
        }
        rows.append(
            {
                "dialog": [CHAT[0], answer],
                "functions_of_it": [{"name": call["name"], "parameters": call}],
            }
        )
    path = tmp_path / f"chats{suffix}"
    write_rows(path, rows)
    assert [row for _, row in ChatSource(str(path), None).rows()] == rows


def test_maps_of_arrow_become_objects(tmp_path: Path) -> None:
    maps = pa.array(
        [[("train", False)], [("a", True), ("a", False)], None], pa.map_(pa.string(), pa.bool_())
    )
    table = pa.table({"messages": [CHAT] * 3, "metadata": maps})
    pq.write_table(table, tmp_path / "chats.parquet")
    rows = [row for _, row in ChatSource(str(tmp_path / "chats.parquet"), None).rows()]
    assert rows[0]["metadata"] == {"train": False}
    rejected(parse_chat(rows[0]), RejectReason.MARKED_UNTRAINED, "train False")
    rejected(parse_chat(rows[1]), RejectReason.MALFORMED_ROW, "duplicate key was 'a'")
    assert isinstance(parse_chat(rows[2]), Chat)


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
    rows: list[Any] = [{"messages": CHAT}, {"messages": [*CHAT, *CHAT]}]
    path = tmp_path / f"chats{suffix}"
    write_rows(path, rows)
    assert list(ChatSource(str(path), "train").rows()) == list(enumerate(rows))


def test_identity_changes_with_one_byte_but_not_with_the_path(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / f"{folder}.jsonl", [{"messages": CHAT}])
    first, second = (
        ChatSource(str(tmp_path / name / f"{name}.jsonl"), "train").identity(1) for name in "ab"
    )
    assert first == second
    (tmp_path / "b" / "b.jsonl").write_text(
        (tmp_path / "b" / "b.jsonl").read_text().replace("hello", "hallo")
    )
    assert ChatSource(str(tmp_path / "b" / "b.jsonl"), "train").identity(1) != first


def test_missing_and_foreign_paths_are_refused(tmp_path: Path) -> None:
    with raises_naming(DatasetError, tmp_path / "nothing.jsonl"):
        ChatSource(str(tmp_path / "nothing.jsonl"), "train")
    with raises_naming(DatasetError, tmp_path, ".jsonl", ".arrow"):
        ChatSource(str(tmp_path), "train")
    (tmp_path / "chats.txt").write_text("hi")
    with raises_naming(DatasetError, tmp_path / "chats.txt", "'.txt'", ".jsonl"):
        ChatSource(str(tmp_path / "chats.txt"), "train")
    (tmp_path / "chats.parquet").write_text("hi")
    with raises_naming(DatasetError, tmp_path / "chats.parquet"):
        list(ChatSource(str(tmp_path / "chats.parquet"), "train").rows())


ALPACA = {"instruction": "Add.", "input": "1, 2", "output": "3", "text": "### the same in one text"}


def turns(*texts: str) -> list[tuple[str, str]]:
    return [(("user", "assistant")[index % 2], text) for index, text in enumerate(texts)]


TOOLS = [{"type": "function", "function": {"name": "add"}}]
TRL = {"prompt": chat("a")["messages"], "completion": [{"role": "assistant", "content": "b"}]}
TWICE = {"q1": "1", "a1": "2", "q2": "3", "a2": "4"}


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        ("alpaca", ALPACA, turns("Add.\n\n1, 2", "3")),
        ("alpaca", ALPACA | {"input": ""}, turns("Add.", "3")),
        (
            "alpaca",
            ALPACA | {"input": None, "system": "Be brief."},
            [("system", "Be brief."), *turns("Add.", "3")],
        ),
        ("prompt-completion", {"prompt": "a", "completion": " b"}, turns("a", " b")),
        ("prompt-completion", TRL, turns("a", "b")),
        (
            "human=q, gpt=a, system=s",
            {"q": "1", "a": "2", "s": "3"},
            [("system", "3"), *turns("1", "2")],
        ),
        ("user=q1,assistant=a1,user=q2,assistant=a2", TWICE, turns("1", "2", "3", "4")),
        ("messages=dialog", {"dialog": chat("a", "b")["messages"], "messages": 3}, turns("a", "b")),
        (
            "messages=m,tools=t",
            {"m": chat("a", "b")["messages"], "t": json.dumps(TOOLS)},
            turns("a", "b"),
        ),
    ],
)
def test_columns_make_chats(columns: str, row: Any, expected: list[tuple[str, str]]) -> None:
    found = parse_chat(Columns.parse(columns.split(",")).apply(row))
    assert isinstance(found, Chat), found
    assert [(message["role"], message["content"]) for message in found.messages] == expected
    assert found.tools == (TOOLS if "tools=" in columns else None)


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        (
            {"instruction": "Add.", "output": "3"},
            RejectReason.NO_COLUMN,
            "input is missing, its columns are instruction, output",
        ),
        (ALPACA | {"output": ""}, RejectReason.EMPTY_CONTENT, "message 1 (assistant)"),
        (ALPACA | {"output": 3}, RejectReason.EMPTY_CONTENT, "message 1 (assistant)"),
        (ALPACA | {"input": 3}, RejectReason.EMPTY_CONTENT, "message 0 (user)"),
        (Rejection(RejectReason.MALFORMED_ROW, "no JSON"), RejectReason.MALFORMED_ROW, "no JSON"),
        ([1], RejectReason.MALFORMED_ROW, "it has the type list"),
    ],
)
def test_rows_without_these_columns_are_rejected(
    row: Any, reason: RejectReason, detail: str
) -> None:
    found = Columns.parse(["alpaca"]).apply(row)
    rejected(parse_chat(found), reason, detail)


@pytest.mark.parametrize(
    ("columns", "facts"),
    [
        ("alpca", ("ROLE=COLUMN", "alpaca", "prompt-completion")),
        ("user=a", ("messages=COLUMN", "assistant")),
        ("messages=a,user=b,assistant=c", ("messages=COLUMN",)),
        ("messages=a+b", ()),
        ("developer=a", ("ROLE=COLUMN",)),
    ],
)
def test_columns_that_make_no_chat_are_refused(columns: str, facts: tuple[str, ...]) -> None:
    with raises_naming(OptionInvalid, "columns", columns, *facts):
        Columns.parse(columns.split(","))


def test_messages_that_are_given_twice_are_refused() -> None:
    with raises_naming(OptionInvalid, "'messages=b'", "given once"):
        Columns.parse(("messages=a", "messages=b"))


def test_the_store_records_the_columns(
    config: ExtractConfig, chats_file: Path, tmp_path: Path
) -> None:
    rows = [{"q": f"question {n}", "a": f"answer {n}"} for n in range(6)]
    write_jsonl(chats_file, rows)
    with raises_naming(
        DatasetError, "columns", "user=question,assistant=answer", "alpaca", "prompt-completion"
    ):
        build_plan(config)
    config = config.replaced(columns="user=q,assistant=a")
    extract(config)
    assert build_plan(config).manifest.extraction["columns"] == {"0.user": "q", "1.assistant": "a"}
    same = write_jsonl(tmp_path / "same.jsonl", [chat(row["q"], row["a"]) for row in rows])
    plain = build_plan(config.replaced(columns=(), dataset=str(same)))
    assert (
        plain.table["sequence_id"].to_pylist()
        == build_plan(config).table["sequence_id"].to_pylist()
    )
    with raises_naming(StoreMismatch, "extraction.columns.0.user", "'q'", "'a'"):
        extract(config.replaced(columns="user=a,assistant=q"))


datasets = pytest.importorskip("datasets")


def folder(path: Path, names: Sequence[str]) -> str:
    """Write files of one row each; the row holds the name of its file."""
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps({"at": name}) + "\n")
    return str(path)


def read(dataset: str, split: str | None) -> list[str]:
    return [row["at"] for _, row in ChatSource(dataset, split).rows()]


SFT = ["data/train_sft-00000-of-00002-a3e.jsonl", "data/train_sft-00001-of-00002-b4f.jsonl"]
TRAIN = ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
MIXED = [
    "a.jsonl",
    "chats-1.jsonl",
    "chats-2.jsonl",
    "contest.jsonl",
    "more/latest-00000-of-00001.jsonl",
]


@pytest.mark.parametrize(
    ("names", "one", "other"),
    [
        ([*TRAIN, "test-00000-of-00001.jsonl"], "train", "test"),
        ([*SFT, "data/test_sft-00000-of-00001-c5a.jsonl"], "train_sft", "test_sft"),
        (
            ["default/train/0000.jsonl", "default/train/0001.jsonl", "default/test/0000.jsonl"],
            "train",
            "test",
        ),
        (["chats_train.jsonl", "chats_eval.jsonl"], "train", "eval"),
        (
            ["data/cooking-00000-of-00001.jsonl", "data/travel-00000-of-00001.jsonl"],
            "cooking",
            "travel",
        ),
        (["trainset.jsonl", "testset.jsonl"], "trainset", "testset"),
        (["trainSet.jsonl", "testSet.jsonl"], "trainSet", "testSet"),
        (["chats_heldout.jsonl", "chats_train.jsonl"], "train", "heldout"),
        (
            ["x-train_sft-00000-of-00002.jsonl", "x-train_gen-00000-of-00001.jsonl"],
            "train_sft",
            "train_gen",
        ),
    ],
)
def test_a_folder_of_splits_gives_one_of_them_or_names_them(
    tmp_path: Path, names: list[str], one: str, other: str
) -> None:
    dataset = folder(tmp_path, names)
    for split in (one, other):
        assert read(dataset, split) == sorted(name for name in names if split in name)
    with raises_naming(DatasetError, dataset, one, other, "'nope'", "`split`"):
        ChatSource(dataset, "nope")
    if one == "train_sft":
        assert read(dataset, None) == read(dataset, one)
    else:
        with raises_naming(DatasetError, dataset, one, other, "'train_sft'", "`split`"):
            ChatSource(dataset, None)


@pytest.mark.parametrize(
    ("names", "split", "found", "said"),
    [
        (MIXED, None, MIXED, ""),
        # a folder with the name of the split
        (MIXED, "more", MIXED[-1:], ", split more (1 of 5 files)"),
        (TRAIN, None, TRAIN, ", split train"),  # the only split
        (
            TRAIN,
            "train_sft",
            None,
            ("train", 2, "'train_sft'", "`split`"),
        ),
        (["train.jsonl", "stats.jsonl"], "train", ["train.jsonl"], ", split train (1 of 2 files)"),
        (
            ["train.jsonl", "stats.jsonl"],
            None,
            None,
            ("train", 1, "'train_sft'", "`split`"),
        ),
        (
            ["cooking/train.jsonl", "cooking/test.jsonl"],
            "cooking",
            None,
            ("test", "train", "'cooking'", "`split`"),
        ),
    ],
)
def test_files_that_are_read_of_a_folder(
    tmp_path: Path, names: list[str], split: str | None, found: list[str] | None, said: Any
) -> None:
    """The description of the dataset ends with ``said``.

    If ``found`` is None, ``said`` is instead the facts that the error must name.
    """
    dataset = folder(tmp_path, names)
    if found is None:
        with raises_naming(DatasetError, dataset, *said):
            ChatSource(dataset, split)
        return
    assert read(dataset, split) == found
    assert ChatSource(dataset, split).describe() == dataset + said


def test_linked_folders_of_a_folder_are_read_once(tmp_path: Path) -> None:
    elsewhere = Path(folder(tmp_path / "elsewhere", ["b.jsonl"]))
    dataset = Path(folder(tmp_path / "here", ["a.jsonl"]))
    (dataset / "linked").symlink_to(elsewhere)
    (dataset / "linked_again").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(dataset)
    assert read(str(dataset), None) == ["a.jsonl", "b.jsonl"]


def test_what_cannot_be_read_of_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Path(folder(tmp_path, ["a.jsonl", "closed/b.jsonl"]))
    link = dataset / "train-00001-of-00002.jsonl"
    link.symlink_to(tmp_path / "nowhere")
    with raises_naming(DatasetError, dataset, link.name, tmp_path / "nowhere"):
        ChatSource(str(dataset), None)
    link.unlink()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if os.path.basename(path) == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with raises_naming(PermissionError, dataset / "closed"):
        ChatSource(str(dataset), None)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    dataset = folder(tmp_path, ["train-00000-of-00003.jsonl"])
    assert ChatSource(dataset, None).describe() == (
        f"{dataset}, split train (without train-00001-of-00003.jsonl and 1 other file, missing in "
        "the folder)"
    )


def test_saved_datasets_are_read_without_their_caches(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    parts = {name: datasets.Dataset.from_list([{"at": name}]) for name in ("cooking", "travel")}
    parts["cooking"].save_to_disk(one)
    datasets.DatasetDict(parts).save_to_disk(other)
    for saved in (datasets.load_from_disk(one), datasets.load_from_disk(other)["cooking"]):
        saved.map(lambda row: {"at": "mapped"})
    assert list(one.glob("cache-*.arrow"))
    assert read(str(one), None) == ["cooking"]
    assert read(str(other), "cooking") == ["cooking"]
    assert ChatSource(str(other), "travel").describe() == f"{other}, split travel (1 of 2 files)"
    for split in (None, "nope"):
        with raises_naming(DatasetError, other, "cooking", "travel"):
            ChatSource(str(other), split)


GOOD = [json.dumps(row) for row in random_chats(60)]
DEEP = "[" * 100_000 + "]" * 100_000
SURROGATE = (
    '{"messages": [{"role": "user", "content": "a \\ud800"}, '
    '{"role": "assistant", "content": "b"}]}'
)
DEEP_TOOLS = SURROGATE.replace(" \\ud800", "").replace(
    '{"m', f'{{"tools": {"[" * 900 + "]" * 900}, "m', 1
)
BAD_ROWS = [
    (SURROGATE, RejectReason.NO_UNICODE, "message 0 has '\\ud800' as character 2"),
    (f'{{"messages": {DEEP}}}', RejectReason.MALFORMED_ROW, "nested too deeply"),
    (DEEP_TOOLS, RejectReason.MALFORMED_TOOLS, "tool 0 has the type list"),
    (f'{{"messages": [], "id": {"9" * 5000}}}', RejectReason.MALFORMED_ROW, "limit (4300"),
    ('{"messages": NaN}', RejectReason.MALFORMED_MESSAGES, "messages has the type float"),
    ('{"messages": "caf\udce9"}', RejectReason.MALFORMED_ROW, "can't decode byte 0xe9"),
]


def plan_of(target: Path, dataset: Path, tmp_path: Path, **options: Any) -> ExtractPlan:
    return build_plan(
        ExtractConfig.of(
            model=str(target),
            dataset=str(dataset),
            out=str(tmp_path / "out"),
            device="cpu",
            **options,
        )
    )


def write_lines(path: Path, rows: list[str]) -> Path:
    """Write lines of text. Most of them are JSON; some are meant to be broken."""
    path.write_bytes(("\n".join(rows) + "\n").encode("utf-8", "surrogateescape"))
    return path


def test_bad_rows_among_60_are_counted_and_named(target_folder: Path, tmp_path: Path) -> None:
    whole = plan_of(
        target_folder, write_lines(tmp_path / "whole.jsonl", GOOD), tmp_path, max_length=128
    )
    bad = [row for row, _, _ in BAD_ROWS]
    path = write_lines(tmp_path / "chats.jsonl", [*GOOD[:17], *bad, *GOOD[17:]])
    found = plan_of(
        target_folder, path, tmp_path, max_length=128, max_rejected_fraction=0.2
    ).sequences
    assert found.n_rows == 60 + len(bad)
    assert found.rejections == Counter(reason.value for _, reason, _ in BAD_ROWS)
    assert list(found.ids) == list(whole.sequences.ids)
    for number, (row, reason, detail) in enumerate(BAD_ROWS):
        alone = plan_of(
            target_folder, write_lines(path, [GOOD[0], row]), tmp_path, max_rejected_fraction=0.5
        )
        assert alone.sequences.examples[reason.value].startswith("row 1: "), number
        assert detail in alone.sequences.examples[reason.value]


def test_plain_chats_give_the_plan_they_always_gave(target_folder: Path, tmp_path: Path) -> None:
    chats_file = write_jsonl(tmp_path / "chats.jsonl", random_chats(24))
    plan = plan_of(target_folder, chats_file, tmp_path, max_length=48, compute_dtype="float32")
    digest = hashlib.sha256(plan_bytes(plan.table)).hexdigest()
    assert digest == "299447829c117e2a72db9b38964ff0fff63bb8517fb6942e54399228a3a42b26"
    extraction = json.dumps(dict(plan.manifest.extraction), sort_keys=True).encode()
    assert (
        hashlib.sha256(extraction).hexdigest()
        == "af7d54a5be24b34680ac1816becb22ef28e0651e4f42efa8b3d17626e866f160"
    )


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_an_arrow_row_that_is_no_text_is_one_bad_row(tmp_path: Path, suffix: str) -> None:
    contents = [b"hi", b"caf\xe9", b"ho"]
    buffers = pa.array(contents, pa.binary()).buffers()
    # The buffers are not validated; other writers produce such files.
    texts = pa.Array.from_buffers(pa.string(), 3, buffers)
    roles = pa.array(["assistant"] * 3)
    messages = pa.ListArray.from_arrays(
        [0, 1, 2, 3], pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    )
    table = pa.table({"messages": messages})
    path = tmp_path / f"chats{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    chats = [parse_chat(row) for _, row in ChatSource(str(path), None).rows()]
    assert isinstance(chats[0], Chat)
    assert isinstance(chats[2], Chat)
    rejected(chats[1], RejectReason.MALFORMED_ROW, "utf-8")


@pytest.mark.parametrize("kind", ["zstd", "none", "stream", "file"])
def test_a_file_that_is_damaged_in_its_midst_is_named(tmp_path: Path, kind: str) -> None:
    table = pa.Table.from_pylist(
        [{"messages": [{"role": "user", "content": f"{i:08d}" * 40}]} for i in range(3000)]
    )
    path = tmp_path / ("chats.parquet" if kind in ("zstd", "none") else "chats.arrow")
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression=kind, row_group_size=300, use_dictionary=False)
    else:
        make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    content = bytearray(path.read_bytes())
    if kind == "stream":
        del content[len(content) // 2 :]
    elif kind == "file":
        content[-400:-200] = bytes(200)
    else:
        offset = (
            pq.ParquetFile(path).metadata.row_group(5).column(0).file_offset or len(content) // 2
        )
        content[offset : offset + 400] = b"\x5a" * 400
    path.write_bytes(content)
    with raises_naming(DatasetError, path):
        list(ChatSource(str(path), None).rows())


def test_a_broken_json_list_counts_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text("[" + ",\n".join(GOOD))
    assert all(
        isinstance(row, Rejection) for _, row in list(ChatSource(str(path), None).rows())[:-1]
    )
    path.write_text("\n".join(GOOD) + "\n")  # the same lines under the name of a JSON list
    assert len(list(ChatSource(str(path), None).rows())) == 60
    path.write_text("[1]\n[2]\n")
    assert [row for _, row in ChatSource(str(path), None).rows()] == [[1], [2]]


def test_a_line_beyond_the_bound_is_one_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "MAX_ROW_BYTES", 2000)
    long = GOOD[1].replace('"content": "', '"content": "' + "long " * 1000, 1)
    path = write_lines(tmp_path / "chats.jsonl", [GOOD[0], long, GOOD[2], long])
    rows = [row for _, row in ChatSource(str(path), None).rows()]
    assert rows[::2] == [json.loads(GOOD[0]), json.loads(GOOD[2])]
    assert (
        rows[1::2]
        == [Rejection(RejectReason.MALFORMED_ROW, "its line has more than 2,000 bytes")] * 2
    )


def test_a_parquet_file_that_grows_to_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "MAX_ROW_BYTES", 1 << 18)
    few, many = tmp_path / "few.parquet", tmp_path / "many.parquet"
    pq.write_table(pa.table({"text": ["a" * (1 << 19)]}), few, compression="zstd")
    pq.write_table(
        pa.table({"text": ["a" * (1 << 19), *["b"] * 99]}),
        many,
        compression="zstd",
        use_dictionary=False,
    )
    for path in (few, many):
        assert path.stat().st_size < 2000
        with raises_naming(DatasetError, path):
            next(ChatSource(str(path), None).rows())


def test_the_writer_of_answers_is_read_from_the_record_beside_them(tmp_path: Path) -> None:
    def note(name: str, weights: str) -> None:
        record = {"settings": {"target": {"weights_sha256": weights}}}
        (tmp_path / f"{name}.regeneration.json").write_text(json.dumps(record))

    note("own", "ab")
    assert (
        writer_of_answers(str(tmp_path / "own.jsonl")) == writer_of_answers(str(tmp_path)) == "ab"
    )
    assert writer_of_answers(str(tmp_path / "other.jsonl")) is None
    assert writer_of_answers("organisation/dataset-of-the-hub") is None
    note("other", "cd")
    assert writer_of_answers(str(tmp_path)) is None, "two models wrote these"
    (tmp_path / "other.regeneration.json").write_text('{"settings": {}}')
    assert writer_of_answers(str(tmp_path / "other.jsonl")) is None
