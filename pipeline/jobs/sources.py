"""Records which commits of the Hub a store was made from, so that later starts take those and no newer ones.

``store.json`` records them as ``extraction.sources``; of local folders and files nothing is recorded::

    "sources": {
      "model": {"id": "Qwen/Qwen3-8B", "revision": "main", "commit": "b968826d..."},
      "dataset": {"id": "HuggingFaceH4/ultrachat_200k", "revision": "main", "commit": "8049631c..."}
    }
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import StorageUnavailable, StoreError
from ...storage.paths import StorePath
from ...storage.read.store import read_manifest
from ..chats.dataset import ChatSource
from ..config import ExtractConfig

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
    """Return the recorded commit of what is asked for, else the revision that is asked for.

    Args:
        kind: model or dataset.
        name: its path or Hub id.
        revision: branch, tag or commit; None for main.
    """
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
