"""Read the rows of a dataset of chats in order, in any supported format.

If a row cannot be read, only this row is rejected. The rest of its file is still read.

If a dataset is a folder, one of its splits is read, as on the Hub. The split of a file is taken
from the name of the file or of its sub-folder. Examples: ``train-00000-of-00002.parquet``,
``data/train_sft-00000-of-00001.parquet``, ``default/train/0000.parquet``, ``test.jsonl``,
``chats_validation.jsonl``.

This module does not use the `datasets` library for local files. The library refuses an entire file
if one line is not JSON. It adds nulls to a row that lacks keys of other rows. It also copies all
files to its cache.
"""

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DatasetError, OptionInvalid
from ..files import kind_of, machine_trouble, parse_object, walk
from ..moa.targets.chat import (
    CHAT_COLUMNS,
    ROLES,
    Rejection,
    RejectReason,
    find_key,
)
from ..moa.targets.row_values import unique_keys
from ..text import counted, first_line, format_bytes

# Maximum size of a row in bytes. A longer row of a JSON lines file is rejected without being read
# into memory.
MAX_ROW_BYTES = 1 << 28
MAX_EXPANSION = 200
"""Largest allowed compression ratio of a Parquet row group.

The ratio of chats is about 10. The limit protects against small files that expand to gigabytes. A
row group may have any ratio if its decompressed size is at most MAX_ROW_BYTES.
"""
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".feather")
_UNREAD = re.compile(
    r".*\.(?:ndjson|jsonlines|jl|csv|tsv"
    r"|(?:jsonl?|ndjson|jsonlines|csv|tsv|parquet|arrow)\.(?:gz|bz2|xz|zst|zip|lz4))",
    re.IGNORECASE,
)
"""Matches names of data files in formats that cannot be read here, such as CSV or gzip."""
# The split in which UltraChat and similar datasets keep their chats.
DEFAULT_SPLIT = "train_sft"
# Suffix of the JSON file in which `regenerate` describes the chats that it wrote.
RECORD_SUFFIX = ".regeneration.json"

_DICT = "dataset_dict.json"
_NO_CHATS = re.compile(
    rf"\..*|dataset_infos?\.json|state\.json|{re.escape(_DICT)}|.*{re.escape(RECORD_SUFFIX)}|cache-.*\.arrow"
)
"""Matches names of files without chats: hidden files, metadata, caches of `Dataset.map`."""
_KEYWORD = re.compile(
    r"(?<![^\W\d_])(?:train|training|validation|valid|dev|val|test|testing|eval|evaluation|heldout|holdout)"
    # The split's name may have one of these endings, as in ``trainset`` or ``tests``. The character
    # after the ending must not be a lowercase letter, so that words such as ``testimony`` do not
    # match.
    r"(?:s|sets?|data|split)?(?!(?-i:[^\W\d_A-Z])).*",
    re.IGNORECASE,
)
_SHARDED = re.compile(r"(.+)-\d{5}-of-\d{5}\b.*")
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\..+)")
_SHARD_NUMBER = re.compile(r"(?:[-_. ]?(?:part|shard|chunk))?[-_. ]?\d+(?:[-_ ]of[-_ ]\d+\b.*)?$")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Errors of Arrow for a row that Python cannot represent: invalid UTF-8, a date outside Python's
# range, too deep nesting, or a map with two equal keys.
_UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError, KeyError)
_HASH_BYTES = 1 << 20
_READ_ROWS = 1024


def writer_of_answers(dataset: str) -> str | None:
    """Return the ``weights_sha256`` of the model that wrote the answers in a dataset.

    `regenerate` records this hash in a JSON file next to the chats that it writes.

    Args:
        dataset: a file of chats, or a folder that contains one such file and its JSON file.

    Returns:
        The hash, or None if no such JSON file can be read.
    """
    path = Path(dataset).expanduser()
    try:
        [record] = (
            path.glob(f"*{RECORD_SUFFIX}") if path.is_dir() else [path.with_suffix(RECORD_SUFFIX)]
        )
        return str(parse_object(record.read_bytes())["settings"]["target"]["weights_sha256"])
    except (OSError, KeyError, TypeError, ValueError):
        return None


