"""A network that resets, tears, delays and lists too little loses and damages nothing.

A store written through it equals the store on a disk, byte for byte. Reads through it return the
values that were written.
"""

import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moa_data.errors import StorageUnavailable
from moa_data.storage.backend import open_path
from moa_data.storage.paths import RemotePath
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import hidden_field, tokens_field
from moa_data.tests.kit.faults import Faults, faulty
from moa_data.tests.kit.object_stores import (
    Seaweed,
    empty_prefix,
    environment,
    read_remote_tree,
    use,
)
from moa_data.tests.kit.stores import Recipe, check_reads_equal, make_recipe, read_tree

_log = logging.getLogger(__name__)  # shown by --log-cli-level=INFO
RECIPE = make_recipe((70, 3, 64), (tokens_field(), hidden_field("last", 16)))


def write_together(location: str, recipe: Recipe, n_writers: int) -> None:
    """Let several writers write one store, each with connections of its own.

    A writer starts again when the network fails.
    """

    def work(_: int) -> None:
        for _ in range(20):
            try:
                recipe.write(open_path(location), shares=True)
                return
            except StorageUnavailable:
                continue
        raise AssertionError("twenty runs were not enough")

    with ThreadPoolExecutor(n_writers) as pool:
        list(pool.map(work, range(n_writers)))


def check(location: str, local: Path) -> None:
    """Compare a store with the one on the disk.

    The values and the bytes of all files in its commits must be equal.
    """
    store = open_path(location)
    assert isinstance(store, RemotePath)
    report = verify_store(store)
    assert report.ok, report.damages
    assert report.n_pending_parts == 0
    check_reads_equal(store, local)
    # Killed writers leave uploads, and lost answers leave records. `extract` deletes them when they
    # are old.
    store.bucket.delete(name for name in store.names_below() if name.endswith(".partial"))
    assert read_remote_tree(store) == read_tree(local)


def run_faults(endpoint: str, recipe: Recipe, local: Path, seed: int) -> Counter[str]:
    """Write and read one store through a proxy; return the faults that occurred."""
    faults = Faults(seed)
    with use(endpoint):
        location = empty_prefix(endpoint)
    with faulty(endpoint, faults) as proxy, use(proxy), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOA_DATA_REMOTE_TIMEOUT_S", "20")
        write_together(location, recipe, 2)
        check_reads_equal(open_path(location), local)
    with use(endpoint):
        check(location, local)
    return faults.counts


@pytest.mark.parametrize("n_faults", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_writers_and_readers_behind_faults(
    moto_server: str, recipe: Recipe, tmp_path: Path, n_faults: int
) -> None:
    local, counts = recipe.write(tmp_path / "local"), Counter[str]()
    n_stores = 0
    while sum(counts.values()) < n_faults:
        n_stores += 1
        counts += run_faults(moto_server, recipe, local, seed=n_stores)
    _log.info("%d faults in %d stores: %s", sum(counts.values()), n_stores, dict(counts))
    assert len(counts) >= (2 if n_faults < 200 else 7)


WRITER = textwrap.dedent("""
    import sys
    from moa_data.storage.backend import open_path
    from moa_data.tests.storage.test_faults import RECIPE

    print("ready", flush=True)
    sys.stdin.readline()
    RECIPE.write(open_path(sys.argv[1]), shares=True)
""")


def start_writers(location: str, endpoint: str, n: int) -> list[subprocess.Popen[str]]:
    """Start processes that write a store. They begin together once all are ready."""
    command = [sys.executable, "-c", WRITER, location]
    variables = {**os.environ, **environment(endpoint), "MOA_DATA_REMOTE_TIMEOUT_S": "60"}
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables)
        for _ in range(n)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return processes


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_writers_and_the_server_are_killed(recipe: Recipe, tmp_path: Path) -> None:
    """Kill processes 50 times.

    Most kills hit one of two racing writers. After every fifth of them, the server is killed too
    and restarted.
    """
    local, chance = recipe.write(tmp_path / "local"), random.Random(7)
    server = Seaweed(tmp_path / "seaweed")
    server.start()
    try:
        with use(server.endpoint):
            location, n_stores, n_killed = (
                f"{empty_prefix(server.endpoint)}/store-0",
                0,
                Counter[str](),
            )
            while sum(n_killed.values()) < 50:
                writers = start_writers(location, server.endpoint, 2)
                time.sleep(chance.uniform(0.0, 1.2))
                if writers[0].poll() is None:
                    writers[0].send_signal(signal.SIGKILL)
                    n_killed["writer"] += 1
                if n_killed["writer"] % 5 == 4 and writers[1].poll() is None:
                    server.kill()
                    n_killed["server"] += 1
                    time.sleep(1.0)
                    server.start()
                if chance.random() < 0.5 and writers[1].poll() is None:
                    writers[1].send_signal(signal.SIGKILL)
                    n_killed["writer"] += 1
                for writer in writers:
                    writer.communicate(timeout=600)
                codes = {writer.returncode for writer in writers}
                assert codes <= {0, -signal.SIGKILL}
                # If one writer has finished, the store is complete, even if the other one was
                # killed.
                if 0 in codes:
                    check(location, local)
                    n_stores += 1
                    location = f"{location.rpartition('/')[0]}/store-{n_stores}"
            write_together(location, recipe, 1)
            check(location, local)
            _log.info("killed: %s; %d stores whole", dict(n_killed), n_stores + 1)
    finally:
        server.kill()
