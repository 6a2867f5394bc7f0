"""Measures what drafters write without their target (arXiv 2410.03804: the client after a disconnection).

The target answers up to a cut. From there on a drafter writes alone: one chain without verification, with the target's
activations of everything before the last token and nothing after. In Mixture of Attentions and GLIDE nothing behind the
cut has target KV, in EAGLE the features that are fed back are its own.

Shapes: B rows, n tokens of a continuation, V vocabulary, E target width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionInvalid
from ..moa.decoding.loop import generate_batch
from ..moa.decoding.proposer import DrafterProposer
from ..moa.decoding.tree import TreeShape
from ..moa.targets.cache import TargetCache
from ..moa.targets.live import Target
from ..text import Progress
from .drafters import LoadedDrafter
from .measure import opening_tokens
from .prompts import Prompt
from .scorer import Scorer

TARGET = "target"
"""Name of the target among the writers: what it writes behind the cut is the reference."""


@dataclass(frozen=True)
class Continuation:
    """The tokens that the target or a drafter wrote behind a cut.

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
    by_writer: dict[str, Continuation]


@dataclass
class _Cut:
    """The text before a cut, and what the target would have written behind it."""

    prompt: Prompt
    number: int
    prompt_tokens: list[int]
    written: list[int]
    reference: list[int]
    by_writer: dict[str, Continuation] = field(default_factory=dict)

    @property
    def committed(self) -> list[int]:
        """The prompt and the answer up to the cut; the last token has no target activations."""
        return self.prompt_tokens + self.written


def cut_points(n_answer_tokens: int, n_cuts: int) -> list[int]:
    """Return after how many of its tokens an answer is cut.

    Returns:
        Ascending numbers from 1 to ``n_answer_tokens - 1``, evenly spaced; fewer where there is no room.
    """
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
    batch_size: int = 8,
    scorer: Scorer | None = None,
    progress: Progress | None = None,
) -> list[CutRow]:
    """Cut the greedy answers to prompts and let every drafter go on from each cut.

    Args:
        prompts: of which the first turns are answered; one without room for an answer is left out.
        n_tokens: that are written behind each cut, at most; fewer where the target's positions or the text end.
        max_new_tokens: cuts lie within this many tokens of an answer.
        batch_size: prompts answered, and cuts continued, at once.
        progress: called with (done, total, message) per batch.

    Raises:
        DatasetError: the chat template refuses a prompt.
        DrafterError: a drafter cannot be used with this target.
        OptionInvalid: the scorer raises something, or returns no finite number.
    """
    usable = [(prompt, tokens) for prompt in prompts for tokens in opening_tokens(target, [prompt])]
    cuts: list[_Cut] = []
    for start in range(0, len(usable), batch_size):
        batch = usable[start : start + batch_size]
        answers = generate_batch(target, [tokens for _, tokens in batch], max_new_tokens=max_new_tokens + n_tokens)
        for (prompt, tokens), answer in zip(batch, answers, strict=True):
            for number, point in enumerate(cut_points(min(len(answer.tokens), max_new_tokens), n_cuts)):
                reference = answer.tokens[point : point + n_tokens]
                cuts.append(_Cut(prompt, number, tokens, answer.tokens[:point], reference))
        if progress is not None:
            progress(start + len(batch), len(usable), "answer")
    for start in range(0, len(cuts), batch_size):
        _continue_batch(target, drafters, cuts[start : start + batch_size], n_tokens, scorer)
        if progress is not None:
            progress(start + len(cuts[start : start + batch_size]), len(cuts), "go on alone")
    return [
        CutRow(
            cut.prompt.prompt_id,
            cut.prompt.category,
            cut.number,
            len(cut.prompt_tokens),
            len(cut.written),
            cut.by_writer,
        )
        for cut in cuts
    ]


