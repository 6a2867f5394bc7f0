"""Measures what drafters write without their target (arXiv 2410.03804: the client after a disconnection).

The target answers up to a cut. From there on a drafter writes without verification: one chain, with the target's
activations of everything before the last token and none after it. In Mixture of Attentions and GLIDE nothing after the
cut has target KV, in EAGLE the features that are fed back are its own.

Shapes: B rows, n tokens of a continuation, V vocabulary, E target width.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionInvalid
from ..moa.decoding.loop import generate_batch, prefill
from ..moa.decoding.proposer import DrafterProposer
from ..moa.decoding.tree import TreeShape
from ..moa.drafters.caches import padded
from ..moa.targets.cache import TargetCache
from ..moa.targets.live import Target
from ..text import Progress
from .drafters import LoadedDrafter
from .measure import opening_tokens
from .prompts import Prompt
from .statistics import Interval, ratio_with_interval

TARGET = "target"
"""Name of the target among the writers: what it writes after the cut is the reference."""
_BATCH = 8
"""Cuts that are continued together; no figure depends on it."""
Scorer = Callable[[str, str], float]
"""(the prompt's messages as text, the answer's text) -> a number; greater is better."""


@dataclass(frozen=True)
class Continuation:
    """The tokens that the target or a drafter wrote after a cut.

    Attributes:
        tokens: up to the first end of sequence, included.
        log_probs: the target's log-probability of each token, given all before it, in nats.
        agrees: for each token of the reference, whether this writer has the same at that place.
        score: of the whole answer; None without a scorer.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    agrees: tuple[bool, ...]
    score: float | None = None

    @property
    def n_common(self) -> int:
        """The number of tokens up to the first that differs from the reference."""
        return next((place for place, same in enumerate(self.agrees) if not same), len(self.agrees))


@dataclass(frozen=True)
class CutRow:
    """One cut of one answer.

    Attributes:
        cut: which of the answer's cuts, from 0.
        n_written: tokens of the answer before the cut.
        by_writer: ``target`` and each drafter -> what it wrote.
    """

    prompt_id: str
    category: str
    cut: int
    n_prompt_tokens: int
    n_written: int
    by_writer: dict[str, Continuation] = field(default_factory=dict)


@dataclass(frozen=True)
class _Cut:
    """A row with the text before its cut, whose last token has no target activations, and the reference after it."""

    row: CutRow
    prompt: Prompt
    committed: list[int]
    reference: list[int]


def cut_points(n_answer_tokens: int, n_cuts: int) -> list[int]:
    """Return after how many of its tokens an answer is cut: evenly spaced, fewer than ``n_cuts`` where it is short."""
    points = {round(n_answer_tokens * (number + 1) / (n_cuts + 1)) for number in range(n_cuts)}
    return sorted(point for point in points if 0 < point < n_answer_tokens)


def measure_disconnections(
    target: Target,
    drafters: Mapping[str, LoadedDrafter],
    prompts: Sequence[Prompt],
    *,
    n_tokens: int,
    n_cuts: int,
    max_new_tokens: int,
    batch_size: int = _BATCH,
    scorer: Scorer | None = None,
    progress: Progress | None = None,
) -> list[CutRow]:
    """Cut the greedy answers to prompts and let every drafter continue from each cut.

    Args:
        prompts: of which the first turns are answered; one without room for an answer is left out.
        n_tokens: that are written after each cut, at most; fewer where the target's positions or the text end.
        max_new_tokens: cuts lie within this many tokens of an answer.
        progress: called with (done, total, message) per batch.
    """
    usable = [(prompt, tokens) for prompt in prompts for tokens in opening_tokens(target, [prompt])]
    cuts: list[_Cut] = []
    for start in range(0, len(usable), batch_size):
        batch = usable[start : start + batch_size]
        answers = generate_batch(target, [tokens for _, tokens in batch], max_new_tokens=max_new_tokens + n_tokens)
        for (prompt, tokens), answer in zip(batch, answers, strict=True):
            for number, point in enumerate(cut_points(min(len(answer.tokens), max_new_tokens), n_cuts)):
                row = CutRow(prompt.prompt_id, prompt.category, number, len(tokens), point)
                reference = answer.tokens[point : point + n_tokens]
                cuts.append(_Cut(row, prompt, tokens + answer.tokens[:point], reference))
        if progress is not None:
            progress(start + len(batch), len(usable), "answer")
    for start in range(0, len(cuts), batch_size):
        _continue_batch(target, drafters, cuts[start : start + batch_size], n_tokens, scorer)
        if progress is not None:
            progress(min(start + batch_size, len(cuts)), len(cuts), "continue")
    return [cut.row for cut in cuts]


@torch.inference_mode()
def _continue_batch(
    target: Target, drafters: Mapping[str, LoadedDrafter], cuts: Sequence[_Cut], n_tokens: int, scorer: Scorer | None
) -> None:
    """Fill ``by_writer`` of some cuts."""
    for name in (TARGET, *drafters):
        cache = target.new_cache(len(cuts))
        if name == TARGET:
            prefill(target, cache, [cut.committed[:-1] for cut in cuts])
            continuations = [cut.reference for cut in cuts]
        else:
            continuations = _draft(target, drafters[name], cuts, cache, n_tokens)
        found = continuation_log_probs(target, cache, [cut.committed[-1] for cut in cuts], continuations)
        for cut, tokens, log_probs in zip(cuts, continuations, found, strict=True):
            padded = [*tokens, *[-1] * len(cut.reference)]
            agrees = tuple(ours == theirs for ours, theirs in zip(padded, cut.reference, strict=False))
            score = None if scorer is None else _score(target, scorer, cut, tokens)
            cut.row.by_writer[name] = Continuation(tuple(tokens), tuple(log_probs), agrees, score)


