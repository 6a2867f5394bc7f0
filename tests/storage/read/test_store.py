"""Reading sequences, slices of them and batches, also from threads and forks.

A read that is impossible fails with a clear error.
"""

import json
import multiprocessing
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.errors import (
    SchemaVersionError,
    SelectionInvalid,
    StoreDamaged,
    StoreError,
    StoreNotFound,
)
from moa_data.storage import grid
from moa_data.storage.backend import LocalFile
from moa_data.storage.read.batch import ShardReader
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.stores import Recipe, flip, make_recipe, read_by_zarr, rows_in_store

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
        for tokens in (
            slice(None),
            slice(10),
            slice(-5, None),
            slice(63, 66),
            slice(500, 600),
            slice(9, 3),
        ):
            for layers in selections:
                expected = (
                    kv[tokens]
                    if layers is None
                    else kv[tokens][:, layers if len_of(layers) else []]
                )
                got = reader.read(i, "kv", layers, tokens)
                np.testing.assert_array_equal(got, expected.reshape(got.shape))
                assert got.shape == (len(kv[tokens]), expected.shape[1], 2, 2, 8)


def len_of(layers: Any) -> int:
    return 1 if isinstance(layers, slice) else len(layers)


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        (lambda reader: reader.read(0, "hidden/first"), ("hidden/first", "hidden/last")),
        (lambda reader: reader.read(0, "tokens", layers=[0]), ("'tokens'", "layers")),
        (lambda reader: reader.read(0, "kv", layers=[4]), ("'kv'", "4 layers", "index 4")),
        (lambda reader: reader.read(12, "kv"), (12,)),
        (lambda reader: reader["kv"], ("'kv'",)),
        (lambda reader: reader[0:2], (slice(0, 2),)),
        (lambda reader: reader.read(0, "kv", layers=-1), (-1,)),
        (lambda reader: reader.read(0, "kv", layers=[1.5]), (1.5,)),
        (lambda reader: reader.read(0, "kv", tokens=slice(0, 10, 2)), ("step",)),
        (lambda reader: reader.read_batch([0], ["kv", "k"]), ("'k'",)),
        (lambda reader: reader.read_batch([0], "tokens", layers=[0]), ("'tokens'", "layers")),
        (lambda reader: reader.read_batch([0, 12], "kv"), (12,)),
        (
            lambda reader: reader.read_batch([0], "kv", out={"tokens": np.zeros((1, 300))}),
            ("'kv'", "tokens"),
        ),
        (
            lambda reader: reader.read_batch(
                [0], "kv", out={"kv": np.zeros((1, 2, 4, 2, 2, 8), np.uint16)}
            ),
            ("kv", "uint16"),
        ),
        (
            lambda reader: reader.read_batch(
                [0], "kv", out={"kv": np.zeros((1, 300, 4, 2, 2, 8), np.int16)}
            ),
            ("kv", "uint16"),
        ),
    ],
)
def test_wrong_requests_say_what_is_there(
    reader: ActivationStore,
    wrong: Callable[[ActivationStore], object],
    facts: tuple[object, ...],
) -> None:
    with raises_naming(SelectionInvalid, *facts):
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
        np.testing.assert_array_equal(
            reader.read(i, "tokens"), recipe.values(reader.fields["tokens"], row)
        )
    with raises_naming(StoreError, store, "part 1"):
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
def test_damage_is_named_at_opening(
    store: Path, name: str, damage: Callable[[Path], None], has_seal: bool
) -> None:
    damage(store / name)
    if not has_seal:  # Stores of other programs have no seal.
        (store / "commits/store.json").unlink()
    with raises_naming(StoreDamaged, store / name):
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
    if is_open:  # Otherwise the index is read only after the damage.
        reader.read(i, "kv")
    damage(store / KV_SHARD)
    if is_open and damage is not truncate:
        reader.close()
    with raises_naming(StoreDamaged, store / KV_SHARD):
        reader.read(i, "kv")
    every = range(len(reader))
    for n_threads in (1, 3):  # An error ends all threads.
        with raises_naming(StoreDamaged, store / KV_SHARD):
            reader.read_batch(every, "kv", n_threads=n_threads)
    reader.read_batch(every, "tokens", n_threads=3)


