"""Every drafter at equal weights, steps, batches and data, on one store: which one commits most tokens a target call.

Each drafter is trained with two learning rates; the better one on held-out chats of the TRAINING data is kept, and
trained again with the other seeds. The test prompts are decoded once with each kept run, with chains of several
lengths, a chain that stops where a draft is unsure, and a tree. ::

    moa-data extract --model MODEL --dataset TRAIN_CHATS --out STORE \
        --activations kv,hidden:last,hidden:layer:1,hidden:layer:3,hidden:layer:6
    python benchmarks/drafters.py STORE MODEL TEST_CHATS OUT --steps 340 --seeds 0 1 [--only eagle moa ...] [--speed]

Sizes are for a target of 8 layers and width 384. Everything is kept in OUT, and running it again goes on from there;
several processes may share OUT, each with drafters of its own. OUT/drafters.json holds all rows that are there. With
--speed all runs of the first seed decode one prompt at a time in alternation.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from drafter_options import small_config
from kept import kept, trained
from records import provenance

from moa_data.evaluation.config import DisconnectConfig, EvalConfig
from moa_data.evaluation.run import disconnect, evaluate
from moa_data.evaluation.statistics import ratio_with_interval
from moa_data.moa.drafters.registry import DRAFTERS as KINDS
from moa_data.trainer.config import TrainConfig

READ = (1, 3, 6)
"""Target layers whose outputs are read."""
BLOCK: dict[str, Any] = {"block_layers": 2, "anchors": 24}
DSPARK = {"drafter": "dspark", "block_size": 10, "markov_rank": 32} | BLOCK
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("EAGLE-2", {"drafter": "eagle"}),
    "eagle3": (
        "EAGLE-3",
        {"drafter": "eagle3", "fused_layers": READ, "draft_vocabulary": 1024, "self_attention_mlp_width": 363},
    ),
    "moa": (
        "Mixture of Attentions",
        {
            "drafter": "moa", "self_attention_kv_heads": 1, "self_attention_mlp_width": 235,
            "cross_attention_kv_heads": 1, "cross_attention_mlp_width": 320, "layer_attention_heads": 4,
            "layer_attention_kv_heads": 2, "layer_attention_mlp_width": 224,
        },
    ),
    "dflash": (
        "DFlash",
        {"drafter": "dflash", "block_size": 11, "fused_layers": READ, "self_attention_mlp_width": 288} | BLOCK,
    ),
    "dspark": ("DSpark", DSPARK | {"fused_layers": READ, "self_attention_mlp_width": 174}),
    "block-kv": (
        "DSpark on keys and values",
        DSPARK | {"context": "kv", "fused_layers": READ, "block_layers": 3, "self_attention_mlp_width": 130},
    ),
    "block-kv-2": (
        "DSpark on keys and values, two layers",
        DSPARK | {"context": "kv", "fused_layers": (3, 6), "self_attention_mlp_width": 366},
    ),
    "block-memory": ("DSpark on a memory", DSPARK | {"context": "memory", "self_attention_mlp_width": 67}),
}  # fmt: skip
"""Name -> (title, settings): about 1.89 M weights each, heads and embeddings that a drafter trains included."""
SHAPES: dict[str, dict[str, Any]] = {
    "chain 5": {"method": ("plain", "chain"), "draft_length": 5},
    "chain 7": {"method": ("plain", "chain"), "draft_length": 7},
    "chain 10": {"method": ("plain", "chain", "tree"), "draft_length": 10, "tree": "10@0.4"},
    "tree": {"method": ("plain", "tree"), "tree": "6x8x62"},
}
"""Name -> settings of its decoding; that of ten also as a chain that stops where a draft is unsure."""
STOPPED = "chain of at most 10"
SPEED_LENGTH = 7


def train_config(options: argparse.Namespace, name: str, rate: float, seed: int) -> TrainConfig:
    """The settings of a run; ``rate`` multiplies the learning rates of the preset small."""
    out = str(options.out / f"run-{name}-{rate:g}-{seed}")
    config = small_config(
        options.store, out, **DRAFTERS[name][1], max_steps=options.steps, validate_every=options.steps,
        validation_sequences=options.validation_sequences, seed=seed,
    )  # fmt: skip
    rates = config.optimizer
    return config.replaced(
        learning_rate=rate * rates.learning_rate, matrix_learning_rate=rate * rates.matrix_learning_rate
    )


def chosen_rate(options: argparse.Namespace, name: str) -> tuple[float, dict[float, float]]:
    """Train with each rate; return the one with the longest expected acceptance on held-out training chats, and all."""
    found = {
        rate: float(trained(train_config(options, name, rate, options.seeds[0]))["best_expected_acceptance_length"])
        for rate in options.rates
    }
    return max(found, key=lambda rate: found[rate]), found


def decoded(options: argparse.Namespace, out: Path, runs: list[str], shape: dict[str, Any], **own: Any) -> Any:
    """Return the report of decoding the test prompts, measured first if it is not there."""
    shared = {"model": options.model, "prompts": options.prompts, "device": options.device}
    values: dict[str, Any] = {"n_prompts": options.n_prompts, "max_new_tokens": options.max_new_tokens}
    return kept(EvalConfig.of(drafter=tuple(runs), out=str(out), **shared | values | shape | own), evaluate)


def lengths(report: dict[str, Any], method: str) -> dict[str, Any]:
    """The acceptance length of a method with its interval over prompts, and tokens a call by prompt."""
    pairs = []
    for row in report["rows"]:
        calls = row["runs"][method]["committed_per_call"]
        pairs.append((row["prompt_id"], float(sum(calls)), float(len(calls))))
    mean, interval = ratio_with_interval([pair[0] for pair in pairs], [pair[1:] for pair in pairs])
    return {"mean": mean, "interval": interval, "pairs": pairs}


def alone(options: argparse.Namespace, run: str, out: Path) -> float | None:
    """Tokens like the target's that a drafter writes after a cut; None for those that cannot go on alone."""
    config = DisconnectConfig(
        model=options.model, prompts=options.prompts, drafter=(run,), out=str(out), n_prompts=options.n_prompts,
        max_new_tokens=options.max_new_tokens, device=options.device,
    )  # fmt: skip
    report = kept(config, disconnect)
    prefixes = [one["common_prefix"] for one in report["summary"]] if "summary" in report else []
    return prefixes[-1] if prefixes else None


