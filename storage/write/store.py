"""Writes a store, part by part, each part committed atomically; processes that extract do so beside each other.

Files become durable in this order (each is synced before its rename, and its folder after it)::

    1  store.lock                        locked; held until the process ends, however it ends (``lock``)
    2  codec/basis.safetensors           before the manifest, which holds its sha256
    3  plan.parquet                      before the manifest; a folder without a manifest is incomplete
    4  store.json                        now the folder is a store
    5  parts/kv/zarr.json, ...           Zarr metadata of the arrays of all parts
    6  commits/store.json                sizes and checksums of 3 to 5, which are equal to what the inputs give
    7  target/config.json.A.partial      each file of the bundle, renamed when all are synced; A tells the writer
       commits/target.json               after them, and taken away before a replacement
    8  parts/kv/c.K.0.0.0.0.A.partial    each shard of part K, synced when it is full
       parts/kv/c.K.0.0.0.0              renamed, and the array's folder synced: durable, not yet committed
       commits/part-K.json               now the part exists for readers; 8 again for each part, in any order

A commit is written after the files that it lists, and deleted before them: at every moment what has a commit is whole.
Files that a kill leaves without one are deleted by the next run, which writes exactly the missing parts.

1 to 6 are done alone, 7 and 8 beside others: the renames and the commit of a part are one step to them, before which
a writer looks for a commit once more. The second writer of a part leaves it as it is and deletes its own files.

In a bucket the order is the same, without 1 and without renames, and nothing is done alone: each document of 2 to 6 is
created once, by the first writer, and all others compare it with their own (``publish``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

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
)
from ..chunk import EncodePool
from ..codecs.registry import StoreCodec
from ..commit import (
    PartCommit,
    find_manifest_damage,
    find_size_damage,
    metadata_names,
    read_commits,
    read_file_records,
    read_part_commit,
    write_manifest_commit,
)
from ..grid import ArrayGrid
from ..paths import RemotePath, StorePath
from ..plan import check_plan, part_counts, read_plan
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
from ..shard import FileRecord
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
from .publish import PartFiles, StoreFiles, changed_meanwhile, refuse_links

_COMMIT_NAME = re.compile(r"part-(\d+)\.json")


class StoreWriter(StoreFiles):
    """A process that writes to a store. Make it with :meth:`create_or_resume` or :meth:`join`, and use it in ``with``.

    Attributes:
        manifest: settings that shape its data.
        plan: all sequences (see ``plan.PLAN_SCHEMA``).
        codec: the codec of its fields.
        joined: whether other processes wrote to the store when this one came.
        repaired_parts: parts that had a damaged commit, or lacked files or bytes of it; they are pending again.
    """

    codec: StoreCodec

    def __init__(
        self,
        path: StorePath,
        manifest: StoreManifest,
        plan: pa.Table,
        attempt: str | None = None,
        shares: bool = False,
        joins: bool = False,
    ) -> None:
        super().__init__(path, attempt, shares, joins)
        self.manifest = manifest
        self.plan = plan
        self.joined = self._lock is not None and not self._lock.is_alone
        self.repaired_parts: tuple[int, ...] = ()
        self._counts = part_counts(plan, manifest.alignment_tokens)
        self._longest_part = max(counts["allocated_tokens"] for counts in self._counts)
        self._grids: dict[str, ArrayGrid] = {}
        self._committed: set[int] = set()
        self._damaged: set[int] = set()
        self._open_parts: set[int] = set()

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
            StorageUnavailable: a file could not be read or written, so that damage is unknown; nothing was deleted.
        """
        store = open_path(path)
        check_plan(plan, manifest.alignment_tokens)
        check_counts(manifest, plan)
        with check_guard(store), disk_full_guard(store):
            check_unoccupied(store)
            make_folder(store)
        writer = cls(store, manifest, plan, shares=shares)
        with writer._opening():
            if writer.joined:  # those who were there first keep it in order
                check_same(store, manifest, plan)
                writer._open_codec()
            else:
                writer._open_alone(codec_files or {})
                if shares and writer._lock is not None:
                    writer._lock.share()
        return writer

    @classmethod
    def join(cls, path: str | os.PathLike[str] | StorePath, attempt: str | None = None) -> StoreWriter:
        """Write parts of a store beside the process that opened it, from what the store itself says.

        Args:
            attempt: see the attribute; default: a new one.
        """
        store = open_path(path)
        with check_guard(store):
            manifest, plan = read_manifest(store), read_plan(store / PLAN_NAME)
        writer = cls(store, manifest, plan, attempt, joins=True)
        writer.joined = True
        with writer._opening():
            writer._open_codec()
        return writer

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Close the store where it cannot be opened, and name an I/O error, which is no damage."""
        try:
            with check_guard(self.path), disk_full_guard(self.path):
                yield
        except BaseException:
            self.close()
            raise

    def _open_codec(self) -> None:
        self.codec = StoreCodec.open(self.manifest, self.path)
        self.lay_out(self.codec)

    def _open_alone(self, codec_files: Mapping[str, bytes]) -> None:
        """Begin a store, or put one in order that nobody else writes to, or that lies in a bucket."""
        refuse_links(self.path)
        if exists(manifest_commit_path(self.path)) or exists(self.path / MANIFEST_NAME):
            restore(self.path, self.manifest, self.plan)
            check_same(self.path, self.manifest, self.plan)
            write_codec(self.path, codec_files)
            self.joined = isinstance(self.path, RemotePath)
        else:
            begin(self.path, self.manifest, self.plan, codec_files)
        self.codec = StoreCodec.open(self.manifest, self.path)
        self._clean()
        self.lay_out(self.codec)
        if not exists(manifest_commit_path(self.path)) or find_manifest_damage(self.path):
            self._record_manifest()  # all files were found equal to what the inputs give

    @property
    def has_target(self) -> bool:
        """Whether the target bundle has been committed."""
        return exists(target_commit_path(self.path))

    @property
    def n_parts(self) -> int:
        """Planned parts."""
        return len(self._counts)

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
        """
        if part in self._open_parts:
            raise StoreError(f"Part {part} is being written already; open each part once.")
        claim = -1 if self._lock is None else self._lock.claim(part)
        self._open_parts.add(part)

        def close(is_committed: bool) -> None:
            self._open_parts.discard(part)
            if is_committed:
                on_commit(part)
            if claim >= 0:
                os.close(claim)

        files = PartFiles(self, part, existing)
        return PartWriter(self.part_sequences(part), self._counts[part], codec, self._grids, files, close, pool)

    def lay_out(self, codec: StoreCodec) -> None:
        """Write the metadata of a codec's arrays where it is missing."""
        with check_guard(self.path), disk_full_guard(self.path):
            self._grids |= write_array_metadata(self.path, codec.arrays, self.n_parts, self._longest_part)

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
        # Also shards that no commit lists: a writer that was killed may have named some.
        for name in files:
            remove_file(self.path / PARTS_NAME / name)
        self._committed.discard(part)

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
        self.manifest = manifest
        self._open_codec()
        self._record_manifest()
        name_next_basis(self.path, manifest)

    def record_run(self, record: Mapping[str, Any]) -> StorePath:
        """Write a record of this run (command, versions, timings; it shapes no data) to ``runs/``; returns its path."""
        folder = self.path / RUNS_NAME
        make_folder(folder)
        content = (json.dumps(record, indent=2, sort_keys=True, default=str) + "\n").encode()
        while not put_if_absent(path := folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z.json", content):
            pass  # another machine's run ended in the same microsecond
        return path

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record_manifest(self) -> None:
        write_manifest_commit(self.path, metadata_names(array.name for array in self.codec.arrays))

    def _clean(self) -> None:
        """Delete what a kill left behind; make parts with lost files pending again."""
        for name in (PARTS_NAME, COMMITS_NAME):
            make_folder(self.path / name)
        # Everything is checked before the first deletion, so that a failed check deletes nothing.
        has_damaged_target = not self._target_is_whole()
        commits = self._whole_commits()
        self._remove_unfinished()
        if has_damaged_target:
            remove_file(target_commit_path(self.path))
        name_next_basis(self.path, self.manifest)
        self.repaired_parts = tuple(part for part, commit in commits.items() if commit is None)
        for part in self.repaired_parts:
            remove_file(commit_path(self.path, part))
        self._keep_listed(commit for commit in commits.values() if commit is not None)
        self._committed |= {part for part, commit in commits.items() if commit is not None}

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
        self._remove_unfinished()
        self._keep_listed(commits.values())
        return True

    def remove_uncommitted(self) -> None:
        """Delete files of parts that no commit lists; call it while no part is being written."""
        self._keep_listed(read_part_commit(commit_path(self.path, part)) for part in self._committed)

    def _keep_listed(self, commits: Iterable[PartCommit]) -> None:
        kept = {name for commit in commits for name in commit.files}
        arrays = {name.rpartition("/")[0] for name in kept} | {array.name for array in self.codec.arrays}
        self._remove_unlisted(kept | {name.removeprefix(f"{PARTS_NAME}/") for name in metadata_names(arrays)})

    def _whole_commits(self) -> dict[int, PartCommit | None]:
        """Return the commits of planned parts; None for one that is damaged, or does not match plan or files."""
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
            is_whole = commit.counts == self._counts[part]
            is_whole = is_whole and not find_size_damage(self.path / PARTS_NAME, commit.files, look)
            commits[part] = commit if is_whole else None
        return commits

    def _target_is_whole(self) -> bool:
        """Whether the target bundle has no commit, or all files that its commit lists."""
        commit = target_commit_path(self.path)
        try:
            return not exists(commit) or not find_size_damage(self.path / TARGET_NAME, read_file_records(commit))
        except StoreDamaged:
            return False
