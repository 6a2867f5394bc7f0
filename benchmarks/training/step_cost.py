"""Measures what a training step of each drafter costs beside one of EAGLE-2, at the sizes of ``drafters.py``.

All drafters take a step on the same sequences in turns, on one thread; counted are processor seconds of that thread,
which other work on the machine changes least, and the floating-point operations of its products. Reading is left out,
for it runs beside the steps. ::

    python -m benchmarks.training.step_cost STORE [--steps 40] [--only eagle moa ...]
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.kit.harness import quartiles, run
from benchmarks.training.drafters import ABLATIONS, DRAFTERS
from benchmarks.training.online_step import DrafterStep
from benchmarks.training.runs import small_config
from moa_data.machine import keep_freed_memory
from moa_data.storage.read.store import ActivationStore
from moa_data.trainer.data import BatchReader, StoreDataModule, TrainingStream
from moa_data.trainer.fit import build_module

FIRST = "eagle"
WARM_UP = 2
COUNTED = 3


class Side:
    """A drafter, its optimizer, and the batches that it reads: the same sequences for every drafter."""

    def __init__(self, store: ActivationStore, name: str, options: argparse.Namespace) -> None:
        self.name, n_steps = name, options.steps + WARM_UP + COUNTED
        with tempfile.TemporaryDirectory(prefix="moa-data-bench-") as folder:
            config = small_config(str(store.path), folder, max_steps=n_steps, **(DRAFTERS | ABLATIONS)[name][1])
            data = StoreDataModule(store, config)
            module = build_module(store, data)
        self.n_parameters = sum(weight.numel() for weight in module.drafter.parameters())
        self._step, self._data = DrafterStep(module), data
        rows = data.train_sequences
        reader = BatchReader(store, data.config, torch.device("cpu"))
        self._batches = iter(TrainingStream(reader, rows, store.lengths[rows], n_steps, 0, 1))
        self.seconds: list[float] = []
        self.n_tokens = 0
        self.n_operations: list[int] = []

    def step(self) -> None:
        """Take one step and note its processor seconds."""
        batch = self._data.on_after_batch_transfer(next(self._batches), 0)
        began = time.thread_time()
        self._step(batch)
        self.seconds.append(time.thread_time() - began)
        self.n_tokens += batch.n_tokens

    def count(self) -> None:
        """Take one step, and count its operations in place of its time."""
        with FlopCounterMode(display=False) as counter:
            self.step()
        self.seconds.pop()
        self.n_operations.append(counter.get_total_flops())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps, and compare each drafter's with the first one's."""
    keep_freed_memory()
    store = ActivationStore(options.store)
    names = [FIRST, *(name for name in options.only if name != FIRST)]
    sides = [Side(store, name, options) for name in names]
    for turn in range(options.steps + WARM_UP):
        for side in sides if turn % 2 else sides[::-1]:
            side.step()
    for _ in range(COUNTED):
        for side in sides:
            side.count()
    found = {}
    for side in sides:
        ratios = [own / first for own, first in zip(side.seconds, sides[0].seconds, strict=True)][WARM_UP:]
        found[side.name] = {
            "ratio": quartiles(ratios), "cpu_s": statistics.median(side.seconds[WARM_UP:]),
            "n_parameters": side.n_parameters, "n_tokens": side.n_tokens,
            "gflop": sum(side.n_operations) / COUNTED / 1e9,
            "gflop_ratio": sum(side.n_operations) / sum(sides[0].n_operations),
        }  # fmt: skip
    return {"drafters": found}


if __name__ == "__main__":
    only = {"nargs": "+", "choices": [*DRAFTERS, *ABLATIONS], "default": list(DRAFTERS), "metavar": "DRAFTER"}
    run("step-cost", measure, "store", steps=40, only=only, threads=1)
