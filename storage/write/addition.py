"""Adds fields to an existing store without changing its other files.

At any time a reader sees either the complete old store or the complete new one:

1. For each part, the shards of the new arrays are written, synced and renamed to their final names.
   Then the part's commit is replaced by one that also lists these shards. Readers of the old
   manifest ignore them.
2. When every committed part has the new fields, store.json is replaced by one that names them.

At the end every file has the same bytes as if all fields had been written by one extraction.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ...errors import StoreError, StoreLocked
from ...files import write_atomic
from ..backend import put_if_absent, replace_file
from ..chunk import EncodePool
from ..codecs.registry import BASIS_NAME, NEXT_BASIS_NAME, StoreCodec, read_basis
from ..commit import PartCommit, array_of, read_part_commit
from ..paths import StorePath
from ..read.verify import unfinished_fields
from ..schema import CODEC_NAME, FieldSpec, StoreManifest, commit_path
from .part import PartWriter
from .publish import changed_meanwhile
from .store import StoreWriter


def lacking_fields(commit: PartCommit, fields: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``fields`` that a committed part does not have."""
    # The arrays of a field have the field's name, or are in a folder with that name.
    return tuple(
        name for name in fields if not any(file.startswith(f"{name}/") for file in commit.files)
    )


def extended_codec(old: StoreCodec, specs: Iterable[FieldSpec]) -> StoreCodec:
    """Return a codec that covers the old fields and new ones.

    The old fields keep their learned state. The new fields have none yet.
    """
    codec = StoreCodec(old.name, specs, sources={})
    codec.fields |= old.fields
    return codec


def load_next_basis(store: StorePath, codec: StoreCodec, old: StoreCodec) -> bool:
    """Load the learned state of an unfinished addition of the same fields into ``codec``.

    Returns:
        Whether the store has such a state.
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
    """Save the learned state of the new fields in a second file next to the store's basis.

    Shards of an earlier unfinished addition are removed, since they are encoded with another basis.
    """
    arrays = {array.name for array in writer.codec.arrays}
    for part in writer.committed_parts():
        path = commit_path(writer.path, part)
        commit = read_part_commit(path)
        if unfinished_fields([commit], writer.codec):
            files = {
                name: record for name, record in commit.files.items() if array_of(name) in arrays
            }
            if not replace_file(path, commit.to_json(), replace(commit, files=files).to_json()):
                raise changed_meanwhile(path)
    writer.remove_uncommitted()
    path = writer.path / CODEC_NAME / NEXT_BASIS_NAME
    if isinstance(path, Path):
        # The store's lock excludes other additions. An existing file is left over from an addition
        # that was interrupted, so it can be overwritten.
        write_atomic(path, codec.files()[BASIS_NAME])
    elif not put_if_absent(path, codec.files()[BASIS_NAME]):
        raise StoreLocked(
            f"{path} belongs to an unfinished addition of other fields. Finish that addition "
            "first, or delete the file if no process works on it any more."
        )


class StoreAddition:
    """Adds fields to the committed parts of a store. :meth:`finish` makes them visible to readers.

    Args:
        writer: the store, opened for writing with its own manifest and plan.
        manifest: the new manifest. It has the additional fields, and their settings in
            ``extraction`` and ``codec``.
        codec: codec of the new manifest, with its learned state.
    """

    def __init__(self, writer: StoreWriter, manifest: StoreManifest, codec: StoreCodec) -> None:
        self.manifest = manifest
        self.codec = codec
        self.fields = tuple(
            spec.name for spec in manifest.fields if spec not in writer.manifest.fields
        )
        self._writer = writer
        self._lacking = {
            part: lacking_fields(read_part_commit(commit_path(writer.path, part)), self.fields)
            for part in writer.committed_parts()
        }
        self.n_parts = len(self._lacking)  # Number of committed parts. Each gets the new fields.
        self._is_laid_out = False

    def pending_parts(self) -> list[int]:
        """Return the parts that do not have all new fields yet, in order."""
        return [part for part, fields in self._lacking.items() if fields]

    def part(self, part: int, pool: EncodePool | None = None) -> PartWriter:
        """Open a part for writing the new fields that it does not have yet.

        The ``codec`` of the returned :class:`PartWriter` names these fields.
        """
        if not self._lacking.get(part):
            raise StoreError(
                f"Part {part} lacks no field; write only the parts that pending_parts() returns."
            )
        # Write the array metadata only now, so that the store is unchanged until the first part is
        # opened.
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
                f"{self._writer.path}: {len(pending)} parts lack "
                f"{', '.join(self._lacking[pending[0]])}, the first is part {pending[0]}. Write "
                "them all before finish()."
            )
        self._writer.replace_manifest(self.manifest)
