"""Commits: the documents that make the files of a store exist, and hold their sizes and checksums.

``commits/part-K.json`` lists the shards of a part, ``commits/target.json`` the files of the target bundle, and
``commits/store.json`` what is read when a store is opened: store.json, plan.parquet and the metadata of the arrays.
Stores without the last one are read unchecked.
"""

import contextlib
import json
import re
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..errors import StoreDamaged
from ..files import MAX_JSON_BYTES, MAX_WHOLE_NUMBER, relative_name
from . import schema
from .backend import MISSING, file_crc32, make_folder, names_in, put, read_file, reads_of
from .paths import StorePath, name_below
from .plan import MAX_PLAN_BYTES

_COUNTS = ("part", "n_sequences", "n_tokens", "allocated_tokens")
_REDO = "Run extract again: it redoes that part only."
_RESTORE = "Restore it from a copy, or run `moa-data repair` with --model."
_WRITE_ANEW = "Run `moa-data repair`, or the command that made the store: it writes it anew."
Damage = list[tuple[StorePath, StoreDamaged]]
_SHARD_NAME = re.compile(r"(.+?)/c((\.\d+)+|(/\d+)+)")


_Natural = Annotated[int, Field(ge=0, le=MAX_WHOLE_NUMBER)]
_FileName = Annotated[str, AfterValidator(relative_name)]


@dataclass(frozen=True)
class FileRecord:
    """Size and ``zlib.crc32`` of a file in a commit (see ``backend.file_crc32`` for why not CRC-32C)."""

    bytes: _Natural
    crc32: Annotated[int, Field(ge=0, lt=1 << 32)]


_Files = Mapping[_FileName, FileRecord]


def record_of(content: bytes) -> FileRecord:
    """Return the record of a file with this content."""
    return FileRecord(len(content), zlib.crc32(content))


@dataclass(frozen=True)
class PartCommit:
    """The content of ``commits/part-<k>.json``; ``allocated_tokens`` with padding, ``files`` relative to ``parts/``."""

    part: _Natural
    n_sequences: _Natural
    n_tokens: _Natural
    allocated_tokens: _Natural
    files: _Files

    @property
    def counts(self) -> dict[str, int]:
        """All but the files (``plan.part_counts``)."""
        return {name: getattr(self, name) for name in _COUNTS}

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files."""
        return sum(record.bytes for record in self.files.values())

    def to_json(self) -> bytes:
        """Return the file's content."""
        return files_json(self.files, self.counts)


class _FileList(TypedDict):
    """A commit of any kind."""

    files: _Files


_PART_COMMIT = TypeAdapter(PartCommit)
_FILE_LIST = TypeAdapter(_FileList)


def read_part_commit(path: StorePath, read: Callable[[], bytes] | None = None) -> PartCommit:
    """Read a part's commit, by what ``backend.reads_of`` gave where it is on its way; raises StoreDamaged."""
    with _reading(path):
        return _PART_COMMIT.validate_json(read() if read else read_file(path), strict=True)


def read_commits(store: StorePath, parts: Iterable[int]) -> dict[int, PartCommit]:
    """Read, in order, the commits of those parts that have one; each must be whole and name its own part."""
    commits: dict[int, PartCommit] = {}
    wanted = sorted(parts)
    for part, (path, read) in zip(
        wanted, reads_of(schema.commit_path(store, part) for part in wanted), strict=True
    ):
        with contextlib.suppress(*MISSING):
            commits[part] = read_part_commit(path, read)
            if commits[part].part != part:
                raise StoreDamaged(
                    f"{path} is the commit of part {commits[part].part}. Delete it. {_REDO}"
                )
    return commits


def committed_bytes(store: StorePath) -> int:
    """Sum the bytes of all files that a store's commits list, without opening them; 0 for other folders."""
    n_bytes = 0
    folder = store / schema.COMMITS_NAME
    for _, read in reads_of(folder / name for name in names_in(folder) if name.endswith(".json")):
        with contextlib.suppress(ValueError, OSError):  # what is damaged is written again
            n_bytes += sum(
                record.bytes
                for record in _FILE_LIST.validate_json(read(), strict=True)["files"].values()
            )
    return n_bytes


def has_parts(store: StorePath) -> bool:
    """Whether a store, whatever it was made from, has a commit of any part; what has none may be begun anew."""
    return any(
        name.startswith("part-") and name.endswith(".json")
        for name in names_in(store / schema.COMMITS_NAME)
    )


def array_of(file: str) -> str | None:
    """Return the name of the array that a committed file is a shard of; None for metadata."""
    found = _SHARD_NAME.fullmatch(file)
    return None if found is None else found[1]


def find_size_damage(
    folder: StorePath, files: Mapping[str, FileRecord], listed: Mapping[str, int] | None = None
) -> Damage:
    """Return (path, error) for each committed file that is missing or has another size.

    ``listed``: ``backend.listed_sizes``; what a list lacks or says otherwise, which may be older, is asked for.
    """
    damage: Damage = []
    for name, record in files.items():
        if listed and listed.get(name) == record.bytes:
            continue
        path = folder / name
        try:
            found = path.stat()
        except MISSING:
            damage.append(
                (path, StoreDamaged(f"{path} is missing although it was committed. {_REDO}"))
            )
            continue
        if not stat.S_ISREG(found.st_mode):
            damage.append((path, StoreDamaged(f"{path} is not a regular file. {_REDO}")))
        elif found.st_size != record.bytes:
            message = f"{path} has {found.st_size} bytes, its commit says {record.bytes}. {_REDO}"
            damage.append((path, StoreDamaged(message)))
    return damage


