"""Drafters are unchanged by a round trip through our layout and all others.

Folders that do not fit or hold no drafter are refused with the reason.
"""

import itertools
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from moa_data.errors import DrafterError, TargetError
from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.formats.checkpoint import (
    LAYOUTS,
    check_drafter_matches,
    load_drafter,
    load_drafters,
    save_drafter,
    write_layout,
)
from moa_data.moa.formats.checkpoint import build_drafter as build_drafter_of
from moa_data.moa.formats.layout import EMBEDDINGS, LM_HEAD
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.tests.kit import drafters as kit
from moa_data.tests.kit.drafters import build_drafter, build_eagle3
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.families import build_family
from moa_data.tests.kit.hostile import change_json
from moa_data.tests.kit.models import build_model, random_prompts
from moa_data.tests.kit.variants import quick_rows

from ..drafters.contract import ROUNDS, batch_of

MOA = ("moa", "moa-vllm")
ENGINES = ("eagle", "vllm-eagle", "sglang-eagle")
UNLIKE_THE_PAPER: dict[str, Any] = {
    "layer_attention": False, "cross_attention_drafts": True, "layer_stride": 2,
    "unrotated_keys": True, "layer_groups": 2,
}  # fmt: skip


@cache
def model_of(family: str = "llama", **sizes: Any) -> Any:
    """Build a target once for all tests, which only read it."""
    return build_model(family, **sizes)


def build_eagle(model: Any, **sizes: Any) -> Any:
    drafter = kit.build_eagle(model, target={"weights_sha256": "ab"}, **sizes)
    generator = torch.Generator().manual_seed(2)
    for name, weight in drafter.named_parameters():
        if weight.ndim == 1:
            mean = 0.0 if name.endswith("bias") else 1.0
            torch.nn.init.normal_(weight, mean, 0.1, generator)
    return drafter


def build_block(kind: str, model: Any, **sizes: Any) -> Any:
    small: dict[str, Any] = {"fused_layers": (0, 2), "block_layers": 2, "block_size": 7}
    small |= {"markov_rank": 8} if kind == "dspark" else {}
    return kit.build(kind, model, **(small | sizes))


def build(name: Any, model: Any = None, **sizes: Any) -> Any:
    """Build a drafter that fits the layout."""
    model = model or model_of(num_attention_heads=6)
    if LAYOUTS[name].kind == "eagle3":
        own: dict[str, Any] = {"fused_layers": (0, 1, 2), "draft_vocabulary": 40}
        return build_eagle3(model, **(own | sizes))
    if name == "llama":
        return kit.build("independent", model, **sizes)
    if LAYOUTS[name].kind in ("dflash", "dspark"):
        return build_block(LAYOUTS[name].kind, model, **sizes)
    return (
        build_drafter(model, **sizes)
        if LAYOUTS[name].kind == "moa"
        else build_eagle(model, **sizes)
    )


def write(drafter: Any, name: Any, folder: Path, model: Any, dtype: Any = torch.float32) -> None:
    pieces = {
        "config": model.config,
        EMBEDDINGS: model.model.embed_tokens.weight,
        LM_HEAD: model.lm_head.weight,
    }
    write_layout(drafter, LAYOUTS[name], folder, dtype, pieces)


@torch.no_grad()
def features(drafter: Any, model: Any, inputs: TrainingInputs | None = None) -> Any:
    return drafter.drafted_features(
        kit.frozen_for(drafter, model), inputs or batch_of(drafter, model), ROUNDS["bounded"]
    ).features


@cache
def usual_files(name: Any) -> dict[str, bytes]:
    """Return the files of a drafter of the usual sizes in a layout: name -> content."""
    model = model_of()
    with TemporaryDirectory() as folder:
        write(build(name, model), name, Path(folder), model)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def write_usual(name: Any, folder: Path) -> None:
    """Write a folder of a drafter of the usual sizes in a layout."""
    for file_name, content in usual_files(name).items():
        (folder / file_name).write_bytes(content)


def read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def without_own_key(folder: Path, **changes: Any) -> dict[str, Any]:
    """Remove our own key from a folder's config.json, and return the config.

    Other programs' folders do not have the key.
    """
    config = {
        name: value for name, value in (read_config(folder) | changes).items() if name != "moa_data"
    }
    (folder / "config.json").write_text(json.dumps(config))
    return config


def write_weights(folder: Path, weights: dict[str, Any]) -> None:
    """Replace the tensors of a folder's file, except for those that are None."""
    save_file(
        {name: value for name, value in weights.items() if value is not None},
        folder / "model.safetensors",
    )


TWO_LAYERS: dict[str, Any] = {
    "eagle_layers": 2,
    "self_attention_kv_heads": 1,
    "eagle_input_norm": False,
}
FORMS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LAYOUTS if name != "llama"),
    *((name, TWO_LAYERS) for name in ENGINES),
    *((name, {"eagle_embedding_scale": 32.0}) for name in (*ENGINES, "moa-eagle")),
    ("eagle3", {"fused_layers": (0, 1, 3), "fc_norm": True, "norm_output": True}),
    ("eagle3", {"fused_layers": (0, 1, 3), "norm_before_fc": True, "norm_before_residual": True}),
    ("moa", {"n_target_layers": 2}),
]
LIKE_OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", TWO_LAYERS), ("vllm-eagle", TWO_LAYERS),
    *((name, {"eagle_embedding_scale": 32.0}) for name in ("eagle", "sglang-eagle")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes"),
    quick_rows(FORMS, [form for form in FORMS if form not in LIKE_OTHERS]),
    ids=str,
)
def test_a_folder_computes_the_same_without_our_key(
    tmp_path: Path, name: str, sizes: dict[str, Any]
) -> None:
    model = model_of("qwen2" if name in ("moa", "eagle") else "llama")  # with biases
    drafter = build(name, model, **sizes)
    write(drafter, name, tmp_path, model)
    assert load_drafter(tmp_path).config == drafter.config
    if "n_target_layers" not in sizes:  # the authors' format has no key for this size
        without_own_key(tmp_path)
    again = load_drafter(tmp_path)
    check_drafter_matches(again, Target(model))
    # A folder may have one more layer that only passes its input on. The numbers are still exactly
    # the same.
    inputs = batch_of(drafter, model)
    assert torch.equal(features(again, model, inputs), features(drafter, model, inputs))
    with raises_naming(TargetError, "vocab_size", 67, 80):
        check_drafter_matches(again, Target(model_of(vocab_size=80)))
    write(drafter, name, tmp_path, model, torch.bfloat16)  # rounds once
    file = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in file.values()} <= {torch.bfloat16, torch.int64, torch.bool}
    weights = load_drafter(tmp_path).state_dict()
    for key, value in drafter.state_dict().items():
        assert torch.equal(
            weights[key], value.to(torch.bfloat16).float() if value.is_floating_point() else value
        ), key


