"""Folders and object stores fulfil one contract. Servers may refuse requests."""

import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from moa_data.errors import StorageUnavailable, StoreNotFound
from moa_data.storage import backend, object_store
from moa_data.storage.backend import (
    MISSING,
    LocalFile,
    backend_of,
    download,
    open_path,
)
from moa_data.storage.commit import FileRecord, check_size
from moa_data.storage.object_store import ObjectStore
from moa_data.storage.paths import RemotePath, StorePath
from moa_data.storage.requests import REQUEST_BYTES
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.object_stores import empty_prefix, environment, use


class BackendContract:
    """The contract of all backends.

    A subclass has a fixture ``location``: an empty folder or prefix.
    """

    def test_what_is_put_is_read_and_listed(self, location: StorePath) -> None:
        contents = {"a": b"", "b/c": b"text", "b/c.d/e f+ü": bytes(range(256))}
        for name, data in contents.items():
            backend_of((location / name).parent).make_folder()
            backend_of(location / name).put(data)
            assert backend_of(location / name).read() == data
            assert (location / name).stat().st_size == len(data)
        backend_of(location / "b/c").put(b"another")
        assert backend_of(location / "b/c").read(7) == b"another"
        with raises_naming(ValueError, 7, 6):
            backend_of(location / "b/c").read(6)
        sizes = {"a": 0, "b/c": 7, "b/c.d/e f+ü": 256}
        assert {
            name: (location / name).stat().st_size for name in backend_of(location).names_below()
        } == sizes
        listed = backend_of(location).listed_sizes()
        assert listed == (sizes if isinstance(location, RemotePath) else {})
        backend_of(location / "later").put(b"12345")  # The list is older than this file.
        for name, n_bytes in (("later", 5), ("b/c", 7)):
            check_size(location / name, FileRecord(n_bytes, 0), listed.get(name))
        assert backend_of(location).names_in() == ["a", "b", "later"]
        assert backend_of(location / "nothing").names_in() == []
        assert backend_of(location / "b").exists()
        assert not backend_of(location / "b/c.").exists()

    def test_what_is_not_there_is_not_found(self, location: StorePath) -> None:
        for ask in (
            lambda path: backend_of(path).read(),
            lambda path: path.stat(),
            lambda path: backend_of(path).replace(b"", b"x"),
        ):
            with pytest.raises(MISSING):
                ask(location / "nothing")
        backend_of(location / "x").put(b"1")
        for _ in range(2):
            backend_of(location).remove_files(["x"])
        assert not backend_of(location / "x").exists()

    def test_a_file_is_read_in_blocks(self, location: StorePath) -> None:
        backend_of(location / "file").put(data := os.urandom(100_000))
        assert b"".join(backend_of(location / "file").blocks(30_000)) == data

    def test_one_of_many_creates(self, location: StorePath) -> None:
        assert backend_of(location / "once").put_if_absent(b"first")
        assert not backend_of(location / "once").put_if_absent(b"second")
        # The client repeats the call if the answer to the first one is lost.
        assert backend_of(location / "once").put_if_absent(b"first")
        assert backend_of(location / "once").read() == b"first"
        for key in range(2):
            path = location / f"key-{key}"
            with ThreadPoolExecutor(8) as pool:
                won = list(
                    pool.map(
                        lambda n, path=path: backend_of(path).put_if_absent(b"by %d" % n), range(8)
                    )
                )
            assert won.count(True) == 1
            assert backend_of(path).read() == b"by %d" % won.index(True)
        assert len(backend_of(location).names_in()) == 3  # No half-written file is left.

    def test_a_file_is_replaced_where_it_holds_what_is_expected(self, location: StorePath) -> None:
        backend_of(location / "document").put(b"old")
        assert not backend_of(location / "document").replace(b"another", b"new")
        assert backend_of(location / "document").replace(b"old", b"new")
        assert backend_of(location / "document").read() == b"new"

    def test_a_put_is_seen_whole_or_not_at_all(self, location: StorePath) -> None:
        versions = [bytes([n]) * 50_000 for n in range(8)]
        backend_of(location / "document").put(versions[0])

        def look(n: int) -> bytes:
            with suppress(ValueError):
                return backend_of(location / "document").read()
            return versions[0]

        with ThreadPoolExecutor(4) as pool:
            seen = pool.map(look, range(16))
            for version in versions:
                backend_of(location / "document").put(version)
        assert set(seen) <= set(versions)
        assert backend_of(location / "document").read() == versions[-1]


