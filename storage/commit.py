"""Commits: the documents that make a finished part (or the target bundle) exist, and list its files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import StoreDamaged, StoreError
from ..files import mapping, parse_object, relative_name, whole_number
from .backend import MISSING, names_in, read_file, reads_of
from .paths import RemotePath, Stat, StorePath
from .schema import COMMITS_NAME, commit_path
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
        return _dump(vars(self) | {"files": {name: record.to_dict() for name, record in self.files.items()}})


def read_part_commit(path: StorePath, read: Callable[[], bytes] | None = None) -> PartCommit:
    """Read a part's commit; raises StoreDamaged where it is damaged.

    Args:
        read: reads the file, where it is on its way already (``files.reads_of``).
    """
    try:
        text = read() if read else read_file(path)
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


def read_commits(store: StorePath, parts: Iterable[int]) -> dict[int, PartCommit]:
    """Read, in order, the commits of those parts that have one; each must be whole and name its own part."""
    commits: dict[int, PartCommit] = {}
    wanted = sorted(parts)
    for part, (path, read) in zip(wanted, reads_of(commit_path(store, part) for part in wanted), strict=True):
        try:
            commit = read_part_commit(path, read)
        except MISSING:
            continue
        if commit.part != part:
            raise StoreDamaged(f"{path} is the commit of part {commit.part}. Delete it and run extract again.")
        commits[part] = commit
    return commits


def committed_bytes(store: StorePath) -> int:
    """Sum the bytes of all files that a store's commits list, without opening them; 0 for other folders."""
    n_bytes = 0
    folder = store / COMMITS_NAME
    for _, read in reads_of(folder / name for name in names_in(folder) if name.endswith(".json")):
        with contextlib.suppress(KeyError, TypeError, ValueError, OSError):  # what is damaged is written again
            n_bytes += sum(record.bytes for record in _records(parse_object(read())).values())
    return n_bytes


def array_of(file: str) -> str | None:
    """Return the name of the array that a committed file is a shard of; None for metadata."""
    found = _SHARD_NAME.fullmatch(file)
    return None if found is None else found[1]


def target_commit_json(files: Mapping[str, FileRecord]) -> bytes:
    """Return the content of ``commits/target.json``."""
    return _dump({"files": {name: record.to_dict() for name, record in files.items()}})


def read_target_commit(path: StorePath) -> dict[str, FileRecord]:
    """Read the target bundle's commit: file name -> its record."""
    return read_file_records(path)


def read_file_records(path: StorePath) -> dict[str, FileRecord]:
    """Read a commit that lists files alone; raises StoreDamaged where it is damaged."""
    try:
        text = read_file(path)
        records = _records(parse_object(text))
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(path, error) from error
    if target_commit_json(records) != text:
        raise _invalid(path, ValueError("not the bytes that were written"))
    return records


def find_size_damage(
    folder: StorePath, files: Mapping[str, FileRecord], look: Callable[[StorePath], Stat | os.stat_result] | None = None
) -> list[tuple[StorePath, StoreError]]:
    """Return (path, error) for each committed file that is missing or has another size.

    Args:
        look: tells a file's size (``files.sizes_of``); what it says against a file is asked for once more.

    Raises:
        OSError: the system failed to look at a file, which says nothing about it.
    """
    damage: list[tuple[StorePath, StoreError]] = []
    for name, record in files.items():
        path = folder / name
        try:
            found = look(path) if look else path.stat()
            if found.st_size != record.bytes and isinstance(path, RemotePath):
                found = path.stat()  # a listing may lag behind
        except MISSING:
            damage.append((path, StoreDamaged(f"{path} is missing although it was committed. {_REPAIR}")))
            continue
        if not stat.S_ISREG(found.st_mode):
            damage.append((path, StoreDamaged(f"{path} is no regular file. {_REPAIR}")))
        elif found.st_size != record.bytes:
            message = f"{path} has {found.st_size} bytes, its commit says {record.bytes}. {_REPAIR}"
            damage.append((path, StoreDamaged(message)))
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


def _invalid(path: StorePath, error: Exception) -> StoreDamaged:
    return StoreDamaged(f"{path} is not a commit ({error}). Delete it and run extract again: it redoes that part.")


_SHARD_NAME = re.compile(r"(.+?)/c((\.\d+)+|(/\d+)+)")
_REPAIR = "Run extract again: it redoes that part only."
