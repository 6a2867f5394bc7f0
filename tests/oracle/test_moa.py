"""The drafter equals the official code on every training vector of the oracle folder, in value and gradient."""

import json
import os
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from moa_data.moa.drafters.mixture import moa_objective
from moa_data.moa.drafters.mixture_sizes import MoASizes
from moa_data.moa.drafters.rounds import Draws
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.formats.checkpoint import build_drafter
from moa_data.moa.formats.moa import from_official_keys, sizes_from_official, to_official_keys
from moa_data.moa.nn import kv as kv_layout
from moa_data.moa.nn import losses, masks
from moa_data.moa.target.bundle import FrozenTarget

ORACLE = Path(os.environ.get("MOA_ORACLE", Path(__file__).parents[2] / ".." / "shared" / "oracle")).resolve()
CASES = sorted(file.stem for file in ORACLE.glob("*moa_train_*.safetensors"))
BATCHES = sorted(file.stem for file in ORACLE.glob("*moa_batch.safetensors"))
ACTIVATION, LOSS, GRADIENT = 2e-5, 1e-5, 1e-4


def test_oracle_folder_is_there():
    if not CASES or not BATCHES:
        message = f"NO OFFICIAL VECTORS in {ORACLE}: the drafter was NOT checked; set MOA_ORACLE to their folder."
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    assert len(CASES) >= 1


@cache
def tensors(name):
    return load_file(ORACLE / f"{name}.safetensors")


@cache
def meta(name):
    return json.loads((ORACLE / f"{name}.json").read_text())["meta"]


def target_config(sizes):
    sizes = dict(sizes)
    sizes["rope_parameters"] = {"rope_theta": sizes.pop("rope_theta"), "rope_type": "default"}
    return LlamaConfig(**sizes)


def set_prefix(name):
    return name.split("moa_")[0]


def build(name, n_target_layers):
    """Drafter and frozen target from the weights beside a vector file, float32."""
    prefix = set_prefix(name)
    weights = tensors(f"{prefix}moa_weights")
    config = target_config(meta(name)["target"])
    own = {k: v for k, v in weights.items() if not k.startswith(("model.", "lm_head."))}
    sizes = sizes_from_official(own, config).to_dict() | {"target_layer_inference": n_target_layers}
    drafter = build_drafter(MoASizes.from_dict(sizes), from_official_keys(own))
    frozen_weights = {k.removeprefix("model."): v for k, v in weights.items() if k.startswith(("model.", "lm_head."))}
    return drafter, FrozenTarget(config, frozen_weights, n_target_layers), own


def inputs_of(name, n_target_layers):
    batch = tensors(f"{set_prefix(name)}moa_batch")
    hidden = batch["hidden_states"]
    return batch, TrainingInputs(
        tokens=batch["input_ids"],
        response_mask=batch["response_mask"],
        kv=batch["kv_stack"],
        hidden=hidden[-1],
        entering_hidden=hidden[-1 - n_target_layers] if n_target_layers else None,
    )


def close(got, expected, real, tolerance=ACTIVATION):
    """Compare the positions with attention_mask == 1."""
    torch.testing.assert_close(got[real], expected[real], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", BATCHES)
def test_memory_side(name):
    batch = tensors(name)
    real = batch["attention_mask"].bool()
    packed = kv_layout.pack_kv(list(batch["past_keys"]), list(batch["past_values"]))
    assert torch.equal(packed, batch["kv_stack"])
    drafter, _, _ = build(name, 0)
    with torch.no_grad():
        layers = drafter.encode_layers(packed)
        close(layers, batch["lsa_out"], real)
        close(layers.mean(dim=2), batch["lsa_mean"], real)
        close(drafter.kv_to_hidden(layers.mean(dim=2)), batch["ekv2e_out"], real)
        close(drafter.encode_memory(packed), batch["ekv2e_out"], real)


@pytest.mark.parametrize("name", CASES)
def test_training_case(name):
    case, expected = SimpleNamespace(**meta(name)["case"]), tensors(name)
    n_layers = case.target_layer_inference
    batch, inputs = inputs_of(name, n_layers)
    real = batch["attention_mask"].bool()
    drafter, frozen, own = build(name, n_layers)
    step_bound = expected["every"] if case.variable_future_length else None
    no_rows = torch.zeros(real.shape[0], dtype=torch.bool)
    draws = Draws(step_bound, expected["staircase_rows"].bool() if case.staircase_mask else no_rows)
    if case.staircase_mask:
        kept = expected["staircase_random"] < masks.staircase_drop_probability(case.epoch / case.max_epochs)
        assert torch.equal(~kept, draws.staircase_rows)

    drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound)
    assert torch.equal(drafted, expected["response_mask_noisy"].bool())
    context = masks.last_context(drafted)
    assert torch.equal(context, expected["start_positions"])
    n_tokens = real.shape[1]
    queries = torch.arange(n_tokens).expand_as(context)
    sa_allowed = masks.self_attention_mask(queries, context, draws.staircase_rows[:, None], n_tokens)
    assert torch.equal(sa_allowed[real], expected["sa_allowed"].bool()[real])
    ca_allowed = masks.cross_attention_mask(context, n_tokens)
    assert torch.equal(ca_allowed[real], expected["ca_allowed"].bool()[real])

    terms, outputs = moa_objective(drafter, frozen, inputs, draws, official=True)
    close(outputs.self_attention, expected["sa_out"], real)
    close(outputs.cross_attention, expected["ca_out"], real)
    if n_layers:
        close(outputs.target_layers_input, expected["tli_in"], real)
        close(outputs.target_layers_output, expected["tli_out"], real)
    close(outputs.features, expected["features"], real)
    logits = frozen.logits(outputs.features)
    close(logits, expected["logits"], real)
    close(-losses.forward_kl(logits, frozen.logits(inputs.hidden)), expected["plogq"], real)

    assert terms.forward_kl.item() == pytest.approx(expected["stat.forward_KL"].item(), abs=LOSS)
    assert terms.feature.item() == pytest.approx(expected["stat.feature_loss"].item(), abs=LOSS)
    if n_layers:
        assert terms.entering_feature.item() == pytest.approx(expected["stat.prev_feature_loss"].item(), abs=LOSS)
    assert terms.total.item() == pytest.approx(expected["loss"].item(), abs=LOSS)

    terms.total.backward()
    gradients = to_official_keys({k: p.grad for k, p in drafter.named_parameters()})
    assert set(gradients) == set(own)
    for key, gradient in gradients.items():
        goal = expected[f"grad.{key}"]
        torch.testing.assert_close(gradient, goal, rtol=0, atol=GRADIENT * goal.abs().max().item(), msg=key)
