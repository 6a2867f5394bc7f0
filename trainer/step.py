"""One training step: Lightning module, optimizer, schedule, trial steps, recomputation, validation.

Losses and masks are defined by the drafters (``moa``); files, signals and devices are handled by
``fit``.

Shapes: B sequences, T tokens, P drafted positions, g drafts of a round.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import TrainingError
from ..moa.drafters.base import Drafter
from ..moa.drafters.training import (
    Draws,
    LossTerms,
    LossWeights,
    TrainingInputs,
    TrainingStep,
    at_queries,
)
from ..moa.nn import masks
from ..moa.nn.layers import DecoderBlock
from ..moa.targets.bundle import FrozenTarget
from .config import TrainConfig, known
from .data import Batch, draw, map_tensors, rows_of
from .muon import Muon

# Whole matrices gain 3 % of acceptance length after 340 steps, at 2.4 times the optimizer's cost.
_MUON_BLOCK_ROWS = 128
_RECOMPUTED_PARTS = ("queries", "keys_values", "finish", "attend_self_means")
# Positions of layer self-attention that are recomputed at once. Each position has the rows of all
# layers, which are hundreds together.
_RECOMPUTED_POSITIONS = 16
_LOGITS_BYTES = 1 << 26
PLUS_MINUS = "±"
"""Name of the half width of the 95 % interval in progress lines."""
# Half width of the 95 % interval of a normal distribution, in standard errors.
_NORMAL_95 = 1.96
WHAT_HELPS = (
    "a lower --micro-batch-size, --precision bf16-mixed, smaller sizes of the drafter (for eagle3 "
    "above all drafter.draft_vocabulary), a store of shorter sequences (extract --max-length)."
)
# Share of the free memory that is not used, because memory fragments as the lengths of batches
# change.
_SPARE_SHARE = 0.1
# Peak memory of a step on a CPU, as a multiple of the activations that the forward saves. The rest
# are gradients within a layer and chunks of logits.
_PEAK_FACTOR = 1.5


def zero_peak_constant(
    step: int, warmup_steps: int, peak_multiplier: float, decay_end_step: int
) -> float:
    """Return the learning rate at a step (from 0) as a multiple of the final one.

    It rises from 0 to ``peak_multiplier`` in the warm-up, falls linearly to 1 at
    ``decay_end_step``, and stays there (the official ``trainer.py``, lines 102-123).
    """
    if step < warmup_steps:
        return peak_multiplier * step / warmup_steps
    # A decay that would end within the warm-up is skipped.
    if step >= decay_end_step or decay_end_step <= warmup_steps:
        return 1.0
    done = (step - warmup_steps) / (decay_end_step - warmup_steps)
    return peak_multiplier + (1.0 - peak_multiplier) * done


@contextlib.contextmanager
def recomputed_layers(drafter: Drafter) -> Iterator[None]:
    """Checkpoint the activations of decoder layers, for a forward within this context.

    Results change only by the order of sums over positions.
    """
    # The inputs and outputs of each part of a layer, and attention itself, are saved; the rest is
    # recomputed. This saves more than half of the activations of EAGLE-3 and Mixture of Attentions,
    # at the cost of a second forward of those parts.
    blocks = [block for block in drafter.modules() if isinstance(block, DecoderBlock)]
    # Compiled parts are stored in the instance's ``__dict__``, and are restored afterwards.
    before = [
        {name: vars(block)[name] for name in _RECOMPUTED_PARTS if name in vars(block)}
        for block in blocks
    ]
    for block in blocks:
        for name in _RECOMPUTED_PARTS:
            part = partial(
                checkpoint, getattr(block, name), use_reentrant=False, preserve_rng_state=False
            )
            vars(block)[name] = (
                partial(_by_positions, part) if name == "attend_self_means" else part
            )
    try:
        yield
    finally:
        for block, compiled in zip(blocks, before, strict=True):
            for name in _RECOMPUTED_PARTS:
                del vars(block)[name]
            vars(block).update(compiled)


def _by_positions(means: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    return torch.cat([means(part, *args) for part in x.split(_RECOMPUTED_POSITIONS)])


class DrafterModule(L.LightningModule):
    """Trains a drafter; the frozen target weights are not in its parameters and checkpoints."""

    def __init__(
        self, drafter: Drafter, frozen: FrozenTarget, config: TrainConfig, decay_end_step: int
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.config = config
        self.recomputes = False  # Whether the backward recomputes decoder layers.
        # Step at which the learning rate reaches its final value.
        self._decay_end_step = decay_end_step
        self._frozen = [frozen]  # In a list, so that it is not a submodule.
        self._weights = LossWeights.of(config.drafter)
        self._step_sums: dict[str, Tensor] = {}
        # Whether all activations of the step or validation are finite; a tensor on the device.
        self._are_finite: Any = True
        self._validation: dict[int, list[float]] = {}

    @property
    def frozen(self) -> FrozenTarget:
        """The frozen target weights, on this module's device once a fit has started."""
        return self._frozen[0]

    def on_fit_start(self) -> None:
        """Move the target weights to the device, and compile if requested."""
        self.frozen.to(self.device)
        if self.config.machine.compile:
            # Compile the parts in which only shapes depend on the data, which make most of a step's
            # passes over memory. Masks and loss positions depend on the values too.
            for block in self.drafter.modules():
                if isinstance(block, DecoderBlock):
                    for name in ("finish", "attend_self_means"):
                        vars(block)[name] = torch.compile(getattr(block, name), dynamic=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the loss of one micro-batch.

        The last micro-batch of a step logs the loss terms of the step.
        """
        terms = self.compute_terms(batch.inputs, batch.draws, batch.denominator)
        terms_by_name = {
            "loss": terms.total,
            "forward_kl": terms.forward_kl,
            "feature_loss": terms.feature,
        }
        terms_by_name |= {"entering_feature_loss": terms.entering_feature}
        terms_by_name |= {f"{name}_loss": value for name, value in terms.parts.items()}
        values = {
            f"train/{name}": value.detach()
            for name, value in terms_by_name.items()
            if value is not None
        }
        # Each micro-batch divides by its share of the step's loss positions, so the mean over
        # micro-batches is the loss of the step.
        if batch.index:
            values = {name: self._step_sums[name] + value for name, value in values.items()}
        self._step_sums = values
        if batch.index + 1 == batch.n_parts:
            means = {name: value / batch.n_parts for name, value in values.items()}
            self.log_dict(means, batch_size=1, sync_dist=True)
            self.log(
                "loss",
                means["train/loss"],
                prog_bar=True,
                logger=False,
                batch_size=1,
                sync_dist=True,
            )
        return terms.total

    def compute_terms(self, inputs: TrainingInputs, draws: Draws, denominator: float) -> LossTerms:
        """Compute the terms of the loss; sums over positions are divided by ``denominator``."""
        step = TrainingStep(self._cast(inputs), draws, self._weights, denominator)
        with recomputed_layers(self.drafter) if self.recomputes else contextlib.nullcontext():
            return self.drafter.objective(self.frozen, step)

    def _cast(self, inputs: TrainingInputs) -> TrainingInputs:
        """Cast hidden states to the drafter's dtype, in place.

        Also record whether all activations are finite.
        """
        for values in (inputs.kv, inputs.hidden, inputs.entering_hidden, *inputs.layer_outputs):
            if values is not None:
                # This does not synchronize with the device. The extremes are NaN if any value is.
                self._are_finite = self._are_finite & torch.stack(values.aminmax()).isfinite().all()
        # The KV is cast part by part, at the places that read it.
        inputs.hidden = inputs.hidden.to(self.drafter.dtype)
        inputs.layer_outputs = tuple(
            states.to(self.drafter.dtype) for states in inputs.layer_outputs
        )
        return inputs

    def _check_inputs(self, are_finite: bool) -> None:
        """Refuse activations with NaN or infinity, and reset the check."""
        self._are_finite = True
        if not are_finite:
            raise TrainingError(
                "the store holds NaN or infinity in a sequence that was read for step "
                f"{self.global_step}. `moa-data verify {self.config.store}` lists what is damaged; "
                "extract it again."
            )

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global norm, and refuse activations and gradients that are not finite."""
        # Lightning's own clipping refuses fused optimizers in bf16-mixed too, although nothing is
        # scaled there.
        parameters = [weight for weight in self.drafter.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(
            [weight.grad for weight in parameters if weight.grad is not None]
        )
        # Checked once per step, because each check synchronizes with the device.
        are_inputs_finite, is_norm_finite = torch.stack(
            [self._are_finite, norm.isfinite()]
        ).tolist()
        self._check_inputs(are_inputs_finite)
        # With 16-mixed, gradients may overflow; the loss scaler skips those steps.
        if self.trainer.precision_plugin.precision != "16-mixed" and not is_norm_finite:
            self._refuse_gradients_not_finite()
        if gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def _refuse_gradients_not_finite(self) -> None:
        gradients = [
            (name, weight.grad)
            for name, weight in self.drafter.named_parameters()
            if weight.grad is not None
        ]
        bad = [name for name, gradient in gradients if not gradient.isfinite().all()]
        # The list is empty if only the norm of finite gradients overflows. Clipping then makes them
        # 0.
        if bad:
            raise TrainingError(
                f"the gradient of {bad[0]} is not finite at step {self.global_step} ({len(bad)} "
                "tensors in all); lower --learning-rate, use --precision 32-true, or look for NaN "
                "in the store with `moa-data verify`."
            )

    def on_validation_epoch_start(self) -> None:
        """Reset the validation sums."""
        self._validation = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the sums of one validation batch."""
        self._cast(batch.inputs)
        draft_length = self.config.validation.draft_length
        self._validation[batch.index] = validate_batch(
            self.drafter, self.frozen, batch, draft_length
        )

    def on_validation_epoch_end(self) -> None:
        """Log the metrics over the batches of all devices; they are equal on each device."""
        self._check_inputs(bool(self._are_finite))
        # float64 holds counts exactly, so the sums are bit-identical to those of a single device.
        rows = [[index, *sums] for index, sums in self._validation.items()]
        if self.trainer.world_size > 1:
            gathered: Any = self.all_gather(
                torch.tensor(rows, dtype=torch.float64, device=self.device)
            )
            rows = gathered.flatten(0, -2).tolist()
        metrics = validation_metrics(rows)
        self.log_dict({f"val/{name}": value for name, value in metrics.items()}, batch_size=1)
        shown = {
            "expected acceptance length": metrics["expected_acceptance_length"],
            PLUS_MINUS: metrics["expected_acceptance_half_width"],
        }
        self.log_dict(shown, prog_bar=True, logger=False, batch_size=1)

    def build_optimizer(self, precision: str) -> torch.optim.Optimizer:
        """Build the run's optimizer, without a schedule; AdamW has betas 0.9 and 0.95, eps 1e-8."""
        config = self.config.optimizer
        if config.kind == "muon":
            weights = list(self.drafter.parameters())
            # The rows of an embedding are looked up one by one, so an orthogonal update of the
            # table has no meaning.
            tables = {
                id(module.weight)
                for module in self.drafter.modules()
                if isinstance(module, torch.nn.Embedding)
            }
            matrices = [
                weight for weight in weights if weight.ndim == 2 and id(weight) not in tables
            ]
            return Muon(
                matrices,
                [weight for weight in weights if weight.ndim != 2 or id(weight) in tables],
                lr=known(config.matrix_learning_rate),
                others_lr=known(config.learning_rate),
                weight_decay=config.weight_decay,
                block_rows=_MUON_BLOCK_ROWS,
            )
        return torch.optim.AdamW(
            self.drafter.parameters(),
            lr=known(config.learning_rate),
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=config.weight_decay,
            # A fused step undoes the loss scaling of 16-mixed internally, which is too late for
            # clipping.
            fused=precision != "16-mixed",
        )

    def configure_optimizers(self) -> Any:
        """Build the optimizer with the zero-peak-constant schedule."""
        schedule = self.config.schedule
        optimizer = self.build_optimizer(self.trainer.precision_plugin.precision)
        warmup = known(schedule.warmup_steps)
        peak = known(schedule.peak_multiplier)

        def factor(step: int) -> float:
            return zero_peak_constant(step, warmup, peak, self._decay_end_step)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Choice(NamedTuple):
    """How a device processes its share of a step."""

    micro_batch: int  # Sequences per forward.
    recomputes: bool  # Whether the backward recomputes decoder layers.
    # False if not even the smallest micro-batch with recomputed layers fits.
    fits: bool = True


@dataclass(frozen=True)
class Trial:
    """Trial steps of a module, to see how many sequences fit into memory; they change no weight."""

    module: DrafterModule
    # The longest sequence, [1, T, ...], on the CPU. All of it is treated as response, the most
    # expensive case.
    longest: TrainingInputs
    device: torch.device
    # Creates the autocast context of a forward in the precision of the run.
    autocast: Callable[[], AbstractContextManager[Any]]

    def choose(self, sizes: Sequence[int], free_bytes: int | None, held_copies: float) -> Choice:
        """Choose the first size that fits, without recomputed layers if possible.

        Args:
            sizes: sequences per forward, descending.
            free_bytes: free memory of a CPU; None if unknown, then everything is assumed to fit.
            held_copies: memory that a step needs in addition to weights, gradients and activations,
                in copies of the weights.
        """
        module = self.module
        on_cpu = self.device.type == "cpu"
        weights = sum(weight.nbytes for weight in module.drafter.parameters())
        if self.device.type == "cuda":
            module.drafter.to(self.device)
            module.frozen.to(self.device)
            reserved = int(
                weights * held_copies + _SPARE_SHARE * torch.cuda.mem_get_info(self.device)[0]
            )
        elif not on_cpu or free_bytes is None:
            return Choice(sizes[0], False)
        else:
            reserved = int(weights * (1 + held_copies)) + (module.config.data.prefetch_mb << 20)
        for recomputes in (False, True):
            module.recomputes = recomputes
            # A CUDA device raises an error when it runs out of memory. On a CPU the system would
            # kill the process, so the memory is computed.
            saved_bytes = self.kept_bytes() if on_cpu else 0
            for size in sizes:
                if on_cpu:
                    fits = reserved + size * saved_bytes * _PEAK_FACTOR <= (1 - _SPARE_SHARE) * (
                        free_bytes or 0
                    )
                else:
                    fits = self.step_runs(size, reserved)
                if fits:
                    return Choice(size, recomputes)
        return Choice(sizes[-1], True, fits=False)

    def step_runs(self, size: int, reserved_bytes: int) -> bool:
        """Run forward and backward of a micro-batch while a number of bytes is reserved.

        Returns:
            False if the device runs out of memory.
        """
        try:
            reserved: Tensor | None = torch.empty(
                reserved_bytes, dtype=torch.uint8, device=self.device
            )
            self._terms(size).total.backward()
            has_run = True
        except torch.OutOfMemoryError:
            has_run = False
        reserved = None  # noqa: F841  # Free the reserved memory.
        self.module.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return has_run

    def kept_bytes(self) -> int:
        """Return the bytes that the forward of one sequence saves for its backward."""
        weights = (*self.module.drafter.parameters(), *self.module.frozen.parameters())
        held = {weight.untyped_storage().data_ptr() for weight in weights}
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            terms = self._terms(1)
        del terms  # Kept alive until here, so that no freed storage's address is reused.
        return sum(storages.values())

    def _terms(self, size: int) -> LossTerms:
        def repeated(tensor: Tensor) -> Tensor:
            return tensor.to(self.device).repeat(size, *([1] * (tensor.ndim - 1)))

        inputs: TrainingInputs = map_tensors(self.longest, repeated)
        inputs = replace(inputs, response_mask=torch.ones_like(inputs.response_mask))
        draws = rows_of(
            draw(self.module.config.replaced(batch_size=size), 0, 2), torch.arange(size)
        )
        with self.autocast():
            return self.module.compute_terms(
                inputs, map_tensors(draws, lambda tensor: tensor.to(self.device)), 1.0
            )


@torch.no_grad()
def validate_batch(
    drafter: Drafter, frozen: FrozenTarget, batch: Batch, draft_length: int
) -> list[float]:
    """Draft every round of a batch on the dataset's text, and compare with the stored activations.

    The step bound is ``draft_length + 1``.

    Returns:
        Sums that :func:`validation_metrics` reduces: KL in nats, agreements, drafted positions,
        tokens that the rounds would commit (bonus included) greedily and by sampling at temperature
        1, rounds. Then, with the greedy tokens c and rounds r of each sequence: c * c, c * r, r *
        r, and the number of sequences.
    """
    inputs = batch.inputs
    draws = batch.draws
    drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound, draws.offset)
    outputs = drafter.drafted_features(frozen, inputs, draws)
    queries = outputs.queries
    valid = outputs.valid
    hidden = at_queries(inputs.hidden, queries)[valid].to(outputs.features.dtype)
    chunk = max(1, _LOGITS_BYTES // (4 * frozen.lm_head_weight.shape[0]))
    kl = []
    agree = []
    shared = []
    for part, goal in zip(outputs.features[valid].split(chunk), hidden.split(chunk), strict=True):
        draft = drafter.draft_logits(frozen, part).float()
        target = frozen.logits(goal).float()
        log_target = target.log_softmax(dim=-1)
        log_draft = draft.log_softmax(dim=-1)
        # 0 * inf, from a logit of -inf, counts as 0.
        kl.append(
            (log_target.exp() * (log_target - log_draft)).nan_to_num(0.0, 0.0, 0.0).sum(dim=-1)
        )
        agree.append(draft.argmax(dim=-1) == target.argmax(dim=-1))
        shared.append(torch.minimum(log_target, log_draft).exp().sum(dim=-1))
    accepted = drafted.new_zeros(2, *drafted.shape, dtype=torch.float64)
    kls = torch.cat(kl)
    rows = torch.arange(drafted.shape[0], device=drafted.device)[:, None].expand_as(queries)
    accepted[:, rows[valid], queries[valid]] = torch.stack(
        [torch.cat(agree).double(), torch.cat(shared).double()]
    )
    # A round commits 1 + the leading drafts at which drafter and target have the same argmax. When
    # sampling, each draft is accepted with the probability that both distributions share. The
    # drafts follow the dataset's text, not the target's own answers, so these values estimate
    # decoding.
    greedy = [
        accepted_runs(row[None], mask[None], draft_length)
        for row, mask in zip(accepted[0], drafted, strict=True)
    ]
    sampled = accepted_runs(accepted[1], drafted, draft_length) + 1
    # Number of rounds of each sequence.
    rounds = torch.tensor([len(runs) for runs in greedy], dtype=torch.float64)
    tokens = torch.stack([runs.sum() for runs in greedy]).cpu() + rounds
    sums: list[Any] = [
        kls.sum(),
        accepted[0].sum(),
        len(kls),
        tokens.sum(),
        sampled.sum(),
        rounds.sum(),
    ]
    sums += [tokens @ tokens, tokens @ rounds, rounds @ rounds, (rounds > 0).sum()]
    return [float(value) for value in sums]


def accepted_runs(accepted: Tensor, drafted: Tensor, draft_length: int) -> Tensor:
    """Compute the expected leading run of accepted drafts in every complete round: [n_rounds].

    Each value is in 0..draft_length. A round is a context position followed by ``draft_length``
    drafted ones.

    Args:
        accepted: [B, T], the probability that a draft is accepted if all earlier ones of its round
            are.
        drafted: bool [B, T], whether a position is drafted.
    """
    if drafted.shape[1] <= draft_length:
        return accepted.new_zeros(0)
    windows = drafted.unfold(1, draft_length + 1, 1)  # [B, T - g, g + 1]
    is_round = ~windows[..., 0] & windows[..., 1:].all(dim=-1)
    return accepted.unfold(1, draft_length + 1, 1)[..., 1:][is_round].cumprod(dim=-1).sum(dim=-1)


def validation_metrics(rows: Iterable[Sequence[float]]) -> dict[str, float]:
    """Reduce the sums of all batches to metrics; NaN if nothing was counted.

    Args:
        rows: the number of a batch, then its sums. A batch may occur several times and is counted
            once.
    """
    batches = {int(number): sums for number, *sums in rows}
    totals = [0.0] * 10
    # Add each batch once and in this order, so that the sums do not depend on the devices.
    for number in sorted(batches):
        totals = [total + value for total, value in zip(totals, batches[number], strict=True)]
    kl, agreements, positions, committed, sampled, rounds, *products, n_sequences = totals
    return {
        "kl": kl / positions if positions else float("nan"),
        "top1_agreement": agreements / positions if positions else float("nan"),
        "expected_acceptance_length": committed / rounds if rounds else float("nan"),
        "expected_acceptance_half_width": _half_width(committed, rounds, products, n_sequences),
        "expected_sampled_length": sampled / rounds if rounds else float("nan"),
    }


def _half_width(
    tokens: float, rounds: float, products: Sequence[float], n_sequences: float
) -> float:
    """Compute the half width of the 95 % interval of tokens / rounds.

    The sequences are assumed to be independent.

    Args:
        tokens, rounds: sums over the sequences.
        products: sums over the sequences of tokens * tokens, tokens * rounds and rounds * rounds.
        n_sequences: sequences with at least one round.
    """
    if n_sequences < 2:
        return float("nan")
    ratio = tokens / rounds
    # Sum over sequences of (tokens - ratio * rounds) ** 2.
    squares = products[0] - 2 * ratio * products[1] + ratio * ratio * products[2]
    return _NORMAL_95 * math.sqrt(max(0.0, squares) * n_sequences / (n_sequences - 1)) / rounds
