"""Draft vocabularies: the tokens that a drafter drafts, and when fewer than all of them pay.

Each draft reads the drafter's weights and an LM head, whose rows are most of it where the vocabulary is large: 28 M of
32 M values for EAGLE-2 and a target of 135 M weights with 49,152 tokens. A drafter that drafts only the most frequent
tokens reads only their rows. It never drafts the other tokens, so a draft fails wherever the target chooses one of
them; what is decoded stays the same. Frequency-ranked speculative sampling (arXiv 2502.14856) does this for EAGLE-2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

N_DRAFTS = 5  # of the round for which a draft vocabulary is chosen
# probability that a draft of a good drafter is accepted; a worse drafter loses less by fewer tokens
_ACCEPTED = 0.8
# of a target for which fewer are drafted: small heads are a small part of a draft
_FEWEST_TOKENS = 1 << 14
# fewer tokens save little more, and suit only texts like those of the store
_SMALLEST_CHOICE = 1 << 12
# in tokens per weight read; a smaller gain is not worth depending on the store's texts
_LEAST_GAIN = 1.1


@dataclass(frozen=True)
class DraftVocabulary:
    """How many tokens are drafted, and why."""

    n_tokens: int  # 0 for all
    why: str


def most_frequent(counts: Tensor, n_tokens: int) -> Tensor:
    """List the most frequent tokens by counts [V], of equally frequent ones the lower, ascending: [n_tokens] int64."""
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:n_tokens].sort().values


def over_all_tokens(logits: Tensor, tokens: Tensor, n_tokens: int) -> Tensor:
    """Spread the logits [..., V_d] of some tokens [V_d] over the vocabulary, -inf for the others: [..., V]."""
    spread = logits.new_full((*logits.shape[:-1], n_tokens), -torch.inf)
    return spread.index_copy(-1, tokens, logits)


def may_be_reduced(vocab_size: int) -> bool:
    """Whether a vocabulary is large enough for fewer tokens to pay."""
    return vocab_size >= _FEWEST_TOKENS


def coverage(halves: Tensor, n_tokens: int) -> float:
    """Estimate the share of further text that the most frequent tokens are, by the counts [2, V] of halves of a text.

    It is what the most frequent tokens of one half are of the other half, because a text repeats its own rare tokens.
    """
    shares = []
    for counts, others in zip(halves, halves.flip(0), strict=True):
        drafted = others[most_frequent(counts, n_tokens)]
        shares.append(float(drafted.sum()) / max(1, int(others.sum())))
    return sum(shares) / len(shares)


def choose_draft_vocabulary(
    halves: Tensor,
    width: int,
    drafter_weights: int,
    target_weights: int,
    most_tokens: int | None = None,
) -> DraftVocabulary:
    """Choose how many tokens to draft, so that a round commits the most tokens per weight that it reads.

    Args:
        halves: [2, V] int64, counts of the tokens in halves of the training responses.
        width: of the LM head.
        drafter_weights: what each draft reads besides an LM head.
        target_weights: what the verification of a round reads.
        most_tokens: the largest draft vocabulary; V if None.
    """
    vocab_size = halves.shape[1]
    most = vocab_size if most_tokens is None else most_tokens

    def weights_read(n_tokens: int) -> int:
        return target_weights + N_DRAFTS * (drafter_weights + n_tokens * width)

    def committed(n_tokens: int) -> float:
        accepted = _ACCEPTED * coverage(halves, n_tokens)
        return sum(accepted**n for n in range(N_DRAFTS + 1))

    if not may_be_reduced(vocab_size):
        return DraftVocabulary(
            0, f"the LM head of {vocab_size:,} tokens is a small part of a draft"
        )
    sizes = [
        1 << bits
        for bits in range(_SMALLEST_CHOICE.bit_length() - 1, most.bit_length())
        if 1 << bits < most
    ]
    gains = {
        n: committed(n) / weights_read(n) / (committed(most) / weights_read(most)) for n in sizes
    }
    best = max(gains, key=lambda n: gains[n], default=most)
    if gains.get(best, 1.0) < _LEAST_GAIN:
        return DraftVocabulary(
            0, f"fewer would commit {gains.get(best, 1.0):.2f} times the tokens per weight read"
        )
    share = coverage(halves, best)
    before, after = (f"{weights_read(n) / 1e6:,.0f} M" for n in (most, best))
    return DraftVocabulary(
        best,
        f"about {share:.1%} of what further responses say; a round of {N_DRAFTS} drafts reads {after} weights, not "
        f"{before}: {gains[best]:.2f} times the tokens per weight read",
    )
