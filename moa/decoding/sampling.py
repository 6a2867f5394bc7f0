"""The next token: settings, its distribution, its choice by keyed noise, and the verification of drafts.

Shapes: B rows, N nodes, V vocabulary.

Drafts are verified in one of three ways; all give each token the target's distribution, whatever the drafter proposes.

- Greedily: a draft is accepted if it is the target's argmax.
- By rejection (:func:`accept_sampled`; Leviathan et al. 2023, Algorithm 1): a draft x that was drawn from q is accepted
  with probability min(1, p(x) / q(x)), else the next token comes from max(0, p - q), normalised. Drafts that were
  picked (the most likely ones, as in a tree) are the case of a q that puts all its mass on x: accepted with probability
  p(x), else p(x) becomes 0 and the next child is tried on the normalised rest.
- By the target's own choice (:func:`accept_chosen`): the token at a position is the one with the largest log p + g,
  where g is Gumbel noise keyed by (seed, position). Over seeds it has the distribution p (the Gumbel-max trick); for a
  given seed the text is the same whatever drafts it and which sequences share a call. A drafter that adds the same
  noise to its own log-probabilities draws the target's token more often than by independent draws.

Distributions stay on the device of the logits; uniform numbers are made on the host, so that a seed means the same on
every device.
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

# Most likely tokens that top-p looks at first; the whole vocabulary is sorted only if their mass is
# too small.
_N_LIKELY = 1024
_UINT64 = (1 << 64) - 1
# Numbers that a random generator makes in the time that it takes to move to the next one that is
# wanted.
_N_PER_MOVE = 700
# possible tokens that are compared as they are; of more it is sought first which of them can be
# chosen
_N_PLAIN = 8192
# relative error of what is compared in choosing a token: logarithms of float64 are far more exact
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SamplingConfig:
    """Settings of sampling, applied in the order of vLLM: bias, penalties, temperature, min-p, top-k, top-p.

    The repetition penalty divides the logits of tokens that occurred, in the prompt too, or multiplies them where
    negative. Those for presence and frequency are subtracted, once and for each time that the answer has a token.
    """

    temperature: float = 0.0  # 0 for greedy decoding
    # keep the most likely tokens up to this cumulative probability, at least one
    top_p: float = 1.0
    top_k: int = 0  # keep this many tokens; 0 keeps all
    repetition_penalty: float = 1.0
    min_p: float = 0.0  # keep tokens of at least this share of the most likely one's probability
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # what is added to the logits of some tokens

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise DrafterError(f"temperature must be a number from 0 up, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise DrafterError(f"top_p must be above 0 and at most 1, got {self.top_p}.")
        if self.top_k < 0:
            raise DrafterError(f"top_k must be at least 0 (0 keeps all tokens), got {self.top_k}.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise DrafterError(
                f"repetition_penalty must be a number above 0, got {self.repetition_penalty}."
            )
        if not 0 <= self.min_p <= 1:
            raise DrafterError(f"min_p must be from 0 to 1, got {self.min_p}.")

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the plain argmax of the logits."""
        return self.temperature == 0 and not self.logit_bias and not self.reads_text

    @property
    def reads_text(self) -> bool:
        """Whether the tokens so far change the distribution beside the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse chains that stop by their probability where drafts are sampled."""
        # Their length would depend on the other rows of a batch, and so would the answer of a seed.
        if self.temperature > 0 and shape.stop_below:
            raise DrafterError(
                f"chains such as {shape} stop by their probability in greedy decoding only; give a chain's length "
                f"such as {shape.depth}, or a temperature of 0."
            )


GREEDY = SamplingConfig()


def cut_answer(
    tokens: list[int], max_tokens: int, eos_token_ids: frozenset[int]
) -> tuple[list[int], str]:
    """Cut new tokens of an answer; also return why it ends: ``stop``, ``length``, or empty if it continues."""
    kept = tokens[:max_tokens]
    for index, token in enumerate(kept):
        if token in eos_token_ids:
            return kept[: index + 1], "stop"
    return kept, "length" if len(kept) == max_tokens else ""


def distribution(
    logits: Tensor, previous: Sequence[int], config: SamplingConfig, n_prompt: int = 0
) -> Tensor:
    """The distribution of the next token, given logits [V], prompt and all tokens so far: [V] float64 on their device.

    With temperature 0 all mass is on the most likely token. The answer begins after ``n_prompt`` tokens.
    """
    scores = _adjusted(logits, previous, config, n_prompt)
    if config.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(), scores.shape[0]).double()
    # at most 0: a tiny temperature overflows to -inf alone
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
    """Apply bias and penalties to logits [V]: [V] float64 on their device."""
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
    """Apply the repetition penalty to logits [V], given all tokens so far: [V] float64 on their device."""
    # mps has no float64
    scores = (logits.detach().cpu() if logits.device.type == "mps" else logits.detach()).double()
    if penalty == 1 or not previous:
        return scores
    seen = to_device(sorted(set(previous)), scores.device)
    found = scores[seen]
    changed = torch.where(found < 0, found * penalty, found / penalty)
    # a tiny penalty overflows
    return scores.index_put((seen,), changed.clamp(max=torch.finfo(scores.dtype).max))


