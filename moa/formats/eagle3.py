"""Layout of EAGLE-3, which vLLM and SGLang load: tensors, vocabulary map, config.json.

Sources:

- vllm-project/vllm ``vllm/model_executor/models/llama_eagle3.py`` (``midlayer.`` is read as ``layers.0.``, whose q, k
  and v see 2E; ``d2t`` is an offset that is added to the draft id; ``t2d`` is skipped; without embeddings the target's
  are shared), ``vllm/transformers_utils/configs/eagle.py`` (an architecture that ends in ``Eagle3`` is kept);
- sgl-project/sglang ``python/sglang/srt/models/llama_eagle3.py`` (the same names; ``draft_vocab_size`` has to be there;
  a missing tensor stays random without an error; ``bias`` would give fc and the attention biases);
- SafeAILab/EAGLE ``eagle/traineagle3/config.json``.

The engines number layers differently, see ``pipeline/exchange/conventions.py``: the output of layer k is k + 1 for vLLM
(``eagle_aux_hidden_state_layer_ids`` of config.json, which it prefers to the nested one) and k for SGLang (the same
key below ``eagle_config``), so that one folder tells both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ...errors import CheckpointError, DrafterError
from ..drafters.eagle3 import Eagle3Sizes
from ..files.tensor_list import TensorList, TensorSpec, decoder_layer
from .base import DrafterLayout, Weights, drafter_facts, rope_keys, rows

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""The architecture's name in both engines."""
_FLAGS = ("fc_norm", "norm_output")
"""Keys of config.json for what EAGLE-3.1 adds, both false where they are absent (vllm pull request 42764)."""


def eagle3_tensors(
    width: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    mlp_width: int,
    vocab_size: int,
    draft_vocab_size: int,
    *,
    target_width: int | None = None,
    n_features: int = 3,
    fc_norm: bool = False,
) -> TensorList:
    """List all tensors of the file; embeddings are left out, so that the engines share the target's.

    Args:
        width: E of the drafter.
        vocab_size: V of the target.
        draft_vocab_size: tokens that can be drafted.
        target_width: width of the target's hidden states; default: E.
        n_features: layers of the target that are joined.
        fc_norm: whether each of them has a norm of its own, as in EAGLE-3.1.
    """
    layer = decoder_layer(
        "midlayer.", width, n_heads * head_dim, n_kv_heads * head_dim, mlp_width, input_width=2 * width
    )
    norms = {f"fc_norm.{index}.weight": TensorSpec((target_width or width,)) for index in range(n_features)}
    return (layer | norms if fc_norm else layer) | {
        "midlayer.hidden_norm.weight": TensorSpec((width,)),
        "fc.weight": TensorSpec((width, n_features * (target_width or width))),
        "norm.weight": TensorSpec((width,)),
        "lm_head.weight": TensorSpec((draft_vocab_size, width)),
        "d2t": TensorSpec((draft_vocab_size,), (torch.int64,)),
        "t2d": TensorSpec((vocab_size,), (torch.bool,)),
    }


def check_vocabulary_map(weights: Mapping[str, Tensor]) -> None:
    """Refuse a ``d2t`` and a ``t2d`` that do not describe the same tokens.

    Args:
        weights: with ``d2t`` [V_draft] int64, offsets from a draft id to the target's id, and ``t2d`` [V] bool, true
            for each token that can be drafted.
    """
    drafted, marked = weights["d2t"], weights["t2d"]
    ids = drafted + torch.arange(len(drafted), device=drafted.device)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(marked):
        raise CheckpointError(
            f"d2t names the tokens {int(ids.min())} to {int(ids.max())}, expected ids from 0 to {len(marked) - 1}. d2t "
            "holds offsets (target id - draft id), not target ids."
        )
    if len(ids.unique()) < len(ids):
        raise CheckpointError(f"d2t maps two draft ids to one token ({len(ids.unique())} of {len(ids)} are different).")
    if not bool(marked[ids].all()) or int(marked.sum()) != len(ids):
        raise CheckpointError(f"t2d marks {int(marked.sum())} tokens, expected the {len(ids)} that d2t names.")


def eagle3_config(
    sizes: Mapping[str, Any], draft_vocab_size: int, layers: Sequence[int], target_width: int | None = None
) -> dict[str, Any]:
    """Return the keys of config.json that EAGLE-3 adds to those of a Llama of one layer.

    Args:
        layers: decoder layers of the target, from 0, whose outputs are joined.
        target_width: width of the target's hidden states where it is another than the drafter's.
    """
    own: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
    }
    return dict(sizes) | own | ({"target_hidden_size": target_width} if target_width else {})


