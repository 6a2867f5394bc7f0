"""What happens around the steps: throughput, exports of the best drafter, interruption."""

import time
from pathlib import Path
from typing import Any

import lightning as L

from ..moa.checkpoint import save_drafter
from .batch import Batch
from .module import DrafterModule


class Throughput(L.Callback):
    """Logs tokens/s and the share of time that training waits for data, over each logging interval.

    Attributes:
        n_tokens: real tokens trained on in this invocation.
        n_tokens_total: the same of all invocations of the run.
        n_bytes_read: bytes of the store that were read for the latter.
        step_s: seconds in steps and waiting, validation left out.
        wait_s: seconds waiting for the next batch.
    """

    def __init__(self) -> None:
        self.n_tokens, self.step_s, self.wait_s = 0, 0.0, 0.0
        self.n_tokens_total, self.n_bytes_read = 0, 0
        self._interval = (0, 0.0, 0.0)
        self._mark = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._mark = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The time since the last batch ended was spent waiting for this one."""
        now = time.perf_counter()
        self.wait_s += now - self._mark
        self.step_s += now - self._mark
        self._mark = now

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Count the batch; log at the logging interval."""
        now = time.perf_counter()
        self.step_s += now - self._mark
        self._mark = now
        self.n_tokens += batch.n_tokens * trainer.world_size
        self.n_tokens_total += batch.n_tokens * trainer.world_size
        self.n_bytes_read += batch.n_bytes_read * trainer.world_size
        if trainer.global_step and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            tokens, step_s, wait_s = self._interval
            spent = max(1e-9, self.step_s - step_s)
            speed = (self.n_tokens - tokens) / spent
            pl_module.log("tok/s", speed, prog_bar=True, logger=False, batch_size=1)
            pl_module.log("train/tokens_per_s", speed, batch_size=1)
            pl_module.log("train/data_wait_share", (self.wait_s - wait_s) / spent, batch_size=1)
            self._interval = (self.n_tokens, self.step_s, self.wait_s)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validation is neither training nor waiting."""
        self._mark = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """The totals, for resuming."""
        return {"n_tokens_total": self.n_tokens_total, "n_bytes_read": self.n_bytes_read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.n_tokens_total, self.n_bytes_read = state_dict["n_tokens_total"], state_dict["n_bytes_read"]

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second of this invocation, validation left out."""
        return self.n_tokens / self.step_s if self.step_s else float("nan")

    @property
    def data_wait_share(self) -> float:
        """Share of step time spent waiting for data."""
        return self.wait_s / self.step_s if self.step_s else float("nan")


class ExportBest(L.Callback):
    """Writes ``drafter/`` whenever the expected acceptance length reaches a new best.

    Args:
        folder: where the drafter goes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best = float("-inf")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Export when better."""
        assert isinstance(pl_module, DrafterModule)
        value = trainer.callback_metrics.get("val/expected_acceptance_length")
        if trainer.sanity_checking or value is None or not float(value) > self.best:
            return
        self.best = float(value)
        if trainer.is_global_zero:
            save_drafter(pl_module.drafter, self.folder)

    def state_dict(self) -> dict[str, Any]:
        """The best value, for resuming."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value."""
        self.best = state_dict["best"]


class InterruptGuard(L.Callback):
    """Notes that training is stopped by Ctrl-C, and lets the state that is then saved begin at a whole step.

    Attributes:
        interrupted: whether it was.
    """

    def __init__(self) -> None:
        self.interrupted = False

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remember Ctrl-C; the caller saves."""
        if isinstance(exception, KeyboardInterrupt):
            self.interrupted = True

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Un-count the micro-batches of the unfinished step.

        The stream starts again at the step's first micro-batch, while Lightning would go on counting in its middle and
        from then on step across two batches.
        """
        if self.interrupted:
            n_batches = trainer.global_step * trainer.accumulate_grad_batches
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            for part in ("total", "current"):
                progress[part] = dict.fromkeys(progress[part], n_batches)


class LastValidation(L.Callback):
    """Has the last step of a run validated, whatever the interval, and notes which step was validated last.

    Args:
        max_steps: of the run; an invocation that is to end earlier does not validate where it ends.

    Attributes:
        validated_step: None before the first validation.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.validated_step: int | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Lightning validates once more when it is told to stop."""
        if trainer.global_step >= self.max_steps:
            trainer.should_stop = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the step."""
        self.validated_step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        """The step, for resuming."""
        return {"validated_step": self.validated_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step."""
        self.validated_step = state_dict["validated_step"]
