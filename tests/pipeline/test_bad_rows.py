"""A row that cannot be read, encoded or rendered is one counted row; a damaged file ends the run and is named."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moa_data.errors import DatasetError
from moa_data.moa.targets.chat import Chat, RejectReason, UnreadableRow, parse_chat
from moa_data.pipeline import dataset as dataset_module
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.dataset import ChatSource
from moa_data.pipeline.plan import ExtractPlan, build_plan
from moa_data.storage.plan import plan_bytes
from moa_data.tests.kit.chats import random_chats, rejected

GOOD = [json.dumps(row) for row in random_chats(60)]
DEEP = "[" * 100_000 + "]" * 100_000
SURROGATE = '{"messages": [{"role": "user", "content": "a \\ud800"}, {"role": "assistant", "content": "b"}]}'
DEEP_TOOLS = SURROGATE.replace(" \\ud800", "").replace('{"m', f'{{"tools": {"[" * 900 + "]" * 900}, "m', 1)
BAD_ROWS = [
    (SURROGATE, RejectReason.NO_UNICODE, "message 0, character 2: '\\ud800'"),
    (f'{{"messages": {DEEP}}}', RejectReason.MALFORMED_ROW, "nested too deeply"),
    (DEEP_TOOLS, RejectReason.MALFORMED_TOOLS, "tool 0 is list"),
    (f'{{"messages": [], "id": {"9" * 5000}}}', RejectReason.MALFORMED_ROW, "limit (4300"),
    ('{"messages": NaN}', RejectReason.MALFORMED_MESSAGES, "got float"),
    ('{"messages": "caf\udce9"}', RejectReason.MALFORMED_ROW, "can't decode byte 0xe9"),
]


def plan_of(target: Path, dataset: Path, tmp_path: Path, **options: Any) -> ExtractPlan:
    return build_plan(
        ExtractConfig.of(model=str(target), dataset=str(dataset), out=str(tmp_path / "out"), device="cpu", **options)
    )


def write_rows(path: Path, rows: list[str]) -> Path:
    """Write rows that are JSON or should be."""
    path.write_bytes(("\n".join(rows) + "\n").encode("utf-8", "surrogateescape"))
    return path


def test_bad_rows_among_60_are_counted_and_named(target_folder: Path, tmp_path: Path) -> None:
    whole = plan_of(target_folder, write_rows(tmp_path / "whole.jsonl", GOOD), tmp_path, max_length=128)
    bad = [row for row, _, _ in BAD_ROWS]
    path = write_rows(tmp_path / "chats.jsonl", [*GOOD[:17], *bad, *GOOD[17:]])
    found = plan_of(target_folder, path, tmp_path, max_length=128, max_rejected_fraction=0.2).sequences
    assert found.n_rows == 60 + len(bad)
    assert found.rejections == Counter(reason.value for _, reason, _ in BAD_ROWS)
    assert list(found.ids) == list(whole.sequences.ids)
    for number, (row, reason, detail) in enumerate(BAD_ROWS):
        alone = plan_of(target_folder, write_rows(path, [GOOD[0], row]), tmp_path, max_rejected_fraction=0.5)
        assert alone.sequences.examples[reason.value].startswith("row 1: "), number
        assert detail in alone.sequences.examples[reason.value]


def test_plain_chats_give_the_plan_they_always_gave(target_folder: Path, chats_file: Path, tmp_path: Path) -> None:
    plan = plan_of(target_folder, chats_file, tmp_path, max_length=48)
    digest = hashlib.sha256(plan_bytes(plan.table)).hexdigest()
    assert digest == "299447829c117e2a72db9b38964ff0fff63bb8517fb6942e54399228a3a42b26"
    extraction = json.dumps(dict(plan.manifest.extraction), sort_keys=True).encode()
    assert hashlib.sha256(extraction).hexdigest() == "af7d54a5be24b34680ac1816becb22ef28e0651e4f42efa8b3d17626e866f160"


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_an_arrow_row_that_is_no_text_is_one_bad_row(tmp_path: Path, suffix: str) -> None:
    contents = [b"hi", b"caf\xe9", b"ho"]
    buffers = pa.array(contents, pa.binary()).buffers()
    texts = pa.Array.from_buffers(pa.string(), 3, buffers)  # unchecked, as other writers leave it
    roles = pa.array(["assistant"] * 3)
    messages = pa.ListArray.from_arrays([0, 1, 2, 3], pa.StructArray.from_arrays([roles, texts], ["role", "content"]))
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
    table = pa.Table.from_pylist([{"messages": [{"role": "user", "content": f"{i:08d}" * 40}]} for i in range(3000)])
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
        offset = pq.ParquetFile(path).metadata.row_group(5).column(0).file_offset or len(content) // 2
        content[offset : offset + 400] = b"\x5a" * 400
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=rf"chats\{path.suffix} is no readable"):
        list(ChatSource(str(path), None).rows())


def test_a_broken_json_list_counts_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text("[" + ",\n".join(GOOD))
    assert all(isinstance(row, UnreadableRow) for _, row in list(ChatSource(str(path), None).rows())[:-1])
    path.write_text("\n".join(GOOD) + "\n")  # lines under another name
    assert len(list(ChatSource(str(path), None).rows())) == 60
    path.write_text("[1]\n[2]\n")
    assert [row for _, row in ChatSource(str(path), None).rows()] == [[1], [2]]


def test_a_line_beyond_the_bound_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "MAX_ROW_BYTES", 2000)
    long = GOOD[1].replace('"content": "', '"content": "' + "long " * 1000, 1)
    path = write_rows(tmp_path / "chats.jsonl", [GOOD[0], long, GOOD[2], long])
    rows = [row for _, row in ChatSource(str(path), None).rows()]
    assert rows[::2] == [json.loads(GOOD[0]), json.loads(GOOD[2])]
    assert rows[1::2] == [UnreadableRow("a line of more than 2,000 bytes")] * 2


def test_a_parquet_file_that_grows_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "MAX_ROW_BYTES", 1 << 18)
    few, many = tmp_path / "few.parquet", tmp_path / "many.parquet"
    pq.write_table(pa.table({"text": ["a" * (1 << 19)]}), few, compression="zstd")
    pq.write_table(pa.table({"text": ["a" * (1 << 19), *["b"] * 99]}), many, compression="zstd", use_dictionary=False)
    for path in (few, many):
        assert path.stat().st_size < 2000
        with pytest.raises(DatasetError, match=path.name):
            next(ChatSource(str(path), None).rows())
