"""Writes to a bucket, where nothing is renamed or locked: of several writers of a part one record decides.

What a writer makes goes up under names that nobody else uses (``c.0.0.0.0.0.5f3a9c01.partial``). When all files of a
part are up, it is published::

    1  commits/part-K.json.partial    created if absent: the commit to be made, and the uploads that it is made of
    2  parts/kv/c.K.0.0.0.0           copied from the uploads, by the server
       commits/part-K.json            created if absent; where fields are added, it replaces the one that 1 names
    3  uploads and record             deleted

Every writer that meets a record takes steps 2 and 3 of it, which are the same for all and may be repeated. So nobody
waits for a writer that was killed or sleeps, and a part that was up once is not computed again. Then it publishes its
own files, or deletes them where there is a commit by now.

Why one record for all files of a part, and not each shard created if absent: writers on unlike machines round
differently, and their shards do not go together. Codes of one with scales of the other, or a hidden state with keys
and values that it was not predicted from, decode to wrong values though every checksum fits. With the record all shards
of a part are one writer's. And of a large file, which goes up in pieces, no server that speaks S3 has to know a
conditional upload, only conditional puts of the two documents.

A file is written below its final name by step 2 alone, and only while its commit is not there: before, no reader asks
for it, and afterwards another record comes to nothing. What a repair has left there without a commit is overwritten.

Uploads that no record names are deleted when they are older than ``LEFTOVER_S``. None can name them any more by then,
since a writer gives a part up that it could not publish within ``COMMIT_WITHIN_S`` of its first upload, and both spans
are long against what clocks differ by.

Shards are encoded to a local folder (of the system's temporary ones, ``TMPDIR``) and go up one after the other, each in
pieces at the same time, while the next one is encoded; a shard's local file is deleted once it is up.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from ...errors import StorageUnavailable, StoreDamaged, StoreLocked
from ...files import PARTIAL_SUFFIX, disk_full_guard, mapping, parse_object, relative_name, walk, whole_number
from ..backend import MISSING, download, file_crc32, names_in, read_file
from ..commit import PartCommit, read_part_commit, read_target_commit, target_commit_json
from ..paths import RemotePath, StorePath, requests
from ..schema import COMMITS_NAME, PARTS_NAME, TARGET_NAME, commit_path, publication_path, target_commit_path
from ..shard import FileRecord, MakeDurable, new_attempt, partial_name
from .lock import StoreLock

COMMIT_WITHIN_S = 24 * 3600.0
"""Time from the first upload of a part in which it must be published."""
LEFTOVER_S = 2 * COMMIT_WITHIN_S
"""Age from which an upload that was not published is deleted."""


@dataclass(frozen=True)
class Publication:
    """What a writer has uploaded, and the commit that is to list it.

    Attributes:
        commit: where the commit belongs.
        attempt: is part of the names of the uploads.
        files: final name, relative to the store -> bytes.
        old: content of the commit that is replaced, None where there must be none.
        new: content of the commit.
    """

    commit: RemotePath
    attempt: str
    files: Mapping[str, int]
    old: str | None
    new: str

    @classmethod
    def read(cls, commit: RemotePath) -> Publication | None:
        """Read the record beside a commit; None where there is none, or nothing that one could be."""
        try:
            content = parse_object(read_file(publication_path(commit)))
            files = {
                relative_name(name): whole_number(n, "bytes") for name, n in mapping(content["files"], "files").items()
            }
            old, new, attempt = content["old"], content["new"], content["attempt"]
        except MISSING:
            return None
        except (KeyError, TypeError, ValueError):
            commit.backend.delete([publication_path(commit).key])
            return None
        return cls(commit, str(attempt), files, None if old is None else str(old), str(new))

    def to_json(self) -> bytes:
        """Return the record's content."""
        return (json.dumps(vars(self) | {"commit": self.commit.name}, indent=1, sort_keys=True) + "\n").encode()

    def publish(self) -> bool:
        """Make the commit, unless another one was made first; returns whether it is this one."""
        path = publication_path(self.commit)
        while not path.backend.put_if_absent(path.key, self.to_json()):
            if (other := Publication.read(self.commit)) is not None:
                other.finish()
        return self.finish()

    def finish(self) -> bool:
        """Name the files and make the commit, as far as nobody has done it; delete uploads and record."""
        bucket, store = self.commit.backend, self.commit.parent.parent
        uploads = {name: (store / partial_name(name, self.attempt)).key for name in self.files}

        def copy(name: str) -> None:
            bucket.copy(uploads[name], (store / name).key, self.files[name])

        has_won = False
        if _content(self.commit) == self.old:
            try:
                list(requests().map(copy, self.files))
                key, new = self.commit.key, self.new.encode()
                has_won = (
                    bucket.put_if_absent(key, new) if self.old is None else bucket.replace(key, self.old.encode(), new)
                )
            except FileNotFoundError:
                # Somebody has finished it meanwhile and deleted the uploads; or the commit, or an upload, was deleted.
                has_won = _content(self.commit) == self.new
        bucket.delete([*uploads.values(), publication_path(self.commit).key])
        return has_won


