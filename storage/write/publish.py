"""How the files of a writer become those of a store, in a folder or in a bucket.

A file is written under a name that no other writer uses (``c.0.0.0.0.0.5f3a9c01.partial``), in a bucket by an upload.
When all files of a part are durable, it is published::

    1  commits/part-K.json.partial    in a bucket only: a record of the commit to be made and the files it is made of
    2  parts/kv/c.K.0.0.0.0           renamed, or in a bucket copied by the server, from the name in use so far
       commits/part-K.json            created if absent; where fields are added, it replaces the one that was there
    3  uploads and record             deleted

Of several writers of a part the first to publish wins. In a folder publishing takes a lock. A bucket has no locks: the
record, which is created if absent, decides. Every writer that meets one takes steps 2 and 3 of it, which are the same
for all and may be repeated, so that nobody waits for a writer that was killed. Then it publishes its own files, or
deletes them where there is a commit by now.

Why one record for all files of a part, and not each shard created if absent: machines that differ round differently,
and their shards do not go together. Codes of one with scales of the other decode to wrong values though every checksum
fits. And S3 has conditional puts of documents, not of large files that are uploaded in blocks.

A file gets its final name in step 2 alone, and only while its commit is not there: before, no reader asks for it, and
afterwards another record comes to nothing. Uploads that no record names are deleted when they are older than
``LEFTOVER_S``: a writer gives up a part that it could not publish within ``COMMIT_WITHIN_S`` of its first upload.
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

from ...errors import StorageUnavailable, StoreDamaged, StoreLocked
from ...files import (
    PARTIAL_SUFFIX,
    disk_full_guard,
    mapping,
    parse_object,
    relative_name,
    walk,
    whole_number,
)
from .. import backend
from ..commit import (
    FileRecord,
    PartCommit,
    content_of,
    files_json,
    read_file_records,
    read_part_commit,
)
from ..paths import RemotePath, StorePath, requests
from ..schema import (
    CODEC_NAME,
    COMMITS_NAME,
    PARTS_NAME,
    PUBLISH_NAME,
    RUNS_NAME,
    TARGET_NAME,
    commit_path,
    is_known,
    publication_path,
    target_commit_path,
)
from .lock import FIRST_PART_BYTE, StoreLock

COMMIT_WITHIN_S = 24 * 3600.0  # time from the first upload of a part in which it must be published
LEFTOVER_S = 2 * COMMIT_WITHIN_S  # age from which an upload that was not published is deleted


def partial_name(name: str, attempt: str) -> str:
    """Return what a file is called until it is published: after its writer."""
    return f"{name}.{attempt}{PARTIAL_SUFFIX}"


@dataclass(frozen=True)
class Publication:
    """Files of a writer, and the commit that is to list them."""

    commit: StorePath  # where the commit belongs
    attempt: str  # part of the names that the files have until they are published
    files: Mapping[str, int]  # final name, relative to the store -> bytes
    old: bytes | None  # content of the commit that is replaced, None where there must be none
    new: bytes  # content of the commit

    @classmethod
    def read(cls, commit: StorePath) -> "Publication | None":
        """Read the record beside a commit; None where there is none, or nothing that one could be."""
        try:
            content = parse_object(backend.read_file(publication_path(commit)))
            files = {
                relative_name(name): whole_number(n, "bytes")
                for name, n in mapping(content["files"], "files").items()
            }
            old = None if content["old"] is None else str(content["old"]).encode()
            return cls(commit, str(content["attempt"]), files, old, str(content["new"]).encode())
        except backend.MISSING:
            return None
        except (KeyError, TypeError, ValueError):
            backend.remove_files(publication_path(commit))
            return None

    def to_json(self) -> bytes:
        """Return the record's content."""
        texts = {
            "commit": self.commit.name,
            "old": self.old and self.old.decode(),
            "new": self.new.decode(),
        }
        return (json.dumps(vars(self) | texts, indent=1, sort_keys=True) + "\n").encode()

    def publish(self) -> bool:
        """Make the commit, unless another one was made first; returns whether it is this one."""
        if isinstance(self.commit, RemotePath):  # in a folder the caller holds the lock
            while not backend.put_if_absent(publication_path(self.commit), self.to_json()):
                if (other := Publication.read(self.commit)) is not None:
                    other.finish()
        return self.finish()

    def finish(self) -> bool:
        """Name the files and make the commit, as far as nobody has done it; delete what is left of the files."""
        store = self.commit.parent.parent
        has_won = False
        if content_of(self.commit) == self.old:
            try:
                name_files(store, self.attempt, self.files)
                has_won = (
                    backend.put_if_absent(self.commit, self.new)
                    if self.old is None
                    else backend.replace_file(self.commit, self.old, self.new)
                )
            except FileNotFoundError:
                # Somebody has finished it meanwhile and deleted the uploads; or the commit, or an
                # upload, was deleted.
                has_won = content_of(self.commit) == self.new
        leftovers = (store / partial_name(name, self.attempt) for name in self.files)
        backend.remove_files(*leftovers, publication_path(self.commit))
        return has_won


