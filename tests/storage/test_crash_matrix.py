"""Kills, flips, truncations: afterwards a store is as if nothing had happened, or the damage is named."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.errors import OutputOccupied, StorageUnavailable, StoreError, StoreNotFound
from moa_data.storage.read.verify import verify_store
from moa_data.storage.write.repair import RepairPlan, drop_damage, plan_repair, retract_damage
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.stores import Recipe, flip, make_recipe, read_tree


@pytest.fixture
def recipe() -> Recipe:
    return make_recipe((70, 3, 130, 64, 1, 33), part_tokens=256)


def mutations(content: bytes, positions: int) -> Iterator[bytes | None]:
    """Versions of a file: cut, with one bit flipped at evenly spread places; for many places also gone and longer."""
    yield content[: len(content) // 2]
    if positions > 1:
        yield from (None, b"", content[:-1], content + b"\0")
    for at in np.linspace(0, len(content) - 1, positions + 2)[1:-1].astype(int):
        yield content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]


def part_of(name: str) -> int | None:
    """The part that a file belongs to, each part having one shard of each array."""
    found = re.search(r"commits/part-(\d+)\.json|/c\.(\d+)", name)
    return None if found is None else int(found[1] or found[2])


@pytest.mark.parametrize(
    ("positions", "parts"), [(1, (1,)), pytest.param(60, (0,), marks=pytest.mark.slow)], ids=["once", "many"]
)
def test_every_file_damaged_in_every_way(tmp_path: Path, positions: int, parts: tuple[int, ...]) -> None:
    """What is damaged is named, and repaired to the very same bytes.

    With many places only files of one part are damaged: each mutation opens the store five times for all its commits.
    """
    recipe = make_recipe((70, 3, 130), part_tokens=192)
    store = recipe.write_bundled(tmp_path / "store")
    whole = read_tree(store)
    for name in (name for name in whole if part_of(name) in (None, *parts)):
        for mutation in mutations(whole[name], positions):
            if name.startswith("commits/") and mutation == whole[name][:-1]:
                continue  # all that is lost is the newline at its end
            path = store / name
            path.unlink() if mutation is None else path.write_bytes(mutation)
            if name.startswith("commits/") and mutation is None:
                pass  # a part without a commit is one that is still to be written
            elif name == "store.json" and mutation is None:
                with pytest.raises(StoreNotFound):
                    verify_store(store)
            else:
                plan = plan_repair(store)
                assert plan.damages, (name, mutation)
                assert not plan.others
                named = " ".join(f"{damage.path} {damage.message}" for damage in plan.damages)
                # A commit may be changed to list a file that is not there: then that file is named, and its part.
                is_its_part = part_of(name) in {damage.part for damage in plan.damages} - {None}
                assert name in named or Path(name).stem in named or is_its_part, (name, named)
                if plan.is_droppable:
                    drop_damage(plan)
                    assert verify_store(store).ok
            recipe.write_bundled(store)
            assert read_tree(store) == whole, name


# Each kill is on a store of its own: a new one, or a copy of a damaged one whose parts are written again.
KILLS = """
import shutil, sys
from pathlib import Path

from moa_data.tests.kit.kills import kill_at_every_change
from moa_data.tests.storage.test_crash_matrix import CODEC, MANY, rewrite
from moa_data.storage.write.repair import plan_repair

def act(n, arm):
    store = Path(sys.argv[2]) / str(n)
    if sys.argv[1] == "write":
        arm()
        MANY.write(store, files=CODEC)
    else:
        plan = plan_repair(shutil.copytree(sys.argv[1], store))
        arm()
        rewrite(plan)

kill_at_every_change(act, every=int(sys.argv[3]))
"""
MANY, CODEC = make_recipe((70, 3, 130, 64, 100, 129, 90, 80), part_tokens=192), {"basis.safetensors": b"learned"}


def rewrite(plan: RepairPlan) -> None:
    """Do what `repair --model` does: drop what is damaged, and write it again."""
    with StoreWriter.create_or_resume(plan.store, MANY.manifest, MANY.plan) as writer:
        writer.replace_parts(retract_damage(writer, plan).parts)
        for part in writer.pending_parts():
            MANY.write_part(writer, part)


def killed(what: object, folder: Path, every: int) -> list[Path]:
    """Kill a writer at every so many changes of the disk; returns the stores that are left."""
    folder.mkdir()
    subprocess.run([sys.executable, "-c", KILLS, str(what), str(folder), str(every)], check=True, timeout=1800)
    return [store for store in folder.iterdir() if any(store.iterdir())]


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_at_any_moment_then_rerun_gives_equal_bytes(tmp_path: Path, every: int) -> None:
    whole = read_tree(MANY.write(tmp_path / "whole", files=CODEC))
    n_partly_committed = 0
    for store in killed("write", tmp_path / "killed", every):
        if (store / "store.json").exists():
            report = verify_store(store)
            assert report.ok
            n_partly_committed += 0 < report.n_parts < MANY.manifest.n_parts
        assert read_tree(MANY.write(store, files=CODEC)) == whole
    assert n_partly_committed > 2


@pytest.mark.parametrize("every", [71, pytest.param(1, marks=pytest.mark.slow)])
def test_parts_are_given_up_only_when_they_are_written_again(tmp_path: Path, every: int) -> None:
    store, n_parts = MANY.write(tmp_path / "store"), MANY.manifest.n_parts
    whole = read_tree(store)
    for part in range(n_parts - 1):
        flip(next((store / "parts/kv").glob(f"c.{part}.*")))
    folders = killed(store, tmp_path / "killed", every)
    assert min(n_parts - 2, len(folders)) > 2
    for folder in folders:
        plan, n_pending = plan_repair(folder), verify_store(folder).n_pending_parts
        assert n_pending <= 1
        assert bool(plan.missing) == bool(n_pending)
        left = {name: content for name, content in read_tree(folder).items() if not name.endswith(".partial")}
        assert plan.damages or plan.missing or left == whole
        rewrite(plan)
        assert read_tree(folder) == whole


def test_a_store_that_lost_its_manifest_takes_no_other_inputs(tmp_path: Path, recipe: Recipe) -> None:
    store = recipe.write(tmp_path / "store")
    whole = read_tree(store)
    other = make_recipe((70, 3, 130, 64, 1, 33), part_tokens=256).with_manifest(identities={"dataset.sha256": "other"})
    (store / "store.json").unlink()
    with pytest.raises(StoreError, match=r"store\.json is not the file that was written"):
        other.write(store)
    (store / "commits/store.json").unlink()
    with pytest.raises(OutputOccupied, match=r"committed parts but no store\.json"):
        recipe.write(store)
    for name in ("store.json", "commits/store.json"):
        (store / name).write_bytes(whole[name])
    assert read_tree(recipe.write(store)) == whole


def test_a_read_only_store(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    store = recipe.write(tmp_path / "store")
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageUnavailable, match=r"cannot be written .*Read-only.*choose another output folder"):
        recipe.write(store)
    assert verify_store(store).ok