def measured(options: argparse.Namespace, name: str, rate: float, seed: int) -> dict[str, Any]:
    """Train with a seed and decode the test prompts: a row."""
    config = train_config(options, name, rate, seed)
    training, run = trained(config), config.out
    row: dict[str, Any] = {
        "drafter": name, "title": DRAFTERS[name][0], "seed": seed, "rate": rate, "steps": options.steps,
        "n_parameters": training["n_parameters"], "n_tokens": training.get("n_tokens_total"),
        "expected_acceptance_length": training["best_expected_acceptance_length"], "lengths": {},
    }  # fmt: skip
    for shape, settings in SHAPES.items():
        out = options.out / f"eval-{name}-{seed}-{shape.replace(' ', '-')}.json"
        report = decoded(options, out, [run], settings, batch_size=options.batch_size)
        for method in settings["method"][1:]:
            key = STOPPED if method == "tree" and shape != "tree" else shape
            row["lengths"][key] = lengths(report, method)
    return row


def speed(options: argparse.Namespace, runs: dict[str, str]) -> Any:
    """Decode one prompt at a time with all runs in alternation; returns the report."""
    own = {"n_prompts": options.speed_prompts, "repeats": options.repeats}
    shape = {"method": ("plain", "chain"), "draft_length": SPEED_LENGTH}
    return decoded(options, options.out / "speed.json", list(runs.values()), shape, **own)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    for name in ("store", "model", "prompts"):
        parser.add_argument(name)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=340)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0], help="times the preset's learning rates")
    parser.add_argument("--only", nargs="+", choices=list(DRAFTERS), default=list(DRAFTERS), metavar="DRAFTER")
    parser.add_argument("--validation-sequences", type=int, default=150)
    parser.add_argument("--n-prompts", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=10, help="prompts decoded together, but for speed")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--speed", action="store_true", help="measure tokens/s too; on an idle machine")
    parser.add_argument("--speed-prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def main() -> None:
    """Train and measure what is not there yet, and write all rows that are."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, str] = {}
    for name in options.only:
        assert DRAFTERS[name][1]["drafter"] in KINDS
        rate, tried = chosen_rate(options, name)
        runs[name] = train_config(options, name, rate, options.seeds[0]).out
        for seed in options.seeds:
            row = measured(options, name, rate, seed) | {"tried": tried}
            (options.out / f"row-{name}-{seed}.json").write_text(json.dumps(row, indent=1) + "\n")
            found = {key: round(value["mean"], 2) for key, value in row["lengths"].items()}
            print(f"{row['title']}, seed {seed}, rate {rate:g} of {tried}: {found}", flush=True)
    rows = [json.loads(file.read_text()) for file in sorted(options.out.glob("row-*.json"))]
    document: dict[str, Any] = {"rows": rows, "provenance": provenance()}
    if options.speed:
        report = speed(options, runs)
        document["speed"] = report["methods"]
    (options.out / "drafters.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
