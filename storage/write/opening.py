"""Opens a store for writing: checks that the folder holds a store of the same inputs, or nothing, and begins one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...errors import OutputOccupied, SchemaVersionError, StoreDamaged, StoreMismatch
from ..backend import (
    blocks_of,
    exists,
    make_folder,
    names_in,
    put,
    put_if_absent,
    read_file,
    remove_file,
    sync_names,
)
from ..codecs.registry import BASIS_NAME, NEXT_BASIS_NAME
from ..commit import find_manifest_damage, restore_files
from ..grid import ArrayGrid, array_grid, grid_from_metadata, zarr_metadata
from ..paths import StorePath
from ..plan import plan_bytes, plan_counts, read_plan
from ..read.store import read_manifest
from ..schema import (
    CODEC_NAME,
    COMMITS_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    PARTS_NAME,
    PLAN_NAME,
    ZARR_NAME,
    StoredArray,
    StoreManifest,
    flatten,
    is_known,
    manifest_commit_path,
)


def check_counts(manifest: StoreManifest, plan: pa.Table) -> None:
    """Compare the manifest's counts with the plan's; raises StoreDamaged."""
    for key, value in plan_counts(plan).items():
        if getattr(manifest, key) != value:
            raise StoreDamaged(f"The manifest says {key} {getattr(manifest, key)}, the plan has {value}.")


def check_unoccupied(store: StorePath) -> None:
    """Refuse a folder that is not empty, a readable store, or the unfinished start of one."""
    # Whether there is a folder a bucket tells by a list of all files alone.
    if isinstance(store, Path):
        there = next(path for path in (store, *store.absolute().parents) if path.exists())
        if not there.is_dir():
            raise OutputOccupied(f"{store}: {there} is a file, not a folder. Choose another output folder.")
        if there is not store:
            return
    manifest, has_commit = store / MANIFEST_NAME, exists(manifest_commit_path(store))
    if exists(manifest):
        try:
            read_manifest(store)
        except SchemaVersionError:
            if not any(path == manifest for path, _ in find_manifest_damage(store)):
                raise  # else the version is a damaged byte
        except StoreDamaged as error:
            if not has_commit:  # else `restore` repairs it, or names the damage
                raise OutputOccupied(f"{store} holds something else: {error} Choose another output folder.") from error
        return
    commits = names_in(store / COMMITS_NAME)
    if any(name.startswith("part-") and name.endswith(".json") for name in commits) and not has_commit:
        raise OutputOccupied(
            f"{store} has committed parts but no {MANIFEST_NAME}, so that nothing tells which inputs they came from. "
            f"Restore {MANIFEST_NAME}, or choose another output folder."
        )
    names = names_in(store)
    foreign = sorted(name for name in names if not is_known(name))
    if names and (foreign or (LOCK_NAME not in names and isinstance(store, Path))):  # a bucket's start leaves no lock
        shown = ", ".join((foreign or sorted(names))[:3])
        raise OutputOccupied(
            f"{store} is not empty and not an activation store (it holds {shown}). "
            "Choose another output folder, or empty this one."
        )


def restore(store: StorePath, manifest: StoreManifest, plan: pa.Table) -> None:
    """Write damaged or lost store.json and plan.parquet again if these inputs are the store's; else name the damage."""
    try:
        restore_files(store, {MANIFEST_NAME: manifest.to_json().encode(), PLAN_NAME: plan_bytes(plan)})
    except StoreDamaged:
        if not exists(store / MANIFEST_NAME):
            raise
        # Either their commit is damaged, or the inputs are others: the comparison that follows says which.


def check_same(store: StorePath, manifest: StoreManifest | None, plan: pa.Table) -> None:
    """Compare everything that shapes the data, or the plan alone; raises StoreMismatch with every key that differs."""
    changes: dict[str, tuple[Any, Any]] = {}
    if manifest is not None:
        old, new = (flatten(json.loads(each.to_json())) for each in (read_manifest(store), manifest))
        pairs = {key: (old.get(key, "(absent)"), new.get(key, "(absent)")) for key in sorted(old.keys() | new.keys())}
        changes = {key: (was, now) for key, (was, now) in pairs.items() if was != now}
    old_plan = read_plan(store / PLAN_NAME)
    if not old_plan.equals(plan.replace_schema_metadata(None)):
        changes["plan"] = _first_difference(old_plan, plan)
    if changes:
        raise StoreMismatch(str(store), changes)