def files_json(files: Mapping[str, FileRecord], counts: Mapping[str, int] | None = None) -> bytes:
    """Return the content of a commit that lists files, and of a part's commit also its counts."""
    document = {**(counts or {}), "files": {name: vars(record) for name, record in files.items()}}
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def read_file_records(path: StorePath) -> dict[str, FileRecord]:
    """Read a commit that lists files alone; raises StoreDamaged where it is damaged."""
    with _reading(path):
        return dict(_FILE_LIST.validate_json(read_file(path), strict=True)["files"])


# The target bundle


def check_target_bundle(store: StorePath, folder: StorePath) -> None:
    """Compare the target bundle, or a local copy of it, with its commit, byte for byte; raises StoreDamaged."""
    commit = schema.target_commit_path(store)

    def compare(files: Mapping[str, FileRecord]) -> Damage:
        return find_size_damage(folder, files) or [
            (
                folder / name,
                StoreDamaged(f"{folder / name} is not the file that {commit} lists. {_RESTORE}"),
            )
            for name, record in files.items()
            if file_crc32(folder / name) != record.crc32
        ]

    for _, error in _find_damage(commit, compare):
        raise error


def _find_damage(
    commit: StorePath, compare: Callable[[Mapping[str, FileRecord]], Damage]
) -> Damage:
    """Compare files with a commit that lists them; again where another process replaces both meanwhile."""
    while True:
        before = content_of(commit)
        try:
            damage = compare(read_file_records(commit))
        except MISSING:
            return []
        except StoreDamaged as error:
            damage = [(commit, error)]
        if not damage or content_of(commit) == before:
            return damage


# store.json, plan.parquet and the metadata of the arrays


def metadata_names(arrays: Iterable[str]) -> set[str]:
    """Return the names, inside the store, of the metadata of these arrays and of the groups that they lie in."""
    ways = (PurePosixPath(schema.PARTS_NAME, array, schema.ZARR_NAME).parents for array in arrays)
    groups = {parent for parents in ways for parent in parents} - {PurePosixPath()}
    return {(group / schema.ZARR_NAME).as_posix() for group in groups}


def is_metadata(name: str) -> bool:
    """Whether a name inside a store is that of Zarr metadata that all parts share."""
    return name.startswith(f"{schema.PARTS_NAME}/") and name.endswith(f"/{schema.ZARR_NAME}")


def write_manifest_commit(store: StorePath, metadata: Collection[str] = ()) -> None:
    """Record store.json, plan.parquet, and the metadata of these names, as they are."""
    names = (schema.MANIFEST_NAME, schema.PLAN_NAME, *sorted(metadata))
    files = {name: record_of(read_file(store / name, MAX_PLAN_BYTES)) for name in names}
    put(schema.manifest_commit_path(store), files_json(files))


def find_manifest_damage(store: StorePath, metadata: bool = True) -> Damage:
    """Return (path, error) for each recorded file, or all but the arrays' metadata, that has changed."""
    commit = schema.manifest_commit_path(store)

    def compare(records: Mapping[str, FileRecord]) -> Damage:
        if lacking := {schema.MANIFEST_NAME, schema.PLAN_NAME} - records.keys():
            return [
                (
                    commit,
                    StoreDamaged(
                        f"{commit} does not list {' and '.join(sorted(lacking))}. {_RESTORE}"
                    ),
                )
            ]
        if others := [
            name
            for name in records
            if name not in (schema.MANIFEST_NAME, schema.PLAN_NAME) and not is_metadata(name)
        ]:
            return [
                (
                    commit,
                    StoreDamaged(f"{commit} lists {others[0]}, which no store has. {_RESTORE}"),
                )
            ]
        damage = []
        for name, record in records.items():
            path = store / name
            advice = _WRITE_ANEW if is_metadata(name) else _RESTORE
            if (metadata or not is_metadata(name)) and record_of(
                content_of(path, MAX_PLAN_BYTES) or b""
            ) != record:
                message = f"{path} is not the file that was written: its checksum differs from its commit's. {advice}"
                damage.append((path, StoreDamaged(message)))
        return damage

    return _find_damage(commit, compare)


def check_manifest(store: StorePath) -> None:
    """Refuse a store whose store.json or plan.parquet has changed; raises StoreDamaged."""
    for _, error in find_manifest_damage(store, metadata=False):
        raise error


def restore_files(store: StorePath, contents: Mapping[str, bytes]) -> None:
    """Write recorded files again where they are damaged and their commit confirms the given bytes.

    A file that holds the given bytes is left alone: then its record is what is damaged. Raises StoreDamaged where the
    commit lists other bytes. ``contents``: name inside the store -> bytes that the same inputs give; other recorded
    files are left alone.
    """
    for path, error in find_manifest_damage(store):
        name = name_below(store, path)
        if name not in contents or content_of(path, MAX_PLAN_BYTES) == contents[name]:
            continue
        if record_of(contents[name]) != read_file_records(schema.manifest_commit_path(store))[name]:
            raise error
        make_folder(path.parent)
        put(path, contents[name])


# Documents


def content_of(path: StorePath, max_bytes: int = MAX_JSON_BYTES) -> bytes | None:
    """Return a file's bytes, or None if the file does not exist; no bytes of one that is longer or not regular."""
    try:
        return read_file(path, max_bytes)
    except MISSING:
        return None
    except ValueError:
        return b""


@contextlib.contextmanager
def _reading(path: StorePath) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise StoreDamaged(
            f"{path} is not a commit ({schema.first_problem(error)}). Delete it. {_REDO}"
        ) from error
    except ValueError as error:  # from `read_file`
        raise StoreDamaged(f"{path} is not a commit ({error}). Delete it. {_REDO}") from error
