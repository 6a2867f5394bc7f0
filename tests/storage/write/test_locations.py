"""The contract of the locations of a store: a folder, and a prefix of a bucket."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.errors import (
    OutputOccupied,
    StorageUnavailable,
    StoreDamaged,
    StoreLocked,
    StoreMismatch,
)
from moa_data.storage.backend import backend_of, open_path
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.commit import read_part_commit
from moa_data.storage.object_store import ObjectStore
from moa_data.storage.paths import RemotePath, StorePath
from moa_data.storage.read import batch
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import commit_path, hidden_field, publication_path, tokens_field
from moa_data.storage.write import publish as publish_module
from moa_data.storage.write.addition import StoreAddition, extended_codec
from moa_data.storage.write.publish import Publication, partial_name
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.kills import killed_at
from moa_data.tests.kit.object_stores import empty_prefix, read_remote_tree, use
from moa_data.tests.kit.stores import FIELDS, Recipe, check_reads_equal, make_recipe, read_tree


def tree_of(store: StorePath) -> dict[str, bytes]:
    if isinstance(store, RemotePath):
        return read_remote_tree(store)
    return {
        name: content for name, content in read_tree(store).items() if not name.startswith("locks/")
    }


LENGTHS = (70, 3, 64)
TOKENS, _, KV, _ = FIELDS


class LocationContract:
    """The contract of writing in any location.

    A subclass has a fixture ``location``, at which nothing exists yet.
    """

    @pytest.fixture
    def recipe(self) -> Recipe:
        return make_recipe(LENGTHS, (TOKENS, KV), part_tokens=192)

    @pytest.fixture
    def wanted(self, store: Path) -> dict[str, bytes]:
        """The files of the store on a disk."""
        return read_tree(store)

    def test_the_store_holds_the_bytes_of_one_on_a_disk(
        self,
        location: StorePath,
        recipe: Recipe,
        store: Path,
        wanted: dict[str, bytes],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # so that several windows are uploaded
        monkeypatch.setattr(batch, "REMOTE_WINDOW_BYTES", 12_000)
        recipe.write(location)
        assert tree_of(location) == wanted
        assert verify_store(location).ok
        check_reads_equal(location, store)

    def test_leaving_without_commit_leaves_nothing(
        self, location: StorePath, recipe: Recipe
    ) -> None:
        with recipe.open(location) as writer:
            before = backend_of(location).names_below()
            with suppress(KeyboardInterrupt), writer.part(0) as out:
                recipe.fill(out)
                raise KeyboardInterrupt
            assert backend_of(location).names_below() == before
            recipe.write_part(writer, 0)

    def test_of_two_writers_of_a_part_the_first_to_commit_wins(
        self, location: StorePath, recipe: Recipe, wanted: dict[str, bytes]
    ) -> None:
        with (
            recipe.open(location, shares=True) as first,
            recipe.open(location, shares=True) as second,
        ):
            assert second.has_other_writers
            one, other = first.part(0), second.part(0)
            recipe.fill(one)
            recipe.fill(other)
            assert other.commit() == one.commit()
            assert (other.was_first, one.was_first) == (True, False)
            for part in first.pending_parts():
                recipe.write_part(first, part)
            assert not second.pending_parts()
        assert tree_of(location) == wanted

    def test_other_inputs_are_refused(self, location: StorePath, recipe: Recipe) -> None:
        with recipe.open(location) as writer:
            recipe.write_part(writer, 0)
        other = recipe.with_manifest(extraction={"max_length": 1, "dtype": "bfloat16"})
        with raises_naming(StoreMismatch, location, "extraction.max_length", 256, 1):
            other.write(location)
        with raises_naming(StoreMismatch, location, "plan", "id-0", "id-1"):
            replace(recipe, plan=make_recipe((3, 70, *LENGTHS[2:]), part_tokens=192).plan).write(
                location
            )

    def test_a_location_with_something_else_is_left_alone(
        self, location: StorePath, recipe: Recipe
    ) -> None:
        if isinstance(location, Path):
            location.mkdir()
        backend_of(location / "notes.txt").put(b"mine")
        with raises_naming(OutputOccupied, location, "notes.txt"):
            recipe.write(location)
        assert backend_of(location).names_below() == ["notes.txt"]

    def test_the_bundle_is_committed_whole_and_replaced(
        self, location: StorePath, recipe: Recipe
    ) -> None:
        recipe = make_recipe((70, 3), recipe.manifest.fields)
        recipe.write(location)
        with recipe.open(location) as writer:
            with suppress(KeyboardInterrupt), writer.target() as folder:
                (folder / "config.json").write_text("{}")
                raise KeyboardInterrupt
            assert not writer.has_target
            for content in ("one", "another"):
                with writer.target() as folder:
                    (folder / "config.json").write_text("{}")
                    (folder / "sub").mkdir()
                    (folder / "sub" / "weights").write_text(content)
                assert writer.has_target
                assert backend_of(location / "target/sub/weights").read() == content.encode()
        with ActivationStore(location) as store:
            assert (store.target_path / "sub" / "weights").read_text() == "another"
        assert verify_store(location).ok


class TestFolder(LocationContract):
    @pytest.fixture
    def location(self, tmp_path: Path) -> Path:
        return tmp_path / "location"


class TestBucket(LocationContract):
    """The contract in a bucket: the fixture ``location`` of this module."""

    def test_damage_is_named(self, location: RemotePath, recipe: Recipe) -> None:
        shard = recipe.write(location) / "parts/kv/c.1.0.0.0.0"
        whole = shard.read_bytes()
        reader = ActivationStore(location)
        i = reader.sequences["part"].to_pylist().index(1)
        backend_of(shard).put(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        with raises_naming(StoreDamaged, shard, "layer 0"):
            reader.read(i, "kv")
        assert [damage.path for damage in verify_store(location, values=False).damages] == [
            "parts/kv/c.1.0.0.0.0"
        ]
        backend_of(shard).put(whole[:-50])
        reader.close()
        with raises_naming(StoreDamaged, shard):
            reader.read(i, "kv")
        for _ in range(2):  # The shard is cut first, and then removed.
            with raises_naming(StoreDamaged, shard):
                ActivationStore(location)
            backend_of(shard.parent).remove_files([shard.name])

    def test_leftovers_go_when_they_are_old(
        self,
        location: RemotePath,
        recipe: Recipe,
        wanted: dict[str, bytes],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        dead = recipe.open(location, shares=True)
        recipe.fill(out := dead.part(0))
        for array in out._arrays.values():
            array.finish()  # A kill before the commit leaves a part like this.
        recipe.write(location)
        uploads = {
            f"parts/{partial_name(name, out._files.attempt)}"
            for array in out._arrays.values()
            for name in array.records
        }
        assert tree_of(location).keys() - wanted.keys() == uploads
        monkeypatch.setattr(publish_module, "LEFTOVER_S", -60.0)
        dead.close()
        with recipe.open(location, shares=True) as writer:
            writer.sweep()
        assert tree_of(location) == wanted
        assert verify_store(location).ok

    def test_a_part_that_took_too_long_is_not_committed(
        self, location: RemotePath, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with recipe.open(location, shares=True) as writer:
            out = writer.part(0)
            recipe.fill(out)
            monkeypatch.setattr(publish_module, "COMMIT_WITHIN_S", -1.0)
            with raises_naming(StorageUnavailable, "commits/part-00000.json", "part_tokens"):
                out.commit()
            out.discard()
            assert writer.is_pending(0)

    @pytest.mark.slow
    def test_two_additions_of_other_fields_do_not_lose_one(
        self, location: RemotePath, recipe: Recipe
    ) -> None:
        recipe.write(location)
        writers = [recipe.open(location) for _ in range(2)]
        recipes = [
            make_recipe(
                LENGTHS, (*recipe.manifest.fields, hidden_field(f"layer_{k}", 16)), part_tokens=192
            )
            for k in range(2)
        ]
        additions = [
            StoreAddition(
                writer, wider.manifest, extended_codec(writer.codec, wider.manifest.fields)
            )
            for writer, wider in zip(writers, recipes, strict=True)
        ]
        for wider, addition in zip(recipes, additions, strict=True):
            for part in addition.pending_parts():
                wider.write_part(addition, part)
        additions[0].finish()
        with raises_naming(StoreLocked, "store.json"):
            additions[1].finish()
        for writer in writers:
            writer.close()
        assert verify_store(location).ok


# Writers in a bucket, on machines that round differently.


def rounded(n: int) -> Callable[[str, dict[str, Any], np.ndarray], np.ndarray]:
    """Return a function that changes values like the rounding of the n-th machine."""

    def change(name: str, row: dict[str, Any], values: np.ndarray) -> np.ndarray:
        return values ^ np.uint16(n) if name == "kv" or name.startswith("hidden") else values

    return change


@pytest.fixture
def recipe() -> Recipe:
    """A store of codes with scales. Codes of one machine with another's scales are wrong values."""
    fields = (tokens_field(), hidden_field("last", 16))
    return make_recipe((70, 3), fields).with_manifest(codec=StoreCodec("int8", ()).describe())


