"""Models and datasets of the Hub: their commits are recorded, and later starts take those when upstream has moved."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from moa_data.errors import DatasetError, StoreMismatch, TargetError
from moa_data.moa.targets.live import resolve_model_folder
from moa_data.pipeline.add import plan_addition
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.dataset import ChatSource
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.plan import build_plan, pinned_revision, recorded_sources
from moa_data.storage.read.store import read_manifest
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import TEXTS_NAME, commit_path
from moa_data.storage.write.repair import plan_repair
from moa_data.tests.kit.chats import random_chats
from moa_data.tests.kit.hub import Hub, serving

MODEL, DATASET = "owner/model", "owner/chats"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on this machine, and an empty cache."""
    with serving(monkeypatch, tmp_path / "cache" / "hub") as hub:
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache" / "datasets")
        yield hub


def chats_of(seed: int, more: int = 0) -> dict[str, bytes]:
    text = "".join(json.dumps(row) + "\n" for row in random_chats(24 + more, seed))
    return {"data/train_sft-00000-of-00001.jsonl": text.encode(), "README.md": b"# Chats\n"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def config(hub: Hub, target_folder: Path, config: ExtractConfig) -> ExtractConfig:
    """An extraction of a model and chats on the Hub."""
    hub.commit(f"models/{MODEL}", files_of(target_folder))
    hub.commit(f"datasets/{DATASET}", chats_of(0))
    return config.replaced(model=MODEL, dataset=DATASET)


def move(hub: Hub) -> None:
    """Let both main branches point at something else."""
    hub.commit(f"models/{MODEL}", {"config.json": b"{}"})
    hub.commit(f"datasets/{DATASET}", chats_of(1, more=3))


def test_later_starts_take_the_recorded_commits(hub: Hub, config: ExtractConfig, tmp_path: Path) -> None:
    plan = build_plan(config)
    extract(config)
    store = Path(config.out)
    sources = recorded_sources(read_manifest(store).extraction)
    assert sources == {
        "model": {"id": MODEL, "revision": "main", "commit": hub.branches[f"models/{MODEL}@main"]},
        "dataset": {"id": DATASET, "revision": "main", "commit": hub.branches[f"datasets/{DATASET}@main"]},
    }
    move(hub)
    shutil.rmtree(tmp_path / "cache")
    commit_path(store, 1).unlink()
    (store / TEXTS_NAME).unlink()  # so that the rows are read again
    assert extract(config).n_parts_done == 1
    for shard in (store / "parts" / "kv").glob("c.0.*"):
        shard.unlink()
    repair(plan_repair(store), MODEL)
    assert verify_store(store).ok
    assert build_plan(config).table.equals(plan.table)
    report = audit(store, MODEL, samples=2, device="cpu")
    assert report.ok
    assert not report.notes
    assert plan_addition(AddConfig(store=str(store), model=MODEL, activations=("hidden:layer:0",))).n_tokens
    by_commit = config.replaced(revision=sources["model"]["commit"], dataset_revision=sources["dataset"]["commit"])
    assert extract(by_commit).n_parts_done == 0


def test_another_commit_is_another_input(hub: Hub, config: ExtractConfig, target_folder: Path) -> None:
    extract(config)
    move(hub)
    hub.commit(f"datasets/{DATASET}", chats_of(2), branch="v2")
    with pytest.raises(StoreMismatch, match=r"extraction\.sources\.dataset\.commit"):
        extract(config.replaced(dataset_revision="v2"))
    old = hub.commit(f"datasets/{DATASET}", chats_of(0), branch="old")  # another name of the same commit
    assert old == recorded_sources(read_manifest(Path(config.out)).extraction)["dataset"]["commit"]
    assert extract(config.replaced(dataset_revision="old", model=str(target_folder))).n_parts_done == 0


def test_a_configuration_is_chosen(hub: Hub) -> None:
    card = "---\nconfigs:\n" + "".join(f"- config_name: {c}\n  data_files: {c}/*.jsonl\n" for c in "ab") + "---\n"
    rows = {f"{name}/train.jsonl": json.dumps({"at": name}).encode() + b"\n" for name in "ab"}
    hub.commit(f"datasets/{DATASET}", rows | {"README.md": card.encode()})
    assert [row for _, row in ChatSource(DATASET, "train", "b").rows()] == [{"at": "b"}]
    with pytest.raises(DatasetError, match=r"Config name is missing.*--dataset-config"):
        ChatSource(DATASET, "train")


def test_what_is_in_the_cache_is_not_taken_for_another_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit(f"datasets/{DATASET}", chats_of(0))
    read = ChatSource(DATASET, None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert ChatSource(DATASET, None).commit == read.commit
    with pytest.raises(DatasetError, match=r"is wanted, but only .* is in the cache and the Hub cannot be reached"):
        ChatSource(DATASET, None, revision="0" * 40)


def test_local_inputs_have_no_revision(target_folder: Path, chats_file: Path) -> None:
    with pytest.raises(TargetError, match=r"is a folder and has no revision v1\. Leave out --revision"):
        resolve_model_folder(str(target_folder), revision="v1")
    for names in ({"config_name": "a"}, {"revision": "v1"}):
        with pytest.raises(DatasetError, match=r"is local\. Leave out --dataset-config and --dataset-revision"):
            ChatSource(str(chats_file), None, **names)


def test_recorded_sources_name_the_commit_of_what_they_were_recorded_for() -> None:
    for record in (None, 3, {"model": 3}, {"model": {"id": "a"}}, {"model": {"id": "a", "revision": 1, "commit": "c"}}):
        assert recorded_sources({"sources": record}) == {}
    sources = {"model": {"id": "a", "revision": "main", "commit": "c"}}
    assert [pinned_revision(sources, "model", "a", asked) for asked in (None, "main", "c")] == ["c"] * 3
    assert pinned_revision(sources, "model", "a", "v2") == "v2"
    assert pinned_revision(sources, "model", "b", None) is None
    assert pinned_revision(sources, "dataset", "a", None) is None
    assert pinned_revision(None, "model", "a", "v2") == "v2"
