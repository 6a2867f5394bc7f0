"""Trains and measures what is missing, so that a script can be stopped and run again.

It also defines options of drafters and of training that several benchmarks share. These options
change settings of the preset small.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.kit.records import provenance
from moa_data.trainer.config import PRESETS, REPORT_FILE, RUN_FILE, TrainConfig
from moa_data.trainer.defaults import is_open
from moa_data.trainer.fit import train

SIZES = (
    "self_attention_kv_heads",
    "self_attention_mlp_width",
    "cross_attention_kv_heads",
    "cross_attention_mlp_width",
    "layer_attention_heads",
    "layer_attention_kv_heads",
    "layer_attention_mlp_width",
    "target_layer_inference",
)


FLAG = {"action": argparse.BooleanOptionalAction}
SIZE_OPTIONS: dict[str, Any] = dict.fromkeys(SIZES, int)
"""Command line options for the sizes of the drafter."""
TRAINING_OPTIONS: dict[str, Any] = {
    "optimizer": str, "teacher_forced_weight": float, "cross_attention_drafts": FLAG,
    "layer_groups": int, "unrotated_keys": FLAG,
}  # fmt: skip
"""Command line options that change the computation of a training step."""


def chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Return the shared options that were given."""
    values = vars(options)
    return {
        name: values[name]
        for name in (*SIZE_OPTIONS, *TRAINING_OPTIONS)
        if values.get(name) is not None
    }


def small_config(store: str, out: str, drafter: str = "moa", **named: Any) -> TrainConfig:
    """Return the preset small with some settings changed by name."""
    values = PRESETS["small"] | {"store": store, "out": out, "drafter": {"kind": drafter}}
    return TrainConfig.of(**values).replaced(**named)


def trained(config: TrainConfig) -> dict[str, Any]:
    """Train or resume training unless the run is finished, and return its report.

    If the run was trained without interruption, its report has ``cpu_s``, the CPU seconds of its
    process. Other work on the machine hardly affects CPU seconds.
    """
    out = Path(config.out)
    report = out / REPORT_FILE
    if report.is_file():
        before, now = (
            TrainConfig(**yaml.safe_load((out / RUN_FILE).read_text())).named(),
            config.named(),
        )
        given = {
            name: value for name, value in now.items() if name != "resume" and not is_open(value)
        }
        changed = [name for name, value in given.items() if before.get(name, value) != value]
        if changed:
            sys.exit(
                f"The run {out} was trained with other values of {', '.join(changed)}. Choose "
                "another output folder, or delete this run."
            )
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
    """Return the report for these settings. If the report is missing, measure first."""
    file = Path(config.out)
    wanted = json.loads(json.dumps(config.named()))
    if not file.is_file() or json.loads(file.read_text())["config"] != wanted:
        measure(config, provenance=provenance())
    found: dict[str, Any] = json.loads(file.read_text())
    return found
