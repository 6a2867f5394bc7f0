"""A worker as Ray calls it writes what one process does, returns one small row, and leaves what others are at."""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moa_data.errors import WorkerError
from moa_data.pipeline.config import ExtractConfig, core_share
from moa_data.pipeline.extract import _open_store, _with_texts, _work_order, extract
from moa_data.pipeline.forwards.parts import Outcome, Timings
from moa_data.pipeline.plan import build_plan
from moa_data.pipeline.workers.ray_actor import PIECE, REPORT, LotReport, RayWorker, actors_that_fit
from moa_data.pipeline.workers.work import BUNDLE, Worker, WorkOrder
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.stores import read_tree

MOST_ROW_BYTES = 1024
"""A token's activations are 512 bytes in these tests, and 131,072 in those of an 8B target."""


class _Context:
    """What Ray tells an actor about itself."""

    was_current_actor_reconstructed = False

    def get_actor_id(self) -> str:
        return "ab12" * 8

    def get_node_id(self) -> str:
        return "node"


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor's surroundings, without Ray, which takes seconds to import."""
    nodes = [{"NodeID": "other", "Resources": {}}, {"NodeID": "node", "Resources": {"CPU": 2.0, "GPU": 4.0}}]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=_Context, nodes=lambda: nodes))


@pytest.fixture
def order(config: ExtractConfig) -> WorkOrder:
    """The order of an extraction whose store was begun."""
    plan = build_plan(config, with_weights=True)
    with _open_store(plan, shares=True) as store:
        return _work_order(_with_texts(plan, store), store)


def report_of(worker: RayWorker, *pieces: int) -> LotReport:
    batch = worker({PIECE: np.array(pieces)})
    assert list(batch) == [REPORT]
    (text,) = batch[REPORT]
    assert isinstance(text, str)
    return LotReport.of({REPORT: text})


def test_lots_give_the_bytes_of_one_process_and_rows_of_some_hundred_bytes(
    config: ExtractConfig, order: WorkOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load = list[str](), Worker.start

    def start(order: WorkOrder, attempt: str) -> Worker:
        loaded.append(order.model)
        return load(order, attempt)

    monkeypatch.setattr(Worker, "start", start)
    whole = config.replaced(out=str(tmp_path / "whole"))
    n_parts = extract(whole).n_parts
    worker = RayWorker(order, "run", {"CPU": 1.0, "GPU": 0.0}, None)
    first = report_of(worker, BUNDLE, 0, 1)
    assert first.outcomes == dict.fromkeys((BUNDLE, 0, 1), Outcome.WRITTEN)
    assert first.worker.startswith("run-ab12ab12ab12-")
    last = report_of(worker, *range(1, n_parts))
    assert last.outcomes == {1: Outcome.FOUND} | dict.fromkeys(range(2, n_parts), Outcome.WRITTEN)
    assert last.timings.n_tokens == extract(whole).n_tokens
    assert last.timings.extract_s > first.timings.extract_s > 0
    assert (last.worker, last.is_restarted, last.error) == (first.worker, False, b"")
    assert loaded == [order.model]  # once an actor
    assert len(last.row()[REPORT][0]) < MOST_ROW_BYTES
    extract(config)  # has nothing to do but to write the card and to clean, as no actor holds the store
    assert read_tree(config.out) == read_tree(whole.out)


def test_parts_that_another_run_writes_are_left_to_it(order: WorkOrder) -> None:
    with StoreWriter.join(order.store) as other:
        part = other.part(1)
        assert report_of(RayWorker(order, "run", {"CPU": 1.0}, None), 0, 1).outcomes == {0: Outcome.WRITTEN}
        part.discard()


def test_what_an_earlier_life_of_the_actor_left_is_deleted(order: WorkOrder) -> None:
    folder = Path(order.store) / "parts" / "kv"
    left, others = folder / "c.0.run-ab12ab12ab12-77ff.partial", folder / "c.0.run-cd34cd34cd34-77ff.partial"
    for path in (left, others):
        path.touch()
    report_of(RayWorker(order, "run", {"CPU": 1.0}, None), 0)
    assert (left.exists(), others.exists()) == (False, True)


def test_work_that_ends_one_life_after_another_ends_the_run(order: WorkOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> Worker:
        raise KeyboardInterrupt  # stands for a kill: no row is returned

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "start", end)
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                report_of(RayWorker(order, "run", {"CPU": 1.0}, None), 3, 4)
    error: Any = pickle.loads(report_of(RayWorker(order, "run", {"CPU": 1.0}, None), 3, 4).error)
    assert isinstance(error, WorkerError)
    assert "5 times in a row at the same work (parts 3, 4)" in str(error)
    assert report_of(RayWorker(order, "another", {"CPU": 1.0}, None), 0).outcomes == {0: Outcome.WRITTEN}
    assert not list(Path(order.store).glob("another-*"))


def test_an_error_comes_as_it_was_raised(order: WorkOrder) -> None:
    weights = next(Path(order.model).glob("*.safetensors"))
    content = weights.read_bytes()
    try:
        weights.write_bytes(content[:-1] + b"\x55")
        report = report_of(RayWorker(order, "run", {"CPU": 1.0}, None), 0)
    finally:
        weights.write_bytes(content)
    assert report.outcomes == {}
    error: Any = pickle.loads(report.error)
    assert isinstance(error, WorkerError)
    assert "identities.target.weights_sha256" in str(error)


def test_a_report_is_the_same_after_its_row() -> None:
    report = LotReport("w", "host", True, {3: Outcome.LATE, BUNDLE: Outcome.FOUND}, Timings(n_tokens=7), b"\x80error")
    assert LotReport.of({REPORT: report.row()[REPORT][0]}) == report


@pytest.mark.parametrize(
    ("needs", "n"),
    [
        ({"CPU": 1.0, "GPU": 0.0}, 16),
        ({"CPU": 1.0, "GPU": 1.0}, 8),
        ({"CPU": 4.0, "GPU": 0.5}, 4),
        ({"CPU": 32.0}, 1),
        ({"CPU": 1.0, "GPU": 1.0, "TPU": 1.0}, 1),
    ],
)
def test_actors_share_a_machine_by_what_they_need(needs: dict[str, float], n: int) -> None:
    assert actors_that_fit({"CPU": 16.0, "GPU": 8.0}, needs) == n


def test_an_actor_computes_on_its_share_of_the_cores(order: WorkOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[WorkOrder]()

    def start(order: WorkOrder, attempt: str) -> Any:
        told.append(order)
        raise ValueError

    monkeypatch.setattr(Worker, "start", start)
    for needs, encode_threads in (({"CPU": 1.0}, None), ({"CPU": 2.0}, 3)):
        report_of(RayWorker(order, "run", needs, encode_threads), 0)
    assert [(item.n_threads, item.n_encode_threads) for item in told] == [
        (core_share(2), core_share(2)), (core_share(1), 3)
    ]  # fmt: skip
