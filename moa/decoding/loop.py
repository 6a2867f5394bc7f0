"""The decoding loop: plain, and speculative with chains or trees of drafts (Algorithm 1 of the paper), for many rows.

One round of one row, with a chain of three drafts (``=`` is committed and has target KV, ``~`` is pending):

    committed     The cat sat on             "on", the root, is committed but has no target KV yet
    target KV     ===========

    propose       the drafter drafts         the    mat    and
    verify        one target call over   on  the    mat    and
                  KV while it runs       ~~  ~~~    ~~~    ~~~
                  its next tokens        the mat    .      then
    accept        drafts that are the target's own tokens: "the", "mat"; then its next token "." (the bonus)
    commit        KV of "on the mat" is kept, of "and" forgotten; "." is the next root
                  The cat sat on the mat .
                  ======================

The round committed three tokens for one target call. Acceptance length is the mean of that number, the prefill not
counted. A tree is verified in the same call under a mask in which each draft sees its own ancestors (``tree``). Without
drafts a round is a plain decoding step, so that plain and speculative decoding are one loop.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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

PLAIN = Proposer()  # of plain decoding: it is never asked for drafts
# Called with each committed run of tokens and, for each of them, whether it was drafted.
OnTokens = Callable[[list[int], list[bool]], None]
# Called after each verification with the drafts and, per row, the accepted nodes from the root
# down.
OnRound = Callable[[DraftTree, list[list[int]]], None]


@dataclass
class DecodeStats:
    """The cost of a generation."""

    # tokens of each target call after the prefill
    committed_per_call: list[int] = field(default_factory=list)
    n_tokens: int = 0  # generated, the one from the prefill included
    n_drafted: int = 0
    n_drafted_calls: int = 0  # target calls that verified drafts
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    @property
    def n_target_calls(self) -> int:
        """The number of target calls after the prefill."""
        return len(self.committed_per_call)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per target call, bonus included; NaN when there was no call after the prefill."""
        return (
            sum(self.committed_per_call) / self.n_target_calls
            if self.committed_per_call
            else float("nan")
        )


@dataclass
class Generation:
    """Generated tokens, without the prompt, the end-of-sequence token included when there was one."""

    tokens: list[int]
    stats: DecodeStats
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The tokens as text, without special tokens."""
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))


def plain_generate(target: Target, prompt_tokens: list[int], **settings: Any) -> Generation:
    """Decode a prompt with the target alone, one call per token; see :func:`generate_batch` for the settings."""
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
    """Decode several prompts of any lengths at once; each gets the answer that it gets alone.

    Greedy tokens are those of plain decoding, sampled ones have its distribution, whatever is proposed. Rows whose
    answer has ended leave the batch. Times in the statistics are those of the batch, divided by its rows.

    Args:
        prompts: token ids, each at least one.
        max_new_tokens: limit of each answer; the target's positions are another.
        tree: shape of the proposer's drafts, or a policy that chooses it; needed with a proposer.
        seed: row r uses ``seed + r``, or ``seed[r]`` of a sequence.
        stop_token_ids: tokens that end an answer, as the target's end-of-sequence tokens do.
        on_tokens: called at each commit; for a single prompt only.

    Raises:
        DrafterError: a prompt that is empty, too long or not of the vocabulary, or settings that make no sense.
    """
    if on_tokens is not None and len(prompts) > 1:
        raise DrafterError("on_tokens serves a single prompt.")
    if proposer is None:
        proposer = PLAIN
        tree = None
    elif tree is None:
        raise DrafterError("drafting needs the shape of the drafts: give `tree`.")
    if not prompts:
        return []
    started = time.perf_counter()
    seeds = [seed + index for index in range(len(prompts))] if isinstance(seed, int) else seed
    ends = target.eos_token_ids.union(stop_token_ids)
    rows = [
        _Row(target, prompt, max_new_tokens, own, ends, on_tokens)
        for prompt, own in zip(prompts, seeds, strict=True)
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
        cache.release()  # after an interruption too: recorded CUDA graphs use its buffer
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
    """Run rounds until the answers of all rows have ended."""
    active = rows
    began = mark_moment(target.device)
    while active := _drop_finished(active, cache, proposer):
        shape = policy.next_shape()
        n_before = n_recorded()
        drafts = _propose(target, proposer, shape, active, sampling)
        drafted_at = mark_moment(target.device)
        hidden, accepted = _verify(target, cache, active, drafts, sampling)
        # right after what waits for it, so that reading the clock does not
        verified_at = mark_moment(target.device)
        draft_s = seconds_between(began, drafted_at)
        verify_s = seconds_between(drafted_at, verified_at)
        began = verified_at
        kept = [[0, *(node + 1 for node in nodes)] for nodes in accepted]
        cache.commit(kept)
        proposer.observe(hidden, kept)
        if n_recorded() == n_before:  # else the round took longer than it ever will again
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
    """Run prompts, padded on the right, and commit them; returns the hidden states of their last tokens, [B, E]."""
    hidden = target.forward(padded(prompts, target.device), cache)
    kept = [range(len(prompt)) for prompt in prompts]
    cache.commit(kept)
    proposer.observe(hidden, kept)
    return hidden[
        torch.arange(len(prompts)),
        to_device([len(prompt) - 1 for prompt in prompts], hidden.device),
    ]


def _begin(target: Target, rows: list["_Row"], hidden: Tensor, sampling: SamplingConfig) -> None:
    """Commit the first token of each row, given the hidden states [B, E] of the prompts' last tokens."""
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
    """Propose drafts; greedy ones are cut to the positions that are left and the tokens that any row still needs."""
    # Sampled drafts keep their shape: each level uses random numbers, and an answer must not depend
    # on the rest of its
    # batch. Tokens beyond the last position are cut when they are committed.
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
    """Run the target once over root and drafts of each row; returns hidden states, and the nodes that it accepts."""
    roots = to_device([[row.committed[-1]] for row in rows], target.device)
    # padding is token 0
    tokens = torch.cat((roots, drafts.tokens.clamp(min=0)), dim=1) if drafts.n_nodes else roots
    hidden = target.forward(tokens, cache, None if drafts.is_chain else ancestors(drafts.parents))
    logits = target.logits(hidden)  # [B, 1 + N, V]
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
    """One prompt and its answer so far."""

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
            raise DrafterError("the prompt is empty; give at least one token.")
        if max_new_tokens < 1:
            raise DrafterError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
        if len(prompt_tokens) >= target.max_positions:
            raise DrafterError(
                f"the prompt has {len(prompt_tokens)} tokens, the target has {target.max_positions} positions; "
                "shorten the prompt."
            )
        vocab_size = target.sizes["vocab_size"]
        if (
            unknown := next((token for token in prompt_tokens if not 0 <= token < vocab_size), None)
        ) is not None:
            raise DrafterError(
                f"the prompt has token {unknown}, the target's tokens are 0 to {vocab_size - 1}; use its tokenizer."
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
        """Commit tokens up to the end of the answer; returns how many."""
        kept, finish = cut_answer(tokens, self.n_remaining, self._ends)
        self.tokens += kept
        self.committed += kept
        self.stats.n_tokens = len(self.tokens)
        self.finished = bool(finish)
        if self._on_tokens is not None:
            self._on_tokens(kept, drafted[: len(kept)])
        return len(kept)
