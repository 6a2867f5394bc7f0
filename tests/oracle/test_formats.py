"""Folders with the official weights of the oracle load as what computes the official features, and are written back."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.formats.table import LAYOUTS, write_layout

from .test_eagle_glide import CASES, frozen_target
from .test_moa import BATCHES, ORACLE, close, inputs_of, meta, set_prefix, target_config, tensors

TRAINED = sorted(file.stem for file in ORACLE.glob("*moa_trained_drafter_weights.safetensors"))


def write_official(folder, weights, config):
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return load_drafter(folder)


@pytest.mark.parametrize("name", [*(f"{set_prefix(batch)}moa_weights" for batch in BATCHES), *TRAINED])
def test_moa_checkpoint(tmp_path, name):
    weights = {key: w for key, w in tensors(name).items() if not key.startswith(("model.", "lm_head."))}
    config = target_config(meta(f"{set_prefix(name)}moa_batch" if "trained" not in name else name)["target"])
    drafter = write_official(tmp_path / "official", weights, config)
    if "trained" not in name:
        batch = tensors(f"{set_prefix(name)}moa_batch")
        with torch.no_grad():
            memory = drafter.encode_memory(batch["kv_stack"])
        close(memory, batch["ekv2e_out"], batch["attention_mask"].bool())
    refused = LAYOUTS["moa"].refusals(drafter.config)
    assert not refused, refused
    write_layout(drafter, LAYOUTS["moa"], tmp_path / "again", target_config=config)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", [case for case in CASES if case.endswith("noise0")])
def test_eagle_checkpoint(tmp_path, name):
    case, config = tensors(name), target_config(meta(name)["target"])
    weights = {key.removeprefix("weight."): value for key, value in case.items() if key.startswith("weight.")}
    drafter = write_official(tmp_path, weights, config)
    frozen = frozen_target(config)
    batch, inputs = inputs_of("moa_batch", 0)
    with torch.no_grad():
        features = drafter(drafter.join(frozen.embed(inputs.tokens[:, 1:]), inputs.hidden[:, :-1]))
    close(features, case["features"][:, :-1], batch["attention_mask"].bool()[:, 1:])
