"""Targets whose weights contradict config.json or are not finite are refused by name."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moa_data.errors import NotEnoughMemory, TargetError
from moa_data.moa.targets import loading, model_files
from moa_data.moa.targets.facts import load_facts
from moa_data.moa.targets.loading import check_weights, load_target_model
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.families import build_family
from moa_data.tests.kit.hostile import change_json
from moa_data.tests.kit.models import build_model

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KEYS = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, written: Path) -> Path:
    """Return a copy of a Llama's folder."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return tmp_path


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a folder's file."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file({name: value.contiguous() for name, value in weights.items()}, file, {"format": "pt"})


def refused(folder: Path, *texts: str, dtype: torch.dtype = torch.float32) -> None:
    """Check that loading is refused with a single line that contains all texts.

    The check without loading must refuse the folder in the same words.
    """
    for load in (
        lambda: load_target_model(folder, dtype, "cpu"),
        lambda: check_weights(folder, dtype),
    ):
        with pytest.raises(TargetError) as caught:
            load()
        message = str(caught.value)
        assert "\n" not in message
        for text in texts:
            assert text in message


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        (
            {"vocab_size": 66},
            (f"{EMBEDDINGS} has shape [67, 48], expected [66, 48]", "vocab_size 66"),
        ),
        (
            {"vocab_size": 68},
            (f"{EMBEDDINGS} has shape [67, 48], expected [68, 48]", "vocab_size 68"),
        ),
        (
            {"num_key_value_heads": 4},
            (f"{KEYS} has shape [24, 48], expected [48, 48]", "num_key_value_heads 4"),
        ),
        (
            {"intermediate_size": 60},
            (".mlp.gate_proj.weight has shape [64, 48], expected [60, 48]",),
        ),
        (
            {"num_hidden_layers": 3},
            ("unexpected tensor model.layers.3.input_layernorm.weight [48]", "hidden_layers 3"),
        ),
        ({"num_hidden_layers": 5}, ("missing tensor model.layers.4.", "num_hidden_layers 5")),
        (
            {"attention_bias": True},
            ("missing tensor model.layers.0.self_attn.q_proj.bias [48]", "attention_bias True"),
        ),
        (
            {"tie_word_embeddings": True},
            (f"{HEAD} [67, 48] differs from the embeddings", "tie_word_embeddings True"),
        ),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_the_weights(
    folder: Path, config: dict[str, Any], texts: tuple[str, ...]
) -> None:
    change_json(folder / "config.json", **config)
    refused(folder, *texts)


def test_weights_that_the_config_does_not_have(folder: Path) -> None:
    change_weights(
        folder, lambda weights: weights.update({KEYS.replace("weight", "bias"): torch.zeros(24)})
    )
    refused(
        folder,
        "unexpected tensor model.layers.0.self_attn.k_proj.bias [24]",
        "attention_bias False",
    )


def test_weights_that_are_missing(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(HEAD))
    refused(folder, f"missing tensor {HEAD} [67, 48]", "tie_word_embeddings False")


def test_weights_in_several_files(folder: Path) -> None:
    build_model("llama").save_pretrained(folder / "shards", max_shard_size="40KB")
    assert len(list((folder / "shards").glob("*.safetensors"))) > 1
    load_target_model(folder / "shards", torch.float32, "cpu")
    change_json(folder / "shards/config.json", vocab_size=66)
    refused(folder / "shards", f"{EMBEDDINGS} has shape [67, 48], expected [66, 48]")


def test_a_tensor_in_two_files_is_named(folder: Path) -> None:
    model = load_file(folder / "model.safetensors")
    save_file({HEAD: model[HEAD] * 2}, folder / "more.safetensors")
    refused(folder, f"{HEAD} [67, 48] in more.safetensors", "as the same tensor")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.0.self_attn.k_proj.weight", [24, 48]),
        ("model.model.norm.weight", [48]),
        ("norm.weight", [7]),
    ],
)
def test_two_names_of_one_tensor_are_named(folder: Path, name: str, shape: list[int]) -> None:
    change_weights(folder, lambda weights: weights.update({name: torch.ones(shape)}))
    refused(folder, f"{name} {shape}", "as the same tensor")


