"""Sampling of tokens, and verification of drafts.

Shapes: B rows, N nodes of a draft tree, V vocabulary.

Drafts are verified in one of three ways. With each of them, every committed token has the target's
distribution, whatever the drafter proposes.

- Greedy: a draft is accepted if it is the target's argmax.
- Rejection sampling (:func:`accept_sampled`; Leviathan et al. 2023, Algorithm 1): a draft x that
  was sampled from q is accepted with probability ``min(1, p(x) / q(x))``. If x is rejected, the
  next token is sampled from ``max(0, p - q)``, normalized. A draft that was not sampled, such as a
  most likely token in a tree, is a special case: q(x) is 1. So x is accepted with probability p(x).
  If x is rejected, p(x) is set to 0, the other probabilities are normalized, and the next child of
  the node is tried.
- Keyed choice (:func:`accept_chosen`): at each position the target chooses the token with the
  largest ``log p + g``. Here g is Gumbel noise, a function of the seed, the position and the token.
  A draft is accepted if it is the chosen token. Over all seeds the chosen token has the
  distribution p (the Gumbel-max trick). For a given seed, the answer depends neither on the drafter
  nor on the other sequences of a batch. A drafter that adds the same noise to its own
  log-probabilities drafts the target's token more often than a drafter that samples independently.

Distributions stay on the device of the logits. Uniform random numbers are drawn on the host,
because then a seed gives the same numbers with every device.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import DrafterError
from ..nn.masks import to_device
from .tree import NO_DRAFT, DraftTree, TreeShape

# Top-p first sorts only this number of most likely tokens. It sorts the whole vocabulary only if
# the total probability of these tokens is too small.
_N_LIKELY = 1024
_UINT64 = (1 << 64) - 1
# The noise of token i is computed from the random number with index i. The generator can skip
# numbers that are not needed, but one skip takes as long as drawing about this many numbers. So if
# the gaps between needed numbers are smaller on average, all numbers up to the last needed one are
# drawn.
_N_PER_MOVE = 700
# If at most this many tokens have a probability above 0, the noise of all these tokens is computed.
# Otherwise, a faster computation first excludes the tokens that cannot have the largest value of
# ``log p + noise``.
_N_PLAIN = 8192
# Relative margin of the comparison that excludes tokens which cannot have the largest value of
# ``log p + noise``. The margin is far larger than the rounding errors of float64 logarithms, so
# rounding cannot exclude the right token.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling settings.

    The settings are applied in the same order as in vLLM: bias, penalties, temperature, min-p,
    top-k, top-p.

    The repetition penalty changes the logits of tokens that occurred in the prompt or the answer:
    positive logits are divided by the penalty, and negative logits are multiplied by the penalty.
    The presence penalty is subtracted from the logit of each token that occurred in the answer. The
    frequency penalty is subtracted from the same logits, once for each occurrence of the token.
    """

    # Logits are divided by the temperature before tokens are sampled. 0 means greedy decoding.
    temperature: float = 0.0
    # Keep the most likely tokens until their cumulative probability reaches this value. At least
    # one token is kept.
    top_p: float = 1.0
    # Keep this many of the most likely tokens. 0 keeps all tokens.
    top_k: int = 0
    repetition_penalty: float = 1.0
    # Keep tokens whose probability is at least this fraction of the most likely token's
    # probability.
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Pairs of a token id and the value that is added to the logit of this token.
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "a number from 0 up"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number above 0"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
        ):
            if not is_valid:
                raise DrafterError(f"{name} must be {expected}, got {getattr(self, name)}.")

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the argmax of the unchanged logits."""
        return self.temperature == 0 and not self.logit_bias and not self.reads_text

    @property
    def reads_text(self) -> bool:
        """Whether penalties make the distribution depend on the tokens so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_shape(self, shape: TreeShape) -> None:
        """Check that a shape can be used with these settings.

        Raises:
            DrafterError: tokens are sampled, but chains of this shape end early when their drafts
                become unlikely.
        """
        # The mean probability of all rows decides when chains end. So the other rows of the batch
        # change the length of a row's chain, and with it the number of random numbers that the row
        # draws. But the answer for a seed must not depend on other rows.
        if self.temperature > 0 and shape.stop_below:
            raise DrafterError(
                f"`tree={shape}` ends a chain when its drafts become unlikely, which works only at "
                f"temperature 0. Give a fixed length such as `tree={shape.depth}`, or "
                "`temperature=0`."
            )


