"""Reports have ratios of sums over prompts and compare methods and drafters by them.

Files are written completely or not at all.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import OptionInvalid
from moa_data.evaluation.config import EvalConfig
from moa_data.evaluation.measure import Continuation, CutRow, Measurement, MethodRun, PromptRow
from moa_data.evaluation.report import (
    TITLE,
    Disconnection,
    EvaluationReport,
    accepted_by_position,
    check_output,
    drafter_pairs,
    ratio_with_interval,
    summarize_writer,
    write_report,
)
from moa_data.evaluation.views import break_even_lines, markdown_report
from moa_data.tests.kit.errors import raises_naming


@pytest.mark.parametrize(
    ("prompts", "values", "expected"),
    [
        # Rows of a prompt stay together. A row whose denominator is 0 does not change the result.
        ("babc", [(1.0, 2.0), (2.0, 4.0), (3.0, 2.0), (0.0, 0.0)], (6 / 8, (0.5, 1.0))),
        ("aa", [(1.0, 2.0), (1.0, 2.0)], (0.5, None)),
        ("a", [(0.0, 0.0)], (None, None)),
        ("", [], (None, None)),
        # Over a baseline, prompts of very different lengths do not widen the interval if the
        # lengths affect both methods equally.
        (
            "abc",
            [(10, seconds / 2, 10, seconds) for seconds in (1.0, 10.0, 100.0)],
            (2.0, (2.0, 2.0)),
        ),
        ("ab", [(4.0, 2.0, 1.0, 1.0), (1.0, 1.0, 0.0, 0.0)], (2.0, None)),
    ],
)
def test_ratios_of_sums_over_prompts(prompts: str, values: Any, expected: Any) -> None:
    ratio, interval = ratio_with_interval(list(prompts), values)
    assert ratio == (None if expected[0] is None else pytest.approx(expected[0]))
    assert interval == (None if expected[1] is None else pytest.approx(expected[1]))


def test_accepted_by_position() -> None:
    assert accepted_by_position([1, 2, 4, 4]) == (0.75, 0.5, 0.5)
    assert accepted_by_position([1, 1]) == accepted_by_position([]) == ()


def run(seconds: float, *committed: int) -> MethodRun:
    return MethodRun([*committed], 1 + sum(committed), total_s=seconds)


def row(prompt: str, category: str = "all", **runs: MethodRun) -> PromptRow:
    named = {name.replace("_", " "): value for name, value in runs.items()}
    return PromptRow(prompt, category, 0, 10, tuple(named), named)


def test_markdown_has_totals_over_totals_for_each_method_and_category() -> None:
    rows = [
        row(str(number), category, plain=run(1.0, 1, 1, 1), chain=run(seconds, 2, 1))
        for number, (category, seconds) in enumerate((("math", 0.5), ("qa", 1.0), ("qa", 4.0)))
    ]
    config = EvalConfig.of(
        model="m",
        prompts="p",
        method=("plain", "chain"),
        drafter=("d",),
        max_new_tokens=9,
        cuda_graphs=False,
        repeats=3,
    )
    report = EvaluationReport(
        Measurement(rows), config=config.named(),
        environment={"dtype": "float32", "device": "cpu", "n_threads": 1},
        provenance={}, prompts={"file": "p.jsonl", "kind": "spec-bench", "n_answers": 3},
    )  # fmt: skip
    plain, chain = report.methods
    assert [plain.tokens_per_s, chain.tokens_per_s, chain.ratio] == pytest.approx(
        [4.0, 12 / 5.5, 3 / 5.5]
    )
    assert chain.accepted_drafts == (3, 3)
    text = markdown_report(report)
    for line in (
        "| chain | 1.50 (1.50-1.50) | 6 | 33.3% | 12 |", "| qa | 2 | 1.50 (1.50-1.50) |",
        "| math | 1 | 1.50 |",
        "| chain | 0.0 | 0.0 | 916.7 | 0.0 | 50% |", "without CUDA graphs, median of 3 repeats",
        "a round takes 916.7 ms and a plain step 333.3 ms, so a round has to commit 2.75 tokens",
        "It commits 1.50.",
        "To make it faster, train the drafter longer",
    ):  # fmt: skip
        assert line in text


@pytest.mark.parametrize("drafts_all", [True, False])
def test_a_smaller_vocabulary_is_said_to_help_drafters_that_draft_all_tokens(
    drafts_all: bool,
) -> None:
    slow = replace(run(3.0, 1, 1, 1), draft_s=2.0, verify_s=1.0)
    runs: dict[str, Any] = {"plain": run(1.0, 1, 1, 1), "chain": slow, "prompt-lookup": slow}
    report = EvaluationReport(
        Measurement([row("a", **runs)]),
        {},
        {},
        {},
        {},
        drafters={"one": {"drafts_all_tokens": drafts_all}},
    )
    chain, advice, lookup = break_even_lines(report)
    assert chain.startswith("- chain: ")
    assert ("draft_vocabulary" in advice) == drafts_all
    assert lookup.startswith("- prompt-lookup: ")


def test_each_drafter_is_set_over_the_first_by_each_method() -> None:
    rows = [
        row(
            "a",
            plain=run(9.0, 1, 1, 1, 1, 1, 1),
            chain_one=run(4.0, 2, 2, 2),
            chain_two=run(2.0, 3, 3),
        ),
        row("b", plain=run(5.0, 1, 1, 1), chain_one=run(2.0, 2, 1), chain_two=run(1.0, 3)),
    ]
    # An answer of one token has no target call and does not change the acceptance length.
    for given in (rows, [*rows, row("c", plain=run(1.0), chain_one=run(1.0), chain_two=run(0.5))]):
        (pair,) = drafter_pairs(given, ["one", "two"])
        assert (pair["method"], pair["drafter"], pair["over"]) == ("chain", "two", "one")
        assert (pair["acceptance_length"], pair["speed"]) == (
            pytest.approx((9 / 3) / (9 / 5)),
            pytest.approx(2.0),
        )
        assert pair["acceptance_length_interval"] == pytest.approx((1.5, 2.0))
    (pair,) = drafter_pairs([row("a", chain_one=run(1.0), chain_two=run(0.5))], ["one", "two"])
    assert (pair["acceptance_length"], pair["speed"], pair["speed_interval"]) == (None, 2.0, None)
    assert drafter_pairs(rows, ["one"]) == drafter_pairs(rows, []) == []


def test_writers_after_cuts() -> None:
    def cut(prompt: str, agrees: list[bool], log_probs: list[float]) -> CutRow:
        tokens = tuple(range(len(log_probs)))
        return CutRow(
            prompt, "c", 0, 5, 3, {"d": Continuation(tokens, tuple(log_probs), tuple(agrees))}
        )

    rows = [
        cut("a", [True, False, True], [-1.0, -2.0, -3.0, -4.0]),
        cut("a", [True], [-1.0]),
        cut("b", [False], []),
    ]
    summary = summarize_writer("d", rows)
    assert summary.common_prefix.mean == pytest.approx(2 / 3)
    assert summary.agreement.mean == pytest.approx(3 / 5)
    assert [figure.mean for figure in summary.agreement_by_offset] == [
        pytest.approx(2 / 3),
        0.0,
        1.0,
        None,
    ]
    assert [figure.n for figure in summary.log_prob_by_offset] == [2, 1, 1, 1]
    assert summary.log_prob.mean == pytest.approx(-11 / 5)
    assert summary.log_prob.interval is None, "one prompt alone has no interval"
    assert summary.agreement.interval is not None
    assert summary.score.mean is None
    assert Disconnection.of([], 3) == Disconnection(0, 0, 3, [], [])


def test_a_report_that_cannot_be_json_replaces_nothing(tmp_path: Path) -> None:
    def report(value: float) -> EvaluationReport:
        return EvaluationReport(
            Measurement([row("a", plain=run(1.0, 1))]), {"value": value}, {}, {}, {}
        )

    write_report(report(1.0), "first", tmp_path / "report.json")
    with raises_naming(ValueError, "nan"):
        write_report(report(float("nan")), "second", tmp_path / "report.json")
    assert (tmp_path / "report.md").read_text() == "first"


def test_a_run_that_ended_between_its_two_files_does_not_hinder_the_next(tmp_path: Path) -> None:
    path, notes = tmp_path / "report.json", tmp_path / "report.md"
    notes.write_text(f"{TITLE}\n")
    assert check_output(path) == path
    notes.write_text("somebody's notes")
    with pytest.raises(OptionInvalid):
        check_output(path)
