"""The paper's ablations of Mixture of Attentions: what each part gives at equal steps, data and about equal weights.

Trains every variant with every seed from one store, decodes the same prompts with it, and lets it go on alone after a
cut. The variant without layer self-attention gets its weights back as wider MLPs.

    python -m benchmarks.training.ablations STORE MODEL PROMPTS OUT --steps 340 --seeds 0 1
        [--variants full last-layer ...]
        [--n-prompts 40] [--max-new-tokens 128] [drafter sizes]

Variants with target layers need a store that holds them; the script names the flags of `moa-data extract` and goes on
without. Everything is kept in OUT, and running it again goes on from there.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit.harness import run
from benchmarks.training.drafter_options import SIZE_OPTIONS, chosen, small_config
from benchmarks.training.kept import kept, trained
from moa_data.errors import DrafterError, TrainingError
from moa_data.evaluation.config import EvalConfig
from moa_data.evaluation.report import ratio_with_interval
from moa_data.evaluation.run import evaluate
from moa_data.moa.drafters.mixture import MoADrafter, MoASizes
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.storage.read.store import ActivationStore
from moa_data.trainer.batches import needed_fields
from moa_data.trainer.config import PRESETS, TrainConfig

FULL = "full"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    FULL: ("Mixture of Attentions", {}),
    "last-layer": ("no layer self-attention, KV of the last layer only", {"layer_attention": False}),
    "no-bound": ("no step bound: cross-attention sees what precedes the response", {"step_bound": False}),
    "fixed-bound": ("one step bound of 10", {"step_bound_min": 10, "step_bound_max": 10}),
    "no-staircase": ("no staircase curriculum", {"staircase": False}),
    "standard": ("teacher-forced in place of on-policy", {"on_policy": False}),
    "two-passes": ("a teacher-forced pass beside the on-policy one", {"teacher_forced_weight": 1.0}),
    "drafts-in-sight": (
        "both passes, and cross-attention to the drafts of the round",
        {"teacher_forced_weight": 1.0, "cross_attention_drafts": True},
    ),
    "default": (
        "these, and a memory of the keys before RoPE and of two means over layers: what `moa-data train` does",
        {"teacher_forced_weight": 1.0, "cross_attention_drafts": True, "layer_groups": 2, "unrotated_keys": True},
    ),
    "target-layers-1": ("target layer inference, N = 1", {"target_layer_inference": 1}),
    "target-layers-3": ("target layer inference, N = 3", {"target_layer_inference": 3}),
}
Rows = list[dict[str, Any]]
Value = tuple[str, float, float]
"""A prompt's name, and the numerator and denominator of its ratio."""


@dataclass(frozen=True)
class Result:
    """The rows of the reports of one variant with one seed."""

    variant: str
    seed: int
    training: dict[str, Any]
    decoding: dict[str, Any]

    def acceptance(self, method: str) -> list[Value]:
        """Tokens and target calls of each answer."""
        runs = [(row["prompt_id"], row["runs"][method]["committed_per_call"]) for row in self.decoding["rows"]]
        return [(prompt, float(sum(calls)), float(len(calls))) for prompt, calls in runs]

    def speed(self, method: str) -> float:
        """Tokens/s over plain decoding's."""
        ratio: float = next(item["ratio"] for item in self.decoding["methods"] if item["method"] == method)
        return ratio

    def _written(self) -> list[tuple[str, dict[str, Any]]]:
        name = next(iter(self.decoding["drafters"]))
        return [(row["prompt_id"], row["by_writer"][name]) for row in self.decoding["disconnection"]["rows"]]

    def agreement(self) -> list[Value]:
        """Tokens like the target's after each cut, of those compared."""
        return [(prompt, float(sum(one["agrees"])), float(len(one["agrees"]))) for prompt, one in self._written()]

    def common_prefix(self) -> list[Value]:
        """Tokens up to the first that differs from the target's, of one cut."""
        return [(prompt, float(np.cumprod([*one["agrees"], 0]).sum()), 1.0) for prompt, one in self._written()]

    def log_prob(self) -> list[Value]:
        """The target's log-probability of what was written, and how many tokens."""
        return [(prompt, sum(one["log_probs"]), float(len(one["log_probs"]))) for prompt, one in self._written()]


MEASURES: dict[str, Callable[[Result], list[Value]]] = {
    "chain": lambda result: result.acceptance("chain"),
    "tree": lambda result: result.acceptance("tree"),
    "common_prefix": Result.common_prefix,
    "agreement": Result.agreement,
    "log_prob": Result.log_prob,
}
"""Key -> values per prompt. Intervals are over prompts, all seeds of a prompt together."""


def sizes_of(options: argparse.Namespace, variant: str, frozen: FrozenTarget) -> dict[str, Any]:
    """Return sizes that give a variant's drafter about the weights of the full one."""
    given = chosen(options)
    own = {name: value for name, value in VARIANTS[variant][1].items() if name in ("layer_attention", "layer_groups")}
    if not own:
        return given
    paper = {"cross_attention_drafts": False, "layer_groups": 1, "unrotated_keys": False}
    full = MoASizes.from_target(frozen.config, **paper | given)
    missing = n_weights(full) - n_weights(dataclasses.replace(full, **own))
    wider = round(missing / (2 * 3 * full.hidden_size))  # two MLPs of three matrices
    names = ("self_attention_mlp_width", "cross_attention_mlp_width")
    return given | {name: getattr(full, name) + wider for name in names}


