"""Workers on one store: it gets the bytes of one process, and each part is computed once.

That holds whatever happens to the workers. A fake replaces Ray here; test_extract_workers.py uses
the real one.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moa_data.config import resolve
from moa_data.errors import OptionInvalid, WorkerError
from moa_data.pipeline import workers
from moa_data.pipeline.config import ExtractConfig, ScaleSettings, core_share
from moa_data.pipeline.extract import extract, worker_devices
from moa_data.pipeline.plan import build_plan
from moa_data.pipeline.report import PartProgress, Timings
from moa_data.pipeline.workers import (
    SETTINGS_NAME,
    TIMINGS_NAME,
    Worker,
    WorkerProcess,
    outcome_of,
    pending_in_turn,
    ray_task,
    run_on_ray,
    run_processes,
    workers_that_fit,
)
from moa_data.storage.read.verify import verify_store
from moa_data.storage.write.publish import partial_name
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.kills import die
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.stores import Recipe, make_recipe, read_tree
from moa_data.tests.kit.workers import Forked, Script, open_recipe, workers_of, write_bundle

Told = list[tuple[int, int, str]]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """A recipe with nine parts of one or two sequences."""
    return make_recipe((70, 3, 130, 64, 1, 33, 129, 90, 150, 65), part_tokens=128)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> dict[str, bytes]:
    path = recipe.write(tmp_path_factory.mktemp("whole") / "store")
    with StoreWriter.create_or_resume(path, recipe.manifest, recipe.plan) as writer:
        write_bundle(writer)
    return read_tree(path)


class Crew:
    """A store that scripted workers write.

    They are forked processes, or tasks of a fake Ray that runs them in this process.
    """

    def __init__(self, path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.recipe, self.patch, self.told = path, recipe, monkeypatch, Told()
        self.pids: list[int] = []
        self.n_started = 0

    def run(
        self,
        n_workers: int,
        at_part: Callable[[int, int], None] = lambda number, part: None,
        ray: bool = False,
    ) -> tuple[Timings, list[str]]:
        """Run workers until all parts are written."""
        script = Script(self.recipe, at_part)
        self.pids = script.pids

        def task(worker: Worker, needs: Mapping[str, float]) -> tuple[int, str]:
            self.n_started += 1
            return 0, json.dumps(asdict(script.work(worker)))

        self.patch.setattr(workers, "ray_task", task)
        with self.opened() as store:
            progress = progress_to(lambda *told: self.told.append(told)).of("extract", "token")
            crew = workers_of(self.path, n_workers)
            if ray:
                found = run_on_ray(
                    crew, store, ScaleSettings(engine="ray", workers=n_workers), progress
                )
            else:
                found = run_processes(crew, store, progress, script.start)
            store.sweep()
        return found

    def opened(self) -> StoreWriter:
        return open_recipe(self.path, self.recipe)

    def n_commits(self) -> int:
        return len(list((self.path / "commits").glob("part-*.json")))

    def check_gone(self) -> None:
        for pid in self.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


class RayError(Exception):
    """Stands in for the error that Ray raises when a worker is lost."""


class FakeTask:
    """A function with Ray's interface: it runs when somebody waits for its reference."""

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
        return [
            {"NodeID": "other", "Resources": {}},
            {"NodeID": "node", "Resources": {"CPU": 2.0, "GPU": 4.0}},
        ]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "node")

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references, []

    def get(self, reference: Any) -> Any:
        return reference()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workers, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(workers, "_POLL_EVERY_S", 0.01)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for the workers' logs


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay())


@pytest.fixture
def crew(tmp_path: Path, recipe: Recipe, ray: None, monkeypatch: pytest.MonkeyPatch) -> Crew:
    return Crew(tmp_path / "store", recipe, monkeypatch)


