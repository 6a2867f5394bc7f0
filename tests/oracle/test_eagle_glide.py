"""EAGLE and GLIDE equal the official code on every training vector, in value and gradient."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moa_data.moa.drafters.eagle import EagleDrafter
from moa_data.moa.drafters.glide import GlideDrafter, GlideSizes, block_context
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.formats.checkpoint import LAYOUTS, build_drafter
from moa_data.moa.nn import masks
from moa_data.moa.nn.kv import pack_kv, unpack_kv
from moa_data.moa.nn.layers import rotate
from moa_data.moa.targets.facts import TargetFacts
from moa_data.tests.kit.drafters import forward_kl

from .official import eagle_objective, glide_features, glide_objective, rotated_twice
from .vectors import (
    Vectors,
    frozen_target,
    inputs_of,
    load_official,
    meta,
    names,
    target_config,
    tensors,
)


@pytest.mark.parametrize("name", names("eagle_train_"))
def test_eagle(tmp_path: Path, name: str) -> None:
    settings, frozen = meta(name), frozen_target(name)
    real, inputs = inputs_of(name)
    expected = Vectors(tensors(name), real[:, 1:])
    drafter = load_official(tmp_path, expected.starting_with("weight."), target_config(name))
    assert isinstance(drafter, EagleDrafter)
    noise = torch.zeros(2, *inputs.hidden.shape)
    if settings["training_noise"]:
        drawn = torch.stack((expected["noise_hidden"], expected["noise_emb"]))
        noise = (drawn - 0.5) * settings["noise_uniform_scale"]
        torch.manual_seed(settings["torch_manual_seed"])
        assert torch.equal(torch.rand_like(inputs.hidden), drawn[0])
    hidden, embeddings = inputs.hidden + noise[0], frozen.embed(inputs.tokens) + noise[1]

    combined = drafter.combine(embeddings[:, 1:], hidden[:, :-1])
    features = drafter(combined, torch.arange(combined.shape[1]).expand(len(combined), -1))
    logits = frozen.logits(features)
    found = {
        "fc_in": torch.cat((embeddings[:, 1:], hidden[:, :-1]), dim=-1),
        "fc_out": combined,
        "features": features,
    }
    for key, got in found.items():
        # The official code has one more slot, with zeros for the token after the last one.
        expected.close(key, F.pad(got, (0, 0, 0, 1)), F.pad(real[:, 1:], (0, 1)))
    expected.close("logits", logits)
    expected.close("plogq", -forward_kl(logits, frozen.logits(hidden[:, 1:])))
    expected.equal("response_mask_shifted", inputs.response_mask[:, 1:], ...)

    terms = eagle_objective(drafter, frozen, inputs, noise)
    expected.losses(terms)
    terms["loss"].backward()
    assert expected.gradients(drafter, LAYOUTS["moa-eagle"].own_name)
    expected.all_read()


def glide_case(name: str) -> tuple[Vectors, GlideDrafter, TrainingInputs, Tensor]:
    """Return a file's vectors, drafter, row of the batch, and mask of that row's real positions."""
    sizes, config = meta(name)["model_config"], target_config(name)
    real, inputs = inputs_of(name)
    row = slice(meta(name)["row"], meta(name)["row"] + 1)
    real, vectors = real[row], Vectors(tensors(name), real[row])
    own = GlideSizes.from_target(
        TargetFacts.of(config),
        self_attention_kv_heads=sizes["self_attention_num_key_value_heads"],
        self_attention_mlp_width=sizes["self_attention_intermediate_size"],
        block_size=sizes["block_size"],
    )
    drafter = build_drafter(own, vectors.starting_with("weight."))
    assert isinstance(drafter, GlideDrafter)
    # In the official code all padding has the last real position, and a query without visible keys
    # also sees padding.
    keys, values = unpack_kv(inputs.required_kv()[row, :, -1], own.attended[1])
    shift = (real.cumsum(dim=1) - 1) - torch.arange(real.shape[1])
    kv = pack_kv([rotate(keys, drafter.rotary(shift))], [values])
    return (
        vectors,
        drafter,
        TrainingInputs(inputs.tokens[row], inputs.response_mask[row], kv, inputs.hidden[row]),
        real,
    )


@pytest.mark.parametrize("name", names("glide_train_"))
def test_glide(name: str) -> None:
    frozen, (expected, drafter, inputs, _) = frozen_target(name), glide_case(name)
    seen: dict[str, Tensor] = {}
    for key, module in (
        ("sa_attn_out", drafter.self_attention.self_attn),
        ("ca_out", drafter.cross_attention),
    ):
        module.register_forward_hook(lambda _, __, out, key=key: seen.update({key: out}))
    features, allowed = glide_features(drafter, frozen, inputs)
    expected.equal("ca_allowed", allowed, ...)
    found = seen | {
        "ca_in": frozen.embed(inputs.tokens) + seen["sa_attn_out"],
        "features": features,
    }
    for key, got in (found | {"logits": frozen.logits(features)}).items():
        expected.close(key, got)
    terms = glide_objective(frozen, inputs, features)
    expected.losses(terms)
    terms["loss"].backward()
    assert expected.gradients(drafter)
    expected.all_read()


@pytest.mark.parametrize("name", names("glide_train_"))
@torch.no_grad()
def test_the_official_glide_differs_by_rotation_and_first_block_alone(name: str) -> None:
    vectors, drafter, inputs, real = glide_case(name)
    kv, official = inputs.required_kv(), vectors["features"]
    frozen, block, n_tokens, last = (
        frozen_target(name),
        drafter.config.block_size,
        real.shape[1],
        int(real.sum()),
    )
    positions = torch.arange(n_tokens)[None]
    seen = masks.Mask.up_to(block_context(positions, block).clamp(min=0), n_tokens)
    ours = drafter(frozen, inputs.tokens, rotated_twice(drafter, kv), seen, positions)
    assert not torch.allclose(ours[:, :block], official[:, :block], atol=1e-3)
    torch.testing.assert_close(ours[:, block:last], official[:, block:last], rtol=0, atol=2e-5)
    once = drafter(frozen, inputs.tokens, kv, seen, positions)
    torch.testing.assert_close(
        once[:, 1], ours[:, 1], rtol=0, atol=2e-5, msg="position 0 is not rotated"
    )
    assert not torch.allclose(once[:, block:last], ours[:, block:last], atol=1e-3)
