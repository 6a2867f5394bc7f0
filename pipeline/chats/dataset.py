"""The rows of a dataset, one after the other, whatever its format; a row that cannot be read is one bad row."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import DatasetError
from ...moa.targets.chat import UnreadableRow
from ...text import first_line, format_bytes
from .splits import DEFAULT_SPLIT, SUFFIXES, ChosenFiles, choose_files

MAX_ROW_BYTES = 1 << 28
MAX_EXPANSION = 200
"""Most times that a large row group of a Parquet file may grow when it is read; chats compress to a tenth or so."""
"""Longest line of a jsonl file that is read into memory."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH_BYTES = 1 << 20
_READ_ROWS = 1024
_CHAT_COLUMNS = ("messages", "conversations", "tools", "functions")
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)


class ChatSource:
    """The rows of a dataset in order, and a hash of what was read.

    Local files are read directly and their bytes are hashed; a hub dataset is loaded by `datasets` and its rows are
    hashed as they are read, because its cache files depend on the version of that library.

    Args:
        dataset: a file, a folder of files, or a hub id.
        split: split of a hub dataset or of a folder; None for DEFAULT_SPLIT, or the only split of a folder.
        config_name: configuration of a hub dataset; None for its default.
        revision: branch, tag or commit of a hub dataset; None for its main branch.

    Attributes:
        commit: the commit of a hub dataset that is read; None for files, and where `datasets` does not say.

    Raises:
        DatasetError: there is nothing that can be read, or several splits and none is the wanted one.
    """

    def __init__(
        self, dataset: str, split: str | None, config_name: str | None = None, revision: str | None = None
    ) -> None:
        self.name = dataset
        self.config_name = config_name
        self.commit: str | None = None
        path = Path(dataset).expanduser()
        self._root = path if path.is_dir() else path.parent
        self._hub_rows: Any = None
        self._row_hash = hashlib.sha256()
        self._ahead: deque[tuple[int, bytes]] = deque()
        if path.exists():
            if config_name or revision:
                raise DatasetError(f"{dataset} is local. Leave out --dataset-config and --dataset-revision.")
            self.chosen = choose_files(path, split)
        else:
            self.chosen = ChosenFiles((), split or DEFAULT_SPLIT)
            self._hub_rows = _load_hub(dataset, config_name, split or DEFAULT_SPLIT, revision)
            self.commit = _commit_of(self._hub_rows)
            if revision and _COMMIT.fullmatch(revision) and self.commit not in (revision, None):
                raise DatasetError(
                    f"Dataset {dataset}: commit {revision} is wanted, but only {self.commit} is in the cache and the "
                    "Hub cannot be reached. Connect to the network, or unset HF_HUB_OFFLINE."
                )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are read, in their order; none for a hub dataset."""
        return self.chosen.files

    def describe(self) -> str:
        """Return the dataset's name and the split and files that are read, for people."""
        return self.name + self.chosen.describe()

    def count_rows(self) -> int:
        """Estimate how many rows there are, for progress: lines of text files, exact for the other formats."""
        if self._hub_rows is not None:
            return len(self._hub_rows)
        return sum(_count_rows(file) for file in self.files)

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Yield (row number from 0 over all files, row); a row that cannot be read comes as an UnreadableRow."""
        if self._hub_rows is not None:
            for number, row in enumerate(self._hub_rows):
                self._ahead.append((number, json.dumps(row, sort_keys=True, default=str).encode()))
                yield number, _without_nulls(row)
            return
        number = 0
        for file in self.files:
            for row in _read_file(file):
                yield number, row
                number += 1

    def count(self, row: int) -> None:
        """Add the rows up to this one to the dataset's identity; rows that were only read ahead do not count."""
        while self._ahead and self._ahead[0][0] <= row:
            self._row_hash.update(self._ahead.popleft()[1])

    def origin(self) -> dict[str, str] | None:
        """Return what identifies the dataset without reading its rows; None where nothing does."""
        if self._hub_rows is None:
            return {"sha256": self._files_sha256}
        if self.commit is None:
            return None
        return {
            "id": self.name,
            "config": self.config_name or "",
            "split": str(self.chosen.split),
            "commit": self.commit,
        }

    def identity(self) -> str:
        """Return the sha256 of the files' names and bytes, or of the hub rows counted so far."""
        return self._files_sha256 if self._hub_rows is None else self._row_hash.hexdigest()

    @cached_property
    def _files_sha256(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            # A lone file may be renamed or moved; in a folder the names fix the order.
            name = str(file.relative_to(self._root)) if len(self.files) > 1 else ""
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while block := stream.read(_HASH_BYTES):
                    digest.update(block)
        return digest.hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Read one JSON value; an UnreadableRow where it is none, or none that Python can hold."""
    try:
        return json.loads(text)
    except ValueError as error:  # also UnicodeDecodeError, and whole numbers of thousands of digits
        return UnreadableRow(f"no JSON: {first_line(error)}")
    except RecursionError:
        return UnreadableRow("JSON that is nested too deeply")


def _load_hub(dataset: str, config_name: str | None, split: str, revision: str | None) -> Any:
    if dataset.startswith((".", "/", "~")) or dataset.endswith(SUFFIXES) or dataset.count("/") > 1:
        raise DatasetError(f"Dataset {dataset} does not exist. Give a file, a folder or a hub id (owner/name).")
    import datasets  # slow to import, and only a hub id needs it

    try:
        return datasets.load_dataset(dataset, config_name, split=split, revision=revision, trust_remote_code=False)
    except ValueError as error:
        raise DatasetError(
            f"Dataset {dataset}, split {split!r}: {first_line(error)} Choose another --split, or a --dataset-config."
        ) from error
    except (OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DatasetError(
            f"Dataset {dataset} is neither a local file or folder nor loadable from the hub ({first_line(error)}). "
            "Check the name and the network, or give a local path."
        ) from error


def _commit_of(hub_rows: Any) -> str | None:
    """Return the commit of a dataset that `datasets` has loaded: the name of the folder in its cache."""
    names = {Path(file["filename"]).parent.name for file in hub_rows.cache_files}
    commit = names.pop() if len(names) == 1 else ""
    return commit if _COMMIT.fullmatch(commit) else None


def _read_file(path: Path) -> Iterator[Any]:
    suffix = path.suffix.lower()
    readers: dict[str, Callable[[Path], Iterator[Any]]] = {
        ".parquet": _read_parquet, ".arrow": _read_arrow, ".feather": _read_arrow, ".json": _read_json,
        ".csv": _read_table, ".tsv": _read_table,
    }  # fmt: skip
    try:
        yield from readers.get(suffix, _read_jsonl)(path)
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DatasetError(f"{path} cannot be read ({error.strerror}). Check the disk and the rights.") from error
        raise DatasetError(
            f"{path} is no readable {suffix[1:]} file ({first_line(error)}). Restore or convert it."
        ) from error


def _count_rows(path: Path) -> int:
    if path.suffix.lower() == ".parquet":
        try:
            return int(pq.ParquetFile(path).metadata.num_rows)
        except (pa.ArrowException, OSError):
            return 0  # reading it says what is wrong
    if path.suffix.lower() != ".jsonl":
        return 0
    with path.open("rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(_HASH_BYTES), b""))


def _read_parquet(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        _check_sizes(path, file.metadata)
        for batch in file.iter_batches(batch_size=_READ_ROWS):
            yield from _arrow_rows(batch)


def _check_sizes(path: Path, metadata: Any) -> None:
    """Refuse a file whose cells are larger than a row may be, or that a few kilobytes blow up to gigabytes."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = [group.column(index) for index in range(group.num_columns)]
        n_bytes = sum(column.total_uncompressed_size for column in columns)
        n_stored = sum(column.total_compressed_size for column in columns)
        if n_bytes > MAX_ROW_BYTES * max(group.num_rows, 1) or n_bytes > max(MAX_ROW_BYTES, MAX_EXPANSION * n_stored):
            raise DatasetError(
                f"{path} holds {format_bytes(n_bytes)} of {group.num_rows:,} rows in {format_bytes(n_stored)}; no row "
                f"may have more than {format_bytes(MAX_ROW_BYTES)}. Leave such rows out."
            )


def _read_arrow(path: Path) -> Iterator[Any]:
    with pa.memory_map(str(path)) as source:
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)  # `datasets` writes the stream format, feather is the file format
            for batch in pa.ipc.open_stream(source):
                yield from _arrow_rows(batch)
            return
        for index in range(file.num_record_batches):
            yield from _arrow_rows(file.get_batch(index))


