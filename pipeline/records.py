"""What a store's runs/ says about the extraction that made it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ..storage.commit import RUNS_NAME
from ..storage.documents import parse_object, read_bounded
from .config import ExtractConfig
from .errors import RepairRefused


def recorded_config(store: Path) -> ExtractConfig:
    """Return the settings of the store's last finished extraction.

    Raises:
        RepairRefused: none is recorded, or none can be read.
    """
    names = {item.name for item in dataclasses.fields(ExtractConfig)}
    for path in sorted((store / RUNS_NAME).glob("*.json"), reverse=True):
        try:
            settings = parse_object(read_bounded(path))["config"]
            lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
            config = ExtractConfig(**{name: value for name, value in (settings | lists).items() if name in names})
            config.check()
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        return config
    raise RepairRefused(
        f"{store / RUNS_NAME} records no finished extraction, so its settings are not known. Run `moa-data repair "
        f"{json.dumps(str(store))} --drop`, then the extract command that made the store: it redoes what is missing."
    )
