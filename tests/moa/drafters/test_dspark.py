"""Block-parallel drafters keep the contract with each head.

Blocks, losses and cuts by confidence follow their definitions.
"""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from moa_data.errors import DrafterError
from moa_data.evaluation.run import generate
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters import training as blocks
from moa_data.moa.drafters.block import BlockDrafter
from moa_data.moa.drafters.training import BlockDraws, Draws, LossWeights, TrainingStep
from moa_data.moa.nn.losses import d_pace_weights
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build, frozen_for
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.variants import quick_rows

from .contract import (
    CHAIN,
    PROMPTS,
    TREE,
    WINDOW,
    DrafterContract,
    batch_of,
    check_batch,
    check_samples,
    one_row,
    plain_answers,
)

SMALL: dict[str, Any] = {"fused_layers": (0, 1), "block_layers": 1, "block_size": 7}


class TestDSpark(DrafterContract):
    kind = "dspark"
    sizes = SMALL | {"markov_rank": 8, "block_layers": 2}
    learns_in = 12
    family, speed_shape, shape, tied_shape = WINDOW, CHAIN, TREE, TREE

    @pytest.fixture(scope="class")
    @classmethod
    def unsure(cls, taught: tuple[Target, Any]) -> tuple[Target, Any]:
        """Give the taught drafter a random confidence head.

        The drafter is often right, and its confidence has no relation to that.
        """
        drafter = copy.deepcopy(taught[1])
        with torch.no_grad():
            weight = drafter.confidence_head.proj.weight
            weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(4))
            drafter.confidence_head.proj.bias.fill_(0.5)
        return taught[0], drafter

    def test_chains_that_confidence_cuts_change_speed_alone(
        self, unsure: tuple[Target, Any]
    ) -> None:
        """Each row of a batch is cut separately; if all drafts are cut, a round is a plain step."""
        target, drafter = unsure
        together = check_batch(target, drafter, PROMPTS[:4], TreeShape(7, cut_below=0.4), 12)
        assert [got.tokens for got in together] == plain_answers(12)[:4]
        n_drafted = {got.stats.n_drafted / got.stats.n_target_calls for got in together}
        assert len(n_drafted) > 1
        assert min(n_drafted) < 6

    def test_samples_of_cut_chains_have_the_targets_distribution(
        self, unsure: tuple[Target, Any]
    ) -> None:
        """The distribution is the target's, because a cut depends only on earlier draws."""
        shape = TreeShape(4, cut_below=0.85)
        assert 0 < check_samples(*unsure, shape) < 4 * 600
        check_batch(*unsure, [[7, 8], [5, 9, 11]], shape, 9, SamplingConfig(0.9, top_k=12))


@pytest.mark.slow
class TestRecurrentHead(DrafterContract):
    kind = "dspark"
    sizes = SMALL | {"markov_rank": 8, "markov_head": "rnn", "fused_layers": (-1, 1)}


@pytest.mark.slow
class TestDFlash(DrafterContract):
    kind = "dflash"
    sizes = SMALL


KV: dict[str, Any] = {
    "context": "kv",
    "fused_layers": (1,),
    "block_layers": 1,
    "block_size": 7,
    "markov_rank": 8,
}
SEVERAL: dict[str, Any] = KV | {"fused_layers": (0, 1)}
MEMORY: dict[str, Any] = {
    "context": "memory",
    "fused_layers": None,
    "block_layers": 1,
    "block_size": 7,
}


@pytest.mark.slow
class TestContextOfKeysAndValues(DrafterContract):
    kind = "dspark"
    sizes = KV


@pytest.mark.slow
class TestContextOfSeveralLayers(DrafterContract):
    kind = "dspark"
    sizes = SEVERAL


@pytest.mark.slow
class TestContextOfMemory(DrafterContract):
    kind = "dspark"
    sizes = MEMORY | {"markov_rank": 8, "markov_head": "product"}


def test_a_chain_cut_by_a_confidence_that_is_not_there_is_refused() -> None:
    target = Target(build_model(num_hidden_layers=2))
    with pytest.raises(DrafterError):
        generate(
            target,
            build("dflash", target.model, **SMALL),
            [5, 6],
            max_new_tokens=9,
            tree=TreeShape(4, cut_below=0.2),
        )


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark": ("dspark", SMALL),
    "dflash": ("dflash", SMALL),
    "kv": ("dspark", KV),
    "several": ("dspark", SEVERAL | {"fused_layers": (0, 1, 2, 3), "block_layers": 2}),
    "memory": ("dspark", MEMORY | {"markov_head": "product"}),
}