GREEDY = SamplingConfig()


def cut_answer(
    tokens: list[int], max_tokens: int, eos_token_ids: frozenset[int]
) -> tuple[list[int], str]:
    """Drop new tokens beyond the end of the answer.

    Returns:
        The remaining tokens, and the reason why the answer ends. The reason is ``stop`` after an
        end-of-sequence token, ``length`` after ``max_tokens`` tokens, and empty if the answer
        continues.
    """
    answer = tokens[:max_tokens]
    for index, token in enumerate(answer):
        if token in eos_token_ids:
            return answer[: index + 1], "stop"
    return answer, "length" if len(answer) == max_tokens else ""


def distribution(
    logits: Tensor, previous: Sequence[int], config: SamplingConfig, n_prompt: int = 0
) -> Tensor:
    """Compute the distribution of the next token, [V] float64 on the device of the logits.

    If the temperature is 0, the most likely token has probability 1.

    Args:
        logits: [V].
        previous: tokens of the prompt and of the answer so far.
        config: sampling settings.
        n_prompt: number of tokens of the prompt.
    """
    scores = _adjusted(logits, previous, config, n_prompt)
    if config.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(), scores.shape[0]).double()
    # Subtract the largest score, so that dividing by a tiny temperature can overflow only to -inf.
    scores = (scores - scores.max()) / config.temperature
    if config.min_p:
        scores = scores.masked_fill(scores < math.log(config.min_p), -torch.inf)
    if 0 < config.top_k < scores.shape[0]:
        scores = scores.masked_fill(scores < scores.topk(config.top_k).values[-1], -torch.inf)
    probability = scores.softmax(0)
    return probability if config.top_p == 1 else _likeliest(probability, config.top_p)


def _adjusted(
    logits: Tensor, previous: Sequence[int], config: SamplingConfig, n_prompt: int
) -> Tensor:
    """Apply bias and penalties to logits [V]. Returns [V] float64 on the device of the logits."""
    if config.logit_bias:
        tokens, values = zip(*config.logit_bias, strict=True)
        bias = to_device(values, logits.device, torch.float32)
        logits = logits.float().index_add(0, to_device(tokens, logits.device), bias)
    scores = penalised(logits, previous, config.repetition_penalty)
    if (config.presence_penalty or config.frequency_penalty) and len(previous) > n_prompt:
        counts = Counter(previous[n_prompt:])
        penalties = [
            config.presence_penalty + config.frequency_penalty * n for n in counts.values()
        ]
        seen = to_device(list(counts), scores.device)
        scores = scores.index_add(
            0, seen, to_device(penalties, scores.device, torch.float64), alpha=-1
        )
    return scores


def penalised(logits: Tensor, previous: Sequence[int], penalty: float) -> Tensor:
    """Apply the repetition penalty to logits [V], given all tokens so far.

    Returns:
        [V] float64 on the device of the logits, or on the CPU for an mps device.
    """
    # An mps device has no float64, so compute on the CPU instead.
    scores = (logits.detach().cpu() if logits.device.type == "mps" else logits.detach()).double()
    if penalty == 1 or not previous:
        return scores
    seen = to_device(sorted(set(previous)), scores.device)
    seen_scores = scores[seen]
    changed = torch.where(seen_scores < 0, seen_scores * penalty, seen_scores / penalty)
    # Dividing a score by a tiny penalty can overflow to infinity, so clamp the result.
    return scores.index_put((seen,), changed.clamp(max=torch.finfo(scores.dtype).max))


def _likeliest(probability: Tensor, top_p: float) -> Tensor:
    """Restrict a distribution [V] to the most likely tokens, as top-p does.

    Tokens are kept until their cumulative probability reaches ``top_p``. At least one token
    remains.
    """
    # The code below sorts only the most likely tokens, and then checks whether they are enough. On
    # CUDA, this check would synchronize with the device. So always sort all tokens there.
    if probability.device.type == "cuda":
        ordered, order = probability.sort(descending=True)
        remaining = torch.where(ordered.cumsum(0) - ordered < top_p, ordered, 0.0)
        return torch.zeros_like(probability).scatter(0, order, remaining / remaining.sum())
    ordered, order = probability.topk(min(_N_LIKELY, len(probability)))
    mass = ordered.cumsum(0)
    if mass[-1] < top_p:
        ordered, order = probability.sort(descending=True)
        mass = ordered.cumsum(0)
    is_kept = mass - ordered < top_p
    remaining = ordered[is_kept]
    return torch.zeros_like(probability).index_put_((order[is_kept],), remaining / remaining.sum())


