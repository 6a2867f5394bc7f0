"""Compares all drafters at equal weights, steps, batches and data, on one store.

The question is which drafter commits the most tokens per target call. Each drafter is trained with
two learning rates. The rate that is better on held-out chats of the TRAINING data is used with the
other seeds, too. The test prompts are decoded with each chosen run: with chains of several lengths,
with a chain that stops at an uncertain draft, and with a tree. ::

    moa-data extract --model MODEL --dataset TRAIN_CHATS --out STORE \
        --activations kv,hidden:last,hidden:layer:1,hidden:layer:3,hidden:layer:6
    python -m benchmarks.training.drafters STORE MODEL TEST_CHATS OUT --target NAME --steps 340
        --seeds 0 1 [--only eagle ...] [--set divergence=lk]

--only also takes the variants of Mixture of Attentions in ABLATIONS. Variants with Target Layer
Inference need a store with --target-layers 3. --set changes settings. Runs with changed settings
need a separate OUT.

The sizes of the drafters are for a target of 8 layers and width 384. All results are stored in OUT,
and a later call continues from there. Several processes may share OUT if each trains different
drafters. OUT/drafters.json holds all rows in OUT. ``leaderboard.py`` measures tokens/s, on an idle
machine.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from benchmarks.kit.harness import parsed, parser_of
from benchmarks.kit.records import provenance
from benchmarks.training.leaderboard import DECODING, acceptance, report_name
from benchmarks.training.runs import small_config, trained
from moa_data.trainer.config import PRESETS, TrainConfig

READ = (1, 3, 6)
"""Layers of the target whose outputs the drafters read."""
BLOCK: dict[str, Any] = {"block_layers": 2, "anchors": 24}
# The loss that DSpark was published with.
PUBLISHED = {"forward_kl_weight": 0.0, "cross_entropy_weight": 0.1, "l1_weight": 0.9}
DSPARK = {"drafter": "dspark", "block_size": 10, "markov_rank": 32} | BLOCK | PUBLISHED
MOA: dict[str, Any] = {
    "drafter": "moa", "self_attention_kv_heads": 1, "self_attention_mlp_width": 235,
    "cross_attention_kv_heads": 1, "cross_attention_mlp_width": 320, "layer_attention_heads": 4,
    "layer_attention_kv_heads": 2, "layer_attention_mlp_width": 224,
}  # fmt: skip
PAPER = (
    MOA
    | PRESETS["paper"]["drafter"]
    | {"self_attention_mlp_width": 278, "cross_attention_mlp_width": 363}
)
BOTH_PASSES = {"teacher_forced_weight": 1.0}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("EAGLE-2", {"drafter": "eagle", "self_attention_mlp_width": 1024}),
    "eagle-published": (
        "EAGLE-2 as published",
        {"drafter": "eagle", "self_attention_mlp_width": 1024, "eagle_embedding_scale": 1.0},
    ),
    "eagle3": (
        "EAGLE-3",
        {
            "drafter": "eagle3", "fused_layers": READ, "draft_vocabulary": 1024,
            "self_attention_mlp_width": 363,
        },
    ),
    "moa": ("Mixture of Attentions", MOA),
    "moa-light": (
        "Mixture of Attentions of every second layer, one pass",
        MOA | {"layer_stride": 2, "teacher_forced_weight": 0.0},
    ),
    "dflash": (
        "DFlash",
        {
            "drafter": "dflash", "block_size": 11, "fused_layers": READ,
            "self_attention_mlp_width": 288,
        } | BLOCK,
    ),
    "dspark": ("DSpark", DSPARK | {"fused_layers": READ, "self_attention_mlp_width": 174}),
    "block-kv": (
        "DSpark on keys and values",
        DSPARK | {
            "context": "kv", "fused_layers": READ, "block_layers": 3,
            "self_attention_mlp_width": 130,
        },
    ),
    "block-kv-deep": (
        "DSpark on keys and values of later layers",
        DSPARK | {
            "context": "kv", "fused_layers": (2, 4, 7), "block_layers": 3,
            "self_attention_mlp_width": 130,
        },
    ),
    "block-kv-six": (
        "DSpark on keys and values of six layers",
        DSPARK | {
            "context": "kv", "fused_layers": (1, 2, 3, 5, 6, 7),
            "self_attention_mlp_width": 366,
        },
    ),
    "block-memory": (
        "DSpark on a memory",
        DSPARK | {"context": "memory", "self_attention_mlp_width": 67},
    ),
}  # fmt: skip
"""Maps the name of each drafter to (title, settings).

