"""Reads from a store's runs/ and manifest how it was extracted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import WorkerError
from ...storage.disk.files import names_in
from ...storage.documents import parse_object, read_bounded
from ...storage.names import RUNS_NAME
from ...storage.paths import StorePath
from ..chats.splits import DEFAULT_SPLIT
from ..config import ExtractConfig


def known_split(settings: Mapping[str, Any]) -> str | None:
    """Return the split of recorded settings; None where it may be the default, which some records spell out."""
    split = settings.get("split")
    return split if isinstance(split, str) and split != DEFAULT_SPLIT else None


def recorded_arguments(extraction: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a store's chats were rendered with, beside the chat itself."""
    found = extraction.get("template_kwargs")
    return dict(found) if isinstance(found, Mapping) else {}


def recorded_config(store: StorePath) -> ExtractConfig:
    """Return the settings of the store's last finished extraction.

    Raises:
        WorkerError: none is recorded, or no record can be used.
        OSError: the records cannot be read.
    """
    runs = store / RUNS_NAME
    names = {setting.name for setting in ExtractConfig.settings()}
    records = [name for name in names_in(runs) if name.endswith(".json")]
    for path in (runs / name for name in sorted(records, reverse=True)):
        try:
            settings = parse_object(read_bounded(path))["config"]
            settings = settings | {"split": known_split(settings)}
            return ExtractConfig.of(**{name: value for name, value in settings.items() if name in names})
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    raise WorkerError(
        f"{runs} records no finished extraction, so its settings are not known. Run `moa-data repair "
        f"{json.dumps(str(store))} --drop`, then the command that made the store: it writes what is missing."
    )