def test_an_independent_drafter_is_a_llama(tmp_path: Path) -> None:
    """The folder loads in transformers as a Llama with the same logits.

    Without our own key it is refused, because nothing says for which target it drafts.
    """
    model = model_of(max_position_embeddings=96)
    drafter = kit.build("independent", model, independent_width=24, independent_layers=3)
    write(drafter, "llama", tmp_path, model)
    loaded: Any = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    other, info = loaded
    assert not any(info.values()), info
    tokens = batch_of(drafter, model).tokens
    with torch.no_grad():
        every = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        own = drafter.draft_logits(kit.frozen_for(drafter, model), drafter(tokens, every))
        torch.testing.assert_close(own, other(tokens).logits, rtol=1e-5, atol=1e-5)
    again = load_drafter(tmp_path)
    assert again.config == drafter.config
    assert all(map(torch.equal, again.state_dict().values(), drafter.state_dict().values()))
    without_own_key(tmp_path)
    with raises_naming(DrafterError, tmp_path, "embed_tokens.weight"):
        load_drafter(tmp_path)


def test_transformers_drafts_with_a_block_as_we_do(tmp_path: Path) -> None:
    """The generate of transformers takes as many rounds; its last one may have no draft."""
    model: Any = build_model(num_hidden_layers=3, eos_token_id=None)
    model.generation_config.eos_token_id = None
    target, prompts, n_new = Target(model), random_prompts(1, 3), 20
    drafter = kit.build("dflash", model, block_layers=2, block_size=6, sample_from_anchor=False)
    write(kit.teach(drafter, target, prompts, 40), "hf-dflash", tmp_path, model)
    loaded: Any = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assistant, info = loaded
    assert not any(info.values()), info
    rounds, call = [0], assistant.forward

    def counted(*arguments: Any, **options: Any) -> Any:
        rounds[0] += 1
        return call(*arguments, **options)

    assistant.forward = counted
    for prompt in prompts:
        rounds[0], tokens = 0, torch.tensor([prompt])
        written = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=n_new,
            assistant_model=assistant, speculation_type="dflash",
        )  # fmt: skip
        (own,) = generate_batch(
            target,
            [prompt],
            max_new_tokens=n_new,
            proposer=DrafterProposer(target, drafter),
            tree=TreeShape(5),
        )
        assert written[0, len(prompt) :].tolist() == own.tokens
        assert own.stats.n_target_calls - rounds[0] in (0, 1)
        assert own.stats.acceptance_length > 2


def test_keys_of_each_engine(tmp_path: Path) -> None:
    model = model_of("qwen2")
    keys, configs = {}, {}
    for name, input_norm in itertools.product(ENGINES, (True, False)):
        write(
            build(name, model, eagle_input_norm=input_norm, eagle_layers=2), name, tmp_path, model
        )
        keys[name], configs[name] = (
            set(load_file(tmp_path / "model.safetensors")),
            read_config(tmp_path),
        )
        assert "layers.0.input_layernorm.weight" not in keys[name]
        # Only a drafter with an input norm needs an additional first layer.
        assert ("layers.2.input_layernorm.weight" in keys[name]) == input_norm
        assert configs[name]["num_hidden_layers"] == 2 + input_norm
    assert keys["eagle"] - keys["vllm-eagle"] == {"embed_tokens.weight"}
    assert keys["sglang-eagle"] - keys["vllm-eagle"] == {"fc.bias"}
    assert configs["vllm-eagle"]["architectures"] == ["LlamaForCausalLM"]
    assert configs["vllm-eagle"]["qkv_bias"]
    assert not configs["vllm-eagle"]["attention_bias"]
    assert configs["sglang-eagle"]["architectures"] == ["Qwen2ForCausalLMEagle"]
    assert {config["max_position_embeddings"] for config in configs.values()} == {96}


def test_scaled_rotation_is_written_for_both_majors(tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    model = build_model(rope_parameters=rope)
    drafter = build("vllm-eagle", model)
    write(drafter, "vllm-eagle", tmp_path, model)
    config = without_own_key(tmp_path)
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert load_drafter(tmp_path).config.rope_parameters == rope


def test_official_eagle_checkpoint(tmp_path: Path) -> None:
    """Keys and config are those of yuhuili/EAGLE-*.

    These folders have fc with a bias, float16 weights, a key prefix, buffers, and few config keys.
    """
    model = model_of()
    drafter = build_eagle(model, eagle_input_norm=False, eagle_fc_bias=True)
    write(drafter, "eagle", tmp_path, model, torch.float16)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    torch.save(
        {f"model.{name}": value for name, value in weights.items()}, tmp_path / "pytorch_model.bin"
    )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "vocab_size": 67,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "bias": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = load_drafter(tmp_path)
    assert again.config.eagle_fc_bias
    assert not again.config.eagle_input_norm
    assert torch.equal(features(again, model), features(drafter.half().float(), model))


@pytest.mark.parametrize(
    ("name", "sizes", "model"),
    [
        ("moa", {"layer_attention_heads": 2}, {}),
        ("moa", {}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}),
        ("moa", {}, {"head_dim": 16}),
        ("moa-vllm", {"cross_attention_kv_heads": 2}, {}),
        ("moa-vllm", {"layer_attention_heads": 2}, {}),
        ("moa-vllm", {}, {"family": "qwen2"}),
        ("moa-vllm", {"n_target_layers": 1}, {}),
        *((name, {key: value}, {}) for name in MOA for key, value in UNLIKE_THE_PAPER.items()),
        ("eagle", {}, {"head_dim": 16}),
        ("vllm-eagle", {"eagle_fc_bias": True}, {}),
        ("moa-eagle", {"eagle_input_norm": False}, {}),
        ("eagle3", {"fused_layers": (0, 1)}, {}),
        ("eagle3", {"qkv_bias": True}, {}),
        ("dflash", {"sample_from_anchor": True}, {}),
        ("dflash", {"fused_layers": (-1, 1)}, {}),
        ("dspark", {"sample_from_anchor": False}, {}),
        ("dspark", {"context": "kv"}, {}),
        ("dspark", {"markov_head": "product"}, {}),
        ("vllm-dspark", {"markov_head": "rnn"}, {}),
    ],
)
def test_what_the_other_program_would_run_differently_is_refused(
    tmp_path: Path, name: str, sizes: Any, model: dict[str, Any]
) -> None:
    target = build_model(**model) if model else model_of()
    drafter = build(name, target, **sizes)
    assert len(LAYOUTS[name].refusals(drafter.config)) == 1
    with pytest.raises(DrafterError):
        write(drafter, name, tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["moa", "moa-vllm"])
