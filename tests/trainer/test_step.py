"""Training steps: how much fits into memory, recomputed and compiled layers, the schedule, Muon.

Also the figures of a validation.
"""

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from rich.console import Console

from moa_data.commands.views import run_plan_view
from moa_data.errors import RunWarning, TrainingError
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.drafters.training import LossWeights, TrainingInputs, TrainingStep
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.runs import SIZES, assert_same_weights, run
from moa_data.tests.kit.variants import quick_rows
from moa_data.trainer import step as step_module
from moa_data.trainer.batches import BatchReader
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.data import StoreDataModule, draw, rows_of
from moa_data.trainer.fit import build_module, plan_run, read_metrics
from moa_data.trainer.muon import Muon, orthogonalize
from moa_data.trainer.step import Choice, DrafterModule, Trial, recomputed_layers

CPU = torch.device("cpu")


def module_of(
    store: Path, kind: str = "moa", **changes: Any
) -> tuple[DrafterModule, StoreDataModule]:
    own: dict[str, Any] = {
        "batch_size": 8,
        "accelerator": "cpu",
        "drafter": kind,
        "prefetch_mb": 1,
        "out": "unused",
    }
    config = TrainConfig.of(store=str(store), draft_length=3, **(own | SIZES[kind] | changes))
    data = StoreDataModule(ActivationStore(store), config)
    return build_module(data), data


def step_of(config: TrainConfig, inputs: TrainingInputs) -> TrainingStep:
    """Return a step with four sequences, three times as long and with responses everywhere."""
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


