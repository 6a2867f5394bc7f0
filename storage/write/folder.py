"""Writes to a folder: files get their names by renames, which are synced, and locks keep processes apart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from ...errors import StoreDamaged, StoreError
from ..disk.checking import exists
from ..disk.durable import (
    PARTIAL_SUFFIX,
    disk_full_guard,
    file_crc32,
    fsync_directory,
    walk,
    write_atomic,
    write_file,
)
from ..names import (
    COMMITS_NAME,
    PARTS_NAME,
    PUBLISH_NAME,
    RUNS_NAME,
    TARGET_NAME,
    commit_path,
    part_folder,
    target_commit_path,
)
from ..parts.commit import PartCommit, read_part_commit, target_commit_json
from ..parts.grid import ArrayGrid
from ..parts.shard import FileRecord, Keep, partial_name, record_of, sync_file
from ..schema import SCHEMA_VERSION
from .links import refuse_links
from .lock import StoreLock, part_slot


@dataclass
class FolderPart:
    """The place of a part in a folder (``site.PartPlace``).

    Attributes:
        folder: folder that the names in the part's commit are relative to.
        documents: in schema version 1 the metadata of the part's own group, name -> content; else empty.
        attempt: tells the files of this writer from those of others that write the same part, until they are named.
        publishing: keeps others from publishing the part meanwhile.
    """

    store: Path
    part: int
    folder: Path
    grids: Mapping[str, ArrayGrid]
    existing: Mapping[str, FileRecord]
    documents: Mapping[str, bytes]
    attempt: str
    publishing: Callable[[], AbstractContextManager[None]]
    _has_named: bool = field(default=False, init=False)

    def write_documents(self) -> dict[str, FileRecord]:  # noqa: D102  (site.PartPlace)
        files = dict(self.existing)
        for name, content in self.documents.items():
            record = record_of(content)
            if files.setdefault(name, record) != record:
                raise StoreError(f"Part {self.part}: {name} would change; extract to another folder.")
            if name not in self.existing:
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, content)
        return files

    def path_of(self, name: str) -> Path:  # noqa: D102
        return self.folder / partial_name(name, self.attempt)

    def keep(self, name: str) -> Keep:  # noqa: D102
        return sync_file

    def publish(self, commit: PartCommit, shards: Collection[str]) -> tuple[PartCommit, bool]:  # noqa: D102
        with self.publishing():
            if (other := self._other_commit()) is not None:
                return other, False
            self._has_named = True
            for name in shards:
                os.rename(self.path_of(name), self.folder / name)
            self._sync_names(shards)
            write_atomic(commit_path(self.store, self.part), commit.to_json())
        return commit, True

    def _other_commit(self) -> PartCommit | None:
        """Return the part's commit if it is no longer the one that this writer began with."""
        path = commit_path(self.store, self.part)
        if not exists(path):
            return None
        commit = read_part_commit(path)
        return None if commit.files == self.existing else commit

    def _sync_names(self, shards: Collection[str]) -> None:
        """Make the new names durable: one folder for each array, in schema version 1 all folders of the part."""
        if self.documents:
            folders = [root for root, _, _ in walk(self.folder)] + [self.folder.parent]
        else:
            folders = list(dict.fromkeys((self.folder / name).parent for name in shards))
        for path in folders:
            fsync_directory(path)

    def withdraw(self, shards: Collection[str]) -> bool:  # noqa: D102
        if not self._has_named and not self.documents:
            return False  # names that others may have given are not this writer's
        with self.publishing():
            return self._unname(shards)

    def _unname(self, shards: Collection[str]) -> bool:
        """Delete the files that have got their names, unless a commit lists them; returns whether one does."""
        try:
            path = commit_path(self.store, self.part)
            committed = read_part_commit(path).files if exists(path) else {}
        except (OSError, StoreDamaged):
            return False  # unknown; the next run that opens the store deletes what no commit lists
        if committed and committed != self.existing:
            # An interrupt can arrive right after the commit was written: the part is finished and stays.
            return True
        for name in shards:
            (self.folder / name).unlink(missing_ok=True)
        if self.documents:
            remove_uncommitted(self.folder, committed)
            if not committed:
                self.folder.rmdir()
        return False


