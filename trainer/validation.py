"""Validation without the target: how well drafts agree with the stored activations.

Shapes: B sequences, T tokens, P drafted positions, g drafts of a round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..moa.drafters.base import Drafter
from ..moa.drafters.training import at_queries
from ..moa.nn import masks
from ..moa.targets.bundle import FrozenTarget
from .batches import Batch

_LOGITS_BYTES = 1 << 26


@dataclass
class ValidationSums:
    """Sums and counts, reduced only at the end."""

    kl: float = 0.0
    """Forward KL in nats."""
    agreements: int = 0
    """Positions where drafter and target have the same argmax."""
    positions: int = 0
    committed: int = 0
    """Tokens that the rounds would commit, bonus included."""
    rounds: int = 0

    def add(self, other: "ValidationSums") -> None:
        """Add the sums of another batch."""
        for name in ("kl", "agreements", "positions", "committed", "rounds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def metrics(self) -> dict[str, float]:
        """Compute kl, top1_agreement and expected_acceptance_length (NaN where nothing was counted)."""
        nan = float("nan")
        return {
            "kl": self.kl / self.positions if self.positions else nan,
            "top1_agreement": self.agreements / self.positions if self.positions else nan,
            "expected_acceptance_length": self.committed / self.rounds if self.rounds else nan,
        }


def sum_in_order(rows: Iterable[Sequence[float]]) -> ValidationSums:
    """Add up batches in the order of their numbers, each once, so that the sum does not depend on the devices.

    Args:
        rows: number of a batch, then the fields of its ``ValidationSums``; a batch may come several times.
    """
    total = ValidationSums()
    for _, (kl, *counts) in sorted({int(number): sums for number, *sums in rows}.items()):
        total.add(ValidationSums(kl, *map(int, counts)))
    return total


@dataclass(frozen=True)
class Comparison:
    """A drafter against the stored activations of one batch."""

    drafted: Tensor
    """[B, T] bool, positions that a draft round reaches."""
    agree: Tensor
    """[B, T] bool, drafted positions where drafter and target have the same argmax."""
    kl: Tensor
    """[P], of the drafted positions, in nats."""


@torch.no_grad()
def compare_batch(drafter: Drafter, frozen: FrozenTarget, batch: Batch) -> Comparison:
    """Draft every round of a batch on the dataset's text, and compare the drafts with the target's argmax."""
    inputs, draws = batch.inputs, batch.draws
    drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound, draws.offset)
    outputs = drafter.drafted_features(frozen, inputs, draws)
    queries, valid = outputs.queries, outputs.valid
    hidden = at_queries(inputs.hidden, queries)[valid]
    kl, agree = _compare(drafter, frozen, outputs.features[valid], hidden.to(outputs.features.dtype))
    agree_at = torch.zeros_like(drafted)
    rows = torch.arange(drafted.shape[0], device=drafted.device)[:, None].expand_as(queries)
    agree_at[rows[valid], queries[valid]] = agree
    return Comparison(drafted, agree_at, kl)


def validate_batch(drafter: Drafter, frozen: FrozenTarget, batch: Batch, draft_length: int) -> ValidationSums:
    """Evaluate every draft round of a batch whose step bound is ``draft_length + 1``.

    A round's expected acceptance length is 1 + the leading draft steps at which drafter and target have the same
    argmax. The drafts follow the dataset's text, not the target's own answers, so this is an estimate of decoding.
    """
    found = compare_batch(drafter, frozen, batch)
    runs = agreement_runs(found.agree, found.drafted, draft_length)
    return ValidationSums(
        kl=float(found.kl.sum()),
        agreements=int(found.agree.sum()),
        positions=len(found.kl),
        committed=int((runs + 1).sum()),
        rounds=len(runs),
    )


def agreement_runs(agree: Tensor, drafted: Tensor, draft_length: int) -> Tensor:
    """Measure the leading run of agreements in every complete round.

    Args:
        drafted: [B, T] bool; a round is a context position followed by ``draft_length`` drafted ones.
        draft_length: drafts per round.

    Returns:
        [n_rounds] int64, each 0..draft_length.
    """
    if drafted.shape[1] <= draft_length:
        return torch.zeros(0, dtype=torch.int64)
    windows = drafted.unfold(1, draft_length + 1, 1)  # [B, T - g, g + 1]
    is_round = ~windows[..., 0] & windows[..., 1:].all(dim=-1)
    agreements = agree.unfold(1, draft_length + 1, 1)[..., 1:][is_round]  # [n_rounds, g]
    return agreements.long().cumprod(dim=-1).sum(dim=-1)


def _compare(drafter: Drafter, frozen: FrozenTarget, features: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Compute KL [P] and argmax agreement [P], a bounded number of logits at a time."""
    chunk = max(1, _LOGITS_BYTES // (4 * frozen.lm_head_weight.shape[0]))
    kl, agree = [], []
    for part, goal in zip(features.split(chunk), hidden.split(chunk), strict=True):
        draft, target = drafter.draft_logits(frozen, part).float(), frozen.logits(goal).float()
        log_target = target.log_softmax(dim=-1)
        pointwise = log_target.exp() * (log_target - draft.log_softmax(dim=-1))
        # 0 * inf, where a logit is -inf, counts as 0.
        kl.append(pointwise.nan_to_num(0.0, 0.0, 0.0).sum(dim=-1))
        agree.append(draft.argmax(dim=-1) == target.argmax(dim=-1))
    return torch.cat(kl), torch.cat(agree)
