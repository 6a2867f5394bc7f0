"""A batch gives each sequence the values of a forward of it alone, for all architectures."""

from typing import Any

import numpy as np
import pytest
import torch

from moa_data.errors import OptionInvalid, TargetError
from moa_data.pipeline.config import ActivationSpec, parse_activations
from moa_data.pipeline.forwards.capture import Capture, capture
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_text_model

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
}
SPEC = ActivationSpec(kv=True, last=True, layers=(0, 2))
LENGTHS = (31, 17, 3)


def draw_sequences() -> list[np.ndarray]:
    """Draw sequences of which the first two share a prefix."""
    draw = np.random.default_rng(1)
    first, second, third = (draw.integers(0, 400, n).astype(np.int32) for n in LENGTHS)
    return [first, np.concatenate([first[:9], second[9:]]), third]


def rows(host: Capture, name: str, index: int) -> np.ndarray:
    found = host.rows(name, index)
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_batch_equals_single_forwards(architecture: str) -> None:
    model = build_text_model(architecture, **ARCHITECTURES[architecture])
    sequences = draw_sequences()
    captured = capture(model, sequences, SPEC, torch.float32)
    host = captured.to_host()
    for index, tokens in enumerate(sequences):
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.inference_mode():
            expected = model(ids, output_hidden_states=True, use_cache=False)
        np.testing.assert_allclose(
            rows(host, "hidden/last", index), expected.hidden_states[-1][0], atol=2e-5
        )
        # hidden_states[i + 1] is the output of layer i, except the last one, which is after the
        # final norm.
        np.testing.assert_allclose(
            rows(host, "hidden/layer_0", index), expected.hidden_states[1][0], atol=2e-5
        )
        last_layer = torch.from_numpy(rows(host, "hidden/layer_2", index).copy())
        np.testing.assert_allclose(
            model.model.norm(last_layer).detach(), expected.hidden_states[-1][0], atol=2e-5
        )
        alone = capture(model, [tokens], SPEC, torch.float32).to_host()
        assert rows(host, "kv", index).shape[0] == len(tokens)
        np.testing.assert_allclose(rows(host, "kv", index), rows(alone, "kv", 0), atol=2e-5)
        logits = model.lm_head(torch.from_numpy(rows(host, "hidden/last", index).copy())).detach()
        np.testing.assert_allclose(logits, expected.logits[0], atol=2e-4)


def test_keys_beyond_a_sliding_window_are_kept() -> None:
    """Every token's keys are captured, also those that have left the window.

    The first layer's keys depend only on the token and its position, so a target with a wide window
    must give the same keys.
    """
    tokens = draw_sequences()[0]
    narrow = capture(build_text_model("mistral", sliding_window=5), [tokens], SPEC, torch.float32)
    wide = capture(build_text_model("mistral", sliding_window=None), [tokens], SPEC, torch.float32)
    assert narrow.fields["kv"].shape[1] == len(tokens)
    assert torch.equal(narrow.fields["kv"][:, :, 0], wide.fields["kv"][:, :, 0])
    assert not torch.allclose(
        narrow.fields["hidden/last"][:, 6:], wide.fields["hidden/last"][:, 6:]
    )


def test_only_what_was_asked_for_is_captured() -> None:
    captured = capture(
        build_text_model("llama"),
        draw_sequences(),
        ActivationSpec(False, False, (1,)),
        torch.float32,
    )
    assert list(captured.fields) == ["hidden/layer_1"]
    there = captured.fields["hidden/layer_1"].data_ptr()
    assert captured.to_host().fields["hidden/layer_1"].data_ptr() == there, (
        "what lies in host memory is not copied"
    )


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (1e6, torch.float16)])
def test_values_that_are_not_finite_are_named_by_sequence_and_layer(
    value: float, dtype: torch.dtype
) -> None:
    model = build_text_model("llama")
    tokens = [np.array([1, 2, 3, 4], np.int32), np.array([5, 6], np.int32)]
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] = value
    host = capture(model, tokens, ActivationSpec(True, False, ()), dtype).to_host()
    with raises_naming(TargetError, "first", "kv", 1, "dtype"):
        host.check_finite(["first", "second"])


def test_names_of_activations() -> None:
    spec = parse_activations(("kv", "hidden:last", "hidden:layer:-1", "hidden:layer:0"), 2, 8)
    assert spec == ActivationSpec(True, True, (0, 5, 7))
    assert spec.fields == (
        "kv",
        "hidden/last",
        "hidden/layer_0",
        "hidden/layer_5",
        "hidden/layer_7",
    )
    assert parse_activations(("kv",), 8, 8).layers == ()
    for names, target_layers, facts in (
        (("hidden",), 0, ("'hidden'", "activations")),
        (("hidden:layer:8",), 0, ("'hidden:layer:8'", 7, "activations")),
        (("hidden:layer:x",), 0, ("'hidden:layer:x'", "activations")),
        (("kv",), 9, ("target_layers", 9)),
    ):
        with raises_naming(OptionInvalid, *facts):
            parse_activations(names, target_layers, 8)
