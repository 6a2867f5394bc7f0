"""Draft rounds of a training step: which positions are drafted for, and what each of them sees.

Shapes: B batch, T tokens, Q queries, E target width.

One forward trains many rounds. The positions that are drafted for become *queries*, packed to the left; those of a
second pass over the batch come after those of the first. A row of nine tokens with a response from position 3 on, a
step bound of 4 (of offset 0, see ``masks``) and a second, teacher-forced pass of half the weight::

    pass_index    0  0  0  0    1    1    1    1    1    1
    queries       3  5  6  7    3    4    5    6    7    8      positions that are drafted for
    context       2  4  4  4    2    3    4    5    6    7      last position whose target activations each one sees
    weights       1  1  1  1  0.5  0.5  0.5  0.5  0.5  0.5      in the loss

Queries 5, 6, 7 of the first pass are one round: 6 sees target activations up to 4, and what was drafted at 5 and 6. In
the second pass each query is a round of its own. A row with fewer queries than its neighbours is filled up with
position 0, ``drafted`` false and weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..nn import masks


@dataclass(frozen=True)
class BlockDraws:
    """Which blocks of a response are trained, and what their positions weigh; see :mod:`.blocks`."""

    n_drafts: int
    """K, drafts of a block."""
    most_anchors: int | None = None
    """Most blocks of a sequence, drawn at random; None for all."""
    position_decay: float = 0.0
    """Draft k, from 0, weighs exp(-k / this) in the loss; 0 for 1 each."""
    anchors: Tensor | None = None
    """[B, N] int64, given anchors in place of drawn ones; -1 for none."""
    d_pace: float | None = None
    """Smoothing of D-PACE, by which drafts weigh what they add to the expected acceptance length (:mod:`..nn.losses`);
    None for none."""


@dataclass
class Draws:
    """The random draws of one step, per row."""

    step_bound: Tensor | None
    """[B] int64, see :func:`masks.drafted_positions`; None for no bound."""
    staircase_rows: Tensor
    """[B] bool, see :func:`masks.self_attention_mask`."""
    offset: Tensor | None = None
    """[B] int64, phase of the step bound; None for 0."""
    seeds: tuple[int, ...] = ()
    """Seeds of what a row draws for itself, one per row: noise on the target's hidden states, anchors of blocks."""
    noise_width: float = 0.0
    """The noise is uniform in plus or minus half of this."""
    on_policy_weight: float = 1.0
    """Loss weight of a position in the on-policy pass, which trains what draft rounds see; 0 leaves the pass out."""
    teacher_forced_weight: float = 0.0
    """Loss weight of a position in the teacher-forced pass, in which each one is the first draft of its own round and
    sees the target's activations up to its predecessor, whatever the step bound: what the paper calls standard
    training. 0 leaves the pass out."""
    blocks: BlockDraws | None = None
    """What blocks a block-parallel drafter is trained on; None for all, each position of a block weighing 1."""

    def passes(self, response_mask: Tensor) -> list[tuple[float, Tensor, Tensor]]:
        """List the passes over response masks [B, T] whose weight is above 0, on-policy before teacher-forced.

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
        """The weight of each position in the loss over all passes, from response masks [B, T]: [B, T] float32."""
        return torch.stack([weight * drafted for weight, drafted, _ in self.passes(response_mask)]).sum(dim=0)


@dataclass
class Rounds:
    """The draft rounds that a step trains: positions to draft for, and what each of them sees."""

    queries: Tensor
    """[B, Q] int64, positions."""
    context: Tensor
    """[B, Q] int64, last position whose target activations the query sees."""
    drafted: Tensor
    """[B, Q] bool; False is padding."""
    weights: Tensor
    """[B, Q] float32, weight in the loss."""
    staircase: Tensor
    """[B, Q] bool, see :func:`masks.self_attention_mask`."""
    pass_index: Tensor
    """[Q] int64; queries of different passes do not see each other."""

    @classmethod
    def packed(cls, draws: Draws, response_mask: Tensor) -> Rounds:
        """Pack the drafted positions of each pass over response masks [B, T] to the left."""
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


def loss_queries(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the positions where a mask [B, T] is set to the left.

    Returns:
        queries [B, Q] int64 (position 0 where a row has fewer than Q) and valid [B, Q] bool; Q >= 1.
    """
    n_queries = max(1, int(mask.sum(dim=1).max()))
    order = torch.argsort(mask.int(), dim=1, descending=True, stable=True)[:, :n_queries]
    valid = mask.gather(1, order)
    return torch.where(valid, order, 0), valid


def at_queries(x: Tensor, queries: Tensor) -> Tensor:
    """Gather x [B, T, E] at queries [B, Q]: [B, Q, E]."""
    return x.gather(1, queries[..., None].expand(-1, -1, x.shape[-1]))
