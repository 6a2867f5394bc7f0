"""A tiny Llama target of 8 layers and a store of its hidden states, extracted once per session; both read only."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract

TESTS = Path(__file__).parents[2]
LAYERS = (1, 3, 4, 7)


def load_kit(folder: str) -> ModuleType:
    """The conftest of another folder of tests, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"exchange_{folder}_kit", TESTS / folder / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kit = load_kit("pipeline")
    folder = tmp_path_factory.mktemp("target")
    model = kit.build_model("llama", num_hidden_layers=8)
    torch.manual_seed(1)
    model.model.norm.weight.data = 1 + 0.3 * torch.randn(32)  # a norm that does something
    model.to(torch.bfloat16).save_pretrained(folder)
    kit.build_tokenizer(kit.LLAMA3_TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def extract_config(target: Path, tmp_path_factory: pytest.TempPathFactory) -> ExtractConfig:
    kit = load_kit("pipeline")
    folder = tmp_path_factory.mktemp("data")
    return ExtractConfig(
        model=str(target), dataset=str(kit.write_jsonl(folder / "chats.jsonl", kit.random_chats(12))),
        out=str(folder / "store"), part_tokens=512, target_layers=1, device="cpu",
        activations=("hidden:last", *(f"hidden:layer:{layer}" for layer in LAYERS)),
    )  # fmt: skip


@pytest.fixture(scope="session")
def store(extract_config: ExtractConfig) -> Path:
    extract(extract_config)
    return Path(extract_config.out)


@pytest.fixture(scope="session")
def recipe_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of random values with keys and values of 4 layers, made without a target."""
    return load_kit("storage").make_recipe().write(tmp_path_factory.mktemp("recipe") / "store")
