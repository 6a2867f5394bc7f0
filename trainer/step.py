"""The steps of training and validation: Lightning module, optimizer, schedule and trial steps.

Trial steps find out how many sequences fit into memory, and whether layers must be recomputed. The
losses and masks are defined by the drafters in ``moa``. The module ``fit`` handles files and
devices.

In a validation, the drafter drafts rounds as in decoding. The token at the first position of a round
counts as verified, so the drafter may read the target's activations of this position. The drafter
drafts the tokens at the next g positions.

Shapes: B sequences, T tokens, P drafted positions, g drafts per round.
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
from lightning.fabric.utilities.apply_func import apply_to_collection
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
from ..text import first_line
from .batches import Batch
from .config import TrainConfig, known
from .data import draw
from .muon import Muon

# Muon orthogonalizes a matrix in blocks of this number of rows. If it orthogonalized entire
# matrices, the acceptance length after 340 steps would be 3 % longer, but the optimizer would take
# 2.4 times as long.
_MUON_BLOCK_ROWS = 128
# Methods of a decoder layer that the backward runs again if layers are recomputed.
_RECOMPUTED_PARTS = ("queries", "keys_values", "finish", "attend_self_means")
# Layer self-attention is the attention of Mixture of Attentions drafters over the target's layers
# at one position. It takes much memory, because each position is a sequence with one item per
# layer. So only this number of positions is recomputed at once.
_RECOMPUTED_POSITIONS = 16
_LOGITS_BYTES = 1 << 26
PLUS_MINUS = "±"
"""In progress lines, this label precedes the half width of a metric's 95 % confidence interval."""
# Half width of the 95 % interval of a normal distribution, in standard deviations.
_NORMAL_95 = 1.96
WHAT_HELPS = (
    "a lower `micro_batch_size`, `precision=bf16-mixed`, smaller sizes of the drafter (for eagle3 "
    "above all `draft_vocabulary`), or a store of shorter sequences (`moa-data extract "
    "--max-length N`)."
)
# Fraction of the free memory that trial steps leave unused. A run needs more memory than a trial
# step: its batches have different lengths, which fragments the free memory.
_SPARE_SHARE = 0.1
# Ratio of two sizes: the peak memory of a step on a CPU, and the memory of the activations that the
# forward saves for the backward. The ratio is above 1, because the peak also includes gradients
# within a layer, and the logits of the positions that are processed at once.
_PEAK_FACTOR = 1.5


def zero_peak_constant(
    step: int, warmup_steps: int, peak_multiplier: float, decay_end_step: int
) -> float:
    """Return the learning rate at a step (from 0), divided by the final learning rate.

    The result rises from 0 to ``peak_multiplier`` during the warm-up, falls linearly to 1 at
    ``decay_end_step``, and then stays 1. This follows lines 102-123 of ``trainer.py`` by the
    authors of the Mixture of Attentions paper (arXiv 2410.03804).
    """
    if step < warmup_steps:
        return peak_multiplier * step / warmup_steps
    # If the decay would end before the warm-up, the result is 1 from the end of the warm-up on.
    if step >= decay_end_step or decay_end_step <= warmup_steps:
        return 1.0
    done = (step - warmup_steps) / (decay_end_step - warmup_steps)
    return peak_multiplier + (1.0 - peak_multiplier) * done


