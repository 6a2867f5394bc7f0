"""Commits: the documents that make a finished part (or the target bundle) exist, and list its files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ..errors import StoreDamaged, StoreError
from ..files import MAX_JSON_BYTES, mapping, parse_object, relative_name, whole_number
from .backend import MISSING, file_crc32, make_folder, names_in, put, read_file, reads_of
from .paths import RemotePath, Stat, StorePath, name_below
from .plan import MAX_PLAN_BYTES
from .schema import (
    COMMITS_NAME,
    MANIFEST_NAME,
    PARTS_NAME,
    PLAN_NAME,
    ZARR_NAME,
    commit_path,
    manifest_commit_path,
    target_commit_path,
)
from .shard import FileRecord, record_of


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
    def counts(self) -> dict[str, int]:
        """All but the files (``plan.part_counts``)."""
        return {name: value for name, value in vars(self).items() if name != "files"}

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


_NAMES = (MANIFEST_NAME, PLAN_NAME)


def metadata_names(arrays: Iterable[str]) -> set[str]:
    """Return the names, inside the store, of the metadata of these arrays and of the groups that they lie in."""
    ways = (PurePosixPath(PARTS_NAME, array, ZARR_NAME).parents for array in arrays)
    groups = {parent for parents in ways for parent in parents} - {PurePosixPath()}
    return {(group / ZARR_NAME).as_posix() for group in groups}


def write_manifest_commit(store: StorePath, metadata: Collection[str] = ()) -> None:
    """Record store.json, plan.parquet, and the metadata of these names, as they are."""
    files = {}
    for name in (*_NAMES, *sorted(metadata)):
        content = read_file(store / name, MAX_PLAN_BYTES)
        files[name] = record_of(content).to_dict()
    put(manifest_commit_path(store), (json.dumps({"files": files}, indent=1, sort_keys=True) + "\n").encode())


def read_manifest_commit(store: StorePath) -> dict[str, FileRecord] | None:
    """Return the recorded sizes and checksums by name inside the store, or None where there is no such commit."""
    path = manifest_commit_path(store)
    try:
        records = read_file_records(path)
    except MISSING:
        return None
    except StoreDamaged as error:
        raise StoreDamaged(f"{path}, which guards {' and '.join(_NAMES)}, is damaged. {_RESTORE}") from error
    others = sorted(name for name in records.keys() - _NAMES if not is_metadata(name))
    if not records.keys() >= set(_NAMES) or others:
        raise StoreDamaged(f"{path} names the files {sorted(records)}, expected {sorted(_NAMES)}. {_RESTORE}")
    return records


def is_metadata(name: str) -> bool:
    """Whether a name inside a store is that of Zarr metadata that all parts share."""
    return name.startswith(f"{PARTS_NAME}/") and name.endswith(f"/{ZARR_NAME}")


def find_manifest_damage(store: StorePath, metadata: bool = True) -> list[tuple[StorePath, StoreDamaged]]:
    """Return (path, error) for each recorded file that has changed, or for the commit itself.

    Args:
        metadata: also look at the metadata of the arrays.

    Raises:
        OSError: one of them could not be read, which is no damage.
    """
    while True:
        before = _content(manifest_commit_path(store))
        damage = _compare(store, metadata)
        # An addition of fields replaces this commit meanwhile: files may then have been compared with the old one.
        if not damage or _content(manifest_commit_path(store)) == before:
            return damage


def _compare(store: StorePath, metadata: bool) -> list[tuple[StorePath, StoreDamaged]]:
    try:
        records = read_manifest_commit(store)
    except StoreDamaged as error:
        return [(manifest_commit_path(store), error)]
    damage = []
    for name, record in (records or {}).items():
        path = store / name
        if (metadata or name in _NAMES) and not _holds(path, record):
            message = f"{path} is not the file that was written: its checksum differs from the one in {COMMITS_NAME}/."
            advice = _REPAIR if is_metadata(name) else _RESTORE
            damage.append((path, StoreDamaged(f"{message} {advice}")))
    return damage


def _holds(path: StorePath, record: FileRecord) -> bool:
    """Whether a file holds the recorded bytes; it is read only if its size is the recorded one."""
    try:
        if path.stat().st_size != record.bytes:
            return False
        return matches_record(read_file(path, MAX_PLAN_BYTES), record)
    except (*MISSING, ValueError):  # gone, no regular file, or longer than any is
        return False


def _content(path: StorePath, max_bytes: int = MAX_JSON_BYTES) -> bytes | None:
    """Return a file's bytes, or None where there is no such file; no bytes of one that is longer or not regular."""
    try:
        return read_file(path, max_bytes)
    except MISSING:
        return None
    except ValueError:
        return b""


def matches_record(content: bytes, record: FileRecord) -> bool:
    """Whether these bytes are the recorded ones."""
    return len(content) == record.bytes and zlib.crc32(content) == record.crc32


def check_manifest(store: StorePath) -> None:
    """Refuse a store whose store.json or plan.parquet has changed; raises StoreDamaged."""
    for _, error in find_manifest_damage(store, metadata=False):
        raise error


def restore_files(store: StorePath, contents: Mapping[str, bytes]) -> list[str]:
    """Write recorded files again where they are damaged and their commit confirms the given bytes.

    A file that holds the given bytes is left alone: then its record is what is damaged.

    Args:
        contents: name inside the store -> bytes that the same inputs give; other recorded files are left alone.

    Raises:
        StoreDamaged: their commit is damaged, or records other bytes.
    """
    records = read_manifest_commit(store)
    restored = []
    for path, error in find_manifest_damage(store):
        name = name_below(store, path)
        if name not in contents or _content(path, MAX_PLAN_BYTES) == contents[name]:
            continue
        if not matches_record(contents[name], (records or {})[name]):
            raise error
        make_folder(path.parent)
        put(path, contents[name])
        restored.append(name)
    return restored


def check_target_bundle(store: StorePath, folder: StorePath) -> None:
    """Compare the target bundle with its commit, byte for byte.

    Args:
        folder: the target bundle, or a local copy of it.

    Raises:
        StoreDamaged: a file is gone.
        StoreDamaged: a file is not the one that was written.
        StoreDamaged: the commit is damaged.
    """
    commit = target_commit_path(store)
    while (content := _content(commit)) is not None:
        error = _bundle_error(commit, folder)
        if error is None:
            return
        if _content(commit) == content:  # else the bundle was given more layers while it was compared
            raise error


def _bundle_error(commit: StorePath, folder: StorePath) -> StoreError | None:
    try:
        files = read_target_commit(commit)
    except FileNotFoundError:
        return None
    for _, error in find_size_damage(folder, files):
        return error
    for name, record in files.items():
        path = folder / name
        if file_crc32(path) != record.crc32:
            return StoreDamaged(
                f"{path} is not the file that was written: its checksum differs from the one in {commit}. "
                "Run `moa-data repair` with --model."
            )
    return None


_RESTORE = "Restore it from a copy, or run `moa-data repair` with --model."
_REPAIR = "Run `moa-data repair`, or the command that made the store: it writes it anew."