def _first_difference(old: pa.Table, new: pa.Table) -> tuple[str, str]:
    for row in range(min(old.num_rows, new.num_rows)):
        a, b = old.slice(row, 1).to_pylist()[0], new.slice(row, 1).to_pylist()[0]
        if a != b:
            keys = [key for key in a if a[key] != b[key]]
            was, now = (f"row {row}: " + ", ".join(f"{key}={side[key]}" for key in keys) for side in (a, b))
            return was, now
    return f"{old.num_rows} sequences", f"{new.num_rows} sequences"


def write_array_metadata(
    store: StorePath, arrays: Iterable[StoredArray], n_parts: int, longest_part: int
) -> dict[str, ArrayGrid]:
    """Write the metadata of arrays where it is missing, and return the grid of each by its name.

    Existing metadata stays, also where another release chose another grid: later parts follow it. It raises
    StoreDamaged where it is damaged, and not what this release would write.

    Args:
        longest_part: tokens of the longest part, padding included.
    """
    wanted = {array.name: array for array in arrays}
    documents = zarr_metadata((array, array_grid(array, n_parts, longest_part)) for array in wanted.values())
    contents = {f"{PARTS_NAME}/{name}": content for name, content in documents.items()}
    restore_files(store, contents)
    for name, content in sorted(contents.items(), key=lambda item: item[0].count("/")):  # groups before their members
        path = store / name
        if not exists(path):
            make_folder(path.parent)
            put_if_absent(path, content)
            sync_names(path.parent.parent)
    grids = {}
    for name, array in wanted.items():
        path = store / PARTS_NAME / name / ZARR_NAME
        try:
            grids[name] = grid = grid_from_metadata(read_file(path), array, str(path))
        except ValueError as error:
            raise StoreDamaged(f"{error} Restore the file from a copy.") from error
        if grid.shape[0] != n_parts * grid.part_rows or grid.part_rows < array.n_rows(longest_part):
            raise StoreDamaged(
                f"{path} has {grid.shape[0]} rows and {grid.part_rows} for each part, which is not what the plan's "
                f"{n_parts} parts of up to {longest_part} tokens need. Restore the file from a copy."
            )
    return grids


def begin(store: StorePath, manifest: StoreManifest, plan: pa.Table, codec_files: Mapping[str, bytes]) -> None:
    """Write what makes a folder or prefix a store, the manifest last.

    In a bucket others may begin at the same moment, and what is there stays: it is compared before the next document is
    written. A folder is locked, so that what is there was left by a kill.
    """
    if isinstance(store, Path):
        for path in (store / PLAN_NAME, *(store / CODEC_NAME / name for name in codec_files)):
            path.unlink(missing_ok=True)
    for name, content in codec_files.items():
        make_folder(store / CODEC_NAME)
        if not put_if_absent(store / CODEC_NAME / name, content):
            raise StoreMismatch(str(store), {"codec.basis_sha256": ("(learned by another run)", "(learned here)")})
    if not put_if_absent(store / PLAN_NAME, plan_bytes(plan)):
        check_same(store, None, plan)
    if not put_if_absent(store / MANIFEST_NAME, manifest.to_json().encode()):
        check_same(store, manifest, plan)


def name_next_basis(store: StorePath, manifest: StoreManifest) -> None:
    """Rename the basis that was learned for added fields, once store.json names these fields."""
    path = store / CODEC_NAME / NEXT_BASIS_NAME
    if not exists(path):
        return
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    if digest.hexdigest() != manifest.codec.get("basis_sha256"):
        return
    if isinstance(path, Path):
        os.replace(path, path.with_name(BASIS_NAME))
        sync_names(path.parent)
    else:  # readers that find another basis look at the next one too
        put(path.parent / BASIS_NAME, path.read_bytes())
        remove_file(path)


def write_codec(store: StorePath, files: Mapping[str, bytes]) -> None:
    """Write what the codec has learned, unless it is there; the manifest, written later, holds its hash."""
    for name, content in files.items():
        path = store / CODEC_NAME / name
        make_folder(path.parent)
        if not exists(path) or path.read_bytes() != content:
            put(path, content)
