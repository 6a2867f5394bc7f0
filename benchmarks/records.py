"""Where measurements go: one JSON file for each, with settings and provenance; nothing is overwritten.

Figures that count are copied from there into benchmarks/results/*.json, the tables of docs/results.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from moa_data.commands.provenance import collect_provenance

RUNS = Path(__file__).parents[1] / "runs" / "benchmarks"


def add_out_option(parser: argparse.ArgumentParser) -> None:
    """Add the folder of the record."""
    parser.add_argument("--out", type=Path, default=RUNS, help="folder of the record (default runs/benchmarks)")


def settings_of(options: argparse.Namespace, *without: str) -> dict[str, Any]:
    """Return the options that say what was measured, as JSON can hold them."""
    values = {key: value for key, value in vars(options).items() if key not in {"out", *without}}
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def write_record(folder: Path, name: str, document: dict[str, Any]) -> Path:
    """Write a document and its provenance; returns the file."""
    provenance = collect_provenance()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{provenance['time_utc'].replace(':', '').replace('+0000', 'Z')}.json"
    file.write_text(json.dumps(document | {"provenance": provenance}, indent=1) + "\n")
    return file
