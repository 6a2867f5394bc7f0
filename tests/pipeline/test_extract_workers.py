"""Extraction by several processes, or with Ray on two machines of one host.

It gives the bytes of one process. Workers that are lost or added meanwhile, and other commands on
the same store, do not change that.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.command import error_line
from moa_data.tests.kit.models import write_target
from moa_data.tests.kit.serving import wait_for
from moa_data.tests.kit.stores import read_tree

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray causes many warnings.
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers by /proc"),
]
_WAIT_S = 1200.0
_SETTINGS: dict[str, Any] = {
    "device": "cpu", "max_length": 128, "target_layers": 1, "part_tokens": 512, "batch_tokens": 256,
}  # fmt: skip
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
    # These machines share their cores: threads that spin would take cores from the others.
    "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip


@contextmanager
def kept_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces in the process that starts a machine."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


class Machines:
    """A Ray cluster on this host: a head without CPUs, and further machines of one core each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        common = {"object_store_memory": 80 << 20, "include_dashboard": False}
        with kept_sigterm():
            self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
        self._nodes: list[Any] = []
        self.address = str(self._cluster.address)

    def have(self, n_nodes: int) -> None:
        """Add or kill machines until there are ``n_nodes``, not counting the head."""
        while len(self._nodes) > n_nodes:
            self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)
        while len(self._nodes) < n_nodes:
            with kept_sigterm():
                self._nodes.append(self._cluster.add_node(num_cpus=1, object_store_memory=80 << 20))

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        made = Machines()
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, chats for about 80 parts, and the complete store that one process makes of them."""
    folder = tmp_path_factory.mktemp("ray")
    target, chats = (
        write_target(folder / "target"),
        write_jsonl(folder / "chats.jsonl", random_chats(400)),
    )
    extract(
        ExtractConfig.of(
            model=str(target), dataset=str(chats), out=str(folder / "whole"), **_SETTINGS
        )
    )
    return folder


class Runs:
    """Runs `moa-data extract` on one store, each time in a new process."""

    def __init__(self, room: Path, out: Path, machines: Machines | None = None) -> None:
        self.room, self.out, self._is_ray = room, out, machines is not None
        options = [f"--{name.replace('_', '-')}={value}" for name, value in _SETTINGS.items()]
        files = [
            "--model",
            str(room / "target"),
            "--dataset",
            str(room / "chats.jsonl"),
            "--out",
            str(out),
        ]
        ray = [] if machines is None else ["--engine", "ray", "--address", machines.address]
        self._command = [sys.executable, "-m", "moa_data", "extract", *files, *options, *ray]

    def start(self, n_workers: int = 2, n_parts: int = 0) -> subprocess.Popen[str]:
        """Start a command, and wait until ``n_parts`` parts are committed."""
        running = subprocess.Popen(
            [*self._command, "--workers", str(n_workers)], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
            env={**os.environ, **_ENVIRONMENT},
        )  # fmt: skip
        wait_for(lambda: len(self.commits()) >= n_parts or running.poll() is not None, _WAIT_S)
        assert running.poll() is None, running.communicate()
        return running

    def finish(self, running: subprocess.Popen[str], before: dict[str, int]) -> tuple[str, str]:
        """Wait for a command; check that it gives one process's bytes and keeps earlier commits."""
        out, said = running.communicate(timeout=_WAIT_S)
        assert running.returncode == 0, said
        assert read_tree(self.out) == read_tree(self.room / "whole")
        after = self.commits()
        assert {name: after[name] for name in before} == before
        return out, said

    def workers(self, running: subprocess.Popen[str]) -> list[int]:
        """Return the process ids of the workers.

        They are tasks of Ray that have a store open, or children of the command.
        """
        if self._is_ray:
            return tasks()
        return list(
            map(int, Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split())
        )

    def commits(self) -> dict[str, int]:
        """Return when each part was committed. The time changes if the part is committed again."""
        return {
            path.name: path.stat().st_mtime_ns
            for path in (self.out / "commits").glob("part-*.json")
        }

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.out / "runs").glob("*.json"))]


def tasks() -> list[int]:
    """Return the process ids of Ray tasks that have a store open."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::ray_task"):
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.fixture
def ray_runs(machines: Machines, room: Path, tmp_path: Path) -> Runs:
    machines.have(2)
    wait_for(lambda: not tasks(), _WAIT_S)  # Tasks of the previous test may still run.
    return Runs(room, tmp_path / "store", machines)


@pytest.fixture(params=["processes", "ray"])
def runs(request: pytest.FixtureRequest, room: Path, tmp_path: Path) -> Runs:
    found: Runs = Runs(room, tmp_path / "store")
    return found if request.param == "processes" else request.getfixturevalue("ray_runs")


def test_workers_write_the_bytes_of_one_process(runs: Runs) -> None:
    _, said = runs.finish(runs.start(), {})
    assert "2 workers" in said
    assert "Traceback" not in said
    (record,) = runs.records()
    assert (record["n_parts_done"], record["n_parts_late"], record["lost_workers"]) == (
        len(runs.commits()),
        0,
        [],
    )
    assert "wrote no part" in runs.finish(runs.start(), runs.commits())[0]


def test_a_worker_is_killed(runs: Runs) -> None:
    running = runs.start(n_parts=5)
    before = runs.commits()
    os.kill(runs.workers(running)[0], signal.SIGKILL)
    out, _ = runs.finish(running, before)
    assert len(runs.records()[0]["lost_workers"]) == 1
    assert "lost         1 of 2 workers ended early; " in out


def test_a_machine_is_lost_and_another_one_joins(machines: Machines, ray_runs: Runs) -> None:
    running = ray_runs.start(n_parts=5)
    machines.have(1)
    n_parts = len(ray_runs.commits()) + 5
    wait_for(lambda: len(ray_runs.commits()) >= n_parts, _WAIT_S)
    before = ray_runs.commits()
    machines.have(2)
    ray_runs.finish(running, before)


def test_the_command_is_killed_and_the_same_one_continues(runs: Runs) -> None:
    running = runs.start(n_parts=5)
    workers = runs.workers(running)
    running.kill()
    running.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), _WAIT_S)
    before = runs.commits()
    runs.finish(runs.start(), before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("heeded_signals")
def test_a_signal_ends_the_run_in_one_line(runs: Runs, number: signal.Signals) -> None:
    running = runs.start(n_parts=5)
    running.send_signal(number)
    _, said = running.communicate(timeout=_WAIT_S)
    assert "Finished work is kept" in error_line(running.returncode, said, 128 + number)
    assert not list(runs.out.rglob("c.*.partial"))
    before = runs.commits()
    runs.finish(runs.start(), before)


def test_commands_at_once_share_the_parts(runs: Runs) -> None:
    first, second = runs.start(1), runs.start(1)
    out, said = first.communicate(timeout=_WAIT_S)
    assert first.returncode == 0, (out, said)
    runs.finish(second, {})
    records = runs.records()
    assert sum(record["n_parts_done"] for record in records) == len(runs.commits())
    # With parts this small, a process has up to four in flight. The other one takes them too when
    # no other part is left.
    assert sum(record["n_parts_late"] for record in records) <= 8
    n_tokens = json.loads((runs.out / "store.json").read_text())["n_tokens"]
    assert sum(record["timings"]["n_tokens"] for record in records) == n_tokens
