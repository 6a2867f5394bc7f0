"""Writes a store, part by part, each part committed atomically; processes that extract do so beside each other.

Files become durable in this order (each is synced before its rename, and its folder after it)::

    1  store.lock                        locked; held until the process ends, however it ends (``lock``)
    2  codec/basis.safetensors           before the manifest, which holds its sha256
    3  plan.parquet                      before the manifest, which a folder without is an unfinished start
    4  store.json                        now the folder is a store
    5  parts/kv/zarr.json, ...           Zarr metadata of the arrays of all parts
    6  commits/store.json                sizes and checksums of 3 to 5, which are equal to what the inputs give
    7  target.partial/ -> target/        commits/target.json after it, and taken away before a replacement
    8  parts/kv/c.K.0.0.0.0.A.partial    each shard of part K, synced when it is full; A tells the writer
       parts/kv/c.K.0.0.0.0              renamed, and the array's folder synced: whole, but nobody's yet
       commits/part-K.json               now the part exists for readers; 8 again for each part, in any order

In a store of schema version 1, which is continued in that version, 5 belongs to 8: each part has a group of its own.

A commit is written after the files that it lists, and deleted before them: so at every moment what has a commit is
whole. Files that a kill leaves without one are deleted by the next run, which redoes exactly the missing parts.

1 to 6 are done alone, 7 and 8 beside others: the renames and the commit of a part are one step to them, before which
a writer looks for a commit once more. Who comes second leaves the part as it is and deletes its own files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from ..codecs.registry import BASIS_NAME, NEXT_BASIS_NAME, StoreCodec
from ..disk.checking import check_guard, exists
from ..disk.durable import PARTIAL_SUFFIX, disk_full_guard, file_crc32, fsync_directory, walk, write_atomic
from ..documents import open_regular
from ..errors import ManifestInvalid, StoreError, WriteInvalid
from ..names import (
    CODEC_NAME,
    COMMITS_NAME,
    MANIFEST_NAME,
    PARTS_NAME,
    PLAN_NAME,
    PUBLISH_NAME,
    RUNS_NAME,
    TARGET_NAME,
    commit_path,
    manifest_commit_path,
    part_folder,
    target_commit_path,
)
from ..parts.commit import (
    PartCommit,
    find_size_damage,
    read_commits,
    read_part_commit,
    read_target_commit,
    target_commit_json,
)
from ..parts.encoding import EncodePool
from ..parts.grid import ArrayGrid, array_grid_1, zarr_metadata
from ..parts.manifest_commit import find_manifest_damage, metadata_names, write_manifest_commit
from ..parts.plan import check_plan, part_lengths, plan_bytes, read_plan
from ..parts.shard import FileRecord
from ..read.store import read_manifest
from ..schema import StoreManifest
from .arrays import lay_out
from .links import refuse_linked_folders, refuse_links
from .lock import StoreLock, part_slot
from .opening import check_counts, check_same, check_unoccupied, restore, stored_version
from .part import PartPlace, PartWriter, remove_uncommitted

_COMMIT_NAME = re.compile(r"part-(\d+)\.json")


class StoreWriter:
    """A process that writes to a store. Make it with :meth:`create_or_resume` or :meth:`join`, and use it in ``with``.

    Attributes:
        attempt: a name of this writer that no other has; its unfinished files bear it.
        manifest: settings that shape its data.
        plan: all sequences (see ``plan.PLAN_SCHEMA``).
        repaired_parts: parts that had a damaged commit, or lacked files or bytes of it; they are pending again.
    """

    def __init__(
        self, path: Path, manifest: StoreManifest, plan: pa.Table, lock: StoreLock, attempt: str | None = None
    ) -> None:
        self.attempt = attempt or new_attempt()
        self.path = path
        self.manifest = manifest
        self.plan = plan
        self.repaired_parts: tuple[int, ...] = ()
        self._lock = lock
        self._lengths = part_lengths(plan, manifest.alignment_tokens)
        self.codec = StoreCodec.open(manifest, path)
        self._grids: dict[str, ArrayGrid] = {}
        self._committed: set[int] = set()
        self._open_parts: dict[int, int] = {}

    @classmethod
    def create_or_resume(
        cls,
        path: str | os.PathLike[str],
        manifest: StoreManifest,
        plan: pa.Table,
        codec_files: Mapping[str, bytes] | None = None,
        shares: bool = False,
    ) -> StoreWriter:
        """Start a store, or go on with one that was made from the same inputs, in the schema version that it has.

        Args:
            codec_files: what the codec has learned (``StoreCodec.files``), for ``codec/``.
            shares: whether others that share may write parts beside this process, and it beside them. A store of schema
                version 1 is not shared.

        Raises:
            OutputOccupied: the folder holds something else.
            StoreLocked: another process is writing to it, which does not share it.
            LocksUnsupported: its file system has no locks.
            LinkRefused: a symbolic link stands inside it; nothing was changed.
            CheckIncomplete: a file could not be read, so that damage is unknown; nothing was deleted.
            StoreMismatch: it was made from other inputs; names every key that changed.
            PlanInvalid: the plan breaks a rule.
            ManifestInvalid: manifest and plan disagree, or the store's own files are damaged.
            DiskFull: no room for the plan.
        """
        store = Path(path)
        check_plan(plan, manifest.alignment_tokens)
        check_counts(manifest, plan)
        with check_guard(store):
            check_unoccupied(store)
        with disk_full_guard(store):
            store.mkdir(parents=True, exist_ok=True)
        lock = StoreLock.take(store, shares)
        try:
            if not lock.is_alone:
                return cls._beside_others(store, manifest, plan, lock)
            with check_guard(store):
                refuse_links(store)
                is_begun = exists(manifest_commit_path(store)) or exists(store / MANIFEST_NAME)
            if is_begun:
                with check_guard(store):
                    manifest = replace(manifest, schema_version=stored_version(store, manifest))
                with check_guard(store):
                    restore(store, manifest, plan)
                    check_same(store, manifest, plan)
                _write_codec(store, codec_files or {})
            else:
                _write_codec(store, codec_files or {})
                write_atomic(store / PLAN_NAME, plan_bytes(plan))
                # The manifest comes last: without it the folder is an unfinished start, which is begun afresh.
                write_atomic(store / MANIFEST_NAME, manifest.to_json().encode())
            with check_guard(store):
                writer = cls(store, manifest, plan, lock)
            writer._clean()
            writer.lay_out(writer.codec)
            with check_guard(store):
                is_recorded = exists(manifest_commit_path(store)) and not find_manifest_damage(store)
            if not is_recorded:
                writer._record_manifest()  # all files were found equal to what the inputs give
            if shares and not writer._has_part_groups:
                lock.share()
            return writer
        except BaseException:
            lock.close()
            raise

    @classmethod
    def _beside_others(cls, store: Path, manifest: StoreManifest, plan: pa.Table, lock: StoreLock) -> StoreWriter:
        """Join those who write to a store that was made from the same inputs; they keep it in order."""
        with check_guard(store):
            manifest = replace(manifest, schema_version=stored_version(store, manifest))
            check_same(store, manifest, plan)
            writer = cls(store, manifest, plan, lock)
        writer.lay_out(writer.codec)
        return writer

    @classmethod
    def join(cls, path: str | os.PathLike[str], attempt: str | None = None) -> StoreWriter:
        """Write parts of a store beside the process that opened it, from what the store itself says.

        Args:
            attempt: see the attribute; default: a new one.

        Raises:
            StoreLocked: another process is writing to it alone.
            StoreNotFound, ManifestInvalid: it was not begun, or is damaged.
        """
        store = Path(path)
        with check_guard(store):
            manifest = read_manifest(store)
        lock = StoreLock.join(store)
        try:
            with check_guard(store):
                writer = cls(store, manifest, read_plan(store / PLAN_NAME), lock, attempt)
            writer.lay_out(writer.codec)
            return writer
        except BaseException:
            lock.close()
            raise

    @property
    def is_shared(self) -> bool:
        """Whether other processes may write to the store too."""
        return not self._lock.is_alone

    @property
    def joined(self) -> bool:
        """Whether other processes wrote to the store when this one came."""
        return self._lock.joined

    def publishing(self, slot: int) -> AbstractContextManager[None]:
        """Keep others from publishing the same document meanwhile; see ``lock`` for the slots."""
        return self._lock.publishing(slot)

    @property
    def target_path(self) -> Path:
        """The folder of the target bundle."""
        return self.path / TARGET_NAME

    @property
    def has_target(self) -> bool:
        """Whether the target bundle has been committed."""
        return exists(target_commit_path(self.path))

    @contextmanager
    def target(self) -> Iterator[Path]:
        """Write the target bundle: yields a folder to fill, which becomes ``target/`` when the block ends well.

        Raises:
            DiskFull: no room; nothing of the bundle is left behind.
            LinkRefused: there is a symbolic link inside the store.
        """
        partial = self.path / (TARGET_NAME + PARTIAL_SUFFIX)
        refuse_links(self.path, folders=())
        with disk_full_guard(self.target_path):
            try:
                _remove(partial)
                partial.mkdir()
                yield partial
                files = _sync_tree(partial)
                refuse_links(self.path, [partial, self.target_path])
                self._retract(target_commit_path(self.path))
                _replace_tree(partial, self.target_path, files)
            finally:
                _remove(partial)
            write_atomic(target_commit_path(self.path), target_commit_json(files))

    @property
    def n_parts(self) -> int:
        """Planned parts."""
        return len(self._lengths)

    def committed_parts(self) -> list[int]:
        """Return the parts that have a commit, in order, those that others wrote meanwhile included."""
        if self.is_shared:
            with check_guard(self.path):
                names = map(_COMMIT_NAME.fullmatch, os.listdir(self.path / COMMITS_NAME))
                found = {int(name[1]) for name in names if name is not None}
            self._committed = found & set(range(self.n_parts))
        return sorted(self._committed)

    def pending_parts(self) -> list[int]:
        """Return the parts that have no commit yet, in order."""
        committed = set(self.committed_parts())
        return [part for part in range(self.n_parts) if part not in committed]

    def is_pending(self, part: int) -> bool:
        """Whether a part has no commit yet."""
        return not exists(commit_path(self.path, part)) if self.is_shared else part not in self._committed

    def is_claimed(self, part: int) -> bool:
        """Whether a process, which may be this one, writes a part at this moment; only a hint."""
        return self._lock.is_claimed(part)

    def part_sequences(self, part: int) -> pa.Table:
        """Return the plan's rows of one part."""
        mask = self.plan["part"].to_numpy() == part
        return self.plan.filter(pa.array(mask))

    def part(self, part: int, pool: EncodePool | None = None) -> PartWriter:
        """Open a pending part for writing; use it in ``with``.

        Args:
            pool: encodes on threads of its own (see :class:`PartWriter`); default: the caller's thread encodes.

        Raises:
            WriteInvalid: no such part, or it is committed already.
            LinkRefused: there is a symbolic link inside the store.
        """
        if not 0 <= part < self.n_parts:
            raise WriteInvalid(f"The plan has parts 0 to {self.n_parts - 1}, got {part}.")
        if part in self._committed:
            raise WriteInvalid(f"Part {part} is committed already; write only the parts that pending_parts() returns.")
        return self.open_part(part, self.codec, {}, self._committed.add, pool)

    def open_part(
        self,
        part: int,
        codec: StoreCodec,
        existing: Mapping[str, FileRecord],
        on_commit: Callable[[int], None],
        pool: EncodePool | None = None,
    ) -> PartWriter:
        """Open a part for writing fields to it that it lacks.

        Args:
            codec: codec of these fields; :meth:`lay_out` must have written their metadata.
            existing: files that the part's commit lists.
            on_commit: called with the part's number once it is committed.
            pool: as for :meth:`part`.

        Raises:
            WriteInvalid: the part is being written already.
        """
        self._refuse_links(part, codec)
        if part in self._open_parts:
            raise WriteInvalid(f"Part {part} is being written already; open each part once.")
        length = int(self._lengths[part])
        grids, documents = self._grids, dict[str, bytes]()
        if self._has_part_groups:
            grids = {array.name: array_grid_1(array, length) for array in codec.arrays}
            documents = zarr_metadata((array, grids[array.name]) for array in codec.arrays)
        self._open_parts[part] = self._lock.claim(part)
        return PartWriter(
            store=self.path,
            part=part,
            sequences=self.part_sequences(part),
            allocated_tokens=length,
            codec=codec,
            place=PartPlace(
                folder=self._folder(part),
                grids=grids,
                existing=existing,
                documents=documents,
                attempt=self.attempt,
                publishing=partial(self._lock.publishing, part_slot(part)),
            ),
            on_commit=on_commit,
            on_close=self._on_close,
            pool=pool,
        )

    def _on_close(self, part: int) -> None:
        claim = self._open_parts.pop(part)
        if claim >= 0:
            os.close(claim)

    def lay_out(self, codec: StoreCodec) -> None:
        """Write the metadata of a codec's arrays where it is missing; in schema version 1 each part has its own.

        Raises:
            ManifestInvalid: metadata that is there is damaged.
            LinkRefused: a symbolic link stands where it belongs.
            DiskFull: no room.
        """
        if not self._has_part_groups:
            refuse_linked_folders(self.path, self.path / PARTS_NAME, (array.name for array in codec.arrays))
            self._grids |= lay_out(self.path, codec.arrays, self.n_parts, int(self._lengths.max()))

    def drop_part(self, part: int) -> None:
        """Delete a part; it is pending again, and readers do not see it. Links inside the store are refused."""
        self._refuse_links(part, self.codec)
        try:
            files = set(read_part_commit(commit_path(self.path, part)).files)
        except (FileNotFoundError, ManifestInvalid):
            files = set()
        self._retract(commit_path(self.path, part))
        folder = self._folder(part)
        if self._has_part_groups:
            _remove(folder)
        for array in () if self._has_part_groups else self.codec.arrays:
            grid = self._grids[array.name]
            files |= {f"{array.name}/{grid.shard_key(part, number)}" for number in range(grid.shards_per_part)}
        for name in files:
            (folder / name).unlink(missing_ok=True)
        self._committed.discard(part)

    def drop_target(self) -> None:
        """Delete the target bundle: no training until it is written again. Links inside the store are refused."""
        refuse_links(self.path, [self.target_path])
        self._retract(target_commit_path(self.path))
        _remove(self.target_path)

    def replace_manifest(self, manifest: StoreManifest) -> None:
        """Replace store.json by one whose files all exist already.

        The old one's commit is deleted first and the new one's written last: a store without a commit is read
        unchecked, so that at every moment readers find the old manifest or the new one.

        Raises:
            DiskFull: no room; the store is the old one, or the new one without its commit until it is opened again.
        """
        if manifest != self.manifest:
            refuse_links(self.path, folders=())
            self._retract(manifest_commit_path(self.path))
            write_atomic(self.path / MANIFEST_NAME, manifest.to_json().encode())
            self.manifest, self.codec = manifest, StoreCodec.open(manifest, self.path)
            self.lay_out(self.codec)
            self._record_manifest()
            name_next_basis(self.path, manifest)

    def record_run(self, record: Mapping[str, Any]) -> Path:
        """Write a record of this run (command, versions, timings) to ``runs/``.

        Args:
            record: anything JSON holds; it shapes no data.

        Returns:
            The file's path, named after the time in UTC.
        """
        refuse_links(self.path, folders=())
        folder = self.path / RUNS_NAME
        folder.mkdir(exist_ok=True)
        path = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z.json"
        write_atomic(path, (json.dumps(record, indent=2, sort_keys=True, default=str) + "\n").encode())
        return path

    def close(self) -> None:
        """Let other processes write to the store."""
        self._lock.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record_manifest(self) -> None:
        arrays = [] if self._has_part_groups else [array.name for array in self.codec.arrays]
        write_manifest_commit(self.path, metadata_names(arrays) if arrays else ())

    @property
    def _has_part_groups(self) -> bool:
        return self.manifest.schema_version == 1

    def _folder(self, part: int) -> Path:
        return part_folder(self.path, part, self.manifest.schema_version)

    def _refuse_links(self, part: int, codec: StoreCodec) -> None:
        """Refuse symbolic links where a part's files are written or deleted."""
        if self._has_part_groups:
            refuse_links(self.path, [self._folder(part)])
        else:
            refuse_linked_folders(self.path, self._folder(part), (array.name for array in codec.arrays))

    def _retract(self, commit: Path) -> None:
        """Delete a commit durably, before the files that it lists change."""
        commit.unlink(missing_ok=True)
        fsync_directory(self.path / COMMITS_NAME)

    def _clean(self) -> None:
        """Delete what a kill left behind; make parts with lost files pending again.

        Everything is checked before the first deletion, so that a failed check deletes nothing.
        """
        with disk_full_guard(self.path):
            for name in (PARTS_NAME, COMMITS_NAME):
                (self.path / name).mkdir(exist_ok=True)
        with check_guard(self.path):
            has_damaged_target = not self._target_is_whole()
            commits = self._commits()
        self._remove_partials()
        if has_damaged_target:
            target_commit_path(self.path).unlink()
        name_next_basis(self.path, self.manifest)
        for part in (part for part, commit in commits.items() if commit is None):
            commit_path(self.path, part).unlink()
        self._committed |= {part for part, commit in commits.items() if commit is not None}
        self._remove_unlisted(commit for commit in commits.values() if commit is not None)
        self.repaired_parts = tuple(part for part, commit in commits.items() if commit is None)

    def _remove_partials(self) -> None:
        """Delete unfinished documents, and the file under whose locks parts were published."""
        for folder in (self.path, self.path / COMMITS_NAME, self.path / RUNS_NAME):
            for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
                _remove(leftover)
        (self.path / PUBLISH_NAME).unlink(missing_ok=True)

    def sweep(self) -> bool:
        """Stop sharing the store, and delete what writers that were killed or came second have left behind.

        Returns:
            Whether it was done; not while others write, of whom the last one does it. Nothing may be written after it.
        """
        if not self._lock.try_alone():
            return False
        with check_guard(self.path):
            commits = read_commits(self.path, range(self.n_parts))
        self._committed = set(commits)
        self._remove_partials()
        self._remove_unlisted(commits.values())
        return True

    def remove_attempt(self, attempt: str) -> None:
        """Delete the unfinished shards of a writer that is dead."""
        for array in self.codec.arrays:
            for leftover in (self.path / PARTS_NAME / array.name).glob(f"*.{attempt}{PARTIAL_SUFFIX}"):
                leftover.unlink(missing_ok=True)

    def remove_uncommitted(self) -> None:
        """Delete files of parts that no commit lists; call it while no part is being written."""
        self._remove_unlisted(read_part_commit(commit_path(self.path, part)) for part in self._committed)

    def _remove_unlisted(self, commits: Iterable[PartCommit]) -> None:
        parts, kept = self.path / PARTS_NAME, set[str]()
        for commit in commits:
            below = self._folder(commit.part).relative_to(parts)
            kept |= {f"{below}/{name}" for name in commit.files} if below.parts else commit.files.keys()
        arrays = {name.rpartition("/")[0] for name in kept} | {array.name for array in self.codec.arrays}
        if not self._has_part_groups:
            kept |= {name.removeprefix(f"{PARTS_NAME}/") for name in metadata_names(arrays)}
        remove_uncommitted(parts, kept)

    def _commits(self) -> dict[int, PartCommit | None]:
        """Return the commits of planned parts; None for one that is damaged, or does not match plan or files."""
        part_of = self.plan["part"].to_numpy()
        n_sequences = np.bincount(part_of, minlength=self.n_parts)
        n_tokens = np.bincount(part_of, self.plan["n_tokens"].to_numpy(), self.n_parts).astype(np.int64)
        commits: dict[int, PartCommit | None] = {}
        for part in range(self.n_parts):
            if not exists(commit_path(self.path, part)):
                continue
            try:
                commit = read_part_commit(commit_path(self.path, part))
            except ManifestInvalid:
                commits[part] = None
                continue
            planned = (part, n_sequences[part], n_tokens[part], self._lengths[part])
            found = (commit.part, commit.n_sequences, commit.n_tokens, commit.allocated_tokens)
            is_whole = found == planned and not find_size_damage(self._folder(part), commit.files)
            commits[part] = commit if is_whole else None
        return commits

    def _target_is_whole(self) -> bool:
        """Whether the target bundle has no commit, or all files that its commit lists."""
        try:
            return not self.has_target or not find_size_damage(
                self.target_path, read_target_commit(target_commit_path(self.path))
            )
        except ManifestInvalid:
            return False


