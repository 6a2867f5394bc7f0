"""A plan's estimates hold for the extraction. Defaults are chosen for the machine."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from moa_data.machine import peak_memory, resident_memory
from moa_data.pipeline import estimate as estimate_module
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.estimate import estimate
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan
from moa_data.pipeline.report import Timings
from moa_data.storage.plan import numbers
from moa_data.storage.read.store import read_manifest
from moa_data.tests.kit.command import run
from moa_data.tests.kit.hostile import change_json
from moa_data.tests.kit.models import write_target
from moa_data.tests.kit.variants import quick


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers are wide enough to compress like those of real models."""
    sizes = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 512}
    return write_target(tmp_path_factory.mktemp("wide"), **sizes)


def folder_bytes(store: Path, name: str = "") -> int:
    return sum(file.stat().st_size for file in (store / name).rglob("*") if file.is_file())


@pytest.mark.parametrize(
    "codec",
    quick(
        ["lossless", "int8", "transform:2", "transform:2,tokens,from-kv"],
        ["lossless", "transform:2"],
    ),
)
def test_a_store_takes_the_planned_bytes(
    config: ExtractConfig, wide_target: Path, codec: str
) -> None:
    config = config.replaced(model=str(wide_target), codec=codec, part_tokens=1 << 16)
    plan = build_plan(config)
    extract(config)
    store, ranges = Path(config.out), plan.disk_ranges
    found = {name: folder_bytes(store, name) for name in ("parts", "target/", "codec/")}
    found["other files"] = folder_bytes(store) - sum(found.values())
    assert {name for name, n_bytes in found.items() if n_bytes} == set(ranges)
    for name, (least, most) in ranges.items():
        assert least <= found[name] <= most, name
    assert sum(least for least, _ in ranges.values()) <= folder_bytes(store) <= plan.stored_bytes


def test_the_planned_bits_leave_out_the_bases(config: ExtractConfig) -> None:
    plain, predicted = (
        build_plan(config.replaced(codec=codec)) for codec in ("transform:1", "transform:1,tokens")
    )
    assert plain.disk_ranges["parts"] == predicted.disk_ranges["parts"]
    # The codec that predicts from tokens stores features of each token.
    assert predicted.disk_ranges["codec/"][1] - plain.disk_ranges["codec/"][1] == 2 * 400 * 32
    text = plain.describe()
    assert "codec/ " in text
    assert "at most kv 1.0, hidden/last " in text


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset"
)
def test_an_extraction_takes_the_planned_memory(config: ExtractConfig, wide_target: Path) -> None:
    config = config.replaced(model=str(wide_target))
    plan = build_plan(config)
    before = resident_memory()
    least, most = plan.forward.host_range(256)
    assert before + plan.forward.weight_bytes < least < most
    Path("/proc/self/clear_refs").write_text("5")
    extract(config)
    # This process still holds memory of other tests, so it may need less than the lower bound.
    assert before <= peak_memory() <= most


def test_the_memory_of_workers_and_of_what_a_codec_learns(
    config: ExtractConfig, monkeypatch: Any
) -> None:
    monkeypatch.setattr(estimate_module, "resident_memory", lambda: 1000)
    one = build_plan(config).forward
    three = dataclasses.replace(one, n_workers=3)
    (least, most), of_three = one.host_range(500), three.host_range(500)
    assert of_three == (1000 + 3 * least, 1000 + 3 * most)
    learning = build_plan(config.replaced(codec="transform:1@all")).forward
    monkeypatch.setattr(estimate_module, "SAMPLE_TOKENS", 10**6)
    assert learning.host_range(500)[1] > most + 4 * 10**6 * 3 * 2 * 8  # a basis over three layers


def test_the_slowest_and_the_fastest_of_three_batches_bound_the_time(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([100.0, 2.0, 1.0, 4.0])  # Seconds per token. The first run only warms up.
    lengths: list[int] = []

    def run_fake(_forwards: Any, table: Any, _disk: Path) -> Timings:
        lengths.append(int(numbers(table, "n_tokens").max()))
        n_padded, rate = len(table) * lengths[-1], next(rates)
        return Timings(
            forward_s=rate * n_padded / 2, extract_s=rate * n_padded, n_padded_tokens=n_padded
        )

    monkeypatch.setattr(estimate_module, "_run", run_fake)
    least_s, most_s = estimate(build_plan(config))
    assert lengths[0] == lengths[1] < lengths[2] < lengths[3]
    assert most_s / least_s == pytest.approx(4 * 1.2**2)


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_a_cpu_computes_in_float32(config: ExtractConfig, model: Path, weights: str) -> None:
    change_json(model / "config.json", dtype=weights)
    plan = build_plan(config.replaced(model=str(model), compute_dtype="auto"))
    assert plan.forward.compute_dtype == plan.manifest.extraction["compute_dtype"] == "float32"


def test_an_extraction_resumes_in_its_own_dtype(config: ExtractConfig) -> None:
    extract(config.replaced(compute_dtype="bfloat16"))
    Path(config.out, "commits/part-00001.json").unlink()
    assert extract(config.replaced(compute_dtype="auto")).n_parts_done == 1
    assert read_manifest(Path(config.out)).extraction["compute_dtype"] == "bfloat16"


def test_plan_advises_what_to_store_and_to_train(config: ExtractConfig) -> None:
    planned = run(
        "plan",
        "--model",
        config.model,
        "--dataset",
        config.dataset,
        "--out",
        config.out,
        "--device",
        "cpu",
    )
    assert planned.exit_code == 0, planned.output
    lines = dict(line.split(None, 1) for line in planned.stdout.splitlines())
    assert lines["drafter"].startswith("`moa-data train --drafter eagle`: ")
    # A token has 3 layers of 2 heads with 8 keys and 8 values, and a hidden state of width 32.
    assert lines["activations"].startswith("--activations hidden:last: ")
    assert lines["activations"].endswith("each token would take 4 times the bytes.")
    assert lines["time"].endswith(" to run the target, encode and write")
