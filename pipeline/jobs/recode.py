"""Make a store with another codec from a lossless one, without the target."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import Interrupted, OptionInvalid
from ...moa.targets.bundle import FrozenTarget
from ...storage.chunks.field import TOKENS
from ...storage.codecs.registry import StoreCodec
from ...storage.disk.checking import exists
from ...storage.disk.files import open_path
from ...storage.dtypes import to_float32
from ...storage.errors import CodecUnknown
from ...storage.names import TARGET_NAME, commit_path
from ...storage.parts.commit import read_part_commit
from ...storage.paths import StorePath
from ...storage.read.store import ActivationStore
from ...storage.schema import SCHEMA_VERSION
from ...storage.write.part import PartWriter
from ...storage.write.store import StoreWriter
from ...text import Progress, format_bytes, format_hours
from ..forwards.calibrate import calibrate, learned_before, learning_on
from .plan import existing_parent


@dataclass(frozen=True)
class RecodeReport:
    """What a recoding did; ``source_bytes`` are those of the source's parts."""

    source: StorePath
    out: StorePath
    codec: str
    n_parts: int
    n_parts_done: int
    n_tokens: int
    source_bytes: int
    stored_bytes: int
    wall_s: float

    def describe(self) -> str:
        """Return the report as text."""
        return (
            f"{self.out}: codec {self.codec}, {self.n_parts:,} parts ({self.n_parts_done:,} by this run in "
            f"{format_hours(self.wall_s)}), {format_bytes(self.stored_bytes)}, "
            f"{self.stored_bytes / self.n_tokens:,.0f} bytes per token; {self.stored_bytes / self.source_bytes:.3f} of "
            f"{self.source}"
        )


def recode(
    store: str | os.PathLike[str] | StorePath,
    codec: str,
    out: str | os.PathLike[str] | StorePath,
    progress: Progress | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> RecodeReport:
    """Write the content of a lossless store with another codec, or go on where an earlier run stopped.

    The new store has the bytes that extracting with that codec would have given.

    Args:
        store: a complete lossless store.
        progress: called with (tokens done, tokens in all, message).

    Raises:
        OptionInvalid: unknown codec, the source is not lossless, or source and output are one folder.
        Interrupted: after Ctrl-C.
        StoreError: a store cannot be used.
    """
    start = time.perf_counter()
    target_store = open_path(out)
    with ActivationStore(store, require_complete=True) as source:
        if not source.codec.is_lossless:
            raise OptionInvalid(
                f"{source.path} has codec {source.codec.name}; only a lossless store can be recoded, since what one "
                "codec has lost another cannot bring back. Extract again, or give the lossless store."
            )
        if target_store == source.path or _is_same_folder(target_store, source.path):
            raise OptionInvalid(f"--out {target_store} is the store itself. Choose another folder.")
        new = codec_for(source, codec, target_store, progress)
        manifest = dataclasses.replace(source.manifest, codec=new.describe(), schema_version=SCHEMA_VERSION)
        with StoreWriter.create_or_resume(target_store, manifest, source.sequences, new.files()) as writer:
            pending = writer.pending_parts()
            try:
                _copy_target(source, writer)
                _write_parts(source, writer, progress)
            except KeyboardInterrupt as error:
                n_done = writer.n_parts - len(writer.pending_parts())
                raise Interrupted(
                    f"Interrupted; {n_done} of {writer.n_parts} parts are committed in {writer.path}. Run the same "
                    "command again to go on."
                ) from error
            report = RecodeReport(
                source=source.path,
                out=target_store,
                codec=new.name,
                n_parts=writer.n_parts,
                n_parts_done=len(pending),
                n_tokens=manifest.n_tokens,
                source_bytes=sum(commit.stored_bytes for commit in source.commits.values()),
                stored_bytes=sum(
                    read_part_commit(commit_path(writer.path, part)).stored_bytes for part in range(writer.n_parts)
                ),
                wall_s=time.perf_counter() - start,
            )
            record = vars(report) | {"source": str(source.path), "out": str(target_store)}
            writer.record_run({"recode": record, "provenance": provenance or {}})
    return report


def _is_same_folder(one: StorePath, other: StorePath) -> bool:
    return isinstance(one, Path) and isinstance(other, Path) and one.exists() and one.samefile(other)


def codec_for(
    source: ActivationStore, name: str, out: StorePath | None = None, progress: Progress | None = None
) -> StoreCodec:
    """Make a codec, and let it learn if it must.

    Args:
        source: a lossless store to learn from.
        out: a store that may hold what an earlier run learned.

    Raises:
        OptionInvalid: no codec of that name, or not for these fields.
    """
    try:
        codec = StoreCodec(name, source.manifest.fields)
    except CodecUnknown as error:
        raise OptionInvalid(f"{error} Mend --codec.") from error
    if not codec.learned:
        return codec
    if out is not None and (before := learned_before(codec, out)) is not None:
        return before

    def read(row: int) -> dict[str, np.ndarray]:
        values = {field: to_float32(source.read(row, field), source.fields[field].dtype) for field in codec.learned}
        return values | {TOKENS: source.read(row, TOKENS)}

    frozen = FrozenTarget.load(source.target_path, 0, sizes=source.manifest.target)
    learning = learning_on("cpu", None if out is None else existing_parent(out), progress)
    calibrate(codec, source.lengths, read, frozen.config, frozen.lm_head_weight, frozen.embed_tokens.weight, learning)
    return codec


def _copy_target(source: ActivationStore, writer: StoreWriter) -> None:
    if not writer.has_target and exists(source.path / TARGET_NAME):
        with writer.target() as folder:
            shutil.copytree(source.target_path, folder, dirs_exist_ok=True)


def _write_sequence(source: ActivationStore, i: int, out: PartWriter, codec: StoreCodec, first_token: int) -> None:
    """Write all fields of a sequence, encoded where the codec encodes them."""
    values = {name: source.read(i, name) for name in source.fields}
    exact = {
        name: to_float32(values[name], spec.dtype)
        for name, spec in source.fields.items()
        if not codec.fields[name].is_identity
    }
    for name, rows in (values | codec.encode(exact, values[TOKENS])).items():
        out.write(name, first_token, rows)


def _write_parts(source: ActivationStore, writer: StoreWriter, progress: Progress | None) -> None:
    parts = source.sequences["part"].to_numpy()
    pending = writer.pending_parts()
    n_done = int(source.lengths[~np.isin(parts, pending)].sum())
    for part in pending:
        with writer.part(part) as out:
            for i in np.flatnonzero(parts == part).tolist():
                first_token = int(source.sequences["first_token"][i].as_py())
                _write_sequence(source, i, out, writer.codec, first_token)
                n_done += int(source.lengths[i])
                if progress:
                    progress(n_done, source.manifest.n_tokens, f"recode part {part + 1}/{writer.n_parts}")
            out.commit()