class TestFolder(BackendContract):
    @pytest.fixture
    def location(self, tmp_path: Path) -> Path:
        return tmp_path

    def test_a_file_system_without_hard_links(
        self, location: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*paths: object) -> None:
            raise PermissionError

        monkeypatch.setattr(os, "link", refuse)
        self.test_a_file_is_replaced_where_it_holds_what_is_expected(location)
        assert backend_of(location / "once").put_if_absent(b"first")
        assert not backend_of(location / "once").put_if_absent(b"second")


class ObjectStoreContract(BackendContract):
    """The contract of object stores, in addition to that of all backends."""

    def test_ranges_end_with_the_file(self, location: RemotePath) -> None:
        location.bucket.put("file", data := os.urandom(100_000))
        ranges = [(99_990, 100_000), (0, 5), (3, 9), (99_998, 100_020), (200_000, 200_001)]
        found = location.bucket.read_ranges([("file", start, stop) for start, stop in ranges])
        assert [bytes(each) for each in found] == [data[start:stop] for start, stop in ranges]
        with pytest.raises(FileNotFoundError):
            location.bucket.read_ranges([("nothing", 0, 1)])

    def test_one_of_many_replaces(self, location: RemotePath) -> None:
        store = location.bucket
        store.put("document", b"new")
        with ThreadPoolExecutor(8) as pool:
            won = list(
                pool.map(lambda n: store.replace("document", b"new", b"by %d" % n), range(8))
            )
        assert won.count(True) == 1
        assert store.read("document") == b"by %d" % won.index(True)

    def test_uploads_and_copies_in_blocks(
        self, location: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, data = location.bucket, os.urandom(REQUEST_BYTES + 12345)
        step = 1 << 20
        (tmp_path / "file").write_bytes(data)
        store.put("a b/c", tmp_path / "file")
        ranges = [(REQUEST_BYTES - 7, REQUEST_BYTES + 7), (100, 100 + step)]
        found = store.read_ranges([("a b/c", *each) for each in ranges])
        assert [bytes(each) for each in found] == [data[start:stop] for start, stop in ranges]
        store.put("target", b"old")
        store.copy("a b/c", "target", len(data))
        assert store.read("target") == data
        monkeypatch.setattr(object_store, "COPY_BYTES", 1000)
        store.copy("a b/c", "d/e f", len(data))
        assert store.read("d/e f") == data
        for n_bytes in (10, 2000):
            with pytest.raises(FileNotFoundError):
                store.copy("nothing", "target", n_bytes)

    def test_a_path_is_pickled_by_its_url(self, location: RemotePath, tmp_path: Path) -> None:
        location.bucket.put("parts/kv/c.1", b"shard")
        again = pickle.loads(pickle.dumps(location / "parts"))
        assert again == location / "parts"
        assert again.names_below() == ["kv/c.1"]
        download(again, tmp_path, again.names_below())
        assert (tmp_path / "kv/c.1").read_bytes() == b"shard"


class TestMoto(ObjectStoreContract):
    @pytest.fixture
    def location(self, moto_server: str) -> Iterator[RemotePath]:
        with use(moto_server):
            yield RemotePath(ObjectStore(f"{empty_prefix(moto_server)}/some/prefix"))

    def test_a_bucket_that_does_not_exist_is_no_empty_one(self, location: RemotePath) -> None:
        with raises_naming(StorageUnavailable, "s3://nowhere/store"):
            ObjectStore("s3://nowhere/store").read("store.json")

    def test_a_fork_of_a_process_that_has_connected_refuses(self, location: RemotePath) -> None:
        location.bucket.put("x", b"1")
        child = os.fork()
        if not child:
            try:
                location.bucket.read("x")
            except StorageUnavailable as error:
                os._exit(7 if "spawn" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.slow
class TestSeaweed(ObjectStoreContract):
    @pytest.fixture
    def location(self, seaweed_server: str) -> Iterator[RemotePath]:
        with use(seaweed_server):
            yield RemotePath(ObjectStore(f"{empty_prefix(seaweed_server)}/some/prefix"))


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOA_DATA_REMOTE_TIMEOUT_S", "0.1")
    with use("http://127.0.0.1:9"):
        store = ObjectStore("s3://bucket/store")
        for ask in (
            store.read,
            store.size,
            store.list_files,
            lambda name: store.put_if_absent(name, b""),
        ):
            with raises_naming(StorageUnavailable, "AWS_ENDPOINT_URL") as caught:
                ask("store.json")
            assert "\n" not in str(caught.value)


WAIT = """
from moa_data.errors import StorageUnavailable
from moa_data.storage import backend, object_store

object_store.NOTICE_S = 0.05
for _ in range(2):
    try:
        object_store.ObjectStore("s3://bucket/store").size("store.json")
    except StorageUnavailable:
        pass
"""


def test_a_server_that_does_not_answer_is_logged_once() -> None:
    variables = {
        **os.environ,
        **environment("http://127.0.0.1:9"),
        "MOA_DATA_REMOTE_TIMEOUT_S": "0.3",
    }
    run = subprocess.run(
        [sys.executable, "-c", WAIT], env=variables, capture_output=True, text=True, check=True
    )
    assert run.stderr.count("s3://bucket/store") == 1


def test_urls_of_all_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for url in ("s3://bucket/a/store", "gs://bucket/a/store", "az://container/a/store"):
        path = open_path(url + "/")
        assert str(path) == url
        assert isinstance(path, RemotePath)
        assert isinstance(path.bucket, ObjectStore)
        assert getattr(path.bucket.connection, "prefix", None) == "a/store"
    with pytest.raises(StoreNotFound):
        open_path("hf://datasets/me/store")


def test_ranges_are_merged_where_they_lie_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "GAP_BYTES", 10)
    monkeypatch.setattr(object_store, "REQUEST_BYTES", 100)
    ranges = [("b", 0, 5), ("a", 50, 60), ("a", 0, 40), ("a", 75, 80), ("a", 85, 101)]
    assert list(object_store._grouped(ranges)) == [[2, 1], [3, 4], [0]]


def test_a_file_that_is_in_use_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_OPEN_FILES", 1)
    monkeypatch.setattr(backend, "_opened", deque())
    for k in range(4):
        (tmp_path / f"{k}").write_bytes(bytes([k]) * 100)
    files = [LocalFile(tmp_path / f"{k}") for k in range(4)]
    used = files[0]._open()
    out = np.empty(100, np.uint8)
    for k in (1, 2, 3):
        assert files[k].read_into(0, out) == 100
        assert (out == k).all()
    assert os.pread(used.fd, 1, 0) == b"\0"
    del used
    stop = threading.Event()

    def keep_reading(k: int) -> int:
        own, n_reads = np.empty(100, np.uint8), 0
        while not stop.is_set() or not n_reads:
            files[k].read_into(0, own)
            assert (own == k).all()
            n_reads += 1
        return n_reads

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(keep_reading, k % 4) for k in range(8)]
        stop.wait(0.3)
        stop.set()
        assert all(job.result() for job in jobs)
    assert sum(file._descriptor is not None for file in files) <= 1
