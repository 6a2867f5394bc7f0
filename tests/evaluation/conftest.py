"""Folders of a tiny random target with a byte-level tokenizer and of a random drafter for it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.evaluation.config import EvalConfig
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import build_byte_tokenizer, build_text_model

MAX_POSITIONS = 96


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = build_byte_tokenizer()
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": MAX_POSITIONS}
    sizes |= {"num_hidden_layers": 2}
    sizes |= {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    build_text_model(**sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return Target.load(str(target_folder), torch.float32, "cpu")


@pytest.fixture(scope="session")
def drafter_folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(build_drafter(target.model, seed=0, std=0.1, target=target.identity), folder)
    return folder


@pytest.fixture
def chats_file(tmp_path: Path) -> Path:
    texts = (
        "hello",
        "what is two and two?",
        "tell me more",
        "why",
        "a much longer question about the weather",
    )
    return write_jsonl(tmp_path / "chats.jsonl", [chat(text, "an answer") for text in texts])


@pytest.fixture
def config(
    target_folder: Path, drafter_folder: Path, chats_file: Path, tmp_path: Path
) -> EvalConfig:
    return EvalConfig.of(
        model=str(target_folder), drafter=(str(drafter_folder),), method=("plain", "chain"),
        prompts=str(chats_file), out=str(tmp_path / "out" / "report.json"), max_new_tokens=6,
        draft_length=3, device="cpu", warmup=0,
    )  # fmt: skip


@pytest.fixture
def questions_file(tmp_path: Path) -> Path:
    rows = [
        {
            "question_id": number,
            "category": category,
            "turns": ["first?", "second?"][: 1 + number % 2],
        }
        for number, category in enumerate(["math", "math", "math", "writing", "writing", "qa"])
    ]
    return write_jsonl(tmp_path / "questions.jsonl", rows)
