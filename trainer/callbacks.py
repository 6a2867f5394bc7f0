"""Callbacks for throughput, micro-batches, validation, checkpoints, progress and signals."""

import contextlib
import json
import signal
import threading
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from typing_extensions import override

from ..errors import Interrupted, RunWarning
from ..machine import free_memory
from ..text import Progress
from .batches import Batch
from .checkpoints import write_beside, write_drafter
from .config import BEST, DRAFTER, LAST, known
from .data import StoreDataModule, TrainingStream, device_share
from .step import PLUS_MINUS, WHAT_HELPS, DrafterModule, Trial

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A shell or a launcher may send the SIGINT of one Ctrl-C twice. So a SIGINT is ignored if it
# arrives within this number of seconds after the first stop signal.
REPEAT_S = 1.0


class Throughput(L.Callback):
    """Logs tokens/s and the fraction of time spent waiting for data, once per logging interval.

    A run may consist of several invocations of the command, because it can be resumed.
    """

    def __init__(self) -> None:
        # Number of tokens trained on in this invocation, without padding.
        self.n_tokens = 0
        # Seconds spent in steps, including the wait for data, but without validation and checkpoint
        # writes.
        self.step_s = 0.0
        # Seconds spent waiting for the next micro-batch.
        self.wait_s = 0.0
        # Number of tokens trained on in all invocations of the run.
        self.n_tokens_total = 0
        # Number of bytes read from the store in all invocations. It is estimated from the bytes
        # that this device has read, as if all devices had read the same amount.
        self.n_bytes_read = 0
        # Two numbers: ``n_tokens_total`` and ``n_bytes_read`` as they were at the end of the last
        # complete step.
        self._at_step = (0, 0)
        # The values of ``n_tokens``, ``step_s`` and ``wait_s`` at the start of the logging
        # interval.
        self._interval = (0, 0.0, 0.0)
        self._wait_before_s = 0.0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Remember how long the trainer has waited for data during setup. This time does not count
        # as waiting in training, so it is subtracted later.
        self._wait_before_s = _stream_of(trainer).wait_s

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        stream = _stream_of(trainer)
        # Count the time since the trainer requested this micro-batch (``asked_s``). The time of a
        # validation or of a checkpoint is not counted, because the trainer requests the next
        # micro-batch only afterwards.
        self.step_s += time.perf_counter() - stream.asked_s
        self.wait_s = stream.wait_s - self._wait_before_s
        self.n_tokens += batch.n_tokens_of_all
        self.n_tokens_total += batch.n_tokens_of_all
        self.n_bytes_read += batch.n_bytes_read * trainer.world_size
        if not _ends_step(trainer, batch_idx):
            return
        self._at_step = (self.n_tokens_total, self.n_bytes_read)
        # mypy does not know the trainer's attribute ``log_every_n_steps``, because one of
        # Lightning's connectors sets it.
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            tokens, step_s, wait_s = self._interval
            spent = max(1e-9, self.step_s - step_s)
            speed = (self.n_tokens - tokens) / spent
            pl_module.log("tok/s", speed, prog_bar=True, logger=False, batch_size=1)
            pl_module.log("train/tokens_per_s", speed, batch_size=1)
            pl_module.log("train/data_wait_share", (self.wait_s - wait_s) / spent, batch_size=1)
            self._interval = (self.n_tokens, self.step_s, self.wait_s)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Save the counts as of the last complete step, because a resumed run repeats the
        # micro-batches of an unfinished step.
        n_tokens_total, n_bytes_read = self._at_step
        return {"n_tokens_total": n_tokens_total, "n_bytes_read": n_bytes_read}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._at_step = (state_dict["n_tokens_total"], state_dict["n_bytes_read"])
        self.n_tokens_total, self.n_bytes_read = self._at_step


