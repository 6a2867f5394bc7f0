"""Ratios of sums over prompts, with standard errors and bootstrap intervals.

Calls and turns of one prompt are not independent, so that the prompt is the unit that is resampled.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from .measure import MethodRun

N_RESAMPLES = 2000
CONFIDENCE = 0.95


def sums_by_prompt(prompt_ids: Sequence[str], values: Sequence[Sequence[float]]) -> np.ndarray:
    """Sum rows that belong to one prompt.

    Args:
        prompt_ids: the prompt of each row.
        values: [n_rows, n_columns].

    Returns:
        [n_prompts, n_columns] float64, in the order of first occurrence.
    """
    places = {prompt_id: place for place, prompt_id in enumerate(dict.fromkeys(prompt_ids))}
    sums = np.zeros((len(places), len(values[0])))
    np.add.at(sums, [places[prompt_id] for prompt_id in prompt_ids], np.asarray(values, dtype=float))
    return sums


def acceptance_length(prompt_ids: Sequence[str], runs: Sequence[MethodRun]) -> tuple[float | None, float | None]:
    """Tokens per target call over all runs, and its standard error as a ratio of sums over prompts.

    Args:
        prompt_ids: the prompt of each run.
        runs: of one method.

    Returns:
        (length, standard error); None where there is no call, or fewer than two prompts.
    """
    sums = _tokens_and_calls(prompt_ids, runs)
    tokens, calls = sums.sum(axis=0)
    if not calls:
        return None, None
    length, n = float(tokens / calls), len(sums)
    if n < 2:
        return length, None
    squares = float(np.square(sums[:, 0] - length * sums[:, 1]).sum())
    return length, math.sqrt(squares * n / (n - 1)) / float(calls)


def acceptance_length_interval(prompt_ids: Sequence[str], runs: Sequence[MethodRun]) -> tuple[float, float] | None:
    """Bootstrap interval of :func:`acceptance_length`; None where fewer than two prompts have a call."""
    return ratio_with_interval(prompt_ids, [(sum(run.committed_per_call), run.n_target_calls) for run in runs])[1]


def speed_ratio_interval(
    prompt_ids: Sequence[str], runs: Sequence[MethodRun], baseline: Sequence[MethodRun]
) -> tuple[float, float] | None:
    """Bootstrap interval of tokens/s over the baseline's tokens/s, prompts paired; None for fewer than two prompts."""
    values = [
        (run.n_tokens, run.seconds, base.n_tokens, base.seconds) for run, base in zip(runs, baseline, strict=True)
    ]
    return relative_with_interval(prompt_ids, values)[1]


def relative_with_interval(
    prompt_ids: Sequence[str], values: Sequence[tuple[float, float, float, float]]
) -> tuple[float, tuple[float, float] | None]:
    """A ratio of sums over that of a baseline on the same prompts, and its bootstrap interval, prompts paired.

    Args:
        prompt_ids: the prompt of each row.
        values: per row numerator and denominator, and those of the baseline; none of the sums is 0.

    Returns:
        (relative ratio, interval); no interval for fewer than two prompts.
    """
    sums = sums_by_prompt(prompt_ids, values)

    def relative(total: np.ndarray) -> np.ndarray:
        return total[:, 0] / total[:, 1] / (total[:, 2] / total[:, 3])

    return float(relative(sums.sum(axis=0)[None])[0]), _interval(sums, relative)


def ratio_with_interval(
    prompt_ids: Sequence[str], values: Sequence[tuple[float, float]]
) -> tuple[float | None, tuple[float, float] | None]:
    """A ratio of sums over prompts, such as a mean over the tokens of all prompts, and its bootstrap interval.

    Args:
        prompt_ids: the prompt of each row.
        values: per row numerator and denominator.

    Returns:
        (ratio, interval); None for both where the denominators are all 0, for the interval where fewer than two prompts
        have one.
    """
    if not values:
        return None, None
    sums = sums_by_prompt(prompt_ids, values)
    sums = sums[sums[:, 1] > 0]
    if not len(sums):
        return None, None
    total = sums.sum(axis=0)
    return float(total[0] / total[1]), _interval(sums, lambda drawn: drawn[:, 0] / drawn[:, 1])


def accepted_by_position(committed_per_call: Sequence[int]) -> tuple[float, ...]:
    """Share of target calls that accepted the draft at each position, the first draft of a call being position 0.

    Args:
        committed_per_call: tokens committed by each call, bonus included.
    """
    if not committed_per_call:
        return ()
    accepted = np.asarray(committed_per_call) - 1
    return tuple(float((accepted > position).mean()) for position in range(int(accepted.max())))


def _tokens_and_calls(prompt_ids: Sequence[str], runs: Sequence[MethodRun]) -> np.ndarray:
    return sums_by_prompt(prompt_ids, [(sum(run.committed_per_call), run.n_target_calls) for run in runs])


def _interval(sums: np.ndarray, ratio: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float] | None:
    """Percentiles of a ratio of sums when prompts are drawn anew; the draws are the same in every run."""
    n_prompts = len(sums)
    if n_prompts < 2:
        return None
    counts = np.random.default_rng(0).multinomial(n_prompts, np.full(n_prompts, 1 / n_prompts), N_RESAMPLES)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratio(counts @ sums), (tail, 1 - tail))
    return float(low), float(high)
