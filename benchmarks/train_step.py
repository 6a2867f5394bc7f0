"""Measures training from a store: tokens per second, and the share of time that a step waits for data.

A short run that isn't counted comes first. Validation is off. Appends one JSON file to benchmarks/results.

    python benchmarks/train_step.py STORE [--steps 40] [--batch-size 8] [--threads 1] [--reader-threads 1]
        [drafter sizes] [--optimizer adamw] [--teacher-forced-weight 0] [--no-cross-attention-drafts]
        [--layer-groups 1] [--no-unrotated-keys]
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from moa_data.commands.provenance import collect_provenance
from moa_data.trainer.config import PRESETS, TrainConfig
from moa_data.trainer.run import train

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
TRAINING = ("optimizer", "teacher_forced_weight", "cross_attention_drafts", "layer_groups", "unrotated_keys")


def main() -> None:
    """Runs the benchmark, prints the figures and writes them."""
    parser = argparse.ArgumentParser(description="Measure training from a store.")
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--reader-threads", type=int, default=1)
    parser.add_argument("--precision", default="auto")
    add_size_options(parser)
    add_training_options(parser)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = chosen_sizes(options) | chosen_training(options)
    values: dict[str, Any] = {
        "batch_size": options.batch_size,
        "reader_threads": options.reader_threads,
        "precision": options.precision,
        "validation_fraction": 0.0,
        "checkpoint_every": 10**9,
    }
    with tempfile.TemporaryDirectory(prefix="moa-data-bench-") as folder:
        config = small_config(options.store, f"{folder}/warm-up", max_steps=3, **values | chosen)
        train(config, progress_bar=False)
        report = train(config.replaced(out=f"{folder}/run", max_steps=options.steps), progress_bar=False)
    figures = {
        "tokens_per_s": report.tokens_per_s,
        "data_wait_share": report.data_wait_share,
        "n_tokens": report.n_tokens,
        "n_steps": report.n_steps,
        "n_parameters": report.n_parameters,
        "n_threads": torch.get_num_threads(),
        "n_reader_threads": options.reader_threads,
    }
    for name, value in figures.items():
        print(f"{name:20} {value:14,.3f}")
    settings = {key: value for key, value in config.named().items() if key != "out"} | {"max_steps": options.steps}
    print(write_result(options.out, "train", {"figures": figures, "settings": settings}))


def small_config(store: str, out: str, **named: Any) -> TrainConfig:
    """The preset small with some settings changed, by their names."""
    return TrainConfig.merged([("", PRESETS["small"] | {"store": store, "out": out})]).replaced(**named)


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each size of the drafter."""
    for name in SIZES:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=None)


def chosen_sizes(options: argparse.Namespace) -> dict[str, int]:
    """The sizes that were given."""
    return {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of training that decide what a step computes."""
    parser.add_argument("--optimizer", default=None, help="adamw or muon; default: that of the preset small, muon")
    parser.add_argument("--teacher-forced-weight", type=float, default=None, help="0 for the on-policy pass alone")
    parser.add_argument("--cross-attention-drafts", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--layer-groups", type=int, default=None)
    parser.add_argument("--unrotated-keys", action=argparse.BooleanOptionalAction, default=None)


def chosen_training(options: argparse.Namespace) -> dict[str, Any]:
    """The training options that were given."""
    return {name: getattr(options, name) for name in TRAINING if getattr(options, name) is not None}


def write_result(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """Write figures and settings with their provenance; returns the file."""
    provenance = collect_provenance()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{provenance['time_utc'].replace(':', '').replace('+0000', 'Z')}.json"
    file.write_text(json.dumps(result | {"provenance": provenance}, indent=1) + "\n")
    return file


if __name__ == "__main__":
    main()
