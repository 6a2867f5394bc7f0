"""The automatic choice of a shape: measures a target and a drafter on this machine (``shape_costs``, ``shape_policy``).

Shapes: B rows, N nodes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..target.cache import TargetCache
from ..target.live import Target
from .loop import OpenSession, generate_batch
from .sampling import GREEDY, SamplingConfig
from .session import DraftSession
from .shape_costs import BREADTHS, WIDEST, AcceptanceLog, DecodingCosts, fastest, n_nodes_of
from .shape_policy import AdaptivePolicy
from .tree import DraftTree, TreeShape

_ASKED_IN_VAIN = 1e-30
"""A probability below which no chain of three drafts falls."""
_N_VERIFIED = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 63)


@dataclass(frozen=True)
class AutoShape:
    """The choice, and what it rests on.

    Attributes:
        shape: the fastest one; None where plain decoding is.
        costs: measured.
        acceptance: counted.
        speed_ratio: expected tokens/s over plain decoding's.
        calibration_s: seconds that all of this took.
        is_drawn: chains are drawn from the drafter's distribution.
    """

    shape: TreeShape | None
    costs: DecodingCosts
    acceptance: AcceptanceLog
    speed_ratio: float
    calibration_s: float
    is_drawn: bool = False

    def policy(self) -> AdaptivePolicy:
        """Starts each answer with the choice and adapts it to the answer."""
        return AdaptivePolicy(self.costs, self.acceptance, self.is_drawn)

    def describe(self) -> str:
        """One line for people."""
        if self.shape is None:
            return "auto: plain decoding, because no shape of drafts promises to be faster here"
        costs, shape = self.costs, self.shape
        n_drafts = self.acceptance.n_drafts(shape)
        draft_s = costs.draft_s(shape, n_drafts)
        n_nodes = n_nodes_of(shape) if n_drafts is None else n_drafts
        verify_ms, plain_ms = (1e3 * costs.verification_s(n) for n in (1 + n_nodes, 1))
        return (
            f"auto: {shape} (draft {1e3 * draft_s:.1f} ms, verify {verify_ms:.1f} ms, plain step {plain_ms:.1f} ms; "
            f"{self.acceptance.committed(shape):.2f} tokens per call and {self.speed_ratio:.2f} times plain decoding "
            "expected), adapted to each answer"
        )


class _Probe:
    """A policy that drafts with the widest tree, and decodes plainly every third round, to time both side by side."""

    def __init__(self, widest: TreeShape) -> None:
        self._n_rounds, self._last_s, self._widest = 0, 0.0, widest
        self.is_cut = False  # of the last round
        self._drafted_s: list[float] = []
        self._plain_s: list[float] = []

    def begin(self, n_prompt_tokens: int, max_new_tokens: int) -> None:
        """Count the rounds of this generation."""
        self._n_rounds = 0

    def next_shape(self) -> TreeShape | None:
        """Plain is every third round, not the first, which reads the prompt."""
        self._n_rounds += 1
        return None if self._n_rounds % 3 == 0 else self._widest

    def observe(self, n_drafts: int, accepted: Sequence[Sequence[int]], round_s: float, is_cut: bool) -> None:
        """Take note of the seconds until it is known what was drafted."""
        self._last_s, self.is_cut = round_s, is_cut

    def note(self, drafts: DraftTree) -> None:
        """Keep the seconds of a round; those that drafted less, at the end of an answer, count for nothing."""
        if not drafts.n_nodes:
            self._plain_s.append(self._last_s)
        elif drafts.n_nodes == n_nodes_of(self._widest):
            self._drafted_s.append(self._last_s)

    @property
    def is_usable(self) -> bool:
        """Whether both were timed."""
        return bool(self._drafted_s and self._plain_s)

    @property
    def widest_over_plain(self) -> float:
        """Seconds of a round with the widest tree over those of a plain one, by their medians."""
        return float(np.median(self._drafted_s) / np.median(self._plain_s))


def choose_shape(
    target: Target,
    open_session: OpenSession,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int = 48,
    batch_size: int = 1,
    sampling: SamplingConfig = GREEDY,
) -> AutoShape:
    """Decode some prompts with a wide tree, and plainly now and then, measure what each part costs, and choose.

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
    widest = _widest(target, open_session)
    log, probe = AcceptanceLog(widest=widest), _Probe(widest)
    rows = [prompts[index % len(prompts)] for index in range(max(batch_size, len(prompts)))]
    is_drawn = sampling.temperature > 0
    costs = measure_costs(target, open_session, rows[:batch_size], is_drawn=is_drawn)
    for start in range(0, len(rows) - batch_size + 1, batch_size):

        def on_round(drafts: DraftTree, accepted: list[list[int]]) -> None:
            probe.note(drafts)
            if drafts.n_nodes and not probe.is_cut:
                log.observe(drafts, accepted)

        generate_batch(
            target, rows[start : start + batch_size], max_new_tokens=max_new_tokens, open_session=open_session,
            tree=probe, sampling=sampling, on_round=on_round,
        )  # fmt: skip
    if probe.is_usable:
        # Whatever else the machine does slows neighbouring rounds alike, but not quite: what is left is mostly reading
        # what was committed, which a first level does too.
        rest_s = probe.widest_over_plain * costs.round_s(None) - costs.round_s(widest)
        costs = replace(costs, rest_s=min(max(0.0, rest_s), costs.root_s[1]))
    shape, ratio = fastest(costs, log, is_drawn)
    return AutoShape(shape, costs, log, ratio, time.perf_counter() - began, is_drawn)


