"""What a training step sees: named tensors, never a store.

Shapes: B sequences, T tokens (longest of the batch), L target layers, D packed KV width, E target width.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..moa.objective import Draws, TrainingInputs


@dataclass
class Batch:
    """One micro-batch."""

    inputs: TrainingInputs
    """Right-padded activations."""
    draws: Draws
    """Step bounds and staircase rows, already drawn."""
    denominator: float
    """What sums over loss positions are divided by; unequal micro-batches and devices then weigh by their positions."""
    n_tokens: int
    """Real tokens, without padding."""
    read_s: float = 0.0
    """Seconds that the reader threads spent on it."""

    def to(self, device: torch.device, **kwargs: Any) -> "Batch":
        """Move every tensor."""
        return replace(self, inputs=_move(self.inputs, device, **kwargs), draws=_move(self.draws, device, **kwargs))


def _move(item: Any, device: torch.device, **kwargs: Any) -> Any:
    values = {entry.name: getattr(item, entry.name) for entry in fields(item)}
    moved = {name: v.to(device, **kwargs) for name, v in values.items() if isinstance(v, Tensor)}
    return replace(item, **moved)