@pytest.mark.parametrize(
    ("form", "d_pace"),
    quick_rows(
        itertools.product(FORMS, (None, 0.5)),
        [("dspark", 0.5), ("dflash", None), ("kv", None), ("several", 0.5), ("memory", None)],
    ),
)
def test_blocks_of_a_text_equal_rounds_one_by_one(form: str, d_pace: float | None) -> None:
    """The loss of a batch is the sum over its blocks, each with its own context only.

    Drafts are weighted by position in the block. Rows with fewer blocks have padding.
    """
    model = build_model()
    kind, sizes = FORMS[form]
    drafter = build(kind, model, **sizes)
    frozen = frozen_for(drafter, model)
    inputs, n_drafts = batch_of(drafter, model, 24), drafter.config.n_drafts
    chosen = BlockDraws(n_drafts, max_anchors=5, position_decay=2.5)
    draws = Draws(None, torch.zeros(2, dtype=torch.bool), seeds=(3, 4), blocks=chosen)
    anchors, valid = blocks.draw_anchors(inputs.response_mask, draws)
    assert valid.sum(dim=1).tolist() == [5, 5]
    padded = torch.nn.functional.pad(inputs.response_mask, (0, 9))
    assert torch.equal(anchors, blocks.draw_anchors(padded, draws)[0]), "whatever follows a row"
    weights = LossWeights(
        forward_kl=0.5, cross_entropy=0.25, l1=0.125, confidence=0.75, d_pace=d_pace
    )
    both = drafter.objective(frozen, TrainingStep(inputs, draws, weights, denominator=2.0))
    alone, n_weight = 0.0, 0.0
    for row in range(2):
        for anchor in anchors[row].tolist():
            one = replace(chosen, anchors=torch.tensor([[anchor]]))
            own = one_row(inputs, row, 24)
            unseen = torch.arange(24)[None, :, None] >= anchor
            own = replace(
                own,
                layer_outputs=tuple(
                    states.masked_fill(unseen, 9.0) for states in own.layer_outputs
                ),
            )
            own.kv = None if own.kv is None else own.kv.masked_fill(unseen[..., None], 9.0)
            step = TrainingStep(
                own, Draws(None, torch.zeros(1, dtype=torch.bool), blocks=one), weights, 2.0
            )
            alone += drafter.objective(frozen, step)["loss"].item()
            n_weight += float(drafter.loss_positions(own.response_mask, step.draws).sum())
    assert both["loss"].item() == pytest.approx(alone, rel=1e-5)
    assert float(drafter.loss_positions(inputs.response_mask, draws).sum()) == pytest.approx(
        n_weight
    )
    other = replace(draws, seeds=(5, 6))
    assert anchors.tolist() != blocks.draw_anchors(inputs.response_mask, other)[0].tolist(), (
        "drawn anew"
    )


def test_d_pace_weighs_drafts_by_what_the_drafter_says_of_them() -> None:
    """The loss has weights that are computed separately for each block."""
    model = build_model()
    drafter = build("dspark", model, **SMALL)
    frozen, inputs, n_drafts = (
        frozen_for(drafter, model),
        batch_of(drafter, model, 24),
        drafter.config.n_drafts,
    )
    anchors = torch.tensor([[13, 17], [4, -1]])

    draws = Draws(
        None, torch.zeros(2, dtype=torch.bool), blocks=BlockDraws(n_drafts, anchors=anchors)
    )
    weights = LossWeights(forward_kl=0.0, cross_entropy=1.0, l1=0.0, confidence=0.0, d_pace=0.5)
    got = drafter.objective(frozen, TrainingStep(inputs, draws, weights, denominator=1.0))[
        "loss"
    ].item()
    valid = anchors >= 0
    hidden = drafter.hidden_at_anchors(frozen, inputs, anchors.clamp(min=0), valid)
    features = drafter.make_features(
        hidden, drafter.tokens_before(inputs.tokens, anchors.clamp(min=0))
    )
    labels = (blocks.draft_positions(anchors, n_drafts) + 1).clamp(0, 23)
    rows = torch.arange(2)[:, None, None]
    logits = drafter.draft_logits(frozen, features)
    wrong = -logits.log_softmax(dim=-1).gather(-1, inputs.tokens[rows, labels][..., None])[..., 0]
    supervised = (
        blocks.draft_weights(
            inputs.response_mask, anchors.clamp(min=0), valid, BlockDraws(n_drafts)
        )
        > 0
    )
    expected = (d_pace_weights(wrong, supervised, 0.5) * wrong).sum().item()
    assert got == pytest.approx(expected, rel=1e-5)


def test_no_block_reaches_into_another_answer() -> None:
    response = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0]])
    draws = Draws(None, torch.zeros(1, dtype=torch.bool), blocks=BlockDraws(3, position_decay=1.0))
    anchors, valid = blocks.draw_anchors(response, draws)
    assert anchors.tolist() == [[1, 2, 5]]
    weights = blocks.draft_weights(response, anchors, valid, draws.blocks)
    assert (weights > 0).tolist() == [
        [[True, True, False], [True, False, False], [True, False, False]]
    ]
    assert weights[0, 0, 1].item() == pytest.approx(0.36788, abs=1e-5)
    assert BlockDrafter.loss_positions(response, draws)[0].tolist() == pytest.approx(
        [0, 1, 1.36788, 0, 0, 1, 0, 0]
    )
    mask = blocks.block_mask(anchors, valid, 2, 8).dense[0]
    assert mask[:, :8].sum(dim=1).tolist() == [1, 1, 2, 2, 5, 5], "strictly before the anchor"
    assert torch.equal(mask[:, 8:], torch.block_diag(*[torch.ones(2, 2)] * 3).bool())
