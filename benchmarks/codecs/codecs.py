"""Measures codecs: bytes, errors, the teacher's distributions, and drafters trained from each.

Extracts one lossless store, recodes it with each codec, and measures on the same sequences: bytes per token, ratio to
raw and to the order-0 entropy floor of lossless coding, relative L2 error of keys, values and hidden states (the mean
over states), the KL of the teacher's next-token distribution from decoded hidden states, the KL of the target's own
next-token distribution when it goes on from decoded KV, and the acceptance length of drafters trained from the store at
equal steps and seeds: Mixture of Attentions, or a drafter of ``drafters.py``.

    python -m benchmarks.codecs.codecs MODEL TRAIN_CHATS TEST_CHATS OUT [--codecs lossless int8 transform:1]
        [--max-sequences 2800] [--steps 340] [--seeds 0] [--n-prompts 80] [drafter sizes]
        [--optimizer adamw] [--teacher-forced-weight 0] [--no-cross-attention-drafts]
        [--layer-groups 1] [--no-unrotated-keys]
        [--drafter dspark --activations hidden:last hidden:layer:1 hidden:layer:3 hidden:layer:6]

A codec followed by " for RUN" learns keys and values in the metric of that drafter, e.g. "transform:0.3@all for
run-lossless-0" for the one that an earlier call with --codecs lossless has trained into OUT.

Every result is kept as JSON in OUT, and running it again goes on from there.
"""

import argparse
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.codecs.codec_speed import order0_bits
from benchmarks.kit.harness import run
from benchmarks.kit.records import provenance
from benchmarks.training.drafter_options import SIZE_OPTIONS, TRAINING_OPTIONS, chosen, small_config
from benchmarks.training.drafters import DRAFTERS
from moa_data.evaluation.prompts import load_prompts
from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.nn.kv import unpack_kv
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.chat_tokens import prompt_tokens
from moa_data.moa.targets.live import Target
from moa_data.pipeline.config import TEXT_FIELDS, ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.summary import summarize_store
from moa_data.storage.schema import to_float32
from moa_data.trainer.fit import train
from moa_data.trainer.sensitivity import DrafterMetrics

CODECS = ("lossless", "int8", "transform:2", "transform:1", "transform:0.5")


def floor_bytes_per_token(store: ActivationStore, sample: np.ndarray) -> float:
    """Bytes per token that coding each byte plane of each field at its order-0 entropy would take."""
    total = 0.0
    for name, spec in store.fields.items():
        values = np.concatenate([np.asarray(store.read(int(i), name)).reshape(-1) for i in sample])
        planes = values.view(np.uint8).reshape(len(values), -1)
        bits_per_value = sum(order0_bits(planes[:, k]) for k in range(planes.shape[1]))
        total += bits_per_value / 8 * spec.token_bytes / spec.storage_dtype.itemsize
    return total


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
def divergences(target: Target, exact: ActivationStore, coded: ActivationStore, sample: np.ndarray) -> dict[str, float]:
    """KL of the teacher from decoded hidden states, and of the target that goes on from decoded KV of half a chat."""
    frozen = FrozenTarget.from_model(target.model)
    teacher, continuation = [], []
    for i in sample.tolist():
        tokens = torch.from_numpy(exact.read(i, "tokens").astype(np.int64))[None]
        hidden = [
            torch.from_numpy(to_float32(store.read(i, "hidden/last"), exact.fields["hidden/last"].dtype))
            for store in (exact, coded)
        ]
        teacher.append(kl(*(frozen.logits(state) for state in hidden)))
        if "kv" not in exact.fields:
            continue
        half = tokens.shape[1] // 2
        logits = []
        for store in (exact, coded):
            kv = torch.from_numpy(to_float32(store.read(i, "kv", tokens=slice(0, half)), exact.fields["kv"].dtype))
            cache = target.new_cache()
            cache.begin_call(half, target.device)
            layers: list[Any] = list(cache.layers)
            for layer in range(kv.shape[1]):
                layers[layer].update(*unpack_kv(kv[None, :, layer].flatten(2), kv.shape[2]))
            cache.commit([range(half)])
            logits.append(target.logits(target.forward(tokens[:, half:], cache))[0])
        continuation.append(kl(*logits))
    found = {"teacher_kl": torch.cat(teacher)} | ({"continuation_kl": torch.cat(continuation)} if continuation else {})
    return {name: float(values.mean()) for name, values in found.items()}


