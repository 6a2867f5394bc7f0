"""Mixture of Attentions keeps the contract in all its forms.

Passes, encoded KV and losses follow their definitions.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moa_data.errors import DrafterError
from moa_data.moa.drafters import training
from moa_data.moa.drafters.caches import write_after
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.drafters.training import Draws, LossWeights, Rounds, TrainingInputs, TrainingStep
from moa_data.moa.formats.checkpoint import load_drafter, save_drafter
from moa_data.moa.nn import losses, packed
from moa_data.moa.nn.kv import pack_kv
from moa_data.moa.nn.layers import rotate
from moa_data.moa.nn.losses import d_pace_weights
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import (
    PAPER,
    build_drafter,
    forward_kl,
    frozen_for,
    stored,
    token_counts,
    weight_of_positions,
)
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.variants import quick, quick_rows

from .contract import CLOSE, STOPPING, TREE, WINDOW, DrafterContract, ForcedDrafting, check_contexts

OURS: dict[str, Any] = {"cross_attention_drafts": True, "layer_groups": 2, "unrotated_keys": True}


class TestPaper(DrafterContract):
    kind = "moa"
    sizes = PAPER
    family = WINDOW


class TestOurs(DrafterContract):
    kind = "moa"
    learns_in = 16
    speed_shape, shape, sampled_shape, tied_shape = STOPPING, TREE, TREE, TREE


@pytest.mark.slow
class TestPaperThroughTargetLayers(DrafterContract):
    kind = "moa"
    sizes = PAPER | {"target_layer_inference": 2}


@pytest.mark.slow
class TestOursThroughTargetLayers(DrafterContract):
    kind = "moa"
    sizes = {"target_layer_inference": 1}


@pytest.mark.slow
class TestLastLayerAlone(DrafterContract):
    kind = "moa"
    sizes = {"layer_attention": False, "target_layer_inference": 2}


@pytest.mark.slow
class TestEverySecondLayer(DrafterContract):
    kind = "moa"
    sizes = {"layer_stride": 2, "layer_groups": 1, "target_layer_inference": 1}


@pytest.mark.slow
class TestSmallVocabulary(DrafterContract):
    """Only thirty tokens can be drafted; sampling and decoding still use all tokens."""

    kind = "moa"
    sizes = {"draft_vocabulary": 30}


def test_the_most_frequent_tokens_are_drafted(tmp_path: Path) -> None:
    """Their logits equal those of the target's head, also after the drafter is saved and loaded.

    Other tokens are never drafted.
    """
    model = build_model()
    drafter = build_drafter(model, 0, draft_vocabulary=30)
    counts, frozen, features = token_counts(), frozen_for(drafter, model), torch.randn(2, 3, 48)
    chosen = torch.zeros(len(counts), dtype=torch.bool)
    chosen[list(drafter.config.draft_tokens)] = True
    assert int(chosen.sum()) == 30
    assert counts[chosen].min() >= counts[~chosen].max()
    save_drafter(drafter, tmp_path)
    for one in (drafter, load_drafter(tmp_path)):
        logits = one.draft_logits(frozen, features)
        torch.testing.assert_close(logits[..., chosen], frozen.logits(features)[..., chosen])
        assert bool(torch.isneginf(logits[..., ~chosen]).all())
    with pytest.raises(DrafterError):
        dataclasses.replace(drafter.config, draft_tokens=(len(counts),))


def test_rows_of_the_head_are_laid_out_for_drafting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are rounded only for drafting, in inference mode.

    Nothing is prepared in validation, so nothing is rounded there.
    """
    monkeypatch.setattr(packed, "_FEWEST_VALUES", 1)
    if not packed._works(torch.float32, in_halves=True):
        pytest.skip("this machine has no products of float16 weights")
    model, features = build_model(), torch.randn(2, 3, 48)
    for is_prepared in (False, True):
        drafter = build_drafter(model, 0, draft_vocabulary=30)
        frozen = frozen_for(drafter, model)
        if is_prepared:
            frozen.prepare()
        rows = frozen.head_of(drafter.draft_ids)
        assert ("packed" in vars(rows)) == is_prepared
        with torch.inference_mode():
            found = drafter.draft_logits(frozen, features)[..., list(drafter.config.draft_tokens)]
        tolerance = 1e-2 if is_prepared else 1e-6
        torch.testing.assert_close(found, features @ rows.weight.T, rtol=tolerance, atol=tolerance)
        if is_prepared:
            assert not torch.equal(found, features @ rows.weight.T)


