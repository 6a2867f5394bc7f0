"""Says what drafters are, and what differed in their training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import OptionInvalid
from ..moa.drafters.base import Drafter
from ..trainer.config import CHANGE_NO_RESULT

_RUN_FILES = ("run.yaml", "report.json")  # that `moa-data train` leaves beside a drafter
# Kinds of drafters are what is compared, and steps are compared as they were taken. Presets are in
# the settings that
# they set. The other two change rounding alone.
_MAY_DIFFER = CHANGE_NO_RESULT | {
    "drafter",
    "preset",
    "max_steps",
    "epochs",
    "micro_batch_size",
    "compile",
}


def drafter_facts(folder: str | Path, drafter: Drafter) -> dict[str, Any]:
    """List the facts of a drafter and of the run of ``moa-data train`` that its folder holds; else None or empty."""
    folder = Path(folder).expanduser().absolute()
    facts: dict[str, Any] = {
        "folder": str(folder),
        "kind": drafter.kind,
        "n_parameters": sum(weight.numel() for weight in drafter.parameters()),  # trained weights
        "drafts_all_tokens": drafter.config.draft_vocabulary in (0, drafter.config.vocab_size),
        "n_steps": None,
        # that it was trained on; of a run that recorded no total, by its last invocation
        "n_tokens": None,
        "n_bytes_read": None,  # of the store, for these tokens
        "store": {},  # identity of the store: sequences, tokens, hashes, codec
        "settings": {},
    }
    run = next(
        (
            run
            for run in (folder, folder.parent)
            if all((run / name).is_file() for name in _RUN_FILES)
        ),
        None,
    )
    if run is not None:
        report = _read(run / "report.json")
        store = run / "store.json"
        facts["n_steps"] = report.get("n_steps")
        facts["n_tokens"] = report.get("n_tokens_total") or report.get("n_tokens")
        facts["n_bytes_read"] = report.get("n_bytes_read") or None
        facts["store"] = _read(store) if store.is_file() else {}
        facts["settings"] = _read(run / "run.yaml")
    return facts


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
        # What a run did not record does not count as a difference.
        by_run = {name: own[key] for name, own in known.items() if key in own}
        if len(set(map(str, by_run.values()))) > 1:
            found.append(
                f"{key}: " + ", ".join(f"{name} {_short(value)}" for name, value in by_run.items())
            )
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
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise OptionInvalid(
            f"{file} cannot be read ({' '.join(str(error).split())}); restore it."
        ) from error
    if not isinstance(values, dict):
        raise OptionInvalid(
            f"{file} holds a {type(values).__name__}, expected a mapping; restore it."
        )
    return values
