"""Publishes the files of a writer: gives them their final names and writes the commit of the part.

A store is a local folder or a prefix of a bucket. A *writer* is a process that writes to the store.
The *commit* of a part is a JSON file that lists the files of the part. Readers ignore a part that
has no commit.

A writer first writes each file of a part under a temporary name, such as
``c.0.0.0.0.0.5f3a9c01.partial``. No other writer uses the same temporary name. When all files are
synced or uploaded, the writer publishes the part. If several writers write the same part, the first
one to publish it wins, and the others delete their files.

*In a folder*, a writer holds a lock while it publishes part K::

    parts/kv/c.K.0.0.0.0              renamed from its temporary name, like all files of the part
    commits/part-K.json               created, or replaced if fields are added to the part

*In a bucket*, there are no locks, and the server can only copy files, not rename them. So a writer
first creates a *publication record*. This JSON file contains the new commit, and the names of the
uploaded files. A part can have only one record at a time::

    1  commits/part-K.json.partial    the record, which can be created only if there is none yet
    2  parts/kv/c.K.0.0.0.0           copied by the server from the uploaded file, like all files of
                                      the part
       commits/part-K.json            created if it does not exist, or replaced if fields are added
    3  uploads and record             deleted

A writer may find that another writer has already created a record. The other writer may have been
killed, so nobody waits for it. Instead, the writer that finds the record executes steps 2 and 3 of
the other writer's publication. It does no harm if several writers execute these steps. Afterwards,
the writer publishes its own files. But if the part has a commit by then, the writer deletes its own
files instead.

One record lists all files of a part, for two reasons:

- A part must not contain shards from different machines, because machines may round differently.
  If scales from one machine were used to decode codes from another machine, the values would be
  wrong, although all checksums would match.
- S3 supports conditional writes of small files, but not of large files, which are uploaded in
  blocks. So one small file must decide which writer publishes.

Step 2 does nothing if another writer has already created the commit, or has already replaced it. So
if readers may open a file, it is never overwritten by the publication of another record. Uploads
that no record lists are deleted when they are older than ``LEFTOVER_S``. A writer gives up a part
if it has not published the part within ``COMMIT_WITHIN_S`` after its first upload.
"""

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from ...errors import StorageUnavailable, StoreDamaged, StoreLocked
from ...files import PARTIAL_SUFFIX, disk_full_guard
from ..backend import MISSING, backend_of, file_crc32
from ..commit import (
    FileName,
    FileRecord,
    PartCommit,
    content_of,
    files_json,
    read_part_commit,
)
from ..paths import StorePath, name_below
from ..requests import requests
from ..schema import (
    CODEC_NAME,
    COMMITS_NAME,
    LOCKS_NAME,
    PARTS_NAME,
    PUBLISH_NAME,
    RUNS_NAME,
    TARGET_NAME,
    Natural,
    commit_path,
    is_known,
    publication_path,
    target_commit_path,
)
from .lock import StoreLock

# Longest allowed time, in seconds, from the first upload of a part to its publication.
COMMIT_WITHIN_S = 24 * 3600.0
LEFTOVER_S = 2 * COMMIT_WITHIN_S  # Age in seconds at which an unpublished upload is deleted.


def partial_name(name: str, attempt: str) -> str:
    """Return the temporary name under which a file is written before it gets its final name.

    ``attempt`` is a random string that identifies the writer. So two writers never use the same
    temporary name.
    """
    return f"{name}.{attempt}{PARTIAL_SUFFIX}"


@dataclass(frozen=True)
class Publication:
    """Files that a writer publishes together, and the commit that lists them.

    To publish files means to give them their final names and to write the commit. In a bucket, the
    writer first saves the attributes of this object as a JSON file, the publication record. If the
    writer is then killed, other writers read the record and finish the publication.
    """

    # Name of the commit's file in ``commits/``, e.g. ``"part-00007.json"``.
    commit: str
    # Random text that identifies the writer in the temporary names of the files (``partial_name``).
    attempt: str
    # Final name of each file, relative to the store -> size of the file in bytes.
    files: Mapping[FileName, Natural]
    # Content of the commit that is replaced. If the value is None, the commit must not exist yet,
    # and is created.
    old: str | None
    new: str  # Content of the new commit.

    def to_json(self) -> bytes:
        """Return the content of the publication record: this object as JSON."""
        return (json.dumps(vars(self), indent=1, sort_keys=True) + "\n").encode()

    def publish(self, path: StorePath) -> bool:
        """Publish the files and the commit, unless another writer has published this commit first.

        If the store is in a folder, the caller must hold the lock for these files
        (:meth:`StoreFiles.publishing`).

        Args:
            path: path of the commit.

        Returns:
            Whether the commit now has the content of this publication.
        """
        record = backend_of(publication_path(path))
        if record.uploads:
            # A bucket has no locks. Instead, only the writer that has created the publication
            # record may publish. If there is a record of another writer, finish the publication of
            # that writer, which deletes the record. Then try again.
            while not record.put_if_absent(self.to_json()):
                finish_recorded(path)
        return self.finish(path)

    def finish(self, path: StorePath) -> bool:
        """Give the files their final names, write the commit, and delete the uploads and the record.

        These are steps 2 and 3 of the module's docstring. Another writer may already have executed
        these steps, completely or in part.

        Args:
            path: path of the commit.

        Returns:
            Whether the commit now has the content of this publication.
        """
        store = path.parent.parent
        old = None if self.old is None else self.old.encode()
        new = self.new.encode()
        has_won = False
        if content_of(path) == old:
            try:
                name_files(store, self.attempt, self.files)
                commit = backend_of(path)
                has_won = commit.put_if_absent(new) if old is None else commit.replace(old, new)
            except FileNotFoundError:
                # An upload or the old commit is missing. Perhaps another writer has finished this
                # publication in the meantime and deleted the uploads. In that case, the commit has
                # its new content.
                has_won = content_of(path) == new
        leftovers = [partial_name(name, self.attempt) for name in self.files]
        leftovers.append(name_below(store, publication_path(path)))
        backend_of(store).remove_files(leftovers)
        return has_won


