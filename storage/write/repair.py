"""Gives damaged parts of a store up; ``pipeline.extract.repair`` writes them again instead."""

import os

from ...text import Progress
from ..backend import check_guard, open_path
from ..commit import find_manifest_damage
from ..paths import StorePath
from ..plan import read_plan
from ..read.store import read_manifest
from ..read.verify import Finding
from ..schema import PLAN_NAME, manifest_commit_path
from .store import StoreWriter


def drop_damage(
    path: str | os.PathLike[str] | StorePath, progress: Progress | None = None
) -> tuple[Finding, ...]:
    """Check every byte of a store and delete the commits of what is damaged; returns the damage.

    Raises:
        StoreDamaged: store.json, plan.parquet or the codec is damaged, without which no part can be read.
        StorageUnavailable: something could not be checked; nothing was deleted.
    """
    store = open_path(path)
    with check_guard(store):
        for file, error in find_manifest_damage(store, metadata=False):
            # a damaged record is written again from whole files
            if file != manifest_commit_path(store):
                raise error
        manifest = read_manifest(store)
        plan = read_plan(store / PLAN_NAME)
    with StoreWriter.create_or_resume(
        store, manifest, plan, depth="values", progress=progress
    ) as writer:
        return writer.damages
