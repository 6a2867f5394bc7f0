"""Measures codecs: bytes, errors, the teacher's distributions, and drafters trained from each.

Extracts one lossless store, recodes it with each codec, and measures on the same sequences:

- bytes per token and the ratio to raw
- the relative L2 error of keys, values and hidden states (the mean over the states)
- the KL divergence of the teacher's next-token distributions, if they are computed from decoded
  hidden states
- the acceptance length of drafters trained from the store, with equal steps and seeds. The drafter
  is Mixture of Attentions, or one of ``drafters.py``

The command::

    python -m benchmarks.codecs.codecs MODEL TRAIN_CHATS TEST_CHATS OUT
        [--codecs lossless int8 transform:1]
        [--max-sequences 2800] [--steps 340] [--seeds 0] [--n-prompts 80] [drafter sizes]
        [--optimizer adamw] [--teacher-forced-weight 0] [--no-cross-attention-drafts]
        [--layer-groups 1] [--no-unrotated-keys]
        [--drafter dspark --activations hidden:last hidden:layer:1 hidden:layer:3 hidden:layer:6]

A codec may be followed by " for RUN". It then gives more bits to keys and values in which errors
would change the drafts of that run's drafter. For example, "transform:0.3@all for run-lossless-0"
uses the drafter that an earlier call with --codecs lossless has trained into OUT.

Stores, runs and reports stay in OUT. A later call makes only those that are missing.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit.harness import run
from benchmarks.training.drafters import DRAFTERS
from benchmarks.training.leaderboard import lengths
from benchmarks.training.runs import (
    SIZE_OPTIONS,
    TRAINING_OPTIONS,
    chosen,
    kept,
    small_config,
    trained,
)
from moa_data.evaluation.config import EvalConfig
from moa_data.evaluation.run import evaluate
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.pipeline.compare import KEYS, VALUES, compare
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.recode import recode
from moa_data.trainer.sensitivity import DrafterMetrics

CODECS = ("lossless", "int8", "transform:2", "transform:1", "transform:0.5")


def measure_store(options: argparse.Namespace, codec: str) -> dict[str, float]:
    """Measure sizes, errors and divergences of one codec.

    The recoded store stays on disk, for training.
    """
    folder, lossless = store_folder(options, codec), store_folder(options, "lossless")
    if codec != "lossless" and not folder.exists():
        name, _, metric_run = codec.partition(" for ")
        metrics = DrafterMetrics(load_drafter(options.out / metric_run)) if metric_run else None
        recode(lossless, name, folder, kv_metrics=metrics)
    found = compare(lossless, folder, samples=options.sample)
    assert found.teacher is not None
    hidden = [
        errors.total.relative for name, errors in found.errors.items() if name.startswith("hidden/")
    ]
    figures = {
        f"{name[:-1]}_error": found.errors[name].total.relative
        for name in (KEYS, VALUES)
        if name in found.errors
    }
    return figures | {
        "bytes_per_token": found.bytes_per_token,
        "times_smaller": found.times_smaller,
        "hidden_error": float(np.mean(hidden)),
        "teacher_kl": found.teacher.kl,
    }


def measure_drafter(options: argparse.Namespace, codec: str, seed: int) -> dict[str, Any]:
    """Train a drafter from the store, and decode the test prompts with chains of 5 drafts."""
    folder = str(options.out / f"run-{slug(codec)}-{seed}")
    values = {"validate_every": options.steps, "max_steps": options.steps, "seed": seed}
    values |= DRAFTERS[options.drafter][1] if options.drafter else chosen(options)
    training = trained(small_config(str(store_folder(options, codec)), folder, **values))
    decoding = EvalConfig.of(
        model=options.model, prompts=options.test_chats, n_prompts=options.n_prompts,
        drafter=(folder,), method=("plain", "chain"), draft_length=5, max_new_tokens=128,
        batch_size=20, device="cpu", out=str(options.out / f"eval-{slug(codec)}-{seed}.json"),
    )  # fmt: skip
    return {
        "acceptance_length": lengths(kept(decoding, evaluate), "chain")[0],
        "expected_acceptance_length": training["best_expected_acceptance_length"],
        "data_wait_share": training["data_wait_share"],
    }


def slug(codec: str) -> str:
    """Turn a codec's name into text that a file name may contain."""
    return re.sub(r"[^a-z0-9.]+", "-", codec)


def store_folder(options: argparse.Namespace, codec: str) -> Path:
    """Return the folder of a codec's store."""
    out: Path = options.out
    return out / f"store-{slug(codec)}"


def add_drafter(row: dict[str, Any], first: dict[str, Any], result: dict[str, Any]) -> None:
    """Add a drafter's figures to the row of its codec.

    The ratio to the lossless store is taken seed by seed.
    """
    row.setdefault("acceptance_lengths", []).append(result["acceptance_length"])
    row["acceptance_length"] = float(np.mean(row["acceptance_lengths"]))
    row["data_wait_share"] = max(row.get("data_wait_share", 0.0), result["data_wait_share"])
    if "acceptance_length" in first:
        pairs = zip(row["acceptance_lengths"], first["acceptance_lengths"], strict=False)
        row["of_lossless"] = float(np.mean([ours / reference for ours, reference in pairs]))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every codec, and then a drafter of each codec, seed by seed."""
    options.out = Path(options.folder)
    options.out.mkdir(parents=True, exist_ok=True)
    changes = {"activations": tuple(options.activations)} if options.activations else {}
    extract(
        ExtractConfig.of(
            model=options.model, dataset=options.train_chats,
            out=str(store_folder(options, "lossless")), max_sequences=options.max_sequences,
            **changes,
        )
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for codec in options.codecs:
        rows.append(measure_store(options, codec) | {"codec": codec})
    for seed in options.seeds if options.steps else ():
        for row in rows:
            add_drafter(row, rows[0], measure_drafter(options, row["codec"], seed))
    return {"rows": rows}


if __name__ == "__main__":
    run(
        "codecs", measure, "model", "train_chats", "test_chats", "folder", codecs=CODECS,
        max_sequences=2800, sample=40, steps=340, seeds=[0], n_prompts=80,
        drafter={"choices": list(DRAFTERS)}, activations={"nargs": "+"}, threads=1, **SIZE_OPTIONS,
        **TRAINING_OPTIONS,
    )  # fmt: skip
