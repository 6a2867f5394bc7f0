"""Adding fields gives the bytes of one extraction of all fields, whatever interrupts it; the old fields keep theirs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moa_data.pipeline.add import add
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.storage.verify import verify_store

OLD, NEW = ("kv", "hidden:last"), ("kv", "hidden:last", "hidden:layer:0", "hidden:layer:1")


@pytest.fixture
def config(target_folder: Path, chats_file: Path, tmp_path: Path) -> ExtractConfig:
    return ExtractConfig(
        model=str(target_folder), dataset=str(chats_file), out=str(tmp_path / "store"), max_length=128, device="cpu",
        part_tokens=768, batch_tokens=256, activations=OLD,
    )  # fmt: skip


def addition(config: ExtractConfig, **changes: Any) -> AddConfig:
    return dataclasses.replace(AddConfig(config.out, config.model, ("hidden:layer:0",), target_layers=1), **changes)


def data_bytes(store: str | Path) -> dict[str, bytes]:
    """Every file that must not differ between runs."""
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(Path(store).rglob("*"))
        if path.is_file() and "runs" not in path.parts and path.name != "store.lock"
    }


def fresh(config: ExtractConfig, **changes: Any) -> dict[str, bytes]:
    """The files of one extraction of all fields."""
    config = dataclasses.replace(config, activations=NEW, target_layers=1, **changes)
    config = dataclasses.replace(config, out=f"{config.out}-fresh")
    extract(config)
    return data_bytes(config.out)


@pytest.mark.parametrize("codec", ["lossless", "int4", "transform:3,tokens"])
def test_the_store_becomes_the_one_of_a_single_extraction(config: ExtractConfig, codec: str) -> None:
    config = dataclasses.replace(config, codec=codec)
    extract(config)
    before = data_bytes(config.out)
    calls: list[tuple[int, int, str]] = []
    Path(config.dataset).rename(f"{config.dataset}.away")  # the tokens are in the store
    report = add(addition(config), progress=lambda *call: calls.append(call), provenance={"argv": ["moa-data"]})
    Path(f"{config.dataset}.away").rename(config.dataset)
    after = data_bytes(config.out)
    assert report.fields == ("hidden/layer_0", "hidden/layer_1")
    assert report.n_parts == report.n_parts_done > 1
    assert "bit for bit" in report.agreement
    assert calls[-1][:2] == (report.n_tokens, report.n_tokens)
    arrays = [name for name in before if name.startswith("parts/")]
    assert {name: after[name] for name in arrays} == {name: before[name] for name in arrays}
    assert sum(len(after[name]) for name in after if "/hidden/layer_" in name) == report.stored_bytes
    assert after == fresh(config)
    assert verify_store(config.out).ok
    assert not list(Path(config.out).rglob("*.partial"))