def _arrow_rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """Yield the rows of a batch; one that Python cannot hold is an UnreadableRow, the others are as they are.

    Raises:
        pa.ArrowInvalid: the batch points outside its data.
    """
    try:
        batch.validate(full=True)
        rows: Iterable[Any] = batch.to_pylist()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, pa.ArrowInvalid) and "UTF8" not in str(error):
            raise
        rows = (_arrow_row(batch.slice(index, 1)) for index in range(batch.num_rows))
    for row in rows:
        yield row if isinstance(row, UnreadableRow) else _without_nulls(row)


def _arrow_row(batch: pa.RecordBatch) -> Any:
    try:
        return batch.to_pylist()[0]
    except (ValueError, TypeError, OverflowError) as error:  # no UTF-8, a date beyond Python's
        return UnreadableRow(first_line(error))
    except RecursionError:
        return UnreadableRow("values that are nested too deeply")


def _without_nulls(row: Any) -> Any:
    """Drop keys that Arrow added: its structs have the keys of all rows, and a null where a row lacks one."""
    found = [name for name in _CHAT_COLUMNS if isinstance(row.get(name), (list, Mapping))]
    return row | {name: _drop_nulls(row[name]) for name in found} if found else row


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _read_json(path: Path) -> Iterator[Any]:
    """Read a list of rows, an object whose `data` is one, or JSON lines under the wrong suffix."""
    text = path.read_bytes()
    content = parse_json(text)
    if isinstance(content, UnreadableRow):
        # One row may be at fault in a long list; anything else is lines, or no list at all.
        items = _list_items(path, text)
        yield from _read_jsonl(path) if items is None else map(parse_json, items)
        return
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    yield from content if isinstance(content, list) else [content]