def choose_files(path: Path, split: str | None) -> tuple[list[Path], str | None, int]:
    """Choose the files of a dataset that are read.

    Args:
        path: a file or a folder. If none of the folder's files belongs to a split, all files are
            chosen.
        split: the split to read. If the argument is None, it is DEFAULT_SPLIT, or the only split of
            the folder.

    Returns:
        The files in reading order, the name of their split, and the number of other files in the
        folder. If the files do not belong to a split, the name is None.
    """
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DatasetError(
                f"{path} has the suffix {path.suffix!r}, expected one of {', '.join(SUFFIXES)}. "
                "Convert it to jsonl."
            )
        return [path], None, 0
    if not path.is_dir():
        raise DatasetError(
            f"{path} is {kind_of(path)}, expected a file of chats or a folder of such files."
        )
    split_of_file = _files_by_split(path)
    if not split_of_file:
        raise DatasetError(
            f"Folder {path} has no file with one of the suffixes {', '.join(SUFFIXES)}. Point "
            "`dataset` at chats in one of these formats."
        )
    wanted = split or DEFAULT_SPLIT
    chosen = [file for file, name in split_of_file.items() if name == wanted]
    if not chosen:
        chosen = [file for file in split_of_file if _is_named(file.relative_to(path), wanted)]
    chosen_splits = {split_of_file[file] for file in chosen} - {None}
    if chosen and len(chosen_splits) < 2:
        return chosen, wanted, len(split_of_file) - len(chosen)
    n_files_of_split = Counter(split_of_file.values())
    # Choose all files if none of them belongs to a split. Also choose all files if they belong to
    # the same split and the caller has not asked for a split.
    if len(n_files_of_split) == 1 and (split is None or None in n_files_of_split):
        return list(split_of_file), next(iter(n_files_of_split)), 0
    shown = [f"{name or 'without a split'} ({n})" for name, n in n_files_of_split.items()]
    raise DatasetError(
        f"Folder {path} does not have the split {wanted!r} (the default is {DEFAULT_SPLIT}). It "
        f"has these splits, with their numbers of files: {', '.join(shown)}. Choose one with "
        "`split`, or point `dataset` at a single file."
    )


def _is_named(relative: Path, split: str) -> bool:
    stem = relative.name.split(".")[0]
    return split in relative.parts[:-1] or stem == split or stem.startswith(split + "-")


