"""Writes a store, part by part, each part committed atomically; processes that extract do so beside each other.

Files become durable in this order (each is synced before its rename, and its folder after it)::

    1  store.lock                        locked; held until the process ends, however it ends (``lock``)
    2  codec/basis.safetensors           before the manifest, which holds its sha256
    3  plan.parquet                      before the manifest; a folder without a manifest is incomplete
    4  store.json                        now the folder is a store
    5  parts/kv/zarr.json, ...           Zarr metadata of the arrays of all parts
    6  commits/store.json                sizes and checksums of 3 to 5, which are equal to what the inputs give
    7  target.partial/ -> target/        commits/target.json after it, and taken away before a replacement
    8  parts/kv/c.K.0.0.0.0.A.partial    each shard of part K, synced when it is full; A tells the writer
       parts/kv/c.K.0.0.0.0              renamed, and the array's folder synced: durable, not yet committed
       commits/part-K.json               now the part exists for readers; 8 again for each part, in any order

A commit is written after the files that it lists, and deleted before them: at every moment what has a commit is whole.
Files that a kill leaves without one are deleted by the next run, which writes exactly the missing parts.

1 to 6 are done alone, 7 and 8 beside others: the renames and the commit of a part are one step to them, before which
a writer looks for a commit once more. The second writer of a part leaves it as it is and deletes its own files.

In a bucket the order is the same, without 1 and without renames, and nothing is done alone: each document of 2 to 6 is
created once, by the first writer, and all others compare it with their own (``bucket``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from ...errors import StoreDamaged, StoreError
from ...files import disk_full_guard
from ..backend import (
    MISSING,
    check_guard,
    exists,
    make_folder,
    names_in,
    open_path,
    put_if_absent,
    reads_of,
    remove_file,
    replace_file,
    sizes_of,
    sync_names,
)
from ..chunk import EncodePool
from ..codecs.registry import StoreCodec
from ..commit import (
    PartCommit,
    find_manifest_damage,
    find_size_damage,
    metadata_names,
    read_commits,
    read_part_commit,
    read_target_commit,
    write_manifest_commit,
)
from ..grid import ArrayGrid
from ..paths import RemotePath, StorePath
from ..plan import check_plan, part_lengths, read_plan
from ..read.store import read_manifest
from ..schema import (
    COMMITS_NAME,
    MANIFEST_NAME,
    PARTS_NAME,
    PLAN_NAME,
    RUNS_NAME,
    TARGET_NAME,
    StoreManifest,
    commit_path,
    manifest_commit_path,
    target_commit_path,
)
from ..shard import FileRecord, new_attempt
from .bucket import BucketPublisher, changed_meanwhile
from .lock import StoreLock
from .opening import (
    begin,
    check_counts,
    check_same,
    check_unoccupied,
    name_next_basis,
    restore,
    write_array_metadata,
    write_codec,
)
from .part import PartWriter
from .publish import FolderPublisher, Publisher, refuse_links

_COMMIT_NAME = re.compile(r"part-(\d+)\.json")


class StoreWriter:
    """A process that writes to a store. Make it with :meth:`create_or_resume` or :meth:`join`, and use it in ``with``.

    Attributes:
        attempt: a name of this writer that no other has; its unfinished files bear it.
        manifest: settings that shape its data.
        plan: all sequences (see ``plan.PLAN_SCHEMA``).
        joined: whether other processes wrote to the store when this one came.
        repaired_parts: parts that had a damaged commit, or lacked files or bytes of it; they are pending again.
    """

    def __init__(self, path: StorePath, manifest: StoreManifest, plan: pa.Table, publisher: Publisher) -> None:
        self.attempt = publisher.attempt
        self.path = path
        self.manifest = manifest
        self.plan = plan
        self.repaired_parts: tuple[int, ...] = ()
        self._publisher = publisher
        self._lock = publisher.lock
        self.joined = False
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
        """Start a store, or continue one that was made from the same inputs.

        Args:
            path: the store's folder, or its URL (``s3://``, ``gs://``, ``az://``, ``file://``).
            codec_files: what the codec has learned (``StoreCodec.files``), for ``codec/``.
            shares: whether others that share may write parts beside this process, and it beside them, as in a bucket
                they always may.

        Raises:
            OutputOccupied: the folder holds something else.
            StoreLocked: another process is writing to it, which does not share it.
            StoreMismatch: it was made from other inputs; names every key that changed.
            StorageUnavailable: its file system is full, has no locks, or a file could not be read, so that damage is
                unknown; nothing was deleted.
            StoreDamaged: its own files are damaged, or a symbolic link stands inside it; nothing was changed.
            StoreError: the plan breaks a rule, or contradicts the manifest.
        """
        store = open_path(path)
        check_plan(plan, manifest.alignment_tokens)
        check_counts(manifest, plan)
        with check_guard(store):
            check_unoccupied(store)
        with disk_full_guard(store):
            make_folder(store)
        publisher = _publisher(store, new_attempt(), shares)
        try:
            if publisher.lock is not None and not publisher.lock.is_alone:
                return cls._beside_others(store, manifest, plan, publisher)
            with check_guard(store):
                refuse_links(store)
                is_begun = exists(manifest_commit_path(store)) or exists(store / MANIFEST_NAME)
            if is_begun:
                with check_guard(store):
                    restore(store, manifest, plan)
                    check_same(store, manifest, plan)
                write_codec(store, codec_files or {})
            else:
                begin(store, manifest, plan, codec_files or {})
            with check_guard(store):
                writer = cls(store, manifest, plan, publisher)
            writer.joined = isinstance(store, RemotePath) and is_begun
            writer._clean()
            writer.lay_out(writer.codec)
            with check_guard(store):
                is_recorded = exists(manifest_commit_path(store)) and not find_manifest_damage(store)
            if not is_recorded:
                writer._record_manifest()  # all files were found equal to what the inputs give
            if shares and publisher.lock is not None:
                publisher.lock.share()
            return writer
        except BaseException:
            publisher.close()
            raise

    @classmethod
    def _beside_others(
        cls, store: StorePath, manifest: StoreManifest, plan: pa.Table, publisher: Publisher
    ) -> StoreWriter:
        """Join those who write to a store that was made from the same inputs; they keep it in order."""
        with check_guard(store):
            check_same(store, manifest, plan)
            writer = cls(store, manifest, plan, publisher)
        writer.joined = True
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
        publisher = _publisher(store, attempt or new_attempt(), joins=True)
        try:
            with check_guard(store):
                writer = cls(store, manifest, read_plan(store / PLAN_NAME), publisher)
            writer.joined = True
            writer.lay_out(writer.codec)
            return writer
        except BaseException:
            publisher.close()
            raise

    @property
    def is_shared(self) -> bool:
        """Whether other processes may write to the store too."""
        return self._lock is None or not self._lock.is_alone

    def publishing(self, byte: int) -> AbstractContextManager[None]:
        """Keep others from publishing the same document meanwhile; ``lock`` names the bytes."""
        return nullcontext() if self._lock is None else self._lock.locked_byte(byte)

    @property
    def target_path(self) -> Path:
        """A local folder with the target bundle: the store's own, or a copy of what is in a bucket."""
        return self._publisher.target_path

    @property
    def scratch_path(self) -> Path:
        """A local folder for files that only this process and its workers need: the store's, or a temporary one."""
        return self._publisher.scratch_path

    @property
    def has_target(self) -> bool:
        """Whether the target bundle has been committed."""
        return exists(target_commit_path(self.path))

    def target(self) -> AbstractContextManager[Path]:
        """Write the target bundle: yields a folder to fill, which becomes ``target/`` when the block ends well."""
        return self._publisher.bundle()

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
            known = self._committed if self._lock is None else set[int]()
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
        return self._lock is not None and self._lock.is_claimed(part)

    def part_sequences(self, part: int) -> pa.Table:
        """Return the sequences of a part in the order in which they must be written."""
        return self.plan.filter(pa.array(self.plan["part"].to_numpy() == part))

    def part(self, part: int, pool: EncodePool | None = None) -> PartWriter:
        """Open a part for writing; use it in ``with``.

        Args:
            pool: encodes on threads of its own (see :class:`PartWriter`); default: the caller's thread encodes.

        Raises:
            StoreError: no such part, or it is committed already.
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
        if part in self._open_parts:
            raise StoreError(f"Part {part} is being written already; open each part once.")
        self._open_parts[part] = -1 if self._lock is None else self._lock.claim(part)
        return PartWriter(
            store=self.path,
            part=part,
            sequences=self.part_sequences(part),
            allocated_tokens=int(self._lengths[part]),
            codec=codec,
            grids=self._grids,
            existing=existing,
            publisher=self._publisher.part(part, existing),
            on_commit=on_commit,
            on_close=self._on_close,
            pool=pool,
        )

    def _on_close(self, part: int) -> None:
        claim = self._open_parts.pop(part)
        if claim >= 0:
            os.close(claim)

    def lay_out(self, codec: StoreCodec) -> None:
        """Write the metadata of a codec's arrays where it is missing."""
        self._grids |= write_array_metadata(self.path, codec.arrays, self.n_parts, int(self._lengths.max()))

    def replace_parts(self, parts: Iterable[int]) -> None:
        """Make damaged parts pending; each is kept until :meth:`part` opens it, so that a stop loses at most that."""
        self._damaged |= self._committed & set(parts)

    def drop_part(self, part: int) -> None:
        """Delete a part; it is pending again, and readers do not see it."""
        try:
            files = set(read_part_commit(commit_path(self.path, part)).files)
        except (FileNotFoundError, StoreDamaged):
            files = set()
        self._retract(commit_path(self.path, part))
        for array in self.codec.arrays:
            grid = self._grids[array.name]
            files |= {f"{array.name}/{grid.shard_key(part, number)}" for number in range(grid.shards_per_part)}
        for name in files:
            remove_file(self.path / PARTS_NAME / name)
        self._committed.discard(part)

    def drop_target(self) -> None:
        """Delete the target bundle: no training until it is written again."""
        self._publisher.drop_bundle()

    def replace_manifest(self, manifest: StoreManifest) -> None:
        """Replace store.json by one whose files all exist already.

        Readers find the old manifest or the new one at every moment; where the disk is full it may be the new one
        without its commit, until the store is opened again.
        """
        # The old one's commit is deleted first and the new one's written last, as a store without it is read unchecked.
        if manifest == self.manifest:
            return
        path = self.path / MANIFEST_NAME
        if isinstance(self.path, RemotePath) and read_manifest(self.path) != self.manifest:
            raise changed_meanwhile(path)
        self._retract(manifest_commit_path(self.path))
        if not replace_file(path, self.manifest.to_json().encode(), manifest.to_json().encode()):
            raise changed_meanwhile(path)  # the process that changed it, or the next one, writes its commit
        self.manifest, self.codec = manifest, StoreCodec.open(manifest, self.path)
        self.lay_out(self.codec)
        self._record_manifest()
        name_next_basis(self.path, manifest)

    def record_run(self, record: Mapping[str, Any]) -> StorePath:
        """Write a record of this run (command, versions, timings) to ``runs/``.

        Args:
            record: anything JSON holds; it shapes no data.

        Returns:
            The file's path, named after the time in UTC.
        """
        folder = self.path / RUNS_NAME
        make_folder(folder)
        content = (json.dumps(record, indent=2, sort_keys=True, default=str) + "\n").encode()
        while not put_if_absent(path := folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z.json", content):
            pass  # another machine's run ended in the same microsecond
        return path

    def close(self) -> None:
        """Let other processes write to the store."""
        self._publisher.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record_manifest(self) -> None:
        write_manifest_commit(self.path, metadata_names(array.name for array in self.codec.arrays))

    def _retract(self, commit: StorePath) -> None:
        """Delete a commit durably, before the files that it lists change."""
        remove_file(commit)
        sync_names(self.path / COMMITS_NAME)

    def _clean(self) -> None:
        """Delete what a kill left behind; make parts with lost files pending again."""
        with disk_full_guard(self.path):
            for name in (PARTS_NAME, COMMITS_NAME):
                make_folder(self.path / name)
        # Everything is checked before the first deletion, so that a failed check deletes nothing.
        with check_guard(self.path):
            has_damaged_target = not self._target_is_whole()
            commits = self._commits()
        self._publisher.remove_unfinished()
        if has_damaged_target:
            remove_file(target_commit_path(self.path))
        name_next_basis(self.path, self.manifest)
        self.repaired_parts = tuple(part for part, commit in commits.items() if commit is None)
        for part in self.repaired_parts:
            remove_file(commit_path(self.path, part))
        whole = {part: commit for part, commit in commits.items() if commit is not None}
        self._committed |= whole.keys()
        self._remove_unlisted(whole.values())

    def sweep(self) -> bool:
        """Stop sharing the store, and delete what writers that were killed or came second have left behind.

        Returns:
            Whether it was done; not while others write, of whom the last one does it. Nothing may be written after it.
        """
        if self._lock is not None and not self._lock.try_alone():
            return False
        with check_guard(self.path):
            commits = read_commits(self.path, range(self.n_parts))
        self._committed = set(commits)
        self._publisher.remove_unfinished()
        self._remove_unlisted(commits.values())
        return True

    def remove_attempt(self, attempt: str) -> None:
        """Delete the unfinished shards of a writer that is dead."""
        self._publisher.remove_attempt(attempt)

    def remove_uncommitted(self) -> None:
        """Delete files of parts that no commit lists; call it while no part is being written."""
        self._remove_unlisted(read_part_commit(commit_path(self.path, part)) for part in self._committed)

    def _remove_unlisted(self, commits: Iterable[PartCommit]) -> None:
        kept = {name for commit in commits for name in commit.files}
        arrays = {name.rpartition("/")[0] for name in kept} | {array.name for array in self.codec.arrays}
        kept |= {name.removeprefix(f"{PARTS_NAME}/") for name in metadata_names(arrays)}
        self._publisher.remove_unlisted(kept)

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
            is_whole = found == planned and not find_size_damage(self.path / PARTS_NAME, commit.files, look)
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


def _publisher(store: StorePath, attempt: str, shares: bool = False, joins: bool = False) -> Publisher:
    """Lock a store, alone if it can be."""
    if isinstance(store, Path):
        return FolderPublisher(store, StoreLock(store, shares, joins), attempt)
    publisher = BucketPublisher(store, attempt)
    if not joins:
        publisher.remove_unfinished()  # before anything is compared with commits that are about to be made
    return publisher
