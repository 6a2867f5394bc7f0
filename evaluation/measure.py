"""Decodes the same prompts with every method in alternation, and compares the tokens.

All methods are counted by the same code: tokens are the ids that a method generated, seconds are its whole call,
prefill included. So a method measured against itself gives equal counts, and a speed ratio of 1 up to noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..moa.decode import Generation
from ..moa.target import Target
from ..pipeline.chats import Message
from ..pipeline.errors import TemplateError
from ..pipeline.prompts import prompt_tokens
from .errors import PromptsError
from .prompts import Prompt

Progress = Callable[[int, int, str], None]
Generate = Callable[[list[int]], Generation]
"""A method: prompt ids to a generation."""


@dataclass(frozen=True)
class MethodRun:
    """What one method did on one prompt.

    Attributes:
        n_tokens: generated tokens, the one of the prefill included.
        n_drafted: tokens proposed by the drafter.
        committed_per_call: tokens committed by each target call after the prefill, bonus token included.
        seconds: of the whole generation, prefill included.
        prefill_s: seconds of the prompt's forward.
        draft_s: seconds of drafting.
        verify_s: seconds of target calls after the prefill.
        first_divergence: index of the first generated token that differs from the baseline's; None where none does.
        top2_gap: difference of the two highest target logits there; tiny values mean a tie that rounding decided.
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

    @property
    def n_target_calls(self) -> int:
        """Target calls after the prefill."""
        return len(self.committed_per_call)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, prefill included."""
        return self.n_tokens / self.seconds


@dataclass(frozen=True)
class PromptRow:
    """One answered turn.

    Attributes:
        prompt_id: of the prompt.
        category: of the prompt.
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
    """A turn without an answer: its prompt leaves no position to generate into. Later turns are skipped with it."""

    prompt_id: str
    turn: int
    n_prompt_tokens: int


@dataclass
class Measurement:
    """All rows, and what was left out."""

    rows: list[PromptRow] = field(default_factory=list)
    skipped: list[SkippedTurn] = field(default_factory=list)


def measure(
    target: Target,
    methods: Mapping[str, Generate],
    prompts: Sequence[Prompt],
    *,
    warmup: int = 1,
    progress: Progress | None = None,
) -> Measurement:
    """Decode every turn of every prompt with every method; the order of the methods turns round from turn to turn.

    Args:
        target: with its tokenizer.
        methods: name -> method. The first is the baseline: its answers make the history of later turns, and the
            other methods' tokens are compared with its tokens.
        prompts: to answer.
        warmup: prompts that each method decodes first, unmeasured.
        progress: called with (done, total, message) per prompt.

    Raises:
        PromptsError: the chat template refuses a prompt.
    """
    baseline, result = next(iter(methods)), Measurement()
    names = list(methods)
    for prompt in prompts[:warmup]:
        tokens = _tokens(target, prompt, list(prompt.turns[0]))
        if len(tokens) < target.max_positions:
            for generate in methods.values():
                generate(tokens)
    for index, prompt in enumerate(prompts):
        history: list[Message] = []
        for turn, messages in enumerate(prompt.turns):
            history += messages
            tokens = _tokens(target, prompt, history)
            if len(tokens) >= target.max_positions:
                result.skipped.append(SkippedTurn(prompt.prompt_id, turn, len(tokens)))
                break
            shift = len(result.rows) % len(names)
            order = names[shift:] + names[:shift]
            generations = {name: methods[name](tokens) for name in order}
            runs = {name: _compare(target, tokens, generations[baseline], generations[name]) for name in names}
            result.rows.append(PromptRow(prompt.prompt_id, prompt.category, turn, len(tokens), tuple(order), runs))
            answer = target.tokenizer.decode(generations[baseline].tokens, skip_special_tokens=True)
            history.append({"role": "assistant", "content": answer})
        if progress is not None:
            progress(index + 1, len(prompts), f"evaluate {prompt.category} {prompt.prompt_id}")
    return result


def first_divergence(baseline: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference; the shorter length where one is a prefix of the other, None if they are equal."""
    for index, (left, right) in enumerate(zip(baseline, other, strict=False)):
        if left != right:
            return index
    return None if len(baseline) == len(other) else min(len(baseline), len(other))


@torch.inference_mode()
def top2_gap(target: Target, tokens: Sequence[int]) -> float:
    """Difference of the two highest logits of the token that follows, in one forward without a cache."""
    hidden = target.forward(torch.tensor([list(tokens)], device=target.device), target.new_cache())
    highest = target.logits(hidden[0, -1]).float().topk(2).values
    return float(highest[0] - highest[1])


def _tokens(target: Target, prompt: Prompt, history: list[Message]) -> list[int]:
    try:
        return prompt_tokens(target.tokenizer, history)
    except TemplateError as error:
        raise PromptsError(f"prompt {prompt.prompt_id}: {error}") from error


def _compare(target: Target, prompt: list[int], baseline: Generation, other: Generation) -> MethodRun:
    divergence = first_divergence(baseline.tokens, other.tokens)
    gap: Any = None
    if divergence is not None:
        gap = top2_gap(target, [*prompt, *baseline.tokens[:divergence]])
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
    )
