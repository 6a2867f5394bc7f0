"""Layouts of EAGLE, EAGLE-2 and EAGLE-3 drafters, as other programs store them.

EAGLE and EAGLE-2 have the same drafters, and differ only in the shape of the drafts. There are four
layouts for these drafters: for the EAGLE authors' code, vLLM, SGLang, and the MoA authors' code.
For EAGLE-3 there is one layout, which vLLM and SGLang read.

In the EAGLE authors' code, vLLM and SGLang, the first layer of EAGLE has no norm before its
attention. But a drafter of this package may have been trained with this norm. An export then
inserts a first layer whose weights are zero except for norms, so this layer returns its input
unchanged. The layers of the drafter become the second and later layers of the file. The three
programs apply the norm in these layers. The cost is that one more layer is run.

Sources for EAGLE (vLLM and SGLang use the target's embeddings and LM head):

- SafeAILab/EAGLE ``eagle/model/cnets1.py``, ``eagle/model/ea_model.py``,
  ``eagle/train/EAGLE-LLaMA3-Instruct-8B.json``: unexpected or missing tensors raise an error. If
  config.json has no ``bias``, the value is true.
- vllm-project/vllm ``vllm/model_executor/models/llama_eagle.py``: ``fc`` has no bias. An unknown
  tensor name raises a KeyError.
- vllm-project/vllm ``vllm/transformers_utils/configs/eagle.py``: vLLM changes the architecture
  ``LlamaForCausalLM`` in config.json to ``EagleLlamaForCausalLM``.
- sgl-project/sglang ``python/sglang/srt/models/llama_eagle.py``, ``qwen2_eagle.py``: ``fc`` has a
  bias. If the file does not contain this bias, its values stay random. Only Qwen2 has attention
  biases.
- huawei-noah/HEBO, branch ``mixture-of-attentions``, ``moa_spec/models/train/eagle.py``.

Sources for EAGLE-3:

- vllm-project/vllm ``vllm/model_executor/models/llama_eagle3.py``: ``midlayer.`` is read as
  ``layers.0.``. The q, k and v projections of this layer have inputs of width 2E. ``d2t`` has an
  offset for each token of the draft vocabulary. To get the token id of a draft, vLLM adds the
  offset to the draft's index in the draft vocabulary. vLLM refuses a file with ``d2t`` if the draft
  vocabulary has all tokens. vLLM ignores ``t2d``. If the file has no embeddings, vLLM uses the
  target's.
- vllm-project/vllm ``vllm/transformers_utils/configs/eagle.py``: vLLM does not change an
  architecture in config.json whose name ends in ``Eagle3``.
- sgl-project/sglang ``python/sglang/srt/models/llama_eagle3.py``: the names of tensors are the same
  as in vLLM. config.json must have ``draft_vocab_size``. If a tensor is missing, its values stay
  random, without an error. If ``bias`` were true, ``fc`` and the attention would have biases.
- SafeAILab/EAGLE ``eagle/traineagle3/config.json``.
"""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...errors import DrafterError
from ..drafters.eagle import EagleDrafter, EagleSizes
from ..drafters.eagle3 import Eagle3Sizes
from ..targets.facts import parse_facts
from ..targets.model_files import FLOATS, find_problems
from . import layout
from .layout import ForeignConfig, Layout, Weights


def _renumbered(name: str, shift: int) -> str:
    """Add ``shift`` to the layer number: ``layers.0.x`` becomes ``layers.1.x`` for a shift of 1."""
    return re.sub(r"^layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + shift}.", name)


def _scaled(weights: Weights, sizes: EagleSizes, scale: float) -> Weights:
    """Multiply the columns of the layer ``fc`` that are applied to embeddings by a scale.

    The products are exact if the scale is a power of two.
    """
    fc_weight = weights.get("fc.weight")
    # If the weight of ``fc`` is missing or has a wrong shape or dtype, change nothing.
    # ``find_problems`` refuses the weights later.
    if fc_weight is None or fc_weight.dim() != 2 or fc_weight.dtype not in FLOATS:
        return weights
    fc_weight = fc_weight.clone()
    fc_weight[:, : sizes.hidden_size] *= scale
    return weights | {"fc.weight": fc_weight}


