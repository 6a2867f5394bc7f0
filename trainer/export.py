"""Write a drafter in the format of another program.

The formats are defined in ``moa/formats/checkpoint.py``.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open

from ..errors import DrafterError, StoreError, TargetError
from ..files import PARTIAL_SUFFIX, disk_full_guard, refuse_other_files
from ..moa.drafters.base import Drafter
from ..moa.drafters.sizes import check_target_fits
from ..moa.formats.checkpoint import LAYOUTS, load_drafter, write_layout
from ..moa.formats.layout import EMBEDDINGS, LM_HEAD, Layout
from ..moa.targets.bundle import FROZEN_FILE, hash_target, weight_files
from ..moa.targets.facts import TargetFacts, load_facts
from ..moa.targets.live import resolve_model_folder
from ..moa.targets.model_files import read_header
from ..storage.backend import backend_of, open_path
from ..storage.paths import RemotePath
from ..storage.read.store import ActivationStore
from ..storage.schema import MANIFEST_NAME, TARGET_NAME
from .config import RUN_FILE, DrafterExportConfig
from .data import target_identity

_GIVE = "Give the target with `model`."


@dataclass(frozen=True)
class DrafterExportReport:
    """The report that `moa-data export-drafter` prints about the files that it has written."""

    folder: Path
    format: str
    reader: str  # The program that loads the exported drafter.
    kind: str
    n_tensors: int
    written_bytes: int
    notes: tuple[str, ...]  # Notes for the user of the exported drafter.

    def describe(self) -> str:
        """Return the report as text."""
        lines = [
            f"{self.folder}: {self.kind} drafter for {self.reader} ({self.format}), "
            f"{self.n_tensors} tensors, {self.written_bytes / 1e6:,.1f} MB; reading it again gave "
            "equal weights"
        ]
        for note in self.notes:
            lines.append(f"note: {note}")
        return "\n".join(lines)


def export_drafter(config: DrafterExportConfig) -> DrafterExportReport:
    """Write a drafter in the file format of another program.

    The drafter in the written folder is loaded again and compared with the given drafter. The
    folder gets its final name only if both are equal.
    """
    layout = LAYOUTS[config.format]
    source = Path(config.drafter).expanduser()
    folder = Path(config.out).expanduser()
    drafter = load_drafter(source)
    refuse_other_files(folder)
    facts: TargetFacts | None = None
    pieces: dict[str, Any] = {}
    if config.model or (layout.kind == drafter.kind and layout.needs):
        identity, facts, tensors = find_target(config.model, source, layout.needs)
        check_target_fits(drafter.config, facts.sizes, identity)
        pieces = {"config": facts.config, **tensors}
    _check_embeddings(layout, facts or _facts_of(source))
    dtype = getattr(torch, config.dtype)
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk_full_guard(folder):
            n_tensors = write_layout(drafter, layout, partial, dtype, pieces)
        _compare(drafter, partial, dtype)
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    n_bytes = (folder / "model.safetensors").stat().st_size
    notes = tuple(layout.notes(drafter.config))
    if n_drafted := len(drafter.config.draft_tokens):
        notes += (
            f"{layout.reader} drafts from the whole vocabulary, with the target's LM head, while "
            f"in moa-data the drafter can draft only {n_drafted:,} tokens",
        )
    return DrafterExportReport(
        folder, layout.name, layout.reader, drafter.kind, n_tensors, n_bytes, notes
    )


def find_target(
    model: str | None, drafter: Path, needs: Sequence[str]
) -> tuple[dict[str, str], TargetFacts, dict[str, torch.Tensor]]:
    """Read a target's hashes, the facts about it, and the tensors that a file format needs.

    Args:
        model: a store, a model folder or a hub id. If the argument is None, it is the store that
            the drafter was trained from.
        drafter: path of the drafter.
        needs: names of the tensors that the file format needs.

    Returns:
        The target's hashes, the facts about the target, and the needed tensors by name.
    """
    source = model or _store_of(drafter)
    with contextlib.ExitStack() as opened:
        if _is_store(source):
            # Open the store without reading its parts. Keep the store open until the files are
            # read, because closing a store in a bucket deletes the local copies of its files.
            store = opened.enter_context(ActivationStore(source, parts=()))
            folder = store.target_path
            identity = target_identity(store)
            files = [folder / FROZEN_FILE]
            prefix = ""
        else:
            folder = resolve_model_folder(source)
            # Raise an error for an invalid target now, because hashing its weights takes long.
            load_facts(folder)
            files = weight_files(folder)
            prefix = "model."
            identity = hash_target(folder)
        # If a target has no LM head of its own, its embeddings are the LM head (tied weights).
        names = {EMBEDDINGS: (prefix + EMBEDDINGS,), LM_HEAD: (LM_HEAD, prefix + EMBEDDINGS)}
        tensors: dict[str, torch.Tensor] = {}
        for name in needs:
            if name in names:
                tensors[name] = _read_tensor(files, names[name], folder)
        facts = load_facts(folder)
        # Some targets multiply embeddings by a constant. A store holds the multiplied embeddings,
        # so do the same to embeddings from a model folder.
        if EMBEDDINGS in tensors and prefix:
            table = tensors[EMBEDDINGS]
            tensors[EMBEDDINGS] = table * torch.tensor(facts.embedding_scale, dtype=table.dtype)
        if not Path(source).exists():
            # ``source`` is a hub id. Record it instead of the model's path in the local Hub cache.
            facts.config.name_or_path = source
        return identity, facts, tensors


def _facts_of(drafter: Path) -> TargetFacts | None:
    """Read the facts about the target from the store that a drafter was trained from.

    If the store is not known or cannot be read, the result is None.
    """
    with contextlib.suppress(TargetError, StoreError):
        return find_target(None, drafter, ())[1]
    return None


def _check_embeddings(layout: Layout, facts: TargetFacts | None) -> None:
    """Refuse a format without embeddings if the target scales its embeddings.

    A program that loads this format would feed unscaled embeddings of the target to the drafter,
    but the drafter was trained with scaled embeddings.
    """
    if facts is not None and not layout.holds_embeddings and facts.embedding_scale != 1:
        fitting = ", ".join(other.name for other in LAYOUTS.values() if other.holds_embeddings)
        raise DrafterError(
            f"{facts.model_type} scales its embeddings, but the format {layout.name} holds no "
            f"embeddings, so {layout.reader} would feed unscaled embeddings to the drafter. Choose "
            f"one of the formats {fitting}."
        )


def _store_of(drafter: Path) -> str:
    for folder in (drafter, drafter.parent):
        if (folder / RUN_FILE).is_file():
            settings = yaml.safe_load((folder / RUN_FILE).read_text(encoding="utf-8"))
            store = str(settings.get("store", "")) if isinstance(settings, dict) else ""
            if store and _is_store(store):
                return store
            raise TargetError(
                f"this format needs data of the target, but the store {store!r}, from which "
                f"{folder} was trained, does not exist. {_GIVE}"
            )
    raise TargetError(
        f"this format needs data of the target, but {drafter} is not the folder of a run, so its "
        f"target is not known. {_GIVE}"
    )


def _read_tensor(files: list[Path], names: tuple[str, ...], folder: Path) -> Any:
    for name in names:
        for file in files:
            if name in read_header(file, TargetError):
                with safe_open(file, framework="pt") as tensors:
                    return tensors.get_tensor(name)
    raise TargetError(
        f"this format needs the tensor {names[0]} of the target, but {folder} lacks it. {_GIVE}"
    )


def _is_store(location: str) -> bool:
    path = open_path(location)
    if isinstance(path, RemotePath):
        return backend_of(path / MANIFEST_NAME).exists()
    return (path / TARGET_NAME / FROZEN_FILE).is_file()


def _compare(drafter: Drafter, folder: Path, dtype: torch.dtype) -> None:
    again = load_drafter(folder)
    if json.dumps(again.config.to_dict(), sort_keys=True) != json.dumps(
        drafter.config.to_dict(), sort_keys=True
    ):
        raise DrafterError(
            f"the sizes of the drafter in {folder} changed when it was read again after the "
            "export. Report this as a bug, with the drafter.json of the exported drafter."
        )
    weights = again.state_dict()
    for name, value in drafter.state_dict().items():
        meant = value.to(dtype).to(weights[name].dtype) if value.is_floating_point() else value
        if not torch.equal(weights[name], meant):
            raise DrafterError(
                f"the tensor {name} in {folder} changed when it was read again after the export. "
                "Check the disk and try again."
            )
