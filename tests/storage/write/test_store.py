"""A part appears complete or not at all.

A store continues only with the inputs that it was made from.
"""

import errno
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.errors import (
    OutputOccupied,
    StorageUnavailable,
    StoreDamaged,
    StoreError,
    StoreLocked,
    StoreMismatch,
)
from moa_data.storage.chunk import EncodePool
from moa_data.storage.commit import committed_bytes
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import (
    SPEED_TEST_PREFIX,
    hidden_field,
    response_mask_field,
    tokens_field,
)
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.disks import check_rights, tmpfs
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.kills import full_at, killed_everywhere
from moa_data.tests.kit.stores import Recipe, make_recipe, read_tree


@pytest.fixture
def writer(tmp_path: Path, recipe: Recipe) -> Iterator[Any]:
    with recipe.open(tmp_path / "store") as opened:
        yield opened


@pytest.mark.parametrize("n_threads", [0, 1, 3])
def test_pieces_of_any_size_and_any_number_of_threads_give_equal_bytes(
    store: Path, tmp_path: Path, recipe: Recipe, n_threads: int
) -> None:
    other = tmp_path / "pieces"
    rng = np.random.default_rng(0)
    opened = recipe.open(other)
    with opened as writer, EncodePool(n_threads) as pool:
        for part in reversed(writer.pending_parts()):
            with writer.part(part, pool) as out:
                for field in recipe.manifest.fields:
                    for row in out.sequences.to_pylist():
                        values, at = recipe.values(field, row).copy(), 0
                        while at < len(values):
                            n = int(rng.integers(1, 90))
                            out.write(field.name, row["first_token"] + at, values[at : at + n])
                            at += n
                out.commit()
    assert pool.busy_s > 0
    assert read_tree(other) == read_tree(store)


def test_wrong_writes_are_refused(writer: StoreWriter, recipe: Recipe) -> None:
    with writer.part(1) as out:
        with raises_naming(StoreError, "Part 1"):
            writer.part(1)
        recipe.fill(out)
        out.commit()
    for part in (1, 99):
        with raises_naming(StoreError, part):
            writer.part(part)
    with writer.part(0) as out:
        out.write("tokens", 0, np.zeros(10, np.int32))
        end = out.allocated_tokens
        for field, first, values, facts in (
            ("kvs", 10, np.zeros(1, np.int32), ("tokens", "kv")),
            (
                "kv",
                0,
                np.zeros((1, 4, 2, 2, 8), np.float32),
                ("uint16", "bfloat16", "[n, 4, 2, 2, 8]", "float32", [1, 4, 2, 2, 8]),
            ),
            ("tokens", 10, np.zeros((3, 1), np.int32), ("int32", [3, 1])),
            ("tokens", 9, np.zeros(1, np.int32), (9, 10)),
            ("tokens", end, np.zeros(1, np.int32), (f"{end} tokens", end + 1)),
        ):
            with raises_naming(StoreError, f"'{field}'", *facts):
                out.write(field, first, values)


def test_a_forgotten_sequence_is_not_committed(writer: StoreWriter, recipe: Recipe) -> None:
    with writer.part(0) as out:
        recipe.fill(
            out, lambda name, row, x: x[:-1] if name == "kv" and row["first_token"] == 0 else x
        )
        with raises_naming(StoreError, 1, "'kv'", "tokens 0"):
            out.commit()
    assert 0 in writer.pending_parts()


def test_every_changed_key_is_named(store: Path, recipe: Recipe) -> None:
    before = read_tree(store)
    changed = recipe.with_manifest(
        identities={
            "target.weights_sha256": "XX",
            "dataset.sha256": "bb",
            "template.sha256": "new",
        },
        extraction={"max_length": 128, "dtype": "bfloat16"},
        fields=(*recipe.manifest.fields[:3], hidden_field("last", 16, "float32")),
    )
    with pytest.raises(StoreMismatch) as caught:
        changed.write(store)
    assert caught.value.changes == {
        "identities.target.weights_sha256": ("aa", "XX"),
        "identities.tokenizer.sha256": ("cc", "(absent)"),
        "identities.template.sha256": ("(absent)", "new"),
        "extraction.max_length": (256, 128),
        "fields.hidden/last.dtype": ("bfloat16", "float32"),
    }
    long = StoreMismatch("s", {"identities.target.path": ("/models/a" * 9, "/models/a" * 9 + "b")})
    assert f"the store has '{'/models/a' * 3}/mo…, this command has" in str(long)
    notes = caught.value.__notes__
    for key, (old, new) in caught.value.changes.items():
        assert f"{key}: the store has {old!r}, this command has {new!r}" in notes
    assert read_tree(store) == before


