"""The policy follows what its rounds show: acceptance of the answer, of late, and seconds."""

import dataclasses
import itertools
import math
import random

import pytest

from moa_data.moa.decoding.shape_costs import DecodingCosts, candidates, fastest, n_nodes_of
from moa_data.moa.decoding.shape_policy import AdaptivePolicy
from moa_data.moa.decoding.tree import TreeShape

from .test_shape_costs import costs, log_of

ROUNDS = costs(per_token=1.0, level=0.5)
LOG = log_of([0, 2, 5], [0, 2, 5], [0])


def nodes_of(shape: TreeShape | None) -> int:
    return n_nodes_of(shape) if shape else 0


def shapes_of(policy: AdaptivePolicy, n_rounds: int, accepted: list[int]) -> list[TreeShape | None]:
    """Shapes of rounds that take exactly as long as they should."""
    found = []
    for _ in range(n_rounds):
        found.append(policy.next_shape())
        policy.observe(nodes_of(found[-1]), [accepted if found[-1] else []], ROUNDS.round_s(found[-1]))
    return found


def speed_ratio(
    policy: AdaptivePolicy, actual: DecodingCosts, accepted: list[list[int]], n_answers: int, seed: int = 0
) -> float:
    """Tokens/s over plain decoding's on a machine of some costs whose speed wanders by a factor of two."""
    draws, seconds, plain_s, slowness = random.Random(seed), 0.0, 0.0, 1.0
    for _ in range(n_answers):
        policy.begin(20, 100)
        n_tokens = 0
        while n_tokens < 100:
            shape = policy.next_shape()
            slowness = min(2.0, max(1.0, slowness * math.exp(draws.gauss(0, 0.05))))
            spike = 5.0 if draws.random() < 0.02 else 1.0
            round_s = actual.round_s(shape) * slowness * math.exp(draws.gauss(0, 0.1)) * spike
            nodes = draws.choice(accepted)[: shape.depth] if shape else []
            policy.observe(nodes_of(shape), [nodes], round_s)
            n_tokens += 1 + len(nodes)
            seconds += round_s
            plain_s += (1 + len(nodes)) * actual.round_s(None) * slowness * spike
    return plain_s / seconds


def test_an_answer_on_which_the_drafter_fails_is_decoded_plainly_and_tried_again() -> None:
    policy = AdaptivePolicy(ROUNDS, LOG)
    policy.begin(10, 100)
    shapes = shapes_of(policy, 200, [])
    first_plain = shapes.index(None)
    assert shapes[0] == fastest(ROUNDS, LOG)[0]
    assert 1 <= first_plain <= 12
    assert any(shape is not None for shape in shapes[first_plain:])
    assert sum(shape is not None for shape in shapes[100:]) < 0.2 * 100


def test_an_answer_on_which_the_drafter_is_right_keeps_its_drafts() -> None:
    policy = AdaptivePolicy(ROUNDS, LOG)
    policy.begin(10, 100)
    shapes = shapes_of(policy, 300, [0, 2, 5])
    # Now and then a plain round is timed, which costs little.
    assert 3 <= shapes.count(None) <= 10
    assert None not in shapes[:6]


def test_a_bad_beginning_is_no_bad_drafter() -> None:
    """The first drafts of an answer are the least certain; a drafter that is right on average stays in use."""
    policy = AdaptivePolicy(ROUNDS, LOG)
    for _ in range(4):
        policy.begin(10, 100)
        assert None not in shapes_of(policy, 3, [])
        shapes_of(policy, 20, [0, 2, 5])


@pytest.mark.parametrize("seed", range(5))
def test_acceptance_that_scatters_keeps_its_drafts(seed: int) -> None:
    """A third of the rounds accepts nothing, half of them all: adapting loses little against the best shape."""
    accepted: list[list[int]] = [[], [], [0], [0, 2, 5], [0, 2, 5], [0, 2, 5]]
    log, rounds = log_of(*accepted), costs(per_token=1.0, level=2.0)
    best, promised = fastest(rounds, log)
    assert best is not None
    assert 1.2 < promised < 1.6
    fixed = AdaptivePolicy(rounds, log)
    fixed.next_shape = lambda: best  # type: ignore[method-assign]
    fixed.observe = lambda *round_: None  # type: ignore[method-assign]
    adapted = speed_ratio(AdaptivePolicy(rounds, log), rounds, accepted, 20, seed)
    assert adapted > 0.93 * speed_ratio(fixed, rounds, accepted, 20, seed)


def test_a_prompt_that_takes_longer_to_read_than_drafts_save_is_decoded_plainly() -> None:
    rounds = dataclasses.replace(ROUNDS, prompt_token_s=1.0)
    log = log_of([0, 2, 5])
    policy = AdaptivePolicy(rounds, log)
    saved_s = 10.0 - min(rounds.round_s(shape) / log.committed(shape) for shape in candidates())
    policy.begin(int(100 * saved_s / 4) + 1, 100)
    assert policy.next_shape() is None
    policy.begin(int(100 * saved_s / 4) - 1, 100)
    assert policy.next_shape() is not None


