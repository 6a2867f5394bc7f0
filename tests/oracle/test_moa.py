"""Mixture of Attentions equals the official code on every training vector, in value and gradient."""

from types import SimpleNamespace

import pytest
import torch

from moa_data.moa.drafters.mixture import MoADrafter, MoASizes
from moa_data.moa.drafters.training import Draws, TrainingStep
from moa_data.moa.formats.checkpoint import build_drafter
from moa_data.moa.formats.moa import MOA, sizes_from_official
from moa_data.moa.nn import masks
from moa_data.moa.nn.kv import pack_kv
from moa_data.tests.kit.drafters import encode_layers, forward_kl

from .official import everywhere, moa_forward
from .vectors import Vectors, drafter_weights, frozen_target, inputs_of, meta, names, set_of, target_config


def build(name: str, n_layers: int = 0) -> MoADrafter:
    """The drafter of the set that a file belongs to, float32."""
    weights = drafter_weights(f"{set_of(name)}moa_weights")
    sizes = sizes_from_official(weights, target_config(meta(name)["target"])).to_dict()
    own = {own_key(key): value for key, value in weights.items()}
    drafter = build_drafter(MoASizes.from_dict(sizes | {"target_layer_inference": n_layers}), own)
    assert isinstance(drafter, MoADrafter)
    return drafter


def own_key(official: str) -> str:
    return MOA.own_name(official)


@pytest.mark.parametrize("name", names("moa_batch"))
@torch.no_grad()
def test_memory(name: str) -> None:
    real, inputs = inputs_of(name)
    assert inputs.kv is not None
    expected = Vectors(name, real, unread=("attention_mask", "input_ids", "response_mask", "hidden_states"))
    keys, values = expected.starting_with("past_keys"), expected.starting_with("past_values")
    for key in keys:
        assert torch.equal(pack_kv(list(keys[key]), list(values[key])), expected["kv_stack"])
    drafter = build(name)
    layers = encode_layers(drafter, expected["kv_stack"])
    expected.close("lsa_out", layers)
    expected.close("lsa_mean", layers.mean(dim=2))
    for memory in (drafter.kv_to_hidden(layers.mean(dim=2)), drafter.encode_kv(expected["kv_stack"])):
        expected.close("ekv2e_out", memory)
    expected.all_read()


@pytest.mark.parametrize("name", names("moa_train_"))
def test_training(name: str) -> None:
    case = SimpleNamespace(**meta(name)["case"])
    n_layers = case.target_layer_inference
    real, inputs = inputs_of(name, n_layers)
    expected = Vectors(name, real, unread=("position_ids",))
    drafter, frozen = build(name, n_layers), frozen_target(name, n_layers)
    staircase = torch.zeros(len(real), dtype=torch.bool)
    if case.staircase_mask:
        staircase = expected["staircase_rows"].bool()
        probability = masks.staircase_drop_probability(case.epoch / case.max_epochs)
        assert torch.equal(expected["staircase_random"] >= probability, staircase)
        assert float(expected["stat.staircase_mask"]) == pytest.approx(float(staircase.float().mean()))
    draws = Draws(expected["every"] if case.variable_future_length else None, staircase)

    rounds = everywhere(draws, inputs.response_mask)
    everything = torch.ones_like(real)
    expected.equal("response_mask_noisy", rounds.drafted, everything)
    expected.equal("start_positions", rounds.context, everything)
    n_tokens = real.shape[1]
    allowed = masks.self_attention_mask(rounds.queries, rounds.context, rounds.staircase, n_tokens)
    expected.equal("sa_allowed", allowed.dense)
    expected.equal("ca_allowed", masks.Mask.up_to(rounds.context, n_tokens).dense)

    outputs = moa_forward(drafter, frozen, inputs, rounds)
    expected.close("sa_out", outputs.self_attention)
    expected.close("ca_out", outputs.cross_attention)
    expected.close("tli_in", outputs.entering)
    expected.close("tli_out", outputs.leaving)
    expected.close("features", outputs.features)
    logits = frozen.logits(outputs.features)
    expected.close("logits", logits)
    expected.close("plogq", -forward_kl(logits, frozen.logits(inputs.hidden)))

    terms = drafter.losses(frozen, TrainingStep(inputs, draws), rounds, outputs)
    expected.losses(terms)
    terms.total.backward()
    expected.gradients(drafter, own_key)
    expected.all_read()
