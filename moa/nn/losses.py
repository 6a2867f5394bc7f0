"""Distillation losses per position; the reduction is the caller's.

Shapes: N positions, J draft steps, E hidden width, V vocabulary, V_d draft vocabulary.

The loss goes through an LM head, the largest matrix of a model: 1 GB for 128,256 tokens of width 4,096 in bfloat16. So
positions are processed in chunks whose logits are bounded in bytes, but in at most ``MAX_CHUNKS`` of them, since each
reads the head once. A frozen head stays in its own dtype; where features are wider, blocks of it are cast.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def forward_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Compute the cross-entropy to the target's soft labels, the part of the forward KL that depends on the drafter.

    -sum_v softmax(target)_v * log_softmax(draft)_v at temperature 1 (official ``train/moa_spec.py``, lines 253-262).
    Tokens of probability 0 on either side contribute 0, so that -inf logits give a finite value and gradient.
    Logits [..., V] -> [...], in nats.
    """
    probability = target_logits.softmax(dim=-1)
    log_draft = draft_logits.log_softmax(dim=-1)
    log_draft = log_draft.masked_fill(torch.isinf(log_draft), 0.0)
    return -(probability * log_draft).sum(dim=-1)


DIVERGENCES = ("kl", "lk", "lk-hybrid")


