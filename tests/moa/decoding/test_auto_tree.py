"""A choice is measured on the target itself; shapes may change from round to round."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moa_data.moa.decoding.auto_tree import choose_shape
from moa_data.moa.decoding.loop import draft_session, generate_batch
from moa_data.moa.decoding.prompt_lookup import prompt_lookup_session
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.decoding.session import DrafterSession
from moa_data.moa.decoding.shape_costs import WIDEST, AcceptanceLog, n_nodes_of
from moa_data.moa.decoding.tree import DraftTree, TreeShape
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.target.live import Target
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import build_model

from ..drafters.test_eagle import build_eagle
from ..drafters.test_medusa import build_medusa


@pytest.mark.parametrize("build", [build_drafter, build_eagle])
def test_shapes_that_change_from_round_to_round_are_lossless(build: Callable[..., Drafter]) -> None:
    model = build_model(eos_token_id=None)
    target, prompts = Target(model), [[5, 6, 7], [8], [9, 10, 11, 12]]

    class Changing:
        def begin(self, n_prompt_tokens: int, max_new_tokens: int) -> None:
            self.shapes = itertools.cycle([TreeShape(3), None, TreeShape(2, 2, 4), None, None, TreeShape(1)])

        def next_shape(self) -> TreeShape | None:
            return next(self.shapes)

        def observe(self, n_drafts: int, accepted: Sequence[Sequence[int]], round_s: float, is_cut: bool) -> None:
            assert round_s > 0
            assert n_drafts in (0, 1, 2, 3, 4)
            assert 1 <= len(accepted) <= 3

    session = draft_session(target, build(model))
    found = generate_batch(target, prompts, max_new_tokens=20, open_session=session, tree=Changing())
    plain = generate_batch(target, prompts, max_new_tokens=20)
    assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.parametrize("shape", [TreeShape(4), TreeShape(3, 2, 6), TreeShape(4, stop_below=0.999)], ids=str)
def test_a_policy_is_told_which_rounds_had_no_use_for_its_shape(shape: TreeShape) -> None:
    """Also where a chain stops by itself before that."""
    model = build_model(eos_token_id=None)
    target, rounds = Target(model), []

    class Steady:
        def begin(self, n_prompt_tokens: int, max_new_tokens: int) -> None:
            self.n_left = max_new_tokens - 1

        def next_shape(self) -> TreeShape:
            return shape

        def observe(self, n_drafts: int, accepted: Sequence[Sequence[int]], round_s: float, is_cut: bool) -> None:
            assert is_cut == (self.n_left - 1 < shape.depth)
            self.n_left -= 1 + len(accepted[0])
            rounds.append((n_drafts, is_cut))

    session = draft_session(target, build_drafter(model))
    generate_batch(target, [[5, 6, 7]], max_new_tokens=12, open_session=session, tree=Steady())
    assert {is_cut for _, is_cut in rounds} == {True, False}
    whole = 1 if shape.stop_below else n_nodes_of(shape)
    assert {n_drafts for n_drafts, is_cut in rounds if not is_cut} == {whole}


def test_acceptance_is_not_counted_at_the_end_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(eos_token_id=None)
    target, n_nodes, observe = Target(model), [], AcceptanceLog.observe

    def noting(self: AcceptanceLog, drafts: DraftTree, accepted: Sequence[Sequence[int]]) -> None:
        n_nodes.append(drafts.n_nodes)
        observe(self, drafts, accepted)

    monkeypatch.setattr(AcceptanceLog, "observe", noting)
    choice = choose_shape(target, draft_session(target, build_drafter(model)), [[5, 6, 7]], max_new_tokens=20)
    assert choice.acceptance.n_rounds == len(n_nodes) > 2
    assert set(n_nodes) == {n_nodes_of(WIDEST)}


@pytest.mark.parametrize("build", [build_drafter, build_eagle])
def test_a_choice_is_measured_on_the_target_itself(build: Callable[..., Drafter]) -> None:
    model = build_model(eos_token_id=None)
    target, drafter = Target(model), build(model)
    choice = choose_shape(target, draft_session(target, drafter), [[5, 6, 7], [8, 9]], max_new_tokens=12)
    if choice.shape is None:
        assert choice.speed_ratio == 1.0
        assert "plain decoding" in choice.describe()
    else:
        n_drafts = choice.acceptance.n_drafts(choice.shape)
        expected = choice.acceptance.committed(choice.shape) / choice.costs.round_s(choice.shape, n_drafts)
        assert expected * choice.costs.round_s(None) == pytest.approx(choice.speed_ratio)
        assert choice.speed_ratio > 1.0
        assert str(choice.shape) in choice.describe()


@pytest.mark.parametrize("n_heads", [1, 2, 4])
def test_no_shape_is_tried_that_the_drafter_cannot_make(n_heads: int) -> None:
    model = build_model(eos_token_id=None)
    target = Target(model)
    session = draft_session(target, build_medusa(model, medusa_heads=n_heads))
    choice = choose_shape(target, session, [[5, 6, 7], [8, 9]], max_new_tokens=12)
    assert choice.acceptance.n_rounds > 0
    assert choice.acceptance.widest.depth == n_heads
    assert choice.shape is None or choice.shape.depth <= n_heads
    found = generate_batch(target, [[5, 6, 7]], max_new_tokens=30, open_session=session, tree=choice.policy())
    assert found[0].tokens == generate_batch(target, [[5, 6, 7]], max_new_tokens=30)[0].tokens


def test_prompt_lookup_may_be_chosen_too() -> None:
    target = Target(build_model(eos_token_id=None))
    session = prompt_lookup_session(target.device)
    assert choose_shape(target, session, [[5, 6, 5, 6, 5]], max_new_tokens=12).acceptance.widest == WIDEST


def test_chains_that_are_drawn_are_not_asked_whether_they_stop() -> None:
    model = build_model(eos_token_id=None)
    target, sampling = Target(model), SamplingConfig(temperature=1.0)
    session = draft_session(target, build_drafter(model), None, sampling)
    choice = choose_shape(target, session, [[5, 6, 7]], max_new_tokens=12, sampling=sampling)
    assert choice.costs.stop_s == 0.0
    generation = generate_batch(
        target, [[5, 6, 7]], max_new_tokens=30, open_session=session, tree=choice.policy(), sampling=sampling
    )
    assert len(generation[0].tokens) == 30


@pytest.mark.parametrize(("shares", "most"), [((1.0, 1.0), 0.0), ((1.0, 1000.0), 1.0)])
def test_a_machine_that_slows_down_meanwhile_charges_drafts_little(
    monkeypatch: pytest.MonkeyPatch, shares: tuple[float, float], most: float
) -> None:
    """Neither where all rounds take long, nor where those with drafts are hit."""
    model = build_model(eos_token_id=None)
    target, drafter = Target(model), build_drafter(model)
    propose, is_plain = DrafterSession.propose, [True]

    def noting(self: DrafterSession, *args: Any) -> DraftTree:
        is_plain[0] = False
        return propose(self, *args)

    def seconds(began: float, ended: float) -> float:
        was_plain, is_plain[0] = is_plain[0], True
        return 100.0 * shares[not was_plain]

    monkeypatch.setattr(DrafterSession, "propose", noting)
    monkeypatch.setattr("moa_data.moa.decoding.clock.DeviceClock.seconds", staticmethod(seconds))
    choice = choose_shape(target, draft_session(target, drafter), [[5, 6, 7], [8, 9]], max_new_tokens=32)
    assert choice.acceptance.n_rounds > 4
    assert choice.costs.rest_s <= most * choice.costs.root_s[1]
