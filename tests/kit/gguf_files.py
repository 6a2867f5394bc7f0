"""Writes tiny GGUF files like llama.cpp's, of the models and tokenizers of ``kit.models``."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, dequantize, quantize

from .models import SPECIAL_TOKENS, build_text_model, build_tokenizer
from .templates import LLAMA3_TEMPLATE

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.": "blk.", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    path: Path,
    types: dict[str, str] | str = "F32",
    template: str | None = LLAMA3_TEMPLATE,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    facts: dict[str, Any] | None = None,
    architecture: str = "llama",
    tokenizer_kind: str = "gpt2",
    **changes: Any,
) -> dict[str, np.ndarray[Any, Any]]:
    """Write a Llama with its tokenizer.

    Args:
        types: the type of all matrices, or the types of some matrices by their names in the file.
        extra: additional tensors.
        facts: additional metadata, with strings or integers as values.
        changes: arguments of ``build_text_model``.

    Returns:
        The dequantized values in float32, by their names in transformers.
    """
    model = build_text_model(**changes)
    writer = GGUFWriter(path, architecture)
    _add_sizes(writer, model.config)
    _add_tokenizer(writer, template, tokenizer_kind)
    for key, value in (facts or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    values = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        in_file = _name_in_file(name)
        kind = types if isinstance(types, str) else types.get(in_file, "F32")
        values[name] = _add(
            writer, in_file, weight.numpy(), "F32" if weight.ndim == 1 else kind, model.config
        )
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _name_in_file(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _add(
    writer: GGUFWriter, name: str, weight: np.ndarray[Any, Any], kind: str, config: Any
) -> Any:
    """Add a tensor in a GGUF type, and return the values that remain after quantization."""
    n_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    # llama.cpp rotates neighboring dimensions and transformers rotates halves, so the rows of
    # queries and keys are in a different order in the file.
    in_file = weight
    if n_heads is not None:
        halves = weight.reshape(n_heads, 2, -1, weight.shape[1])
        in_file = halves.swapaxes(1, 2).reshape(weight.shape)
    raw_type = GGMLQuantizationType[kind]
    data = quantize(np.ascontiguousarray(in_file), raw_type)
    writer.add_tensor(name, data, raw_dtype=raw_type)
    left = dequantize(data, raw_type)
    if n_heads is not None:
        left = left.reshape(n_heads, -1, 2, weight.shape[1]).swapaxes(1, 2)
    return left.reshape(weight.shape)


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: GGUFWriter, template: str | None, kind: str) -> None:
    tokenizer = build_tokenizer(None)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(True)
    if template is not None:
        writer.add_chat_template(template)