_PUBLICATION = TypeAdapter(Publication)


def finish_recorded(commit: StorePath) -> None:
    """Finish the publication of another writer, which may have been killed.

    The other writer has left a publication record: a JSON file with the new commit and the names of
    the uploaded files. If the record is not valid, it is only deleted.

    Args:
        commit: path of the commit. If it has no publication record, nothing is done.
    """
    record = publication_path(commit)
    try:
        publication = _PUBLICATION.validate_json(backend_of(record).read(), strict=True)
    except MISSING:
        return
    except ValueError:
        backend_of(commit.parent).remove_files([record.name])
        return
    publication.finish(commit)


def name_files(store: StorePath, attempt: str, files: Mapping[str, int]) -> None:
    """Give files their final names.

    In a folder, the files are renamed. In a bucket, the server copies the uploaded files, which
    stay there under their temporary names.

    Args:
        store: the store's path.
        attempt: string that identifies the writer in the temporary names (``partial_name``).
        files: final name, relative to the store -> size in bytes.
    """
    if isinstance(store, Path):
        for name in files:
            os.rename(store / partial_name(name, attempt), store / name)
        for folder in {(store / name).parent for name in files}:
            backend_of(folder).sync_names()
        return
    bucket = store.bucket

    def copy(name: str) -> None:
        bucket.copy((store / partial_name(name, attempt)).key, (store / name).key, files[name])

    list(requests().map(copy, files))


