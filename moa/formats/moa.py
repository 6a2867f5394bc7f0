"""Layouts of the Mixture of Attentions: the authors' own checkpoints, and what their fork of vLLM loads.

Sources, all in huawei-noah/HEBO, branch ``mixture-of-attentions``:

- tensors and their shapes: ``moa_spec/models/train/moa_spec.py`` (constructor, and ``save_pretrained``, which keeps the
  drafter's tensors alone), ``moa_spec/models/train/cross_attention.py``;
- config.json of the vLLM layout: ``vllm/convert_checkpoint.py``, read by
  ``vllm/vllm/transformers_utils/configs/moa_spec.py``; its tensors: ``vllm/vllm/model_executor/models/moa_spec.py``
  (``load_weights``), which fuses q, k, v and gate, up while it loads.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from ...errors import CheckpointError, DrafterError, TargetError
from ..drafters.mixture_sizes import MoASizes
from ..files.tensor_list import TensorList, TensorSpec, decoder_layer
from ..targets.bundle import parse_target_config
from .base import DrafterLayout, Weights, drafter_facts, is_rope_scaled, rope_keys, rows, split_heads

_OFFICIAL_PROJECTION = "Ekv2E"
_OWN_PROJECTION = "kv_to_hidden"
_BLOCKS = ("self_attention", "cross_attention", "layer_self_attention")


def to_official_keys(weights: Mapping[str, Tensor]) -> Weights:
    """Turn own state-dict keys into official ones."""
    return {name.replace(_OWN_PROJECTION, _OFFICIAL_PROJECTION): value for name, value in weights.items()}


def from_official_keys(weights: Mapping[str, Tensor]) -> Weights:
    """Turn official state-dict keys into own ones."""
    return {name.replace(_OFFICIAL_PROJECTION, _OWN_PROJECTION): value for name, value in weights.items()}


def _unlike_the_paper(sizes: MoASizes, who: str) -> list[str]:
    """List refusals where the drafter was trained differently from the paper."""
    found = [] if sizes.layer_attention else [f"it has no layer self-attention, which {who} always runs"]
    if sizes.cross_attention_drafts:
        found.append(
            f"its cross-attention sees the drafts of the round, which it does not in {who} (train with "
            "--set drafter.cross_attention_drafts=false)"
        )
    if sizes.layer_groups > 1:
        found.append(
            f"its memory is made from {sizes.layer_groups} means over layers, in {who} from one (train with "
            "--set drafter.layer_groups=1)"
        )
    if sizes.layer_stride > 1:
        found.append(
            f"its memory is made of {len(sizes.memory_layers)} of the target's layers, in {who} of all (train with "
            "--set drafter.layer_stride=1)"
        )
    if sizes.unrotated_keys:
        found.append(
            f"its memory is made from keys before RoPE, in {who} from those after (train with "
            "--set drafter.unrotated_keys=false)"
        )
    return found


def sizes_from_official(weights: Mapping[str, Tensor], target_config: Any) -> MoASizes:
    """Infer drafter sizes from the shapes of official weights and the target's transformers config."""
    base = MoASizes.from_target(target_config).to_dict()
    return _sizes(weights, {name: value for name, value in base.items() if "attention_" not in name})


def _sizes(weights: Mapping[str, Tensor], facts: dict[str, Any]) -> MoASizes:
    """Infer sizes from shapes.

    Layer self-attention has the target's query heads and the head dim that its q_proj implies, also where that does not
    divide the KV width evenly (the official code rounds down).
    """
    n_heads, head_dim = facts["n_heads"], facts["head_dim"]
    layer_head_dim = rows(weights, "layer_self_attention.self_attn.q_proj.weight") // n_heads
    if not layer_head_dim:
        raise CheckpointError(f"layer_self_attention.self_attn.q_proj.weight is too small for {n_heads} heads.")
    head_dims = {"self_attention": head_dim, "cross_attention": head_dim, "layer_self_attention": layer_head_dim}
    values = facts | {"layer_attention_heads": n_heads, "layer_attention_head_dim": layer_head_dim}
    for block, dim in head_dims.items():
        own = block.replace("layer_self", "layer")
        values[f"{own}_kv_heads"] = rows(weights, f"{block}.self_attn.k_proj.weight") // dim
        values[f"{own}_mlp_width"] = rows(weights, f"{block}.mlp.gate_proj.weight")
    values |= {"cross_attention_drafts": False, "layer_groups": 1, "unrotated_keys": False}  # the paper's form
    values["qkv_bias"] = "self_attention.self_attn.q_proj.bias" in weights
    try:
        return MoASizes.from_dict(values)
    except DrafterError as error:
        raise CheckpointError(f"the weights do not fit config.json: {error}") from error


