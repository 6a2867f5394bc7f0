"""What trials say of a step is what a step takes, and micro-batches are chosen by it."""

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.errors import RunWarning
from moa_data.moa.drafters.training import LossWeights, TrainingInputs, TrainingStep
from moa_data.moa.nn.limits import LIMITS, smallest_parts
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.memory import LiveBytes
from moa_data.tests.kit.training import build_store
from moa_data.tests.kit.variants import quick
from moa_data.trainer.batches.datamodule import StoreDataModule, draw, rows_of
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.fit import callbacks
from moa_data.trainer.fit.run import build_module, measure_run, plan_run, train
from moa_data.trainer.step import recompute
from moa_data.trainer.step.memory import MeasuredStep, MemoryPlan, StepMemory
from moa_data.trainer.step.recompute import recomputed_layers

KINDS: dict[str, dict[str, Any]] = {
    "moa": {},
    "eagle": {},
    "eagle3": {"fused_layers": (0, 1)},
    "dspark": {"fused_layers": (0, 1), "block_layers": 2},
    "dflash": {"fused_layers": (0, 1), "block_layers": 2, "block_size": 8},
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


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", quick(KINDS, ["moa", "eagle", "dspark"]))
def test_a_trial_foretells_the_peak_of_a_step(store_of_all: Path, kind: str, recomputes: bool) -> None:
    """Of four sequences three times as long as the trial's; it may say too much, but not by twice."""
    config, store = settings(store_of_all, kind), ActivationStore(store_of_all)
    data = StoreDataModule(store, config)
    module = build_module(store, config, data)
    measured = measure_run(module, data)
    step = step_of(config, data.longest_sequence())
    layers = recomputed_layers(module.drafter) if recomputes else nullcontext()
    with smallest_parts(), layers, LiveBytes() as live:  # parts of a given size are counted apart
        LIMITS.watched, LIMITS.score_bytes = None, 1 << 18  # chunks as in a run
        module.drafter.objective(module.frozen, step).total.backward()
    gradients = sum(weight.nbytes for weight in module.drafter.parameters())
    activations = live.peak - gradients
    memory = measured.recomputing if recomputes else measured.plain
    # What is made again at once does not grow with the sequence.
    foretold = 4 * memory.sequence_bytes(step.inputs.tokens.shape[1]) + memory.chunk_bytes - measured.plain.chunk_bytes
    assert activations < foretold * 1.05
    # The largest tensor of many slots, their mask, is counted as if it had gradients.
    assert foretold < (3 if kind == "dflash" else 2) * activations


def step_of(config: TrainConfig, inputs: TrainingInputs) -> TrainingStep:
    """Four sequences three times as long, all of them response."""
    for name, value in vars(inputs).items():
        if isinstance(value, torch.Tensor):
            setattr(inputs, name, value.repeat(4, 3, *([1] * (value.ndim - 2))))
    inputs.layer_outputs = tuple(states.repeat(4, 3, 1) for states in inputs.layer_outputs)
    inputs.response_mask = torch.ones_like(inputs.response_mask)
    draws = rows_of(draw(config, 0, 2), torch.arange(4))
    return TrainingStep(inputs, draws, LossWeights.of(config.drafter))


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
    assert plan.here().micro_batch == plan.on(80 * 10**9).micro_batch == 8
    assert plan.on(1).micro_batch == 1
    assert plan.shortage() is None
    assert not (tmp_path / "run").exists()


def test_layers_are_recomputed_where_one_sequence_does_not_fit() -> None:
    sizes: dict[str, Any] = {"weight_bytes": 100, "training_bytes": 300, "frozen_bytes": 50, "chunk_bytes": 50}
    plain = StepMemory(**sizes, bytes_per_token=10.0, bytes_per_pair=0.0)
    recomputing = StepMemory(**sizes, bytes_per_token=1.0, bytes_per_pair=0.0, recomputes=True)
    measured = MeasuredStep(plain, recomputing)

    def plan(free_bytes: int | None, held_bytes: int = 0, micro_batch: int | None = None) -> MemoryPlan:
        return MemoryPlan(measured, 100, 8, micro_batch, free_bytes, held_bytes)

    for free, recomputes, size in ((None, False, 8), (10**5, False, 8), (1875, False, 1), (1874, True, 8)):
        chosen = plan(free).here()
        assert (chosen.memory.recomputes, chosen.micro_batch) == (recomputes, size)
    assert plan(10**5, micro_batch=4).here().micro_batch == 4
    assert plan(4000, micro_batch=4).here().memory.recomputes
    assert plan(None).shortage() is plan(600).shortage() is plan(500, held_bytes=150).shortage() is None
    message = plan(599).shortage()
    assert message is not None
    assert "1 of the longest sequences (100 tokens) is foretold to take 600 B of 599 B" in message
    assert "lower --micro-batch-size" in str(plan(700, micro_batch=8).shortage())


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_changes_no_loss_and_no_gradient(
    store_of_all: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "_POSITIONS", 1 << 10)  # pieces are added up in another order
    config, store = settings(store_of_all, kind), ActivationStore(store_of_all)
    data = StoreDataModule(store, config)
    module = build_module(store, config, data)
    step, found = step_of(config, data.longest_sequence()), []
    before = [set(vars(part)) for part in module.drafter.modules()]
    for layers in (nullcontext(), recomputed_layers(module.drafter)):
        module.zero_grad()
        with layers:
            loss = module.drafter.objective(module.frozen, step).total
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in module.drafter.parameters())])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)
    assert [set(vars(part)) for part in module.drafter.modules()] == before


