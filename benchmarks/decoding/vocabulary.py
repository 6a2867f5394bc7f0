"""Measures what a draft vocabulary saves and costs: the time of drafts and acceptance lengths.

Drafts and plain steps take turns on one thread. The figures are milliseconds of CPU time, which
other work on the machine affects least. With --trained RUN, the benchmark measures other figures,
on the sequences that the run held out: the expected acceptance length of the run's drafter, and the
share of response tokens that can be drafted. ::

    python -m benchmarks.decoding.vocabulary MODEL [--kinds eagle moa] [--sizes 4096 8192]
        [--repeats 9]
    python -m benchmarks.decoding.vocabulary MODEL --trained RUN --sizes 1024 4096
"""

import argparse
import dataclasses
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.decoding.decode import random_drafter
from benchmarks.kit.harness import in_turn, run
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.moa.drafters.vocabulary import N_DRAFTS, most_frequent
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.storage.read.store import ActivationStore
from moa_data.trainer.batches import BatchReader
from moa_data.trainer.config import RUN_FILE, TrainConfig
from moa_data.trainer.data import StoreDataModule, ValidationBatches
from moa_data.trainer.step import validate_batch, validation_metrics
from moa_data.trainer.vocabulary import count_response_tokens

N_PROMPT = 200


def set_vocabulary(drafter: Drafter, tokens: torch.Tensor) -> None:
    """Restrict a drafter to some tokens. An empty tensor removes the restriction."""
    n_tokens, ids = len(tokens), tuple(tokens.tolist())
    drafter.config = dataclasses.replace(
        drafter.config, draft_vocabulary=n_tokens, draft_tokens=ids
    )
    drafter.draft_ids = tokens
    drafter._target_rows = {}


class Text:
    """A prompt that is decoded step by step, with or without drafts."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self._target, self._cache = target, target.new_cache()
        self._proposer = DrafterProposer(target, drafter)
        generator = torch.Generator().manual_seed(0)
        self._committed = torch.randint(
            5, target.facts.vocab_size, (N_PROMPT,), generator=generator
        ).tolist()
        self._proposer.begin(self._cache)
        self._commit(self._committed)

    def step(self) -> None:
        """Decode one token plainly."""
        self._commit(self._committed[-1:])

    def draft(self) -> None:
        """Draft a chain after the last token."""
        self._proposer.propose([self._committed], TreeShape(N_DRAFTS))

    def _commit(self, tokens: list[int]) -> None:
        hidden = self._target.forward(torch.tensor([tokens]), self._cache)
        kept = [range(len(tokens))]
        self._cache.commit(kept)
        self._proposer.observe(hidden, kept)
        self._committed.append(int(self._target.logits(hidden[:, -1]).argmax()))


@torch.inference_mode()
def costs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure five drafts and a plain step, in milliseconds.

    Returns a row for each kind of drafter and each draft vocabulary.
    """
    target = Target.load(options.model, torch.float32, "cpu")
    target.prepare()
    rows = []
    for kind in options.kinds:
        for n_tokens in (0, *options.sizes):
            with torch.inference_mode(False):
                drafter = random_drafter(target, kind, 0)
                set_vocabulary(drafter, torch.arange(n_tokens))
                drafter.requires_grad_(False).prepare()
            text = Text(target, drafter)
            taken = in_turn({"plain": text.step, "drafts": text.draft}, options.repeats)
            plain_ms, drafts_ms = (
                1e3 * statistics.median(taken[name]) for name in ("plain", "drafts")
            )
            rows.append(
                {
                    "drafter": kind,
                    "n_tokens": n_tokens,
                    "plain_ms": plain_ms,
                    "drafts_ms": drafts_ms,
                }
            )
            print(rows[-1], flush=True)
    return rows


def acceptance(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the expected acceptance length of a run's drafter for each draft vocabulary.

    It is measured on the sequences that the run held out.
    """
    config = TrainConfig(**yaml.safe_load((Path(options.trained) / RUN_FILE).read_text()))
    store, drafter = ActivationStore(config.store), load_drafter(options.trained)
    data, frozen = StoreDataModule(store, config), FrozenTarget.load(store.target_path)
    reader, held_out = BatchReader(store, config, torch.device("cpu")), data.validation_sequences
    counts, others = (
        count_response_tokens(store, rows) for rows in (data.train_sequences, held_out)
    )
    load = partial(ValidationBatches, reader, held_out, 4)
    rows = []
    for n_tokens in (0, *options.sizes):
        tokens = most_frequent(counts, n_tokens)
        set_vocabulary(drafter, tokens)
        batches = [data.on_after_batch_transfer(batch, 0) for batch in load()]
        sums = [
            [batch.index, *validate_batch(drafter, frozen, batch, N_DRAFTS)] for batch in batches
        ]
        covered = float(others[tokens].sum()) / float(others.sum()) if n_tokens else 1.0
        length = validation_metrics(sums)["expected_acceptance_length"]
        rows.append({"n_tokens": n_tokens, "coverage": covered, "length": length})
        print(rows[-1], flush=True)
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the acceptance lengths of a run if one is given, and the costs otherwise."""
    return {"acceptance": acceptance(options)} if options.trained else {"costs": costs(options)}


if __name__ == "__main__":
    kinds = {"nargs": "+", "choices": list(DRAFTERS), "default": ["eagle", "moa"]}
    run(
        "vocabulary",
        measure,
        "model",
        kinds=kinds,
        sizes=[4096, 8192],
        trained=str,
        repeats=9,
        threads=1,
    )
