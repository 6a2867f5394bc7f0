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

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...errors import (
    OutputOccupied,
    SchemaVersionError,
    StoreDamaged,
    StoreError,
    StoreLocked,
    StoreMismatch,
)
from ...files import disk_full_guard, kind_of
from ...text import Progress
from .. import backend
from ..chunk import EncodePool
from ..codecs.registry import BASIS_NAME, NEXT_BASIS_NAME, StoreCodec, read_basis
from ..commit import (
    FileRecord,
    PartCommit,
    find_manifest_damage,
    has_parts,
    metadata_names,
    read_commits,
    read_part_commit,
    restore_files,
    write_manifest_commit,
)
from ..grid import ArrayGrid, array_grid, read_grid, zarr_metadata
from ..paths import RemotePath, StorePath
from ..plan import check_plan, numbers, part_counts, plan_bytes, plan_counts, read_plan, rows_where
from ..read.store import read_manifest
from ..read.verify import Depth, Finding, verify_commits
from ..schema import (
    CARD_NAME,
    CODEC_NAME,
    COMMITS_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    PARTS_NAME,
    PLAN_NAME,
    RUNS_NAME,
    TARGET_NAME,
    StoredArray,
    StoreManifest,
    commit_path,
    flatten,
    is_known,
    manifest_commit_path,
    target_commit_path,
)
from .part import PartWriter
from .publish import PartFiles, StoreFiles, changed_meanwhile, refuse_links

_COMMIT_NAME = re.compile(r"part-(\d+)\.json")


