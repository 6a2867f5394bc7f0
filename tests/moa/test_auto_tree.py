"""The fastest shape follows from costs and acceptance; where nothing pays, that is plain decoding."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from moa_data.moa.auto_tree import (
    WIDEST,
    AcceptanceLog,
    AdaptivePolicy,
    DecodingCosts,
    candidates,
    choose_shape,
    fastest,
)
from moa_data.moa.decode import draft_session, generate_batch
from moa_data.moa.drafter import Drafter
from moa_data.moa.target import Target
from moa_data.moa.tree import DraftTree, TreeShape

from .conftest import build_drafter, build_model
from .test_eagle import build_eagle

#        root
#      0      1        level 1, scores -0.1, -1.0
#    2  3     4        level 2, scores -0.2, -1.5, -1.1
#    5                 level 3, score -0.3
PARENTS = [-1, -1, 0, 0, 1, 2]
SCORES = [-0.1, -1.0, -0.2, -1.5, -1.1, -0.3]


def tree() -> DraftTree:
    return DraftTree(torch.zeros(1, 6, dtype=torch.int64), torch.tensor([PARENTS]), torch.tensor([SCORES]))


def costs(plain: float = 10.0, per_token: float = 0.0, level: float = 1.0) -> DecodingCosts:
    verify = {n: plain + per_token * (n - 1) for n in (1, 2, 8, 63)}
    return DecodingCosts(verify, dict.fromkeys((1, 2, 4, 8), level), dict.fromkeys((1, 2, 4, 8), level))


def test_a_smaller_tree_is_credited_with_the_nodes_that_it_would_hold() -> None:
    log = AcceptanceLog()
    log.observe(tree(), [[0, 2, 5]])
    # A chain follows the best child each time: nodes 0, 2 and 5.
    assert [log.committed(TreeShape(depth)) for depth in (1, 2, 3, 4)] == [2.0, 3.0, 4.0, 4.0]
    log = AcceptanceLog()
    log.observe(tree(), [[1, 4]])
    # Node 1 is a second child: no chain holds it; node 4 is the fifth best of six.
    assert log.committed(TreeShape(3)) == 1.0
    assert log.committed(TreeShape(3, 2, 62)) == 3.0
    assert [log.committed(TreeShape(3, 2, n)) for n in (3, 4, 5)] == [1.0, 2.0, 3.0]
    assert log.committed(TreeShape(1, 2, 2)) == 2.0  # the nodes that are better lie deeper than such a tree
    log.observe(tree(), [[]])
    assert log.committed(TreeShape(3, 2, 62)) == 2.0
    assert log.committed(None) == 1.0


def test_the_fastest_shape_grows_as_calls_get_cheaper() -> None:
    log = AcceptanceLog()
    for accepted in ([0, 2, 5], [1, 4], [0], []):
        log.observe(tree(), [accepted])
    free_verification, _ = fastest(costs(per_token=0.0, level=0.01), log)
    assert free_verification is not None
    assert not free_verification.is_chain
    costly_verification, ratio = fastest(costs(per_token=6.0, level=0.01), log)
    assert costly_verification is None
    assert ratio == 1.0
    chain, ratio = fastest(costs(per_token=1.5, level=0.01), log)
    assert chain is not None
    assert ratio == pytest.approx(log.committed(chain) * 10 / costs(per_token=1.5, level=0.01).round_s(chain))
    assert fastest(costs(level=50.0), log)[0] is None


def test_candidates_are_distinct_and_bounded_by_the_widest() -> None:
    shapes = candidates()
    assert len(set(shapes)) == len(shapes)
    assert WIDEST in shapes
    assert all(shape.depth <= WIDEST.depth and min(shape.n_nodes, shape.n_candidates) <= 62 for shape in shapes)


def log_of(*accepted: list[int]) -> AcceptanceLog:
    log = AcceptanceLog()
    for nodes in accepted:
        log.observe(tree(), [nodes])
    return log


def shapes_of(policy: AdaptivePolicy, n_rounds: int, accepted: list[int]) -> list[TreeShape | None]:
    found = []
    for _ in range(n_rounds):
        found.append(policy.next_shape())
        policy.observe([accepted if found[-1] else []])
    return found


def test_an_answer_on_which_the_drafter_fails_is_decoded_plainly_and_tried_again() -> None:
    costs_of_rounds, log = costs(per_token=1.0, level=0.5), log_of([0, 2, 5], [0, 2, 5], [0])
    policy = AdaptivePolicy(costs_of_rounds, log)
    policy.begin(10, 100)
    shapes = shapes_of(policy, 200, [])
    first_plain = shapes.index(None)
    assert shapes[0] == fastest(costs_of_rounds, log)[0]
    assert 1 <= first_plain <= 12
    assert any(shape is not None for shape in shapes[first_plain:])
    assert sum(shape is not None for shape in shapes[first_plain:]) < 0.2 * len(shapes)
    policy.begin(10, 100)
    assert shapes_of(policy, 1, [])[0] == shapes[0]


def test_an_answer_on_which_the_drafter_is_right_keeps_its_drafts() -> None:
    policy = AdaptivePolicy(costs(per_token=1.0, level=0.5), log_of([0, 2, 5], [0, 2, 5], [0]))
    policy.begin(10, 100)
    assert None not in shapes_of(policy, 100, [0, 2, 5])


def test_a_prompt_that_takes_longer_to_read_than_drafts_save_is_decoded_plainly() -> None:
    rounds = dataclasses.replace(costs(per_token=1.0, level=0.5), prompt_token_s=1.0)
    log = log_of([0, 2, 5])
    policy = AdaptivePolicy(rounds, log)
    saved_s = 10.0 - min(rounds.round_s(shape) / log.committed(shape) for shape in candidates())
    policy.begin(int(100 * saved_s / 4) + 1, 100)
    assert policy.next_shape() is None
    policy.begin(int(100 * saved_s / 4) - 1, 100)
    assert policy.next_shape() is not None


@pytest.mark.parametrize("build", [build_drafter, build_eagle])
def test_shapes_that_change_from_round_to_round_are_lossless(build: Callable[..., Drafter]) -> None:
    model = build_model(eos_token_id=None)
    target, prompts = Target(model), [[5, 6, 7], [8], [9, 10, 11, 12]]

    class Changing:
        def begin(self, n_prompt_tokens: int, max_new_tokens: int) -> None:
            self.shapes = itertools.cycle([TreeShape(3), None, TreeShape(2, 2, 4), None, None, TreeShape(1)])

        def next_shape(self) -> TreeShape | None:
            return next(self.shapes)

        def observe(self, accepted: Sequence[Sequence[int]]) -> None:
            assert 1 <= len(accepted) <= 3

    session = draft_session(target, build(model))
    found = generate_batch(target, prompts, max_new_tokens=20, open_session=session, tree=Changing())
    plain = generate_batch(target, prompts, max_new_tokens=20)
    assert [one.tokens for one in found] == [one.tokens for one in plain]


def test_verification_costs_are_interpolated() -> None:
    assert costs(per_token=1.0).verification_s(5) == 14.0
    assert costs().round_s(TreeShape(3)) == 13.0


@pytest.mark.parametrize("build", [build_drafter, build_eagle])
def test_a_choice_is_measured_on_the_target_itself(build: Callable[..., Drafter]) -> None:
    model = build_model(eos_token_id=None)
    target, drafter = Target(model), build(model)
    choice = choose_shape(target, draft_session(target, drafter), [[5, 6, 7], [8, 9]], max_new_tokens=12)
    if choice.shape is None:
        assert choice.speed_ratio == 1.0
        assert "plain decoding" in choice.describe()
    else:
        expected = choice.acceptance.committed(choice.shape) / choice.costs.round_s(choice.shape)
        assert expected * choice.costs.round_s(None) == pytest.approx(choice.speed_ratio)
        assert choice.speed_ratio > 1.0
        assert str(choice.shape) in choice.describe()