@torch.inference_mode()
def _continue_batch(
    target: Target, drafters: Mapping[str, LoadedDrafter], cuts: Sequence[_Cut], n_tokens: int, scorer: Scorer | None
) -> None:
    """Fill ``by_writer`` of some cuts."""
    for name in (TARGET, *drafters):
        cache = target.new_cache(len(cuts))
        if name == TARGET:
            _prefill(target, cache, cuts)
            continuations = [cut.reference for cut in cuts]
        else:
            continuations = _continue_alone(target, drafters[name], cuts, cache, n_tokens)
        found = continuation_log_probs(target, cache, [cut.committed[-1] for cut in cuts], continuations)
        for cut, tokens, log_probs in zip(cuts, continuations, found, strict=True):
            padded = [*tokens, *[-1] * len(cut.reference)]
            agrees = tuple(ours == theirs for ours, theirs in zip(padded, cut.reference, strict=False))
            score = None if scorer is None else _score(target, scorer, cut, tokens)
            cut.by_writer[name] = Continuation(tuple(tokens), tuple(log_probs), agrees, score)


def _prefill(target: Target, cache: TargetCache, cuts: Sequence[_Cut], proposer: DrafterProposer | None = None) -> None:
    """Commit all but the last token before each cut, as the end of a round leaves it."""
    rows = [cut.committed[:-1] for cut in cuts]
    hidden = target.forward(_padded(rows, target.device), cache)
    kept = [range(len(row)) for row in rows]
    cache.commit(kept)
    if proposer is not None:
        proposer.observe(hidden, kept)


def _continue_alone(
    target: Target, loaded: LoadedDrafter, cuts: Sequence[_Cut], cache: TargetCache, n_tokens: int
) -> list[list[int]]:
    """Draft a chain behind each cut, up to the end of sequence, of the target's positions or the drafter's levels."""
    proposer = DrafterProposer(target, loaded.drafter, loaded.frozen)
    proposer.begin(cache)
    _prefill(target, cache, cuts, proposer)
    most = min(n_tokens, loaded.drafter.config.max_depth or n_tokens)
    room = [min(most, target.max_positions - len(cut.committed)) for cut in cuts]
    drafts = proposer.propose([cut.committed for cut in cuts], TreeShape(max(room)))
    return [
        _up_to_end(tokens[:own], target.eos_token_ids) for tokens, own in zip(drafts.tokens.tolist(), room, strict=True)
    ]


def continuation_log_probs(
    target: Target, cache: TargetCache, roots: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the target's log-probability of each token of a continuation, given everything before it.

    Args:
        cache: with everything before the roots committed; it is left so.
        roots: the token before each continuation.

    Returns:
        Per row and token, in nats.
    """
    fed = [[root, *tokens[:-1]] for root, tokens in zip(roots, continuations, strict=True)]
    hidden = target.forward(_padded(fed, target.device), cache)  # [B, n, E]
    found = []
    for row, tokens in enumerate(continuations):
        log_p = target.logits(hidden[row, : len(tokens)]).float().log_softmax(dim=-1)  # [n, V]
        chosen = torch.tensor(list(tokens), dtype=torch.int64, device=log_p.device)[:, None]
        found.append(log_p.gather(1, chosen)[:, 0].tolist())
    return found


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


def _up_to_end(tokens: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """Return the tokens up to the first end of sequence, included."""
    stop = next((place + 1 for place, token in enumerate(tokens) if token in eos_token_ids), len(tokens))
    return tokens[:stop]


def _score(target: Target, scorer: Scorer, cut: _Cut, tokens: Sequence[int]) -> float:
    prompt = "\n".join(str(message["content"]) for message in cut.prompt.turns[0])
    answer = target.tokenizer.decode([*cut.written, *tokens], skip_special_tokens=True)
    where = f"the scorer, called with an answer to prompt {cut.prompt.prompt_id},"
    try:
        score: Any = scorer(prompt, answer)
    except Exception as error:  # the user's function may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise OptionInvalid(f"{where} raised {reason}; mend the function.") from error
    try:
        number = float(score)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise OptionInvalid(f"{where} returned {str(score)[:60]!r}, expected a finite number; mend the function.")
    return number
