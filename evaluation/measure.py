"""Decodes the same prompts with every method in alternation, and compares the tokens.

All methods are counted by the same code: tokens are the ids that a method generated, seconds are its whole call,
prefill included. So a method measured against itself gives equal counts, and a speed ratio of 1 up to noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import DatasetError, PromptUnusable, TemplateError
from ..moa.decoding.loop import Generation
from ..moa.decoding.sampling import GREEDY, SamplingConfig, penalised
from ..moa.targets.chat import Message
from ..moa.targets.chat_tokens import check_prompt, prompt_tokens
from ..moa.targets.live import Target
from ..text import Progress
from .prompts import Prompt

Generate = Callable[[list[list[int]], Sequence[int]], list[Generation]]
"""A method: (prompts as token ids, a seed for each) -> a generation for each."""


@dataclass(frozen=True)
class MethodRun:
    """The figures of one method on one prompt.

    Attributes:
        n_tokens: generated tokens, the one of the prefill included.
        committed_per_call: tokens committed by each target call after the prefill, bonus token included.
        seconds: of the whole generation, prefill included. Of several repeats the one of median length counts; of a
            batch, the row's equal share.
        prefill_s: seconds of the prompt's forward.
        verify_s: seconds of target calls after the prefill.
        first_divergence: index of the first generated token that differs from the baseline's; None where none does.
        top2_gap: difference of the two highest target logits there, after the repetition penalty; tiny values mean a
            tie that rounding decided.
    """

    n_tokens: int
    n_drafted: int
    committed_per_call: tuple[int, ...]
    seconds: float
    prefill_s: float
    draft_s: float
    verify_s: float
    first_divergence: int | None = None
    top2_gap: float | None = None
    repeats_s: tuple[float, ...] = ()

    @property
    def n_target_calls(self) -> int:
        """Target calls after the prefill."""
        return len(self.committed_per_call)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, prefill included."""
        return self.n_tokens / self.seconds

    @property
    def calls(self) -> tuple[int, int]:
        """Tokens committed by target calls, and their number: a ratio's two sides."""
        return sum(self.committed_per_call), self.n_target_calls

    @property
    def speed(self) -> tuple[int, float]:
        """Generated tokens, and seconds: a ratio's two sides."""
        return self.n_tokens, self.seconds


@dataclass(frozen=True)
class PromptRow:
    """The runs of all methods on one turn of a prompt.

    Attributes:
        turn: which answer, from 0.
        n_prompt_tokens: tokens before the answer.
        order: names of the methods in the order in which they ran.
        runs: method name -> what it did.
    """

    prompt_id: str
    category: str
    turn: int
    n_prompt_tokens: int
    order: tuple[str, ...]
    runs: dict[str, MethodRun]


@dataclass(frozen=True)
class SkippedTurn:
    """A turn without an answer, since it or a turn before it leaves no position to generate into.

    Attributes:
        n_prompt_tokens: tokens of the prompt that was too long; 0 where the answer before it spells a control token.
    """

    prompt_id: str
    turn: int
    n_prompt_tokens: int


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
        progress: called with (done, total, message) per batch.
        sampling: of the methods. Unless it draws tokens, the gap of the two highest logits is measured where answers
            first differ.
    """
    _check_prompts(target, prompts)
    result = Measurement()
    if first := opening_tokens(target, prompts[:warmup]):
        for generate in methods.values():
            for start in range(0, len(first), batch_size):
                generate(first[start : start + batch_size], [seed] * len(first[start : start + batch_size]))
    n_batches = 0
    for start in range(0, len(prompts), batch_size):
        chats = [
            _Chat(prompt, seed + start + index) for index, prompt in enumerate(prompts[start : start + batch_size])
        ]
        for turn in range(max(len(chat.prompt.turns) for chat in chats)):
            batch = [chat for chat in chats if chat.begin_turn(target, turn, result.skipped)]
            if batch:
                shift = n_batches % len(methods)
                order = [*methods][shift:] + [*methods][:shift]
                result.rows += _measure_batch(target, methods, order, batch, turn, repeats, sampling)
                n_batches += 1
        if progress is not None:
            last = chats[-1].prompt
            progress(start + len(chats), len(prompts), f"evaluate {last.category} {last.prompt_id}")
    return result


def opening_tokens(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of the first turns of prompts; those that leave no position to generate into are left out."""
    _check_prompts(target, prompts)
    openings = [_tokens(target, prompt, list(prompt.turns[0])) for prompt in prompts]
    return [tokens for tokens in openings if len(tokens) < target.max_positions]