def n_weights(config: MoASizes) -> int:
    """Count the weights of a drafter of these sizes."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in MoADrafter(config).parameters())


def train_config(options: argparse.Namespace, variant: str, seed: int, frozen: FrozenTarget) -> TrainConfig:
    """Return the settings of a variant's run, which differ from the others' in what the variant takes away."""
    values = {"validate_every": options.steps, "seed": seed, "max_steps": options.steps}
    # The paper's drafter and training, unless the variant says otherwise.
    values |= PRESETS["paper"]["drafter"] | sizes_of(options, variant, frozen) | VARIANTS[variant][1]
    return small_config(options.store, str(options.out / f"run-{variant}-{seed}"), **values)


def unusable(options: argparse.Namespace, frozen: FrozenTarget) -> dict[str, str]:
    """Return the variants that the store cannot serve, and why."""
    found = {}
    with ActivationStore(options.store) as store:
        for variant in options.variants:
            config = train_config(options, variant, 0, frozen)
            try:
                needed_fields(store, config)
                FrozenTarget.load(store.target_path, config.target_layer_inference)
            except (TrainingError, DrafterError) as error:
                found[variant] = str(error)
        if found:
            depths = [VARIANTS[variant][1].get("target_layer_inference", 0) for variant in options.variants]
            n_layers = int(store.manifest.target["n_layers"])
            entering = ",".join(f"hidden:layer:{n_layers - depth - 1}" for depth in sorted(set(depths) - {0}))
            print(
                f"skipped: {', '.join(found)}. A store for all variants: moa-data extract --activations "
                f"kv,hidden:last,{entering} --target-layers {max(depths)}",
                flush=True,
            )
    return found


def measured(options: argparse.Namespace, variant: str, seed: int, training: dict[str, Any]) -> Result:
    """Decode the prompts with a trained variant, and let it go on alone."""
    shared = {
        "model": options.model,
        "prompts": options.prompts,
        "drafter": (str(options.out / f"run-{variant}-{seed}"),),
        "n_prompts": options.n_prompts,
        "max_new_tokens": options.max_new_tokens,
        "device": options.device,
    }
    decoding = EvalConfig.of(
        method=("plain", "chain", "tree"), out=str(options.out / f"eval-{variant}-{seed}.json"),
        tree=options.tree, batch_size=options.batch_size, disconnect=options.n_tokens, cuts=options.cuts, **shared,
    )  # fmt: skip
    return Result(variant, seed, training, kept(decoding, evaluate))


def validated(result: Result) -> float | None:
    """The best expected acceptance length; None where the store is too small to hold sequences out."""
    best = float(result.training["best_expected_acceptance_length"])
    return best if best > 0 else None


def figures(results: Sequence[Result], baseline: Sequence[Result]) -> dict[str, Any]:
    """Return all figures of one variant over all seeds; ratios are to the full variant with the same seeds."""
    row: dict[str, Any] = {
        "variant": results[0].variant,
        "what": VARIANTS[results[0].variant][0],
        "seeds": [result.seed for result in results],
        "n_parameters": results[0].training["n_parameters"],
        "n_tokens": results[0].training.get("n_tokens_total"),
        "n_bytes_read": results[0].training.get("n_bytes_read"),
        "expected_acceptance_length": [validated(result) for result in results],
        "ratio": {method: [result.speed(method) for result in results] for method in ("chain", "tree")},
    }
    pairs = [(ours, full) for ours in results for full in baseline if ours.seed == full.seed]
    for key, values in MEASURES.items():
        found = [value for result in results for value in values(result)]
        mean, interval = ratio_with_interval([value[0] for value in found], [value[1:] for value in found])
        by_seed = [ratio_with_interval([v[0] for v in own], [v[1:] for v in own])[0] for own in map(values, results)]
        row[key] = {"mean": mean, "interval": interval, "by_seed": by_seed}
        if pairs and key in ("chain", "tree"):
            joined = [(a, b) for ours, full in pairs for a, b in zip(values(ours), values(full), strict=True)]
            of_full = ratio_with_interval([a[0] for a, _ in joined], [(*a[1:], *b[1:]) for a, b in joined])
            row[key] |= {"of_full": of_full[0], "of_full_interval": of_full[1]}
    return row


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train and measure what is not there yet, seed by seed, so that all variants are there early."""
    options.out = Path(options.folder)
    options.out.mkdir(parents=True, exist_ok=True)
    with ActivationStore(options.store) as store:
        frozen = FrozenTarget.load(store.target_path, 0)
    skipped = unusable(options, frozen)
    results: dict[str, list[Result]] = {}
    for seed in options.seeds:
        for variant in options.variants:
            if variant not in skipped:
                training = trained(train_config(options, variant, seed, frozen))
                results.setdefault(variant, []).append(measured(options, variant, seed, training))
    return {"rows": [figures(own, results.get(FULL, [])) for own in results.values()], "skipped": skipped}


if __name__ == "__main__":
    run(
        "ablations", measure, "store", "model", "prompts", "folder", steps=340, seeds=[0], n_prompts=40,
        variants={"nargs": "+", "choices": list(VARIANTS), "default": list(VARIANTS)}, max_new_tokens=128,
        tree="6x8x62", batch_size=1, cuts=3, n_tokens=32, threads=1, device="auto", **SIZE_OPTIONS,
    )  # fmt: skip
