"""Writes one JSON file for each measurement, with settings and provenance. Nothing is overwritten.

Figures to publish are copied into a file of benchmarks/results, from which the tables of
docs/results/ are made. This command adds the commit and the machine of the measurement to the
file::

    python -m benchmarks.kit.records auto-policy RECORD ...
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from moa_data.commands.console import collect_provenance

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "runs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"


def add_out_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the record's folder."""
    parser.add_argument(
        "--out",
        type=Path,
        default=RUNS,
        help="folder to which the results are written (default runs/benchmarks)",
    )


def settings_of(options: argparse.Namespace, *without: str) -> dict[str, Any]:
    """Return the options that describe the measurement, in types that JSON can hold."""
    values = {key: value for key, value in vars(options).items() if key not in {"out", *without}}
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def provenance() -> dict[str, Any]:
    """Return the command, commit, versions, time and machine of this run."""
    return collect_provenance() | {
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def _cpu_name() -> str | None:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None
    )


def write_record(folder: Path, name: str, document: dict[str, Any]) -> Path:
    """Write a document and its provenance, and return the file."""
    found = provenance()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{found['time_utc'].replace(':', '').replace('+0000', 'Z')}.json"
    file.write_text(json.dumps(document | {"provenance": found}, indent=1, default=str) + "\n")
    return file


def sources(records: list[Path]) -> list[dict[str, Any]]:
    """Return the distinct sources of records: commit, day, processor, memory and torch version.

    Raises:
        ValueError: A record was measured outside a checkout, or with uncommitted changes.
    """
    found: list[dict[str, Any]] = []
    for record in records:
        of = json.loads(record.read_text())["provenance"]
        if of["git_sha"] is None or of["git_dirty"]:
            raise ValueError(
                f"{record} was measured outside a git repository, or with uncommitted changes. "
                "Commit the code, and measure again."
            )
        source = {
            "commit": of["git_sha"][:12],
            "day": of["time_utc"][:10],
            "cpu": of.get("cpu"),
            "n_cpus": of["n_cpus"],
            "memory_gib": of.get("memory_gib"),
            "torch": of["versions"].get("torch"),
        }
        if source not in found:
            found.append(source)
    return found


def main() -> None:
    """Add the commits and machines of records to a file of results."""
    parser = argparse.ArgumentParser(
        description="Add to benchmarks/results/NAME.json the commits and machines with which its "
        "figures were measured."
    )
    parser.add_argument("name", help="NAME of the file, without .json")
    parser.add_argument("records", type=Path, nargs="+", help="files that the benchmark wrote")
    options = parser.parse_args()
    file = RESULTS / f"{options.name}.json"
    table = json.loads(file.read_text())
    # Keep the sources of earlier records, because their rows stay in the table.
    known = table.get("sources", [])
    table["sources"] = known + [
        source for source in sources(options.records) if source not in known
    ]
    file.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