class PartFiles:
    """The files of one part that a writer has written and not published yet.

    For a store in a bucket, each shard is first written to a local temporary folder. The shard is
    uploaded while the next shard is being encoded.

    Args:
        store: the files of the store.
        part: number of the part.
        existing: file name -> size and checksum, for the files that the part's commit already
            lists. For a new part, the mapping is empty. The mapping has entries only if fields are
            added to a committed part.
    """

    def __init__(self, store: "StoreFiles", part: int, existing: Mapping[str, FileRecord]) -> None:
        self._store = store
        self._part = part
        self.existing = existing
        self.commit_path = commit_path(store.path, part)
        self._folder = store.scratch_path / PARTS_NAME
        # In a bucket, this process may give up a part and write it again later. By then, another
        # writer may still be publishing the first uploads. So in a bucket, each PartFiles object
        # uses different temporary names.
        self.attempt = store.attempt if isinstance(store.path, Path) else secrets.token_hex(4)
        self._first_upload_s: float | None = None
        self._paths: list[Path] = []  # Paths of the local files of the shards.
        self._asked_for: PartCommit | None = None

    def new_path(self, name: str) -> Path:
        """Return a path for a new shard. The caller must write the shard to this local file.

        Args:
            name: name of the shard in the commit.
        """
        self._paths.append(self._folder / partial_name(name, self.attempt))
        return self._paths[-1]

    def make_durable(self, fd: int, path: Path) -> None:
        """Make a finished local file durable: sync it to disk, or upload it to the bucket."""
        if isinstance(self._store.path, Path):
            with disk_full_guard(path):
                os.fsync(fd)
            return
        # Use the wall clock. Unlike `time.monotonic`, it continues while the machine is suspended.
        self._first_upload_s = self._first_upload_s or time.time()
        name = name_below(self._folder, path)
        backend_of(self._store.path / PARTS_NAME / name).move_in(path)
        path.unlink()

    def publish(self, commit: PartCommit, shards: Collection[str]) -> tuple[PartCommit, bool]:
        """Publish the part: give its files their final names, and write its commit.

        Args:
            commit: the new commit of the part.
            shards: names of the shards that this writer has written.

        Returns:
            The commit that the part now has, and whether this is ``commit``. If not, another writer
            has committed the part first.
        """
        path = self.commit_path
        if time.time() - (self._first_upload_s or time.time()) > COMMIT_WITHIN_S:
            raise StorageUnavailable(
                f"{path} was not written, because the upload of this part has taken more than "
                f"{COMMIT_WITHIN_S / 3600:.0f} hours, and other processes may have deleted its "
                "first files as leftovers. Run the same command again. For a new store, choose a "
                "smaller `part_tokens`."
            )
        old = replace(commit, files=self.existing).to_json().decode() if self.existing else None
        files = {f"{PARTS_NAME}/{name}": commit.files[name].bytes for name in shards}
        self._asked_for = commit
        with self._store.publishing(f"publish-{self._part:05}"):
            # In a folder, `publish` first checks whether the commit exists, and then renames the
            # files. The lock is held during both steps, so that a part never has files of two
            # writers.
            new = commit.to_json().decode()
            if Publication(path.name, self.attempt, files, old, new).publish(path):
                return commit, True
        try:
            other = read_part_commit(path)
        except FileNotFoundError as error:
            raise changed_meanwhile(path) from error
        if not other.files.keys() >= commit.files.keys():
            raise changed_meanwhile(path)
        return other, False

    def withdraw(self) -> bool:
        """Give up the part, and delete its files.

        Files that were published already are not deleted. In a bucket, if this writer has tried to
        publish its uploads, the uploads are not deleted either.

        Returns:
            Whether the part nevertheless has the commit of this writer. This happens if an
            interrupt has arrived after the commit was written.
        """
        for path in self._paths:
            path.unlink(missing_ok=True)
        if self._asked_for is None:
            uploads = [name_below(self._folder, path) for path in self._paths]
            backend_of(self._store.path / PARTS_NAME).remove_files(uploads)
            return False
        # This writer has tried to publish. So keep the uploads. The server may have created the
        # publication record although its response was lost. In that case, other writers need the
        # uploads to finish the publication. If no record lists the uploads, a later run deletes
        # them.
        with suppress(OSError, StoreDamaged):
            return read_part_commit(self.commit_path) == self._asked_for
        return False


