"""Measures codecs: bytes, errors, the teacher's distributions, and drafters trained from each.

Extracts one lossless store, recodes it with each codec, and measures on the same sequences: bytes per token, ratio to
raw, relative L2 error of keys, values and hidden states (the mean over states), the KL of the teacher's next-token
distribution from decoded hidden states, and the acceptance length of drafters trained from the store at equal steps and
seeds: Mixture of Attentions, or a drafter of ``drafters.py``.

    python -m benchmarks.codecs.codecs MODEL TRAIN_CHATS TEST_CHATS OUT [--codecs lossless int8 transform:1]
        [--max-sequences 2800] [--steps 340] [--seeds 0] [--n-prompts 80] [drafter sizes]
        [--optimizer adamw] [--teacher-forced-weight 0] [--no-cross-attention-drafts]
        [--layer-groups 1] [--no-unrotated-keys]
        [--drafter dspark --activations hidden:last hidden:layer:1 hidden:layer:3 hidden:layer:6]

A codec followed by " for RUN" learns keys and values in the metric of that drafter, e.g. "transform:0.3@all for
run-lossless-0" for the one that an earlier call with --codecs lossless has trained into OUT.

Stores, runs and reports are kept in OUT, and only what is missing is made again.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit.harness import run
from benchmarks.training.drafters import DRAFTERS
from benchmarks.training.leaderboard import lengths
from benchmarks.training.runs import SIZE_OPTIONS, TRAINING_OPTIONS, chosen, kept, small_config, trained
from moa_data.evaluation.config import EvalConfig
from moa_data.evaluation.run import evaluate
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.pipeline.config import TEXT_FIELDS, ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import summarize_store
from moa_data.storage.schema import to_float32
from moa_data.trainer.sensitivity import DrafterMetrics

CODECS = ("lossless", "int8", "transform:2", "transform:1", "transform:0.5")


def errors(exact: ActivationStore, coded: ActivationStore, sample: np.ndarray) -> dict[str, float]:
    """Relative L2 errors over the sampled sequences."""
    sums: dict[str, np.ndarray] = {}
    for i in sample.tolist():
        for field in (name for name in exact.fields if name not in TEXT_FIELDS):
            a, b = (to_float32(store.read(i, field), exact.fields[field].dtype) for store in (exact, coded))
            pairs = {field: (a, b)}
            if field == "kv":
                pairs = {"key": (a[:, :, :, 0], b[:, :, :, 0]), "value": (a[:, :, :, 1], b[:, :, :, 1])}
            for name, (x, y) in pairs.items():
                own = np.square(x - y, dtype=np.float64).sum(), np.square(x, dtype=np.float64).sum()
                sums[name] = sums.get(name, np.zeros(2)) + own
    found = {name: float(np.sqrt(error / total)) for name, (error, total) in sums.items()}
    hidden = [error for name, error in found.items() if name.startswith("hidden/")]
    own_parts = {f"{name}_error": found[name] for name in ("key", "value") if name in found}
    return own_parts | {"hidden_error": float(np.mean(hidden))}


def kl(logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(softmax(logits) || softmax(other)) per row, in nats."""
    p = logits.double().log_softmax(-1)
    return (p.exp() * (p - other.double().log_softmax(-1))).sum(-1)


@torch.inference_mode()
def teacher_kl(target: Target, exact: ActivationStore, coded: ActivationStore, sample: np.ndarray) -> float:
    """The mean KL of the teacher's next-token distributions from decoded hidden states."""
    frozen, spec = FrozenTarget.from_model(target.model), exact.fields["hidden/last"]
    found = []
    for i in sample.tolist():
        hidden = [torch.from_numpy(to_float32(store.read(i, "hidden/last"), spec.dtype)) for store in (exact, coded)]
        found.append(kl(*(frozen.logits(state) for state in hidden)))
    return float(torch.cat(found).mean())