def _files_by_split(folder: Path) -> dict[Path, str | None]:
    """Map each file that may hold chats to its split. The paths are sorted.

    A file without a split is mapped to None.
    """
    # `DatasetDict.save_to_disk` writes one folder per split.
    is_dict = (folder / _DICT).is_file()
    splits: dict[Path, str | None] = {}
    for file in sorted(_walk(folder)):
        relative = file.relative_to(folder)
        if file.suffix.lower() in SUFFIXES:
            if not file.exists():
                raise DatasetError(
                    f"Folder {folder} holds {relative}, which is {kind_of(file)}. Restore the file, "
                    "or delete the link."
                )
            splits[file] = relative.parts[0] if is_dict else _split_of(relative)
        elif _UNREAD.fullmatch(file.name):
            raise DatasetError(
                f"Folder {folder} holds {relative}, which is not in one of the formats "
                f"{', '.join(SUFFIXES)}. Unpack or convert this file, or move it to another folder."
            )
    return splits


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without files that cannot hold chats.

    Links to folders are followed.

    Raises:
        OSError: a folder cannot be read.
    """
    visited: set[Path] = set()
    for parent, folders, names in walk(folder, follows_links=True):
        real = parent.resolve()
        folders[:] = [name for name in folders if not _NO_CHATS.fullmatch(name)]
        if real in visited:
            # A link points to a folder that was visited before under another path. Skip the folder.
            folders.clear()
            continue
        visited.add(real)
        for name in names:
            path = parent / name
            if not _NO_CHATS.fullmatch(name) and (path.is_file() or path.is_symlink()):
                yield path


def _missing_shards(files: Sequence[Path]) -> list[str]:
    """Return the names of missing files of a numbered series, such as ``train-00001-of-00002``."""
    present = {file.name for file in files}
    missing: set[str] = set()
    for name in present:
        if match := _SHARD.fullmatch(name):
            start, total, end = match.groups()
            for number in range(int(total)):
                missing.add(f"{start}-{number:05}-of-{total}{end}")
    return sorted(missing - present)


def _split_of(relative: Path) -> str | None:
    """Guess the split of a file from its path.

    If folders of the path are named after splits, the innermost of these folders gives the split.
    Otherwise, the file's name gives it. If the file's name does not contain a split either, the
    result is None.
    """
    for folder in reversed(relative.parts[:-1]):
        if match := _KEYWORD.search(folder):
            return match[0]
    stem = relative.name.removesuffix(relative.suffix)
    sharded = _SHARDED.fullmatch(stem)
    if sharded and relative.parts[:-1][-1:] == ("data",):
        return sharded[1]
    if match := _KEYWORD.search(stem):
        return _SHARD_NUMBER.sub("", match[0]) or match[0]
    return None


class ChatSource:
    """The rows of a dataset in order, and a hash that identifies the dataset.

    For local files, the hash covers the bytes of the files. For a Hub dataset, it covers the rows
    as they are read. It does not cover the cached files of the Hub dataset, because their bytes
    depend on the version of the `datasets` library.

    Args:
        dataset: a file, a folder of files, or a hub id.
        split: the split to read. If the argument is None, it is DEFAULT_SPLIT, or the only split of
            a folder.
        config_name: configuration of a Hub dataset. If the argument is None, it is the dataset's
            default.
        revision: branch, tag or commit of a Hub dataset. If the argument is None, it is the
            dataset's default.
    """

    def __init__(
        self,
        dataset: str,
        split: str | None,
        config_name: str | None = None,
        revision: str | None = None,
    ) -> None:
        self.name = dataset
        self.config_name = config_name
        # The commit of a Hub dataset. For local files, or if `datasets` does not report the commit,
        # the value is None.
        self.commit: str | None = None
        path = Path(dataset).expanduser()
        self._root = path if path.is_dir() else path.parent
        self._hub: Any = None
        # Only for a Hub dataset: entry n is the sha256 of the first n rows.
        self._digests: list[bytes] = []
        if path.exists():
            if config_name or revision:
                raise DatasetError(
                    f"{dataset} is a local file or folder, so it has no configuration and no "
                    "revision. Leave out `dataset_config` and `dataset_revision`."
                )
            self._files, self._split, self._n_others = choose_files(path, split)
        else:
            self._files = []
            self._split = split or DEFAULT_SPLIT
            self._n_others = 0
            self._hub = _load_hub(dataset, config_name, self._split, revision)
            self.commit = _commit_of(self._hub)
            if revision and _COMMIT.fullmatch(revision) and self.commit not in (revision, None):
                raise DatasetError(
                    f"Commit {revision} of dataset {dataset} cannot be read, because the Hub cannot "
                    f"be reached and the local cache has only commit {self.commit}. Connect to the "
                    "network, or unset HF_HUB_OFFLINE."
                )

    def describe(self) -> str:
        """Return a text with the dataset's name, its split, and how many of its files are read.

        If a numbered series of files has gaps, the text names a missing file.
        """
        n_files = len(self._files)
        text = self.name if self._split is None else f"{self.name}, split {self._split}"
        if self._n_others:
            text += f" ({n_files} of {n_files + self._n_others} files)"
        if missing := _missing_shards(self._files):
            more = f" and {counted(len(missing) - 1, 'other file')}" if len(missing) > 1 else ""
            text += f" (without {missing[0]}{more}, missing in the folder)"
        return text

    def count_rows(self) -> int:
        """Estimate the number of rows, for progress.

        Only the rows of JSON lines files, Parquet files and Hub datasets are counted. Counting the
        rows of other files would be slow, so these files count as 0.
        """
        return sum(map(_count_rows, self._files)) if self._hub is None else len(self._hub)

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Yield (row number, row). The row numbers start at 0 and continue from file to file.

        A row that cannot be read is yielded as a Rejection.
        """
        return enumerate(
            chain.from_iterable(map(_read_file, self._files))
            if self._hub is None
            else self._read_hub()
        )

    def _read_hub(self) -> Iterator[Any]:
        digest = hashlib.sha256()
        self._digests = [digest.digest()]
        for row in self._hub:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            self._digests.append(digest.digest())
            yield _without_nulls(row)

    def origin(self) -> dict[str, str] | None:
        """Return entries for a manifest that identify the dataset without reading its rows.

        Local files are identified by their hash. A Hub dataset is identified by its name,
        configuration, split and commit. If the commit is not known, the result is None.
        """
        if self._hub is None:
            return {"sha256": self._files_sha256}
        named = {"id": self.name, "config": self.config_name or "", "split": str(self._split)}
        return None if self.commit is None else named | {"commit": self.commit}

    def identity(self, n_rows: int) -> str:
        """Return the sha256 of the local files, or of the first rows of the Hub dataset.

        Args:
            n_rows: number of rows of the Hub dataset to hash. They must have been read already.
        """
        return self._files_sha256 if self._hub is None else self._digests[n_rows].hex()

    @cached_property
    def _files_sha256(self) -> str:
        digest = hashlib.sha256()
        for file in self._files:
            # The name of a single file is not hashed, so that the file can be renamed. Names of
            # several files are hashed, because the files are read in the order of their names.
            name = str(file.relative_to(self._root)) if len(self._files) > 1 else ""
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while block := stream.read(_HASH_BYTES):
                    digest.update(block)
        return digest.hexdigest()