class StoreWriter(StoreFiles, AbstractContextManager["StoreWriter"]):
    """A process that writes to a store. Make it with :meth:`create_or_resume`, for ``with``."""

    codec: StoreCodec

    def __init__(
        self,
        path: StorePath,
        manifest: StoreManifest,
        plan: pa.Table,
        shares: bool = False,
    ) -> None:
        super().__init__(path, shares)
        self.manifest = manifest
        self.plan = plan  # all sequences (see ``plan.PLAN_SCHEMA``)
        # others wrote to it when this one came
        self.joined = self._lock is not None and not self._lock.is_alone
        # what was damaged when the store was opened; it is missing now
        self.damages: tuple[Finding, ...] = ()
        # whether it took the place of a store of other inputs, which had no part
        self.has_begun_anew = False
        self._counts = part_counts(plan, manifest.alignment_tokens)
        self.n_parts = len(self._counts)  # planned parts
        self._longest_part = max(counts["allocated_tokens"] for counts in self._counts)
        self._grids: dict[str, ArrayGrid] = {}
        self._committed: set[int] = set()
        self._open_parts: set[int] = set()

    @classmethod
    def create_or_resume(
        cls,
        path: str | os.PathLike[str] | StorePath,
        manifest: StoreManifest,
        plan: pa.Table,
        codec_files: Mapping[str, bytes] | None = None,
        shares: bool = False,
        begins_anew: bool = False,
        depth: Depth = "sizes",
        progress: Progress | None = None,
    ) -> "StoreWriter":
        """Start a store, or continue one that was made from the same inputs.

        What is damaged loses its commit: it is missing then, and is written again.

        Args:
            path: the store's folder, or its URL (``s3://``, ``gs://``, ``az://``, ``file://``).
            codec_files: what the codec has learned (``StoreCodec.files``), for ``codec/``.
            shares: whether others that share it too may write beside this process, as in a bucket they always may.
            begins_anew: whether to replace a store of other inputs that has no part and that nobody is writing to.
            depth: how the files of a store are checked that nobody else is writing to; ``progress`` is told of bytes.

        Raises:
            OutputOccupied: the folder holds something else.
            StoreLocked: another process is writing to it, which does not share it.
            StoreMismatch: it was made from other inputs; names every key that changed.
            StorageUnavailable: a file could not be read or written, so that damage is unknown; nothing was deleted.
        """
        store = backend.open_path(path)
        check_plan(plan, manifest.alignment_tokens)
        for key, value in plan_counts(plan).items():
            if getattr(manifest, key) != value:
                raise StoreDamaged(
                    f"The manifest says {key} {getattr(manifest, key)}, the plan has {value}."
                )
        with backend.check_guard(store), disk_full_guard(store):
            _check_unoccupied(store)
            backend.make_folder(store)
        writer = cls(store, manifest, plan, shares=shares)
        with writer._opening():
            if writer.joined:  # those who were there first keep it in order
                writer._check_joined()
                writer._open_codec()
            else:
                writer._open_alone(codec_files or {}, begins_anew)
                writer._clean(depth, progress)
                if shares and writer._lock is not None:
                    writer._lock.share()
        return writer

    @contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            with backend.check_guard(self.path), disk_full_guard(self.path):
                yield
        except BaseException:
            self.close()
            raise

    def _open_codec(self) -> None:
        self.codec = StoreCodec.open(self.manifest, self.path)
        self.lay_out(self.codec)

    def _check_joined(self) -> None:
        """Refuse other inputs than those from which other processes are writing the store."""
        try:
            _check_same(self.path, self.manifest, self.plan)
        except StoreMismatch as error:
            if has_parts(self.path) or all(key.startswith("codec.") for key in error.changes):
                raise
            raise StoreLocked(
                f"{self.path} was begun from other inputs by a process that is still writing to it. Wait until it "
                "ends, or choose another output folder."
            ) from error

    def _open_alone(self, codec_files: Mapping[str, bytes], begins_anew: bool) -> None:
        """Begin a store, or put one in order that nobody else writes to, or that lies in a bucket."""
        refuse_links(self.path)
        has_begun = backend.exists(manifest_commit_path(self.path)) or backend.exists(
            self.path / MANIFEST_NAME
        )
        if has_begun and not self._is_of_these_inputs(begins_anew):
            self._delete_all()
            self.has_begun_anew = True
            has_begun = False
        if has_begun:
            for name, content in codec_files.items():
                path = self.path / CODEC_NAME / name
                backend.make_folder(path.parent)
                if not backend.exists(path) or path.read_bytes() != content:
                    backend.put(path, content)
            self.joined = isinstance(self.path, RemotePath)
        else:
            _begin(self.path, self.manifest, self.plan, codec_files)
        for name in (PARTS_NAME, COMMITS_NAME):
            backend.make_folder(self.path / name)
        self._open_codec()
        if not backend.exists(manifest_commit_path(self.path)) or find_manifest_damage(self.path):
            self._record_manifest()  # all files were found equal to what the inputs give

    def _is_of_these_inputs(self, begins_anew: bool) -> bool:
        """Whether the store can be continued; refuses other inputs and damage, unless it may be begun anew."""
        try:
            self._restore()
            _check_same(self.path, self.manifest, self.plan)
        except (StoreMismatch, StoreDamaged):
            # A bucket has no lock that would keep others out meanwhile.
            if not begins_anew or isinstance(self.path, RemotePath) or has_parts(self.path):
                raise
            return False
        return True

    def _delete_all(self) -> None:
        """Delete a store without parts, but not its lock; its manifest goes last, so that a kill leaves no mixture."""
        for name in (COMMITS_NAME, PARTS_NAME, TARGET_NAME, CODEC_NAME, RUNS_NAME):
            if backend.exists(self.path / name):
                shutil.rmtree(str(self.path / name))
        # The texts name what they were made from, and this start may be reading them.
        backend.remove_files(*(self.path / name for name in (CARD_NAME, PLAN_NAME, MANIFEST_NAME)))
        backend.sync_names(self.path)

    def _restore(self) -> None:
        """Write damaged or lost store.json and plan.parquet again if these inputs are the store's."""
        documents = {
            MANIFEST_NAME: self.manifest.to_json().encode(),
            PLAN_NAME: plan_bytes(self.plan),
        }
        try:
            restore_files(self.path, documents)
        except StoreDamaged:
            if not backend.exists(self.path / MANIFEST_NAME):
                raise
            # Either their commit is damaged, or the inputs are others: the comparison that follows
            # says which.

    @property
    def has_target(self) -> bool:
        """Whether the target bundle has been committed."""
        return backend.exists(target_commit_path(self.path))

    def committed_parts(self) -> list[int]:
        """Return the parts that have a commit, in order, those that others wrote meanwhile included."""
        if self.is_shared:
            with backend.check_guard(self.path):
                names = map(_COMMIT_NAME.fullmatch, backend.names_in(self.path / COMMITS_NAME))
                found = {int(name[1]) for name in names if name is not None}
            # The list of a bucket may lack what was committed just now.
            known = self._committed if self._lock is None else set[int]()
            self._committed = (found | known) & set(range(self.n_parts))
        return sorted(self._committed)

    def pending_parts(self) -> list[int]:
        """Return the parts that have no commit yet, in order."""
        committed = set(self.committed_parts())
        return [part for part in range(self.n_parts) if part not in committed]

    def is_pending(self, part: int) -> bool:
        """Whether a part has no commit yet."""
        return not (
            backend.exists(commit_path(self.path, part))
            if self.is_shared
            else part in self._committed
        )

    def is_claimed(self, part: int) -> bool:
        """Whether a process, which may be this one, writes a part at this moment; only a hint."""
        return self._lock is not None and self._lock.is_claimed(part)

    def part_sequences(self, part: int) -> pa.Table:
        """Return the sequences of a part in the order in which they must be written."""
        return rows_where(self.plan, numbers(self.plan, "part") == part)

    def part(self, part: int, pool: EncodePool | None = None) -> PartWriter:
        """Open a part for writing (see :class:`PartWriter`); StoreError for no such part, or one that is committed."""
        if not 0 <= part < self.n_parts:
            raise StoreError(f"The plan has parts 0 to {self.n_parts - 1}, got {part}.")
        if part in self._committed:
            raise StoreError(
                f"Part {part} is committed already; write only the parts that pending_parts() returns."
            )
        return self.open_part(part, self.codec, {}, self._committed.add, pool)

    def open_part(
        self,
        part: int,
        codec: StoreCodec,
        existing: Mapping[str, FileRecord],
        on_commit: Callable[[int], None],
        pool: EncodePool | None = None,
    ) -> PartWriter:
        """Open a part for writing the fields of a codec, which was laid out, beside files that its commit lists."""
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
        return PartWriter(
            self.part_sequences(part), self._counts[part], codec, self._grids, files, close, pool
        )

    def lay_out(self, codec: StoreCodec) -> None:
        """Write the metadata of a codec's arrays where it is missing."""
        with backend.check_guard(self.path), disk_full_guard(self.path):
            self._grids |= _write_array_metadata(
                self.path, codec.arrays, self.n_parts, self._longest_part
            )

    def replace_manifest(self, manifest: StoreManifest) -> None:
        """Replace store.json by one whose files all exist; readers find the old or the new one at every moment."""
        # The old one's commit is deleted first and the new one's written last: a store without it
        # is read unchecked. On
        # a full disk it stays so until the store is opened again.
        if manifest == self.manifest:
            return
        path = self.path / MANIFEST_NAME
        if isinstance(self.path, RemotePath) and read_manifest(self.path) != self.manifest:
            raise changed_meanwhile(path)
        self._retract(manifest_commit_path(self.path))
        if not backend.replace_file(
            path, self.manifest.to_json().encode(), manifest.to_json().encode()
        ):
            # the process that changed it, or the next one, writes its commit
            raise changed_meanwhile(path)
        self.manifest = manifest
        self._open_codec()
        self._record_manifest()
        name_next_basis(self.path, manifest)

    def record_run(self, record: Mapping[str, Any]) -> StorePath:
        """Write a record of this run (command, versions, timings; it shapes no data) to ``runs/``; returns its path."""
        folder = self.path / RUNS_NAME
        backend.make_folder(folder)
        content = (json.dumps(record, indent=2, sort_keys=True, default=str) + "\n").encode()
        while not backend.put_if_absent(
            path := folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z.json", content
        ):
            pass  # another machine's run ended in the same microsecond
        return path

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record_manifest(self) -> None:
        write_manifest_commit(self.path, metadata_names(array.name for array in self.codec.arrays))

    def _clean(self, depth: Depth, progress: Progress | None) -> None:
        """Delete what a kill left behind, and the commits of what is damaged."""
        # Everything is checked before the first deletion, so that a failed check deletes nothing.
        report = verify_commits(self.path, self._counts, depth, progress)
        report.check_complete(self.path)
        self._remove_unfinished()
        name_next_basis(self.path, self.manifest)
        self.damages = tuple(report.damages)
        self._drop(self.damages)
        whole = report.commits.keys() - {damage.part for damage in self.damages}
        self._keep_listed(report.commits[part] for part in whole)
        self._committed |= whole

    def _drop(self, damages: Iterable[Finding]) -> None:
        """Delete the commits of what is damaged, and the files of a damaged target bundle."""
        target_commit = target_commit_path(self.path)
        commits: set[StorePath] = set()
        for damage in damages:
            if damage.part is not None:
                commits.add(commit_path(self.path, damage.part))
            elif damage.path.startswith(f"{COMMITS_NAME}/"):
                commits.add(self.path / damage.path)
            else:
                commits.add(target_commit)
        if commits:
            self._retract(*commits)
        if target_commit in commits:
            self._remove_others(TARGET_NAME, ())

    def sweep(self) -> bool:
        """Stop sharing and delete what killed or second writers have left; returns whether no others write.

        The last one of several does it. Nothing may be written after it.
        """
        if self._lock is not None and not self._lock.try_alone():
            return False
        with backend.check_guard(self.path):
            commits = read_commits(self.path, range(self.n_parts))
        self._committed = set(commits)
        self._remove_unfinished()
        self._keep_listed(commits.values())
        return True

    def remove_uncommitted(self) -> None:
        """Delete files of parts that no commit lists; call it while no part is being written."""
        self._keep_listed(
            read_part_commit(commit_path(self.path, part)) for part in self._committed
        )

    def _keep_listed(self, commits: Iterable[PartCommit]) -> None:
        kept = {name for commit in commits for name in commit.files}
        arrays = {name.rpartition("/")[0] for name in kept} | {
            array.name for array in self.codec.arrays
        }
        self._remove_unlisted(
            kept | {name.removeprefix(f"{PARTS_NAME}/") for name in metadata_names(arrays)}
        )


