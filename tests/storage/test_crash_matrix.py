"""Kills, flipped bits and truncations.

Afterwards the store is unchanged by them, or the damage is named.
"""

import builtins
import errno
import io
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.errors import (
    OutputOccupied,
    StorageUnavailable,
    StoreDamaged,
    StoreError,
    StoreNotFound,
)
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import FieldSpec
from moa_data.storage.write.repair import drop_damage
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.kills import killed_everywhere
from moa_data.tests.kit.stores import FIELDS, Recipe, flip, make_recipe, read_tree
from moa_data.tests.kit.variants import quick_rows

RECIPE = make_recipe((70, 3, 130, 64), part_tokens=256)


def mutations(content: bytes, positions: int) -> Iterator[bytes | None]:
    """Yield damaged versions of a file.

    One is cut in half; others have one bit flipped, at evenly spread positions. For several
    positions, versions that are missing (None), empty, shorter or longer come too.
    """
    yield content[: len(content) // 2]
    if positions > 1:
        yield from (None, b"", content[:-1], content + b"\0")
    for at in np.linspace(0, len(content) - 1, positions + 2)[1:-1].astype(int):
        yield content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]


def part_of(name: str) -> int | None:
    """Return the part that a file belongs to. Each part has one shard of each array here."""
    found = re.search(r"commits/part-(\d+)\.json|/c\.(\d+)", name)
    return None if found is None else int(found[1] or found[2])


@pytest.mark.parametrize(
    ("positions", "parts", "fields"),
    [
        (1, (1,), (FIELDS[0], FIELDS[3])),
        pytest.param(60, (0,), FIELDS, marks=pytest.mark.slow),
    ],
    ids=["once", "many"],
)
def test_every_file_damaged_in_every_way(
    tmp_path: Path, positions: int, parts: tuple[int, ...], fields: tuple[FieldSpec, ...]
) -> None:
    """Damage is named, and its repair restores the same bytes.

    With many positions, only the files of one part are damaged: every mutation takes five openings
    of the store, which check all commits.
    """
    recipe = make_recipe((70, 3, 130), fields, part_tokens=192)
    store = recipe.write_bundled(tmp_path / "store")
    whole = read_tree(store)
    for name in (name for name in whole if part_of(name) in (None, *parts)):
        for mutation in mutations(whole[name], positions):
            if name.startswith("commits/") and mutation == whole[name][:-1]:
                continue  # Only the newline at the end is lost.
            path = store / name
            path.unlink() if mutation is None else path.write_bytes(mutation)
            if name.startswith("commits/") and mutation is None:
                pass  # A part without a commit is still to be written.
            elif name == "store.json" and mutation is None:
                with pytest.raises(StoreNotFound):
                    verify_store(store)
            else:
                damages = verify_store(store).damages
                assert damages, (name, mutation)
                named = " ".join(f"{damage.path} {damage.message}" for damage in damages)
                # A damaged commit may list a file that does not exist. Then that file and its part
                # are named.
                is_its_part = part_of(name) in {damage.part for damage in damages} - {None}
                assert name in named or Path(name).stem in named or is_its_part, (name, named)
                if {"store.json", "plan.parquet"} & {damage.path for damage in damages}:
                    with pytest.raises(StoreDamaged):
                        drop_damage(store)
                else:
                    drop_damage(store)
                    assert verify_store(store).ok
            recipe.write_bundled(store)
            assert read_tree(store) == whole, name


MANY, CODEC = (
    make_recipe((70, 3, 130, 64, 100, 129, 90, 80), part_tokens=192),
    {"basis.safetensors": b"learned"},
)


def repair(store: Path) -> None:
    """Do the work of `repair --model`: drop the damaged parts, then write the missing ones."""
    with MANY.open(store, depth="values") as writer:
        for part in writer.pending_parts():
            MANY.write_part(writer, part)


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_at_any_moment_then_rerun_gives_equal_bytes(tmp_path: Path, every: int) -> None:
    whole = read_tree(MANY.write(tmp_path / "whole", files=CODEC))
    n_partly_committed = 0
    for store in killed_everywhere(
        lambda n: tmp_path / str(n), lambda path: MANY.write(path, files=CODEC), every
    ):
        if (store / "store.json").exists():
            report = verify_store(store)
            assert report.ok
            n_partly_committed += 0 < report.n_parts < MANY.manifest.n_parts
        assert read_tree(MANY.write(store, files=CODEC)) == whole
    assert n_partly_committed > 2


