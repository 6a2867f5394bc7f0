"""Plans what of a damaged store must go, and deletes it; ``pipeline.extract`` makes it again."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from ...errors import StoreDamaged
from ...text import Progress, counted
from ..backend import check_guard, open_path, remove_files
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
    TEXTS_NAME,
)
from .store import StoreWriter

# Kinds of damage to the whole store, in the order of the plan's lines. Of the first ones parts cannot be checked.
_MANIFEST, _METADATA, _MANIFEST_COMMIT, _CODEC = "manifest", "metadata", "manifest_commit", "codec"
_TARGET, _TEXTS, _STRAYS, _OTHERS = "target", "texts", "strays", "others"
_MEANINGS = {
    _TARGET: "the target bundle is damaged; training needs it",
    _TEXTS: f"{TEXTS_NAME} is damaged: --model writes it anew, --drop deletes it",
    _MANIFEST: f"{MANIFEST_NAME} or {PLAN_NAME} is damaged: --model writes it anew, --drop cannot help",
    _METADATA: "Zarr's metadata is damaged: --model or --drop writes it anew",
    _MANIFEST_COMMIT: f"the checksums of {MANIFEST_NAME} and {PLAN_NAME} are damaged",
    _CODEC: f"{CODEC_NAME}/ is damaged, without which nothing can be decoded: --model learns it again, --drop cannot "
    "help",
}


@dataclass(frozen=True)
class RepairPlan:
    """What a repair has to do; ``missing`` says what of the plan is still to be written, empty for a complete store."""

    store: StorePath
    damages: tuple[Finding, ...]
    missing: str

    @property
    def parts(self) -> tuple[int, ...]:
        """Parts that must be extracted again or dropped."""
        return tuple(sorted({damage.part for damage in self.damages if damage.part is not None}))

    def of_kind(self, kind: str) -> list[Finding]:
        """Return the damages to one kind of files of the whole store, such as ``"target"``."""
        return [damage for damage in self.damages if damage.part is None and _kind(damage.path) == kind]

    @property
    def is_droppable(self) -> bool:
        """Whether the rest of the store can be read; else only the inputs can give back what is damaged."""
        return not self.of_kind(_MANIFEST) and not self.of_kind(_CODEC)

    @property
    def others(self) -> list[Finding]:
        """Damages that a repair does not help with."""
        return self.of_kind(_OTHERS)

    def describe(self) -> str:
        """Return the plan as lines for people; empty for a whole store."""
        lines = [f"{self.store} is incomplete: {self.missing}"] if self.missing else []
        if self.parts:
            lines.append(f"{counted(len(self.parts), 'damaged part')}: {', '.join(map(str, self.parts))}")
        lines += [line for kind, line in _MEANINGS.items() if self.of_kind(kind)]
        if any(map(self.of_kind, (_MANIFEST, _METADATA, _MANIFEST_COMMIT, _CODEC))):
            lines.append("so the parts were not checked yet: afterwards run this command once more")
        lines += [f"{damage.path} belongs to no part" for damage in self.of_kind(_STRAYS)]
        lines += [f"{damage.path}: {damage.message} This is not repaired; extract again." for damage in self.others]
        return "\n".join(lines)


def plan_repair(
    path: str | os.PathLike[str] | StorePath, progress: Progress | None = None, parts: Collection[int] | None = None
) -> RepairPlan:
    """Verify a store, or some of its parts alone, and sort what is damaged; nothing is changed."""
    store = open_path(path)
    report = verify_store(store, progress, parts=parts)
    report.check_complete(store)
    return RepairPlan(store, tuple(report.damages), report.missing)


_STARTS = {
    f"{TARGET_NAME}/": _TARGET,
    f"{COMMITS_NAME}/target": _TARGET,
    f"{COMMITS_NAME}/part-": _STRAYS,
    f"{COMMITS_NAME}/{MANIFEST_NAME}": _MANIFEST_COMMIT,
    MANIFEST_NAME: _MANIFEST,
    PLAN_NAME: _MANIFEST,
    TEXTS_NAME: _TEXTS,
    CODEC_NAME: _CODEC,
}


def _kind(path: str) -> str:
    """Return what a damaged file of the whole store belongs to."""
    found = (kind for start, kind in _STARTS.items() if path.startswith(start))
    return _METADATA if is_metadata(path) else next(found, _OTHERS)


def drop_damage(plan: RepairPlan) -> tuple[int, ...]:
    """Delete what is damaged: dropped parts are pending, as if they had never been extracted.

    Raises:
        StoreDamaged: store.json, plan.parquet or codec/ is damaged, without which no part can be read.
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
    """Delete from an open store what a plan names beside parts, as far as it is damaged still; return what is.

    Another process may have repaired it, or what the machine said then may no longer hold; so it is read once more.
    """
    now = plan_repair(writer.path, parts=plan.parts)
    _check_droppable(now)
    remove_files(*(writer.path / damage.path for damage in now.of_kind(_STRAYS) + now.of_kind(_TEXTS)))
    if now.of_kind(_TARGET) or (plan.of_kind(_TARGET) and not writer.has_target):
        writer.drop_target()
    return now


def _check_droppable(plan: RepairPlan) -> None:
    if not plan.is_droppable:
        damaged = [f"{MANIFEST_NAME} or {PLAN_NAME}"] * bool(plan.of_kind(_MANIFEST))
        damaged += [f"{CODEC_NAME}/"] * bool(plan.of_kind(_CODEC))
        raise StoreDamaged(
            f"{plan.store}: {' and '.join(damaged)} is damaged, and no part can be read without it. Restore it from a "
            "copy, or pass --model, which makes it anew from the recorded inputs."
        )
