"""Trains and measures what is not there yet, so that a script that is run again goes on from where it was."""

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.kit.records import provenance
from moa_data.trainer.config import REPORT_FILE, RUN_FILE, TrainConfig
from moa_data.trainer.fit import train


def trained(config: TrainConfig) -> dict[str, Any]:
    """Train, or go on training, unless the run is finished; returns its report.

    A run that was trained in one go has ``cpu_s`` too, processor seconds of its process, which other work on the
    machine hardly changes.
    """
    out = Path(config.out)
    report = out / REPORT_FILE
    if report.is_file():
        before, now = TrainConfig(**yaml.safe_load((out / RUN_FILE).read_text())).named(), config.named()
        changed = [name for name, value in now.items() if name != "resume" and before.get(name, value) != value]
        if changed:
            sys.exit(f"{out} was trained with other settings ({', '.join(changed)}); choose another OUT.")
        found: dict[str, Any] = json.loads(report.read_text())
        if found["n_steps"] >= (config.schedule.max_steps or 0):
            return found
    resume = (out / "checkpoints" / "last.ckpt").is_file()
    if not resume:
        shutil.rmtree(out, ignore_errors=True)
    began = time.process_time()
    train(config.replaced(resume=resume), provenance=provenance())
    found = json.loads(report.read_text())
    if not resume:
        found["cpu_s"] = time.process_time() - began
        report.write_text(json.dumps(found, indent=1) + "\n")
    return found


def kept(config: Any, measure: Callable[..., Any]) -> dict[str, Any]:
    """Return the report of these settings, measured first if it is not there."""
    file = Path(config.out)
    wanted = json.loads(json.dumps(config.named()))
    if not file.is_file() or json.loads(file.read_text())["config"] != wanted:
        measure(config, provenance=provenance())
    found: dict[str, Any] = json.loads(file.read_text())
    return found