def _check_unoccupied(store: StorePath) -> None:
    """Refuse a folder that is not empty, a readable store, or the unfinished start of one."""
    # Whether there is a folder a bucket tells by a list of all files alone.
    if isinstance(store, Path):
        there = next(path for path in (store, *store.absolute().parents) if path.exists())
        if not there.is_dir():
            raise OutputOccupied(
                f"{store}: {there} is {kind_of(there)}, not a folder. Choose another output folder."
            )
        if there is not store:
            return
    manifest = store / MANIFEST_NAME
    has_commit = backend.exists(manifest_commit_path(store))
    if backend.exists(manifest):
        try:
            read_manifest(store)
        except SchemaVersionError:
            if not any(path == manifest for path, _ in find_manifest_damage(store)):
                raise  # else the version is a damaged byte
        except StoreDamaged as error:
            if not has_commit:  # else `restore` repairs it, or names the damage
                raise OutputOccupied(
                    f"{store} holds something else: {error} Choose another output folder."
                ) from error
        return
    if has_parts(store) and not has_commit:
        raise OutputOccupied(
            f"{store} has committed parts but no {MANIFEST_NAME}, so that nothing tells which inputs they came from. "
            f"Restore {MANIFEST_NAME}, or choose another output folder."
        )
    names = backend.names_in(store)
    foreign = sorted(name for name in names if not is_known(name))
    # a bucket's start leaves no lock
    if names and (foreign or (LOCK_NAME not in names and isinstance(store, Path))):
        shown = ", ".join((foreign or sorted(names))[:3])
        raise OutputOccupied(
            f"{store} is not empty and not an activation store (it holds {shown}). "
            "Choose another output folder, or empty this one."
        )


