"""All methods see the same prompts and are counted by the same code; the first is the baseline."""

from collections.abc import Sequence

import pytest
import torch

from moa_data.errors import DatasetError
from moa_data.evaluation.measure import Generate, first_divergence, measure, top2_gap
from moa_data.evaluation.prompts import Prompt
from moa_data.evaluation.report import summarize
from moa_data.moa.decoding.loop import DecodeStats, Generation, generate_batch, plain_generate
from moa_data.moa.decoding.sampling import SamplingConfig, distribution
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.progress import progress_to

from .conftest import MAX_POSITIONS


def question(*texts: str, prompt_id: str = "p", category: str = "all") -> Prompt:
    return Prompt(
        prompt_id, category, tuple(({"role": "user", "content": text},) for text in texts)
    )


def plain_method(target: Target, max_new_tokens: int) -> Generate:
    return lambda prompts, seeds: generate_batch(
        target, prompts, max_new_tokens=max_new_tokens, seed=seeds
    )


def in_runs_of(target: Target, n: int, seen: list[list[int]] | None = None) -> Generate:
    """Make a method that returns plain decoding's tokens as if it committed n of them at a time."""

    def generate(prompts: list[list[int]], seeds: Sequence[int]) -> list[Generation]:
        if seen is not None:
            seen.extend(prompts)
        found = generate_batch(target, prompts, max_new_tokens=9)
        for one in found:
            n_rest = len(one.tokens) - 1
            one.stats.committed_per_call = [min(n, n_rest - start) for start in range(0, n_rest, n)]
        return found

    return generate


def test_the_order_turns_round_and_warmup_is_not_measured(target: Target) -> None:
    seen: list[list[int]] = []
    methods = {"plain": in_runs_of(target, 1), "three": in_runs_of(target, 3, seen)}
    prompts = [question(text, prompt_id=text) for text in ("a", "b", "c")]
    steps: list[tuple[int, int]] = []
    measurement = measure(
        target,
        methods,
        prompts,
        warmup=2,
        progress=progress_to(lambda done, n, _: steps.append((done, n))),
    )
    assert [row.order for row in measurement.rows] == [
        ("plain", "three"),
        ("three", "plain"),
        ("plain", "three"),
    ]
    assert len(seen) == 5
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_later_turns_carry_the_baselines_answers(target: Target) -> None:
    seen: list[list[int]] = []
    methods = {"plain": in_runs_of(target, 1), "other": in_runs_of(target, 2, seen)}
    measure(target, methods, [question("first", "second")], warmup=0)
    answer = target.tokenizer.decode(
        plain_generate(target, seen[0], max_new_tokens=9).tokens, skip_special_tokens=True
    )
    text = target.tokenizer.decode(seen[1])
    assert text.replace("<pad>", "").startswith("<bos><user>first<eot><assistant>" + answer)
    assert text.endswith("<eot><user>second<eot><assistant>")


def test_the_median_repeat_counts(target: Target) -> None:
    times = iter([5.0, 1.0, 2.0])

    def slow(prompts: list[list[int]], seeds: Sequence[int]) -> list[Generation]:
        return [
            Generation([3, 4], DecodeStats([1], n_tokens=2, verify_s=(t := next(times)), total_s=t))
        ]

    (row,) = measure(target, {"plain": slow}, [question("a")], warmup=0, repeats=3).rows
    run = row.runs["plain"]
    assert (run.total_s, run.verify_s, run.repeats_s) == (2.0, 2.0, (5.0, 1.0, 2.0))


def test_prompts_without_room_are_counted_not_dropped_silently(target: Target) -> None:
    methods = {"plain": in_runs_of(target, 1)}
    prompts = [
        question("x" * MAX_POSITIONS, prompt_id="long"),
        question("short", prompt_id="short"),
    ]
    measurement = measure(target, methods, prompts)
    assert [turn.prompt_id for turn in measurement.skipped] == ["long"]
    assert [row.prompt_id for row in measurement.rows] == ["short"]
    later = measure(
        target, methods, [question("short", "x" * MAX_POSITIONS, "a", "b", prompt_id="chat")]
    )
    assert [(turn.prompt_id, turn.turn) for turn in later.skipped] == [
        ("chat", 1),
        ("chat", 2),
        ("chat", 3),
    ]
    assert [row.turn for row in later.rows] == [0]


def test_a_divergence_is_located_with_its_logit_gap(target: Target) -> None:
    def wrong(prompts: list[list[int]], seeds: Sequence[int]) -> list[Generation]:
        generation = plain_generate(target, prompts[0], max_new_tokens=9)
        generation.tokens[2] += 1
        return [generation]

    methods = {"plain": plain_method(target, 9), "wrong": wrong}
    measurement = measure(target, methods, [question("hi")], warmup=0)
    run = measurement.rows[0].runs["wrong"]
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    answer = plain_generate(target, text["input_ids"], max_new_tokens=2).tokens
    assert (run.first_divergence, run.top2_gap) == (
        2,
        top2_gap(target, [*text["input_ids"], *answer]),
    )
    drawn = (
        measure(target, methods, [question("hi")], warmup=0, sampling=SamplingConfig(1.0))
        .rows[0]
        .runs["wrong"]
    )
    assert (drawn.first_divergence, drawn.top2_gap) == (2, None)
    assert summarize(measurement.rows)[1].n_exact == 0


def test_the_logit_gap_is_that_of_the_logits_that_tokens_are_chosen_from(target: Target) -> None:
    prompt = target.tokenizer("the quick brown fox jumps over the lazy dog")["input_ids"]
    (answer,) = generate_batch(
        target, [prompt], max_new_tokens=12, sampling=SamplingConfig(repetition_penalty=1.8)
    )
    text = [*prompt, *answer.tokens]
    hidden = target.forward(torch.tensor([text]), target.new_cache())
    probability = distribution(
        target.logits(hidden[0, -1]), text, SamplingConfig(1.0, repetition_penalty=1.8)
    )
    first, second = probability.topk(2).values.log().tolist()
    assert top2_gap(target, text, 1.8) == pytest.approx(first - second)
    assert top2_gap(target, text, 1.8) != pytest.approx(top2_gap(target, text))


def test_first_divergence() -> None:
    others = ([1, 2, 3], [1, 5, 3], [1, 2], [1, 2, 3, 4])
    assert [first_divergence([1, 2, 3], other) for other in others] == [None, 1, 2, 3]


def test_an_answer_that_spells_a_control_token_ends_its_chat(target: Target) -> None:
    """An answer whose tokens spell a control token character by character ends its chat.

    As text in the next prompt, it would become the control token and end the turn.
    """
    spelled = [
        target.tokenizer(sign, add_special_tokens=False)["input_ids"][0] for sign in "a<eot>b"
    ]

    def spelling(prompts: list[list[int]], seeds: Sequence[int]) -> list[Generation]:
        return [Generation(spelled, DecodeStats([1] * 6, n_tokens=7, total_s=0.5)) for _ in prompts]

    measurement = measure(
        target, {"plain": spelling}, [question("first", "second", "third")], warmup=0
    )
    assert [row.turn for row in measurement.rows] == [0]
    assert [(turn.turn, turn.n_prompt_tokens) for turn in measurement.skipped] == [(1, 0), (2, 0)]


def test_control_tokens_in_any_turn_are_refused_before_anything_is_measured(target: Target) -> None:
    prompts = [question("one"), question("one", "two<eot>", prompt_id="forged")]
    with raises_naming(DatasetError, "prompt forged", "message 1", "'<eot>'"):
        measure(target, {}, prompts)
