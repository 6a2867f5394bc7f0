"""A tiny target and chats for it."""

from pathlib import Path

import pytest
import torch

from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.models import build_text_model, build_tokenizer
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama target in bfloat16 with a Llama-3-like template; read only."""
    folder = tmp_path_factory.mktemp("target")
    build_text_model().to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer(LLAMA3_TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture
def chats_file(tmp_path: Path) -> Path:
    """24 chats as jsonl."""
    return write_jsonl(tmp_path / "chats.jsonl", random_chats(24))
