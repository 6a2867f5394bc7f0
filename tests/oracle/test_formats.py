"""Folders with official weights load as what computes the official features, and are written back as they were."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from moa_data.moa.drafters.base import Drafter
from moa_data.moa.drafters.eagle import EagleDrafter
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.formats.checkpoint import LAYOUTS, load_drafter, write_layout

from .vectors import Vectors, drafter_weights, frozen_target, inputs_of, meta, names, set_of, target_config


def load_official(folder: Path, weights: dict[str, Tensor], config: PretrainedConfig) -> Drafter:
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return load_drafter(folder)


@pytest.mark.parametrize("name", [*names("moa_weights"), *names("moa_trained_drafter_weights")])
def test_moa_checkpoint(tmp_path: Path, name: str) -> None:
    weights, config = drafter_weights(name), target_config(meta(name)["target"])
    drafter = load_official(tmp_path / "official", weights, config)
    assert isinstance(drafter, MoADrafter)
    batch = f"{set_of(name)}moa_batch"
    if name in names("moa_weights") and batch in names("moa_batch"):
        real, inputs = inputs_of(name)
        assert inputs.kv is not None
        with torch.no_grad():
            Vectors(batch, real).close("ekv2e_out", drafter.encode_kv(inputs.kv))
    assert not (refused := LAYOUTS["moa"].refusals(drafter.config)), refused
    write_layout(drafter, LAYOUTS["moa"], tmp_path / "again", target_config=config)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", names("eagle_train_"))
@torch.no_grad()
def test_eagle_checkpoint(tmp_path: Path, name: str) -> None:
    real, inputs = inputs_of(name)
    expected = Vectors(name, torch.nn.functional.pad(real[:, 1:], (0, 1)))
    drafter = load_official(tmp_path, expected.starting_with("weight."), target_config(meta(name)["target"]))
    assert isinstance(drafter, EagleDrafter)
    hidden, embeddings = inputs.hidden, frozen_target(name).embed(inputs.tokens)
    if meta(name)["training_noise"]:
        scale = meta(name)["noise_uniform_scale"]
        hidden = hidden + (expected["noise_hidden"] - 0.5) * scale
        embeddings = embeddings + (expected["noise_emb"] - 0.5) * scale
    features = drafter(drafter.join(embeddings[:, 1:], hidden[:, :-1]))
    expected.close("features", torch.nn.functional.pad(features, (0, 0, 0, 1)))
