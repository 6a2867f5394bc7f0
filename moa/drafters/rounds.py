"""Draft rounds of a training step: which positions are drafted for, and what each of them sees.

Shapes: B batch, T tokens, Q queries, E target width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..nn import masks


@dataclass
class Draws:
    """The random draws of one step, per row."""

    step_bound: Tensor | None
    """[B] int64, see :func:`masks.drafted_positions`; None for no bound."""
    staircase_rows: Tensor
    """[B] bool, see :func:`masks.self_attention_mask`."""
    offset: Tensor | None = None
    """[B] int64, phase of the step bound; None for 0."""
    noise_seeds: tuple[int, ...] = ()
    """One per row, of the noise on the target's hidden states; empty for no noise."""
    noise_width: float = 0.0
    """The noise is uniform in plus or minus half of this."""
    on_policy_weight: float = 1.0
    """Of a position in the pass that trains what draft rounds see; 0 leaves the pass out."""
    teacher_forced_weight: float = 0.0
    """Of a position in the pass in which each one is the first draft of its own round and sees the target's activations
    up to its predecessor, whatever the step bound: what the paper calls standard training. 0 leaves it out."""

    def passes(self, response_mask: Tensor) -> list[tuple[float, Tensor, Tensor]]:
        """The passes over response masks [B, T] whose weight is above 0, on-policy before teacher-forced.

        Returns:
            Weight, drafted positions [B, T] bool, last context position of each [B, T] int64.
        """
        found = []
        if self.on_policy_weight:
            drafted = masks.drafted_positions(response_mask, self.step_bound, self.offset)
            found.append((self.on_policy_weight, drafted, masks.last_context(drafted)))
        if self.teacher_forced_weight:
            found.append((self.teacher_forced_weight, *masks.teacher_forced_positions(response_mask)))
        return found

    def position_weights(self, response_mask: Tensor) -> Tensor:
        """Weight of each position in the loss, of response masks [B, T], all passes together: [B, T] float32."""
        return torch.stack([weight * drafted for weight, drafted, _ in self.passes(response_mask)]).sum(dim=0)


@dataclass
class Rounds:
    """The draft rounds that a step trains: positions to draft for, and what each of them sees."""

    queries: Tensor
    """[B, Q] int64, positions."""
    context: Tensor
    """[B, Q] int64, last position whose target activations the query sees."""
    drafted: Tensor
    """[B, Q] bool; the others are padding, or context positions in the official form."""
    weights: Tensor
    """[B, Q] float32 in the loss, 0 for no part in it."""
    staircase: Tensor
    """[B, Q] bool, see :func:`masks.self_attention_mask`."""
    pass_index: Tensor
    """[Q] int64; queries of different passes do not see each other."""

    @classmethod
    def packed(cls, draws: Draws, response_mask: Tensor) -> Rounds:
        """The drafted positions of all passes over response masks [B, T], those of a pass packed to the left."""
        parts: list[dict[str, Tensor]] = []
        for index, (weight, drafted, context) in enumerate(draws.passes(response_mask)):
            queries, valid = loss_queries(drafted)
            # With one token to a round the drafted block would be the token itself.
            own_block = draws.staircase_rows[:, None] & (index == 0 and draws.on_policy_weight > 0)
            parts.append(
                {
                    "queries": queries,
                    "context": context.gather(1, queries),
                    "drafted": valid,
                    "weights": weight * valid,
                    "staircase": own_block.expand_as(valid),
                    "pass_index": torch.full_like(queries[0], index),
                }
            )
        return cls(**{name: torch.cat([part[name] for part in parts], dim=-1) for name in parts[0]})

    @classmethod
    def everywhere(cls, draws: Draws, response_mask: Tensor) -> Rounds:
        """Every position of the on-policy pass, with loss on the whole response, as the official code has it."""
        drafted = masks.drafted_positions(response_mask, draws.step_bound, draws.offset)
        queries = torch.arange(drafted.shape[1], device=drafted.device).expand_as(drafted)
        return cls(
            queries,
            masks.last_context(drafted),
            drafted,
            response_mask.bool().float(),
            draws.staircase_rows[:, None].expand_as(drafted),
            torch.zeros_like(queries[0]),
        )


def loss_queries(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions where a mask is set, packed to the left.

    Args:
        mask: [B, T] bool.

    Returns:
        queries [B, Q] int64 (position 0 where a row has fewer than Q) and valid [B, Q] bool; Q >= 1.
    """
    n_queries = max(1, int(mask.sum(dim=1).max()))
    order = torch.argsort(mask.int(), dim=1, descending=True, stable=True)[:, :n_queries]
    valid = mask.gather(1, order)
    return torch.where(valid, order, 0), valid


def at_queries(x: Tensor, queries: Tensor) -> Tensor:
    """X [B, T, E] at queries [B, Q] -> [B, Q, E]."""
    return x.gather(1, queries[..., None].expand(-1, -1, x.shape[-1]))