def _content(commit: RemotePath) -> str | None:
    try:
        return read_file(commit).decode()
    except FileNotFoundError:
        return None


@dataclass
class BucketPart:
    """A part that is written to a bucket.

    Attributes:
        scratch: local folder for shards on their way.
    """

    store: RemotePath
    part: int
    existing: Mapping[str, FileRecord]
    attempt: str
    scratch: Path
    _first_upload_s: float | None = field(default=None, init=False)
    _asked_for: PartCommit | None = field(default=None, init=False)
    _uploaded: list[RemotePath] = field(default_factory=list, init=False)

    def path_of(self, name: str) -> Path:  # noqa: D102  (publish.PartPublisher)
        return self.scratch / partial_name(name, self.attempt)

    def make_durable(self, name: str) -> MakeDurable:  # noqa: D102
        target = self.store / PARTS_NAME / partial_name(name, self.attempt)

        def upload(fd: int, path: Path) -> None:
            # The wall clock: it goes on while a machine sleeps.
            self._first_upload_s = self._first_upload_s or time.time()
            self._uploaded.append(target)
            _upload(path, target)
            path.unlink()

        return upload

    def publish(self, commit: PartCommit, shards: Collection[str]) -> tuple[PartCommit, bool]:  # noqa: D102
        path = commit_path(self.store, self.part)
        if time.time() - (self._first_upload_s or time.time()) > COMMIT_WITHIN_S:
            raise StorageUnavailable(
                f"{path}: the part took longer than {COMMIT_WITHIN_S / 3600:.0f} hours from its first upload, after "
                "which its files may have been deleted. Run the same command again, with a smaller --part-tokens for a "
                "new store."
            )
        old = replace(commit, files=self.existing).to_json().decode() if self.existing else None
        files = {f"{PARTS_NAME}/{name}": commit.files[name].bytes for name in shards}
        self._asked_for = commit
        if Publication(path, self.attempt, files, old, commit.to_json().decode()).publish():
            return commit, True
        try:
            other = read_part_commit(path)
        except FileNotFoundError as error:
            raise changed_meanwhile(path) from error
        if not other.files.keys() >= commit.files.keys():
            raise changed_meanwhile(path)
        return other, False

    def withdraw(self, shards: Collection[str]) -> bool:  # noqa: D102
        if self._asked_for is None:
            self._delete_uploads()
            return False
        # The record may be there even if no answer came, and then others need the uploads. Else they grow old.
        try:
            return read_part_commit(commit_path(self.store, self.part)) == self._asked_for
        except (OSError, StoreDamaged):
            return False

    def _delete_uploads(self) -> None:
        if self._uploaded:
            self.store.backend.delete([path.key for path in self._uploaded])


