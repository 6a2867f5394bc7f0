"""Measures how often drafters agree with the target, by a draft's distance from the last verified position.

    python -m benchmarks.training.draft_distance STORE RUN RUN ...

On held-out sequences of a store, where every draft is told the text's own tokens before it: share of positions whose
most likely token is the target's. Decoding sees only drafts whose predecessors were accepted; this sees them all.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.kit.harness import run
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.nn import masks
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.storage.read.store import ActivationStore
from moa_data.trainer.batches import BatchReader
from moa_data.trainer.config import RUN_FILE, TrainConfig
from moa_data.trainer.data import StoreDataModule, ValidationBatches
from moa_data.trainer.validation import Comparison, compare_batch


def agreement_by_distance(found: Comparison, draft_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count agreement by the distance of a draft from the last verified position, whatever the drafts before it were.

    Returns:
        Agreements and drafted positions at distance 1, 2, ..., each [draft_length] int64. A round that begins at
        position 0 of a row counts, though it has verified one token alone.
    """
    index = torch.arange(found.drafted.shape[1], device=found.drafted.device)
    distance = index - masks.last_context(found.drafted)  # [B, T]
    counts = [
        torch.bincount(distance[where], minlength=draft_length + 1)[1 : draft_length + 1]
        for where in (found.agree, found.drafted)
    ]
    return counts[0], counts[1]


def agreement(options: argparse.Namespace, run: Path) -> dict[str, Any]:
    """Agreement of one run's drafter, by distance."""
    config = TrainConfig(**yaml.safe_load((run / RUN_FILE).read_text())).replaced(
        store=options.store, prefetch_mb=256, validation_sequences=options.sequences, draft_length=options.draft_length
    )
    store, drafter = ActivationStore(options.store), load_drafter(run)
    frozen = FrozenTarget.load(store.target_path, config.target_layer_inference)
    chosen = StoreDataModule(store, config).validation_sequences
    lengths = store.sequences["n_tokens"].to_numpy().astype(np.int64)
    chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
    batches = ValidationBatches(BatchReader(store, config, torch.device("cpu")), chosen, lengths[chosen], 8)
    sums = torch.zeros(2, options.draft_length, dtype=torch.int64)
    for batch in batches:
        decoded = batch.decode()
        inputs = decoded.inputs
        inputs.hidden = inputs.hidden.float()
        inputs.kv = None if inputs.kv is None else inputs.kv.float()
        inputs.layer_outputs = tuple(states.float() for states in inputs.layer_outputs)
        bound = options.draft_length + 1
        for phase in range(options.phases):
            shifted = (decoded.draws.offset + phase * bound // options.phases) % bound
            part = dataclasses.replace(decoded, draws=dataclasses.replace(decoded.draws, offset=shifted))
            sums += torch.stack(agreement_by_distance(compare_batch(drafter, frozen, part), options.draft_length))
    agreed, drafted = sums.tolist()
    return {
        "run": run.name,
        "drafter": drafter.kind,
        "agreement": [a / max(1, n) for a, n in zip(agreed, drafted, strict=True)],
        "n_positions": drafted,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all runs."""
    return {"rows": [agreement(options, Path(run)) for run in options.runs]}


if __name__ == "__main__":
    run("draft-distance", measure, "store", "runs+", draft_length=12, sequences=150, phases=4, threads=1)
