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


FLAG = {"action": argparse.BooleanOptionalAction}
SIZE_OPTIONS: dict[str, Any] = dict.fromkeys(SIZES, int)
"""Options of the harness: a size of the drafter each."""
TRAINING_OPTIONS: dict[str, Any] = {
    "optimizer": str, "teacher_forced_weight": float, "cross_attention_drafts": FLAG, "layer_groups": int,
    "unrotated_keys": FLAG,
}  # fmt: skip
"""Likewise, what decides what a step of training computes."""


def chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Return those of these options that were given."""
    values = vars(options)
    return {name: values[name] for name in (*SIZE_OPTIONS, *TRAINING_OPTIONS) if values.get(name) is not None}


def small_config(store: str, out: str, drafter: str = "moa", **named: Any) -> TrainConfig:
    """Return the preset small with some settings changed, by their names."""
    values = PRESETS["small"] | {"store": store, "out": out, "drafter": {"kind": drafter}}
    return TrainConfig.merged([("", values)]).replaced(**named)
