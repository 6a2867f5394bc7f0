"""Tiny targets, tokenizers and chats, all built in code."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
GENERATION_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
SPECIAL_TOKENS = [
    "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>",
    "[INST]", "[/INST]", "</s>", "<pad>",
]  # fmt: skip

TEXT = "the cat sat on a warm mat and saw two small birds sing in some tall green trees near our old house"
WORDS = TEXT.split()


def build_tokenizer(template: str | None, bos: str | None = "<|begin_of_text|>", eos: str = "<|eot_id|>") -> Any:
    """A byte-level BPE tokenizer of 400 entries that also puts a BOS before plain text, as Llama-3's does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [TEXT, "user assistant system", "def f(x):\n    return x\n\n", "Hello there, how are you?"]
    backend.train_from_iterator(texts * 4, trainer)
    steps: list[Any] = [processors.ByteLevel(trim_offsets=True)]
    if bos is not None:
        steps.append(
            processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
        )
    backend.post_processor = processors.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token="<pad>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (bos, eos, "<pad>")],
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def build_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """A random model with 3 layers, 2 KV heads of 8 and width 32, in float32."""
    configs: dict[str, Any] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }
    config_class, model_class = configs[architecture]
    sizes = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(seed)
    return model_class(config_class(**(sizes | overrides))).eval()


def random_chats(n_chats: int, seed: int = 0) -> list[dict[str, Any]]:
    """Chats of one to three turns with answers of varied length."""
    draw = random.Random(seed)
    chats = []
    for number in range(n_chats):
        messages = []
        for _ in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": f"{number}: " + " ".join(draw.choices(WORDS, k=4))})
            answer = " ".join(draw.choices(WORDS, k=draw.randint(1, 20)))
            messages.append({"role": "assistant", "content": answer})
        chats.append({"messages": messages})
    return chats


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON lines; a string is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on several threads, and the bytes must not depend on how many there are."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama target in bfloat16 with a Llama-3-like template; read only."""
    folder = tmp_path_factory.mktemp("target")
    build_model("llama").to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer(LLAMA3_TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture
def chats_file(tmp_path: Path) -> Path:
    """24 chats as jsonl."""
    return write_jsonl(tmp_path / "chats.jsonl", random_chats(24))


@pytest.fixture(scope="session")
def tokenizer_for() -> Callable[..., Any]:
    """The tokenizer builder."""
    return build_tokenizer


@pytest.fixture(scope="session")
def model_for() -> Callable[..., Any]:
    """The model builder."""
    return build_model
