"""The contract of buckets, on every kind of server that is at hand; and what happens where a server refuses."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moa_data.errors import StorageUnavailable
from moa_data.storage.disk import object_bucket
from moa_data.storage.disk.bucket import bucket_at
from moa_data.storage.disk.files import blocks_of, download, names_in, open_path, sizes_of
from moa_data.storage.disk.object_bucket import ObjectBucket
from moa_data.storage.disk.requests import REQUEST_BYTES
from moa_data.storage.paths import RemotePath
from moa_data.tests.kit.object_stores import empty_place, environment, use


class BucketContract:
    """What every object store must do; a subclass gives a fixture ``bucket`` of an empty one."""

    def test_what_is_put_is_read(self, bucket: ObjectBucket) -> None:
        for name, data in {"a": b"", "b/c": b"text", "b/c.d/e f+ü": bytes(range(256))}.items():
            bucket.put(name, data)
            assert bucket.read(name) == data
            assert bucket.size(name) == len(data)
        bucket.put("b/c", b"another")
        assert bucket.read("b/c", 7) == b"another"
        with pytest.raises(ValueError, match="7 bytes, at most 6 are read"):
            bucket.read("b/c", 6)
        assert {name: entry.n_bytes for name, entry in bucket.find().items()} == {
            "a": 0, "b/c": 7, "b/c.d/e f+ü": 256,
        }  # fmt: skip
        assert set(bucket.find("b")) == {"b/c", "b/c.d/e f+ü"}
        assert not bucket.find("nothing")

    def test_what_is_not_there_is_not_found(self, bucket: ObjectBucket) -> None:
        for ask in (bucket.read, bucket.size, lambda name: bucket.read_ranges([(name, 0, 1)])):
            with pytest.raises(FileNotFoundError, match=f"{bucket.url}/nothing"):
                ask("nothing")
        bucket.put("x", b"1")
        bucket.delete(["x", "nothing"])
        assert not bucket.find()
        with pytest.raises(FileNotFoundError):
            bucket.read("x")

    def test_one_of_many_creates(self, bucket: ObjectBucket) -> None:
        assert bucket.create("once", b"first")
        assert not bucket.create("once", b"second")
        assert bucket.create("once", b"first")  # as if the answer to the first call had been lost
        assert bucket.read("once") == b"first"
        for key in range(4):
            with ThreadPoolExecutor(8) as pool:
                won = list(pool.map(lambda n, key=key: bucket.create(f"key-{key}", b"by %d" % n), range(8)))
            assert won.count(True) == 1
            assert bucket.read(f"key-{key}") == b"by %d" % won.index(True)

    def test_one_of_many_replaces(self, bucket: ObjectBucket) -> None:
        bucket.put("document", b"old")
        assert not bucket.replace("document", b"another", b"new")
        assert bucket.replace("document", b"old", b"new")
        assert bucket.read("document") == b"new"
        with pytest.raises(FileNotFoundError):
            bucket.replace("nothing", b"old", b"new")
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda n: bucket.replace("document", b"new", b"by %d" % n), range(8)))
        assert won.count(True) == 1
        assert bucket.read("document") == b"by %d" % won.index(True)

    def test_ranges_and_pieces(self, bucket: ObjectBucket) -> None:
        data = os.urandom(REQUEST_BYTES * 2 + 12345)
        step = 1 << 20
        bucket.put("big", (data[at : at + step] for at in range(0, len(data), step)))
        assert bucket.size("big") == len(data)
        ranges = [
            (len(data) - 10, len(data)),
            (0, 5),
            (3, 9),
            (REQUEST_BYTES - 7, REQUEST_BYTES + 7),
            (100, 100 + step),
        ]
        bucket.put("small", b"0123456789")
        found = bucket.read_ranges([*(("big", *each) for each in ranges), ("small", 2, 4)])
        assert [bytes(each) for each in found] == [*(data[start:stop] for start, stop in ranges), b"23"]
        # Who reads behind the end of a file gets what there is.
        found = bucket.read_ranges([("small", 8, 20), ("small", 30, 40), ("small", 0, 3)])
        assert [bytes(each) for each in found] == [b"89", b"", b"012"]
        assert b"".join(blocks_of(RemotePath(bucket, "big"), 3 << 20)) == data

    def test_copies(self, bucket: ObjectBucket, monkeypatch: pytest.MonkeyPatch) -> None:
        data = os.urandom(REQUEST_BYTES + 12345)
        bucket.put("a b/c", data)
        bucket.put("target", b"old")
        bucket.copy("a b/c", "target", len(data))
        assert bucket.read("target") == data
        monkeypatch.setattr(object_bucket, "COPY_BYTES", 1000)
        bucket.copy("a b/c", "d/e f", len(data))
        assert bucket.read("d/e f") == data
        for n_bytes in (10, 2000):
            with pytest.raises(FileNotFoundError):
                bucket.copy("nothing", "target", n_bytes)
        assert bucket.read("target") == data

    def test_an_upload_that_stops_leaves_nothing(self, bucket: ObjectBucket) -> None:
        def pieces() -> Iterator[bytes]:
            for _ in range(3):
                yield bytes(REQUEST_BYTES)
            raise RuntimeError("the forward failed")

        with pytest.raises(RuntimeError, match="the forward failed"):
            bucket.put("torn", pieces())
        assert not bucket.find()

    def test_folders_and_files(self, bucket: ObjectBucket, tmp_path: Path) -> None:
        store = RemotePath(bucket)
        for name in ("store.json", "parts/kv/c.0", "parts/kv/c.1"):
            bucket.put(name, name.encode())
        assert names_in(store) == ["parts", "store.json"]
        assert names_in(store / "parts" / "nothing") == []
        assert (store / "parts").exists()
        assert (store / "parts/kv/c.0").exists()
        assert not (store / "parts/k").exists()
        look = sizes_of(store)
        bucket.put("parts/kv/c.2", b"later")
        assert [look(store / "parts/kv" / name).st_size for name in ("c.0", "c.2")] == [12, 5]
        download(store / "parts", tmp_path)
        assert (tmp_path / "kv/c.1").read_bytes() == b"parts/kv/c.1"
        again = pickle.loads(pickle.dumps(store / "parts"))
        assert again == store / "parts"
        assert again.names() == ["kv/c.0", "kv/c.1", "kv/c.2"]


class TestMoto(BucketContract):
    @pytest.fixture
    def endpoint(self, moto_server: str) -> Iterator[str]:
        with use(moto_server):
            yield moto_server

    @pytest.fixture
    def bucket(self, endpoint: str) -> ObjectBucket:
        found = bucket_at(f"{empty_place(endpoint)}/some/prefix")
        assert isinstance(found, ObjectBucket)
        return found

    def test_a_bucket_that_does_not_exist_is_no_empty_one(self, endpoint: str) -> None:
        with pytest.raises(StorageUnavailable, match=r"s3://nowhere/store: there is no such bucket. Make it first"):
            bucket_at("s3://nowhere/store").read("store.json")

    def test_a_fork_of_a_process_that_has_connected_refuses(self, bucket: ObjectBucket) -> None:
        bucket.put("x", b"1")
        child = os.fork()
        if not child:
            try:
                bucket.read("x")
            except StorageUnavailable as error:
                os._exit(7 if "spawn" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.slow
class TestSeaweed(BucketContract):
    @pytest.fixture
    def bucket(self, seaweed_server: str) -> Iterator[ObjectBucket]:
        with use(seaweed_server):
            found = bucket_at(f"{empty_place(seaweed_server)}/some/prefix")
            assert isinstance(found, ObjectBucket)
            yield found


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOA_DATA_REMOTE_TIMEOUT_S", "0.3")
    with use("http://127.0.0.1:9"):
        bucket = bucket_at("s3://bucket/store")
        for ask in (bucket.read, bucket.size, bucket.find, lambda name: bucket.create(name, b"")):
            with pytest.raises(StorageUnavailable, match=r"could not be reached for 0 s .* AWS_ENDPOINT_URL") as caught:
                ask("store.json")
            assert "\n" not in str(caught.value)


WAIT = """
from moa_data.storage.disk import requests
from moa_data.storage.disk.bucket import bucket_at
from moa_data.errors import StorageUnavailable

