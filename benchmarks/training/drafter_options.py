"""The options of drafters and of training that benchmarks share, on top of the preset small."""

import argparse
from typing import Any

from moa_data.trainer.config import PRESETS, TrainConfig

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


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each size of the drafter."""
    for name in SIZES:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=None)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of training that decide what a step computes."""
    parser.add_argument("--optimizer", default=None, help="adamw or muon; default: that of the preset small, muon")
    parser.add_argument("--teacher-forced-weight", type=float, default=None, help="0 for the on-policy pass alone")
    parser.add_argument("--cross-attention-drafts", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--layer-groups", type=int, default=None)
    parser.add_argument("--unrotated-keys", action=argparse.BooleanOptionalAction, default=None)


def chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Return those of these options that were given."""
    values = vars(options)
    return {name: values[name] for name in (*SIZES, *TRAINING) if values.get(name) is not None}


def small_config(store: str, out: str, drafter: str = "moa", **named: Any) -> TrainConfig:
    """Return the preset small with some settings changed, by their names."""
    values = PRESETS["small"] | {"store": store, "out": out, "drafter": {"kind": drafter}}
    return TrainConfig.merged([("", values)]).replaced(**named)
