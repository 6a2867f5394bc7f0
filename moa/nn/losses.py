"""Distillation losses of each position. The caller sums or averages them.

A loss needs the LM head, the largest matrix of a model: 1 GB for 128,256 tokens of width 4,096 in
bfloat16. To limit the memory for logits, positions are processed in chunks. Each chunk reads the
whole head once, so the number of chunks is limited to ``MAX_CHUNKS``. If the features have a wider
dtype than a frozen head, the head must be cast: a small head at once, a large head piece by piece.

Shapes: N positions, n positions of one chunk, J draft steps, K loss terms, E hidden width, V
vocabulary, V_d draft vocabulary, r rank of the correction that a Markov head adds to the logits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """Divergence of the drafter's distribution q from the target's distribution p.

    ``kind`` selects the forward KL or an LK loss (arXiv 2602.23881). In this table, a is the
    probability that sampling accepts a draft: ``a = sum_v min(p_v, q_v)``::

        kl           the forward KL
        lk           -log a
        lk-hybrid    s * KL + (1 - s) * (1 - a), where s = exp(-decay * a) has no gradient
        tv           0.1 * KL + 0.9 * (1 - a), where 1 - a is the total variation

    The KL is computed as the cross-entropy to the target's probabilities at temperature 1, without
    subtracting the entropy of these probabilities (lines 253-262 of ``train/moa_spec.py`` in the
    MoA authors' code). With ``lk-hybrid``, the KL has more weight for drafts that are less likely
    to be accepted.
    """

    # The LK paper computes one s for the whole batch, from the mean of a. Here s is computed for
    # each position, because a batch can be split into micro-batches and among devices.
    kind: str = "kl"
    decay: float = 3.0

    def of(
        self, kl: Tensor, l1: Tensor, mass: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the divergence and its derivatives.

        Args:
            kl: [...], the forward KL.
            l1: [...], the L1 distance of the two distributions.
            mass: [...], the sum of the target's probabilities of all compared tokens. It is 1 if
                the whole vocabulary is compared.

        Returns:
            The divergence, its derivative with respect to ``kl``, and its derivative with respect
            to ``l1``.
        """
        if self.kind == "kl":
            return kl, torch.ones_like(kl), torch.zeros_like(kl)
        accepted = (0.5 * (1 + mass - l1)).clamp(min=_LEAST_ACCEPTED)
        if self.kind == "lk":
            return -accepted.log(), torch.zeros_like(kl), 0.5 / accepted
        share = torch.full_like(kl, 0.1) if self.kind == "tv" else torch.exp(-self.decay * accepted)
        return share * kl + (1 - share) * (1 - accepted), share, 0.5 * (1 - share)


KL = Divergence()
# Lower bound of the acceptance probability, which keeps its logarithm and gradient finite.
_LEAST_ACCEPTED = 1e-6

# Size in bytes of the float32 logits of one chunk. This size determines the number of positions in
# a chunk. If it would lead to more than MAX_CHUNKS chunks, the chunks are larger.
LOGITS_BYTES = 1 << 26
# Maximum number of chunks of positions. Each chunk reads a whole LM head from memory, so many
# chunks would take much time.
MAX_CHUNKS = 8
# Maximum size in bytes of a block of rows of an LM head. A large head is cast block by block, and
# its gradient is computed block by block.
_CAST_BYTES = 1 << 28


def chunk_rows(n_rows: int, n_logits: int) -> int:
    """Choose the number of positions in one chunk.

    Args:
        n_rows: Total number of positions.
        n_logits: Number of float32 logits of each position.
    """
    return max(1, LOGITS_BYTES // (4 * n_logits), -(-n_rows // MAX_CHUNKS))


def _blocks(head: Tensor) -> Iterator[slice]:
    n_tokens = max(1, _CAST_BYTES // (4 * head.shape[1]))
    return (slice(start, start + n_tokens) for start in range(0, head.shape[0], n_tokens))


def logits_of(x: Tensor, head: Tensor) -> Tensor:
    """Multiply x [..., E] by an LM head [V, E] to get logits [..., V] in the dtype of x."""
    if x.dtype == head.dtype or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, head)
    logits = x.new_empty(*x.shape[:-1], head.shape[0])
    for block in _blocks(head):
        logits[..., block] = F.linear(x, head[block].to(x.dtype))
    return logits


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Limit logits to the range (-cap, cap) by a tanh; without a cap, return them unchanged."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _autocast(features: Tensor, frozen_head: Tensor) -> tuple[torch.dtype, Tensor]:
    """Return the dtype in which logits are computed, and the weight of the frozen LM head.

    Under autocast, the dtype is the dtype of autocast, and the weight is cast to this dtype.
    Otherwise, the dtype is the dtype of the features, and the weight is unchanged.
    """
    if not torch.is_autocast_enabled(features.device.type):
        return features.dtype, frozen_head
    dtype = torch.get_autocast_dtype(features.device.type)
    return dtype, frozen_head.to(dtype)


def _through_head(error: Tensor, head: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the gradient of features [..., E] in ``dtype``.

    ``error`` is the gradient of logits [..., V].
    """
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
    """Compute the drafter's log probabilities of all tokens.

    Returns:
        Two tensors in the shape of the logits: the log probabilities, and the derivative of capped
        logits with respect to uncapped logits. Without a cap, the derivative is None.
    """
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
    """Compute the loss terms, and the gradient of their weighted sum with respect to the logits.

    Args:
        kl: [n, J, 1], the forward KL of each draft.
        log_draft: [n, J, V], log probabilities of the drafter. This tensor is overwritten.
        probability: [n, 1, V], probabilities of the target.
        weights: [n, J, K], weights of the loss terms.
        labels: [n, J], token ids. If None, the loss has no cross-entropy term.
        mass: Sum of ``probability`` over V. If None, it is 1.
        divergence: The divergence to compute.

    Returns:
        The loss terms [n, J, K], the gradient [n, J, V], and a factor [n, J, 1] or None. If there
        is a factor, the gradient has not been multiplied by it yet. The caller multiplies the
        factor into smaller tensors, which takes less time.
    """
    label_loss = None if labels is None else -log_draft.gather(-1, labels[..., None])
    draft = log_draft.exp_()
    if label_loss is None and divergence.kind == "kl":
        return kl, (draft if mass is None else draft.mul_(mass)).sub_(probability), weights
    difference = draft - probability
    l1 = difference.abs().sum(dim=-1, keepdim=True)
    sign = difference.sign_()
    # Gradient of the L1 distance through the softmax: ``q * (sign - mean)``. Here ``sign`` is the
    # sign of q - p, and ``mean`` is the mean of ``sign`` under the distribution q.
    l1_gradient = draft * (sign - (sign * draft).sum(dim=-1, keepdim=True))
    total_mass: Tensor | float = 1.0 if mass is None else mass
    terms, kl_weight, l1_weight = divergence.of(kl, l1, total_mass)
    factor: Tensor | None = weights
    label_weight = torch.zeros_like(kl_weight)
    if label_loss is not None:
        factor = None
        divergence_weight, distance_weight, label_weight = weights.split(1, dim=-1)
        kl_weight = divergence_weight * kl_weight
        l1_weight = distance_weight + divergence_weight * l1_weight
        terms = torch.cat((terms, l1, label_loss), dim=-1)
    error = draft.mul_(kl_weight * total_mass + label_weight)
    error.addcmul_(probability, kl_weight, value=-1).addcmul_(l1_gradient, l1_weight)
    if labels is not None:
        error.scatter_add_(-1, labels[..., None], -label_weight)
    return terms, error, factor


class _ChunkedLosses(torch.autograd.Function):
    """Computes the weighted sum of the losses of :func:`chunked_losses`.

    The forward pass computes the gradients too, so that no logits need to be saved.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, hidden: Tensor, head: Tensor, weights: Tensor, own_head: Any,
        tokens: Any, labels: Any, code: Any, correction: Any, divergence: Divergence, cap: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        draft_head = head if own_head is None else own_head
        dtype = features.dtype
        terms = torch.empty_like(weights, dtype=torch.float32)
        grads: Any = torch.empty_like(features), None if code is None else torch.empty_like(code)
        # The gradients of the drafter's own head and of the correction, summed over all chunks.
        # Each of these two gradients is as large as an LM head.
        sums: Any = [
            None if x is None else torch.zeros_like(x, dtype=torch.float32)
            for x in (own_head, correction)
        ]
        n_logits = features.shape[1] * len(draft_head)
        # If drafter and target use the same frozen head, and there are no labels, the loss needs
        # fewer buffers for logits. So a chunk can have more positions.
        is_plain = own_head is None and labels is None
        n_rows = chunk_rows(len(features), n_logits if is_plain else n_logits + len(head))
        for first in range(0, len(features), n_rows):
            part = slice(first, first + n_rows)
            goal = capped(logits_of(hidden[part], head).float(), cap)
            # The target's probabilities are [n, 1, V].
            mass, probability = None, goal.softmax(dim=-1)[:, None]
            own_cap = cap if own_head is None else None
            own_code = None if code is None else code[part]
            log_draft, slope = _log_draft(features[part], draft_head, own_cap, own_code, correction)
            if tokens is not None:
                probability = probability[..., tokens]
            if dtype == torch.float16:
                # In float16, logits can overflow, and the drafter's log probability of a token can
                # be -inf. The product 0 * -inf would be NaN. So set the target's probability of
                # such a token to 0, and make the log probability finite. Do this without checking
                # whether there are such tokens, because the check would synchronize with the GPU.
                probability = probability * ~torch.isinf(log_draft)
                log_draft.clamp_(min=torch.finfo(torch.float32).min)
            if tokens is not None or dtype == torch.float16:
                mass = probability.sum(dim=-1, keepdim=True)
            if own_head is None:
                kl = -(probability * log_draft).sum(dim=-1, keepdim=True)
            # If the drafter has its own head, compute the KL as a matrix product. The product sums
            # over the vocabulary without another buffer of the size of all logits.
            else:
                kl = -(log_draft @ probability.mT)
            terms[part], error, factor = _terms_and_error(
                kl,
                log_draft,
                probability,
                weights[part],
                None if labels is None else labels[part],
                mass,
                divergence,
            )
            # The gradient of the LM head is the product of the logits' gradients, the loss weights
            # and the features. Multiply the weights into the features, because features have fewer
            # values than logits.
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
        # The gradients of the drafter's own head and of the correction are as large as an LM head,
        # so scale them in place. A second backward pass would scale them again, so it is not
        # supported.
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
    """Compute losses of drafts without materializing all logits.

    The logits of the drafter are ``features @ own_head.T + code @ correction.T``. The logits of the
    target are ``hidden @ head.T``. Without labels there is K = 1 loss term, the divergence. With
    labels there are K = 3 terms: the divergence, the L1 distance of the two distributions (twice
    their total variation), and the cross-entropy to the label. Values and gradients are the same as
    if all logits were materialized.

    Args:
        features: [N, J, E], features of the drafter, for J draft steps at each position.
        hidden: [N, E], hidden states of the target after its final norm.
        head: [V, E], the target's LM head. It is frozen, and may have any dtype.
        weights: [N, J, K], weights of the loss terms. They are not negative.
        own_head: [V_d, E], the drafter's own LM head, which is trained. The backward pass can then
            run only once. If None, the drafter uses ``head``.
        tokens: [V_d] int64, token ids of the draft vocabulary. All other tokens contribute 0 to the
            loss. If None, the draft vocabulary is the whole vocabulary.
        labels: [N, J] int64, the actual next tokens of the training sequences. If None, there is
            only the divergence.
        code: [N, J, r], the input of the correction. If None, the drafter's logits get no
            correction.
        correction: [V, r], a trained matrix. If None, the drafter's logits get no correction.
        divergence: The divergence to compute.
        cap: Limit of the logits that the frozen head computes (:func:`capped`), for the target and
            the drafter. The limit is applied before the correction is added. If None, logits have
            no limit.

    Returns:
        The weighted sum of the loss terms in nats, and the terms [N, J, K], both float32. Only the
        weighted sum has gradients.
    """
    dtype, head = _autocast(features, head)
    if head.numel() * 4 <= _CAST_BYTES:
        # Cast the head here once. Otherwise each product of each chunk would cast it.
        head = head.to(dtype)
    own_head, code, correction = (
        None if x is None else x.to(dtype) for x in (own_head, code, correction)
    )
    # PyTorch declares no types for `apply`, so tell mypy to ignore this call.
    total, terms = _ChunkedLosses.apply(  # type: ignore[no-untyped-call]
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
    """Compute the smooth-L1 loss (beta 1) between features and hidden states.

    Features and hidden states are [..., E]. The losses [...] are means over the width E (line 266
    of ``train/moa_spec.py`` in the MoA authors' code).
    """
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
    """Compute the cross-entropy to labels as :func:`chunked_losses` does, without gradients.

    Returns:
        [N] float32, in nats.
    """
    losses = features.new_empty(len(features), dtype=torch.float32)
    n_rows = chunk_rows(len(features), head.shape[0])
    for first in range(0, len(features), n_rows):
        part = slice(first, first + n_rows)
        log_draft, _ = _log_draft(
            features[part], head, cap, None if code is None else code[part], correction
        )
        losses[part] = F.nll_loss(log_draft, labels[part], reduction="none")
    return losses


def d_pace_weights(cross_entropy: Tensor, supervised: Tensor, smoothing: float) -> Tensor:
    """Compute D-PACE weights (arXiv 2605.18810) for the K drafts of each block.

    A block is a sequence of K drafts. Each draft has the probability ``q = exp(-cross_entropy)``,
    and the smoothed probability ``s = (1 - smoothing) * q + smoothing``. The expected number of
    accepted drafts is the sum of ``s_1 * ... * s_j`` over all j. The weight of draft k is the sum
    of those terms that contain s_k, that is, over all j >= k.

    Args:
        cross_entropy: [..., K], cross-entropy of each draft to the actual token.
        supervised: [..., K] bool, true for drafts that contribute to the loss. All other drafts
            have the weight 0, and count as s = 1 in the products.
        smoothing: From 0 to 1. A lower value gives later drafts less weight if earlier drafts are
            uncertain.
    """
    smoothed = (1 - smoothing) * torch.exp(-cross_entropy.detach()) + smoothing
    reached = torch.where(supervised, smoothed, 1.0).cumprod(dim=-1) * supervised
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * supervised


def d_pace_at(
    cells: tuple[Tensor, ...],
    shape: Sequence[int],
    cross_entropy: Tensor,
    supervised: Tensor | bool,
    smoothing: float,
) -> Tensor:
    """Compute :func:`d_pace_weights` for a list of drafts.

    Each draft has a cell in a grid. The last axis of the grid is the index of a draft in its block,
    and the other axes identify the block.

    Args:
        cells: Indices of the cell of each draft, one tensor per axis of the grid.
        shape: The shape of the grid. Cells without a draft count as not supervised.
        cross_entropy: Cross-entropy of each draft to the actual token.
        supervised: True for drafts that contribute to the loss.
        smoothing: See :func:`d_pace_weights`.

    Returns:
        The weight of each draft, in the shape of ``cross_entropy``.
    """
    grid = cross_entropy.new_zeros(shape)
    is_supervised = torch.zeros_like(grid, dtype=torch.bool)
    grid[cells] = cross_entropy
    is_supervised[cells] = supervised
    return d_pace_weights(grid, is_supervised, smoothing)[cells]