def test_groups_of_keys_and_values_are_refused(name: str) -> None:
    drafter = build_drafter(build_family("deepseek_v3"))
    assert any(
        "kv_groups is (0, 0, 0, 0)" in text for text in LAYOUTS[name].refusals(drafter.config)
    )


def test_what_holds_no_drafter_says_what_it_is(tmp_path: Path) -> None:
    """The cases are a missing path, an interrupted run, a store, and any other folder."""
    run, store = tmp_path / "run", tmp_path / "store"
    for folder in (run / "checkpoints", store, tmp_path / "other"):
        folder.mkdir(parents=True)
    (run / "run.yaml").touch()
    (store / "plan.parquet").touch()
    for folder in (tmp_path / "none", store, tmp_path / "other", run):
        with raises_naming(DrafterError, folder):
            load_drafter(folder)
    (run / "checkpoints" / "last.ckpt").touch()
    with raises_naming(DrafterError, run, "`resume`"):
        load_drafter(run)


def test_a_drafter_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DrafterError):
        write_layout(build_eagle(model_of()), LAYOUTS["moa"], tmp_path)


@pytest.mark.parametrize(
    ("name", "own_key"),
    quick_rows(
        itertools.product(LAYOUTS, (True, False)),
        zip(LAYOUTS, itertools.cycle((True, False)), strict=False),
    ),
)
def test_wrong_tensors_are_named(tmp_path: Path, name: Any, own_key: bool) -> None:
    write_usual(name, tmp_path)
    if not own_key:
        without_own_key(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    # In EAGLE's folders the last layer is the drafter's own; the first one may only pass its input
    # on.
    key = max(key for key in weights if key.endswith("o_proj.weight"))
    for change in (
        {key: None},
        {"extra": torch.zeros(1)},
        {key: torch.zeros(2, 3)},
        {key: weights[key].int()},
    ):
        write_weights(tmp_path, weights | change)
        with pytest.raises(DrafterError):
            load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("eagle3", "num_hidden_layers", 2), ("eagle3", "attention_bias", True),
        ("eagle3", "mlp_bias", True), ("eagle3", "bias", True),
        ("eagle", "bias", True), ("eagle", "qkv_bias", True), ("eagle", "attention_bias", True),
        ("eagle", "mlp_bias", True), ("dflash", "attention_bias", True),
    ],
)  # fmt: skip
def test_tensors_that_a_config_calls_for_are_missed(
    tmp_path: Path, name: str, key: str, value: Any
) -> None:
    model = model_of()
    sizes = {"eagle_input_norm": False, "eagle_fc_bias": False} if name == "eagle" else {}
    write(build(name, model, **sizes), name, tmp_path, model)
    without_own_key(tmp_path)
    load_drafter(tmp_path)
    change_json(tmp_path / "config.json", **{key: value})
    with raises_naming(DrafterError, "config.json", key):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"enable_confidence_head": False}, ("confidence_head.proj.weight", [1, 56])),
        ({"draft_vocab_size": 40}, ("d2t", [40])),
    ],
)
def test_a_config_of_dspark_that_does_not_fit_its_tensors(
    tmp_path: Path, change: dict[str, Any], facts: tuple[object, ...]
) -> None:
    write_usual("dspark", tmp_path)
    without_own_key(tmp_path)
    load_drafter(tmp_path)
    change_json(tmp_path / "config.json", **change)
    with raises_naming(DrafterError, *facts):
        load_drafter(tmp_path)


@pytest.mark.parametrize("own_key", [True, False])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "dspark", "moa-vllm"])
def test_other_activations_are_refused(tmp_path: Path, name: str, own_key: bool) -> None:
    model = build_model()
    write(build(name, model), name, tmp_path, model)
    if not own_key:
        without_own_key(tmp_path)
    change_json(tmp_path / "config.json", hidden_act="gelu")
    with raises_naming(DrafterError, "hidden_act", "gelu"):
        load_drafter(tmp_path)


def test_a_bias_of_fc_that_a_config_denies_is_refused(tmp_path: Path) -> None:
    """In SGLang's folders, ``bias`` is about the attention."""
    model = build_model()
    drafter = build_eagle(model, eagle_input_norm=False, eagle_fc_bias=True)
    write(drafter, "eagle", tmp_path, model)
    without_own_key(tmp_path, bias=False)
    with raises_naming(DrafterError, "fc.bias", [48], "config.json"):
        load_drafter(tmp_path)
    change_json(tmp_path / "config.json", architectures=["LlamaForCausalLMEagle"])
    assert torch.equal(features(load_drafter(tmp_path), model), features(drafter, model))


