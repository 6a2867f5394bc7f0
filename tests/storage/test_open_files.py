"""Readers hold few files open, whatever the number of parts and threads."""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from moa_data.errors import StoreDamaged
from moa_data.storage import backend
from moa_data.storage.backend import LocalFile
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.tests.kit.stores import Recipe, make_recipe, read_tree

N_PARTS = 32


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recipe]:
    """A store of many parts, each with one sequence."""
    recipe = make_recipe((3,) * N_PARTS, part_tokens=64)
    assert recipe.manifest.n_parts == N_PARTS
    return recipe.write(tmp_path_factory.mktemp("many") / "store"), recipe


@contextmanager
def file_limit(n_files: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def n_open(store: Path) -> int:
    """Descriptors of this process that lie in a store."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the listing's own
    return sum(link.startswith(str(store)) for link in links)


def test_a_file_that_is_in_use_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_OPEN_FILES", 1)
    for k in range(4):
        (tmp_path / f"{k}").write_bytes(bytes([k]) * 100)
    files = [LocalFile(tmp_path / f"{k}") for k in range(4)]
    used = files[0]._file.take()
    out = np.empty(100, np.uint8)
    for k in (1, 2, 3):
        assert files[k].read_into(0, out) == 100
        assert (out == k).all()
    assert os.pread(used, 1, 0) == b"\0"
    files[0]._file.give_back()
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


def test_a_file_that_vanished_while_it_was_closed(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MAX_OPEN_FILES", 1)
    store = recipe.write(tmp_path / "store")
    with ActivationStore(store) as reader:
        for field in ("tokens", "response_mask"):
            reader.read(0, field)
        (store / "parts/tokens/c.0").unlink()
        with pytest.raises(StoreDamaged, match=r"tokens/c\.0 is missing"):
            reader.read(0, "tokens")


def test_too_few_descriptors_for_anything_delete_nothing(many: tuple[Path, Recipe]) -> None:
    """Where not even one file more can be opened, that is said, and no part is called damaged."""
    store, _ = many
    whole = read_tree(store)
    script = """
import os, resource, sys
from moa_data.errors import StorageUnavailable
from moa_data.storage.write.repair import plan_repair
from moa_data.storage.read.verify import verify_store

verify_store(sys.argv[1])  # whatever is imported late is there now
n_open = max(int(fd) for fd in os.listdir("/dev/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (n_open, n_open))
for check in (verify_store, plan_repair):
    try:
        check(sys.argv[1])
    except StorageUnavailable as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, str(store)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("could not be checked (Too many open files)") == 2, done.stdout
    assert read_tree(store) == whole
    assert verify_store(store).ok
