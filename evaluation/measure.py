"""Decodes the same prompts with every method in alternation, and compares the tokens; and cuts off the target.

All methods are counted by the same code: tokens are the ids that a method generated, seconds are its whole call,
prefill included. So a method measured against itself gives equal counts, and a speed ratio of 1 up to noise.

Disconnections (arXiv 2410.03804): the target answers up to a cut. From there on a drafter writes without verification:
one chain, with the target's activations of everything before the last token and none after it. In Mixture of Attentions
and GLIDE nothing after the cut has target KV, in EAGLE the features that are fed back are its own.

Shapes: B rows, n tokens of a continuation, V vocabulary, E target width.
"""

import importlib
import math
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import DatasetError, OptionInvalid, PromptUnusable, TemplateError
from ..moa.decoding.loop import DecodeStats, Generation, generate_batch, prefill
from ..moa.decoding.proposer import DrafterProposer
from ..moa.decoding.sampling import GREEDY, SamplingConfig, penalised
from ..moa.decoding.tree import TreeShape
from ..moa.drafters.base import Drafter
from ..moa.drafters.caches import padded
from ..moa.targets.cache import TargetCache
from ..moa.targets.chat import Message
from ..moa.targets.chat_tokens import prompt_tokens
from ..moa.targets.live import Target
from ..text import Progress, first_line
from .prompts import Prompt

# A method: (prompts as token ids, a seed for each) -> a generation for each.
Generate = Callable[[list[list[int]], Sequence[int]], list[Generation]]
# (the prompt's messages as text, the answer's text) -> a number; greater is better.
Scorer = Callable[[str, str], float]
TARGET = "target"  # among the writers: what it writes after the cut is the reference
_BATCH = 8  # cuts that are continued together; no figure depends on it


@dataclass
class MethodRun(DecodeStats):
    """The figures of one method on one prompt; of several repeats the median counts."""

    # index of the first generated token that differs from the baseline's
    first_divergence: int | None = None
    # difference of the two highest target logits there, after the repetition penalty
    top2_gap: float | None = None
    repeats_s: tuple[float, ...] = ()

    @property
    def calls(self) -> tuple[int, int]:
        """Tokens committed by target calls, and their number: a ratio's two sides."""
        return sum(self.committed_per_call), self.n_target_calls

    @property
    def speed(self) -> tuple[int, float]:
        """Generated tokens, and seconds: a ratio's two sides."""
        return self.n_tokens, self.total_s


@dataclass(frozen=True)
class PromptRow:
    """The runs of all methods on one turn of a prompt, and the order in which they ran."""

    prompt_id: str
    category: str
    turn: int
    n_prompt_tokens: int
    order: tuple[str, ...]
    runs: dict[str, MethodRun]


@dataclass(frozen=True)
class SkippedTurn:
    """A turn without an answer, since it or a turn before it leaves no position to generate into."""

    prompt_id: str
    turn: int
    n_prompt_tokens: int  # 0 where the answer before it spells a control token


@dataclass
class Measurement:
    """All rows of a measurement, and the turns that were left out."""

    rows: list[PromptRow] = field(default_factory=list)
    skipped: list[SkippedTurn] = field(default_factory=list)