class FolderSite:
    """A folder that a store is written to (``site.Site``)."""

    def __init__(self, store: Path, hold: StoreLock, attempt: str) -> None:
        self.store, self.hold, self.attempt = store, hold, attempt

    @property
    def scratch_path(self) -> Path:  # noqa: D102
        return self.store

    @property
    def target_path(self) -> Path:  # noqa: D102  (site.Site)
        return self.store / TARGET_NAME

    def part(  # noqa: D102
        self,
        part: int,
        grids: Mapping[str, ArrayGrid],
        existing: Mapping[str, FileRecord],
        documents: Mapping[str, bytes],
    ) -> FolderPart:
        folder = part_folder(self.store, part, 1 if documents else SCHEMA_VERSION)
        publishing = partial(self.hold.publishing, part_slot(part))
        return FolderPart(self.store, part, folder, grids, existing, documents, self.attempt, publishing)

    @contextmanager
    def bundle(self) -> Iterator[Path]:  # noqa: D102
        unfinished = self.store / (TARGET_NAME + PARTIAL_SUFFIX)
        refuse_links(self.store, folders=())
        with disk_full_guard(self.target_path):
            try:
                remove_folder(unfinished)
                unfinished.mkdir()
                yield unfinished
                files = _sync_tree(unfinished)
                refuse_links(self.store, [unfinished, self.target_path])
                self._retract_target()
                _replace_tree(unfinished, self.target_path, files)
            finally:
                remove_folder(unfinished)
            write_atomic(target_commit_path(self.store), target_commit_json(files))

    def _retract_target(self) -> None:
        target_commit_path(self.store).unlink(missing_ok=True)
        fsync_directory(self.store / COMMITS_NAME)

    def drop_bundle(self) -> None:  # noqa: D102
        refuse_links(self.store, [self.target_path])
        self._retract_target()
        remove_folder(self.target_path)

    def remove_unfinished(self) -> None:
        """Delete unfinished documents, and the file under whose locks parts were published."""
        for folder in (self.store, self.store / COMMITS_NAME, self.store / RUNS_NAME):
            for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
                remove_folder(leftover)
        (self.store / PUBLISH_NAME).unlink(missing_ok=True)

    def remove_unlisted(self, kept: Collection[str]) -> None:
        """Delete everything below ``parts/`` but these files; call it while no part is being written."""
        remove_uncommitted(self.store / PARTS_NAME, kept)

    def remove_attempt(self, attempt: str) -> None:
        """Delete the unfinished shards of a writer that is dead; those that it has named are not known by it."""
        for leftover in (self.store / PARTS_NAME).rglob(f"*.{attempt}{PARTIAL_SUFFIX}"):
            leftover.unlink(missing_ok=True)

    def close(self) -> None:  # noqa: D102
        self.hold.close()


def _sync_tree(folder: Path) -> dict[str, FileRecord]:
    """Sync every file and folder below ``folder``; return the files' sizes and checksums by relative path."""
    files: dict[str, FileRecord] = {}
    for root, folders, names in walk(folder):
        folders.sort()
        for name in sorted(names):
            path = root / name
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = FileRecord(path.stat().st_size, file_crc32(path))
        fsync_directory(root)
    return files


def _replace_tree(source: Path, target: Path, files: Collection[str]) -> None:
    """Replace the files of a folder by those of a synced one, one at a time, so that none is ever missing."""
    if not target.is_dir():
        remove_folder(target)
        os.rename(source, target)
        fsync_directory(target.parent)
        return
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, target / name)
    remove_uncommitted(target, files)
    for root, _, _ in walk(target):
        fsync_directory(root)


def remove_uncommitted(folder: Path, files: Collection[str]) -> None:
    """Delete everything below ``folder`` but these files, given by their relative paths."""
    holding = {PurePosixPath(way) for way in {name.rpartition("/")[0] for name in files}}
    kept_folders = {parent.as_posix() for way in holding for parent in (way, *way.parents)}
    for root, folders, names in walk(folder):
        below = root.relative_to(folder).as_posix()
        prefix = "" if below == "." else f"{below}/"
        for name in [name for name in folders if prefix + name not in kept_folders]:
            shutil.rmtree(root / name)
            folders.remove(name)
        for name in names:
            if prefix + name not in files:
                (root / name).unlink()


def remove_folder(path: Path) -> None:
    """Delete a file or folder if it is there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError) as error:
        if not path.is_dir():
            raise StoreError(f"Cannot delete {path}: {error}. Delete it by hand and run again.") from error
        shutil.rmtree(path)
