"""The parts of a training step: mini-batch, random draws, draft rounds or blocks, and losses.

Shapes: B batch, T tokens, Q queries, N blocks of a row, G slots of a block, K drafts of a block,
S context positions, P loss positions, L target layers, D width of packed KV, E target width.

**Rounds.** During training, the positions of a sequence simulate draft rounds. The positions at
which a draft is computed are called *queries*. In each row, the queries are packed to the left. A
training step can make two passes over the batch: the first pass is on-policy, the second pass is
teacher-forced. The queries of the second pass follow the queries of the first pass. In the example,
a row of nine tokens has a response that starts at position 3. The step bound (the length of a
round) is 4, the offset is 0 (see ``masks``), and the second pass has half the weight::

    pass_index    0  0  0  0    1    1    1    1    1    1
    queries       3  5  6  7    3    4    5    6    7    8      drafted positions
    context       2  4  4  4    2    3    4    5    6    7      last visible target activation
    weights       1  1  1  1  0.5  0.5  0.5  0.5  0.5  0.5      weight in the loss

In the first pass, positions 4 and 8 are not queries, because every fourth position counts as
verified. Query 3 is a round of its own. The last verified position before it is 2, the end of the
prompt. Queries 5, 6 and 7 are one round. For example, query 6 sees target activations up to
position 4, and the drafts at positions 5 and 6. In the second pass, each query is a round of its
own. A row with fewer queries than another row is padded with position 0.

**Blocks** are used by block-parallel drafters (:mod:`.block`). A block starts at a position a, its
*anchor*. Like the root of a draft round, the anchor is a known token that the target has not
processed yet. The slots of a block are the anchor and G - 1 mask tokens. Each slot sees the
target's activations up to position a - 1, and all slots of the block. Draft k, counted from 0, is
at position a + k. It predicts the token at a + k + 1, and learns from the target's hidden state at
a + k. Example for G = 4 and a = 5 (``+`` marks visible positions)::

    position          0 1 2 3 4 5 6 7 8 9
    context           + + + + + . .             the target has not processed the anchor yet
    slots                       a m m m
    drafts                      0 1 2 3         predict the tokens at 6, 7, 8, 9
    without the first slot (original DFlash, whose slots predict the token at their own position)
    drafts                        0 1 2         predict the tokens at 6, 7, 8

A position can be an anchor if its token and the next token belong to the response. The drafts of a
block contribute to the loss only until the response ends, so no block learns from another response.
"""

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
    """What training reads from a store, besides tokens, response masks and last hidden states."""

    # True if the target's KV is read.
    kv: bool = False
    # Ascending indices of the layers whose KV is read. Negative numbers count from the last layer.
    # If None, the KV of all layers is read.
    kv_layers: tuple[int, ...] | None = None
    # The layer before the last N target layers. Its output is read, because it is the input of
    # these layers. If None, no such output is read.
    entering_layer: int | None = None
    # Decoder layers whose outputs are read into ``TrainingInputs.layer_outputs``.
    outputs: tuple[int, ...] = ()

    @property
    def fields(self) -> dict[str, str]:
        """Map attributes of :class:`TrainingInputs` to the store fields from which they are read.

        Layer outputs are not included.
        """
        store_fields = {"kv": "kv"} if self.kv else {}
        store_fields["hidden"] = "hidden/last"
        if self.entering_layer is not None:
            store_fields["entering_hidden"] = f"hidden/layer_{self.entering_layer}"
        return store_fields


