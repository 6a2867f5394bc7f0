"""One training step: the Lightning module, its optimizer and schedule, and activation checkpointing of layers.

Losses and masks are the drafters' own (``moa``); files, signals and devices are left to ``fit``.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import TrainingError
from ..moa.drafters.base import Drafter
from ..moa.drafters.training import Draws, LossTerms, LossWeights, TrainingInputs, TrainingStep
from ..moa.nn.layers import DecoderBlock
from ..moa.targets.bundle import FrozenTarget
from .batches import Batch
from .config import TrainConfig
from .muon import Muon
from .sharding import gather_weights, release_weights, shard_weights, whole
from .validation import ValidationSums, sum_in_order, validate_batch

_MUON_BLOCK_ROWS = 128
"""Whole matrices gain 3 % of acceptance length after 340 steps at 2.4 times the optimizer's cost."""
_RECOMPUTED_PARTS = ("queries", "keys_values", "finish", "attend_self_means")
_RECOMPUTED_POSITIONS = 16
"""Positions of layer self-attention that are recomputed at once; each has all layers, hundreds of rows together."""


def zero_peak_constant(step: int, warmup_steps: int, peak_multiplier: float, decay_end_step: int) -> float:
    """Return the factor of the final learning rate at a step, 0-based.

    It rises from 0 to the peak in the warm-up, falls linearly to 1 at ``decay_end_step``, and stays there, as in the
    official ``trainer.py``, lines 102-123.

    Args:
        peak_multiplier: factor at the end of the warm-up.
    """
    if step < warmup_steps:
        return peak_multiplier * step / warmup_steps
    # A decay that would end within the warm-up is left out.
    if step >= decay_end_step or decay_end_step <= warmup_steps:
        return 1.0
    done = (step - warmup_steps) / (decay_end_step - warmup_steps)
    return peak_multiplier + (1.0 - peak_multiplier) * done


