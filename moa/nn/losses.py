"""Distillation losses per position; the reduction is the caller's.

Shapes: N positions, J draft steps, E hidden width, V vocabulary, V_d draft vocabulary.

The loss goes through an LM head, the largest matrix of a model: 1 GB for 128,256 tokens of width 4,096 in bfloat16. So
positions are processed in chunks whose logits are bounded in bytes, but in at most ``MAX_CHUNKS`` of them, since each
reads the head once. If features are wider than a frozen head, a small head is cast once and a large one block by block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """The distance of a draft's distribution q from the target's p: the forward KL, or an LK loss (arXiv 2602.23881).

    With a = sum_v min(p_v, q_v), the probability that sampling accepts a draft::

        kl           the forward KL
        lk           -log a
        lk-hybrid    s * KL + (1 - s) * (1 - a), where s = exp(-decay * a) has no gradient
        tv           0.1 * KL + 0.9 * (1 - a), where 1 - a is the total variation

    The KL is the cross-entropy to the target's soft labels at temperature 1, without their entropy (official
    ``train/moa_spec.py``, lines 253-262). The further a draft is from being accepted, the more the hybrid is the KL.
    """

    # Each position has its own s, where the paper takes one of the batch's mean a: so a batch may
    # be split into
    # micro-batches and among devices.
    kind: str = "kl"
    decay: float = 3.0

    def of(
        self, kl: Tensor, l1: Tensor, mass: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the divergence from the forward KL and the L1 distance, each [...], and its derivatives in both.

        ``mass``: probability of the target's tokens that are compared, [...]; 1 for all tokens.
        """
        if self.kind == "kl":
            return kl, torch.ones_like(kl), torch.zeros_like(kl)
        accepted = (0.5 * (1 + mass - l1)).clamp(min=_LEAST_ACCEPTED)
        if self.kind == "lk":
            return -accepted.log(), torch.zeros_like(kl), 0.5 / accepted
        share = torch.full_like(kl, 0.1) if self.kind == "tv" else torch.exp(-self.decay * accepted)
        return share * kl + (1 - share) * (1 - accepted), share, 0.5 * (1 - share)


KL = Divergence()
# lower bound of the probability of acceptance, so that its logarithm and gradient stay finite
_LEAST_ACCEPTED = 1e-6

# bytes of float32 logits of one chunk, unless that made more than ``MAX_CHUNKS`` chunks
LOGITS_BYTES = 1 << 26
MAX_CHUNKS = 8  # how often the loss of one forward reads an LM head at most
# bytes of an LM head that are cast, or of its gradient that are made, at once
_CAST_BYTES = 1 << 28