def _pack(weights: Weights, sizes: EagleSizes, needs_fc_bias: bool = False) -> Weights:
    """Convert weights for programs whose first layer has no norm before its attention.

    The scale of the embeddings is multiplied into ``fc``. If the drafter's first layer has such a
    norm, it becomes the second layer of the file. The first layer of the file is then a new layer
    that returns its input unchanged.
    """
    weights = _scaled(weights, sizes, sizes.eagle_embedding_scale)
    packed: Weights = {}
    for name, value in weights.items():
        packed[_renumbered(name, int(sizes.eagle_input_norm))] = value
    if sizes.eagle_input_norm:
        for name, value in weights.items():
            if name.startswith("layers.0.") and "input_layernorm" not in name:
                is_norm = name.endswith("norm.weight")
                packed[name] = torch.ones_like(value) if is_norm else torch.zeros_like(value)
    if needs_fc_bias and "fc.bias" not in packed:
        packed["fc.bias"] = torch.zeros_like(weights["fc.weight"][:, 0])
    return packed


def _check_zero_bias(weights: Weights) -> None:
    if weights["fc.bias"].any():
        raise DrafterError(
            f"the tensor fc.bias {list(weights['fc.bias'].shape)} is not zero, but config.json "
            "says that this drafter has no such bias. Restore the original files, or export the "
            "drafter again."
        )


def _unpack(weights: Weights, sizes: EagleSizes, needs_fc_bias: bool = False) -> Weights:
    unpacked = _scaled(weights, sizes, 1 / sizes.eagle_embedding_scale)
    if not sizes.eagle_fc_bias and (needs_fc_bias or "fc.bias" in unpacked):
        layout.check_shape(unpacked, "fc.bias", [sizes.hidden_size])
        _check_zero_bias(unpacked)
        del unpacked["fc.bias"]
    if not sizes.eagle_input_norm:
        return unpacked
    with torch.device("meta"):
        state = EagleDrafter(sizes).state_dict()
    if problem := find_problems(unpacked, _pack(state, sizes)):
        raise DrafterError(
            f"the weights do not fit the sizes of the drafter ({problem}). Restore the file of "
            "weights."
        )
    renumbered: Weights = {}
    for name, value in unpacked.items():
        if not name.startswith("layers.0."):
            renumbered[_renumbered(name, -1)] = value
    for name, value in _pack(renumbered, sizes).items():
        if name.startswith("layers.0.") and not torch.equal(weights[name], value):
            raise DrafterError(
                f"the tensor {name} {list(weights[name].shape)} has other values than those that "
                "moa-data wrote. The first layer in this folder must return its input unchanged. "
                "Export the drafter again."
            )
    return renumbered


def _config(sizes: EagleSizes, target_config: Any, **more: Any) -> dict[str, Any]:
    return layout.llama_config(sizes) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": int(sizes.eagle_input_norm) + sizes.eagle_layers,
        "mlp_bias": False,
        "qkv_bias": sizes.qkv_bias,
        **more,
    }


def _sglang_config(sizes: EagleSizes, target_config: Any) -> dict[str, Any]:
    family, model_type = ("Qwen2", "qwen2") if sizes.qkv_bias else ("Llama", "llama")
    # If ``bias`` were true, SGLang would add attention biases. A Qwen2 layer always has biases of
    # q, k and v, so it needs no ``bias``.
    return _config(
        sizes,
        target_config,
        architectures=[f"{family}ForCausalLMEagle"],
        model_type=model_type,
        bias=False,
    )


def _eagle_notes(sizes: EagleSizes) -> list[str]:
    return [
        "this format has no norm before the first layer. Therefore the folder has an additional "
        "first layer, which returns its input and takes about as much time as any other layer. To "
        "avoid it, train with `moa-data train --no-eagle-input-norm`"
    ] * sizes.eagle_input_norm


def _read_sizes(
    weights: Weights, facts: dict[str, Any], config: ForeignConfig = layout.NO_CONFIG
) -> EagleSizes:
    return EagleSizes.from_dict(
        facts
        | layout.layer_facts(weights, facts["head_dim"], "layers.0", config)
        | {
            "eagle_layers": layout.count_layers(weights, config),
            "eagle_input_norm": "layers.0.input_layernorm.weight" in weights,
            "eagle_fc_bias": "fc.bias" in weights,
            "qkv_bias": "layers.0.self_attn.q_proj.bias" in weights,
        }
    )


def _read_authors_sizes(weights: Weights, config: ForeignConfig) -> EagleSizes:
    # In the EAGLE authors' code, the first layer has no norm before its attention. If the file has
    # such a norm, it is refused later as an unexpected tensor.
    layout.check_bias(config, "bias", weights, "fc.bias")
    # In folders for SGLang, ``bias`` is true if the attention has biases. ``fc`` always has a bias.
    is_for_sglang = "CausalLMEagle" in str(config.get("architectures"))
    if config.get("bias") is False and not is_for_sglang and "fc.bias" in weights:
        _check_zero_bias(weights)
    return replace(
        _read_sizes(weights, layout.drafter_facts(config), config), eagle_input_norm=False
    )