def test_other_schema_version_and_other_folders(store: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(StoreNotFound):
            ActivationStore(folder)
    document = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps(document | {"schema_version": 9}))
    with raises_naming(SchemaVersionError, store / "store.json", 9):
        ActivationStore(store)


# A batch equals its sequences read one by one, and the values that zarr-python and tensorstore
# read.

NAMES = ["tokens", "response_mask", "kv", "hidden/last"]


def expected_batch(
    reader: ActivationStore, rows: list[int], name: str, n_rows: int, layers: Any = None
) -> np.ndarray:
    """Return the batch made of sequences that are read one by one."""
    parts = [reader.read(i, name, layers) for i in rows]
    out = np.zeros((len(rows), n_rows, *parts[0].shape[1:]), parts[0].dtype)
    for b, part in enumerate(parts):
        out[b, : len(part)] = part
    return out


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_equals_zarr_and_tensorstore(data: Any) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=5)))
    recipe = make_recipe(lengths, part_tokens=data.draw(st.sampled_from([64, 256])))
    row_bytes = 64 * 4 * 2 * 2 * 8 * 2
    patch = pytest.MonkeyPatch()
    patch.setattr(grid, "PART_STEP_TOKENS", data.draw(st.sampled_from([64, 8192])))
    patch.setattr(grid, "MAX_SHARD_BYTES", row_bytes * data.draw(st.sampled_from([1, 2, 1000])))
    patch.setattr(grid, "MAX_CHUNK_BYTES", row_bytes // data.draw(st.sampled_from([1, 2, 4])))
    patch.setattr(LocalFile, "max_read_bytes", data.draw(st.sampled_from([1, 3000, 1 << 20])))
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6))
    layers = data.draw(st.sampled_from([None, [0], [3, 1], [2, 3], [1, 1, 0]]))
    n_threads = data.draw(st.integers(1, 3))
    extra = data.draw(st.integers(0, 70))
    with (
        patch.context(),
        tempfile.TemporaryDirectory() as folder,
        ActivationStore(recipe.write(Path(folder), any_bits)) as reader,
    ):
        longest = max(reader.lengths[i] for i in rows)
        out = {
            name: np.full(
                (len(rows), longest + extra, *shape), 9, reader.fields[name].storage_dtype
            )
            for name in NAMES
            if (shape := token_shape(reader, name, layers)) is not None
        }
        batch = reader.read_batch(rows, NAMES, out=out, layers=layers, n_threads=n_threads)
        for name in NAMES:
            assert batch[name] is out[name]
            chosen = layers if name == "kv" else None
            np.testing.assert_array_equal(
                batch[name], expected_batch(reader, rows, name, longest + extra, chosen)
            )
            for b, i in enumerate(rows):
                row = reader.sequences.slice(i, 1).to_pylist()[0]
                written = any_bits(name, row, recipe.values(reader.fields[name], row))
                np.testing.assert_array_equal(reader.read(i, name), written)
                for read in (by_zarr, by_tensorstore):
                    want = read(Path(folder), name, row)
                    want = want if chosen is None else want[:, chosen]
                    np.testing.assert_array_equal(batch[name][b, : len(want)], want)
    patch.undo()


def any_bits(name: str, row: dict[str, Any], values: np.ndarray) -> np.ndarray:
    """Return activations of random bits, with NaNs of both kinds, infinities and subnormals."""
    if values.dtype != np.uint16:
        return values
    rng = np.random.default_rng(row["source_row"])
    special = np.array(
        [0x7F81, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x8001, 0x7F7F, 0xFF7F], np.uint16
    )
    noise = rng.integers(0, 1 << 16, values.shape, np.uint16)
    return np.where(rng.random(values.shape) < 0.5, rng.choice(special, values.shape), noise)