@pytest.mark.parametrize("own_key", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (16,), (2, 3)])
@pytest.mark.parametrize("name", [*ENGINES, "moa-eagle"])
def test_an_fc_layer_of_another_shape_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], own_key: bool
) -> None:
    write_usual(name, tmp_path)
    if not own_key:
        without_own_key(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    key = next(key for key in weights if key.endswith("fc.weight"))
    write_weights(tmp_path, weights | {key: torch.ones(shape)})
    with raises_naming(DrafterError, key, list(shape), [48, 96]):
        load_drafter(tmp_path)


@pytest.mark.parametrize("own_key", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("name", [*ENGINES, "moa-eagle"])
def test_an_fc_layer_of_another_dtype_is_named(
    tmp_path: Path, name: str, dtype: torch.dtype, own_key: bool
) -> None:
    write_usual(name, tmp_path)
    if not own_key:
        without_own_key(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    key = next(key for key in weights if key.endswith("fc.weight"))
    write_weights(tmp_path, weights | {key: weights[key].to(dtype)})
    with raises_naming(DrafterError, key, [48, 96], str(dtype).removeprefix("torch."), "float32"):
        load_drafter(tmp_path)


def test_an_input_norm_that_the_moa_authors_eagle_lacks_is_named(tmp_path: Path) -> None:
    """In the other layouts of EAGLE, a drafter without this norm is another drafter."""
    write_usual("moa-eagle", tmp_path)
    without_own_key(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    write_weights(tmp_path, weights | {"spec_model.0.input_layernorm.weight": None})
    with raises_naming(DrafterError, "spec_model.0.input_layernorm.weight", [48]):
        load_drafter(tmp_path)


@pytest.mark.parametrize("own_key", [True, False])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("moa", "Ekv2E.weight"),
        ("moa-eagle", "spec_model_fc.weight"),
        ("hf-dflash", "encoder.fc.weight"),
        ("speculators-eagle3", "layers.0.mlp.up_proj.weight"),
    ],
)
def test_tensors_are_named_as_in_the_file(
    tmp_path: Path, name: str, key: str, own_key: bool
) -> None:
    write_usual(name, tmp_path)
    if not own_key:
        without_own_key(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for value in (torch.ones(3, 5), torch.full_like(weights[key], torch.nan)):
        write_weights(tmp_path, weights | {key: value})
        with raises_naming(DrafterError, key, list(value.shape)):
            load_drafter(tmp_path)


def test_an_fc_layer_that_eagle3_lacks_is_named(tmp_path: Path) -> None:
    write_usual("eagle3", tmp_path)
    without_own_key(tmp_path)
    write_weights(tmp_path, load_file(tmp_path / "model.safetensors") | {"fc.weight": None})
    with raises_naming(DrafterError, "fc.weight", [48, 144]):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fc.bias", torch.zeros(7)),
        ("layers.0.self_attn.o_proj.weight", torch.full((48, 48), torch.nan)),
        ("layers.0.mlp.up_proj.weight", torch.zeros(3)),
        ("layers.1.self_attn.q_proj.bias", torch.zeros(48)),
    ],
)
def test_an_additional_layer_that_does_not_return_its_input_is_named(
    tmp_path: Path, key: str, value: torch.Tensor
) -> None:
    write_usual("sglang-eagle", tmp_path)
    write_weights(tmp_path, load_file(tmp_path / "model.safetensors") | {key: value})
    with raises_naming(DrafterError, key, list(value.shape)):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    "name", [*ENGINES, "dspark", "speculators-eagle3", "speculators-dspark", "moa-eagle"]
)
def test_missing_tensors_are_named_with_their_shape(tmp_path: Path, name: str) -> None:
    model = build_model()
    write(build(name, model), name, tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    for key in weights.keys() - {"t2d"}:  # d2t names the same tokens
        write_weights(tmp_path, weights | {key: None})
        with raises_naming(DrafterError, list(weights[key].shape)):
            load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "other"),
    [
        ("eagle", "fc.weight", "model.fc.weight"),
        ("eagle", "embed_tokens.weight", "model.embed_tokens.weight"),
        ("hf-dflash", "encoder.fc.weight", "fc.weight"),
        ("eagle3", "midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
    ],
)
def test_two_names_of_one_tensor_are_named(tmp_path: Path, name: str, key: str, other: str) -> None:
    write_usual(name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    write_weights(tmp_path, weights | {other: weights[key] * 2})
    with raises_naming(
        DrafterError, tmp_path, key.removeprefix("encoder."), list(weights[key].shape)
    ):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "shape"),
    [
        ("eagle", EMBEDDINGS, [67, 48]),
        ("dspark", LM_HEAD, [67, 48]),
        ("eagle3", EMBEDDINGS, [67, 48]),
        ("llama", f"model.{LM_HEAD}", [67, 32]),
    ],
)
def test_copies_of_the_targets_tensors_that_are_damaged_are_named(
    tmp_path: Path, name: str, key: str, shape: list[int]
) -> None:
    """The target's tensors are used in place of them, so any finite values are accepted."""
    write_usual(name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    tensor = key.removeprefix("model.")
    write_weights(tmp_path, weights | {key: torch.full(shape, 3.0)})
    load_drafter(tmp_path)
    write_weights(tmp_path, weights | {key: torch.full(shape, torch.nan)})
    with raises_naming(DrafterError, tensor, shape, "float32"):
        load_drafter(tmp_path)
    write_weights(tmp_path, weights | {key: torch.ones(shape, dtype=torch.float8_e4m3fn)})
    load_drafter(tmp_path)
    write_weights(tmp_path, weights | {key: torch.full(shape, torch.nan, dtype=torch.bfloat16)})
    # No copy in float32 is made of a tensor that may be large.
    with raises_naming(DrafterError, tensor, shape, "bfloat16"):
        load_drafter(tmp_path)
    write_weights(tmp_path, weights | {key: torch.ones(999, 5)})
    with raises_naming(DrafterError, tensor, [999, 5], shape):
        load_drafter(tmp_path)


CONTRADICTIONS = [
    (name, key)
    for name in LAYOUTS
    for key in ("hidden_size", "vocab_size", "num_attention_heads", "num_hidden_layers")
    # In these formats, the number of layers is that of the target.
    if key != "num_hidden_layers" or name not in (*MOA, "moa-eagle")
] + [
    ("eagle", "hidden_act"), ("eagle", "tie_word_embeddings"), ("eagle", "attention_bias"),
    ("eagle", "qkv_bias"), ("eagle", "mlp_bias"), ("eagle", "bias"), ("eagle3", "mlp_bias"),
    ("dflash", "attention_bias"), ("llama", "tie_word_embeddings"), ("moa-vllm", "hidden_act"),
    ("speculators-eagle3", "fc_norm"), ("eagle", "rope_theta"), ("moa-vllm", "rope_theta"),
    *((name, key) for name in ("dspark", "vllm-dspark", "speculators-dspark") for key in
      ("markov_rank", "markov_head_type", "enable_confidence_head")),
]  # fmt: skip


def test_a_config_of_the_target_may_differ_from_the_drafter(tmp_path: Path) -> None:
    model = build_model(hidden_act="gelu", tie_word_embeddings=True, attention_bias=True)
    for name in ("moa", "moa-eagle"):
        drafter = build(name, model)
        write(drafter, name, tmp_path, model)
        assert load_drafter(tmp_path).config == drafter.config
        without_own_key(tmp_path)
        load_drafter(tmp_path)


@pytest.mark.parametrize("key", ["attention_bias", "qkv_bias", "mlp_bias", "bias"])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("moa", "moa-eagle")])
def test_biases_that_our_own_key_does_not_have_are_refused(
    tmp_path: Path, name: str, key: str
) -> None:
    write_usual(name, tmp_path)
    config = read_config(tmp_path)
    sizes = config.get("transformer_layer_config", config)
    expected = sizes.setdefault(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_drafter(tmp_path)
    sizes[key] = not expected
    (tmp_path / "config.json").write_text(json.dumps(config))
    with raises_naming(DrafterError, key, not expected, "moa_data"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(("name", "key"), CONTRADICTIONS)
def test_a_config_that_contradicts_our_own_key_is_refused(
    tmp_path: Path, name: str, key: str
) -> None:
    write_usual(name, tmp_path)
    config = read_config(tmp_path)
    for sizes in (config, config.get("transformer_layer_config", {})):
        if key in sizes:
            sizes[key] = 999
    (tmp_path / "config.json").write_text(json.dumps(config))
    with raises_naming(DrafterError, key, 999, "moa_data"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("name", "part", "key"),
    [
        ("eagle3", None, "fc_norm"),
        ("eagle3", "rope_parameters", "rope_theta"),
        ("speculators-eagle3", None, "tie_word_embeddings"),
        ("speculators-dspark", "transformer_layer_config", "tie_word_embeddings"),
    ],
)
def test_no_part_of_a_config_may_contradict_our_own_key(
    tmp_path: Path, name: str, part: str | None, key: str
) -> None:
    write_usual(name, tmp_path)
    config = read_config(tmp_path)
    (config[part] if part else config)[key] = 999
    (tmp_path / "config.json").write_text(json.dumps(config))
    with raises_naming(DrafterError, key, 999, "moa_data"):
        load_drafter(tmp_path)


FOREIGN: dict[str, Any] = {"moa_data": None}
IDS, BLOCK = "eagle_aux_hidden_state_layer_ids", {"block_size": 7, "mask_token_id": 66}
UNUSABLE: list[tuple[str, Any]] = [
    ("sglang-eagle", "{"),
    ("sglang-eagle", "[]"),
    ("sglang-eagle", {"moa_data": 3}),
    ("sglang-eagle", {"moa_data": {"format": "new", "drafter": {}}}),
    ("sglang-eagle", {"moa_data": {"format": "eagle", "drafter": {"a": 1}}}),
    *(
        ("sglang-eagle", FOREIGN | sizes)
        for sizes in ({"hidden_size": None}, {"head_dim": -1}, {"hidden_size": 96})
    ),
    *(("eagle3", FOREIGN | {"eagle_config": {}, IDS: ids}) for ids in (None, "0")),
    ("dflash", FOREIGN | {"layer_types": ["sliding_attention"] * 2}),
    ("dflash", FOREIGN | {"dflash_config": BLOCK}),
    ("dflash", FOREIGN | {"dflash_config": BLOCK | {"target_layer_ids": [0, 2], "causal": True}}),
    ("dflash", FOREIGN | {"dflash_config": BLOCK | {"target_layer_ids": "0"}}),
    ("dflash", FOREIGN | {"dflash_config": {}, "block_size": None}),
]
"""Layout, and changes to its config.json or another text in its place."""


@pytest.mark.parametrize(("name", "changes"), UNUSABLE)
def test_configs_that_cannot_be_used_are_refused(tmp_path: Path, name: str, changes: Any) -> None:
    write_usual(name, tmp_path)
    text = changes if isinstance(changes, str) else json.dumps(read_config(tmp_path) | changes)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DrafterError):
        load_drafter(tmp_path)


def test_tensors_that_contradict_the_drafter_are_named(tmp_path: Path) -> None:
    write_usual("sglang-eagle", tmp_path)
    write_weights(tmp_path, load_file(tmp_path / "model.safetensors") | {"fc.bias": torch.ones(48)})
    with raises_naming(DrafterError, "fc.bias"):
        load_drafter(tmp_path)
    write_weights(tmp_path, {"some.weight": torch.zeros(1)})
    without_own_key(tmp_path)
    with raises_naming(DrafterError, "some.weight"):
        load_drafter(tmp_path)
    write_weights(tmp_path, {})
    with pytest.raises(DrafterError, match="no tensors"):
        load_drafter(tmp_path)
    change_json(tmp_path / "config.json", moa_data={"format": "sglang-eagle"})
    with raises_naming(DrafterError, "moa_data", "config.json", "'drafter'"):
        load_drafter(tmp_path)


def test_eagle3_says_which_layers_it_joins(tmp_path: Path) -> None:
    write_usual("eagle3", tmp_path)
    for own in (["moa_data"], ["moa_data", "eagle_config"]):
        without_own_key(tmp_path, **dict.fromkeys(own))
        assert load_drafter(tmp_path).config.fused_layers == (0, 1, 2)
    without_own_key(tmp_path, eagle_config={IDS: [0, 1, 9]})
    with raises_naming(TargetError, 9, 4):
        check_drafter_matches(load_drafter(tmp_path), Target(model_of()))


@pytest.mark.parametrize("name", ["eagle3", "speculators-eagle3"])
def test_eagle3_has_no_map_of_the_whole_vocabulary(tmp_path: Path, name: str) -> None:
    """Such a map is refused by vLLM; we also read folders that have one."""
    model = model_of()
    drafter = build("eagle3", model, draft_vocabulary=67)
    write(drafter, name, tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    assert not {"d2t", "t2d"} & weights.keys()
    own = {key: value for key, value in drafter.state_dict().items() if key in ("d2t", "t2d")}
    for more in ({}, own):
        write_weights(tmp_path, weights | more)
        found = load_drafter(tmp_path).state_dict()
        assert all(torch.equal(found[key], value) for key, value in drafter.state_dict().items())


def test_eagle3_with_the_norms_of_eagle_3_1_under_the_names_of_vllm(tmp_path: Path) -> None:
    """Without these norms, config.json does not have their flags."""
    model = model_of()
    (tmp_path / "plain").mkdir()
    write_usual("eagle3", tmp_path / "plain")
    drafter = build("eagle3", model, fc_norm=True, norm_output=True)
    write(drafter, "eagle3", tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    assert {name for name in weights if "fc_norm" in name} == {
        f"fc_norm.{index}.weight" for index in range(3)
    }
    assert set(read_config(tmp_path)) - set(read_config(tmp_path / "plain")) == {
        "fc_norm",
        "norm_output",
    }
    without_own_key(tmp_path)
    write_weights(
        tmp_path, {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    )
    again: Any = load_drafter(tmp_path)
    assert (again.kind, again.config.fc_norm, again.config.norm_output) == ("eagle3", True, True)
    frozen = FrozenTarget.from_model(model)
    assert torch.equal(
        *(one.draft_logits(frozen, features(one, model)) for one in (again, drafter))
    )


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"logit_scale": 0.5}, ("logit_scale", 0.5)),
        ({"target_hidden_size": 96}, ("target_hidden_size", 96)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ("use_aux_hidden_state", False)),
    ],
)
def test_keys_of_eagle3_that_change_the_computation_are_heeded(
    tmp_path: Path, changes: dict[str, Any], facts: tuple[object, ...]
) -> None:
    """Keys of speculators' norms are applied; other keys are refused by name."""
    model = model_of()
    write(
        build("eagle3", model, norm_before_fc=True, norm_before_residual=True),
        "eagle3",
        tmp_path,
        model,
    )
    without_own_key(tmp_path)
    assert read_config(tmp_path)["norm_before_residual"]
    sizes: Any = load_drafter(tmp_path).config
    assert (sizes.norm_before_fc, sizes.norm_before_residual) == (True, True)
    without_own_key(tmp_path, **changes)
    with raises_naming(DrafterError, *facts):
        load_drafter(tmp_path)