EAGLE = Layout(
    # An example of this layout is yuhuili/EAGLE-LLaMA3-Instruct-8B.
    name="eagle",
    kind=EagleSizes.kind,
    reader="the EAGLE authors' code",
    needs=(layout.EMBEDDINGS,),
    # If RoPE has linear scaling, the EAGLE authors' code ignores rope_theta. So refuse scaled RoPE.
    unfit=lambda sizes: [
        *layout.unfilled_width(sizes),
        *[
            "the target's RoPE (rotary position embedding) is scaled, which this format does not "
            "support"
        ]
        * layout.is_rope_scaled(sizes),
    ],
    notes=_eagle_notes,
    config=lambda sizes, target_config: _config(
        sizes, target_config, bias=sizes.eagle_fc_bias, pad_token_id=0
    ),
    pack=_pack,
    unpack=_unpack,
    # Do not recognise files of EAGLE-3 with vLLM's tensor names. Such files have numbered layers
    # too, but they also have a hidden_norm.
    recognises=lambda names, config: (
        "fc.weight" in names
        and any(name.startswith("layers.0.") for name in names)
        and "layers.0.hidden_norm.weight" not in names
    ),
    read_sizes=_read_authors_sizes,
)
VLLM_EAGLE = replace(
    EAGLE,
    # To load the folder in vLLM, give --speculative-config '{"method": "eagle", "model": FOLDER,
    # ...}'.
    name="vllm-eagle",
    reader="vLLM",
    needs=(),
    requires={"eagle_fc_bias": (False,)},
    unfit=lambda sizes: [],
    # If ``bias`` were true, vLLM would add biases to attention.
    config=partial(_config, bias=False),
    # Never recognise a folder. A folder that this package did not write is read with the layout
    # ``eagle``.
    recognises=lambda names, config: False,
)
SGLANG_EAGLE = replace(
    VLLM_EAGLE,
    # To load the folder in SGLang, give --speculative-algorithm EAGLE
    # --speculative-draft-model-path FOLDER.
    name="sglang-eagle",
    reader="SGLang",
    requires={},
    config=_sglang_config,
    pack=partial(_pack, needs_fc_bias=True),
    unpack=partial(_unpack, needs_fc_bias=True),
)


def _moa_own_name(name: str) -> str:
    """Rename a tensor: ``spec_model_fc.x`` to ``fc.x``, and ``spec_model.0.x`` to ``layers.0.x``.

    In a file with a single layer, names have no layer number. Then ``spec_model.x`` becomes
    ``layers.0.x``.
    """
    if name.startswith("spec_model."):
        rest = name.removeprefix("spec_model.")
        return f"layers.{rest}" if rest[:1].isdigit() else f"layers.0.{rest}"
    return name.replace("spec_model_fc.", "fc.")


MOA_EAGLE = Layout(
    name="moa-eagle",
    kind=EagleSizes.kind,
    reader="the MoA authors' code",
    needs=("config",),
    requires={"eagle_input_norm": (True,), "eagle_fc_bias": (False,)},
    notes=lambda sizes: [
        "the MoA authors' code does not read the drafter's sizes from config.json. Set them in its "
        f"settings (moa_spec): {sizes.eagle_layers} layers, {sizes.self_attention_kv_heads} KV "
        f"heads, MLP width {sizes.self_attention_mlp_width}, default_layer false"
    ],
    config=lambda sizes, target_config: {**target_config.to_dict(), **layout.rope_keys(sizes)},
    pack=lambda weights, sizes: _scaled(weights, sizes, sizes.eagle_embedding_scale),
    unpack=lambda weights, sizes: _scaled(weights, sizes, 1 / sizes.eagle_embedding_scale),
    file_name=lambda name: name.replace("fc.", "spec_model_fc.").replace("layers.", "spec_model."),
    own_name=_moa_own_name,
    recognises=lambda names, config: "spec_model_fc.weight" in names,
    # Drafters of the MoA authors' code always have a norm before the attention of the first layer.
    read_sizes=lambda weights, config: replace(
        _read_sizes(weights, EagleSizes.from_target(parse_facts(config, "config.json")).to_dict()),
        eagle_input_norm=True,
    ),
)


# Keys of config.json that EAGLE-3.1 (vllm pull request 42764) and speculators add. An absent key
# means false.
EAGLE3_FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")


