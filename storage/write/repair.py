"""Plans what of a damaged store must go, and deletes it; ``pipeline.extract`` makes it again."""

import os
from collections.abc import Collection
from dataclasses import dataclass

from ...errors import StoreDamaged
from ...text import Progress, counted
from ..backend import check_guard, open_path, remove_files
from ..paths import StorePath
from ..plan import read_plan
from ..read.store import read_manifest
from ..read.verify import Finding, verify_store
from ..schema import CODEC_NAME, COMMITS_NAME, MANIFEST_NAME, PARTS_NAME, PLAN_NAME, TARGET_NAME
from .store import StoreWriter

# Kind of damage to the whole store -> how its files' paths start, and what the plan says of it, in that order.
_KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "target": ((f"{TARGET_NAME}/", f"{COMMITS_NAME}/target"), "the target bundle is damaged; training needs it"),
    "manifest": (
        (MANIFEST_NAME, PLAN_NAME),
        f"{MANIFEST_NAME} or {PLAN_NAME} is damaged: --model writes it anew, --drop cannot help",
    ),
    "metadata": ((f"{PARTS_NAME}/",), "Zarr's metadata is damaged: --model or --drop writes it anew"),
    "manifest_commit": (
        (f"{COMMITS_NAME}/{MANIFEST_NAME}",),
        f"the checksums of {MANIFEST_NAME} and {PLAN_NAME} are damaged",
    ),
    "codec": (
        (CODEC_NAME,),
        f"{CODEC_NAME}/ is damaged, without which nothing can be decoded: --model learns it again, --drop cannot help",
    ),
    "strays": ((f"{COMMITS_NAME}/part-",), ""),
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
        """Return the damages to one kind of files of the whole store, such as ``"target"``; others are ``"others"``."""
        return [damage for damage in self.damages if damage.part is None and _kind(damage.path) == kind]

    @property
    def is_droppable(self) -> bool:
        """Whether the rest of the store can be read; else only the inputs can give back what is damaged."""
        return not self.of_kind("manifest") and not self.of_kind("codec")

    @property
    def hides_parts(self) -> bool:
        """Whether parts could not be checked for damage elsewhere, so that a repair has to be followed by another."""
        return any(map(self.of_kind, ("manifest", "metadata", "manifest_commit", "codec")))

    @property
    def others(self) -> list[Finding]:
        """Damages that a repair does not help with."""
        return self.of_kind("others")

    def describe(self) -> str:
        """Return the plan as lines for people; empty for a whole store."""
        lines = [f"{self.store} is incomplete: {self.missing}"] if self.missing else []
        if self.parts:
            lines.append(f"{counted(len(self.parts), 'damaged part')}: {', '.join(map(str, self.parts))}")
        lines += [meaning for kind, (_, meaning) in _KINDS.items() if meaning and self.of_kind(kind)]
        if self.hides_parts:
            lines.append("so the parts are checked afterwards")
        lines += [f"{damage.path} belongs to no part" for damage in self.of_kind("strays")]
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


def _kind(path: str) -> str:
    return next((kind for kind, (starts, _) in _KINDS.items() if path.startswith(starts)), "others")


def drop_damage(plan: RepairPlan) -> tuple[int, ...]:
    """Delete what is damaged, if the rest can be read: dropped parts are pending, as if never extracted."""
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
    remove_files(*(writer.path / damage.path for damage in now.of_kind("strays")))
    if now.of_kind("target") or (plan.of_kind("target") and not writer.has_target):
        writer.drop_target()
    return now


def _check_droppable(plan: RepairPlan) -> None:
    if not plan.is_droppable:
        damaged = [f"{MANIFEST_NAME} or {PLAN_NAME}"] * bool(plan.of_kind("manifest"))
        damaged += [f"{CODEC_NAME}/"] * bool(plan.of_kind("codec"))
        raise StoreDamaged(
            f"{plan.store}: {' and '.join(damaged)} is damaged, and no part can be read without it. Restore it from a "
            "copy, or pass --model, which makes it anew from the recorded inputs."
        )