def measure_store(options: argparse.Namespace, codec: str, target: Target) -> dict[str, float]:
    """Sizes, errors and divergences of one codec; the recoded store stays for training."""
    folder = store_folder(options, codec)
    if codec != "lossless" and not folder.exists():
        name, _, metric_run = codec.partition(" for ")
        metrics = DrafterMetrics(load_drafter(options.out / metric_run)) if metric_run else None
        recode(store_folder(options, "lossless"), name, folder, kv_metrics=metrics)
    summary = summarize_store(folder)
    with ActivationStore(store_folder(options, "lossless")) as exact, ActivationStore(folder) as coded:
        sample = np.random.default_rng(0).choice(len(exact), options.sample, replace=False)
        stored = sum(field.stored_bytes for field in summary.fields) / summary.n_tokens
        raw = summary.raw_bytes / summary.n_tokens
        figures = {
            "bytes_per_token": stored,
            "times_smaller": raw / stored,
        }
        return figures | errors(exact, coded, sample) | {"teacher_kl": teacher_kl(target, exact, coded, sample)}


def measure_drafter(options: argparse.Namespace, codec: str, seed: int) -> dict[str, Any]:
    """Train from the store, and decode the test prompts in chains of 5 drafts."""
    folder = str(options.out / f"run-{slug(codec)}-{seed}")
    values = {"validate_every": options.steps, "max_steps": options.steps, "seed": seed}
    values |= DRAFTERS[options.drafter][1] if options.drafter else chosen(options)
    training = trained(small_config(str(store_folder(options, codec)), folder, **values))
    decoding = EvalConfig.of(
        model=options.model, prompts=options.test_chats, n_prompts=options.n_prompts, drafter=(folder,),
        method=("plain", "chain"), draft_length=5, max_new_tokens=128, batch_size=20, device="cpu",
        out=str(options.out / f"eval-{slug(codec)}-{seed}.json"),
    )  # fmt: skip
    return {
        "acceptance_length": lengths(kept(decoding, evaluate), "chain")[0],
        "expected_acceptance_length": training["best_expected_acceptance_length"],
        "data_wait_share": training["data_wait_share"],
    }


def slug(codec: str) -> str:
    """A codec's name as part of a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", codec)


def store_folder(options: argparse.Namespace, codec: str) -> Path:
    """Where a codec's store lies."""
    out: Path = options.out
    return out / f"store-{slug(codec)}"


def add_drafter(row: dict[str, Any], first: dict[str, Any], result: dict[str, Any]) -> None:
    """Add a drafter's figures to those of its codec; shares of lossless are taken seed by seed."""
    row.setdefault("acceptance_lengths", []).append(result["acceptance_length"])
    row["acceptance_length"] = float(np.mean(row["acceptance_lengths"]))
    row["data_wait_share"] = max(row.get("data_wait_share", 0.0), result["data_wait_share"])
    if "acceptance_length" in first:
        pairs = zip(row["acceptance_lengths"], first["acceptance_lengths"], strict=False)
        row["of_lossless"] = float(np.mean([ours / reference for ours, reference in pairs]))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every codec, and then a drafter of each, seed by seed."""
    options.out = Path(options.folder)
    options.out.mkdir(parents=True, exist_ok=True)
    changes = {"activations": tuple(options.activations)} if options.activations else {}
    extract(
        ExtractConfig.of(
            model=options.model, dataset=options.train_chats, out=str(store_folder(options, "lossless")),
            max_sequences=options.max_sequences, **changes,
        )
    )  # fmt: skip
    target = Target.load(options.model, torch.float32, "cpu")
    rows: list[dict[str, Any]] = []
    for codec in options.codecs:
        rows.append(measure_store(options, codec, target) | {"codec": codec})
    for seed in options.seeds if options.steps else ():
        for row in rows:
            add_drafter(row, rows[0], measure_drafter(options, row["codec"], seed))
    return {"rows": rows}


if __name__ == "__main__":
    run(
        "codecs", measure, "model", "train_chats", "test_chats", "folder", codecs=CODECS, max_sequences=2800,
        sample=40, steps=340, seeds=[0], n_prompts=80, drafter={"choices": list(DRAFTERS)},
        activations={"nargs": "+"}, threads=1, **SIZE_OPTIONS, **TRAINING_OPTIONS,
    )  # fmt: skip
