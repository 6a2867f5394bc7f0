"""Stores in a bucket: what was copied there reads, verifies and is damaged as on a disk."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from moa_data.errors import StoreDamaged
from moa_data.storage.paths import RemotePath
from moa_data.storage.read import batch as read_batch
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.summary import summarize_store
from moa_data.storage.read.verify import verify_store
from moa_data.tests.kit.object_stores import copy_up
from moa_data.tests.kit.stores import make_recipe

KV_SHARD = "parts/kv/c.1.0.0.0.0"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe().write(tmp_path_factory.mktemp("local") / "store")


@pytest.fixture
def remote(local: Path, s3: str) -> RemotePath:
    return copy_up(local, f"{s3}/a store")


def test_a_copy_in_a_bucket_reads_the_same(local: Path, remote: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_batch, "REMOTE_WINDOW_BYTES", 4000)  # several windows
    with ActivationStore(local) as one, ActivationStore(str(remote)) as other:
        assert other.sequences.equals(one.sequences)
        rows, names = list(range(len(one))), list(one.fields)
        expected = one.read_batch(rows, names)
        for reader in (other, pickle.loads(pickle.dumps(other))):
            found = reader.read_batch(rows, names, n_threads=2)
            for name in names:
                np.testing.assert_array_equal(found[name], expected[name])
        np.testing.assert_array_equal(other.read(2, "kv", [1], slice(3, 80)), one.read(2, "kv", [1], slice(3, 80)))
    assert str(summarize_store(remote).path) == str(remote)
    report = verify_store(remote)
    assert report.ok
    assert report.n_bytes == verify_store(local).n_bytes


def test_damage_is_named(remote: RemotePath) -> None:
    whole = (remote / KV_SHARD).read_bytes()
    reader = ActivationStore(remote)
    i = reader.sequences["part"].to_pylist().index(1)
    remote.backend.put(KV_SHARD, whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(StoreDamaged, match=f"{KV_SHARD}: chunk checksum"):
        reader.read(i, "kv")
    assert [damage.path for damage in verify_store(remote, values=False).damages] == [KV_SHARD]
    remote.backend.put(KV_SHARD, whole[:-50])
    reader.close()
    with pytest.raises(StoreDamaged, match=f"{KV_SHARD} ends inside its index"):
        reader.read(i, "kv")
    with pytest.raises(StoreDamaged, match=rf"{KV_SHARD} has {len(whole) - 50} bytes, its commit says {len(whole)}"):
        ActivationStore(remote)
    remote.backend.delete([KV_SHARD])
    with pytest.raises(StoreDamaged, match=f"{remote}/{KV_SHARD} is missing although it was committed"):
        ActivationStore(remote)
    (damage,) = verify_store(remote).damages
    assert (damage.part, damage.path) == (1, KV_SHARD)