@contextlib.contextmanager
def recomputed_layers(drafter: Drafter) -> Iterator[None]:
    """Return a context manager that saves memory by activation checkpointing.

    While the context manager is active, the forward keeps fewer activations of the drafter's
    decoder layers, and the backward computes them again. The results differ only by rounding,
    because sums over positions are computed in another order.
    """
    # The backward runs the methods in ``_RECOMPUTED_PARTS`` again. Only their inputs and outputs,
    # and the activations of the attention itself, are stored until then. For EAGLE-3 and Mixture of
    # Attentions, this saves more than half of the memory for activations.
    blocks = [block for block in drafter.modules() if isinstance(block, DecoderBlock)]
    # The ``__dict__`` of a layer may hold compiled methods, which are replaced below. Remember
    # them, to restore them when the context ends.
    before: list[dict[str, Any]] = []
    for block in blocks:
        before.append(
            {name: vars(block)[name] for name in _RECOMPUTED_PARTS if name in vars(block)}
        )
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
    """Trains a drafter. The frozen target weights are not among its parameters or checkpoints."""

    def __init__(
        self, drafter: Drafter, frozen: FrozenTarget, config: TrainConfig, decay_end_step: int
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.config = config
        self.recomputes = False  # Whether the backward recomputes decoder layers.
        # Step at which the learning rate reaches its final value.
        self._decay_end_step = decay_end_step
        # Keep the target weights in a list, so that torch does not register them as a submodule.
        self._frozen = [frozen]
        self._weights = LossWeights.of(config.drafter)
        self._step_sums: dict[str, Tensor] = {}
        # Whether all activations of the current step or validation so far are finite. After the
        # first batch, the value is a bool tensor on the device, because updating this tensor does
        # not synchronize with the device.
        self._are_finite: Any = True
        self._validation: dict[int, list[float]] = {}

    @property
    def frozen(self) -> FrozenTarget:
        """The frozen target weights. When training has started, they are on the training device."""
        return self._frozen[0]

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Load weights. Raise ValueError if their names or shapes do not match."""
        try:
            return super().load_state_dict(*args, **options)
        except RuntimeError as error:
            # torch raises RuntimeError for weights that do not match, but also for errors of the
            # device. Raise ValueError, so that callers can distinguish the two.
            raise ValueError(first_line(error)) from error

    def on_fit_start(self) -> None:
        """Move the target weights to the device, and compile parts of the drafter if requested."""
        self.frozen.to(self.device)
        if self.config.machine.compile:
            # Compile only these two methods of each layer. They cause most of a step's memory
            # traffic, and the compiled code works for batches of all shapes. Code with masks and
            # loss positions is not compiled, because it depends on the values in a batch.
            for block in self.drafter.modules():
                if isinstance(block, DecoderBlock):
                    for name in ("finish", "attend_self_means"):
                        vars(block)[name] = torch.compile(getattr(block, name), dynamic=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the loss of one micro-batch.

        The loss terms of a step are logged at the step's last micro-batch.
        """
        terms = self.compute_terms(batch.inputs, batch.draws, batch.denominator)
        values = {f"train/{name}": term.detach() for name, term in terms.items()}
        # The loss of a micro-batch is a sum over its positions, divided by ``batch.denominator``:
        # the average number of loss positions in a micro-batch of this step. So the mean of these
        # losses over all micro-batches is the mean loss per position of the step.
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
        return terms["loss"]

    def compute_terms(self, inputs: TrainingInputs, draws: Draws, denominator: float) -> LossTerms:
        """Compute the terms of the loss: sums over positions, divided by ``denominator``."""
        step = TrainingStep(self._cast(inputs), draws, self._weights, denominator)
        with recomputed_layers(self.drafter) if self.recomputes else contextlib.nullcontext():
            return self.drafter.objective(self.frozen, step)

    def _cast(self, inputs: TrainingInputs) -> TrainingInputs:
        """Cast the hidden states in ``inputs`` to the drafter's dtype, in place.

        Also record whether all activations are finite.
        """
        for values in (inputs.kv, inputs.hidden, inputs.entering_hidden, *inputs.layer_outputs):
            if values is not None:
                # If any value is NaN or infinite, so is the minimum or the maximum of the values.
                # Computing the minimum and the maximum does not synchronize with the device.
                self._are_finite = self._are_finite & torch.stack(values.aminmax()).isfinite().all()
        # The KV is not cast here, because the drafter casts the KV of each layer when it reads it.
        inputs.hidden = inputs.hidden.to(self.drafter.dtype)
        inputs.layer_outputs = tuple(
            states.to(self.drafter.dtype) for states in inputs.layer_outputs
        )
        return inputs

    def _check_inputs(self, are_finite: bool) -> None:
        """Raise an error if activations of this step contain NaN or infinity.

        Also reset ``_are_finite`` for the next step.
        """
        self._are_finite = True
        if not are_finite:
            raise TrainingError(
                f"the activations that were read for step {self.global_step} contain NaN or "
                f"infinity. Find the damaged parts with `moa-data verify {self.config.store}`, and "
                "extract them again with `moa-data repair STORE --model MODEL`."
            )

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global norm of the gradients.

        Activations or gradients with NaN or infinity raise an error instead.
        """
        # Lightning's own clipping is not used, because it refuses fused optimizers with any mixed
        # precision. Fused optimizers are safe with bf16-mixed, because this precision does not
        # scale gradients.
        weights = list(self.drafter.parameters())
        norm = torch.nn.utils.get_total_norm(
            [weight.grad for weight in weights if weight.grad is not None]
        )
        # Check activations and gradients together, once per step, because each check synchronizes
        # with the device.
        are_inputs_finite, is_norm_finite = torch.stack(
            [self._are_finite, norm.isfinite()]
        ).tolist()
        self._check_inputs(are_inputs_finite)
        # With 16-mixed, gradients may overflow. This is not an error, because the loss scaler skips
        # steps with such gradients.
        if self.trainer.precision_plugin.precision != "16-mixed" and not is_norm_finite:
            self._refuse_gradients_not_finite()
        if gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(weights, gradient_clip_val, norm)

    def _refuse_gradients_not_finite(self) -> None:
        bad: list[str] = []
        for name, weight in self.drafter.named_parameters():
            if weight.grad is not None and not weight.grad.isfinite().all():
                bad.append(name)
        # Raise nothing if all gradients are finite and only their norm overflows. Clipping then
        # sets the gradients to 0.
        if bad:
            raise TrainingError(
                f"the gradients of {len(bad)} weights are not finite at step {self.global_step}, "
                f"for example the gradient of {bad[0]}. Lower `learning_rate`, use "
                "`precision=32-true`, or look for NaN in the store with `moa-data verify`."
            )

    def on_validation_epoch_start(self) -> None:
        """Discard the sums of the previous validation."""
        self._validation = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Compute and keep the sums of one validation batch (see :func:`validate_batch`)."""
        self._cast(batch.inputs)
        draft_length = self.config.validation.draft_length
        self._validation[batch.index] = validate_batch(
            self.drafter, self.frozen, batch, draft_length
        )

    def on_validation_epoch_end(self) -> None:
        """Compute and log the metrics over all batches. They are the same on every device."""
        self._check_inputs(bool(self._are_finite))
        # The sums are Python floats, so gather them as float64, which does not round them. All
        # devices then add the same numbers in the same order. So the metrics are equal, bit for
        # bit, to those that a single device would compute.
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
        """Build the run's optimizer without a schedule: Muon, or AdamW with betas 0.9 and 0.95."""
        config = self.config.optimizer
        if config.kind == "muon":
            # Do not let Muon update embedding tables. Their rows are looked up one by one and never
            # multiplied as a matrix, so orthogonalizing the update of a table has no meaning.
            modules = self.drafter.modules()
            tables = {
                id(table.weight) for table in modules if isinstance(table, torch.nn.Embedding)
            }
            matrices: list[Tensor] = []
            for weight in self.drafter.parameters():
                if weight.ndim == 2 and id(weight) not in tables:
                    matrices.append(weight)
            return Muon(
                matrices,
                self.drafter.parameters(),
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
            # With 16-mixed, do not use a fused step. A fused step would unscale the gradients
            # itself, so they would be clipped while they are still scaled.
            fused=precision != "16-mixed",
        )

    def configure_optimizers(self) -> Any:
        """Build the optimizer and its learning rate schedule (see :func:`zero_peak_constant`)."""
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
    """The result of a trial: how a device processes its sequences of a step."""

    micro_batch: int  # Number of sequences per forward.
    recomputes: bool  # Whether the backward recomputes decoder layers.
    # Whether the step fits into memory. It is False if even the smallest micro-batch with
    # recomputed layers does not fit.
    fits: bool = True


@dataclass(frozen=True)
class Trial:
    """Runs trial steps to find out how many sequences fit into memory. No weight is changed."""

    module: DrafterModule
    # The inputs of the longest training sequence, in CPU memory, with a batch axis of length 1. In
    # trial steps, all its tokens count as response, which is the most expensive case.
    longest: TrainingInputs
    device: torch.device
    # Returns the context manager in which a forward has the precision of the run.
    autocast: Callable[[], AbstractContextManager[Any]]

    def choose(self, sizes: Sequence[int], free_bytes: int | None, held_copies: float) -> Choice:
        """Choose the largest micro-batch size that fits, without recomputing layers if possible.

        Args:
            sizes: numbers of sequences per forward to try, descending.
            free_bytes: free host memory, if training runs on a CPU. If it is unknown, the argument
                is None, and the largest size is chosen.
            held_copies: memory that a step needs in addition to weights, gradients and activations,
                for example for optimizer moments. The unit is the size of the weights.
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
            # On a CUDA device, run a step and see whether it raises an out-of-memory error. On a
            # CPU, compute the memory of a step instead, because the operating system would kill a
            # process that runs out of memory.
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
        """Check whether forward and backward of a micro-batch fit next to reserved memory.

        Args:
            size: number of sequences in the micro-batch.
            reserved_bytes: device memory to reserve. A run needs this memory for optimizer moments,
                and because its batches have different lengths.

        Returns:
            True if they fit, or False if the device runs out of memory.
        """
        try:
            reserved: Tensor | None = torch.empty(
                reserved_bytes, dtype=torch.uint8, device=self.device
            )
            self._terms(size)["loss"].backward()
            has_run = True
        except torch.OutOfMemoryError:
            has_run = False
        reserved = None  # noqa: F841  # Free the reserved memory.
        self.module.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return has_run

    def kept_bytes(self) -> int:
        """Return the size of the activations that a forward of one sequence saves for backward."""
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
        # Keep the result of the forward alive until here, because storages are counted by address.
        # A later storage could otherwise get the address of a freed storage, and only one of the
        # two would be counted.
        del terms
        return sum(storages.values())

    def _terms(self, size: int) -> LossTerms:
        def repeated(tensor: Tensor) -> Tensor:
            return tensor.to(self.device).repeat(size, *([1] * (tensor.ndim - 1)))

        inputs: TrainingInputs = apply_to_collection(self.longest, Tensor, repeated)
        inputs = replace(inputs, response_mask=torch.ones_like(inputs.response_mask))
        draws = draw(self.module.config.replaced(batch_size=size), 0, 2)
        draws = apply_to_collection(draws, Tensor, Tensor.to, self.device)
        with self.autocast():
            return self.module.compute_terms(inputs, draws, 1.0)


@torch.no_grad()
def validate_batch(
    drafter: Drafter, frozen: FrozenTarget, batch: Batch, draft_length: int
) -> list[float]:
    """Draft all rounds of a batch, and compare the distributions of drafter and target.

    Each draft is predicted after the tokens of the dataset, even if earlier drafts of its round
    differ from these tokens. The target's distributions are computed from its stored hidden states.
    A round starts every ``draft_length + 1`` positions.

    Returns:
        Ten sums over the batch, which :func:`validation_metrics` reduces to metrics:

        0. KL divergence in nats
        1. number of positions at which drafter and target have the same argmax
        2. number of drafted positions
        3. number of tokens that greedy decoding would commit
        4. expected number of tokens that sampling at temperature 1 would commit
        5. number of rounds
        6. sum of ``c * c`` over sequences. ``c`` is the number of tokens that greedy decoding would
           commit in a sequence
        7. sum of ``c * r`` over sequences. ``r`` is the number of rounds of a sequence
        8. sum of ``r * r`` over sequences
        9. number of sequences with at least one round

        The committed tokens of a round include the target's bonus token.
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
        # A target logit of -inf gives probability 0. In the KL divergence, its term 0 * inf is NaN,
        # but must count as 0.
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
    # In greedy decoding, a round commits the drafts before the first position at which drafter and
    # target have a different argmax, plus one token of the target. In sampling, the probability
    # that a draft is accepted is the overlap of both distributions. The results are only estimates,
    # because the tokens before each draft come from the dataset and not from decoding.
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
    """Compute the expected number of leading accepted drafts in each complete round.

    A complete round is one position that is not drafted, followed by ``draft_length`` positions
    that are all drafted.

    Args:
        accepted: probability [B, T] that the draft at a position is accepted, given that all
            earlier drafts of its round are accepted.
        drafted: whether the token at a position is drafted, bool [B, T].
        draft_length: number of drafts per round.

    Returns:
        One value in ``0..draft_length`` per complete round, [n_rounds].
    """
    if drafted.shape[1] <= draft_length:
        return accepted.new_zeros(0)
    # Make one window for each position at which a round could start. The shape is [B, T -
    # draft_length, draft_length + 1].
    windows = drafted.unfold(1, draft_length + 1, 1)
    is_round = ~windows[..., 0] & windows[..., 1:].all(dim=-1)
    return accepted.unfold(1, draft_length + 1, 1)[..., 1:][is_round].cumprod(dim=-1).sum(dim=-1)


def validation_metrics(rows: Iterable[Sequence[float]]) -> dict[str, float]:
    """Reduce the sums of all batches to metrics. Metrics without any data are NaN.

    Args:
        rows: for each batch, its index and its sums from :func:`validate_batch`. If several devices
            have processed the same batch, its index occurs several times, and the batch is counted
            once.
    """
    batches = {int(number): sums for number, *sums in rows}
    totals = [0.0] * 10
    # Add the batches in the order of their indices, so that rounding does not depend on the number
    # of devices.
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
    """Compute the half width of the 95 % interval of the ratio ``tokens / rounds``.

    The sequences are assumed to be independent of each other.

    Args:
        tokens, rounds: number of committed tokens, and of rounds, in all sequences.
        products: the sums of ``t * t``, ``t * r`` and ``r * r`` over sequences. ``t`` is the number
            of committed tokens of a sequence, and ``r`` is its number of rounds.
        n_sequences: number of sequences with at least one round.
    """
    if n_sequences < 2:
        return float("nan")
    ratio = tokens / rounds
    # The sum of ``(t - ratio * r) ** 2`` over sequences. A sequence has ``t`` committed tokens and
    # ``r`` rounds.
    squares = products[0] - 2 * ratio * products[1] + ratio * ratio * products[2]
    return _NORMAL_95 * math.sqrt(max(0.0, squares) * n_sequences / (n_sequences - 1)) / rounds
