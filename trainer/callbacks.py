"""Callbacks around the steps: throughput, micro-batches, validation, checkpoints, progress, and stopping on signals."""

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
from ..files import write_atomic
from ..machine import free_memory
from ..text import Progress
from .checkpoints import write_drafter
from .config import BEST, DRAFTER, LAST, known
from .data import Batch, StoreDataModule, TrainingStream, device_share
from .step import PLUS_MINUS, WHAT_HELPS, DrafterModule, Trial

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# a second SIGINT within this time may be the same Ctrl-C, passed on by a shell or a launcher
REPEAT_S = 1.0


class Throughput(L.Callback):
    """Logs tokens/s and the share of time that training waits for data, over each logging interval."""

    def __init__(self) -> None:
        self.n_tokens = 0  # without padding, in this invocation
        self.step_s = 0.0  # in steps and waiting, without validation and the writing of checkpoints
        self.wait_s = 0.0  # until the next batch came
        self.n_tokens_total = 0  # in all invocations of the run
        self.n_bytes_read = 0  # in all invocations; other devices are taken to read as many
        self._at_step = (0, 0)  # both, at the end of the last whole step
        self._interval = (0, 0.0, 0.0)  # tokens and seconds when it began
        self._wait_before_s = 0.0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._wait_before_s = _stream_of(trainer).wait_s  # for what was read during the setup

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
        # Whatever is done between two batches ends before the trainer asks for the next one.
        self.step_s += time.perf_counter() - stream.asked_s
        self.wait_s = stream.wait_s - self._wait_before_s
        self.n_tokens += batch.n_tokens_of_all
        self.n_tokens_total += batch.n_tokens_of_all
        self.n_bytes_read += batch.n_bytes_read * trainer.world_size
        ends_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if ends_step:
            self._at_step = (self.n_tokens_total, self.n_bytes_read)
        # Lightning sets this attribute in one of its connectors, where mypy doesn't see it.
        if ends_step and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            tokens, step_s, wait_s = self._interval
            spent = max(1e-9, self.step_s - step_s)
            speed = (self.n_tokens - tokens) / spent
            pl_module.log("tok/s", speed, prog_bar=True, logger=False, batch_size=1)
            pl_module.log("train/tokens_per_s", speed, batch_size=1)
            pl_module.log("train/data_wait_share", (self.wait_s - wait_s) / spent, batch_size=1)
            self._interval = (self.n_tokens, self.step_s, self.wait_s)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Without micro-batches of an unfinished step, which come again.
        n_tokens_total, n_bytes_read = self._at_step
        return {"n_tokens_total": n_tokens_total, "n_bytes_read": n_bytes_read}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._at_step = (state_dict["n_tokens_total"], state_dict["n_bytes_read"])
        self.n_tokens_total, self.n_bytes_read = self._at_step


def _stream_of(trainer: L.Trainer) -> TrainingStream:
    stream = trainer.train_dataloader
    assert isinstance(stream, TrainingStream)
    return stream


class ShowSteps(L.Callback):
    """Reports optimizer steps to a progress callback, and micro-batches and validations between them."""

    def __init__(self, progress: Progress, max_steps: int) -> None:
        self.progress = progress
        self.max_steps = max_steps
        self._figures = "train"

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
        if n_done < trainer.accumulate_grad_batches:  # on a CPU a step can take minutes
            self._report(trainer, f", micro-batch {n_done} of {trainer.accumulate_grad_batches}")
            return
        self.on_validation_end(trainer, pl_module)  # once a step, as it waits for the device

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
        self._report(trainer, f", validation {batch_idx + 1} of {n_batches}")

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = [
            f"{name} {float(value):,.4g}" for name, value in trainer.progress_bar_metrics.items()
        ]
        self._figures = ", ".join(["train", *found]).replace(f", {PLUS_MINUS}", f" {PLUS_MINUS}")
        self._report(trainer)

    def _report(self, trainer: L.Trainer, doing: str = "") -> None:
        if trainer.is_global_zero:
            self.progress(trainer.global_step, self.max_steps, self._figures + doing)


