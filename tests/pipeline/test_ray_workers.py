"""Workers as tasks of Ray: lost ones are started anew, but not for ever, and the store gets the bytes of one process.

Ray is stood in for here; test_extract_ray.py has the real one.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moa_data.errors import OptionInvalid, TargetError, WorkerError
from moa_data.pipeline import workers
from moa_data.pipeline.config import ExtractConfig, ScaleSettings, core_share
from moa_data.pipeline.plan import build_plan
from moa_data.pipeline.report import PartProgress, Timings
from moa_data.pipeline.workers import WorkOrder, ray_task, run_on_ray, workers_that_fit
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.stores import make_recipe, read_tree
from moa_data.tests.kit.workers import Script, order_for, write_bundle


class RayError(Exception):
    """Stands for what Ray raises where a worker is lost."""


class FakeTask:
    """A function as Ray calls it: a reference runs it when it is waited for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def options(self, **_: Any) -> "FakeTask":
        return self

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        return lambda: self._function(*arguments)


class FakeRay:
    """Runs each task in this process when it is waited for."""

    exceptions = SimpleNamespace(RayError=RayError)
    remote = FakeTask

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: Any) -> None: ...

    def shutdown(self) -> None: ...

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "other", "Resources": {}}, {"NodeID": "node", "Resources": {"CPU": 2.0, "GPU": 4.0}}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "node")

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references, []

    def get(self, reference: Any) -> Any:
        return reference()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(workers, "_RAY_LOOK_EVERY_S", 0.0)
    return fake


class Cluster:
    """A store of nine parts that tasks write, without a target."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.patch = path, monkeypatch
        self.recipe = make_recipe((70, 3, 130, 64, 1, 33, 129, 90, 150, 65), part_tokens=128)
        self.started: list[str] = []

    def run(self, at_part: Callable[[int, int], None] = lambda number, part: None) -> tuple[Timings, list[str]]:
        script = Script(self.recipe, at_part)

        def work(order: WorkOrder) -> Timings:
            self.started.append(order.attempt)
            return script.work(order)

        self.patch.setattr(workers, "run_worker", work)
        with StoreWriter.create_or_resume(self.path, self.recipe.manifest, self.recipe.plan, shares=True) as store:
            scale = ScaleSettings(engine="ray", workers=2)
            progress = PartProgress(store, None)
            found = run_on_ray(order_for(self.path, store.attempt), store, scale, None, progress)
            store.sweep()
        return found

    def whole(self) -> dict[str, bytes]:
        path = self.recipe.write(self.path.with_name("whole"))
        with StoreWriter.create_or_resume(path, self.recipe.manifest, self.recipe.plan) as writer:
            write_bundle(writer)
        return read_tree(path)

    def n_commits(self) -> int:
        return len(list((self.path / "commits").glob("part-*.json")))


@pytest.fixture
def cluster(tmp_path: Path, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path / "store", monkeypatch)


def test_tasks_write_the_bytes_of_one_process(cluster: Cluster) -> None:
    timings, lost = cluster.run()
    assert (timings.n_parts, timings.n_tokens, lost) == (9, cluster.recipe.manifest.n_tokens, [])
    assert read_tree(cluster.path) == cluster.whole()


def test_a_lost_worker_is_started_anew(cluster: Cluster) -> None:
    def lose(number: int, part: int) -> None:
        if cluster.n_commits() == 4 and len(cluster.started) == 1:
            (cluster.path / "parts" / "kv" / f"c.0.{cluster.started[0]}.partial").touch()
            raise RayError("The worker died because of:\nSIGKILL\n")

    def raises_through(error: Exception) -> Exception:
        raise error

    cluster.patch.setattr(workers, "portable", raises_through)
    _, lost = cluster.run(lose)
    assert lost == ["SIGKILL; started anew"]
    assert read_tree(cluster.path) == cluster.whole()
    assert not list(cluster.path.rglob("*.partial"))


def test_workers_that_are_lost_again_and_again_end_the_run_in_one_line(cluster: Cluster) -> None:
    def lose(number: int, part: int) -> None:
        if part == 4:
            raise RayError("The worker died because of:\nModuleNotFoundError: No module named 'moa_data'\n")

    def raises_through(error: Exception) -> Exception:
        raise error

    cluster.patch.setattr(workers, "portable", raises_through)
    with pytest.raises(WorkerError, match="ModuleNotFoundError") as caught:
        cluster.run(lose)
    assert "\n" not in str(caught.value)
    assert cluster.n_commits() == 8  # the survivors' parts
    cluster.run()
    assert read_tree(cluster.path) == cluster.whole()


def test_an_error_of_a_worker_ends_the_run(cluster: Cluster) -> None:
    def fail(number: int, part: int) -> None:
        raise TargetError("kv of layer 2")

    with pytest.raises(TargetError, match="kv of layer 2"):
        cluster.run(fail)
    assert len(cluster.started) == 1


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
def test_workers_share_a_machine_by_what_they_need(needs: dict[str, float], n: int) -> None:
    assert workers_that_fit({"CPU": 16.0, "GPU": 8.0}, needs) == n


@pytest.mark.usefixtures("ray")
def test_a_worker_computes_on_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[WorkOrder]()

    def work(order: WorkOrder) -> Timings:
        told.append(order)
        return Timings()

    monkeypatch.setattr(workers, "run_worker", work)
    for needs, encode_threads in (({"CPU": 1.0}, None), ({"CPU": 2.0}, 3)):
        ray_task(order_for(Path("store")), needs, encode_threads)
    assert [(item.n_threads, item.n_encode_threads) for item in told] == [
        (core_share(2), core_share(2)), (core_share(1), 3)
    ]  # fmt: skip


def test_ray_that_is_missing_or_taken_is_said_in_one_line(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find(name, *a))
    arguments = ["--model", config.model, "--dataset", config.dataset, "--out", config.out, "--engine", "ray"]
    for command in ("extract", "plan"):
        refused(run(command, *arguments), "pip install 'moa-data[ray]'")
    assert not Path(config.out).exists()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    with pytest.raises(OptionInvalid), workers._connected(ScaleSettings(engine="ray"), 1):
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "auto"},
        {"gpus_per_worker": 0},
        {"engine": "ray", "address": "ray://head:10001"},
    ],
)
def test_options_that_are_refused(config: ExtractConfig, changes: dict[str, Any]) -> None:
    with pytest.raises(OptionInvalid):
        config.replaced(**changes)


def test_options_of_ray(config: ExtractConfig) -> None:
    scale = config.replaced(engine="ray", workers=64, address="auto", gpus_per_worker=0.5).scale
    assert (scale.workers, scale.n_local_workers, scale.is_alone) == (64, 1, False)
    assert not config.replaced(engine="ray").scale.is_alone


def test_gpus_of_workers_need_not_be_on_this_machine(config: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    on_gpus = config.replaced(engine="ray", device="auto", gpus_per_worker=1)
    plan = build_plan(on_gpus)
    assert (plan.device, plan.compute_dtype, plan.manifest.extraction["device"]) == ("cuda", "bfloat16", "cuda")
    assert build_plan(on_gpus.replaced(gpus_per_worker=0)).device == "cpu"
    with pytest.raises(OptionInvalid, match="disagree"):
        build_plan(on_gpus.replaced(device="cpu"))
    with pytest.raises(OptionInvalid, match="learns from forwards on this machine"):
        build_plan(on_gpus.replaced(codec="transform:1"))