def measure(
    target: Target,
    methods: Mapping[str, Generate],
    prompts: Sequence[Prompt],
    *,
    warmup: int = 1,
    batch_size: int = 1,
    repeats: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    sampling: SamplingConfig = GREEDY,
) -> Measurement:
    """Decode every turn of every prompt with every method; batches take turns in which method comes first.

    Args:
        methods: name -> method. The first is the baseline: its answers make the history of later turns, and the
            other methods' tokens are compared with its tokens.
        warmup: prompts that each method decodes first, unmeasured.
        repeats: times that each method decodes each batch, in alternation.
        seed: prompt i draws from seed + i.
        sampling: of the methods.
    """
    first = opening_tokens(target, prompts)[:warmup]
    result = Measurement()
    n_batches = 0
    for generate in methods.values():
        for start in range(0, len(first), batch_size):
            batch = first[start : start + batch_size]
            generate(batch, [seed] * len(batch))
    for start in range(0, len(prompts), batch_size):
        chats = [
            _Chat(prompt, seed + at)
            for at, prompt in enumerate(prompts[start : start + batch_size], start)
        ]
        for turn in range(max(len(chat.prompt.turns) for chat in chats)):
            if answered := [
                chat for chat in chats if chat.begin_turn(target, turn, result.skipped)
            ]:
                # Each method comes first equally often: the first one finds caches cold and the
                # machine idle.
                shift = n_batches % len(methods)
                order = [*methods][shift:] + [*methods][:shift]
                result.rows += _measure_batch(
                    target, methods, order, answered, turn, repeats, sampling
                )
                n_batches += 1
        if progress is not None:
            last = chats[-1].prompt
            progress(start + len(chats), len(prompts), f"evaluate {last.category} {last.prompt_id}")
    return result


