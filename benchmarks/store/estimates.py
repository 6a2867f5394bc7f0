"""Compares the estimates of `plan` and `train --dry-run` with real extraction and training.

    python -m benchmarks.store.estimates OUT --model MODEL --dataset CHATS [--max-sequences 100]
        [--drafter eagle]

Each step (plan, extract, dry run, train) is a separate process, so that its peak memory is measured
separately. An extraction is timed from its first forward to its last commit. A training is timed
from its first step to its end.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.kit.harness import parsed, parser_of
from benchmarks.kit.records import settings_of, write_record
from moa_data.machine import peak_memory
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.estimate import batches_of, estimate
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan
from moa_data.storage.plan import numbers
from moa_data.text import Progress
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.fit import plan_run, train

PARTS = ("plan", "extract", "dry-run", "train")


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def plan_part(config: ExtractConfig) -> dict[str, Any]:
    """Return the estimates of a plan."""
    plan = build_plan(config)
    batches = batches_of(plan.table, plan.forward.batch_tokens)
    largest = max(len(batch) * int(numbers(batch, "n_tokens").max()) for batch in batches)
    memory = plan.forward.host_range(largest)  # `plan` also calls this before it measures time.
    seconds = estimate(plan)
    disk = plan.disk_ranges.values()
    return {
        "n_tokens": [plan.n_tokens, plan.n_tokens],
        "seconds": seconds,
        "memory_bytes": memory,
        "disk_bytes": [sum(low for low, _ in disk), plan.stored_bytes],
    }


def extract_part(config: ExtractConfig) -> dict[str, Any]:
    """Extract, and return the time, memory and disk space that it took."""
    report = extract(config)
    return {
        "n_tokens": report.n_tokens,
        "seconds": report.timings.extract_s,
        "memory_bytes": peak_memory(),
        "disk_bytes": folder_bytes(Path(config.out)),
    }


def dry_run_part(config: TrainConfig) -> dict[str, Any]:
    """Return the estimates of a dry run."""
    plan = plan_run(config)
    return {"n_steps": [plan.n_steps, plan.n_steps]} | dataclasses.asdict(plan.cost)


def train_part(config: TrainConfig) -> dict[str, Any]:
    """Train, and return the time, memory and disk space that it took."""
    first_s: list[float] = []

    def note(*_: object) -> None:
        if not first_s:
            first_s.append(time.perf_counter())

    report = train(config, progress=Progress(note))
    return {
        "n_steps": report.n_steps,
        "seconds": time.perf_counter() - first_s[0],
        "memory_bytes": peak_memory(),
        "disk_bytes": folder_bytes(Path(config.out)),
    }


def run_part(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part in this process."""
    extraction = ExtractConfig.of(
        model=options.model, dataset=options.dataset, out=str(out / "store"),
        max_sequences=options.max_sequences, activations=tuple(options.activations.split(",")),
        codec=options.codec, device=options.device,
    )  # fmt: skip
    accelerator = "cpu" if options.device == "cpu" else "auto"
    training = TrainConfig.of(
        store=str(out / "store"), out=str(out / "run"), drafter=options.drafter,
        max_steps=options.max_steps, accelerator=accelerator,
    )  # fmt: skip
    if options.part in ("plan", "extract"):
        return plan_part(extraction) if options.part == "plan" else extract_part(extraction)
    return dry_run_part(training) if options.part == "dry-run" else train_part(training)


def compare(planned: dict[str, Any], measured: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """Return a row for each figure.

    A row has the estimated range, the measured value, and whether the value is within the range.
    """
    rows = []
    for name, value in measured.items():
        low, high = planned[name]
        rows.append({"what": what, "figure": name, "least": low, "most": high, "measured": value,
                     "within": low <= value <= high})  # fmt: skip
    return rows


def main() -> None:
    """Run the parts one after the other, and print estimates beside measurements."""
    options = parsed(
        parser_of(
            __name__, "out", model=str, dataset=str, max_sequences=100,
            activations="kv,hidden:last", codec="lossless", drafter="moa", max_steps=20,
            device="cpu", threads=int, part={"choices": PARTS, "default": None},
        )
    )  # fmt: skip
    out = Path(options.out)
    if options.part:
        (out / f"{options.part}.json").write_text(json.dumps(run_part(out, options)))
        return
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for part in PARTS:
        command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--part", part]
        subprocess.run(command, check=True)
        found[part] = json.loads((out / f"{part}.json").read_text())
    rows = compare(found["plan"], found["extract"], "extract") + compare(
        found["dry-run"], found["train"], "train"
    )
    print(json.dumps(rows, indent=1))
    print(write_record(out, "estimates", {"settings": settings_of(options), "figures": rows}))


if __name__ == "__main__":
    main()
