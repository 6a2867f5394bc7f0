"""What every backend must do; the tests of each inherit it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from moa_data.storage.backend import (
    MISSING,
    blocks_of,
    exists,
    listed_sizes,
    make_folder,
    names_below,
    names_in,
    put,
    put_if_absent,
    read_file,
    remove_files,
    replace_file,
)
from moa_data.storage.commit import FileRecord, find_size_damage
from moa_data.storage.paths import RemotePath, StorePath


class BackendContract:
    """A subclass gives a fixture ``place``, a folder or prefix that holds nothing."""

    def test_what_is_put_is_read_and_listed(self, place: StorePath) -> None:
        contents = {"a": b"", "b/c": b"text", "b/c.d/e f+ü": bytes(range(256))}
        for name, data in contents.items():
            make_folder((place / name).parent)
            put(place / name, data)
            assert read_file(place / name) == data
            assert (place / name).stat().st_size == len(data)
        put(place / "b/c", b"another")
        assert read_file(place / "b/c", 7) == b"another"
        with pytest.raises(ValueError, match="7 bytes, at most 6 are read"):
            read_file(place / "b/c", 6)
        sizes = {"a": 0, "b/c": 7, "b/c.d/e f+ü": 256}
        assert {name: (place / name).stat().st_size for name in names_below(place)} == sizes
        listed = listed_sizes(place)
        assert listed == (sizes if isinstance(place, RemotePath) else {})
        put(place / "later", b"12345")  # the list is older
        assert not find_size_damage(place, {"later": FileRecord(5, 0), "b/c": FileRecord(7, 0)}, listed)
        assert names_in(place) == ["a", "b", "later"]
        assert names_in(place / "nothing") == []
        assert exists(place / "b")
        assert not exists(place / "b/c.")

    def test_what_is_not_there_is_not_found(self, place: StorePath) -> None:
        for ask in (read_file, lambda path: path.stat(), lambda path: replace_file(path, b"", b"x")):
            with pytest.raises(MISSING):
                ask(place / "nothing")
        put(place / "x", b"1")
        for _ in range(2):
            remove_files(place / "x")
        assert not exists(place / "x")

    def test_a_file_is_read_in_blocks(self, place: StorePath) -> None:
        put(place / "file", data := os.urandom(100_000))
        assert b"".join(blocks_of(place / "file", 30_000)) == data

    def test_one_of_many_creates(self, place: StorePath) -> None:
        assert put_if_absent(place / "once", b"first")
        assert not put_if_absent(place / "once", b"second")
        assert put_if_absent(place / "once", b"first")  # as if the answer to the first call had been lost
        assert read_file(place / "once") == b"first"
        for key in range(4):
            path = place / f"key-{key}"
            with ThreadPoolExecutor(8) as pool:
                won = list(pool.map(lambda n, path=path: put_if_absent(path, b"by %d" % n), range(8)))
            assert won.count(True) == 1
            assert read_file(path) == b"by %d" % won.index(True)
        assert len(names_in(place)) == 5  # nothing half-written is left

    def test_a_file_is_replaced_where_it_holds_what_is_expected(self, place: StorePath) -> None:
        put(place / "document", b"old")
        assert not replace_file(place / "document", b"another", b"new")
        assert replace_file(place / "document", b"old", b"new")
        assert read_file(place / "document") == b"new"

    def test_a_put_is_seen_whole_or_not_at_all(self, place: StorePath) -> None:
        versions = [bytes([n]) * 50_000 for n in range(8)]
        put(place / "document", versions[0])

        def look(n: int) -> bytes:
            with suppress(ValueError):
                return read_file(place / "document")
            return versions[0]

        with ThreadPoolExecutor(4) as pool:
            seen = pool.map(look, range(16))
            for version in versions:
                put(place / "document", version)
        assert set(seen) <= set(versions)
        assert read_file(place / "document") == versions[-1]
