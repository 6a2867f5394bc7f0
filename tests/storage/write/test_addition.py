"""Adding fields to a store.

After a kill at any point it is the old store or the new one. In the end it has the bytes of a store
that was written with all fields.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from moa_data.errors import StorageUnavailable, StoreDamaged, StoreError
from moa_data.storage import commit as commit_module
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.commit import read_commits, read_file_records
from moa_data.storage.plan import read_plan
from moa_data.storage.read.store import ActivationStore, read_manifest
from moa_data.storage.read.verify import summarize_store, unfinished_fields, verify_store
from moa_data.storage.schema import hidden_field
from moa_data.storage.write.addition import StoreAddition, extended_codec
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.kills import full_at, killed_everywhere
from moa_data.tests.kit.stores import Recipe, make_recipe, read_tree

OLD_WEIGHTS, NEW_WEIGHTS = b"norm" * 50, b"norm, layers" * 80


RECIPE = make_recipe((70, 3, 130, 64), part_tokens=256)


@pytest.fixture
def wanted(recipe: Recipe) -> Any:
    """The store's recipe with two more fields."""
    return recipe.with_manifest(
        fields=(*recipe.manifest.fields, hidden_field("layer_1", 16), hidden_field("layer_2", 16)),
        extraction={**recipe.manifest.extraction, "activations": 4},
    )


def write_bundle(writer: StoreWriter, weights: bytes) -> None:
    with writer.target() as folder:
        (folder / "config.json").write_text("{}")
        (folder / "frozen").write_bytes(weights)


def write_store(recipe: Recipe, path: Path, weights: bytes = OLD_WEIGHTS) -> Path:
    recipe.write(path)
    with recipe.open(path) as writer:
        write_bundle(writer, weights)
    return path


def opened(path: Path) -> StoreWriter:
    return StoreWriter.create_or_resume(path, read_manifest(path), read_plan(path / "plan.parquet"))


def add(path: Path, wanted: Recipe) -> None:
    """Start or continue the addition, and finish it."""
    with opened(path) as writer:
        if not writer.has_target or (writer.path / "target/frozen").read_bytes() != NEW_WEIGHTS:
            write_bundle(writer, NEW_WEIGHTS)
        addition = StoreAddition(
            writer, wanted.manifest, extended_codec(writer.codec, wanted.manifest.fields)
        )
        for part in addition.pending_parts():
            wanted.write_part(addition, part)
        addition.finish()


def check_whole(path: Path, wanted: Recipe) -> bool:
    """Read and verify everything, and the bundle; return whether the store has the new fields."""
    with ActivationStore(path) as store:
        assert len(store.commits) == wanted.manifest.n_parts
        for i, row in enumerate(store.sequences.to_pylist()):
            for name, spec in store.fields.items():
                np.testing.assert_array_equal(store.read(i, name), wanted.values(spec, row))
        commit_module.check_target_bundle(path, store.target_path)
        assert (store.target_path / "frozen").read_bytes() in (OLD_WEIGHTS, NEW_WEIGHTS)
        assert (store.target_path / "config.json").exists()
        n_fields = len(store.fields)
    assert verify_store(path, n_threads=1).ok
    return n_fields == len(wanted.manifest.fields)


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_step_leaves_the_old_store_or_the_new_one(
    recipe: Recipe, wanted: Recipe, tmp_path: Path, every: int
) -> None:
    expected = read_tree(write_store(wanted, tmp_path / "fresh", NEW_WEIGHTS))
    store = write_store(recipe, tmp_path / "store")
    arrays = {
        name: content for name, content in read_tree(store).items() if name.startswith("parts/")
    }
    is_new: list[bool] = []
    with ActivationStore(store) as open_before:
        for path in killed_everywhere(
            lambda n: Path(shutil.copytree(store, tmp_path / str(n))),
            lambda path: add(path, wanted),
            every,
        ):
            assert read_tree(path).items() >= arrays.items()
            is_new.append(check_whole(path, wanted))
            add(path, wanted)
            assert read_tree(path) == expected, path
        add(store, wanted)
        for i, row in enumerate(open_before.sequences.to_pylist()):
            for name, spec in open_before.fields.items():
                np.testing.assert_array_equal(open_before.read(i, name), wanted.values(spec, row))
    assert len(is_new) > 3
    assert is_new == sorted(is_new)
    assert is_new[0] < is_new[-1]