def test_only_one_norm_of_eagle3_is_read_in_its_own_dict(tmp_path: Path) -> None:
    """``norm_before_fc`` is read in ``eagle_config`` too, and the other flags are not."""
    model = model_of()
    write(
        build("eagle3", model, norm_before_fc=True, norm_before_residual=True),
        "eagle3",
        tmp_path,
        model,
    )
    config = read_config(tmp_path)
    inner = config["eagle_config"] | {"norm_output": True, "norm_before_residual": False}
    del config["norm_before_fc"]
    without_own_key(tmp_path, eagle_config=inner | {"norm_before_fc": True})
    sizes: Any = load_drafter(tmp_path).config
    assert (sizes.norm_output, sizes.norm_before_residual) == (False, True)
    assert sizes.norm_before_fc


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("name", ["eagle3", "speculators-eagle3"])
def test_eagle3_may_leave_out_what_d2t_implies(tmp_path: Path, name: str, layer: str) -> None:
    """NVIDIA's Model-Optimizer leaves t2d out, and numbers its layer."""
    model = model_of()
    drafter = build("eagle3", model, draft_vocabulary=3)
    drafter.d2t.copy_(torch.tensor([1, 3, 7]))
    drafter.t2d.zero_()[[1, 4, 9]] = True
    write(drafter, name, tmp_path, model)
    without_own_key(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["t2d"]
    write_weights(
        tmp_path, {key.replace("midlayer.", layer): value for key, value in weights.items()}
    )
    assert torch.equal(load_drafter(tmp_path).state_dict()["t2d"], drafter.t2d)
    # d2t has token ids instead of offsets.
    write_weights(tmp_path, weights | {"d2t": torch.tensor([1, 4, 65])})
    with raises_naming(DrafterError, "d2t", 67, 66):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(
            ("eagle", key)
            for key in ("num_key_value_heads", "intermediate_size", "num_hidden_layers")
        ),
        *(
            ("eagle3", key)
            for key in ("num_key_value_heads", "intermediate_size", "draft_vocab_size")
        ),
        *(
            ("dflash", key)
            for key in ("num_key_value_heads", "intermediate_size", "num_hidden_layers")
        ),
    ],
)
def test_sizes_of_the_config_must_be_those_of_the_weights(
    tmp_path: Path, name: str, key: str
) -> None:
    write_usual(name, tmp_path)
    size = without_own_key(tmp_path)[key]
    load_drafter(tmp_path)
    without_own_key(tmp_path, **{key: 2 * size})
    with raises_naming(DrafterError, "config.json", key, 2 * size, size):
        load_drafter(tmp_path)