def _check_same(store: StorePath, manifest: StoreManifest | None, plan: pa.Table) -> None:
    """Compare everything that shapes the data, or the plan alone; raises StoreMismatch with every key that differs."""
    changes: dict[str, tuple[Any, Any]] = {}
    if manifest is not None:
        old, new = (
            flatten(json.loads(each.to_json())) for each in (read_manifest(store), manifest)
        )
        pairs = {
            key: (old.get(key, "(absent)"), new.get(key, "(absent)"))
            for key in sorted(old.keys() | new.keys())
        }
        changes = {key: (was, now) for key, (was, now) in pairs.items() if was != now}
    old_plan = read_plan(store / PLAN_NAME)
    if not old_plan.equals(plan.replace_schema_metadata(None)):
        changes["plan"] = _first_difference(old_plan, plan)
    if changes:
        raise StoreMismatch(str(store), changes)


def _first_difference(old: pa.Table, new: pa.Table) -> tuple[str, str]:
    for row in range(min(old.num_rows, new.num_rows)):
        a = old.slice(row, 1).to_pylist()[0]
        b = new.slice(row, 1).to_pylist()[0]
        if a != b:
            keys = [key for key in a if a[key] != b[key]]
            was, now = (
                f"row {row}: " + ", ".join(f"{key}={side[key]}" for key in keys) for side in (a, b)
            )
            return was, now
    return f"{old.num_rows} sequences", f"{new.num_rows} sequences"


