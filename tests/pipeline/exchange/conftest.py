"""A tiny Llama target of 8 layers and a store of its hidden states.

Both are made once per session and must not be changed.
"""

from pathlib import Path

import pytest

from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.models import write_target
from moa_data.tests.kit.stores import make_recipe

LAYERS = (1, 3, 4, 7)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


@pytest.fixture(scope="session")
def extract_config(target: Path, tmp_path_factory: pytest.TempPathFactory) -> ExtractConfig:
    folder = tmp_path_factory.mktemp("data")
    return ExtractConfig.of(
        model=str(target), dataset=str(write_jsonl(folder / "chats.jsonl", random_chats(12))),
        out=str(folder / "store"), part_tokens=512, target_layers=1, device="cpu",
        compute_dtype="float32",
        activations=("hidden:last", *(f"hidden:layer:{layer}" for layer in LAYERS)),
    )  # fmt: skip


@pytest.fixture(scope="session")
def store(extract_config: ExtractConfig) -> Path:
    extract(extract_config)
    return Path(extract_config.out)


@pytest.fixture(scope="session")
def recipe_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of random values with the keys and values of 4 layers, made without a target."""
    return make_recipe().write(tmp_path_factory.mktemp("recipe") / "store")
