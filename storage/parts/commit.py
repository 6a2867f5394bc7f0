"""Commits: the documents that make a finished part (or the target bundle) exist, and list its files."""

from __future__ import annotations

import contextlib
import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..disk.checking import MISSING, exists
from ..documents import mapping, parse_object, read_bounded, relative_name, whole_number
from ..errors import ManifestInvalid, ShardCorrupt, ShardMissing, StoreError
from ..names import COMMITS_NAME, commit_path
from .shard import FileRecord


@dataclass(frozen=True)
class PartCommit:
    """Content of ``commits/part-<k>.json``.

    Attributes:
        allocated_tokens: length of the token axis, alignment padding included.
        files: path inside the part's folder -> size and checksum.
    """

    part: int
    n_sequences: int
    n_tokens: int
    allocated_tokens: int
    files: Mapping[str, FileRecord]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files."""
        return sum(record.bytes for record in self.files.values())

    def to_json(self) -> bytes:
        """Return the file's content."""
        return _dump(vars(self) | {"files": {name: vars(record) for name, record in self.files.items()}})


def read_part_commit(path: Path) -> PartCommit:
    """Read a part's commit; raises ManifestInvalid where it is damaged."""
    try:
        text = read_bounded(path)
        document = parse_object(text)
        counts = {key: whole_number(document[key], key) for key in ("part", "n_sequences", "n_tokens")}
        allocated_tokens = whole_number(document["allocated_tokens"], "allocated_tokens")
        commit = PartCommit(**counts, allocated_tokens=allocated_tokens, files=_records(document))
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(path, error) from error
    if commit.to_json() != text:
        # A commit guards the other files and has no checksum of its own; but it is written in one way only.
        raise _invalid(path, ValueError("not the bytes that were written"))
    return commit


def read_commits(store: Path, parts: Iterable[int]) -> dict[int, PartCommit]:
    """Read, in order, the commits of those parts that have one; each must be whole and name its own part."""
    commits: dict[int, PartCommit] = {}
    for part in sorted(parts):
        path = commit_path(store, part)
        if not exists(path):
            continue
        commit = read_part_commit(path)
        if commit.part != part:
            raise ManifestInvalid(f"{path} is the commit of part {commit.part}. Delete it and run extract again.")
        commits[part] = commit
    return commits


def committed_bytes(store: Path) -> int:
    """Sum the bytes of all files that a store's commits list, without opening them; 0 for other folders."""
    n_bytes = 0
    for path in (store / COMMITS_NAME).glob("*.json"):
        with contextlib.suppress(KeyError, TypeError, ValueError, OSError):  # what is damaged is written again
            n_bytes += sum(record.bytes for record in _records(parse_object(read_bounded(path))).values())
    return n_bytes


def array_of(file: str) -> str | None:
    """Return the name of the array that a committed file is a shard of; None for metadata."""
    found = _SHARD_NAME.fullmatch(file)
    return None if found is None else found[1]


def target_commit_json(files: Mapping[str, FileRecord]) -> bytes:
    """Return the content of ``commits/target.json``."""
    return _dump({"files": {name: asdict(record) for name, record in files.items()}})


def read_target_commit(path: Path) -> dict[str, FileRecord]:
    """Read the target bundle's commit: file name -> its record."""
    return read_file_records(path)


def read_file_records(path: Path) -> dict[str, FileRecord]:
    """Read a commit that lists files alone; raises ManifestInvalid where it is damaged."""
    try:
        text = read_bounded(path)
        records = _records(parse_object(text))
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(path, error) from error
    if target_commit_json(records) != text:
        raise _invalid(path, ValueError("not the bytes that were written"))
    return records


def find_size_damage(folder: Path, files: Mapping[str, FileRecord]) -> list[tuple[Path, StoreError]]:
    """Return (path, error) for each committed file that is missing or has another size.

    Raises:
        OSError: the system failed to look at a file, which says nothing about it.
    """
    damage: list[tuple[Path, StoreError]] = []
    for name, record in files.items():
        path = folder / name
        try:
            found = path.stat()
        except MISSING:
            damage.append((path, ShardMissing(f"{path} is missing although it was committed. {_REPAIR}")))
            continue
        if not stat.S_ISREG(found.st_mode):
            damage.append((path, ShardCorrupt(f"{path} is no regular file. {_REPAIR}")))
        elif found.st_size != record.bytes:
            message = f"{path} has {found.st_size} bytes, its commit says {record.bytes}. {_REPAIR}"
            damage.append((path, ShardCorrupt(message)))
    return damage


def _records(document: dict[str, Any]) -> dict[str, FileRecord]:
    return {
        relative_name(name): FileRecord(
            whole_number(record["bytes"], "bytes"), whole_number(record["crc32"], "crc32", 0, (1 << 32) - 1)
        )
        for name, record in mapping(document["files"], "files").items()
    }


def _dump(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def _invalid(path: Path, error: Exception) -> ManifestInvalid:
    return ManifestInvalid(f"{path} is not a commit ({error}). Delete it and run extract again: it redoes that part.")


_SHARD_NAME = re.compile(r"(.+?)/c((\.\d+)+|(/\d+)+)")
_REPAIR = "Run extract again: it redoes that part only."
