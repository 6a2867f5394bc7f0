"""Real positions of padded rows, packed one behind the other, so that matrices are applied to no padding.

Shapes: B rows, Q places of each, P real ones among all of them.

The rows of a micro-batch have different numbers of positions to draft for, and are filled up to the most. Attention
needs the rows as they are; projections, MLPs and norms look at one position at a time, and take them packed::

    rows      a0 a1 a2  .        valid  1 1 1 0      packed  a0 a1 a2 b0 c0 c1 c2 c3
              b0  .  .  .               1 0 0 0      places   0  1  2  4  8  9 10 11
              c0 c1 c2 c3               1 1 1 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Packing:
    """Where packed positions stand in their rows."""

    places: Tensor
    """[P] int64, ascending, among the B * Q places of all rows."""
    n_rows: int
    n_places: int
    """Q."""

    @classmethod
    def of(cls, valid: Tensor) -> Packing:
        """Make it from which places are real, [B, Q] bool."""
        return cls(valid.flatten().nonzero()[:, 0], *valid.shape)

    def pack(self, x: Tensor) -> Tensor:
        """Take the real places of x [B, Q, ...]: [P, ...]."""
        packed: Tensor = _Pack.apply(x.flatten(0, 1), self.places)  # type: ignore[no-untyped-call]  # torch's apply
        return packed

    def unpack(self, x: Tensor) -> Tensor:
        """Put x [P, ...] into its rows, with zeros as padding: [B, Q, ...]."""
        padded: Tensor = x.new_zeros(self.n_rows * self.n_places, *x.shape[1:]).index_copy(0, self.places, x)
        return padded.view(self.n_rows, self.n_places, *x.shape[1:])

    def at(self, x: Tensor, queries: Tensor) -> Tensor:
        """Take x [B, T, ...] at the real ones of the positions ``queries`` [B, Q]: [P, ...]."""
        row = torch.arange(self.n_rows, device=queries.device)[:, None] * x.shape[1]
        return x.flatten(0, 1).index_select(0, (row + queries).flatten().index_select(0, self.places))


class _Pack(torch.autograd.Function):
    """Selects rows of a matrix, each at most once; the gradient puts them back, where torch's own adds them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.n_rows = len(x)
        return x.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (places,), grad = ctx.saved_tensors, grad_outputs[0]
        return grad.new_zeros(ctx.n_rows, *grad.shape[1:]).index_copy_(0, places, grad), None
