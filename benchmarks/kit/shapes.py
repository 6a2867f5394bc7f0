"""Shapes of targets by name."""

from typing import Any

from transformers import LlamaConfig

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 8192, "rope_theta": 500_000.0,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 8192, "rope_theta": 500_000.0,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
        "max_position_embeddings": 2048,
    },
}  # fmt: skip


def shape_config(shape: str, n_layers: int | None = None, **more: Any) -> LlamaConfig:
    """Return the config of a shape, optionally with another number of layers."""
    known: dict[str, Any] = SHAPES[shape] | {
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return LlamaConfig(**(known | ({"num_hidden_layers": n_layers} if n_layers else {}) | more))
