"""Stopping on SIGINT, SIGTERM or SIGHUP: between two micro-batches, on all devices at once, with the state saved.

An exception out of a signal's handler could tear an optimizer's step in half, or leave one process of several in a
collective operation for ever. So the handlers only note the signal, and each micro-batch looks for one.
"""

import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from ...errors import Interrupted

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 1.0
"""A second SIGINT within this time may be the same Ctrl-C, passed on by a shell or a launcher."""


class StoppedAtOnce(KeyboardInterrupt):
    """Ctrl-C was pressed again before the state could be saved."""

    signum = signal.SIGINT


class StopGuard(L.Callback):
    """Notes signals while it is entered, and stops training at the next micro-batch.

    Signals that are ignored stay ignored. SIGUSR1 is left to Lightning, which on SLURM saves and queues the job again.

    Attributes:
        signum: number of the first signal noted; 0 before.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.signum = 0
        self._noted_s = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._mask: set[Any] | None = None

    def __enter__(self) -> "StopGuard":
        """Take the handlers over; until a trainer is set up, signals are blocked."""
        # Processes that Lightning starts inherit the block for good: a signal to the whole group reaches them through
        # the first process, and doesn't end them while they import.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                handler = signal.getsignal(signum)
                if handler not in (signal.SIG_IGN, None):
                    self._before[signum] = handler
                    signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the handlers back; whoever entered the guard acts on a signal that was noted and not acted upon."""
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
            self.signum, self._noted_s = signum, now

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Unblock signals: all processes have been started and are connected."""
        self._let_signals_in()

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Stop between two micro-batches."""
        self._stop_if_asked(trainer)

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Stop between two batches of a validation, which is then done again."""
        self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        signum = self.signum
        if trainer.world_size > 1:
            noted = torch.tensor(signum, device=trainer.strategy.root_device)
            signum = int(trainer.strategy.reduce(noted, reduce_op="max"))
        if signum:
            self.signum = signum
            trainer.save_checkpoint(self.checkpoint)
            raise Interrupted(stopped_at(trainer.global_step), self.signum)


def stopped_at(step: int) -> str:
    """Return the line for a run whose state is saved."""
    return f"stopped at step {step}; go on with the same command and --resume."


class SignalsLeftAlone(_SignalConnector):
    """Lightning's handlers without those for stop signals: its own for SIGTERM communicates within the handler."""

    @staticmethod
    def _register_signal(signum: Any, handlers: Any) -> None:
        if signum not in STOP_SIGNALS:
            _SignalConnector._register_signal(signum, handlers)
