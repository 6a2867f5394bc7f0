"""All methods see the same prompts and are counted by the same code; the first one is the baseline."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from moa_data.evaluation.errors import EvaluationError
from moa_data.evaluation.measure import Generate, Measurement, MethodRun, PromptRow, first_divergence, measure
from moa_data.evaluation.prompts import Prompt
from moa_data.evaluation.report import acceptance_length, build_report, markdown_report, summarize
from moa_data.moa.decode import DecodeStats, Generation, plain_generate
from moa_data.moa.target import Target

from .conftest import MAX_POSITIONS


def question(*texts: str, prompt_id: str = "p", category: str = "all") -> Prompt:
    return Prompt(prompt_id, category, tuple(({"role": "user", "content": text},) for text in texts))


def in_runs_of(target: Target, n: int, seen: list[list[int]] | None = None) -> Generate:
    """A method that gives plain decoding's tokens and claims to have committed them n at a time."""

    def generate(tokens: list[int]) -> Generation:
        if seen is not None:
            seen.append(list(tokens))
        plain = plain_generate(target, tokens, max_new_tokens=9)
        n_rest = len(plain.tokens) - 1
        committed = [min(n, n_rest - start) for start in range(0, n_rest, n)]
        stats = DecodeStats(committed_per_call=committed, n_tokens=len(plain.tokens), total_s=0.5)
        return Generation(plain.tokens, stats)

    return generate


def test_a_method_against_itself_counts_equally(target: Target) -> None:
    plain = partial(plain_generate, target, max_new_tokens=12)
    prompts = [question(text, prompt_id=text) for text in ("one", "two", "three", "four")]
    measurement = measure(target, {"plain": plain, "plain#2": plain}, prompts)
    first, second = summarize(measurement.rows)
    assert second.n_exact == second.n_answers == 4
    timed = ("seconds", "tokens_per_s", "ratio", "prefill_s", "verify_s", "ratio_quartiles")
    timeless: dict[str, Any] = {"method": "", **dict.fromkeys(timed)}
    assert replace(first, **timeless) == replace(second, **timeless)
    assert first.acceptance_length == 1.0
    assert first.n_target_calls == first.n_tokens - first.n_answers
    assert first.ratio == 1.0


def test_the_order_turns_round_and_warmup_is_not_measured(target: Target) -> None:
    seen: list[list[int]] = []
    methods = {"plain": in_runs_of(target, 1), "three": in_runs_of(target, 3, seen)}
    prompts = [question(text, prompt_id=text) for text in ("a", "b", "c")]
    steps: list[tuple[int, int]] = []
    measurement = measure(target, methods, prompts, warmup=2, progress=lambda done, n, _: steps.append((done, n)))
    assert [row.order for row in measurement.rows] == [("plain", "three"), ("three", "plain"), ("plain", "three")]
    assert len(seen) == 5
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_later_turns_carry_the_baselines_answers(target: Target) -> None:
    seen: list[list[int]] = []
    methods = {"plain": in_runs_of(target, 1), "other": in_runs_of(target, 2, seen)}
    measure(target, methods, [question("first", "second")], warmup=0)
    answer = target.tokenizer.decode(plain_generate(target, seen[0], max_new_tokens=9).tokens, skip_special_tokens=True)
    text = target.tokenizer.decode(seen[1])
    assert text.replace("<pad>", "").startswith("<bos><user>first<eot><assistant>" + answer)
    assert text.endswith("<eot><user>second<eot><assistant>")


def test_prompts_without_room_are_counted_not_dropped_silently(target: Target) -> None:
    methods = {"plain": in_runs_of(target, 1)}
    prompts = [question("x" * MAX_POSITIONS, prompt_id="long"), question("short", prompt_id="short")]
    measurement = measure(target, methods, prompts)
    assert [turn.prompt_id for turn in measurement.skipped] == ["long"]
    assert [row.prompt_id for row in measurement.rows] == ["short"]
    settings: dict[str, Any] = {"config": {}, "environment": {}, "provenance": {}, "prompts": {}}
    with pytest.raises(EvaluationError, match="all 1 prompts"):
        build_report(measure(target, methods, prompts[:1]), **settings)


def test_a_divergence_is_located_with_its_logit_gap(target: Target) -> None:
    def wrong(tokens: list[int]) -> Generation:
        generation = plain_generate(target, tokens, max_new_tokens=9)
        generation.tokens[2] += 1
        return generation

    methods = {"plain": partial(plain_generate, target, max_new_tokens=9), "wrong": wrong}
    measurement = measure(target, methods, [question("hi")], warmup=0)
    run = measurement.rows[0].runs["wrong"]
    assert run.first_divergence == 2
    assert run.top2_gap is not None
    assert run.top2_gap > 0
    assert summarize(measurement.rows)[1].n_exact == 0


def test_first_divergence() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2, 3], [1, 2]) == 2
    assert first_divergence([1], [1, 2]) == 1


def run(committed: tuple[int, ...], seconds: float = 1.0) -> MethodRun:
    return MethodRun(1 + sum(committed), 0, committed, seconds, 0.0, 0.0, 0.0)


def test_acceptance_length_is_a_ratio_of_sums() -> None:
    length, error = acceptance_length(["a", "b"], [run((3, 3)), run((1, 1, 1, 1))])
    assert length == pytest.approx(10 / 6)
    # Ratio estimator: residuals t - R c are 6 - 10/3 and 4 - 20/3, that is +-8/3.
    assert error == pytest.approx((2 * (8 / 3) ** 2 * 2) ** 0.5 / 6)
    assert acceptance_length(["a", "a"], [run((2,)), run((4,))]) == (3.0, None)
    assert acceptance_length(["a"], [run(())]) == (None, None)


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
        config={"max_new_tokens": 9, "draft_length": 5},
        environment={"dtype": "float32", "device": "cpu", "n_threads": 1},
        provenance={},
        prompts={"file": "p.jsonl", "kind": "spec-bench"},
    )
    text = markdown_report(report)
    assert "| chain | 1.50 +- 0.00 | 6 | 33.3% | 12 |" in text
    assert "| qa | 2 | 1.50 +- 0.00 |" in text
    assert "| math | 1 | 1.50 |" in text
    assert "bonus token included" in text
