"""Decodes the same prompts with every method in alternation, and compares tokens and times.

The same code measures all methods. It counts generated token ids, and measures the time of a whole
generation, including the prefill. So if a method is compared with itself, the counts are equal, and
the ratio of the speeds is 1 up to noise.

This module also measures how well a drafter continues an answer if the connection to the target is
lost (arXiv 2410.03804). To simulate the loss, an answer of the target is *cut*: only its first
tokens are used. Then a drafter writes a continuation of these tokens: a chain of drafts that the
target does not verify. The drafter has the target's activations of all tokens before the cut,
except the last one. For the tokens after the cut, Mixture of Attentions and GLIDE have no target
KV, and EAGLE uses its own features as input.

Shapes: B rows, n tokens of a continuation, V vocabulary, E target width.
"""

import importlib
import math
import runpy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import DatasetError, OptionInvalid, PromptUnusable, TemplateError
from ..moa.decoding.loop import DecodeStats, Generation, generate_batch, prefill
from ..moa.decoding.proposer import DrafterProposer
from ..moa.decoding.sampling import GREEDY, SamplingConfig, cut_answer, penalised
from ..moa.decoding.tree import TreeShape
from ..moa.drafters.base import Drafter
from ..moa.drafters.caches import padded
from ..moa.targets.cache import TargetCache
from ..moa.targets.chat import Message
from ..moa.targets.chat_tokens import prompt_tokens
from ..moa.targets.live import Target
from ..text import SILENT, Progress, first_line
from .prompts import Prompt

# A method is a function. It takes a list with the token ids of each prompt, and a list with the
# seed of each prompt. It returns one generation for each prompt.
Generate = Callable[[list[list[int]], Sequence[int]], list[Generation]]
# A scorer is a function of two texts: the messages of a prompt, and the answer. It returns a
# number. Better answers have higher numbers.
Scorer = Callable[[str, str], float]
# The name of the target as a writer of continuations. Drafters are the other writers.
TARGET = "target"
# Number of cut answers that are continued in one batch. The results do not depend on this number.
_BATCH = 8


@dataclass
class MethodRun(DecodeStats):
    """Counts and times of the answer of one method to one turn of a prompt.

    If the answer was generated several times, the counts and times are from the run with the median
    time.
    """

    # Index of the first generated token that differs from the baseline's answer. None if all tokens
    # are equal.
    first_divergence: int | None = None
    # The target's highest logit minus its second highest logit for the token at the index
    # ``first_divergence``, after the repetition penalty. None if all tokens are equal, or if tokens
    # are sampled.
    top2_gap: float | None = None
    # Seconds that each repetition of the generation took.
    repeats_s: tuple[float, ...] = ()

    @property
    def calls(self) -> tuple[int, int]:
        """The number of tokens that target calls committed, and the number of these calls."""
        return sum(self.committed_per_call), self.n_target_calls

    @property
    def speed(self) -> tuple[int, float]:
        """The number of generated tokens, and the seconds that their generation took."""
        return self.n_tokens, self.total_s


@dataclass(frozen=True)
class PromptRow:
    """The results of all methods for one turn of a prompt, and the order of these methods."""

    prompt_id: str
    category: str
    turn: int
    n_prompt_tokens: int
    order: tuple[str, ...]
    runs: dict[str, MethodRun]


@dataclass(frozen=True)
class SkippedTurn:
    """A turn of a prompt that was not answered.

    Either the messages take all positions of the target, so that no answer fits, or an earlier
    answer contains a control token of the target. All turns after a skipped turn are skipped, too.
    """

    prompt_id: str
    turn: int
    # Number of tokens of all messages up to and including the first skipped turn of the chat. 0 if
    # an answer contains a control token.
    n_prompt_tokens: int


