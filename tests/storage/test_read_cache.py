"""Reads of a bucket are cached on the disk.

The cache is bounded, checked and shared by processes; each block is fetched once.
"""

import os
import pickle
import random
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.errors import OptionInvalid
from moa_data.storage import read_cache
from moa_data.storage.backend import open_path
from moa_data.storage.commit import FileRecord
from moa_data.storage.object_store import ObjectStore
from moa_data.storage.paths import RemotePath
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read_cache import ReadCache, RemoteFile, cache_at, fetch_ranges
from moa_data.storage.schema import kv_field, tokens_field
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.object_stores import copy_up
from moa_data.tests.kit.stores import flip, make_recipe

N_BYTES = 1000
FILES = {name: random.Random(name).randbytes(N_BYTES) for name in ("a", "b", "c")}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_cache, "BLOCK_BYTES", 100)
    monkeypatch.delenv("MOA_DATA_CACHE_DIR", raising=False)


class Reader:
    """Reads pieces of FILES through a cache like those of a bucket, and records the fetches."""

    url = "s3://bucket"

    def __init__(self, cache: ReadCache) -> None:
        self.cache, self.fetched = cache, list[tuple[str, int, int]]()
        bucket: Any = self
        record = FileRecord(N_BYTES, 0)
        self.files = {name: RemoteFile(RemotePath(bucket, name), record, cache) for name in FILES}

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[memoryview]:
        self.fetched += ranges
        return [memoryview(FILES[name][start:stop]) for name, start, stop in ranges]

    def __call__(self, *pieces: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        """Read the pieces and check them; return the ranges that were fetched for that."""
        before = len(self.fetched)
        found = fetch_ranges([(self.files[name], start, stop) for name, start, stop in pieces])
        assert [bytes(each) for each in found] == [
            FILES[name][start:stop] for name, start, stop in pieces
        ]
        return self.fetched[before:]


def blocks(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "blocks").rglob("*") if path.is_file())


def test_what_was_read_is_not_fetched_again(tmp_path: Path) -> None:
    read = Reader(ReadCache(tmp_path, 1 << 20))
    assert read(("a", 150, 320), ("b", 0, 5), ("a", 310, 400)) == [
        ("a", 100, 200), ("a", 200, 300), ("a", 300, 400), ("b", 0, 100),
    ]  # fmt: skip
    assert not read(("a", 100, 400), ("b", 99, 100))
    assert read(("a", 950, 1100), ("a", 400, 400)) == [("a", 900, 1000)]
    assert not Reader(pickle.loads(pickle.dumps(read.cache)))(("a", 150, 400), ("b", 3, 50))


def test_a_damaged_block_is_fetched_again(tmp_path: Path) -> None:
    read = Reader(ReadCache(tmp_path, 1 << 20))
    read(("a", 0, 300))
    whole, torn, empty = blocks(tmp_path)
    flip(whole)
    torn.write_bytes(torn.read_bytes()[:-10])
    empty.write_bytes(b"")
    assert len(read(("a", 0, 300))) == 3
    assert not read(("a", 0, 300))


def test_the_folder_stays_small_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    read = Reader(ReadCache(tmp_path, 1040))  # room for ten blocks with their checksums
    for at in range(0, 1000, 100):
        read(("a", at, at + 100))
        os.utime(max(blocks(tmp_path), key=lambda path: path.stat().st_mtime), (at, at))
    assert not read(("a", 0, 100))
    for at in range(0, 500, 100):
        assert read(("b", at, at + 100))
        assert sum(path.stat().st_size for path in blocks(tmp_path)) <= 1040
    assert not read(("a", 0, 100), ("b", 0, 500))  # This marks the blocks as used.
    assert read(("a", 100, 200))
    nothing = Reader(ReadCache(tmp_path / "none", 50))
    assert nothing(("a", 0, 10))
    assert nothing(("a", 0, 10))


def test_a_folder_that_cannot_be_written_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    read = Reader(ReadCache(tmp_path / "file" / "cache", 1000))
    assert read(("a", 0, 150))
    assert read(("a", 0, 150))


def read_in_turns(folder: Path) -> None:
    """Read all files through a cache with room for half of them."""
    read = Reader(ReadCache(folder, 1500))
    for turn in range(30):
        read(("abc"[turn % 3], 10 * turn, 10 * turn + 250))


def test_threads_and_processes_share_a_folder(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from moa_data.storage import read_cache
        from moa_data.tests.storage import test_read_cache as tests
        read_cache.BLOCK_BYTES = 100
        print("ready", flush=True)
        tests.read_in_turns(Path(sys.argv[1]))
    """)
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        read_in_turns(tmp_path)
    assert other.returncode == 0
    assert sum(path.stat().st_size for path in blocks(tmp_path)) <= 1500
    read = Reader(ReadCache(tmp_path / "threads", 1500))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: read(("abc"[n % 3], 7 * n, 7 * n + 130)), range(100)))
    # A thread's count misses the blocks that other threads are writing at that moment.
    assert sum(path.stat().st_size for path in blocks(tmp_path / "threads")) <= 1500 + 8 * 104


def test_a_second_epoch_of_a_store_asks_for_nothing(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = (tokens_field(), kv_field(4, 2, 8))
    local = make_recipe((70, 3, 200), fields).write(tmp_path / "local")
    remote = copy_up(local, f"{s3}/store")
    asked: list[tuple[str, int, int]] = []
    real = ObjectStore.read_ranges

    def noting(bucket: ObjectStore, ranges: Sequence[tuple[str, int, int]]) -> list[memoryview]:
        asked.extend(ranges)
        return real(bucket, ranges)

    monkeypatch.setattr(ObjectStore, "read_ranges", noting)
    monkeypatch.setattr(read_cache, "BLOCK_BYTES", 4000)
    monkeypatch.setenv("MOA_DATA_CACHE_DIR", str(tmp_path / "cache"))
    with ActivationStore(local) as store:
        expected = store.read_batch(range(len(store)), list(store.fields))
    for epoch in range(2):
        with ActivationStore(remote) as store:
            assert isinstance(store.path, RemotePath)
            found = pickle.loads(pickle.dumps(store)).read_batch(
                range(len(store)), list(store.fields)
            )
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)
        assert bool(asked) is (epoch == 0)
        asked.clear()
    # Another store under the same names has other checksums, and so other blocks.
    make_recipe((71, 3, 200), fields).write(tmp_path / "other")
    remote.bucket.delete(remote.names_below())
    copy_up(tmp_path / "other", f"{s3}/store")
    with (
        ActivationStore(open_path(str(remote))) as store,
        ActivationStore(tmp_path / "other") as other,
    ):
        np.testing.assert_array_equal(store.read(0, "kv"), other.read(0, "kv"))


def test_sizes_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_at() is None
    monkeypatch.setenv("MOA_DATA_CACHE_DIR", "~/cache")
    monkeypatch.setenv("MOA_DATA_CACHE_GB", "2.5")
    cache = cache_at()
    assert cache is not None
    assert (cache.folder, cache.max_bytes) == (Path("~/cache").expanduser(), 2_500_000_000)
    assert (found := cache_at("/elsewhere", 1.0)) is not None
    assert (found.folder, found.max_bytes) == (Path("/elsewhere"), 1_000_000_000)
    for text in ("much", "0", "-1", "nan"):
        monkeypatch.setenv("MOA_DATA_CACHE_GB", text)
        with raises_naming(OptionInvalid, "MOA_DATA_CACHE_GB", f"'{text}'"):
            cache_at()