def _likeliest(probability: Tensor, top_p: float) -> Tensor:
    """Restrict a distribution [V] to its most likely tokens up to a cumulative probability, at least one."""
    if probability.device.type == "cuda":  # nothing here waits for the device
        ordered, order = probability.sort(descending=True)
        kept = torch.where(ordered.cumsum(0) - ordered < top_p, ordered, 0.0)
        return torch.zeros_like(probability).scatter(0, order, kept / kept.sum())
    ordered, order = probability.topk(min(_N_LIKELY, len(probability)))
    mass = ordered.cumsum(0)
    if mass[-1] < top_p:
        ordered, order = probability.sort(descending=True)
        mass = ordered.cumsum(0)
    is_kept = mass - ordered < top_p
    kept = ordered[is_kept]
    return torch.zeros_like(probability).index_put_((order[is_kept],), kept / kept.sum())


def draw_rows(probabilities: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """Draw a token from each distribution, which need not be normalised: [B, V] float64 -> [B] int64."""
    # The first at which the cumulative sum exceeds u times the total, for a uniform u of its row's
    # generator;
    # torch.multinomial takes 20 times as long at a vocabulary of 128,256.
    cumulative = probabilities.cumsum(dim=-1)
    uniform = [
        float(torch.rand(1, generator=generator, dtype=torch.float64)) for generator in generators
    ]
    # Rounding can give the total itself, which no cumulative sum exceeds.
    below_total = cumulative[:, -1:].nextafter(cumulative.new_zeros(()))
    drawn = to_device([[value] for value in uniform], probabilities.device, torch.float64)
    wanted = (drawn * cumulative[:, -1:]).minimum(below_total)
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0]


def noise(seed: int, position: int, tokens: np.ndarray) -> Tensor:
    """Draw the Gumbel noise of tokens [n], ascending, for a seed of 64 bits and a position: [n] float64 on the host.

    The noise of a token is a function of seed, position and token alone.
    """
    # Philox 4x64 with the key (seed, position) gives the same bits on every machine, of which token
    # i has the i-th.
    generator = _philox(seed, position)
    if tokens[-1] < _N_PER_MOVE * len(tokens):
        bits = generator.random_raw(int(tokens[-1]) + 1)[tokens]
    else:
        bits = np.empty(len(tokens), np.uint64)
        n_drawn = 0
        for index, token in enumerate(tokens.tolist()):
            block, place = divmod(token, 4)  # a step of the generator gives four numbers
            if block >= n_drawn:
                generator.advance(block - n_drawn)
                numbers = generator.random_raw(4)
                n_drawn = block + 1
            bits[index] = numbers[place]
    # 52 bits and a half: neither 0 nor 1 can come out, whose noise would be infinite.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.from_numpy(-np.log(-np.log(uniform)))


def _philox(seed: int, position: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed & _UINT64, position], dtype=np.uint64))


def _contenders(probability: Tensor, seed: int, position: int) -> np.ndarray:
    """List tokens that include the one with the largest log p + noise, given p [V] on the host: [n] int64, ascending.

    They are those of a probability, or of many the few that can be the largest.
    """
    is_possible = (probability != 0).numpy()
    n_possible = np.count_nonzero(is_possible)
    if n_possible <= _N_PLAIN:  # none where logits are not numbers: the first token then
        return np.flatnonzero(is_possible) if n_possible else np.arange(1)
    # With noise -log(-log u) the largest log p + noise has the smallest -log(u) / p. As 1 - u is at
    # most -log(u), no
    # token whose (1 - u) / p is above some token's -log(u) / p can be it; so a logarithm for each
    # is not needed.
    bits = _philox(seed, position).random_raw(len(probability)) >> np.uint64(12)
    bits |= np.uint64(0x3FF << 52)  # as a float64: from 1 to 2, u + 1 less half of the last bit
    above = torch.from_numpy(bits.view(np.float64)).neg_().add_(2.0).sub_(2.0**-53)  # 1 - u
    bounds = above / probability
    best = bounds.argmin()
    reached = -torch.log1p(-above[best]) / probability[best]
    # all of them where something is not a number
    return np.flatnonzero(~(bounds > reached * (1 + _ROUNDING)).numpy())


