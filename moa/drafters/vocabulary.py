"""Draft vocabularies: the tokens that a drafter can draft. A small vocabulary can save time.

To compute a draft, the drafter's weights and an LM head are read from memory. With a large
vocabulary, most of these weights are in the LM head. For a target of 135 M weights with 49,152
tokens, EAGLE-2 reads 32 M weights per draft, 28 M of them in the LM head. A drafter that drafts
only the most frequent tokens reads only the rows of the LM head for these tokens. It never drafts
the other tokens, so a draft fails whenever the target chooses one of the other tokens. The decoded
text does not change. Frequency-ranked speculative sampling (arXiv 2502.14856) uses such a draft
vocabulary for EAGLE-2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Assumed number of drafts per round when the size of a draft vocabulary is chosen.
N_DRAFTS = 5
# Assumed probability that a draft is accepted, which is realistic for a good drafter. With a worse
# drafter, a smaller draft vocabulary loses fewer accepted drafts.
_ACCEPTED = 0.8
# A draft vocabulary is chosen only if the target's vocabulary has at least this number of tokens.
# With fewer tokens, the LM head takes only a small share of the time of a draft.
_FEWEST_TOKENS = 1 << 14
# Smallest draft vocabulary. With fewer tokens, the drafter would save little more time, and would
# suit only text similar to the training text.
_SMALLEST_CHOICE = 1 << 12
# A draft vocabulary must increase the number of committed tokens per weight that is read, by at
# least this factor. A smaller gain does not make up for the disadvantage of a draft vocabulary: it
# suits only text similar to the training text.
_LEAST_GAIN = 1.1


@dataclass(frozen=True)
class DraftVocabulary:
    """The size of a draft vocabulary, and the reason for this size."""

    n_tokens: int  # Number of tokens. 0 means all tokens.
    why: str


def most_frequent(counts: Tensor, n_tokens: int) -> Tensor:
    """Return the ascending ids of the most frequent tokens, [n_tokens] int64.

    ``counts`` [V] has the number of occurrences of each token. Among equally frequent tokens, the
    lower ids are chosen.
    """
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:n_tokens].sort().values


def may_be_reduced(vocab_size: int) -> bool:
    """Return whether a vocabulary is so large that a smaller draft vocabulary can save time."""
    return vocab_size >= _FEWEST_TOKENS


def coverage(halves: Tensor, n_tokens: int) -> float:
    """Estimate which share of new text consists of the ``n_tokens`` most frequent tokens.

    ``halves`` [2, V] has the token counts of two halves of a text. The most frequent tokens of one
    half are counted in the other half. If they were counted in the same half, their share would be
    too large, because some rare tokens are frequent in this half by chance.
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
    """Choose the size of the draft vocabulary.

    With the chosen size, a round commits the most tokens per weight that it reads from memory.

    Call this function only if :func:`may_be_reduced` returns true for V.

    Args:
        halves: [2, V] int64, token counts of two halves of the training responses.
        width: width of the LM head.
        drafter_weights: number of weights that each draft reads, without the LM head.
        target_weights: number of weights that the target reads to verify the drafts of a round.
        most_tokens: maximum size of the draft vocabulary. If None, it is V.
    """
    upper_bound = halves.shape[1] if most_tokens is None else most_tokens

    def weights_read(n_tokens: int) -> int:
        return target_weights + N_DRAFTS * (drafter_weights + n_tokens * width)

    def committed(n_tokens: int) -> float:
        accepted = _ACCEPTED * coverage(halves, n_tokens)
        return sum(accepted**n for n in range(N_DRAFTS + 1))

    def efficiency(n_tokens: int) -> float:
        return committed(n_tokens) / weights_read(n_tokens)

    gains: dict[int, float] = {}
    size = _SMALLEST_CHOICE
    while size < upper_bound:
        gains[size] = efficiency(size) / efficiency(upper_bound)
        size *= 2
    best = max(gains, key=lambda n: gains[n], default=upper_bound)
    if gains.get(best, 1.0) < _LEAST_GAIN:
        return DraftVocabulary(
            0,
            f"a smaller draft vocabulary would commit only {gains.get(best, 1.0):.2f} times as "
            "many tokens per weight that is read",
        )
    share = coverage(halves, best)
    before = f"{weights_read(upper_bound) / 1e6:,.0f} M"
    after = f"{weights_read(best) / 1e6:,.0f} M"
    return DraftVocabulary(
        best,
        f"the most frequent tokens, which make up about {share:.1%} of new responses. A round of "
        f"{N_DRAFTS} drafts reads {after} weights and not {before}, and commits {gains[best]:.2f} "
        "times as many tokens per weight that is read",
    )
