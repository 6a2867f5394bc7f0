"""Loads drafters for a measurement, with what their training runs recorded."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from ..errors import OptionInvalid
from ..moa.drafters.base import Drafter
from ..moa.formats.checkpoint import load_drafters
from ..moa.targets.bundle import FrozenTarget
from ..moa.targets.live import Target

_RUN_FILES = ("run.yaml", "report.json")  # that `moa-data train` leaves beside a drafter
# Settings that change no result, or are compared otherwise: stores by their identity, steps as they were taken.
_MAY_DIFFER = {
    "store", "out", "drafter", "preset", "resume", "stop_after_steps", "max_steps", "epochs", "micro_batch_size",
    "devices", "accelerator", "reader_threads", "prefetch_batches", "prefetch_mb", "log_every", "checkpoint_every",
    "dry_run", "compile",
}  # fmt: skip


@dataclass(frozen=True)
class DrafterFacts:
    """The facts of a drafter and its training run; what its folder does not say is None or empty."""

    folder: str
    kind: str
    n_parameters: int  # trained weights
    n_steps: int | None = None
    n_tokens: int | None = None  # that it was trained on; of a run that recorded no total, by its last invocation
    n_bytes_read: int | None = None  # of the store, for these tokens
    store: dict[str, Any] = field(default_factory=dict)  # identity of the store: sequences, tokens, hashes, codec
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that fits the target, the frozen weights that it needs, and its facts."""

    drafter: Drafter
    frozen: FrozenTarget
    facts: DrafterFacts


def load_with_facts(folders: Sequence[str], target: Target, dtype: torch.dtype) -> dict[str, LoadedDrafter]:
    """Load drafters by name, from runs of ``moa-data train`` or folders, with what their runs recorded."""
    loaded: dict[str, LoadedDrafter] = {}
    for folder, (name, drafter) in zip(folders, load_drafters(folders, target, dtype).items(), strict=True):
        frozen = FrozenTarget.from_model(target.model, drafter.config.target_layer_inference)
        loaded[name] = LoadedDrafter(drafter, frozen, drafter_facts(Path(folder).expanduser().absolute(), drafter))
    return loaded


def drafter_facts(folder: Path, drafter: Drafter) -> DrafterFacts:
    """Read what a run of ``moa-data train`` recorded of its drafter; other folders give the drafter's size alone."""
    n_parameters = sum(weight.numel() for weight in drafter.parameters())
    run = next((run for run in (folder, folder.parent) if all((run / name).is_file() for name in _RUN_FILES)), None)
    if run is None:
        return DrafterFacts(str(folder), drafter.kind, n_parameters)
    report, store = _read(run / "report.json"), run / "store.json"
    n_tokens, n_bytes = report.get("n_tokens_total") or report.get("n_tokens"), report.get("n_bytes_read") or None
    identity = _read(store) if store.is_file() else {}
    settings = _read(run / "run.yaml")
    return DrafterFacts(
        str(folder), drafter.kind, n_parameters, report.get("n_steps"), n_tokens, n_bytes, identity, settings
    )


def training_differences(drafters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say what differed in the training of drafters, by name and the fields of their facts, a line each."""
    if len(drafters) < 2:
        return []
    found = [
        f"{name}: its folder holds no training run, so nothing says how it was trained"
        for name, facts in drafters.items()
        if not facts["settings"]
    ]
    known = {name: _compared(facts) for name, facts in drafters.items() if facts["settings"]}
    for key in dict.fromkeys(key for own in known.values() for key in own):
        # What a run did not record is no difference.
        by_run = {name: own[key] for name, own in known.items() if key in own}
        if len(set(map(str, by_run.values()))) > 1:
            found.append(f"{key}: " + ", ".join(f"{name} {_short(value)}" for name, value in by_run.items()))
    return found


def _compared(facts: Mapping[str, Any]) -> dict[str, Any]:
    """List what two trainings must share, by how a line about a difference begins."""
    recorded = {"steps differ": facts["n_steps"], "training tokens differ": facts["n_tokens"]}
    recorded |= {f"stores differ in {key}": value for key, value in facts["store"].items()}
    found = {key: value for key, value in recorded.items() if value is not None}
    for name, value in facts["settings"].items():
        for key, own in value.items() if isinstance(value, dict) else [(name, value)]:
            # Settings of one kind of drafter alone are what is compared.
            if name == "drafter" and key != "forward_kl_weight":
                continue
            key = name if key == "kind" else key
            if key not in _MAY_DIFFER:
                found[f"settings differ in {key}"] = own
    return found


def _short(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return value[:12] if isinstance(value, str) else str(value)


def _read(file: Path) -> dict[str, Any]:
    """Read a mapping from a JSON or YAML file."""
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise OptionInvalid(f"{file} cannot be read ({' '.join(str(error).split())}); restore it.") from error
    if not isinstance(values, dict):
        raise OptionInvalid(f"{file} holds a {type(values).__name__}, expected a mapping; restore it.")
    return values
