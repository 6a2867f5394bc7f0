"""EAGLE and GLIDE equal the official code on every training vector, in value and gradient."""

import pytest
import torch
from torch import Tensor

from moa_data.moa.drafters.eagle import EagleDrafter, EagleSizes
from moa_data.moa.drafters.glide import GlideDrafter, GlideSizes, block_context
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.formats.checkpoint import build_drafter
from moa_data.moa.nn import masks
from moa_data.moa.nn.kv import pack_kv, unpack_kv
from moa_data.moa.nn.layers import rotate
from moa_data.tests.kit.drafters import forward_kl

from .official import eagle_objective, glide_features, glide_objective, rotated_twice
from .vectors import Vectors, frozen_target, inputs_of, meta, names, target_config


def eagle_key(official: str) -> str:
    """Official key of a weight -> ours."""
    if official == "spec_model_fc.weight":
        return "fc.weight"
    rest = official.removeprefix("spec_model.")
    return f"layers.{rest}" if rest[0].isdigit() else f"layers.0.{rest}"


def build_eagle(name: str, vectors: Vectors) -> EagleDrafter:
    sizes = meta(name)["model_config"]
    drafter = build_drafter(
        EagleSizes.from_target(
            target_config(meta(name)["target"]),
            eagle_layers=sizes["number_of_layers"],
            self_attention_kv_heads=sizes["drafter_num_key_value_heads"],
            self_attention_mlp_width=sizes["drafter_intermediate_size"],
        ),
        {eagle_key(key): value for key, value in vectors.starting_with("weight.").items()},
    )
    assert isinstance(drafter, EagleDrafter)
    return drafter


@pytest.mark.parametrize("name", names("eagle_train_"))
def test_eagle(name: str) -> None:
    settings, frozen = meta(name), frozen_target(name)
    real, inputs = inputs_of(name)
    expected = Vectors(name, real[:, 1:])
    drafter = build_eagle(name, expected)
    noise = torch.zeros(2, *inputs.hidden.shape)
    if settings["training_noise"]:
        drawn = torch.stack((expected["noise_hidden"], expected["noise_emb"]))
        noise = (drawn - 0.5) * settings["noise_uniform_scale"]
        torch.manual_seed(settings["torch_manual_seed"])
        assert torch.equal(torch.rand_like(inputs.hidden), drawn[0])
    hidden, embeddings = inputs.hidden + noise[0], frozen.embed(inputs.tokens) + noise[1]

    # The official code has one slot more, with zeros for the token behind the last.
    one_more = torch.nn.functional.pad(real[:, 1:], (0, 1))
    joined = drafter.join(embeddings[:, 1:], hidden[:, :-1])
    features = drafter(joined)
    logits = frozen.logits(features)
    found = {"fc_in": torch.cat((embeddings[:, 1:], hidden[:, :-1]), dim=-1), "fc_out": joined, "features": features}
    for key, got in found.items():
        expected.close(key, torch.nn.functional.pad(got, (0, 0, 0, 1)), one_more)
    expected.close("logits", logits)
    expected.close("plogq", -forward_kl(logits, frozen.logits(hidden[:, 1:])))
    expected.equal("response_mask_shifted", inputs.response_mask[:, 1:], torch.ones_like(real[:, 1:]))

    terms = eagle_objective(drafter, frozen, inputs, noise)
    expected.losses(terms)
    assert terms.n_positions == int(inputs.response_mask[:, 1:].sum())
    terms.total.backward()
    expected.gradients(drafter, eagle_key)
    expected.all_read()


def build_glide(name: str, vectors: Vectors) -> tuple[GlideDrafter, TrainingInputs, Tensor]:
    """Drafter, the row of the batch that the vectors belong to, and which of its positions are real."""
    settings, sizes = meta(name), meta(name)["model_config"]
    config = target_config(settings["target"])
    drafter = build_drafter(
        GlideSizes.from_target(
            config,
            self_attention_kv_heads=sizes["self_attention_num_key_value_heads"],
            self_attention_mlp_width=sizes["self_attention_intermediate_size"],
            block_size=sizes["block_size"],
        ),
        vectors.starting_with("weight."),
    )
    assert isinstance(drafter, GlideDrafter)
    real, inputs = inputs_of(name)
    assert inputs.kv is not None
    row = slice(settings["row"], settings["row"] + 1)
    real = real[row]
    # In the official code all padding stands at the last real position, and a query without a key sees padding too.
    assert config.num_key_value_heads is not None
    keys, values = unpack_kv(inputs.kv[row, :, -1], config.num_key_value_heads)
    shift = (real.cumsum(dim=1) - 1) - torch.arange(real.shape[1])
    kv = pack_kv([rotate(keys, drafter.rotary(shift))], [values])
    return drafter, TrainingInputs(inputs.tokens[row], inputs.response_mask[row], kv, inputs.hidden[row]), real


@pytest.mark.parametrize("name", names("glide_train_"))
def test_glide(name: str) -> None:
    real, _ = inputs_of(name)
    row = meta(name)["row"]
    expected, frozen = Vectors(name, real[row : row + 1]), frozen_target(name)
    drafter, inputs, real = build_glide(name, expected)
    seen: dict[str, Tensor] = {}
    for key, module in (("sa_attn_out", drafter.self_attention.self_attn), ("ca_out", drafter.cross_attention)):
        module.register_forward_hook(lambda _, __, out, key=key: seen.update({key: out.detach()}))
    features = glide_features(
        drafter, frozen, inputs, lambda allowed: expected.equal("ca_allowed", allowed, torch.ones_like(real))
    )
    expected.close("sa_attn_out", seen["sa_attn_out"])
    expected.close("ca_in", frozen.embed(inputs.tokens) + seen["sa_attn_out"])
    expected.close("ca_out", seen["ca_out"])
    expected.close("features", features)
    expected.close("logits", frozen.logits(features))
    terms = glide_objective(frozen, inputs, features)
    expected.losses(terms)
    terms.total.backward()
    expected.gradients(drafter, lambda key: key)
    expected.all_read()


@pytest.mark.parametrize("name", names("glide_train_"))
@torch.no_grad()
def test_the_official_glide_differs_by_rotation_and_first_block_alone(name: str) -> None:
    real, _ = inputs_of(name)
    vectors = Vectors(name, real)
    drafter, inputs, real = build_glide(name, vectors)
    assert inputs.kv is not None
    frozen, block, n_tokens, last = frozen_target(name), drafter.config.block_size, real.shape[1], int(real.sum())
    context = block_context(torch.arange(n_tokens)[None], block).clamp(min=0)
    seen = masks.Mask.up_to(context, n_tokens)
    ours = drafter(frozen, inputs.tokens, rotated_twice(drafter, inputs.kv), seen)
    assert not torch.allclose(ours[:, :block], vectors["features"][:, :block], atol=1e-3)
    torch.testing.assert_close(ours[:, block:last], vectors["features"][:, block:last], rtol=0, atol=2e-5)
    once = drafter(frozen, inputs.tokens, inputs.kv, seen)
    torch.testing.assert_close(once[:, 1], ours[:, 1], rtol=0, atol=2e-5, msg="position 0 is not rotated")
    assert not torch.allclose(once[:, block:last], ours[:, block:last], atol=1e-3)