def _write_array_metadata(
    store: StorePath, arrays: Iterable[StoredArray], n_parts: int, longest_part: int
) -> dict[str, ArrayGrid]:
    """Write the metadata of arrays where it is missing, and return the grid of each by its name.

    Existing metadata stays, also where another release chose another grid: later parts follow it.
    """
    wanted = {array.name: array for array in arrays}
    documents = zarr_metadata(
        (array, array_grid(array, n_parts, longest_part)) for array in wanted.values()
    )
    contents = {f"{PARTS_NAME}/{name}": content for name, content in documents.items()}
    restore_files(store, contents)
    # groups before their members
    for name, content in sorted(contents.items(), key=lambda item: item[0].count("/")):
        path = store / name
        if not backend.exists(path):
            backend.make_folder(path.parent)
            backend.put_if_absent(path, content)
            backend.sync_names(path.parent.parent)
    return {
        name: read_grid(store / PARTS_NAME, array, n_parts, longest_part)
        for name, array in wanted.items()
    }


def _begin(
    store: StorePath, manifest: StoreManifest, plan: pa.Table, codec_files: Mapping[str, bytes]
) -> None:
    """Write what makes a folder or prefix a store, the manifest last.

    In a bucket others may begin at the same moment, and what is there stays: it is compared before the next document is
    written. A folder is locked, so that what is there was left by a kill.
    """
    if isinstance(store, Path):
        for path in (store / PLAN_NAME, *(store / CODEC_NAME / name for name in codec_files)):
            path.unlink(missing_ok=True)
    for name, content in codec_files.items():
        backend.make_folder(store / CODEC_NAME)
        if not backend.put_if_absent(store / CODEC_NAME / name, content):
            raise StoreMismatch(
                str(store), {"codec.basis_sha256": ("(learned by another run)", "(learned here)")}
            )
    if not backend.put_if_absent(store / PLAN_NAME, plan_bytes(plan)):
        _check_same(store, None, plan)
    if not backend.put_if_absent(store / MANIFEST_NAME, manifest.to_json().encode()):
        _check_same(store, manifest, plan)


def name_next_basis(store: StorePath, manifest: StoreManifest) -> None:
    """Rename the basis that was learned for added fields, once store.json names these fields."""
    path = store / CODEC_NAME / NEXT_BASIS_NAME
    try:
        content = read_basis(path)
    except backend.MISSING:
        return
    if hashlib.sha256(content).hexdigest() != manifest.codec.get("basis_sha256"):
        return
    if isinstance(path, Path):
        os.replace(path, path.with_name(BASIS_NAME))
        backend.sync_names(path.parent)
    else:  # readers that find another basis look at the next one too
        backend.put(path.parent / BASIS_NAME, content)
        backend.remove_files(path)