@dataclass(frozen=True)
class Divergence:
    """The distance of a draft's distribution q from the target's p: the forward KL, or an LK loss (arXiv 2602.23881).

    With a = sum_v min(p_v, q_v), the probability that sampling accepts a draft::

        kl           the forward KL
        lk           -log a
        lk-hybrid    s * KL + (1 - s) * (1 - a), where s = exp(-decay * a) has no gradient

    The further a draft is from being accepted, the more the hybrid is the KL. Each position has its own s, where the
    paper takes one of the batch's mean a: so a batch may be split into micro-batches and among devices.
    """

    kind: str = "kl"
    decay: float = 3.0

    def of(self, kl: Tensor, l1: Tensor, mass: Tensor | float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the divergence from the forward KL and the L1 distance, each [...].

        Args:
            mass: probability of the target's tokens that are compared, [...]; 1 for all tokens.

        Returns:
            The divergence, and the factors of the gradients of KL and L1 in its own, each [...].
        """
        if self.kind == "kl":
            return kl, torch.ones_like(kl), torch.zeros_like(kl)
        accepted = (0.5 * (1 + mass - l1)).clamp(min=_LEAST_ACCEPTED)
        if self.kind == "lk":
            return -accepted.log(), torch.zeros_like(kl), 0.5 / accepted
        share = torch.exp(-self.decay * accepted)
        return share * kl + (1 - share) * (1 - accepted), share, 0.5 * (1 - share)


KL = Divergence()
_LEAST_ACCEPTED = 1e-6
"""Lower bound of the probability of acceptance, so that its logarithm and gradient stay finite."""

LOGITS_BYTES = 1 << 26
"""Bytes of float32 logits of one chunk, unless that made more than ``MAX_CHUNKS`` chunks."""
MAX_CHUNKS = 8
"""How often the loss of one forward reads an LM head at most."""
_CAST_BYTES = 1 << 28
"""Bytes of an LM head that are cast, or of its gradient that are made, at once."""


def chunk_rows(n_rows: int, n_logits: int, chunk_bytes: int | None = None) -> int:
    """Choose the positions of a chunk, of ``n_rows`` positions that have ``n_logits`` float32 logits each."""
    chunk_bytes = LOGITS_BYTES if chunk_bytes is None else chunk_bytes
    return max(1, chunk_bytes // (4 * n_logits), -(-n_rows // MAX_CHUNKS))


def _blocks(head: Tensor) -> Iterator[slice]:
    """Cut the vocabulary of a head [V, E] into slices whose cast or gradient takes at most ``_CAST_BYTES``."""
    n_tokens = max(1, _CAST_BYTES // (4 * head.shape[1]))
    return (slice(start, start + n_tokens) for start in range(0, head.shape[0], n_tokens))


def logits_of(x: Tensor, head: Tensor) -> Tensor:
    """Apply a head [V, E] to x [..., E], in the dtype of x: [..., V]."""
    if x.dtype == head.dtype or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, head)
    logits = x.new_empty(*x.shape[:-1], head.shape[0])
    for block in _blocks(head):
        logits[..., block] = F.linear(x, head[block].to(x.dtype))
    return logits


def _autocast(features: Tensor, frozen_head: Tensor) -> tuple[torch.dtype, Tensor]:
    """The dtype to compute in, and a frozen head: cast to it under autocast, else as it is stored."""
    if not torch.is_autocast_enabled(features.device.type):
        return features.dtype, frozen_head
    dtype = torch.get_autocast_dtype(features.device.type)
    return dtype, frozen_head.to(dtype)


def _through_head(error: Tensor, head: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring a gradient of logits [..., V] back to features [..., E], in their dtype."""
    if dtype == head.dtype:
        return error.to(dtype) @ head
    parts = (error[..., block].to(dtype) @ head[block].to(dtype) for block in _blocks(head))
    total = next(parts)
    for part in parts:
        total += part
    return total


class _ChunkedForwardKL(torch.autograd.Function):
    """Forward KL through a frozen LM head, chunk by chunk; forward computes the gradient too and keeps no logits."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, hidden: Tensor, head: Tensor, divergence: Divergence, chunk_bytes: int | None
    ) -> Tensor:
        value = features.new_empty(features.shape[0], dtype=torch.float32)
        grad = torch.empty_like(features)
        n_rows = chunk_rows(features.shape[0], head.shape[0], chunk_bytes)
        for first in range(0, features.shape[0], n_rows):
            part = slice(first, first + n_rows)
            probability = logits_of(hidden[part], head).float().softmax(dim=-1)
            log_draft = logits_of(features[part], head).float().log_softmax(dim=-1)
            draft = log_draft.exp()
            l1, of_l1 = _l1_and_gradient(draft, probability, divergence)
            if features.dtype == torch.float16:
                # The one dtype whose products overflow to -inf. Looking for -inf first would make the host wait.
                excluded = torch.isinf(log_draft)
                log_draft.masked_fill_(excluded, 0.0)
                draft = draft * probability.masked_fill_(excluded, 0.0).sum(dim=-1, keepdim=True)
            kl = -(probability * log_draft).sum(dim=-1)
            value[part], of_kl, of_distance = divergence.of(kl, l1)
            error = draft.sub_(probability)
            if of_l1 is not None:
                error = error.mul_(of_kl[:, None]).addcmul_(of_l1, of_distance[:, None])
            grad[part] = _through_head(error, head, features.dtype)
        ctx.save_for_backward(grad)
        return value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0][:, None].to(grad.dtype), None, None, None, None


def _l1_and_gradient(draft: Tensor, probability: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor | None]:
    """Compute the L1 distance [...] of distributions [..., V], and its gradient in the draft's logits; none for KL."""
    if divergence.kind == "kl":
        return draft.new_zeros(draft.shape[:-1]), None
    difference = draft - probability
    l1, sign = difference.abs().sum(dim=-1), difference.sign_()
    # d|p - q| through the softmax: p (sign - its mean under p).
    return l1, draft * (sign - (sign * draft).sum(dim=-1, keepdim=True))


def chunked_forward_kl(
    features: Tensor, hidden: Tensor, head: Tensor, chunk_bytes: int | None = None, divergence: Divergence = KL
) -> Tensor:
    """Compute a divergence of two feature streams through one frozen LM head, without [N, V] logits.

    Equal to ``forward_kl(features @ head.T, hidden @ head.T)`` for the KL, in value and in the gradient of
    ``features``; peak memory does not grow with N * V. The head gets no gradient.

    Args:
        features: [N, E], the drafter's.
        hidden: [N, E], the target's, after its final norm.
        head: [V, E], frozen, in any dtype.
        chunk_bytes: bound on one float32 logits buffer; None for ``LOGITS_BYTES``.

    Returns:
        [N] float32, in nats.
    """
    dtype, head = _autocast(features, head)
    losses: Tensor = _ChunkedForwardKL.apply(  # type: ignore[no-untyped-call]  # torch's apply has no types
        features.to(dtype), hidden.to(dtype), head, divergence, chunk_bytes
    )
    return losses


class _ChunkedHeadKL(torch.autograd.Function):
    """Weighted sum of forward KLs through a trained LM head; forward computes both gradients too, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        hidden: Tensor,
        head: Tensor,
        target_head: Tensor,
        weights: Tensor,
        tokens: Tensor | None,
        divergence: Divergence,
        chunk_bytes: int | None,
    ) -> tuple[Tensor, Tensor]:
        total = features.new_zeros((), dtype=torch.float32)
        by_step = features.new_zeros(features.shape[1], dtype=torch.float32)
        grad_features = torch.empty_like(features)
        grad_head = torch.zeros_like(head, dtype=torch.float32)
        n_logits = features.shape[1] * head.shape[0] + target_head.shape[0]
        n_rows = chunk_rows(features.shape[0], n_logits, chunk_bytes)
        for first in range(0, features.shape[0], n_rows):
            part = slice(first, first + n_rows)
            probability = logits_of(hidden[part], target_head).float().softmax(dim=-1)[:, None]  # [n, 1, V]
            if tokens is not None:
                probability = probability[..., tokens]
            log_draft = F.linear(features[part], head).float().log_softmax(dim=-1)  # [n, J, V_d]
            kl = -(log_draft @ probability.mT).squeeze(-1)  # [n, J], without a third buffer of their size
            mass = probability.sum(dim=-1, keepdim=True)
            draft = log_draft.exp_()
            l1, of_l1 = _l1_and_gradient(draft, probability, divergence)
            value, of_kl, of_distance = divergence.of(kl, l1, mass[..., 0])
            total += (value * weights[part]).sum()
            by_step += (value * (weights[part] > 0)).sum(dim=0)
            error = draft.mul_(mass).sub_(probability)
            if of_l1 is not None:
                error.mul_(of_kl[..., None]).addcmul_(of_l1, of_distance[..., None])
            error = error.mul_(weights[part, :, None]).to(head.dtype)
            grad_features[part] = error @ head
            for block in _blocks(head):
                grad_head[block] += (error[..., block].flatten(0, 1).T @ features[part].flatten(0, 1)).float()
        ctx.save_for_backward(grad_features)
        ctx.grad_head = grad_head
        ctx.mark_non_differentiable(by_step)
        return total, by_step

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_features,) = ctx.saved_tensors
        scale = grad_outputs[0].to(grad_features.dtype)
        # As large as the head, so it is scaled in place and not kept.
        grad_head, ctx.grad_head = ctx.grad_head.to(grad_features.dtype), None
        return grad_features * scale, None, grad_head.mul_(scale), None, None, None, None, None


def chunked_head_kl(
    features: Tensor,
    hidden: Tensor,
    head: Tensor,
    target_head: Tensor,
    weights: Tensor,
    tokens: Tensor | None = None,
    chunk_bytes: int | None = None,
    divergence: Divergence = KL,
) -> tuple[Tensor, Tensor]:
    """Compute a divergence of several draft steps at each position, through an LM head that is trained too.

    Equal to ``sum(weights * forward_kl(features @ head.T, hidden @ target_head.T))`` for the KL, in value and in the
    gradients of features and head. Tokens outside the draft vocabulary contribute 0.

    Args:
        features: [N, J, E], the drafter's of J draft steps at each position.
        hidden: [N, E], the target's, after its final norm.
        head: [V_d, E], trained; its gradient can be asked for once.
        target_head: [V, E], frozen, in any dtype.
        weights: [N, J], weights of the sum, at least 0.
        tokens: [V_d] int64, the draft vocabulary; None for all tokens.
        chunk_bytes: as for :func:`chunked_forward_kl`.

    Returns:
        The weighted sum, a float32 scalar in nats, and without a gradient [J] float32, each step's unweighted sum over
        the positions whose weight is above 0.
    """
    dtype, target_head = _autocast(features, target_head)
    features, hidden, head = features.to(dtype), hidden.to(dtype), head.to(dtype)
    loss, by_step = _ChunkedHeadKL.apply(  # type: ignore[no-untyped-call]  # torch's apply has no types
        features, hidden, head, target_head, weights, tokens, divergence, chunk_bytes
    )
    return loss, by_step


def feature_loss(features: Tensor, hidden: Tensor) -> Tensor:
    """Compute smooth-L1 (beta 1) to hidden states, averaged over the width: [..., E] -> [...] (official line 266)."""
    return F.smooth_l1_loss(features.float(), hidden.float(), reduction="none").mean(dim=-1)


class _ChunkedTokenLosses(torch.autograd.Function):
    """Weighted sum of the terms of :func:`chunked_token_losses`; forward computes the gradients too, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        code: Tensor | None,
        hidden: Tensor,
        labels: Tensor,
        head: Tensor,
        correction: Tensor | None,
        weights: Tensor,
        divergence: Divergence,
        chunk_bytes: int | None,
    ) -> tuple[Tensor, Tensor]:
        total = features.new_zeros((), dtype=torch.float32)
        terms = features.new_empty(len(features), 3, dtype=torch.float32)
        grad_features = torch.empty_like(features)
        grad_code = None if code is None else torch.empty_like(code)
        grad_correction = None if correction is None else torch.zeros_like(correction, dtype=torch.float32)
        n_rows = chunk_rows(len(features), 2 * head.shape[0], chunk_bytes)  # more buffers are held than of a KL alone
        for first in range(0, len(features), n_rows):
            part = slice(first, first + n_rows)
            logits = logits_of(features[part], head).float()
            if code is not None and correction is not None:
                logits += F.linear(code[part], correction)
            log_draft = logits.log_softmax(dim=-1)
            probability = logits_of(hidden[part], head).float().softmax(dim=-1)
            own = labels[part, None]
            terms[part, 0] = -log_draft.gather(1, own)[:, 0]
            kl = -(probability * log_draft).sum(dim=-1)
            draft = log_draft.exp_()
            difference = probability.neg_().add_(draft)
            terms[part, 1] = difference.abs().sum(dim=-1)
            terms[part, 2], share_of_kl, share_of_distance = divergence.of(kl, terms[part, 1])
            total += (terms[part] * weights[part]).sum()
            of_label, of_distance, of_divergence = weights[part].split(1, dim=1)  # [n, 1] each
            of_distance = of_distance + of_divergence * share_of_distance[:, None]
            of_kl = of_divergence * share_of_kl[:, None]
            sign = difference.sign()
            error = difference.mul_(of_kl)
            # d|p - q| through the softmax: p (sign - its mean under p).
            error += draft * (sign - (sign * draft).sum(dim=-1, keepdim=True)) * of_distance
            error += draft * of_label
            error = error.scatter_add_(1, own, -of_label).to(features.dtype)
            grad_features[part] = _through_head(error, head, features.dtype)
            if code is not None and correction is not None:
                assert grad_code is not None
                assert grad_correction is not None
                grad_code[part] = error @ correction
                grad_correction += (error.T @ code[part]).float()
        ctx.save_for_backward(grad_features, grad_code, grad_correction)
        ctx.mark_non_differentiable(terms)
        return total, terms

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if grad is None else grad * grad_outputs[0].to(grad.dtype) for grad in ctx.saved_tensors]
        features, code, correction = found
        return features, code, None, None, None, correction, None, None, None


