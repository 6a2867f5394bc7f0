"""EAGLE and GLIDE equal the official code on every training vector of the oracle folder, in value and gradient."""

import pytest
import torch

from moa_data.moa.drafters.eagle import EagleSizes, eagle_objective
from moa_data.moa.drafters.glide import GlideSizes, block_context
from moa_data.moa.drafters.rounds import Draws
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.formats.checkpoint import build_drafter
from moa_data.moa.nn import losses, masks
from moa_data.moa.nn.kv import pack_kv, unpack_kv
from moa_data.moa.nn.layers import rotate
from moa_data.moa.target.bundle import FrozenTarget

from .test_moa import GRADIENT, LOSS, ORACLE, close, inputs_of, meta, target_config, tensors

CASES = sorted(file.stem for file in ORACLE.glob("eagle_train_*.safetensors"))
GLIDE_CASES = sorted(file.stem for file in ORACLE.glob("glide_train_*.safetensors"))


def own_key(official):
    """Official key of a weight -> ours."""
    if official == "spec_model_fc.weight":
        return "fc.weight"
    rest = official.removeprefix("spec_model.")
    return f"layers.{rest}" if rest[0].isdigit() else f"layers.0.{rest}"


def build(name):
    settings, case = meta(name), tensors(name)
    config = target_config(settings["target"])
    sizes = settings["model_config"]
    drafter = build_drafter(
        EagleSizes.from_target(
            config,
            eagle_layers=sizes["number_of_layers"],
            self_attention_kv_heads=sizes["drafter_num_key_value_heads"],
            self_attention_mlp_width=sizes["drafter_intermediate_size"],
        ),
        {own_key(key.removeprefix("weight.")): value for key, value in case.items() if key.startswith("weight.")},
    )
    return drafter, frozen_target(config)


def frozen_target(config):
    weights = tensors("moa_weights")
    frozen = {k.removeprefix("model."): v for k, v in weights.items() if k.startswith(("model.", "lm_head."))}
    return FrozenTarget(config, frozen, 0)


def build_glide(name, **changes):
    """Drafter, frozen target and the row of the batch that the vectors belong to."""
    settings = meta(name)
    config, sizes = target_config(settings["target"]), settings["model_config"]
    chosen = {
        "self_attention_kv_heads": sizes["self_attention_num_key_value_heads"],
        "self_attention_mlp_width": sizes["self_attention_intermediate_size"],
        "block_size": sizes["block_size"],
        "official_rotation": True,
    }
    weights = {k.removeprefix("weight."): v for k, v in tensors(name).items() if k.startswith("weight.")}
    drafter = build_drafter(GlideSizes.from_target(config, **(chosen | changes)), weights)
    batch, inputs = inputs_of("moa_batch", 0)
    row = slice(settings["row"], settings["row"] + 1)
    real = batch["attention_mask"][row].bool()
    # In the official code all padding stands at the last real position, and a query without a key sees padding too.
    keys, values = unpack_kv(inputs.kv[row, :, -1], config.num_key_value_heads)
    shift = (real.cumsum(dim=1) - 1) - torch.arange(real.shape[1])
    kv = pack_kv([rotate(keys, drafter.rotary(shift))], [values])
    own = TrainingInputs(inputs.tokens[row], inputs.response_mask[row], kv, inputs.hidden[row])
    return drafter, frozen_target(config), own, real


@pytest.mark.parametrize("name", CASES)
def test_eagle_training_case(name):
    settings, expected = meta(name), tensors(name)
    drafter, frozen = build(name)
    batch, inputs = inputs_of("moa_batch", 0)
    real = batch["attention_mask"].bool()
    noise = None
    hidden, embeddings = inputs.hidden, frozen.embed(inputs.tokens)
    if settings["training_noise"]:
        drawn = torch.stack((expected["noise_hidden"], expected["noise_emb"]))
        noise = (drawn - 0.5) * settings["noise_uniform_scale"]
        hidden, embeddings = hidden + noise[0], embeddings + noise[1]
        torch.manual_seed(settings["torch_manual_seed"])
        assert torch.equal(torch.rand_like(hidden), expected["noise_hidden"])

    # The official code has one slot more, with zeros for the token behind the last.
    inside = real[:, 1:]
    fc_in = torch.cat((embeddings[:, 1:], hidden[:, :-1]), dim=-1)
    close(fc_in, expected["fc_in"][:, :-1], inside)
    joined = drafter.join(embeddings[:, 1:], hidden[:, :-1])
    close(joined, expected["fc_out"][:, :-1], inside)
    features = drafter(joined)
    close(features, expected["features"][:, :-1], inside)
    logits = frozen.logits(features)
    close(logits, expected["logits"], inside)
    close(-losses.forward_kl(logits, frozen.logits(hidden[:, 1:])), expected["plogq"], inside)
    assert torch.equal(inputs.response_mask[:, 1:], expected["response_mask_shifted"])

    terms = eagle_objective(drafter, frozen, inputs, noise=noise, official=True)
    assert terms.forward_kl.item() == pytest.approx(expected["stat.forward_KL"].item(), abs=LOSS)
    assert terms.feature.item() == pytest.approx(expected["stat.feature_loss"].item(), abs=LOSS)
    assert terms.total.item() == pytest.approx(expected["loss"].item(), abs=LOSS)
    assert terms.n_positions == int(expected["response_mask_shifted"].sum())

    terms.total.backward()
    gradients = {key: weight.grad for key, weight in drafter.named_parameters()}
    goals = {own_key(key.removeprefix("grad.")): goal for key, goal in expected.items() if key.startswith("grad.")}
    assert gradients.keys() == goals.keys()
    for key, goal in goals.items():
        torch.testing.assert_close(gradients[key], goal, rtol=0, atol=GRADIENT * goal.abs().max().item(), msg=key)


