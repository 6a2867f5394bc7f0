"""Adds fields to an existing store, without touching its other files.

At every moment readers see the whole old store or the whole new one:

1. The new arrays' shards of a part are written, synced and given their names. Then its commit is replaced by one that
   lists them too, which readers of the old manifest do not ask for.
2. When every committed part has them, store.json is replaced by one that names the new fields.

At the end every file has the bytes that one extraction of all fields would have given.
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
    """Return the fields, of those given, that a committed part lacks."""
    # A field's arrays have its name, or lie in a folder of that name.
    return tuple(
        name for name in fields if not any(file.startswith(f"{name}/") for file in commit.files)
    )


def extended_codec(old: StoreCodec, specs: Iterable[FieldSpec]) -> StoreCodec:
    """Return a store's codec for more fields: the old ones keep what they learned, new ones have not learned yet."""
    codec = StoreCodec(old.name, specs, sources={})
    codec.fields |= old.fields
    return codec


def load_next_basis(store: StorePath, codec: StoreCodec, old: StoreCodec) -> bool:
    """Load into ``codec`` what an unfinished addition of the same fields has learned; returns whether there is any."""
    path = store / CODEC_NAME / NEXT_BASIS_NAME
    specs = (field.spec for field in codec.fields.values())
    found = StoreCodec(codec.name, specs, codec.sources)
    try:
        found.load(read_basis(path))
    except (FileNotFoundError, ValueError, KeyError):
        return False
    if found.only(old.fields).files() != old.files():
        return False
    codec.fields |= found.only(codec.fields.keys() - old.fields.keys()).fields
    return True


def save_next_basis(writer: StoreWriter, codec: StoreCodec) -> None:
    """Save what the new fields have learned beside the store's own basis; drop shards encoded with another one."""
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
        # The lock of the folder keeps other additions out: what is there was left by one that
        # ended.
        write_atomic(path, codec.files()[BASIS_NAME])
    elif not put_if_absent(path, codec.files()[BASIS_NAME]):
        raise StoreLocked(
            f"{path} is what an unfinished addition of other fields has learned. Finish that one first, or delete the "
            "file if no process works on it any more."
        )


class StoreAddition:
    """Adds fields to the committed parts of a store; :meth:`finish` makes them exist for readers.

    Args:
        writer: the store, opened for writing with its own manifest and plan.
        manifest: the store's manifest with more fields, and their settings in ``extraction`` and ``codec``.
        codec: codec of that manifest, with what it has learned.
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
        self.n_parts = len(self._lacking)  # committed parts, to which fields are added
        self._is_laid_out = False

    def pending_parts(self) -> list[int]:
        """Return the parts that lack new fields, in order."""
        return [part for part, fields in self._lacking.items() if fields]

    def part(self, part: int, pool: EncodePool | None = None) -> PartWriter:
        """Open a part to write the new fields that it lacks (those of its ``codec``); see :class:`PartWriter`."""
        if not self._lacking.get(part):
            raise StoreError(
                f"Part {part} lacks no field; write only the parts that pending_parts() returns."
            )
        # not before: until the first part is written the store is as it was
        if not self._is_laid_out:
            self._writer.lay_out(self.codec)
            self._is_laid_out = True
        existing = read_part_commit(commit_path(self._writer.path, part)).files
        codec = self.codec.only(self._lacking[part])
        return self._writer.open_part(
            part, codec, existing, lambda done: self._lacking.update({done: ()}), pool
        )

    def finish(self) -> None:
        """Make the new fields exist for readers."""
        if pending := self.pending_parts():
            raise StoreError(
                f"{self._writer.path}: {len(pending)} parts lack {', '.join(self._lacking[pending[0]])}, the first is "
                f"part {pending[0]}. Write them all before finish()."
            )
        self._writer.replace_manifest(self.manifest)