def chunked_token_losses(
    features: Tensor,
    hidden: Tensor,
    labels: Tensor,
    head: Tensor,
    weights: Tensor,
    code: Tensor | None = None,
    correction: Tensor | None = None,
    chunk_bytes: int | None = None,
    divergence: Divergence = KL,
) -> tuple[Tensor, Tensor]:
    """Compare drafts with the target's distributions and with the tokens of the text, without [N, V] logits.

    The drafter's logits are ``features @ head.T + code @ correction.T``, the target's ``hidden @ head.T``. The terms of
    a position are the cross-entropy to its label, the L1 distance of the two distributions (twice their total
    variation) and their divergence.

    Args:
        features: [N, E], the drafter's.
        hidden: [N, E], the target's, after its final norm.
        labels: [N] int64, tokens of the text.
        head: [V, E], frozen, in any dtype.
        weights: [N, 3] float32, of the terms of each position in the sum.
        code: [N, r], the drafter's; None for no correction of its logits.
        correction: [V, r], trained.
        chunk_bytes: as for :func:`chunked_forward_kl`.

    Returns:
        The weighted sum, a float32 scalar in nats with gradients for features, code and correction, and the terms
        [N, 3] float32, which have none.
    """
    dtype, head = _autocast(features, head)
    code, correction = (None if x is None else x.to(dtype) for x in (code, correction))
    total, terms = _ChunkedTokenLosses.apply(  # type: ignore[no-untyped-call]  # torch's apply has no types
        features.to(dtype), code, hidden.to(dtype), labels, head, correction, weights, divergence, chunk_bytes
    )
    return total, terms


