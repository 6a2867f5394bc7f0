"""EAGLE-3 keeps the contract; training-time test equals an unrolled drafter and decoding."""

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from moa_data.errors import DrafterError
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.drafters import eagle3
from moa_data.moa.drafters.eagle3 import STEP_DECAY, Eagle3Drafter
from moa_data.moa.drafters.training import LossWeights, TrainingInputs, TrainingStep
from moa_data.moa.formats.checkpoint import load_drafter, save_drafter
from moa_data.moa.nn.losses import d_pace_weights
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import (
    NO_DRAWS,
    assert_loss,
    build_eagle3,
    forward_kl,
    stored,
    token_counts,
    weight_of_positions,
)
from moa_data.tests.kit.models import FAMILIES, SIZES, build_model
from moa_data.tests.kit.variants import quick_rows

from .contract import CLOSE, STOPPING, TREE, DrafterContract, ForcedDrafting, batch_of, one_row

VOCABULARY = SIZES["vocab_size"]


class TestEagle3(DrafterContract):
    kind = "eagle3"
    close = 5e-5
    sizes = {"fused_layers": (0, 1), "test_time_steps": 3}
    learns_in = 12
    speed_shape, tied_shape = STOPPING, TREE


@pytest.mark.slow
class TestSmallVocabulary(DrafterContract):
    """Only thirty tokens can be drafted; sampling and decoding still use all. All norms are on."""

    kind = "eagle3"
    close = 5e-5
    sizes = {
        "fused_layers": (0, 1), "test_time_steps": 3, "draft_vocabulary": 30, "fc_norm": True,
        "norm_output": True, "norm_before_fc": True, "norm_before_residual": True,
    }  # fmt: skip


def unrolled(
    drafter: Any, frozen: FrozenTarget, inputs: TrainingInputs, row: int, root: int, n_steps: int
) -> Tensor:
    """Compute the features of one round token by token with full attention: [n_steps, E]."""
    block, features = drafter.midlayer, []
    embeddings = frozen.embed(inputs.tokens[row : row + 1])
    fused = drafter.true_features(
        torch.cat([states[row : row + 1] for states in inputs.layer_outputs], dim=-1)
    )
    stream = torch.cat((embeddings[:, 1 : root + 1], fused[:, :root]), dim=-1)  # slots 0..root-1
    for step in range(n_steps):
        rotation = drafter.rotary(torch.arange(root + step)[None])
        causal = torch.ones(1, root + step, root + step, dtype=torch.bool).tril()
        attended = block(stream, rotation, *block.keys_values(stream, rotation), causal)
        features.append(drafter.fed_back(attended[:, -1]))
        if step < n_steps - 1:
            following = torch.cat((embeddings[:, root + step + 1], features[-1]), dim=-1)
            stream = torch.cat((stream, following[:, None]), dim=1)
    return torch.cat(features)


@pytest.mark.parametrize(
    ("family", "draft_vocabulary", "d_pace"),
    quick_rows(
        itertools.product(FAMILIES, (None, 20), (None, 0.3)),
        [("llama", None, None), ("qwen3", 20, 0.3)],
    ),
)
def test_training_time_test_equals_rounds_one_by_one(
    family: str, draft_vocabulary: int | None, d_pace: float | None
) -> None:
    """Values and gradients are equal; decoding has the same values.

    A round ends at the end of its response.
    """
    model = build_model(family, num_hidden_layers=2)
    frozen, n_steps = FrozenTarget.from_model(model), 4
    norms = dict.fromkeys(
        ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"),
        draft_vocabulary is not None,
    )
    drafter = build_eagle3(
        model, draft_vocabulary=draft_vocabulary, test_time_steps=n_steps, **norms
    )
    inputs = batch_of(drafter, model, 22)
    total, first, n_rounds = torch.zeros(()), torch.zeros(()), 0
    for row in range(2):
        for root in range(1, 22):
            n_alive = 0
            while (
                n_alive < n_steps
                and root + n_alive < 22
                and inputs.response_mask[row, root + n_alive]
            ):
                n_alive += 1
            if not n_alive:
                continue
            n_rounds += 1
            features = unrolled(drafter, frozen, inputs, row, root, n_alive)
            if root % 4 == 0:
                stepped = ForcedDrafting(drafter, Target(model)).chain(
                    inputs.tokens[row].tolist(), root, n_alive - 1
                )
                torch.testing.assert_close(stepped, features.detach(), rtol=0, atol=CLOSE)
            goal = frozen.logits(inputs.hidden[row, root : root + n_alive])
            logits = drafter.draft_logits(frozen, features)
            kl, weights = forward_kl(logits, goal), STEP_DECAY ** torch.arange(n_alive)
            if d_pace is not None:
                labels = inputs.tokens[row, (root + 1 + torch.arange(n_alive)).clamp(max=21)]
                wrong = -logits.log_softmax(dim=-1)[torch.arange(n_alive), labels]
                weights = d_pace_weights(wrong, torch.ones(n_alive, dtype=torch.bool), d_pace)
            total = total + (kl * weights).sum()
            first = first + kl[0].detach()
    step = TrainingStep(inputs, NO_DRAWS, LossWeights(forward_kl=0.5, d_pace=d_pace), 3.0)
    terms = assert_loss(drafter, frozen, step, 0.5 * total / 3.0)
    assert (
        n_rounds
        == pytest.approx(weight_of_positions(drafter, frozen, step))
        == int(drafter.loss_positions(inputs.response_mask, NO_DRAWS).sum())
        > 20
    )
    torch.testing.assert_close(terms["forward_kl"], first / 3.0, rtol=1e-5, atol=1e-6)


