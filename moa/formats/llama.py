"""The layout of an independent drafter: an ordinary Llama checkpoint with tied embeddings.

vLLM loads the folder with ``{"method": "draft_model", "model": FOLDER, ...}``. transformers loads
it with ``LlamaForCausalLM.from_pretrained`` for ``generate(assistant_model=...)``. The drafter uses
the target's tokenizer.
"""

from typing import Any, Never

from ...errors import DrafterError
from ..drafters.independent import IndependentSizes
from . import layout
from .layout import Layout


def _config(sizes: IndependentSizes, target_config: Any) -> dict[str, Any]:
    block = sizes.own_block
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": layout.ACTIVATION,
        "hidden_size": block.width,
        "intermediate_size": block.mlp_width,
        "num_hidden_layers": sizes.independent_layers,
        "num_attention_heads": block.n_heads,
        "num_key_value_heads": block.n_kv_heads,
        "head_dim": block.head_dim,
        "rms_norm_eps": block.norm_eps,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    } | layout.rope_keys(sizes)


def _read_sizes(*_: object) -> Never:
    raise DrafterError(
        "the drafter was written by another program, which does not record the drafter's target. "
        "Give a drafter that moa-data has exported."
    )


LLAMA = Layout(
    name="llama",
    kind=IndependentSizes.kind,
    reader="vLLM and transformers",
    ignored=(layout.LM_HEAD,),
    config=_config,
    file_name=lambda name: f"model.{name}",
    recognises=lambda names, config: False,
    read_sizes=_read_sizes,
)