def _draft(
    target: Target, loaded: LoadedDrafter, cuts: Sequence[_Cut], cache: TargetCache, n_tokens: int
) -> list[list[int]]:
    """Draft a chain after each cut, up to the end of sequence, of the target's positions or the drafter's levels."""
    proposer = DrafterProposer(target, loaded.drafter, loaded.frozen)
    proposer.begin(cache)
    prefill(target, cache, [cut.committed[:-1] for cut in cuts], proposer)  # as the end of a round leaves it
    depth = min(n_tokens, loaded.drafter.config.max_depth or n_tokens)
    room = [min(depth, target.max_positions - len(cut.committed)) for cut in cuts]
    drafts = proposer.propose([cut.committed for cut in cuts], TreeShape(max(room)))
    found = []
    for tokens, own in zip(drafts.tokens.tolist(), room, strict=True):
        ends = [place + 1 for place, token in enumerate(tokens[:own]) if token in target.eos_token_ids]
        found.append(tokens[: min(ends, default=own)])
    return found


def continuation_log_probs(
    target: Target, cache: TargetCache, roots: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the target's log-probability of each token of a continuation, given everything before it, in nats.

    Args:
        cache: with everything before the roots committed; it is left so.
        roots: the token before each continuation.
    """
    fed = [[root, *tokens[:-1]] for root, tokens in zip(roots, continuations, strict=True)]
    hidden = target.forward(padded(fed, target.device), cache)  # [B, n, E]
    found = []
    for row, tokens in enumerate(continuations):
        log_p = target.logits(hidden[row, : len(tokens)]).float().log_softmax(dim=-1)  # [n, V]
        chosen = torch.tensor(list(tokens), dtype=torch.int64, device=log_p.device)[:, None]
        found.append(log_p.gather(1, chosen)[:, 0].tolist())
    return found


def load_scorer(name: str) -> Scorer:
    """Find a user's function by ``module:function`` or ``file.py:function``."""
    where, _, function = name.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, Path(where).expanduser())
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except Exception as error:  # the user's module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise OptionInvalid(f"--scorer {name}: {where} cannot be imported ({reason}); check the name.") from error
    scorer: Scorer | None = getattr(module, function, None)
    if not callable(scorer):
        raise OptionInvalid(f"--scorer {name}: {where} has no function {function!r}; check the name.")
    return scorer


def _score(target: Target, scorer: Scorer, cut: _Cut, tokens: Sequence[int]) -> float:
    prompt = "\n".join(str(message["content"]) for message in cut.prompt.turns[0])
    answer = target.tokenizer.decode([*cut.committed[cut.row.n_prompt_tokens :], *tokens], skip_special_tokens=True)
    where = f"the scorer, called with an answer to prompt {cut.row.prompt_id},"
    try:
        score: Any = scorer(prompt, answer)
    except Exception as error:  # the user's function may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise OptionInvalid(f"{where} raised {reason}; correct the function.") from error
    try:
        number = float(score)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise OptionInvalid(f"{where} returned {str(score)[:60]!r}, expected a finite number; correct the function.")
    return number


@dataclass(frozen=True)
class Figure:
    """A mean over ``n`` values and its 95 % interval; None where nothing was counted, or for fewer than two prompts."""

    mean: float | None
    interval: Interval
    n: int


@dataclass(frozen=True)
class WriterSummary:
    """The figures of one writer, the target or a drafter, over all cuts.

    Attributes:
        common_prefix: tokens in common with the target's continuation.
        agreement: share of the target's tokens that the writer has at the same place.
        log_prob: the target's, per token.
        agreement_by_offset: the same by tokens since the cut.
        log_prob_by_offset: the same by tokens since the cut.
    """

    writer: str
    n_cuts: int
    common_prefix: Figure
    agreement: Figure
    log_prob: Figure
    score: Figure
    agreement_by_offset: tuple[Figure, ...]
    log_prob_by_offset: tuple[Figure, ...]


def summarize_writer(name: str, rows: Sequence[CutRow]) -> WriterSummary:
    """Sum up what one writer wrote."""
    prompt_ids = [row.prompt_id for row in rows]
    written = [row.by_writer[name] for row in rows]
    longest = max(max(len(one.tokens), len(one.agrees)) for one in written)

    def figure(values: Sequence[Sequence[float]]) -> Figure:
        """Return the mean of values per cut, and its interval."""
        mean, interval = ratio_with_interval(prompt_ids, [(sum(part), len(part)) for part in values])
        return Figure(mean, interval, sum(map(len, values)))

    return WriterSummary(
        writer=name,
        n_cuts=len(rows),
        common_prefix=figure([(one.n_common,) for one in written]),
        agreement=figure([one.agrees for one in written]),
        log_prob=figure([one.log_probs for one in written]),
        score=figure([() if one.score is None else (one.score,) for one in written]),
        agreement_by_offset=tuple(figure([one.agrees[i : i + 1] for one in written]) for i in range(longest)),
        log_prob_by_offset=tuple(figure([one.log_probs[i : i + 1] for one in written]) for i in range(longest)),
    )