def measure_store(options: argparse.Namespace, codec: str, target: Target) -> dict[str, float]:
    """Sizes, errors and divergences of one codec; the recoded store stays for training."""
    folder = store_folder(options, codec)
    if codec != "lossless":
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
            "raw_bytes_per_token": raw,
            "times_smaller": raw / stored,
            "of_floor": stored / floor_bytes_per_token(exact, sample),
        }
        return figures | errors(exact, coded, sample) | divergences(target, exact, coded, sample)


def acceptance_length(options: argparse.Namespace, target: Target, folder: Path) -> float:
    """Mean over the test prompts of tokens committed per target call, chains of 5 drafts."""
    drafter = load_drafter(folder, torch.float32, target.device)
    prompts = [
        prompt_tokens(target.template, list(prompt.turns[0]))
        for prompt in load_prompts(options.test_chats, options.n_prompts).prompts
    ]
    lengths = []
    for start in range(0, len(prompts), 20):
        generations = generate_batch(
            target,
            prompts[start : start + 20],
            max_new_tokens=128,
            proposer=DrafterProposer(target, drafter),
            tree=TreeShape(5),
        )
        lengths += [generation.stats.acceptance_length for generation in generations]
    return float(np.nanmean(lengths))


def measure_drafter(options: argparse.Namespace, codec: str, seed: int, target: Target) -> dict[str, float | None]:
    """Train from the store and decode the test prompts."""
    folder = options.out / f"run-{slug(codec)}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    values = {"validate_every": options.steps, "max_steps": options.steps, "seed": seed}
    values |= DRAFTERS[options.drafter][1] if options.drafter else chosen(options)
    trained = train(small_config(str(store_folder(options, codec)), str(folder), **values))
    return {
        "acceptance_length": acceptance_length(options, target, folder),
        "expected_acceptance_length": trained.best_expected_acceptance_length,
        "data_wait_share": trained.data_wait_share,
        "tokens_per_s": trained.tokens_per_s,
    }


def slug(codec: str) -> str:
    """A codec's name as part of a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", codec)


def store_folder(options: argparse.Namespace, codec: str) -> Path:
    """Where a codec's store lies."""
    out: Path = options.out
    return out / f"store-{slug(codec)}"


def kept(file: Path, make: Any) -> dict[str, Any]:
    """The result in a file, made first if it is not there."""
    if not file.exists():
        file.write_text(json.dumps(make() | {"provenance": provenance()}, indent=1) + "\n")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


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
        file = options.out / f"store-{slug(codec)}.json"
        rows.append(kept(file, partial(measure_store, options, codec, target)) | {"codec": codec})
    for seed in options.seeds if options.steps else ():
        for row in rows:
            file = options.out / f"drafter-{slug(row['codec'])}-{seed}.json"
            add_drafter(row, rows[0], kept(file, partial(measure_drafter, options, row["codec"], seed, target)))
    return {"rows": rows}


if __name__ == "__main__":
    run(
        "codecs", measure, "model", "train_chats", "test_chats", "folder", codecs=CODECS, max_sequences=2800,
        sample=40, steps=340, seeds=[0], n_prompts=80, drafter={"choices": list(DRAFTERS)},
        activations={"nargs": "+"}, threads=1, **SIZE_OPTIONS, **TRAINING_OPTIONS,
    )  # fmt: skip