def test_names_without_a_prefix_are_the_targets_too(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in weights.keys() - {HEAD}:
        weights[name.removeprefix("model.")] = weights.pop(name)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    check_weights(folder, torch.float32)
    loaded = load_target_model(folder, torch.float32, "cpu").state_dict()
    assert torch.equal(loaded[KEYS], weights[KEYS.removeprefix("model.")])


def test_tensors_that_are_not_the_targets_are_no_disagreement(folder: Path) -> None:
    extra = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(6) for layer in range(4)
    }
    # This tensor belongs to a layer for multi-token prediction.
    extra["model.layers.4.eh_proj.weight"] = torch.ones(2, 2)
    change_weights(folder, lambda weights: weights.update(extra))
    change_json(folder / "config.json", num_nextn_predict_layers=1)
    load_target_model(folder, torch.float32, "cpu")
    check_weights(folder, torch.float32)
    change_json(folder / "config.json", num_nextn_predict_layers=0)
    refused(folder, "unexpected tensor model.layers.4.eh_proj.weight [2, 2]")


def test_layers_are_for_drafting_only_if_they_have_its_parts(folder: Path) -> None:
    """A config with one layer too few must not lose the last layer as one for drafting."""
    change_json(folder / "config.json", num_hidden_layers=3, num_nextn_predict_layers=1)
    refused(folder, "unexpected tensor model.layers.3.input_layernorm.weight [48]")


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_weights_of_dtypes_that_are_not_floating_point(
    folder: Path, dtype: torch.dtype, prefix: str
) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights[KEYS] = torch.ones(24, 48).to(dtype)
        for name in list(weights):
            weights[name.replace("model.", prefix, 1)] = weights.pop(name)

    change_weights(folder, change)
    refused(folder, KEYS, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_of_dtypes_that_are_not_floating_point(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """The model has no tensors of these names, because transformers stacks the experts."""
    build_family(family).save_pretrained(tmp_path)
    names = sorted(load_file(tmp_path / "model.safetensors"))
    name = [name for name in names if ".experts." in name][3]
    change_weights(tmp_path, lambda weights: weights.update({name: weights[name].to(dtype)}))
    shape = list(load_file(tmp_path / "model.safetensors")[name].shape)
    refused(tmp_path, name, str(shape), "expected float32")


def test_layers_of_unlike_sizes_are_named_too(tmp_path: Path) -> None:
    """Config attributes that differ between Gemma 4's layers cannot be read."""
    build_family("gemma4_text").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = max(key for key in weights if key.endswith("q_proj.weight"))
    change_weights(tmp_path, lambda weights: weights.pop(name))
    refused(tmp_path, f"missing tensor {name}")


def test_tied_weights_may_be_there_twice(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({HEAD: weights[EMBEDDINGS].clone()}))
    change_json(folder / "config.json", tie_word_embeddings=True)
    load_target_model(folder, torch.float32, "cpu")
    check_weights(folder, torch.float32)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tied_head_that_differs_is_named_without_a_prefix_too(
    tmp_path: Path, family: str
) -> None:
    build_family(family).save_pretrained(tmp_path)

    def change(weights: dict[str, Tensor]) -> None:
        for name in weights.keys() - {HEAD}:
            weights[re.sub(r"^(model|transformer)\.", "", name)] = weights.pop(name)

    change_weights(tmp_path, change)
    change_json(tmp_path / "config.json", tie_word_embeddings=True)
    refused(tmp_path, f"{HEAD} [67, 48] differs from the embeddings")


def test_a_tied_head_is_compared_in_the_dtype_of_use(folder: Path) -> None:
    """Its copy may be stored in another dtype."""
    change_weights(
        folder, lambda weights: weights.update({HEAD: weights[EMBEDDINGS].to(torch.bfloat16)})
    )
    change_json(folder / "config.json", tie_word_embeddings=True)
    load_target_model(folder, torch.bfloat16, "cpu")
    check_weights(folder, torch.bfloat16)
    refused(folder, f"{HEAD} [67, 48] differs from the embeddings")


@pytest.mark.parametrize("change", ["missing", "missing expert", "another shape"])
def test_experts_that_cannot_be_stacked(tmp_path: Path, change: str) -> None:
    build_family("mixtral").save_pretrained(tmp_path)
    names = sorted(load_file(tmp_path / "model.safetensors"))
    expert = [name for name in names if "layers.1." in name and ".experts.2." in name]
    shape = list(load_file(tmp_path / "model.safetensors")[expert[0]].shape)

    def damage(weights: dict[str, Tensor]) -> None:
        if change == "another shape":
            weights[expert[0]] = weights[expert[0]][:5]
        else:
            for name in expert if change == "missing expert" else expert[:1]:
                del weights[name]

    change_weights(tmp_path, damage)
    missing = f"missing tensor {expert[0]} {shape}"
    other = f"{expert[0]} has shape [5, {shape[1]}], expected {shape}"
    refused(tmp_path, other if change == "another shape" else missing)


def test_a_matrix_that_all_experts_of_a_layer_lack_is_named(tmp_path: Path) -> None:
    build_family("mixtral").save_pretrained(tmp_path)
    names = sorted(load_file(tmp_path / "model.safetensors"))
    matrices = [name for name in names if "layers.1." in name and name.endswith("w1.weight")]

    def damage(weights: dict[str, Tensor]) -> None:
        for name in matrices:
            del weights[name]

    change_weights(tmp_path, damage)
    refused(tmp_path, f"missing tensor {matrices[0]} [")


@pytest.mark.parametrize("start", ["model.layers.1.", "model.layers.1.block_sparse_moe.experts."])
def test_a_layer_that_the_config_does_not_have_is_named(tmp_path: Path, start: str) -> None:
    """The first expert of the layer is missing."""
    build_family("mixtral").save_pretrained(tmp_path)

    def add(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            if name.startswith(start) and ".experts.0." not in name:
                weights[name.replace(".1.", ".9.", 1)] = weights[name].clone()

    change_weights(tmp_path, add)
    refused(tmp_path, "unexpected tensor model.layers.9.")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(folder: Path, value: float) -> None:
    def put(weights: dict[str, Tensor]) -> None:
        weights[KEYS][2, 3] = value

    change_weights(folder, put)
    refused(folder, f"1 values of {KEYS} [24, 48] are NaN or infinity in float32")


def test_values_that_overflow_in_float16(folder: Path) -> None:
    def put(weights: dict[str, Tensor]) -> None:
        weights[EMBEDDINGS][:, 3] = 7e4

    change_weights(folder, put)
    load_target_model(folder, torch.bfloat16, "cpu")
    refused(folder, f"67 values of {EMBEDDINGS} [67, 48]", "`dtype=bfloat16`", dtype=torch.float16)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("name", "dtype"), [("torch.bfloat16", torch.bfloat16), ("auto", None)])
def test_dtypes_that_other_programs_write(folder: Path, key: str, name: str, dtype: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    values.pop("dtype")
    (folder / "config.json").write_text(json.dumps(values | {key: name}))
    assert load_facts(folder).config.dtype == dtype
    assert load_target_model(folder, torch.float32, "cpu").dtype == torch.float32


def refuse(error: Exception) -> Callable[..., NoReturn]:
    def refused(*args: Any, **options: Any) -> NoReturn:
        raise error

    return refused


@pytest.mark.parametrize(("n_free", "fits_in_bfloat16"), [(30_000, True), (10_000, False)])
def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_free: int, fits_in_bfloat16: bool
) -> None:
    build_model("llama").save_pretrained(tmp_path)
    n_bytes = sum(weight.numel() for weight in build_model("llama").parameters()) * 4
    monkeypatch.setattr(loading, "free_memory", lambda: n_bytes * n_free // 40_000)
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read")
    )
    with raises_naming(TargetError, tmp_path, "float32") as caught:
        load_target_model(tmp_path, torch.float32, "cpu")
    assert ("`dtype=bfloat16`" in str(caught.value)) == fits_in_bfloat16


def test_weights_that_cannot_be_mapped_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens for a sparse file that is larger than the address space of the process."""
    build_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(
        model_files, "safe_open", refuse(MemoryError("Cannot allocate memory (os error 12)"))
    )
    with raises_naming(NotEnoughMemory, tmp_path / "model.safetensors"):
        load_target_model(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize("value", [["llama"], {"llama": 1}, 3])
def test_a_model_type_that_is_not_a_text_is_refused(folder: Path, value: Any) -> None:
    change_json(folder / "config.json", model_type=value)
    refused(folder, "model type")
