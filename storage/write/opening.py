"""Opens a store for writing: checks that the folder holds a store of the same inputs, or nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...errors import OutputOccupied, SchemaVersionError, StoreDamaged, StoreMismatch
from ..disk.checking import exists
from ..disk.durable import PARTIAL_SUFFIX
from ..disk.files import names_in
from ..names import COMMITS_NAME, KNOWN_NAMES, LOCK_NAME, MANIFEST_NAME, PLAN_NAME, manifest_commit_path
from ..parts.manifest_commit import find_manifest_damage, restore_files
from ..parts.plan import plan_bytes, plan_counts, read_plan
from ..paths import StorePath
from ..read.store import read_manifest
from ..schema import StoreManifest, flatten


def check_counts(manifest: StoreManifest, plan: pa.Table) -> None:
    """Compare the manifest's counts with the plan's; raises StoreDamaged."""
    for key, value in plan_counts(plan).items():
        if getattr(manifest, key) != value:
            raise StoreDamaged(f"The manifest says {key} {getattr(manifest, key)}, the plan has {value}.")


def check_unoccupied(store: StorePath) -> None:
    """Refuse a folder that is not empty, a readable store, or the unfinished start of one."""
    # Whether there is a folder a bucket tells by a list of all files alone.
    if isinstance(store, Path) and not exists(store):
        return
    if isinstance(store, Path) and not store.is_dir():
        raise OutputOccupied(f"{store} is a file, not a folder. Choose another output folder.")
    manifest = store / MANIFEST_NAME
    if exists(manifest):
        try:
            read_manifest(store)
        except SchemaVersionError:
            if not any(path == manifest for path, _ in find_manifest_damage(store)):
                raise  # else the version is a damaged byte
        except StoreDamaged as error:
            if exists(manifest_commit_path(store)):
                return  # a store whose manifest is damaged: `restore` repairs it, or names the damage
            raise OutputOccupied(f"{store} holds something else: {error} Choose another output folder.") from error
        return
    commits = names_in(store / COMMITS_NAME)
    if any(name.startswith("part-") and name.endswith(".json") for name in commits) and not exists(
        manifest_commit_path(store)
    ):
        raise OutputOccupied(
            f"{store} has committed parts but no {MANIFEST_NAME}, so that nothing tells which inputs they came from. "
            f"Restore {MANIFEST_NAME}, or choose another output folder."
        )
    names = names_in(store)
    foreign = sorted(name for name in names if name.removesuffix(PARTIAL_SUFFIX) not in KNOWN_NAMES)
    if names and (foreign or (LOCK_NAME not in names and isinstance(store, Path))):  # a bucket's start leaves no lock
        shown = ", ".join((foreign or sorted(names))[:3])
        raise OutputOccupied(
            f"{store} is not empty and not an activation store (it holds {shown}). "
            "Choose another output folder, or empty this one."
        )


def restore(store: StorePath, manifest: StoreManifest, plan: pa.Table) -> None:
    """Write damaged or lost store.json and plan.parquet again if these inputs are the store's; else name the damage."""
    if not exists(manifest_commit_path(store)):
        return
    contents = {MANIFEST_NAME: manifest.to_json().encode(), PLAN_NAME: plan_bytes(plan)}
    try:
        restore_files(store, contents)
    except StoreDamaged:
        if not exists(store / MANIFEST_NAME):
            raise
        # Either their commit is damaged, or the inputs are others: the comparison that follows says which.


def check_same(store: StorePath, manifest: StoreManifest, plan: pa.Table) -> None:
    """Compare everything that shapes the data; raises StoreMismatch with every key that differs."""
    old = flatten(json.loads(read_manifest(store).to_json()))
    new = flatten(json.loads(manifest.to_json()))
    absent = "(absent)"
    changes: dict[str, tuple[Any, Any]] = {
        key: (old.get(key, absent), new.get(key, absent))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, absent) != new.get(key, absent)
    }
    changes |= _plan_changes(store, plan)
    if changes:
        raise StoreMismatch(str(store), changes)


def check_same_plan(store: StorePath, plan: pa.Table) -> None:
    """Compare the plan alone, of a store that has no manifest yet; raises StoreMismatch."""
    if changes := _plan_changes(store, plan):
        raise StoreMismatch(str(store), changes)


def _plan_changes(store: StorePath, plan: pa.Table) -> dict[str, tuple[Any, Any]]:
    old_plan = read_plan(store / PLAN_NAME)
    is_same = old_plan.equals(plan.replace_schema_metadata(None))
    return {} if is_same else {"plan": _first_difference(old_plan, plan)}


def _first_difference(old: pa.Table, new: pa.Table) -> tuple[str, str]:
    for row in range(min(old.num_rows, new.num_rows)):
        a, b = old.slice(row, 1).to_pylist()[0], new.slice(row, 1).to_pylist()[0]
        if a != b:
            keys = [key for key in a if a[key] != b[key]]
            was, now = (f"row {row}: " + ", ".join(f"{key}={side[key]}" for key in keys) for side in (a, b))
            return was, now
    return f"{old.num_rows} sequences", f"{new.num_rows} sequences"
