"""One drafter over another: ratios of sums on the same prompts."""

import pytest

from moa_data.evaluation.measure import MethodRun, PromptRow
from moa_data.evaluation.pairs import drafter_pairs


def run(seconds: float, *committed: int) -> MethodRun:
    n_tokens = 1 + sum(committed)
    return MethodRun(n_tokens, 5 * len(committed), committed, seconds, 0.1, 0.1, 0.1)


def row(prompt: str, **runs: MethodRun) -> PromptRow:
    named = {name.replace("_", " "): value for name, value in runs.items()}
    return PromptRow(prompt, "all", 0, 10, tuple(named), named)


def test_each_drafter_is_set_over_the_first_by_each_method() -> None:
    rows = [
        row("a", plain=run(9.0, 1, 1, 1, 1, 1, 1), chain_one=run(4.0, 2, 2, 2), chain_two=run(2.0, 3, 3)),
        row("b", plain=run(5.0, 1, 1, 1), chain_one=run(2.0, 2, 1), chain_two=run(1.0, 3)),
    ]
    (pair,) = drafter_pairs(rows, ["one", "two"])
    assert (pair.method, pair.drafter, pair.over) == ("chain", "two", "one")
    assert pair.acceptance_length == pytest.approx((9 / 3) / (9 / 5))
    assert pair.speed == pytest.approx(2.0)
    assert pair.speed_interval == pytest.approx((2.0, 2.0))
    assert pair.acceptance_length_interval is not None
    assert pair.acceptance_length_interval == pytest.approx((1.5, 2.0))
    assert drafter_pairs(rows, ["one"]) == drafter_pairs(rows, []) == []


def test_an_answer_of_one_token_takes_no_figure_from_the_others() -> None:
    rows = [
        row("a", chain_one=run(4.0, 2, 2), chain_two=run(2.0, 4)),
        row("b", chain_one=run(4.0, 1, 1), chain_two=run(2.0, 2)),
    ]
    (pair,) = drafter_pairs(rows, ["one", "two"])
    (with_short,) = drafter_pairs([*rows, row("c", chain_one=run(1.0), chain_two=run(1.0))], ["one", "two"])
    assert pair.acceptance_length == with_short.acceptance_length == pytest.approx(2.0)
    assert pair.acceptance_length_interval == with_short.acceptance_length_interval == pytest.approx((2.0, 2.0))


def test_answers_without_a_target_call_leave_no_acceptance_length() -> None:
    (pair,) = drafter_pairs([row("a", chain_one=run(1.0), chain_two=run(0.5))], ["one", "two"])
    assert (pair.acceptance_length, pair.acceptance_length_interval, pair.speed_interval) == (None, None, None)
    assert pair.speed == pytest.approx(2.0)