@pytest.mark.parametrize(
    ("n_workers", "on_ray"),
    [(2, False), pytest.param(20, False, marks=pytest.mark.slow), (2, True)],
)
def test_any_number_of_workers_writes_the_bytes_of_one(
    crew: Crew, whole: dict[str, bytes], n_workers: int, on_ray: bool
) -> None:
    timings, lost = crew.run(n_workers, ray=on_ray)
    assert read_tree(crew.path) == whole
    n_tokens = crew.recipe.manifest.n_tokens
    assert (timings.n_parts, timings.n_tokens, lost) == (9, n_tokens, [])
    counts = [done for done, total, _ in crew.told]
    assert counts == sorted(counts)
    assert crew.told[-1][:2] == (n_tokens, n_tokens)


@pytest.mark.parametrize("n_killed", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_parts_of_killed_workers_are_done_by_the_others(
    crew: Crew, whole: dict[str, bytes], n_killed: int
) -> None:
    _, lost = crew.run(3, lambda number, part: die() if number < n_killed else None)
    assert read_tree(crew.path) == whole
    # On a busy machine, one may be killed after all parts are written.
    assert 1 <= len(lost) <= n_killed
    for end in lost:
        who, log = end.split(
            ": it was ended by signal SIGKILL, which the kernel sends if memory runs out (log: "
        )
        assert who in ("worker 0", "worker 1")
        assert Path(log.rstrip(")")).is_file()


def test_when_no_worker_is_left_the_same_command_goes_on(
    crew: Crew, whole: dict[str, bytes]
) -> None:
    def die_late(number: int, part: int) -> None:
        if crew.n_commits() > 4:
            os.write(2, b"\nTraceback\nAcceleratorError: the link fell off\n\n")
            os._exit(70)

    with raises_naming(WorkerError, 2, "the link fell off", "`workers`") as caught:
        crew.run(2, die_late)
    assert caught.value.exit_code == 2
    assert verify_store(crew.path).n_parts >= 5
    crew.check_gone()
    crew.run(2)
    assert read_tree(crew.path) == whole


def test_an_error_in_a_worker_ends_the_run(crew: Crew, whole: dict[str, bytes]) -> None:
    def fail(number: int, part: int) -> None:
        if part == 3:
            raise ValueError("kv of layer 2 is not finite")
        time.sleep(0.05)

    with pytest.raises(WorkerError) as caught:
        crew.run(2, fail)
    assert (str(caught.value), caught.value.exit_code) == ("kv of layer 2 is not finite", 2)
    crew.check_gone()
    assert not list(crew.path.rglob("c.*.partial"))
    crew.run(1)
    assert read_tree(crew.path) == whole


def test_a_worker_that_does_not_end_in_time_leaves_no_file(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_LEAVE_S", 0.1)
    has_begun = tmp_path / "has-begun"

    def hang_or_fail(number: int, part: int) -> None:
        if number == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # The files of a part this small exist only while it is committed.
            (crew.path / "parts" / "tokens" / partial_name("c.0", "0123abcd")).touch()
            has_begun.touch()
            time.sleep(60)
        while not has_begun.exists():
            time.sleep(0.01)
        raise ValueError("kv of layer 2 is not finite")

    with pytest.raises(WorkerError):
        crew.run(2, hang_or_fail)
    crew.check_gone()
    assert not list(crew.path.rglob("c.*.partial"))


def test_ctrl_c_ends_the_workers_and_leaves_no_file_of_theirs(
    crew: Crew, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        if crew.n_commits() >= 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartProgress, "report", interrupt)
        with pytest.raises(KeyboardInterrupt):
            crew.run(2, lambda number, part: time.sleep(0.05))
    crew.check_gone()
    assert not list(crew.path.rglob("c.*.partial"))
    crew.run(2)
    assert read_tree(crew.path) == whole


def test_parts_of_another_run_are_left_to_it_unless_it_stands_still(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crew.opened() as first, crew.opened() as other:
        assert other.try_lock(3)
        assert other.try_lock(5)
        held, stuck = other.part(3), other.part(5)
        turns = pending_in_turn(first)
        assert [next(turns) for _ in range(8)] == [0, 1, 2, 4, 6, 7, 8, None]
        held.discard()
        assert next(turns) == 3
        monkeypatch.setattr(workers, "_PATIENCE_S", 0.0)
        assert [part for part in turns if part is not None] == [5]
        stuck.discard()


def test_a_worker_writes_what_one_process_does(config: ExtractConfig, tmp_path: Path) -> None:
    whole = config.replaced(out=str(tmp_path / "whole"))
    n_parts = extract(whole).n_parts
    assert extract(config, share=(1, 2)).n_parts_done == n_parts
    assert extract(config, share=(0, 2)).n_parts_done == 0
    assert not (Path(config.out) / "runs").exists()
    extract(config)  # Only the card is left to write.
    assert read_tree(config.out) == read_tree(whole.out)


def test_workers_get_the_device_memory_of_the_target_that_was_proven(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()

    def stop(*_: object) -> None:
        told.append("start workers")
        raise WorkerError("none started")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("free memory"))
    monkeypatch.setattr("moa_data.pipeline.extract.run_processes", stop)
    with pytest.raises(WorkerError):
        extract(config.replaced(workers=2))
    assert told == ["free memory", "start workers"]


def test_each_worker_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert worker_devices("cpu", 3) == ["cpu"] * 3
    assert worker_devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert worker_devices("cuda:2", 1) == ["cuda:2"]
    for device, n_workers in (("cuda", 5), ("cuda:1", 2), ("mps", 2)):
        with pytest.raises(OptionInvalid):
            worker_devices(device, n_workers)


@pytest.mark.parametrize(("code", "is_lost"), [(-9, True), (143, True), (2, False), (70, False)])
def test_the_exit_code_of_a_worker_says_whether_the_others_go_on(code: int, is_lost: bool) -> None:
    if is_lost:
        assert outcome_of(code, "Error: x") == "Error: x"
        return
    assert (
        outcome_of(code, "Error: AcceleratorError: the link fell off")
        == "Error: AcceleratorError: the link fell off"
    )
    with pytest.raises(WorkerError) as caught:
        outcome_of(code, "Error: x")
    assert (str(caught.value), caught.value.exit_code) == ("x", code)


def test_the_command_of_a_worker_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from moa_data.commands.signals import begin_command, end_with_input, watch_signals\n"
    )
    code += (
        "watch_signals()\nbegin_command()\nend_with_input()\nprint(flush=True)\ntime.sleep(60)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(60) != 0


def test_a_lost_task_is_started_anew(crew: Crew, whole: dict[str, bytes]) -> None:
    def lose(number: int, part: int) -> None:
        if crew.n_commits() == 4 and crew.n_started == 1:
            (crew.path / "parts" / "kv" / "c.0.other.partial").touch()
            raise RayError("The worker died because of:\nSIGKILL\n")

    _, lost = crew.run(2, lose, ray=True)
    assert lost == ["worker 0: SIGKILL"]
    assert read_tree(crew.path) == whole
    assert not list(crew.path.rglob("*.partial"))


def test_tasks_that_are_lost_again_and_again_end_the_run_in_one_line(
    crew: Crew, whole: dict[str, bytes]
) -> None:
    def lose(number: int, part: int) -> None:
        if part == 4:
            raise RayError(
                "The worker died because of:\nModuleNotFoundError: No module named 'moa_data'\n"
            )

    with raises_naming(WorkerError, "ModuleNotFoundError") as caught:
        crew.run(2, lose, ray=True)
    assert "\n" not in str(caught.value)
    assert crew.n_commits() == 8  # the parts of the surviving workers
    crew.run(2, ray=True)
    assert read_tree(crew.path) == whole


def test_a_worker_computes_on_its_share_of_the_cores(tmp_path: Path) -> None:
    told = list[tuple[int, int | None]]()

    def start(worker: Worker, folder: Path, n_threads: int) -> Forked:
        given = resolve(ExtractConfig, {}, folder / SETTINGS_NAME)
        assert given == worker.config.replaced(encode_threads=given.forward.encode_threads)
        told.append((n_threads, given.forward.encode_threads))
        return Forked(lambda: 0)

    [worker] = workers_of(tmp_path / "store", 1)
    WorkerProcess(worker, 2, start).close()
    WorkerProcess(
        replace(worker, config=worker.config.replaced(encode_threads=3)), 1, start
    ).close()
    assert told == [(core_share(2), core_share(2)), (core_share(1), 3)]


def test_what_libraries_print_in_a_worker_is_ignored(tmp_path: Path) -> None:
    def start(worker: Worker, folder: Path, n_threads: int) -> Forked:
        (folder / TIMINGS_NAME).write_text(
            "INFO: the engine starts\n" + json.dumps(asdict(Timings(n_tokens=5))) + "\n"
        )
        return Forked(lambda: 0)

    [worker] = workers_of(tmp_path / "store", 1)
    process = WorkerProcess(worker, 1, start)
    assert outcome_of(*process.ended()) == Timings(n_tokens=5)
    process.close()


def test_a_worker_that_cannot_be_started_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> Forked:
        raise OSError("no process is left")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    [worker] = workers_of(tmp_path / "store", 1)
    with raises_naming(OSError, "no process is left"):
        WorkerProcess(worker, 1, start)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("ray")
def test_a_task_of_ray_shares_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[int]()

    class Fake:
        def __init__(self, worker: Worker, n_here: int) -> None:
            told.append(n_here)

        def ended(self) -> tuple[int, str]:
            return 2, "Error: x"

        def close(self) -> None: ...

    monkeypatch.setattr(workers, "WorkerProcess", Fake)
    [worker] = workers_of(tmp_path / "store", 1)
    assert ray_task(worker, {"CPU": 1.0, "GPU": 2.0}) == (2, "Error: x")
    assert told == [2]
    needed = ({"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 0.5}, {"CPU": 1.0, "TPU": 1.0})
    assert [workers_that_fit({"CPU": 16.0, "GPU": 8.0}, needs) for needs in needed] == [8, 4, 1]


def test_ray_that_is_missing_or_taken_is_said_in_one_line(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find(name, *a)
    )
    arguments = [
        "--model",
        config.model,
        "--dataset",
        config.dataset,
        "--out",
        config.out,
        "--engine",
        "ray",
    ]
    for command in ("extract", "plan"):
        refused(run(command, *arguments), "pip install 'moa-data[ray]'")
    assert not Path(config.out).exists()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    with pytest.raises(OptionInvalid), workers._connected(ScaleSettings(engine="ray")):
        pass


def test_options_of_workers(config: ExtractConfig) -> None:
    refused_ones: list[dict[str, Any]] = [
        {"address": "auto"}, {"gpus_per_worker": 0},
        {"engine": "ray", "address": "ray://head:10001"},
        {"workers": 0}, {"workers": "1:2"},
    ]  # fmt: skip
    for changes in refused_ones:
        with pytest.raises(OptionInvalid):
            config.replaced(**changes)
    scale = config.replaced(engine="ray", workers=64, address="auto", gpus_per_worker=0.5).scale
    assert (scale.workers, scale.n_local_workers, scale.is_alone) == (64, 1, False)
    assert not config.replaced(engine="ray").scale.is_alone


def test_gpus_of_workers_need_not_be_on_this_machine(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    on_gpus = config.replaced(engine="ray", device="auto", compute_dtype="auto", gpus_per_worker=1)
    plan = build_plan(on_gpus)
    assert (
        plan.forward.device,
        plan.forward.compute_dtype,
        plan.manifest.extraction["device"],
    ) == (
        "cuda",
        "bfloat16",
        "cuda",
    )
    assert build_plan(on_gpus.replaced(gpus_per_worker=0)).forward.device == "cpu"
    with raises_naming(OptionInvalid, "`device=cpu`", "gpus_per_worker"):
        build_plan(on_gpus.replaced(device="cpu"))
    with raises_naming(OptionInvalid, "transform:1"):
        build_plan(on_gpus.replaced(codec="transform:1"))
