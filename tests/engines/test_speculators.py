"""Drafters and hidden states exchanged with speculators itself.

`make test-engines` makes the environment that these tests need.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa_data.moa.formats.checkpoint import load_drafter, save_drafter
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.exchange.config import ExportConfig, ImportConfig
from moa_data.pipeline.exchange.transfer import export_store, import_folder
from moa_data.pipeline.extract import extract
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import to_float32
from moa_data.tests.kit import drafters as kit
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.models import write_target
from moa_data.trainer.config import DrafterExportConfig
from moa_data.trainer.export import export_drafter

from ..moa.formats.test_speculators import compare, verifier

PYTHON = Path(os.environ.get("MOA_DATA_SPECULATORS", "none"))
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not PYTHON.is_file(), reason="MOA_DATA_SPECULATORS names no Python with speculators"
    ),
]


def run(*words: str | Path) -> None:
    side = Path(__file__).with_name("speculators_side.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1"
    }
    found = subprocess.run(
        [PYTHON, side, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "MISSING" not in found.stderr + found.stdout
    assert "UNEXPECTED" not in found.stderr + found.stdout


def test_its_drafters_of_today_load_here_with_its_logits(tmp_path: Path) -> None:
    run("make", tmp_path)
    model = verifier(tmp_path / "verifier")
    folders = sorted(path.parent for path in tmp_path.glob("*/vectors.safetensors"))
    assert len(folders) == 12
    for folder in folders:
        compare(load_drafter(folder), model, load_file(folder / "vectors.safetensors"))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("eagle3", {"draft_vocabulary": 40}),
        ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}),
        ("eagle3", {"fc_norm": True, "norm_output": True, "query_key_norm": True}),
        ("dflash", {}),
        ("dflash", {"sample_from_anchor": True}),
        ("dspark", {"markov_rank": 8}),
        ("dspark", {"markov_head": "gated", "confidence_with_markov": False}),
        ("dspark", {"markov_head": "rnn", "confidence_head": False}),
        ("dspark", {"markov_head": "none", "confidence_head": False}),
    ],
    ids=str,
)
def test_our_exports_load_there_with_our_logits(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    folder = write_target(tmp_path / "target", num_hidden_layers=4)
    model = verifier(folder)
    block: dict[str, Any] = {"fused_layers": (-1, 2), "block_layers": 2, "block_size": 4}
    drafter = kit.build(
        kind, model, **({"fused_layers": (0, 1, 3)} if kind == "eagle3" else block), **sizes
    )
    for weight in drafter.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0, 0.1)
    save_drafter(drafter, tmp_path / "run")
    given: Any = {
        "drafter": str(tmp_path / "run"),
        "format": f"speculators-{kind}",
        "model": str(folder),
    }
    export_drafter(DrafterExportConfig(**given, out=str(tmp_path / "out")))
    n_tokens, width = 12, model.config.hidden_size
    generator = torch.Generator().manual_seed(3)
    vectors = {
        "input_ids": torch.randint(4, model.config.vocab_size, (n_tokens,), generator=generator),
        "hidden_states": torch.randn(
            n_tokens, len(drafter.config.fused_layers) * width, generator=generator
        ),
    }
    if kind != "eagle3":
        vectors["anchors"] = torch.isin(torch.arange(n_tokens), torch.tensor([1, 4, 7]))
        vectors["hidden_states"][:, :width] = model.model.embed_tokens(
            vectors["input_ids"]
        ).detach()
    save_file(vectors, tmp_path / "vectors.safetensors")
    run("run", tmp_path / "out", tmp_path / "vectors.safetensors")
    compare(drafter, model, load_file(tmp_path / "vectors.safetensors"))


def test_its_fp8_states_are_read_as_its_own_reader_does(tmp_path: Path) -> None:
    model = write_target(tmp_path / "model", num_hidden_layers=4)
    chats = write_jsonl(tmp_path / "chats.jsonl", random_chats(3))
    activations = ("hidden:last", *(f"hidden:layer:{layer}" for layer in (0, 1, 3)))
    extract(
        ExtractConfig.of(
            model=str(model),
            dataset=str(chats),
            out=str(tmp_path / "store"),
            activations=activations,
        )
    )
    out: Any = {"format": "speculators", "layers": (0, 1)}
    export_store(ExportConfig(store=str(tmp_path / "store"), out=str(tmp_path / "out"), **out))
    run("fp8", tmp_path / "out" / "hidden_states", tmp_path / "read.safetensors")
    import_folder(
        ImportConfig(
            folder=str(tmp_path / "out"), model=str(model), out=str(tmp_path / "back"), **out
        )
    )
    back, theirs = ActivationStore(tmp_path / "back"), load_file(tmp_path / "read.safetensors")
    assert len(back) == len(theirs) == 3
    for row in range(3):
        for slot, layer in enumerate((0, 1, 3)):
            got = torch.from_numpy(to_float32(back.read(row, f"hidden/layer_{layer}"), "bfloat16"))
            assert torch.equal(got, theirs[f"hs_{row}"][:, slot].float())