class MoaLayout(DrafterLayout):
    """The authors' checkpoints, such as ``huawei-noah/MOASpec-Llama-3-8B-Instruct``: 29 tensors for a Llama target."""

    name: ClassVar[str] = "moa"
    kind: ClassVar[str] = MoASizes.kind
    reader: ClassVar[str] = "the MoA authors' code"
    needs_target_config: ClassVar[bool] = True

    @override
    def refusals(self, sizes: MoASizes) -> list[str]:
        """Refuse drafters that the official code would run differently."""
        found = split_heads(sizes, self.reader) + _unlike_the_paper(sizes, self.reader)
        heads, head_dim = sizes.layer_attention_heads, sizes.layer_attention_head_dim
        if (heads, head_dim) != (sizes.n_heads, sizes.kv_width // sizes.n_heads):
            found.append(
                f"layer self-attention has {heads} heads of {head_dim}, and {self.reader} gives it the target's "
                f"{sizes.n_heads} of {sizes.kv_width // sizes.n_heads} (train with --set drafter.layer_attention_heads="
                f"{sizes.n_heads})"
            )
        if is_rope_scaled(sizes):
            found.append(
                f"the target's rope type is {sizes.rope_parameters['rope_type']!r}, and {self.reader} leaves cross- "
                "and layer self-attention unscaled (moa-vllm scales them as they were trained)"
            )
        return found

    @override
    def tensors(self, sizes: MoASizes) -> TensorList:
        """List three decoder layers and Ekv2E; biases of q, k, v only with Qwen2, and never in cross-attention."""
        width, queries, keys = sizes.hidden_size, sizes.n_heads * sizes.head_dim, sizes.head_dim
        layer_queries = sizes.layer_attention_heads * sizes.layer_attention_head_dim
        layer_keys = sizes.layer_attention_kv_heads * sizes.layer_attention_head_dim
        return (
            decoder_layer(
                "self_attention.", width, queries, keys * sizes.self_attention_kv_heads,
                sizes.self_attention_mlp_width, qkv_bias=sizes.qkv_bias,
            )
            | decoder_layer(
                "cross_attention.", width, queries, keys * sizes.cross_attention_kv_heads,
                sizes.cross_attention_mlp_width,
            )
            | decoder_layer(
                "layer_self_attention.", sizes.kv_width, layer_queries, layer_keys, sizes.layer_attention_mlp_width,
                qkv_bias=sizes.qkv_bias,
            )
            | {
                "Ekv2E.weight": TensorSpec((width, sizes.kv_width)),
                "Ekv2E.bias": TensorSpec((width,)),
            }
        )  # fmt: skip

    @override
    def pack(self, weights: Weights, sizes: MoASizes) -> Weights:
        return to_official_keys(weights)

    @override
    def unpack(self, weights: Weights, sizes: MoASizes) -> Weights:
        return from_official_keys(weights)

    @override
    def config(self, sizes: MoASizes, target_config: Any) -> dict[str, Any]:
        """Return the target's config; the official code gets the drafter's sizes from its own settings."""
        return {**target_config.to_dict(), **rope_keys(sizes)}

    @override
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Look for layer self-attention beside the config of a target."""
        return _is_moa(names) and config.get("model_type") != MoaVllmLayout.model_type

    @override
    def read_sizes(self, weights: Weights, config: Mapping[str, Any]) -> MoASizes:
        try:
            target_config = parse_target_config(config, "config.json")
        except TargetError as error:
            raise CheckpointError(f"config.json is not the target's config: {error}") from error
        return sizes_from_official(weights, target_config)

    @override
    def notes(self, sizes: MoASizes) -> list[str]:
        """List the sizes that only our own key of config.json holds."""
        told = (
            f"moa_spec's settings have to name the drafter's sizes: KV heads {sizes.self_attention_kv_heads}, "
            f"{sizes.cross_attention_kv_heads}, {sizes.layer_attention_kv_heads} and MLP widths "
            f"{sizes.self_attention_mlp_width}, {sizes.cross_attention_mlp_width}, {sizes.layer_attention_mlp_width} "
            "of self-, cross- and layer self-attention"
        )
        layers = sizes.target_layer_inference
        return [told + (f", and target_layer_inference {layers}" if layers else "")]


class MoaVllmLayout(MoaLayout):
    """The folder that the authors' fork of vLLM loads: the same tensors, and a config.json with the drafter's sizes."""

    name: ClassVar[str] = "moa-vllm"
    reader: ClassVar[str] = "the MoA authors' fork of vLLM"
    needs_target_config: ClassVar[bool] = False
    model_type: ClassVar[str] = "moa_spec"

    @override
    def refusals(self, sizes: MoASizes) -> list[str]:
        """Refuse what the fork asserts against, or has no place for."""
        found = split_heads(sizes, self.reader) + _unlike_the_paper(sizes, self.reader)
        if sizes.self_attention_kv_heads != sizes.cross_attention_kv_heads:
            found.append(
                f"self- and cross-attention have {sizes.self_attention_kv_heads} and {sizes.cross_attention_kv_heads} "
                "KV heads, and the fork keeps both in one cache (train with equal ones)"
            )
        if sizes.layer_attention_heads != sizes.n_heads or sizes.kv_width % sizes.n_heads:
            found.append(
                f"layer self-attention has {sizes.layer_attention_heads} heads over a KV width of {sizes.kv_width}, "
                f"and the fork gives it the target's {sizes.n_heads}, which have to divide that width"
            )
        if sizes.qkv_bias:
            found.append("q, k and v have biases, and the fork drops them")
        if sizes.target_layer_inference:
            found.append("it drafts through the target's last layers, which the fork does not")
        return found

    @override
    def config(self, sizes: MoASizes, target_config: Any) -> dict[str, Any]:
        """Return the keys of ``MOASpecConfig``."""
        values: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": ["MOASpecModel"],
            "hidden_act": "silu",
            "hidden_size": sizes.hidden_size,
            "kv_hidden_size": sizes.kv_width,
            "num_attention_heads": sizes.n_heads,
            "max_position_embeddings": sizes.max_position_embeddings,
            "rms_norm_eps": sizes.norm_eps,
            "vocab_size": sizes.vocab_size,
            "disable_LSA": False,
        }
        for block in _BLOCKS:
            own = block.replace("layer_self", "layer")
            values[f"{block}_num_key_value_heads"] = getattr(sizes, f"{own}_kv_heads")
            values[f"{block}_intermediate_size"] = getattr(sizes, f"{own}_mlp_width")
        return values | rope_keys(sizes)

    @override
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Look for layer self-attention beside ``moa_spec``."""
        return _is_moa(names) and config.get("model_type") == self.model_type

    @override
    def read_sizes(self, weights: Weights, config: Mapping[str, Any]) -> MoASizes:
        """Read the sizes from the config's keys and the shapes; nothing tells the number of the target's layers."""
        facts = drafter_facts(config)
        return _sizes(weights, facts | {"kv_width": rows(weights, "layer_self_attention.input_layernorm.weight")})

    @override
    def notes(self, sizes: MoASizes) -> list[str]:
        return []


def _is_moa(names: set[str]) -> bool:
    return any(name.startswith("layer_self_attention.") for name in names)