def draw_rows(probabilities: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """Sample a token from each distribution.

    Args:
        probabilities: [B, V] float64. The rows need not be normalized.
        generators: a random generator for each row.

    Returns:
        [B] int64.
    """
    # Draw a uniform number u, and choose the first token whose cumulative sum exceeds u times the
    # total. torch.multinomial would take 20 times as long with a vocabulary of 128,256 tokens.
    cumulative = probabilities.cumsum(dim=-1)
    uniform = [
        float(torch.rand(1, generator=generator, dtype=torch.float64)) for generator in generators
    ]
    # Rounding can make u times the total equal to the total, and no cumulative sum exceeds the
    # total. So limit the product to the largest float below the total.
    below_total = cumulative[:, -1:].nextafter(cumulative.new_zeros(()))
    drawn = to_device([[value] for value in uniform], probabilities.device, torch.float64)
    wanted = (drawn * cumulative[:, -1:]).minimum(below_total)
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0]


def noise(seed: int, position: int, tokens: np.ndarray) -> Tensor:
    """Compute the Gumbel noise of tokens, [n] float64 on the host.

    The noise of a token depends only on seed, position and token.

    Args:
        seed: an integer of 64 bits.
        position: position of the token in the sequence.
        tokens: [n], token ids in ascending order.
    """
    # Philox 4x64 with the key (seed, position) gives the same random bits on every machine. Token i
    # uses the random number with index i.
    generator = _philox(seed, position)
    if tokens[-1] < _N_PER_MOVE * len(tokens):
        bits = generator.random_raw(int(tokens[-1]) + 1)[tokens]
    else:
        bits = np.empty(len(tokens), np.uint64)
        n_drawn = 0
        for index, token in enumerate(tokens.tolist()):
            # Each step of Philox gives four random numbers.
            block, index_in_block = divmod(token, 4)
            if block >= n_drawn:
                generator.advance(block - n_drawn)
                numbers = generator.random_raw(4)
                n_drawn = block + 1
            bits[index] = numbers[index_in_block]
    # Turn 52 random bits into a uniform number between 0 and 1. One half is added to the integer of
    # 52 bits, so the number is never exactly 0 or 1, for which the noise would be infinite.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.from_numpy(-np.log(-np.log(uniform)))


def _philox(seed: int, position: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed & _UINT64, position], dtype=np.uint64))


def _contenders(probability: Tensor, seed: int, position: int) -> np.ndarray:
    """List the candidates for the token with the largest ``log p + noise``.

    If at most ``_N_PLAIN`` tokens have a probability above 0, the list contains all these tokens.
    Otherwise it contains only the few tokens that can have the largest value.

    Args:
        probability: p [V], on the host.
        seed: seed of the noise, an integer of 64 bits.
        position: position of the token in the sequence.

    Returns:
        [n] int64, ascending.
    """
    is_possible = (probability != 0).numpy()
    n_possible = np.count_nonzero(is_possible)
    # If logits are NaN, there may be no token with a probability above 0. Then return only token 0.
    if n_possible <= _N_PLAIN:
        return np.flatnonzero(is_possible) if n_possible else np.arange(1)
    # The noise is ``-log(-log u)``, where u is a uniform random number between 0 and 1. So the
    # token with the largest ``log p + noise`` has the smallest ``-log(u) / p``. ``-log(u)`` is at
    # least ``1 - u``, so ``(1 - u) / p`` is a lower bound of this value that needs no logarithm.
    # Exclude each token whose lower bound is above the value of the token with the smallest bound.
    bits = _philox(seed, position).random_raw(len(probability)) >> np.uint64(12)
    # ``u`` is ``(n + 0.5) * 2**-52``, if n is the integer of the 52 random bits. A float64 with the
    # exponent bits of 1.0 and these 52 bits as its fraction is ``1 + n * 2**-52``. This is equal to
    # ``1 + u - 2**-53``.
    bits |= np.uint64(0x3FF << 52)
    # 1 - u for each token. u is below 1, so 1 - u is never 0.
    above = torch.from_numpy(bits.view(np.float64)).neg_().add_(2.0).sub_(2.0**-53)
    bounds = above / probability
    best = bounds.argmin()
    reached = -torch.log1p(-above[best]) / probability[best]
    # Comparisons with NaN are false, so this negated comparison keeps tokens whose value is NaN.
    return np.flatnonzero(~(bounds > reached * (1 + _ROUNDING)).numpy())


