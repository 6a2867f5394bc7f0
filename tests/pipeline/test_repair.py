"""A damaged store gets its parts back from the target, byte for byte; nothing is deleted for the wrong target."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moa_data import files
from moa_data.errors import StorageUnavailable, StoreDamaged, StoreMismatch, WorkerError
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.forwards import calibrate
from moa_data.pipeline.plan import recorded_config
from moa_data.storage.read.verify import verify_store
from moa_data.storage.write import part as part_writer
from moa_data.storage.write.repair import drop_damage, plan_repair
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.models import write_target
from moa_data.tests.kit.stores import flip, read_tree


def extracted(config: ExtractConfig) -> tuple[Path, dict[str, bytes]]:
    """Extract to a store; return it and its files."""
    extract(config)
    return Path(config.out), read_tree(config.out)


def test_damaged_pieces_are_extracted_again(config: ExtractConfig, tmp_path: Path) -> None:
    store, whole = extracted(config)
    flip(next((store / "parts/kv").glob("c.1.*")))
    flip(store / "target/frozen.safetensors")
    plan = plan_repair(store)
    assert (plan.parts, bool(plan.of_kind("target")), plan.is_droppable) == ((1,), True, True)

    other = write_target(tmp_path / "other", seed=1)
    before = read_tree(store)
    with pytest.raises(StoreMismatch, match="weights_sha256") as caught:
        repair(plan, str(other))
    assert "--model" in caught.value.hint
    assert read_tree(store) == before

    report = repair(plan, config.model)
    assert report.n_parts_done == 1
    assert read_tree(store) == whole
    flip(store / "store.json")
    flip(store / "plan.parquet")
    plan = plan_repair(store)
    assert (plan.parts, plan.is_droppable) == ((), False)
    repair(plan, config.model)
    assert read_tree(store) == whole
    assert verify_store(store).ok


def test_a_repair_on_a_full_disk_goes_on(config: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged parts stay until their turn, and what is missing is work for the same command."""
    store, whole = extracted(config)
    n_damaged = 4
    for part in range(n_damaged):
        flip(next((store / "parts/kv").glob(f"c.{part}.*")))
    calls = iter(range(3))

    def full_after_some(fd: int, data: Any) -> int:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return files.write_all(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(part_writer, "write_all", full_after_some)
        with pytest.raises(StorageUnavailable):
            repair(plan_repair(store), config.model)
    report = verify_store(store)
    n_left = len({damage.part for damage in report.damages}) + report.n_pending_parts
    assert n_left == n_damaged
    assert 0 < report.n_pending_parts < n_damaged
    refused(run("verify", store), exit_code=1)

    drop_damage(plan_repair(store))
    for command in ("verify", "repair"):
        refused(run(command, store), f"{n_left} of {report.n_parts + report.n_pending_parts} parts", exit_code=3)
    assert run("verify", store).stdout.startswith("INCOMPLETE")
    done = run("repair", store, "--model", config.model)
    assert done.exit_code == 0, done.output
    assert read_tree(store) == whole


def test_a_lost_bundle_is_missing(config: ExtractConfig) -> None:
    store, whole = extracted(config)
    (store / "commits/target.json").unlink()
    refused(run("verify", store), "target bundle", exit_code=3)
    report = repair(plan_repair(store), config.model)
    assert report.n_parts_done == 0
    assert "wrote target/" in report.describe()
    assert read_tree(store) == whole
    assert "nothing to do" in extract(config).describe()


def test_a_learned_codec_is_learned_again(config: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config.replaced(codec="transform:3,tokens")
    store, whole = extracted(config)
    flip(store / "codec/basis.safetensors")
    before = read_tree(store)
    plan = plan_repair(store)
    assert [damage.path for damage in plan.damages] == ["codec"]
    assert "codec/ is damaged, without which nothing can be decoded" in plan.describe()
    with pytest.raises(StoreDamaged, match="codec/"):
        drop_damage(plan)

    with monkeypatch.context() as patch:
        patch.setattr(calibrate.sample_rows, "__defaults__", (500,))
        with pytest.raises(WorkerError, match="is not what the parts were written with"):
            repair(plan, config.model)
    records = {path: path.read_text() for path in (store / "runs").iterdir()}
    for path in records:
        path.unlink()
    with pytest.raises(WorkerError, match="If `recode` made the store"):
        repair(plan, config.model)
    assert read_tree(store) == before

    for path, text in records.items():
        path.write_text(text)
    (store / "codec/basis.safetensors").unlink()
    assert repair(plan_repair(store), config.model).n_parts_done == 0
    assert read_tree(store) == whole
    assert verify_store(store).ok


def test_settings_come_from_the_last_record_that_can_be_read(config: ExtractConfig, tmp_path: Path) -> None:
    runs = tmp_path / "store" / "runs"
    with pytest.raises(WorkerError, match="records no finished extraction"):
        recorded_config(runs.parent)
    runs.mkdir(parents=True)
    own = json.dumps({"config": config.named() | {"max_length": 77, "added_later": 1}})
    for name, text in (("1.json", own), ("2.json", '{"config": {"model": 5}}'), ("3.json", "{")):
        (runs / name).write_text(text)
    assert recorded_config(runs.parent) == config.replaced(max_length=77)
