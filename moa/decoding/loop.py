"""The decoding loop for a batch: plain, or speculative with chains or trees of drafts.

Speculative decoding is Algorithm 1 of the Mixture of Attentions paper (arXiv 2410.03804). The
example shows one round of one sequence, with a chain of three drafts. Under the words, ``=`` marks
committed tokens with target KV, and ``~`` marks the tokens of the target call:

    committed     The cat sat on             "on", the root, is committed, but has no target KV yet
    target KV     ===========

    propose       the drafter drafts         the    mat    and
    verify        one target call on     on  the    mat    and
                  root and drafts        ~~  ~~~    ~~~    ~~~
                  its next tokens        the mat    .      then
    accept        the drafts that equal the target's own tokens: "the", "mat"; then the target's
                  next token "." (the bonus)
    commit        the KV of "on the mat" is kept, the KV of "and" is dropped; "." is the next root
                  The cat sat on the mat .
                  ======================

The round committed three tokens with one target call. The acceptance length is the mean number of
committed tokens over all rounds, without the prefill. A tree of drafts is also verified in one
target call, under a mask in which each draft sees only its ancestors (``tree``). A round without
drafts is a plain decoding step, so the same loop does plain and speculative decoding.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ...errors import DrafterError
from ..drafters.caches import padded
from ..nn.graphs import n_recorded
from ..nn.masks import to_device
from ..targets.cache import TargetCache
from ..targets.live import Target, mark_moment, seconds_between
from .policy import ShapePolicy
from .proposer import Proposer
from .sampling import GREEDY, SamplingConfig, accept_argmax, accept_sampled, cut_answer
from .tree import NO_DRAFT, DraftTree, TreeShape, ancestors

# The proposer for plain decoding. Its method ``propose`` is never called.
PLAIN = Proposer()
# A function that is called when tokens are committed. Its arguments are the tokens, and one bool
# per token that is true if the token was a draft.
OnTokens = Callable[[list[int], list[bool]], None]
# A function that is called after each verification. Its arguments are the drafts of all rows, and
# for each row the indices of its accepted drafts, in the order of their levels.
OnRound = Callable[[DraftTree, list[list[int]]], None]


@dataclass
class DecodeStats:
    """Token counts and times of a generation."""

    # One entry for each target call after the prefill: the number of tokens committed by its round.
    committed_per_call: list[int] = field(default_factory=list)
    # Number of generated tokens, including the first token, which is chosen after the prefill.
    n_tokens: int = 0
    n_drafted: int = 0
    # Number of target calls that verified drafts.
    n_drafted_calls: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    @property
    def n_target_calls(self) -> int:
        """Number of target calls after the prefill."""
        return len(self.committed_per_call)

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens committed per target call, including the bonus token.

        The result is NaN if there was no target call after the prefill.
        """
        return (
            sum(self.committed_per_call) / self.n_target_calls
            if self.committed_per_call
            else float("nan")
        )


def sum_stats(runs: Iterable[DecodeStats]) -> DecodeStats:
    """Return the sums of the counts and times of several generations."""
    total = DecodeStats()
    for run in runs:
        for item in fields(DecodeStats):
            setattr(total, item.name, getattr(total, item.name) + getattr(run, item.name))
    return total


