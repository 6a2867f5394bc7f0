"""Decoding: plain, and speculative with chains or trees of drafts (Algorithm 1 of the paper), one row or many.

A round: a draft session proposes tokens after the root (the last committed token, which has no target KV yet); one
target call verifies root and drafts; the drafts that the target agrees with are committed together with the target's
next token (the bonus). The rest is rolled back. Without drafts a round is a plain decoding step.

Acceptance length = tokens committed per target call, bonus included; the prefill is not counted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..drafters.base import Drafter
from ..errors import DrafterError
from ..target.bundle import FrozenTarget
from ..target.cache import TargetCache
from ..target.clock import DeviceClock
from ..target.live import Target
from .sampling import GREEDY, SamplingConfig, accept_argmax, accept_sampled
from .session import DrafterSession, DraftSession
from .shape_policy import FixedShape, ShapePolicy
from .tree import NO_DRAFT, DraftTree, Shape, StaticTree, TreeShape, ancestors

OnTokens = Callable[[list[int], list[bool]], None]
"""Called with each committed run of tokens and, for each, whether it was drafted."""


OnRound = Callable[[DraftTree, list[list[int]]], None]
"""Called after each verification with the drafts and, per row, the accepted nodes from the root down."""

OpenSession = Callable[[TargetCache, list[torch.Generator]], DraftSession]
"""(cache of the target's KV, one generator per row) -> who proposes drafts."""


@dataclass
class DecodeStats:
    """What a generation cost. Counted alike by plain and speculative decoding."""

    committed_per_call: list[int] = field(default_factory=list)
    """Tokens committed by each target call after the prefill."""
    n_tokens: int = 0
    """All generated tokens, the one from the prefill included."""
    n_drafted: int = 0
    """Tokens proposed by the drafter."""
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    @property
    def n_target_calls(self) -> int:
        """Target calls after the prefill."""
        return len(self.committed_per_call)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per target call, bonus included; NaN when there was no call after the prefill."""
        return sum(self.committed_per_call) / self.n_target_calls if self.committed_per_call else float("nan")


@dataclass
class Generation:
    """Generated tokens, without the prompt, the end-of-sequence token included when there was one."""

    tokens: list[int]
    stats: DecodeStats


def plain_generate(
    target: Target,
    prompt_tokens: list[int],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig = GREEDY,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Decode with the target alone, one call per token.

    Args:
        target: the loaded target.
        prompt_tokens: at least one id.
        max_new_tokens: bound on generated tokens; also bounded by the target's positions.
        sampling: how the next token is chosen.
        seed: of the draws.
        on_tokens: called at each commit.

    Raises:
        DrafterError: empty prompt, or one that leaves no position to generate into.
    """
    (generation,) = generate_batch(
        target, [prompt_tokens], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, on_tokens=on_tokens
    )
    return generation


def speculative_generate(
    target: Target,
    drafter: Drafter,
    frozen: FrozenTarget | None,
    prompt_tokens: list[int],
    *,
    max_new_tokens: int,
    draft_length: int = 5,
    tree: Shape | None = None,
    sampling: SamplingConfig = GREEDY,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Decode with drafts; greedy tokens are those of :func:`plain_generate`, sampled ones have its distribution.

    Args:
        target: the loaded target.
        drafter: trained for this target.
        frozen: target pieces for the drafter, with its N layers; None takes them from the live target.
        prompt_tokens: at least one id.
        max_new_tokens: bound on generated tokens; also bounded by the target's positions.
        draft_length: tokens drafted per round, at least 1; not used with ``tree``.
        tree: shape of the drafts; None for a chain.
        sampling: how the next token is chosen.
        seed: of the draws.
        on_tokens: called at each commit.

    Raises:
        DrafterError: empty or too long prompt, draft_length < 1, or drafter and frozen differ in dtype.
    """
    if tree is None and draft_length < 1:
        raise DrafterError(f"draft_length must be at least 1, got {draft_length}.")
    (generation,) = generate_batch(
        target,
        [prompt_tokens],
        max_new_tokens=max_new_tokens,
        open_session=draft_session(target, drafter, frozen, sampling),
        tree=tree or TreeShape(draft_length),
        sampling=sampling,
        seed=seed,
        on_tokens=on_tokens,
    )
    return generation


def draft_session(
    target: Target, drafter: Drafter, frozen: FrozenTarget | None = None, sampling: SamplingConfig = GREEDY
) -> OpenSession:
    """Drafting with a trained drafter, for :func:`generate_batch`; arguments as for :func:`speculative_generate`."""
    pieces = frozen or FrozenTarget.from_model(target.model, drafter.config.target_layer_inference)
    return lambda cache, generators: DrafterSession(drafter, pieces, cache, sampling, generators)


def generate_batch(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    open_session: OpenSession | None = None,
    tree: Shape | ShapePolicy | None = None,
    sampling: SamplingConfig = GREEDY,
    seed: int | Sequence[int] = 0,
    on_tokens: OnTokens | None = None,
    on_round: OnRound | None = None,
) -> list[Generation]:
    """Decode several prompts of any lengths at once; each gives what it gives alone.

    Rows whose answer has ended leave the batch. Times in the statistics are those of the whole batch, shared equally by
    the rows that took part.

    Args:
        target: the loaded target.
        prompts: token ids, each at least one.
        max_new_tokens: bound on generated tokens of each; also bounded by the target's positions.
        open_session: who proposes drafts; None for plain decoding.
        tree: shape of the drafts, or who chooses it; needed with ``open_session``.
        sampling: how the next token is chosen.
        seed: of the draws; row r draws from ``seed + r``, or from its own seed of a sequence.
        on_tokens: called at each commit; for a single prompt only.
        on_round: called after each verification.

    Returns:
        A generation per prompt, in their order.

    Raises:
        DrafterError: an empty or too long prompt, or settings that make no sense.
    """
    if on_tokens is not None and len(prompts) > 1:
        raise DrafterError("on_tokens serves a single prompt.")
    if open_session is not None and tree is None:
        raise DrafterError("drafting needs the shape of the drafts: give `tree`.")
    if not prompts:
        return []
    started = time.perf_counter()
    seeds = [seed + index for index in range(len(prompts))] if isinstance(seed, int) else seed
    rows = [_Row(target, prompt, max_new_tokens, own, on_tokens) for prompt, own in zip(prompts, seeds, strict=True)]
    active = list(rows)
    cache = target.new_cache(len(rows))
    session = None
    if open_session is not None:
        session = open_session(cache, [row.generator for row in rows])
    _prefill(target, cache, active, session, sampling)
    policy = FixedShape(tree) if tree is None or isinstance(tree, TreeShape | StaticTree) else tree
    policy.begin(max(map(len, prompts)), max_new_tokens)
    clock = DeviceClock(target.device)
    while active := _drop_finished(active, cache, session):
        drafts, accepted = _round(target, cache, active, session, policy, clock, sampling)
        if on_round is not None:
            on_round(drafts, accepted)
    for row in rows:
        row.stats.total_s = (time.perf_counter() - started) / len(rows)
    return [Generation(row.tokens, row.stats) for row in rows]


def _prefill(
    target: Target, cache: TargetCache, rows: list["_Row"], session: DraftSession | None, sampling: SamplingConfig
) -> None:
    """Run the prompts, padded on the right, and commit the first token of each row."""
    began = time.perf_counter()
    lengths = [len(row.committed) for row in rows]
    padded = [row.committed + [0] * (max(lengths) - len(row.committed)) for row in rows]
    hidden = target.forward(torch.tensor(padded, device=target.device), cache)
    _commit(cache, session, hidden, [range(length) for length in lengths])
    last = hidden[torch.arange(len(rows)), torch.tensor(lengths) - 1]  # [B, E]
    for row, logits in zip(rows, target.logits(last), strict=True):
        row.begin(_choose(logits[None], DraftTree.empty(1, logits.device), 0, row, sampling)[1])
        row.stats.prefill_s = (time.perf_counter() - began) / len(rows)


def _round(
    target: Target,
    cache: TargetCache,
    rows: list["_Row"],
    session: DraftSession | None,
    policy: ShapePolicy,
    clock: DeviceClock,
    sampling: SamplingConfig,
) -> tuple[DraftTree, list[list[int]]]:
    """Draft, verify and commit; the drafts and the accepted nodes of each row."""
    began = clock.mark()
    shape = policy.next_shape()
    useful = _useful(target, shape, rows, sampling)
    drafts = _propose(target, session, useful, rows)
    drafted_at = clock.mark()
    accepted = _verify(target, cache, rows, session, drafts, sampling)
    verified_at = clock.mark()
    draft_s, verify_s = clock.seconds(began, drafted_at), clock.seconds(drafted_at, verified_at)
    policy.observe(drafts.n_nodes, accepted, draft_s + verify_s, useful != shape)
    for row, drafted in zip(rows, drafts.on_host[0], strict=True):
        row.stats.draft_s += draft_s / len(rows) if session is not None else 0.0
        row.stats.verify_s += verify_s / len(rows)
        row.stats.n_drafted += len(drafted) - drafted.count(NO_DRAFT)
    return drafts, accepted


def _drop_finished(rows: list["_Row"], cache: TargetCache, session: DraftSession | None) -> list["_Row"]:
    going = [index for index, row in enumerate(rows) if not row.finished]
    if going and len(going) < len(rows):
        cache.select_rows(going)
        if session is not None:
            session.select_rows(going)
    return [rows[index] for index in going]


def _useful(target: Target, shape: Shape | None, rows: list["_Row"], sampling: SamplingConfig) -> Shape | None:
    """The shape, in greedy decoding no deeper than there are positions for and than any row has use for.

    Sampling uses up random numbers at each level, and an answer must not depend on the rest of its batch: what lies
    beyond the last position is cut when it is committed.
    """
    if shape is None or not sampling.is_argmax:
        return shape
    wanted = max(row.n_remaining for row in rows) - 1
    depth = min(wanted, target.max_positions - max(len(row.committed) for row in rows))
    return shape.cut(depth) if depth >= 1 else None


def _propose(target: Target, session: DraftSession | None, shape: Shape | None, rows: list["_Row"]) -> DraftTree:
    """Drafts of each row; none without a shape."""
    if session is None or shape is None:
        return DraftTree.empty(len(rows), target.device)
    return session.propose([row.committed for row in rows], shape)


def _verify(
    target: Target,
    cache: TargetCache,
    rows: list["_Row"],
    session: DraftSession | None,
    drafts: DraftTree,
    sampling: SamplingConfig,
) -> list[list[int]]:
    """One target call over root and drafts of each row; commits what the target agrees with, returns those nodes."""
    roots = torch.tensor([[row.committed[-1]] for row in rows], device=target.device)
    tokens = torch.cat((roots, drafts.tokens.clamp(min=0)), dim=1)  # [B, 1 + N]; any token fills up
    hidden = target.forward(tokens, cache, ancestors(drafts.parents) if drafts.n_nodes else None)
    logits = target.logits(hidden)  # [B, 1 + N, V]
    predicted = logits.argmax(dim=-1).tolist() if sampling.is_argmax else None
    drafted, parents = drafts.on_host
    nodes: list[list[int]] = []
    for index, row in enumerate(rows):
        if predicted is not None:
            accepted, bonus = accept_argmax(drafted[index], parents[index], predicted[index])
        else:
            accepted, bonus = _choose(logits[index], drafts, index, row, sampling)
        nodes.append(accepted)
        row.commit([*(drafted[index][node] for node in accepted), bonus])
    _commit(cache, session, hidden, [[0, *(node + 1 for node in accepted)] for accepted in nodes])
    return nodes


def _commit(cache: TargetCache, session: DraftSession | None, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
    """Keep some tokens of a target call, of which a drafter may want the hidden states [B, n, E]."""
    cache.commit(kept)
    if session is not None:
        session.observe(hidden, kept)


def _choose(
    logits: Tensor, drafts: DraftTree, index: int, row: "_Row", sampling: SamplingConfig
) -> tuple[list[int], int]:
    if sampling.is_argmax:
        return accept_argmax([], [], logits.argmax(dim=-1).tolist())
    return accept_sampled(drafts, index, logits, row.committed, sampling, row.generator)


class _Row:
    """One prompt in the making: what is committed, and when to stop."""

    def __init__(
        self, target: Target, prompt_tokens: list[int], max_new_tokens: int, seed: int, on_tokens: OnTokens | None
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
        self._eos_token_ids, self._on_tokens = target.eos_token_ids, on_tokens
        self._limit = min(max_new_tokens, target.max_positions - len(prompt_tokens))
        self.generator = torch.Generator().manual_seed(seed)
        self.committed = list(prompt_tokens)
        self.tokens: list[int] = []
        self.stats = DecodeStats()
        self.finished = False

    @property
    def n_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self._limit - len(self.tokens)

    def begin(self, token: int) -> None:
        """Take the token that the prefill gave."""
        self._append([token], [False])

    def commit(self, tokens: list[int]) -> None:
        """Commit the tokens of one target call, the last of them not drafted; cut after the first end of sequence."""
        self.stats.committed_per_call.append(self._append(tokens, [True] * (len(tokens) - 1) + [False]))

    def _append(self, tokens: list[int], drafted: list[bool]) -> int:
        kept = tokens[: self.n_remaining]
        for index, token in enumerate(kept):
            if token in self._eos_token_ids:
                kept, self.finished = kept[: index + 1], True
                break
        self.tokens += kept
        self.committed += kept
        self.stats.n_tokens = len(self.tokens)
        self.finished = self.finished or self.n_remaining == 0
        if self._on_tokens is not None:
            self._on_tokens(kept, drafted[: len(kept)])
        return len(kept)
