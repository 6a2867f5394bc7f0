"""Only missing files and wrong bytes are damage: whatever else the machine refuses, nothing is deleted for it."""

import builtins
import errno
import io
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import StorageUnavailable, StoreError
from moa_data.storage.read.verify import verify_store
from moa_data.storage.write.repair import drop_damage, plan_repair
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.stores import Recipe, flip, make_recipe, read_tree

QUICK = ("EMFILE", "EACCES", "MemoryError")
OTHERS = ("ENFILE", "EPERM", "EIO", "ESTALE", "ENOMEM", "ELOOP")
ALL = (*QUICK, *OTHERS)
REFUSALS = (*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS))
CALLS = ((os, "open"), (os, "stat"), (os, "preadv"), (os, "listdir"), (os, "scandir"), (io, "open"), (builtins, "open"))
SHARD = "parts/kv/c.1.0.0.0.0"


@pytest.fixture
def recipe() -> Recipe:
    return make_recipe((70, 3, 130, 64), part_tokens=256)


@pytest.fixture
def store(tmp_path: Path, recipe: Recipe) -> Path:
    return recipe.write_bundled(tmp_path / "store")


def refusal(name: str, path: Any) -> Exception:
    code = getattr(errno, name, 0)
    return MemoryError() if name == "MemoryError" else OSError(code, os.strerror(code), str(path))


@contextmanager
def refusing(store: Path, name: str, wanted: Callable[[str], bool]) -> Iterator[None]:
    """Let the calls that look at a file of the store fail where its path is a wanted one; reads have no path."""
    with pytest.MonkeyPatch.context() as patch:
        for module, call in CALLS:
            real = getattr(module, call)

            def refuse(path: Any = ".", *rest: Any, real: Any = real, call: str = call, **more: Any) -> Any:
                text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
                if (text.startswith(str(store)) or call == "preadv") and wanted(text):
                    raise refusal(name, path)
                return real(path, *rest, **more)

            patch.setattr(module, call, refuse)
        yield


def once_at(n: int, lasting: bool) -> Callable[[str], bool]:
    """Whether this is the n-th call, or one after it."""
    count = itertools.count()
    return lambda path: (i := next(count)) == n or (lasting and i > n)


def n_calls(store: Path, action: Callable[[], Any]) -> int:
    count = itertools.count()
    with refusing(store, "EIO", lambda path: next(count) < 0):
        action()
    return next(count)


@pytest.mark.parametrize(
    ("name", "every"), [("EMFILE", 5), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ALL)]
)
def test_a_refusal_anywhere_is_no_damage(store: Path, recipe: Recipe, name: str, every: int) -> None:
    """The machine refuses one call, or all from there on: no check calls that damage, and no writer deletes for it."""
    whole = read_tree(store)

    def reopen() -> None:
        StoreWriter.create_or_resume(store, recipe.manifest, recipe.plan).close()

    def drop() -> None:
        if (plan := plan_repair(store)).damages:
            drop_damage(plan)

    for action in (reopen, drop):
        n = n_calls(store, action)
        for at, lasting in (
            *((at, False) for at in range(0, n, every)),
            *((at, True) for at in range(0, n, 9 * every)),
        ):
            with refusing(store, name, once_at(at, lasting)), suppress(StoreError, OSError, MemoryError):
                action()
            assert read_tree(store) == whole, (action, at, lasting)


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize(
    "path",
    [SHARD, "commits/part-00001.json", "target/config.json",
     "commits/target.json", "store.json", "plan.parquet", "commits/store.json", "parts/kv/zarr.json"],
)  # fmt: skip
def test_what_cannot_be_read_is_named_apart_from_damage(store: Path, recipe: Recipe, name: str, path: str) -> None:
    damaged = "parts/hidden/last/c.0.0"
    flip(store / damaged)
    before = read_tree(store)
    plan = plan_repair(store)
    with refusing(store, name, lambda text: text == str(store / path)):
        if path in ("store.json", "plan.parquet", "commits/store.json", "parts/kv/zarr.json"):
            with pytest.raises(StorageUnavailable, match="which says nothing about damage"):
                verify_store(store)
        else:
            report = verify_store(store)
            assert [damage.path for damage in report.damages] == [damaged]  # the rest is checked all the same
            assert {item.path for item in report.unchecked} == {path}
            assert not report.ok
        with pytest.raises(StorageUnavailable, match="so nothing was deleted"):
            plan_repair(store)
        with pytest.raises(StorageUnavailable, match="so nothing was deleted"):
            drop_damage(plan)
        with suppress(StorageUnavailable):  # going on with an extraction reads no data
            StoreWriter.create_or_resume(store, recipe.manifest, recipe.plan).close()
    assert read_tree(store) == before


def test_a_refusal_that_passes_does_not_leave_values_unread(store: Path) -> None:
    """The sizes of a part could not be had at first, its checksums could: it is not whole without its values."""
    first = itertools.count()
    with refusing(store, "ESTALE", lambda path: path.endswith(SHARD) and next(first) == 0):
        report = verify_store(store)
    assert next(first) > 1
    assert not report.ok
    assert not report.damages
    assert [(item.part, item.path, item.message) for item in report.unchecked] == [
        (1, "parts", os.strerror(errno.ESTALE))
    ]
    assert verify_store(store).ok


def test_what_was_mended_meanwhile_is_not_dropped(store: Path) -> None:
    whole = read_tree(store)
    for path in (SHARD, "target/config.json", "parts/tokens/c.0"):
        flip(store / path)
    plan = plan_repair(store)
    assert (plan.parts, bool(plan.of_kind("target"))) == ((0, 1), True)
    for path in (SHARD, "target/config.json"):
        (store / path).write_bytes(whole[path])
    assert drop_damage(plan) == (0,)
    assert {path for path in whole if "part-00000" not in path and "/c.0" not in path} <= set(read_tree(store))


def test_a_part_stays_where_its_commit_cannot_be_seen(store: Path, recipe: Recipe) -> None:
    """An interrupt arrives when the commit has just appeared, and the machine does not say whether it has."""
    whole = read_tree(store)
    (store / "commits/part-00001.json").unlink()
    with StoreWriter.create_or_resume(store, recipe.manifest, recipe.plan) as writer:
        out = writer.part(1)
        recipe.fill(out)
        out.commit()
        with refusing(store, "EIO", lambda text: text.endswith("commits/part-00001.json")):
            out.discard()
    assert read_tree(store) == whole