def name_files(store: StorePath, attempt: str, files: Mapping[str, int]) -> None:
    """Give files of a store, name -> bytes, their final names; in a bucket the uploads stay too."""
    if isinstance(store, Path):
        for name in files:
            os.rename(store / partial_name(name, attempt), store / name)
        for folder in {(store / name).parent for name in files}:
            backend.sync_names(folder)
        return
    bucket = store.backend

    def copy(name: str) -> None:
        bucket.copy((store / partial_name(name, attempt)).key, (store / name).key, files[name])

    list(requests().map(copy, files))


class PartFiles:
    """The files of one part until they are published; ``existing`` is what its commit lists, where fields are added.

    Shards of a part in a bucket are encoded to a temporary folder and uploaded while the next one is encoded.
    """

    def __init__(self, store: "StoreFiles", part: int, existing: Mapping[str, FileRecord]) -> None:
        self._store = store
        self._part = part
        self.existing = existing
        self.commit_path = commit_path(store.path, part)
        self._folder = store.scratch_path / PARTS_NAME
        # The uploads of a part that was given up may still be published, so that a second try needs
        # other names.
        self.attempt = store.attempt if isinstance(store.path, Path) else secrets.token_hex(4)
        self._first_upload_s: float | None = None
        self._uploads: list[StorePath] = []
        self._asked_for: PartCommit | None = None

    def path_of(self, name: str) -> Path:
        """Return the local file in which a shard, called as its commit will list it, is written."""
        return self._folder / partial_name(name, self.attempt)

    def make_durable(self, fd: int, path: Path) -> None:
        """Sync a local file that is complete, or upload it."""
        if isinstance(self._store.path, Path):
            with disk_full_guard(path):
                os.fsync(fd)
            return
        # the wall clock: it runs while a machine sleeps
        self._first_upload_s = self._first_upload_s or time.time()
        target = self._store.path / PARTS_NAME / path.relative_to(self._folder).as_posix()
        self._uploads.append(target)
        _store(path, target)
        path.unlink()

    def publish(self, commit: PartCommit, shards: Collection[str]) -> tuple[PartCommit, bool]:
        """Make the part exist, with these shards of this writer.

        Returns the part's commit, and whether it is this one; else another writer was first, and its commit stays.
        """
        path = self.commit_path
        if time.time() - (self._first_upload_s or time.time()) > COMMIT_WITHIN_S:
            raise StorageUnavailable(
                f"{path}: the part took longer than {COMMIT_WITHIN_S / 3600:.0f} hours from its first upload, after "
                "which its files may have been deleted. Run the same command again, with a smaller --part-tokens for a "
                "new store."
            )
        old = replace(commit, files=self.existing).to_json() if self.existing else None
        files = {f"{PARTS_NAME}/{name}": commit.files[name].bytes for name in shards}
        self._asked_for = commit
        with self._store.publishing(FIRST_PART_BYTE + self._part):
            # In a folder the byte is held from the look at the commit to the last rename, so that
            # no part is mixed.
            if Publication(path, self.attempt, files, old, commit.to_json()).publish():
                return commit, True
        try:
            other = read_part_commit(path)
        except FileNotFoundError as error:
            raise changed_meanwhile(path) from error
        if not other.files.keys() >= commit.files.keys():
            raise changed_meanwhile(path)
        return other, False

    def withdraw(self) -> bool:
        """Delete what was not published; returns whether the commit was made: an interrupt may arrive just then."""
        if self._asked_for is None:
            backend.remove_files(*self._uploads)
            return False
        # A record may be there even if no answer came, and then others need the uploads. Else a
        # later run deletes them.
        with suppress(OSError, StoreDamaged):
            return read_part_commit(self.commit_path) == self._asked_for
        return False


