"""Finds the files of a folder that are the dataset: those of one split, and those that `save_to_disk` names.

A file belongs to the split that its sub-folder or its name spells, as on the Hub: ``train-00000-of-00002.parquet``,
``data/train_sft-00000-of-00001.parquet``, ``default/train/0000.parquet``, ``test.jsonl``, ``chats_validation.jsonl``.
In a folder of `save_to_disk` ``dataset_dict.json`` or ``state.json`` says which it is. Splits are never mixed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import DatasetError

TABLES = (".csv", ".tsv")
"""Suffixes of tables. A folder may hold tables that are no chats, so they are read where there is nothing else."""
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".feather", *TABLES)
DEFAULT_SPLIT = "train_sft"
"""Split that is read where none is given: that of chats in UltraChat and its relatives."""
RECORD_SUFFIX = ".regeneration.json"
"""Suffix of what `regenerate` writes beside its chats."""

_STATE, _DICT = "state.json", "dataset_dict.json"
_NO_CHATS = {"dataset_info.json", _STATE, _DICT, "dataset_infos.json"}
_MAP_CACHE = re.compile(r"cache-[^/]*\.arrow")
_KEYWORD = re.compile(
    r"(?<![^\W\d_])(?:train|training|validation|valid|dev|val|test|testing|eval|evaluation|heldout|holdout)"
    # Words end where letters do, or where a capital begins (testSet); people also write trainset and tests.
    r"(?:s|sets?|data|split)?(?!(?-i:[^\W\d_A-Z])).*",
    re.IGNORECASE,
)
_SHARDED = re.compile(r"(.+)-\d{5}-of-\d{5}\b.*")
_SHARD_NUMBER = re.compile(r"(?:[-_. ]?(?:part|shard|chunk))?[-_. ]?\d+(?:[-_ ]of[-_ ]\d+\b.*)?$")
_SHOWN_SPLITS = 8


@dataclass(frozen=True)
class ChosenFiles:
    """The files of a dataset, in the order in which they are read.

    Attributes:
        files: at least one.
        split: their split; None where nothing in the folder looks like one.
        n_others: files beside them that are not read.
    """

    files: tuple[Path, ...]
    split: str | None = None
    n_others: int = 0

    def describe(self) -> str:
        """Say which split and how many files are read; empty where no split is known."""
        if self.split is None:
            return ""
        n_all = len(self.files) + self.n_others
        return f", split {self.split}" + (f" ({len(self.files)} of {n_all} files)" if self.n_others else "")


def choose_files(path: Path, split: str | None) -> ChosenFiles:
    """Find the files of a dataset.

    Args:
        path: a file, which is taken as it is, or a folder.
        split: the split to read; None for DEFAULT_SPLIT where the folder has it, else for the only one it has.

    Returns:
        The files of one split, or all of a folder in which nothing looks like a split.

    Raises:
        DatasetError: there is nothing that can be read, several splits and none is the wanted one, or a `save_to_disk`
            folder lacks one of its files.
    """
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DatasetError(
                f"{path} has the suffix {path.suffix!r}, expected one of {', '.join(SUFFIXES)}. Convert it to jsonl."
            )
        return ChosenFiles((path,))
    found = _saved_splits(path, split) or _saved(path) or _without_tables(_named(path))
    if not found:
        raise DatasetError(
            f"Folder {path} holds no {', '.join(SUFFIXES)} file. Point --dataset at chats in one of these formats."
        )
    return _choose(path, found, split)


def _choose(path: Path, found: Mapping[Path, str | None], split: str | None) -> ChosenFiles:
    """Take the wanted split, the only one, or all files where none has a split."""
    splits = Counter(name for name in found.values() if name is not None)
    wanted = split or DEFAULT_SPLIT
    named = [file for file, name in found.items() if name == wanted]
    named = named or [file for file in found if _is_named(file.relative_to(path), wanted)]
    if named and len({found[file] for file in named} - {None}) < 2:
        return ChosenFiles(tuple(named), wanted, len(found) - len(named))
    if not splits:
        return ChosenFiles(tuple(found))
    n_without = len(found) - splits.total()
    if split is None and len(splits) == 1 and not n_without:
        return ChosenFiles(tuple(found), next(iter(splits)))
    shown = ", ".join(f"{name} ({n} file{'s' * (n > 1)})" for name, n in sorted(splits.items())[:_SHOWN_SPLITS])
    more = f" and {len(splits) - _SHOWN_SPLITS} more" if len(splits) > _SHOWN_SPLITS else ""
    beside = f", beside {n_without} file{'s' * (n_without > 1)} of no split" if n_without else ""
    raise DatasetError(
        f"Folder {path} holds the split{'s' * (len(splits) > 1)} {shown}{more}{beside}, and none that is called "
        f"{wanted!r}{' (the default)' if split is None else ''}. Choose one with "
        f"--split, for example --split {sorted(splits, key=_training_first)[0]}, or point --dataset at a single file."
    )


def _training_first(name: str) -> tuple[bool, str]:
    return "train" not in name, name


def _is_named(relative: Path, split: str) -> bool:
    """Whether a file, or one of its folders, has the name of a split."""
    stem = relative.name.split(".")[0]
    return split in relative.parts[:-1] or stem == split or stem.startswith(split + "-")


def _named(path: Path) -> dict[Path, str | None]:
    """Map every file that may hold chats to the split that its folders or its name spell, in the order of the paths."""
    states: dict[Path, list[Path] | None] = {}
    found: dict[Path, str | None] = {}
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        if (
            not file.is_file()
            or file.suffix.lower() not in SUFFIXES
            or file.name in _NO_CHATS
            or file.name.endswith(RECORD_SUFFIX)
            or _MAP_CACHE.fullmatch(file.name)
            or any(part.startswith(".") for part in relative.parts)
        ):
            continue
        if file.parent not in states:
            states[file.parent] = _listed_files(file.parent)
        listed = states[file.parent]
        if listed is None or file in listed:
            found[file] = _split_of(relative)
    return found


def _without_tables(found: dict[Path, str | None]) -> dict[Path, str | None]:
    return {file: split for file, split in found.items() if file.suffix.lower() not in TABLES} or found


def _split_of(relative: Path) -> str | None:
    """Return the split that a path spells: its innermost folder that looks like one, else the file's name."""
    for folder in reversed(relative.parts[:-1]):
        if match := _KEYWORD.search(folder):
            return match[0]
    stem = relative.name.removesuffix(relative.suffix)
    sharded = _SHARDED.fullmatch(stem)
    if sharded and relative.parts[:-1][-1:] == ("data",):
        return sharded[1]
    if match := _KEYWORD.search(stem):
        return _SHARD_NUMBER.sub("", match[0]) or match[0]
    return None


