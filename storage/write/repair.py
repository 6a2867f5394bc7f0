"""Deletes the commits of damaged parts. ``pipeline.extract.repair`` then writes the parts again."""

import os

from ...text import SILENT, Progress
from ..backend import check_guard, open_path
from ..commit import find_manifest_damage
from ..paths import StorePath
from ..plan import read_plan
from ..read.store import read_manifest
from ..read.verify import Finding
from ..schema import PLAN_NAME, manifest_commit_path
from .store import StoreWriter


def drop_damage(
    path: str | os.PathLike[str] | StorePath, progress: Progress = SILENT
) -> tuple[Finding, ...]:
    """Check every byte of a store, and delete the commits of damaged parts.

    Args:
        path: the store's folder, or its URL.
        progress: reports the number of bytes that have been checked.

    Returns:
        The damage that was found.

    Raises:
        StoreDamaged: store.json, plan.parquet or the codec is damaged. No part can be read without
            them.
        StorageUnavailable: a file could not be checked. Nothing was deleted.
    """
    store = open_path(path)
    with check_guard(store):
        for file, error in find_manifest_damage(store, metadata=False):
            # If only commits/store.json is damaged, it can be made again from store.json,
            # plan.parquet and the zarr.json files. Damage to store.json or plan.parquet is an
            # error.
            if file != manifest_commit_path(store):
                raise error
        manifest = read_manifest(store)
        plan = read_plan(store / PLAN_NAME)
    with StoreWriter.create_or_resume(
        store, manifest, plan, depth="values", progress=progress
    ) as writer:
        return writer.damages