@dataclass
class TrainingInputs:
    """One mini-batch of stored activations, right padded."""

    # [B, T] int64, token ids.
    tokens: Tensor
    # [B, T], non-zero for tokens of responses. Position i predicts token i + 1.
    response_mask: Tensor
    # [B, T, L, D], keys (after RoPE) and values of the layers that the drafter reads. None if the
    # drafter reads no KV.
    kv: Tensor | None
    # [B, T, E], the target's hidden states after its final norm.
    hidden: Tensor
    # [B, T, E], the input of the target's last N layers. It is required if the drafter runs its
    # features through these layers, that is, if N is above 0.
    entering_hidden: Tensor | None = None
    # One tensor [B, T, E] for each layer whose output the drafter reads. No norm has been applied.
    layer_outputs: tuple[Tensor, ...] = ()

    def required_kv(self) -> Tensor:
        """Return the KV; raise DrafterError if the batch has no KV."""
        if self.kv is None:
            raise DrafterError(
                "this drafter reads the target's keys and values, but the batch has none. Set `kv` "
                "of the batch."
            )
        return self.kv


# Random draws of a step


@dataclass
class BlockDraws:
    """Settings that choose the draft blocks to train, and the loss weights of their drafts."""

    # K, number of drafts of a block.
    n_drafts: int = 1
    # Maximum number of blocks per sequence. If a sequence has more possible blocks, this number of
    # blocks is sampled. If None, all possible blocks are trained.
    max_anchors: int | None = None
    # Draft k, counted from 0, has the loss weight ``exp(-k / position_decay)``. If
    # ``position_decay`` is 0, all drafts have the weight 1.
    position_decay: float = 0.0
    # [B, N] int64, fixed positions of anchors; -1 is padding. If None, :func:`draw_anchors` chooses
    # the anchors.
    anchors: Tensor | None = None


@dataclass
class Draws:
    """What a training step chooses at random for each row of its batch, and settings of the step.

    Tensors and ``seeds`` have one entry per row.
    """

    # [B] int64, the step bound e of each row: every e-th position counts as verified and is not
    # drafted. This limits the length of draft rounds. If None, all positions of responses are
    # drafted.
    step_bound: Tensor | None
    # [B] bool, true for staircase rows. In these rows, the self-attention of a drafted position
    # sees only tokens of its own round.
    staircase_rows: Tensor
    # [B] int64, the offset o of each row. With the step bound e, the positions o, o + e, o + 2 e
    # and so on count as verified. If None, all offsets are 0.
    offset: Tensor | None = None
    # One seed per row, for noise in hidden states and for sampled blocks.
    seeds: tuple[int, ...] = ()
    # The noise is uniform between -noise_width / 2 and noise_width / 2.
    noise_width: float = 0.0
    # Loss weight of the on-policy pass, which trains draft rounds. 0 skips the pass.
    on_policy_weight: float = 1.0
    # Loss weight of the teacher-forced pass. In this pass, each position of a response is the first
    # draft of its own round, and the step bound has no effect. The Mixture of Attentions paper
    # calls this standard training. 0 skips the pass.
    teacher_forced_weight: float = 0.0
    # Settings of block-parallel drafters. By default all draft blocks are trained, and each draft
    # of a block has weight 1.
    blocks: BlockDraws = field(default_factory=BlockDraws)

    def passes(self, response_mask: Tensor) -> list[tuple[float, Tensor, Tensor]]:
        """List the passes of this step, the on-policy pass first. Skip passes with weight 0.

        ``response_mask`` is [B, T]. The entry of a pass has three values: its weight; [B, T] bool,
        true for drafted positions; and [B, T] int64, the last verified position that each position
        sees.
        """
        passes = []
        if self.on_policy_weight:
            passes.append((self.on_policy_weight, *draft_rounds(response_mask, self, first=0)))
        if self.teacher_forced_weight:
            # All positions before a drafted position are verified. Position 0 is not drafted,
            # because no position precedes it.
            drafted = response_mask.bool().clone()
            drafted[:, :1] = False
            before = (masks.positions_of(drafted) - 1).clamp(min=0)
            passes.append((self.teacher_forced_weight, drafted, before.expand_as(drafted)))
        return passes


# Rounds


