"""What vLLM and SGLang expect of an EAGLE-3 folder, as data: tensors, vocabulary map, config.json.

Sources:

- vllm-project/vllm ``vllm/model_executor/models/llama_eagle3.py`` (``midlayer.`` is read as ``layers.0.``, whose q, k
  and v see 2E; ``d2t`` is an offset that is added to the draft id; ``t2d`` is skipped; without embeddings the target's
  are shared), ``vllm/transformers_utils/configs/eagle.py`` (an architecture that ends in ``Eagle3`` is kept);
- sgl-project/sglang ``python/sglang/srt/models/llama_eagle3.py`` (the same names; ``draft_vocab_size`` has to be there;
  a missing tensor stays random without an error; ``bias`` would give fc and the attention biases);
- SafeAILab/EAGLE ``eagle/traineagle3/config.json``.

The engines number layers differently, see ``interop/conventions.py``: the output of layer k is k + 1 for vLLM
(``eagle_aux_hidden_state_layer_ids`` of config.json, which it prefers to the nested one) and k for SGLang (the same
key below ``eagle_config``), so that one folder tells both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError
from .tensor_list import TensorList, TensorSpec, decoder_layer

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""Both engines know it under this name."""


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
) -> TensorList:
    """All tensors of the file; embeddings are left out, so that the engines share the target's.

    Args:
        width: E of the drafter.
        n_heads: query heads.
        n_kv_heads: key/value heads.
        head_dim: of both.
        mlp_width: of the MLP.
        vocab_size: V of the target.
        draft_vocab_size: tokens that can be drafted.
        target_width: width of the target's hidden states; default: E.
        n_features: layers of the target that are joined.
    """
    layer = decoder_layer(
        "midlayer.", width, n_heads * head_dim, n_kv_heads * head_dim, mlp_width, input_width=2 * width
    )
    return layer | {
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

    Raises:
        CheckpointError: an id is outside the vocabulary, occurs twice, or is not marked.
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
    """Keys of config.json that EAGLE-3 adds to those of a Llama of one layer.

    Args:
        sizes: the keys of that Llama.
        draft_vocab_size: tokens that can be drafted.
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
