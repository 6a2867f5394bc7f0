"""Stores of schema version 1: one that an earlier release wrote, and new ones of the same layout."""

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from moa_data.storage.read.store import ActivationStore
from moa_data.storage.write.store import StoreWriter

ARCHIVE = Path(__file__).parents[1] / "data" / "store-1.zip"
"""``build_store(path, n_sequences=18, dtype="bfloat16")`` of ``kit.training``, run at commit ac8cd80."""


def unpack(folder: Path) -> Path:
    """Return the store of the earlier release, unpacked to a folder."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    return folder / "store-1"


def write_as_version_1(store: Path, out: Path) -> Path:
    """Write the content of a store in the layout of schema version 1, its target and runs included."""
    with ActivationStore(store) as source:
        manifest = replace(source.manifest, schema_version=1)
        with StoreWriter.create_or_resume(out, manifest, source.sequences, source.codec.files()) as writer:
            with writer.target() as folder:
                shutil.copytree(source.target_path, folder, dirs_exist_ok=True)
            part_of = source.sequences["part"].to_numpy()
            for part in writer.pending_parts():
                with writer.part(part) as opened:
                    for i in np.flatnonzero(part_of == part).tolist():
                        first = source.sequences["first_token"][i].as_py()
                        for field in source.fields:
                            opened.write(field, first, source.read(i, field), source.read(i, "tokens"))
                    opened.commit()
    shutil.copytree(store / "runs", out / "runs")
    return out
