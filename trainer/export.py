"""Writes a drafter for another program: `moa-data export-drafter`. The formats are in ``moa/formats/checkpoint.py``."""

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors import safe_open
from torch import Tensor

from ..errors import DrafterError, OutputOccupied, TargetError
from ..files import PARTIAL_SUFFIX, disk_full_guard
from ..moa.drafters.base import Drafter
from ..moa.drafters.sizes import check_identity_fits, check_sizes_fit
from ..moa.formats.checkpoint import LAYOUTS, load_drafter, write_layout
from ..moa.targets.bundle import FROZEN_FILE, hash_target, load_target_config, target_sizes, weight_files
from ..moa.targets.live import resolve_model_folder
from ..moa.targets.model_files import read_header
from ..storage.backend import exists, open_path
from ..storage.paths import RemotePath
from ..storage.read.store import ActivationStore
from ..storage.schema import MANIFEST_NAME, TARGET_NAME
from .config import RUN_FILE, DrafterExportConfig
from .data import target_identity

_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_GIVE = "Give the target with --model."


@dataclass(frozen=True)
class DrafterExportReport:
    """The outcome of an export."""

    folder: Path
    format: str
    reader: str  # the program that loads it
    kind: str
    n_tensors: int
    written_bytes: int
    notes: tuple[str, ...]  # what to know before using it

    def describe(self) -> str:
        """Return the report as text."""
        line = (
            f"{self.folder}: {self.kind} drafter for {self.reader} ({self.format}), {self.n_tensors} tensors, "
            f"{self.written_bytes / 1e6:,.1f} MB; loaded again and equal"
        )
        return "\n".join((line, *(f"note: {note}" for note in self.notes)))


class TargetPieces(NamedTuple):
    """What a layout may need of a target."""

    config: Any  # of transformers
    identity: dict[str, str]  # weights_sha256 and config_sha256
    embeddings: Tensor | None = None  # [V, E], where they were asked for
    lm_head: Tensor | None = None  # likewise; the embeddings where the target has no LM head of its own


def export_drafter(config: DrafterExportConfig) -> DrafterExportReport:
    """Write a drafter in another layout; the folder gets its name once it has been loaded again and is equal."""
    layout = LAYOUTS[config.format]
    source, folder = Path(config.drafter).expanduser(), Path(config.out).expanduser()
    drafter = load_drafter(source)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputOccupied(f"{folder} is not an empty folder. Choose another --out.")
    pieces = None
    needs_target = layout.needs_target_config or layout.needs_embeddings or layout.needs_head
    if config.model or (layout.kind == drafter.kind and needs_target):
        pieces = find_target(config.model, source, layout.needs_embeddings, layout.needs_head)
        check_sizes_fit(drafter.config, target_sizes(pieces.config))
        check_identity_fits(drafter.config, pieces.identity)
    of_target = (pieces.config, pieces.embeddings, pieces.lm_head) if pieces else (None, None, None)
    dtype = getattr(torch, config.dtype)
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk_full_guard(folder):
            n_tensors = write_layout(drafter, layout, partial, dtype, *of_target)
        _compare(drafter, partial, dtype)
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    n_bytes, notes = (folder / "model.safetensors").stat().st_size, tuple(layout.notes(drafter.config))
    return DrafterExportReport(folder, layout.name, layout.reader, drafter.kind, n_tensors, n_bytes, notes)


def find_target(model: str | None, drafter: Path, with_embeddings: bool, with_head: bool = False) -> TargetPieces:
    """Read the target's config, identity and weights from a store, a model folder or the Hub.

    Without a model it is the store that the drafter's run was trained from.
    """
    place = model or _store_of(drafter)
    with contextlib.ExitStack() as opened:
        if _is_store(place):
            # Whatever its parts are like; of a store in a bucket, files of the target last until it is closed.
            store = opened.enter_context(ActivationStore(place, parts=()))
            folder, identity = store.target_path, target_identity(store)
            files, prefix = [folder / FROZEN_FILE], ""
        else:
            folder = resolve_model_folder(place)
            load_target_config(folder)  # refuses what is no target before it is hashed
            files, prefix, identity = weight_files(folder), "model.", hash_target(folder)
        embeddings = _read_tensor(files, (prefix + _EMBEDDINGS,), folder) if with_embeddings else None
        head = _read_tensor(files, (_HEAD, prefix + _EMBEDDINGS), folder) if with_head else None
        return TargetPieces(load_target_config(folder), identity, embeddings, head)


def _store_of(drafter: Path) -> str:
    for folder in (drafter, drafter.parent):
        if (folder / RUN_FILE).is_file():
            settings = yaml.safe_load((folder / RUN_FILE).read_text(encoding="utf-8"))
            store = str(settings.get("store", "")) if isinstance(settings, dict) else ""
            if store and _is_store(store):
                return store
            raise TargetError(f"the format needs the target, and the store {store!r} of {folder} is not there. {_GIVE}")
    raise TargetError(f"the format needs the target, and {drafter} is no run. {_GIVE}")


def _read_tensor(files: list[Path], names: tuple[str, ...], folder: Path) -> Any:
    for name in names:
        for file in files:
            if name in read_header(file, TargetError):
                with safe_open(file, framework="pt") as tensors:
                    return tensors.get_tensor(name)
    raise TargetError(f"{folder} has no tensor {names[0]}. {_GIVE}")


def _is_store(place: str) -> bool:
    path = open_path(place)
    if isinstance(path, RemotePath):
        return exists(path / MANIFEST_NAME)
    return (path / TARGET_NAME / FROZEN_FILE).is_file()


def _compare(drafter: Drafter, folder: Path, dtype: torch.dtype) -> None:
    again = load_drafter(folder)
    if json.dumps(again.config.to_dict(), sort_keys=True) != json.dumps(drafter.config.to_dict(), sort_keys=True):
        raise DrafterError(f"{folder} does not load with the same sizes. Report this drafter.json.")
    weights = again.state_dict()
    for name, value in drafter.state_dict().items():
        meant = value.to(dtype).to(weights[name].dtype) if value.is_floating_point() else value
        if not torch.equal(weights[name], meant):
            raise DrafterError(f"{folder}: {name} does not load as it was written. Check the disk and try again.")