@pytest.fixture
def location(moto_server: str) -> Iterator[RemotePath]:
    with use(moto_server):
        location = open_path(f"{empty_prefix(moto_server)}/a store")
        assert isinstance(location, RemotePath)
        yield location


def trees(recipe: Recipe, folder: Path, n: int) -> list[dict[str, bytes]]:
    """Return the files that each of n machines writes into a folder."""
    return [read_tree(recipe.write(folder / str(i), rounded(i))) for i in range(n)]


CHANGING = ("put_if_absent", "replace", "put", "copy", "delete")
"""Requests that change a bucket."""
N_PUTS = 3
"""Number of uploads for the part of these tests, and of copies."""
STEPS = {
    "an upload": (1, False), "the record": (N_PUTS, False), "a copy": (N_PUTS + 1, True),
    "half": (N_PUTS + 2, True),
    "the commit": (2 * N_PUTS + 1, True), "the deletion": (2 * N_PUTS + 2, True),
    "the end": (2 * N_PUTS + 3, True),
}  # fmt: skip
FAST = ("half",)


@pytest.mark.parametrize(
    "step", [pytest.param(s, marks=() if s in FAST else pytest.mark.slow) for s in STEPS]
)
def test_a_kill_before_any_step_of_a_publication(
    location: RemotePath, recipe: Recipe, tmp_path: Path, step: str
) -> None:
    """The next writer, on another machine, finishes the part of the first or writes all of it."""
    n_calls, is_first = STEPS[step]
    is_over = False
    with recipe.open(location) as writer, killed_at(n_calls + 1, CHANGING, ObjectStore):
        recipe.write_part(writer, 0, rounded(0))
        is_over = True
    assert is_over is (step == "the end")
    recipe.write(location, rounded(1))
    found = {
        name: data
        for name, data in read_remote_tree(location).items()
        if not name.startswith("parts/") or ".partial" not in name
    }
    assert found == trees(recipe, tmp_path, 2)[0 if is_first else 1]


