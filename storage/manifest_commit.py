"""Commits of the files that are read once, when a store is opened: store.json, plan.parquet and the target bundle.

``commits/store.json`` holds the sizes and checksums of store.json, plan.parquet and (from schema version 2 on) the
metadata of the arrays, so that no flipped byte in them goes unnoticed. It is the manifest's commit, as
``commits/target.json`` is that of target/.

It is written when a store is begun, or when a resumed extraction has found all files equal to what its inputs give.
Stores without one are read unchecked.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import PurePosixPath

from ..errors import StoreDamaged, StoreError
from ..files import MAX_JSON_BYTES
from .backend import MISSING, exists, file_crc32, make_folder, put, read_file
from .commit import find_size_damage, read_file_records, read_target_commit
from .paths import RemotePath, StorePath, name_below
from .plan import MAX_PLAN_BYTES
from .schema import (
    COMMITS_NAME,
    MANIFEST_NAME,
    PARTS_NAME,
    PLAN_NAME,
    ZARR_NAME,
    manifest_commit_path,
    publication_path,
    target_commit_path,
)
from .shard import FileRecord, record_of

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
        if error is None or (isinstance(commit, RemotePath) and exists(publication_path(commit))):
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
