"""Rows of a dataset to chats: lists of {"role", "content"} messages, or a counted reason why not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .errors import DatasetError

Message = dict[str, str]
Progress = Callable[[int, int, str], None]

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".feather")
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
}
_HASH_BYTES = 1 << 20


class RejectReason(StrEnum):
    """Why a row gives no sequence; the values are shown to the user."""

    MALFORMED_ROW = "the row is no JSON object"
    NO_MESSAGES = "the row has neither messages nor conversations"
    MALFORMED_MESSAGES = "messages is no list of objects with a role and a content"
    UNKNOWN_ROLE = "a message has an unknown role"
    EMPTY_CONTENT = "a message is empty or no text"
    NO_RESPONSE = "the chat has no assistant message"
    SPECIAL_TOKEN_IN_CONTENT = "a message contains a special token of the tokenizer"
    TEMPLATE_FAILED = "the chat template refuses the chat"
    TEMPLATE_REWRITES_RESPONSE = "the chat template rewrites the response"
    NO_RESPONSE_TOKENS = "no response token"
    TRUNCATED_AWAY = "every response lies beyond max_length"
    NO_PROMPT_TOKENS = "every token would be a response"


@dataclass(frozen=True)
class Rejection:
    """A row that gives no sequence.

    Attributes:
        reason: one of a fixed set, for counting.
        detail: what exactly, for the first example shown.
    """

    reason: RejectReason
    detail: str = ""


def parse_chat(row: Any) -> list[Message] | Rejection:
    """Read the chat of one row.

    Args:
        row: a mapping with `messages` ([{role, content}]) or `conversations` ([{from, value}], ShareGPT).

    Returns:
        The messages with roles system, user, assistant or tool and their text unchanged, or why there are none.
    """
    if not isinstance(row, Mapping):
        return Rejection(RejectReason.MALFORMED_ROW, f"got {type(row).__name__}")
    items = row.get("messages")
    if items is None:
        items = row.get("conversations")
    if items is None:
        return Rejection(RejectReason.NO_MESSAGES, "columns: " + ", ".join(map(str, list(row)[:8])))
    if not isinstance(items, (list, tuple)) or not items:
        return Rejection(RejectReason.MALFORMED_MESSAGES, f"got {type(items).__name__} of length {_length(items)}")
    messages = []
    for index, item in enumerate(items):
        message = _parse_message(item, index)
        if isinstance(message, Rejection):
            return message
        messages.append(message)
    if not any(message["role"] == "assistant" for message in messages):
        return Rejection(RejectReason.NO_RESPONSE, "roles: " + ", ".join(m["role"] for m in messages[:8]))
    return messages


def _parse_message(item: Any, index: int) -> Message | Rejection:
    if not isinstance(item, Mapping):
        return Rejection(RejectReason.MALFORMED_MESSAGES, f"message {index} is {type(item).__name__}")
    name = item.get("role", item.get("from"))
    content = item.get("content", item.get("value"))
    if name is None:
        return Rejection(RejectReason.MALFORMED_MESSAGES, f"message {index} has no role")
    role = _ROLES.get(str(name).strip().lower())
    if role is None:
        return Rejection(RejectReason.UNKNOWN_ROLE, f"message {index} has role {name!r}")
    if isinstance(content, (list, tuple)):
        content = _join_text_parts(content)
    if not isinstance(content, str) or not content.strip():
        return Rejection(RejectReason.EMPTY_CONTENT, f"message {index} ({role})")
    return {"role": role, "content": content}


def _join_text_parts(parts: list[Any] | tuple[Any, ...]) -> str | None:
    """Text of [{"type": "text", "text": ...}]; None where a part is no text."""
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]


def _length(value: Any) -> int | str:
    return len(value) if hasattr(value, "__len__") else "?"


class ChatSource:
    """The rows of a dataset in order, and a hash of what was read.

    Local files are read directly and their bytes are hashed; a hub dataset is loaded by `datasets` and its rows are
    hashed as they are read, because its cache files depend on the version of that library.

    Args:
        dataset: a file, a folder of files, or a hub id.
        split: split of a hub dataset; in a folder it selects the files or sub-folder named after it, if there are any.

    Raises:
        DatasetError: nothing there that can be read.
    """

    def __init__(self, dataset: str, split: str) -> None:
        self.name = dataset
        self.split = split
        path = Path(dataset).expanduser()
        self.files: list[Path] = _find_files(path, split) if path.exists() else []
        self._root = path if path.is_dir() else path.parent
        self._hub_rows: Any = None
        self._row_hash = hashlib.sha256()
        if not self.files:
            self._hub_rows = _load_hub(dataset, split)

    def count_rows(self) -> int:
        """About how many rows there are, for progress: lines of text files, exact for the other formats."""
        if self._hub_rows is not None:
            return len(self._hub_rows)
        return sum(_count_rows(file) for file in self.files)

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Yield (row number from 0 over all files, row); a line that is no JSON comes as its error text."""
        if self._hub_rows is not None:
            for number, row in enumerate(self._hub_rows):
                self._row_hash.update(json.dumps(row, sort_keys=True, default=str).encode())
                yield number, row
            return
        number = 0
        for file in self.files:
            for row in _read_file(file):
                yield number, row
                number += 1

    def identity(self) -> str:
        """sha256 of the files' names and bytes, or of the hub rows read so far."""
        if self._hub_rows is not None:
            return self._row_hash.hexdigest()
        digest = hashlib.sha256()
        for file in self.files:
            # A lone file may be renamed or moved; in a folder the names fix the order.
            name = str(file.relative_to(self._root)) if len(self.files) > 1 else ""
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while block := stream.read(_HASH_BYTES):
                    digest.update(block)
        return digest.hexdigest()


