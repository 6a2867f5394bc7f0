"""Chooses the sequences per forward by a trial on the longest one, and whether decoder layers are recomputed.

A CUDA device takes whole steps, and says when it runs out of memory. A CPU never says so, the system ends the process:
there the bytes that one forward keeps for its backward are counted.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..moa.drafters.training import LossTerms, TrainingInputs
from .batches import map_tensors
from .data import draw, rows_of
from .step import DrafterModule

WHAT_HELPS = (
    "a lower --micro-batch-size, --precision bf16-mixed, smaller sizes of the drafter (of eagle3 above all "
    "drafter.draft_vocabulary), a store of shorter sequences (extract --max-length)."
)
_SPARE_SHARE = 0.1
"""Share of the free memory that a step leaves: allocators leave gaps as the lengths of batches change."""
_PEAK_FACTOR = 1.5
"""Peak of a step on a CPU by what its forward keeps: gradients within a layer and chunks of logits come on top."""


@dataclass(frozen=True)
class Choice:
    """How a device takes its share of a step."""

    micro_batch: int
    """Sequences per forward."""
    recomputes: bool
    """Whether decoder layers are recomputed in the backward."""
    fits: bool = True
    """False where not even the smallest micro-batch with recomputed layers does."""


@dataclass(frozen=True)
class Trial:
    """Steps of a module on micro-batches of one sequence; they change no weight."""

    module: DrafterModule
    longest: TrainingInputs
    """The longest sequence, [1, T, ...], on the CPU; all of it is taken as response, the most costly case."""
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    """Makes the context of a forward in the precision of the run."""

    def choose(self, sizes: Sequence[int], free_bytes: int | None, held_copies: float) -> Choice:
        """Choose the first of some sizes that fits, without recomputed layers if there is one.

        Args:
            sizes: sequences per forward, descending.
            free_bytes: free memory of a CPU; None where that is unknown: everything fits then.
            held_copies: bytes that a step holds beside weights, gradients and activations, in copies of the weights.
        """
        module, on_cpu = self.module, self.device.type == "cpu"
        weights = sum(weight.nbytes for weight in module.drafter.parameters())
        if self.device.type == "cuda":
            module.drafter.to(self.device)
            module.frozen.to(self.device)
            reserved = int(weights * held_copies + _SPARE_SHARE * torch.cuda.mem_get_info(self.device)[0])
        elif not on_cpu or free_bytes is None:
            return Choice(sizes[0], False)
        else:
            reserved = int(weights * (1 + held_copies)) + (module.config.data.prefetch_mb << 20)
        for recomputes in (False, True):
            module.recomputes = recomputes
            kept = self.kept_bytes() if on_cpu else 0
            for size in sizes:
                if on_cpu:
                    fits = reserved + size * kept * _PEAK_FACTOR <= (1 - _SPARE_SHARE) * (free_bytes or 0)
                else:
                    fits = self.step_runs(size, reserved)
                if fits:
                    return Choice(size, recomputes)
        return Choice(sizes[-1], True, fits=False)

    def step_runs(self, size: int, reserved_bytes: int) -> bool:
        """Run forward and backward of a micro-batch; False where the device runs out of memory.

        Args:
            reserved_bytes: bytes that are held meanwhile.
        """
        try:
            reserved: Tensor | None = torch.empty(reserved_bytes, dtype=torch.uint8, device=self.device)
            terms: LossTerms | None = self._terms(size)
            assert terms is not None
            terms.total.backward()
            has_run = True
        except torch.OutOfMemoryError:
            has_run = False
        reserved = terms = None  # noqa: F841  # their memory is given back here
        self.module.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return has_run

    def kept_bytes(self) -> int:
        """Count the bytes that the forward of one sequence keeps for its backward."""
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
        del terms  # not before, or freed storages would give their addresses to others
        return sum(storages.values())

    def _terms(self, size: int) -> LossTerms:
        def repeated(tensor: Tensor) -> Tensor:
            return tensor.to(self.device).repeat(size, *([1] * (tensor.ndim - 1)))

        inputs: TrainingInputs = map_tensors(self.longest, repeated)
        inputs = replace(inputs, response_mask=torch.ones_like(inputs.response_mask))
        draws = rows_of(draw(self.module.config.replaced(batch_size=size), 0, 2), torch.arange(size))
        with self.autocast():
            return self.module.compute_terms(inputs, map_tensors(draws, lambda tensor: tensor.to(self.device)), 1.0)
