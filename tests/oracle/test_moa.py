"""Mixture of Attentions equals the official code on every vector and rewrites its checkpoints."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.drafters.training import Draws, TrainingStep
from moa_data.moa.formats.checkpoint import LAYOUTS, write_layout
from moa_data.moa.nn import masks
from moa_data.moa.nn.kv import pack_kv
from moa_data.tests.kit.drafters import encode_layers, forward_kl

from . import vectors
from .official import everywhere, moa_forward
from .vectors import Vectors, inputs_of, meta, names, set_of, tensors


def build(folder: Path, name: str, n_layers: int = 0) -> MoADrafter:
    """Build the float32 drafter of the set that a file belongs to."""
    drafter = vectors.load_official(
        folder,
        vectors.weights_of(f"{set_of(name)}moa_weights", of_target=False),
        vectors.target_config(name),
    )
    assert isinstance(drafter, MoADrafter)
    drafter.config = replace(drafter.config, target_layer_inference=n_layers)
    return drafter


@pytest.mark.parametrize("name", [*names("moa_weights"), *names("moa_trained_drafter_weights")])
def test_checkpoint(tmp_path: Path, name: str) -> None:
    weights, config = vectors.weights_of(name, of_target=False), vectors.target_config(name)
    drafter = vectors.load_official(tmp_path / "official", weights, config)
    assert not (refused := LAYOUTS["moa"].refusals(drafter.config)), refused
    write_layout(drafter, LAYOUTS["moa"], tmp_path / "again", target={"config": config})
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", names("moa_batch"))
@torch.no_grad()
def test_encoded_kv(tmp_path: Path, name: str) -> None:
    real, _ = inputs_of(name)
    expected = Vectors(
        tensors(name), real, ("attention_mask", "input_ids", "response_mask", "hidden_states")
    )
    keys, values = expected.starting_with("past_keys"), expected.starting_with("past_values")
    for key in keys:
        assert torch.equal(pack_kv(list(keys[key]), list(values[key])), expected["kv_stack"])
    drafter = build(tmp_path, name)
    layers = encode_layers(drafter, expected["kv_stack"])
    expected.close("lsa_out", layers)
    expected.close("lsa_mean", layers.mean(dim=2))
    for encoded in (
        drafter.kv_to_hidden(layers.mean(dim=2)),
        drafter.encode_kv(expected["kv_stack"]),
    ):
        expected.close("ekv2e_out", encoded)
    expected.all_read()


@pytest.mark.parametrize("name", names("moa_train_"))
def test_training(tmp_path: Path, name: str) -> None:
    case = SimpleNamespace(**meta(name)["case"])
    n_layers = case.target_layer_inference
    real, inputs = inputs_of(name, n_layers)
    expected = Vectors(tensors(name), real, ("position_ids",))
    drafter, frozen = build(tmp_path, name, n_layers), vectors.frozen_target(name, n_layers)
    staircase = torch.zeros(len(real), dtype=torch.bool)
    if case.staircase_mask:
        staircase = expected["staircase_rows"].bool()
        probability = masks.staircase_drop_probability(case.epoch / case.max_epochs)
        assert torch.equal(expected["staircase_random"] >= probability, staircase)
        assert float(expected["stat.staircase_mask"]) == pytest.approx(
            float(staircase.float().mean())
        )
    draws = Draws(expected["every"] if case.variable_future_length else None, staircase)

    rounds, n_tokens = everywhere(draws, inputs.response_mask), real.shape[1]
    expected.equal("response_mask_noisy", rounds.drafted, ...)
    expected.equal("start_positions", rounds.context, ...)
    allowed = masks.self_attention_mask(rounds.queries, rounds.context, rounds.staircase, n_tokens)
    expected.equal("sa_allowed", allowed.dense)
    expected.equal("ca_allowed", masks.Mask.up_to(rounds.context, n_tokens).dense)

    seen: dict[str, Tensor] = {}
    for key, module in (("sa_out", drafter.self_attention), ("ca_out", drafter.cross_attention)):
        module.register_forward_hook(lambda _, __, out, key=key: seen.update({key: out}))
    entering, leaving, features = moa_forward(drafter, frozen, inputs, rounds)
    logits = frozen.logits(features)
    found = seen | {"tli_in": entering, "tli_out": leaving, "features": features, "logits": logits}
    for key, got in (found | {"plogq": -forward_kl(logits, frozen.logits(inputs.hidden))}).items():
        expected.close(key, got)

    terms = drafter.losses(frozen, TrainingStep(inputs, draws), rounds, entering, features)
    expected.losses(terms)
    terms["loss"].backward()
    assert expected.gradients(drafter, LAYOUTS["moa"].own_name)
    expected.all_read()
