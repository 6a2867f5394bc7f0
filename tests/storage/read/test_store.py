"""Reading parts of sequences, into buffers, from threads and forks; and saying clearly what cannot be read."""

import json
import multiprocessing
import pickle
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.storage.disk import open_files
from moa_data.storage.errors import (
    ManifestInvalid,
    PartUncommitted,
    SchemaVersionError,
    ShardCorrupt,
    ShardMissing,
    SliceInvalid,
    StoreNotFound,
    UnknownField,
)
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.stores import Recipe, flip

KV_SHARD = "parts/part-00001.zarr/kv/c/0/0/0/0/0"


@pytest.fixture
def reader(store: Path) -> Iterator[Any]:
    with ActivationStore(store) as opened:
        yield opened


def rows(reader: ActivationStore) -> list[dict[str, Any]]:
    return reader.sequences.to_pylist()


def test_token_and_layer_selections(reader: ActivationStore, recipe: Recipe) -> None:
    for i, row in enumerate(rows(reader)):
        kv = recipe.values(reader.fields["kv"], row)
        for tokens in (slice(None), slice(10), slice(-5, None), slice(63, 66), slice(500, 600), slice(9, 3)):
            for layers in (None, slice(None), slice(1, 3), slice(None, None, -1), [2], [-1, 0], np.array([1]), []):
                expected = kv[tokens] if layers is None else kv[tokens][:, layers if len_of(layers) else []]
                got = reader.read(i, "kv", layers, tokens)
                np.testing.assert_array_equal(got, expected.reshape(got.shape))
                assert got.shape == (len(kv[tokens]), expected.shape[1], 2, 2, 8)


def len_of(layers: Any) -> int:
    return 1 if isinstance(layers, slice) else len(layers)


def test_negative_sequence_index(reader: ActivationStore) -> None:
    np.testing.assert_array_equal(reader.read(-1, "tokens"), reader.read(len(reader) - 1, "tokens"))


@pytest.mark.parametrize("layers", [None, [1, 3]])
def test_read_into_fills_only_the_tokens(reader: ActivationStore, recipe: Recipe, layers: list[int] | None) -> None:
    n_layers = 4 if layers is None else 2
    for i, row in enumerate(rows(reader)):
        out = np.full((220, n_layers, 2, 2, 8), 7, np.uint16)
        n_tokens = reader.read_into(i, "kv", out, layers)
        assert n_tokens == row["n_tokens"] == reader.lengths[i]
        np.testing.assert_array_equal(out[:n_tokens], reader.read(i, "kv", layers))
        assert (out[n_tokens:] == 7).all()


def test_read_into_a_strided_view(reader: ActivationStore) -> None:
    batch = np.zeros((220, 3, 16), np.uint16)
    reader.read_into(2, "hidden/last", batch[:, 1])
    np.testing.assert_array_equal(batch[: reader.lengths[2], 1], reader.read(2, "hidden/last"))
    assert not batch[:, [0, 2]].any()


def test_wrong_requests_say_what_is_there(reader: ActivationStore) -> None:
    with pytest.raises(UnknownField, match="no field 'hidden/first'; it has tokens, response_mask, kv, hidden/last"):
        reader.read(0, "hidden/first")
    with pytest.raises(UnknownField, match="'tokens' has no layers"):
        reader.read(0, "tokens", layers=[0])
    with pytest.raises(SliceInvalid, match="has 4 layers, there is no layer 4"):
        reader.read(0, "kv", layers=[4])
    with pytest.raises(SliceInvalid, match="12 committed sequences, there is no sequence 12"):
        reader.read(12, "kv")
    with pytest.raises(SliceInvalid, match="step 1, got 2"):
        reader.read(0, "kv", tokens=slice(0, 10, 2))
    with pytest.raises(SliceInvalid, match=r"out array of uint16 with shape .*got float32 \[300, 16\]"):
        reader.read_into(0, "hidden/last", np.zeros((300, 16), np.float32))
    with pytest.raises(SliceInvalid, match="out array"):
        reader.read_into(0, "hidden/last", np.zeros((1, 16), np.uint16))


def test_threads_read_the_same_with_few_open_shards(
    store: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "MAX_OPEN_FILES", 2)
    reader = ActivationStore(store)
    expected = {i: recipe.values(reader.fields["kv"], row) for i, row in enumerate(rows(reader))}
    with ThreadPoolExecutor(8) as pool:
        jobs = [(i, pool.submit(reader.read, i, "kv")) for _ in range(20) for i in expected]
        for i, job in jobs:
            np.testing.assert_array_equal(job.result(), expected[i])


def read_in_child(reader: ActivationStore, queue: multiprocessing.Queue) -> None:
    queue.put([reader.read(i, "kv").sum(dtype=np.int64) for i in range(len(reader))])


