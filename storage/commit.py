"""Reads and writes commits: JSON files that list files of a store with sizes and checksums.

- ``commits/part-K.json`` lists the files of part K of the store. Readers ignore a part that has no
  commit.
- ``commits/target.json`` lists the files of the target bundle (``target/``).
- ``commits/store.json`` lists the files that describe the store: store.json, plan.parquet and the
  zarr.json files of the arrays. If a store has no ``commits/store.json``, these files are read
  without a check.
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
from ..files import MAX_JSON_BYTES, relative_name
from . import schema
from .backend import MISSING, backend_of, file_crc32, reads_of
from .paths import StorePath, name_below
from .plan import MAX_PLAN_BYTES

_REDO = "Run the same `moa-data extract` command again: it rewrites only the damaged part."
_RESTORE = "Restore the file from a copy, or run `moa-data repair STORE --model MODEL`."
_WRITE_ANEW = (
    "Run `moa-data repair`, or the command that made the store. Both write the file again."
)
Damage = list[tuple[StorePath, StoreDamaged]]
_SHARD_NAME = re.compile(r"(.+?)/c((\.\d+)+|(/\d+)+)")


FileName = Annotated[str, AfterValidator(relative_name)]


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 (``zlib.crc32``) of a file, as a commit lists them.

    The checksum is CRC-32, because CRC-32C would not detect that two shards were swapped (see
    ``backend.file_crc32``).
    """

    bytes: schema.Natural
    crc32: Annotated[int, Field(ge=0, lt=1 << 32)]


_Files = Mapping[FileName, FileRecord]


def record_of(content: bytes) -> FileRecord:
    """Return the size and checksum of a file with this content."""
    return FileRecord(len(content), zlib.crc32(content))


@dataclass(frozen=True)
class PartCommit:
    """The commit of part k of a store: the content of ``commits/part-<k>.json``.

    ``files`` maps the names of the files of the part, relative to ``parts/``, to their sizes and
    checksums. ``allocated_tokens`` is the number of tokens including padding.
    """

    part: schema.Natural
    n_sequences: schema.Natural
    n_tokens: schema.Natural
    allocated_tokens: schema.Natural
    files: _Files

    @property
    def stored_bytes(self) -> int:
        """Total size in bytes of all files of the part."""
        return sum(record.bytes for record in self.files.values())

    def to_json(self) -> bytes:
        """Return the content of the commit's JSON file."""
        return files_json(**vars(self))

    def check_counts(self, store: StorePath, part: int, planned: Mapping[str, int]) -> None:
        """Compare the counts in this commit with the plan of the store.

        Args:
            store: the store that contains this commit.
            part: number of the part, from the name of the commit's file.
            planned: the item of ``plan.part_counts`` for this part.

        Raises:
            StoreDamaged: a count differs. The message names all counts that differ.
        """
        differences: list[str] = []
        for name, expected in planned.items():
            if (got := getattr(self, name)) != expected:
                differences.append(f"{name} is {got}, expected {expected}")
        if differences:
            raise StoreDamaged(
                f"{schema.commit_path(store, part)} does not fit {schema.PLAN_NAME}: "
                f"{'; '.join(differences)}. If the plan has not changed, delete the commit file. "
                f"{_REDO}"
            )


class _FileList(TypedDict):
    """The content of any commit: of a part, of the target bundle (``target/``), or of store.json.

    Only the keys that every commit has are declared here.
    """

    files: _Files


_PART_COMMIT = TypeAdapter(PartCommit)
_FILE_LIST = TypeAdapter(_FileList)


def read_part_commit(path: StorePath, read: Callable[[], bytes] | None = None) -> PartCommit:
    """Read the commit of a part.

    Args:
        path: path of the commit.
        read: function from ``backend.reads_of`` that returns the content of the file. If the
            argument is None, the file is read from ``path``.

    Raises:
        StoreDamaged: the file is not a valid commit.
    """
    with _reading(path):
        return _PART_COMMIT.validate_json(read() if read else backend_of(path).read(), strict=True)


def read_commits(store: StorePath, parts: Iterable[int]) -> dict[int, PartCommit]:
    """Read the commits of several parts. Parts without a commit are skipped.

    Returns:
        Number of the part -> its commit, ordered by part.

    Raises:
        StoreDamaged: a commit is not valid.
    """
    commits: dict[int, PartCommit] = {}
    wanted = sorted(parts)
    paths = [schema.commit_path(store, part) for part in wanted]
    for part, (path, read) in zip(wanted, reads_of(paths), strict=True):
        with contextlib.suppress(*MISSING):
            commits[part] = read_part_commit(path, read)
    return commits