def choose(
    logits: Tensor,
    previous: Sequence[int],
    sampling: SamplingConfig,
    seed: int,
    position: int,
    n_prompt: int = 0,
) -> int:
    """Choose the token at a position of a text, the prompt included, given prompt and tokens so far.

    Args:
        logits: [V], of the target or of a drafter, -inf where a token cannot come.
        seed: of the text; tokens of one seed at different positions are independent.
    """
    if sampling.temperature == 0:
        return int(_adjusted(logits, previous, sampling, n_prompt).argmax())
    return _likeliest_with_noise(
        distribution(logits, previous, sampling, n_prompt).cpu(), seed, position
    )


def _likeliest_with_noise(probability: Tensor, seed: int, position: int) -> int:
    """Find the token with the largest log p + noise, given p [V] on the host."""
    tokens = _contenders(probability, seed, position)
    log_p = probability[torch.from_numpy(tokens)].log()
    return int(tokens[int((log_p + noise(seed, position, tokens)).argmax())])


@dataclass(frozen=True)
class Text:
    """All tokens of a text so far, and what decides the next ones."""

    tokens: list[int]
    sampling: SamplingConfig
    seed: int
    n_prompt: int = 0
    # which tokens may follow an answer: [V] bool
    allowed: Callable[[Sequence[int]], np.ndarray] | None = None
    min_tokens: int = 0  # of the answer, before which none of the ends comes
    ends: frozenset[int] = frozenset()

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the plain argmax of the logits."""
        return self.allowed is None and self.sampling.is_argmax and not self._is_short

    @property
    def _is_short(self) -> bool:
        return len(self.tokens) - self.n_prompt < self.min_tokens and bool(self.ends)

    def masked(self, logits: Tensor) -> Tensor:
        """Set the logits [V] of tokens that may not come to -inf."""
        if self.allowed is None:
            return logits
        allowed = torch.from_numpy(self.allowed(self.tokens[self.n_prompt :]))
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def choosable(self, logits: Tensor) -> Tensor:
        """Set the logits [V] of tokens that are not to be chosen to -inf: :meth:`masked` ones, and too early ends."""
        logits = self.masked(logits)
        if not self._is_short:
            return logits
        others = logits.index_fill(0, to_device(sorted(self.ends), logits.device), -torch.inf)
        # Where nothing else is allowed the answer ends all the same, as in vLLM.
        return (
            others
            if self.allowed is None
            else torch.where((others > -torch.inf).any(), others, logits)
        )


def choose_rows(logits: Sequence[Tensor], texts: Sequence[Text]) -> list[int]:
    """Choose the token after each text as :func:`choose` does, given logits [V] of each, with one wait for a device."""
    pairs = [(text.choosable(own), text) for own, text in zip(logits, texts, strict=True)]
    if not logits[0].is_cuda:
        return [
            choose(own, text.tokens, text.sampling, text.seed, len(text.tokens), text.n_prompt)
            for own, text in pairs
        ]
    found = torch.stack(
        [distribution(own, text.tokens, text.sampling, text.n_prompt) for own, text in pairs]
    )
    return [
        _likeliest_with_noise(p, text.seed, len(text.tokens))
        for p, text in zip(found.cpu(), texts, strict=True)
    ]


class ChainChoice:
    """Chooses the tokens of chains of drafts, level by level, for texts that end with the root, one a row."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = [replace(text, tokens=list(text.tokens)) for text in texts]
        self._is_argmax = all(text.is_argmax for text in texts)

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose the next token of each row from the drafter's logits [B, V]: [B] int64."""
        if self._is_argmax:  # nothing comes to the host
            return logits.argmax(dim=-1)
        chosen = choose_rows(logits.unbind(), self._texts)
        for text, token in zip(self._texts, chosen, strict=True):
            text.tokens.append(token)
        return to_device(chosen, logits.device)


def accept_argmax(
    tokens: Sequence[int], parents: Sequence[int], predicted: Sequence[int]
) -> tuple[list[int], int]:
    """Verify greedily, given N + 1 predicted tokens: after the root, -1, then after each node.

    Returns the accepted nodes from the root down, and the target's next token after the last of them.
    """
    children: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        children.setdefault((parent, token), node)
    accepted: list[int] = []
    at = -1
    while (found := children.get((at, token := predicted[at + 1]))) is not None:
        accepted.append(at := found)
    return accepted, token


class Verified(NamedTuple):
    """A text that ends with the root, its drafts, and the target's logits after the root and each of them."""

    text: Text
    tokens: Sequence[int]  # of the drafts
    parents: Sequence[int]
    logits: Tensor  # [N + 1, V]


