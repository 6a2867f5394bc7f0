"""Ratios of sums over prompts with bootstrap intervals.

Calls and turns of one prompt are not independent, so that the prompt is the unit that is resampled.
"""

from collections.abc import Sequence

import numpy as np

_N_RESAMPLES, _CONFIDENCE = 2000, 0.95

Interval = tuple[float, float] | None


def ratio_with_interval(prompt_ids: Sequence[str], values: Sequence[Sequence[float]]) -> tuple[float | None, Interval]:
    """Return the ratio of two sums over prompts, or that ratio over a baseline's on the same prompts.

    Args:
        prompt_ids: the prompt of each row.
        values: per row numerator and denominator, and perhaps those of the baseline. A row whose denominator is 0, such
            as an answer without a target call, is left out.

    Returns:
        (ratio, interval); None for both without a row, for the interval with fewer than two prompts.
    """
    if not values:
        return None, None
    table = np.array([*values], dtype=float)
    used = (table[:, 1::2] > 0).all(axis=1)
    if not used.any():
        return None, None
    _, place = np.unique(np.array(prompt_ids)[used], return_inverse=True)
    sums = np.zeros((place.max() + 1, table.shape[1]))  # [n_prompts, 2 or 4]
    np.add.at(sums, place, table[used])

    def ratio(drawn: np.ndarray) -> np.ndarray:
        ratios: np.ndarray = drawn[:, 0] / drawn[:, 1]
        return ratios if drawn.shape[1] == 2 else ratios / (drawn[:, 2] / drawn[:, 3])

    found = float(ratio(sums.sum(axis=0, keepdims=True))[0])
    if len(sums) < 2:
        return found, None
    # How often each prompt is drawn in each resample; a fixed seed gives equal reports equal intervals.
    counts = np.random.default_rng(0).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), _N_RESAMPLES)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(ratio(counts @ sums), (tail, 1 - tail))
    return found, (float(low), float(high))


def accepted_by_position(committed_per_call: Sequence[int]) -> tuple[float, ...]:
    """Return the share of target calls that accepted the draft at each position, from the first of a call on.

    Args:
        committed_per_call: tokens committed by each call, bonus included.
    """
    if not committed_per_call:
        return ()
    accepted = np.asarray(committed_per_call) - 1
    return tuple(float((accepted > position).mean()) for position in range(int(accepted.max())))
