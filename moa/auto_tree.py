"""Which shape of drafts is fastest on this machine, from measured costs and measured acceptance.

A round of a shape with depth d, breadth b and n nodes commits E(d, b, n) tokens and takes
draft(d, b) + verify(1 + n) + rest seconds; plain decoding commits one in verify(1). The fastest shape is the one with
the best ratio, and plain decoding is one of the candidates, so that drafting is used only where it pays.

E is counted, not modelled: a few answers are decoded with a wide tree, and each accepted node tells for which smaller
shapes it would have been drafted too. What a shape's rounds would have been is approximated by the wide tree's rounds.

Shapes: B rows, N nodes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .decode import OpenSession, generate_batch
from .drafting import DraftSession
from .sampling import GREEDY, SamplingConfig
from .target import Target
from .target_cache import TargetCache
from .tree import DraftTree, TreeShape

WIDEST = TreeShape(6, 8, 62)
"""The official tree of EAGLE-2 and MoA: seven levels with the root."""
_BREADTHS = (1, 2, 4, 8)
_N_VERIFIED = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 63)
_PRIOR_ROUNDS = 1.0
"""Rounds of this answer that typical prompts weigh as much as."""
_FADE, _FADE_PLAIN = 0.9, 0.99
"""What is left of an answer's evidence after a round with drafts, and after a plain one."""
_MARGIN = 1.03
"""Drafting must promise this many times plain decoding's speed: below it, the estimate's error decides."""


@dataclass(frozen=True)
class DecodingCosts:
    """Seconds of the parts of a round, for all rows of a batch together.

    Attributes:
        verify_s: tokens per row in a target call -> its seconds, not falling.
        root_s: breadth -> seconds of the first level of drafts.
        level_s: breadth -> seconds of each further level.
        rest_s: seconds of a round outside of drafting and the target call, and of drafting what was just committed.
        prompt_token_s: seconds that the drafter needs for each token of a prompt before its first draft.
    """

    verify_s: dict[int, float]
    root_s: dict[int, float]
    level_s: dict[int, float]
    rest_s: float = 0.0
    prompt_token_s: float = 0.0

    def verification_s(self, n_tokens: int) -> float:
        """Seconds of a target call over n tokens per row, interpolated."""
        return float(np.interp(n_tokens, list(self.verify_s), list(self.verify_s.values())))

    def round_s(self, shape: TreeShape | None) -> float:
        """Seconds of a round; None for plain decoding."""
        if shape is None:
            return self.verification_s(1)
        draft_s = self.root_s[shape.breadth] + (shape.depth - 1) * self.level_s[shape.breadth]
        return draft_s + self.verification_s(1 + _n_nodes(shape)) + self.rest_s


