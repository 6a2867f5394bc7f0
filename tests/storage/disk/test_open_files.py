"""Readers hold few files open: as many as the process can spare, whatever the number of parts and threads."""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from moa_data.errors import StoreDamaged
from moa_data.storage.care.verify import verify_store
from moa_data.storage.disk import open_files
from moa_data.storage.disk.files import LocalFile
from moa_data.storage.read.store import ActivationStore
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


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_open_files_are_bounded_by_the_limit_of_the_process(many: tuple[Path, Recipe]) -> None:
    store, recipe = many
    with ActivationStore(store) as reader:
        n_allowed = 64 + len(os.listdir("/proc/self/fd"))
        with file_limit(n_allowed), ThreadPoolExecutor(8) as pool:
            for name in reader.fields:
                batch = reader.read_batch(range(N_PARTS), name, n_threads=4, decoded=False)
                assert 0 < n_open(store) <= n_allowed // 4
            jobs = [pool.submit(reader.read, i, "hidden/last") for _ in range(3) for i in range(N_PARTS)]
            rows = reader.sequences.to_pylist()
            for job, row in zip(jobs, rows * 3, strict=True):
                np.testing.assert_array_equal(job.result(), recipe.values(reader.fields["hidden/last"], row))
            assert 0 < n_open(store) <= n_allowed // 4
        assert len(batch) == 1
        reader.close()
        assert n_open(store) == 0


def test_where_none_is_left_idle_files_are_closed(many: tuple[Path, Recipe], tmp_path: Path) -> None:
    """Something else took what the reader was to have."""
    store, _ = many
    with ActivationStore(store) as reader:
        reader.read_batch(range(N_PARTS), "tokens")
        taken = []
        with file_limit(max(int(fd) for fd in os.listdir("/proc/self/fd")) + 20):
            with suppress(OSError):
                while True:
                    taken.append(os.open(tmp_path, os.O_RDONLY))
            for fd in (taken.pop(), taken.pop()):
                os.close(fd)
            try:
                assert reader.read_batch(range(N_PARTS), "hidden/last")["hidden/last"].shape == (N_PARTS, 3, 16)
            finally:
                for fd in taken:
                    os.close(fd)


def test_a_file_that_is_in_use_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MAX_OPEN_FILES", 1)
    for k in range(4):
        (tmp_path / f"{k}").write_bytes(bytes([k]) * 100)
    files = [LocalFile(tmp_path / f"{k}") for k in range(4)]
    used = files[0]._handle.take()
    out = np.empty(100, np.uint8)
    for k in (1, 2, 3):
        assert files[k].read_into(0, out) == 100
        assert (out == k).all()
    assert os.pread(used, 1, 0) == b"\0"
    files[0]._handle.give_back()
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
    monkeypatch.setattr(open_files, "MAX_OPEN_FILES", 1)
    store = recipe.write(tmp_path / "store")
    with ActivationStore(store) as reader:
        for field in ("tokens", "response_mask"):
            reader.read(0, field)
        (store / "parts/tokens/c.0").unlink()
        with pytest.raises(StoreDamaged, match=r"tokens/c\.0 is missing"):
            reader.read(0, "tokens")


@pytest.mark.parametrize("command", [("verify",), ("repair", "--drop")])
def test_commands_at_64_descriptors(many: tuple[Path, Recipe], command: tuple[str, ...]) -> None:
    store, _ = many
    whole = read_tree(store)
    done = subprocess.run(
        [sys.executable, "-m", "moa_data", command[0], str(store), *command[1:]],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "whole" in done.stdout
    assert read_tree(store) == whole


def test_too_few_descriptors_for_anything_delete_nothing(many: tuple[Path, Recipe]) -> None:
    """Where not even one file more can be opened, that is said, and no part is called damaged."""
    store, _ = many
    whole = read_tree(store)
    script = """
import os, resource, sys
from moa_data.errors import StorageUnavailable
from moa_data.storage.care.repair import plan_repair
from moa_data.storage.care.verify import verify_store

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
