"""What trials say of a step is what a step takes, and micro-batches are chosen by it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.moa.drafters.training import LossWeights, TrainingStep
from moa_data.moa.nn.limits import LIMITS, smallest_parts
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.memory import LiveBytes
from moa_data.tests.kit.training import build_store
from moa_data.trainer.batches.datamodule import StoreDataModule, draw, rows_of
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.fit.run import build_module, measure_run, plan_run
from moa_data.trainer.step.memory import StepMemory

KINDS: dict[str, dict[str, Any]] = {
    "moa": {},
    "eagle": {},
    "eagle3": {"fused_layers": (0, 1)},
    "glide": {},
    "medusa": {},
    "independent": {},
}


@pytest.fixture(scope="module")
def store_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    activations = ("kv", "hidden:last", "hidden:layer:0", "hidden:layer:1")
    return build_store(tmp_path_factory.mktemp("memory") / "store", activations=activations, n_sequences=40)


def settings(store: Path, kind: str = "moa", **changes: Any) -> TrainConfig:
    own: dict[str, Any] = {"batch_size": 8, "accelerator": "cpu", "drafter": kind}
    return TrainConfig.of(store=str(store), **({"out": "unused"} | own | KINDS[kind] | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_foretells_the_peak_of_a_step(store_of_all: Path, kind: str) -> None:
    """Of four sequences three times as long as the trial's; it may say too much, but not by twice."""
    config, store = settings(store_of_all, kind), ActivationStore(store_of_all)
    data = StoreDataModule(store, config)
    module = build_module(store, config, data)
    memory = measure_run(module, data)
    inputs = data.longest_sequence()
    for name, value in vars(inputs).items():
        if isinstance(value, torch.Tensor):
            setattr(inputs, name, value.repeat(4, 3, *([1] * (value.ndim - 2))))
    inputs.layer_outputs = tuple(states.repeat(4, 3, 1) for states in inputs.layer_outputs)
    inputs.response_mask = torch.ones_like(inputs.response_mask)
    step = TrainingStep(
        inputs, rows_of(draw(config, 0, 2), torch.arange(4)), LossWeights(**config.drafter.loss_weights())
    )
    with smallest_parts(), LiveBytes() as live:  # parts of a given size are counted apart
        module.drafter.objective(module.frozen, step).total.backward()
    gradients = sum(weight.nbytes for weight in module.drafter.parameters())
    activations = live.peak - gradients
    foretold = 4 * memory.sequence_bytes(inputs.tokens.shape[1])
    assert activations < foretold * 1.05
    assert foretold < 2 * activations


def test_parts_are_as_before_after_a_trial(store_of_all: Path) -> None:
    before = vars(LIMITS).copy()
    store, config = ActivationStore(store_of_all), settings(store_of_all)
    data = StoreDataModule(store, config)
    module = build_module(store, config, data)
    assert measure_run(module, data) == measure_run(module, data), "the same each time"
    assert vars(LIMITS) == before
    assert all(weight.grad is None for weight in module.drafter.parameters())


def test_the_most_sequences_that_fit_are_chosen() -> None:
    memory = StepMemory(100, 300, 50, 50, bytes_per_token=2.0, bytes_per_pair=0.1)
    assert memory.sequence_bytes(100) == 1200
    assert memory.micro_batch_size(32, 100, None) == 32
    assert memory.micro_batch_size(32, 100, 10**6) == 32
    room = int((500 + 8 * 1200) / 0.8) + 1
    assert memory.micro_batch_size(32, 100, room) == 8
    assert memory.micro_batch_size(32, 100, room - 2) == 4, "divides the share"
    assert memory.micro_batch_size(32, 100, room - 300, held_bytes=300) == 8
    assert memory.micro_batch_size(32, 100, 1) == 1
    assert memory.micro_batch_size(12, 100, room) == 6


def test_a_plan_trains_nothing(store_of_all: Path, tmp_path: Path) -> None:
    plan = plan_run(settings(store_of_all, out=str(tmp_path / "run")))
    assert plan.size_here() == plan.size_on(80 * 10**9) == 8
    assert plan.size_on(1) == 1
    assert plan.step_bytes(2) - plan.step_bytes(1) == plan.memory.sequence_bytes(plan.longest)
    assert not (tmp_path / "run").exists()
