"""A trial finds the sequences per forward that fit, and recomputing layers changes no loss and no gradient."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.errors import RunWarning
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.drafters.training import LossWeights, TrainingInputs, TrainingStep
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.runs import SIZES, run
from moa_data.trainer import step as step_module
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.data import StoreDataModule, draw, rows_of
from moa_data.trainer.fit import build_module, plan_run
from moa_data.trainer.step import Choice, DrafterModule, Trial, recomputed_layers

CPU = torch.device("cpu")


def module_of(store: Path, kind: str = "moa", **changes: Any) -> tuple[DrafterModule, StoreDataModule]:
    own: dict[str, Any] = {"batch_size": 8, "accelerator": "cpu", "drafter": kind, "prefetch_mb": 1, "out": "unused"}
    config = TrainConfig.of(store=str(store), draft_length=3, **(own | SIZES[kind] | changes))
    data = StoreDataModule(opened := ActivationStore(store), config)
    return build_module(opened, config, data), data


def step_of(config: TrainConfig, inputs: TrainingInputs) -> TrainingStep:
    """Four sequences three times as long, all of them response."""
    for name, value in vars(inputs).items():
        if isinstance(value, torch.Tensor):
            setattr(inputs, name, value.repeat(4, 3, *([1] * (value.ndim - 2))))
    inputs.layer_outputs = tuple(states.repeat(4, 3, 1) for states in inputs.layer_outputs)
    inputs.response_mask = torch.ones_like(inputs.response_mask)
    draws = rows_of(draw(config, 0, 2), torch.arange(4))
    return TrainingStep(inputs, draws, LossWeights.of(config.drafter))


def test_a_cpu_takes_as_many_as_its_memory_holds(store_of_all: Path) -> None:
    module, data = module_of(store_of_all)
    trial, sizes = Trial(module, data.longest_sequence(), CPU, nullcontext), (8, 4, 2, 1)
    kept = trial.kept_bytes()
    assert kept == trial.kept_bytes() > 0
    assert all(weight.grad is None for weight in module.drafter.parameters())
    fixed = 3 * sum(weight.nbytes for weight in module.drafter.parameters()) + (1 << 20)

    def chosen(n_sequences: float, sizes: Sequence[int] = sizes) -> Choice:
        free = int((fixed + n_sequences * 1.5 * kept) / 0.9) + 1
        return trial.choose(sizes, free, 2)

    assert trial.choose(sizes, None, 2) == Choice(8, False)
    assert chosen(8) == chosen(100) == Choice(8, False)
    assert chosen(7.9) == Choice(4, False)
    assert chosen(1) == Choice(1, False)
    assert chosen(0.95).recomputes
    assert chosen(0) == Choice(1, True, fits=False)
    assert chosen(3, [4]).recomputes, "a given size is kept"


def test_a_device_that_runs_out_of_memory_takes_fewer(store_of_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, data = module_of(store_of_all)
    real, sizes = MoADrafter.objective, []

    def with_room_for_two(self: Any, frozen: Any, step: TrainingStep) -> Any:
        sizes.append(len(step.inputs.tokens))
        if sizes[-1] > 2 - module.recomputes:
            raise torch.OutOfMemoryError("no room")
        return real(self, frozen, step)

    monkeypatch.setattr(MoADrafter, "objective", with_room_for_two)
    trial = Trial(module, data.longest_sequence(), CPU, nullcontext)
    assert [trial.step_runs(size, 1 << 20) for size in (4, 2)] == [False, True]
    assert all(weight.grad is None for weight in module.drafter.parameters())
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_: module)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    step_runs = Trial.step_runs
    monkeypatch.setattr(Trial, "step_runs", lambda cuda, size, _: step_runs(trial, size, 0))
    on_cuda = replace(trial, device=torch.device("cuda"))
    assert on_cuda.choose((8, 4, 2, 1), None, 2) == Choice(2, False)
    assert on_cuda.choose((4,), None, 2) == Choice(4, True, fits=False)
    assert sizes == [4, 2, 8, 4, 2, 4, 4]


def test_a_plan_trains_nothing(store_of_all: Path, tmp_path: Path) -> None:
    own: dict[str, Any] = {"drafter": "eagle", "batch_size": 8, "epochs": 2, "validation_fraction": 0.0}
    plan = plan_run(TrainConfig.of(store=str(store_of_all), out=str(tmp_path / "run"), **own))
    store = ActivationStore(store_of_all)
    steps = len(store) // 8
    assert (plan.n_sequences, plan.steps_per_epoch, plan.n_steps) == (len(store), steps, 2 * steps)
    assert plan.n_tokens_per_epoch == store.lengths.sum()
    assert plan.read_bytes_per_epoch == store.lengths.sum() * 32 * 4, "a hidden state of a token"
    assert plan.disk_bytes == 10 * 4 * plan.n_parameters
    assert plan.free_disk_bytes > 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", SIZES)
def test_recomputing_changes_no_loss_and_no_gradient(
    store_of_all: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "_RECOMPUTED_POSITIONS", 1 << 10)  # parts are added up in another order
    module, data = module_of(store_of_all, kind)
    step, found = step_of(module.config, data.longest_sequence()), []
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


def test_parts_of_layer_self_attention_change_no_more_than_rounding(store_of_all: Path) -> None:
    module, data = module_of(store_of_all)
    kv, found = data.longest_sequence().kv, []
    assert kv is not None
    assert kv.shape[1] > step_module._RECOMPUTED_POSITIONS
    for layers in (nullcontext(), recomputed_layers(module.drafter)):
        module.zero_grad()
        with layers:
            memory = module.drafter.encode_kv(kv)  # type: ignore[operator]
        memory.square().sum().backward()
        found.append([memory.detach(), *(p.grad for p in module.drafter.layer_self_attention.parameters())])  # type: ignore[union-attr]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_run_that_does_not_fit_warns_and_keeps_its_choice(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It recomputes, says so in memory.json, and does so again when it is resumed with more room."""
    options: dict[str, Any] = {"max_steps": 2, "validation_fraction": 0.0, "warmup_steps": 1}
    monkeypatch.setattr("moa_data.trainer.callbacks.free_memory", lambda: 1000)
    with pytest.warns(RunWarning) as warned:
        run(store_path, tmp_path / "run", **options, stop_after_steps=1)
    assert len([one for one in warned if one.category is RunWarning]) == 1
    monkeypatch.undo()
    run(store_path, tmp_path / "run", **options, resume=True)
    noted = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert noted == {"micro_batch_size": 1, "recomputes": True}