N_TOKENS, PROMPT = 22, 9
NO_STAIRCASE = torch.zeros(1, dtype=torch.bool)
DRAWS = {
    "bounded": Draws(torch.tensor([5]), NO_STAIRCASE, torch.tensor([2])),
    "unbounded": Draws(None, NO_STAIRCASE),
    "teacher-forced": Draws(torch.tensor([5]), NO_STAIRCASE, None, (), 0.0, 0.0, 1.0),
    "both": Draws(torch.tensor([5]), NO_STAIRCASE, torch.tensor([2]), (), 0.0, 1.0, 0.5),
}


def inputs_for(drafter: MoADrafter, model: Any, n_rows: int = 1) -> TrainingInputs:
    torch.manual_seed(3)
    tokens = torch.randint(4, 67, (n_rows, N_TOKENS))
    return stored(
        drafter, model, tokens, (torch.arange(N_TOKENS) >= PROMPT).expand(n_rows, -1).clone()
    )


@pytest.mark.parametrize("draws", quick(DRAWS, ("unbounded", "both")))
@pytest.mark.parametrize("sizes", [{}, OURS | {"target_layer_inference": 1}], ids=["paper", "ours"])
@torch.no_grad()
def test_both_passes_are_rounds_of_decoding(draws: str, sizes: dict[str, Any]) -> None:
    """A decoding session reaches each loss position after verifying what it sees in training."""
    target = Target(build_model("mistral"))
    n_layers = sizes.get("target_layer_inference", 0)
    drafter = build_drafter(target.model, n_layers, **{k: v for k, v in sizes.items() if k in OURS})
    inputs = inputs_for(drafter, target.model)
    rounds = Rounds.packed(DRAWS[draws], inputs.response_mask)
    trained = drafter(frozen_for(drafter, target.model), inputs.tokens, inputs.kv, rounds)[1][0]
    assert rounds.drafted[0].all(), "one row has no padding"
    text, rows, before = inputs.tokens[0].tolist(), ForcedDrafting(drafter, target), 0
    positions, roots = rounds.queries[0].tolist(), (rounds.context[0] + 1).tolist()
    for root, group in itertools.groupby(range(len(positions)), key=roots.__getitem__):
        queries = list(group)
        if root < before:
            rows = ForcedDrafting(drafter, target)
        before = root
        depths = [positions[query] - root for query in queries]
        stepped = rows.chain(text, root, max(depths))
        torch.testing.assert_close(stepped[depths], trained[queries], rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    ("attention", "n_target_layers", "n_kv_heads", "kv_width"),
    quick_rows(
        [
            (attention, *sizes)
            for attention in ("paper", "last layer")
            for sizes in ((0, 1, 24), (1, 1, 24), (1, 4, 96))
        ],
        [("last layer", 0, 1, 24), ("paper", 1, 4, 96)],
    ),
)
def test_contexts_hold_the_narrower_of_means_and_encoded_kv(
    attention: str, n_target_layers: int, n_kv_heads: int, kv_width: int
) -> None:
    """Contexts also hold the KV of the target layers that drafted features pass through."""
    target = Target(build_model("qwen2-mixed", num_key_value_heads=n_kv_heads))
    drafter = build_drafter(target.model, n_target_layers, layer_attention=attention == "paper")
    assert drafter.context_width == min(48, kv_width) + n_target_layers * kv_width
    check_contexts(drafter, target, 10 * CLOSE, roots_by_piece={3: (2, 7, 11)})


