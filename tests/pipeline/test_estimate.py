"""The hours of a plan are those of its slowest stage, which is named with what would change it."""

import dataclasses
from pathlib import Path

import pytest

from moa_data.pipeline.add_plan import plan_addition
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.estimate import (
    Estimate,
    Work,
    batch_lengths,
    count_padded,
    estimate_addition,
    estimate_extraction,
    stage_seconds,
)
from moa_data.pipeline.extract import extract
from moa_data.pipeline.forwards import speed
from moa_data.pipeline.forwards.speed import Speeds
from moa_data.pipeline.plan import build_plan
from moa_data.tests.kit.command import run

GPU = Speeds(
    forward_s_per_token=4e-5, forward_cores=0.0, copy_s_per_token=5e-6, encode_s_per_byte=1 / 1e9,
    encode_core_s_per_byte=2 / 1e9, write_s_per_byte=1 / 2e9, disk_s_per_byte=1 / 1.5e9, sync_s=1e-3,
)  # fmt: skip
WORK = Work(n_padded_tokens=10**6, raw_bytes=131 * 10**9, stored_bytes=90 * 10**9, n_files=100)


def estimate_of(speeds: Speeds, **changes: object) -> Estimate:
    seconds = stage_seconds(speeds, WORK, 16)
    whole = Estimate(
        seconds=seconds, n_encode_threads=2, n_cores=16, codec="lossless", is_whole=True, sync_share=0.0,
        is_on_cpu="cores" in seconds, compute_dtype="float32",
    )  # fmt: skip
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]  # each test names the fields it changes


def test_the_slowest_stage_is_the_whole_and_is_named() -> None:
    found = estimate_of(GPU)
    assert found.seconds == pytest.approx({"forward": 40, "copy": 5, "encode": 131, "write": 45, "disk": 60.1})
    assert found.slowest == "encode"
    assert found.total_s == pytest.approx(131)
    assert "encode on 2 threads 2 min" in found.describe()
    assert "slowest      encode on 2 threads; --encode-threads 16 or a codec that stores less" in found.describe()
    assert "more cores or" in estimate_of(GPU, n_encode_threads=16).describe()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"forward_s_per_token": 1e-3}, "slowest      forward; a faster device would"),
        ({"copy_s_per_token": 1e-3}, "slowest      copy to host; fewer --activations"),
        ({"write_s_per_byte": 1e-8}, r"slowest      write (one thread); a codec that stores less (--codec int8)"),
        ({"disk_s_per_byte": 1e-8}, "slowest      disk; a faster disk for --out or a codec"),
        ({"forward_cores": 1.0, "forward_s_per_token": 1e-2}, "forward; --compute-dtype bfloat16 where"),
    ],
)
def test_each_stage_has_advice_of_its_own(change: dict[str, float], said: str) -> None:
    assert said in estimate_of(dataclasses.replace(GPU, **change)).describe()


def test_small_parts_are_told_to_grow() -> None:
    found = estimate_of(dataclasses.replace(GPU, sync_s=10.0), sync_share=0.9)
    assert "fewer, larger parts (--part-tokens)" in found.describe()


def test_on_a_cpu_the_stages_share_its_cores() -> None:
    shared = dataclasses.replace(GPU, forward_cores=2.0, encode_core_s_per_byte=1e-9, forward_s_per_token=1e-4)
    seconds = stage_seconds(shared, WORK, 2)
    assert seconds["cores"] == pytest.approx((100 * 2 + 131 + 45) / 2)
    assert max(seconds, key=lambda stage: seconds[stage]) == "cores"


def test_batches_are_those_of_the_extraction(config: ExtractConfig) -> None:
    plan = build_plan(config)
    report = extract(config)
    lengths = batch_lengths(plan.table, plan.batch_tokens)
    assert sum(int(batch.sum()) for batch in lengths) == plan.n_tokens
    assert count_padded(lengths) == report.timings.n_padded_tokens


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_MOMENT_S", 0.02)
    monkeypatch.setattr(speed, "_PROBE_BYTES", 1 << 20)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("codec", ["lossless", "int8", "transform:1,tokens,from-kv"])
def test_a_plan_is_measured_and_leaves_nothing(config: ExtractConfig, tmp_path: Path, codec: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    found = estimate_extraction(build_plan(config.replaced(codec=codec)))
    assert sorted(tmp_path.rglob("*")) == before
    assert found.seconds.keys() == {"forward", "copy", "encode", "write", "disk", "cores"}
    assert found.seconds["forward"] > 0
    assert found.seconds["copy"] == 0
    assert (found.seconds["encode"] > 0) == found.is_whole == (not codec.startswith("transform"))
    assert ("learns first" in found.describe()) == codec.startswith("transform")


@pytest.mark.usefixtures("quick")
def test_an_addition_is_measured_too(config: ExtractConfig) -> None:
    extract(config.replaced(activations=("hidden:last",), target_layers=0))
    plan = plan_addition(AddConfig.of(store=config.out, model=config.model, activations=("hidden:layer:1",)))
    assert estimate_addition(plan).seconds["encode"] > 0
    done = run("add", config.out, "--model", config.model, "--activations", "hidden:layer:1", "--dry-run")
    assert "as long as the slowest of: forward" in done.stdout


@pytest.mark.usefixtures("quick")
def test_a_stand_in_of_fewer_layers_is_scaled_to_all_of_them(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_timed", lambda *_: (2.0, 1.0))  # seconds of a batch, whatever it computes
    plan = build_plan(config)
    whole = estimate_extraction(plan).seconds["forward"]
    monkeypatch.setattr(speed, "_MOST_WEIGHTS", 1)  # one layer of three
    assert estimate_extraction(plan).seconds["forward"] == pytest.approx(3 * whole)