def choose(
    logits: Tensor,
    previous: Sequence[int],
    sampling: SamplingConfig,
    seed: int,
    position: int,
    n_prompt: int = 0,
) -> int:
    """Choose the token at a position with keyed noise, or greedily if the temperature is 0.

    Args:
        logits: [V], logits of the target or of a drafter. Tokens that are not allowed have -inf.
        previous: tokens of the prompt and of the answer so far.
        sampling: sampling settings.
        seed: seed of the sequence. The noise at different positions is independent.
        position: position of the token in the sequence, counted from the start of the prompt.
        n_prompt: number of tokens of the prompt.
    """
    if sampling.temperature == 0:
        return int(_adjusted(logits, previous, sampling, n_prompt).argmax())
    return _likeliest_with_noise(
        distribution(logits, previous, sampling, n_prompt).cpu(), seed, position
    )


def _likeliest_with_noise(probability: Tensor, seed: int, position: int) -> int:
    """Find the token with the largest ``log p + noise``, given p [V] on the host."""
    tokens = _contenders(probability, seed, position)
    log_p = probability[torch.from_numpy(tokens)].log()
    return int(tokens[int((log_p + noise(seed, position, tokens)).argmax())])


@dataclass(frozen=True)
class SamplingState:
    """The tokens of a sequence so far, and the settings that determine its next tokens."""

    tokens: list[int]  # Tokens of the prompt and of the answer so far.
    sampling: SamplingConfig
    seed: int
    n_prompt: int = 0
    # A function that takes the tokens of the answer so far. It returns [V] bool, true for tokens
    # that are allowed as the next token. If None, all tokens are allowed.
    allowed: Callable[[Sequence[int]], np.ndarray] | None = None
    # Minimum number of tokens of the answer. The tokens in ``ends`` end the answer, so they are not
    # chosen before the answer has this length.
    min_tokens: int = 0
    ends: frozenset[int] = frozenset()

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the argmax of the unchanged logits."""
        return self.allowed is None and self.sampling.is_argmax and not self._is_short

    @property
    def _is_short(self) -> bool:
        return len(self.tokens) - self.n_prompt < self.min_tokens and bool(self.ends)

    def masked(self, logits: Tensor) -> Tensor:
        """Return the logits [V], with -inf for all tokens that :attr:`allowed` excludes."""
        if self.allowed is None:
            return logits
        allowed = torch.from_numpy(self.allowed(self.tokens[self.n_prompt :]))
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def choosable(self, logits: Tensor) -> Tensor:
        """Return the logits [V], with -inf for all tokens that must not be chosen.

        These are the tokens that :meth:`masked` excludes, and the tokens of ``ends`` before the
        minimum length.
        """
        logits = self.masked(logits)
        if not self._is_short:
            return logits
        others = logits.index_fill(0, to_device(sorted(self.ends), logits.device), -torch.inf)
        # If all allowed tokens are in ``ends``, they can be chosen nevertheless. The answer then
        # ends before its minimum length. vLLM does the same.
        return (
            others
            if self.allowed is None
            else torch.where((others > -torch.inf).any(), others, logits)
        )


def choose_rows(logits: Sequence[Tensor], states: Sequence[SamplingState]) -> list[int]:
    """Choose each sequence's next token as :func:`choose` does.

    The function synchronizes with the device only once for all sequences.

    Args:
        logits: one tensor [V] per sequence.
        states: the tokens so far and the settings of each sequence.
    """
    pairs = [(state.choosable(row), state) for row, state in zip(logits, states, strict=True)]
    if not logits[0].is_cuda:
        return [
            choose(row, state.tokens, state.sampling, state.seed, len(state.tokens), state.n_prompt)
            for row, state in pairs
        ]
    probabilities = torch.stack(
        [distribution(row, state.tokens, state.sampling, state.n_prompt) for row, state in pairs]
    )
    return [
        _likeliest_with_noise(p, state.seed, len(state.tokens))
        for p, state in zip(probabilities.cpu(), states, strict=True)
    ]


class ChainChoice:
    """Chooses the drafted tokens of chains, level by level.

    Each row of the batch has a :class:`SamplingState` whose last token is the root.
    """

    def __init__(self, states: Sequence[SamplingState]) -> None:
        self._states = [replace(state, tokens=list(state.tokens)) for state in states]
        self._is_argmax = all(state.is_argmax for state in states)

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose the next token of each row, [B] int64, from the drafter's logits [B, V]."""
        # If only an argmax is needed, compute it on the device, so that no logits are copied to the
        # host.
        if self._is_argmax:
            return logits.argmax(dim=-1)
        chosen = choose_rows(logits.unbind(), self._states)
        for state, token in zip(self._states, chosen, strict=True):
            state.tokens.append(token)
        return to_device(chosen, logits.device)


