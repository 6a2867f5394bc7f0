"""What a worker process and the process that directs it say to each other, over one connection.

The director sends an order, then a piece whenever one is asked for. Everything is small: activations never leave the
process that computed them but as shards of the store.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass

import torch

from ...errors import MoaDataError, WorkerError
from ..forwards.parts import Outcome, Timings
from .work import WorkOrder


@dataclass(frozen=True)
class Start:
    """From the director: what to work on, and the name for unfinished files."""

    order: WorkOrder
    attempt: str


@dataclass(frozen=True)
class Piece:
    """From the director: a piece of work; None when there is no more."""

    piece: int | None


@dataclass(frozen=True)
class Asking:
    """From the worker: it has nothing to compute."""


@dataclass(frozen=True)
class Loading:
    """From the worker: bytes of the target's weights that are loaded."""

    done: int


@dataclass(frozen=True)
class Computed:
    """From the worker: tokens that it has computed so far."""

    n_tokens: int


@dataclass(frozen=True)
class Done:
    """From the worker: a piece has its commit."""

    piece: int
    outcome: Outcome


@dataclass(frozen=True)
class Ended:
    """From the worker: all is written."""

    timings: Timings


@dataclass(frozen=True)
class Failed:
    """From the worker: an error that ends the whole run."""

    error: Exception


def portable(error: Exception) -> Exception:
    """Return the error as it can be sent to another process, with the lines that led to it as a note."""
    lines = "".join(traceback.format_exception(error))
    sent: Exception = WorkerError(str(error)) if isinstance(error, MoaDataError) else RuntimeError(repr(error))
    with contextlib.suppress(Exception):  # an error's own constructor may take anything
        copied = pickle.loads(pickle.dumps(error))
        sent = copied if str(copied) == str(error) else sent
    sent.add_note(f"In a worker:\n{lines}")
    return sent


def is_of_device(error: BaseException) -> bool:
    """Whether an accelerator failed: then its process can't go on, but others can."""
    kind = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)
