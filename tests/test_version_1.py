"""Stores of schema version 1 stay what they are: read, checked, trained from, added to and mended."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.pipeline.card import CardOrigin, card_text
from moa_data.pipeline.recode import recode
from moa_data.storage.care.repair import drop_damage, plan_repair
from moa_data.storage.care.summary import summarize_store
from moa_data.storage.care.verify import verify_store
from moa_data.storage.codecs.transform import pieces
from moa_data.storage.parts.plan import read_plan
from moa_data.storage.read.store import ActivationStore, read_manifest
from moa_data.storage.schema import hidden_field
from moa_data.storage.write.addition import StoreAddition, extended_codec
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.stores import flip, read_by_zarr, read_tree
from moa_data.tests.kit.version_1 import unpack, write_as_version_1
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.fit.run import train


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return unpack(tmp_path)


def every_value(store: Path) -> dict[tuple[str, str], bytes]:
    with ActivationStore(store, require_complete=True) as reader:
        ids = reader.sequences["sequence_id"].to_pylist()
        return {(key, name): reader.read(i, name).tobytes() for i, key in enumerate(ids) for name in reader.fields}


def test_it_is_read_as_plain_zarr_reads_it_and_found_whole(store: Path) -> None:
    assert json.loads((store / "store.json").read_text())["schema_version"] == 1
    with ActivationStore(store, require_complete=True) as reader:
        assert (len(reader), reader.n_parts_committed) == (18, 2)
        assert list(reader.fields) == ["tokens", "response_mask", "kv", "hidden/last", "hidden/layer_1"]
        for i, row in enumerate(reader.sequences.to_pylist()):
            group = store / f"parts/part-{row['part']:05d}.zarr"
            for name in reader.fields:
                got = read_by_zarr(group, name, row["first_token"], row["first_token"] + row["n_tokens"])
                np.testing.assert_array_equal(reader.read(i, name), got)
        batch = reader.read_batch([17, 0], "kv", layers=[1])["kv"]
        np.testing.assert_array_equal(batch[1, : reader.lengths[0]], reader.read(0, "kv")[:, [1]])
    assert verify_store(store).ok
    summary = summarize_store(store)
    assert (summary.schema_version, summary.unfinished) == (1, {})
    assert summary.stored_bytes == sum(path.stat().st_size for path in (store / "parts").rglob("0") if path.is_file())


def test_its_layout_is_written_as_the_earlier_release_wrote_it(store: Path, tmp_path: Path) -> None:
    (store / "runs").mkdir()
    other = write_as_version_1(store, tmp_path / "other")
    before, after = read_tree(store), read_tree(other)
    assert after.keys() == before.keys()
    for name in (name for name in before if name.endswith("zarr.json") or name == "store.json"):
        assert json.loads(after[name]) == json.loads(before[name]), name
    assert every_value(other) == every_value(store)


def test_a_drafter_is_trained_from_it(store: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "batch_size": 4,
        "max_steps": 2,
        "draft_length": 3,
        "step_bound_min": 3,
        "step_bound_max": 6,
    }
    config |= {"validation_fraction": 0.2, "accelerator": "cpu", "precision": "32-true"}
    report = train(TrainConfig.of(store=str(store), out=str(tmp_path / "run"), **config))
    assert report.n_steps == 2


@pytest.mark.parametrize("name", ["store.json", "plan.parquet", "commits/store.json"])
def test_damage_of_its_documents_is_mended_from_the_inputs(store: Path, name: str) -> None:
    manifest, plan, whole = read_manifest(store), read_plan(store / "plan.parquet"), read_tree(store)
    flip(store / name)
    # Whoever extracts again asks for the newest version, and gets the one that is there.
    with StoreWriter.create_or_resume(store, replace(manifest, schema_version=2), plan) as writer:
        assert (writer.manifest.schema_version, writer.pending_parts()) == (1, [])
    assert read_tree(store) == whole


@pytest.mark.parametrize("name", ["kv/c/0/0/0/0/0", "hidden/zarr.json", "hidden/last/zarr.json"])
def test_a_damaged_part_is_dropped_and_written_again_in_its_layout(store: Path, tmp_path: Path, name: str) -> None:
    manifest, plan = read_manifest(store), read_plan(store / "plan.parquet")
    whole, values = read_tree(store), every_value(store)
    copy = unpack(tmp_path / "copy")
    flip(store / "parts/part-00001.zarr" / name)
    assert drop_damage(plan_repair(store)) == (1,)
    assert not (store / "parts/part-00001.zarr").exists()
    with ActivationStore(copy) as source, StoreWriter.create_or_resume(store, manifest, plan) as writer:
        with writer.part(1) as out:  # left half way, as by an interrupt
            out.write("tokens", 0, source.read(0, "tokens")[:1])
        assert not (store / "parts/part-00001.zarr").exists()
        ids = source.sequences["sequence_id"].to_pylist()
        with writer.part(1) as out:
            for row in out.sequences.to_pylist():
                for field in source.fields:
                    out.write(field, row["first_token"], source.read(ids.index(row["sequence_id"]), field))
            out.commit()
    assert read_tree(store).keys() == whole.keys()
    assert every_value(store) == values
    assert verify_store(store).ok


def test_a_field_is_added_in_its_layout(store: Path) -> None:
    manifest, plan, before = read_manifest(store), read_plan(store / "plan.parquet"), read_tree(store)
    wider = replace(manifest, fields=(*manifest.fields, hidden_field("layer_0", 8)))
    with StoreWriter.create_or_resume(store, manifest, plan) as writer:
        addition = StoreAddition(writer, wider, extended_codec(writer.codec, wider.fields))
        with addition.part(0) as out:
            out.write("hidden/layer_0", 0, np.zeros((1, 8), np.uint16))
        assert read_tree(store) == before  # it was left without a commit
        for part in addition.pending_parts():
            with addition.part(part) as out:
                for row in out.sequences.to_pylist():
                    out.write("hidden/layer_0", row["first_token"], np.full((row["n_tokens"], 8), 7, np.uint16))
                out.commit()
        addition.finish()
    assert read_manifest(store) == wider
    assert verify_store(store).ok
    added = {name for name in read_tree(store) if name not in before}
    assert added == {
        f"parts/part-0000{k}.zarr/hidden/layer_0/{name}" for k in (0, 1) for name in ("zarr.json", "c/0/0")
    }
    with ActivationStore(store) as reader:
        assert (reader.read(3, "hidden/layer_0") == 7).all()


def test_recoding_gives_the_newest_version(store: Path, tmp_path: Path) -> None:
    recode(store, "lossless", tmp_path / "same")
    assert read_manifest(tmp_path / "same").schema_version == 2
    assert every_value(tmp_path / "same") == every_value(store)
    recode(store, "int8", tmp_path / "small")
    recode(tmp_path / "same", "int8", tmp_path / "small-2")
    assert read_tree(tmp_path / "small") == read_tree(tmp_path / "small-2")


def test_runs_of_a_transform_codec_stay_arrays_of_their_own(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "MIN_GROUP_BYTES", 1)
    recode(store, "transform:3@all", tmp_path / "new")
    with ActivationStore(tmp_path / "new") as new, ActivationStore(store) as source:
        manifest = replace(new.manifest, schema_version=1)
        with StoreWriter.create_or_resume(tmp_path / "old", manifest, new.sequences, new.codec.files()) as writer:
            for part in writer.pending_parts():
                with writer.part(part) as out:
                    for i, row in enumerate(source.sequences.to_pylist()):
                        for field in source.fields if row["part"] == part else ():
                            out.write(field, row["first_token"], source.read(i, field), source.read(i, "tokens"))
                    out.commit()
        assert [array.name for array in new.codec.fields["kv"].arrays] == ["kv/codes"]
    assert (tmp_path / "old/parts/part-00000.zarr/kv/codes_00/zarr.json").exists()
    assert not (tmp_path / "old/parts/part-00000.zarr/kv/codes").exists()
    assert every_value(tmp_path / "old") == every_value(tmp_path / "new")
    assert verify_store(tmp_path / "old").ok
    with ActivationStore(tmp_path / "old") as old:
        wider = extended_codec(old.codec, (*old.manifest.fields, hidden_field("layer_0", 8)))
        assert wider.schema_version == 1


def test_its_card_shows_how_to_read_it(store: Path) -> None:
    text = card_text(store, CardOrigin("a/model", "a/dataset"))
    scope: dict[str, Any] = {}
    block = text.split("## Load it without moa-data")[1].split("```python\n")[1].split("```")[0]
    exec(block.replace('Path("STORE")', f"Path({str(store)!r})"), scope)
    with ActivationStore(store) as reader:
        np.testing.assert_array_equal(scope["bits"], reader.read(0, "hidden/last"))