def accept_argmax(
    tokens: Sequence[int], parents: Sequence[int], predicted: Sequence[int]
) -> tuple[list[int], int]:
    """Verify the drafts of a row greedily.

    Args:
        tokens: the drafts.
        parents: index of each draft's parent, -1 for the root.
        predicted: the N + 1 tokens that the target chooses: the first one after the root, and then
            one after each of the N drafts.

    Returns:
        The indices of the accepted drafts from the first level down, and the token that the target
        chooses after the last accepted draft.
    """
    children: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        children.setdefault((parent, token), node)
    accepted: list[int] = []
    parent_of_next = -1
    while (
        child := children.get((parent_of_next, token := predicted[parent_of_next + 1]))
    ) is not None:
        accepted.append(parent_of_next := child)
    return accepted, token


class Verified(NamedTuple):
    """A sequence, its drafts, and the target's logits that verify these drafts.

    ``state`` contains the committed tokens and the settings of the sequence. The last committed
    token is the root, to which the drafts are attached.
    """

    state: SamplingState
    tokens: Sequence[int]  # Token ids of the N drafts.
    parents: Sequence[int]
    logits: Tensor  # [N + 1, V], the target's logits after the root and after each draft.


def accept_chosen(rounds: Sequence[Verified]) -> list[tuple[list[int], int]]:
    """Verify the drafts of several sequences with keyed choices (:func:`choose`), level by level.

    Returns:
        For each sequence, the accepted drafts and the next token, as :func:`accept_argmax` returns
        them.
    """
    states = [replace(verified.state, tokens=list(verified.state.tokens)) for verified in rounds]
    accepted: list[list[int]] = [[] for _ in rounds]
    bonus = [0] * len(rounds)
    open_ = list(range(len(rounds)))
    while open_:
        nodes = [accepted[row][-1] if accepted[row] else -1 for row in open_]
        logits = [rounds[row].logits[node + 1] for row, node in zip(open_, nodes, strict=True)]
        bonus_of = zip(
            open_, nodes, choose_rows(logits, [states[row] for row in open_]), strict=True
        )
        open_ = []
        for row, node, token in bonus_of:
            children = enumerate(zip(rounds[row].tokens, rounds[row].parents, strict=True))
            draft = next((child for child, edge in children if edge == (token, node)), None)
            if draft is None:
                bonus[row] = token
                continue
            accepted[row].append(draft)
            states[row].tokens.append(token)
            open_.append(row)
    return list(zip(accepted, bonus, strict=True))


def accept_sampled(
    tree: DraftTree,
    row: int,
    logits: Tensor,
    previous: Sequence[int],
    config: SamplingConfig,
    generator: torch.Generator | None,
    n_prompt: int = 0,
) -> tuple[list[int], int]:
    """Verify the drafts of a row by rejection sampling, or greedily if the temperature is 0.

    Args:
        tree: the drafts of all rows of the batch.
        row: the row to verify.
        logits: [N + 1, V], the target's logits after the root and after each draft.
        previous: tokens of the prompt and committed tokens, including the root.
        config: sampling settings.
        generator: the row's random generator.
        n_prompt: number of tokens of the prompt.

    Returns:
        The accepted drafts and the next token, as :func:`accept_argmax` returns them.
    """
    tokens, parents = (rows[row] for rows in tree.on_host)
    accepted: list[int] = []
    judge = _Judge(
        tree,
        row,
        logits,
        previous,
        lambda node_logits, before: distribution(node_logits, before, config, n_prompt),
    )
    while True:
        last_accepted = accepted[-1] if accepted else -1
        # Do not draw random numbers for padding. A row must draw the same numbers whether it is
        # decoded in a batch or alone, and a row that is decoded alone has no padding.
        children = [
            node
            for node, parent in enumerate(parents)
            if parent == last_accepted and tokens[node] != NO_DRAFT
        ]
        node, probability = _try(judge, last_accepted, children, generator)
        if node is None:
            return accepted, int(draw_rows(probability[None], [generator]))
        accepted.append(node)