def test_the_norms_of_speculators() -> None:
    """One norm precedes the fusing layer; the residual begins after the norm of the features.

    The first norm covers all fused outputs together.
    """
    model = build_model()
    drafter = build_eagle3(model, norm_before_fc=True, norm_before_residual=True)
    states, embedding = torch.randn(1, 1, 96), torch.randn(1, 1, 48)
    mean_square = states.square().mean(dim=-1, keepdim=True)
    scaled = states / (mean_square + drafter.config.norm_eps).sqrt() * drafter.input_norm.weight
    fused = drafter.true_features(states)
    torch.testing.assert_close(fused, scaled @ drafter.fc.weight.T)
    block = drafter.midlayer
    normed = block.hidden_norm(fused)
    combined, attention = (
        torch.cat((block.input_layernorm(embedding), normed), dim=-1),
        block.self_attn,
    )
    # The attention output of a single token is its value.
    value = attention.v_proj(combined).unflatten(-1, (2, 12)).repeat_interleave(2, dim=2).flatten(2)
    x = normed + attention.o_proj(value)
    expected = x + block.mlp(block.post_attention_layernorm(x))
    stream, rotation = torch.cat((embedding, fused), dim=-1), drafter.rotary(torch.arange(1)[None])
    found = block(stream, rotation, *block.keys_values(stream, rotation), None)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("n_rows", [1, 2])
def test_attention_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch, n_rows: int) -> None:
    """Parts of one row give the same loss and gradient, also in a batch of one row."""
    model = build_model(num_hidden_layers=2)
    frozen, drafter = FrozenTarget.from_model(model), build_eagle3(model, test_time_steps=3)
    inputs = batch_of(drafter, model, 22)
    inputs = inputs if n_rows > 1 else one_row(inputs, 0, 22)
    counted = Mock(side_effect=eagle3._attend)
    monkeypatch.setattr(eagle3, "_attend", counted)

    def gradients() -> tuple[Tensor, ...]:
        total = drafter.objective(frozen, TrainingStep(inputs, NO_DRAWS, denominator=1.0))["loss"]
        return total.detach(), *torch.autograd.grad(total, list(drafter.parameters()))

    whole = gradients()
    n_whole = counted.call_count
    monkeypatch.setattr("moa_data.moa.drafters.eagle3._SCORE_BYTES", 1)
    for one, other in zip(whole, gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert counted.call_count > 3 * n_whole


def test_a_long_prompt_in_pieces_hands_over_all_layer_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target(build_model("mistral", num_hidden_layers=2))
    drafter, tokens = build_eagle3(target.model), torch.randint(4, VOCABULARY, (1, 30))
    expected = stored(drafter, target.model, tokens, torch.ones(1, 30))
    monkeypatch.setattr("moa_data.moa.targets.live._CHUNK_TOKENS", 7)
    cache = target.new_cache()
    with pytest.raises(DrafterError):
        cache.take_layer_outputs()
    DrafterProposer(target, drafter).begin(cache)
    target.forward(tokens, cache)
    torch.testing.assert_close(
        cache.take_layer_outputs(), torch.cat(expected.layer_outputs, dim=-1)
    )
    assert not any(layer._forward_hooks for layer in target.model.model.layers)
    with pytest.raises(DrafterError):
        cache.take_layer_outputs()


def test_draft_vocabulary_is_the_most_frequent_tokens(tmp_path: Path) -> None:
    """The maps are not weights, so that a cast keeps their dtype."""
    model = build_model()
    frozen, counts = FrozenTarget.from_model(model), token_counts()
    drafter = build_eagle3(model, draft_vocabulary=20)
    tokens = drafter.draft_tokens
    assert tokens.tolist() == sorted(
        sorted(range(VOCABULARY), key=lambda token: (-counts[token], token))[:20]
    )
    assert drafter.t2d.nonzero()[:, 0].tolist() == tokens.tolist()
    features = torch.randn(3, 2, SIZES["hidden_size"])
    with torch.no_grad():
        logits = drafter.draft_logits(frozen, features)
        assert torch.equal(logits[..., tokens], drafter.lm_head(drafter.norm(features)))
    assert torch.isinf(logits).sum() == 3 * 2 * (VOCABULARY - 20)
    full = build_eagle3(model)
    assert full.draft_tokens is None
    assert full.t2d.all()
    assert torch.equal(full.lm_head.weight, model.lm_head.weight)
    save_drafter(drafter, tmp_path)
    half = load_drafter(tmp_path, torch.bfloat16)
    assert isinstance(half, Eagle3Drafter)
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(half.d2t, drafter.d2t)