def begin(
    recipe: Recipe, store: Path, begins_anew: bool = True, shares: bool = False
) -> StoreWriter:
    return StoreWriter.create_or_resume(
        store, recipe.manifest, recipe.plan, shares=shares, begins_anew=begins_anew
    )


def test_a_store_without_parts_is_begun_anew_from_other_inputs(
    tmp_path: Path, recipe: Recipe
) -> None:
    other = make_recipe(
        (70, 90), (tokens_field(), response_mask_field(), hidden_field("last", 32)), part_tokens=128
    )
    expected = read_tree(other.write_bundled(tmp_path / "expected"))
    store = tmp_path / "store"
    recipe.write_bundled(store)
    for commit in (store / "commits").glob("part-*"):
        commit.unlink()
    with pytest.raises(StoreMismatch):
        other.write(store)  # A writer that only continues a store, such as a repair, refuses it.
    with begin(other, store) as writer:
        assert writer.has_begun_anew
        assert not writer.has_target
    with begin(other, store) as writer:
        assert not writer.has_begun_anew
    assert read_tree(other.write_bundled(store)) == expected


def test_a_kill_while_a_store_is_begun_anew_leaves_no_mixture(
    tmp_path: Path, recipe: Recipe
) -> None:
    other = make_recipe(
        (70, 90), (tokens_field(), response_mask_field(), hidden_field("last", 32)), part_tokens=128
    )
    expected = read_tree(other.write_bundled(tmp_path / "expected"))
    first = recipe.write_bundled(tmp_path / "first")
    for commit in (first / "commits").glob("part-*"):
        commit.unlink()

    def make(n: int) -> Path:
        return Path(shutil.copytree(first, tmp_path / str(n)))

    for store in killed_everywhere(make, lambda store: begin(other, store).close(), every=11):
        begin(other, store).close()
        assert read_tree(other.write_bundled(store)) == expected


def test_a_store_that_others_write_to_or_that_has_a_part_is_not_begun_anew(
    tmp_path: Path, recipe: Recipe
) -> None:
    other, store = recipe.with_manifest(extraction={"max_length": 128}), tmp_path / "store"
    with begin(recipe, store, shares=True) as writer:
        with pytest.raises(StoreLocked):
            begin(other, store, shares=True)
        with pytest.raises(StoreLocked):
            begin(other, store)
        recipe.write_part(writer, 0)
        with pytest.raises(StoreMismatch):
            begin(other, store, shares=True)
    before = read_tree(store)
    with pytest.raises(StoreMismatch):
        begin(other, store)
    assert read_tree(store) == before


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0])
def test_files_have_the_rights_that_the_umask_gives(
    tmp_path: Path, recipe: Recipe, mask: int
) -> None:
    before = os.umask(mask)
    try:
        store = recipe.write_bundled(tmp_path / "store")
        with recipe.open(store, shares=True) as writer, writer.publishing("card"):
            check_rights(store, mask)
    finally:
        os.umask(before)


def test_manifest_and_plan_must_agree(tmp_path: Path, recipe: Recipe) -> None:
    with raises_naming(StoreDamaged, "n_tokens", 5, 881):
        recipe.with_manifest(n_tokens=5).write(tmp_path / "store")
    with raises_naming(StoreDamaged, "'part'"):
        replace(recipe, plan=recipe.plan.drop_columns(["part"])).write(tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_the_folder_of_a_killed_speed_test_hinders_no_store(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "store" / f"{SPEED_TEST_PREFIX}abc" / "store").mkdir(parents=True)
    recipe.write(tmp_path / "store")
    assert not verify_store(tmp_path / "store").damages


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, recipe: Recipe) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.tex").write_text("x")
    with raises_naming(OutputOccupied, folder, "chapter1.tex"):
        recipe.write(folder)
    assert [path.name for path in folder.iterdir()] == ["chapter1.tex"]
    (folder / "chapter1.tex").rename(folder / "store.json")
    with raises_naming(OutputOccupied, folder):
        recipe.write(folder)
    with raises_naming(OutputOccupied, folder / "store.json"):
        recipe.write(folder / "store.json")
    (folder / "store.json").rename(folder / "parts")
    with raises_naming(OutputOccupied, folder, "parts"):
        recipe.write(folder)


@pytest.mark.parametrize(
    "change", [('"schema_version": 2', '"schema_version": 3'), ("schema_", "sahema_")]
)
def test_a_flipped_bit_in_the_schema_version_is_mended(
    store: Path, recipe: Recipe, change: tuple[str, str]
) -> None:
    before = read_tree(store)
    (store / "store.json").write_text((store / "store.json").read_text().replace(*change))
    recipe.write(store)
    assert read_tree(store) == before