@dataclass
class AcceptanceLog:
    """For each shape, how many of a wide tree's accepted nodes it would have drafted as well."""

    n_rounds: int = 0
    needed: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(breadth, depth) -> for each accepted node that a tree of this breadth and depth drafts, how many nodes the tree
    must have to hold it."""

    def observe(self, drafts: DraftTree, accepted: Sequence[Sequence[int]]) -> None:
        """Count a round of each row.

        Args:
            drafts: of the wide tree, with scores.
            accepted: per row the accepted nodes from the root down.
        """
        self.n_rounds += len(accepted)
        if drafts.scores is None or not drafts.n_nodes:
            return
        for row, nodes in enumerate(accepted):
            if not nodes:
                continue
            parents, scores = drafts.parents[row].tolist(), drafts.scores[row].tolist()
            for breadth in _BREADTHS:
                depths = np.array(_depths_within(parents, scores, breadth))
                for depth in range(1, WIDEST.depth + 1):
                    drafted = (depths > 0) & (depths <= depth)
                    self.needed.setdefault((breadth, depth), []).extend(
                        1 + int((drafted & (np.array(scores) > scores[node])).sum()) for node in nodes if drafted[node]
                    )

    def committed(self, shape: TreeShape | None) -> float:
        """Tokens per target call that a shape would have had, the bonus included."""
        if shape is None or not self.n_rounds:
            return 1.0
        needed = self.needed.get((shape.breadth, shape.depth), ())
        return 1.0 + sum(n <= _n_nodes(shape) for n in needed) / self.n_rounds


@dataclass(frozen=True)
class AutoShape:
    """The choice, and what it rests on.

    Attributes:
        shape: the fastest one; None where plain decoding is.
        costs: measured.
        acceptance: counted.
        speed_ratio: expected tokens/s over plain decoding's.
        calibration_s: seconds that all of this took.
    """

    shape: TreeShape | None
    costs: DecodingCosts
    acceptance: AcceptanceLog
    speed_ratio: float
    calibration_s: float

    def policy(self) -> "AdaptivePolicy":
        """Starts each answer with the choice and adapts it to the answer."""
        return AdaptivePolicy(self.costs, self.acceptance)

    def describe(self) -> str:
        """One line for people."""
        if self.shape is None:
            return "auto: plain decoding, because no shape of drafts promises to be faster here"
        costs, shape = self.costs, self.shape
        draft_s = costs.root_s[shape.breadth] + (shape.depth - 1) * costs.level_s[shape.breadth]
        verify_ms, plain_ms = (1e3 * costs.verification_s(n) for n in (1 + _n_nodes(shape), 1))
        return (
            f"auto: {shape} (draft {1e3 * draft_s:.1f} ms, verify {verify_ms:.1f} ms, plain step {plain_ms:.1f} ms; "
            f"{self.acceptance.committed(shape):.2f} tokens per call and {self.speed_ratio:.2f} times plain decoding "
            "expected), adapted to each answer"
        )


class AdaptivePolicy:
    """The fastest shape round by round: what was counted on typical prompts, scaled by this answer's own acceptance.

    An answer on which the drafter fails is soon decoded plainly. There the memory of its failure fades, so that it is
    tried again; and a prompt that takes the drafter longer to read than its drafts would save is decoded plainly
    altogether.

    Args:
        costs: of the parts of a round.
        log: of acceptance on typical prompts.
    """

    def __init__(self, costs: DecodingCosts, log: AcceptanceLog) -> None:
        self._costs, self._shapes = costs, candidates()
        self._accepted = np.array([log.committed(shape) - 1.0 for shape in self._shapes])
        self._round_s = np.array([costs.round_s(shape) for shape in self._shapes])
        self.begin(0, 1)

    def begin(self, n_prompt_tokens: int, max_new_tokens: int) -> None:
        """Start from what was counted on typical prompts."""
        self._n_rounds, self._seen, self._expected = 0.0, 0.0, 0.0
        self._chosen: int | None = None
        saved_s = self._costs.round_s(None) - float((self._round_s / (1.0 + self._accepted)).min())
        # How long the answer will be and how well it is drafted is not known: reading must pay within a quarter of it.
        self._drafts = saved_s * max_new_tokens / 4 > self._costs.prompt_token_s * n_prompt_tokens

    def next_shape(self) -> TreeShape | None:
        """The shape with the best expected speed; None for a plain step."""
        self._chosen = None
        if not self._drafts:
            return None
        own = self._seen / self._expected if self._expected else 1.0
        scale = (self._n_rounds * own + _PRIOR_ROUNDS) / (self._n_rounds + _PRIOR_ROUNDS)
        speeds = (1.0 + scale * self._accepted) / self._round_s
        best = int(speeds.argmax())
        if speeds[best] * self._costs.round_s(None) > _MARGIN:
            self._chosen = best
            return self._shapes[best]
        return None

    def observe(self, accepted: Sequence[Sequence[int]]) -> None:
        """Compare with what was expected of the shape."""
        if self._chosen is None:
            self._n_rounds *= _FADE_PLAIN
            return
        self._n_rounds = self._n_rounds * _FADE + 1.0
        self._seen = self._seen * _FADE + float(np.mean([len(nodes) for nodes in accepted]))
        self._expected = self._expected * _FADE + float(self._accepted[self._chosen])


def choose_shape(
    target: Target,
    open_session: OpenSession,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int = 48,
    batch_size: int = 1,
    sampling: SamplingConfig = GREEDY,
) -> AutoShape:
    """Decode some prompts with a wide tree, measure what each part of a round costs, and choose.

    Where tokens are sampled, chains are judged as if they were picked like a tree's nodes, not drawn.

    Args:
        target: the loaded target.
        open_session: who drafts.
        prompts: token ids of typical prompts, at least one.
        max_new_tokens: of each.
        batch_size: rows that will be decoded together.
        sampling: how tokens will be chosen.

    Raises:
        DrafterError: a prompt that cannot be decoded.
    """
    began = time.perf_counter()
    log, round_s = AcceptanceLog(), []
    rows = [prompts[index % len(prompts)] for index in range(max(batch_size, len(prompts)))]
    costs = measure_costs(target, open_session, rows[:batch_size])
    for start in range(0, len(rows) - batch_size + 1, batch_size):
        ends: list[float] = []

        def on_round(drafts: DraftTree, accepted: list[list[int]], ends: list[float] = ends) -> None:
            log.observe(drafts, accepted)
            if drafts.n_nodes == WIDEST.n_nodes:
                ends.append(time.perf_counter())

        generate_batch(
            target, rows[start : start + batch_size], max_new_tokens=max_new_tokens, open_session=open_session,
            tree=WIDEST, sampling=sampling, on_round=on_round,
        )  # fmt: skip
        round_s += np.diff(ends).tolist()
    if round_s:
        # As robust against what else the machine does as the costs, which are the least of several timings.
        rest_s = max(0.0, float(np.quantile(round_s, 0.1)) - costs.round_s(WIDEST))
        costs = replace(costs, rest_s=rest_s)
    shape, ratio = fastest(costs, log)
    return AutoShape(shape, costs, log, ratio, time.perf_counter() - began)


def fastest(costs: DecodingCosts, log: AcceptanceLog) -> tuple[TreeShape | None, float]:
    """The shape with the best expected speed, and its ratio to plain decoding's; None for plain decoding.

    Args:
        costs: of the parts of a round.
        log: of acceptance.
    """
    plain = 1.0 / costs.round_s(None)
    best: tuple[TreeShape | None, float] = (None, 1.0)
    for shape in candidates():
        ratio = log.committed(shape) / costs.round_s(shape) / plain
        if ratio > max(best[1], _MARGIN):
            best = (shape, ratio)
    return best


def candidates() -> list[TreeShape]:
    """Chains and trees up to the widest."""
    chains = [TreeShape(depth) for depth in range(1, WIDEST.depth + 1)]
    trees = [
        TreeShape(depth, breadth, n_nodes)
        for breadth in _BREADTHS[1:]
        for depth in range(1, WIDEST.depth + 1)
        for n_nodes in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 62)
        if max(depth, 2) <= n_nodes <= TreeShape(depth, breadth).n_candidates
    ]
    return chains + trees


@torch.inference_mode()
def measure_costs(
    target: Target, open_session: OpenSession, prompts: Sequence[list[int]], n_repeats: int = 5
) -> DecodingCosts:
    """Time target calls and drafts behind some prompts.

    Args:
        target: the loaded target.
        open_session: who drafts.
        prompts: token ids, a row each.
        n_repeats: timings of each part, of which the least counts.
    """
    room = target.max_positions - max(map(len, prompts))
    verify_s: dict[int, list[float]] = {n: [] for n in _N_VERIFIED if n < max(2, room)}
    timings: dict[tuple[int, int], list[float]] = {(b, depth): [] for b in _BREADTHS for depth in (1, 3)}
    first_round_s = []
    for _ in range(n_repeats):
        cache, session, committed = _prefilled(target, open_session, prompts)
        first_round_s.append(_seconds(target, partial(session.propose, committed, TreeShape(1))))
        for n_tokens, found in verify_s.items():
            tokens = torch.zeros(len(prompts), n_tokens, dtype=torch.int64, device=target.device)
            found.append(_seconds(target, partial(_call, target, cache, tokens)))
        for (breadth, depth), found in timings.items():
            # A drafter may propose once per target call only, so that the root is committed each time.
            _commit_root(target, cache, session, committed)
            found.append(_seconds(target, partial(session.propose, committed, TreeShape(depth, breadth))))
    # Whatever else the machine does only adds time: the least of all repeats is nearest to the cost, and a larger
    # call bounds a smaller one.
    first, third = ({b: min(timings[b, depth]) for b in _BREADTHS} for depth in (1, 3))
    least = np.minimum.accumulate([min(found) for found in verify_s.values()][::-1])[::-1]
    return DecodingCosts(
        dict(zip(verify_s, least.tolist(), strict=True)),
        first,
        {b: max(third[b] - first[b], 0.0) / 2 for b in _BREADTHS},
        prompt_token_s=max(0.0, min(first_round_s) - first[1]) / max(map(len, prompts)),
    )


def _prefilled(
    target: Target, open_session: OpenSession, prompts: Sequence[list[int]]
) -> tuple[TargetCache, DraftSession, list[list[int]]]:
    """Cache and session behind prompts, as at the beginning of a first round."""
    cache = target.new_cache(len(prompts))
    lengths = [len(prompt) for prompt in prompts]
    padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
    session = open_session(cache, [torch.Generator().manual_seed(0) for _ in prompts])
    hidden = target.forward(torch.tensor(padded, device=target.device), cache)
    cache.commit([range(length) for length in lengths])
    session.observe(hidden, [range(length) for length in lengths])
    roots = target.logits(hidden[torch.arange(len(prompts)), torch.tensor(lengths) - 1]).argmax(dim=-1).tolist()
    return cache, session, [[*prompt, root] for prompt, root in zip(prompts, roots, strict=True)]


def _commit_root(target: Target, cache: TargetCache, session: DraftSession, committed: list[list[int]]) -> None:
    """A plain decoding step."""
    hidden = target.forward(torch.tensor([row[-1:] for row in committed], device=target.device), cache)
    kept = [[0]] * len(committed)
    cache.commit(kept)
    session.observe(hidden, kept)
    for row, token in zip(committed, target.logits(hidden[:, -1]).argmax(dim=-1).tolist(), strict=True):
        row.append(token)


def _call(target: Target, cache: TargetCache, tokens: Tensor) -> None:
    target.logits(target.forward(tokens, cache))


def _seconds(target: Target, call: Callable[[], object]) -> float:
    _synchronize(target)
    began = time.perf_counter()
    call()
    _synchronize(target)
    return time.perf_counter() - began


def _synchronize(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def _n_nodes(shape: TreeShape) -> int:
    return min(shape.n_nodes, shape.n_candidates)


def _depths_within(parents: Sequence[int], scores: Sequence[float], breadth: int) -> list[int]:
    """Depth of each node that a tree of smaller breadth would have drafted too, from 1; -1 for the others.

    Such a node is among the best ``breadth`` children of its parent, and its parent among the best of its level.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    by_parent: dict[int, list[int]] = {}
    by_depth: dict[int, list[int]] = {}
    for node in sorted(range(len(parents)), key=lambda node: -scores[node]):
        by_parent.setdefault(parents[node], []).append(node)
        by_depth.setdefault(depths[node], []).append(node)
    extended = {-1} | {node for nodes in by_depth.values() for node in nodes[:breadth]}
    kept = {node for parent, nodes in by_parent.items() if parent in extended for node in nodes[:breadth]}
    within = [-1] * len(parents)
    for node, parent in enumerate(parents):
        if node in kept and (parent < 0 or within[parent] > 0):
            within[node] = depths[node]
    return within
