"""What a training step consists of: a mini-batch, its random draws, the draft rounds or blocks, and the loss terms.

Shapes: B batch, T tokens, Q queries, N blocks of a row, G slots of a block, K drafts of a block, S context positions,
P loss positions, L target layers, D packed KV width, E target width.

**Rounds.** The positions that are drafted for become *queries*, packed to the left; those of a second pass over the
batch come after those of the first. A row of nine tokens with a response from position 3 on, a step bound of 4 (of
offset 0, see ``masks``) and a second, teacher-forced pass of half the weight::

    pass_index    0  0  0  0    1    1    1    1    1    1
    queries       3  5  6  7    3    4    5    6    7    8      positions that are drafted for
    context       2  4  4  4    2    3    4    5    6    7      last position whose target activations each one sees
    weights       1  1  1  1  0.5  0.5  0.5  0.5  0.5  0.5      in the loss

Queries 5, 6, 7 of the first pass are one round: 6 sees target activations up to 4, and what was drafted at 5 and 6. In
the second pass each query is a round of its own. A row with fewer queries than others is filled up with position 0.

**Blocks** of a block-parallel drafter (:mod:`.block`). A block begins at an *anchor* a, a token whose predecessors are
verified, as the root of a draft round is. Its slots are the anchor and G - 1 masked tokens; they see the target up to
a - 1 and each other, in both directions. Draft k, from 0, stands at position a + k: it predicts the token at a + k + 1
and its teacher is the target's hidden state of a + k. For G = 4 and a = 5 (``+`` is seen)::

    position          0 1 2 3 4 5 6 7 8 9
    context           + + + + + . .             never the anchor's own: decoding does not know it
    slots                       a m m m
    drafts                      0 1 2 3         of the tokens at 6, 7, 8, 9
    with the first slot left out
    drafts                        0 1 2         of 6, 7, 8: in the original DFlash a slot predicts its own position

Anchors are positions whose token and whose next token are of the response. The drafts of a block carry loss as far as
the response continues, so that no block reaches into another answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import DrafterError
from ..nn import losses, masks
from ..targets.bundle import FrozenTarget


@dataclass(frozen=True)
class Reads:
    """What training reads of a store besides tokens, response masks and the last hidden state."""

    kv: bool = False  # the target's KV
    # of these layers, ascending, negative counted from the last; None for all
    kv_layers: tuple[int, ...] | None = None
    # the layer whose output enters the last N target layers, where that is read
    entering_layer: int | None = None
    # decoder layers whose outputs become ``TrainingInputs.layer_outputs``
    outputs: tuple[int, ...] = ()

    @property
    def fields(self) -> dict[str, str]:
        """Attribute of :class:`TrainingInputs` -> field of the store, without the outputs of layers."""
        found = {"kv": "kv"} if self.kv else {}
        found["hidden"] = "hidden/last"
        if self.entering_layer is not None:
            found["entering_hidden"] = f"hidden/layer_{self.entering_layer}"
        return found


@dataclass
class TrainingInputs:
    """One mini-batch of stored activations, right padded."""

    tokens: Tensor  # [B, T] int64
    response_mask: Tensor  # [B, T], non-zero on response tokens (position i predicts token i + 1)
    # [B, T, L, D], keys (after RoPE) and values of the layers that the drafter reads, if any
    kv: Tensor | None
    hidden: Tensor  # [B, T, E], target hidden state after the final norm
    # [B, T, E], enters the last N target layers; needed when N > 0
    entering_hidden: Tensor | None = None
    # [B, T, E] each, of the layers that the drafter reads, before any norm
    layer_outputs: tuple[Tensor, ...] = ()

    def required_kv(self) -> Tensor:
        """Return the KV, which a drafter cannot do without."""
        if self.kv is None:
            raise DrafterError(
                "this drafter needs the target's keys and values, which the batch lacks."
            )
        return self.kv


# What a step draws


@dataclass(frozen=True)
class BlockDraws:
    """Which blocks of a response are trained, and what their positions weigh."""

    n_drafts: int = 1  # K, drafts of a block
    max_anchors: int | None = None  # blocks of a sequence at most, drawn at random; None for all
    position_decay: float = 0.0  # draft k, from 0, weighs exp(-k / this) in the loss; 0 for 1 each
    anchors: Tensor | None = None  # [B, N] int64, given anchors in place of drawn ones; -1 for none


@dataclass
class Draws:
    """The random draws of one step, per row."""

    step_bound: Tensor | None  # [B] int64, see :func:`masks.drafted_positions`; None for no bound
    staircase_rows: Tensor  # [B] bool, see :func:`masks.self_attention_mask`
    offset: Tensor | None = None  # [B] int64, phase of the step bound; None for 0
    seeds: tuple[int, ...] = ()  # one per row, of its noise on hidden states and of its anchors
    noise_width: float = 0.0  # the noise is uniform in plus or minus half of this
    on_policy_weight: float = 1.0  # in the loss, of a pass over draft rounds; 0 leaves the pass out
    # Of a pass in which each position is the first draft of its own round, whatever the step bound:
    # what the paper
    # calls standard training.
    teacher_forced_weight: float = 0.0
    blocks: BlockDraws = BlockDraws()  # all of them, each position of a block weighing 1

    def passes(self, response_mask: Tensor) -> list[tuple[float, Tensor, Tensor]]:
        """List the passes over response masks [B, T] whose weight is above 0, on-policy before teacher-forced.

        Of each: weight, drafted positions [B, T] bool, last context position of each [B, T] int64.
        """
        found = []
        if self.on_policy_weight:
            found.append((self.on_policy_weight, *draft_rounds(response_mask, self, first=0)))
        if self.teacher_forced_weight:
            # All positions before a drafted one are verified; nothing precedes position 0.
            drafted = response_mask.bool().clone()
            drafted[:, :1] = False
            before = (torch.arange(drafted.shape[1], device=drafted.device) - 1).clamp(min=0)
            found.append((self.teacher_forced_weight, drafted, before.expand_as(drafted)))
        return found


# Rounds


@dataclass
class Rounds:
    """The draft rounds that a step trains: positions to draft for, and what each of them sees."""

    queries: Tensor  # [B, Q] int64, positions
    context: Tensor  # [B, Q] int64, last position whose target activations the query sees
    drafted: Tensor  # [B, Q] bool; False is padding
    weights: Tensor  # [B, Q] float32, weight in the loss
    staircase: Tensor  # [B, Q] bool, see :func:`masks.self_attention_mask`
    pass_index: Tensor  # [Q] int64; queries of different passes do not see each other

    @classmethod
    def packed(cls, draws: Draws, response_mask: Tensor) -> "Rounds":
        """Pack the drafted positions of each pass over response masks [B, T] to the left."""
        parts: list[tuple[Tensor, ...]] = []  # of each field
        passes = draws.passes(response_mask)
        # the host waits once
        widths = torch.stack([drafted.sum(dim=1).max() for _, drafted, _ in passes]).tolist()
        for index, (weight, drafted, context) in enumerate(passes):
            queries, valid = loss_queries(drafted, widths[index])
            # With one token to a round the drafted block would be the token itself.
            own_block = draws.staircase_rows[:, None] & (index == 0 and draws.on_policy_weight > 0)
            pass_index = torch.full_like(queries[0], index)
            seen = context.gather(1, queries)
            parts.append(
                (queries, seen, valid, weight * valid, own_block.expand_as(valid), pass_index)
            )
        return cls(*(torch.cat(part, dim=-1) for part in zip(*parts, strict=True)))

    def d_pace(self, cross_entropy: Tensor, at: tuple[Tensor, ...], smoothing: float) -> Tensor:
        """Weigh the positions [P] at ``at`` by D-PACE (:func:`..nn.losses.d_pace_weights`), each round as a block: [P].

        Those of a second, teacher-forced pass keep the weight 1.
        """
        place = torch.where(self.drafted, self.queries - self.context - 1, 0)
        index = ((place == 0) & self.drafted).cumsum(dim=1) - 1  # of the round, in its row
        cell = (at[0], index[at], place[at])
        grid = cross_entropy.new_zeros(*place.shape, int(place.max()) + 1)
        supervised = torch.zeros_like(grid, dtype=torch.bool)
        grid[cell], supervised[cell] = cross_entropy, True
        paced = losses.d_pace_weights(grid, supervised, smoothing)[cell]
        return torch.where(self.pass_index[at[1]] == 0, paced, 1.0)


def loss_queries(mask: Tensor, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Pack the positions where a mask [B, T] is set to the left: queries [B, Q] int64, valid [B, Q] bool; Q >= 1.

    ``most``: of a row, if the host knows it.
    """
    n_queries = max(1, int(mask.sum(dim=1).max()) if most is None else most)
    order = torch.argsort(mask.int(), dim=1, descending=True, stable=True)[:, :n_queries]
    valid = mask.gather(1, order)
    return torch.where(valid, order, 0), valid


