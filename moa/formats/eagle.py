"""Layouts of EAGLE(-2): the EAGLE authors' checkpoints, what vLLM and SGLang load, and the MoA authors' EAGLE.

The EAGLE authors' first layer has no norm before its attention, and neither has that of vLLM or SGLang. A drafter that
was trained with one keeps it there as the second layer, behind a first one whose output projections are zero: such a
layer hands its input on exactly, at the price of running it.

Sources:

- EAGLE authors: SafeAILab/EAGLE ``eagle/model/cnets1.py`` (``Model``, ``LlamaDecoderLayer``, ``LlamaAttention`` with
  its ``qkv_bias``), ``eagle/model/ea_model.py`` (strict loading; ``bias`` of config.json, true where absent),
  ``eagle/train/EAGLE-LLaMA3-Instruct-8B.json``;
- vLLM: vllm-project/vllm ``vllm/model_executor/models/llama_eagle.py`` (``fc`` without bias, an unknown name is a
  KeyError, embeddings and LM head are the target's), ``vllm/transformers_utils/configs/eagle.py``
  (``LlamaForCausalLM`` becomes ``EagleLlamaForCausalLM``);
- SGLang: sgl-project/sglang ``python/sglang/srt/models/llama_eagle.py`` and ``qwen2_eagle.py`` (``fc`` with a bias that
  stays random where the file has none; embeddings and LM head are the target's; attention biases with Qwen2 alone);
- MoA authors: huawei-noah/HEBO, branch ``mixture-of-attentions``, ``moa_spec/models/train/eagle.py``.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from typing_extensions import override

from ...errors import CheckpointError, DrafterError, TargetError
from ..drafters.eagle import EagleSizes
from ..files.tensor_list import TensorList, TensorSpec, decoder_layer
from ..targets.bundle import parse_target_config
from .base import DrafterLayout, Weights, drafter_facts, is_rope_scaled, rope_keys, rows, split_heads

_EMBEDDINGS = "embed_tokens.weight"
"""The copy of the target's embeddings in a file; the target's own are used here."""


def eagle_layer(prefix: str, sizes: EagleSizes, input_norm: bool) -> TensorList:
    """List the tensors of one decoder layer."""
    return decoder_layer(
        prefix,
        sizes.hidden_size,
        sizes.n_heads * sizes.head_dim,
        sizes.self_attention_kv_heads * sizes.head_dim,
        sizes.self_attention_mlp_width,
        qkv_bias=sizes.qkv_bias,
        input_norm=input_norm,
    )


class EagleAuthorsLayout(DrafterLayout):
    """The EAGLE authors' checkpoints, such as ``yuhuili/EAGLE-LLaMA3-Instruct-8B``."""

    name: ClassVar[str] = "eagle"
    kind: ClassVar[str] = EagleSizes.kind
    reader: ClassVar[str] = "the EAGLE authors' code"
    needs_embeddings: ClassVar[bool] = True
    optional: ClassVar[frozenset[str]] = frozenset({_EMBEDDINGS})

    @override
    def refusals(self, sizes: EagleSizes) -> list[str]:
        """Refuse scaled RoPE (the code's linear one ignores rope_theta) and heads that do not fill the width."""
        found = split_heads(sizes, self.reader)
        if is_rope_scaled(sizes):
            kind = sizes.rope_parameters["rope_type"]
            found.append(f"the target's rope type is {kind!r}, and {self.reader} has the default one alone")
        return found

    @override
    def tensors(self, sizes: EagleSizes) -> TensorList:
        """List the joining layer and the decoder layers, the first of which has no input norm."""
        n_before = _n_before(sizes)
        width = sizes.hidden_size
        tensors = {"fc.weight": TensorSpec((width, 2 * width))}
        if self.has_fc_bias(sizes):
            tensors["fc.bias"] = TensorSpec((width,))
        for index in range(n_before + sizes.eagle_layers):
            tensors |= eagle_layer(f"layers.{index}.", sizes, input_norm=index > 0)
        if self.needs_embeddings:
            tensors[_EMBEDDINGS] = TensorSpec((sizes.vocab_size, width))
        return tensors

    def has_fc_bias(self, sizes: EagleSizes) -> bool:
        """Return whether the file has a bias of the joining layer."""
        return sizes.eagle_fc_bias

    @override
    def pack(self, weights: Weights, sizes: EagleSizes) -> Weights:
        """Put the layers behind a first one without a norm, see above."""
        n_before = _n_before(sizes)
        packed = {_renumbered(name, n_before): value for name, value in weights.items()}
        if n_before:
            dtype = weights["fc.weight"].dtype
            for name, spec in eagle_layer("layers.0.", sizes, input_norm=False).items():
                fill = 1.0 if name.endswith("norm.weight") else 0.0
                packed[name] = torch.full(spec.shape, fill, dtype=dtype)
        if self.has_fc_bias(sizes) and "fc.bias" not in packed:
            packed["fc.bias"] = torch.zeros(sizes.hidden_size, dtype=weights["fc.weight"].dtype)
        return packed

    @override
    def unpack(self, weights: Weights, sizes: EagleSizes) -> Weights:
        """Leave out the target's weights and the layer that hands its input on."""
        own = {name: value for name, value in weights.items() if name != _EMBEDDINGS}
        if not sizes.eagle_fc_bias and "fc.bias" in own and own.pop("fc.bias").any():
            raise CheckpointError("fc.bias is not zero, as it has to be for a drafter without one; export it again.")
        n_before = _n_before(sizes)
        if n_before:
            own = {name: value for name, value in own.items() if not name.startswith("layers.0.")}
        return {_renumbered(name, -n_before): value for name, value in own.items()}

    @override
    def config(self, sizes: EagleSizes, target_config: Any) -> dict[str, Any]:
        """Return the drafter's own config; ``bias`` is that of fc."""
        return self.base_config(sizes) | {"bias": sizes.eagle_fc_bias, "pad_token_id": 0}

    def base_config(self, sizes: EagleSizes) -> dict[str, Any]:
        """Return the keys that all engines read."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.self_attention_mlp_width,
            "num_hidden_layers": _n_before(sizes) + sizes.eagle_layers,
            "num_attention_heads": sizes.n_heads,
            "num_key_value_heads": sizes.self_attention_kv_heads,
            "head_dim": sizes.head_dim,
            "max_position_embeddings": sizes.max_position_embeddings,
            "rms_norm_eps": sizes.norm_eps,
            "vocab_size": sizes.vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "qkv_bias": sizes.qkv_bias,
        } | rope_keys(sizes)

    @override
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Look for a joining layer and numbered layers, which in vLLM's names EAGLE-3 has too."""
        is_eagle3 = "layers.0.hidden_norm.weight" in names
        return "fc.weight" in names and any(name.startswith("layers.0.") for name in names) and not is_eagle3

    @override
    def read_sizes(self, weights: Weights, config: Mapping[str, Any]) -> EagleSizes:
        facts = drafter_facts(config)
        if tuple(weights["fc.weight"].shape) != (facts["hidden_size"], 2 * facts["hidden_size"]):
            raise CheckpointError(
                f"fc.weight has shape {tuple(weights['fc.weight'].shape)}, expected "
                f"{(facts['hidden_size'], 2 * facts['hidden_size'])} from config.json."
            )
        return replace(_sizes(weights, facts), eagle_input_norm=False)

    @override
    def canonical(self, weights: Weights) -> Weights:
        """Leave out the prefix that transformers' causal LMs have, and a copy of the target's LM head."""
        own = {name.removeprefix("model."): value for name, value in super().canonical(weights).items()}
        return {name: value for name, value in own.items() if name != "lm_head.weight"}

    @override
    def notes(self, sizes: EagleSizes) -> list[str]:
        """Tell what the layer that hands its input on costs."""
        if not _n_before(sizes):
            return []
        return [
            f"{self.reader} has no norm before its first layer: the folder holds one layer more, which hands its input "
            "on and costs about as much as a layer (train with --set drafter.eagle_input_norm=false)"
        ]


