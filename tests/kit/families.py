"""Tiny random targets of every supported family, with the special features of each turned on."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .models import build_tokenizer
from .templates import LLAMA3_TEMPLATE
from .variants import quick

SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
    "head_dim": 16, "intermediate_size": 64, "vocab_size": 67, "max_position_embeddings": 96,
    "initializer_range": 0.15, "eos_token_id": 3, "bos_token_id": 1, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {**_MIXED, "use_sliding_window": True},
    "qwen3": {**_MIXED, "use_sliding_window": True},
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 7},
    "granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 5.0, "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
    },
    "olmo2": {},
    "phi3": {"sliding_window": 7, "partial_rotary_factor": 0.5},
    "ministral": _MIXED,
    "ministral3": {"sliding_window": 9},
    "glm4_moe": {
        **_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "use_qk_norm": True,
    },
    "smollm3": {"no_rope_layers": [1, 1, 0, 1], "use_sliding_window": True, **_MIXED},
    "cohere2": {**_MIXED, "logit_scale": 0.3, "tie_word_embeddings": True},
    "gemma2": {
        **_MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 30, "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **_MIXED, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 30,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {**_MIXED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 40,
        "attention_chunk_size": 5, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 0],
        "attn_temperature_tuning": True, "floor_scale": 60,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
    },
    "qwen3_next": {
        **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 24, "partial_rotary_factor": 0.25,
    },
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "gemma4_text": {
        **_MIXED, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 67, "num_kv_shared_layers": 2,
        "tie_word_embeddings": True,
    },
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
}  # fmt: skip
"""Model type -> the settings that its config has in addition to :data:`SIZES`."""
SOME_FAMILIES = quick(
    FEATURES, ("qwen3_moe", "gemma2", "gpt_oss", "qwen3_next", "gemma4_text", "deepseek_v3")
)
"""All families as parameters. The listed families run by default, one of each kind."""
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},
    "gpt_neox": {},
    "olmo": {},
    "starcoder2": {"sliding_window": 6},
    "exaone4": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
"""Families that the package does not describe."""


LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose last layers a drafter can run its drafts through."""
STATES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LATENTS = ("deepseek_v3", "glm4_moe_lite")
GROUPED = (*STATES, *LATENTS, "gemma4_text")
"""Families whose keys and values are stored in groups of layers."""
_SCALED = ("gemma2", "gemma3_text", "gemma4_text")
_OTHER_KEYS = (*GROUPED, "phi3", "glm4_moe", "smollm3", "cohere2", "gemma3_text", "llama4_text")
_BLOCK: dict[str, Any] = {"block_layers": 1, "layer_groups": 1}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "moa": ("moa", {"layer_groups": 1}),
    "moa of `--target-layers`": ("moa", {"layer_groups": 1, "target_layer_inference": 1}),
    "glide": ("glide", {}),
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "dspark": ("dspark", {"block_layers": 1}),
    "dflash": ("dflash", {"block_layers": 1}),
    "block drafters of context `kv`": (
        "dspark",
        {"block_layers": 1, "context": "kv", "fused_layers": (1,)},
    ),
    "of context `memory`": ("dflash", {**_BLOCK, "context": "memory", "fused_layers": None}),
    "medusa": ("medusa", {}),
    "independent": ("independent", {}),
}
"""Drafters by their names in the table of supported combinations: kind and sizes."""


def works(family: str, drafter: str) -> str:
    """Return letters for what works with a family and one of :data:`DRAFTERS`.

    C stands for chains, T for trees and batches, and S for ``serve``. E stands for all formats of
    ``export-drafter`` that the kind has, with heads that fill the width, and e for only those
    formats that hold embeddings. The text is empty if the drafter cannot be trained.
    """
    kind, sizes = DRAFTERS[drafter]
    reads_kv = kind in ("moa", "glide") or "context" in sizes
    if ("target_layer_inference" in sizes and family not in LLAMAS) or (
        sizes.get("context") == "kv" and family in _OTHER_KEYS
    ):
        return ""
    letters = "C" if family in STATES else "CT" if family in LATENTS and reads_kv else "CTS"
    if "context" in sizes or kind in ("glide", "medusa") or (kind == "moa" and family in GROUPED):
        return letters  # no other program supports these drafters
    # The format moa-vllm has no biases, so these drafters cannot use it.
    if kind == "moa" and ("target_layer_inference" in sizes or family == "qwen2"):
        return letters + "e"
    if family in _SCALED:  # another program would not apply the scale of the embeddings
        return letters + ("e" if kind in ("eagle", "eagle3", "dspark", "independent") else "")
    return letters + "E"


def build_family(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random causal LM in float32.

    Weights that are initialized to 0 or 1, such as norms, biases and sinks, are random too.
    """
    config = AutoConfig.for_model(
        model_type, **(SIZES | {**FEATURES, **OTHERS}.get(model_type, {}) | changes)
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=changes.get("attention")
    )
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.data.normal_(float(weight.data.mean()) if "norm" in name else 0.0, 0.1)
    return model.eval().requires_grad_(False)


def varied(model_type: str, seed: int) -> dict[str, Any]:
    """Return other sizes for a family, drawn from a seed."""
    draw = random.Random(f"{model_type} {seed}")
    n_heads = draw.choice((2, 4, 8))
    changes: dict[str, Any] = {
        "num_attention_heads": n_heads,
        "hidden_size": draw.choice((32, 48, 64)),
    }
    own = FEATURES[model_type]
    if "kv_lora_rank" in own:
        changes |= {"num_key_value_heads": n_heads, "q_lora_rank": draw.choice((None, 16))}
    else:
        changes |= {
            "num_key_value_heads": draw.choice([n for n in (1, 2, n_heads) if n_heads % n == 0])
        }
    for name in ("sliding_window", "attention_chunk_size"):
        if name in own:
            changes[name] = draw.randint(2, 12)
    if (
        "layer_types" in own
        and "linear_num_key_heads" not in own
        and "num_kv_shared_layers" not in own
    ):
        changes["layer_types"] = [draw.choice(own["layer_types"][:2]) for _ in range(3)] + [
            own["layer_types"][1]
        ]
    return changes


def write_family(folder: Path, model_type: str, **changes: Any) -> Path:
    """Write a target of a family with a chat template like Llama-3's."""
    sizes = {
        "vocab_size": 400,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 9,
    }
    build_family(model_type, **(sizes | changes)).save_pretrained(folder)
    build_tokenizer(LLAMA3_TEMPLATE).save_pretrained(folder)
    return folder