@dataclass
class Measurement:
    """The results of a measurement, one row per answered turn, and the turns that were skipped."""

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
    progress: Progress = SILENT,
    sampling: SamplingConfig = GREEDY,
) -> Measurement:
    """Decode every turn of every prompt with every method.

    The methods decode one batch after another. They take turns at being the first to decode a
    batch.

    Args:
        target: the target.
        methods: name -> method. The first method is the baseline. The tokens of the other methods
            are compared with the baseline's tokens. The baseline's answers become the history of
            later turns.
        prompts: the prompts.
        warmup: number of prompts that each method decodes before the measurement.
        batch_size: number of prompts that are decoded together.
        repeats: number of times that each method decodes each batch. Methods alternate.
        seed: seed of the sampling. The prompt with index i uses ``seed + i``.
        progress: reports the number of measured prompts.
        sampling: sampling settings of all methods.
    """
    first = opening_tokens(target, prompts)[:warmup]
    result = Measurement()
    n_batches = 0
    evaluating = progress.of("evaluate", "prompt")
    for generate in methods.values():
        for start in range(0, len(first), batch_size):
            batch = first[start : start + batch_size]
            generate(batch, [seed] * len(batch))
    for start in range(0, len(prompts), batch_size):
        chats: list[_Chat] = []
        for index, prompt in enumerate(prompts[start : start + batch_size], start):
            chats.append(_Chat(prompt, seed + index))
        n_turns = max(len(chat.prompt.turns) for chat in chats)
        for turn in range(n_turns):
            answered: list[_Chat] = []
            for chat in chats:
                if chat.begin_turn(target, turn, result.skipped):
                    answered.append(chat)
            if not answered:
                continue
            # The first method that decodes a batch has a disadvantage from cold caches, or an
            # advantage from a machine that was idle before. So let each method be the first one
            # equally often.
            shift = n_batches % len(methods)
            order = [*methods][shift:] + [*methods][:shift]
            result.rows += _measure_batch(target, methods, order, answered, turn, repeats, sampling)
            n_batches += 1
        last = chats[-1].prompt
        evaluating(start + len(chats), len(prompts), f"{last.category} {last.prompt_id}")
    return result