Each drafter has about 1.89 M weights, including an LM head and embeddings of its own.
"""
ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("MoA as in the paper", PAPER),
    "last-layer": (
        "no layer self-attention, KV of the last layer only, wider MLPs",
        PAPER
        | {
            "layer_attention": False,
            "self_attention_mlp_width": 438,
            "cross_attention_mlp_width": 523,
        },
    ),
    "no-bound": ("no step bound", PAPER | {"step_bound": False}),
    "fixed-bound": ("one step bound of 10", PAPER | {"step_bound_min": 10, "step_bound_max": 10}),
    "no-staircase": ("no staircase curriculum", PAPER | {"staircase": False}),
    "standard": ("teacher-forced in place of on-policy", PAPER | {"on_policy": False}),
    "two-passes": ("a teacher-forced pass beside the on-policy one", PAPER | BOTH_PASSES),
    "drafts-in-sight": (
        "both passes, drafts in sight of cross-attention",
        PAPER | BOTH_PASSES | {"cross_attention_drafts": True, "self_attention_mlp_width": 278},
    ),
    "one-pass": ("one pass", MOA | {"teacher_forced_weight": 0.0}),
    "half-layers": ("every second layer", MOA | {"layer_stride": 2}),
    "target-layers-1": (
        "the paper's, through 1 target layer",
        PAPER | {"target_layer_inference": 1},
    ),
    "target-layers-3": (
        "the paper's, through 3 target layers",
        PAPER | {"target_layer_inference": 3},
    ),
}
"""Variants of Mixture of Attentions (``--only``). Each leaves out or replaces one part."""


def train_config(options: argparse.Namespace, name: str, rate: float, seed: int) -> TrainConfig:
    """Return the settings of a run.

    ``rate`` multiplies the learning rates of the preset small.
    """
    out = str(options.out / f"run-{name}-{rate:g}-{seed}")
    settings = (DRAFTERS | ABLATIONS)[name][1] | settings_given(options.set)
    config = small_config(
        options.store, out, **settings, max_steps=options.steps, validate_every=options.steps,
        validation_sequences=options.validation_sequences, seed=seed,
    )  # fmt: skip
    rates = config.named()
    return config.replaced(
        learning_rate=rate * rates["learning_rate"],
        matrix_learning_rate=rate * rates["matrix_learning_rate"],
    )


def settings_given(changes: list[str]) -> dict[str, Any]:
    """Parse settings of the form ``NAME=VALUE``."""
    return {name: yaml.safe_load(value) for name, value in (one.split("=", 1) for one in changes)}


def chosen_rate(options: argparse.Namespace, name: str) -> tuple[float, dict[float, float]]:
    """Train with each learning rate.

    Returns the rate with the longest expected acceptance length on held-out training chats, and the
    lengths of all rates.
    """
    found = {
        rate: float(
            trained(train_config(options, name, rate, options.seeds[0]))[
                "best_expected_acceptance_length"
            ]
        )
        for rate in options.rates
    }
    return max(found, key=lambda rate: found[rate]), found


def measured(options: argparse.Namespace, name: str, rate: float, seed: int) -> dict[str, Any]:
    """Train with a seed, decode the test prompts, and return a row."""
    config = train_config(options, name, rate, seed)
    training, run = trained(config), config.out
    title, _ = (DRAFTERS | ABLATIONS)[name]
    return {
        "drafter": name, "title": title, "seed": seed, "rate": rate, "steps": options.steps,
        "run": run, "set": options.set,
        "n_parameters": training["n_parameters"], "n_tokens": training["n_tokens_total"],
        "expected_acceptance_length": training["best_expected_acceptance_length"],
        "cpu_s": training.get("cpu_s"),
        "lengths": acceptance(options, report_name(title, options.target, seed), run),
    }  # fmt: skip


def main() -> None:
    """Train and measure what is missing, and write all rows."""
    only = {
        "nargs": "+",
        "choices": [*DRAFTERS, *ABLATIONS],
        "default": list(DRAFTERS),
        "metavar": "DRAFTER",
    }
    changes = {"nargs": "+", "default": [], "metavar": "SETTING=VALUE"}
    own = {"steps": 340, "seeds": [0, 1], "rates": [0.5, 1.0], "only": only, "set": changes}
    words = ("store", "model", "prompts", "out")
    options = parsed(parser_of(__name__, *words, validation_sequences=150, **own, **DECODING))
    options.out = Path(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        rate, tried = chosen_rate(options, name)
        for seed in options.seeds:
            row = measured(options, name, rate, seed) | {"tried": tried}
            (options.out / f"row-{name}-{seed}.json").write_text(json.dumps(row, indent=1) + "\n")
            found = {key: round(value[0], 2) for key, value in row["lengths"].items()}
            print(f"{row['title']}, seed {seed}, rate {rate:g} of {tried}: {found}", flush=True)
    rows = [json.loads(file.read_text()) for file in sorted(options.out.glob("row-*.json"))]
    document = {"rows": rows, "provenance": provenance()}
    (options.out / "drafters.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
