"""The contract of places that stores are written to: a folder, and a prefix of a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moa_data.errors import OutputOccupied, StorageUnavailable, StoreDamaged, StoreLocked, StoreMismatch
from moa_data.storage.backend import names_in, open_path, put, remove_file
from moa_data.storage.paths import RemotePath, StorePath
from moa_data.storage.read import batch
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import hidden_field
from moa_data.storage.write import publish as publish_module
from moa_data.storage.write.addition import StoreAddition, extended_codec
from moa_data.storage.write.publish import partial_name
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.object_stores import empty_place, read_remote_tree, use
from moa_data.tests.kit.stores import FIELDS, Recipe, make_recipe, read_tree


def tree_of(store: StorePath) -> dict[str, bytes]:
    if isinstance(store, RemotePath):
        return read_remote_tree(store)
    return {name: content for name, content in read_tree(store).items() if name != "publish.lock"}


def shared(store: StorePath, recipe: Recipe) -> StoreWriter:
    return StoreWriter.create_or_resume(store, recipe.manifest, recipe.plan, shares=True)


LENGTHS = (70, 3, 200, 64)


class PlaceContract:
    """What writing must do wherever a store lies; a subclass gives a fixture ``place`` where nothing is."""

    @pytest.fixture
    def recipe(self) -> Recipe:
        return make_recipe(LENGTHS)

    @pytest.fixture
    def store(self, tmp_path: Path, recipe: Recipe) -> Path:
        return recipe.write(tmp_path / "store")

    @pytest.fixture
    def wanted(self, store: Path) -> dict[str, bytes]:
        """The bytes of the store on a disk."""
        return read_tree(store)

    def test_the_store_holds_the_bytes_of_one_on_a_disk(
        self,
        place: StorePath,
        recipe: Recipe,
        store: Path,
        wanted: dict[str, bytes],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(batch, "REMOTE_WINDOW_BYTES", 4000)  # several windows
        recipe.write(place)
        assert tree_of(place) == wanted
        assert verify_store(place).ok
        with ActivationStore(place, require_complete=True) as one, ActivationStore(store) as other:
            found, expected = (reader.read_batch(range(len(reader)), list(reader.fields)) for reader in (one, other))
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)

    def test_leaving_without_commit_leaves_nothing(self, place: StorePath, recipe: Recipe) -> None:
        with StoreWriter.create_or_resume(place, recipe.manifest, recipe.plan) as writer:
            before = set(self.names(place))
            with suppress(KeyboardInterrupt), writer.part(0) as out:
                recipe.fill(out)
                raise KeyboardInterrupt
            assert set(self.names(place)) == before
            recipe.write_part(writer, 0)

    def test_of_two_writers_of_a_part_the_first_to_commit_wins(
        self, place: StorePath, recipe: Recipe, wanted: dict[str, bytes]
    ) -> None:
        with shared(place, recipe) as first, shared(place, recipe) as second:
            assert second.joined
            one, other = first.part(0), second.part(0)
            recipe.fill(one)
            recipe.fill(other)
            assert other.commit() == one.commit()
            assert (other.was_first, one.was_first) == (True, False)
            for part in first.pending_parts():
                recipe.write_part(first, part)
            assert not second.pending_parts()
        assert tree_of(place) == wanted

    def test_other_inputs_are_refused(self, place: StorePath, recipe: Recipe) -> None:
        recipe.write(place)
        other = recipe.with_manifest(extraction={"max_length": 1, "dtype": "bfloat16"})
        with pytest.raises(StoreMismatch, match=r"extraction\.max_length: store has 256, given 1"):
            other.write(place)
        with pytest.raises(StoreMismatch, match="plan: store has"):
            replace(recipe, plan=make_recipe((3, 70, *LENGTHS[2:])).plan).write(place)

    def test_a_place_with_something_else_is_left_alone(self, place: StorePath, recipe: Recipe) -> None:
        if isinstance(place, Path):
            place.mkdir()
        put(place / "notes.txt", b"mine")
        with pytest.raises(OutputOccupied, match=r"it holds notes\.txt"):
            recipe.write(place)
        assert self.names(place) == ["notes.txt"]

    def test_the_bundle_is_committed_whole_and_replaced(self, place: StorePath, recipe: Recipe) -> None:
        recipe.write(place)
        with StoreWriter.create_or_resume(place, recipe.manifest, recipe.plan) as writer:
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
                assert (writer.target_path / "sub" / "weights").read_text() == content
        with ActivationStore(place) as store:
            assert (store.target_path / "sub" / "weights").read_text() == "another"
        assert verify_store(place).ok

    def test_runs_are_recorded(self, place: StorePath, recipe: Recipe) -> None:
        with StoreWriter.create_or_resume(place, recipe.manifest, recipe.plan) as writer:
            paths = [writer.record_run({"n": n}) for n in range(3)]
        assert [json.loads(path.read_bytes())["n"] for path in paths] == [0, 1, 2]
        assert len(names_in(place / "runs")) == 3

    @staticmethod
    def names(place: StorePath) -> list[str]:
        if isinstance(place, RemotePath):
            return place.names()
        found = (path for path in place.rglob("*") if path.is_file() and path.name != "store.lock")
        return sorted(path.relative_to(place).as_posix() for path in found)


class TestFolder(PlaceContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path / "place"


class TestBucket(PlaceContract):
    @pytest.fixture
    def place(self, moto_server: str) -> Iterator[StorePath]:
        with use(moto_server):
            yield open_path(f"{empty_place(moto_server)}/a store")

    def test_damage_is_named(self, place: RemotePath, recipe: Recipe) -> None:
        shard = recipe.write(place) / "parts/kv/c.1.0.0.0.0"
        whole = shard.read_bytes()
        reader = ActivationStore(place)
        i = reader.sequences["part"].to_pylist().index(1)
        put(shard, whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        with pytest.raises(StoreDamaged, match=f"{shard}: chunk checksum"):
            reader.read(i, "kv")
        assert [damage.path for damage in verify_store(place, values=False).damages] == ["parts/kv/c.1.0.0.0.0"]
        put(shard, whole[:-50])
        reader.close()
        with pytest.raises(StoreDamaged, match=f"{shard} ends inside its index"):
            reader.read(i, "kv")
        for _ in range(2):  # cut, then gone
            with pytest.raises(StoreDamaged, match=str(shard)):
                ActivationStore(place)
            remove_file(shard)

    def test_leftovers_go_when_they_are_old(
        self, place: RemotePath, recipe: Recipe, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dead = shared(place, recipe)
        recipe.fill(out := dead.part(0))
        for array in out._arrays.values():
            array.finish()  # as a kill before the commit leaves it
        recipe.write(place)
        uploads = {
            f"parts/{partial_name(name, out._files.attempt)}"
            for array in out._arrays.values()
            for name in array.records
        }
        assert tree_of(place).keys() - wanted.keys() == uploads
        monkeypatch.setattr(publish_module, "LEFTOVER_S", -60.0)
        dead.close()
        with shared(place, recipe) as writer:
            writer.sweep()
        assert tree_of(place) == wanted
        assert verify_store(place).ok

    def test_a_part_that_took_too_long_is_not_committed(
        self, place: RemotePath, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with shared(place, recipe) as writer:
            out = writer.part(0)
            recipe.fill(out)
            monkeypatch.setattr(publish_module, "COMMIT_WITHIN_S", -1.0)
            with pytest.raises(StorageUnavailable, match="took longer than"):
                out.commit()
            out.discard()
            assert writer.is_pending(0)

    @pytest.mark.slow
    def test_two_additions_of_other_fields_do_not_lose_one(self, place: RemotePath, recipe: Recipe) -> None:
        recipe.write(place)
        writers = [StoreWriter.create_or_resume(place, recipe.manifest, recipe.plan) for _ in range(2)]
        recipes = [make_recipe(LENGTHS, fields=(*FIELDS, hidden_field(f"layer_{k}", 16))) for k in range(2)]
        additions = [
            StoreAddition(writer, wider.manifest, extended_codec(writer.codec, wider.manifest.fields))
            for writer, wider in zip(writers, recipes, strict=True)
        ]
        for wider, addition in zip(recipes, additions, strict=True):
            for part in addition.pending_parts():
                wider.write_part(addition, part)
        additions[0].finish()
        with pytest.raises(StoreLocked, match=r"store\.json was changed by another process meanwhile"):
            additions[1].finish()
        for writer in writers:
            writer.close()
        assert verify_store(place).ok