def test_a_device_that_runs_out_of_memory_takes_fewer(
    store_of_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    own: dict[str, Any] = {
        "drafter": "eagle",
        "batch_size": 8,
        "epochs": 2,
        "validation_fraction": 0.0,
    }
    plan = plan_run(TrainConfig.of(store=str(store_of_all), out=str(tmp_path / "run"), **own))
    store = ActivationStore(store_of_all)
    steps = len(store) // 8
    assert (plan.n_sequences, plan.steps_per_epoch, plan.n_steps) == (len(store), steps, 2 * steps)
    assert plan.n_tokens_per_epoch == store.lengths.sum()
    assert plan.read_bytes_per_epoch == store.lengths.sum() * 32 * 4, "a hidden state of a token"
    assert plan.cost.disk_bytes[0] == 3 * 4 * plan.n_parameters
    assert plan.free_disk_bytes > 0
    assert plan.export_problems["eagle"] == []
    assert not (tmp_path / "run").exists()


def test_a_plan_names_the_formats_that_would_not_hold_the_drafter(
    store_of_all: Path, tmp_path: Path
) -> None:
    plan = plan_run(
        TrainConfig.of(store=str(store_of_all), out=str(tmp_path / "run"), drafter="moa")
    )
    assert plan.export_problems["moa"], (
        "the default has two layer groups, and the authors' code has one"
    )
    console = Console(width=200)
    with console.capture() as shown:
        console.print(run_plan_view(plan))
    assert "no export to moa " in shown.get()
    assert "better drafter" in shown.get(), "eagle, for a small store"


@pytest.mark.parametrize(
    ("kind", "in_parts"),
    quick_rows(
        [*((kind, False) for kind in SIZES), ("moa", True)],
        [("moa", False), ("moa", True), ("eagle3", False), ("dflash", False)],
    ),
)
def test_recomputing_changes_no_loss_and_no_gradient(
    store_of_all: Path, kind: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer self-attention sums its parts in another order, so results differ by rounding."""
    if not in_parts:
        monkeypatch.setattr(step_module, "_RECOMPUTED_POSITIONS", 1 << 10)
    module, data = module_of(store_of_all, kind)
    step, found = step_of(module.config, data.longest_sequence()), []
    assert step.inputs.tokens.shape[1] > 3 * step_module._RECOMPUTED_POSITIONS or not in_parts
    before = [set(vars(part)) for part in module.drafter.modules()]
    for layers in (nullcontext(), recomputed_layers(module.drafter)):
        module.zero_grad()
        with layers:
            loss = module.drafter.objective(module.frozen, step)["loss"]
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in module.drafter.parameters())])
    tolerance = 1e-5 if in_parts else 0
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
    assert [set(vars(part)) for part in module.drafter.modules()] == before


def test_a_run_that_does_not_fit_warns_and_keeps_its_choice(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It recomputes layers and records that in memory.json.

    After a resume with more memory, it recomputes again.
    """
    options: dict[str, Any] = {
        "drafter": "eagle", "max_steps": 2, "validation_fraction": 0.0, "warmup_steps": 1
    }  # fmt: skip
    monkeypatch.setattr("moa_data.trainer.callbacks.free_memory", lambda: 1000)
    with pytest.warns(RunWarning) as warned:
        run(store_path, tmp_path / "run", **options, stop_after_steps=1)
    assert len([one for one in warned if one.category is RunWarning]) == 1
    monkeypatch.undo()
    run(store_path, tmp_path / "run", **options, resume=True)
    noted = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert noted == {"micro_batch_size": 1, "recomputes": True}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # The compiler itself causes many warnings.
@pytest.mark.parametrize("kind", ["moa", "independent"])
def test_compiled_training_equals_eager(
    store_path: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    real = DrafterModule.on_fit_start

    def watched(module: DrafterModule) -> None:
        real(module)
        compiled.append(sum("finish" in vars(block) for block in module.drafter.modules()))

    monkeypatch.setattr(DrafterModule, "on_fit_start", watched)
    for name, compile in (("eager", False), ("compiled", True)):
        run(
            store_path,
            tmp_path / name,
            drafter=kind,
            max_steps=4,
            validate_every=4,
            log_every=1,
            compile=compile,
        )
    assert compiled[0] == 0 < compiled[1]
    eager, fast = read_metrics(tmp_path / "eager"), read_metrics(tmp_path / "compiled")
    for name in ("train/loss", "train/forward_kl", "val/kl"):
        assert [v for _, v in fast[name]] == pytest.approx([v for _, v in eager[name]], rel=1e-5), (
            name
        )
    assert_same_weights(tmp_path / "eager", tmp_path / "compiled", rtol=1e-3, atol=2e-5)


def test_runs_of_agreement_per_complete_round() -> None:
    drafted = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1]]).bool()
    agree = torch.tensor([[0, 0, 1, 0, 0, 1, 1, 0, 1.0]])
    assert step_module.accepted_runs(agree, drafted, 2).tolist() == [1, 2], (
        "the cut-off round at the end does not count"
    )
    agree = torch.tensor([[0, 0, 0, 1, 0, 1, 1, 0, 1.0]])
    assert step_module.accepted_runs(agree, drafted, 2).tolist() == [0, 2], (
        "a later agreement does not undo a miss"
    )
    assert step_module.accepted_runs(agree[:, :2], drafted[:, :2], 2).tolist() == []


def test_samples_are_accepted_with_the_probability_that_both_distributions_share() -> None:
    drafted = torch.tensor([[0, 1, 1, 0]]).bool()
    shared = torch.tensor([[0, 0.5, 0.25, 0.0]])
    assert step_module.accepted_runs(shared, drafted, 2).tolist() == [0.5 + 0.5 * 0.25]


def test_each_batch_counts_once_in_the_order_of_a_single_device() -> None:
    kls = [0.1, 0.2, 0.3, 0.7, 1e9]
    # All sequences have the same tokens and rounds, so there is no spread.
    rest = [1, 2, 3, 2.5, 1, 9, 3, 1, 1]
    whole = step_module.validation_metrics([number, kl, *rest] for number, kl in enumerate(kls))
    dealt = [3, 1, 0, 4, 2, 4, 4]
    assert step_module.validation_metrics([number, kls[number], *rest] for number in dealt) == whole
    total = (((0.1 + 0.2) + 0.3) + 0.7) + 1e9  # equal to the last bit
    lengths = {
        "expected_acceptance_length": 3.0,
        "expected_acceptance_half_width": 0.0,
        "expected_sampled_length": 2.5,
    }
    assert whole == {"kl": total / 10, "top1_agreement": 0.5} | lengths
    assert all(map(math.isnan, step_module.validation_metrics([]).values()))