def committed_bytes(store: StorePath) -> int:
    """Sum the sizes of all files that the commits of a store list, without opening the files.

    The sum is 0 for a folder that is not a store.
    """
    n_bytes = 0
    folder = store / schema.COMMITS_NAME
    commits: list[StorePath] = []
    for name in backend_of(folder).names_in():
        if name.endswith(".json"):
            commits.append(folder / name)
    for _, read in reads_of(commits):
        # Skip a damaged commit. The files that the commit lists will be written again, so their
        # sizes do not count.
        with contextlib.suppress(ValueError, OSError):
            records = _FILE_LIST.validate_json(read(), strict=True)["files"].values()
            n_bytes += sum(record.bytes for record in records)
    return n_bytes


def has_parts(store: StorePath) -> bool:
    """Whether a store has the commit of at least one part.

    A store without the commit of any part contains no data yet, so an extraction with any inputs
    may replace the store.
    """
    return any(
        name.startswith("part-") and name.endswith(".json")
        for name in backend_of(store / schema.COMMITS_NAME).names_in()
    )


def array_of(file: str) -> str | None:
    """Return the name of the array that a shard belongs to, or None if the file is not a shard."""
    match = _SHARD_NAME.fullmatch(file)
    return None if match is None else match[1]


def check_size(path: StorePath, record: FileRecord, listed_bytes: int | None = None) -> None:
    """Check that a committed file exists, is a regular file, and has the right size.

    Args:
        path: path of the file.
        record: size and checksum that the commit lists for the file.
        listed_bytes: size of the file from a listing of its folder (``listed_sizes``), which may be
            out of date. If this size is None or differs from the commit, ``stat`` is called.

    Raises:
        StoreDamaged: the file is missing, not regular, or of the wrong size.
    """
    if listed_bytes == record.bytes:
        return
    try:
        status = path.stat()
    except MISSING as error:
        raise StoreDamaged(
            f"{path} is missing, although a commit of the store lists it. {_REDO}"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise StoreDamaged(f"{path} is not a regular file. {_REDO}")
    if status.st_size != record.bytes:
        raise StoreDamaged(
            f"{path} has {status.st_size} bytes, but its commit lists {record.bytes} bytes. {_REDO}"
        )


def files_json(files: Mapping[str, FileRecord], **counts: int) -> bytes:
    """Return the JSON text of a commit. Only the commit of a part has ``counts``."""
    records = {name: vars(record) for name, record in files.items()}
    document = {**counts, "files": records}
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def read_file_records(path: StorePath) -> dict[str, FileRecord]:
    """Read the commit of the target bundle (``target/``) or of the manifest (store.json).

    These commits contain no counts.

    Raises:
        StoreDamaged: the commit is damaged.
    """
    with _reading(path):
        return dict(_FILE_LIST.validate_json(backend_of(path).read(), strict=True)["files"])


# The target bundle


def check_target_bundle(store: StorePath, folder: StorePath) -> None:
    """Compare the files of a store's target bundle with the sizes and checksums in its commit.

    The target bundle consists of the config, tokenizer and frozen weights of the target.

    Args:
        store: the store that contains the commit.
        folder: the target bundle of the store, or a local copy of it.

    Raises:
        StoreDamaged: a file is missing or differs.
    """
    commit = schema.target_commit_path(store)

    def compare(files: Mapping[str, FileRecord]) -> Damage:
        for name, record in files.items():
            path = folder / name
            check_size(path, record)
            if file_crc32(path) != record.crc32:
                raise StoreDamaged(
                    f"{path} has changed since it was written: it does not match {commit}. "
                    f"{_RESTORE}"
                )
        return []

    for _, error in _find_damage(commit, compare):
        raise error


def _find_damage(
    commit: StorePath, compare: Callable[[Mapping[str, FileRecord]], Damage]
) -> Damage:
    """Compare files with the commit that lists them.

    If another process replaces the commit in the meantime, the comparison is repeated.

    Args:
        commit: path of the commit. If it does not exist, nothing is compared.
        compare: function that compares the files with the sizes and checksums in the commit, and
            returns the damaged files. If the function raises StoreDamaged, the commit itself counts
            as damaged.

    Returns:
        (path, error) for each damaged file. If the commit is not valid, the list contains only the
        commit.
    """
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
    """Return the names of the zarr.json files of arrays and of the Zarr groups that contain them.

    The names are relative to the store.
    """
    names: set[str] = set()
    for array in arrays:
        for folder in PurePosixPath(schema.PARTS_NAME, array, schema.ZARR_NAME).parents:
            # Leave out the store's folder, because it is not a Zarr group.
            if folder != PurePosixPath():
                names.add((folder / schema.ZARR_NAME).as_posix())
    return names


def is_metadata(name: str) -> bool:
    """Whether a file is a zarr.json file. ``name`` is the file's name relative to the store."""
    return name.startswith(f"{schema.PARTS_NAME}/") and name.endswith(f"/{schema.ZARR_NAME}")


def write_manifest_commit(store: StorePath, metadata: Collection[str] = ()) -> None:
    """Record the current store.json, plan.parquet and metadata files in ``commits/store.json``.

    Args:
        store: the store.
        metadata: names of the zarr.json files, relative to the store.
    """
    names = (schema.MANIFEST_NAME, schema.PLAN_NAME, *sorted(metadata))
    files = {name: record_of(backend_of(store / name).read(MAX_PLAN_BYTES)) for name in names}
    backend_of(schema.manifest_commit_path(store)).put(files_json(files))


def find_manifest_damage(store: StorePath, metadata: bool = True) -> Damage:
    """Find files whose size or checksum differs from ``commits/store.json``.

    Args:
        store: the store.
        metadata: whether the zarr.json files are checked too.

    Returns:
        (path, error) for each file that differs or is missing.
    """
    commit = schema.manifest_commit_path(store)

    def compare(records: Mapping[str, FileRecord]) -> Damage:
        if lacking := {schema.MANIFEST_NAME, schema.PLAN_NAME} - records.keys():
            raise StoreDamaged(
                f"{commit} is damaged: it does not list {' and '.join(sorted(lacking))}. {_RESTORE}"
            )
        damage: Damage = []
        for name, record in records.items():
            if is_metadata(name):
                advice = _WRITE_ANEW
            elif name in (schema.MANIFEST_NAME, schema.PLAN_NAME):
                advice = _RESTORE
            else:
                raise StoreDamaged(
                    f"{commit} is damaged: it lists {name}, which is not a file of a store. "
                    f"{_RESTORE}"
                )
            if is_metadata(name) and not metadata:
                continue
            path = store / name
            if record_of(content_of(path, MAX_PLAN_BYTES) or b"") != record:
                message = (
                    f"{path} is missing or has changed since it was written: its checksum differs "
                    f"from the one in its commit. {advice}"
                )
                damage.append((path, StoreDamaged(message)))
        return damage

    return _find_damage(commit, compare)


def check_manifest(store: StorePath) -> None:
    """Check that store.json and plan.parquet have not changed.

    Raises:
        StoreDamaged: one of the two files differs from ``commits/store.json``.
    """
    for _, error in find_manifest_damage(store, metadata=False):
        raise error


def restore_files(store: StorePath, contents: Mapping[str, bytes]) -> None:
    """Repair damaged files that ``commits/store.json`` lists.

    The content of these files was computed again from the same inputs. A damaged file is replaced
    only if the new content has the size and checksum in ``commits/store.json``. If the file already
    has the new content, the damage is in ``commits/store.json``, and nothing is written.

    Args:
        store: the store.
        contents: name relative to the store -> content that was computed again. Other files are not
            written.

    Raises:
        StoreDamaged: the new content of a damaged file does not have the size and checksum in
            ``commits/store.json``.
    """
    for path, error in find_manifest_damage(store):
        name = name_below(store, path)
        if name not in contents or content_of(path, MAX_PLAN_BYTES) == contents[name]:
            continue
        if record_of(contents[name]) != read_file_records(schema.manifest_commit_path(store))[name]:
            raise error
        backend_of(path.parent).make_folder()
        backend_of(path).put(contents[name])


# Reading files


def content_of(path: StorePath, max_bytes: int = MAX_JSON_BYTES) -> bytes | None:
    """Return the content of a file, or None if the file does not exist.

    If the file is longer than ``max_bytes`` or not a regular file, the result is ``b""``. It
    differs from the expected content of any file.
    """
    try:
        return backend_of(path).read(max_bytes)
    except MISSING:
        return None
    except ValueError:
        return b""


@contextlib.contextmanager
def _reading(path: StorePath) -> Iterator[None]:
    try:
        yield
    # `read` of a backend raises ValueError if a file is too long or not a regular file.
    except ValueError as error:
        problem = schema.first_problem(error) if isinstance(error, ValidationError) else error
        raise StoreDamaged(
            f"{path} is not a valid commit file ({problem}). Delete this file. {_REDO}"
        ) from error
