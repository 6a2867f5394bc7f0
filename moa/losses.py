"""Distillation losses per position; the reduction is the caller's.

Shapes: N positions, E hidden width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def forward_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Cross-entropy to the target's soft labels, the part of the forward KL that depends on the drafter.

    -sum_v softmax(target)_v * log_softmax(draft)_v at temperature 1 (paper equation of the training objective; official
    ``train/moa_spec.py``, lines 253-262). Tokens to which either side gives no probability contribute 0, so that -inf
    logits give a finite value and gradient.

    Args:
        draft_logits: [..., V].
        target_logits: [..., V].

    Returns:
        [...], in nats.
    """
    probability = target_logits.softmax(dim=-1)
    log_draft = draft_logits.log_softmax(dim=-1)
    log_draft = log_draft.masked_fill(torch.isinf(log_draft), 0.0)
    return -(probability * log_draft).sum(dim=-1)


class _ChunkedForwardKL(torch.autograd.Function):
    """Forward KL through a frozen LM head, chunk by chunk; the gradient is made on the way, so no logits are kept."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, hidden: Tensor, head: Tensor, chunk_rows: int) -> Tensor:
        value = features.new_empty(features.shape[0], dtype=torch.float32)
        grad = torch.empty_like(features)
        for rows in torch.arange(features.shape[0], device="cpu").split(chunk_rows):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            probability = F.linear(hidden[part], head).float().softmax(dim=-1)
            log_draft = F.linear(features[part], head).float().log_softmax(dim=-1)
            excluded = torch.isinf(log_draft)
            if excluded.any():
                log_draft = log_draft.masked_fill(excluded, 0.0)
                probability = probability.masked_fill(excluded, 0.0)
                draft = log_draft.exp().masked_fill(excluded, 0.0) * probability.sum(dim=-1, keepdim=True)
            else:
                draft = log_draft.exp()
            value[part] = -(probability * log_draft).sum(dim=-1)
            grad[part] = (draft - probability).to(head.dtype) @ head
        ctx.save_for_backward(grad)
        return value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0][:, None].to(grad.dtype), None, None, None


def chunked_forward_kl(features: Tensor, hidden: Tensor, head: Tensor, chunk_bytes: int = 1 << 26) -> Tensor:
    """:func:`forward_kl` of two feature streams through one frozen LM head, without [N, V] logits.

    Equal to ``forward_kl(features @ head.T, hidden @ head.T)`` in value and in the gradient of ``features``; peak
    memory does not grow with N * V. The head gets no gradient.

    Args:
        features: [N, E], the drafter's.
        hidden: [N, E], the target's, after its final norm.
        head: [V, E], frozen.
        chunk_bytes: bound on one float32 logits buffer, in bytes.

    Returns:
        [N] float32, in nats.
    """
    chunk_rows = max(1, chunk_bytes // (4 * head.shape[0]))
    if torch.is_autocast_enabled(features.device.type):
        dtype = torch.get_autocast_dtype(features.device.type)
        features, hidden, head = features.to(dtype), hidden.to(dtype), head.to(dtype)
    return _ChunkedForwardKL.apply(features, hidden.to(features.dtype), head.to(features.dtype), chunk_rows)


def forward_kl_of_heads(
    features: Tensor, own_head: Tensor, hidden: Tensor, head: Tensor, chunk_bytes: int = 1 << 26
) -> Tensor:
    """:func:`forward_kl` of a drafter with an LM head of its own, without [N, V] logits.

    Equal to ``forward_kl(features @ own_head.T, hidden @ head.T)`` in value and in the gradients of ``features`` and
    ``own_head``; the logits of a chunk are made once more for them. The target's head gets no gradient.

    Args:
        features: [N, W], the drafter's.
        own_head: [V, W], trained.
        hidden: [N, E], the target's, after its final norm.
        head: [V, E], frozen.
        chunk_bytes: bound on one float32 logits buffer, in bytes.

    Returns:
        [N] float32, in nats.
    """
    chunk_rows = max(1, chunk_bytes // (4 * head.shape[0]))

    def part_of(features: Tensor, own_head: Tensor, hidden: Tensor) -> Tensor:
        target_logits = F.linear(hidden, head.to(hidden.dtype)).float()
        return forward_kl(F.linear(features, own_head.to(features.dtype)).float(), target_logits)

    parts = zip(features.split(chunk_rows), hidden.detach().split(chunk_rows), strict=True)
    return torch.cat([checkpoint(part_of, part, own_head, goal, use_reentrant=False) for part, goal in parts])


def feature_loss(features: Tensor, hidden: Tensor) -> Tensor:
    """Smooth-L1 (beta 1) of features to the target's hidden states, mean over the width (official line 266).

    Args:
        features: [..., E].
        hidden: [..., E].

    Returns:
        [...].
    """
    return F.smooth_l1_loss(features.float(), hidden.float(), reduction="none").mean(dim=-1)
