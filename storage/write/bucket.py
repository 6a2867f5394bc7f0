"""Writes to a bucket, where nothing is renamed or locked: whoever creates a commit first has won.

What a writer makes goes up under names that nobody else uses (``c.0.0.0.0.0-5f3a9c01``, after the *attempt* at the
part), and then the commit, which lists these names, is created by a request that fails where there is one already. So
of two writers of a part, wherever they run and however late they are, one commit stays, with the files that it lists;
nobody waits for anybody, and a writer that is killed holds nothing up. Whoever loses deletes its own files.

Files that a killed writer leaves are nobody's: they are deleted when no commit lists them and they are older than
``LEFTOVER_S``. They can't be listed any more by then, since a writer gives a part up that it could not commit within
``COMMIT_WITHIN_S`` of its first upload, and both spans are long against what clocks differ by.

Shards are encoded to a local folder (of the system's temporary ones, ``TMPDIR``) and go up one after the other, each in
pieces at the same time, while the next one is encoded; a shard's local file is deleted once it is up.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from ..disk.checking import MISSING
from ..disk.durable import disk_full_guard, file_crc32, walk
from ..disk.files import download
from ..errors import ManifestInvalid, StorageUnavailable, StoreLocked, StoreReadOnly
from ..names import PARTS_NAME, TARGET_NAME, ZARR_NAME, commit_path, target_commit_path
from ..parts.commit import PartCommit, read_part_commit, read_target_commit, stored_target_names, target_commit_json
from ..parts.grid import ArrayGrid
from ..parts.shard import FileRecord, Keep, attempt_name, new_attempt
from ..paths import RemotePath, StorePath
from .site import Hold

COMMIT_WITHIN_S = 24 * 3600.0
"""Time from the first upload of a part in which it must be committed."""
LEFTOVER_S = 2 * COMMIT_WITHIN_S
"""Age from which a file that no commit lists is deleted."""


class NoHold:
    """The hold on a store that nobody needs to hold: others may always write, and commits decide between them.

    Attributes:
        joined: whether the store had been begun before, perhaps by somebody who still writes.
    """

    is_alone = False

    def __init__(self) -> None:
        self.joined = True

    def share(self) -> None:  # noqa: D102  (site.Hold)
        pass

    def try_alone(self) -> bool:  # noqa: D102
        return False

    def publishing(self, slot: int) -> AbstractContextManager[None]:  # noqa: D102
        return nullcontext()

    def claim(self, part: int) -> int:  # noqa: D102
        return -1

    def is_claimed(self, part: int) -> bool:  # noqa: D102
        return False

    def close(self) -> None:  # noqa: D102
        pass


@dataclass
class BucketPart:
    """The place of a part in a bucket (``site.PartPlace``).

    Attributes:
        scratch: local folder for shards on their way.
    """

    store: RemotePath
    part: int
    grids: Mapping[str, ArrayGrid]
    existing: Mapping[str, FileRecord]
    attempt: str
    scratch: Path
    _first_upload_s: float | None = field(default=None, init=False)
    _has_asked: bool = field(default=False, init=False)
    _uploaded: list[RemotePath] = field(default_factory=list, init=False)

    def write_documents(self) -> dict[str, FileRecord]:  # noqa: D102  (site.PartPlace)
        return dict(self.existing)

    def path_of(self, name: str) -> Path:  # noqa: D102
        return self.scratch / attempt_name(name, self.attempt)

    def keep(self, name: str) -> Keep:  # noqa: D102
        target = self.store / PARTS_NAME / attempt_name(name, self.attempt)

        def upload(fd: int, path: Path) -> None:
            # The wall clock: it goes on while a machine sleeps.
            self._first_upload_s = self._first_upload_s or time.time()
            self._uploaded.append(target)
            _upload(path, target)
            path.unlink()

        return upload

    def publish(self, commit: PartCommit, shards: Collection[str]) -> tuple[PartCommit, bool]:  # noqa: D102
        path = commit_path(self.store, self.part)
        own = replace(
            commit,
            files={
                name: replace(record, attempt=self.attempt) if name in shards else record
                for name, record in commit.files.items()
            },
        )
        if time.time() - (self._first_upload_s or time.time()) > COMMIT_WITHIN_S:
            raise StorageUnavailable(
                f"{path}: the part took longer than {COMMIT_WITHIN_S / 3600:.0f} hours from its first upload, after "
                "which its files may have been deleted. Run the same command again, with a smaller --part-tokens for a "
                "new store."
            )
        self._has_asked = True
        if self.existing:
            has_won = self._replace(path, replace(commit, files=self.existing), own)
        else:
            has_won = path.bucket.create(path.key, own.to_json())
        if has_won:
            return own, True
        other = read_part_commit(path)
        if not other.files.keys() >= commit.files.keys():
            raise changed_meanwhile(path)
        self._delete_uploads()
        return other, False

    @staticmethod
    def _replace(path: RemotePath, old: PartCommit, new: PartCommit) -> bool:
        try:
            return path.bucket.replace(path.key, old.to_json(), new.to_json())
        except FileNotFoundError as error:
            raise changed_meanwhile(path) from error

    def withdraw(self, shards: Collection[str]) -> bool:  # noqa: D102
        if self._has_asked:
            # A commit that got no answer may be made yet: then its files must be there. Else they grow old.
            try:
                files = read_part_commit(commit_path(self.store, self.part)).files
            except (OSError, ManifestInvalid):
                return False
            return any(record.attempt == self.attempt for record in files.values())
        self._delete_uploads()
        return False

    def _delete_uploads(self) -> None:
        if self._uploaded:
            self.store.bucket.delete([path.key for path in self._uploaded])


class BucketSite:
    """A prefix of a bucket that a store is written to (``site.Site``)."""

    def __init__(self, store: RemotePath, attempt: str) -> None:
        self.store, self.attempt = store, attempt
        self.hold: Hold = NoHold()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._bundle: tuple[dict[str, str], Path] | None = None

    @property
    def scratch_path(self) -> Path:  # noqa: D102
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="moa-data-")
        return Path(self._scratch.name)

    @property
    def target_path(self) -> Path:  # noqa: D102  (site.Site)
        names = stored_target_names(self.store)
        if self._bundle is None or self._bundle[0] != names:
            folder = Path(tempfile.mkdtemp(prefix=TARGET_NAME, dir=self.scratch_path))
            download(self.store / TARGET_NAME, folder, names)
            self._bundle = names, folder
        return self._bundle[1]

    def part(  # noqa: D102
        self,
        part: int,
        grids: Mapping[str, ArrayGrid],
        existing: Mapping[str, FileRecord],
        documents: Mapping[str, bytes],
    ) -> BucketPart:
        if documents:
            raise StoreReadOnly(
                f"{self.store} has schema version 1, which is written to disks only. Copy the store to one."
            )
        return BucketPart(self.store, part, grids, existing, new_attempt(), self.scratch_path)

    @contextmanager
    def bundle(self) -> Iterator[Path]:  # noqa: D102
        path, old = target_commit_path(self.store), None
        try:
            old = read_target_commit(path)
        except MISSING:
            pass
        except ManifestInvalid:
            self.store.bucket.delete([path.key])
        attempt = new_attempt()
        with tempfile.TemporaryDirectory(dir=self.scratch_path) as name:
            folder, files = Path(name), dict[str, FileRecord]()
            with disk_full_guard(folder):
                yield folder
            for root, _, names in walk(folder):
                for local in (root / each for each in sorted(names)):
                    below = local.relative_to(folder).as_posix()
                    files[below] = FileRecord(local.stat().st_size, file_crc32(local), attempt)
                    _upload(local, self.store / TARGET_NAME / attempt_name(below, attempt))
        content = target_commit_json(files)
        if old is not None:
            if not path.bucket.replace(path.key, target_commit_json(old), content):
                raise changed_meanwhile(path)
        elif not path.bucket.create(path.key, content):
            self._delete_bundle(files)  # another one's, of the same target, was there first

    def _delete_bundle(self, files: Mapping[str, FileRecord]) -> None:
        names = [record.stored_as(name) for name, record in files.items()]
        self.store.bucket.delete([(self.store / TARGET_NAME / name).key for name in names])

    def drop_bundle(self) -> None:  # noqa: D102
        path = target_commit_path(self.store)
        try:
            files: Mapping[str, FileRecord] = read_target_commit(path)
        except (*MISSING, ManifestInvalid):
            files = {}
        self.store.bucket.delete([path.key])
        self._delete_bundle(files)

    def remove_unfinished(self) -> None:
        """Do nothing: what is not there whole is not there."""

    def remove_unlisted(self, kept: Collection[str]) -> None:
        """Delete files below ``parts/`` and ``target/`` that no commit lists and that have become too old for one."""
        bucket = self.store.bucket
        listed = {(self.store / PARTS_NAME / name).key for name in kept}
        listed |= {(self.store / TARGET_NAME / name).key for name in stored_target_names(self.store).values()}
        now = datetime.now(UTC)
        found = bucket.find((self.store / PARTS_NAME).key) | bucket.find((self.store / TARGET_NAME).key)
        bucket.delete(
            key
            for key, entry in found.items()
            if key not in listed
            and not key.endswith(f"/{ZARR_NAME}")
            and entry.modified is not None
            and (now - entry.modified).total_seconds() > LEFTOVER_S
        )

    def remove_attempt(self, attempt: str) -> None:
        """Do nothing: a commit that a dead writer has asked for may be made yet, and its files grow old."""

    def close(self) -> None:  # noqa: D102
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


def _upload(path: Path, target: RemotePath) -> None:
    """Upload a file, and compare its size with what the server has."""
    target.bucket.put(target.key, path)
    expected, got = path.stat().st_size, target.stat().st_size
    if got != expected:
        raise StorageUnavailable(f"{target} has {got} bytes after an upload of {expected}. Run the same command again.")


def changed_meanwhile(path: StorePath) -> StoreLocked:
    """Return the error for a document that is not the one any more from which a change began."""
    return StoreLocked(
        f"{path} was changed by another process meanwhile. Wait until it ends, then run the same command again."
    )
