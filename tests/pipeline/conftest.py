"""A tiny target and chats for it."""

import shutil
from pathlib import Path

import pytest

from moa_data.pipeline.config import ExtractConfig
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.models import write_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama target in bfloat16 with a Llama-3-like template; read only."""
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def model(target_folder: Path, tmp_path: Path) -> Path:
    """A copy of the target, to be changed."""
    return Path(shutil.copytree(target_folder, tmp_path / "model"))


@pytest.fixture
def chats_file(tmp_path: Path) -> Path:
    """24 chats as jsonl."""
    return write_jsonl(tmp_path / "chats.jsonl", random_chats(24))


@pytest.fixture
def config(target_folder: Path, chats_file: Path, tmp_path: Path) -> ExtractConfig:
    """An extraction of the chats in several parts, with the state that enters the last layer."""
    return ExtractConfig.of(
        model=str(target_folder), dataset=str(chats_file), out=str(tmp_path / "store"), max_length=128, device="cpu",
        target_layers=1, part_tokens=512, batch_tokens=256, compute_dtype="float32",
    )  # fmt: skip