NOT_FINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    quick_rows(
        itertools.product(("own", *LAYOUTS), NOT_FINITE),
        zip(("own", *LAYOUTS), itertools.cycle(NOT_FINITE), strict=False),
    ),
)
def test_values_that_are_not_finite_are_named(tmp_path: Path, name: str, value: float) -> None:
    model = model_of()
    drafter = build("moa" if name == "own" else name, model)
    tensor = next(iter(drafter.parameters()))
    tensor.data.view(-1)[0] = value
    if name == "own":
        save_drafter(drafter, tmp_path)
    else:
        write(drafter, name, tmp_path, model)
    with raises_naming(DrafterError, 1, list(tensor.shape), "float32"):
        load_drafter(tmp_path)


def test_values_that_overflow_in_float16_are_named(tmp_path: Path) -> None:
    drafter = build_drafter(model_of())
    drafter.kv_to_hidden.weight.data[0, 0] = 7e4
    save_drafter(drafter, tmp_path)
    load_drafter(tmp_path, torch.bfloat16)
    with raises_naming(DrafterError, 1, "kv_to_hidden.weight", "float16", "`dtype=bfloat16`"):
        load_drafter(tmp_path, torch.float16)


@pytest.mark.parametrize(
    ("d2t", "marked"),
    [
        ([1, 4, 65], [1, 4, 65]),  # token ids instead of offsets
        ([1, 0, 7], [1, 9]),  # two draft ids for one token
        ([1, 3, 7], [1, 4, 8]),
        ([1, 3, 7], [1, 4, 8, 9]),
    ],
)
def test_a_wrong_map_of_the_vocabulary_is_refused(d2t: list[int], marked: list[int]) -> None:
    drafter = build_eagle3(model_of(), draft_vocabulary=3)
    drafter.d2t.copy_(torch.tensor([1, 3, 7]))
    drafter.t2d.zero_()[[1, 4, 9]] = True
    build_drafter_of(drafter.config, drafter.state_dict())
    drafter.d2t.copy_(torch.tensor(d2t))
    drafter.t2d.zero_()[marked] = True
    with pytest.raises(DrafterError):
        build_drafter_of(drafter.config, drafter.state_dict())