@pytest.mark.parametrize(("n_target_layers", "sees_drafts"), [(0, True), (2, False)])
def test_two_passes_in_one_forward_are_the_weighted_mean_of_both(
    n_target_layers: int, sees_drafts: bool
) -> None:
    """Losses and gradients are equal.

    The staircase of the on-policy pass does not affect the teacher-forced pass.
    """
    model = build_model()
    drafter = build_drafter(model, n_target_layers, cross_attention_drafts=sees_drafts)
    inputs, frozen = inputs_for(drafter, model, n_rows=2), frozen_for(drafter, model)
    inputs.response_mask[1, :12] = False
    draws = Draws(torch.tensor([5, 6]), torch.tensor([True, False]), torch.tensor([2, 1]))
    only = Draws(
        None, torch.zeros(2, dtype=torch.bool), on_policy_weight=0.0, teacher_forced_weight=1.0
    )
    both = dataclasses.replace(draws, teacher_forced_weight=0.5)
    found = []
    for one in (draws, only, both):
        step = TrainingStep(inputs, one)
        total = drafter.objective(frozen, step)["loss"]
        gradients = torch.autograd.grad(total, list(drafter.parameters()))
        found.append((weight_of_positions(drafter, frozen, step), total, gradients))
    (
        (policy_weight, policy, policy_gradients),
        (forced_weight, forced, forced_gradients),
        (weight, total, gradients),
    ) = found
    assert weight == pytest.approx(policy_weight + 0.5 * forced_weight)
    share = policy_weight / weight
    torch.testing.assert_close(total, share * policy + (1 - share) * forced)
    for got, a, b in zip(gradients, policy_gradients, forced_gradients, strict=True):
        torch.testing.assert_close(
            got, share * a + (1 - share) * b, rtol=1e-3, atol=1e-5 * float(a.abs().max()) + 1e-9
        )