def test_a_forked_child_reads_while_a_thread_of_the_parent_reads(reader: ActivationStore) -> None:
    expected = [reader.read(i, "kv").sum(dtype=np.int64) for i in range(len(reader))]
    stop = threading.Event()

    def keep_reading() -> None:
        while not stop.is_set():
            reader.read(0, "kv")

    thread = threading.Thread(target=keep_reading)
    thread.start()
    try:
        context = multiprocessing.get_context("fork")
        for _ in range(3):
            queue = context.Queue()
            child = context.Process(target=read_in_child, args=(reader, queue))
            child.start()
            assert queue.get(timeout=30) == expected
            child.join(30)
            assert child.exitcode == 0
    finally:
        stop.set()
        thread.join()


def test_pickles_and_reads_again(reader: ActivationStore) -> None:
    copy = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(copy.read(0, "kv"), reader.read(0, "kv"))


def test_reads_again_after_close(reader: ActivationStore) -> None:
    before = reader.read(0, "kv")
    reader.close()
    np.testing.assert_array_equal(reader.read(0, "kv"), before)


def test_a_part_without_commit_does_not_exist(store: Path, recipe: Recipe) -> None:
    (store / "commits/part-00001.json").unlink()
    reader = ActivationStore(store)
    assert reader.n_parts_committed == recipe.manifest.n_parts - 1
    assert 1 not in reader.sequences["part"].to_pylist()
    for i, row in enumerate(rows(reader)):
        np.testing.assert_array_equal(reader.read(i, "tokens"), recipe.values(reader.fields["tokens"], row))
    with pytest.raises(PartUncommitted, match=r"1 of \d parts have no commit, the first is part 1. Run the same"):
        ActivationStore(store, require_complete=True)


def test_a_store_without_commits_is_empty(store: Path) -> None:
    shutil.rmtree(store / "commits")
    assert len(ActivationStore(store)) == 0


def test_truncated_file_is_refused_at_opening(store: Path) -> None:
    with open(store / KV_SHARD, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ShardCorrupt, match=rf"{KV_SHARD} has 1000 bytes, its commit says \d+. Run extract again"):
        ActivationStore(store)


def test_missing_file_is_refused_at_opening_and_later(store: Path) -> None:
    reader = ActivationStore(store)
    (store / KV_SHARD).unlink()
    i = reader.sequences["part"].to_pylist().index(1)
    with pytest.raises(ShardMissing, match=f"{KV_SHARD} is missing"):
        reader.read(i, "kv")
    with pytest.raises(ShardMissing, match=f"{KV_SHARD} is missing although it was committed"):
        ActivationStore(store)


def test_flipped_byte_in_a_chunk_names_file_and_tokens(store: Path) -> None:
    flip(store / KV_SHARD, 100)
    reader = ActivationStore(store)
    i = reader.sequences["part"].to_pylist().index(1)
    with pytest.raises(ShardCorrupt, match=rf"{KV_SHARD}: chunk checksum is .*tokens from 0 of the shard"):
        reader.read(i, "kv")
    reader.read(i, "tokens")


def test_flipped_byte_in_the_index_is_noticed(store: Path) -> None:
    flip(store / KV_SHARD, -20)
    reader = ActivationStore(store)
    with pytest.raises(ShardCorrupt, match="index checksum is"):
        reader.read(reader.sequences["part"].to_pylist().index(1), "kv")


def test_truncation_after_opening_is_noticed(store: Path) -> None:
    reader = ActivationStore(store)
    i = reader.sequences["part"].to_pylist().index(1)
    reader.read(i, "kv")
    with open(store / KV_SHARD, "r+b") as file:
        file.truncate(200)
    with pytest.raises(ShardCorrupt, match="inside a chunk"):
        reader.read(i, "kv")


def test_other_schema_version_and_other_folders(store: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="there is no such folder"):
        ActivationStore(tmp_path / "nowhere")
    with pytest.raises(StoreNotFound, match=r"it has no store.json"):
        ActivationStore(tmp_path)
    document = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps(document | {"schema_version": 9}))
    with pytest.raises(SchemaVersionError, match=r"schema version 9; this release reads version 1. Install a release"):
        ActivationStore(store)


def test_damaged_plan_and_commit_are_named(store: Path) -> None:
    commit = store / "commits/part-00000.json"
    good = commit.read_bytes()
    commit.write_bytes(good[:50])
    with pytest.raises(ManifestInvalid, match=r"part-00000.json is not a commit .*Delete it and run extract again"):
        ActivationStore(store)
    commit.write_bytes((store / "commits/part-00001.json").read_bytes())
    with pytest.raises(ManifestInvalid, match="is the commit of part 1"):
        ActivationStore(store)
    commit.write_bytes(good)
    (store / "plan.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ManifestInvalid, match=r"plan\.parquet is not the file that was written"):
        ActivationStore(store)
    (store / "commits/store.json").unlink()
    with pytest.raises(ManifestInvalid, match="cannot be read as the plan"):
        ActivationStore(store)
