"""Compares drafters by the same method on the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from .config import DRAFTING
from .measure import PromptRow
from .statistics import Interval, ratio_with_interval


@dataclass(frozen=True)
class DrafterPair:
    """The ratio of two drafters by the same method.

    Attributes:
        acceptance_length: of the drafter over that of the other; None where a prompt has no target call.
        acceptance_length_interval: 95 %, prompts paired; None for fewer than two prompts.
        speed: tokens/s of the drafter over those of the other.
    """

    method: str
    drafter: str
    over: str
    acceptance_length: float | None
    acceptance_length_interval: Interval
    speed: float
    speed_interval: Interval


def drafter_pairs(rows: Sequence[PromptRow], drafters: Sequence[str]) -> list[DrafterPair]:
    """Compare each drafter with the first one, for all methods that both were measured by.

    Args:
        drafters: their names, as in those of the methods.
    """
    return [
        _pair(rows, method, drafter, drafters[0])
        for method in DRAFTING
        for drafter in drafters[1:]
        if f"{method} {drafter}" in rows[0].runs and f"{method} {drafters[0]}" in rows[0].runs
    ]


def _pair(rows: Sequence[PromptRow], method: str, drafter: str, over: str) -> DrafterPair:
    prompt_ids = [row.prompt_id for row in rows]
    runs = [(row.runs[f"{method} {drafter}"], row.runs[f"{method} {over}"]) for row in rows]
    calls = [
        (sum(run.committed_per_call), run.n_target_calls, sum(other.committed_per_call), other.n_target_calls)
        for run, other in runs
    ]
    seconds = [(run.n_tokens, run.seconds, other.n_tokens, other.seconds) for run, other in runs]
    speed, speed_interval = ratio_with_interval(prompt_ids, seconds)
    assert speed is not None
    return DrafterPair(method, drafter, over, *ratio_with_interval(prompt_ids, calls), speed, speed_interval)