def _load_hub(dataset: str, config_name: str | None, split: str, revision: str | None) -> Any:
    if dataset.startswith((".", "/", "~")) or dataset.endswith(SUFFIXES) or dataset.count("/") > 1:
        raise DatasetError(
            f"Dataset {dataset} does not exist. Give a file, a folder or a hub id (owner/name)."
        )
    import datasets  # Import it here, because the import is slow and only Hub datasets need it.

    try:
        return datasets.load_dataset(
            dataset, config_name, split=split, revision=revision, trust_remote_code=False
        )
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        if (trouble := machine_trouble(error)) is not None:
            raise trouble from error
        raise DatasetError(
            f"Dataset {dataset} is not a local file or folder, and its split {split!r} cannot be "
            f"loaded from the Hub ({first_line(error)}). Check the name, `split`, `dataset_config` "
            "and the network, or give a local path."
        ) from error


def _commit_of(hub_rows: Any) -> str | None:
    """Return the commit of a loaded Hub dataset, taken from the name of its cache folder."""
    names = {Path(file["filename"]).parent.name for file in hub_rows.cache_files}
    commit = names.pop() if len(names) == 1 else ""
    return commit if _COMMIT.fullmatch(commit) else None


def _count_rows(path: Path) -> int:
    if path.suffix.lower() == ".parquet":
        try:
            return int(pq.ParquetFile(path).metadata.num_rows)
        except (pa.ArrowException, OSError):
            # The file cannot be read, so count 0 rows. The error is raised later, when the rows are
            # read.
            return 0
    if path.suffix.lower() != ".jsonl":
        return 0
    n_rows = 0
    with path.open("rb") as stream:
        while block := stream.read(_HASH_BYTES):
            n_rows += block.count(b"\n")
    return n_rows


