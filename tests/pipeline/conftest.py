"""A tiny target, and chats for it."""

import shutil
from pathlib import Path

import pytest

from moa_data.pipeline.config import ExtractConfig
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.models import write_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama target in bfloat16 with a template like Llama 3's. Tests must not change it."""
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def model(target_folder: Path, tmp_path: Path) -> Path:
    """A copy of the target that a test may change."""
    return Path(shutil.copytree(target_folder, tmp_path / "model"))


@pytest.fixture
def chats_file(tmp_path: Path) -> Path:
    """12 chats in a jsonl file."""
    return write_jsonl(tmp_path / "chats.jsonl", random_chats(12))


@pytest.fixture
def config(target_folder: Path, chats_file: Path, tmp_path: Path) -> ExtractConfig:
    """An extraction of the chats into several parts, with the inputs of the last layer."""
    return ExtractConfig.of(
        model=str(target_folder), dataset=str(chats_file), out=str(tmp_path / "store"),
        max_length=128, device="cpu",
        target_layers=1, part_tokens=256, batch_tokens=256, compute_dtype="float32",
    )  # fmt: skip
