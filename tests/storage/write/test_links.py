"""Writers refuse symbolic links inside a store before they change anything.

Readers follow them.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moa_data.errors import StoreDamaged
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.write.repair import drop_damage
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.stores import Recipe, flip, make_recipe

NAMES = (
    "parts", "store.json", "store.lock", "parts/hidden", "parts/kv/zarr.json",
    "parts/kv/c.1.0.0.0.0", "target/more",
    "target.partial", "commits/part-00001.json", "runs/1.json",
)  # fmt: skip


RECIPE = make_recipe((70, 3, 130, 64), part_tokens=256)


@pytest.fixture
def store(bundled_store: Path) -> Path:
    """A store with all files that a store may have, damaged in one part and in the target bundle.

    A repair drops both of them.
    """
    path = bundled_store
    for name in ("target/more/weights", "runs/0.json", "codec/basis.safetensors", "README.md"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("{}" * 100)
    for damaged in ("parts/tokens/c.1", "target/config.json"):
        flip(path / damaged, -1)
    return path


def everything(folder: Path) -> dict[str, object]:
    """Return all paths below a folder.

    The values are the content of files (None for the lock), the targets of links, and None for
    folders.
    """
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file() and path.name != "store.lock"
        else None
        for path in folder.rglob("*")
    }


def link(store: Path, name: str) -> Path:
    """Replace a path of a store by a symbolic link.

    An existing file or folder is moved elsewhere first. Otherwise the link points to a folder with
    a file in it.
    """
    elsewhere = store.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.txt").write_text("mine")
    path = store / name
    if os.path.lexists(path):
        shutil.move(path, elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    else:
        path.symlink_to(elsewhere)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_writers_refuse_a_link(store: Path, recipe: Recipe, name: str) -> None:
    assert [damage.part for damage in verify_store(store).damages] == [None, 1]
    path = link(store, name)
    before = everything(store.parent)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: recipe.write(store),
        lambda: drop_damage(store),
    )
    for attempt in attempts:
        with raises_naming(StoreDamaged, store, "symbolic link") as caught:
            attempt()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert everything(store.parent) == before


def test_a_linked_store_is_a_store(store: Path, recipe: Recipe) -> None:
    linked = store.parent / "linked"
    linked.symlink_to(store)
    # No store has a file of this name, so no writer touches it.
    (store / "my notes").symlink_to("/nowhere")
    assert [damage.part for damage in drop_damage(linked)] == [None, 1]
    recipe.write(linked)
    assert verify_store(linked).ok
    assert (store / "my notes").is_symlink()


@pytest.mark.parametrize(
    "name", ["parts", "parts/kv", "parts/kv/c.0.0.0.0.0", "commits", "store.json"]
)
def test_readers_follow_links(bundled_store: Path, recipe: Recipe, name: str) -> None:
    store = bundled_store
    link(store, name)
    assert verify_store(store).ok
    with ActivationStore(store) as reader:
        for i, row in enumerate(reader.sequences.to_pylist()):
            np.testing.assert_array_equal(
                reader.read(i, "kv"), recipe.values(reader.fields["kv"], row)
            )