def test_passes_share_the_distributions_of_their_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's distribution at a position is computed once for both passes.

    Loss and gradients do not change.
    """
    model = build_model()
    drafter = build_drafter(model, 0)
    inputs, frozen = inputs_for(drafter, model, n_rows=2), frozen_for(drafter, model)
    inputs.response_mask[1, :12] = inputs.response_mask[1, 15] = False
    draws = Draws(
        torch.tensor([5, 6]),
        torch.zeros(2, dtype=torch.bool),
        torch.tensor([2, 1]),
        (),
        0.0,
        1.0,
        0.5,
    )
    step = TrainingStep(inputs, draws, LossWeights(), 7.0)
    chunked, shared = losses.chunked_losses, training._by_teacher
    shapes: list[tuple[int, ...]] = []

    def note(features: Tensor, hidden: Tensor, **settings: Any) -> Any:
        shapes.append(tuple(features.shape[:2]))
        assert features.is_contiguous(), "products of other layouts take several times as long"
        return chunked(features, hidden, **settings)

    def share_nothing(teachers: Tensor) -> tuple[Tensor, Tensor]:
        every = torch.arange(len(teachers))
        return torch.stack((every, every), dim=1), torch.zeros(len(every), dtype=torch.bool)

    monkeypatch.setattr(losses, "chunked_losses", note)
    found = []
    for by_teacher in (shared, share_nothing):
        monkeypatch.setattr(training, "_by_teacher", by_teacher)
        total = drafter.objective(frozen, step)["loss"]
        found.append((total, *torch.autograd.grad(total, list(drafter.parameters()))))
    passes = draws.passes(inputs.response_mask)
    n_each = [int(drafted.sum()) for _, drafted, _ in passes]
    n_both = int((passes[0][1] & passes[1][1]).sum())
    assert 0 < n_both < n_each[1]
    assert shapes == [(sum(n_each) - n_both, 2), (sum(n_each), 2)]
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


def test_d_pace_weighs_each_round_by_itself() -> None:
    """The loss has weights that are computed separately for each round.

    A teacher-forced pass keeps its own weight.
    """
    model = build_model()
    drafter = build_drafter(model, 0)
    inputs, frozen = inputs_for(drafter, model, n_rows=2), frozen_for(drafter, model)
    inputs.response_mask[1, :12] = inputs.response_mask[1, 15] = False
    draws = Draws(
        torch.tensor([5, 6]),
        torch.zeros(2, dtype=torch.bool),
        torch.tensor([2, 1]),
        (),
        0.0,
        1.0,
        0.5,
    )
    rounds = Rounds.packed(draws, inputs.response_mask)
    features = drafter(frozen, inputs.tokens, inputs.required_kv(), rounds)[1]
    expected = torch.zeros(())
    for row in range(2):
        blocks: dict[tuple[int, int], list[int]] = {}
        for query in range(rounds.queries.shape[1]):
            if rounds.drafted[row, query]:
                blocks.setdefault(
                    (int(rounds.pass_index[query]), int(rounds.context[row, query])), []
                ).append(query)
        assert max(map(len, blocks.values())) >= 3
        for (number, _), queries in blocks.items():
            positions = rounds.queries[row, queries]
            logits = frozen.logits(features[row, queries])
            kl = forward_kl(logits, frozen.logits(inputs.hidden[row, positions]))
            labels = inputs.tokens[row, (positions + 1).clamp(max=N_TOKENS - 1)]
            wrong = -logits.log_softmax(dim=-1)[torch.arange(len(queries)), labels]
            paced = d_pace_weights(wrong, torch.ones(len(queries), dtype=torch.bool), 0.25)
            expected = expected + (kl * (paced if number == 0 else 0.5)).sum()
    step = TrainingStep(inputs, draws, LossWeights(1.0, 0.0, d_pace=0.25), 7.0)
    torch.testing.assert_close(
        drafter.objective(frozen, step)["loss"], expected / 7.0, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("stride", "layers"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [0, 3]), (4, [3])]
)
def test_encoded_kv_of_some_layers(stride: int, layers: list[int]) -> None:
    """Encoded KV depends only on the selected layers, so that these are enough.

    The last layer is selected for every stride.
    """
    drafter = build_drafter(
        build_model(), layer_stride=stride, layer_groups=1 if stride == 4 else 2
    )
    kv = torch.randn(2, 5, 4, 48)
    others = [layer for layer in range(4) if layer not in layers]
    changed = kv.clone()
    changed[:, :, others] = torch.nan
    memory = drafter.encode_kv(kv)
    assert torch.equal(drafter.encode_kv(changed), memory)
    assert torch.equal(drafter.encode_kv(kv[:, :, layers]), memory)
    changed[:, :, layers[0]] += 1
    assert not torch.equal(drafter.encode_kv(changed), memory)


def test_encoded_kv_in_pieces_equals_that_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = build_drafter(build_model()).double()
    kv, used = (
        torch.randn(2, 5, 4, 48, dtype=torch.float64),
        list(drafter.layer_self_attention.parameters()),
    )
    sizes: list[int] = []
    attend = drafter.layer_self_attention.attend_self_means

    def attend_to_few(x: Tensor, *args: Any) -> Tensor:
        sizes.append(len(x))
        return attend(x, *args)

    monkeypatch.setattr(drafter.layer_self_attention, "attend_self_means", attend_to_few)
    found = []
    for most in (10, 1, 4):
        monkeypatch.setattr("moa_data.moa.drafters.kv_encoder._MAX_POSITIONS", most)
        encoded = drafter.encode_kv(kv)
        found.append((encoded, *torch.autograd.grad(encoded.square().sum(), used)))
        torch.testing.assert_close(found[-1], found[0])
    assert sizes == [10, *[1] * 10, 4, 4, 2]


@pytest.mark.parametrize("layer_attention", [True, False])
def test_equal_content_makes_equal_encoded_kv_wherever_it_stands(layer_attention: bool) -> None:
    """This holds for keys before RoPE; with rotated keys the paper's memory depends on position."""
    model = build_model()
    for unrotated in (True, False):
        drafter = build_drafter(
            model, layer_attention=layer_attention, unrotated_keys=unrotated
        ).double()
        keys, values = torch.randn(2, 4, 1, 2, 5, 12, dtype=torch.float64).unbind()
        memories = []
        for first in (0, 40):
            at = torch.arange(first, first + 5)[None]
            rotated = [rotate(layer, drafter.rotary(at)) for layer in keys]
            memories.append(drafter.encode_kv(pack_kv(rotated, list(values)), at))
        difference = (memories[0] - memories[1]).abs().max()
        assert (difference < 1e-5) == unrotated, difference


@pytest.mark.parametrize("before", [[6], [6, 3]])
def test_keys_and_values_that_are_no_numbers_do_not_stay_in_the_targets_cache(
    before: list[int],
) -> None:
    view = torch.ones(len(before), 2, 7, 4), torch.ones(len(before), 2, 7, 4)
    nothing = torch.full((len(before), 2, 1, 4), torch.nan)
    write_after(view, before, 1, nothing, nothing)
    for written in view:
        assert written.isfinite().all()
        for row, length in enumerate(before):
            assert not written[row, :, length].any()
            assert written[row, :, :length].all()
