"""Reading parts of sequences, into buffers, from threads and forks; and saying clearly what cannot be read."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.errors import SchemaVersionError, SelectionInvalid, StoreDamaged, StoreError, StoreNotFound
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.stores import Recipe, flip

KV_SHARD = "parts/kv/c.1.0.0.0.0"


@pytest.fixture
def reader(store: Path) -> Iterator[Any]:
    with ActivationStore(store) as opened:
        yield opened


def rows(reader: ActivationStore) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = reader.sequences.to_pylist()
    return found


def test_a_store_is_a_sequence_of_dicts_that_says_what_it_holds(reader: ActivationStore) -> None:
    first = reader[0]
    assert list(first) == list(reader.fields)
    for name, values in first.items():
        assert np.array_equal(values, reader.read(0, name))
    with pytest.raises(IndexError):
        reader[len(reader)]
    np.testing.assert_array_equal(reader.read(-1, "tokens"), reader.read(len(reader) - 1, "tokens"))
    for text in (str(reader.path), f"{len(reader):,} sequences", "kv ", "tokens int32[n]"):
        assert text in repr(reader)


def test_token_and_layer_selections(reader: ActivationStore, recipe: Recipe) -> None:
    selections: tuple[Any, ...] = (
        None, slice(None), slice(1, 3), slice(None, None, -1), [2], [-1, 0], np.array([1]), [],
    )  # fmt: skip
    for i, row in enumerate(rows(reader)):
        kv = recipe.values(reader.fields["kv"], row)
        for tokens in (slice(None), slice(10), slice(-5, None), slice(63, 66), slice(500, 600), slice(9, 3)):
            for layers in selections:
                expected = kv[tokens] if layers is None else kv[tokens][:, layers if len_of(layers) else []]
                got = reader.read(i, "kv", layers, tokens)
                np.testing.assert_array_equal(got, expected.reshape(got.shape))
                assert got.shape == (len(kv[tokens]), expected.shape[1], 2, 2, 8)


def len_of(layers: Any) -> int:
    return 1 if isinstance(layers, slice) else len(layers)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda reader: reader.read(0, "hidden/first"), "tokens, response_mask, kv, hidden/last"),
        (lambda reader: reader.read(0, "tokens", layers=[0]), "'tokens'"),
        (lambda reader: reader.read(0, "kv", layers=[4]), "layer 4"),
        (lambda reader: reader.read(12, "kv"), "sequence 12"),
        (lambda reader: reader["kv"], "'kv'"),
        (lambda reader: reader.read(0, "kv", tokens=slice(0, 10, 2)), "step"),
    ],
)
def test_wrong_requests_say_what_is_there(
    reader: ActivationStore, wrong: Callable[[ActivationStore], object], what: str
) -> None:
    with pytest.raises(SelectionInvalid, match=what):
        wrong(reader)


def test_reads_again_after_close_and_pickled(reader: ActivationStore) -> None:
    before = reader.read(0, "kv")
    reader.close()
    for again in (reader, pickle.loads(pickle.dumps(reader))):
        np.testing.assert_array_equal(again.read(0, "kv"), before)


def test_a_part_without_commit_does_not_exist(store: Path, recipe: Recipe) -> None:
    (store / "commits/part-00001.json").unlink()
    reader = ActivationStore(store)
    assert len(reader.commits) == recipe.manifest.n_parts - 1
    assert 1 not in reader.sequences["part"].to_pylist()
    for i, row in enumerate(rows(reader)):
        np.testing.assert_array_equal(reader.read(i, "tokens"), recipe.values(reader.fields["tokens"], row))
    with pytest.raises(StoreError, match="part 1"):
        ActivationStore(store, require_complete=True)
    shutil.rmtree(store / "commits")
    assert len(ActivationStore(store)) == 0


def truncate(path: Path) -> None:
    os.truncate(path, 200)


def take_next(commit: Path) -> None:
    commit.write_bytes((commit.parent / "part-00001.json").read_bytes())


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (KV_SHARD, truncate), (KV_SHARD, Path.unlink), ("commits/part-00000.json", truncate),
        ("commits/part-00000.json", take_next), ("plan.parquet", truncate),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_seal", [True, False])
def test_damage_is_named_at_opening(store: Path, name: str, damage: Callable[[Path], None], has_seal: bool) -> None:
    damage(store / name)
    if not has_seal:  # as in stores of other programs
        (store / "commits/store.json").unlink()
    with pytest.raises(StoreDamaged, match=name):
        ActivationStore(store)


@pytest.mark.parametrize(
    "damage",
    [partial(flip, at=100), partial(flip, at=-20), truncate, Path.unlink],
    ids=["chunk", "index", "cut", "gone"],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_damage_after_opening_is_named_when_it_is_read(
    store: Path, damage: Callable[[Path], None], is_open: bool
) -> None:
    reader = ActivationStore(store)
    i = reader.sequences["part"].to_pylist().index(1)
    if is_open:  # else the index is still to be read
        reader.read(i, "kv")
    damage(store / KV_SHARD)
    if is_open and damage is not truncate:
        reader.close()
    with pytest.raises(StoreDamaged, match=KV_SHARD):
        reader.read(i, "kv")
    reader.read(i, "tokens")


def test_other_schema_version_and_other_folders(store: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(StoreNotFound):
            ActivationStore(folder)
    document = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps(document | {"schema_version": 9}))
    with pytest.raises(SchemaVersionError, match="9"):
        ActivationStore(store)