def places(mask: Tensor) -> tuple[Tensor, ...]:
    """List the indices where a mask is set, [P] int64 of each dimension, row by row.

    The host waits for them once; a mask as an index makes it wait each time, and again in the backward.
    """
    return mask.nonzero(as_tuple=True)


def at_queries(x: Tensor, queries: Tensor) -> Tensor:
    """Gather x [B, T, E] at queries [B, Q]: [B, Q, E]."""
    return x.gather(1, queries[..., None].expand(-1, -1, x.shape[-1]))


def draft_rounds(response_mask: Tensor, draws: Draws, first: int = 1) -> tuple[Tensor, Tensor]:
    """Find the positions from ``first`` on that rounds draft for [B, T] bool, and the last context position of each."""
    drafted = masks.drafted_positions(response_mask, draws.step_bound, draws.offset)
    drafted[:, :first] = False
    return drafted, masks.last_context(drafted)


def round_queries(
    response_mask: Tensor, draws: Draws, first: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack the positions of :func:`draft_rounds`: queries, valid, and the last context position of each [B, Q]."""
    drafted, context = draft_rounds(response_mask, draws, first)
    queries, valid = loss_queries(drafted)
    return queries, valid, context.gather(1, queries)


# Blocks


def draw_anchors(response_mask: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Choose the anchors of each row of response masks [B, T], ascending; too many are drawn from by the row's seed.

    Returns anchors [B, N] int64, 0 where a row has fewer, and which are real, [B, N] bool; N >= 1.
    """
    blocks = draws.blocks
    if blocks.anchors is not None:
        valid = blocks.anchors >= 0
        return torch.where(valid, blocks.anchors, 0), valid
    response = response_mask.bool()
    candidates = response[:, :-1] & response[:, 1:]
    rows = []
    for row, places in enumerate(candidates.cpu().unbind()):
        found = places.nonzero()[:, 0]
        if blocks.max_anchors is not None and len(found) > blocks.max_anchors:
            generator = torch.Generator().manual_seed(draws.seeds[row] if draws.seeds else row)
            found = (
                found[torch.randperm(len(found), generator=generator)[: blocks.max_anchors]]
                .sort()
                .values
            )
        rows.append(found)
    anchors = torch.nn.utils.rnn.pad_sequence([*rows, torch.zeros(1, dtype=torch.int64)], True, -1)[
        :-1
    ]
    anchors = anchors.to(response.device)
    return anchors.clamp(min=0), anchors >= 0


def draft_positions(anchors: Tensor, n_drafts: int) -> Tensor:
    """List the positions of the drafts of blocks [B, N]: [B, N, K]."""
    return anchors[..., None] + torch.arange(n_drafts, device=anchors.device)


def draft_weights(
    response_mask: Tensor, anchors: Tensor, valid: Tensor, blocks: BlockDraws
) -> Tensor:
    """Weigh each draft of blocks in the loss, 0 from the first one on whose token is not of the response: [B, N, K]."""
    n_tokens = response_mask.shape[1]
    labels = draft_positions(anchors, blocks.n_drafts) + 1
    rows = torch.arange(len(labels), device=labels.device)[:, None, None]
    supervised = (
        response_mask.bool()[rows, labels.clamp(max=n_tokens - 1)]
        & (labels < n_tokens)
        & valid[..., None]
    )
    weights = supervised.float().cumprod(dim=-1)
    if blocks.position_decay:
        weights = weights * torch.exp(
            -torch.arange(blocks.n_drafts, device=weights.device) / blocks.position_decay
        )
    return weights


def block_mask(anchors: Tensor, valid: Tensor, n_slots: int, n_context: int) -> masks.Mask:
    """Let the slots of blocks [B, N] see the context before their anchor and, after the context, their own block."""
    # Blocks that are padding see only themselves, so that no row of the mask is empty.
    first = torch.where(valid, anchors, 0)

    def context(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < first[row, query // n_slots]

    def own_block(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query // n_slots == key // n_slots) | (row < 0)  # of the shape of all three

    n_rows, n_blocks = anchors.shape
    n_queries = n_blocks * n_slots
    return masks.Mask(
        n_rows, n_queries, ((n_context, context), (n_queries, own_block)), anchors.device
    )


# Losses


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms; the defaults are those of the papers."""

    forward_kl: float = 0.1  # MoA, Table 6, as of the feature loss
    feature: float = 1.0
    # of block-parallel drafters, as the two below: to the tokens of the text
    cross_entropy: float = 0.1
    l1: float = 0.9  # the L1 distance of drafter's and target's distributions
    confidence: float = 1.0  # the binary cross-entropy of the confidence head
    divergence: losses.Divergence = losses.KL  # in the term of the forward KL
    # smoothing of D-PACE, see :func:`..nn.losses.d_pace_weights`; None for fixed weights
    d_pace: float | None = None

    @classmethod
    def of(cls, settings: Any) -> "LossWeights":
        """Make the weights of the settings of a drafter in training."""
        names = [one.name for one in fields(cls) if hasattr(settings, f"{one.name}_weight")]
        weights = {name: getattr(settings, f"{name}_weight") for name in names}
        is_paced = getattr(settings, "position_weights", None) == "d-pace"
        pace = settings.d_pace_smoothing if is_paced else None
        return cls(
            **weights,
            divergence=losses.Divergence(settings.divergence, settings.lk_decay),
            d_pace=pace,
        )


@dataclass(frozen=True)
class TrainingStep:
    """A mini-batch, the random draws that go with it, and how its loss is weighed."""

    inputs: TrainingInputs
    draws: Draws
    weights: LossWeights = LossWeights()
    denominator: float | None = None

    def scale(self, n_positions: float | Tensor) -> float:
        """The factor of sums over loss positions; with a denominator nothing waits for their number."""
        # Without a denominator as in the released code.
        return 1.0 / (
            self.denominator if self.denominator is not None else float(n_positions) + 1e-5
        )


@dataclass
class LossTerms:
    """Scalars of one mini-batch, each a sum over loss positions divided by the denominator."""

    total: Tensor
    forward_kl: Tensor  # or the divergence that is trained in its place
    # the feature loss; None for a drafter whose features are not compared with hidden states
    feature: Tensor | None
    n_positions: int
    # before the target's last layers; None without target layer inference
    entering_feature: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # further terms by name, for logs


def distillation(
    frozen: FrozenTarget,
    features: Tensor,
    hidden: Tensor,
    scale: float,
    divergence: losses.Divergence = losses.KL,
    weights: Tensor | None = None,
    teachers: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum forward KL (or another divergence) and feature loss over P positions with weights [P], times a scale.

    ``teachers`` [P] int64 are equal where the hidden states are; their distribution is then computed once for both. At
    most two may be equal. None if all differ.
    """
    weights = features.new_ones(len(features), dtype=torch.float32) if weights is None else weights
    feature = (losses.feature_loss(features, hidden) * weights).sum() * scale
    compare = partial(
        losses.chunked_losses,
        head=frozen.lm_head_weight,
        divergence=divergence,
        cap=frozen.logit_cap,
    )
    if teachers is None:
        kl, _ = compare(features[:, None], hidden, weights=weights[:, None, None])
    else:
        pairs, has_two = _by_teacher(teachers)
        shares = weights[pairs] * F.pad(has_two[:, None], (1, 0), value=True)
        kl, _ = compare(features[pairs], hidden[pairs[:, 0]], weights=shares[..., None])
    return kl * scale, feature


def _by_teacher(teachers: Tensor) -> tuple[Tensor, Tensor]:
    """Find the one or two of P positions that have each teacher, [N, 2] int64, and which have two, [N] bool.

    A single position is given twice.
    """
    order = teachers.argsort(stable=True)
    is_equal = teachers[order[1:]] == teachers[order[:-1]]
    starts = F.pad(~is_equal, (1, 0), value=True)[: len(order)].nonzero()[:, 0]  # there may be none
    has_two = F.pad(is_equal, (0, 1))[starts]
    return torch.stack((order[starts], order[starts + has_two]), dim=1), has_two
