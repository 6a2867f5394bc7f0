"""Drafters that speculators' own classes saved compute the same here.

``tests/engines/speculators_side.py`` made the folders with ``save_pretrained`` and describes the
vectors.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from moa_data.errors import DrafterError
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.formats.checkpoint import (
    LAYOUTS,
    check_drafter_matches,
    load_drafter,
    write_layout,
)
from moa_data.moa.formats.layout import EMBEDDINGS
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.errors import raises_naming

DATA = Path(__file__).parent / "data_speculators"
NATIVE = sorted(path.name for path in DATA.iterdir() if path.name != "verifier")
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}


def verifier(folder: Path = DATA / "verifier") -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def shared_verifier() -> Any:
    """Load the target once for all tests, which only read it."""
    model = verifier()
    model.config.name_or_path = "verifier"
    return model


@torch.no_grad()
def logits_of(drafter: Any, model: Any, vectors: dict[str, Any]) -> dict[str, Tensor]:
    """Compute what a file of vectors holds. Tokens outside a reduced vocabulary have -inf."""
    frozen, tokens = FrozenTarget.from_model(model), vectors["input_ids"][None]
    outputs = vectors["hidden_states"][None].split(model.config.hidden_size, dim=-1)
    if drafter.kind == "eagle3":
        # Slot s holds the token at s + 1.
        tokens, outputs = (
            torch.cat((tokens[:, :1], tokens), 1),
            tuple(torch.cat((x, x[:, :1]), 1) for x in outputs),
        )
    mask, no_hidden = torch.ones_like(tokens, dtype=torch.bool), torch.empty(0)
    inputs = TrainingInputs(tokens, mask, hidden=no_hidden, kv=None, layer_outputs=outputs)
    if drafter.kind == "eagle3":
        queries = torch.arange(1, tokens.shape[1])[None]
        features, _ = drafter.test_time_features(
            frozen, inputs, queries, torch.ones_like(queries, dtype=torch.bool)
        )
        return {
            "logits": torch.stack(
                [drafter.draft_logits(frozen, features[j, 0].roll(-j, 0)) for j in range(3)]
            )
        }
    anchors = vectors["anchors"].nonzero().T
    before = drafter.tokens_before(tokens, anchors)
    # The output of layer -1 is the embedding, which training inputs do not contain.
    if drafter.config.fused_layers[0] == -1:
        inputs = TrainingInputs(tokens, mask, hidden=no_hidden, kv=None, layer_outputs=outputs[1:])
    hidden = drafter.hidden_at_anchors(
        frozen, inputs, anchors, torch.ones_like(anchors, dtype=torch.bool)
    )
    features = drafter.make_features(hidden, before)
    found = {"logits": drafter.draft_logits(frozen, features)[0]}
    if (confidence := drafter.confidence_logits(features)) is not None:
        found["confidence"] = confidence[0]
    return found


def compare(drafter: Any, model: Any, vectors: dict[str, Tensor]) -> None:
    found = logits_of(drafter, model, vectors)
    assert found.keys() == vectors.keys() & {"logits", "confidence"}
    logits, theirs = found["logits"], vectors["logits"]
    is_drafted = torch.isfinite(logits).flatten(0, -2).all(0)
    assert is_drafted.sum() == theirs.shape[-1]
    logits = logits[..., is_drafted]
    if drafter.kind == "eagle3":
        for step in range(3):  # rounds that begin late run past the end
            n_slots = theirs.shape[1] - step
            torch.testing.assert_close(logits[step, :n_slots], theirs[step, :n_slots], **CLOSE)
        return
    first = drafter.config.block_size - drafter.config.n_drafts
    torch.testing.assert_close(logits, theirs[:, first:], **CLOSE)
    if "confidence" in found:
        torch.testing.assert_close(
            found["confidence"], vectors["confidence"].view(len(theirs), -1)[:, first:], **CLOSE
        )


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_folder_has_the_logits_of_its_own_class(name: str) -> None:
    drafter, model = load_drafter(DATA / name), shared_verifier()
    check_drafter_matches(drafter, Target(model))
    compare(drafter, model, load_file(DATA / name / "vectors.safetensors"))


def copied(name: str, folder: Path, layers: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Copy a native folder and change its config.json."""
    shutil.copytree(DATA / name, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config["transformer_layer_config"] |= layers or {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "facts"),
    [
        (
            "dflash", {"speculators_model_type": "xpress"},
            ("speculators_model_type", "'xpress'", "eagle3, dflash, dspark"),
        ),
        ("eagle3", {"embed_requires_grad": True}, ("embed_requires_grad", True)),
        ("eagle3", {"target_hidden_size": 32}, ("target_hidden_size", 32)),
        ("dspark", {"residual_scale": 0.5}, ("residual_scale", 0.5)),
        ("dflash", {"markov_rank": 4}, ("markov_rank", 4)),
        ("dspark-rnn", {"sample_from_anchor": False}, ("rnn", "anchor")),
        ("eagle3", {"layers": {"num_hidden_layers": 2}}, ("num_hidden_layers", 2)),
        ("eagle3", {"layers": {"model_type": "gemma3_text"}}, ("model_type", "gemma3_text")),
        ("eagle3", {"layers": {"hidden_act": "gelu"}}, ("hidden_act", "gelu")),
        ("dflash", {"layers": {"layer_types": ["sliding_attention"] * 2}}, ("sliding window",)),
        ("eagle3-qwen3", {"layers": {"layer_types": ["sliding_attention"]}}, ("sliding window",)),
        ("eagle3", {"layers": {"query_scale": 2}}, ("query_scale", 2)),
        (
            "eagle3",
            {"layers": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
            ("partial_rotary_factor", 0.5),
        ),
        ("eagle3-fc-norm", {"norm_before_fc": True}, ("input_norm.weight",)),
        ("eagle3", {"fc_norm": True}, ("fc_norm.0.weight",)),
        (
            "eagle3", {"eagle_aux_hidden_state_layer_ids": None},
            ("eagle_aux_hidden_state_layer_ids",),
        ),
    ],
)  # fmt: skip
def test_keys_that_change_the_computation_are_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], facts: tuple[object, ...]
) -> None:
    with raises_naming(DrafterError, *facts):
        load_drafter(copied(name, tmp_path / "drafter", **changes))
    # Null and false do not change the computation.
    load_drafter(copied(name, tmp_path / "plain", residual_scale=None, with_memory=False))


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_flags_without_tensors_are_heeded(tmp_path: Path, flag: str) -> None:
    vectors, model = load_file(DATA / "eagle3-fc-norm" / "vectors.safetensors"), shared_verifier()
    drafter = load_drafter(copied("eagle3-fc-norm", tmp_path / "drafter", None, **{flag: False}))
    with pytest.raises(AssertionError, match="not close"):
        compare(drafter, model, vectors)


