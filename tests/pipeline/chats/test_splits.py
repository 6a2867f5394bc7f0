"""Splits are never mixed: one is chosen by name, or the folder is refused and its splits are named."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import DatasetError
from moa_data.pipeline.chats.dataset import ChatSource

datasets = pytest.importorskip("datasets")


def folder(path: Path, names: Sequence[str]) -> str:
    """Files with one row each, which says where it stands."""
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps({"at": name}) + "\n")
    return str(path)


def read(dataset: str, split: str | None) -> list[str]:
    return [row["at"] for _, row in ChatSource(dataset, split).rows()]


HUB = ["data/train_sft-00000-of-00002-a3e.jsonl", "data/train_sft-00001-of-00002-b4f.jsonl",
       "data/test_sft-00000-of-00001-c5a.jsonl"]  # fmt: skip
LAYOUTS = [
    (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"], "train", "test"),
    (HUB, "train_sft", "test_sft"),
    (["train.jsonl", "test.jsonl", "validation.jsonl"], "train", "validation"),
    (["default/train/0000.jsonl", "default/train/0001.jsonl", "default/test/0000.jsonl"], "train", "test"),
    (["train/a.jsonl", "test/a.jsonl"], "train", "test"),
    (["chats_train.jsonl", "chats_eval.jsonl"], "train", "eval"),
    (["data/cooking-00000-of-00001.jsonl", "data/travel-00000-of-00001.jsonl"], "cooking", "travel"),
    (["trainset.jsonl", "testset.jsonl"], "trainset", "testset"),
    (["trainSet.jsonl", "testSet.jsonl"], "trainSet", "testSet"),
    (["split=train/a.jsonl", "split=test/a.jsonl"], "train", "test"),
    (["chats_heldout.jsonl", "chats_train.jsonl"], "train", "heldout"),
    (["x-train_sft-00000-of-00002.jsonl", "x-train_gen-00000-of-00001.jsonl"], "train_sft", "train_gen"),
]


@pytest.mark.parametrize(("names", "one", "other"), LAYOUTS)
def test_a_folder_of_splits_gives_one_of_them_or_names_them(
    tmp_path: Path, names: list[str], one: str, other: str
) -> None:
    dataset = folder(tmp_path, names)
    wanted = sorted(name for name in names if one in name)
    assert read(dataset, one) == wanted
    assert read(dataset, other) == sorted(name for name in names if other in name)
    with pytest.raises(DatasetError, match=rf"splits .*{other}.* called 'nope'\. Choose one with --split"):
        ChatSource(dataset, "nope")
    if one == "train_sft":
        assert read(dataset, None) == wanted
    else:
        with pytest.raises(DatasetError, match=r"none that is called 'train_sft' \(the default\)"):
            ChatSource(dataset, None)


def test_files_that_look_like_no_split_are_one_dataset(tmp_path: Path) -> None:
    names = ["a.jsonl", "chats-1.jsonl", "chats-2.jsonl", "contest.jsonl", "more/latest-00000-of-00002.jsonl"]
    dataset = folder(tmp_path, names)
    assert read(dataset, None) == names
    assert ChatSource(dataset, None).describe() == dataset
    assert read(dataset, "more") == names[-1:]  # a folder of that very name


def test_the_only_split_is_the_default_and_is_named(tmp_path: Path) -> None:
    names = ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    dataset = folder(tmp_path, names)
    assert read(dataset, None) == names
    assert ChatSource(dataset, None).describe() == f"{dataset}, split train"
    with pytest.raises(DatasetError, match=r"holds the split train \(2 files\), and none that is called 'train_sft'"):
        ChatSource(dataset, "train_sft")


def test_files_of_no_split_beside_a_split_are_neither_mixed_in_nor_picked(tmp_path: Path) -> None:
    dataset = folder(tmp_path, ["train.jsonl", "statistics.jsonl"])
    assert read(dataset, "train") == ["train.jsonl"]
    assert ChatSource(dataset, "train").describe() == f"{dataset}, split train (1 of 2 files)"
    with pytest.raises(DatasetError, match=r"split train \(1 file\), beside 1 file of no split, and none"):
        ChatSource(dataset, None)


def test_a_name_that_covers_two_splits_is_refused(tmp_path: Path) -> None:
    dataset = folder(tmp_path, ["cooking/train.jsonl", "cooking/test.jsonl"])
    with pytest.raises(DatasetError, match=r"splits test .*, train .*, and none that is called 'cooking'"):
        ChatSource(dataset, "cooking")


def saved(path: Path, *names: str) -> Any:
    dataset = datasets.Dataset.from_list([{"at": name} for name in names])
    dataset.save_to_disk(path)
    return datasets.load_from_disk(path)


def test_a_cache_of_map_in_a_saved_dataset_is_not_read(tmp_path: Path) -> None:
    loaded = saved(tmp_path / "saved", "a", "b")
    loaded.map(lambda row: {"at": row["at"].upper()})
    assert list((tmp_path / "saved").glob("cache-*.arrow"))
    assert read(str(tmp_path / "saved"), None) == ["a", "b"]
    # Also where saved datasets lie side by side, and where the list is lost.
    saved(tmp_path / "saved" / "more", "c")
    assert read(str(tmp_path / "saved"), None) == ["a", "b"]
    (tmp_path / "saved" / "state.json").unlink()
    assert read(str(tmp_path / "saved"), None) == ["a", "b", "c"]


def test_a_saved_split_is_not_read_under_another_name(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"at": "a"}], split="train").save_to_disk(tmp_path / "saved")
    assert read(str(tmp_path / "saved"), None) == read(str(tmp_path / "saved"), "train") == ["a"]
    with pytest.raises(DatasetError, match=r"holds the split train .* none that is called 'test'"):
        ChatSource(str(tmp_path / "saved"), "test")


def test_a_saved_dictionary_of_splits_is_read_by_split(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    parts = {name: datasets.Dataset.from_list([{"at": name}]) for name in ("cooking", "travel")}
    datasets.DatasetDict(parts).save_to_disk(path)
    datasets.load_from_disk(path)["cooking"].map(lambda row: {"at": "mapped"})
    assert read(str(path), "cooking") == ["cooking"]
    assert ChatSource(str(path), "travel").describe() == f"{path}, split travel (1 of 2 files)"
    for split in (None, "nope"):
        with pytest.raises(DatasetError, match=r"splits cooking \(1 file\), travel \(1 file\)"):
            ChatSource(str(path), split)
    (path / "cooking" / "state.json").unlink()
    assert read(str(path), "travel") == ["travel"]
    with pytest.raises(DatasetError, match=r"cooking has no state\.json that lists its files"):
        ChatSource(str(path), "cooking")


def test_files_that_a_saved_dataset_lacks_or_has_elsewhere_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved(path, "a")
    state = json.loads((path / "state.json").read_text())
    (file,) = path.glob("*.arrow")
    outside = file.rename(tmp_path / "outside.arrow")
    with pytest.raises(DatasetError, match=r"data-00000-of-00001\.arrow is missing, one of 1 files that"):
        ChatSource(str(path), None)
    for name in ("../outside.arrow", str(outside), "..\\outside.arrow", "", None, 3):
        (path / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": name}]}))
        with pytest.raises(DatasetError, match="no name of a file inside the folder"):
            ChatSource(str(path), None)
    for text in ("{", "[" * 100_000, "[]"):
        (path / "state.json").write_text(text)
        with pytest.raises(DatasetError, match=r"state\.json (is no JSON|holds no JSON object)"):
            ChatSource(str(path), None)
    (path / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(DatasetError, match="saved with a selection of rows"):
        ChatSource(str(path), None)