@dataclass
class Generation:
    """The generated tokens without the prompt. An end-of-sequence token is included."""

    tokens: list[int]
    stats: DecodeStats
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The generated tokens decoded to text, without special tokens."""
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))


def plain_generate(target: Target, prompt_tokens: list[int], **settings: Any) -> Generation:
    """Decode a prompt with the target alone, with one call per token.

    The settings are the keyword arguments of :func:`generate_batch`.
    """
    return generate_batch(target, [prompt_tokens], **settings)[0]


def generate_batch(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    proposer: Proposer | None = None,
    tree: TreeShape | ShapePolicy | None = None,
    sampling: SamplingConfig = GREEDY,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Iterable[int] = (),
    on_tokens: OnTokens | None = None,
    on_round: OnRound | None = None,
) -> list[Generation]:
    """Decode prompts of any lengths in one batch.

    Each prompt gets the same answer as when it is decoded in a batch of its own. Compared with
    plain decoding, greedy answers are the same, and sampled answers have the same distribution.
    When the answer of a row has ended, the row leaves the batch. The times in the statistics are
    the times of the batch, divided by the number of its rows.

    Args:
        prompts: token ids of each prompt, at least one id per prompt.
        max_new_tokens: maximum number of tokens of each answer. An answer also ends when prompt and
            answer fill all positions of the target.
        proposer: proposes the drafts. If None, decoding is plain.
        tree: shape of the drafts, or a policy that chooses the shape. Required with a proposer.
        seed: seed of the random numbers. The prompt with index r uses ``seed + r``, or ``seed[r]``
            if ``seed`` is a sequence.
        stop_token_ids: tokens that end an answer, in addition to the target's end-of-sequence
            tokens.
        on_tokens: called when tokens are committed. It is allowed only with a single prompt.
        on_round: called after each verification.

    Raises:
        DrafterError: a prompt is empty, too long or has tokens outside the vocabulary, or the
            settings are invalid.
    """
    if on_tokens is not None and len(prompts) > 1:
        raise DrafterError(
            "the argument on_tokens works with one prompt, but several prompts were given. Leave "
            "it out for a batch of prompts."
        )
    if proposer is None:
        proposer = PLAIN
        tree = None
    elif tree is None:
        raise DrafterError(
            "the argument proposer was given without the argument tree, the shape of its drafts. "
            "Give both."
        )
    if not prompts:
        return []
    started = time.perf_counter()
    seeds = [seed + index for index in range(len(prompts))] if isinstance(seed, int) else seed
    ends = target.eos_token_ids.union(stop_token_ids)
    rows = [
        _Row(target, prompt, max_new_tokens, row_seed, ends, on_tokens)
        for prompt, row_seed in zip(prompts, seeds, strict=True)
    ]
    policy = tree if isinstance(tree, ShapePolicy) else ShapePolicy(tree)
    policy.begin()
    cache = target.new_cache(len(rows))
    try:
        with target.threads():
            proposer.begin(cache, [row.generator for row in rows])
            prefill_began = time.perf_counter()
            _begin(target, rows, prefill(target, cache, prompts, proposer), sampling)
            prefill_s = (time.perf_counter() - prefill_began) / len(rows)
            _decode(target, cache, rows, proposer, policy, sampling, on_round)
    finally:
        # Release the cache even if decoding is interrupted. The next cache can then reuse the
        # buffer of this cache, and the CUDA graphs that were recorded for this buffer.
        cache.release()
    for row in rows:
        row.stats.prefill_s = prefill_s
        row.stats.total_s = (time.perf_counter() - started) / len(rows)
    return [Generation(row.tokens, row.stats, target.tokenizer) for row in rows]


def _decode(
    target: Target,
    cache: TargetCache,
    rows: list["_Row"],
    proposer: Proposer,
    policy: ShapePolicy,
    sampling: SamplingConfig,
    on_round: OnRound | None,
) -> None:
    """Run rounds of drafting and verification until the answers of all rows have ended."""
    active = rows
    began = mark_moment(target.device)
    while active := _drop_finished(active, cache, proposer):
        shape = policy.next_shape()
        n_before = n_recorded()
        drafts = _propose(target, proposer, shape, active, sampling)
        drafted_at = mark_moment(target.device)
        hidden, accepted = _verify(target, cache, active, drafts, sampling)
        # The times below can be computed without waiting for the device, because the verification
        # has just synchronized with the device.
        verified_at = mark_moment(target.device)
        draft_s = seconds_between(began, drafted_at)
        verify_s = seconds_between(drafted_at, verified_at)
        began = verified_at
        committed = [[0, *(node + 1 for node in nodes)] for nodes in accepted]
        cache.commit(committed)
        proposer.observe(hidden, committed)
        # A round that records a CUDA graph takes far longer than the later rounds that replay the
        # graph. So do not report such a round to the policy.
        if n_recorded() == n_before:
            policy.observe(
                drafts.n_nodes, 1 + sum(map(len, accepted)) / len(accepted), draft_s + verify_s
            )
        draft_s = 0.0 if shape is None else draft_s
        for row, drafted in zip(active, drafts.on_host[0], strict=True):
            n_drafted = len(drafted) - drafted.count(NO_DRAFT)
            row.stats.n_drafted += n_drafted
            row.stats.n_drafted_calls += n_drafted > 0
            row.stats.draft_s += draft_s / len(active)
            row.stats.verify_s += verify_s / len(active)
        if on_round is not None:
            on_round(drafts, accepted)


def prefill(
    target: Target, cache: TargetCache, prompts: Sequence[list[int]], proposer: Proposer = PLAIN
) -> Tensor:
    """Run the target over the prompts, padded on the right, and commit the prompts' tokens.

    Returns:
        The hidden states of the prompts' last tokens, [B, E].
    """
    hidden = target.forward(padded(prompts, target.device), cache)
    committed = [range(len(prompt)) for prompt in prompts]
    cache.commit(committed)
    proposer.observe(hidden, committed)
    return hidden[
        torch.arange(len(prompts)),
        to_device([len(prompt) - 1 for prompt in prompts], hidden.device),
    ]


def _begin(target: Target, rows: list["_Row"], hidden: Tensor, sampling: SamplingConfig) -> None:
    """Choose and commit the first token of each answer.

    Args:
        hidden: [B, E], the hidden states of the prompts' last tokens.
    """
    nothing = DraftTree.empty(1, target.device)
    for row, logits in zip(rows, target.logits(hidden), strict=True):
        if sampling.is_argmax:
            token = int(logits.argmax())
        else:
            token = accept_sampled(
                nothing, 0, logits[None], row.committed, sampling, row.generator, row.n_prompt
            )[1]
        row.append([token], [False])


def _drop_finished(rows: list["_Row"], cache: TargetCache, proposer: Proposer) -> list["_Row"]:
    unfinished = [index for index, row in enumerate(rows) if not row.finished]
    if unfinished and len(unfinished) < len(rows):
        cache.select_rows(unfinished)
        proposer.select_rows(unfinished)
    return [rows[index] for index in unfinished]


def _propose(
    target: Target,
    proposer: Proposer,
    shape: TreeShape | None,
    rows: list["_Row"],
    sampling: SamplingConfig,
) -> DraftTree:
    """Propose drafts.

    Greedy drafts never have more levels than the target has positions left, or more levels than an
    answer of the batch can still use.
    """
    # Do not limit the levels of sampled drafts. The limit depends on all rows of the batch, and
    # each level draws random numbers. So with a limit, the answer of a row would depend on the
    # other rows. Tokens beyond the last position are dropped when they are committed.
    if shape is not None and sampling.is_argmax:
        wanted = max(row.n_remaining for row in rows) - 1
        depth = min(wanted, target.max_positions - max(len(row.committed) for row in rows))
        shape = shape.cut(depth) if depth >= 1 else None
    if shape is None:
        return DraftTree.empty(len(rows), target.device)
    return proposer.propose([row.committed for row in rows], shape)


def _verify(
    target: Target,
    cache: TargetCache,
    rows: list["_Row"],
    drafts: DraftTree,
    sampling: SamplingConfig,
) -> tuple[Tensor, list[list[int]]]:
    """Run the target once over the root and drafts of each row, and append the accepted tokens.

    The bonus token is appended to a row after its accepted drafts.

    Returns:
        The hidden states of the tokens of this target call, and the indices of each row's accepted
        drafts.
    """
    roots = to_device([[row.committed[-1]] for row in rows], target.device)
    # Feed token 0 in place of padding, because the padding value -1 is not a valid token id.
    tokens = torch.cat((roots, drafts.tokens.clamp(min=0)), dim=1) if drafts.n_nodes else roots
    hidden = target.forward(tokens, cache, None if drafts.is_chain else ancestors(drafts.parents))
    logits = target.logits(hidden)  # [B, 1 + N, V], logits after the root and after each draft.
    predicted = drafts.on_host_with(logits.argmax(dim=-1)) if sampling.is_argmax else None
    drafted, parents = drafts.on_host
    nodes: list[list[int]] = []
    for index, row in enumerate(rows):
        if predicted is not None:
            accepted, bonus = accept_argmax(drafted[index], parents[index], predicted[index])
        else:
            accepted, bonus = accept_sampled(
                drafts, index, logits[index], row.committed, sampling, row.generator, row.n_prompt
            )
        nodes.append(accepted)
        new = [*(drafted[index][node] for node in accepted), bonus]
        row.stats.committed_per_call.append(row.append(new, [True] * len(accepted) + [False]))
    return hidden, nodes


class _Row:
    """One row of the batch: a prompt, and the tokens of its answer so far."""

    def __init__(
        self,
        target: Target,
        prompt_tokens: list[int],
        max_new_tokens: int,
        seed: int,
        ends: frozenset[int],
        on_tokens: OnTokens | None,
    ) -> None:
        if not prompt_tokens:
            raise DrafterError("the prompt is empty. Give at least one token.")
        if max_new_tokens < 1:
            raise DrafterError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
        if len(prompt_tokens) >= target.max_positions:
            raise DrafterError(
                f"the prompt has {len(prompt_tokens)} tokens, expected fewer than "
                f"{target.max_positions}, the target's maximum number of positions. Shorten the "
                "prompt."
            )
        vocab_size = target.facts.vocab_size
        if (
            unknown := next((token for token in prompt_tokens if not 0 <= token < vocab_size), None)
        ) is not None:
            raise DrafterError(
                f"the prompt has the token id {unknown}, but the target's token ids are from 0 to "
                f"{vocab_size - 1}. Encode the prompt with the target's tokenizer."
            )
        self._ends = ends
        self._on_tokens = on_tokens
        self._limit = min(max_new_tokens, target.max_positions - len(prompt_tokens))
        self.generator = torch.Generator().manual_seed(seed)
        self.committed = list(prompt_tokens)
        self.n_prompt = len(prompt_tokens)
        self.tokens: list[int] = []
        self.stats = DecodeStats()
        self.finished = False

    @property
    def n_remaining(self) -> int:
        return self._limit - len(self.tokens)

    def append(self, tokens: list[int], drafted: list[bool]) -> int:
        """Commit the tokens up to the end of the answer. Return how many tokens were committed."""
        committed, finish = cut_answer(tokens, self.n_remaining, self._ends)
        self.tokens += committed
        self.committed += committed
        self.stats.n_tokens = len(self.tokens)
        self.finished = bool(finish)
        if self._on_tokens is not None:
            self._on_tokens(committed, drafted[: len(committed)])
        return len(committed)