def opening_tokens(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Encode the first turns of prompts, of those that leave a position to generate into."""
    # the texts of all turns, so that none is refused after others were decoded
    for prompt in prompts:
        try:
            target.template.check_prompt(
                [message for turn in prompt.turns for message in turn], prompt.tools
            )
        except PromptUnusable as error:
            raise DatasetError(f"prompt {prompt.prompt_id}: {error}") from error
    openings = [_tokens(target, prompt, list(prompt.turns[0])) for prompt in prompts]
    return [tokens for tokens in openings if len(tokens) < target.max_positions]


class _Chat:
    """A prompt and the turns of it that were answered."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.prompt = prompt
        self.seed = seed
        self.history: list[Message] = []
        self.tokens: list[int] = []
        self._ended = False

    def begin_turn(self, target: Target, turn: int, skipped: list[SkippedTurn]) -> bool:
        """Encode a turn; False where there is none with room for an answer, which is skipped with all after it."""
        if self._ended or turn >= len(self.prompt.turns):
            return False
        self.history += self.prompt.turns[turn]
        try:
            self.tokens = _tokens(target, self.prompt, self.history)
        # it is the answer that spells a control token: all prompts were checked before
        except PromptUnusable:
            self.tokens = []
        if not self.tokens or len(self.tokens) >= target.max_positions:
            turns = range(turn, len(self.prompt.turns))
            skipped += [
                SkippedTurn(self.prompt.prompt_id, number, len(self.tokens)) for number in turns
            ]
            self._ended = True
        return not self._ended


def _measure_batch(
    target: Target,
    methods: Mapping[str, Generate],
    order: Sequence[str],
    batch: Sequence[_Chat],
    turn: int,
    repeats: int,
    sampling: SamplingConfig,
) -> list[PromptRow]:
    prompts = [chat.tokens for chat in batch]
    seeds = [chat.seed for chat in batch]
    generations: dict[str, list[list[Generation]]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name in order:
            generations[name].append(methods[name](prompts, seeds))
    rows = []
    for index, chat in enumerate(batch):
        of_baseline = next(iter(generations.values()))[0][index]
        runs = {
            name: _compare(
                target,
                chat.tokens,
                of_baseline,
                [repeat[index] for repeat in generations[name]],
                sampling,
            )
            for name in methods
        }
        prompt = chat.prompt
        rows.append(
            PromptRow(prompt.prompt_id, prompt.category, turn, len(chat.tokens), tuple(order), runs)
        )
        answer = target.tokenizer.decode(of_baseline.tokens, skip_special_tokens=True)
        chat.history.append({"role": "assistant", "content": answer})
    return rows


def first_divergence(baseline: Sequence[int], other: Sequence[int]) -> int | None:
    """Find the first difference: the shorter length where one is a prefix, None where both are equal."""
    pairs = enumerate(zip_longest(baseline, other))
    return next((index for index, (left, right) in pairs if left != right), None)


@torch.inference_mode()
def top2_gap(target: Target, tokens: Sequence[int], repetition_penalty: float = 1.0) -> float:
    """Compute the difference of the two highest logits of the next token, by one forward without a cache."""
    hidden = target.forward(torch.tensor([list(tokens)], device=target.device), target.new_cache())
    highest = penalised(target.logits(hidden[0, -1]), tokens, repetition_penalty).topk(2).values
    return float(highest[0] - highest[1])


def _tokens(target: Target, prompt: Prompt, history: list[Message]) -> list[int]:
    try:
        return prompt_tokens(target.template, history, prompt.tools)
    except PromptUnusable:
        raise
    except TemplateError as error:
        raise DatasetError(f"prompt {prompt.prompt_id}: {error}") from error


def _compare(
    target: Target,
    prompt: list[int],
    baseline: Generation,
    repeats: list[Generation],
    sampling: SamplingConfig,
) -> MethodRun:
    # Of an even number of repeats the faster median, so that it is a run that took place; their
    # tokens are equal.
    other = sorted(repeats, key=lambda repeat: repeat.stats.total_s)[(len(repeats) - 1) // 2]
    divergence = first_divergence(baseline.tokens, other.tokens)
    gap = None
    if divergence is not None and sampling.temperature == 0:
        # A gap near zero tells a tie, which rounding decides, from an error of the method.
        gap = top2_gap(
            target, [*prompt, *baseline.tokens[:divergence]], sampling.repetition_penalty
        )
    repeats_s = tuple(repeat.stats.total_s for repeat in repeats)
    return MethodRun(
        **asdict(other.stats), first_divergence=divergence, top2_gap=gap, repeats_s=repeats_s
    )


@dataclass(frozen=True)
class Continuation:
    """The tokens that the target or a drafter wrote after a cut."""

    tokens: tuple[int, ...]  # up to the first end of sequence, included
    log_probs: tuple[float, ...]  # the target's of each token, given all before it, in nats
    # for each token of the reference, whether this writer has the same at that place
    agrees: tuple[bool, ...]
    score: float | None = None

    @property
    def n_common(self) -> int:
        """The number of tokens up to the first that differs from the reference."""
        return next((place for place, same in enumerate(self.agrees) if not same), len(self.agrees))


@dataclass(frozen=True)
class CutRow:
    """One cut of one answer, after ``n_written`` of its tokens: ``target`` and each drafter -> what it wrote."""

    prompt_id: str
    category: str
    cut: int
    n_prompt_tokens: int
    n_written: int
    by_writer: dict[str, Continuation] = field(default_factory=dict)


class _Cut(NamedTuple):
    """A row with the text before its cut, whose last token has no target activations, and the reference after it."""

    row: CutRow
    prompt: Prompt
    committed: list[int]
    reference: list[int]


def cut_points(n_answer_tokens: int, n_cuts: int) -> list[int]:
    """Choose after how many of its tokens an answer is cut: evenly spaced, fewer than ``n_cuts`` if it is short."""
    points = {round(n_answer_tokens * (number + 1) / (n_cuts + 1)) for number in range(n_cuts)}
    return sorted(point for point in points if 0 < point < n_answer_tokens)


def measure_disconnections(
    target: Target,
    drafters: Mapping[str, Drafter],
    # of which the first turns are answered; one without room for an answer is left out
    prompts: Sequence[Prompt],
    *,
    # that are written after each cut, at most; fewer where the target's positions or the text end
    n_tokens: int,
    n_cuts: int,
    max_new_tokens: int,  # cuts lie within this many tokens of an answer
    batch_size: int = _BATCH,
    scorer: Scorer | None = None,
    progress: Progress | None = None,
) -> list[CutRow]:
    """Cut the greedy answers to prompts and let every drafter continue from each cut."""
    usable = [(prompt, tokens) for prompt in prompts for tokens in opening_tokens(target, [prompt])]
    cuts: list[_Cut] = []
    for start in range(0, len(usable), batch_size):
        batch = usable[start : start + batch_size]
        answers = generate_batch(
            target, [tokens for _, tokens in batch], max_new_tokens=max_new_tokens + n_tokens
        )
        for (prompt, tokens), answer in zip(batch, answers, strict=True):
            for number, point in enumerate(
                cut_points(min(len(answer.tokens), max_new_tokens), n_cuts)
            ):
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
    target: Target,
    drafters: Mapping[str, Drafter],
    cuts: Sequence[_Cut],
    n_tokens: int,
    scorer: Scorer | None,
) -> None:
    """Fill ``by_writer`` of some cuts."""
    for name in (TARGET, *drafters):
        cache = target.new_cache(len(cuts))
        if name == TARGET:
            prefill(target, cache, [cut.committed[:-1] for cut in cuts])
            continuations = [cut.reference for cut in cuts]
        else:
            continuations = _draft(target, drafters[name], cuts, cache, n_tokens)
        found = continuation_log_probs(
            target, cache, [cut.committed[-1] for cut in cuts], continuations
        )
        for cut, tokens, log_probs in zip(cuts, continuations, found, strict=True):
            agrees = tuple(ours == theirs for ours, theirs in zip_longest(tokens, cut.reference))[
                : len(cut.reference)
            ]
            score = None if scorer is None else _score(target, scorer, cut, tokens)
            cut.row.by_writer[name] = Continuation(tuple(tokens), tuple(log_probs), agrees, score)


def _draft(
    target: Target, drafter: Drafter, cuts: Sequence[_Cut], cache: TargetCache, n_tokens: int
) -> list[list[int]]:
    """Draft a chain after each cut, up to the end of sequence, of the target's positions or the drafter's levels."""
    proposer = DrafterProposer(target, drafter)
    proposer.begin(cache)
    # as the end of a round leaves it
    prefill(target, cache, [cut.committed[:-1] for cut in cuts], proposer)
    # Block drafters make so many levels at once and no more.
    depth = min(n_tokens, drafter.config.max_depth or n_tokens)
    room = [min(depth, target.max_positions - len(cut.committed)) for cut in cuts]
    drafts = proposer.propose([cut.committed for cut in cuts], TreeShape(max(room)))
    found = []
    for tokens, own in zip(drafts.tokens.tolist(), room, strict=True):
        ends = [
            place + 1 for place, token in enumerate(tokens[:own]) if token in target.eos_token_ids
        ]
        found.append(tokens[: min(ends, default=own)])
    return found


def continuation_log_probs(
    target: Target, cache: TargetCache, roots: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Compute the target's log-probability of each token of continuations, given everything before it, in nats.

    ``cache``: with everything before the roots, the tokens before the continuations, committed; it is left so.
    """
    # The last token of a continuation predicts what nobody wrote.
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
            scorer: Scorer = runpy.run_path(str(Path(where).expanduser()))[function]
        else:
            scorer = getattr(importlib.import_module(where), function)
    except Exception as error:  # the user's module may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise OptionInvalid(
            f"--scorer {name}: no such function ({reason}); check the name."
        ) from error
    return scorer


def _score(target: Target, scorer: Scorer, cut: _Cut, tokens: Sequence[int]) -> float:
    prompt = "\n".join(str(message["content"]) for message in cut.prompt.turns[0])
    answer = target.tokenizer.decode(
        [*cut.committed[cut.row.n_prompt_tokens :], *tokens], skip_special_tokens=True
    )
    try:
        score = scorer(prompt, answer)
        if not math.isfinite(score):
            raise ValueError(f"{score} is not a finite number")
    except Exception as error:  # the user's function may raise anything
        reason = f"with an answer to prompt {cut.row.prompt_id}, failed ({type(error).__name__}: {first_line(error)})"
        raise OptionInvalid(f"the scorer, called {reason}; correct the function.") from error
    return float(score)
