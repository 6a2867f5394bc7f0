"""Builds tiny random targets of every supported family, and tokenizers for them."""

import random
from functools import cache
from pathlib import Path
from typing import Any

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

from .templates import BYTES_TEMPLATE, LLAMA3_TEMPLATE

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "vocab_size": 67,
    "max_position_embeddings": 96,
    "initializer_range": 0.15,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8, "head_dim": 12}),
    # The last layer has a sliding window. The layers before it attend to everything.
    "qwen2-mixed": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3},
    ),
}
SPECIAL_TOKENS = [
    "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>",
    "<|im_end|>", "[INST]", "[/INST]", "</s>", "<pad>",
]  # fmt: skip
TEXT = (
    "the cat sat on a warm mat and saw two small birds sing in some tall green trees "
    "near our old house"
)


def build_model(family: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """Return a random causal LM in float32.

    Biases and norms are random too, so that a test notices code that ignores them.
    """
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(SIZES | extra | overrides))).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def build_text_model(family: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """Return a random model for ``build_tokenizer``.

    It has 3 layers, 2 KV heads of size 8 and a hidden size of 32, in float32.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
        "sliding_window": None, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 9,
    }  # fmt: skip
    return build_model(family, seed, **(sizes | overrides))


def write_target(folder: Path, **changes: Any) -> Path:
    """Write a Llama target in bfloat16 with a chat template like Llama-3's."""
    build_text_model(**changes).to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer(LLAMA3_TEMPLATE).save_pretrained(folder)
    return folder


def written_by_transformers(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Return the tokens that transformers' ``generate`` writes after a prompt, greedily."""
    attention_mask = torch.ones(1, len(prompt))
    tokens = model.generate(
        torch.tensor([prompt]), attention_mask=attention_mask, do_sample=False, **options
    )
    written: list[int] = tokens[0, len(prompt) :].tolist()
    return written


def random_prompts(n: int, seed: int, longest: int = 20) -> list[list[int]]:
    """Return the token ids of prompts for ``build_model``, without its special tokens."""
    draw = random.Random(seed)
    return [
        [draw.randrange(4, SIZES["vocab_size"]) for _ in range(draw.randint(1, longest))]
        for _ in range(n)
    ]


@cache
def _backend(bos: str | None) -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [
        TEXT,
        "user assistant system",
        "def f(x):\n    return x\n\n",
        "Hello there, how are you?",
    ]
    backend.train_from_iterator(texts * 4, trainer)
    steps: list[Any] = [processors.ByteLevel(trim_offsets=True)]
    if bos is not None:
        steps.append(
            processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
            )
        )
    backend.post_processor = processors.Sequence(steps)
    return str(backend.to_str())


def build_tokenizer(
    template: str | None, bos: str | None = "<|begin_of_text|>", eos: str = "<|eot_id|>"
) -> Any:
    """Return a byte-level BPE tokenizer of 400 entries.

    It puts a BOS before plain text, like Llama-3's.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(bos)), bos_token=bos, eos_token=eos,
        pad_token="<pad>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (bos, eos, "<pad>")],
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def build_byte_tokenizer() -> Any:
    """Return a tokenizer with the tokens <pad>, <bos>, <eot>, <user>, <assistant> and all bytes."""
    special = ("<pad>", "<bos>", "<eot>", "<user>", "<assistant>")
    vocabulary = {
        token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eot>", pad_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
    )  # fmt: skip
    tokenizer.chat_template = BYTES_TEMPLATE
    return tokenizer


def write_target_of_letters(folder: Path, max_positions: int, **changes: Any) -> Path:
    """Write a random target with a byte tokenizer.

    The target writes letters, and soon ends its texts, also when it writes the user's questions.
    """
    tokenizer = build_byte_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "max_position_embeddings": max_positions, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.5,
    }  # fmt: skip
    model = build_text_model(**sizes | changes)
    written = tokenizer("abcdefghijklmnopqrst", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        silent = torch.ones(len(tokenizer), dtype=torch.bool)
        silent[[*written, 2]] = False
        model.lm_head.weight[silent] = 0
        model.lm_head.weight[2] *= 1.6
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
