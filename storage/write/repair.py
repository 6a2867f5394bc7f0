"""Plans which pieces of a damaged store must go, and deletes them; ``pipeline.extract`` makes them again."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ...errors import StoreDamaged
from ...text import Progress
from ..backend import check_guard, open_path, remove_file
from ..commit import is_metadata
from ..paths import StorePath
from ..plan import read_plan
from ..read.store import read_manifest
from ..read.verify import Finding, verify_store
from ..schema import (
    CODEC_NAME,
    COMMITS_NAME,
    MANIFEST_NAME,
    PLAN_NAME,
    TARGET_NAME,
    manifest_commit_path,
    target_commit_path,
)
from .store import StoreWriter

# What a damaged file of the whole store means, in the order of the plan's lines.
_MEANINGS = {
    "target": "the target bundle is damaged; training needs it",
    "manifest": f"{MANIFEST_NAME} or {PLAN_NAME} is damaged: --model writes it anew, --drop cannot help",
    "metadata": "Zarr's metadata is damaged: --model or --drop writes it anew",
    "manifest_commit": f"the checksums of {MANIFEST_NAME} and {PLAN_NAME} are damaged",
    "codec": f"{CODEC_NAME}/ is damaged, without which nothing can be decoded: --model learns it again, --drop cannot "
    "help",
}


@dataclass(frozen=True)
class RepairPlan:
    """What a repair has to do.

    Attributes:
        damages: everything that `verify_store` found.
        parts: parts that must be extracted again or dropped.
        target: whether the target bundle must be.
        manifest: whether store.json or plan.parquet are not what was written; only the inputs can give them back.
        metadata: whether metadata of the arrays that all parts share is; opening the store for writing repairs it.
        manifest_commit: whether only their record, commits/store.json, is damaged.
        codec: whether what a codec has learned is; the target can teach it again.
        strays: commits that belong to no part, relative to the store.
        others: damages that a repair does not help with.
        missing: what of the plan is still to be written, in words; empty for a complete store.
    """

    store: StorePath
    damages: tuple[Finding, ...]
    parts: tuple[int, ...]
    target: bool
    manifest: bool
    metadata: bool
    manifest_commit: bool
    codec: bool
    strays: tuple[str, ...]
    others: tuple[Finding, ...]
    missing: str

    def describe(self) -> str:
        """Return the plan as lines for people; empty for a whole store."""
        lines = [f"{self.store} is incomplete: {self.missing}"] if self.missing else []
        if self.parts:
            lines.append(f"{len(self.parts)} parts are damaged: {', '.join(map(str, self.parts))}")
        lines += [line for name, line in _MEANINGS.items() if getattr(self, name)]
        if self.manifest or self.metadata or self.manifest_commit or self.codec:
            lines.append("so the parts were not checked yet: afterwards run this command once more")
        lines += [f"{name} belongs to no part" for name in self.strays]
        lines += [f"{damage.path}: {damage.message} This is not repaired; extract again." for damage in self.others]
        return "\n".join(lines)


def plan_repair(
    path: str | os.PathLike[str] | StorePath, progress: Progress | None = None, parts: Collection[int] | None = None
) -> RepairPlan:
    """Verify a store, or some of its parts alone, and sort what is damaged; nothing is changed."""
    store = open_path(path)
    report = verify_store(store, progress, parts=parts)
    report.check_complete(store)
    found: dict[str, list[Finding]] = {name: [] for name in (*_MEANINGS, "strays", "others")}
    for damage in report.damages:
        if damage.part is None:
            found[_kind(damage.path)].append(damage)
    return RepairPlan(
        store=store,
        damages=tuple(report.damages),
        parts=tuple(sorted({damage.part for damage in report.damages if damage.part is not None})),
        strays=tuple(damage.path for damage in found.pop("strays")),
        others=tuple(found.pop("others")),
        missing=report.missing,
        **{name: bool(damages) for name, damages in found.items()},
    )


def _kind(path: str) -> str:
    """Say what a damaged file of the whole store belongs to: a key of ``_MEANINGS``, ``strays`` or ``others``."""
    if path.startswith((f"{TARGET_NAME}/", target_commit_path(Path()).as_posix())):
        return "target"
    if path in (MANIFEST_NAME, PLAN_NAME):
        return "manifest"
    if is_metadata(path):
        return "metadata"
    if path == manifest_commit_path(Path()).as_posix():
        return "manifest_commit"
    if path == CODEC_NAME:
        return "codec"
    return "strays" if path.startswith(f"{COMMITS_NAME}/part-") else "others"


def drop_damage(plan: RepairPlan) -> tuple[int, ...]:
    """Delete what is damaged: dropped parts are pending, as if they had never been extracted.

    Raises:
        StoreDamaged: store.json, plan.parquet or codec/ is damaged, without which no part can be read; or a symbolic
            link stands inside the store.
        StorageUnavailable: it could not be checked once more; nothing was deleted.
        StoreLocked: another process is writing to the store.
    """
    _check_droppable(plan)
    with check_guard(plan.store):
        manifest, table = read_manifest(plan.store), read_plan(plan.store / PLAN_NAME)
    with StoreWriter.create_or_resume(plan.store, manifest, table) as writer:
        now = retract_damage(writer, plan)
        for part in now.parts:
            writer.drop_part(part)
        return tuple(sorted({*now.parts, *writer.repaired_parts}))


def retract_damage(writer: StoreWriter, plan: RepairPlan) -> RepairPlan:
    """Delete from an open store what a plan names beside parts, as far as it is damaged still.

    Another process may have repaired it, or what the machine said then may no longer hold; so it is read once more.

    Returns:
        What is damaged now; its parts are left to the caller.
    """
    now = plan_repair(writer.path, parts=plan.parts)
    _check_droppable(now)
    for name in now.strays:
        remove_file(writer.path / name)
    if now.target or (plan.target and not writer.has_target):
        writer.drop_target()
    return now


def _check_droppable(plan: RepairPlan) -> None:
    """Raise StoreDamaged if something is damaged without which no part can be decoded."""
    damaged = [f"{MANIFEST_NAME} or {PLAN_NAME}"] if plan.manifest else []
    damaged += [f"{CODEC_NAME}/"] if plan.codec else []
    if damaged:
        raise StoreDamaged(
            f"{plan.store}: {' and '.join(damaged)} is damaged, and no part can be read without it. Restore it from a "
            "copy, or pass --model, which makes it anew from the recorded inputs."
        )
