"""`auto` keeps the gain of drafts and bounds their cost; no policy changes greedy tokens."""

import itertools
from collections.abc import Callable

import pytest

from moa_data.moa.decoding.loop import DecodeStats, generate_batch
from moa_data.moa.decoding.policy import (
    AUTO_SHAPE,
    MEASURE_EVERY,
    PATIENCE,
    AutoPolicy,
    ShapePolicy,
)
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build_drafter, build_eagle, build_medusa
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.variants import quick_rows

PLAIN_S = 0.01


def decode(
    policy: AutoPolicy,
    n_tokens: int,
    per_round: float,
    cost: float,
    slowness: Callable[[int], float] = lambda _: 1.0,
) -> float:
    """Decode an answer; return its time in plain steps.

    A round with drafts commits ``per_round`` tokens and takes the time of ``cost`` plain steps.
    """
    policy.begin()
    n_done, spent, n_rounds = 0.0, 0.0, 0
    while n_done < n_tokens:
        drafts = policy.next_shape() is not None
        tokens, steps = (per_round, cost) if drafts else (1.0, 1.0)
        policy.observe(4 if drafts else 0, tokens, PLAIN_S * steps * slowness(n_rounds))
        n_done, spent, n_rounds = n_done + tokens, spent + steps, n_rounds + 1
    return spent


@pytest.mark.parametrize(("per_round", "cost"), [(4.0, 2.5), (1.0, 2.5), (1.0, 20.0), (4.0, 5.0)])
def test_drafts_are_used_if_they_pay_and_cost_what_plain_steps_pay_in_if_not(
    per_round: float, cost: float
) -> None:
    policy = AutoPolicy()
    spent = sum(decode(policy, 128, per_round, cost) for _ in range(20))
    pays = cost < per_round
    assert spent < (
        1.01 * 20 * 128 * cost / per_round
        if pays
        else 20 * 128 * (1 + 1 / MEASURE_EVERY) + PATIENCE + cost
    )


def test_an_answer_on_which_drafts_fail_is_soon_decoded_plainly_and_the_next_one_is_tried() -> None:
    policy = AutoPolicy()
    decode(policy, 500, per_round=4.0, cost=2.5)
    for _ in range(5):
        assert (
            decode(policy, 128, per_round=1.0, cost=2.5)
            < 128 * (1 + 1 / MEASURE_EVERY) + PATIENCE + 2 * 1.5
        )
        assert decode(policy, 128, per_round=4.0, cost=2.5) < 1.02 * 128 * 2.5 / 4.0 + 1


def test_neither_a_machine_that_slows_down_nor_a_long_prompt_is_held_against_drafts() -> None:
    """The machine becomes twice as slow, so that earlier timings of plain steps are too fast."""
    policy = AutoPolicy()
    decode(policy, 500, per_round=4.0, cost=2.5)
    spent = decode(
        policy, 2000, per_round=4.0, cost=2.5, slowness=lambda n: 1.0 + min(1.0, n / 400)
    )
    assert spent < 1.02 * 2000 * 2.5 / 4.0
    policy.begin()
    # The first round with drafts is slow, because the drafter also reads the prompt.
    policy.observe(4, 1.0, PLAIN_S * 4 * PATIENCE)
    assert policy.next_shape() == AUTO_SHAPE


@pytest.mark.parametrize(
    ("policy", "shape"),
    [
        (AutoPolicy(), AUTO_SHAPE),
        (AutoPolicy(max_depth=3), AUTO_SHAPE.cut(3)),
        (AutoPolicy(is_drawn=True), TreeShape(5)),
    ],
)
def test_the_first_rounds_time_plain_steps(policy: AutoPolicy, shape: TreeShape) -> None:
    for _ in range(3):
        assert policy.next_shape() is None
        policy.observe(0, 1.0, PLAIN_S)
    assert policy.next_shape() == shape
    policy.observe(4, 3.0, 2 * PLAIN_S)
    assert (
        policy.describe([DecodeStats([1] * 4, n_drafted_calls=1)])
        == f"1 of 4 target calls verified a chain of drafts (of the shape {shape}). The other calls "
        "had no drafts"
    )


class Changing(ShapePolicy):
    """Use another shape in each round."""

    def begin(self) -> None:
        self.shapes = itertools.cycle(
            [TreeShape(3), None, TreeShape(2, 2, 4), None, None, TreeShape(1)]
        )

    def next_shape(self) -> TreeShape | None:
        return next(self.shapes)

    def observe(self, n_drafts: int, n_committed: float, round_s: float) -> None:
        assert round_s > 0
        assert n_drafts in (0, 1, 2, 3, 4)
        assert 1 <= n_committed <= 1 + n_drafts


@pytest.mark.parametrize(
    ("build", "policy"),
    quick_rows(
        itertools.product((build_drafter, build_eagle, build_medusa), (Changing, AutoPolicy)),
        [(build_drafter, Changing), (build_eagle, Changing), (build_medusa, AutoPolicy)],
    ),
)
def test_shapes_that_change_from_round_to_round_are_lossless(
    build: Callable[..., Drafter], policy: Callable[[], Changing | AutoPolicy]
) -> None:
    model = build_model(eos_token_id=None, num_hidden_layers=2)
    target, prompts = Target(model), [[5, 6, 7], [8], [9, 10, 11, 12]]
    proposer = DrafterProposer(target, build(model))
    chosen = AutoPolicy(max_depth=proposer.max_depth) if policy is AutoPolicy else policy()
    found = generate_batch(target, prompts, max_new_tokens=14, proposer=proposer, tree=chosen)
    plain = generate_batch(target, prompts, max_new_tokens=14)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