class StoreFiles:
    """The files of a store that is written to: a folder, locked until :meth:`close`, or a prefix of a bucket.

    ``shares``: see ``StoreLock``; in a bucket others may always write.
    """

    def __init__(self, path: StorePath, shares: bool = False) -> None:
        self.path = path
        self.attempt = secrets.token_hex(4)  # no other writer's name; its unfinished files bear it
        # A bucket has no locks: the records of publications decide there.
        self._lock = StoreLock(path, shares) if isinstance(path, Path) else None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._target_copy: tuple[Mapping[str, FileRecord], Path] | None = None
        if self._lock is None:
            # before anything is compared with commits that are about to be made
            self._remove_unfinished()

    @property
    def is_shared(self) -> bool:
        """Whether other processes may write to the store too."""
        return self._lock is None or not self._lock.is_alone

    def publishing(self, byte: int) -> AbstractContextManager[None]:
        """Keep others from publishing the same document meanwhile; ``lock`` names the bytes."""
        return nullcontext() if self._lock is None else self._lock.locked_byte(byte)

    @property
    def scratch_path(self) -> Path:
        """A local folder for files that only this process and its workers need: the store's, or a temporary one."""
        if isinstance(self.path, Path):
            return self.path
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="moa-data-")
        return Path(self._scratch.name)

    @property
    def target_path(self) -> Path:
        """A local folder with the target bundle: the store's own, or a copy of what is in a bucket."""
        if isinstance(self.path, Path):
            return self.path / TARGET_NAME
        try:
            files = read_file_records(target_commit_path(self.path))
        except backend.MISSING:
            files = {}
        if self._target_copy is None or self._target_copy[0] != files:
            folder = Path(tempfile.mkdtemp(prefix=TARGET_NAME, dir=self.scratch_path))
            backend.download(self.path / TARGET_NAME, folder, files)
            self._target_copy = files, folder
        return self._target_copy[1]

    @contextmanager
    def target(self) -> Iterator[Path]:
        """Write the target bundle: yields a folder to fill, which becomes ``target/`` when the block ends well."""
        commit = target_commit_path(self.path)
        attempt = secrets.token_hex(4)
        files = dict[str, FileRecord]()
        with (
            disk_full_guard(self.path / TARGET_NAME),
            tempfile.TemporaryDirectory(
                PARTIAL_SUFFIX, f"{TARGET_NAME}.", self.scratch_path
            ) as name,
        ):
            folder = Path(name)
            yield folder
            for root, _, names in walk(folder):
                for local in (root / each for each in names):
                    below = local.relative_to(folder).as_posix()
                    files[below] = FileRecord(local.stat().st_size, backend.file_crc32(local))
                    _store(local, self.path / TARGET_NAME / partial_name(below, attempt))
            # While files are replaced they do not fit their commit; without one a bundle is
            # incomplete, not damaged.
            was_there = content_of(commit) is not None
            self._retract(commit)
            sizes = {f"{TARGET_NAME}/{below}": record.bytes for below, record in files.items()}
            has_won = Publication(commit, attempt, sizes, None, files_json(files)).publish()
            if was_there and not has_won:  # else another one's, of the same target, was there first
                raise changed_meanwhile(commit)
            self._remove_others(TARGET_NAME, files)

    def _remove_others(self, folder: str, kept: Collection[str]) -> None:
        """Delete the files of a folder but those to keep and those that somebody is writing."""
        found = (
            name
            for name in backend.names_below(self.path / folder)
            if not name.endswith(PARTIAL_SUFFIX)
        )
        backend.remove_files(*(self.path / folder / name for name in found if name not in kept))

    def _retract(self, *commits: StorePath) -> None:
        """Delete commits durably, before the files that they list change."""
        backend.remove_files(*commits)
        backend.sync_names(self.path / COMMITS_NAME)

    def _remove_unfinished(self) -> None:
        """Delete documents that a kill left unfinished; in a bucket finish what others were publishing."""
        if isinstance(self.path, Path):
            for folder in (
                self.path,
                *(self.path / name for name in (COMMITS_NAME, RUNS_NAME, CODEC_NAME)),
            ):
                for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
                    if leftover.is_dir() and not leftover.is_symlink():
                        shutil.rmtree(leftover)
                    else:
                        leftover.unlink(missing_ok=True)
            for leftover in (self.path / TARGET_NAME).rglob(f"*{PARTIAL_SUFFIX}"):
                leftover.unlink(missing_ok=True)
            (self.path / PUBLISH_NAME).unlink(missing_ok=True)
            return
        commits = self.path / COMMITS_NAME
        for name in backend.names_in(commits):
            if name.endswith(PARTIAL_SUFFIX):
                found = Publication.read(commits / name.removesuffix(PARTIAL_SUFFIX))
                if found is not None:
                    found.finish()

    def _remove_unlisted(self, kept: Collection[str]) -> None:
        """Delete files below ``parts/`` but those to keep; in a bucket uploads that are too old to be published."""
        if isinstance(self.path, Path):
            _remove_files_but(self.path / PARTS_NAME, kept)
            return
        # Nothing below its final name: another process may be publishing it at this moment.
        bucket = self.path.backend
        now = datetime.now(UTC)
        found = bucket.list_files((self.path / PARTS_NAME).key) | bucket.list_files(
            (self.path / TARGET_NAME).key
        )
        bucket.delete(
            key
            for key, entry in found.items()
            if key.endswith(PARTIAL_SUFFIX)
            and entry.modified is not None
            and (now - entry.modified).total_seconds() > LEFTOVER_S
        )

    def close(self) -> None:
        """Let other processes write to the store, and delete what is local."""
        if self._lock is not None:
            self._lock.close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


