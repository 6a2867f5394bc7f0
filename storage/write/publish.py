"""How the files of a writer become those of a store: in a folder by renames, which are synced.

``bucket`` does the same in an object store, which has neither renames nor locks. Everything else about writing does
not know which of them it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from ...errors import StoreDamaged, StoreError
from ...files import PARTIAL_SUFFIX, disk_full_guard, fsync_directory, walk, write_atomic
from ..backend import exists, file_crc32
from ..commit import PartCommit, read_part_commit, target_commit_json
from ..paths import RemotePath, StorePath
from ..schema import (
    CODEC_NAME,
    COMMITS_NAME,
    PARTS_NAME,
    PUBLISH_NAME,
    RUNS_NAME,
    TARGET_NAME,
    commit_path,
    is_known,
    target_commit_path,
)
from ..shard import FileRecord, MakeDurable, partial_name, sync_file
from .lock import StoreLock


class PartPublisher(Protocol):
    """Where the shards of one part go while they are written, and how they become the part's."""

    def path_of(self, name: str) -> Path:
        """Return the local file in which a shard, called as its commit will list it, is written."""
        ...

    def make_durable(self, name: str) -> MakeDurable:
        """Return what makes that file durable once it is written."""
        ...

    def publish(self, commit: PartCommit, shards: Collection[str]) -> tuple[PartCommit, bool]:
        """Make the part exist.

        Args:
            shards: the files of the commit that this writer wrote.

        Returns:
            The part's commit, and whether it is this one; else another writer was first, and its commit stays.
        """
        ...

    def withdraw(self, shards: Collection[str]) -> bool:
        """Delete what was published without a commit; returns whether there is a commit after all."""
        ...


class Publisher(Protocol):
    """A store that is written to.

    Attributes:
        lock: keeps other processes out; None where there are no locks, and commits alone decide between writers.
        attempt: a name of the writer that no other has.
    """

    lock: StoreLock | None
    attempt: str

    @property
    def scratch_path(self) -> Path:
        """A local folder for files on their way; a folder that is a store is its own."""
        ...

    @property
    def target_path(self) -> Path:
        """A local folder with the files of the target bundle."""
        ...

    def part(self, part: int, existing: Mapping[str, FileRecord]) -> PartPublisher:
        """Return the publisher of a part whose commit, where fields are added, lists ``existing`` already."""
        ...

    def bundle(self) -> AbstractContextManager[Path]:
        """Yield a local folder to fill, which becomes the target bundle, with its commit, when the block ends well."""
        ...

    def drop_bundle(self) -> None:
        """Delete the target bundle."""
        ...

    def remove_unfinished(self) -> None:
        """Delete documents that a kill left unfinished, or finish them."""
        ...

    def remove_unlisted(self, kept: Collection[str]) -> None:
        """Delete files below ``parts/`` but ``kept``, as far as no writer can commit them any more."""
        ...

    def remove_attempt(self, attempt: str) -> None:
        """Delete the unfinished shards of a writer that is dead."""
        ...

    def close(self) -> None:
        """Free the lock and delete what is local."""
        ...


@dataclass
class FolderPart:
    """A part that is written to a folder.

    Attributes:
        attempt: tells the files of this writer from those of others that write the same part.
        publishing: keeps others from publishing the part meanwhile.
    """

    store: Path
    part: int
    existing: Mapping[str, FileRecord]
    attempt: str
    publishing: Callable[[], AbstractContextManager[None]]
    _has_renamed: bool = field(default=False, init=False)

    def path_of(self, name: str) -> Path:  # noqa: D102  (PartPublisher)
        return self.store / PARTS_NAME / partial_name(name, self.attempt)

    def make_durable(self, name: str) -> MakeDurable:  # noqa: D102
        return sync_file

    def publish(self, commit: PartCommit, shards: Collection[str]) -> tuple[PartCommit, bool]:  # noqa: D102
        path = commit_path(self.store, self.part)
        with self.publishing():
            if exists(path) and (other := read_part_commit(path)).files != self.existing:
                return other, False
            self._has_renamed = True
            finals = [self.store / PARTS_NAME / name for name in shards]
            for name, final in zip(shards, finals, strict=True):
                os.rename(self.path_of(name), final)
            for folder in dict.fromkeys(final.parent for final in finals):
                fsync_directory(folder)
            write_atomic(path, commit.to_json())
        return commit, True

    def withdraw(self, shards: Collection[str]) -> bool:  # noqa: D102
        if not self._has_renamed:
            return False  # files of these names may be another writer's
        with self.publishing():
            try:
                path = commit_path(self.store, self.part)
                committed = read_part_commit(path).files if exists(path) else {}
            except (OSError, StoreDamaged):
                return False  # unknown; the next run that opens the store deletes what no commit lists
            if committed and committed != self.existing:
                return True  # an interrupt can arrive right after the commit was written
            for name in shards:
                (self.store / PARTS_NAME / name).unlink(missing_ok=True)
            return False