def test_schedule() -> None:
    factors = [
        step_module.zero_peak_constant(step, 50, 20.0, 1000)
        for step in (0, 25, 50, 525, 1000, 5000)
    ]
    assert factors == [0.0, 10.0, 20.0, 10.5, 1.0, 1.0]
    assert [step_module.zero_peak_constant(step, 50, 1.0, 0) for step in (25, 60)] == [0.5, 1.0]
    assert step_module.zero_peak_constant(0, 0, 3.0, 10) == 3.0


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 16), (2, 8, 24), (2, 24, 8)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_other_parameters_follow_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.zeros(5))
    theirs.data.copy_(ours.data)
    optimizers = (
        Muon([], [ours], others_lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([theirs], lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    )
    for step in range(7):
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = torch.linspace(-1, 1, 5) * (step + 1) + weight.detach()
            optimizer.step()
        optimizers[0].load_state_dict(optimizers[0].state_dict())
    torch.testing.assert_close(ours, theirs)


def test_checkpoints_hold_what_earlier_releases_read() -> None:
    group = Muon([torch.nn.Parameter(torch.zeros(2, 2))]).state_dict()["param_groups"][0]
    assert (group["momentum"], group["n_iterations"]) == (0.95, 5)


def test_blocks_of_rows_are_orthogonalised_each() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(20, 12))
    weight.grad = torch.randn(20, 12)
    Muon([weight], lr=1.0, block_rows=8).step()
    # The first Nesterov direction is a multiple of the gradient, and orthogonalising ignores the
    # scale.
    for block, grad in zip(weight.detach().split(8), weight.grad.split(8), strict=True):
        torch.testing.assert_close(-block, orthogonalize(grad[None])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("field", ["hidden", "kv", "layer_outputs", "entering_hidden"])
def test_activations_that_are_not_finite_end_a_step_and_a_validation(
    store_of_all: Path, field: str
) -> None:
    module, data = module_of(store_of_all, "eagle")
    inputs = data.longest_sequence()
    module._cast(replace(inputs))
    module._check_inputs(bool(module._are_finite))
    values = inputs.hidden.clone()
    values[0, 1, 2] = math.inf
    changes: dict[str, Any] = {field: (values,) if field == "layer_outputs" else values}
    module._cast(replace(inputs, **changes))
    module._cast(replace(inputs))  # a micro-batch after the one with infinity
    with raises_naming(TrainingError, "step 0", "moa-data verify"):
        module._check_inputs(bool(module._are_finite))


@pytest.mark.parametrize("is_validation", [False, True])
def test_a_store_with_values_that_are_not_finite_is_not_trained_on(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_validation: bool
) -> None:
    read = BatchReader.batch

    def damaged(
        reader: BatchReader, sequences: Any, draws: Any, response: Any = None, **facts: Any
    ) -> Any:
        batch = read(reader, sequences, draws, response, **facts)
        if (response is None) == is_validation and facts:
            batch.inputs.hidden[0, 0, 0] = math.nan
        return batch

    monkeypatch.setattr(BatchReader, "batch", damaged)
    with raises_naming(TrainingError, f"moa-data verify {store_path}"):
        run(store_path, tmp_path / "run", drafter="eagle", max_steps=1)


def test_masks_that_are_zero_everywhere_are_refused(store_path: Path) -> None:
    table = ActivationStore(store_path).sequences
    column = table.schema.get_field_index("n_response_tokens")
    zeros = pa.array([0] * table.num_rows, pa.int32())
    store: Any = SimpleNamespace(
        path=store_path, sequences=table.set_column(column, "n_response_tokens", zeros)
    )
    with raises_naming(TrainingError, store_path, 50):
        StoreDataModule(store, TrainConfig.of(store=str(store_path), out="unused", batch_size=8))