def _list_items(path: Path, text: bytes) -> list[bytes] | None:
    """Cut a JSON list at its own commas, without reading what is between them; None where the text is no list."""
    if not text.lstrip().startswith(b"["):
        return None
    items: list[bytes] = []
    depth = start = 0
    for match in _STRUCTURE.finditer(text):
        sign = match[0]
        depth += (sign in b"[{") - (sign in b"]}")
        if depth == 1 and sign == b"[" and not items and not start:
            start = match.end()
        elif (depth == 1 and sign == b",") or not depth:
            items.append(text[start : match.start()])
            start = match.end()
        if not depth:
            return None if text[match.end() :].strip() else items
    raise DatasetError(f"{path} is no readable json file (its list does not end). Restore or convert it.")


def _read_table(path: Path) -> Iterator[Any]:
    """Yield the rows of a csv or tsv file as texts by column; its first line names the columns."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        lines = csv.reader(stream, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        names = _next_line(lines)
        if names is None:
            return
        if isinstance(names, UnreadableRow) or len(set(names)) < len(names):
            raise DatasetError(f"{path} does not begin with a line of column names, each of them once. Add one.")
        while (line := _next_line(lines)) is not None:
            if isinstance(line, UnreadableRow):
                yield line
            elif len(line) != len(names):
                yield UnreadableRow(f"{len(line)} fields for {len(names)} columns")
            else:
                yield dict(zip(names, line, strict=True))


def _next_line(lines: Iterator[list[str]]) -> list[str] | UnreadableRow | None:
    """Return the next line that is not empty; None at the end."""
    try:
        return next((line for line in lines if line), None)
    except csv.Error as error:
        return UnreadableRow(f"no csv: {error}")


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as stream:
        while line := stream.readline(MAX_ROW_BYTES):
            if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (rest := stream.readline(_HASH_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield UnreadableRow(f"a line of more than {MAX_ROW_BYTES:,} bytes")
            elif line.strip():
                yield parse_json(line)
