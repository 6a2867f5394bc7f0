"""A tiny random target with a byte-level tokenizer, and a random drafter for it, as folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.drafters.mixture_sizes import MoASizes
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.target.live import Target

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eot>", "<user>", "<assistant>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<eot>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<eot>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
MAX_POSITIONS = 96


def build_tokenizer() -> Any:
    """One token per byte, plus the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eot>",
        pad_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, intermediate_size=48,
            vocab_size=len(tokenizer), max_position_embeddings=MAX_POSITIONS, initializer_range=0.3,
            bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return Target.load(str(target_folder), torch.float32, "cpu")


@pytest.fixture(scope="session")
def drafter_folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    drafter = MoADrafter(MoASizes.from_target(target.config, target=target.identity))
    drafter.initialize(torch.Generator().manual_seed(0), std=0.1)
    save_drafter(drafter, folder)
    return folder


def write_lines(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON lines; a str is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def chat(*contents: str, **extra: Any) -> dict[str, Any]:
    """A chat of alternating user and assistant messages."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **extra}


@pytest.fixture
def chats_file(tmp_path: Path) -> Path:
    texts = ("hello", "what is two and two?", "tell me more", "why", "a much longer question about the weather")
    return write_lines(tmp_path / "chats.jsonl", [chat(text, "an answer") for text in texts])


@pytest.fixture
def questions_file(tmp_path: Path) -> Path:
    rows = [
        {"question_id": number, "category": category, "turns": ["first?", "second?"][: 1 + number % 2]}
        for number, category in enumerate(["math", "math", "math", "writing", "writing", "qa"])
    ]
    return write_lines(tmp_path / "questions.jsonl", rows)