@pytest.mark.parametrize(
    "name", [name for name in NATIVE if name not in ("dflash-reduced", "dspark-gated")]
)
def test_exports_have_the_names_and_the_config_of_native_folders(tmp_path: Path, name: str) -> None:
    """Keys that are null or false may be absent.

    The config of a Llama's layers may have keys of Qwen3's.
    """
    drafter, model = load_drafter(DATA / name), shared_verifier()
    pieces = {"config": model.config, EMBEDDINGS: model.model.embed_tokens.weight}
    write_layout(drafter, LAYOUTS[f"speculators-{drafter.kind}"], tmp_path, target=pieces)
    written, own = (load_file(folder / "model.safetensors") for folder in (tmp_path, DATA / name))
    assert written.keys() == own.keys()
    assert all(torch.equal(value, own[key]) for key, value in written.items())
    config, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, DATA / name)
    )
    skipped = {
        "transformer_layer_config",
        "speculators_config",
        "auto_map",
        "dtype",
        "transformers_version",
    }
    for key in theirs.keys() - skipped:
        assert (config.get(key) or None) == (theirs[key] or None), key
    for key in (
        config["transformer_layer_config"].keys() & theirs["transformer_layer_config"].keys()
    ):
        assert config["transformer_layer_config"][key] == theirs["transformer_layer_config"][key], (
            key
        )
    found, meant = config["speculators_config"], theirs["speculators_config"]
    assert found["verifier"] == meant["verifier"]
    assert (found["algorithm"], found["default_proposal_method"]) == (meant["algorithm"], "greedy")
    assert "moa_data" in config
    assert load_drafter(tmp_path).config == drafter.config


def test_a_reduced_vocabulary_of_blocks_drafts_its_own_tokens_and_stays_here() -> None:
    drafter = load_drafter(DATA / "dspark-gated")
    tokens = torch.arange(40) % 4 > 1
    features = torch.randn(2, 20)
    logits = drafter.draft_logits(FrozenTarget.from_model(shared_verifier()), features)
    assert torch.equal(torch.isfinite(logits), tokens.expand(2, -1))
    assert len(LAYOUTS["speculators-dspark"].refusals(drafter.config)) == 1


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("d2t", [2, 3]),
        ("t2d", []),
        ("lm_head.weight", [40, 16]),
        ("markov_head.markov_w2.weight", [3]),
    ],
)
def test_tensors_of_a_reduced_vocabulary_of_another_shape_are_named(
    tmp_path: Path, key: str, shape: list[int]
) -> None:
    file = copied("dspark-gated", tmp_path / "drafter") / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {key: torch.ones(shape, dtype=weights[key].dtype)}, file)
    with pytest.raises(DrafterError) as caught:
        load_drafter(file.parent)
    assert f"{key} has the shape {shape}, expected" in str(caught.value)
