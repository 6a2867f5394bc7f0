"""Adds fields to an existing store. The shards of the other fields do not change.

Fields are added in two steps:

1. For each part, the shards of the new arrays are written, synced and renamed to their final names.
   Then the part's commit is replaced by a commit that also lists these shards. Readers still ignore
   these shards, because store.json does not contain the new fields.
2. When every committed part has the new fields, store.json is replaced by a file that contains the
   new fields.

So a reader finds either the old fields only, or the old fields and all new fields. At the end,
every file has the same bytes as if one extraction had written all fields.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ...errors import StoreError, StoreLocked
from ...files import write_atomic
from ..backend import backend_of
from ..chunk import EncodePool
from ..codecs.registry import BASIS_NAME, NEXT_BASIS_NAME, StoreCodec, read_basis
from ..commit import FileRecord, PartCommit, array_of, read_part_commit
from ..paths import StorePath
from ..schema import CODEC_NAME, FieldSpec, StoreManifest, commit_path
from .part import PartWriter
from .publish import changed_meanwhile
from .store import StoreWriter


def lacking_fields(commit: PartCommit, fields: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the ``fields`` without shards in the commit of a part."""
    # The name of a shard starts with the name of its field, followed by a slash.
    lacking: list[str] = []
    for name in fields:
        if not any(file.startswith(f"{name}/") for file in commit.files):
            lacking.append(name)
    return tuple(lacking)


def extended_codec(old: StoreCodec, specs: Iterable[FieldSpec]) -> StoreCodec:
    """Return a codec for the old fields of a store and the fields to add.

    The codecs of the old fields keep their learned state. The codecs of the new fields must still
    learn from a sample.

    Args:
        old: the codec of the store.
        specs: the old fields and the fields to add.
    """
    codec = StoreCodec(old.name, specs, sources={})
    codec.fields |= old.fields
    return codec


def load_next_basis(store: StorePath, codec: StoreCodec, old: StoreCodec) -> bool:
    """Load into ``codec`` the learned state that an interrupted addition of fields has saved.

    The state is in the file ``codec/next-basis.safetensors``.

    Args:
        store: the store's path.
        codec: codec of the old fields and the fields to add.
        old: the codec of the store.

    Returns:
        Whether the state was loaded. If False, the file does not exist, or its content does not fit
        these fields.
    """
    path = store / CODEC_NAME / NEXT_BASIS_NAME
    specs = (field.spec for field in codec.fields.values())
    saved = StoreCodec(codec.name, specs, codec.sources)
    try:
        saved.load(read_basis(path))
    except (FileNotFoundError, ValueError, KeyError):
        return False
    if saved.only(old.fields).files() != old.files():
        return False
    codec.fields |= saved.only(codec.fields.keys() - old.fields.keys()).fields
    return True


def save_next_basis(writer: StoreWriter, codec: StoreCodec) -> None:
    """Save the learned state of ``codec`` in ``codec/next-basis.safetensors``.

    The saved state is for the old and the new fields. An interrupted addition may have written
    shards of new fields. These shards are deleted, because they were encoded with a different
    basis.

    Raises:
        StoreLocked: in a bucket, an addition of other fields is unfinished.
    """
    path = writer.path / CODEC_NAME / NEXT_BASIS_NAME
    # Raise this error before any shard is deleted, because another process may still be adding the
    # other fields.
    if not isinstance(path, Path) and backend_of(path).exists():
        raise _unfinished(path)
    arrays = {array.name for array in writer.codec.arrays}
    for part in writer.committed_parts():
        part_path = commit_path(writer.path, part)
        commit = read_part_commit(part_path)
        files: dict[str, FileRecord] = {}
        for name, record in commit.files.items():
            if array_of(name) in arrays:
                files[name] = record
        if files != commit.files:
            new_commit = replace(commit, files=files)
            if not backend_of(part_path).replace(commit.to_json(), new_commit.to_json()):
                raise changed_meanwhile(part_path)
    writer.remove_uncommitted()
    if isinstance(path, Path):
        # This process holds the store's lock, so no other addition is running. If the file exists
        # already, an interrupted addition has left it behind, and this process may replace the
        # file.
        write_atomic(path, codec.files()[BASIS_NAME])
    elif not backend_of(path).put_if_absent(codec.files()[BASIS_NAME]):
        raise _unfinished(path)


def _unfinished(path: StorePath) -> StoreLocked:
    return StoreLocked(
        f"{path} belongs to an unfinished `moa-data add` of other fields. Finish that command "
        "first, or delete this file if no process runs the command any more."
    )


class StoreAddition:
    """Adds fields to the committed parts of a store.

    Readers see the new fields only after :meth:`finish`.

    Args:
        writer: the store, opened for writing with its current manifest and plan.
        manifest: the new manifest. It contains the old and the new fields. Its entries
            ``extraction`` and ``codec`` contain the settings of the new fields.
        codec: codec of all fields of the new manifest, with its learned state.
    """

    def __init__(self, writer: StoreWriter, manifest: StoreManifest, codec: StoreCodec) -> None:
        self.manifest = manifest
        self.codec = codec
        self.fields = tuple(
            spec.name for spec in manifest.fields if spec not in writer.manifest.fields
        )
        self._writer = writer
        self._lacking: dict[int, tuple[str, ...]] = {}
        for part in writer.committed_parts():
            commit = read_part_commit(commit_path(writer.path, part))
            self._lacking[part] = lacking_fields(commit, self.fields)
        # Number of committed parts. The new fields are added to all of these parts.
        self.n_parts = len(self._lacking)
        self.part_tokens = {part: writer.part_tokens[part] for part in self._lacking}
        self._is_laid_out = False

    def pending_parts(self) -> list[int]:
        """Return the numbers of the parts that lack at least one new field, in ascending order."""
        return [part for part, fields in self._lacking.items() if fields]

    def part(self, part: int, pool: EncodePool | None = None) -> PartWriter:
        """Open a part for writing the new fields that the part does not have yet.

        The ``codec`` of the returned :class:`PartWriter` has exactly these fields.

        Args:
            part: number of the part.
            pool: thread pool that encodes (see :class:`PartWriter`).
        """
        if not self._lacking.get(part):
            raise StoreError(
                f"Part {part} already has all fields, or has no commit yet. Write only the parts "
                "that pending_parts() returns."
            )
        # Write the Zarr metadata of the new arrays only now, when the first part is opened. Until
        # then, the store does not change.
        if not self._is_laid_out:
            self._writer.lay_out(self.codec)
            self._is_laid_out = True
        existing = read_part_commit(commit_path(self._writer.path, part)).files
        codec = self.codec.only(self._lacking[part])
        return self._writer.open_part(
            part, codec, existing, lambda done: self._lacking.update({done: ()}), pool
        )

    def finish(self) -> None:
        """Make the new fields visible to readers by replacing store.json."""
        if pending := self.pending_parts():
            raise StoreError(
                f"{len(pending)} parts of {self._writer.path} lack new fields. The first of them, "
                f"part {pending[0]}, lacks {', '.join(self._lacking[pending[0]])}. Write all parts "
                "before you call finish()."
            )
        self._writer.replace_manifest(self.manifest)