class _Chat:
    """A prompt and the turns of it that were answered."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.prompt, self.seed = prompt, seed
        self.history: list[Message] = []
        self.tokens: list[int] = []
        self._ended = False

    def begin_turn(self, target: Target, turn: int, skipped: list[SkippedTurn]) -> bool:
        """Return whether there is such a turn with room for an answer; one without is skipped with all after it."""
        if self._ended or turn >= len(self.prompt.turns):
            return False
        self.history += self.prompt.turns[turn]
        try:
            self.tokens = _tokens(target, self.prompt, self.history)
        except PromptUnusable:  # the prompts were looked at before: it is the answer
            self.tokens = []
        if not self.tokens or len(self.tokens) >= target.max_positions:
            turns = range(turn, len(self.prompt.turns))
            skipped += [SkippedTurn(self.prompt.prompt_id, number, len(self.tokens)) for number in turns]
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
    """Answer one turn of each chat with every method."""
    baseline = next(iter(methods))
    prompts, seeds = [chat.tokens for chat in batch], [chat.seed for chat in batch]
    generations: dict[str, list[list[Generation]]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name in order:
            generations[name].append(methods[name](prompts, seeds))
    rows = []
    for index, chat in enumerate(batch):
        of_baseline = generations[baseline][0][index]
        runs = {
            name: _compare(target, chat.tokens, of_baseline, [repeat[index] for repeat in generations[name]], sampling)
            for name in methods
        }
        prompt = chat.prompt
        rows.append(PromptRow(prompt.prompt_id, prompt.category, turn, len(chat.tokens), tuple(order), runs))
        answer = target.tokenizer.decode(of_baseline.tokens, skip_special_tokens=True)
        chat.history.append({"role": "assistant", "content": answer})
    return rows


def first_divergence(baseline: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first difference: the shorter length where one is a prefix, None where both are equal."""
    for index, (left, right) in enumerate(zip(baseline, other, strict=False)):
        if left != right:
            return index
    return None if len(baseline) == len(other) else min(len(baseline), len(other))


@torch.inference_mode()
def top2_gap(target: Target, tokens: Sequence[int], repetition_penalty: float = 1.0) -> float:
    """Return the difference of the two highest logits of the next token, by one forward without a cache."""
    hidden = target.forward(torch.tensor([list(tokens)], device=target.device), target.new_cache())
    highest = penalised(target.logits(hidden[0, -1]), tokens, repetition_penalty).topk(2).values
    return float(highest[0] - highest[1])


def _check_prompts(target: Target, prompts: Sequence[Prompt]) -> None:
    """Render the texts of all turns, so that one that cannot be used is refused before anything is measured."""
    for prompt in prompts:
        try:
            check_prompt(target.tokenizer, [message for turn in prompt.turns for message in turn], prompt.tools)
        except PromptUnusable as error:
            raise DatasetError(f"prompt {prompt.prompt_id}: {error}") from error


def _tokens(target: Target, prompt: Prompt, history: list[Message]) -> list[int]:
    try:
        return prompt_tokens(target.tokenizer, history, prompt.tools, prompt.system)
    except PromptUnusable:
        raise
    except TemplateError as error:
        raise DatasetError(f"prompt {prompt.prompt_id}: {error}") from error


def _compare(
    target: Target, prompt: list[int], baseline: Generation, repeats: list[Generation], sampling: SamplingConfig
) -> MethodRun:
    """Return a method's median repeat. Greedy and seeded repeats give equal tokens."""
    other = sorted(repeats, key=lambda repeat: repeat.stats.total_s)[(len(repeats) - 1) // 2]
    divergence = first_divergence(baseline.tokens, other.tokens)
    gap: Any = None
    if divergence is not None and sampling.temperature == 0:
        gap = top2_gap(target, [*prompt, *baseline.tokens[:divergence]], sampling.repetition_penalty)
    stats = other.stats
    return MethodRun(
        n_tokens=len(other.tokens),
        n_drafted=stats.n_drafted,
        committed_per_call=tuple(stats.committed_per_call),
        seconds=stats.total_s,
        prefill_s=stats.prefill_s,
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        first_divergence=divergence,
        top2_gap=gap,
        repeats_s=tuple(repeat.stats.total_s for repeat in repeats),
    )