class VllmEagleLayout(EagleAuthorsLayout):
    """The folder that vLLM loads with ``--speculative-config '{"method": "eagle", "model": FOLDER, ...}'``."""

    name: ClassVar[str] = "vllm-eagle"
    reader: ClassVar[str] = "vLLM"
    needs_embeddings: ClassVar[bool] = False

    @override
    def refusals(self, sizes: EagleSizes) -> list[str]:
        """Refuse a bias of the joining layer, which has none there."""
        return ["fc has a bias, and that of vLLM has none"] if sizes.eagle_fc_bias else []

    @override
    def config(self, sizes: EagleSizes, target_config: Any) -> dict[str, Any]:
        """Return the config without ``bias``, which would give the attention biases."""
        return self.base_config(sizes) | {"bias": False}

    @override
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Return False: without our key it is read as ``eagle``."""
        return False


class SglangEagleLayout(EagleAuthorsLayout):
    """The folder that SGLang loads with ``--speculative-algorithm EAGLE --speculative-draft-model-path FOLDER``."""

    name: ClassVar[str] = "sglang-eagle"
    reader: ClassVar[str] = "SGLang"
    needs_embeddings: ClassVar[bool] = False

    @override
    def refusals(self, sizes: EagleSizes) -> list[str]:
        return []

    @override
    def has_fc_bias(self, sizes: EagleSizes) -> bool:
        """Return True: SGLang's has one, which stays random where the file has none."""
        return True

    @override
    def config(self, sizes: EagleSizes, target_config: Any) -> dict[str, Any]:
        """Return the config without ``bias``, which adds attention biases; Qwen2's layer has those of q, k and v."""
        family, model_type = ("Qwen2", "qwen2") if sizes.qkv_bias else ("Llama", "llama")
        own = {"architectures": [f"{family}ForCausalLMEagle"], "model_type": model_type, "bias": False}
        return self.base_config(sizes) | own

    @override
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Return False: without our key it is read as ``eagle``."""
        return False


class MoaEagleLayout(DrafterLayout):
    """The EAGLE that the MoA authors trained for comparison, beside the target's config.json."""

    name: ClassVar[str] = "moa-eagle"
    kind: ClassVar[str] = EagleSizes.kind
    reader: ClassVar[str] = "the MoA authors' code"
    needs_target_config: ClassVar[bool] = True

    @override
    def refusals(self, sizes: EagleSizes) -> list[str]:
        """Refuse a first layer without its norm, and a bias of fc."""
        found = [] if sizes.eagle_input_norm else [f"the first layer has no input norm, and {self.reader} has one"]
        return found + ([f"fc has a bias, and {self.reader} has none"] if sizes.eagle_fc_bias else [])

    @override
    def tensors(self, sizes: EagleSizes) -> TensorList:
        """List the joining layer and the numbered layers."""
        tensors = {"spec_model_fc.weight": TensorSpec((sizes.hidden_size, 2 * sizes.hidden_size))}
        for index in range(sizes.eagle_layers):
            tensors |= eagle_layer(f"spec_model.{index}.", sizes, input_norm=True)
        return tensors

    @override
    def pack(self, weights: Weights, sizes: EagleSizes) -> Weights:
        return {
            _replaced(name, ("fc.", "spec_model_fc."), ("layers.", "spec_model.")): w for name, w in weights.items()
        }

    @override
    def unpack(self, weights: Weights, sizes: EagleSizes) -> Weights:
        pairs = ("spec_model_fc.", "fc."), ("spec_model.", "layers.")
        return {_replaced(name, *pairs): value for name, value in weights.items()}

    @override
    def canonical(self, weights: Weights) -> Weights:
        """Number the layer also where there is a single one."""
        return {_numbered(name): value for name, value in super().canonical(weights).items()}

    @override
    def config(self, sizes: EagleSizes, target_config: Any) -> dict[str, Any]:
        """Return the target's config; the code gets the drafter's sizes from its own settings."""
        return {**target_config.to_dict(), **rope_keys(sizes)}

    @override
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Look for this layout's own name of the joining layer."""
        return "spec_model_fc.weight" in names

    @override
    def read_sizes(self, weights: Weights, config: Mapping[str, Any]) -> EagleSizes:
        try:
            target_config = parse_target_config(config, "config.json")
        except TargetError as error:
            raise CheckpointError(f"config.json is not the target's config: {error}") from error
        facts = EagleSizes.from_target(target_config).to_dict()
        own = self.unpack(weights, EagleSizes.from_dict(facts))
        return _sizes(own, facts)

    @override
    def notes(self, sizes: EagleSizes) -> list[str]:
        """List the sizes that only our own key of config.json holds."""
        return [
            f"moa_spec's settings have to name the drafter's sizes: {sizes.eagle_layers} layers, "
            f"{sizes.self_attention_kv_heads} KV heads, MLP width {sizes.self_attention_mlp_width}, default_layer false"
        ]