class MicroBatches(L.Callback):
    """Chooses by trials the sequences per forward, and whether decoder layers are recomputed."""

    def __init__(self, data: StoreDataModule, file: Path) -> None:
        # The choice is noted in a file: a resumed run takes it again where it fits, and then adds
        # up in the same order.
        self.data = data
        self.file = file
        self._has_chosen = False

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, DrafterModule)
        # all devices are connected by now
        share = device_share(self.data.config, trainer.world_size)
        if not self._has_chosen:  # it is asked again for a validation after the last step
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
        # Lightning counts micro-batches, and a step where their number divides; the stream begins
        # at the first one of a
        # step. After a checkpoint from the middle of a step, or of an invocation with other
        # micro-batches, each step
        # would mix two batches: so its counts are set to those at the end of the checkpoint's step.
        step = checkpoint["global_step"]
        loops = checkpoint["loops"]["fit_loop"]
        n_batches = step * trainer.accumulate_grad_batches
        progress = loops["epoch_loop.batch_progress"]
        for part in ("total", "current"):
            progress[part] = dict.fromkeys(progress[part], n_batches)
        # Where a validation is due, Lightning passes its end once more, done or not, and counts the
        # step only there.
        is_due = trainer.enable_validation and n_batches % trainer.val_check_interval == 0
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1 if is_due else step

    def _choose(self, trainer: L.Trainer, module: DrafterModule, share: int) -> None:
        device = trainer.strategy.root_device
        n_devices = trainer.world_size
        given = self.data.config.data.micro_batch_size
        sizes = self.data.micro_batch_sizes(share)
        noted: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):  # there is none yet
            noted = dict(json.loads(self.file.read_text()))
        copies = 3 if n_devices > 1 else 2  # two moments, and DDP's copy of the gradients
        free = free_memory() if device.type == "cpu" else None
        free = None if free is None else free // trainer.num_devices
        trial = Trial(
            module, self.data.longest_sequence(), device, trainer.precision_plugin.forward_context
        )
        chosen = trial.choose(sizes, free, copies)
        # Devices of unlike memory take steps together.
        size = int(
            trainer.strategy.reduce(
                torch.tensor(chosen.micro_batch, device=device), reduce_op="min"
            )
        )
        before = noted.get("micro_batch_size")
        if not given and type(before) is int and 0 < before <= size and share % before == 0:
            size = before
        self.data.micro_batch = size
        module.recomputes = chosen.recomputes or noted.get("recomputes") is True
        if trainer.is_global_zero:
            facts = {"micro_batch_size": size, "recomputes": module.recomputes}
            write_atomic(self.file, (json.dumps(facts, indent=1) + "\n").encode())
        if not chosen.fits:
            text = f"a step of {sizes[-1]} of the longest sequences does not fit into the free memory; what helps: "
            warnings.warn(text + WHAT_HELPS, RunWarning, stacklevel=2)


class Saves(L.Callback):
    """Saves the state every so many steps, and ``drafter/`` and ``best.ckpt`` at each new best validation.

    It validates the last step of a run, whatever the interval, and repeats an unfinished validation on resume.
    """

    def __init__(self, out: Path, every_n_steps: int, max_steps: int) -> None:
        self.out = out
        self.every_n_steps = every_n_steps
        # of the run; an invocation that is to end earlier does not validate where it ends
        self.max_steps = max_steps
        self.best = float("-inf")  # expected acceptance length
        self.best_half_width = float("nan")  # of its 95 % interval
        self.validated_step: int | None = None
        self._saved_step = 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step = trainer.global_step  # a resumed run begins with it

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if step >= self.max_steps:
            trainer.should_stop = True  # Lightning then validates once more
        # This is called for each micro-batch of a step.
        if step % self.every_n_steps == 0 and step != self._saved_step:
            trainer.save_checkpoint(self.out / LAST)
            self._saved_step = step

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DrafterModule)
        self.validated_step = trainer.global_step
        value = trainer.callback_metrics.get("val/expected_acceptance_length")
        if value is None or not float(value) > self.best:
            return
        self.best = float(value)
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
        # earlier runs have none
        self.best_half_width = state_dict.get("best_half_width", float("nan"))

    @override
    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Lightning runs the validation of the checkpoint's step from its first batch, unless it had
        # ended.
        step = checkpoint["global_step"]
        is_open = (
            step > 0
            and checkpoint["callbacks"].get(self.state_key, {}).get("validated_step") != step
        )
        # Lightning runs one that has started a batch and not processed it.
        count = {"ready": int(is_open), "started": int(is_open), "processed": 0, "completed": 0}
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
        progress |= {"total": dict(count), "current": dict(count), "is_last_batch": False}


class StoppedAtOnce(KeyboardInterrupt):
    """Ctrl-C was pressed again before the state could be saved."""


class StopGuard(L.Callback):
    """Notes SIGINT, SIGTERM and SIGHUP while it is entered, and stops training at the next micro-batch, state saved.

    Signals that are ignored stay ignored. SIGUSR1 is left to Lightning, which on SLURM saves and queues the job again.
    """

    # An exception out of a signal's handler could tear an optimizer's step in half, or leave one
    # process of several in
    # a collective operation for ever. So the handlers only note the signal, and each micro-batch
    # looks for one.

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.signum = 0  # of the first signal noted; 0 before
        self.has_started = False  # whether training has, so that a checkpoint is restored
        self._noted_s = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._mask: set[Any] | None = None

    def __enter__(self) -> "StopGuard":
        # Until a trainer is set up, signals are blocked. Processes that Lightning starts inherit
        # the block for good: a
        # signal to the whole group reaches them through the first process, and doesn't end them
        # while they import.
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
        self._let_signals_in()  # all processes have been started and are connected

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.has_started = True

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        signum = self.signum
        if trainer.world_size > 1:
            noted = torch.tensor(signum, device=trainer.strategy.root_device)
            signum = int(trainer.strategy.reduce(noted, reduce_op="max"))
        if signum:
            self.signum = signum
            trainer.save_checkpoint(self.checkpoint)
            raise Interrupted(stopped_at(trainer.global_step), self.signum)

    @override
    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.on_train_batch_start(trainer)  # a validation that is stopped is done again


def stopped_at(step: int) -> str:
    """Return the line for a run whose state is saved."""
    return f"stopped at step {step}; go on with the same command and --resume."


class SignalsLeftAlone(_SignalConnector):
    """Lightning's handlers without those for stop signals: its own for SIGTERM communicates within the handler."""

    @staticmethod
    def _register_signal(signum: Any, handlers: Any) -> None:
        if signum not in STOP_SIGNALS:
            _SignalConnector._register_signal(signum, handlers)
