"""Layouts of Mixture of Attentions drafters: for the authors' own code and for their fork of vLLM.

Sources, all in huawei-noah/HEBO, branch ``mixture-of-attentions``:

- Tensors of the authors' own code: see the constructor and ``save_pretrained`` in
  ``moa_spec/models/train/{moa_spec,cross_attention}.py``.
- config.json of the fork of vLLM: ``vllm/convert_checkpoint.py`` writes this file, and
  ``vllm/vllm/transformers_utils/configs/moa_spec.py`` reads it.
- Tensors of the fork of vLLM: see ``load_weights`` in
  ``vllm/vllm/model_executor/models/moa_spec.py``. The function fuses q, k and v, and gate and up.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..drafters.mixture import MoASizes
from ..targets.facts import parse_facts
from . import layout
from .layout import Layout, Weights

# Name of a decoder block in the MoA authors' weights and config.json -> prefix of the block's
# sizes in :class:`MoASizes`.
_BLOCKS = {
    "self_attention": "self_attention",
    "cross_attention": "cross_attention",
    "layer_self_attention": "layer_attention",
}
_MODEL_TYPE = "moa_spec"
_KEY = "layer_self_attention.self_attn.q_proj.weight"


def sizes_from_official(weights: Weights, target_config: Any) -> MoASizes:
    """Infer a drafter's sizes from the shapes of its weights and from the target's config.

    The weights have the names of the MoA authors' code.
    """
    base = MoASizes.from_target(target_config).to_dict()
    return _sizes(
        weights, {name: value for name, value in base.items() if "attention_" not in name}
    )


def _sizes(weights: Weights, facts: dict[str, Any]) -> MoASizes:
    # Layer self-attention has the target's number of heads. If this number does not divide the KV
    # width, the MoA authors' code rounds the head dim down. So derive the head dim from the shape
    # of q_proj.
    n_heads = facts["n_heads"]
    head_dim = facts["head_dim"]
    layer_head_dim = max(1, layout.rows(weights, _KEY) // n_heads)
    values = facts | {"layer_attention_heads": n_heads, "layer_attention_head_dim": layer_head_dim}
    for block, our_name in _BLOCKS.items():
        dim = layer_head_dim if our_name == "layer_attention" else head_dim
        values[f"{our_name}_kv_heads"] = (
            layout.rows(weights, f"{block}.self_attn.k_proj.weight") // dim
        )
        values[f"{our_name}_mlp_width"] = layout.rows(weights, f"{block}.mlp.gate_proj.weight")
    # The weights do not show these settings. Assume the values of the drafter in the Mixture of
    # Attentions paper, which the MoA authors' code always uses.
    values |= {"cross_attention_drafts": False, "layer_groups": 1, "unrotated_keys": False}
    values["qkv_bias"] = "self_attention.self_attn.q_proj.bias" in weights
    return MoASizes.from_dict(values)


# Name of a size -> its value for the drafter in the Mixture of Attentions paper.
_PAPER: dict[str, tuple[Any, ...]] = {
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
        yield (
            "the target's layers have different kinds of KV caches, which this format does not "
            "support"
        )


def _moa_unfit(sizes: MoASizes) -> Iterator[str]:
    yield from _unlike_all(sizes)
    heads = sizes.layer_attention_heads
    head_dim = sizes.layer_attention_head_dim
    n_heads = sizes.n_heads
    if (heads, head_dim) != (n_heads, sizes.kv_width // n_heads):
        yield (
            f"layer self-attention (attention over the target's layers) has {heads} heads of size "
            f"{head_dim}, but this format supports only {n_heads} heads of size "
            f"{sizes.kv_width // n_heads}, the target's number of heads "
            f"(layer_attention_heads={n_heads})"
        )
    if layout.is_rope_scaled(sizes):
        yield (
            "the target's RoPE (rotary position embedding) is scaled, but the MoA authors' code "
            "ignores the scaling in cross-attention and layer self-attention (the format moa-vllm "
            "supports it)"
        )


def _moa_notes(sizes: MoASizes) -> list[str]:
    given: list[str] = []
    for block in _BLOCKS.values():
        for size in (f"{block}_kv_heads", f"{block}_mlp_width"):
            given.append(f"{size} {getattr(sizes, size)}")
    return [
        "the MoA authors' code does not read the drafter's sizes from config.json. Set them in its "
        f"settings (moa_spec): {', '.join(given)}, target_layer_inference "
        f"{sizes.target_layer_inference}"
    ]


MOA = Layout(
    # An example of this layout is huawei-noah/MOASpec-Llama-3-8B-Instruct. Its file has 29 tensors
    # for a Llama target.
    name="moa",
    kind=MoASizes.kind,
    reader="the MoA authors' code",
    needs=("config",),
    requires=_PAPER,
    unfit=_moa_unfit,
    notes=_moa_notes,
    # The MoA authors' code takes the drafter's sizes from its own settings, not from config.json.
    # So config.json describes the target.
    config=lambda sizes, target_config: {**target_config.to_dict(), **layout.rope_keys(sizes)},
    file_name=lambda name: name.replace("kv_to_hidden", "Ekv2E"),
    own_name=lambda name: name.replace("Ekv2E", "kv_to_hidden"),
    recognises=lambda names, config: _KEY in names and config.get("model_type") != _MODEL_TYPE,
    read_sizes=lambda weights, config: sizes_from_official(
        weights, parse_facts(config, "config.json")
    ),
)


def _vllm_unfit(sizes: MoASizes) -> Iterator[str]:
    yield from _unlike_all(sizes)
    heads = sizes.layer_attention_heads
    n_heads = sizes.n_heads
    self_heads = sizes.self_attention_kv_heads
    cross_heads = sizes.cross_attention_kv_heads
    if self_heads != cross_heads:
        yield (
            f"self-attention has {self_heads} KV heads and cross-attention has {cross_heads}, but "
            "the fork of vLLM has one KV cache for both, so the numbers must be equal"
        )
    if heads != n_heads or sizes.kv_width % n_heads:
        yield (
            f"layer self-attention (attention over the target's layers) has {heads} heads, but the "
            f"fork of vLLM supports only the target's number of heads ({n_heads}), which must also "
            f"divide the KV width ({sizes.kv_width})"
        )


def _vllm_config(sizes: MoASizes, target_config: Any) -> dict[str, Any]:
    values = layout.target_keys(sizes) | {
        "hidden_act": layout.ACTIVATION,
        "model_type": _MODEL_TYPE,
        "architectures": ["MOASpecModel"],
        "kv_hidden_size": sizes.kv_width,
        "disable_LSA": False,
    }
    for block, our_name in _BLOCKS.items():
        values[f"{block}_num_key_value_heads"] = getattr(sizes, f"{our_name}_kv_heads")
        values[f"{block}_intermediate_size"] = getattr(sizes, f"{our_name}_mlp_width")
    return values


MOA_VLLM = replace(
    MOA,
    name="moa-vllm",
    reader="the MoA authors' fork of vLLM",
    needs=(),
    # The fork of vLLM ignores the biases of q, k and v, and does not run drafts through the
    # target's last layers. So a drafter that has such biases, or that was trained with these
    # layers, would draft other tokens in the fork.
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