def _ends_step(trainer: L.Trainer, batch_idx: int) -> bool:
    """Return whether a micro-batch is the last one of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def _stream_of(trainer: L.Trainer) -> TrainingStream:
    stream = trainer.train_dataloader
    assert isinstance(stream, TrainingStream)
    return stream


class ShowSteps(L.Callback):
    """Reports the number of steps, and the micro-batch or validation batch within a step."""

    def __init__(self, progress: Progress, max_steps: int) -> None:
        self.progress = progress.of("train", "step")
        self.max_steps = max_steps
        self._figures: list[str] = []

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._report(trainer)

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        n_done = batch_idx % trainer.accumulate_grad_batches + 1
        # Show micro-batches, because a step can take minutes on a CPU.
        if n_done < trainer.accumulate_grad_batches:
            self._report(trainer, f"micro-batch {n_done} of {trainer.accumulate_grad_batches}")
            return
        # Show metrics only once per step, because reading them synchronizes with the device.
        self.on_validation_end(trainer, pl_module)

    @override
    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        *args: Any,
    ) -> None:
        [n_batches] = trainer.num_val_batches
        self._report(trainer, f"validation {batch_idx + 1} of {n_batches}")

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._figures = [
            f"{name} {float(value):,.4g}" for name, value in trainer.progress_bar_metrics.items()
        ]
        self._report(trainer)

    def _report(self, trainer: L.Trainer, *doing: str) -> None:
        if trainer.is_global_zero:
            note = ", ".join([*self._figures, *doing]).replace(f", {PLUS_MINUS}", f" {PLUS_MINUS}")
            self.progress(trainer.global_step, self.max_steps, note)


class MicroBatches(L.Callback):
    """Runs trial steps to find the largest micro-batch size that fits into memory.

    The trial steps also show whether the backward must recompute layers to save memory.
    """

    def __init__(self, data: StoreDataModule, file: Path) -> None:
        self.data = data
        # Path of the file to which the chosen micro-batch size is written. A resumed run uses this
        # size again if it still fits into memory, so that gradients are summed in the same order.
        self.file = file
        self._has_chosen = False

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, DrafterModule)
        # The processes of all devices are connected now, so ``world_size`` is final.
        share = device_share(self.data.config, trainer.world_size)
        # Choose only once. Lightning calls ``setup`` again for a validation after the last step.
        if not self._has_chosen:
            self._choose(trainer, pl_module, share)
            self._has_chosen = True
        trainer.accumulate_grad_batches = share // self.data.micro_batch
        if trainer.enable_validation:
            every = known(self.data.config.validation.validate_every)
            trainer.val_check_interval = every * trainer.accumulate_grad_batches

    @override
    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Lightning restores its count of micro-batches, and takes an optimizer step whenever the
        # count is a multiple of ``accumulate_grad_batches``. But a resumed run starts at the first
        # micro-batch of a step. If the checkpoint was saved in the middle of a step, or with
        # another micro-batch size, every later step would mix the sequences of two steps. So set
        # the count to the number of micro-batches in the steps that the checkpoint has completed.
        step = checkpoint["global_step"]
        loops = checkpoint["loops"]["fit_loop"]
        n_batches = step * trainer.accumulate_grad_batches
        progress = loops["epoch_loop.batch_progress"]
        for part in ("total", "current"):
            progress[part] = dict.fromkeys(progress[part], n_batches)
        # Lightning's count of steps grows by one at the end of each step. If a validation is due at
        # the step of the checkpoint, Lightning runs the end of this step a second time after a
        # resume, even if the validation has finished. So start the count one step lower.
        is_due = trainer.enable_validation and n_batches % trainer.val_check_interval == 0
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1 if is_due else step

    def _choose(self, trainer: L.Trainer, module: DrafterModule, share: int) -> None:
        device = trainer.strategy.root_device
        n_devices = trainer.world_size
        sizes = self.data.micro_batch_sizes(share)
        recorded: dict[str, Any] = {}
        # The file does not exist before the first invocation of a run has chosen a size. A damaged
        # file is treated like a missing file.
        with contextlib.suppress(OSError, ValueError, TypeError):
            recorded = dict(json.loads(self.file.read_text()))
        # Besides weights and gradients, a step needs memory for two optimizer moments, and with DDP
        # also for a copy of the gradients. Each of these is as large as the weights, and ``copies``
        # is their number.
        copies = 3 if n_devices > 1 else 2
        free = free_memory() if device.type == "cpu" else None
        free = None if free is None else free // trainer.num_devices
        trial = Trial(
            module, self.data.longest_sequence(), device, trainer.precision_plugin.forward_context
        )
        chosen = trial.choose(sizes, free, copies)
        # All devices must use the same size, because they take steps together. Use the smallest
        # size that a device has chosen.
        size = int(
            trainer.strategy.reduce(
                torch.tensor(chosen.micro_batch, device=device), reduce_op="min"
            )
        )
        before = recorded.get("micro_batch_size")
        if before in sizes and before < size:
            size = before
        self.data.micro_batch = size
        module.recomputes = chosen.recomputes or recorded.get("recomputes") is True
        if trainer.is_global_zero:
            facts = {"micro_batch_size": size, "recomputes": module.recomputes}
            write_beside(self.file, (json.dumps(facts, indent=1) + "\n").encode())
        if not chosen.fits:
            text = (
                f"even a micro-batch of {sizes[-1]} of the longest sequences does not fit into the "
                "free memory. To save memory, use "
            )
            warnings.warn(text + WHAT_HELPS, RunWarning, stacklevel=2)


class Saves(L.Callback):
    """Saves checkpoints at an interval, and the drafter whenever a validation is the best so far.

    The drafter with the best validation is written to ``drafter/``, and its checkpoint to
    ``best.ckpt``. The last step of a run is always validated. A resumed run repeats a validation
    that was interrupted.
    """

    def __init__(self, out: Path, every_n_steps: int, max_steps: int) -> None:
        self.out = out
        self.every_n_steps = every_n_steps
        # Number of steps of the entire run. An invocation that stops before this step does not
        # validate at its end.
        self.max_steps = max_steps
        # Largest expected acceptance length of all validations so far.
        self.best = float("-inf")
        # Half width of the 95 % confidence interval of ``best``, the largest expected acceptance
        # length.
        self.best_half_width = float("nan")
        self.validated_step: int | None = None

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step >= self.max_steps:
            # Let Lightning stop. Before it stops, it runs a last validation.
            trainer.should_stop = True
        if step % self.every_n_steps == 0 and _ends_step(trainer, batch_idx):
            trainer.save_checkpoint(self.out / LAST)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DrafterModule)
        self.validated_step = trainer.global_step
        length = float(trainer.callback_metrics["val/expected_acceptance_length"])
        # If ``length`` is NaN, the comparison is false, so this method returns.
        if not length > self.best:
            return
        self.best = length
        self.best_half_width = float(trainer.callback_metrics["val/expected_acceptance_half_width"])
        if trainer.is_global_zero:
            write_drafter(pl_module.drafter, self.out / DRAFTER)
        trainer.save_checkpoint(self.out / BEST)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_half_width": self.best_half_width,
            "validated_step": self.validated_step,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        self.validated_step = state_dict["validated_step"]
        # Checkpoints of earlier releases do not have the key ``best_half_width``. The half width is
        # then unknown, which NaN stands for.
        self.best_half_width = state_dict.get("best_half_width", float("nan"))

    @override
    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # If the checkpoint was saved before the validation of its step had ended, let Lightning run
        # this validation again, from its first batch.
        step = checkpoint["global_step"]
        is_open = (
            step > 0
            and checkpoint["callbacks"].get(self.state_key, {}).get("validated_step") != step
        )
        # Lightning runs a validation on resume if one validation batch is counted as started but
        # not as processed.
        count = {"ready": int(is_open), "started": int(is_open), "processed": 0, "completed": 0}
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
        progress |= {"total": dict(count), "current": dict(count), "is_last_batch": False}


class StoppedAtOnce(KeyboardInterrupt):
    """Raised when Ctrl-C is pressed a second time, before the state could be saved."""


class StopGuard(L.Callback):
    """After SIGINT, SIGTERM or SIGHUP, saves the state and stops at the next micro-batch.

    The guard is a context manager. It handles these signals until its context ends. A signal that
    the process ignored before stays ignored. SIGUSR1 is left to Lightning, which saves and requeues
    the job on SLURM.
    """

    # If a signal handler raised an exception, it could interrupt an optimizer step half way. It
    # could also stop one process while the others wait for it forever in a collective operation.
    # Therefore, a handler only stores the number of the signal. The guard checks for a stored
    # number at the start of each micro-batch, and stops all processes there.

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        # Number of the first signal that was received; 0 if there is none.
        self.signum = 0
        # Whether training has started. The checkpoint of a resumed run is restored before that.
        self.has_started = False
        self._noted_s = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._mask: set[Any] | None = None

    def __enter__(self) -> "StopGuard":
        # Lightning starts one process per further device. A signal to the process group would kill
        # these processes while they import modules, because they have no handlers yet. Therefore,
        # block stop signals until the trainer is set up. Started processes inherit this block and
        # never end it. They learn of a signal from the first process.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                handler = signal.getsignal(signum)
                if handler not in (signal.SIG_IGN, None):
                    self._before[signum] = handler
                    signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._let_signals_in()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _let_signals_in(self) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._mask = None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum and signum == signal.SIGINT and now > self._noted_s + REPEAT_S:
            raise StoppedAtOnce
        if not self.signum:
            self.signum = signum
            self._noted_s = now

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # All processes have been started and are connected, so unblock the stop signals.
        self._let_signals_in()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.has_started = True

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        signum = self.signum
        if trainer.world_size > 1:
            signal_tensor = torch.tensor(signum, device=trainer.strategy.root_device)
            signum = int(trainer.strategy.reduce(signal_tensor, reduce_op="max"))
        if signum:
            self.signum = signum
            trainer.save_checkpoint(self.checkpoint)
            raise Interrupted(stopped_at(trainer.global_step), self.signum)

    @override
    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        # Stopping within a validation is safe, because a resumed run repeats the validation.
        self.on_train_batch_start(trainer)


def stopped_at(step: int) -> str:
    """Return the message for the user after a signal has stopped a run and its state was saved."""
    return (
        f"stopped at step {step} after saving its state. Continue with the same command and "
        "`resume`."
    )


class SignalsLeftAlone(_SignalConnector):
    """Lets Lightning register its signal handlers, but not for SIGINT, SIGTERM and SIGHUP.

    `StopGuard` handles these signals. Lightning's handler for SIGTERM would communicate with the
    other processes while it interrupts the training loop.
    """

    @staticmethod
    def _register_signal(signum: Any, handlers: Any) -> None:
        if signum not in STOP_SIGNALS:
            _SignalConnector._register_signal(signum, handlers)
