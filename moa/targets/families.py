"""Targets by their transformers config: what is known of each family, its sizes, and which layers see how far.

Any causal LM of transformers whose LM head is a matrix alone gives hidden states, from which most drafters learn. What
a family has besides is data, an entry of :data:`FAMILIES`; what an entry says, and what is assumed of families without
one, is proven on the loaded model before it is used (:mod:`.proof`).

| level | what works | which targets |
|---|---|---|
| hidden states | stores of hidden states, drafters that read no KV | causal LMs of transformers, LM head without bias |
| keys and values | stores of KV, drafters that read it | those of :data:`FAMILIES` |
| decoding | chains, trees, batches, serving | those whose attention takes masks; proven for each model |
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto

from ...errors import DrafterError, TargetError
from ...files import parsing
from ..nn.layers import ROPE_TYPES, BlockSizes, Rotary
from ..nn.masks import Chunk
from .model_files import FLOATS, check_model_folder, quantised_by, read_config


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is known of a model type beyond its config."""

    keeps_kv: bool = True  # whether the config says what each layer caches
    # whether ``layer_types`` is heeded; else all layers slide where there is a window
    mixes_layers: bool = False
    # whether all keys are rotated as a drafter rotates its own, by pairs (i, i + d / 2)
    rotates_halves: bool = True
    rotates_all: bool = True  # whether no layer with keys leaves them as they are
    carries_state: bool = False  # whether some layers have a state in place of KV
    has_llama_layers: bool = False  # whether ``layers.DecoderBlock`` computes its layers
    attention: str = "sdpa"  # kernels of transformers that compute all that the attention has
    norm_offset: float = 0.0  # what is added to the weights of norms


class KVShape(NamedTuple):
    """The keys and values that a layer caches for a token."""

    n_heads: int
    key_width: int  # of a head, as for values
    value_width: int

    @property
    def width(self) -> int:
        """Numbers of all heads."""
        return self.n_heads * (self.key_width + self.value_width)


class KVGroup(NamedTuple):
    """Layers that cache keys and values alike, as one field of a store."""

    # "kv" where these are all layers of the target, else "kv/full_attention" or the like
    field: str
    layers: tuple[int, ...]  # of the target, ascending
    shape: KVShape
    is_rotated: bool = True  # whether all layers of the target rotate their keys


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
    # two rotations
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
"""Model type of the text model -> what is known of it."""
# what is assumed of the others
OTHER = Family(mixes_layers=True, keeps_kv=False, rotates_halves=False)


# Upper limits of the sizes in a config.json, far above those of the largest models.
_LARGEST = {
    "num_hidden_layers": 1 << 10, "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12, "head_dim": 1 << 12,
    "hidden_size": 1 << 18, "intermediate_size": 1 << 20, "vocab_size": 1 << 22, "max_position_embeddings": 1 << 26,
    "sliding_window": 1 << 26,
}  # fmt: skip
_MANY_POSITIONS = 1 << 20  # positions of a target whose config names no bound


def load_target_config(folder: Path, with_weights: bool = True) -> Any:
    """Load the transformers config of a model folder, that of its text model, with plausible sizes.

    ``with_weights``: whether the weights will be used, and so refused if they are quantised.
    """
    folder, values = Path(folder), read_config(Path(folder))
    check_model_folder(folder)
    return parse_target_config(values, folder / "config.json", folder, with_weights)


def parse_target_config(
    values: Mapping[str, Any], source: object, folder: Path | None = None, with_weights: bool = True
) -> Any:
    """Make the transformers config of a target from the values of its config.json, of a folder if there is one."""
    _check_loads(values, source)
    if with_weights and (problem := quantisation_problem(values, folder)):
        raise TargetError(f"{source}: {problem}.")
    own = values.get("text_config")
    # before transformers makes lists of that length
    _check_counts(own if isinstance(own, dict) else values, source)
    with parsing(f"cannot read {source}", TargetError):
        config = transformers_config(values, folder)
        dtype = config.dtype
        config = config.get_text_config(decoder=True)
        config.dtype = config.dtype or dtype
    name = config.model_type
    with parsing(
        f"{source}: the config of {name} is not understood", TargetError, "Choose another target."
    ):
        _check_config(config, source)
        sizes = target_sizes(config)
        _ = kv_groups(config)
        try:
            Rotary(sizes["head_dim"], rope_parameters(config), sizes["max_position_embeddings"])
        except DrafterError as error:
            raise TargetError(f"{source}: {error}") from error
    return config


