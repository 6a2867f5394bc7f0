"""Extraction with several processes ends in the bytes of one, whoever is killed, and whoever else extracts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.storage.read.verify import verify_store
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.command import error_line, refused, run
from moa_data.tests.kit.stores import read_tree


def children(pid: int | None = None) -> list[int]:
    """Process ids of the children of a process, of this one by default."""
    pid = pid or os.getpid()
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def elsewhere(config: ExtractConfig, name: str = "whole") -> ExtractConfig:
    return config.replaced(out=str(Path(config.out).with_name(name)))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers by /proc")
def test_a_worker_is_killed_and_the_store_has_the_bytes_of_one_process(config: ExtractConfig) -> None:
    extract(elsewhere(config))
    before, killed, told = set(children()), list[int](), list[str]()

    def kill_one(done: int, total: int, message: str) -> None:
        told.append(message)
        if message.startswith("extract") and not killed:
            killed.append(max(set(children()) - before))
            os.kill(killed[0], signal.SIGKILL)

    report = extract(config.replaced(workers=2), progress=kill_one)
    assert killed
    assert read_tree(config.out) == read_tree(elsewhere(config).out)
    assert (report.n_parts_done, report.timings.n_late) == (report.n_parts, 0)
    assert "lost         1 of 2 workers (signal SIGKILL" in report.describe()
    assert any("1 of 2 workers left" in message for message in told)
    (record,) = [json.loads(path.read_text()) for path in (Path(config.out) / "runs").glob("*.json")]
    assert len(record["lost_workers"]) == 1
    assert set(children()) == before


def test_more_workers_than_a_machine_can_have_are_refused(config: ExtractConfig) -> None:
    arguments = ["extract", "--model", config.model, "--dataset", config.dataset, "--out", config.out]
    refused(run(*arguments, "--workers", "0"), "--workers is '0'")
    refused(run(*arguments, "--workers", "1:2"), "--workers is '1:2'")


class Commands:
    """Runs `moa-data extract` on one store, in processes of their own."""

    def __init__(self, config: ExtractConfig) -> None:
        self.out = Path(config.out)
        self.arguments = [
            "extract", "--model", config.model, "--dataset", config.dataset, "--out", config.out, "--device", "cpu",
            "--max-length", "128", "--target-layers", "1", "--part-tokens", "512", "--batch-tokens", "256",
        ]  # fmt: skip

    def start(self, n_workers: int) -> subprocess.Popen[str]:
        environment: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "moa_data", *self.arguments, "--workers", str(n_workers)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def wait_for_parts(self, n_parts: int, running: subprocess.Popen[str]) -> None:
        while self.n_committed() < n_parts and running.poll() is None:
            time.sleep(0.01)

    def n_committed(self) -> int:
        return len(list((self.out / "commits").glob("part-*.json")))


@pytest.fixture
def commands(config: ExtractConfig, tmp_path: Path) -> Commands:
    """Extractions of about 60 parts, and a whole store to compare with."""
    many = config.replaced(dataset=str(write_jsonl(tmp_path / "many.jsonl", random_chats(300))))
    extract(elsewhere(many))
    return Commands(many)


def is_whole(commands: Commands) -> bool:
    return read_tree(commands.out) == read_tree(commands.out.with_name("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("heeded_signals")
def test_a_signal_ends_all_processes_in_one_line(commands: Commands, number: signal.Signals) -> None:
    running = commands.start(2)
    commands.wait_for_parts(3, running)
    running.send_signal(number)
    _, said = running.communicate(timeout=120)
    assert "parts are committed in" in error_line(running.returncode, said, 128 + number)
    assert not list(commands.out.rglob("*.partial"))
    running = commands.start(2)
    out, said = running.communicate(timeout=300)
    assert running.returncode == 0, said
    assert "workers      2" in out
    assert is_whole(commands)


@pytest.mark.slow
def test_workers_end_when_the_command_is_killed(commands: Commands) -> None:
    running = commands.start(2)
    commands.wait_for_parts(3, running)
    workers = children(running.pid)
    assert len(workers) == 2
    running.kill()
    running.communicate()
    again = commands.start(2)  # at once: the orphans may still be writing
    _, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    deadline_s = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert verify_store(commands.out).ok
    third = commands.start(1)  # has nothing to do but to sweep
    third.communicate(timeout=300)
    assert is_whole(commands)


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [(1, 1), (2, 2, 2)])
def test_commands_at_once_share_the_parts(commands: Commands, n_workers: tuple[int, ...]) -> None:
    running = [commands.start(n) for n in n_workers]
    outputs = [one.communicate(timeout=500) for one in running]
    assert [one.returncode for one in running] == [0] * len(n_workers), outputs
    assert is_whole(commands)
    records = [json.loads(path.read_text()) for path in (commands.out / "runs").glob("*.json")]
    n_parts = commands.n_committed()
    assert sum(record["n_parts_done"] for record in records) == n_parts
    # Such small parts: a process has up to four in flight, which the others take when nothing else is left.
    assert sum(record["n_parts_late"] for record in records) <= 4 * sum(n_workers)
