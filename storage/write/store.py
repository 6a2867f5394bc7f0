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

In a bucket the order is the same, without 1 and without renames, and nothing is done alone: each document of 2 to 6 is
created once, by whoever comes first, and all others compare it with their own (``bucket``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from ...errors import StoreDamaged, StoreError, StoreMismatch
from ..codecs.registry import BASIS_NAME, NEXT_BASIS_NAME, StoreCodec
from ..disk.checking import MISSING, check_guard, exists
from ..disk.durable import (
    disk_full_guard,
    fsync_directory,
    make_folder,
    remove_file,
    replace_file,
    write_atomic,
    write_new,
)
from ..disk.files import blocks_of, names_in, open_path, reads_of, sizes_of
from ..names import (
    CODEC_NAME,
    COMMITS_NAME,
    MANIFEST_NAME,
    PARTS_NAME,
    PLAN_NAME,
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
)
from ..parts.encoding import EncodePool
from ..parts.grid import ArrayGrid, array_grid_1, zarr_metadata
from ..parts.manifest_commit import find_manifest_damage, metadata_names, write_manifest_commit
from ..parts.plan import check_plan, part_lengths, plan_bytes, read_plan
from ..parts.shard import FileRecord, new_attempt
from ..paths import RemotePath, StorePath, name_below
from ..read.store import read_manifest
from ..schema import StoreManifest
from .arrays import lay_out
from .bucket import BucketSite, changed_meanwhile
from .folder import FolderSite, remove_folder
from .links import refuse_linked_folders, refuse_links
from .lock import StoreLock
from .opening import check_counts, check_same, check_same_plan, check_unoccupied, restore
from .part import PartWriter
from .site import Site

_COMMIT_NAME = re.compile(r"part-(\d+)\.json")


class StoreWriter:
    """A process that writes to a store. Make it with :meth:`create_or_resume` or :meth:`join`, and use it in ``with``.

    Attributes:
        attempt: a name of this writer that no other has; its unfinished files bear it.
        manifest: settings that shape its data.
        plan: all sequences (see ``plan.PLAN_SCHEMA``).
        repaired_parts: parts that had a damaged commit, or lacked files or bytes of it; they are pending again.
    """

    def __init__(self, path: StorePath, manifest: StoreManifest, plan: pa.Table, site: Site) -> None:
        self.attempt = site.attempt
        self.path = path
        self.manifest = manifest
        self.plan = plan
        self.repaired_parts: tuple[int, ...] = ()
        self._site = site
        self._lengths = part_lengths(plan, manifest.alignment_tokens)
        self.codec = StoreCodec.open(manifest, path)
        self._grids: dict[str, ArrayGrid] = {}
        self._committed: set[int] = set()
        self._damaged: set[int] = set()
        self._open_parts: dict[int, int] = {}

    @classmethod
    def create_or_resume(
        cls,
        path: str | os.PathLike[str] | StorePath,
        manifest: StoreManifest,
        plan: pa.Table,
        codec_files: Mapping[str, bytes] | None = None,
        shares: bool = False,
    ) -> StoreWriter:
        """Start a store, or go on with one that was made from the same inputs, in the schema version that it has.

        Args:
            path: the store's folder, or its URL (``s3://``, ``gs://``, ``az://``, ``file://``).
            codec_files: what the codec has learned (``StoreCodec.files``), for ``codec/``.
            shares: whether others that share may write parts beside this process, and it beside them. A store of schema
                version 1 is not shared, one in a bucket always.

        Raises:
            OutputOccupied: the folder holds something else.
            StoreLocked: another process is writing to it, which does not share it.
            StorageUnavailable: its file system has no locks.
            StoreDamaged: a symbolic link stands inside it; nothing was changed.
            StorageUnavailable: a file could not be read, so that damage is unknown; nothing was deleted.
            StoreMismatch: it was made from other inputs; names every key that changed.
            StoreDamaged: the plan breaks a rule.
            StoreDamaged: manifest and plan disagree, or the store's own files are damaged.
            StorageUnavailable: no room for the plan.
        """
        store = open_path(path)
        check_plan(plan, manifest.alignment_tokens)
        check_counts(manifest, plan)
        with check_guard(store):
            check_unoccupied(store)
        with disk_full_guard(store):
            make_folder(store)
        site = _site(store, new_attempt(), shares)
        try:
            if isinstance(store, Path) and not site.hold.is_alone:
                return cls._beside_others(store, manifest, plan, site)
            with check_guard(store):
                refuse_links(store)
                is_begun = exists(manifest_commit_path(store)) or exists(store / MANIFEST_NAME)
            if is_begun:
                with check_guard(store):
                    restore(store, manifest, plan)
                    check_same(store, manifest, plan)
                _write_codec(store, codec_files or {})
            else:
                site.hold.joined = False
                _begin(store, manifest, plan, codec_files or {})
            with check_guard(store):
                writer = cls(store, manifest, plan, site)
            writer._clean()
            writer.lay_out(writer.codec)
            with check_guard(store):
                is_recorded = exists(manifest_commit_path(store)) and not find_manifest_damage(store)
            if not is_recorded:
                writer._record_manifest()  # all files were found equal to what the inputs give
            if shares and not writer._has_part_groups:
                site.hold.share()
            return writer
        except BaseException:
            site.close()
            raise

    @classmethod
    def _beside_others(cls, store: StorePath, manifest: StoreManifest, plan: pa.Table, site: Site) -> StoreWriter:
        """Join those who write to a store that was made from the same inputs; they keep it in order."""
        with check_guard(store):
            check_same(store, manifest, plan)
            writer = cls(store, manifest, plan, site)
        writer.lay_out(writer.codec)
        return writer

    @classmethod
    def join(cls, path: str | os.PathLike[str] | StorePath, attempt: str | None = None) -> StoreWriter:
        """Write parts of a store beside the process that opened it, from what the store itself says.

        Args:
            attempt: see the attribute; default: a new one.

        Raises:
            StoreLocked: another process is writing to it alone.
            StoreNotFound, StoreDamaged: it was not begun, or is damaged.
        """
        store = open_path(path)
        with check_guard(store):
            manifest = read_manifest(store)
        site = _joined_site(store, attempt or new_attempt())
        try:
            with check_guard(store):
                writer = cls(store, manifest, read_plan(store / PLAN_NAME), site)
            writer.lay_out(writer.codec)
            return writer
        except BaseException:
            site.close()
            raise

    @property
    def is_shared(self) -> bool:
        """Whether other processes may write to the store too."""
        return not self._site.hold.is_alone

    @property
    def joined(self) -> bool:
        """Whether other processes wrote to the store when this one came."""
        return self._site.hold.joined

    def publishing(self, slot: int) -> AbstractContextManager[None]:
        """Keep others from publishing the same document meanwhile; see ``lock`` for the slots."""
        return self._site.hold.publishing(slot)

    @property
    def target_path(self) -> Path:
        """A local folder with the target bundle: the store's own, or a copy of what is in a bucket."""
        return self._site.target_path

    @property
    def scratch_path(self) -> Path:
        """A local folder for files that only this process and its workers need: the store's, or a temporary one."""
        return self._site.scratch_path

    @property
    def has_target(self) -> bool:
        """Whether the target bundle has been committed."""
        return exists(target_commit_path(self.path))

    def target(self) -> AbstractContextManager[Path]:
        """Write the target bundle: yields a folder to fill, which becomes ``target/`` when the block ends well.

        Raises:
            StorageUnavailable: no room; nothing of the bundle is left behind.
            StoreDamaged: there is a symbolic link inside the store.
        """
        return self._site.bundle()

    @property
    def n_parts(self) -> int:
        """Planned parts."""
        return len(self._lengths)

    def committed_parts(self) -> list[int]:
        """Return the parts that have a commit, in order, those that others wrote meanwhile included."""
        if self.is_shared:
            with check_guard(self.path):
                names = map(_COMMIT_NAME.fullmatch, names_in(self.path / COMMITS_NAME))
                found = {int(name[1]) for name in names if name is not None}
            # The list of a bucket may lack what was committed just now.
            known = self._committed if isinstance(self.path, RemotePath) else set[int]()
            self._committed = (found | known) & set(range(self.n_parts))
        return sorted(self._committed - self._damaged)

    def pending_parts(self) -> list[int]:
        """Return the parts that have no commit yet or are to be replaced, in order."""
        committed = set(self.committed_parts())
        return [part for part in range(self.n_parts) if part not in committed]

    def is_pending(self, part: int) -> bool:
        """Whether a part has no commit yet or is to be replaced."""
        if part in self._damaged:
            return True
        return not exists(commit_path(self.path, part)) if self.is_shared else part not in self._committed

    def is_claimed(self, part: int) -> bool:
        """Whether a process, which may be this one, writes a part at this moment; only a hint."""
        return self._site.hold.is_claimed(part)

    def part_sequences(self, part: int) -> pa.Table:
        """Return the plan's rows of one part."""
        mask = self.plan["part"].to_numpy() == part
        return self.plan.filter(pa.array(mask))

    def part(self, part: int, pool: EncodePool | None = None) -> PartWriter:
        """Open a pending part for writing; use it in ``with``.

        Args:
            pool: encodes on threads of its own (see :class:`PartWriter`); default: the caller's thread encodes.

        Raises:
            StoreError: no such part, or it is committed already.
            StoreDamaged: there is a symbolic link inside the store.
        """
        if not 0 <= part < self.n_parts:
            raise StoreError(f"The plan has parts 0 to {self.n_parts - 1}, got {part}.")
        if part in self._damaged:
            if exists(commit_path(self.path, part)):
                self.drop_part(part)
            # Else another repair of a bucket has dropped it, and may be copying its own shards there.
            self._damaged.discard(part)
            self._committed.discard(part)
        if part in self._committed:
            raise StoreError(f"Part {part} is committed already; write only the parts that pending_parts() returns.")
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
            StoreError: the part is being written already.
        """
        self._refuse_links(part, codec)
        if part in self._open_parts:
            raise StoreError(f"Part {part} is being written already; open each part once.")
        length = int(self._lengths[part])
        grids, documents = self._grids, dict[str, bytes]()
        if self._has_part_groups:
            grids = {array.name: array_grid_1(array, length) for array in codec.arrays}
            documents = zarr_metadata((array, grids[array.name]) for array in codec.arrays)
        self._open_parts[part] = self._site.hold.claim(part)
        return PartWriter(
            store=self.path,
            part=part,
            sequences=self.part_sequences(part),
            allocated_tokens=length,
            codec=codec,
            place=self._site.part(part, grids, existing, documents),
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
            StoreDamaged: metadata that is there is damaged.
            StoreDamaged: a symbolic link stands where it belongs.
            StorageUnavailable: no room.
        """
        if not self._has_part_groups:
            refuse_linked_folders(self.path, self.path / PARTS_NAME, (array.name for array in codec.arrays))
            self._grids |= lay_out(self.path, codec.arrays, self.n_parts, int(self._lengths.max()))

    def replace_parts(self, parts: Iterable[int]) -> None:
        """Make damaged parts pending; each is kept until :meth:`part` opens it, so that a stop loses at most that."""
        self._damaged |= self._committed & set(parts)

    def drop_part(self, part: int) -> None:
        """Delete a part; it is pending again, and readers do not see it. Links inside the store are refused."""
        self._refuse_links(part, self.codec)
        try:
            files = set(read_part_commit(commit_path(self.path, part)).files)
        except (FileNotFoundError, StoreDamaged):
            files = set()
        self._retract(commit_path(self.path, part))
        folder = self._folder(part)
        if self._has_part_groups and isinstance(folder, Path):
            remove_folder(folder)
        for array in () if self._has_part_groups else self.codec.arrays:
            grid = self._grids[array.name]
            files |= {f"{array.name}/{grid.shard_key(part, number)}" for number in range(grid.shards_per_part)}
        for name in files:
            remove_file(folder / name)
        self._committed.discard(part)

    def drop_target(self) -> None:
        """Delete the target bundle: no training until it is written again. Links inside the store are refused."""
        self._site.drop_bundle()

    def replace_manifest(self, manifest: StoreManifest) -> None:
        """Replace store.json by one whose files all exist already.

        The old one's commit is deleted first and the new one's written last: a store without a commit is read
        unchecked, so that at every moment readers find the old manifest or the new one.

        Raises:
            StorageUnavailable: no room; the store is the old one, or the new one without its commit until it is
                opened again.
        """
        if manifest != self.manifest:
            refuse_links(self.path, folders=())
            if isinstance(self.path, RemotePath) and read_manifest(self.path) != self.manifest:
                raise changed_meanwhile(self.path / MANIFEST_NAME)
            self._retract(manifest_commit_path(self.path))
            self._swap_manifest(manifest)
            self.manifest, self.codec = manifest, StoreCodec.open(manifest, self.path)
            self.lay_out(self.codec)
            self._record_manifest()
            name_next_basis(self.path, manifest)

    def _swap_manifest(self, manifest: StoreManifest) -> None:
        path = self.path / MANIFEST_NAME
        if not replace_file(path, self.manifest.to_json().encode(), manifest.to_json().encode()):
            raise changed_meanwhile(path)  # whose commit is written by the one who has changed it, or by the next one

    def record_run(self, record: Mapping[str, Any]) -> StorePath:
        """Write a record of this run (command, versions, timings) to ``runs/``.

        Args:
            record: anything JSON holds; it shapes no data.

        Returns:
            The file's path, named after the time in UTC.
        """
        refuse_links(self.path, folders=())
        folder = self.path / RUNS_NAME
        make_folder(folder)
        content = (json.dumps(record, indent=2, sort_keys=True, default=str) + "\n").encode()
        while not write_new(path := folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z.json", content):
            pass  # another machine's run ended in the same microsecond
        return path

    def close(self) -> None:
        """Let other processes write to the store."""
        self._site.close()

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

    def _folder(self, part: int) -> StorePath:
        return part_folder(self.path, part, self.manifest.schema_version)

    def _refuse_links(self, part: int, codec: StoreCodec) -> None:
        """Refuse symbolic links where a part's files are written or deleted."""
        if self._has_part_groups:
            refuse_links(self.path, [self._folder(part)])
        else:
            refuse_linked_folders(self.path, self._folder(part), (array.name for array in codec.arrays))

    def _retract(self, commit: StorePath) -> None:
        """Delete a commit durably, before the files that it lists change."""
        remove_file(commit)
        fsync_directory(self.path / COMMITS_NAME)

    def _clean(self) -> None:
        """Delete what a kill left behind; make parts with lost files pending again.

        Everything is checked before the first deletion, so that a failed check deletes nothing.
        """
        with disk_full_guard(self.path):
            for name in (PARTS_NAME, COMMITS_NAME):
                make_folder(self.path / name)
        with check_guard(self.path):
            has_damaged_target = not self._target_is_whole()
            commits = self._commits()
        self._site.remove_unfinished()
        if has_damaged_target:
            remove_file(target_commit_path(self.path))
        name_next_basis(self.path, self.manifest)
        for part in (part for part, commit in commits.items() if commit is None):
            remove_file(commit_path(self.path, part))
        self._committed |= {part for part, commit in commits.items() if commit is not None}
        self._remove_unlisted(commit for commit in commits.values() if commit is not None)
        self.repaired_parts = tuple(part for part, commit in commits.items() if commit is None)

    def sweep(self) -> bool:
        """Stop sharing the store, and delete what writers that were killed or came second have left behind.

        Returns:
            Whether it was done; not while others write, of whom the last one does it. Nothing may be written after it.
        """
        if not self._site.hold.try_alone() and isinstance(self.path, Path):
            return False
        with check_guard(self.path):
            commits = read_commits(self.path, range(self.n_parts))
        self._committed = set(commits)
        self._site.remove_unfinished()
        self._remove_unlisted(commits.values())
        return True

    def remove_attempt(self, attempt: str) -> None:
        """Delete the unfinished shards of a writer that is dead."""
        self._site.remove_attempt(attempt)

    def remove_uncommitted(self) -> None:
        """Delete files of parts that no commit lists; call it while no part is being written."""
        self._remove_unlisted(read_part_commit(commit_path(self.path, part)) for part in self._committed)

    def _remove_unlisted(self, commits: Iterable[PartCommit]) -> None:
        parts, kept = self.path / PARTS_NAME, set[str]()
        for commit in commits:
            folder = self._folder(commit.part)
            names = commit.files.keys()
            kept |= names if folder == parts else {name_below(parts, folder / name) for name in names}
        arrays = {name.rpartition("/")[0] for name in kept} | {array.name for array in self.codec.arrays}
        if not self._has_part_groups:
            kept |= {name.removeprefix(f"{PARTS_NAME}/") for name in metadata_names(arrays)}
        self._site.remove_unlisted(kept)

    def _commits(self) -> dict[int, PartCommit | None]:
        """Return the commits of planned parts; None for one that is damaged, or does not match plan or files."""
        part_of = self.plan["part"].to_numpy()
        n_sequences = np.bincount(part_of, minlength=self.n_parts)
        n_tokens = np.bincount(part_of, self.plan["n_tokens"].to_numpy(), self.n_parts).astype(np.int64)
        commits: dict[int, PartCommit | None] = {}
        look = sizes_of(self.path / PARTS_NAME)
        for part, (path, read) in enumerate(reads_of(commit_path(self.path, part) for part in range(self.n_parts))):
            try:
                commit = read_part_commit(path, read)
            except MISSING:
                continue
            except StoreDamaged:
                commits[part] = None
                continue
            planned = (part, n_sequences[part], n_tokens[part], self._lengths[part])
            found = (commit.part, commit.n_sequences, commit.n_tokens, commit.allocated_tokens)
            is_whole = found == planned and not find_size_damage(self._folder(part), commit.files, look)
            commits[part] = commit if is_whole else None
        return commits

    def _target_is_whole(self) -> bool:
        """Whether the target bundle has no commit, or all files that its commit lists."""
        try:
            return not self.has_target or not find_size_damage(
                self.path / TARGET_NAME, read_target_commit(target_commit_path(self.path))
            )
        except StoreDamaged:
            return False


def _site(store: StorePath, attempt: str, shares: bool) -> Site:
    """Take hold of a place to write a store to, alone if it can be."""
    if isinstance(store, RemotePath):
        site = BucketSite(store, attempt)
        site.remove_unfinished()  # before anything is compared with commits that are about to be made
        return site
    return FolderSite(store, StoreLock.take(store, shares), attempt)


def _joined_site(store: StorePath, attempt: str) -> Site:
    """Take hold of a place that others write a store to."""
    if isinstance(store, RemotePath):
        return BucketSite(store, attempt)
    return FolderSite(store, StoreLock.join(store), attempt)


def _begin(store: StorePath, manifest: StoreManifest, plan: pa.Table, codec_files: Mapping[str, bytes]) -> None:
    """Write what makes a place a store.

    The manifest comes last: without it a folder is an unfinished start, which is begun afresh. In a bucket others may
    begin at the same moment, and what is there stays: it is compared before the next document is written.
    """
    for name, content in codec_files.items():
        make_folder(store / CODEC_NAME)
        if not write_new(store / CODEC_NAME / name, content):
            raise StoreMismatch(str(store), {"codec.basis_sha256": ("(learned by another run)", "(learned here)")})
    if not write_new(store / PLAN_NAME, plan_bytes(plan)):
        check_same_plan(store, plan)
    if not write_new(store / MANIFEST_NAME, manifest.to_json().encode()):
        check_same(store, manifest, plan)


def name_next_basis(store: StorePath, manifest: StoreManifest) -> None:
    """Rename the basis that was learned for added fields, once store.json names these fields."""
    path = store / CODEC_NAME / NEXT_BASIS_NAME
    if not exists(path):
        return
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    if digest.hexdigest() != manifest.codec.get("basis_sha256"):
        return
    if isinstance(path, Path):
        os.replace(path, path.with_name(BASIS_NAME))
        fsync_directory(path.parent)
    else:  # readers that find another basis look at the next one too
        write_atomic(path.parent / BASIS_NAME, path.read_bytes())
        remove_file(path)


def _write_codec(store: StorePath, files: Mapping[str, bytes]) -> None:
    """Write what the codec has learned, unless it is there; the manifest, written later, holds its hash."""
    for name, content in files.items():
        path = store / CODEC_NAME / name
        make_folder(path.parent)
        if not exists(path) or path.read_bytes() != content:
            write_atomic(path, content)