def test_pieces_of_layer_self_attention_change_no_more_than_rounding(store_of_all: Path) -> None:
    config, store = settings(store_of_all), ActivationStore(store_of_all)
    data = StoreDataModule(store, config)
    module = build_module(store, config, data)
    kv, found = data.longest_sequence().kv, []
    assert kv is not None
    assert kv.shape[1] > recompute._POSITIONS
    for layers in (nullcontext(), recomputed_layers(module.drafter)):
        module.zero_grad()
        with layers:
            memory = module.drafter.encode_kv(kv)  # type: ignore[operator]
        memory.square().sum().backward()
        found.append([memory.detach(), *(p.grad for p in module.drafter.layer_self_attention.parameters())])  # type: ignore[union-attr]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_run_that_does_not_fit_warns_in_one_line(
    store_of_all: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It recomputes, says so in memory.json, and goes on so when it is resumed with more room."""
    run = tmp_path / "run"
    options: dict[str, Any] = {"out": str(run), "max_steps": 2, "validation_fraction": 0.0, "warmup_steps": 1}
    monkeypatch.setattr(callbacks, "free_memory", lambda: 1000)
    with pytest.warns(RunWarning, match="1 of the longest sequences .* what helps: ") as warned:
        train(settings(store_of_all, **options, stop_after_steps=1))
    assert len([one for one in warned if one.category is RunWarning]) == 1
    assert "\n" not in str(warned[0].message)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunWarning)
        train(settings(store_of_all, **options, resume=True))
    noted = json.loads((run / "memory.json").read_text())
    assert (noted["recomputes"], noted["micro_batch_size"]) == (True, 1)


def test_devices_that_share_a_drafter_take_less_each() -> None:
    """AdamW's 16 bytes a weight become 8 + 16 / n: weights and gradients within a step, and a share of everything."""
    sizes: dict[str, Any] = {"frozen_bytes": 0, "chunk_bytes": 0, "bytes_per_token": 1.0, "bytes_per_pair": 0.0}
    memory = StepMemory(weight_bytes=400, training_bytes=1200, **sizes)
    shared = MeasuredStep(memory, memory).shared(8)
    assert (shared.plain.fixed_bytes, shared.recomputing.fixed_bytes) == (1000, 1000)
    assert MeasuredStep(memory, memory).shared(100).plain.fixed_bytes == 816