@pytest.mark.parametrize("every", [71, pytest.param(1, marks=pytest.mark.slow)])
def test_a_repair_that_is_killed_at_any_moment_goes_on(tmp_path: Path, every: int) -> None:
    """Each spoiled part is damaged, missing or rewritten; every other part stays as it is."""
    store, n_parts = MANY.write(tmp_path / "store"), MANY.manifest.n_parts
    whole = read_tree(store)
    spoiled = set(range(0, n_parts, 2))
    for part in spoiled:
        flip(next((store / "parts/kv").glob(f"c.{part}.*")))
    n_partly_repaired = 0
    for folder in killed_everywhere(
        lambda n: Path(shutil.copytree(store, tmp_path / str(n))), repair, every
    ):
        report = verify_store(folder)
        damaged = {damage.part for damage in report.damages}
        assert damaged <= spoiled
        assert report.n_pending_parts <= len(spoiled - damaged)
        n_partly_repaired += 0 < report.n_pending_parts < len(spoiled)
        if damaged:
            repair(folder)
        else:
            MANY.write(folder)  # Any run writes missing parts.
        assert read_tree(folder) == whole
    assert n_partly_repaired


def test_a_store_that_lost_its_manifest_takes_no_other_inputs(
    tmp_path: Path, recipe: Recipe
) -> None:
    store = recipe.write(tmp_path / "store")
    whole = read_tree(store)
    other = make_recipe((70, 3, 130, 64), part_tokens=256).with_manifest(
        identities={"dataset.sha256": "other"}
    )
    (store / "store.json").unlink()
    with raises_naming(StoreDamaged, store / "store.json"):
        other.write(store)
    (store / "commits/store.json").unlink()
    with raises_naming(OutputOccupied, store, "store.json"):
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
    with raises_naming(StorageUnavailable, store, os.strerror(errno.EROFS)):
        recipe.write(store)
    assert verify_store(store).ok


# Only missing files and wrong bytes are damage. Nothing is deleted because the machine refuses a
# call for another reason.

ALL = (
    "EACCES", "MemoryError", "EMFILE", "ENFILE", "EPERM", "EIO", "ESTALE", "ENOMEM", "ELOOP"
)  # fmt: skip
CALLS = (
    (os, "open"),
    (os, "stat"),
    (os, "preadv"),
    (os, "listdir"),
    (os, "scandir"),
    (io, "open"),
    (builtins, "open"),
)
SHARD = "parts/kv/c.1.0.0.0.0"
PATHS = (
    SHARD, "commits/part-00001.json", "target/config.json", "commits/target.json", "store.json",
    "plan.parquet", "commits/store.json", "parts/kv/zarr.json",
)  # fmt: skip


@pytest.fixture
def store(bundled_store: Path) -> Path:
    """The store with its target bundle."""
    return bundled_store


def refusal(name: str, path: Any) -> Exception:
    code = getattr(errno, name, 0)
    return MemoryError() if name == "MemoryError" else OSError(code, os.strerror(code), str(path))


