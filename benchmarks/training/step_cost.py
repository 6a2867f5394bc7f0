"""Compares the cost of a training step of each drafter with that of EAGLE-2.

The drafters have the sizes of ``drafters.py``. With ``--default-sizes``, they have the sizes that
`train` gives them for the store's target. All drafters take steps on the same sequences in turns,
on one thread. The figures are CPU seconds of this thread, which other work on the machine affects
least, and the floating-point operations of its matrix products. Reading is not counted, because it
runs in parallel with the steps. ``--parts`` splits the seconds among the parts of a step. ::

    python -m benchmarks.training.step_cost STORE [--steps 40] [--only eagle moa ...]
    python -m benchmarks.training.step_cost STORE --default-sizes --parts --batch-size 4 --steps 4
        --only eagle moa
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.kit.harness import quartiles, run
from benchmarks.training.drafters import ABLATIONS, DRAFTERS
from benchmarks.training.online_step import DrafterStep
from benchmarks.training.runs import SIZES, small_config
from moa_data.machine import keep_freed_memory
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.nn import losses
from moa_data.storage.read.store import ActivationStore
from moa_data.trainer.batches import BatchReader
from moa_data.trainer.data import StoreDataModule, TrainingStream
from moa_data.trainer.fit import build_module

FIRST = "eagle"
WARM_UP = 2
COUNTED = 3


class Parts:
    """Measures the CPU seconds of the parts of a step. A call of :meth:`mark` ends a part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._last = time.thread_time()

    def mark(self, name: str) -> None:
        """Add the time since the last mark to the part that ends here."""
        now = time.thread_time()
        self.seconds[name] += now - self._last
        self._last = now

    def after(self, call: Callable[..., Any], name: str, backward: str = "") -> Callable[..., Any]:
        """Return ``call`` as a function that marks the end of a part when it returns.

        If ``backward`` is given, the end of this other part is marked when the gradient of the
        result arrives in the backward.
        """

        def marking(*args: Any, **settings: Any) -> Any:
            self.mark("other")
            result = call(*args, **settings)
            self.mark(name)
            if backward and isinstance(result, Tensor) and result.requires_grad:
                result.register_hook(lambda _: self.mark(backward))
            return result

        return marking

    def watch(self, drafter: Any) -> None:
        """Mark the parts of a Mixture of Attentions. The backward runs them in reverse order."""
        if isinstance(drafter, MoADrafter):
            own: dict[Any, tuple[str, str, str]] = {
                drafter: ("encode_kv", "layer self-attention", "self-attention, backward"),
                drafter.self_attention: ("forward", "self-attention", "cross-attention, backward"),
                drafter.cross_attention: ("attend_cached", "cross-attention", ""),
            }
            for module, (method, name, backward) in own.items():
                vars(module)[method] = self.after(getattr(module, method), name, backward)


class Side:
    """A drafter with its optimizer and batches. All drafters read the same sequences."""

    def __init__(self, store: ActivationStore, name: str, options: argparse.Namespace) -> None:
        self.name, n_steps = name, options.steps + WARM_UP + COUNTED
        sizes = (DRAFTERS | ABLATIONS)[name][1]
        if options.default_sizes:
            sizes = {setting: value for setting, value in sizes.items() if setting not in SIZES}
        if options.batch_size is not None:
            sizes = sizes | {"batch_size": options.batch_size}
        with tempfile.TemporaryDirectory(prefix="moa-data-bench-") as folder:
            config = small_config(str(store.path), folder, max_steps=n_steps, **sizes)
            data = StoreDataModule(store, config)
            module = build_module(data)
        self.n_parameters = sum(weight.numel() for weight in module.drafter.parameters())
        self._step, self._data = DrafterStep(module), data
        self.parts = Parts()
        if options.parts:
            self.parts.watch(module.drafter)
        rows = data.train_sequences
        reader = BatchReader(store, data.config, torch.device("cpu"))
        self._batches = iter(TrainingStream(reader, rows, n_steps, 0, 1))
        self.seconds: list[float] = []
        self.n_tokens = 0
        self.n_operations: list[int] = []

    def step(self) -> None:
        """Take one step, and record its CPU seconds."""
        batch = self._data.on_after_batch_transfer(next(self._batches), 0)
        began = time.thread_time()
        chunked_losses = losses.chunked_losses
        losses.chunked_losses = self.parts.after(
            chunked_losses, "LM head and losses, backward included"
        )
        self.parts.begin()
        self._step(batch)
        self.parts.mark("the rest of the backward, optimizer")
        losses.chunked_losses = chunked_losses
        self.seconds.append(time.thread_time() - began)
        self.n_tokens += batch.n_tokens

    def count(self) -> None:
        """Take one step, and count its operations instead of its time."""
        with FlopCounterMode(display=False) as counter:
            self.step()
        self.seconds.pop()
        self.n_operations.append(counter.get_total_flops())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps, and compare each drafter with the first one."""
    keep_freed_memory()
    store = ActivationStore(options.store)
    names = [FIRST, *(name for name in options.only if name != FIRST)]
    sides = [Side(store, name, options) for name in names]
    for turn in range(options.steps + WARM_UP):
        for side in sides if turn % 2 else sides[::-1]:
            if turn == WARM_UP:
                side.parts.seconds.clear()
            side.step()
    parts = {side.name: dict(side.parts.seconds) for side in sides}
    for _ in range(COUNTED):
        for side in sides:
            side.count()
    found = {}
    for side in sides:
        ratios = [own / first for own, first in zip(side.seconds, sides[0].seconds, strict=True)][
            WARM_UP:
        ]
        found[side.name] = {
            "ratio": quartiles(ratios), "cpu_s": statistics.median(side.seconds[WARM_UP:]),
            "n_parameters": side.n_parameters, "n_tokens": side.n_tokens,
            "gflop": sum(side.n_operations) / COUNTED / 1e9,
            "gflop_ratio": sum(side.n_operations) / sum(sides[0].n_operations),
        }  # fmt: skip
    return {"drafters": found} | ({"parts_s": parts} if options.parts else {})


if __name__ == "__main__":
    only = {
        "nargs": "+",
        "choices": [*DRAFTERS, *ABLATIONS],
        "default": list(DRAFTERS),
        "metavar": "DRAFTER",
    }
    run(
        "step-cost",
        measure,
        "store",
        steps=40,
        only=only,
        threads=1,
        default_sizes=False,
        parts=False,
        batch_size=int,
    )