def token_shape(reader: ActivationStore, name: str, layers: list[int] | None) -> tuple[int, ...]:
    shape = reader.fields[name].token_shape
    return (len(layers), *shape[1:]) if name == "kv" and layers is not None else shape


def by_zarr(store: Path, name: str, row: dict[str, Any]) -> np.ndarray:
    return read_by_zarr(store / "parts", name, *rows_in_store(store, name, row))


def by_tensorstore(store: Path, name: str, row: dict[str, Any]) -> np.ndarray:
    path = str(store / "parts" / name)
    array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result()
    first, end = rows_in_store(store, name, row)
    return array[first:end].read().result()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_new_arrays_and_strided_buffers(store: Path, n_threads: int) -> None:
    with ActivationStore(store) as reader:
        rows = np.array([3, -1, 3, 0])
        batch = reader.read_batch(rows, NAMES, n_threads=n_threads)
        assert list(batch) == NAMES
        longest = max(reader.lengths[rows])
        for name in NAMES:
            np.testing.assert_array_equal(
                batch[name], expected_batch(reader, rows.tolist(), name, longest)
            )
        wide = np.zeros((4, longest, 3, 16), np.uint16)
        reader.read_batch(
            rows, "hidden/last", out={"hidden/last": wide[:, :, 1]}, n_threads=n_threads
        )
        np.testing.assert_array_equal(wide[:, :, 1], batch["hidden/last"])
        assert not wide[:, :, [0, 2]].any(), "nothing beside the buffer is written"
        assert reader.read_batch([], "kv")["kv"].shape == (0, 0, 4, 2, 2, 8)
        stored = reader.read_batch(rows, "kv", decoded=False)
        np.testing.assert_array_equal(stored["kv"], batch["kv"])


def test_a_chunk_is_decoded_once_and_those_of_other_layers_are_not(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "MAX_CHUNK_BYTES", 64 * 2 * 2 * 8 * 2)  # one layer per chunk
    decoded = []
    original = ShardReader.decode

    def noting(self: Any, data: Any, row: Any, column: Any, out: Any) -> None:
        decoded.append((self.path.parent.name, self.path.name, row, column))
        original(self, data, row, column, out)

    with ActivationStore(recipe.write(tmp_path / "store")) as reader:
        rows = [i for i, part in enumerate(reader.sequences["part"].to_pylist()) if part == 0]
        expected = expected_batch(
            reader, [*rows, *rows], "kv", max(reader.lengths[rows]), layers=[-1]
        )
        monkeypatch.setattr(ShardReader, "decode", noting)
        batch = reader.read_batch([*rows, *rows], ["tokens", "kv"], layers=[-1])
    np.testing.assert_array_equal(batch["kv"], expected)
    assert len(decoded) == len(set(decoded))
    assert sum(name == "tokens" for name, *_ in decoded) == 1, (
        "the sequences of a part share one chunk"
    )
    assert {column for name, _, _, column in decoded if name == "kv"} == {3}


def checksums(reader: ActivationStore) -> tuple[int, int]:
    """Return the checksums of all keys and values, read together and one by one."""
    together = reader.read_batch(range(len(reader)), "kv", n_threads=3)["kv"].sum(dtype=np.int64)
    return int(together), sum(
        int(reader.read(i, "kv").sum(dtype=np.int64)) for i in range(len(reader))
    )


def put_checksums(reader: ActivationStore, queue: "multiprocessing.Queue[Any]") -> None:
    queue.put(checksums(reader))


def test_threads_and_forked_children_read_the_same(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch needs enough reads for several threads.
    monkeypatch.setattr(LocalFile, "max_read_bytes", 3000)
    with ActivationStore(store) as reader:
        expected = checksums(reader)
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(checksums, reader) for _ in range(12)]
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            child = context.Process(target=put_checksums, args=(reader, queue))
            child.start()
            assert queue.get(timeout=30) == expected
            child.join(30)
            assert child.exitcode == 0
            assert [job.result() for job in running] == [expected] * 12
