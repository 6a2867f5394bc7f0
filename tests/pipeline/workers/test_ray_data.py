"""What is submitted to Ray: what no commit names, in lots, and again until all have one, whatever becomes of Ray.

Ray is stood in for here; tests/pipeline/jobs/test_extract_ray.py has the real one.
"""

import contextlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moa_data.errors import OptionInvalid, TargetError, WorkerError
from moa_data.pipeline.config import ExtractConfig, ScaleSettings
from moa_data.pipeline.forwards.parts import Outcome, Timings
from moa_data.pipeline.plan import build_plan
from moa_data.pipeline.workers import ray_data
from moa_data.pipeline.workers.ray_actor import LotReport
from moa_data.pipeline.workers.ray_data import RayWorkers, cut_lots
from moa_data.pipeline.workers.tally import Tally
from moa_data.pipeline.workers.work import BUNDLE
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.stores import Recipe, make_recipe, read_tree
from moa_data.tests.kit.workers import order_for

N_PARTS = 9


@pytest.mark.parametrize(("n_pieces", "n_workers"), [(0, 2), (1, 8), (60, 2), (3700, 8), (3700, 1024)])
def test_lots_get_smaller_so_that_nobody_waits_long_at_the_end(n_pieces: int, n_workers: int) -> None:
    lots = cut_lots(range(n_pieces), n_workers)
    assert [piece for lot in lots for piece in lot] == list(range(n_pieces))
    sizes = [len(lot) for lot in lots]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes, default=1) <= 8
    assert sizes[-n_workers:] == [1] * min(n_workers, n_pieces)


class Rows:
    """A data set whose lots are done in this process."""

    def __init__(self, rows: Callable[[], Iterator[Any]]) -> None:
        self.iter_rows = rows


