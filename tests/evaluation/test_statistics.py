"""Ratios of sums over prompts."""

import numpy as np
import pytest

from moa_data.evaluation.measure import MethodRun
from moa_data.evaluation.statistics import (
    acceptance_length,
    acceptance_length_interval,
    accepted_by_position,
    speed_ratio_interval,
    sums_by_prompt,
)


def run(committed: tuple[int, ...], seconds: float = 1.0) -> MethodRun:
    return MethodRun(1 + sum(committed), 0, committed, seconds, 0.0, 0.0, 0.0)


def test_turns_of_a_prompt_are_summed() -> None:
    sums = sums_by_prompt(["b", "a", "b"], [(1, 2), (3, 4), (5, 6)])
    assert sums.tolist() == [[6, 8], [3, 4]]


def test_acceptance_length_is_a_ratio_of_sums() -> None:
    length, error = acceptance_length(["a", "b"], [run((3, 3)), run((1, 1, 1, 1))])
    assert length == pytest.approx(10 / 6)
    # Ratio estimator: residuals t - R c are 6 - 10/3 and 4 - 20/3, that is +-8/3.
    assert error == pytest.approx((2 * (8 / 3) ** 2 * 2) ** 0.5 / 6)
    assert acceptance_length(["a", "a"], [run((2,)), run((4,))]) == (3.0, None)
    assert acceptance_length(["a"], [run(())]) == (None, None)


def test_accepted_by_position() -> None:
    assert accepted_by_position([1, 2, 4, 4]) == (0.75, 0.5, 0.5)
    assert accepted_by_position([1, 1]) == ()
    assert accepted_by_position([]) == ()


def test_a_prompt_without_a_call_takes_no_interval_from_the_others() -> None:
    runs = [run((2, 2)), run((4, 4))]
    interval = acceptance_length_interval(["a", "b"], runs)
    assert interval is not None
    assert acceptance_length_interval(["a", "b", "c"], [*runs, run(())]) == interval
    assert acceptance_length_interval(["a"], runs[:1]) is None


def test_intervals_cover_the_truth() -> None:
    """Of many samples of 30 prompts, about 95 % of the intervals hold the ratio of the means that they come from."""
    random = np.random.default_rng(0)
    names = [str(index) for index in range(30)]
    hits = 0
    for _ in range(200):
        runs = [run(tuple(1 + random.binomial(4, 0.5, size=10))) for _ in names]
        interval = acceptance_length_interval(names, runs)
        assert interval is not None
        hits += interval[0] <= 3.0 <= interval[1]
    assert 0.88 <= hits / 200 <= 0.99


def test_a_speed_ratio_is_paired_by_prompt() -> None:
    """Prompts of very different length do not widen the interval when both methods feel them alike."""
    base = [run((1,) * 9, seconds) for seconds in (1.0, 10.0, 100.0)]
    fast = [run((1,) * 9, seconds / 2) for seconds in (1.0, 10.0, 100.0)]
    interval = speed_ratio_interval(["a", "b", "c"], fast, base)
    assert interval == pytest.approx((2.0, 2.0))
    assert speed_ratio_interval(["a"], fast[:1], base[:1]) is None