@contextlib.contextmanager
def recomputed_layers(drafter: Drafter) -> Iterator[None]:
    """Activation checkpointing of decoder layers, for a forward within this context.

    Kept are the inputs and outputs of each part of a layer, and attention itself: less than half of the activations of
    EAGLE-3 and Mixture of Attentions. It costs a second forward of those parts, and changes a result by no more than
    the order of sums over positions.
    """
    blocks = [block for block in drafter.modules() if isinstance(block, DecoderBlock)]
    # Compiled parts stand in the instance's own dictionary, and are put back.
    before = [{name: vars(block)[name] for name in _RECOMPUTED_PARTS if name in vars(block)} for block in blocks]
    for block in blocks:
        for name in _RECOMPUTED_PARTS:
            part = partial(checkpoint, getattr(block, name), use_reentrant=False, preserve_rng_state=False)
            vars(block)[name] = partial(_by_positions, part) if name == "attend_self_means" else part
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
    """Trains a drafter; the frozen target weights are kept out of its parameters and checkpoints.

    Args:
        decay_end_step: step at which the learning rate reaches its final value.

    Attributes:
        recomputes: whether decoder layers are recomputed in the backward.
    """

    def __init__(self, drafter: Drafter, frozen: FrozenTarget, config: TrainConfig, decay_end_step: int) -> None:
        super().__init__()
        self.drafter = drafter
        self.config = config
        self.recomputes = False
        self._decay_end_step = decay_end_step
        self._frozen = [frozen]  # in a list, so that it is not a submodule
        self._weights = LossWeights.of(config.drafter)
        self._step_sums: dict[str, Tensor] = {}
        self._validation: dict[int, ValidationSums] = {}

    @property
    def frozen(self) -> FrozenTarget:
        """The frozen target weights; they are on this module's device once a fit has started."""
        return self._frozen[0]

    def configure_model(self) -> None:
        """Shard the weights where the strategy asks for it; Lightning calls this once all devices are connected."""
        if self.device_mesh is not None:
            shard_weights(self.drafter, self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        """Move the target weights to the device, and compile.

        Compiled are the parts of decoder blocks in which only shapes depend on the data: most of a step's passes over
        memory. Masks and loss positions depend on the values too.
        """
        self.frozen.to(self.device)
        if self.config.machine.compile:
            for block in self.drafter.modules():
                if isinstance(block, DecoderBlock):
                    for name in ("finish", "attend_self_means"):
                        vars(block)[name] = torch.compile(getattr(block, name), dynamic=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the loss of one micro-batch."""
        terms = self.compute_terms(batch.inputs, batch.draws, batch.denominator)
        values = {
            "train/loss": terms.total.detach(),
            "train/forward_kl": terms.forward_kl.detach(),
        }
        if terms.feature is not None:
            values["train/feature_loss"] = terms.feature.detach()
        if terms.entering_feature is not None:
            values["train/entering_feature_loss"] = terms.entering_feature.detach()
        values |= {f"train/{name}_loss": value.detach() for name, value in terms.parts.items()}
        self._log_step(batch, values)
        return terms.total

    def compute_terms(self, inputs: TrainingInputs, draws: Draws, denominator: float) -> LossTerms:
        """Compute the terms of the loss; sums over positions are divided by ``denominator``."""
        step = TrainingStep(self._cast(inputs), draws, self._weights, denominator)
        with recomputed_layers(self.drafter) if self.recomputes else contextlib.nullcontext():
            return self.drafter.objective(self.frozen, step)

    def _log_step(self, batch: Batch, values: dict[str, Tensor]) -> None:
        """Log the terms of a whole step with its last micro-batch: means over micro-batches and devices.

        Each micro-batch divides by its share of the step's loss positions, so the mean over all is the step's loss.
        """
        if batch.index:
            values = {name: self._step_sums[name] + value for name, value in values.items()}
        self._step_sums = values
        if batch.index + 1 == batch.n_parts:
            means = {name: value / batch.n_parts for name, value in values.items()}
            self.log_dict(means, batch_size=1, sync_dist=True)
            self.log("loss", means["train/loss"], prog_bar=True, logger=False, batch_size=1, sync_dist=True)

    def _cast(self, inputs: TrainingInputs) -> TrainingInputs:
        """Cast hidden states to the drafter's dtype, in place; KV is cast where it is read, in parts."""
        inputs.hidden = inputs.hidden.to(self.drafter.dtype)
        inputs.layer_outputs = tuple(states.to(self.drafter.dtype) for states in inputs.layer_outputs)
        return inputs

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the global norm, and refuse a gradient that is not finite.

        Lightning's own clipping refuses fused optimizers in bf16-mixed too, where nothing is scaled.
        """
        parameters = [weight for weight in self.drafter.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in parameters if weight.grad is not None])
        total = whole(norm)
        # 16-mixed has overflows, and skips those steps. Asked once a step, because each answer waits for the device.
        if self.trainer.precision_plugin.precision != "16-mixed" and not total.isfinite():
            self._refuse_gradients_not_finite()
        if gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def _refuse_gradients_not_finite(self) -> None:
        # There is none where only the norm of finite gradients overflows: clipping then makes them 0.
        bad = [
            name
            for name, p in self.drafter.named_parameters()
            if p.grad is not None and not whole(p.grad).isfinite().all()
        ]
        if bad:
            raise TrainingError(
                f"the gradient of {bad[0]} is not finite at step {self.global_step} ({len(bad)} tensors in all); "
                "lower --learning-rate or use --precision 32-true."
            )

    def on_validation_epoch_start(self) -> None:
        """Reset the sums."""
        self._validation = {}
        gather_weights(self.drafter)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the sums of one validation batch."""
        self._cast(batch.inputs)
        draft_length = self.config.validation.draft_length
        self._validation[batch.index] = validate_batch(self.drafter, self.frozen, batch, draft_length)

    def on_validation_epoch_end(self) -> None:
        """Log the ratios of the sums over the batches of all devices, which are the same on each device."""
        release_weights(self.drafter)
        # float64, which holds counts exactly: the sums are those of one device, to the last bit.
        rows = [[index, *dataclasses.astuple(sums)] for index, sums in self._validation.items()]
        if self.trainer.world_size > 1:
            found: Any = self.all_gather(torch.tensor(rows, dtype=torch.float64, device=self.device))
            rows = found.flatten(0, -2).tolist()
        metrics = sum_in_order(rows).metrics()
        self.log_dict({f"val/{name}": value for name, value in metrics.items()}, batch_size=1)
        expected = metrics["expected_acceptance_length"]
        self.log("expected acceptance length", expected, prog_bar=True, logger=False, batch_size=1)

    def build_optimizer(self, precision: str) -> torch.optim.Optimizer:
        """Build the run's optimizer, without a schedule; AdamW has betas 0.9 and 0.95, eps 1e-8."""
        config = self.config.optimizer
        if config.kind == "muon":
            weights = list(self.drafter.parameters())
            # Rows of an embedding are looked up one by one: an orthogonal update of the table means nothing.
            tables = {id(module.weight) for module in self.drafter.modules() if isinstance(module, torch.nn.Embedding)}
            matrices = [weight for weight in weights if weight.ndim == 2 and id(weight) not in tables]
            return Muon(
                matrices,
                [weight for weight in weights if weight.ndim != 2 or id(weight) in tables],
                lr=config.matrix_learning_rate,
                others_lr=config.learning_rate,
                weight_decay=config.weight_decay,
                block_rows=_MUON_BLOCK_ROWS,
            )
        return torch.optim.AdamW(
            self.drafter.parameters(),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=config.weight_decay,
            # A fused step undoes the loss scaling of 16-mixed by itself, too late for clipping.
            fused=precision != "16-mixed",
        )

    def configure_optimizers(self) -> Any:
        """Build the optimizer with the zero-peak-constant schedule."""
        schedule = self.config.schedule
        optimizer = self.build_optimizer(self.trainer.precision_plugin.precision)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: zero_peak_constant(
                step, schedule.warmup_steps, schedule.peak_multiplier, self._decay_end_step
            ),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
