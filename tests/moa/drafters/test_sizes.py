"""Sizes that do not fit each other or the target are refused by name.

Default sizes follow from the target.
"""

from dataclasses import replace
from typing import Any

import pytest

from moa_data.errors import DrafterError
from moa_data.moa.drafters.block import default_read_layers
from moa_data.moa.drafters.eagle import EagleSizes
from moa_data.moa.drafters.eagle3 import Eagle3Sizes, default_fused_layers
from moa_data.moa.drafters.independent import IndependentSizes
from moa_data.moa.drafters.mixture import MoASizes
from moa_data.moa.drafters.registry import drafter_class
from moa_data.moa.targets.facts import TargetFacts
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import SIZES, build_model

BLOCK: dict[str, Any] = {"fused_layers": (0, 1), "block_layers": 1, "block_size": 7}
KV = BLOCK | {"context": "kv", "fused_layers": (1,)}
MEMORY: dict[str, Any] = BLOCK | {"context": "memory", "fused_layers": None}
FUSED: dict[str, Any] = {"fused_layers": (0, 1)}
UNFIT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("moa", {"layer_stride": 5}),
    ("moa", {"layer_stride": 3, "layer_groups": 3}),
    ("moa", {"self_attention_kv_heads": 3, "layer_attention_kv_heads": 7}),
    ("moa", {"layer_attention_heads": 5}),
    ("moa", {"target_layer_inference": 5}),
    ("moa", {"layer_groups": 5}),
    ("moa", {"kv_width": 0}),
    ("eagle", {"self_attention_kv_heads": 3}),
    ("eagle3", {"fused_layers": None}),
    ("eagle3", {"fused_layers": (0, 4)}),
    ("eagle3", {"fused_layers": (1, 0)}),
    ("eagle3", {"fused_layers": ()}),
    ("eagle3", FUSED | {"draft_vocabulary": 68}),
    ("glide", {"block_size": 0}),
    ("independent", {"independent_width": 33}),
    ("independent", {"independent_layers": 0}),
    ("dspark", BLOCK | {"fused_layers": None}),
    ("dspark", BLOCK | {"fused_layers": (0, 4)}),
    ("dspark", BLOCK | {"fused_layers": (-1,)}),
    ("dspark", BLOCK | {"sample_from_anchor": False, "block_size": 1}),
    ("dspark", BLOCK | {"mask_token": 67}),
    ("dspark", BLOCK | {"markov_head": "gru"}),
    ("dspark", BLOCK | {"context": "text"}),
    ("dspark", KV | {"block_layers": 2}),
    ("dspark", KV | {"fused_layers": (0, 1, 2)}),
    ("dspark", KV | {"self_attention_kv_heads": 4}),
    ("dspark", BLOCK | {"context": "memory"}),
    ("dspark", MEMORY | {"layer_groups": 9}),
)


@pytest.fixture(scope="module")
def usual_facts() -> TargetFacts:
    return TargetFacts.of_model(build_model())


@pytest.mark.parametrize(("kind", "sizes"), UNFIT, ids=str)
def test_unfit_sizes_are_refused(
    usual_facts: TargetFacts, kind: str, sizes: dict[str, Any]
) -> None:
    # The errors of block drafters name the setting whose value must change, which may be another.
    facts = () if kind == "dspark" else (list(sizes)[-1],)
    with raises_naming(DrafterError, *facts):
        drafter_class(kind).config_class.from_target(usual_facts, **sizes)


def test_sizes_of_another_kind_are_refused() -> None:
    with pytest.raises(DrafterError):
        EagleSizes.from_dict({"kind": "moa"})


def test_all_unknown_keys_are_named(usual_facts: TargetFacts) -> None:
    sizes = EagleSizes.from_target(usual_facts).to_dict()
    with raises_naming(DrafterError, "first_new", "second_new"):
        EagleSizes.from_dict(sizes | {"second_new": 1, "first_new": 2})


@pytest.mark.parametrize("epsilon", [-1.0, 1e30])
def test_an_epsilon_that_no_norm_has_is_refused(usual_facts: TargetFacts, epsilon: float) -> None:
    sizes = EagleSizes.from_target(usual_facts).to_dict()
    with raises_naming(DrafterError, "norm_eps", epsilon):
        EagleSizes.from_dict(sizes | {"norm_eps": epsilon})


def test_heads_divide_widths() -> None:
    model = build_model(num_attention_heads=6, head_dim=64)
    wide = MoASizes.from_target(TargetFacts.of_model(model))
    assert (wide.layer_attention_heads, wide.layer_attention_head_dim) == (4, 64), (
        "256 / 6 is no head dim"
    )
    model = build_model(hidden_size=384, num_attention_heads=6, intermediate_size=1024)
    facts = TargetFacts.of_model(model)
    sizes = IndependentSizes.from_target(facts)
    assert (sizes.independent_width, sizes.independent_mlp_width, sizes.independent_layers) == (
        192,
        512,
        2,
    )
    assert (sizes.own_block.n_heads, sizes.own_block.head_dim) == (4, 48)
    narrow = IndependentSizes.from_target(facts, independent_width=6)
    assert (narrow.own_block.n_heads, narrow.own_block.head_dim) == (3, 2)


def test_default_layers_are_those_of_the_official_code() -> None:
    assert default_read_layers(36) == (1, 9, 17, 25, 33)
    assert default_read_layers(32) == (1, 8, 15, 22, 29)
    assert default_read_layers(28, 3) == (1, 13, 25)
    assert default_read_layers(28, 1) == (14,)
    assert default_fused_layers(8) == (1, 3, 4)
    assert default_fused_layers(32) == (1, 15, 28)


@pytest.mark.parametrize(("vocab_size", "expected"), [(67, 67), (128_256, 32_000)])
def test_defaults_follow_from_the_vocabulary(vocab_size: int, expected: int) -> None:
    facts = replace(TargetFacts.of_model(build_model()), vocab_size=vocab_size)
    assert Eagle3Sizes.defaults(facts, FUSED)["draft_vocabulary"] == expected
    assert SIZES["vocab_size"] == 67
    assert (
        drafter_class("dspark").config_class.defaults(facts, BLOCK)["mask_token"] == vocab_size - 1
    )