@torch.no_grad()
def chunked_cross_entropy(
    features: Tensor, labels: Tensor, head: Tensor, code: Tensor | None = None, correction: Tensor | None = None
) -> Tensor:
    """Compute the cross-entropy of :func:`chunked_token_losses` alone, without a gradient: [N] float32, in nats."""
    found = features.new_empty(len(features), dtype=torch.float32)
    n_rows = chunk_rows(len(features), head.shape[0])
    for first in range(0, len(features), n_rows):
        part = slice(first, first + n_rows)
        logits = logits_of(features[part], head).float()
        if code is not None and correction is not None:
            logits += F.linear(code[part], correction.to(code.dtype))
        found[part] = F.cross_entropy(logits, labels[part], reduction="none")
    return found


def d_pace_weights(cross_entropy: Tensor, supervised: Tensor, smoothing: float) -> Tensor:
    """Weigh the drafts of blocks by what they add to the expected acceptance length (D-PACE, arXiv 2605.18810).

    A draft of probability q = exp(-cross-entropy) counts as (1 - smoothing) * q + smoothing. Its weight is the sum over
    itself and the later drafts of the product of these up to each: the first drafts weigh most while they are unsure,
    the later ones more once the first are right.

    Args:
        cross_entropy: [..., K], to the text's tokens.
        supervised: [..., K] bool; the others have weight 0 and count as certain.
        smoothing: from 0 to 1, where 1 weighs a draft by the number of those from it on.

    Returns:
        [..., K], without a gradient.
    """
    smoothed = (1 - smoothing) * torch.exp(-cross_entropy.detach()) + smoothing
    reached = torch.where(supervised, smoothed, 1.0).cumprod(dim=-1) * supervised
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * supervised