class FolderPublisher:
    """A folder that a store is written to."""

    def __init__(self, store: Path, lock: StoreLock, attempt: str) -> None:
        self.store, self.attempt = store, attempt
        self.lock: StoreLock | None = lock
        self._publishing = lock.publishing

    @property
    def scratch_path(self) -> Path:  # noqa: D102  (Publisher)
        return self.store

    @property
    def target_path(self) -> Path:  # noqa: D102
        return self.store / TARGET_NAME

    def part(self, part: int, existing: Mapping[str, FileRecord]) -> FolderPart:  # noqa: D102
        return FolderPart(self.store, part, existing, self.attempt, lambda: self._publishing(part))

    @contextmanager
    def bundle(self) -> Iterator[Path]:  # noqa: D102
        unfinished = self.store / (TARGET_NAME + PARTIAL_SUFFIX)
        with disk_full_guard(self.target_path):
            try:
                remove_folder(unfinished)
                unfinished.mkdir()
                yield unfinished
                files = _sync_tree(unfinished)
                self._retract_target()
                _replace_tree(unfinished, self.target_path, files)
            finally:
                remove_folder(unfinished)
            write_atomic(target_commit_path(self.store), target_commit_json(files))

    def _retract_target(self) -> None:
        target_commit_path(self.store).unlink(missing_ok=True)
        fsync_directory(self.store / COMMITS_NAME)

    def drop_bundle(self) -> None:  # noqa: D102
        self._retract_target()
        remove_folder(self.target_path)

    def remove_unfinished(self) -> None:
        """Delete unfinished documents, and the file whose bytes were locked while parts were published."""
        for folder in (self.store, *(self.store / name for name in (COMMITS_NAME, RUNS_NAME, CODEC_NAME))):
            for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
                remove_folder(leftover)
        (self.store / PUBLISH_NAME).unlink(missing_ok=True)

    def remove_unlisted(self, kept: Collection[str]) -> None:  # noqa: D102
        _remove_others(self.store / PARTS_NAME, kept)

    def remove_attempt(self, attempt: str) -> None:
        """Delete the unfinished shards of a writer that is dead; after a rename they do not bear its name."""
        for leftover in (self.store / PARTS_NAME).rglob(f"*.{attempt}{PARTIAL_SUFFIX}"):
            leftover.unlink(missing_ok=True)

    def close(self) -> None:  # noqa: D102
        if self.lock is not None:
            self.lock.close()


def refuse_links(store: StorePath) -> None:
    """Refuse symbolic links inside a store: what is written or deleted through one lies elsewhere.

    Names that no store has are passed over, as no writer touches them; the store's folder itself may be a link.
    """
    if isinstance(store, RemotePath):
        return
    inside = [os.fspath(store)]
    while inside:
        folder = inside.pop()
        is_top = folder == os.fspath(store)
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_top and not is_known(entry.name):
                    continue
                if entry.is_symlink():
                    raise StoreDamaged(
                        f"{entry.path} is a symbolic link to {os.readlink(entry.path)!r}, and nothing inside a store "
                        "is written or deleted through a link. Put the files themselves in its place, or move the "
                        "whole store and link its folder."
                    )
                if entry.is_dir(follow_symlinks=False):
                    inside.append(entry.path)


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
    _remove_others(target, files)
    for root, _, _ in walk(target):
        fsync_directory(root)


def _remove_others(folder: Path, files: Collection[str]) -> None:
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
