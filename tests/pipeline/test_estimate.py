"""The hours of a plan come from three of its batches, and leave nothing on the disk."""

from pathlib import Path

import pyarrow as pa
import pytest

from moa_data.pipeline import estimate as estimate_module
from moa_data.pipeline.add import plan_addition
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.estimate import batches_of, estimate
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan
from moa_data.tests.kit.command import run


def test_batches_hold_neighbours_of_a_part_and_keep_to_the_budget(config: ExtractConfig) -> None:
    lengths, parts = [50, 30, 30, 9, 9, 9, 1, 40], [0] * 7 + [1]
    table = pa.table({"n_tokens": pa.array(lengths, pa.int32()), "part": pa.array(parts, pa.int32())})
    found = [batch["n_tokens"].to_pylist() for batch in batches_of(table, 60)]
    assert found == [[50], [30, 30], [9, 9, 9, 1], [40]]
    assert [len(batch) for batch in batches_of(table, 1)] == [1] * 8
    plan = build_plan(config)
    planned = [batch["n_tokens"].to_pylist() for batch in batches_of(plan.table, plan.forward.batch_tokens)]
    assert sum(len(batch) * max(batch) for batch in planned) == extract(config).timings.n_padded_tokens


@pytest.mark.parametrize("codec", ["lossless", "int8", "transform:1,tokens,from-kv"])
def test_a_plan_is_timed_and_leaves_nothing(config: ExtractConfig, tmp_path: Path, codec: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    found = estimate(build_plan(config.replaced(codec=codec)))
    assert sorted(tmp_path.rglob("*")) == before
    assert 0 < found.forward_s < found.extract_s


def test_an_addition_is_timed_too(config: ExtractConfig) -> None:
    extract(config.replaced(activations=("hidden:last",), target_layers=0))
    plan = plan_addition(AddConfig.of(store=config.out, model=config.model, activations=("hidden:layer:1",)))
    assert estimate(plan).extract_s > 0
    done = run("add", config.out, "--model", config.model, "--activations", "hidden:layer:1", "--dry-run")
    assert "time         about" in done.stdout


def test_fewer_layers_are_timed_for_all_of_them(config: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moa_data.moa.targets.live.DeviceClock.seconds", lambda *_: 2.0)  # whatever a batch computes
    plan = build_plan(config.replaced(activations=("kv",)))
    whole = estimate(plan).forward_s
    monkeypatch.setattr(estimate_module, "_MAX_WEIGHTS", 1)  # one layer of three
    assert estimate(plan).forward_s == pytest.approx(3 * whole)


def test_plan_tells_what_workers_take(config: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = ["plan", "--model", config.model, "--dataset", config.dataset, "--out", config.out]
    told = run(*arguments, "--device", "cpu", "--workers", "4", "--part-tokens", "512")
    assert told.exit_code == 0, told.output
    assert "\nworkers      4 take about" in told.stdout
    elsewhere = run(*arguments, "--engine", "ray", "--gpus-per-worker", "1")
    assert "not measured, as this machine has no GPU" in elsewhere.stdout