def transformers_config(values: Mapping[str, Any], folder: Path | None = None) -> Any:
    """Make the config of transformers from the values of a config.json, of a folder if there is one."""
    plain = _with_plain_dtypes(values)
    if folder is not None and plain == values:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Infinity, for example, is an object in what transformers writes.
    return AutoConfig.for_model(**PreTrainedConfig._decode_special_floats(plain))


def _with_plain_dtypes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``torch.bfloat16`` as ``bfloat16``, and leave out ``auto``: AutoConfig reads neither."""
    plain = dict(values)
    for key in ("dtype", "torch_dtype"):
        if isinstance(name := plain.get(key), str):
            plain[key] = None if name == "auto" else name.removeprefix("torch.")
    if isinstance(text := plain.get("text_config"), dict):
        plain["text_config"] = _with_plain_dtypes(text)
    return plain


def quantisation_problem(values: Mapping[str, Any], folder: Path | None = None) -> str:
    """Say why the weights of a target can't be used, by the values of its config.json; empty where they can."""
    method = quantised_by(values, folder)
    return method and (
        f"the weights are quantised by {method!r}. Give the folder that they were made from, or save them dequantised "
        "with transformers"
    )


def model_loader(folder: Path) -> Any:
    """The class of transformers that loads a target, with the text model of those that also see."""
    is_text = (
        read_config(folder).get("model_type") in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def attention_of(config: Any) -> str:
    """The kernels of transformers that compute all that a target's attention has."""
    model_class: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_plain = model_class is not None and not model_class._supports_sdpa  # as in older families
    return "eager" if is_plain else family_of(config).attention


def family_of(config: Any) -> Family:
    """Return what is known of the family of a target's config."""
    return FAMILIES.get(config.model_type, OTHER)


def _check_loads(values: Mapping[str, Any], source: object) -> None:
    """Refuse what transformers loads as no causal LM, nor as one that also sees."""
    model_type = values.get("model_type")
    text = values.get("text_config")
    sees = model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    loads_text = (
        isinstance(text, dict)
        and text.get("model_type") in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    if model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not (
        sees and loads_text
    ):
        way = "Choose another target, or a transformers that has it"
        raise TargetError(
            f"model type {str(model_type)[:60]!r} is not a causal language model of transformers "
            f"{transformers.__version__} ({source}). {'Save its text model alone as one' if sees else way}."
        )


def _check_counts(values: Mapping[str, Any], source: object) -> None:
    for name, largest in _LARGEST.items():
        value = values.get(name)
        of_layers = value if name == "intermediate_size" and isinstance(value, list) else [value]
        least = 0 if name == "sliding_window" else 1  # no window, where no layer slides
        if any(
            one is not None and (type(one) is not int or not least <= one <= largest)
            for one in of_layers
        ):
            shown = f"{str(value)[:60]!r}, expected a whole number from {least} to {largest}"
            raise TargetError(f"{source}: {name} is {shown}. Restore the file.")


def _check_config(config: Any, source: object) -> None:
    """Refuse sizes that do not fit together, including those that transformers fills in."""
    needed = ("hidden_size", "num_hidden_layers", "vocab_size")
    if lacking := [name for name in needed if getattr(config, name, None) is None]:
        raise TargetError(
            f"{source}: {config.model_type} has no {' and no '.join(lacking)}, from which stores and drafters are "
            "made. Choose another target."
        )
    for own in getattr(config, "per_layer_config", None) or [config]:
        _check_counts({name: getattr(own, name, None) for name in _LARGEST}, source)
    known = target_sizes(config)
    family = family_of(config)
    kinds = set(getattr(config, "layer_types", None) or ()) if family.mixes_layers else set()
    known_kinds = {"full_attention", "sliding_attention", "chunked_attention"}
    known_kinds |= {"linear_attention"} if family.carries_state else set()
    n_heads = known["n_heads"]
    n_kv_heads = known["n_kv_heads"]
    epsilon = norm_eps(config)
    if family.keeps_kv and n_heads % n_kv_heads:
        trouble = f"{n_kv_heads} KV heads do not divide {n_heads} heads"
    elif type(epsilon) not in (int, float) or not 0 <= epsilon <= 1:
        trouble = f"the epsilon of its norms is {epsilon!r}, expected a number from 0 to 1"
    elif config.dtype not in (None, *FLOATS):
        trouble = f"dtype is {str(config.dtype)[:60]!r}, expected a dtype of floating-point numbers"
    elif family.keeps_kv and kinds - known_kinds:
        trouble = (
            f"layer_types are not all {' or '.join(sorted(known_kinds - {'chunked_attention'}))}"
        )
    elif "sliding_attention" in layer_kinds(config) and not getattr(config, "sliding_window", None):
        trouble = "layers have sliding_attention and sliding_window is missing"
    else:
        return
    raise TargetError(f"{source}: {trouble}. Restore the file.")


def target_sizes(config: Any) -> dict[str, Any]:
    """The sizes of a target, from its transformers config.

    Those of its heads are of any layer where layers differ; then ``kv_width`` is that of the widest one's KV. Where no
    layer has attention, they are heads of about 64 for the drafters that have it.
    """
    own = _a_layer(config)
    n_heads = getattr(own, "num_attention_heads", None) or max(1, config.hidden_size // 64)
    groups = kv_groups(config) if family_of(config).keeps_kv else []
    kv_width = max((group.shape.width for group in groups if group.field != "kv"), default=0)
    return {
        "n_layers": config.num_hidden_layers,
        "n_heads": n_heads,
        "n_kv_heads": getattr(own, "num_key_value_heads", None) or n_heads,
        "head_dim": getattr(own, "head_dim", None) or config.hidden_size // n_heads,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": _n_positions(config),
        "architecture": config.model_type,
    } | ({"kv_width": kv_width} if kv_width else {})


def _a_layer(config: Any) -> Any:
    return (getattr(config, "per_layer_config", None) or [config])[0]


def count_weights(config: Any) -> int:
    """Count the weights of a text model, of tied ones those of one matrix; less biases and norms of Llama's layers."""
    if not family_of(config).has_llama_layers:
        return sum(weight.numel() for weight in empty_model(config).parameters())
    sizes = target_sizes(config)
    heads = sizes["n_heads"] + sizes["n_kv_heads"]
    layer = sizes["hidden_size"] * (2 * heads * sizes["head_dim"] + 3 * config.intermediate_size)
    return int(sizes["vocab_size"] * sizes["hidden_size"] + sizes["n_layers"] * layer)


def empty_model(config: Any) -> Any:
    """Make a causal LM of the config of a text model, on the meta device; raises TargetError."""
    trouble = f"transformers makes no causal LM of {config.model_type}"
    with parsing(trouble, TargetError, "Choose another target."), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def text_model(model: Any) -> Any:
    """Find the text model in a causal LM: what gives hidden states, without the LM head."""
    found = model.get_decoder()
    is_found = found is not model and hasattr(found, "config")
    # as in Llama 4, and where the LM head is called a decoder
    return found if is_found else model.model


def decoder_layers(model: Any) -> nn.ModuleList:
    """Find the decoder layers of a causal LM."""
    body = text_model(model)
    for name in ("layers", "h", "blocks", "decoder.layers"):
        with contextlib.suppress(AttributeError):
            return cast(nn.ModuleList, body.get_submodule(name))
    raise TargetError(
        f"the decoder layers of {type(body).__name__} are not found. Leave out hidden:layer:K."
    )


def _n_positions(config: Any) -> int:
    """The positions up to which a token's keys stay as they are while its text grows."""
    found: int = getattr(config, "max_position_embeddings", None) or _MANY_POSITIONS
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type") == "longrope":  # another rotation from some length on
        found = int(rope.get("original_max_position_embeddings") or found)
    return found


def norm_eps(config: Any) -> float:
    """The epsilon of a target's norms."""
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    return next(
        (getattr(config, name) for name in names if getattr(config, name, None) is not None), 1e-5
    )


def mlp_width(config: Any) -> int:
    """The width of a target's dense MLPs; four times its own where the config names none."""
    width = getattr(config, "intermediate_size", None)
    width = max(width) if isinstance(width, list) else width  # of each layer
    return width if isinstance(width, int) else 4 * int(config.hidden_size)


def embedding_scale(config: Any) -> float:
    """What a target's embedding layer multiplies what it looks up with, as Gemma's does; 1 of others."""
    table = empty_model(config).get_input_embeddings()
    return float(getattr(table, "scalar_embed_scale", getattr(table, "embed_scale", 1.0)))


def logit_scale(config: Any) -> float:
    """What a target multiplies the outputs of its LM head by."""
    divisor = getattr(config, "logits_scaling", None)  # Granite's
    return float(1 / divisor if divisor else getattr(config, "logit_scale", None) or 1.0)


def logit_cap(config: Any) -> float | None:
    """The bound of a target's logits, which a tanh keeps them within; None for no bound."""
    # RecurrentGemma's, xLSTM's
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((cap for name in names if (cap := getattr(config, name, None)) is not None), None)


def check_kv(config: Any) -> None:
    """Refuse a target whose keys and values no store takes."""
    if not family_of(config).keeps_kv:
        raise TargetError(
            f"what the layers of {config.model_type} cache is not known, so a store of keys and values cannot be made. "
            "One of hidden states can: --activations hidden:last,hidden:layer:1,..."
        )


def rotates_as_llama(config: Any) -> bool:
    """Whether all of a target's layers have keys, all alike, and rotated as a drafter rotates its own."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    is_whole = (rope.get("partial_rotary_factor") or 1.0) == 1
    is_known = family_of(config).rotates_halves and rope.get("rope_type", "default") in ROPE_TYPES
    return is_known and is_whole and has_uniform_kv(config)


def check_rotation(config: Any) -> None:
    """Refuse a drafter whose queries meet a target's own keys where these are rotated in another way."""
    if not rotates_as_llama(config):
        raise DrafterError(
            f"this drafter takes keys that are alike in all layers and rotated as Llama's, unlike those of "
            f"{config.model_type}. Train one that takes keys as they are, such as moa, or that reads hidden states."
        )


def layer_kinds(config: Any) -> list[str]:
    """The kind of attention of each decoder layer, as transformers names it."""
    slides = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) if family_of(config).mixes_layers else None
    return list(
        kinds or ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    )


def layer_windows(config: Any) -> list[int | None]:
    """The attention window of each decoder layer in tokens, the query included; None for full attention."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    windows = {
        "sliding_attention": window,
        "chunked_attention": None if chunk is None else Chunk(chunk),
    }
    return [windows.get(kind) for kind in layer_kinds(config)]


def kv_shapes(config: Any) -> list[KVShape | None]:
    """What each layer caches of keys and values; None for a layer that carries a state in their place."""
    kinds = layer_kinds(config)
    found = list[KVShape | None]()
    for kind, own in zip(
        kinds, getattr(config, "per_layer_config", None) or [config] * len(kinds), strict=True
    ):
        if (
            kind == "linear_attention"
            or (n_heads := getattr(own, "num_attention_heads", None)) is None
        ):
            found.append(None)
        # a latent, and a rotated key of all heads
        elif (rank := getattr(own, "kv_lora_rank", None)) is not None:
            found.append(KVShape(1, rank, own.qk_rope_head_dim))
        else:
            width = getattr(own, "head_dim", None) or config.hidden_size // n_heads
            found.append(
                KVShape(getattr(own, "num_key_value_heads", None) or n_heads, width, width)
            )
    return found


def kv_groups(config: Any) -> list[KVGroup]:
    """Group the layers that cache keys and values of their own, in the order of their first layers."""
    shapes = kv_shapes(config)
    shared = getattr(config, "kv_sharing_modes", None) or [None] * len(shapes)
    is_latent = getattr(_a_layer(config), "kv_lora_rank", None) is not None
    found: dict[tuple[str, KVShape], list[int]] = {}
    for layer, (kind, shape, mode) in enumerate(
        zip(layer_kinds(config), shapes, shared, strict=True)
    ):
        if shape is not None and mode != "reuse":  # the cache of an earlier layer
            found.setdefault(("latent" if is_latent else kind, shape), []).append(layer)
    kinds = {shape for _, shape in found}
    n_layers = sum(map(len, found.values()))
    is_rotated = family_of(config).rotates_all
    if (
        n_layers == len(shapes)
        and len(kinds) == 1
        and all(one.key_width == one.value_width for one in kinds)
    ):
        return [KVGroup("kv", tuple(range(n_layers)), kinds.pop(), is_rotated)]
    groups: list[KVGroup] = []
    for (kind, shape), layers in found.items():
        # of this kind, and of another shape
        n_before = sum(one.field.startswith(f"kv/{kind}") for one in groups)
        name = f"kv/{kind}{f'_{n_before + 1}' if n_before else ''}"
        groups.append(KVGroup(name, tuple(layers), shape, is_rotated))
    return groups


def has_uniform_kv(config: Any) -> bool:
    """Whether all layers cache keys and values of one shape, and keys as wide as values."""
    return [group.field for group in kv_groups(config)] == ["kv"]


def attention_sizes(config: Any) -> dict[str, int]:
    """The key/value heads, and their widest dim, that attention gets of any layer: of latents what they expand to."""
    if getattr(config, "kv_lora_rank", None) is not None:
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return {"n_kv_heads": config.num_attention_heads, "head_dim": max(width, config.v_head_dim)}
    shapes = [shape for shape in kv_shapes(config) if shape is not None]
    return {
        "n_kv_heads": max(one.n_heads for one in shapes),
        "head_dim": max(one.key_width for one in shapes),
    }


def rope_parameters(config: Any) -> dict[str, Any]:
    """The RoPE parameters that drafters of a target have, as a plain dict (``rope_theta``, ``rope_type``, ...).

    They are the target's own, of its layers with full attention; where it has none whose angles stay as a text grows,
    the plain rotation of its base.
    """
    found = getattr(config, "rope_parameters", None) or {}
    own = {
        key: value
        for key, value in dict(found.get("full_attention") or found).items()
        if value is not None
    }
    if family_of(config).has_llama_layers or (
        own.get("rope_type", "default") in ROPE_TYPES
        and own.get("rope_theta")
        and "partial_rotary_factor" not in own
    ):
        return own
    return {"rope_type": "default", "rope_theta": own.get("rope_theta") or 10_000.0}


def layer_sizes(config: Any) -> BlockSizes:
    """The block sizes of the target's own decoder layers; raises TargetError where drafts can't pass through them."""
    if not family_of(config).has_llama_layers:
        raise TargetError(
            f"drafts cannot pass through layers of {config.model_type}. Leave --target-layers and "
            "--target-layer-inference at 0."
        )
    if config.hidden_act != "silu":
        raise TargetError(
            f"hidden_act {config.hidden_act!r} is not supported in target layer inference, only silu."
        )
    sizes = target_sizes(config)
    has_bias = bool(getattr(config, "attention_bias", False))
    return BlockSizes(
        width=sizes["hidden_size"],
        n_heads=sizes["n_heads"],
        n_kv_heads=sizes["n_kv_heads"],
        head_dim=sizes["head_dim"],
        mlp_width=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        qkv_bias=has_bias or config.model_type == "qwen2",
        output_bias=has_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        query_key_norm=config.model_type == "qwen3",
    )