def new_attempt() -> str:
    """Return a name for a writer that no other has."""
    return secrets.token_hex(4)


def name_next_basis(store: Path, manifest: StoreManifest) -> None:
    """Rename the basis that was learned for added fields, once store.json names these fields."""
    path = store / CODEC_NAME / NEXT_BASIS_NAME
    if not exists(path):
        return
    with open(open_regular(path), "rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got == manifest.codec.get("basis_sha256"):
        os.replace(path, path.with_name(BASIS_NAME))
        fsync_directory(path.parent)


def _write_codec(store: Path, files: Mapping[str, bytes]) -> None:
    """Write what the codec has learned, unless it is there; the manifest, written later, holds its hash."""
    for name, content in files.items():
        path = store / CODEC_NAME / name
        path.parent.mkdir(exist_ok=True)
        if not exists(path) or path.read_bytes() != content:
            write_atomic(path, content)


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
        _remove(target)
        os.rename(source, target)
        fsync_directory(target.parent)
        return
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, target / name)
    remove_uncommitted(target, files)
    for root, _, _ in walk(target):
        fsync_directory(root)


def _remove(path: Path) -> None:
    """Delete a file or folder if it is there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError) as error:
        if not path.is_dir():
            raise StoreError(f"Cannot delete {path}: {error}. Delete it by hand and run again.") from error
        shutil.rmtree(path)