def test_a_full_disk_at_any_write_leaves_a_whole_store(
    recipe: Recipe, wanted: Recipe, tmp_path: Path
) -> None:
    expected = read_tree(write_store(wanted, tmp_path / "fresh", NEW_WEIGHTS))
    store = write_store(recipe, tmp_path / "store")
    n_full = 0
    for at in range(1, 1000, 3):
        try:
            with full_at(at):
                add(store, wanted)
                break
        except StorageUnavailable:
            n_full += 1
        assert not list(store.rglob("*.partial"))
        check_whole(store, wanted)
    assert n_full > 3
    assert read_tree(store) == expected


def test_half_way_the_store_is_the_old_one_and_says_what_is_under_way(
    recipe: Recipe, wanted: Recipe, tmp_path: Path
) -> None:
    store = write_store(recipe, tmp_path / "store")
    with opened(store) as writer:
        addition = StoreAddition(
            writer, wanted.manifest, extended_codec(writer.codec, wanted.manifest.fields)
        )
        assert addition.pending_parts() == [0, 1]
        wanted.write_part(addition, 1)
        with raises_naming(StoreError, store, "hidden/layer_1", "hidden/layer_2", "part 0"):
            addition.finish()
        with raises_naming(StoreError, "Part 1", "pending_parts"):
            addition.part(1)
        with (
            addition.part(0) as out,
            raises_naming(StoreError, "'kv'", "hidden/layer_1"),
        ):
            out.write("kv", 0, np.zeros(1, np.uint16))
        assert unfinished_fields(
            read_commits(store, (0, 1)).values(), writer.codec
        ) == dict.fromkeys(("hidden/layer_1", "hidden/layer_2"), 1)
    assert not check_whole(store, wanted)
    assert summarize_store(store).unfinished == {"hidden/layer_1": 1, "hidden/layer_2": 1}
    # The Zarr metadata of the new fields is there already. Another extraction of the old fields has
    # nothing to do.
    recipe.write(store)
    assert "hidden/layer_1" in zarr.open_group(store / "parts", mode="r")
    # The addition can be finished with one of the two fields; the part with both fields keeps them.
    one = replace(wanted, manifest=replace(wanted.manifest, fields=wanted.manifest.fields[:-1]))
    add(store, one)
    assert list(read_manifest(store).fields) == list(one.manifest.fields)
    add(store, wanted)
    assert check_whole(store, wanted)
    assert summarize_store(store).unfinished == {}


def test_a_reader_that_opens_while_the_manifest_changes_does_not_see_damage(
    recipe: Recipe, wanted: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write_store(recipe, tmp_path / "store")
    real, calls = read_file_records, list[Path]()

    def change_after_reading(path: Path) -> Any:
        records = real(path)
        if not calls:
            calls.append(path)
            add(store, wanted)
        return records

    monkeypatch.setattr(commit_module, "read_file_records", change_after_reading)
    assert commit_module.find_manifest_damage(store) == []
    assert calls


def test_a_reader_that_opens_while_the_basis_changes_takes_the_new_manifest(
    recipe: Recipe, wanted: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write_store(recipe, tmp_path / "store")
    real: Callable[..., StoreCodec] = vars(StoreCodec)["open"].__func__
    calls: list[Any] = []

    def not_the_basis(cls: type[StoreCodec], manifest: Any, path: Path) -> StoreCodec:
        calls.append(manifest)
        if len(calls) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(StoreCodec, "open", classmethod(real))
                add(store, wanted)
            raise StoreDamaged("another basis")
        return real(cls, manifest, path)

    monkeypatch.setattr(StoreCodec, "open", classmethod(not_the_basis))
    with ActivationStore(store) as reader:
        assert "hidden/layer_2" in reader.fields
    assert len(calls) == 2
    calls.clear()
    with pytest.raises(StoreDamaged, match="another basis"):
        ActivationStore(store)
