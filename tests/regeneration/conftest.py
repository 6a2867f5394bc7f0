"""A random target that writes letters and ends its answers, a drafter for it, and chats."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.live import Target
from moa_data.regeneration.config import RegenerateConfig
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import build_byte_tokenizer, build_text_model

MAX_POSITIONS = 160


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("letters")
    tokenizer = build_byte_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "max_position_embeddings": MAX_POSITIONS, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "initializer_range": 0.5,
    }  # fmt: skip
    model = build_text_model(**sizes)
    written = tokenizer("abcdefghijklmnopqrst", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        silent = torch.ones(len(tokenizer), dtype=torch.bool)
        silent[[*written, 2]] = False
        model.lm_head.weight[silent] = 0
        model.lm_head.weight[2] *= 1.6
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return Target.load(str(target_folder), torch.float32, "cpu")


@pytest.fixture(scope="session")
def drafter_folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(build_drafter(target.model, std=0.1, target=target.identity), folder)
    return folder


@pytest.fixture
def rows() -> list[Any]:
    """Chats of one and two turns, and rows that cannot be answered."""
    return [
        *(chat(f"what is {n}?", "old", f"and {n + 1}?", "old") for n in range(4)),
        *(chat(f"tell me of {n}") for n in range(4)),
        {"no": "chat"},
        chat("x" * MAX_POSITIONS, "old"),
        chat("<eot> in the text", "old"),
    ]


@pytest.fixture
def config(target_folder: Path, rows: list[Any], tmp_path: Path) -> RegenerateConfig:
    dataset = write_jsonl(tmp_path / "questions.jsonl", rows)
    return RegenerateConfig.of(
        model=str(target_folder), dataset=str(dataset), out=str(tmp_path / "answered.jsonl"), max_new_tokens=36,
        max_length=MAX_POSITIONS, batch_size=3, device="cpu", max_rejected_fraction=1,
    )  # fmt: skip