class Stage:
    """A store of nine parts whose lots are done by a script instead of Ray."""

    def __init__(self, folder: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.recipe, self.patch = folder, recipe, monkeypatch
        self.submitted: list[list[int]] = []
        self.told: list[tuple[int, int, str]] = []

    def run(self, do: Callable[[StoreWriter, int], None]) -> RayWorkers:
        """Submit until all is done; ``do`` is called with each piece."""

        def lots(workers: RayWorkers, pieces: Sequence[int]) -> Rows:
            self.submitted.append(list(pieces))
            return Rows(lambda: self._rows(pieces, do))

        self.patch.setattr(RayWorkers, "_lots", lots)
        self.patch.setattr(ray_data, "_connected", lambda *_: contextlib.nullcontext())
        self.patch.setattr(ray_data, "_TELL_EVERY_S", 0.01)
        with StoreWriter.create_or_resume(self.path, self.recipe.manifest, self.recipe.plan, shares=True) as store:
            tally = Tally(store, self.recipe.plan, lambda *told: self.told.append(told))
            scale = ScaleSettings(engine="ray", workers="2")
            self.workers = RayWorkers(order_for(self.path), store, tally, scale, None)
            self.workers.run()
            tally.finish()
            store.sweep()
        return self.workers

    def _rows(self, pieces: Sequence[int], do: Callable[[StoreWriter, int], None]) -> Iterator[Any]:
        for lot in cut_lots(pieces, 2):
            with StoreWriter.join(self.path) as store:
                for piece in lot:
                    do(store, piece)
                outcomes = dict.fromkeys(lot, Outcome.WRITTEN)
            yield {"report": LotReport("w", "host", False, outcomes, Timings(n_tokens=5)).row()["report"][0]}

    def write(self, store: StoreWriter, piece: int) -> None:
        if piece == BUNDLE:
            with store.target() as folder:
                (folder / "config.json").write_text("{}")
        else:
            self.recipe.write_part(store, piece)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    recipe = make_recipe((70, 3, 130, 64, 1, 33, 129, 90, 150, 65), part_tokens=128)
    return Stage(tmp_path / "store", recipe, monkeypatch)


def whole(stage: Stage) -> dict[str, bytes]:
    path = stage.recipe.write(stage.path.with_name("whole"))
    with StoreWriter.create_or_resume(path, stage.recipe.manifest, stage.recipe.plan) as writer:
        stage.write(writer, BUNDLE)
    return read_tree(path)


def test_everything_is_submitted_once_and_told_in_one_line(stage: Stage) -> None:
    workers = stage.run(stage.write)
    assert stage.submitted == [[BUNDLE, *range(N_PARTS)]]
    assert (workers.n_workers, workers.timings.n_tokens, workers.lost) == (1, 5, [])
    n_tokens = stage.recipe.manifest.n_tokens
    assert stage.told[-1] == (n_tokens, n_tokens, "extract 9/9 parts, 1 workers of Ray")
    assert read_tree(stage.path) == whole(stage)


def test_what_has_no_commit_is_submitted_again_when_ray_gives_up(stage: Stage) -> None:
    def do(store: StoreWriter, piece: int) -> None:
        if piece == 4 and len(stage.submitted) == 1:
            raise RuntimeError("The actor died.\nmore")
        stage.write(store, piece)

    workers = stage.run(do)
    assert stage.submitted[1] == list(range(4, N_PARTS))
    assert workers.lost == ["Ray gave up: The actor died."]
    assert read_tree(stage.path) == whole(stage)


def test_a_run_that_gets_nothing_done_ends_with_the_cause(stage: Stage) -> None:
    def do(store: StoreWriter, piece: int) -> None:
        if piece >= 2:
            raise RuntimeError("The actor died because of:\nModuleNotFoundError: No module named 'moa_data'\n")
        stage.write(store, piece)

    with pytest.raises(WorkerError, match=r"ModuleNotFoundError: No module named 'moa_data'\. .* to go on\.$"):
        stage.run(do)
    assert len(stage.submitted) == 2
    stage.run(stage.write)
    assert read_tree(stage.path) == whole(stage)


def test_a_failure_after_the_last_commit_is_none(stage: Stage) -> None:
    def do(store: StoreWriter, piece: int) -> None:
        stage.write(store, piece)
        if piece == N_PARTS - 1:
            raise RuntimeError("The machine is gone.")

    assert stage.run(do).lost == []


def test_an_error_of_a_worker_ends_the_run_and_a_lost_worker_is_noted(stage: Stage) -> None:
    error = pickle.dumps(TargetError("kv of layer 2"))
    stage.patch.setattr(
        stage, "_rows", lambda *_: iter([{"report": LotReport("a", "big", True, {}, Timings(), e).row()["report"][0]}
                                         for e in (b"", b"", error)]),
    )  # fmt: skip
    with pytest.raises(TargetError, match="kv of layer 2"):
        stage.run(stage.write)
    assert stage.workers.lost == ["started anew on big"]


def test_parts_of_another_run_are_waited_for_and_done_here_when_it_stands_still(stage: Stage) -> None:
    """Another process holds part 3, which never ends, and part 5, which it commits."""
    with contextlib.ExitStack() as held:

        def do(store: StoreWriter, piece: int) -> None:
            if len(stage.submitted) > 1 or piece not in (3, 5):
                stage.write(store, piece)
            elif piece == 3:
                other = held.enter_context(StoreWriter.join(stage.path))
                held.callback(other.part(3).discard)
                stage.patch.setattr(ray_data, "_PATIENCE_S", 0.1)
                stage.recipe.write_part(other, 5)

        stage.run(do)
        assert stage.submitted[1:] == [[3]]
        assert any("waiting for another run's" in message for _, _, message in stage.told)


def test_leftovers_of_its_actors_are_deleted(stage: Stage) -> None:
    def do(store: StoreWriter, piece: int) -> None:
        left = stage.path / "parts" / "kv" / f"c.0.{stage.workers._store.attempt}-ab12-7f.partial"
        left.touch()
        if piece >= 0:
            stage.patch.setattr(StoreWriter, "sweep", lambda _: False)
        stage.write(store, piece)

    stage.run(do)
    assert not list(stage.path.glob("parts/kv/*.partial"))


def test_ray_that_is_missing_or_taken_is_said_in_one_line(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find(name, *a))
    arguments = ["--model", config.model, "--dataset", config.dataset, "--out", config.out, "--engine", "ray"]
    for command in ("extract", "plan"):
        refused(run(command, *arguments), "--engine ray needs Ray", "pip install 'moa-data[ray]'")
    assert not Path(config.out).exists()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    with pytest.raises(OptionInvalid, match=r"ray\.shutdown\(\)"), ray_data._connected(ScaleSettings(engine="ray"), 1):
        pass


def test_options_of_ray(config: ExtractConfig) -> None:
    for changes, problem in {
        ("workers", "1:2"): "only Ray takes MIN:MAX",
        ("address", "auto"): "address is for Ray; add engine ray",
        ("gpus_per_worker", 0): "gpus_per_worker is for Ray",
    }.items():
        with pytest.raises(OptionInvalid, match=problem):
            config.replaced(**dict([changes]))
    with pytest.raises(OptionInvalid, match="MIN is more than MAX; write 2:4"):
        config.replaced(engine="ray", workers="4:2")
    with pytest.raises(OptionInvalid, match="Ray Client is not supported"):
        config.replaced(engine="ray", address="ray://head:10001")
    scale = config.replaced(engine="ray", workers="2:64", address="auto", gpus_per_worker=0.5).scale
    assert (scale.fewest_workers, scale.n_workers, scale.n_local_workers, scale.is_alone) == (2, 64, 1, False)
    assert not config.replaced(engine="ray").scale.is_alone


def test_gpus_of_workers_need_not_be_on_this_machine(config: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    on_gpus = config.replaced(engine="ray", device="auto", gpus_per_worker=1)
    plan = build_plan(on_gpus)
    assert (plan.device, plan.compute_dtype, plan.manifest.extraction["device"]) == ("cuda", "bfloat16", "cuda")
    assert build_plan(on_gpus.replaced(gpus_per_worker=0)).device == "cpu"
    with pytest.raises(OptionInvalid, match=r"--device cpu and --gpus-per-worker 1 disagree"):
        build_plan(on_gpus.replaced(device="cpu"))
    with pytest.raises(OptionInvalid, match="learns from forwards on this machine"):
        build_plan(on_gpus.replaced(codec="transform:1"))
