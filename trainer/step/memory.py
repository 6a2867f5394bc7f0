"""Measures the memory of a training step by trial forwards, and chooses the micro-batch that fits.

What grows with a micro-batch is what the forward keeps for the backward. A trial counts it: it runs the drafter's
objective over the beginning of one sequence and adds up the tensors that autograd saves. That is the same on each run
and on each device, and takes seconds at the largest sizes. Three lengths tell what a token takes, what a pair of tokens
takes (masks), from which follows a sequence of any length. The same trial tells what a step takes whose backward makes
the inside of layers again (:mod:`.recompute`): that is for sequences of which not even one fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...moa.drafters.base import Drafter
from ...moa.drafters.training import LossWeights, TrainingInputs, TrainingStep
from ...moa.nn.limits import LIMITS, smallest_parts
from ...moa.targets.bundle import FrozenTarget
from ...text import format_bytes
from ..batches.datamodule import draw, rows_of
from ..config import TrainConfig
from .recompute import Part, share_at_once, wrapped_layers

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
    """Bytes that it keeps of a pair of tokens of one sequence."""
    recomputes: bool = False
    """Whether the backward makes what lies inside layers again."""

    def sequence_bytes(self, n_tokens: int) -> int:
        """Count the bytes of one sequence of a micro-batch."""
        return int(n_tokens * self.bytes_per_token + n_tokens**2 * self.bytes_per_pair)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a step whatever its micro-batch."""
        return self.weight_bytes + self.training_bytes + self.frozen_bytes + self.chunk_bytes

    def step_bytes(self, n_sequences: int, n_tokens: int) -> int:
        """Bytes of a step with so many sequences per forward."""
        return self.fixed_bytes + n_sequences * self.sequence_bytes(n_tokens)

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
        room = SHARE_OF_FREE * free_bytes + held_bytes
        fits = (n for n in range(share, 0, -1) if share % n == 0 and self.step_bytes(n, n_tokens) <= room)
        return next(fits, 1)


