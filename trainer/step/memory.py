"""Measures the memory of a training step by trial forwards, and chooses the micro-batch that fits.

What grows with a micro-batch is what the forward keeps for the backward. A trial counts it: it runs the drafter's
objective over the beginning of one sequence and adds up the tensors that autograd saves. That is the same on each run
and on each device, and takes seconds at the largest sizes. Trials of three lengths give the bytes of a token and of a
pair of tokens (masks), from which those of a sequence of any length follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...moa.drafters.base import Drafter
from ...moa.drafters.training import LossWeights, TrainingInputs, TrainingStep
from ...moa.nn.limits import LIMITS, smallest_parts
from ...moa.targets.bundle import FrozenTarget
from ..batches.datamodule import draw, rows_of
from ..config import TrainConfig

SHARE_OF_FREE = 0.8
"""Share of the free memory that a step may take: allocators leave gaps, and kernels have workspaces."""
_TRIAL_TOKENS = 64
_ALIVE_IN_BACKWARD = 4
"""Tensors as large as the largest saved one that the backward holds at once: the gradients inside a gated MLP."""
_LOGITS_ALIVE = 4
"""Tensors as large as a chunk's logits that a loss holds at once."""
_HELD_INPUTS = 2
"""Batches of stored activations that are there at once: the one in use, and the next."""
_MOMENTS = {"adamw": 2, "muon": 2}  # Muon keeps one, and makes a second of all matrices of a shape


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step on one device."""

    weight_bytes: int
    """The drafter's weights."""
    training_bytes: int
    """Their gradients, the optimizer's moments, and one more copy of the largest of them."""
    frozen_bytes: int
    """The frozen target weights."""
    chunk_bytes: int
    """Intermediates that do not grow with a micro-batch, and batches that are read ahead."""
    bytes_per_token: float
    """Bytes that the forward keeps for each token, the stored activations included."""
    bytes_per_pair: float
    """Bytes that it keeps for each pair of tokens of one sequence."""

    def sequence_bytes(self, n_tokens: int) -> int:
        """Count the bytes of one sequence of a micro-batch."""
        return int(n_tokens * self.bytes_per_token + n_tokens**2 * self.bytes_per_pair)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a step whatever its micro-batch."""
        return self.weight_bytes + self.training_bytes + self.frozen_bytes + self.chunk_bytes

    def micro_batch_size(self, share: int, n_tokens: int, free_bytes: int | None, held_bytes: int = 0) -> int:
        """Choose the most sequences per forward that fit.

        Args:
            share: sequences of a step on this device, which the micro-batch divides.
            n_tokens: tokens of the longest sequence.
            free_bytes: free memory of the device; None where that is unknown: there is no bound then.
            held_bytes: bytes of ``fixed_bytes`` that the device holds already.

        Returns:
            At least 1, also where that does not fit.
        """
        if free_bytes is None:
            return share
        room = SHARE_OF_FREE * free_bytes - (self.fixed_bytes - held_bytes)
        fits = (n for n in range(share, 0, -1) if share % n == 0 and n * self.sequence_bytes(n_tokens) <= room)
        return next(fits, 1)


@dataclass(frozen=True)
class MemoryPlan:
    """A measured step, and the micro-batches that follow from it on a device."""

    memory: StepMemory
    longest: int
    """Tokens of the longest sequence."""
    share: int
    """Sequences of a step on one device."""
    free_bytes: int | None
    """Free memory of this machine's device."""
    held_bytes: int
    """Bytes of the step's ``fixed_bytes`` that it holds already."""

    def size_here(self) -> int:
        """Choose the micro-batch as a run here would."""
        return self.memory.micro_batch_size(self.share, self.longest, self.free_bytes, self.held_bytes)

    def size_on(self, device_bytes: int) -> int:
        """Choose the micro-batch on an empty device with so much memory."""
        return self.memory.micro_batch_size(self.share, self.longest, device_bytes)

    def step_bytes(self, micro_batch: int) -> int:
        """Count the bytes of a step with so many of the longest sequences per forward."""
        return self.memory.fixed_bytes + micro_batch * self.memory.sequence_bytes(self.longest)


