"""Measures training from a store: tokens per second, and the share of time that a step waits for data.

A short run that isn't counted comes first. Validation is off. Writes one JSON file to runs/benchmarks.

    python benchmarks/train_step.py STORE [--steps 40] [--batch-size 8] [--threads 1] [--reader-threads 1]
        [drafter sizes] [--optimizer adamw] [--teacher-forced-weight 0] [--no-cross-attention-drafts]
        [--layer-groups 1] [--no-unrotated-keys]
"""

import argparse
import tempfile
from typing import Any

import torch
from records import add_out_option, write_record

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
    add_out_option(parser)
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
    print(write_record(options.out, "train", {"figures": figures, "settings": settings}))


def small_config(store: str, out: str, **named: Any) -> TrainConfig:
    """The preset small with some settings changed, by their names."""
    return TrainConfig.merged([("", PRESETS["small"] | {"store": store, "out": out})]).replaced(**named)


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each size of the drafter."""
    for name in SIZES:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=None)


def chosen_sizes(options: argparse.Namespace) -> dict[str, Any]:
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


if __name__ == "__main__":
    main()