class Eagle3Layout(DrafterLayout):
    """The folder that vLLM (``"method": "eagle3"``) and SGLang (``--speculative-algorithm EAGLE3``) load."""

    name: ClassVar[str] = "eagle3"
    kind: ClassVar[str] = Eagle3Sizes.kind
    reader: ClassVar[str] = "vLLM and SGLang"

    @override
    def refusals(self, sizes: Eagle3Sizes) -> list[str]:
        """Refuse biases of q, k and v, which have no place, and other than three joined states."""
        found = ["q, k and v have biases, and the engines have none"] if sizes.qkv_bias else []
        if (n := len(sizes.fused_layers)) != 3:
            found.append(f"it joins {n} layers of the target, and the engines join 3 (train with three fused_layers)")
        return found

    @override
    def tensors(self, sizes: Eagle3Sizes) -> TensorList:
        return eagle3_tensors(
            sizes.hidden_size,
            sizes.n_heads,
            sizes.self_attention_kv_heads,
            sizes.head_dim,
            sizes.self_attention_mlp_width,
            sizes.vocab_size,
            sizes.draft_vocabulary,
            n_features=len(sizes.fused_layers),
            fc_norm=sizes.fc_norm,
        )

    @override
    def pack(self, weights: Weights, sizes: Eagle3Sizes) -> Weights:
        check_vocabulary_map(weights)
        return dict(weights)

    @override
    def unpack(self, weights: Weights, sizes: Eagle3Sizes) -> Weights:
        check_vocabulary_map(weights)
        return weights

    @override
    def config(self, sizes: Eagle3Sizes, target_config: Any) -> dict[str, Any]:
        """Return a Llama of one layer, the draft vocabulary and the fused layers; ``test_time_steps`` is training's."""
        base = {
            "hidden_act": "silu",
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.self_attention_mlp_width,
            "num_attention_heads": sizes.n_heads,
            "num_key_value_heads": sizes.self_attention_kv_heads,
            "head_dim": sizes.head_dim,
            "max_position_embeddings": sizes.max_position_embeddings,
            "rms_norm_eps": sizes.norm_eps,
            "vocab_size": sizes.vocab_size,
            "attention_bias": False,
            "mlp_bias": False,
        } | rope_keys(sizes)
        flags = {name: True for name in _FLAGS if getattr(sizes, name)}
        return eagle3_config(base, sizes.draft_vocabulary, sizes.fused_layers) | flags

    @override
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Look for a joining layer in front of the one layer that has this name."""
        return {"fc.weight", "midlayer.hidden_norm.weight"} <= names

    @override
    def canonical(self, weights: Weights) -> Weights:
        """Leave out the prefix of causal LMs and a copy of the embeddings; rename vLLM's layer to the other name."""
        own = {name.removeprefix("model."): value for name, value in super().canonical(weights).items()}
        own = {name.replace("layers.0.", "midlayer."): value for name, value in own.items()}
        return {name: value for name, value in own.items() if name != "embed_tokens.weight"}

    @override
    def read_sizes(self, weights: Weights, config: Mapping[str, Any]) -> Eagle3Sizes:
        """Read the sizes from the drafter's config.json, the fused layers included, and from the shapes."""
        facts = drafter_facts(config)
        read = {
            "self_attention_kv_heads": rows(weights, "midlayer.self_attn.k_proj.weight") // facts["head_dim"],
            "self_attention_mlp_width": rows(weights, "midlayer.mlp.gate_proj.weight"),
            "draft_vocabulary": rows(weights, "lm_head.weight"),
            "fused_layers": fused_layers_of(config),
            "fc_norm": "fc_norm.0.weight" in weights,
            "norm_output": bool(config.get("norm_output", False)),
        }
        try:
            return Eagle3Sizes.from_dict(facts | read)
        except DrafterError as error:
            raise CheckpointError(f"the weights do not fit config.json: {error}") from error


def fused_layers_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the decoder layers, from 0, that a foreign config.json names for the engines.

    Raises:
        CheckpointError: it names none, so that they would have to be guessed from the target's depth.
    """
    nested = config.get("eagle_config")
    for values, shift in ((nested if isinstance(nested, Mapping) else {}, 0), (config, 1)):
        if ids := values.get("eagle_aux_hidden_state_layer_ids"):
            if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
                raise CheckpointError(
                    f"eagle_aux_hidden_state_layer_ids is {str(ids)[:60]!r}, expected a list of layers."
                )
            return tuple(layer - shift for layer in ids)
    raise CheckpointError(
        "config.json does not say which layers of the target are fused; add eagle_aux_hidden_state_layer_ids below "
        "eagle_config."
    )