def measure_step(
    drafter: Drafter,
    frozen: FrozenTarget,
    config: TrainConfig,
    inputs: TrainingInputs,
    autocast_dtype: torch.dtype | None,
) -> StepMemory:
    """Measure a step by trials on the CPU.

    Args:
        inputs: one sequence of stored activations, [1, T, ...]; all of it is taken as response, the most costly case.
        autocast_dtype: dtype that products are cast to; None for no autocast.
    """
    longest = inputs.tokens.shape[1]
    lengths = sorted({max(1, min(_TRIAL_TOKENS, longest) // part) for part in (1, 2, 4)})
    found = [_trial_bytes(drafter, frozen, config, _beginning(inputs, n), autocast_dtype) for n in lengths]
    # What does not grow, such as weights with a norm's weight folded in, must not be counted as a token's.
    per_pair, per_token, constant = _fit(lengths, found)
    weights = list(drafter.parameters())
    largest, total = max(weight.nbytes for weight in weights), sum(weight.nbytes for weight in weights)
    return StepMemory(
        weight_bytes=total,
        training_bytes=total * (1 + _MOMENTS[config.optimizer.kind]) + largest,
        frozen_bytes=sum(weight.nbytes for weight in frozen.parameters()),
        chunk_bytes=int(constant)
        + _LOGITS_ALIVE * (LIMITS.logits_bytes + LIMITS.score_bytes)
        + (config.data.prefetch_mb << 20),
        bytes_per_token=per_token,
        bytes_per_pair=per_pair,
    )


def _fit(lengths: list[int], n_bytes: list[int]) -> tuple[float, float, float]:
    """Fit bytes = a * n^2 + b * n + c with none of them negative; returns a, b and c."""
    for degree in range(len(lengths) - 1, 0, -1):
        fitted = [0.0] * (2 - degree) + np.polyfit(lengths, n_bytes, degree).tolist()
        if min(fitted[:2]) >= 0 and fitted[2] > -0.01 * n_bytes[-1]:
            return fitted[0], fitted[1], max(0.0, fitted[2])
    return 0.0, n_bytes[-1] / lengths[-1], 0.0


def _tensors(inputs: TrainingInputs) -> list[Tensor]:
    return [value for value in (*vars(inputs).values(), *inputs.layer_outputs) if isinstance(value, Tensor)]


def _beginning(inputs: TrainingInputs, n_tokens: int) -> TrainingInputs:
    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(part) for part in value)
        return None if value is None else value[:1, :n_tokens].clone()

    cut_inputs = TrainingInputs(**{name: cut(value) for name, value in vars(inputs).items()})
    return replace(cut_inputs, response_mask=torch.ones_like(cut_inputs.response_mask))


def _trial_bytes(
    drafter: Drafter,
    frozen: FrozenTarget,
    config: TrainConfig,
    inputs: TrainingInputs,
    autocast_dtype: torch.dtype | None,
) -> int:
    """Run the objective over one sequence; return the bytes that its micro-batch takes."""
    draws = rows_of(draw(config, 0, 2), torch.zeros(1, dtype=torch.int64))
    step = TrainingStep(inputs, draws, LossWeights(**config.drafter.loss_weights()))
    known = [*drafter.parameters(), *frozen.parameters(), *_tensors(inputs)]
    held = {tensor.untyped_storage().data_ptr() for tensor in known}
    autocast = torch.autocast("cpu", autocast_dtype, enabled=autocast_dtype is not None)
    with smallest_parts() as logits_bytes, _saved_bytes(held) as saved, autocast:
        drafter.objective(frozen, step)
    n_inputs = sum(value.nbytes for value in _tensors(inputs))
    transient = _ALIVE_IN_BACKWARD * max(saved.values()) + _LOGITS_ALIVE * max(logits_bytes)
    return sum(saved.values()) + transient + _HELD_INPUTS * n_inputs


@contextmanager
def _saved_bytes(held: set[int]) -> Iterator[dict[int, int]]:
    """Collect the bytes of each storage that autograd saves, by address, without those that are held anyway."""
    saved: dict[int, int] = {}
    kept = []  # else a storage that is freed gives its address to another one

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