@torch.inference_mode()
def measure_costs(
    target: Target, open_session: OpenSession, prompts: Sequence[list[int]], n_repeats: int = 5, is_drawn: bool = False
) -> DecodingCosts:
    """Time target calls and drafts behind some prompts.

    Args:
        target: the loaded target.
        open_session: who drafts.
        prompts: token ids, a row each.
        n_repeats: timings of each part, of which the least counts.
        is_drawn: chains are drawn from the drafter's distribution, and so don't stop by it.
    """
    room = target.max_positions - max(map(len, prompts))
    verify_s: dict[int, list[float]] = {n: [] for n in _N_VERIFIED if n < max(2, room)}
    deep = min(3, _widest(target, open_session).depth)
    asking = TreeShape(deep, stop_below=0.0 if is_drawn else _ASKED_IN_VAIN)
    timings: dict[TreeShape, list[float]] = {TreeShape(depth, b): [] for b in BREADTHS for depth in (1, deep)}
    timings.setdefault(asking, [])
    first_round_s = []
    for _ in range(n_repeats):
        cache, session, committed = _prefilled(target, open_session, prompts)
        first_round_s.append(_seconds(target, partial(session.propose, committed, TreeShape(1))))
        for n_tokens, found in verify_s.items():
            tokens = torch.zeros(len(prompts), n_tokens, dtype=torch.int64, device=target.device)
            found.append(_seconds(target, partial(_call, target, cache, tokens)))
        for shape, found in timings.items():
            # A drafter may propose once per target call only, so that the root is committed each time.
            _commit_root(target, cache, session, committed)
            found.append(_seconds(target, partial(session.propose, committed, shape)))
    # Whatever else the machine does only adds time: the least of all repeats is nearest to the cost, and a larger
    # call bounds a smaller one.
    first, last = ({b: min(timings[TreeShape(depth, b)]) for b in BREADTHS} for depth in (1, deep))
    n_further = max(1, deep - 1)
    least = np.minimum.accumulate([min(found) for found in verify_s.values()][::-1])[::-1]
    return DecodingCosts(
        dict(zip(verify_s, least.tolist(), strict=True)),
        first,
        {b: max(last[b] - first[b], 0.0) / n_further for b in BREADTHS},
        prompt_token_s=max(0.0, min(first_round_s) - first[1]) / max(map(len, prompts)),
        stop_s=max(0.0, min(timings[asking]) - last[1]) / n_further,
    )


def _widest(target: Target, open_session: OpenSession) -> TreeShape:
    """The widest tree, of as many levels as are drafted."""
    max_depth = open_session(target.new_cache(), [torch.Generator()]).max_depth
    return WIDEST if max_depth is None else WIDEST.cut(max_depth)


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
