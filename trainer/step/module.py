"""The Lightning module: step, log, optimizer. The mathematics is in ``moa``."""

import contextlib
import dataclasses
from typing import Any

import lightning as L
import torch
from torch import Tensor

from ...errors import TrainingError
from ...moa.drafters.base import Drafter
from ...moa.drafters.training import LossWeights, TrainingInputs, TrainingStep
from ...moa.nn.layers import DecoderBlock
from ...moa.targets.bundle import FrozenTarget
from ..batches.batch import Batch
from ..config import TrainConfig
from .muon import Muon
from .recompute import recomputed_layers
from .schedule import zero_peak_constant
from .sharding import gather_weights, release_weights, shard_weights, whole
from .validation import ValidationSums, sum_in_order, validate_batch


def compile_layers(drafter: Drafter) -> None:
    """Compile the parts of decoder blocks in which only shapes depend on the data, each when it is first called.

    They are most of a step's passes over memory, above all layer self-attention. Masks and loss positions depend on the
    values too.
    """
    for block in drafter.modules():
        if isinstance(block, DecoderBlock):
            for name in ("finish", "attend_self_means"):
                vars(block)[name] = torch.compile(getattr(block, name), dynamic=True)


class DrafterModule(L.LightningModule):
    """Trains a drafter; the frozen target weights are kept out of its parameters and checkpoints.

    Args:
        decay_end_step: step at which the learning rate reaches its final value.

    Attributes:
        recomputes: whether the backward makes what lies inside layers again, see :mod:`.recompute`.
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
        """Share the weights with other devices where the strategy is to; Lightning calls this once they have met."""
        if self.device_mesh is not None:
            shard_weights(self.drafter, self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        """Move the target weights to the device; compile here, as compiled layers would change the memory of trials."""
        self.frozen.to(self.device)
        if self.config.machine.compile:
            compile_layers(self.drafter)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the loss of one micro-batch."""
        step = TrainingStep(self._cast(batch.inputs), batch.draws, self._weights, batch.denominator)
        with recomputed_layers(self.drafter) if self.recomputes else contextlib.nullcontext():
            terms = self.drafter.objective(self.frozen, step)
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
        """Clip the global norm, and refuse to go on from a gradient that is not finite.

        Lightning's own clipping refuses fused optimizers in bf16-mixed too, where nothing is scaled.
        """
        parameters = [weight for weight in self.drafter.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in parameters if weight.grad is not None])
        total = whole(norm)
        # 16-mixed has overflows, and skips those steps. One question a step: each waits for the device.
        if self.trainer.precision_plugin.precision != "16-mixed" and not total.isfinite():
            self._refuse_gradients_not_finite()
        if gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def _refuse_gradients_not_finite(self) -> None:
        """Raise with the name of a gradient that is not finite; none is where the norm of finite ones overflows."""
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
        """Forget the sums of the last validation."""
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
            tables = {id(module.weight) for module in self.drafter.modules() if isinstance(module, torch.nn.Embedding)}
            matrices = [weight for weight in weights if weight.ndim == 2 and id(weight) not in tables]
            return Muon(
                matrices,
                [weight for weight in weights if weight.ndim != 2 or id(weight) in tables],
                lr=config.matrix_learning_rate,
                others_lr=config.learning_rate,
                weight_decay=config.weight_decay,
                # Whole matrices gain 3 % of acceptance length after 340 steps at 2.4 times the optimizer's cost.
                block_rows=128,
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