def accept_chosen(rounds: Sequence[Verified]) -> list[tuple[list[int], int]]:
    """Verify rounds of several texts by the target's own choices, level by level; see :func:`accept_argmax`."""
    texts = [replace(one.text, tokens=list(one.text.tokens)) for one in rounds]
    accepted: list[list[int]] = [[] for _ in rounds]
    bonus = [0] * len(rounds)
    open_ = list(range(len(rounds)))
    while open_:
        at = [accepted[row][-1] if accepted[row] else -1 for row in open_]
        logits = [rounds[row].logits[node + 1] for row, node in zip(open_, at, strict=True)]
        bonus_of = zip(open_, at, choose_rows(logits, [texts[row] for row in open_]), strict=True)
        open_ = []
        for row, node, token in bonus_of:
            children = enumerate(zip(rounds[row].tokens, rounds[row].parents, strict=True))
            found = next((child for child, edge in children if edge == (token, node)), None)
            if found is None:
                bonus[row] = token
                continue
            accepted[row].append(found)
            texts[row].tokens.append(token)
            open_.append(row)
    return list(zip(accepted, bonus, strict=True))


def accept_sampled(
    tree: DraftTree,
    row: int,
    logits: Tensor,  # [N + 1, V], the target's after the root and after each node
    previous: Sequence[int],  # prompt and committed tokens, the root included
    config: SamplingConfig,
    generator: torch.Generator | None,
    n_prompt: int = 0,
) -> tuple[list[int], int]:
    """Verify one row by sampling, or greedily with penalties; see :func:`accept_argmax`."""
    tokens, parents = (rows[row] for rows in tree.on_host)
    accepted: list[int] = []
    judge = _Judge(
        tree, row, logits, previous, lambda own, text: distribution(own, text, config, n_prompt)
    )
    while True:
        at = accepted[-1] if accepted else -1
        # Padding takes no random number: a row alone has none.
        children = [
            node for node, parent in enumerate(parents) if parent == at and tokens[node] != NO_DRAFT
        ]
        node, probability = _try(judge, at, children, generator)
        if node is None:
            return accepted, int(draw_rows(probability[None], [generator]))
        accepted.append(node)


class _Judge:
    """The target's distributions after the root and each node of a row, and the probabilities of the drafts."""

    def __init__(
        self,
        tree: DraftTree,
        row: int,
        logits: Tensor,
        previous: Sequence[int],
        of: Callable[..., Tensor],
    ) -> None:
        # of: the distribution of logits after a text
        self._logits, self._previous, self._of = logits, previous, of
        self.tokens, self._parents = (rows[row] for rows in tree.on_host)
        proposals = None if tree.probabilities is None else tree.probabilities[row]
        self.proposals = (
            proposals if proposals is None or logits.device.type != "mps" else proposals.cpu()
        )
        self._after: dict[int, Tensor] = {}
        self._chances: list[list[float]] | None = None
        # all of them at once: each time that one is read waits
        if logits.device.type == "cuda" and self.tokens:
            everything = torch.stack([self._chance(node) for node in range(len(self.tokens))])
            self._chances = everything.tolist()

    def after(self, at: int) -> Tensor:
        """Compute the distribution after a node, -1 for the root: [V] float64."""
        if at not in self._after:
            above = at
            path = list[int]()
            while above >= 0:
                path.append(self.tokens[above])
                above = self._parents[above]
            text = [*self._previous, *reversed(path)]
            self._after[at] = self._of(self._logits[at + 1], text)
        return self._after[at]

    def chance(self, node: int) -> list[float]:
        """Return the probability of a draft after its parent, and that with which it was drawn, if it was."""
        return self._chances[node] if self._chances is not None else self._chance(node).tolist()

    def _chance(self, node: int) -> Tensor:
        token = max(self.tokens[node], 0)  # padding is never asked for
        of_target = self.after(self._parents[node])[token]
        return (
            of_target[None]
            if self.proposals is None
            else torch.stack((of_target, self.proposals[node, token]))
        )


def _try(
    judge: _Judge, at: int, drafts: Sequence[int], generator: torch.Generator | None
) -> tuple[int | None, Tensor]:
    """Try the drafts after a node, in order; return the accepted one or None, and what to draw from instead.

    Any number of them were picked, or one was drawn from a proposal [V].
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
    total = rest.sum()  # 0 where rounding left no mass
    return None, torch.where(total > 0, rest / total, probability)


def _accepts(ratio: float, generator: torch.Generator | None) -> bool:
    return float(torch.rand((), generator=generator, dtype=torch.float64)) < ratio
