"""The simulated cluster does what can be computed by hand, and loses no part."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def cluster() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        spec = importlib.util.spec_from_file_location("benchmarks_cluster", FOLDER / "cluster.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)  # where dataclasses look up their annotations
        spec.loader.exec_module(module)
        return module


def test_one_worker_computes_one_part_after_another_and_writes_beside(cluster: ModuleType) -> None:
    job = cluster.Job(n_workers=1, n_parts=8, part_s=10.0, part_bytes=4e9, start_s=100.0)
    assert cluster.Simulation(job).run() == pytest.approx(100 + 8 * 10 + 4 * 4)  # lots of 4, 2, 1, 1
    slow = cluster.Job(n_workers=1, n_parts=4, part_s=1.0, part_bytes=10e9, start_s=0.0)
    assert cluster.Simulation(slow).run() == pytest.approx(1 + 20 + 1 + 10 + 1 + 10)


def test_workers_divide_the_parts_and_share_the_bucket(cluster: ModuleType) -> None:
    job = cluster.Job(n_workers=8, n_parts=800, part_s=10.0, part_bytes=1.0, start_s=0.0)
    assert cluster.Simulation(job).run() == pytest.approx(job.ideal_s, rel=0.02)
    full = cluster.Job(n_workers=8, n_parts=800, part_s=1.0, part_bytes=1e9, start_s=0.0, bucket=2e9)
    assert cluster.Simulation(full).run() == pytest.approx(400, rel=0.05)  # 800 GB at 2 GB/s


def test_a_straggler_keeps_nobody_waiting_for_more_than_its_last_lot(cluster: ModuleType) -> None:
    job = cluster.Job(8, 800, part_s=10.0, part_bytes=1.0, start_s=0.0, slow_every=8, slow_times=5.0)
    even = 800 * 10.0 / (7 + 1 / 5)
    assert even <= cluster.Simulation(job).run() <= even + 2 * 50


def test_preempted_workers_lose_what_is_in_flight_and_no_part(cluster: ModuleType) -> None:
    job = cluster.Job(8, 800, part_s=10.0, part_bytes=1e9, start_s=20.0, preempted_every_s=300.0, replaced_s=30.0)
    run = cluster.Simulation(job)
    seconds = run.run()
    n_lives = sum(worker.life for worker in run._workers)
    assert n_lives > 10
    assert 0 < run.n_lost <= 3 * n_lives
    assert job.ideal_s < seconds < 2 * job.ideal_s
    assert seconds == cluster.Simulation(job).run()
    assert seconds != cluster.Simulation(job, seed=1).run()