def _n_before(sizes: EagleSizes) -> int:
    """Return how many layers hand their input on unchanged: one for a drafter with a norm before its first layer."""
    return int(sizes.eagle_input_norm)


def _renumbered(name: str, shift: int) -> str:
    """Rename ``layers.0.x`` to ``layers.1.x`` for a shift of 1; other names stay."""
    head, *rest = name.split(".")
    return ".".join(("layers", str(int(rest[0]) + shift), *rest[1:])) if head == "layers" else name


def _numbered(name: str) -> str:
    """Rename ``spec_model.x`` to ``spec_model.0.x``."""
    rest = name.removeprefix("spec_model.")
    return name if rest == name or rest[:1].isdigit() else f"spec_model.0.{rest}"


def _replaced(name: str, *pairs: tuple[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in pairs if name.startswith(old)), name)


def _sizes(weights: Weights, facts: dict[str, Any]) -> EagleSizes:
    """Infer sizes from shapes."""
    first = "layers.0."
    read = {
        "self_attention_kv_heads": rows(weights, f"{first}self_attn.k_proj.weight") // facts["head_dim"],
        "self_attention_mlp_width": rows(weights, f"{first}mlp.gate_proj.weight"),
        "eagle_layers": len({name.split(".")[1] for name in weights if name.startswith("layers.")}),
        "eagle_input_norm": f"{first}input_layernorm.weight" in weights,
        "eagle_fc_bias": "fc.bias" in weights,
        "qkv_bias": f"{first}self_attn.q_proj.bias" in weights,
    }
    try:
        return EagleSizes.from_dict(facts | read)
    except DrafterError as error:
        raise CheckpointError(f"the weights do not fit config.json: {error}") from error