def test_noise_spoils_the_targets_in_the_official_form_alone():
    if not CASES:
        pytest.skip("no official vectors")
    name = next(case for case in CASES if case.endswith("noise1"))
    drafter, frozen = build(name)
    _, inputs = inputs_of("moa_batch", 0)
    noise = torch.full((1, *inputs.hidden.shape), 0.05)
    clean, noisy = (eagle_objective(drafter, frozen, inputs, noise=n) for n in (None, noise))
    assert not torch.equal(clean.total, noisy.total)
    shifted = eagle_objective(drafter, frozen, inputs, noise=noise, official=True)
    assert not torch.equal(noisy.feature, shifted.feature)


@pytest.mark.parametrize("name", GLIDE_CASES)
def test_glide_training_case(name):
    expected = tensors(name)
    drafter, frozen, inputs, real = build_glide(name)
    positions = torch.arange(inputs.tokens.shape[1])[None]
    last_seen = block_context(positions, drafter.config.block_size)
    assert torch.equal(masks.cross_attention_mask(last_seen, inputs.tokens.shape[1]), expected["ca_allowed"])

    seen = {}
    for key, module in (("sa", drafter.self_attention.self_attn), ("ca", drafter.cross_attention)):
        module.register_forward_hook(lambda _, __, out, key=key: seen.update({f"{key}_out": out.detach()}))
    features = drafter(frozen, inputs.tokens, inputs.kv, last_seen, official=True)
    close(seen["sa_out"], expected["sa_attn_out"], real)
    close(frozen.embed(inputs.tokens) + seen["sa_out"], expected["ca_in"], real)
    close(seen["ca_out"], expected["ca_out"], real)
    close(features, expected["features"], real)
    close(frozen.logits(features), expected["logits"], real)

    terms = drafter.objective(frozen, inputs, Draws(None, torch.zeros(1, dtype=torch.bool)), official=True)
    assert terms.forward_kl.item() == pytest.approx(expected["stat.forward_KL"].item(), abs=LOSS)
    assert terms.total.item() == pytest.approx(expected["loss"].item(), abs=LOSS)
    assert terms.n_positions == int(inputs.response_mask.sum())
    terms.total.backward()
    gradients = {key: weight.grad for key, weight in drafter.named_parameters()}
    goals = {key.removeprefix("grad."): goal for key, goal in expected.items() if key.startswith("grad.")}
    assert gradients.keys() == goals.keys()
    for key, goal in goals.items():
        torch.testing.assert_close(gradients[key], goal, rtol=0, atol=GRADIENT * goal.abs().max().item(), msg=key)


@torch.no_grad()
def test_the_official_glide_differs_by_rotation_and_first_block_alone():
    if not GLIDE_CASES:
        pytest.skip("no official vectors")
    name = GLIDE_CASES[0]
    expected = tensors(name)["features"]
    drafter, frozen, inputs, _ = build_glide(name)
    block = drafter.config.block_size
    last_seen = block_context(torch.arange(inputs.tokens.shape[1])[None], block).clamp(min=0)
    ours = drafter(frozen, inputs.tokens, inputs.kv, last_seen)
    assert not torch.allclose(ours[:, :block], expected[:, :block], atol=1e-3)
    torch.testing.assert_close(ours[:, block:], expected[:, block:], rtol=0, atol=2e-5)
    once, *_ = build_glide(name, official_rotation=False)
    other = once(frozen, inputs.tokens, inputs.kv, last_seen)
    torch.testing.assert_close(other[:, 1], ours[:, 1], rtol=0, atol=2e-5, msg="position 0 is not rotated")
    assert not torch.allclose(other[:, block:], ours[:, block:], atol=1e-3)