class StoreFiles:
    """The files of a store that is opened for writing.

    A store in a folder is locked until :meth:`close`. A store in a bucket has no lock.

    Args:
        path: the store's path.
        shares: whether to share the lock with other processes (see ``StoreLock``). For a store in a
            bucket, the argument has no effect, because several processes can always write to it.
    """

    def __init__(self, path: StorePath, shares: bool = False) -> None:
        self.path = path
        # Random text that identifies this writer in the temporary names of its files
        # (`partial_name`).
        self.attempt = secrets.token_hex(4)
        # The lock of the store. A bucket has publication records instead of locks, so the value is
        # None for a bucket.
        self._lock = StoreLock(path, shares) if isinstance(path, Path) else None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if self._lock is None:
            # In a bucket, killed writers may have left publication records. Finish these
            # publications first, so that their commits exist when the store is checked.
            self._remove_unfinished()

    def publishing(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager that locks files while they are published.

        No other process can publish the same files inside the ``with`` block. For a store in a
        bucket, nothing is locked.

        Args:
            name: name of the lock. There is one lock for each part, and one each for the dataset
                card, texts.arrow and ``target/`` (see the module ``lock``).
        """
        if self._lock is None or self._lock.is_alone:
            return nullcontext()
        return self._lock.hold(name)

    @property
    def scratch_path(self) -> Path:
        """A local folder for temporary files of this process and its worker processes.

        It is the store's folder, or a temporary folder if the store is in a bucket.
        """
        if isinstance(self.path, Path):
            return self.path
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="moa-data-")
        return Path(self._scratch.name)

    @contextmanager
    def target(self) -> Iterator[Path]:
        """Write the target bundle: the config, tokenizer and frozen weights of the target.

        Yields:
            A local folder, which the ``with`` block fills. If the block ends without an error, the
            files in the folder are published as ``target/``.
        """
        commit = target_commit_path(self.path)
        attempt = secrets.token_hex(4)
        files = dict[str, FileRecord]()
        with (
            disk_full_guard(self.path / TARGET_NAME),
            tempfile.TemporaryDirectory(
                PARTIAL_SUFFIX, f"{TARGET_NAME}.", self.scratch_path
            ) as folder_name,
        ):
            folder = Path(folder_name)
            yield folder
            for file_name in backend_of(folder).names_below():
                local = folder / file_name
                files[file_name] = FileRecord(local.stat().st_size, file_crc32(local))
                target = self.path / TARGET_NAME / partial_name(file_name, attempt)
                backend_of(target).move_in(local)
            # While the files of the target bundle are replaced, they do not match its old commit,
            # and the target bundle would look damaged. So delete the old commit first. A target
            # bundle without a commit counts as incomplete.
            was_there = content_of(commit) is not None
            self._retract(commit)
            sizes = {f"{TARGET_NAME}/{name}": record.bytes for name, record in files.items()}
            new = files_json(files).decode()
            has_won = Publication(commit.name, attempt, sizes, None, new).publish(commit)
            # If there was no commit, another writer may have published the same target bundle
            # first, which is not an error.
            if was_there and not has_won:
                raise changed_meanwhile(commit)
            self._remove_others(TARGET_NAME, files)

    def _remove_others(self, folder: str, kept: Collection[str]) -> None:
        """Delete the files of a folder. Keep files in ``kept`` and files with temporary names."""
        backend = backend_of(self.path / folder)
        others: list[str] = []
        for name in backend.names_below():
            if not name.endswith(PARTIAL_SUFFIX) and name not in kept:
                others.append(name)
        backend.remove_files(others)

    def _retract(self, *commits: StorePath) -> None:
        """Delete commits durably, before the files that they list are changed."""
        folder = backend_of(self.path / COMMITS_NAME)
        folder.remove_files(commit.name for commit in commits)
        folder.sync_names()

    def _remove_unfinished(self) -> None:
        """Clean up after writers that were killed.

        In a local store, delete the temporary files that they have left outside of ``parts/``. In a
        bucket, they may have left publication records. A record lists uploaded files and contains
        their future commit. Give these files their final names, and write the commit.
        """
        if isinstance(self.path, Path):
            leftovers = [self.path / LOCKS_NAME, self.path / PUBLISH_NAME]
            for name in ("", COMMITS_NAME, RUNS_NAME, CODEC_NAME):
                leftovers += (self.path / name).glob(f"*{PARTIAL_SUFFIX}")
            leftovers += (self.path / TARGET_NAME).rglob(f"*{PARTIAL_SUFFIX}")
            for leftover in leftovers:
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink(missing_ok=True)
            return
        commits = self.path / COMMITS_NAME
        for name in backend_of(commits).names_in():
            if name.endswith(PARTIAL_SUFFIX):
                finish_recorded(commits / name.removesuffix(PARTIAL_SUFFIX))

    def _remove_unlisted(self, kept: Collection[str]) -> None:
        """Delete all files in ``parts/`` that are not in ``kept``. Then delete empty folders.

        In a bucket, another writer may be publishing its files right now. So only uploads in
        ``parts/`` and ``target/`` that are older than ``LEFTOVER_S`` are deleted there. No writer
        publishes uploads of this age any more.
        """
        parts = self.path / PARTS_NAME
        if isinstance(parts, Path):
            backend = backend_of(parts)
            backend.remove_files(name for name in backend.names_below() if name not in kept)
            # Reverse the order, so that a folder comes after the folders in it.
            for folder in sorted(parts.rglob("*/"), reverse=True):
                if not os.listdir(folder):
                    folder.rmdir()
            return
        # Keep all files with final names, because another process may be publishing them right now.
        bucket = parts.bucket
        now = datetime.now(UTC)
        target = parts.parent / TARGET_NAME
        entries = bucket.list_files(parts.key) | bucket.list_files(target.key)
        leftovers: list[str] = []
        for key, entry in entries.items():
            if not key.endswith(PARTIAL_SUFFIX) or entry.modified is None:
                continue
            if (now - entry.modified).total_seconds() > LEFTOVER_S:
                leftovers.append(key)
        bucket.delete(leftovers)

    def close(self) -> None:
        """Release the lock and delete temporary local files."""
        if self._lock is not None:
            self._lock.close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


def refuse_links(store: StorePath) -> None:
    """Raise StoreDamaged if a store contains a symbolic link.

    Writing or deleting through a link would change files outside of the store. The store's folder
    itself may be a link. This folder may also contain links with names that a store does not use
    (``schema.is_known``), because no writer changes such links.
    """
    inside = [os.fspath(store)] if isinstance(store, Path) else list[str]()
    while inside:
        folder = inside.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if folder == str(store) and not is_known(entry.name):
                    continue
                if entry.is_symlink():
                    raise StoreDamaged(
                        f"{entry.path} is a symbolic link to {os.readlink(entry.path)!r}, but a "
                        "store with links inside its folder is never written. Replace the link "
                        "with the files themselves, or make the whole store a link instead."
                    )
                if entry.is_dir(follow_symlinks=False):
                    inside.append(entry.path)


def changed_meanwhile(path: StorePath) -> StoreLocked:
    """Return the error to raise if another process has changed a file that this process had read."""
    return StoreLocked(
        f"{path} was changed by another process while this command ran. Wait until that process "
        "ends, then run the same command again."
    )