def _saved_splits(path: Path, split: str | None) -> dict[Path, str | None]:
    """Map the files of a folder of `DatasetDict.save_to_disk` to their splits; empty for any other folder."""
    if not (path / _DICT).is_file():
        return {}
    names = _read_object(path / _DICT).get("splits")
    if not isinstance(names, list) or not names or not all(_is_inside(name) for name in names):
        raise DatasetError(f"{path / _DICT} names no splits inside its folder. Save the dataset again.")
    wanted = names[0] if split is None and len(names) == 1 else split or DEFAULT_SPLIT
    found: dict[Path, str | None] = {}
    for name in names:
        files = _listed_files(path / name)
        if files is None and name == wanted:
            raise DatasetError(
                f"{path / name} has no {_STATE} that lists its files, though {path / _DICT} names the split. Restore "
                "the folder, or save the dataset again."
            )
        found |= dict.fromkeys(files or (), name)
    return found


def _saved(path: Path) -> dict[Path, str | None]:
    """Map the files of a folder of `Dataset.save_to_disk` to its split, if it says one; empty for any other folder."""
    files = _listed_files(path)
    if files is None:
        return {}
    split = _read_object(path / _STATE).get("_split")
    return dict.fromkeys(files, split if isinstance(split, str) else None)


def _listed_files(folder: Path) -> list[Path] | None:
    """Return the files that a folder's state.json lists, all there; None where it has no such list."""
    if not (folder / _STATE).is_file():
        return None
    state = _read_object(folder / _STATE)
    items = state.get("_data_files")
    if not isinstance(items, list):
        return None  # another program's
    if state.get("_indices_data_files"):
        raise DatasetError(
            f"{folder} was saved with a selection of rows by an old release of datasets. Load it with that library and "
            "save it again with a newer one."
        )
    names = [item.get("filename") if isinstance(item, Mapping) else None for item in items]
    if foreign := [name for name in names if not _is_inside(name)]:
        raise DatasetError(
            f"{folder / _STATE} lists {foreign[0]!r}, which is no name of a file inside the folder. Save the dataset "
            "again."
        )
    files = [folder / str(name) for name in names]
    if missing := [file for file in files if not file.is_file()]:
        raise DatasetError(
            f"{missing[0]} is missing, one of {len(files)} files that {folder / _STATE} lists. Restore it, or save the "
            "dataset again."
        )
    return files


def _is_inside(name: Any) -> bool:
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    steps = PurePosixPath(name)
    return not steps.is_absolute() and ".." not in steps.parts and bool(steps.parts)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is no JSON ({error}). Restore it, or save the dataset again.") from error
    if not isinstance(document, dict):
        raise DatasetError(f"{path} holds no JSON object. Restore it, or save the dataset again.")
    return document
