"""Families of targets. Makes configs and models of targets with transformers.

Any causal LM of transformers can be a target if its LM head is a plain matrix. Such a target gives
hidden states, which are enough for most drafters. :data:`FAMILIES` lists further properties of each
family. For families without an entry, default properties are assumed. Before a property is used,
:mod:`.proof` checks it on the loaded model.

| the target must support | needed for | supported by |
|---|---|---|
| hidden states | stores of hidden states, drafters without KV | causal LMs, LM head without bias |
| keys and values | stores of KV, drafters that read KV | :data:`FAMILIES` |
| decoding | chains, trees, batches, serving | models whose attention takes masks; each is checked |
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto

from ...errors import TargetError
from ...files import parsing
from .model_files import read_config


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of a model type that its config does not state."""

    # Whether the config determines the KV shape of each layer, so that KV can be stored.
    keeps_kv: bool = True
    # Whether layers may have different kinds of attention, which the config lists in
    # ``layer_types``. If false, all layers have the same attention, with a sliding window if the
    # config states one.
    mixes_layers: bool = False
    # Whether RoPE rotates all keys as in drafters. There, the dimensions i and i + d / 2 of a head
    # are rotated together, and d is the head dim.
    rotates_halves: bool = True
    # Whether RoPE rotates the keys of every layer that has keys. Some families leave out RoPE in
    # some layers.
    rotates_all: bool = True
    # Whether some layers carry a recurrent state instead of KV.
    carries_state: bool = False
    # Whether the layers of this family compute the same as the class ``layers.DecoderBlock``. This
    # class is moa-data's implementation of Llama's decoder layer.
    has_llama_layers: bool = False
    # Name of transformers' attention implementation that supports all features of this family.
    attention: str = "sdpa"
    # The constant that norms add to their weights. Gemma's norms compute ``x * (1 + weight)``.
    norm_offset: float = 0.0


_MIXED = Family(mixes_layers=True)
_ROTATED_IN_SOME = Family(mixes_layers=True, rotates_halves=False, rotates_all=False)
_WITH_STATES = Family(mixes_layers=True, carries_state=True, norm_offset=1.0)
FAMILIES: dict[str, Family] = {
    "llama": Family(has_llama_layers=True),
    "mistral": Family(has_llama_layers=True),
    "qwen2": Family(has_llama_layers=True, mixes_layers=True),
    "qwen3": Family(has_llama_layers=True, mixes_layers=True),
    "qwen3_moe": Family(),
    "mixtral": Family(),
    "granite": Family(),
    "olmo2": Family(),
    "phi3": Family(),
    "ministral": _MIXED,
    "ministral3": Family(),
    "glm4_moe": Family(),
    "smollm3": _ROTATED_IN_SOME,
    "cohere2": _ROTATED_IN_SOME,
    "gemma2": Family(mixes_layers=True, attention="eager", norm_offset=1.0),
    # Gemma 3 has two kinds of rotation: one for sliding-window layers, one for full attention. A
    # drafter has only one kind, so ``rotates_halves`` is false.
    "gemma3_text": Family(mixes_layers=True, rotates_halves=False, norm_offset=1.0),
    "gpt_oss": Family(mixes_layers=True, attention="eager"),
    "llama4_text": _ROTATED_IN_SOME,
    "qwen3_next": _WITH_STATES,
    "qwen3_5_text": _WITH_STATES,
    "qwen3_5_moe_text": _WITH_STATES,
    "gemma4_text": Family(mixes_layers=True, rotates_halves=False),
    "deepseek_v3": Family(rotates_halves=False),
    "glm4_moe_lite": Family(rotates_halves=False),
}
"""Model type of the text model -> the properties of its family."""

# The properties that are assumed for a model type without an entry in FAMILIES.
OTHER = Family(mixes_layers=True, keeps_kv=False, rotates_halves=False)


def transformers_config(values: Mapping[str, Any], folder: Path | None = None) -> Any:
    """Make the transformers config from the values of a config.json.

    If the folder is given, transformers usually reads the config.json itself. But transformers does
    not understand the dtypes ``torch.bfloat16`` and ``auto``. If the config.json has one of these,
    the config is made from ``values``, after the dtype is replaced.

    Args:
        values: the content of config.json.
        folder: the folder that holds the config.json. If None, the config is made from ``values``.
    """
    plain = _with_plain_dtypes(values)
    if folder is not None and plain == values:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # In a config.json, transformers writes special floats such as infinity as objects. Decode these
    # objects.
    return AutoConfig.for_model(**PreTrainedConfig._decode_special_floats(plain))


def _with_plain_dtypes(values: Mapping[str, Any]) -> dict[str, Any]:
    """In the dtypes of a config, replace ``torch.bfloat16`` by ``bfloat16``, and ``auto`` by None.

    transformers reads neither ``torch.bfloat16`` nor ``auto``.
    """
    plain = dict(values)
    for key in ("dtype", "torch_dtype"):
        if isinstance(name := plain.get(key), str):
            plain[key] = None if name == "auto" else name.removeprefix("torch.")
    if isinstance(text := plain.get("text_config"), dict):
        plain["text_config"] = _with_plain_dtypes(text)
    return plain


def model_loader(folder: Path) -> Any:
    """Return transformers' auto class that loads a target: for text, or for images and text."""
    is_text = (
        read_config(folder).get("model_type") in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def first_attribute(item: Any, names: Sequence[str]) -> Any:
    """Return the value of the first of several attributes that is not None.

    Attributes that do not exist are skipped. If all are None or do not exist, the result is None.
    """
    for name in names:
        value = getattr(item, name, None)
        if value is not None:
            return value
    return None


def empty_model(config: Any) -> Any:
    """Make a causal LM on the meta device from the config of a text model.

    Raises TargetError on failure.
    """
    trouble = f"transformers cannot make a causal LM from the config of {config.model_type}"
    with parsing(trouble, TargetError, "Choose another target."), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def text_model(model: Any) -> Any:
    """Return the text model in a causal LM. A text model computes hidden states, not logits."""
    decoder = model.get_decoder()
    is_found = decoder is not model and hasattr(decoder, "config")
    # In two cases, ``get_decoder`` does not return the text model: in Llama 4 it returns the causal
    # LM, and in models whose LM head is named "decoder" it returns the LM head. In these cases, use
    # ``model.model``.
    return decoder if is_found else model.model


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a causal LM."""
    body = text_model(model)
    for name in ("layers", "h", "blocks", "decoder.layers"):
        with contextlib.suppress(AttributeError):
            return cast(nn.ModuleList, body.get_submodule(name))
    raise TargetError(
        f"moa-data cannot find the decoder layers of {type(body).__name__}, so it cannot store "
        "the outputs of single layers. Leave hidden:layer:K out of `activations`."
    )


@contextlib.contextmanager
def layer_outputs(model: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of decoder layers. They do not include a final norm.

    Yields a dict from the index of a layer to the output [B, T, E] of this layer in the last
    forward pass.
    """
    outputs: dict[int, Tensor] = {}
    width = text_model(model).config.hidden_size

    def keep(layer: int, _module: Any, _inputs: Any, output: Any) -> None:
        outputs[layer] = output[0] if isinstance(output, tuple | list) else output
        if outputs[layer].ndim != 3 or outputs[layer].shape[2] != width:
            raise TargetError(
                f"the layers of {model.config.model_type} do not output one hidden state for each "
                "token, so moa-data cannot store their outputs. Leave hidden:layer:K out of "
                "`activations`."
            )

    modules: Any = decoder_layers(model) if layers else []
    handles = [modules[layer].register_forward_hook(partial(keep, layer)) for layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
