"""Several workers divide what each has for itself, wait for what they share, and pay until something else binds."""

import dataclasses

import pytest

from moa_data.pipeline.config import ExtractConfig, ScaleSettings
from moa_data.pipeline.forwards import speed
from moa_data.pipeline.scaling import Scaling
from moa_data.pipeline.workers.devices import devices_here
from moa_data.tests.kit.command import run

GPUS = Scaling(
    seconds={"forward": 8000.0, "copy": 400.0, "encode": 4000.0, "write": 2000.0, "disk": 1000.0},
    n_parts=3200, n_cores=64, most_here=8, encode_threads=None, most_encode_threads=16,
)  # fmt: skip
"""One GPU of eight, on a machine of 64 cores, of which one worker encodes on 16 and each of eight on 8."""


def test_one_worker_takes_what_was_measured() -> None:
    assert GPUS.stages(1) == dict(GPUS.seconds)
    assert GPUS.total_s(1) == 8000


def test_workers_divide_forwards_and_share_the_disk() -> None:
    assert GPUS.stages(8) == {"forward": 1000, "copy": 50, "encode": 1000, "write": 250, "disk": 1000}
    assert GPUS.stages(16)["forward"] == GPUS.stages(16)["encode"] == 500
    assert (GPUS.total_s(16), GPUS.slowest(16)) == (1000, "disk")


def test_more_workers_pay_until_the_disk_is_full() -> None:
    assert GPUS.enough() == 8
    told = GPUS.describe(64)
    assert told.startswith(
        "workers      1: 2.2 h, 2: 67 min, 4: 33 min, 8: 17 min, 16: 17 min, 32: 17 min, 64: 17 min\n"
    )
    assert "more than 8 hardly pay: the disk of --out is full" in told


def test_a_faster_bucket_takes_more_workers_and_each_writes_as_fast_as_one() -> None:
    bucket = dataclasses.replace(GPUS, out_s=100.0)
    assert bucket.stages(4)["disk"] == 250
    assert bucket.stages(64)["disk"] == 100
    assert 75 <= bucket.enough() <= 85
    assert bucket.total_s(80) == 100


def test_a_part_is_the_unit_of_work() -> None:
    few = dataclasses.replace(GPUS, n_parts=10, out_s=1.0)
    assert few.stages(4)["forward"] == 8000 * 3 / 10
    assert few.stages(9)["forward"] == few.stages(5)["forward"]
    assert few.enough() == 10
    assert "up to 10 of them pay, as many as there are parts" in few.describe(3)
    assert "parts are the unit of work" in dataclasses.replace(few, out_s=1590.0).describe(3)


def test_workers_on_one_cpu_share_its_cores() -> None:
    cpu = dataclasses.replace(GPUS, seconds={**GPUS.seconds, "cores": 6000.0}, most_here=10_000, n_cores=2)
    assert (cpu.total_s(4), cpu.slowest(4)) == (6000, "cores")
    assert cpu.stages(4)["encode"] == 2000  # on one core each instead of two
    assert "the cores of this machine are busy" in dataclasses.replace(cpu, encode_threads=2).describe(4)
    cluster = dataclasses.replace(cpu, most_here=1, out_s=1.0)
    assert cluster.stages(4)["cores"] == 1500


def test_threads_that_are_given_are_each_workers_own() -> None:
    assert dataclasses.replace(GPUS, encode_threads=16).stages(8)["encode"] == 500


def test_room_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert devices_here("cuda", ScaleSettings(engine="ray")) == 8
    assert devices_here("cuda", ScaleSettings(engine="ray", gpus_per_worker=0.5)) == 16
    monkeypatch.setattr("moa_data.pipeline.workers.devices.usable_cores", lambda: 6)
    assert devices_here("cpu", ScaleSettings(engine="ray", cpus_per_worker=4)) == 1
    assert devices_here("cpu", ScaleSettings(engine="ray", cpus_per_worker=2)) == 3


def test_plan_tells_what_workers_take(config: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(speed, "_MOMENT_S", 0.02)
    monkeypatch.setattr(speed, "_PROBE_BYTES", 1 << 20)
    arguments = ["plan", "--model", config.model, "--dataset", config.dataset, "--out", config.out, "--device", "cpu"]
    alone = run(*arguments)
    assert "\nworkers " not in alone.stdout
    told = run(*arguments, "--workers", "4", "--set", "scale.out_bytes_per_s=1e12", "--part-tokens", "512")
    assert told.exit_code == 0, told.output
    assert "\nworkers      1: " in told.stdout
    assert ", 2: " in told.stdout
    assert ", 4: " in told.stdout
    elsewhere = run(*arguments[:-2], "--engine", "ray", "--gpus-per-worker", "1")
    assert "not measured, as this machine has no GPU" in elsewhere.stdout
