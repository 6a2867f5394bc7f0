"""Opens a store for writing its parts. Several processes may write to the same store.

A part is a range of the store's sequences. The commit of a part is a JSON file that lists all files
of the part. Readers ignore a part until it has a commit.

A writer creates the files of a store in the order of the following list. Each file is synced before
it is renamed, and the folder is synced after the rename. In the names of the files, ``A`` stands
for a random string that identifies the writer, and ``K`` for the number of a part::

    1  store.lock                        locked until the process ends in any way (``lock``)
    2  codec/basis.safetensors           written before store.json, which contains its sha256
    3  plan.parquet                      written before store.json
    4  store.json                        the manifest; a folder without it is not yet a store
    5  parts/kv/zarr.json, ...           Zarr metadata of the arrays, which all parts share
    6  commits/store.json                sizes and checksums of the files of steps 3 to 5, after
                                         these files were compared with the current inputs
    7  target/config.json.A.partial      the files of the target bundle with temporary names
       target/config.json                the same files, renamed when all of them are synced
       commits/target.json               sizes and checksums of the files of the target bundle
    8  parts/kv/c.K.0.0.0.0.A.partial    the shards of part K with temporary names
       parts/kv/c.K.0.0.0.0              the same shards, renamed when all of them are synced
       commits/part-K.json               the commit, which makes the part visible to readers

Step 8 is repeated for each part, in any order.

A commit is written after the files that it lists, and it is deleted before any of them is replaced
or deleted. So all files that a commit lists are complete. If a process is killed, the next run
deletes the files that no commit lists, and writes only the parts without a commit.

In a folder, a writer does steps 1 to 6 under an exclusive lock. Several processes may do steps 7
and 8 at the same time. In step 8, a process takes a lock and checks whether another writer has
committed the part. If so, the process deletes its own files. If not, it renames its shards and
writes the commit, and then releases the lock.

In a bucket, the order is the same, but without locks, and files are copied instead of renamed. The
first writer creates the files of steps 2 to 6. All other writers compare these files with the
content that they would write themselves. For step 8 see ``publish``.
"""