def _store(path: Path, target: StorePath) -> None:
    """Make a local file a durable file of a store: rename it, or upload it and compare its size with the server's."""
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        backend.sync_names(target.parent.parent)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        os.rename(path, target)
        return
    target.backend.put(target.key, path)
    expected = path.stat().st_size
    got = target.stat().st_size
    if got != expected:
        raise StorageUnavailable(
            f"{target} has {got} bytes after an upload of {expected}. Run the same command again."
        )


def _remove_files_but(parts: Path, kept: Collection[str]) -> None:
    """Delete everything below a folder but these files, given by their relative paths."""
    for root, folders, names in walk(parts):
        below = "" if root == parts else f"{root.relative_to(parts).as_posix()}/"
        for name in [
            name for name in folders if not any(file.startswith(f"{below}{name}/") for file in kept)
        ]:
            shutil.rmtree(root / name)
            folders.remove(name)
        for name in names:
            if below + name not in kept:
                (root / name).unlink()


def refuse_links(store: StorePath) -> None:
    """Refuse symbolic links inside a store: what is written or deleted through one lies elsewhere.

    Names that no store has are passed over, as no writer touches them; the store's folder itself may be a link.
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
                        f"{entry.path} is a symbolic link to {os.readlink(entry.path)!r}, and nothing inside a store "
                        "is written through a link. Put the files themselves in its place, or link the whole store."
                    )
                if entry.is_dir(follow_symlinks=False):
                    inside.append(entry.path)


def changed_meanwhile(path: StorePath) -> StoreLocked:
    """Return the error for a document that is not the one any more from which a change began."""
    return StoreLocked(
        f"{path} was changed by another process meanwhile. Wait until it ends, then run the same command again."
    )
