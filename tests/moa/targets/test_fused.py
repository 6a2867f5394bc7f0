"""Fused layers compute the same as the model's own layers, in every family.

Other layers do not change.
"""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from moa_data.moa.nn import packed
from moa_data.moa.targets import fused
from moa_data.moa.targets.families import decoder_layers, text_model
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.families import FEATURES, OTHERS, SOME_FAMILIES, build_family
from moa_data.tests.kit.models import FAMILIES, build_model
from moa_data.tests.kit.variants import quick, quick_rows

TOKENS = torch.tensor([[5, 9, 33, 12, 40, 7, 21, 60], [4, 8, 30, 11, 9, 50, 6, 13]])


@pytest.fixture(autouse=True)
def takes_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_FEWEST_VALUES", 1)
    if not packed._works(torch.float32):
        pytest.skip("this machine gains nothing by the layout")


def are_fused(model: Any) -> list[bool]:
    return ["fused" in vars(layer) for layer in decoder_layers(model)]


def hidden_of(model: Any) -> list[torch.Tensor]:
    """Return hidden states of a prefill, a plain step and a chain; the second row is shorter."""
    target = Target(model)
    cache, found = target.new_cache(2), []
    for start, stop in ((0, 3), (3, 4), (4, 8)):
        found.append(target.forward(TOKENS[:, start:stop], cache))
        cache.commit([list(range(stop - start)), list(range(min(2, stop - start)))])
    return found


BIASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
}
FORMS = [*itertools.product(BIASES, (torch.float32, torch.bfloat16))]
CASES = [(family, *form) for family in FAMILIES for form in FORMS]


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    # By default each family has two of the four forms, and its neighbours have the others.
    quick_rows(
        CASES,
        [
            (family, *form)
            for index, family in enumerate(FAMILIES)
            for form in (FORMS[index % 2], FORMS[3 - index % 2])
        ],
    ),
)
def test_layers_compute_what_the_models_own_do(
    family: str, changes: str, dtype: torch.dtype
) -> None:
    """Weights were stored in either dtype."""
    model = build_model(family, **BIASES[changes]).to(dtype).float()
    expected = hidden_of(model)
    Target(model).prepare()
    # Qwen3 has norms of query and key heads, so its layers are not fused.
    assert are_fused(model) == [family != "qwen3"] * len(decoder_layers(model))
    for own, other in zip(hidden_of(model), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_where_a_part_of_each_head_is_rotated_the_models_own_layer_computes() -> None:
    model = build_family("glm4_moe", use_qk_norm=False)
    expected = hidden_of(model)
    Target(model).prepare()
    for own, other in zip(hidden_of(model), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_computes_what_the_models_own_does(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The fused body computes the same; its calls have 3 tokens, which fit any window.

    There is no fused body if a layer has another form, or if a hook changes the model's output.
    """
    model, tokens = build_model(family), TOKENS[:1, :3]
    with torch.inference_mode():
        expected = text_model(model)(input_ids=tokens, output_hidden_states=True, use_cache=False)
    assert fused.FusedBody.of(model) is None
    fused.fuse(model)
    body = fused.FusedBody.of(model)
    assert (body is None) == (family == "qwen3")
    if body is not None:
        with torch.inference_mode():
            hidden, outputs = body(tokens, torch.arange(3)[None], (0, 2))
        torch.testing.assert_close(hidden, expected.last_hidden_state, rtol=1e-4, atol=1e-5)
        assert list(outputs) == [0, 2]
        for layer, output in outputs.items():
            torch.testing.assert_close(
                output, expected.hidden_states[layer + 1], rtol=1e-4, atol=1e-5
            )
        with torch.inference_mode():
            some, _ = body(tokens, torch.arange(3)[None], wanted=torch.tensor([0, 2]))
        torch.testing.assert_close(some, hidden[:, [0, 2]], rtol=1e-4, atol=1e-5)
        text_model(model).norm.register_forward_hook(lambda _module, _inputs, output: 2 * output)
        assert fused.FusedBody.of(model) is None
        assert "transformers runs the target's layers" in caplog.text


def test_layers_that_fusing_would_change_are_counted_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build_model("llama")
    first, *_ = decoder_layers(model)
    first.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    fused.fuse(model)
    assert not are_fused(model)[0]
    assert all(are_fused(model)[1:])
    assert "fusing the weights of 1 layers" in caplog.text


@pytest.mark.parametrize(
    "family", [*SOME_FAMILIES, *quick(OTHERS, ("gpt_neox",)), "granite", "cohere2", "smollm3"]
)
def test_layers_of_another_form_stay_what_they_are(family: str) -> None:
    """This includes the other layers of a model in which some layers have Llama's form."""
    model = build_family(family)
    expected = model(input_ids=TOKENS[:1]).logits
    fused.fuse(model)
    with torch.inference_mode():
        torch.testing.assert_close(
            model(input_ids=TOKENS[:1]).logits, expected, rtol=1e-3, atol=1e-4
        )
    n_like_llama = dict.fromkeys(("llama", "mistral", "qwen2", "ministral"), 4)
    n_like_llama["smollm3"] = 3  # the fourth does not rotate
    assert sum(are_fused(model)) == n_like_llama.get(family, 0)
    assert set(FEATURES) >= {"granite", "cohere2", "smollm3"}


def test_weights_that_change_and_gradients_take_the_models_own_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model()
    fused.fuse(model)
    layers: Any = decoder_layers(model)
    ran: list[int] = []
    real = fused._forward

    def counted(layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        ran.append(layer.attention.layer_idx)
        return real(layer, *args, **kwargs)

    monkeypatch.setattr(fused, "_forward", counted)
    with torch.inference_mode():
        model(input_ids=TOKENS)
    assert ran == list(range(len(layers)))
    ran.clear()
    with torch.no_grad():
        layers[1].mlp.up_proj.weight.mul_(2)
        own = model(input_ids=TOKENS).logits
        assert 1 not in ran
        fused.fuse(model)
        ran.clear()
        torch.testing.assert_close(model(input_ids=TOKENS).logits, own, rtol=1e-4, atol=1e-5)
        assert ran == list(range(len(layers)))
    ran.clear()
    model.requires_grad_(True)
    model(input_ids=TOKENS).logits.sum().backward()
    assert not ran


def test_copies_are_layers_of_the_models_own_class() -> None:
    model = build_model()
    own = [type(layer) for layer in decoder_layers(model)]
    fused.fuse(model)
    assert [type(layer) for layer in decoder_layers(model)] != own
    layers = decoder_layers(model)
    for copied in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert isinstance(copied, nn.ModuleList)
        assert [type(layer) for layer in copied] == own
        assert not any("fused" in vars(layer) for layer in copied)


def test_half_precision_is_rounded_where_the_model_rounds() -> None:
    model = build_model().to(torch.bfloat16)
    fused.fuse(model)
    assert not any(are_fused(model))
