"""vLLM and speculators draft as we do, and `conform` names errors in the folder that they read."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.conform.run import ask_engine, compare, pieces_of
from moa_data.moa.formats.checkpoint import LAYOUTS, load_drafter, write_layout
from moa_data.moa.formats.engines import FORMATS
from moa_data.moa.targets.live import Target
from moa_data.tests.kit import drafters as kit
from moa_data.tests.kit.models import random_prompts, write_target

from ..moa.formats.test_speculators import DATA, verifier

PYTHONS = {
    "vllm": os.environ.get("MOA_DATA_VLLM", "none"),
    "speculators": os.environ.get("MOA_DATA_SPECULATORS", "none"),
}
pytestmark = pytest.mark.engines
# Engine, kind of drafter, changes to the config of the folder that the engine reads, and the cause
# that is named.
CASES: list[tuple[str, str, dict[str, Any], str]] = [
    *(("vllm", kind, {}, "") for kind in ("eagle", "eagle3", "dflash", "independent")),
    ("vllm", "eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "counted one too low"),
    ("vllm", "eagle3", {"norm_before_residual": True}, "norm_before_residual"),
    (
        "vllm",
        "dflash",
        {"dflash_config": {"mask_token_id": 34, "target_layer_ids": [1, 3]}},
        "token is one too high",
    ),
    (
        "vllm",
        "independent",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "base 10,000",
    ),
    *(("speculators", kind, {}, "") for kind in ("eagle3", "dflash", "dspark")),
    ("speculators", "dspark", {"aux_hidden_state_layer_ids": [3, 5]}, "counted one too high"),
    ("speculators", "dspark", {"sample_from_anchor": False}, "sample_from_anchor"),
]


@pytest.mark.parametrize(
    ("engine", "kind", "config", "cause"), CASES, ids=["-".join(map(str, one)) for one in CASES]
)
def test_engine(tmp_path: Path, engine: str, kind: str, config: dict[str, Any], cause: str) -> None:
    if not Path(PYTHONS[engine]).is_file():
        pytest.skip(f"MOA_DATA_{engine.upper()} names no Python with it")
    rope = {"rope_type": "default", "rope_theta": 5e5}
    # vLLM has kernels for a few head sizes only.
    sizes = {"head_dim": 32, "num_hidden_layers": 6, "rope_parameters": rope}
    model = write_target(tmp_path / "model", **sizes)
    target = Target.load(str(model), torch.float32, "cpu")
    own: dict[str, dict[str, Any]] = {
        "eagle": {"eagle_input_norm": False},
        "eagle3": {"fused_layers": (1, 3, 4), "draft_vocabulary": 40},
        "dflash": {"fused_layers": (1, 3), "block_layers": 2, "block_size": 5, "mask_token": 33},
        "dspark": {
            "fused_layers": (1, 3),
            "block_layers": 2,
            "block_size": 5,
            "mask_token": 33,
            "markov_rank": 8,
        },
        "independent": {"independent_width": 128},
    }
    drafter, (layout, method) = (
        kit.build(kind, target.model, std=0.3, **own[kind]),
        FORMATS[engine][kind],
    )
    write_layout(drafter, LAYOUTS[layout], tmp_path / "drafter", target=pieces_of(target))
    file = tmp_path / "drafter" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    prompts = random_prompts(3, 9)
    job = {
        "engine": engine, "method": method, "model": str(model),
        "drafter": str(tmp_path / "drafter"), "prompts": prompts, "max_new_tokens": 16,
        "dtype": "float32", "max_positions": target.max_positions, "n_drafts": 4,
    }  # fmt: skip
    found = compare(drafter, target, prompts, ask_engine(job, PYTHONS[engine], tmp_path), 16)
    assert found.n_rounds > 20
    assert bool(found.partings) == bool(cause), found
    assert not cause or (found.causes and cause in found.causes[0]), found


@pytest.mark.parametrize("name", ["dflash-reduced", "dspark-gated", "dspark-shifted", "eagle3"])
def test_a_native_folder_of_speculators(tmp_path: Path, name: str) -> None:
    """Native folders conform.

    They read the target's first and last outputs and have draft vocabularies, and an answer is
    shorter than a block.
    """
    if not Path(PYTHONS["speculators"]).is_file():
        pytest.skip("MOA_DATA_SPECULATORS names no Python with it")
    shutil.copytree(DATA / name, tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    config = json.loads(file.read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(DATA / "verifier")
    file.write_text(json.dumps(config))
    drafter, target = load_drafter(tmp_path / "drafter"), Target(verifier())
    prompts = [[token % 40 for token in prompt] for prompt in random_prompts(6, 9)]
    job = {
        "engine": "speculators", "method": drafter.kind, "model": str(DATA / "verifier"),
        "prompts": prompts, "drafter": str(tmp_path / "drafter"), "max_new_tokens": 16,
        "dtype": "float32", "n_drafts": 3,
    }  # fmt: skip
    answers = ask_engine(job, PYTHONS["speculators"], tmp_path)
    assert any(len(answer["tokens"]) < 4 for answer in answers), [len(a["tokens"]) for a in answers]
    found = compare(drafter, target, prompts, answers, 16)
    assert found.n_rounds > 10
    assert not found.partings