def test_unlike_machines_race(location: RemotePath, recipe: Recipe, tmp_path: Path) -> None:
    """All files of a part come from one machine, and no other files are left."""
    several_parts = make_recipe(LENGTHS, recipe.manifest.fields, part_tokens=192)
    recipe = several_parts.with_manifest(codec=recipe.manifest.codec)

    def work(n: int) -> None:
        with recipe.open(location, shares=True) as writer:
            for part in writer.pending_parts():
                recipe.write_part(writer, part, rounded(n))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert verify_store(location).ok
    whole, found = trees(recipe, tmp_path, 2), read_remote_tree(location)
    assert found.keys() == whole[0].keys()
    for part in range(recipe.manifest.n_parts):
        shards = (f"parts/{name}" for name in read_part_commit(commit_path(location, part)).files)
        names = [f"commits/part-{part:05d}.json", *shards]
        assert {name: found[name] for name in names} in [
            {name: tree[name] for name in names} for tree in whole
        ]


def test_a_record_whose_uploads_are_gone_comes_to_nothing(
    location: RemotePath, recipe: Recipe, tmp_path: Path
) -> None:
    with recipe.open(location, shares=True) as writer:
        path = commit_path(location, 0)
        record = Publication(path.name, "5f3a9c01", {"parts/kv/c.0": 10}, None, "{}")
        backend_of(publication_path(path)).put_if_absent(record.to_json())
        recipe.write_part(writer, 0, rounded(0))
    assert read_remote_tree(location) == trees(recipe, tmp_path, 1)[0]


def test_plain_libraries_read_a_bucket_as_a_folder(
    location: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the snippet of docs/object-stores.md, with zarr-python and with tensorstore."""
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    recipe = make_recipe((70, 3))
    local = recipe.write(tmp_path / "local")
    recipe.write(location)
    assert read_remote_tree(location) == read_tree(local)
    bucket, _, prefix = location.bucket.url.removeprefix("s3://").partition("/")
    page = (Path(__file__).parents[3] / "docs" / "object-stores.md").read_text()
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    program = found[1].replace('"bucket", "llama3-8b"', f"{bucket!r}, {prefix!r}")
    exec(compile(program, "docs/object-stores.md", "exec"), names)
    row = recipe.plan.slice(0, 1).to_pylist()[0]
    np.testing.assert_array_equal(names["by_zarr"], recipe.values(recipe.manifest.fields[3], row))
    np.testing.assert_array_equal(names["by_tensorstore"], names["by_zarr"])
