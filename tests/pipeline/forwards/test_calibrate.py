"""Codecs learn from keys without the rotation that the target applies to them."""

from typing import Any

import numpy as np
import pytest
import torch

from moa_data.moa.targets.facts import TargetFacts
from moa_data.pipeline.config import parse_activations
from moa_data.pipeline.forwards.calibrate import target_rope
from moa_data.pipeline.forwards.capture import capture
from moa_data.tests.kit.families import build_family

BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("qwen3_moe", {}, marks=pytest.mark.slow),
        ("phi3", {}),  # rotates only a part of each head
        pytest.param("glm4_moe", {}, marks=pytest.mark.slow),
        ("gemma3_text", {"rope_parameters": BY_KIND}),
        (
            "gemma4_text",
            {"global_head_dim": 16, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0},
        ),
    ],
)
def test_keys_of_one_token_are_alike_without_their_rotation(
    name: str, changes: dict[str, Any]
) -> None:
    """For a text that repeats one token, every layer has equal states at all positions."""
    model = build_family(name, **changes)
    facts = TargetFacts.of_model(model)
    assert facts.has_uniform_kv
    spec = parse_activations(["kv"], 0, 4)
    # [n, layer, head, 2, width]
    kv = capture(model, [np.full(30, 7, np.int32)], spec, torch.float32).fields["kv"][0]
    keys, rope = kv[:, :, :, 0].numpy(), target_rope(facts)
    unrotated = rope.rotate(keys, undo=True)
    np.testing.assert_allclose(
        unrotated, np.broadcast_to(unrotated[:1], unrotated.shape), atol=1e-4
    )
    assert (np.abs(keys - keys[:1]).max(axis=(0, 2, 3)) > 0.1).all()
    np.testing.assert_allclose(rope.rotate(unrotated[:, 1:], 0, [1, 2, 3]), keys[:, 1:], atol=1e-5)