class _Judge:
    """Computes the probabilities that verify the drafts of one row.

    :meth:`after` gives the target's distribution of the token after the root or after a node. A
    distribution is computed when it is first needed. :meth:`chance` gives the probabilities of a
    draft.
    """

    def __init__(
        self,
        tree: DraftTree,
        row: int,
        logits: Tensor,
        previous: Sequence[int],
        of: Callable[..., Tensor],
    ) -> None:
        # ``of`` computes the distribution of a token from its logits [V] and all tokens before it.
        self._logits, self._previous, self._of = logits, previous, of
        self.tokens, self._parents = (rows[row] for rows in tree.on_host)
        proposals = None if tree.probabilities is None else tree.probabilities[row]
        self.proposals = (
            proposals if proposals is None or logits.device.type != "mps" else proposals.cpu()
        )
        self._after: dict[int, Tensor] = {}
        self._chances: list[list[float]] | None = None
        # Copy the probabilities of all drafts at once, because each copy makes the host wait for
        # the device.
        if logits.device.type == "cuda" and self.tokens:
            everything = torch.stack([self._chance(node) for node in range(len(self.tokens))])
            self._chances = everything.tolist()

    def after(self, at: int) -> Tensor:
        """Compute the distribution of the token after a node (-1: the root), [V] float64."""
        if at not in self._after:
            above = at
            path = list[int]()
            while above >= 0:
                path.append(self.tokens[above])
                above = self._parents[above]
            before = [*self._previous, *reversed(path)]
            self._after[at] = self._of(self._logits[at + 1], before)
        return self._after[at]

    def chance(self, node: int) -> list[float]:
        """Return a list with the probability that the target gives to a draft.

        If the draft was sampled, the list has a second item: the probability that the drafter gives
        to the same draft.
        """
        return self._chances[node] if self._chances is not None else self._chance(node).tolist()

    def _chance(self, node: int) -> Tensor:
        # Replace the padding value -1 by a valid index. The result for padding is never used.
        token = max(self.tokens[node], 0)
        of_target = self.after(self._parents[node])[token]
        return (
            of_target[None]
            if self.proposals is None
            else torch.stack((of_target, self.proposals[node, token]))
        )


def _try(
    judge: _Judge, at: int, drafts: Sequence[int], generator: torch.Generator | None
) -> tuple[int | None, Tensor]:
    """Try the drafts that follow a node, one after another, until one is accepted.

    If the drafts were not sampled, there may be any number of drafts. If they were sampled from the
    drafter's distribution [V], there is at most one draft.

    Returns:
        The index of the accepted draft or None, and a distribution [V]. The index is None if no
        draft is accepted. The next token must then be sampled from the distribution.
    """
    probability = judge.after(at)
    left = 1.0
    for node in drafts:
        of_target, *of_drafter = judge.chance(node)
        if of_drafter:
            ratio = of_target / of_drafter[0] if of_drafter[0] else math.inf
        else:
            ratio = of_target / left if left > 0 else 0.0
        if _accepts(ratio, generator):
            return node, probability
        left -= of_target
    if not drafts:
        return None, probability
    if judge.proposals is None:
        tried = to_device([judge.tokens[node] for node in drafts], probability.device)
        rest = probability.index_fill(0, tried, 0.0)
    else:
        rest = (probability - judge.proposals[drafts[0]]).clamp(min=0)
    # Rounding can make all remaining probabilities 0. Then use the target's distribution.
    total = rest.sum()
    return None, torch.where(total > 0, rest / total, probability)


def _accepts(ratio: float, generator: torch.Generator | None) -> bool:
    return float(torch.rand((), generator=generator, dtype=torch.float64)) < ratio