def opening_tokens(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Encode the first turn of each prompt. Leave out turns after which no answer would fit."""
    # Check the texts of all turns first, so that no text is rejected in the middle of a
    # measurement.
    for prompt in prompts:
        try:
            messages = list(chain.from_iterable(prompt.turns))
            target.template.check_prompt(messages, prompt.tools)
        except PromptUnusable as error:
            raise DatasetError(f"prompt {prompt.prompt_id}: {error}") from error
    openings: list[list[int]] = []
    for prompt in prompts:
        tokens = _tokens(target, prompt, list(prompt.turns[0]))
        if len(tokens) < target.max_positions:
            openings.append(tokens)
    return openings


class _Chat:
    """A prompt, and its chat history up to the current turn."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.prompt = prompt
        self.seed = seed
        self.history: list[Message] = []
        self.tokens: list[int] = []
        self._ended = False

    def begin_turn(self, target: Target, turn: int, skipped: list[SkippedTurn]) -> bool:
        """Add a turn to the history, and encode the history as the next prompt.

        If the turn cannot be answered, this turn and all later turns are added to ``skipped``.

        Returns:
            Whether the chat has this turn and the turn can be answered.
        """
        if self._ended or turn >= len(self.prompt.turns):
            return False
        self.history += self.prompt.turns[turn]
        try:
            self.tokens = _tokens(target, self.prompt, self.history)
        # The texts of all prompts were checked before the measurement. So this error means that one
        # of the answers contains a control token.
        except PromptUnusable:
            self.tokens = []
        if not self.tokens or len(self.tokens) >= target.max_positions:
            for number in range(turn, len(self.prompt.turns)):
                skipped.append(SkippedTurn(self.prompt.prompt_id, number, len(self.tokens)))
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
    generations = defaultdict[str, list[list[Generation]]](list)
    for _ in range(repeats):
        for name in order:
            generations[name].append(methods[name](prompts, seeds))
    baseline = next(iter(methods))
    rows = []
    for index, chat in enumerate(batch):
        of_baseline = generations[baseline][0][index]
        runs: dict[str, MethodRun] = {}
        for name in methods:
            of_method = [repeat[index] for repeat in generations[name]]
            runs[name] = _compare(target, chat.tokens, of_baseline, of_method, sampling)
        prompt = chat.prompt
        rows.append(
            PromptRow(prompt.prompt_id, prompt.category, turn, len(chat.tokens), tuple(order), runs)
        )
        answer = target.tokenizer.decode(of_baseline.tokens, skip_special_tokens=True)
        chat.history.append({"role": "assistant", "content": answer})
    return rows


def first_divergence(baseline: Sequence[int], other: Sequence[int]) -> int | None:
    """Find the first index at which two sequences differ. None if they are equal.

    If one sequence is a prefix of the other, the result is the length of the shorter one.
    """
    for index, (left, right) in enumerate(zip_longest(baseline, other)):
        if left != right:
            return index
    return None


@torch.inference_mode()
def top2_gap(target: Target, tokens: Sequence[int], repetition_penalty: float = 1.0) -> float:
    """Compute the gap between the target's two highest logits for the token after ``tokens``."""
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
    # Take the repetition with the median time. All repetitions have the same tokens. If their
    # number is even, take the one with the lower of the two middle times, because no repetition has
    # exactly the median time.
    other = sorted(repeats, key=lambda repeat: repeat.stats.total_s)[(len(repeats) - 1) // 2]
    divergence = first_divergence(baseline.tokens, other.tokens)
    gap = None
    if divergence is not None and sampling.temperature == 0:
        # The gap shows whether rounding explains the different tokens. Rounding decides between two
        # tokens only if their logits are nearly equal. If the gap between the logits is larger, the
        # method has an error.
        gap = top2_gap(
            target, [*prompt, *baseline.tokens[:divergence]], sampling.repetition_penalty
        )
    repeats_s = tuple(repeat.stats.total_s for repeat in repeats)
    return MethodRun(
        **asdict(other.stats), first_divergence=divergence, top2_gap=gap, repeats_s=repeats_s
    )


@dataclass(frozen=True)
class Continuation:
    """The tokens that the target or a drafter wrote after the cut of an answer."""

    tokens: tuple[int, ...]  # tokens up to the first end-of-sequence token, which is included
    log_probs: tuple[float, ...]  # The target's log-probability of each token, in nats.
    # For each position after the cut, whether this continuation has the same token as the target's
    # continuation.
    agrees: tuple[bool, ...]
    # The score of the answer with this continuation. None if answers are not scored.
    score: float | None = None

    @property
    def n_common(self) -> int:
        """The number of tokens before the first difference from the target's continuation."""
        return (*self.agrees, False).index(False)


@dataclass(frozen=True)
class CutRow:
    """An answer that is cut after its first ``n_written`` tokens, with its continuations.

    ``by_writer`` maps a writer to the continuation that this writer wrote. A writer is ``target``
    or the name of a drafter.
    """

    prompt_id: str
    category: str
    cut: int
    n_prompt_tokens: int
    n_written: int
    by_writer: dict[str, Continuation] = field(default_factory=dict)


class _Cut(NamedTuple):
    """An answer of the target that is cut, with its tokens before and after the cut.

    ``committed`` contains the tokens of the prompt, and the tokens of the answer up to the cut. The
    last of these tokens has no target activations yet. ``reference`` contains the tokens with which
    the target itself continues. The results are written to ``row``.
    """

    row: CutRow
    prompt: Prompt
    committed: list[int]
    reference: list[int]


def cut_points(n_answer_tokens: int, n_cuts: int) -> list[int]:
    """Choose the positions at which an answer is cut. The positions are evenly spaced.

    At each position, the tokens before it are kept, and drafters continue them. A short answer is
    cut at fewer than ``n_cuts`` positions.
    """
    points = set[int]()
    for number in range(1, n_cuts + 1):
        point = round(n_answer_tokens * number / (n_cuts + 1))
        if 0 < point < n_answer_tokens:
            points.add(point)
    return sorted(points)


def measure_disconnections(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    *,
    n_tokens: int,
    n_cuts: int,
    max_new_tokens: int,
    batch_size: int = _BATCH,
    scorer: Scorer | None = None,
    progress: Progress = SILENT,
) -> list[CutRow]:
    """Cut the target's greedy answers to prompts, and let every drafter continue from each cut.

    To cut an answer means to keep only its first tokens.

    Args:
        target: the target.
        drafters: name -> drafter.
        prompts: prompts whose first turns are answered. Prompts that are too long for an answer are
            skipped.
        n_tokens: maximum number of tokens that are written after each cut. A continuation also ends
            at the target's maximum number of positions, and at an end-of-sequence token.
        n_cuts: maximum number of cuts per answer.
        max_new_tokens: an answer is cut only within its first ``max_new_tokens`` tokens.
        batch_size: number of cut answers that are continued in one batch.
        scorer: scores the answers. If it is None, they are not scored.
        progress: reports the number of finished answers, then the number of cuts with finished
            continuations.
    """
    usable: list[tuple[Prompt, list[int]]] = []
    for prompt in prompts:
        for tokens in opening_tokens(target, [prompt]):
            usable.append((prompt, tokens))
    cuts: list[_Cut] = []
    answering = progress.of("answer prompts", "prompt")
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
        answering(start + len(batch), len(usable))
    continuing = progress.of("continue cut answers", "cut")
    for start in range(0, len(cuts), batch_size):
        _continue_batch(target, drafters, cuts[start : start + batch_size], n_tokens, scorer)
        continuing(min(start + batch_size, len(cuts)), len(cuts))
    return [cut.row for cut in cuts]


@torch.inference_mode()
def _continue_batch(
    target: Target,
    drafters: Mapping[str, Drafter],
    cuts: Sequence[_Cut],
    n_tokens: int,
    scorer: Scorer | None,
) -> None:
    """Let the target and each drafter continue a batch of cut answers.

    Each continuation is stored in ``CutRow.by_writer``.
    """
    for name in (TARGET, *drafters):
        cache = target.new_cache(len(cuts))
        if name == TARGET:
            prefill(target, cache, [cut.committed[:-1] for cut in cuts])
            continuations = [cut.reference for cut in cuts]
        else:
            continuations = _draft(target, drafters[name], cuts, cache, n_tokens)
        all_log_probs = continuation_log_probs(target, cache, cuts, continuations)
        for cut, tokens, log_probs in zip(cuts, continuations, all_log_probs, strict=True):
            pairs = zip_longest(tokens[: len(cut.reference)], cut.reference)
            agrees = tuple(written == wanted for written, wanted in pairs)
            score = None if scorer is None else _score(target, scorer, cut, tokens)
            cut.row.by_writer[name] = Continuation(tuple(tokens), tuple(log_probs), agrees, score)


def _draft(
    target: Target, drafter: Drafter, cuts: Sequence[_Cut], cache: TargetCache, n_tokens: int
) -> list[list[int]]:
    """Draft a chain of tokens after each cut of an answer.

    A chain ends at an end-of-sequence token, at the target's maximum number of positions, or at the
    maximum number of tokens that the drafter can draft in a row.
    """
    proposer = DrafterProposer(target, drafter)
    proposer.begin(cache)
    # A prefill suffices here: the drafter's state after it is the same as if the tokens up to the
    # cut had been decoded in rounds.
    prefill(target, cache, [cut.committed[:-1] for cut in cuts], proposer)
    # Some drafters, such as block drafters, draft at most ``max_depth`` tokens in a row.
    depth = min(n_tokens, drafter.config.max_depth or n_tokens)
    committed: list[list[int]] = []
    room: list[int] = []
    for cut in cuts:
        committed.append(cut.committed)
        room.append(min(depth, target.max_positions - len(cut.committed)))
    drafts = proposer.propose(committed, TreeShape(max(room)))
    chains: list[list[int]] = []
    for tokens, limit in zip(drafts.tokens.tolist(), room, strict=True):
        chains.append(cut_answer(tokens, limit, target.eos_token_ids)[0])
    return chains


def continuation_log_probs(
    target: Target, cache: TargetCache, cuts: Sequence[_Cut], continuations: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Compute the target's log-probability, in nats, of each token of some continuations.

    The log-probability of a token is conditioned on all tokens before this token.

    Args:
        target: the target.
        cache: the target's KV of all tokens before each cut, except the last one. The committed
            tokens of this cache stay the same.
        cuts: one entry per row: the cut after which the continuation begins.
        continuations: one entry per row: the tokens of the continuation.
    """
    # The last token of a continuation need not be processed by the target, because no token after
    # it is scored.
    fed: list[list[int]] = []
    for cut, tokens in zip(cuts, continuations, strict=True):
        fed.append([cut.committed[-1], *tokens[:-1]])
    hidden = target.forward(padded(fed, target.device), cache)  # The hidden states are [B, n, E].
    log_probs = []
    for row, tokens in enumerate(continuations):
        # The log-probabilities are [n, V].
        log_p = target.logits(hidden[row, : len(tokens)]).float().log_softmax(dim=-1)
        chosen = torch.tensor(list(tokens), dtype=torch.int64, device=log_p.device)[:, None]
        log_probs.append(log_p.gather(1, chosen)[:, 0].tolist())
    return log_probs


def load_scorer(name: str) -> Scorer:
    """Load a user's function from ``module:function`` or ``file.py:function``."""
    where, _, function = name.rpartition(":")
    try:
        if where.endswith(".py"):
            scorer: Scorer = runpy.run_path(str(Path(where).expanduser()))[function]
        else:
            scorer = getattr(importlib.import_module(where), function)
    except Exception as error:
        # The user's module may raise any error. Report it as an invalid option.
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise OptionInvalid(
            f"`scorer={name}` cannot be loaded ({reason}). Write it as module:function or "
            "file.py:function, and check that Python can import the function."
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
    except Exception as error:
        # The user's function may raise any error. Report it as an invalid option.
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise OptionInvalid(
            "the function that `scorer` names failed for an answer to the prompt "
            f"{cut.row.prompt_id} ({reason}). Correct the function."
        ) from error
    return float(score)
