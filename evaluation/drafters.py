"""Describes drafters, and the differences between their training runs."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import OptionInvalid
from ..files import parsing
from ..moa.drafters.base import Drafter
from ..trainer.config import CHANGE_NO_RESULT

_RUN_FILES = ("run.yaml", "report.json")  # files that `moa-data train` writes next to a drafter
# The report lists the settings that differ between the training runs of the drafters. The settings
# below are not compared. ``drafter`` may differ, because drafters of different kinds are meant to
# be compared. ``preset`` only sets other settings, and these are compared. Instead of ``max_steps``
# and ``epochs``, the number of steps that a run has made is compared. ``micro_batch_size`` and
# ``compile`` change only rounding.
_MAY_DIFFER = CHANGE_NO_RESULT | {
    "drafter",
    "preset",
    "max_steps",
    "epochs",
    "micro_batch_size",
    "compile",
}


def drafter_facts(folder: str | Path, drafter: Drafter) -> dict[str, Any]:
    """Return facts about a drafter and about its training run.

    If the folder belongs to no training run, the facts about the run are None or empty.
    """
    folder = Path(folder).expanduser().absolute()
    facts: dict[str, Any] = {
        "folder": str(folder),
        "kind": drafter.kind,
        "n_parameters": sum(weight.numel() for weight in drafter.parameters()),
        "drafts_all_tokens": drafter.config.draft_vocabulary in (0, drafter.config.vocab_size),
        "n_steps": None,
        # Number of tokens that the drafter was trained on. If the run was resumed, it may not have
        # recorded the total. Then this is the number of tokens since the run was last resumed.
        "n_tokens": None,
        "n_bytes_read": None,  # number of bytes that training read from the store
        # facts that identify the store: numbers of sequences and tokens, hashes, codec
        "store": {},
        "settings": {},
    }
    run = _training_run(folder)
    if run is not None:
        report = _read(run / "report.json")
        store = run / "store.json"
        facts["n_steps"] = report.get("n_steps")
        facts["n_tokens"] = report.get("n_tokens_total") or report.get("n_tokens")
        facts["n_bytes_read"] = report.get("n_bytes_read") or None
        facts["store"] = _read(store) if store.is_file() else {}
        facts["settings"] = _read(run / "run.yaml")
    return facts


def _training_run(folder: Path) -> Path | None:
    """Find the training run of a drafter in its folder or the parent folder. None if not found."""
    for run in (folder, folder.parent):
        if all((run / name).is_file() for name in _RUN_FILES):
            return run
    return None


def training_differences(drafters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the differences between the training runs of drafters, one line per difference.

    ``drafters`` maps the name of each drafter to the result of :func:`drafter_facts`.
    """
    if len(drafters) < 2:
        return []
    differences: list[str] = []
    # Text of a fact -> {name of a drafter: value of the fact}. Drafters that did not record the
    # fact are left out.
    by_fact: dict[str, dict[str, Any]] = {}
    for name, facts in drafters.items():
        if not facts["settings"]:
            differences.append(
                f"it is unknown how {name} was trained, because its folder contains no training run"
            )
            continue
        for fact, value in _compared(facts):
            by_fact.setdefault(fact, {})[name] = value
    for fact, by_drafter in by_fact.items():
        if len(set(map(str, by_drafter.values()))) > 1:
            recorded = [f"{name} {_short(value)}" for name, value in by_drafter.items()]
            differences.append(f"{fact} ({', '.join(recorded)})")
    return differences


def _compared(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the facts about a training run that are compared with the facts about other runs.

    Each fact is a pair of a text and a value. If the value differs between training runs, the
    report has a line that begins with the text.
    """
    recorded = {
        "the numbers of training steps differ": facts["n_steps"],
        "the numbers of training tokens differ": facts["n_tokens"],
    }
    for key, value in facts["store"].items():
        recorded[f"the stores differ in {key}"] = value
    for fact, value in recorded.items():
        if value is not None:
            yield fact, value
    for name, value in facts["settings"].items():
        for key, setting in value.items() if isinstance(value, dict) else [(name, value)]:
            # The settings under ``drafter`` apply only to one kind of drafter, so they may differ
            # between drafters. Skip them. The exception is ``forward_kl_weight``, which several
            # kinds of drafters have.
            if name == "drafter" and key != "forward_kl_weight":
                continue
            key = name if key == "kind" else key
            if key not in _MAY_DIFFER:
                yield f"the settings differ in {key}", setting


def _short(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return value[:12] if isinstance(value, str) else str(value)


def _read(file: Path) -> dict[str, Any]:
    with parsing(f"cannot read {file}", OptionInvalid, "Restore the file."):
        text = file.read_text(encoding="utf-8")
        try:
            values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        except yaml.YAMLError as error:
            # An error of YAML or JSON may have several lines, and its position is not in the first
            # one. So put all lines of the message into one line.
            raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(values, dict):
        raise OptionInvalid(
            f"{file} contains {values!r:.60}, expected an object with names and values. Restore the file."
        )
    return values