def test_how_long_answers_were_decides_what_reading_a_prompt_may_take() -> None:
    rounds, log = dataclasses.replace(ROUNDS, prompt_token_s=1.0), log_of([0, 2, 5])
    saved_s = 10.0 - min(rounds.round_s(shape) / log.committed(shape) for shape in candidates())
    for n_tokens, drafts in ((80, True), (10, False)):
        policy = AdaptivePolicy(rounds, log)
        policy.begin(10_000, 100)  # nothing pays for so long a prompt
        for _ in range(n_tokens):
            assert policy.next_shape() is None
            policy.observe(0, [[]], rounds.round_s(None))
        policy.begin(int(50 * saved_s), 100)
        assert (policy.next_shape() is not None) == drafts


@pytest.mark.parametrize("seed", range(5))
def test_drafts_that_take_longer_than_measured_are_given_up(seed: int) -> None:
    promised = fastest(ROUNDS, LOG)[1]
    actual = dataclasses.replace(ROUNDS, rest_s=25.0)
    assert promised > 1.5
    assert fastest(actual, LOG) == (None, 1.0)
    accepted = [[0, 2, 5], [0, 2, 5], [0]]
    policy = AdaptivePolicy(ROUNDS, LOG)
    assert speed_ratio(policy, actual, accepted, 20, seed) > 0.95
    # A policy that believes the measurement loses a tenth and more.
    believer = AdaptivePolicy(ROUNDS, LOG)
    believer._surcharge.observe_plain = believer._surcharge.observe_drafted = lambda ratio: None  # type: ignore[method-assign]
    assert speed_ratio(believer, actual, accepted, 20, seed) < 0.9


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_machine_that_keeps_its_proportions_keeps_its_drafts(seed: int) -> None:
    accepted = [[0, 2, 5], [0, 2, 5], [0]]
    expected = fastest(ROUNDS, LOG)[1]
    assert speed_ratio(AdaptivePolicy(ROUNDS, LOG), ROUNDS, accepted, 20, seed) > 0.93 * expected


@pytest.mark.parametrize("cause", ["slow", "wrong"])
def test_what_went_wrong_at_first_is_tried_again(cause: str) -> None:
    """Two answers on which drafts take three times too long, or are never right; then all is as it was measured."""
    policy, n_drafted = AdaptivePolicy(ROUNDS, LOG), []
    for answer in range(16):
        policy.begin(10, 100)
        n_drafted.append(0)
        for _ in range(60):
            shape, is_bad = policy.next_shape(), answer < 2
            nodes = [0, 2, 5][: shape.depth] if shape and not (is_bad and cause == "wrong") else []
            policy.observe(nodes_of(shape), [nodes], ROUNDS.round_s(shape) * (3.0 if shape and is_bad else 1.0))
            n_drafted[-1] += shape is not None
    assert n_drafted[1] < 20
    assert min(n_drafted[-3:]) > 50


def test_a_drafter_that_failed_on_the_last_answers_must_earn_its_drafts() -> None:
    policy = AdaptivePolicy(ROUNDS, LOG)
    policy.begin(10, 100)
    first = shapes_of(policy, 40, [])
    for _ in range(8):
        policy.begin(10, 100)
        shapes_of(policy, 40, [])
    policy.begin(10, 100)
    later = shapes_of(policy, 40, [])
    assert first.index(None) >= 1
    assert later[0] is None or later.count(None) > first.count(None)


def test_rounds_that_were_cut_teach_nothing() -> None:
    """At the end of an answer there is no use for the whole shape: what comes next is as without these rounds."""
    policy, untaught = AdaptivePolicy(ROUNDS, LOG), AdaptivePolicy(ROUNDS, LOG)
    for one in (policy, untaught):
        one.begin(10, 12)
        shapes_of(one, 3, [0, 2, 5])
    for n_drafts in (3, 1, 0):
        assert policy.next_shape() is not None
        policy.observe(n_drafts, [[]], 100.0, is_cut=True)
    assert policy._typical == untaught._typical
    assert policy.next_shape() == untaught.next_shape()
    for one in (policy, untaught):
        one.begin(10, 12)
    assert policy._typical == untaught._typical
    assert policy._surcharge.factor == untaught._surcharge.factor == 1.0
    assert (policy._answers_n_tokens[-1], untaught._answers_n_tokens[-1]) == (15.0, 12.0), "but tokens are counted"


def test_a_chain_that_stopped_is_expected_to_take_less() -> None:
    rounds, log = costs(per_token=1.0, level=2.0), log_of([0, 2, 5])
    policy = AdaptivePolicy(rounds, log)
    policy.begin(10, 100)
    for n_drafts in itertools.islice(itertools.cycle((1, 3, 2)), 60):
        shape = policy.next_shape()
        assert shape is None or shape.is_chain
        round_s = rounds.round_s(shape, n_drafts if shape else None)
        policy.observe(n_drafts if shape else 0, [[0]] if shape else [[]], round_s)
    assert policy._surcharge.is_sure
    assert policy._surcharge.factor == pytest.approx(1.0)