def _read_file(path: Path) -> Iterator[Any]:
    suffix = path.suffix.lower()
    readers: dict[str, Callable[[Path], Iterator[Any]]] = {
        ".parquet": _read_parquet, ".arrow": _read_arrow, ".feather": _read_arrow, ".json": _read_json,
    }  # fmt: skip
    try:
        yield from readers.get(suffix, read_jsonl)(path)
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DatasetError(
                f"{path} cannot be read ({error.strerror}). Check the disk, and your right to read "
                "the file."
            ) from error
        raise DatasetError(
            f"{path} cannot be read as a {suffix[1:]} file ({first_line(error)}). Restore the "
            "file, or convert it."
        ) from error


def _read_parquet(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
            n_bytes = 0
            n_stored = 0
            for index in range(group.num_columns):
                column = group.column(index)
                n_bytes += column.total_uncompressed_size
                n_stored += column.total_compressed_size
            # Refuse a decompression bomb: a few kilobytes that expand to gigabytes.
            if n_bytes > min(
                MAX_ROW_BYTES * max(group.num_rows, 1), max(MAX_ROW_BYTES, MAX_EXPANSION * n_stored)
            ):
                raise DatasetError(
                    f"{path} has a row group of {group.num_rows:,} rows that grows from "
                    f"{format_bytes(n_stored)} to {format_bytes(n_bytes)} when it is decompressed. "
                    f"This is too much, because a row may have at most "
                    f"{format_bytes(MAX_ROW_BYTES)}. Remove the long rows."
                )
        for batch in file.iter_batches(batch_size=_READ_ROWS):
            yield from _arrow_rows(batch)


def _read_arrow(path: Path) -> Iterator[Any]:
    with pa.memory_map(str(path)) as source:
        try:
            file = pa.ipc.open_file(source)
            batches: Iterable[pa.RecordBatch] = map(file.get_batch, range(file.num_record_batches))
        except pa.ArrowInvalid:
            # The file is not in Arrow's file format (Feather), so read it in Arrow's stream format.
            # The `datasets` library writes files in the stream format.
            source.seek(0)
            batches = pa.ipc.open_stream(source)
        for batch in batches:
            yield from _arrow_rows(batch)


def _arrow_rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """Yield the rows of a batch. A row that Python cannot represent becomes a Rejection."""
    try:
        # In a damaged file, offsets may point outside the buffers of the batch. Only Arrow's full
        # validation finds such offsets.
        batch.validate(full=True)
        rows: Iterable[Any] = batch.to_pylist(maps_as_pydicts="strict")
    except _UNREADABLE as error:
        if isinstance(error, pa.ArrowInvalid) and "UTF8" not in str(error):
            raise
        rows = (_arrow_row(batch.slice(index, 1)) for index in range(batch.num_rows))
    for row in rows:
        yield row if isinstance(row, Rejection) else _without_nulls(row)


def _arrow_row(batch: pa.RecordBatch) -> Any:
    try:
        return batch.to_pylist(maps_as_pydicts="strict")[0]
    except _UNREADABLE as error:
        return Rejection(RejectReason.MALFORMED_ROW, first_line(error))


def _without_nulls(row: Any) -> Any:
    """Return a row without the keys whose value is null inside the row's columns.

    In an Arrow column, the structs of all rows have the same keys. If the original row lacks a key,
    Arrow stores null for this key.
    """
    # Clean every column, because the option ``--columns`` can name any of them.
    return {name: _drop_nulls(value) for name, value in row.items()}


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value


def parse_json(text: str | bytes) -> Any:
    """Parse one JSON value. Returns a Rejection if Python cannot read the text as JSON."""
    try:
        # Decode bytes as UTF-8 here, because json.loads guesses the encoding of bytes and might read a
        # damaged line as UTF-16.
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(decoded, object_pairs_hook=unique_keys)
    # Python raises ValueError for text that is not JSON, for invalid UTF-8, and for integers with
    # thousands of digits.
    except ValueError as error:
        return Rejection(RejectReason.MALFORMED_ROW, f"it is not valid JSON: {first_line(error)}")
    except RecursionError:
        return Rejection(RejectReason.MALFORMED_ROW, "its JSON is nested too deeply")


def _read_json(path: Path) -> Iterator[Any]:
    """Yield the rows of a JSON file.

    The file holds a list of rows, or an object with such a list under the key ``data``. A file of
    JSON lines with the wrong suffix is read too.
    """
    with _open_json(path) as stream:
        content = parse_json(stream.read())
    if isinstance(content, Rejection):
        yield from read_jsonl(path)
        return
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        if beside := find_key(content, CHAT_COLUMNS):
            raise DatasetError(
                f"{path} has the key {beside!r} next to the key 'data', but only the rows in 'data' "
                f"are read. Put {beside!r} into each row."
            )
        content = content["data"]
    yield from content if isinstance(content, list) else [content]


@contextmanager
def _open_json(path: Path) -> Iterator[IO[Any]]:
    """Open a JSON file: in binary mode for UTF-8, in text mode for UTF-16 and UTF-32.

    PowerShell and Excel write UTF-16. In a UTF-8 file, a damaged character makes one row
    unreadable. In the other encodings, a damaged character makes the rest of the file unreadable.
    """
    with path.open("rb") as stream:
        encoding = json.detect_encoding(stream.read(4))
        stream.seek(0)
        if encoding in ("utf-8", "utf-8-sig"):
            yield stream
            return
        try:
            yield io.TextIOWrapper(stream, encoding, newline="\n")
        except UnicodeError as error:
            raise DatasetError(
                f"{path} starts like a file in {encoding}, but cannot be decoded as such "
                f"({first_line(error)}). Convert it to UTF-8."
            ) from error


def read_jsonl(path: Path) -> Iterator[Any]:
    """Yield the values of a JSON lines file. A line that is not JSON becomes a Rejection.

    Empty lines are skipped.
    """
    with _open_json(path) as stream:
        while line := stream.readline(MAX_ROW_BYTES):
            if len(line) == MAX_ROW_BYTES and line[-1:] not in ("\n", b"\n"):
                while (rest := stream.readline(_HASH_BYTES)) and rest[-1:] not in ("\n", b"\n"):
                    pass
                yield Rejection(
                    RejectReason.MALFORMED_ROW, f"its line has more than {MAX_ROW_BYTES:,} bytes"
                )
            elif line.strip():
                yield parse_json(line)


_TURN_ROLES = {"user", "assistant"}  # roles that a chat must have
# Keys of a chat. The value of each key is read from one column; columns are not concatenated.
_SINGLE_COLUMNS = ("messages", "tools", "system")
FORMATS = {
    "alpaca": ("user=instruction+input", "assistant=output"),
    "prompt-completion": ("user=prompt", "assistant=completion"),
}


@dataclass(frozen=True)
class Columns:
    """Makes a chat from the columns of a row, as the setting ``columns`` describes it.

    Some datasets have one column per role. Others have the entire chat in a column, but not in the
    column ``messages``. The setting ``columns`` either lists the column of each role in the order
    of the chat, or names a known format. Some values of the setting, each with a row that it fits::

        alpaca              {"instruction": "Add.", "input": "1, 2", "output": "3"}
        prompt-completion   {"prompt": "Add 1 and 2.", "completion": "3"}
        messages=chat       {"chat": [{"role": "user", "content": "Add 1 and 2."}, ...]}
    """

    # One entry per message: the role, and the names of the columns that contain the message's text.
    # The texts of several columns are concatenated, with an empty line between them. Empty texts
    # are left out.
    turns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # Maps a key of the chat (messages, tools or system) to the column that contains its value.
    renamed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Columns":
        """Parse texts such as ``role=column[+column]``, or the name of a format.

        Args:
            texts: the value of the setting ``columns``. It is empty if the rows are chats already.

        Raises:
            OptionInvalid: a text does not parse, or only one of user and assistant is given.
        """
        turns: list[tuple[str, tuple[str, ...]]] = []
        renamed: dict[str, str] = {}
        # Texts of the form ``role=column``. If ``texts`` contains the name of a format, FORMATS
        # gives the texts that the name stands for.
        assignments: list[str] = []
        for text in texts:
            assignments.extend(FORMATS.get(text, (text,)))
        for text in assignments:
            role, _, names = text.partition("=")
            role = ROLES.get(role.strip(), role.strip())
            columns = tuple(name.strip() for name in names.split("+"))
            is_single = len(columns) == 1 and role in _SINGLE_COLUMNS and role not in renamed
            if role in _TURN_ROLES and all(columns):
                turns.append((role, columns))
            elif is_single and columns[0]:
                renamed[role] = columns[0]
            else:
                raise OptionInvalid(
                    f"`columns` has {text!r}. Expected the name of a format "
                    f"({' or '.join(FORMATS)}), or ROLE=COLUMN, as in "
                    "user=instruction+input,assistant=output. The roles are user, assistant, "
                    "messages, tools and system. The last three may be given once only, and "
                    "with one column."
                )
        roles = {role for role, _ in turns}
        if texts and roles != (set() if "messages" in renamed else _TURN_ROLES):
            raise OptionInvalid(
                f"`columns` is {','.join(texts)}. Expected either messages=COLUMN, or columns for "
                "both user and assistant."
            )
        return cls(tuple(turns), renamed)

    def describe(self) -> dict[str, str]:
        """Return a dict for store.json. It maps each role to its columns, separated by ``+``.

        The dict is empty if the rows are chats already.
        """
        # A role may occur twice, so the key also contains the message's index in the chat.
        columns_of_turn: dict[str, str] = {}
        for index, (role, columns) in enumerate(self.turns):
            columns_of_turn[f"{index}.{role}"] = "+".join(columns)
        return {**columns_of_turn, **self.renamed}

    @property
    def _wanted(self) -> list[str]:
        of_turns = (columns for _, columns in self.turns)
        return [*chain.from_iterable(of_turns), *self.renamed.values()]

    def left_out(self, row: Mapping[str, Any]) -> list[str]:
        """Return the names of a row's non-empty columns that :meth:`apply` ignores.

        For example, if the messages are made from other columns, the row's column ``messages`` is
        ignored.
        """
        wanted = self._wanted
        if not wanted:
            return []
        replaced = {"messages", "conversations", *self.renamed}.difference(wanted)
        return [name for name in row if name in replaced and row[name]]

    def apply(self, row: Any) -> Any | Rejection:
        """Return the chat that is made from a row.

        If the row lacks a column, the result is a Rejection. A row that is not a mapping is
        returned unchanged.
        """
        wanted = self._wanted
        if not wanted or not isinstance(row, Mapping):
            return row
        for name in wanted:
            if name not in row:
                return Rejection(
                    RejectReason.NO_COLUMN,
                    f"{name} is missing, its columns are " + ", ".join(map(str, list(row)[:8])),
                )
        chat = dict(row)
        for name in ("messages", "conversations", *wanted):
            chat.pop(name, None)
        for name, column in self.renamed.items():
            chat[name] = row[column]
        if self.turns:
            messages: list[Any] = []
            for role, columns in self.turns:
                messages += _messages(role, columns, row)
            chat["messages"] = messages
        return chat


def _messages(role: str, columns: Sequence[str], row: Mapping[str, Any]) -> list[Any]:
    """Return the messages that the columns of one role contain. Usually it is a single message.

    The texts of several columns are concatenated. If there is only one column, it may also hold a
    list of messages, as in TRL's conversational prompts. Such a list is returned unchanged.
    """
    values = [row[name] for name in columns if row[name] not in (None, "")]
    content = values[0] if len(values) == 1 else None
    if all(isinstance(value, str) for value in values):
        content = "\n\n".join(values)
    elif isinstance(content, list | tuple) and all(isinstance(item, Mapping) for item in content):
        return list(content)
    return [{"role": role, "content": content}]
