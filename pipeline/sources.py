"""What a store was made from: commits of the Hub, content hashes of the target, and the settings of its runs.

``store.json`` records the commits as ``extraction.sources``, so that later starts take those and no newer ones; of
local folders and files nothing is recorded::

    "sources": {
      "model": {"id": "Qwen/Qwen3-8B", "revision": "main", "commit": "b968826d..."},
      "dataset": {"id": "HuggingFaceH4/ultrachat_200k", "revision": "main", "commit": "8049631c..."}
    }
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import StorageUnavailable, StoreError, StoreMismatch, TargetError, WorkerError
from ..files import parse_object
from ..moa.targets.bundle import hash_target, weight_files
from ..moa.targets.template import template_text
from ..storage.backend import names_in, read_file
from ..storage.paths import StorePath
from ..storage.read.store import read_manifest
from ..storage.schema import RUNS_NAME
from ..text import Progress
from .config import ExtractConfig
from .dataset import ChatSource

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt",
)  # fmt: skip

Sources = Mapping[str, Mapping[str, str]]
_MAIN = "main"


def recorded_sources(extraction: Mapping[str, Any]) -> Sources:
    """Return the sources that a manifest's ``extraction`` records; malformed ones are left out."""
    found = extraction.get("sources")
    entries = found.items() if isinstance(found, Mapping) else ()
    return {
        kind: entry
        for kind, entry in entries
        if isinstance(entry, Mapping) and all(isinstance(entry.get(key), str) for key in ("id", "revision", "commit"))
    }


def stored_sources(store: StorePath) -> Sources | None:
    """Return the sources of a store; None where there is no store yet."""
    try:
        return recorded_sources(read_manifest(store).extraction)
    except StorageUnavailable:
        raise
    except (StoreError, OSError):
        return None


def pinned_revision(sources: Sources | None, kind: str, name: str, revision: str | None) -> str | None:
    """Return the recorded commit of a model or dataset that is asked for, else the revision that is asked for."""
    entry = (sources or {}).get(kind)
    if entry and entry["id"] == name and (revision or _MAIN) in (entry["revision"], entry["commit"]):
        return entry["commit"]
    return revision


def sources_record(
    config: ExtractConfig, folder: Path, dataset: ChatSource, before: Sources | None
) -> dict[str, dict[str, dict[str, str]]]:
    """Return the record of the sources for ``extraction``.

    Args:
        folder: folder of the model, as it was found.
        before: the store's own record. An entry stays where the commits are equal, or where one of the two is unknown:
            content hashes then tell whether the data are the same.
    """
    now: dict[str, dict[str, str]] = {}
    if not Path(config.model).expanduser().is_dir():
        now["model"] = {"id": config.model, "revision": config.revision or _MAIN, "commit": folder.name}
    if dataset.commit:
        revision = config.data.dataset_revision or _MAIN
        now["dataset"] = {"id": config.dataset, "revision": revision, "commit": dataset.commit}
    if before is None:
        return {"sources": now} if now else {}
    kept = {kind: dict(entry) for kind, entry in before.items()}
    changed = {kind: new for kind, new in now.items() if kind in kept and kept[kind]["commit"] != new["commit"]}
    return {"sources": kept | changed} if kept else {}


def weight_identities(folder: Path, progress: Progress | None = None) -> dict[str, str]:
    """Hash a target's weights and config: target.weights_sha256 and target.config_sha256."""
    return {f"target.{key}": value for key, value in hash_target(folder, progress).items()}


def tokenizer_identities(folder: Path, tokenizer: Any) -> dict[str, str]:
    """Hash what tokens depend on of a target: tokenizer.sha256 and template.sha256."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode())
            digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    template = hashlib.sha256(template_text(tokenizer).encode()).hexdigest()
    return {"tokenizer.sha256": digest.hexdigest(), "template.sha256": template}


def check_identities(
    store: StorePath,
    stored: Mapping[str, str],
    found: Mapping[str, str],
    others: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
) -> None:
    """Refuse inputs that are not those of a store.

    Args:
        stored: identities of the manifest; those that it lacks are not compared.
        found: identities of what is given now.
        others: further differences: dotted key -> (stored value, value now).
    """
    changes: dict[str, tuple[Any, Any]] = {
        f"identities.{key}": (stored[key], value) for key, value in found.items() if stored.get(key, value) != value
    }
    if changes := {**changes, **others}:
        raise StoreMismatch(str(store), changes, "Give the --model, and the kind of device, that it was made with.")


def check_weights(folder: Path, is_local: bool) -> None:
    """Refuse a local model folder without safetensors files before any other work is done."""
    if is_local and not weight_files(folder):
        raise TargetError(f"{folder} has no *.safetensors weights; save the model with safe serialization.")


def recorded_arguments(extraction: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a store's chats were rendered with, beside the chat itself."""
    found = extraction.get("template_kwargs")
    return dict(found) if isinstance(found, Mapping) else {}


def recorded_config(store: StorePath) -> ExtractConfig:
    """Return the settings of the store's last finished extraction; raises WorkerError where none can be used."""
    runs = store / RUNS_NAME
    names = {setting.name for setting in ExtractConfig.settings()}
    records = [name for name in names_in(runs) if name.endswith(".json")]
    for path in (runs / name for name in sorted(records, reverse=True)):
        try:
            settings = parse_object(read_file(path))["config"]
            return ExtractConfig.of(**{name: value for name, value in settings.items() if name in names})
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    raise WorkerError(
        f"{runs} records no finished extraction, so its settings are not known. Run the command that made the store: "
        f"it writes what is missing, after `moa-data repair {json.dumps(str(store))} --drop` also what is damaged."
    )