class BucketPublisher:
    """A prefix of a bucket that a store is written to."""

    def __init__(self, store: RemotePath, attempt: str) -> None:
        self.store, self.attempt = store, attempt
        self.lock: StoreLock | None = None  # a bucket has none: the record decides between writers
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._bundle: tuple[Mapping[str, FileRecord], Path] | None = None

    @property
    def scratch_path(self) -> Path:  # noqa: D102
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="moa-data-")
        return Path(self._scratch.name)

    @property
    def target_path(self) -> Path:  # noqa: D102  (publish.Publisher)
        files = self._target_files() or {}
        if self._bundle is None or self._bundle[0] != files:
            folder = Path(tempfile.mkdtemp(prefix=TARGET_NAME, dir=self.scratch_path))
            download(self.store / TARGET_NAME, folder, files)
            self._bundle = files, folder
        return self._bundle[1]

    def part(self, part: int, existing: Mapping[str, FileRecord]) -> BucketPart:  # noqa: D102
        return BucketPart(self.store, part, existing, new_attempt(), self.scratch_path)

    @contextmanager
    def bundle(self) -> Iterator[Path]:  # noqa: D102
        path = target_commit_path(self.store)
        try:
            old = self._target_files()
        except StoreDamaged:
            self.store.backend.delete([path.key])
            old = None
        attempt = new_attempt()
        with tempfile.TemporaryDirectory(dir=self.scratch_path) as name:
            folder, files = Path(name), dict[str, FileRecord]()
            with disk_full_guard(folder):
                yield folder
            for root, _, names in walk(folder):
                for local in (root / each for each in sorted(names)):
                    below = local.relative_to(folder).as_posix()
                    files[below] = FileRecord(local.stat().st_size, file_crc32(local))
                    _upload(local, self.store / TARGET_NAME / partial_name(below, attempt))
        sizes = {f"{TARGET_NAME}/{name}": record.bytes for name, record in files.items()}
        before = None if old is None else target_commit_json(old).decode()
        has_won = Publication(path, attempt, sizes, before, target_commit_json(files).decode()).publish()
        if old is not None and not has_won:  # else another one's, of the same target, was there first
            raise changed_meanwhile(path)
        self._delete_from_bundle((old or {}).keys() - files.keys())

    def _target_files(self) -> dict[str, FileRecord] | None:
        try:
            return read_target_commit(target_commit_path(self.store))
        except MISSING:
            return None

    def _delete_from_bundle(self, names: Collection[str]) -> None:
        self.store.backend.delete([(self.store / TARGET_NAME / name).key for name in names])

    def drop_bundle(self) -> None:  # noqa: D102
        try:
            files = self._target_files() or {}
        except StoreDamaged:
            files = {}
        self.store.backend.delete([target_commit_path(self.store).key])
        self._delete_from_bundle(files)

    def remove_unfinished(self) -> None:
        """Finish what others were publishing, of whom some may be dead."""
        commits = self.store / COMMITS_NAME
        for name in names_in(commits):
            if name.endswith(PARTIAL_SUFFIX):
                publication = Publication.read(commits / name.removesuffix(PARTIAL_SUFFIX))
                if publication is not None:
                    publication.finish()

    def remove_unlisted(self, kept: Collection[str]) -> None:
        """Delete uploads that have become too old to be published.

        Nothing below its final name is deleted, for another process may be publishing it at this moment.
        """
        bucket, now = self.store.backend, datetime.now(UTC)
        found = bucket.list_files((self.store / PARTS_NAME).key) | bucket.list_files((self.store / TARGET_NAME).key)
        bucket.delete(
            key
            for key, entry in found.items()
            if key.endswith(PARTIAL_SUFFIX)
            and entry.modified is not None
            and (now - entry.modified).total_seconds() > LEFTOVER_S
        )

    def remove_attempt(self, attempt: str) -> None:
        """Do nothing: what a dead writer has uploaded may be published yet, and else grows old."""

    def close(self) -> None:  # noqa: D102
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


def _upload(path: Path, target: RemotePath) -> None:
    """Upload a file, and compare its size with what the server has."""
    target.backend.upload(target.key, path)
    expected, got = path.stat().st_size, target.stat().st_size
    if got != expected:
        raise StorageUnavailable(f"{target} has {got} bytes after an upload of {expected}. Run the same command again.")


def changed_meanwhile(path: StorePath) -> StoreLocked:
    """Return the error for a document that is not the one any more from which a change began."""
    return StoreLocked(
        f"{path} was changed by another process meanwhile. Wait until it ends, then run the same command again."
    )