@dataclass
class Rounds:
    """The draft rounds of a training step.

    The drafted positions are called queries. The fields say what each query sees, and which weight
    the query has in the loss.
    """

    queries: Tensor  # [B, Q] int64, the position of each query.
    context: Tensor  # [B, Q] int64, the last position whose target activations a query sees.
    drafted: Tensor  # [B, Q] bool; False is padding.
    # [B, Q] float32, weight of each query in the loss.
    weights: Tensor
    # [B, Q] bool, true if self-attention sees only tokens of the query's own round. This is the
    # case in the on-policy pass of staircase rows.
    staircase: Tensor
    # [Q] int64, the index of the pass to which each query belongs. Queries of different passes do
    # not see each other.
    pass_index: Tensor

    @classmethod
    def packed(cls, draws: Draws, response_mask: Tensor) -> "Rounds":
        """List the drafted positions of all passes, packed to the left.

        ``response_mask`` is [B, T].
        """
        # One tuple per pass. A tuple has one tensor for each field of :class:`Rounds`.
        parts: list[tuple[Tensor, ...]] = []
        passes = draws.passes(response_mask)
        # For each pass, the largest number of drafted positions in a row. Copy these numbers from
        # the device together, so that the host synchronizes with it only once.
        widths = torch.stack([drafted.sum(dim=1).max() for _, drafted, _ in passes]).tolist()
        for index, (weight, drafted, context) in enumerate(passes):
            queries, valid = loss_queries(drafted, widths[index])
            # Only the on-policy pass has staircase rows. In the teacher-forced pass, a round has a
            # single token, so a query of a staircase row would see only itself.
            own_block = draws.staircase_rows[:, None] & (index == 0 and draws.on_policy_weight > 0)
            pass_index = torch.full_like(queries[0], index)
            seen = context.gather(1, queries)
            parts.append(
                (queries, seen, valid, weight * valid, own_block.expand_as(valid), pass_index)
            )
        # One tensor for each field of :class:`Rounds`. The queries of the first pass come first,
        # followed by the queries of the second pass.
        columns: list[Tensor] = []
        for of_passes in zip(*parts, strict=True):
            columns.append(torch.cat(of_passes, dim=-1))
        return cls(*columns)

    def d_pace(self, cross_entropy: Tensor, at: tuple[Tensor, ...], smoothing: float) -> Tensor:
        """Compute D-PACE weights [P] of the P queries at the indices ``at``.

        D-PACE gives a weight to each draft of a block; see :func:`.losses.d_pace_weights`. Here a
        block is a draft round of the on-policy pass. Queries of the teacher-forced pass have the
        weight 1.
        """
        depth = torch.where(self.drafted, self.queries - self.context - 1, 0)
        # [B, Q]. Rounds are counted from 0 in each row. For each query, this is the number of its
        # round.
        index = ((depth == 0) & self.drafted).cumsum(dim=1) - 1
        cell = (at[0], index[at], depth[at])
        shape = (*depth.shape, int(depth.max()) + 1)
        paced = losses.d_pace_at(cell, shape, cross_entropy, True, smoothing)
        return torch.where(self.pass_index[at[1]] == 0, paced, 1.0)


def loss_queries(mask: Tensor, most: int | None = None) -> tuple[Tensor, Tensor]:
    """List the positions at which a mask [B, T] is true, packed to the left.

    Args:
        mask: [B, T] bool.
        most: the largest number of true positions in a row of the mask. If it is None, the function
            computes it, which synchronizes with the device.

    Returns:
        Queries [B, Q] int64, and valid [B, Q] bool. ``valid`` is false for padding. Q is at least
        1.
    """
    n_queries = max(1, int(mask.sum(dim=1).max()) if most is None else most)
    order = torch.argsort(mask.int(), dim=1, descending=True, stable=True)[:, :n_queries]
    valid = mask.gather(1, order)
    return torch.where(valid, order, 0), valid


def true_indices(mask: Tensor) -> tuple[Tensor, ...]:
    """Return the indices at which a mask is true, in row-major order: [P] int64 for each dimension.

    Index tensors with these indices instead of the mask. Computing the indices synchronizes with
    the device once. Indexing with the mask would synchronize at every use, and again in the
    backward pass.
    """
    return mask.nonzero(as_tuple=True)