def _find_files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DatasetError(
                f"{path} has the suffix {path.suffix!r}, expected one of {', '.join(SUFFIXES)}. Convert it to jsonl."
            )
        return [path]
    ignored = {"dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json"}
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and file.suffix.lower() in SUFFIXES
        and file.name not in ignored
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise DatasetError(
            f"Folder {path} holds no {', '.join(SUFFIXES)} file. Point --dataset at chats in one of these formats."
        )
    named = [file for file in files if _belongs_to_split(file.relative_to(path), split)]
    return named or files


def _belongs_to_split(relative: Path, split: str) -> bool:
    stem = relative.name.split(".")[0]
    return split in relative.parts[:-1] or stem == split or stem.startswith(split + "-")


def _load_hub(dataset: str, split: str) -> Any:
    if dataset.startswith((".", "/", "~")) or dataset.endswith(SUFFIXES) or dataset.count("/") > 1:
        raise DatasetError(f"Dataset {dataset} does not exist. Give a file, a folder or a hub id (owner/name).")
    import datasets  # slow to import, and only a hub id needs it

    try:
        return datasets.load_dataset(dataset, split=split, trust_remote_code=False)
    except ValueError as error:
        raise DatasetError(
            f"Dataset {dataset}, split {split!r}: {_first_line(error)} Choose another --split."
        ) from error
    except (OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DatasetError(
            f"Dataset {dataset} is neither a local file or folder nor loadable from the hub ({_first_line(error)}). "
            "Check the name and the network, or give a local path."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _read_file(path: Path) -> Iterator[Any]:
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            for batch in pq.ParquetFile(path).iter_batches(batch_size=1024):
                yield from batch.to_pylist()
        elif suffix in (".arrow", ".feather"):
            yield from _read_arrow(path)
        elif suffix == ".json":
            yield from _read_json(path)
        else:
            yield from _read_jsonl(path)
    except pa.ArrowInvalid as error:
        raise DatasetError(
            f"{path} is no readable {suffix[1:]} file ({_first_line(error)}). Restore or convert it."
        ) from error


def _count_rows(path: Path) -> int:
    if path.suffix.lower() == ".parquet":
        try:
            return int(pq.ParquetFile(path).metadata.num_rows)
        except pa.ArrowInvalid:
            return 0  # reading it says what is wrong
    if path.suffix.lower() != ".jsonl":
        return 0
    with path.open("rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(_HASH_BYTES), b""))


def _read_arrow(path: Path) -> Iterator[Any]:
    with pa.memory_map(str(path)) as source:
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)  # `datasets` writes the stream format, feather is the file format
            for batch in pa.ipc.open_stream(source):
                yield from batch.to_pylist()
            return
        for index in range(file.num_record_batches):
            yield from file.get_batch(index).to_pylist()


def _read_json(path: Path) -> Iterator[Any]:
    """A list of rows, an object whose `data` is one, or JSON lines under the wrong suffix."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        yield from _read_jsonl(path)
        return
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    yield from content if isinstance(content, list) else [content]


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as stream:
        for line in stream:
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:  # also UnicodeDecodeError
                yield f"no JSON: {error}"
