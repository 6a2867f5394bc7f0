"""Layouts of the Mixture of Attentions: the authors' own checkpoints, and what their fork of vLLM loads.

Sources, all in huawei-noah/HEBO, branch ``mixture-of-attentions``:

- the authors' tensors: ``moa_spec/models/train/{moa_spec,cross_attention}.py`` (constructor, ``save_pretrained``);
- vLLM's config.json: ``vllm/convert_checkpoint.py``, read by ``vllm/vllm/transformers_utils/configs/moa_spec.py``;
- vLLM's tensors: ``vllm/vllm/model_executor/models/moa_spec.py`` (``load_weights``, which fuses q, k, v and gate, up).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..drafters.mixture import MoASizes
from ..targets.families import parse_target_config
from . import layout
from .layout import Layout, Weights

# Name of a block in weights and config.json -> in our sizes.
_BLOCKS = {
    "self_attention": "self_attention",
    "cross_attention": "cross_attention",
    "layer_self_attention": "layer_attention",
}
_MODEL_TYPE = "moa_spec"
_KEY = "layer_self_attention.self_attn.q_proj.weight"


def sizes_from_official(weights: Weights, target_config: Any) -> MoASizes:
    """Infer drafter sizes from the shapes of official weights and the target's transformers config."""
    base = MoASizes.from_target(target_config).to_dict()
    return _sizes(
        weights, {name: value for name, value in base.items() if "attention_" not in name}
    )


def _sizes(weights: Weights, facts: dict[str, Any]) -> MoASizes:
    # Layer self-attention has the target's query heads, and the head dim that its q_proj implies
    # also where the heads
    # do not divide the KV width: the official code rounds down.
    n_heads = facts["n_heads"]
    head_dim = facts["head_dim"]
    layer_head_dim = max(1, layout.rows(weights, _KEY) // n_heads)
    values = facts | {"layer_attention_heads": n_heads, "layer_attention_head_dim": layer_head_dim}
    for block, own in _BLOCKS.items():
        dim = layer_head_dim if own == "layer_attention" else head_dim
        values[f"{own}_kv_heads"] = layout.rows(weights, f"{block}.self_attn.k_proj.weight") // dim
        values[f"{own}_mlp_width"] = layout.rows(weights, f"{block}.mlp.gate_proj.weight")
    # the paper's form
    values |= {"cross_attention_drafts": False, "layer_groups": 1, "unrotated_keys": False}
    values["qkv_bias"] = "self_attention.self_attn.q_proj.bias" in weights
    return MoASizes.from_dict(values)


_PAPER: dict[str, tuple[Any, ...]] = {  # sizes with which a drafter is that of the paper
    "layer_attention": (True,),
    "cross_attention_drafts": (False,),
    "layer_groups": (1,),
    "layer_stride": (1,),
    "unrotated_keys": (False,),
    "kv_groups": ((),),
}


def _unlike_all(sizes: MoASizes) -> Iterator[str]:
    yield from layout.unfilled_width(sizes)
    if sizes.kv_groups:
        yield "the target's layers do not cache alike, and theirs do"


def _moa_unfit(sizes: MoASizes) -> Iterator[str]:
    yield from _unlike_all(sizes)
    heads = sizes.layer_attention_heads
    head_dim = sizes.layer_attention_head_dim
    n_heads = sizes.n_heads
    if (heads, head_dim) != (n_heads, sizes.kv_width // n_heads):
        yield (
            f"layer self-attention has {heads} heads of {head_dim}, and theirs the target's {n_heads} of "
            f"{sizes.kv_width // n_heads}: layer_attention_heads={n_heads}"
        )
    if layout.is_rope_scaled(sizes):
        yield (
            "the target's RoPE is scaled, and theirs leaves cross- and layer self-attention unscaled (moa-vllm scales "
            "them as they were trained)"
        )


def _moa_notes(sizes: MoASizes) -> list[str]:
    kv_heads, mlp_widths = (
        ", ".join(str(getattr(sizes, f"{own}_{part}")) for own in _BLOCKS.values())
        for part in ("kv_heads", "mlp_width")
    )
    n_layers = sizes.target_layer_inference
    return [
        f"moa_spec's settings have to name the drafter's sizes: KV heads {kv_heads} and MLP widths {mlp_widths} of "
        "self-, cross- and layer self-attention"
        + (f", and target_layer_inference {n_layers}" if n_layers else "")
    ]


MOA = Layout(
    name="moa",  # such as huawei-noah/MOASpec-Llama-3-8B-Instruct: 29 tensors for a Llama target
    kind=MoASizes.kind,
    reader="the MoA authors' code",
    needs=("config",),
    requires=_PAPER,
    unfit=_moa_unfit,
    notes=_moa_notes,
    # The official code gets the drafter's sizes from its own settings.
    config=lambda sizes, target_config: {**target_config.to_dict(), **layout.rope_keys(sizes)},
    file_name=lambda name: name.replace("kv_to_hidden", "Ekv2E"),
    own_name=lambda name: name.replace("Ekv2E", "kv_to_hidden"),
    recognises=lambda names, config: _KEY in names and config.get("model_type") != _MODEL_TYPE,
    read_sizes=lambda weights, config: sizes_from_official(
        weights, parse_target_config(config, "config.json")
    ),
)


def _vllm_unfit(sizes: MoASizes) -> Iterator[str]:
    yield from _unlike_all(sizes)
    heads = sizes.layer_attention_heads
    n_heads = sizes.n_heads
    own = sizes.self_attention_kv_heads
    cross = sizes.cross_attention_kv_heads
    if own != cross:
        yield f"self- and cross-attention have {own} and {cross} KV heads, and the fork one cache for both"
    if heads != n_heads or sizes.kv_width % n_heads:
        yield (
            f"layer self-attention has {heads} heads over a KV width of {sizes.kv_width}, and the fork gives it the "
            f"target's {n_heads}, which have to divide that width"
        )


def _vllm_config(sizes: MoASizes, target_config: Any) -> dict[str, Any]:
    values = layout.target_keys(sizes) | {
        "model_type": _MODEL_TYPE,
        "architectures": ["MOASpecModel"],
        "kv_hidden_size": sizes.kv_width,
        "disable_LSA": False,
    }
    for block, own in _BLOCKS.items():
        values[f"{block}_num_key_value_heads"] = getattr(sizes, f"{own}_kv_heads")
        values[f"{block}_intermediate_size"] = getattr(sizes, f"{own}_mlp_width")
    return values


MOA_VLLM = replace(
    MOA,
    name="moa-vllm",
    reader="the MoA authors' fork of vLLM",
    needs=(),
    # The fork drops biases of q, k and v, and does not draft through the target's last layers.
    requires=_PAPER | {"qkv_bias": (False,), "target_layer_inference": (0,)},
    unfit=_vllm_unfit,
    notes=lambda sizes: [],
    config=_vllm_config,
    recognises=lambda names, config: _KEY in names and config.get("model_type") == _MODEL_TYPE,
    read_sizes=lambda weights, config: _sizes(
        weights,
        layout.drafter_facts(config)
        | {"kv_width": layout.rows(weights, "layer_self_attention.input_layernorm.weight")},
    ),
)