def at_queries(x: Tensor, queries: Tensor) -> Tensor:
    """Gather the values [B, Q, E] of x [B, T, E] at the positions ``queries`` [B, Q]."""
    return x.gather(1, queries[..., None].expand(-1, -1, x.shape[-1]))


def draft_rounds(response_mask: Tensor, draws: Draws, first: int = 1) -> tuple[Tensor, Tensor]:
    """Find the drafted positions, and the last context position that each position sees.

    A draft round sees the target's activations up to its last context position. Positions before
    ``first`` are not drafted.

    Returns:
        [B, T] bool, true for drafted positions; and [B, T] int64, the last context position at or
        before each position.
    """
    drafted = masks.drafted_positions(response_mask, draws.step_bound, draws.offset)
    drafted[:, :first] = False
    return drafted, masks.last_context(drafted)


def round_queries(
    response_mask: Tensor, draws: Draws, first: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """List the drafted positions from ``first`` on, packed to the left.

    Returns:
        Three tensors [B, Q]: the positions; bools that are false for padding; and for each position
        the last position whose target activations it sees.
    """
    drafted, context = draft_rounds(response_mask, draws, first)
    queries, valid = loss_queries(drafted)
    return queries, valid, context.gather(1, queries)


# Blocks


def draw_anchors(response_mask: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Choose the positions in responses at which draft blocks start (anchors), ascending.

    ``response_mask`` is [B, T]. A row has at most ``draws.blocks.max_anchors`` anchors. If a row
    has more possible anchors, its anchors are sampled with the row's seed.

    Returns:
        Anchors [B, N] int64, padded with 0, and valid [B, N] bool, with N >= 1.
    """
    blocks = draws.blocks
    if blocks.anchors is not None:
        valid = blocks.anchors >= 0
        return torch.where(valid, blocks.anchors, 0), valid
    response = response_mask.bool().cpu()
    # [B, T] bool. A position can be an anchor if it and the next position are in a response.
    trained = F.pad(response[:, :-1] & response[:, 1:], (0, 1))
    if blocks.max_anchors is not None:
        for row, anchors in enumerate(trained):
            candidates = anchors.nonzero()[:, 0]
            generator = torch.Generator().manual_seed(draws.seeds[row] if draws.seeds else row)
            order = torch.randperm(len(candidates), generator=generator)
            anchors[candidates[order[blocks.max_anchors :]]] = False
    queries, valid = loss_queries(trained)
    return queries.to(response_mask.device), valid.to(response_mask.device)


def draft_positions(anchors: Tensor, n_drafts: int) -> Tensor:
    """List the positions of the K drafts of blocks with anchors [B, N]: [B, N, K]."""
    return anchors[..., None] + torch.arange(n_drafts, device=anchors.device)


def draft_weights(
    response_mask: Tensor, anchors: Tensor, valid: Tensor, blocks: BlockDraws
) -> Tensor:
    """Compute the loss weights [B, N, K] of the drafts of blocks.

    A draft has the weight 0 if its token, or the token of an earlier draft of the block, is not in
    the response.
    """
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
    """Build the attention mask of blocks with anchors [B, N].

    A slot sees the context positions before its anchor, and all slots of its own block. The keys of
    the context come first, followed by the keys of all slots.
    """
    # [B, N * G], the anchor of each slot, or 0 for blocks that are padding. The slots of these
    # blocks see no context, but they see their own block. So each query sees at least one key.
    first = torch.where(valid, anchors, 0).repeat_interleave(n_slots, dim=1)

    def context(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < first[row, query]

    def own_block(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # ``row < 0`` is always false. Its only purpose is to broadcast the result to the common
        # shape of all three indices.
        return (query // n_slots == key // n_slots) | (row < 0)

    return masks.Mask(first, ((n_context, context), (first.shape[1], own_block)))


# Losses


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms. The defaults come from the papers of the drafters."""

    # The weights of the forward KL and of the feature loss are from table 6 of the Mixture of
    # Attentions paper.
    forward_kl: float = 0.1
    feature: float = 1.0
    # Weight of the cross-entropy to the actual next tokens. This term, the L1 term and the
    # confidence term are used by block-parallel drafters only.
    cross_entropy: float = 0.1
    l1: float = 0.9  # Weight of the L1 distance between the distributions of drafter and target.
    confidence: float = 1.0  # Weight of the confidence head's binary cross-entropy.
    # The divergence that the forward KL term computes.
    divergence: losses.Divergence = losses.KL
    # Smoothing s of D-PACE. D-PACE computes the weight of a draft from the probabilities of the
    # drafts of its block. Each probability q is first replaced by (1 - s) q + s. If None, D-PACE is
    # not used, and the weights of drafts are fixed.
    d_pace: float | None = None

    @classmethod
    def of(cls, settings: Any) -> "LossWeights":
        """Read the loss weights from a drafter's training settings."""
        weights: dict[str, Any] = {}
        for item in fields(cls):
            setting = f"{item.name}_weight"
            if hasattr(settings, setting):
                weights[item.name] = getattr(settings, setting)
        is_paced = getattr(settings, "position_weights", None) == "d-pace"
        pace = settings.d_pace_smoothing if is_paced else None
        return cls(
            **weights,
            divergence=losses.Divergence(settings.divergence, settings.lk_decay),
            d_pace=pace,
        )


@dataclass(frozen=True)
class TrainingStep:
    """A mini-batch, its random draws, and its loss weights."""

    inputs: TrainingInputs
    draws: Draws
    weights: LossWeights = LossWeights()
    denominator: float | None = None

    def scale(self, n_positions: float | Tensor) -> float:
        """Return the factor by which sums over loss positions are multiplied.

        The factor is 1 divided by the ``denominator``. Without a denominator, the factor is 1
        divided by ``n_positions``. If ``n_positions`` is a tensor, the function synchronizes with
        the device.
        """
        # Add 1e-5 to the number of positions, as the MoA authors' code does.
        return 1.0 / (
            self.denominator if self.denominator is not None else float(n_positions) + 1e-5
        )


LossTerms = dict[str, Tensor]
"""Scalar losses of one mini-batch by name. ``loss`` is minimized, and all losses are logged.

Each loss is a sum over loss positions, divided by the denominator of the step. ``forward_kl`` is
the forward KL, or another divergence if the settings select it.
"""


def distillation(
    frozen: FrozenTarget,
    features: Tensor,
    hidden: Tensor,
    scale: float,
    divergence: losses.Divergence = losses.KL,
    weights: Tensor | None = None,
    teachers: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum the forward KL (or another divergence) and the feature loss over P positions.

    Args:
        frozen: the target.
        features: [P, E], features of the drafter.
        hidden: [P, E], the target's hidden states.
        scale: factor by which both sums are multiplied.
        divergence: the divergence to compute.
        weights: [P], weights of the positions; None if all weights are 1.
        teachers: [P] int64, an id of the hidden state of each position. At most two positions may
            have the same id. Such positions have equal hidden states, so the target's distribution
            is computed only once for both. If None, all ids are different.
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
    """Group P positions by the id of their hidden state. Each of the N ids has 1 or 2 positions.

    Returns:
        [N, 2] int64, the indices of the two positions of each id; and [N] bool, true for ids with
        two positions. If an id has only one position, the index of this position is repeated.
    """
    order = teachers.argsort(stable=True)
    is_equal = teachers[order[1:]] == teachers[order[:-1]]
    # ``is_equal`` compares each position with the previous one, so it lacks an entry for the first
    # position. Padding adds this entry. If there are no positions at all, cut the added entry off.
    starts = F.pad(~is_equal, (1, 0), value=True)[: len(order)].nonzero()[:, 0]
    has_two = F.pad(is_equal, (0, 1))[starts]
    return torch.stack((order[starts], order[starts + has_two]), dim=1), has_two
