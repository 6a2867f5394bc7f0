"""Reports: ratios of sums over prompts, methods and drafters compared by them, and files that are written whole."""

from pathlib import Path

import numpy as np
import pytest

from moa_data.evaluation.config import EvalConfig
from moa_data.evaluation.measure import Measurement, MethodRun, PromptRow
from moa_data.evaluation.report import (
    accepted_by_position,
    build_report,
    drafter_pairs,
    ratio_with_interval,
    summarize,
    write_report,
)
from moa_data.evaluation.views import markdown_report


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


def run(committed: tuple[int, ...], seconds: float = 1.0) -> MethodRun:
    return MethodRun(1 + sum(committed), 0, committed, seconds, 0.0, 0.0, 0.0)


def test_speed_is_totals_over_totals_and_quartiles_of_answers() -> None:
    rows = [
        PromptRow(str(index), "all", 0, 4, ("plain", "chain"), {"plain": run((1,) * 3), "chain": run((3,), seconds)})
        for index, seconds in enumerate((0.5, 1.0, 4.0))
    ]
    plain, chain = summarize(rows)
    assert plain.tokens_per_s == 4.0
    assert chain.tokens_per_s == pytest.approx(12 / 5.5)
    assert chain.ratio == pytest.approx(3 / 5.5)
    assert chain.ratio_quartiles == pytest.approx((0.625, 1.0, 1.5))
    assert chain.calls_saved == pytest.approx(2 / 3)
    assert chain.accepted_drafts == (0, 0, 3)
    assert chain.acceptance_length == 3.0


def test_markdown_has_a_line_per_method_and_category() -> None:
    rows = [
        PromptRow(str(index), category, 0, 4, ("plain", "chain"), {"plain": run((1,) * 3), "chain": run((2, 1))})
        for index, category in enumerate(("math", "qa", "qa"))
    ]
    report = build_report(
        Measurement(rows),
        config=EvalConfig.of(
            model="m", prompts="p", method=("plain", "chain"), drafter=("d",), max_new_tokens=9
        ).named(),
        environment={"dtype": "float32", "device": "cpu", "n_threads": 1},
        provenance={},
        prompts={"file": "p.jsonl", "kind": "spec-bench"},
    )
    text = markdown_report(report)
    assert "| chain | 1.50 (1.50-1.50) | 6 | 33.3% | 12 |" in text
    assert "| qa | 2 | 1.50 (1.50-1.50) |" in text
    assert "| math | 1 | 1.50 |" in text
    assert "| chain | 0.0 | 0.0 | 500.0 | 0.0 | 50% |" in text
    assert "bonus token included" in text


def drafted(seconds: float, *committed: int) -> MethodRun:
    n_tokens = 1 + sum(committed)
    return MethodRun(n_tokens, 5 * len(committed), committed, seconds, 0.1, 0.1, 0.1)


def row(prompt: str, **runs: MethodRun) -> PromptRow:
    named = {name.replace("_", " "): value for name, value in runs.items()}
    return PromptRow(prompt, "all", 0, 10, tuple(named), named)


def test_each_drafter_is_set_over_the_first_by_each_method() -> None:
    rows = [
        row("a", plain=drafted(9.0, 1, 1, 1, 1, 1, 1), chain_one=drafted(4.0, 2, 2, 2), chain_two=drafted(2.0, 3, 3)),
        row("b", plain=drafted(5.0, 1, 1, 1), chain_one=drafted(2.0, 2, 1), chain_two=drafted(1.0, 3)),
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
        row("a", chain_one=drafted(4.0, 2, 2), chain_two=drafted(2.0, 4)),
        row("b", chain_one=drafted(4.0, 1, 1), chain_two=drafted(2.0, 2)),
    ]
    (pair,) = drafter_pairs(rows, ["one", "two"])
    (with_short,) = drafter_pairs([*rows, row("c", chain_one=drafted(1.0), chain_two=drafted(1.0))], ["one", "two"])
    assert pair.acceptance_length == with_short.acceptance_length == pytest.approx(2.0)
    assert pair.acceptance_length_interval == with_short.acceptance_length_interval == pytest.approx((2.0, 2.0))


def test_answers_without_a_target_call_leave_no_acceptance_length() -> None:
    (pair,) = drafter_pairs([row("a", chain_one=drafted(1.0), chain_two=drafted(0.5))], ["one", "two"])
    assert (pair.acceptance_length, pair.acceptance_length_interval, pair.speed_interval) == (None, None, None)
    assert pair.speed == pytest.approx(2.0)


def test_a_report_that_cannot_be_json_replaces_nothing(tmp_path: Path) -> None:
    write_report({"a": 1}, "first", tmp_path / "report.json")
    with pytest.raises(ValueError, match="JSON"):
        write_report({"a": float("nan")}, "second", tmp_path / "report.json")
    assert (tmp_path / "report.md").read_text() == "first"