@pytest.mark.parametrize("damage", ["truncate", "delete", "delete commit", "truncate commit"])
def test_resume_redoes_exactly_the_damaged_part(store: Path, recipe: Recipe, damage: str) -> None:
    before = read_tree(store)
    shard, commit = store / "parts/kv/c.1.0.0.0.0", store / "commits/part-00001.json"
    path = commit if damage.endswith("commit") else shard
    if damage.startswith("delete"):
        path.unlink()
    else:
        os.truncate(path, 100)
    with recipe.open(store) as writer:
        assert writer.pending_parts() == [1]
        assert {damage.part for damage in writer.damages} == (
            set() if damage == "delete commit" else {1}
        )
        recipe.write_part(writer, 1)
    assert read_tree(store) == before


def test_leftovers_are_deleted_and_other_files_kept(store: Path, recipe: Recipe) -> None:
    before = read_tree(store)
    for leftover in ("parts/part-00001.zarr", "parts/tokens.partial", "target.partial"):
        (store / leftover / "kv").mkdir(parents=True)
    (store / "commits/part-00001.json.partial").write_text("{")
    (store / "notes.txt").write_text("mine")
    recipe.write(store)
    assert read_tree(store) == before | {"notes.txt": b"mine"}
    assert not (store / "target.partial").exists()


@pytest.mark.parametrize(("call", "code"), [("write", errno.ENOSPC), ("fsync", errno.EDQUOT)])
def test_disk_full_anywhere_loses_nothing(
    tmp_path: Path, recipe: Recipe, call: str, code: int
) -> None:
    whole = read_tree(recipe.write(tmp_path / "whole"))
    messages: list[str] = []
    for at in range(1, 120, 17):
        store = tmp_path / f"{at}"
        with full_at(at, call, code):
            try:
                recipe.write(store)
            except StorageUnavailable as error:
                messages.append(str(error))
        assert list(store.rglob("*.partial")) == []
        if (store / "store.json").exists():
            assert verify_store(store).ok
        assert read_tree(recipe.write(store)) == whole
    assert len(messages) > 3
    assert all("run the same command again" in text for text in messages)


def test_starting_lists_the_folders_of_the_store_and_none_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of 240 million tokens has thousands of parts."""
    recipe, n_parts = make_recipe(lengths=(1,) * 50, part_tokens=64), 50
    store = recipe.write(tmp_path / "store")
    listed: list[Any] = []
    looked_at: list[Any] = []
    for calls, name in (
        (listed, "scandir"),
        (listed, "listdir"),
        (looked_at, "stat"),
        (looked_at, "open"),
    ):
        real = getattr(os, name)

        def note(
            path: Any = ".", *rest: Any, calls: list[Any] = calls, real: Any = real, **more: Any
        ) -> Any:
            calls.append(path)
            return real(path, *rest, **more)

        monkeypatch.setattr(os, name, note)
    with recipe.open(store) as writer:
        assert writer.pending_parts() == []
    assert len(listed) < 40
    # Each part has a commit, which is opened, and four shards, whose sizes are compared with it.
    assert len(looked_at) < 8 * n_parts + 100
    listed.clear()
    with ActivationStore(store, require_complete=True) as reader:
        assert len(reader) == n_parts
        n_bytes = sum(commit.stored_bytes for commit in reader.commits.values())
    assert not listed
    looked_at.clear()
    assert committed_bytes(store) > n_bytes
    assert len(looked_at) < 2 * n_parts


# From the last release with schema version 1, with the package versions of constraints.txt.
BYTES_OF_A_TINY_STORE = "f4ad4856728584fb90522739f84f7b2805d90b1d1855a956ac5c3f7e03bc0d33"


def test_the_bytes_of_a_tiny_store(tmp_path: Path) -> None:
    """Changed bytes mean a changed format.

    Stores of earlier releases must still be read, verified and continued.
    """
    tree = read_tree(make_recipe((70, 3, 130), part_tokens=192).write(tmp_path / "store"))
    digest = hashlib.sha256()
    for name, content in sorted(tree.items()):
        digest.update(f"{name} {len(content)} {hashlib.sha256(content).hexdigest()}\n".encode())
    assert digest.hexdigest() == BYTES_OF_A_TINY_STORE


def test_a_full_file_system(tmp_path: Path) -> None:
    recipe = make_recipe(tuple(range(100, 180)))
    with tmpfs(tmp_path / "disk", "size=2048k") as disk:
        with pytest.raises(StorageUnavailable, match="All finished work is saved"):
            recipe.write(disk / "store")
        assert list(disk.rglob("*.partial")) == []
        with ActivationStore(disk / "store") as reader:
            assert 0 < len(reader.commits) < recipe.manifest.n_parts
        assert verify_store(disk / "store").ok
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert read_tree(recipe.write(disk / "store")) == read_tree(
            recipe.write(tmp_path / "whole")
        )
