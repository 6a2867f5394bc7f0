"""Training on a simulated CUDA device gives the CPU's losses and gradients.

Races become visible, and a step waits for the device only a few times.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moa_data.errors import TrainingError
from moa_data.moa.nn import attention
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.device import Counts, CudaTensor
from moa_data.tests.kit.runs import SIZES, settings
from moa_data.tests.kit.training import build_store
from moa_data.tests.kit.variants import quick
from moa_data.trainer import data as data_module
from moa_data.trainer.batches import Batch, BatchReader
from moa_data.trainer.data import StoreDataModule, TrainingStream, ValidationBatches
from moa_data.trainer.fit import build_module
from moa_data.trainer.step import Choice, Trial, validate_batch

KINDS: dict[str, dict[str, Any]] = SIZES | {
    "moa with a target layer": {"target_layer_inference": 1},
    "dspark on keys and values": {
        "context": "kv",
        "fused_layers": (1,),
        "block_layers": 1,
        "markov_rank": 8,
    },
    "dspark on a memory": {"context": "memory", "block_layers": 1, "markov_rank": 8},
    "dflash with D-PACE": SIZES["dflash"] | {"position_weights": "d-pace"},
}
QUICK_KINDS = ("eagle3", "moa with a target layer", "dflash with D-PACE")
"""The kinds that run by default: one that drafts token by token, one that reads the target's KV, and
one that drafts a block."""
N_STEPS = 2
# Most waits of one step, with its batch, forward, backward, clipping and optimizer.
MAX_WAITS = 4
MAX_LAUNCHES = {
    "moa": 585, "eagle": 226, "eagle3": 577, "dspark": 375, "dflash": 325, "glide": 243,
    "medusa": 153,
    "independent": 204, "moa with a target layer": 715, "dspark on keys and values": 334,
    "dspark on a memory": 520, "dflash with D-PACE": 342,
}  # fmt: skip


class NoTrainer:
    """Stands in for Lightning's trainer; gradient clipping only reads its precision."""

    precision_plugin = SimpleNamespace(precision="32-true")


@dataclass
class Step:
    """The results of one step."""

    loss: float
    gradients: dict[str, Tensor]  # gradients before clipping, on the CPU
    n_launches: int
    n_waits: int
    worst: str  # the lines of code that waited


@pytest.fixture(autouse=True)
def no_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable FlexAttention, since nothing can be compiled for the simulated device."""
    monkeypatch.setattr(attention, "_flex_works", lambda *_: False)


class Run:
    """A run without Lightning: the same reader, stream, module and optimizer."""

    def __init__(self, path: Path, kind: str, device: str, **changes: Any) -> None:
        own: dict[str, Any] = (
            {"drafter": kind.split()[0], "validation_fraction": 0.0} | KINDS[kind] | changes
        )
        self.device, self.config, self.store = (
            torch.device(device),
            settings(path, **own),
            ActivationStore(path),
        )
        self.data = StoreDataModule(self.store, self.config)
        self.module = build_module(self.data).to(self.device)
        self.module.frozen.to(self.device)
        vars(self.module).update(
            log=lambda *_, **__: None, log_dict=lambda *_, **__: None, _trainer=NoTrainer()
        )
        self.reader = BatchReader(self.store, self.data.config, self.device)
        self.sequences = self.data.train_sequences

    def steps(self, counts: Counts, n_steps: int = N_STEPS) -> Iterator[Step]:
        """Train, and yield each step's results."""
        optimizer = self.module.build_optimizer("32-true")
        batches = iter(TrainingStream(self.reader, self.sequences, n_steps, 0, 1))
        for _ in range(n_steps):
            counts.reset()
            loss = self.module.training_step(self.data.on_after_batch_transfer(next(batches), 0), 0)
            loss.backward()
            weights = self.module.drafter.named_parameters()
            gradients = {name: one.grad.clone() for name, one in weights if one.grad is not None}
            self.module.configure_gradient_clipping(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            n_launches, n_waits, worst = counts.launches, counts.waits, counts.worst()
            yield Step(
                float(loss.detach()),
                {name: one.cpu() for name, one in gradients.items()},
                n_launches,
                n_waits,
                worst,
            )

    def validated(self) -> list[float]:
        """Measure the drafts for the first sequences."""
        batches = ValidationBatches(self.reader, self.sequences[:8], 8)
        batch = self.data.on_after_batch_transfer(next(iter(batches)), 0)
        return validate_batch(
            self.module.drafter, self.module.frozen, batch, self.config.validation.draft_length
        )


def assert_equal(found: Sequence[Step], expected: Sequence[Step]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.loss == pytest.approx(other.loss, rel=1e-5)
        assert own.gradients.keys() == other.gradients.keys()
        for name, gradient in own.gradients.items():
            torch.testing.assert_close(
                gradient, other.gradients[name], rtol=1e-3, atol=1e-6, msg=name
            )


@pytest.mark.parametrize("kind", quick(KINDS, QUICK_KINDS))
def test_steps_are_those_of_the_cpu_and_wait_rarely(
    store_of_all: Path, device: Counts, kind: str
) -> None:
    own, expected = Run(store_of_all, kind, "cuda"), Run(store_of_all, kind, "cpu")
    assert all(isinstance(weight, CudaTensor) for weight in own.module.drafter.parameters())
    steps = list(own.steps(device))
    assert_equal(steps, list(expected.steps(device)))
    last = steps[-1]
    assert last.n_waits <= MAX_WAITS, last.worst
    assert last.n_launches <= MAX_LAUNCHES[kind], last.worst
    assert own.validated() == pytest.approx(expected.validated(), rel=1e-4)


@pytest.mark.parametrize(
    "codec", quick(["int8", "transform:2,tokens@all"], ["transform:2,tokens@all"])
)
def test_codes_are_decoded_on_the_device(tmp_path: Path, device: Counts, codec: str) -> None:
    exact = build_store(tmp_path / "exact", ("kv", "hidden:last"), n_sequences=12)
    recode(exact, codec, tmp_path / "store")
    steps = list(Run(tmp_path / "store", "moa", "cuda").steps(device))
    assert_equal(steps, list(Run(tmp_path / "store", "moa", "cpu").steps(device)))
    assert steps[-1].n_waits <= MAX_WAITS, steps[-1].worst


def use_without_waiting(batch: Batch) -> Batch:
    """Use a batch like :func:`await_copy` does, but before its copy has arrived."""
    return replace(batch, copied=None)


def test_races_show(store_of_all: Path, device: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code's protection against late copies is necessary: without it the losses differ."""
    expected = [step.loss for step in Run(store_of_all, "eagle", "cpu").steps(device, 3)]

    def losses() -> list[float]:
        return [
            step.loss
            for step in Run(store_of_all, "eagle", "cuda", prefetch_batches=4).steps(device, 3)
        ]

    assert losses() == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(data_module, "await_copy", use_without_waiting)
    try:
        found = losses()
    except TrainingError:  # Gradients are not finite.
        found = [float("nan")]
    assert found != pytest.approx(expected, rel=1e-3)


def test_trial_steps_run_on_the_device(
    store_of_all: Path, device: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    run = Run(store_of_all, "eagle", "cuda")
    trial = Trial(run.module, run.data.longest_sequence(), run.device, nullcontext)
    assert trial.choose((4, 2), None, 2) == Choice(4, False)
    assert all(weight.grad is None for weight in run.module.drafter.parameters())