@contextmanager
def refusing(store: Path, name: str, wanted: Callable[[str], bool]) -> Iterator[None]:
    """Let calls that look at a file of the store fail, if its path is wanted.

    Reads have no path; ``wanted`` gets an empty text for them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, call in CALLS:
            real = getattr(module, call)

            def refuse(
                path: Any = ".", *rest: Any, real: Any = real, call: str = call, **more: Any
            ) -> Any:
                text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
                if (text.startswith(str(store)) or call == "preadv") and wanted(text):
                    raise refusal(name, path)
                return real(path, *rest, **more)

            patch.setattr(module, call, refuse)
        yield


def once_at(n: int, lasting: bool) -> Callable[[str], bool]:
    """Return a function that is true for the n-th call, and for all later ones if ``lasting``."""
    count = itertools.count()
    return lambda path: (i := next(count)) == n or (lasting and i > n)


def n_calls(store: Path, action: Callable[[], Any]) -> int:
    count = itertools.count()
    with refusing(store, "EIO", lambda path: next(count) < 0):
        action()
    return next(count)


@pytest.mark.parametrize(
    ("name", "every"),
    [("EMFILE", 7), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ALL)],
)
def test_a_refusal_anywhere_is_no_damage(
    store: Path, recipe: Recipe, name: str, every: int
) -> None:
    """The machine refuses one call, or all calls from there on.

    No check reports that as damage, and no writer deletes anything because of it.
    """
    whole = read_tree(store)

    def reopen() -> None:
        recipe.open(store).close()

    def drop() -> None:
        drop_damage(store)

    for action in (reopen, drop):
        n = n_calls(store, action)
        for at, lasting in (
            *((at, False) for at in range(0, n, every)),
            *((at, True) for at in range(0, n, 9 * every)),
        ):
            with (
                refusing(store, name, once_at(at, lasting)),
                suppress(StoreError, OSError, MemoryError),
            ):
                action()
            assert read_tree(store) == whole, (action, at, lasting)


@pytest.mark.parametrize(
    ("path", "name"),
    quick_rows(
        itertools.product(PATHS, ALL),
        [*((path, "EACCES") for path in PATHS), (SHARD, "MemoryError"), (PATHS[5], "MemoryError")],
    ),
)
def test_what_cannot_be_read_is_named_apart_from_damage(
    store: Path, recipe: Recipe, name: str, path: str
) -> None:
    damaged = "parts/hidden/last/c.0.0"
    flip(store / damaged)
    before = read_tree(store)
    with refusing(store, name, lambda text: text == str(store / path)):
        if path in ("store.json", "plan.parquet", "commits/store.json", "parts/kv/zarr.json"):
            with raises_naming(StorageUnavailable, store):
                verify_store(store)
        else:
            report = verify_store(store)
            # All other files are still checked.
            assert [damage.path for damage in report.damages] == [damaged]
            assert {item.path for item in report.unchecked} == {path}
            assert not report.ok
        with pytest.raises(StorageUnavailable, match="Nothing was deleted"):
            drop_damage(store)
        with suppress(StorageUnavailable):  # Resuming an extraction reads no data.
            recipe.open(store).close()
    assert read_tree(store) == before


def test_a_refusal_that_passes_does_not_leave_values_unread(store: Path) -> None:
    """The size of a file cannot be read at first, so its part counts as unchecked."""
    first = itertools.count()
    with refusing(store, "ESTALE", lambda path: path.endswith(SHARD) and next(first) == 0):
        report = verify_store(store)
    assert not report.ok
    assert not report.damages
    found = [(item.part, item.path, item.message) for item in report.unchecked]
    assert found == [(1, SHARD, os.strerror(errno.ESTALE))]
    assert verify_store(store).ok


def test_what_is_damaged_is_dropped_and_nothing_else(store: Path) -> None:
    whole = read_tree(store)
    (store / "commits/part-00099.json").write_bytes(whole["commits/part-00001.json"])
    for path in ("parts/tokens/c.0", "target/config.json"):
        flip(store / path)
    assert {(damage.part, damage.path) for damage in drop_damage(store)} == {
        (0, "parts/tokens/c.0"),
        (None, "target/config.json"),
        (None, "commits/part-00099.json"),
    }
    kept = {
        path
        for path in whole
        if "part-00000" not in path and "/c.0" not in path and "target" not in path
    }
    assert read_tree(store) == {path: whole[path] for path in kept}


def test_a_part_stays_where_its_commit_cannot_be_seen(store: Path, recipe: Recipe) -> None:
    """An interrupt arrives just after the commit, and the machine cannot tell whether it exists."""
    whole = read_tree(store)
    (store / "commits/part-00001.json").unlink()
    with recipe.open(store) as writer:
        out = writer.part(1)
        recipe.fill(out)
        out.commit()
        with refusing(store, "EIO", lambda text: text.endswith("commits/part-00001.json")):
            out.discard()
    assert read_tree(store) == whole