@pytest.mark.parametrize(
    ("family", "input_norm"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", True)]
)
@torch.no_grad()
def test_the_file_computes_the_same_in_an_engines_order_of_work(
    tmp_path: Path, family: str, input_norm: bool
) -> None:
    """The layers of transformers give the same features if the first one runs without its norm.

    vLLM, SGLang and the EAGLE authors' code run it in this way.
    """
    model = model_of(family)
    drafter = build_eagle(model, eagle_input_norm=input_norm)
    write(drafter, "sglang-eagle", tmp_path, model)
    weights, written = load_file(tmp_path / "model.safetensors"), read_config(tmp_path)
    written |= {"architectures": None, "model_type": "llama", "attention_bias": written["qkv_bias"]}
    config = LlamaConfig.from_dict(written, attn_implementation="eager")
    hidden = torch.randn(1, 12, config.hidden_size, generator=torch.Generator().manual_seed(0))
    embeddings = model.model.embed_tokens(torch.arange(3, 15)[None])
    x = torch.cat((embeddings, hidden), dim=-1) @ weights["fc.weight"].T + weights["fc.bias"]
    rotation = LlamaRotaryEmbedding(config)(x, torch.arange(12)[None])
    mask = torch.full((1, 1, 12, 12), float("-inf")).triu(1)
    for index in range(config.num_hidden_layers):
        layer = LlamaDecoderLayer(config, index).eval()
        if not index:
            layer.set_submodule("input_layernorm", torch.nn.Identity())
        prefix = f"layers.{index}."
        own = {
            key.removeprefix(prefix): value
            for key, value in weights.items()
            if key.startswith(prefix)
        }
        missing, unexpected = layer.load_state_dict(own, strict=False)
        assert not unexpected
        assert set(missing) <= {"self_attn.o_proj.bias"}
        if missing:
            layer.self_attn.o_proj.bias.zero_()
        x = layer(x, attention_mask=mask, position_embeddings=rotation)
    torch.testing.assert_close(
        x, drafter(drafter.combine(embeddings, hidden), torch.arange(12)[None]), rtol=0, atol=2e-5
    )


PUBLISHED = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""Weights of a layer, from the header of a published checkpoint of z-lab."""


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_keys_and_config_of_block_drafters(tmp_path: Path, head: str) -> None:
    """Names and layer ids are as published.

    vLLM and speculators count layer ids from the embedding.
    """
    model = model_of()
    backbone = {"fc", "hidden_norm", "norm"} | {
        f"layers.{i}.{name}" for i in (0, 1) for name in PUBLISHED
    }
    write(build_block("dflash", model), "dflash", tmp_path / "dflash", model)
    assert set(load_file(tmp_path / "dflash" / "model.safetensors")) == {
        f"{name}.weight" for name in backbone
    }
    config = read_config(tmp_path / "dflash")
    assert (config["architectures"], config["num_target_layers"]) == (["DFlashDraftModel"], 4)
    assert config["dflash_config"] == {
        "block_size": 7,
        "mask_token_id": 66,
        "target_layer_ids": [0, 2],
    }
    drafter = build_block("dspark", model, markov_head=head, confidence_with_markov=head == "gated")
    write(drafter, "dspark", tmp_path / "dspark", model)
    weights = load_file(tmp_path / "dspark" / "model.safetensors")
    own = {
        "embed_tokens.weight",
        "lm_head.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }
    own |= {f"markov_head.markov_w{i}.weight" for i in (1, 2) if head != "none"}
    inner = {"gated": "gate_proj", "rnn": "joint_proj"}.get(head)
    own |= {f"markov_head.{inner}.{part}" for part in ("weight", "bias") if inner}
    assert set(weights) == own | {f"{name}.weight" for name in backbone}
    config = read_config(tmp_path / "dspark")
    assert config["target_layer_ids"] == [0, 2]
    assert config["markov_rank"] == (0 if head == "none" else 8)
    assert config["enable_confidence_head"]
    # With vLLM's names and layer ids it is the same drafter.
    del config["target_layer_ids"], config["dflash_config"]["target_layer_ids"], config["moa_data"]
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3]
    (tmp_path / "dspark" / "config.json").write_text(json.dumps(config))
    save_file(
        {f"model.{name}": value for name, value in weights.items()},
        tmp_path / "dspark" / "model.safetensors",
    )
    again: Any = load_drafter(tmp_path / "dspark")
    check_drafter_matches(again, Target(model))
    found, expected = features(again, model), features(drafter, model)
    frozen = FrozenTarget.from_model(model)
    assert torch.equal(again.draft_logits(frozen, found), drafter.draft_logits(frozen, expected))
    assert torch.equal(again.confidence(found), drafter.confidence(expected))


# Our own layout


def same_weights(one: Any, other: Any) -> bool:
    weights, others = one.state_dict(), other.state_dict()
    return weights.keys() == others.keys() and all(
        torch.equal(value, others[name]) for name, value in weights.items()
    )


def test_weights_in_several_files(tmp_path: Path) -> None:
    model = build_model()
    drafter = build("eagle3", model)
    write(drafter, "eagle3", tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    weight_map: dict[str, Any] = {}
    for file, parts in shards.items():
        save_file({name: weights[name] for name in parts}, tmp_path / file)
        weight_map |= dict.fromkeys(parts, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert same_weights(load_drafter(tmp_path), drafter)
    for wrong in ("../model-1.safetensors", "model-1.bin", 3):
        index.write_text(json.dumps({"weight_map": weight_map | {"x": wrong}}))
        with raises_naming(DrafterError, index, wrong):
            load_drafter(tmp_path)
    for text in ("{}", '{"weight_map": {}}', '{"weight_map": null}'):
        index.write_text(text)
        with raises_naming(DrafterError, index, "weight_map"):
            load_drafter(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file(weights, tmp_path / "model-2.safetensors")
    with raises_naming(DrafterError, index, names[0]):
        load_drafter(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with raises_naming(DrafterError, tmp_path / "model-2.safetensors"):
        load_drafter(tmp_path)
    index.unlink()
    with raises_naming(DrafterError, tmp_path / "model.safetensors"):
        load_drafter(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").touch()
    with raises_naming(DrafterError, "pytorch_model.bin.index.json", "model.safetensors"):
        load_drafter(tmp_path)


def test_official_layout_as_pickle_and_its_faults(tmp_path: Path) -> None:
    model = model_of()
    drafter = build_drafter(model)
    write_layout(drafter, LAYOUTS["moa"], tmp_path, target={"config": model.config})
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert same_weights(load_drafter(tmp_path), drafter)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("moa_data")
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nothing"}))
    with raises_naming(DrafterError, "config.json", "nothing"):
        load_drafter(tmp_path)
    for content in ([torch.zeros(1)], {"a": 1}, {"a": Path("code")}, None):
        torch.save(content, tmp_path / "pytorch_model.bin")
        if content is None:
            (tmp_path / "pytorch_model.bin").write_bytes(b"torn")
        with raises_naming(DrafterError, tmp_path / "pytorch_model.bin"):
            load_drafter(tmp_path)


def test_drafters_are_named_by_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    target = Target(model_of())
    for folder in ("one/drafter", "two", "other/two"):
        save_drafter(build_drafter(target.model), tmp_path / folder)
    folders = ["~/one", str(tmp_path / "two"), str(tmp_path / "other" / "two")]
    assert list(load_drafters(folders, target, torch.float32)) == ["one", "two", "two'"]


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ({"n_heads": "4"}, ("n_heads", "'4'")), ({"norm_eps": "small"}, ("norm_eps", "'small'")),
        ({"n_heads": None}, ("n_heads",)),
        *(
            (text, ())
            for text in (b'{"kind": []}', b'{"hidden": 1}', b"[]", b"null", b"{", b"\xff")
        ),
    ],
)  # fmt: skip
def test_descriptions_that_cannot_be_used_are_refused(
    tmp_path: Path, content: Any, facts: tuple[object, ...]
) -> None:
    save_drafter(build_drafter(model_of()), tmp_path)
    file = tmp_path / "drafter.json"
    if isinstance(content, dict):
        values = json.loads(file.read_text()) | content
        content = json.dumps(
            {name: value for name, value in values.items() if value is not None}
        ).encode()
    file.write_bytes(content)
    with raises_naming(DrafterError, *facts):
        load_drafter(tmp_path)


def test_strict_keys_and_shapes(tmp_path: Path) -> None:
    drafter = build_drafter(model_of())
    save_drafter(drafter, tmp_path)
    weights = load_file(tmp_path / "drafter.safetensors")
    for change in (
        {"kv_to_hidden.bias": None},
        {"extra": torch.zeros(1)},
        {"kv_to_hidden.bias": torch.zeros(2)},
    ):
        changed = {name: value for name, value in (weights | change).items() if value is not None}
        save_file(changed, tmp_path / "drafter.safetensors")
        with raises_naming(DrafterError, next(iter(change))):
            load_drafter(tmp_path)
    (tmp_path / "drafter.safetensors").write_bytes(b"torn")
    with pytest.raises(DrafterError):
        load_drafter(tmp_path)
    (tmp_path / "drafter.safetensors").unlink()
    with raises_naming(DrafterError, tmp_path / "drafter.safetensors"):
        load_drafter(tmp_path)


def test_another_target_is_refused(tmp_path: Path) -> None:
    model = model_of()
    target = Target(model)
    target.identity = {"weights_sha256": "cd" * 32}
    check_drafter_matches(build_drafter(model, target={"weights_sha256": "cd" * 32}), target)
    with raises_naming(TargetError, "ef" * 6, "cd" * 6):
        check_drafter_matches(build_drafter(model, target={"weights_sha256": "ef" * 32}), target)
    with raises_naming(TargetError, "kv_width", 48, 96):
        check_drafter_matches(build_drafter(model), Target(model_of(num_key_value_heads=4)))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "does not exist"),
        (("run.yaml",), "stopped before .* again[.]"),
        (("run.yaml", "checkpoints/last.ckpt"), "again with `resume`"),
        (("store.json", "plan.parquet"), "is a store"),
        (("notes",), "holds no drafter"),
    ],
)
def test_what_is_no_drafter_is_named(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    folder = tmp_path / "folder"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    with pytest.raises(DrafterError, match=said):
        load_drafter(folder)