requests.NOTICE_S = 0.05
for _ in range(2):
    try:
        bucket_at("s3://bucket/store").size("store.json")
    except StorageUnavailable:
        pass
"""


def test_a_server_that_does_not_answer_is_told_of_once() -> None:
    variables = {**os.environ, **environment("http://127.0.0.1:9"), "MOA_DATA_REMOTE_TIMEOUT_S": "0.3"}
    run = subprocess.run([sys.executable, "-c", WAIT], env=variables, capture_output=True, text=True, check=True)
    assert run.stderr.count("s3://bucket/store") == 1


def test_urls_of_all_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for url in ("s3://bucket/a/store", "gs://bucket/a/store", "az://container/a/store"):
        assert url.rstrip("/") == str(open_path(url + "/"))
        store = bucket_at(url)
        assert isinstance(store, ObjectBucket)
        assert getattr(store.store, "prefix", None) == "a/store"


def test_what_fsspec_knows_is_read_only() -> None:
    bucket = bucket_at("memory://nothing/store")
    for ask in (
        lambda: bucket.put("x", b""),
        lambda: bucket.create("x", b""),
        lambda: bucket.replace("x", b"", b""),
        lambda: bucket.copy("x", "y", 1),
        lambda: bucket.delete(["x"]),
    ):
        with pytest.raises(StorageUnavailable, match="memory://nothing/store can be read but not written"):
            ask()


def test_ranges_are_joined_where_they_lie_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_bucket, "GAP_BYTES", 10)
    monkeypatch.setattr(object_bucket, "REQUEST_BYTES", 100)
    ranges = [("b", 0, 5), ("a", 50, 60), ("a", 0, 40), ("a", 75, 80), ("a", 85, 101)]
    assert list(object_bucket._grouped(ranges)) == [[2, 1], [3, 4], [0]]
