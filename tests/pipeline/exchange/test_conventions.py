"""Exported files hold what transformers calls the same states, and layers are numbered as the other projects do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moa_data.errors import OptionInvalid
from moa_data.pipeline.exchange.config import ExportConfig, Format
from moa_data.pipeline.exchange.formats import make_format
from moa_data.pipeline.exchange.transfer import export_store
from moa_data.storage.read.store import ActivationStore

BFLOAT16: dict[str, Any] = {"rtol": 2**-7, "atol": 1e-2}


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@torch.inference_mode()
def live(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The nine hidden states [n, E] of transformers: embeddings, after 1 to 7 layers, after the final norm."""
    return tuple(state[0] for state in model(tokens[None], output_hidden_states=True).hidden_states)


def test_speculators_slots_are_states_after_2_4_5_layers_and_the_last_before_the_norm(
    store: Path, model: Any, tmp_path: Path
) -> None:
    export_store(ExportConfig(store=str(store), format="speculators", out=str(tmp_path), max_sequences=2))
    record = load_file(tmp_path / "hidden_states" / "hs_0.safetensors")
    rows, original = load_from_disk(str(tmp_path)), ActivationStore(store)
    assert rows.with_format(None)["seq_len"][:] == original.lengths[:2].tolist()
    assert torch.equal(record["token_ids"], rows[0]["input_ids"])
    assert rows[1]["loss_mask"].tolist() == original.read(1, "response_mask").tolist()
    with safe_open(tmp_path / "hidden_states" / "hs_0.safetensors", framework="pt") as file:
        assert file.metadata() == {"target_layer_ids": "2,4,5,8"}
    states = live(model, record["token_ids"])
    slots = record["hidden_states"].float()
    for slot, layers_passed in enumerate((2, 4, 5)):
        torch.testing.assert_close(slots[:, slot], states[layers_passed], **BFLOAT16)
    with torch.inference_mode():
        torch.testing.assert_close(model.model.norm(slots[:, 3]), states[8], rtol=2**-6, atol=2e-2)
    assert not torch.allclose(slots[:, 3], states[8], **BFLOAT16)  # the norm of this target is seen


def test_specforge_and_eagle_hold_the_last_state_after_the_norm(store: Path, model: Any, tmp_path: Path) -> None:
    files: dict[Format, str] = {"specforge": "rows_0-2000/data_0.ckpt", "eagle": "0/data_0.ckpt"}
    for name, file in files.items():
        export_store(ExportConfig(store=str(store), format=name, out=str(tmp_path / name), max_sequences=1))
        record = torch.load(tmp_path / name / file, weights_only=True)
        states = live(model, record["input_ids"])
        last = record["hidden_state"].float()
        torch.testing.assert_close(last[0] if name == "specforge" else last, states[8], **BFLOAT16)
        if name == "specforge":
            aux = torch.cat([states[2], states[4], states[5]], dim=-1)
            torch.testing.assert_close(record["aux_hidden_state"][0].float(), aux, **BFLOAT16)


def test_default_layers_are_those_of_eagle_3() -> None:
    fields = [make_format("specforge", (), n_layers).fields for n_layers in (32, 7)]
    assert fields == [("hidden/last", *(f"hidden/layer_{n}" for n in layers)) for layers in ((1, 15, 28), (1, 2, 3))]
    for layers, n_layers in (((), 1), ((), 6), ((6,), 6)):
        with pytest.raises(OptionInvalid, match="--layers"):
            make_format("specforge", layers, n_layers)
