"""Workers on one store: whatever becomes of them, it gets the bytes of one process, and each part is computed once."""

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moa_data.errors import OptionInvalid, StoreMismatch, WorkerError
from moa_data.pipeline import workers
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan
from moa_data.pipeline.report import PartProgress, Timings
from moa_data.pipeline.texts import keep_texts
from moa_data.pipeline.workers import device_orders, pending_in_turn, portable, run_processes, run_worker
from moa_data.storage.read.verify import verify_store
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.kills import die
from moa_data.tests.kit.stores import Recipe, make_recipe, read_tree
from moa_data.tests.kit.workers import Script, order_for, write_bundle

Told = list[tuple[int, int, str]]


@pytest.fixture
def recipe() -> Recipe:
    """Nine parts of one or two sequences."""
    return make_recipe((70, 3, 130, 64, 1, 33, 129, 90, 150, 65), part_tokens=128)


@pytest.fixture
def whole(tmp_path: Path, recipe: Recipe) -> dict[str, bytes]:
    path = recipe.write(tmp_path / "whole")
    with StoreWriter.create_or_resume(path, recipe.manifest, recipe.plan) as writer:
        write_bundle(writer)
    return read_tree(path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_LOOK_EVERY_S", 0.01)


class Crew:
    """A store that scripted workers write."""

    def __init__(self, path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.recipe, self.patch, self.told = path, recipe, monkeypatch, Told()
        self.pids: list[int] = []

    def run(
        self, n_workers: int, at_part: Callable[[int, int], None] = lambda number, part: None
    ) -> tuple[Timings, list[str]]:
        """Run workers until all is written."""
        script = Script(self.recipe, at_part)
        self.pids = script.pids
        self.patch.setattr(workers, "start_process", script.start)
        with self.opened() as store:
            progress = PartProgress(store, lambda *told: self.told.append(told))
            order = order_for(self.path, store.attempt)
            found = run_processes(device_orders(order, "cpu", n_workers), store, progress)
            progress.tell(found[0], looks=True)
            store.sweep()
        return found

    def opened(self) -> StoreWriter:
        return StoreWriter.create_or_resume(self.path, self.recipe.manifest, self.recipe.plan, shares=True)

    def check_gone(self) -> None:
        for pid in self.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert not list(self.path.rglob("c.*.partial"))


@pytest.fixture
def crew(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Crew:
    return Crew(tmp_path / "store", recipe, monkeypatch)


@pytest.mark.parametrize("n_workers", [1, 2, 5, 20])
def test_any_number_of_workers_writes_the_bytes_of_one(crew: Crew, whole: dict[str, bytes], n_workers: int) -> None:
    timings, lost = crew.run(n_workers)
    assert read_tree(crew.path) == whole
    assert lost == []
    assert timings.n_parts == 9
    n_tokens = crew.recipe.manifest.n_tokens
    counts = [done for done, total, _ in crew.told]
    assert counts == sorted(counts)
    assert crew.told[-1][:2] == (n_tokens, n_tokens)


def test_a_slow_worker_does_less_and_holds_nobody_up(crew: Crew, whole: dict[str, bytes]) -> None:
    """The first one waits in its part until the others have done all the rest."""

    def wait(number: int, part: int) -> None:
        commits = crew.path / "commits"
        while number == 0 and len(list(commits.glob("part-*.json"))) < 8:
            time.sleep(0.005)

    timings, _ = crew.run(3, wait)
    assert read_tree(crew.path) == whole
    assert timings.n_tokens == crew.recipe.manifest.n_tokens


@pytest.mark.parametrize("n_killed", [1, 2])
def test_parts_of_killed_workers_are_done_by_the_others(crew: Crew, whole: dict[str, bytes], n_killed: int) -> None:
    _, lost = crew.run(3, lambda number, part: die() if number < n_killed else None)
    assert read_tree(crew.path) == whole
    assert set(lost) == {"signal SIGKILL, which the kernel sends where memory runs out"}
    assert len(lost) <= n_killed  # on a busy machine one may come when all is done


def test_when_no_worker_is_left_the_same_command_goes_on(crew: Crew, whole: dict[str, bytes]) -> None:
    def die_late(number: int, part: int) -> None:
        if len(list((crew.path / "commits").glob("part-*.json"))) > 4:
            os.write(2, b"\nTraceback\nRuntimeError: the link fell off\n\n")
            die()

    with pytest.raises(WorkerError, match="the link fell off"):
        crew.run(2, die_late)
    assert verify_store(crew.path).n_parts >= 5
    crew.check_gone()
    crew.run(2)
    assert read_tree(crew.path) == whole


def test_an_error_in_a_worker_ends_the_run(crew: Crew, whole: dict[str, bytes]) -> None:
    def fail(number: int, part: int) -> None:
        if part == 3:
            raise ValueError("kv of layer 2 is not finite")
        time.sleep(0.05)

    with pytest.raises(ValueError, match="kv of layer 2"):
        crew.run(2, fail)
    crew.check_gone()
    crew.run(1)
    assert read_tree(crew.path) == whole


def test_ctrl_c_ends_the_workers_and_leaves_no_file_of_theirs(
    crew: Crew, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        if len(list((crew.path / "commits").glob("part-*.json"))) >= 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartProgress, "tell", interrupt)
        with pytest.raises(KeyboardInterrupt):
            crew.run(2, lambda number, part: time.sleep(0.05))
    crew.check_gone()
    crew.run(2)
    assert read_tree(crew.path) == whole


def test_parts_of_another_run_are_left_to_it_unless_it_stands_still(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crew.opened() as first, StoreWriter.join(crew.path) as other:
        held, stuck = other.part(3), other.part(5)
        turns = pending_in_turn(first)
        assert [next(turns) for _ in range(8)] == [0, 1, 2, 4, 6, 7, 8, None]
        held.discard()
        assert next(turns) == 3
        monkeypatch.setattr(workers, "_PATIENCE_S", 0.0)
        assert [part for part in turns if part is not None] == [5]
        stuck.discard()


def test_workers_begin_with_shares_of_their_own(crew: Crew) -> None:
    with crew.opened() as first:
        assert list(pending_in_turn(first)) == list(range(9))
        for index in range(2):
            with StoreWriter.join(crew.path) as worker:
                turns = [part for part in pending_in_turn(worker, index, 2) if part is not None]
                own = set(range(9)[index::2])
                assert set(turns[: len(own)]) == own
                assert sorted(turns) == list(range(9))
        with crew.opened() as second:
            assert list(pending_in_turn(second)) != list(range(9))


def test_a_worker_writes_what_one_process_does(config: ExtractConfig, tmp_path: Path) -> None:
    whole = config.replaced(out=str(tmp_path / "whole"))
    n_parts = extract(whole).n_parts
    plan = build_plan(config, with_weights=True)
    with StoreWriter.create_or_resume(plan.store, plan.manifest, plan.table, shares=True) as store:
        keep_texts(store.path, plan.sequences, plan.texts_origin)
    order = replace(order_for(Path(config.out)), model=config.model)
    assert run_worker(order).n_parts == n_parts
    assert run_worker(replace(order, attempt="another")).n_parts == 0
    extract(config)  # has nothing to do but to write the card
    assert read_tree(config.out) == read_tree(whole.out)


def test_each_worker_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(device: str, n_workers: int) -> list[str]:
        return [order.device for order in device_orders(order_for(Path("store")), device, n_workers)]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert devices("cpu", 3) == ["cpu"] * 3
    assert devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices("cuda:2", 1) == ["cuda:2"]
    for device, n_workers in (("cuda", 5), ("cuda:1", 2), ("mps", 2)):
        with pytest.raises(OptionInvalid):
            devices(device, n_workers)


def test_an_error_crosses_processes_as_it_was() -> None:
    for error in (ValueError("x"), StoreMismatch("store", {"a": (1, 2)})):
        copied = pickle.loads(pickle.dumps(portable(error)))
        assert str(error) in str(copied)