def chunk_rows(n_rows: int, n_logits: int) -> int:
    """Choose the positions of a chunk, of ``n_rows`` positions that have ``n_logits`` float32 logits each."""
    return max(1, LOGITS_BYTES // (4 * n_logits), -(-n_rows // MAX_CHUNKS))


def _blocks(head: Tensor) -> Iterator[slice]:
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


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Keep logits within a bound as their model does, by a tanh; None for no bound."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


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


def _log_draft(
    features: Tensor,
    head: Tensor,
    cap: float | None,
    code: Tensor | None,
    correction: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log probabilities, and the derivative of what is capped in what is not; None without a cap."""
    logits = logits_of(features, head).float()
    slope = None
    if cap is not None:
        logits = capped(logits, cap)
        slope = 1 - (logits / cap).square()
    if code is not None and correction is not None:
        logits += F.linear(code, correction.to(code.dtype))
    return logits.log_softmax(dim=-1), slope


def _terms_and_error(
    kl: Tensor,
    log_draft: Tensor,
    probability: Tensor,
    weights: Tensor,
    labels: Tensor | None,
    mass: Tensor | None,
    divergence: Divergence,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the terms [n, J, K], and the gradient of their weighted sum in the logits; ``log_draft`` is overwritten.

    The gradient may lack a factor [n, J, 1], which is returned too. The sum ``mass`` of ``probability`` is None for 1.
    """
    own = None if labels is None else -log_draft.gather(-1, labels[..., None])
    draft = log_draft.exp_()
    if own is None and divergence.kind == "kl":
        return (
            kl[..., None],
            (draft if mass is None else draft.mul_(mass)).sub_(probability),
            weights,
        )
    difference = draft - probability
    l1 = difference.abs().sum(dim=-1)
    sign = difference.sign_()
    # d|p - q| through the softmax: p (sign - its mean under p).
    of_l1 = draft * (sign - (sign * draft).sum(dim=-1, keepdim=True))
    whole: Tensor | float = 1.0 if mass is None else mass
    found = divergence.of(kl, l1, 1.0 if mass is None else mass[..., 0])
    terms, of_kl, of_distance = (part[..., None] for part in found)
    factor: Tensor | None = weights
    of_label = torch.zeros_like(of_kl)
    if own is not None:
        factor = None
        of_divergence, of_own, of_label = weights.split(1, dim=-1)
        of_kl = of_divergence * of_kl
        of_distance = of_own + of_divergence * of_distance
        terms = torch.cat((terms, l1[..., None], own), dim=-1)
    error = draft.mul_(of_kl * whole + of_label)
    error.addcmul_(probability, of_kl, value=-1).addcmul_(of_l1, of_distance)
    if labels is not None:
        error.scatter_add_(-1, labels[..., None], -of_label)
    return terms, error, factor


class _ChunkedLosses(torch.autograd.Function):
    """The weighted sum of :func:`chunked_losses`; forward computes the gradients too and keeps no logits."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, hidden: Tensor, head: Tensor, weights: Tensor, own_head: Any, tokens: Any,
        labels: Any, code: Any, correction: Any, divergence: Divergence, cap: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        draft_head = head if own_head is None else own_head
        dtype = features.dtype
        terms = torch.empty_like(weights, dtype=torch.float32)
        grads: Any = torch.empty_like(features), None if code is None else torch.empty_like(code)
        # Sums over all chunks, as large as a head: of its own, and of the correction.
        sums: Any = [
            None if x is None else torch.zeros_like(x, dtype=torch.float32)
            for x in (own_head, correction)
        ]
        n_logits = features.shape[1] * len(draft_head)
        # A KL through a frozen head holds the fewest buffers of logits.
        is_plain = own_head is None and labels is None
        n_rows = chunk_rows(len(features), n_logits if is_plain else n_logits + len(head))
        for first in range(0, len(features), n_rows):
            part = slice(first, first + n_rows)
            goal = capped(logits_of(hidden[part], head).float(), cap)
            mass, probability = None, goal.softmax(dim=-1)[:, None]  # [n, 1, V]
            own_cap = cap if own_head is None else None
            own_code = None if code is None else code[part]
            log_draft, slope = _log_draft(features[part], draft_head, own_cap, own_code, correction)
            if tokens is not None:
                probability = probability[..., tokens]
            if dtype == torch.float16:
                # The one dtype whose products overflow to -inf. Looking for -inf first would make
                # the host wait.
                probability = probability * ~torch.isinf(log_draft)
                log_draft.clamp_(min=torch.finfo(torch.float32).min)
            if tokens is not None or dtype == torch.float16:
                mass = probability.sum(dim=-1, keepdim=True)
            if own_head is None:
                kl = -(probability * log_draft).sum(dim=-1)
            else:  # of several steps: without a third buffer of their size
                kl = -(log_draft @ probability.mT).squeeze(-1)
            terms[part], error, factor = _terms_and_error(
                kl,
                log_draft,
                probability,
                weights[part],
                None if labels is None else labels[part],
                mass,
                divergence,
            )
            # The weights are factors of the narrow features, not of logits.
            scale: Any = 1.0 if factor is None else factor.to(dtype)
            bent = error.to(dtype) if slope is None else error.mul(slope).to(dtype)
            error = error.to(dtype)
            grads[0][part] = _through_head(bent, draft_head, dtype) * scale
            if own_head is not None:
                scaled = (features[part] * scale).flatten(0, 1)
                for block in _blocks(own_head):
                    sums[0][block] += (error[..., block].flatten(0, 1).T @ scaled).float()
            if code is not None:
                grads[1][part] = error @ correction
                sums[1] += (error.flatten(0, 1).T @ code[part].flatten(0, 1)).float()
        ctx.save_for_backward(*grads)
        ctx.sums = sums
        ctx.mark_non_differentiable(terms)
        return (terms * weights).sum(), terms

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        features, code = (
            None if grad is None else grad * grad_outputs[0].to(grad.dtype)
            for grad in ctx.saved_tensors
        )
        # As large as a head, so they are scaled in place and not kept.
        own_head, correction = ctx.sums
        ctx.sums = None
        for grad in (own_head, correction):
            if grad is not None:
                grad.mul_(grad_outputs[0])
        return features, None, None, None, own_head, None, None, code, correction, None, None


def chunked_losses(
    features: Tensor,
    hidden: Tensor,
    head: Tensor,
    weights: Tensor,
    *,
    own_head: Tensor | None = None,
    tokens: Tensor | None = None,
    labels: Tensor | None = None,
    code: Tensor | None = None,
    correction: Tensor | None = None,
    divergence: Divergence = KL,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compare drafts with the target's distributions, and with the tokens of the text, without all logits at once.

    The drafter's logits are ``features @ own_head.T + code @ correction.T``, the target's ``hidden @ head.T``. The
    terms of a draft are the divergence and, with labels, the L1 distance of the two distributions (twice their total
    variation) and the cross-entropy to the label: K is 1 or 3. Equal to the plain computation in value and gradient.

    Args:
        features: [N, J, E], the drafter's of J draft steps at each position.
        hidden: [N, E], the target's, after its final norm.
        head: [V, E], frozen, in any dtype.
        weights: [N, J, K], at least 0.
        own_head: [V_d, E], trained; its gradient can be asked for once. None for the target's.
        tokens: [V_d] int64, the draft vocabulary, outside of which the target's tokens contribute 0; None for all.
        labels: [N, J] int64, tokens of the text.
        code: [N, J, r]; None for no correction of the drafter's logits.
        correction: [V, r], trained.
        cap: bound of what the frozen head gives (:func:`capped`), of target and drafter, before a correction.

    Returns:
        The weighted sum in nats, which alone has gradients, and the terms [N, J, K], both float32.
    """
    dtype, head = _autocast(features, head)
    if head.numel() * 4 <= _CAST_BYTES:
        head = head.to(dtype)  # once, not for each product of each chunk
    own_head, code, correction = (
        None if x is None else x.to(dtype) for x in (own_head, code, correction)
    )
    total, terms = _ChunkedLosses.apply(  # type: ignore[no-untyped-call]  # torch's apply has no types
        features.to(dtype),
        hidden.to(dtype),
        head,
        weights,
        own_head,
        tokens,
        labels,
        code,
        correction,
        divergence,
        cap,
    )
    return total, terms


def feature_loss(features: Tensor, hidden: Tensor) -> Tensor:
    """Compute smooth-L1 (beta 1) to hidden states, averaged over the width: [..., E] -> [...] (official line 266)."""
    return F.smooth_l1_loss(features.float(), hidden.float(), reduction="none").mean(dim=-1)


@torch.no_grad()
def chunked_cross_entropy(
    features: Tensor,
    labels: Tensor,
    head: Tensor,
    code: Tensor | None = None,
    correction: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute the cross-entropy to labels of :func:`chunked_losses` alone, without a gradient: [N] float32, in nats."""
    found = features.new_empty(len(features), dtype=torch.float32)
    n_rows = chunk_rows(len(features), head.shape[0])
    for first in range(0, len(features), n_rows):
        part = slice(first, first + n_rows)
        log_draft, _ = _log_draft(
            features[part], head, cap, None if code is None else code[part], correction
        )
        found[part] = F.nll_loss(log_draft, labels[part], reduction="none")
    return found


def d_pace_weights(cross_entropy: Tensor, supervised: Tensor, smoothing: float) -> Tensor:
    """Weigh the drafts of blocks by what they add to the expected acceptance length (D-PACE, arXiv 2605.18810).

    A draft of probability q = exp(-cross-entropy) counts as (1 - smoothing) * q + smoothing. Its weight is the sum over
    itself and the later drafts of the product of these up to each.

    Args:
        cross_entropy: [..., K], to the text's tokens.
        supervised: [..., K] bool; the others have weight 0 and count as certain.
    """
    smoothed = (1 - smoothing) * torch.exp(-cross_entropy.detach()) + smoothing
    reached = torch.where(supervised, smoothed, 1.0).cumprod(dim=-1) * supervised
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * supervised