@dataclass(frozen=True)
class MeasuredStep:
    """What a step takes as it is, and where its backward makes what lies inside layers again."""

    plain: StepMemory
    recomputing: StepMemory

    def shared(self, n_devices: int) -> MeasuredStep:
        """Return what each of some devices takes that share weights, gradients and moments (:mod:`.sharding`).

        A forward gathers all weights and a backward makes all gradients, whose shares are there beside.
        """
        both = []
        for memory in (self.plain, self.recomputing):
            weights, training = memory.weight_bytes, memory.training_bytes
            shares = replace(
                memory,
                weight_bytes=weights + weights // n_devices,
                training_bytes=min(training, weights + training // n_devices),
            )
            both.append(shares)
        return MeasuredStep(*both)

    def choose(self, n_sequences: int, n_tokens: int, free_bytes: int | None, held_bytes: int = 0) -> StepMemory:
        """Choose the plain one where so many sequences per forward fit.

        Args:
            n_tokens: tokens of the longest sequence.
            free_bytes: free memory of the device; None where that can't be told.
            held_bytes: what the device holds already of a step.
        """
        needed = self.plain.step_bytes(n_sequences, n_tokens) - held_bytes
        return self.plain if free_bytes is None or needed <= SHARE_OF_FREE * free_bytes else self.recomputing


@dataclass(frozen=True)
class Choice:
    """The micro-batch of a device, and what a step takes with it."""

    memory: StepMemory
    micro_batch: int
    step_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """A measured step, and the micro-batches that follow from it on a device."""

    measured: MeasuredStep
    longest: int
    """Tokens of the longest sequence."""
    share: int
    """Sequences of a step on one device."""
    micro_batch: int | None
    """Sequences per forward that the settings give; None for as many as fit."""
    free_bytes: int | None
    """Free memory of this machine's device."""
    held_bytes: int
    """Bytes of the step's ``fixed_bytes`` that it holds already."""

    def here(self) -> Choice:
        """Choose as a run here would."""
        return self._choose(self.free_bytes, self.held_bytes)

    def on(self, device_bytes: int) -> Choice:
        """Choose for an empty device."""
        return self._choose(device_bytes, 0)

    def _choose(self, free_bytes: int | None, held_bytes: int) -> Choice:
        memory = self.measured.choose(self.micro_batch or 1, self.longest, free_bytes, held_bytes)
        size = self.micro_batch or memory.micro_batch_size(self.share, self.longest, free_bytes, held_bytes)
        return Choice(memory, size, memory.step_bytes(size, self.longest))

    def shortage(self) -> str | None:
        """Say in one line that the longest sequences do not fit here, and what helps; None where they do."""
        chosen = self.here()
        if self.free_bytes is None or chosen.step_bytes - self.held_bytes <= self.free_bytes:
            return None
        room = self.free_bytes + self.held_bytes
        fewer = "a lower --micro-batch-size, " if chosen.micro_batch > 1 else ""
        return (
            f"a forward of {chosen.micro_batch} of the longest sequences ({self.longest:,} tokens) is foretold to take "
            f"{format_bytes(chosen.step_bytes)} of {format_bytes(room)}, so the system may end this run; what helps: "
            f"{fewer}--precision bf16-mixed, smaller sizes of the drafter (of eagle3 above all "
            "drafter.draft_vocabulary), a store of shorter sequences (extract --max-length)."
        )


def measure_step(
    drafter: Drafter,
    frozen: FrozenTarget,
    config: TrainConfig,
    inputs: TrainingInputs,
    autocast_dtype: torch.dtype | None,
) -> MeasuredStep:
    """Measure a step by trials on the CPU.

    Args:
        inputs: one sequence of stored activations, [1, T, ...]; all of it is taken as response, the most costly case.
        autocast_dtype: dtype that products are cast to; None for no autocast.
    """
    longest = inputs.tokens.shape[1]
    lengths = sorted({max(1, min(_TRIAL_TOKENS, longest) // part) for part in (1, 2, 4)})
    trials = [_trial_bytes(drafter, frozen, config, _beginning(inputs, n), autocast_dtype) for n in lengths]
    weights = list(drafter.parameters())
    largest, total = max(weight.nbytes for weight in weights), sum(weight.nbytes for weight in weights)

    def fitted(found: Sequence[int], recomputes: bool) -> StepMemory:
        # What does not grow, such as weights with a norm's weight folded in, must not be taken for a token's.
        per_pair, per_token, constant = _fit(lengths, found)
        return StepMemory(
            weight_bytes=total,
            training_bytes=total * (1 + _MOMENTS[config.optimizer.kind]) + largest,
            frozen_bytes=sum(weight.nbytes for weight in frozen.parameters()),
            chunk_bytes=int(constant)
            + _LOGITS_ALIVE * (LIMITS.logits_bytes + LIMITS.score_bytes)
            + (config.data.prefetch_mb << 20),
            bytes_per_token=per_token,
            bytes_per_pair=per_pair,
            recomputes=recomputes,
        )

    plain, recomputing = zip(*trials, strict=True)
    return MeasuredStep(fitted(plain, False), fitted(recomputing, True))


def _fit(lengths: Sequence[int], n_bytes: Sequence[int]) -> tuple[float, float, float]:
    """Fit bytes = a * n^2 + b * n + c, none of them negative: a, b and c."""
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
) -> tuple[int, int]:
    """Run the objective over one sequence; return the bytes of its micro-batch, plain and recomputing."""
    draws = rows_of(draw(config, 0, 2), torch.zeros(1, dtype=torch.int64))
    step = TrainingStep(inputs, draws, LossWeights.of(config.drafter))
    known = [*drafter.parameters(), *frozen.parameters(), *_tensors(inputs)]
    held = {tensor.untyped_storage().data_ptr() for tensor in known}
    autocast = torch.autocast("cpu", autocast_dtype, enabled=autocast_dtype is not None)
    with smallest_parts() as logits_bytes, _saved_bytes(drafter, held) as saved, autocast:
        drafter.objective(frozen, step)
    n_inputs = sum(value.nbytes for value in _tensors(inputs))
    common = _HELD_INPUTS * n_inputs + _LOGITS_ALIVE * max(logits_bytes)
    plain, kept = saved.outside | saved.inside, saved.outside | saved.entering
    recomputing = sum(kept.values()) + max(saved.again, _ALIVE_IN_BACKWARD * max(kept.values()))
    return common + _with_gradients(plain), common + recomputing


def _with_gradients(saved: Mapping[int, int]) -> int:
    return sum(saved.values()) + _ALIVE_IN_BACKWARD * max(saved.values(), default=0)


@dataclass
class _Saved:
    """Bytes by address of the storages that autograd saves, without those that are held anyway."""

    outside: dict[int, int] = field(default_factory=dict)
    inside: dict[int, int] = field(default_factory=dict)
    """Within parts of layers, which recomputing makes again, one at a time."""
    entering: dict[int, int] = field(default_factory=dict)
    """What goes into these parts, which it keeps."""
    again: int = 0
    """Most bytes of what is made again at once, gradients included."""


@contextmanager
def _saved_bytes(drafter: Drafter, held: set[int]) -> Iterator[_Saved]:
    saved = _Saved()
    kept = []  # or a storage that is freed on the way gives its address to another one

    def note(tensor: Tensor, into: dict[int, int]) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            into[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor.detach())
        return tensor

    def saving_into(found: dict[int, int]) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: note(tensor, found), lambda tensor: tensor)

    def watch(name: str, part: Part) -> Part:
        def watched(*args: Any) -> Any:
            own: dict[int, int] = {}
            with saving_into(own):
                made = part(*args)
            for value in args:
                if isinstance(value, Tensor):
                    note(value, saved.entering)
            saved.inside |= own
            saved.again = max(saved.again, int(share_at_once(name, args[0]) * _with_gradients(own)))
            return made

        return watched

    with saving_into(saved.outside), wrapped_layers(drafter, watch):
        yield saved
