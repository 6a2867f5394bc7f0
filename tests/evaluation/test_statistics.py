"""Ratios of sums over prompts."""

import numpy as np
import pytest

from moa_data.evaluation.statistics import accepted_by_position, ratio_with_interval


def test_ratios_of_sums_over_prompts() -> None:
    """Rows of a prompt stay together, and one whose denominator is 0 takes nothing from the others."""
    prompts, values = ["b", "a", "b", "c"], [(1.0, 2.0), (2.0, 4.0), (3.0, 2.0), (0.0, 0.0)]
    ratio, interval = ratio_with_interval(prompts, values)
    assert ratio == 6 / 8
    assert interval == (0.5, 1.0), "two prompts with ratios of 1 and 1/2"
    assert ratio_with_interval(["a", "a"], [(1.0, 2.0), (1.0, 2.0)]) == (0.5, None)
    assert ratio_with_interval(["a"], [(0.0, 0.0)]) == ratio_with_interval([], []) == (None, None)


def test_ratios_to_a_baseline_are_paired_by_prompt() -> None:
    """Prompts of very different length do not widen the interval when both methods feel them alike."""
    values = [(10, seconds / 2, 10, seconds) for seconds in (1.0, 10.0, 100.0)]
    ratio, interval = ratio_with_interval(["a", "b", "c"], values)
    assert ratio == pytest.approx(2.0)
    assert interval == pytest.approx((2.0, 2.0))
    assert ratio_with_interval(["a", "b"], [(4.0, 2.0, 1.0, 1.0), (1.0, 1.0, 0.0, 0.0)]) == (2.0, None)


def test_intervals_cover_the_truth() -> None:
    """Of many samples of 30 prompts, about 95 % of the intervals hold the ratio of the means that they come from."""
    random = np.random.default_rng(0)
    names = [str(index) for index in range(30)]
    hits = 0
    for _ in range(200):
        _, interval = ratio_with_interval(names, [(10 + random.binomial(4, 0.5, size=10).sum(), 10) for _ in names])
        assert interval is not None
        hits += interval[0] <= 3.0 <= interval[1]
    assert 0.88 <= hits / 200 <= 0.99


def test_accepted_by_position() -> None:
    assert accepted_by_position([1, 2, 4, 4]) == (0.75, 0.5, 0.5)
    assert accepted_by_position([1, 1]) == ()
    assert accepted_by_position([]) == ()