import hashlib
import json
import os
import re
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from ...errors import (
    OutputOccupied,
    SchemaVersionError,
    StoreDamaged,
    StoreError,
    StoreLocked,
    StoreMismatch,
)
from ...files import LockHeld, disk_full_guard, kind_of
from ...text import SILENT, Progress
from ..backend import MISSING, backend_of, check_guard, open_path
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
from ..paths import StorePath
from ..plan import (
    check_plan_of,
    numbers,
    part_counts,
    plan_bytes,
    read_plan,
    rows_where,
)
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
    SPEED_TEST_PREFIX,
    TARGET_NAME,
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
    """An activation store that is opened for writing.

    Use :meth:`create_or_resume` to create an object, and use the object in a ``with`` statement.
    """

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
        # Table of all sequences of the store (see ``plan.PLAN_SCHEMA``).
        self.plan = plan
        # Whether other processes were writing to the store when it was opened. For a store in a
        # bucket, this is unknown, so the value is whether the store existed already.
        self.has_other_writers = self._lock is not None and not self._lock.is_alone
        # Damage that was found when the store was opened. The commits that list the damaged files
        # were deleted.
        self.damages: tuple[Finding, ...] = ()
        # Whether an older store was deleted at this path when this store was opened. The older
        # store was made from different inputs and had no committed part.
        self.has_begun_anew = False
        self._counts = part_counts(plan, manifest.alignment_tokens)
        # Number of planned parts.
        self.n_parts = len(self._counts)
        # Number of tokens in each planned part.
        self.part_tokens = {part: counts["n_tokens"] for part, counts in enumerate(self._counts)}
        self._longest_part = max(counts["allocated_tokens"] for counts in self._counts)
        self._grids: dict[str, ArrayGrid] = {}
        self._committed: set[int] = set()
        self._open_parts: set[int] = set()
        # Maps the number of each part that this process has locked to the lock file of the part.
        # Closing the file releases the lock.
        self._part_locks: dict[int, IO[Any]] = {}

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
        progress: Progress = SILENT,
    ) -> "StoreWriter":
        """Create a store, or resume writing a store that was made from the same inputs.

        The commits of damaged parts are deleted, so that these parts are pending again.

        Args:
            path: the store's folder, or its URL (``s3://``, ``gs://``, ``az://``, ``file://``).
            manifest: the manifest for the current inputs (model, dataset and settings).
            plan: the plan for the current inputs.
            codec_files: files to write to ``codec/``, the learned state of the codec
                (``StoreCodec.files``).
            shares: whether other processes may write to the store at the same time. They must also
                set this argument. For a store in a bucket, the argument has no effect, because
                several processes can always write to it.
            begins_anew: whether an existing store from different inputs may be replaced. It is
                replaced only if it has no committed part and no other process is writing to it.
            depth: how thoroughly the files of existing parts are checked. If another process is
                writing to the store, the files are not checked.
            progress: reports the number of bytes that have been checked.

        Raises:
            OutputOccupied: the path contains files that do not belong to a store.
            StoreLocked: another process is writing to the store and does not share its lock.
            StoreMismatch: the store was made from different inputs. The error contains every key
                that differs.
            StorageUnavailable: a file could not be read or written, so it is unknown whether the
                store is damaged. Nothing was deleted.
        """
        store = open_path(path)
        check_plan_of(store, manifest, plan)
        with check_guard(store), disk_full_guard(store):
            _check_unoccupied(store)
            backend_of(store).make_folder()
        writer = cls(store, manifest, plan, shares=shares)
        with writer._opening():
            # If other processes share the lock, the first of them has already created the store and
            # deleted uncommitted files. In this case, only check that this process has the same
            # inputs as the other processes.
            if writer.has_other_writers:
                writer._check_other_writers()
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
            with check_guard(self.path), disk_full_guard(self.path):
                yield
        except BaseException:
            self.close()
            raise

    def _open_codec(self) -> None:
        self.codec = StoreCodec.open(self.manifest, self.path)
        self.lay_out(self.codec)

    def _check_other_writers(self) -> None:
        """Raise an error if the other writers of this store have other inputs than this process."""
        try:
            _check_same(self.path, self.manifest, self.plan)
        except StoreMismatch as error:
            if has_parts(self.path) or all(key.startswith("codec.") for key in error.changes):
                raise
            raise StoreLocked(
                f"Another process is still writing {self.path}, from other inputs than this "
                "command. Wait until it ends, or choose another output folder."
            ) from error

    def _open_alone(self, codec_files: Mapping[str, bytes], begins_anew: bool) -> None:
        """Create a store, or check and restore store.json and plan.parquet of an existing store.

        For a store in a folder, this process must hold the lock of the store exclusively.
        """
        refuse_links(self.path)
        manifest_commit = backend_of(manifest_commit_path(self.path))
        has_begun = manifest_commit.exists() or backend_of(self.path / MANIFEST_NAME).exists()
        if has_begun and not self._is_of_these_inputs(begins_anew):
            self._delete_all()
            self.has_begun_anew = True
            has_begun = False
        if has_begun:
            for name, content in codec_files.items():
                path = self.path / CODEC_NAME / name
                backend_of(path.parent).make_folder()
                file = backend_of(path)
                if not file.exists() or path.read_bytes() != content:
                    file.put(content)
            self.has_other_writers = self._lock is None
        else:
            _begin(self.path, self.manifest, self.plan, codec_files)
        for name in (PARTS_NAME, COMMITS_NAME):
            backend_of(self.path / name).make_folder()
        self._open_codec()
        if not manifest_commit.exists() or find_manifest_damage(self.path):
            # commits/store.json is missing or damaged, so write it again. The files that it lists
            # were compared with the current inputs above, so these files are right.
            self._record_manifest()

    def _is_of_these_inputs(self, begins_anew: bool) -> bool:
        """Compare an existing store with the current manifest and plan.

        Returns:
            True if the store was made from the same inputs. False if the store was made from
            different inputs and may be replaced.

        Raises:
            StoreMismatch: the store was made from different inputs, and may not be replaced.
            StoreDamaged: the store is damaged, and may not be replaced.
        """
        try:
            self._restore()
            _check_same(self.path, self.manifest, self.plan)
        except (StoreMismatch, StoreDamaged):
            # A store in a bucket is never replaced, because other processes may be writing to it.
            if not begins_anew or self._lock is None or has_parts(self.path):
                raise
            return False
        return True

    def _delete_all(self) -> None:
        """Delete the files of a store that has no committed parts.

        The lock file and texts.arrow are kept.

        The manifest is deleted last. If the process is killed earlier, the next run finds the
        manifest of the old store, and deletes the remaining files.
        """
        for name in (COMMITS_NAME, PARTS_NAME, TARGET_NAME, CODEC_NAME, RUNS_NAME):
            if backend_of(self.path / name).exists():
                shutil.rmtree(str(self.path / name))
        # Keep texts.arrow, because this process may be reading it. A texts.arrow from other inputs
        # does no harm: the file contains a description of its inputs, and readers check this
        # description.
        folder = backend_of(self.path)
        folder.remove_files([CARD_NAME, PLAN_NAME, MANIFEST_NAME])
        folder.sync_names()

    def _restore(self) -> None:
        """Repair store.json and plan.parquet if the store was made from the current inputs."""
        documents = {
            MANIFEST_NAME: self.manifest.to_json().encode(),
            PLAN_NAME: plan_bytes(self.plan),
        }
        try:
            restore_files(self.path, documents)
        except StoreDamaged:
            if not backend_of(self.path / MANIFEST_NAME).exists():
                raise
            # Files made from the current inputs do not have the checksums in commits/store.json.
            # Either commits/store.json is damaged, or the store is from other inputs. The caller
            # compares the inputs next.

    @property
    def has_target(self) -> bool:
        """Whether the target bundle (``target/``) has been committed."""
        return backend_of(target_commit_path(self.path)).exists()

    def committed_parts(self) -> list[int]:
        """Return the numbers of the parts that have a commit, in ascending order.

        The result includes parts that other processes have committed in the meantime.
        """
        with check_guard(self.path):
            for name in backend_of(self.path / COMMITS_NAME).names_in():
                if (match := _COMMIT_NAME.fullmatch(name)) and int(match[1]) < self.n_parts:
                    # Keep the commits that are already known. The listing of a bucket may be out of
                    # date, and lack the latest commits of this process.
                    self._committed.add(int(match[1]))
        return sorted(self._committed)

    def pending_parts(self) -> list[int]:
        """Return the numbers of the parts that have no commit yet, in ascending order."""
        committed = set(self.committed_parts())
        return [part for part in range(self.n_parts) if part not in committed]

    def is_pending(self, part: int) -> bool:
        """Return whether a part has no commit yet."""
        return not backend_of(commit_path(self.path, part)).exists()

    def try_lock(self, part: int) -> bool:
        """Lock a part that this process is about to write, so that no other process writes it too.

        The lock is released when the ``PartWriter`` or the store is closed. The lock only saves
        work: if two processes write the same part, the second one to finish deletes its files.
        Nothing is locked in a bucket, or if no other process can write to the store.

        Returns:
            False if another process holds the lock. Otherwise True.
        """
        if self._lock is not None and not self._lock.is_alone:
            try:
                self._part_locks[part] = self._lock.hold(f"part-{part:05}", waits=False)
            except LockHeld:
                return False
        return True

    def part_sequences(self, part: int) -> pa.Table:
        """Return the sequences of a part in the order in which they must be written."""
        return rows_where(self.plan, numbers(self.plan, "part") == part)

    def part(self, part: int, pool: EncodePool | None = None) -> PartWriter:
        """Open a part for writing.

        Args:
            part: number of the part.
            pool: thread pool that encodes (see :class:`PartWriter`).

        Raises:
            StoreError: the plan does not contain this part, or the part is already committed.
        """
        if not 0 <= part < self.n_parts:
            raise StoreError(
                f"The plan has only the parts 0 to {self.n_parts - 1}, so part {part} does not "
                "exist."
            )
        if part in self._committed:
            raise StoreError(
                f"Part {part} is committed already. Write only the parts that pending_parts() "
                "returns."
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
        """Open a part for writing the fields of a codec.

        Args:
            part: number of the part.
            codec: codec of the fields. :meth:`lay_out` must have been called with a codec that
                contains these fields.
            existing: file name -> size and checksum, for the files that the part's commit already
                lists. The new commit lists them too.
            on_commit: function that is called with the part's number after the part is committed.
            pool: thread pool that encodes (see :class:`PartWriter`).
        """
        if part in self._open_parts:
            raise StoreError(
                f"Part {part} is already open for writing. Commit or discard it before you open it "
                "again."
            )
        self._open_parts.add(part)

        def close(is_committed: bool) -> None:
            self._open_parts.discard(part)
            if is_committed:
                on_commit(part)
            if part in self._part_locks:
                self._part_locks.pop(part).close()

        files = PartFiles(self, part, existing)
        return PartWriter(
            self.part_sequences(part), self._counts[part], codec, self._grids, files, close, pool
        )

    def lay_out(self, codec: StoreCodec) -> None:
        """Write the zarr.json files of a codec's arrays if they do not exist yet.

        An existing file is kept, even if its grid differs from the grid that this release would
        choose. New parts use the existing grid.
        """
        sizes = self.n_parts, self._longest_part
        with check_guard(self.path), disk_full_guard(self.path):
            documents = zarr_metadata((array, array_grid(array, *sizes)) for array in codec.arrays)
            contents = {f"{PARTS_NAME}/{name}": content for name, content in documents.items()}
            restore_files(self.path, contents)
            # Write the zarr.json of a group before the zarr.json files of the groups and arrays
            # inside it.
            for name, content in sorted(contents.items(), key=lambda item: item[0].count("/")):
                path = self.path / name
                file = backend_of(path)
                if not file.exists():
                    backend_of(path.parent).make_folder()
                    file.put_if_absent(content)
                    backend_of(path.parent.parent).sync_names()
            for array in codec.arrays:
                self._grids[array.name] = read_grid(self.path / PARTS_NAME, array, *sizes)

    def replace_manifest(self, manifest: StoreManifest) -> None:
        """Replace store.json atomically.

        All parts must already have the fields of the new manifest.
        """
        # commits/store.json contains the checksum of store.json. So delete commits/store.json
        # first, and write it again last. In between, readers do not verify the files that it lists.
        # If the disk is full, commits/store.json stays missing until the store is opened for
        # writing again.
        if manifest == self.manifest:
            return
        path = self.path / MANIFEST_NAME
        if self._lock is None and read_manifest(self.path) != self.manifest:
            raise changed_meanwhile(path)
        self._retract(manifest_commit_path(self.path))
        if not backend_of(path).replace(
            self.manifest.to_json().encode(), manifest.to_json().encode()
        ):
            # Another process has changed store.json. commits/store.json is missing now. Either the
            # other process writes it, or the next process that opens the store for writing.
            raise changed_meanwhile(path)
        self.manifest = manifest
        self._open_codec()
        self._record_manifest()
        name_next_basis(self.path, manifest)

    def record_run(self, record: Mapping[str, Any]) -> StorePath:
        """Write a JSON file about this run to ``runs/``.

        Args:
            record: command, versions and timings of the run. They do not affect the data of the
                store.

        Returns:
            Path of the file.
        """
        folder = self.path / RUNS_NAME
        backend_of(folder).make_folder()
        content = (json.dumps(record, indent=2, sort_keys=True, default=str) + "\n").encode()
        while True:
            path = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z.json"
            if backend_of(path).put_if_absent(content):
                return path
            # The name of the file contains the time in microseconds. Another run has already
            # created a file with the same time. Try again with the current time.

    def close(self) -> None:
        """Release the locks and delete temporary local files."""
        for file in self._part_locks.values():
            file.close()
        super().close()

    def __exit__(self, _: object, error: object, *__: object) -> None:
        # After Ctrl-C, the user may never run the command again. So delete the lock files and all
        # uncommitted files now.
        if isinstance(error, KeyboardInterrupt):
            self.sweep()
        self.close()

    def _record_manifest(self) -> None:
        write_manifest_commit(self.path, metadata_names(array.name for array in self.codec.arrays))

    def _clean(self, depth: Depth, progress: Progress) -> None:
        """Check the files of the store. Delete uncommitted files and commits of damaged parts."""
        # Check all files before the first deletion, so that nothing is deleted if a file cannot be
        # checked.
        report = verify_commits(self.path, self._counts, depth, progress)
        report.check_complete(self.path)
        self._remove_unfinished()
        name_next_basis(self.path, self.manifest)
        self.damages = tuple(report.damages)
        self._drop(self.damages)
        intact = report.commits.keys() - {damage.part for damage in self.damages}
        self._keep_listed(report.commits[part] for part in intact)
        self._committed |= intact

    def _drop(self, damages: Iterable[Finding]) -> None:
        """Delete the commits of damaged parts. If ``target/`` is damaged, delete its files."""
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

    def sweep(self, waits_s: float = 0.0) -> bool:
        """Take the store's lock exclusively, and delete files that no commit lists.

        Killed processes leave such files behind. If another process is still writing to the store,
        nothing is deleted, because the files may belong to that process. Afterwards, the caller
        must not write to the store.

        Args:
            waits_s: number of seconds to wait for other processes to stop writing.

        Returns:
            Whether the files were deleted.
        """
        if self._lock is not None and not self._lock.try_alone(waits_s):
            return False
        with check_guard(self.path):
            commits = read_commits(self.path, range(self.n_parts))
        self._committed = set(commits)
        self._remove_unfinished()
        self._keep_listed(commits.values())
        return True

    def remove_uncommitted(self) -> None:
        """Delete the files in ``parts/`` that no commit lists.

        This method must not be called while a part is being written.
        """
        self._keep_listed(
            read_part_commit(commit_path(self.path, part)) for part in self._committed
        )

    def _keep_listed(self, commits: Iterable[PartCommit]) -> None:
        listed: set[str] = set()
        for commit in commits:
            listed.update(commit.files)
        arrays = {array.name for array in self.codec.arrays}
        for name in listed:
            arrays.add(name.rpartition("/")[0])
        for name in metadata_names(arrays):
            listed.add(name.removeprefix(f"{PARTS_NAME}/"))
        self._remove_unlisted(listed)


def _check_unoccupied(store: StorePath) -> None:
    """Raise OutputOccupied if a path contains anything other than a store.

    The path may be missing, or it may be an empty folder, a store, or a store whose creation was
    interrupted.
    """
    # Check that a local path is a folder or can become a folder. A bucket has no folders, so this
    # check is not needed there.
    if isinstance(store, Path):
        folders = (store, *store.absolute().parents)
        existing = next(path for path in folders if path.exists() or path.is_symlink())
        if not existing.is_dir():
            raise OutputOccupied(
                f"{store} cannot be created, because {existing} is {kind_of(existing)}, not a "
                "folder. Choose another output folder."
            )
        if existing is not store:
            return
    manifest = store / MANIFEST_NAME
    has_commit = backend_of(manifest_commit_path(store)).exists()
    if backend_of(manifest).exists():
        try:
            read_manifest(store)
        except SchemaVersionError:
            if not any(path == manifest for path, _ in find_manifest_damage(store)):
                # store.json is undamaged, so the store really has a schema version that this
                # release cannot read. Raise the error that says so.
                raise
        except StoreDamaged as error:
            # store.json is not a valid manifest. If commits/store.json exists, the folder is a
            # store with a damaged store.json, which ``StoreWriter._restore`` later repairs or
            # reports. If commits/store.json does not exist either, store.json may be a file of
            # another program.
            if not has_commit:
                raise OutputOccupied(
                    f"{error} If {store} belongs to another program, choose another output folder."
                ) from error
        return
    if has_parts(store) and not has_commit:
        raise OutputOccupied(
            f"{store} has committed parts, but {MANIFEST_NAME} is missing, so it is unknown from "
            f"which inputs they were made. Restore {MANIFEST_NAME} from a copy, or choose another "
            "output folder."
        )
    # Ignore the folder that a killed speed test leaves behind.
    all_names = backend_of(store).names_in()
    names = [name for name in all_names if not name.startswith(SPEED_TEST_PREFIX)]
    foreign = sorted(name for name in names if not is_known(name))
    # Accept a store whose creation was interrupted. Such a store contains only names that may occur
    # in a store. In a folder, the lock file must be one of them. A bucket has no lock file.
    if names and (foreign or (LOCK_NAME not in names and isinstance(store, Path))):
        shown = ", ".join((foreign or sorted(names))[:3])
        raise OutputOccupied(
            f"{store} is not empty, and it is not an activation store (it holds {shown}). Choose "
            "another output folder, or empty this one."
        )


def _check_same(store: StorePath, manifest: StoreManifest | None, plan: pa.Table) -> None:
    """Compare a store with a manifest and a plan.

    Args:
        store: the store's path.
        manifest: the expected manifest. If the argument is None, only the plan is compared.
        plan: the expected plan.

    Raises:
        StoreMismatch: the manifest or the plan of the store differs. The error contains every key
            that differs.
    """
    changes: dict[str, tuple[Any, Any]] = {}
    if manifest is not None:
        old = flatten(json.loads(read_manifest(store).to_json()))
        new = flatten(json.loads(manifest.to_json()))
        for key in sorted(old.keys() | new.keys()):
            was = old.get(key, "(absent)")
            now = new.get(key, "(absent)")
            if was != now:
                changes[key] = (was, now)
    old_plan = read_plan(store / PLAN_NAME)
    if not old_plan.equals(plan):
        changes |= _plan_changes(old_plan, plan)
    if changes:
        raise StoreMismatch(str(store), changes)


def _plan_changes(old: pa.Table, new: pa.Table) -> dict[str, tuple[Any, Any]]:
    """Describe the first difference between two plans that are not equal.

    If the shorter plan is the start of the longer one, the difference is the number of rows.

    Returns:
        The argument ``changes`` of StoreMismatch: maps a key to (old value, new value).
    """
    n_rows = min(old.num_rows, new.num_rows)
    row = bisect_left(
        range(n_rows),
        True,
        key=lambda row: not old.slice(0, row + 1).equals(new.slice(0, row + 1)),
    )
    if row == n_rows:
        return {"plan.n_sequences": (old.num_rows, new.num_rows)}
    (old_values,) = old.slice(row, 1).to_pylist()
    (new_values,) = new.slice(row, 1).to_pylist()
    changes: dict[str, tuple[Any, Any]] = {}
    for name, was in old_values.items():
        if (now := new_values[name]) != was:
            changes[f"plan.row {row}.{name}"] = (was, now)
    return changes


def _begin(
    store: StorePath, manifest: StoreManifest, plan: pa.Table, codec_files: Mapping[str, bytes]
) -> None:
    """Create a store: write the codec's files, then plan.parquet, then store.json.

    Some of these files may already exist. A folder is locked, so such files were left by a killed
    process, and are replaced. In a bucket, another writer may be creating the store at the same
    time. So in a bucket, existing files are not replaced, but compared with the new content.
    """
    if isinstance(store, Path):
        (store / PLAN_NAME).unlink(missing_ok=True)
        for name in codec_files:
            (store / CODEC_NAME / name).unlink(missing_ok=True)
    for name, content in codec_files.items():
        backend_of(store / CODEC_NAME).make_folder()
        if not backend_of(store / CODEC_NAME / name).put_if_absent(content):
            raise StoreMismatch(
                str(store), {"codec.basis_sha256": ("(learned by another run)", "(learned here)")}
            )
    if not backend_of(store / PLAN_NAME).put_if_absent(plan_bytes(plan)):
        _check_same(store, None, plan)
    if not backend_of(store / MANIFEST_NAME).put_if_absent(manifest.to_json().encode()):
        _check_same(store, manifest, plan)


def name_next_basis(store: StorePath, manifest: StoreManifest) -> None:
    """Rename ``codec/next-basis.safetensors`` to ``codec/basis.safetensors``.

    While fields are added, ``codec/next-basis.safetensors`` contains the new basis of the codec.
    The file is renamed only if it exists and store.json already contains its hash.
    """
    path = store / CODEC_NAME / NEXT_BASIS_NAME
    try:
        content = read_basis(path)
    except MISSING:
        return
    if hashlib.sha256(content).hexdigest() != manifest.codec.get("basis_sha256"):
        return
    # Write codec/basis.safetensors before codec/next-basis.safetensors is deleted. So at any time,
    # the basis that store.json requires exists under at least one of the two names. Readers try
    # both names.
    folder = backend_of(path.parent)
    backend_of(path.parent / BASIS_NAME).put(content)
    folder.remove_files([path.name])
    folder.sync_names()
