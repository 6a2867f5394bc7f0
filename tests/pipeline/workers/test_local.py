"""Workers of one machine: whatever becomes of them, the store gets the bytes of one process, each part once."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moa_data.errors import WorkerError
from moa_data.pipeline.workers import local
from moa_data.pipeline.workers.local import LocalWorkers
from moa_data.pipeline.workers.tally import Tally
from moa_data.pipeline.workers.work import BUNDLE, pieces_of
from moa_data.storage.care.verify import verify_store
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.kills import die
from moa_data.tests.kit.stores import Recipe, make_recipe, read_tree
from moa_data.tests.kit.workers import Script, order_for

Told = list[tuple[int, int, str]]


@pytest.fixture
def recipe() -> Recipe:
    """Nine parts of one or two sequences."""
    return make_recipe((70, 3, 130, 64, 1, 33, 129, 90, 150, 65), part_tokens=128)


@pytest.fixture
def whole(tmp_path: Path, recipe: Recipe) -> dict[str, bytes]:
    path = recipe.write(tmp_path / "whole")
    with StoreWriter.create_or_resume(path, recipe.manifest, recipe.plan) as writer, writer.target() as folder:
        (folder / "config.json").write_text("{}")
    return read_tree(path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_TELL_EVERY_S", 0.01)


class Directed:
    """A store that scripted workers write."""

    def __init__(self, path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.recipe, self.patch, self.told = path, recipe, monkeypatch, Told()

    def run(self, n_workers: int, at_part: Callable[[int, int], None] = lambda number, part: None) -> LocalWorkers:
        """Direct workers until all is written."""
        self.patch.setattr(local._Process, "start", Script(self.recipe, at_part).start)
        with self.opened() as store:
            tally = Tally(store, self.recipe.plan, lambda *told: self.told.append(told))
            workers = LocalWorkers([order_for(self.path, number) for number in range(n_workers)], store, tally)
            try:
                workers.run()
                tally.finish()
                tally.finish()
            finally:
                self.pids = [worker.process.pid for worker in workers._workers]
            store.sweep()
        return workers

    def opened(self) -> StoreWriter:
        return StoreWriter.create_or_resume(self.path, self.recipe.manifest, self.recipe.plan, shares=True)


@pytest.fixture
def directed(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Directed:
    return Directed(tmp_path / "store", recipe, monkeypatch)


@pytest.mark.parametrize("n_workers", [1, 2, 5, 20])
def test_any_number_of_workers_writes_the_bytes_of_one(
    directed: Directed, whole: dict[str, bytes], n_workers: int
) -> None:
    workers = directed.run(n_workers)
    assert read_tree(directed.path) == whole
    assert workers.lost == []
    n_tokens = directed.recipe.manifest.n_tokens
    assert workers.timings.n_tokens == n_tokens  # no part was computed twice
    counts = [done for done, total, message in directed.told if message.startswith("extract")]
    assert counts == sorted(counts)
    assert directed.told[-1] == (n_tokens, n_tokens, f"extract 9/9 parts, {n_workers} workers")
    assert directed.told[0][2] == f"load the target, {n_workers} workers"


def test_a_slow_worker_does_less_and_holds_nobody_up(directed: Directed, whole: dict[str, bytes]) -> None:
    """The first one waits in its part until the others have done all the rest."""

    def wait(number: int, part: int) -> None:
        commits = directed.path / "commits"
        while number == 0 and len(list(commits.glob("part-*.json"))) < 8:
            time.sleep(0.005)

    workers = directed.run(3, wait)
    assert read_tree(directed.path) == whole
    assert workers.timings.n_tokens == directed.recipe.manifest.n_tokens


@pytest.mark.parametrize("n_killed", [1, 2])
def test_parts_of_killed_workers_are_done_by_the_others(
    directed: Directed, whole: dict[str, bytes], n_killed: int
) -> None:
    workers = directed.run(3, lambda number, part: die() if number < n_killed else None)
    assert read_tree(directed.path) == whole
    assert workers.lost == ["signal SIGKILL, which the kernel sends where memory runs out"] * n_killed
    assert directed.told[-1][2] == f"extract 9/9 parts, {3 - n_killed} of 3 workers left"
    counts = [done for done, _, message in directed.told if message.startswith("extract")]
    assert counts == sorted(counts)


def test_when_no_worker_is_left_the_same_command_goes_on(directed: Directed, whole: dict[str, bytes]) -> None:
    def die_late(number: int, part: int) -> None:
        if part > 4 + number:
            os.write(2, b"\nTraceback\nRuntimeError: the link fell off\n\n")
            die()

    with pytest.raises(WorkerError, match=r"of 2; the last one ended by signal SIGKILL.*the link fell off.*go on"):
        directed.run(2, die_late)
    assert verify_store(directed.path).n_parts >= 5
    assert not list(directed.path.rglob("*.partial"))
    directed.run(2)
    assert read_tree(directed.path) == whole


def test_an_error_in_a_worker_ends_the_run(directed: Directed, whole: dict[str, bytes]) -> None:
    def fail(number: int, part: int) -> None:
        if part == 3:
            raise ValueError("kv of layer 2 is not finite")

    with pytest.raises(ValueError, match="kv of layer 2"):
        directed.run(2, fail)
    for pid in directed.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(directed.path.rglob("*.partial"))
    directed.run(1)
    assert read_tree(directed.path) == whole


def test_ctrl_c_ends_the_workers_and_leaves_no_file_of_theirs(
    directed: Directed, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        if len(list((directed.path / "commits").glob("part-*.json"))) >= 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalWorkers, "_tell", interrupt)
        with pytest.raises(KeyboardInterrupt):
            directed.run(2, lambda number, part: time.sleep(0.05))
    for pid in directed.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(directed.path.rglob("*.partial"))
    directed.run(2)
    assert read_tree(directed.path) == whole


def test_what_another_run_commits_meanwhile_is_not_done_again(directed: Directed, whole: dict[str, bytes]) -> None:
    n_tokens = directed.recipe.manifest.n_tokens
    with directed.opened() as other:

        def write_the_others(number: int, part: int) -> None:
            for pending in other.pending_parts():
                if pending != part:
                    directed.recipe.write_part(other, pending)

        workers = directed.run(1, write_the_others)
        assert workers.timings.n_tokens < n_tokens / 4
        assert directed.told[-1] == (n_tokens, n_tokens, "extract 9/9 parts, 1 workers")
        assert other.sweep()
    assert read_tree(directed.path) == whole


def test_a_second_run_takes_the_parts_in_another_order(directed: Directed) -> None:
    with directed.opened(), directed.opened() as second:
        assert pieces_of(second)[0] == BUNDLE
        assert sorted(pieces_of(second)) == [BUNDLE, *range(9)]
        assert pieces_of(second) != [BUNDLE, *range(9)]