def _eagle3_config(sizes: Eagle3Sizes, target_config: Any) -> dict[str, Any]:
    layers = list(sizes.fused_layers)
    additions: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "mlp_bias": False,
        "bias": False,
        "draft_vocab_size": sizes.draft_vocabulary,
        # The output of layer k has the id k + 1 in vLLM, and the id k in SGLang. vLLM prefers the
        # key at the top level. SGLang reads the key in ``eagle_config``.
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }
    for name in EAGLE3_FLAGS:
        if getattr(sizes, name):
            additions[name] = True
    return layout.llama_config(sizes) | additions


def _read_eagle3_sizes(weights: Weights, config: ForeignConfig) -> Eagle3Sizes:
    facts = layout.drafter_facts(config)
    key = "eagle_aux_hidden_state_layer_ids"
    eagle_config = layout.nested(config, "eagle_config")
    # Refuse keys that would change the computation in a way that is not implemented. Only null and
    # the values in this dict are accepted.
    for name, plain in {
        "use_aux_hidden_state": True,
        "logit_scale": 1,
        "target_hidden_size": facts["hidden_size"],
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
    }.items():
        if (value := eagle_config.get(name, config.get(name, plain))) not in (plain, None):
            raise DrafterError(
                f"config.json has {name} {value!r}, but only {plain!r} is supported for EAGLE-3 "
                "drafters. Choose another drafter."
            )
    draft_vocabulary = layout.rows(weights, layout.LM_HEAD)
    layout.check_size(config, "draft_vocab_size", draft_vocabulary, weights, layout.LM_HEAD)
    read: dict[str, Any] = {
        "draft_vocabulary": draft_vocabulary,
        "fused_layers": layout.read_layer_ids((eagle_config.get(key), 0), (config.get(key), 1)),
        "query_key_norm": "midlayer.self_attn.q_norm.weight" in weights,
    }
    for name in EAGLE3_FLAGS:
        # A flag is also true if the file of weights has a tensor that is named after the flag. For
        # the flag ``fc_norm``, this is ``fc_norm.0.weight``.
        read[name] = bool(config.get(name)) or f"{name}.0.weight" in weights
    # TensorRT-LLM reads the flag ``norm_before_fc`` in ``eagle_config``. The other flags are always
    # at the top level of config.json.
    read["norm_before_fc"] = bool(eagle_config.get("norm_before_fc", read["norm_before_fc"]))
    return Eagle3Sizes.from_dict(
        facts | layout.layer_facts(weights, facts["head_dim"], "midlayer", config) | read
    )


def _full_vocabulary(sizes: Eagle3Sizes) -> Weights:
    """Return the tensors ``d2t`` and ``t2d`` of a drafter that can draft all tokens.

    The exported file of such a drafter lacks these tensors, because vLLM refuses a file with
    ``d2t``. An import adds them again. For a drafter with a reduced vocabulary, the result is
    empty, because its file contains its own tensors.
    """
    n_tokens = sizes.vocab_size if sizes.draft_vocabulary == sizes.vocab_size else 0
    made = {
        "d2t": torch.zeros(n_tokens, dtype=torch.int64),
        "t2d": torch.ones(n_tokens, dtype=torch.bool),
    }
    return made if n_tokens else {}


def _pack_eagle3(weights: Weights, sizes: Eagle3Sizes) -> Weights:
    """Remove ``d2t`` and ``t2d`` from the weights of a drafter that can draft all tokens."""
    packed = dict(weights)
    for name in _full_vocabulary(sizes):
        packed.pop(name, None)
    return packed


EAGLE3 = Layout(
    # To load the folder, give "method": "eagle3" in vLLM, or --speculative-algorithm EAGLE3 in
    # SGLang.
    name="eagle3",
    kind=Eagle3Sizes.kind,
    reader="vLLM and SGLang",
    ignored=(layout.EMBEDDINGS,),
    requires={"qkv_bias": (False,), "query_key_norm": (False,)},
    unfit=lambda sizes: (
        [
            "vLLM and SGLang require drafters that read exactly 3 layers of the target, so "
            "fused_layers must have 3 layers"
        ]
        * (len(sizes.fused_layers) != 3)
    ),
    config=_eagle3_config,
    pack=_pack_eagle3,
    unpack=lambda weights, sizes: (
        _full_vocabulary(sizes) | layout.with_draft_vocabulary(weights, sizes.vocab_size)
    ),
    # Some files have vLLM's name of the decoder layer, ``layers.0.``, in place of ``midlayer.``.
    own_name=lambda name: name.replace("layers.0.", "midlayer."),
    recognises=lambda names, config: bool(
        {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names
    ),
    read_sizes=_read_eagle3_sizes,
)
