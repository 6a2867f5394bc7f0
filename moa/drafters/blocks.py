"""Blocks of a block-parallel drafter in training: their anchors, what they see, and what their positions weigh.

Shapes: B rows, T tokens, N blocks of a row, G slots of a block, K drafts of a block, S context positions.

A block begins at an *anchor* a, a token whose predecessors are verified, as the root of a draft round is. Its slots are
the anchor and G - 1 masked tokens, at positions a to a + G - 1; they see the target up to a - 1 and each other, in both
directions. Draft k, from 0, stands at position a + k in the count of this package: it predicts the token at a + k + 1
and its teacher is the target's hidden state of a + k. For G = 4 and a = 5 (``+`` is seen)::

    position          0 1 2 3 4 5 6 7 8 9
    context           + + + + + . .             never the anchor's own: decoding does not know it
    slots                       a m m m
    drafts                      0 1 2 3         of the tokens at 6, 7, 8, 9
    with the first slot left out
    drafts                        0 1 2         of 6, 7, 8: in the original DFlash a slot predicts its own position

An anchor is drawn among the positions whose token and whose next token are of the response. The drafts of a block carry
loss as far as the response goes on, so that no block reaches into another answer.
"""

import torch
from torch import Tensor

from ..nn.masks import Mask
from .rounds import BlockDraws, Draws

ALL_BLOCKS = BlockDraws(n_drafts=1)


def draw_anchors(response_mask: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Choose the anchors of each row of response masks [B, T], ascending.

    Without more candidates than the draws allow all are taken; else as many at random, by the row's own seed alone.

    Returns:
        Anchors [B, N] int64, 0 where a row has fewer, and which are real, [B, N] bool; N >= 1.
    """
    blocks = draws.blocks or ALL_BLOCKS
    if blocks.anchors is not None:
        valid = blocks.anchors >= 0
        return torch.where(valid, blocks.anchors, 0), valid
    response = response_mask.bool()
    candidates = response[:, :-1] & response[:, 1:]
    rows = []
    for row, places in enumerate(candidates.cpu().unbind()):
        found = places.nonzero()[:, 0]
        if blocks.most_anchors is not None and len(found) > blocks.most_anchors:
            generator = torch.Generator().manual_seed(draws.seeds[row] if draws.seeds else row)
            found = found[torch.randperm(len(found), generator=generator)[: blocks.most_anchors]].sort().values
        rows.append(found)
    anchors = torch.nn.utils.rnn.pad_sequence([*rows, torch.zeros(1, dtype=torch.int64)], True, -1)[:-1]
    anchors = anchors.to(response.device)
    return anchors.clamp(min=0), anchors >= 0


def draft_positions(anchors: Tensor, n_drafts: int) -> Tensor:
    """List the positions of the drafts of blocks [B, N]: [B, N, K]."""
    return anchors[..., None] + torch.arange(n_drafts, device=anchors.device)


def draft_weights(response_mask: Tensor, anchors: Tensor, valid: Tensor, blocks: BlockDraws) -> Tensor:
    """Weigh each draft of blocks in the loss, 0 from the first one on whose token is not of the response.

    Args:
        response_mask: [B, T].
        anchors: [B, N].
        valid: [B, N] bool.

    Returns:
        [B, N, K] float32.
    """
    n_tokens = response_mask.shape[1]
    labels = draft_positions(anchors, blocks.n_drafts) + 1
    rows = torch.arange(len(labels), device=labels.device)[:, None, None]
    supervised = response_mask.bool()[rows, labels.clamp(max=n_tokens - 1)] & (labels < n_tokens) & valid[..., None]
    weights = supervised.float().cumprod(dim=-1)
    if blocks.position_decay:
        weights = weights * torch.exp(-torch.arange(blocks.n_drafts, device=weights.device) / blocks.position_decay)
    return weights


def position_weights(response_mask: Tensor, draws: Draws) -> Tensor:
    """Add up the weights of all drafts at each position of response masks [B, T]: [B, T] float32."""
    anchors, valid = draw_anchors(response_mask, draws)
    blocks = draws.blocks or ALL_BLOCKS
    weights = draft_weights(response_mask, anchors, valid, blocks)
    places = draft_positions(anchors, blocks.n_drafts).clamp(max=response_mask.shape[1] - 1)
    found = torch.zeros(response_mask.shape, device=weights.device)
    return found.scatter_add_(1, places.flatten(1), weights.flatten(1))


def block_mask(anchors: Tensor, valid: Tensor, n_slots: int, n_context: int) -> Mask:
    """Let the slots of each block see the context before its anchor and, behind the context, their own block.

    Blocks that are padding see themselves alone, so that no row of the mask is empty.

    Args:
        anchors: [B, N].
        valid: [B, N] bool.
        n_slots: G.
        n_context: S.
    """
    first = torch.where(valid, anchors, 0)

    def context(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < first[row, query // n_slots]

    def own_block(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query // n_slots == key // n_slots) | (row < 0)  # of the shape of all three

    n_rows, n_blocks = anchors.shape
    n_queries = n_blocks * n_slots
    return Mask(n_rows, n_queries, ((n_context, context), (n_queries, own_block)), anchors.device)


def expected_lengths(accepted: Tensor, supervised: Tensor) -> Tensor:
    """Compute the acceptance length that sampling expects of each block with a supervised draft, bonus included.

    Args:
        accepted: [B, N, K], the probability that each draft is accepted after those before it.
        supervised: [B, N, K] bool; a block ends before the first draft that is not.

    Returns:
        [n_blocks].
    """
    reached = (accepted.clamp(0, 1) * supervised).cumprod(dim=-1)
    return 1 + reached.sum(dim=-1)[supervised.any(dim=-1)]
