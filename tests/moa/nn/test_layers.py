"""Our decoder block equals the decoder layer of every supported family.

Incremental calls equal calls with the whole sequence.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.errors import DrafterError, TargetError
from moa_data.moa.nn.layers import RMSNorm, Rotary, no_cache, rotate
from moa_data.moa.nn.masks import causal_mask
from moa_data.moa.targets.bundle import FrozenTarget, save_target_bundle
from moa_data.moa.targets.facts import TargetFacts
from moa_data.moa.targets.families import layer_outputs
from moa_data.tests.kit.drafters import build_eagle3
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.variants import QUICK_FAMILIES


class NoTokenizer:
    def save_pretrained(self, path: Path) -> None:
        """Do nothing, because there is no tokenizer to save."""


@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_frozen_layers_equal_the_target(family: str) -> None:
    model = build_model(family)
    tokens = torch.randint(0, 67, (2, 20))
    with layer_outputs(model, range(4)) as states:
        out = model(tokens)
    frozen = FrozenTarget.from_model(model, n_layers=2)
    x, positions = states[1], torch.arange(20)[None]
    assert frozen.windows == {"mistral": (8, 8), "qwen2-mixed": (None, 6)}.get(family, (None, None))
    for layer, window in zip(frozen.blocks, frozen.windows, strict=True):
        mask = causal_mask(positions, 20, window)
        x = layer.attend_cached(x, frozen.rotary(positions), no_cache, mask)
    torch.testing.assert_close(x, states[3], rtol=0, atol=2e-5)
    torch.testing.assert_close(frozen.logits(frozen.norm(x)), out.logits, rtol=0, atol=5e-5)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("has_own_norms", [False, True])
def test_attention_to_itself_equals_forward_on_own_keys(
    has_own_norms: bool, needs_gradient: bool
) -> None:
    """Values and gradients of weights are equal, and so are gradients of inputs that need them.

    The means over groups of outputs are equal too.
    """
    model = build_model()
    block = (
        build_eagle3(model).midlayer
        if has_own_norms
        else FrozenTarget.from_model(model, 1).blocks[0]
    )
    rotation = Rotary(12, {"rope_theta": 1e4}, 96)(torch.arange(7)[None])
    x = torch.randn(60, 7, 96 if has_own_norms else 48, requires_grad=needs_gradient)
    inputs = [*block.requires_grad_(True).parameters(), *([x] if needs_gradient else [])]
    expected = block(x, rotation, *block.keys_values(x, rotation), None)
    cases = [(block.attend_cached(x, rotation, no_cache, None), expected)]
    for sizes in ([7], [4, 3], [2, 2, 2, 1], [1] * 7):
        means = torch.stack([group.mean(dim=1) for group in expected.split(sizes, dim=1)], dim=1)
        cases.append((block.attend_self_means(x, rotation, len(sizes)), means))
    for pair in cases:
        torch.testing.assert_close(*pair)
        gradients = (
            torch.autograd.grad(one.square().sum(), inputs, retain_graph=True) for one in pair
        )
        for got, goal in zip(*gradients, strict=True):
            torch.testing.assert_close(got, goal, rtol=1e-4, atol=1e-3)


def test_rotary_stays_float32_and_uses_theta() -> None:
    rotary = Rotary(8, {"rope_theta": 5e4, "rope_type": "default"}, 64).to(torch.bfloat16)
    assert rotary.frequencies.dtype == torch.float32
    torch.testing.assert_close(rotary.frequencies[4:], 5e4 ** (-torch.arange(0, 8, 2) / 8))
    with raises_naming(DrafterError, 5):
        Rotary(5, {"rope_theta": 1e4}, 64)
    with raises_naming(DrafterError, "dynamic"):
        Rotary(8, {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}, 64)


def test_llama3_rope_scaling_reaches_the_frozen_layers() -> None:
    rope: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
    }
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    model = build_model(rope_parameters=rope)
    torch.testing.assert_close(
        FrozenTarget.from_model(model).rotary.frequencies[6:], model.model.rotary_emb.inv_freq
    )


def test_only_silu_layers_are_kept() -> None:
    with raises_naming(TargetError, "hidden_act", "silu", "gelu"):
        FrozenTarget.from_model(build_model(hidden_act="gelu"), 1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_bundle_round_trip(family: str, tied: bool, tmp_path: Path) -> None:
    model = build_model(family, tie_word_embeddings=tied)
    save_target_bundle(model, NoTokenizer(), tmp_path, 2)
    frozen = FrozenTarget.load(tmp_path, n_layers=2)
    live = FrozenTarget.from_model(model, n_layers=2)
    assert frozen.state_dict().keys() == live.state_dict().keys()
    for name, value in live.state_dict().items():
        assert torch.equal(frozen.state_dict()[name], value), name
    assert not any(p.requires_grad for p in frozen.parameters())
    assert frozen.facts.layer_sizes() == TargetFacts.of_model(model).layer_sizes()
    with raises_naming(TargetError, tmp_path, 2, 3):
        FrozenTarget.load(tmp_path, n_layers=3)
    with raises_naming(TargetError, tmp_path / "elsewhere", "frozen.safetensors"):
        FrozenTarget.load(tmp_path / "elsewhere")


def test_rotation_and_norm_equal_the_plain_formulas_in_value_and_gradient() -> None:
    x = torch.randn(2, 2, 3, 12, dtype=torch.float64, requires_grad=True)
    cos, sin = (
        part.double() for part in Rotary(12, {"rope_theta": 1e4}, 96)(torch.arange(3)[None])
    )
    first, second = x.chunk(2, dim=-1)
    plain = x * cos[:, None] + torch.cat((second, first), dim=-1) * sin[:, None]
    assert torch.equal(sin[..., :6], -sin[..., 6:])
    torch.testing.assert_close(rotate(x, (cos, sin)), plain)
    with torch.no_grad():
        torch.testing.assert_close(rotate(x, (cos, sin)), plain)
    assert torch.autograd.gradcheck(lambda x: rotate(x, (cos, sin)), x)

    norm = RMSNorm(12, eps=1e-5, dtype=torch.float64)
    norm.weight.data.normal_()
    torch.testing.assert_close(
        norm(x), x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
    )
    assert torch.autograd.gradcheck(lambda x, weight: type(norm).forward(norm, x), (x, norm.weight))
    with torch.no_grad():
        torch.testing.assert_close(norm(x), torch.nn.RMSNorm.forward(norm, x))
