"""Facts about targets by their transformers config: family, sizes, KV shapes and attention windows.

Any causal LM of transformers gives hidden states if its LM head is a plain matrix, and hidden
states are enough for most drafters. :data:`FAMILIES` lists further properties of each family as
data. These entries, and the assumptions about families without an entry, are checked on the loaded
model before they are used (:mod:`.proof`).

| level | features | targets |
|---|---|---|
| hidden states | stores of hidden states, drafters without KV | causal LMs, LM head without bias |
| keys and values | stores of KV, drafters that read it | :data:`FAMILIES` |
| decoding | chains, trees, batches, serving | attention takes masks; each model is checked |
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
from ..nn.layers import ROPE_TYPES, DecoderBlockSizes, Rotary
from ..nn.masks import Chunk
from .model_files import FLOATS, check_model_folder, quantised_by, read_config


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of a model type that its config does not state."""

    # Whether the config determines the KV shape of each layer.
    keeps_kv: bool = True
    # Whether the model reads ``layer_types`` of the config. If not, all layers use the window of
    # the config.
    mixes_layers: bool = False
    # Whether all keys are rotated as in drafters, that is in pairs of dimensions (i, i + d / 2).
    rotates_halves: bool = True
    # Whether keys are rotated in all layers that have keys.
    rotates_all: bool = True
    # Whether some layers carry a recurrent state instead of KV.
    carries_state: bool = False
    # Whether the layers of this family compute the same as ``layers.DecoderBlock``.
    has_llama_layers: bool = False
    # Name of the attention implementation in transformers that supports all features of this
    # family.
    attention: str = "sdpa"
    # The constant that norms add to their weights.
    norm_offset: float = 0.0


class KVShape(NamedTuple):
    """The shape of the keys and values that a layer caches for one token."""

    n_heads: int
    # Width of a key of one head.
    key_width: int
    # Width of a value of one head.
    value_width: int

    @property
    def width(self) -> int:
        """Number of values per token, keys and values of all heads together."""
        return self.n_heads * (self.key_width + self.value_width)


class KVGroup(NamedTuple):
    """Layers whose KV has the same shape. A store has one field for the KV of these layers."""

    # Name of the field: "kv" if the group holds all layers of the target, else e.g.
    # "kv/full_attention".
    field: str
    layers: tuple[int, ...]  # Layer indices of the target, ascending.
    shape: KVShape
    is_rotated: bool = True  # Whether all layers of the target rotate their keys


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
    # Gemma 3 has two kinds of rotation: one for sliding-window layers, one for full attention.
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
# Assumed properties of model types that have no entry in FAMILIES.
OTHER = Family(mixes_layers=True, keeps_kv=False, rotates_halves=False)


# Upper limits of the sizes in a config.json. They are far above the sizes of the largest models.
_LARGEST = {
    "num_hidden_layers": 1 << 10, "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12, "hidden_size": 1 << 18, "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22, "max_position_embeddings": 1 << 26, "sliding_window": 1 << 26,
}  # fmt: skip
# Maximum number of positions of a target if the config does not state it.
_MANY_POSITIONS = 1 << 20


def load_target_config(folder: Path, with_weights: bool = True) -> Any:
    """Load the transformers config of a folder's text model, and check the sizes in it.

    Args:
        folder: the model folder.
        with_weights: whether the weights will be used. If true, quantised weights raise
            TargetError.
    """
    folder, values = Path(folder), read_config(Path(folder))
    check_model_folder(folder)
    return parse_target_config(values, folder / "config.json", folder, with_weights)


def parse_target_config(
    values: Mapping[str, Any], source: object, folder: Path | None = None, with_weights: bool = True
) -> Any:
    """Make the transformers config of a target's text model from the values of its config.json.

    Args:
        values: the content of config.json.
        source: name of the config file in error messages.
        folder: the folder that holds the config file; None without a folder.
        with_weights: whether the weights will be used. If true, quantised weights raise
            TargetError.

    Raises:
        TargetError: the config is not supported, or its sizes are not plausible.
    """
    _check_loads(values, source)
    if with_weights and (problem := quantisation_problem(values, folder)):
        raise TargetError(f"{source}: {problem}.")
    text_config = values.get("text_config")
    # Check counts such as the number of layers first, because transformers allocates lists of these
    # lengths.
    _check_counts(text_config if isinstance(text_config, dict) else values, source)
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
    """Make the transformers config from the values of a config.json.

    If there is a folder, transformers reads the file itself. But it does not understand dtypes such
    as ``torch.bfloat16`` and ``auto``. If the file has them, the config is made from ``values``.

    Args:
        values: the content of config.json.
        folder: the folder that holds the config.json. If None, the config is made from ``values``.
    """
    plain = _with_plain_dtypes(values)
    if folder is not None and plain == values:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Decode special floats such as infinity, because transformers writes them as objects.
    return AutoConfig.for_model(**PreTrainedConfig._decode_special_floats(plain))


def _with_plain_dtypes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``torch.bfloat16`` by ``bfloat16``, and ``auto`` by None.

    AutoConfig reads neither ``torch.bfloat16`` nor ``auto``.
    """
    plain = dict(values)
    for key in ("dtype", "torch_dtype"):
        if isinstance(name := plain.get(key), str):
            plain[key] = None if name == "auto" else name.removeprefix("torch.")
    if isinstance(text := plain.get("text_config"), dict):
        plain["text_config"] = _with_plain_dtypes(text)
    return plain


def quantisation_problem(values: Mapping[str, Any], folder: Path | None = None) -> str:
    """Return why quantised weights cannot be used; empty if the weights are not quantised."""
    method = quantised_by(values, folder)
    return method and (
        f"the weights are quantised by {method!r}. Give the folder of the weights before "
        "quantisation, or save them dequantised with transformers"
    )


def model_loader(folder: Path) -> Any:
    """Return transformers' auto class for a target: for text, or for images and text."""
    is_text = (
        read_config(folder).get("model_type") in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def attention_of(config: Any) -> str:
    """Return the attention implementation of transformers that supports a target fully."""
    model_class: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # Older model classes support only eager attention.
    is_plain = model_class is not None and not model_class._supports_sdpa
    return "eager" if is_plain else family_of(config).attention


def family_of(config: Any) -> Family:
    """Return the properties of a target's family."""
    return FAMILIES.get(config.model_type, OTHER)


def _check_loads(values: Mapping[str, Any], source: object) -> None:
    """Raise TargetError if transformers can load a model type neither for text nor for images."""
    # Convert to text, because a damaged config may hold a list, which cannot be looked up.
    model_type = str(values.get("model_type"))
    text = values.get("text_config")
    sees = model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    loads_text = (
        isinstance(text, dict)
        and str(text.get("model_type")) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    if model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not (
        sees and loads_text
    ):
        way = "Choose another target, or install a release of transformers that supports it"
        raise TargetError(
            f"{source}: transformers {transformers.__version__} has no text-only causal language "
            f"model for the model type {model_type[:60]!r}. "
            f"{'Save the text part of this model as a causal language model' if sees else way}."
        )


def _check_counts(values: Mapping[str, Any], source: object) -> None:
    for name, largest in _LARGEST.items():
        value = values.get(name)
        of_layers = value if name == "intermediate_size" and isinstance(value, list) else [value]
        # A window of 0 means that no layer has a sliding window.
        least = 0 if name == "sliding_window" else 1
        for count in of_layers:
            if count is not None and (type(count) is not int or not least <= count <= largest):
                shown = f"{str(value)[:60]!r}, expected a whole number from {least} to {largest}"
                raise TargetError(f"{source}: {name} is {shown}. Restore the file.")


def _check_config(config: Any, source: object) -> None:
    """Raise TargetError if sizes do not fit together.

    This includes defaults filled in by transformers.
    """
    needed = ("hidden_size", "num_hidden_layers", "vocab_size")
    if lacking := [name for name in needed if getattr(config, name, None) is None]:
        raise TargetError(
            f"{source}: the config of {config.model_type} has no {' and no '.join(lacking)}, "
            "which stores and drafters need. Choose another target."
        )
    for layer_config in getattr(config, "per_layer_config", None) or [config]:
        _check_counts({name: getattr(layer_config, name, None) for name in _LARGEST}, source)
    known = target_sizes(config)
    family = family_of(config)
    kinds = set(getattr(config, "layer_types", None) or ()) if family.mixes_layers else set()
    known_kinds = {"full_attention", "sliding_attention", "chunked_attention"}
    known_kinds |= {"linear_attention"} if family.carries_state else set()
    n_heads = known["n_heads"]
    n_kv_heads = known["n_kv_heads"]
    epsilon = norm_eps(config)
    if family.keeps_kv and n_heads % n_kv_heads:
        trouble = f"{n_heads} query heads are not a multiple of {n_kv_heads} KV heads"
    elif type(epsilon) not in (int, float) or not 0 <= epsilon <= 1:
        trouble = f"the epsilon of its norms is {epsilon!r}, expected a number from 0 to 1"
    elif config.dtype not in (None, *FLOATS):
        trouble = f"dtype is {str(config.dtype)[:60]!r}, expected a dtype of floating-point numbers"
    elif family.keeps_kv and kinds - known_kinds:
        trouble = (
            "layer_types must contain only "
            f"{' or '.join(sorted(known_kinds - {'chunked_attention'}))}"
        )
    elif "sliding_attention" in layer_kinds(config) and not getattr(config, "sliding_window", None):
        trouble = "some layers have sliding_attention, but sliding_window is missing"
    else:
        return
    raise TargetError(f"{source}: {trouble}. Restore the file.")


def target_sizes(config: Any) -> dict[str, Any]:
    """Return the sizes of a target from its transformers config.

    If layers differ, the number and size of heads are those of the first layer, and ``kv_width`` is
    the number of KV values per token in the widest layer. If no layer has attention, drafters get
    heads with about 64 dimensions.
    """
    layer_config = _a_layer(config)
    n_heads = getattr(layer_config, "num_attention_heads", None) or max(1, config.hidden_size // 64)
    group_widths: list[int] = []
    for group in kv_groups(config) if family_of(config).keeps_kv else ():
        if group.field != "kv":
            group_widths.append(group.shape.width)
    kv_width = max(group_widths, default=0)
    return {
        "n_layers": config.num_hidden_layers,
        "n_heads": n_heads,
        "n_kv_heads": getattr(layer_config, "num_key_value_heads", None) or n_heads,
        "head_dim": getattr(layer_config, "head_dim", None) or config.hidden_size // n_heads,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": _n_positions(config),
        "architecture": config.model_type,
    } | ({"kv_width": kv_width} if kv_width else {})


def _a_layer(config: Any) -> Any:
    return (getattr(config, "per_layer_config", None) or [config])[0]


def count_weights(config: Any) -> int:
    """Count the weights of a text model. Tied matrices count once.

    For families with Llama's layers, biases and norms are not counted.
    """
    if not family_of(config).has_llama_layers:
        return sum(weight.numel() for weight in empty_model(config).parameters())
    sizes = target_sizes(config)
    heads = sizes["n_heads"] + sizes["n_kv_heads"]
    layer = sizes["hidden_size"] * (2 * heads * sizes["head_dim"] + 3 * config.intermediate_size)
    return int(sizes["vocab_size"] * sizes["hidden_size"] + sizes["n_layers"] * layer)


def empty_model(config: Any) -> Any:
    """Make a causal LM on the meta device from a text model's config.

    Raises TargetError on failure.
    """
    trouble = f"transformers cannot make a causal LM from the config of {config.model_type}"
    with parsing(trouble, TargetError, "Choose another target."), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def text_model(model: Any) -> Any:
    """Return the text model of a causal LM, which computes hidden states and has no LM head."""
    decoder = model.get_decoder()
    is_found = decoder is not model and hasattr(decoder, "config")
    # In Llama 4 ``get_decoder`` returns the model itself, and in models whose LM head is named
    # "decoder" it returns the LM head. Use ``model.model`` in these cases.
    return decoder if is_found else model.model


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a causal LM."""
    body = text_model(model)
    for name in ("layers", "h", "blocks", "decoder.layers"):
        with contextlib.suppress(AttributeError):
            return cast(nn.ModuleList, body.get_submodule(name))
    raise TargetError(
        f"moa-data cannot find the decoder layers of {type(body).__name__}, so it cannot store "
        "the outputs of single layers. Leave hidden:layer:K out of --activations."
    )


def _n_positions(config: Any) -> int:
    """Return the sequence length up to which cached keys stay valid when the sequence grows."""
    n_positions: int = getattr(config, "max_position_embeddings", None) or _MANY_POSITIONS
    rope = dict(getattr(config, "rope_parameters", None) or {})
    # For sequences beyond the original length, longrope uses another rotation, which changes cached
    # keys.
    if rope.get("rope_type") == "longrope":
        n_positions = int(rope.get("original_max_position_embeddings") or n_positions)
    return n_positions


def norm_eps(config: Any) -> float:
    """Return the epsilon of a target's norms."""
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        epsilon: float | None = getattr(config, name, None)
        if epsilon is not None:
            return epsilon
    return 1e-5


def mlp_width(config: Any) -> int:
    """Return the width of a target's dense MLPs, by default four times the hidden size."""
    width = getattr(config, "intermediate_size", None)
    # Some configs have a list with the width of each layer. Use the largest width.
    width = max(width) if isinstance(width, list) else width
    return width if isinstance(width, int) else 4 * int(config.hidden_size)


def embedding_scale(config: Any) -> float:
    """Return the factor that an embedding layer applies, as in Gemma; 1 if there is none."""
    table = empty_model(config).get_input_embeddings()
    return float(getattr(table, "scalar_embed_scale", getattr(table, "embed_scale", 1.0)))


def logit_scale(config: Any) -> float:
    """Return the factor that a target applies to the outputs of its LM head."""
    # Granite divides the logits by this value.
    divisor = getattr(config, "logits_scaling", None)
    return float(1 / divisor if divisor else getattr(config, "logit_scale", None) or 1.0)


def logit_cap(config: Any) -> float | None:
    """Return the soft cap of a target's logits, which a tanh applies; None without a cap."""
    # RecurrentGemma uses the second of these names, xLSTM the third.
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        cap: float | None = getattr(config, name, None)
        if cap is not None:
            return cap
    return None


def check_kv(config: Any) -> None:
    """Raise TargetError for a target whose keys and values cannot be stored."""
    if not family_of(config).keeps_kv:
        raise TargetError(
            f"moa-data does not know what the layers of {config.model_type} cache, so it cannot "
            "store their keys and values. Store hidden states: --activations "
            "hidden:last,hidden:layer:1,..."
        )


def rotates_as_llama(config: Any) -> bool:
    """Whether all layers of a target have keys of the same shape, rotated as in drafters."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    is_whole = (rope.get("partial_rotary_factor") or 1.0) == 1
    is_known = family_of(config).rotates_halves and rope.get("rope_type", "default") in ROPE_TYPES
    return is_known and is_whole and has_uniform_kv(config)


def check_rotation(config: Any) -> None:
    """Raise DrafterError for a target whose keys are not rotated as in drafters.

    Call this for drafters whose queries attend to the target's own keys.
    """
    if not rotates_as_llama(config):
        raise DrafterError(
            "this drafter needs keys that have the same shape in all layers and are rotated "
            f"(RoPE) as in Llama, but those of {config.model_type} are not. Train a drafter that "
            "accepts any keys, such as moa, or one that reads hidden states."
        )


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of attention of each decoder layer, with the names of transformers."""
    slides = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) if family_of(config).mixes_layers else None
    return list(
        kinds or ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    )


def layer_windows(config: Any) -> list[int | None]:
    """Return the attention window of each decoder layer; None for full attention.

    A window is a number of tokens and includes the query's own token.
    """
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    windows = {
        "sliding_attention": window,
        "chunked_attention": None if chunk is None else Chunk(chunk),
    }
    return [windows.get(kind) for kind in layer_kinds(config)]


def kv_shapes(config: Any) -> list[KVShape | None]:
    """Return the KV shape of each layer; None for a layer that carries a state instead of KV."""
    kinds = layer_kinds(config)
    shapes = list[KVShape | None]()
    for kind, layer_config in zip(
        kinds, getattr(config, "per_layer_config", None) or [config] * len(kinds), strict=True
    ):
        if (
            kind == "linear_attention"
            or (n_heads := getattr(layer_config, "num_attention_heads", None)) is None
        ):
            shapes.append(None)
        # Multi-head latent attention caches a latent, and one rotated key for all heads.
        elif (rank := getattr(layer_config, "kv_lora_rank", None)) is not None:
            shapes.append(KVShape(1, rank, layer_config.qk_rope_head_dim))
        else:
            width = getattr(layer_config, "head_dim", None) or config.hidden_size // n_heads
            shapes.append(
                KVShape(getattr(layer_config, "num_key_value_heads", None) or n_heads, width, width)
            )
    return shapes


def kv_groups(config: Any) -> list[KVGroup]:
    """Group the layers with a KV cache of their own by kind and shape, ordered by first layer."""
    shapes = kv_shapes(config)
    shared = getattr(config, "kv_sharing_modes", None) or [None] * len(shapes)
    is_latent = getattr(_a_layer(config), "kv_lora_rank", None) is not None
    layers_of: dict[tuple[str, KVShape], list[int]] = {}
    for layer, (kind, shape, mode) in enumerate(
        zip(layer_kinds(config), shapes, shared, strict=True)
    ):
        # A layer with the mode "reuse" reads the KV cache of an earlier layer.
        if shape is not None and mode != "reuse":
            layers_of.setdefault(("latent" if is_latent else kind, shape), []).append(layer)
    distinct_shapes = {shape for _, shape in layers_of}
    n_layers = sum(map(len, layers_of.values()))
    is_rotated = family_of(config).rotates_all
    if n_layers == len(shapes) and len(distinct_shapes) == 1:
        (only_shape,) = distinct_shapes
        if only_shape.key_width == only_shape.value_width:
            return [KVGroup("kv", tuple(range(n_layers)), only_shape, is_rotated)]
    groups: list[KVGroup] = []
    for (kind, shape), layers in layers_of.items():
        # Number the groups of the same kind, because they have different shapes.
        n_before = sum(entry.field.startswith(f"kv/{kind}") for entry in groups)
        name = f"kv/{kind}{f'_{n_before + 1}' if n_before else ''}"
        groups.append(KVGroup(name, tuple(layers), shape, is_rotated))
    return groups


def has_uniform_kv(config: Any) -> bool:
    """Whether the KV of all layers has the same shape, with keys as wide as values."""
    groups = kv_groups(config)
    return len(groups) == 1 and groups[0].field == "kv"


def attention_sizes(config: Any) -> dict[str, int]:
    """Return the largest number of KV heads and the largest head dim that attention computes with.

    For latents, these are the sizes of the keys and values to which a latent is expanded.
    """
    if getattr(config, "kv_lora_rank", None) is not None:
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return {"n_kv_heads": config.num_attention_heads, "head_dim": max(width, config.v_head_dim)}
    shapes = [shape for shape in kv_shapes(config) if shape is not None]
    return {
        "n_kv_heads": max(kv_shape.n_heads for kv_shape in shapes),
        "head_dim": max(kv_shape.key_width for kv_shape in shapes),
    }


def rope_parameters(config: Any) -> dict[str, Any]:
    """Return the RoPE parameters of a target's drafters: ``rope_theta``, ``rope_type`` and others.

    They are the parameters of the target's layers with full attention. If drafters do not support
    this type of rotation, they use the default rotation with the target's ``rope_theta``.
    """
    by_kind = getattr(config, "rope_parameters", None) or {}
    parameters: dict[str, Any] = {}
    for key, value in dict(by_kind.get("full_attention") or by_kind).items():
        if value is not None:
            parameters[key] = value
    if family_of(config).has_llama_layers or (
        parameters.get("rope_type", "default") in ROPE_TYPES
        and parameters.get("rope_theta")
        and "partial_rotary_factor" not in parameters
    ):
        return parameters
    return {"rope_type": "default", "rope_theta": parameters.get("rope_theta") or 10_000.0}


def layer_sizes(config: Any) -> DecoderBlockSizes:
    """Return the sizes of the target's decoder layers as block sizes.

    Raises:
        TargetError: the drafter cannot run these layers on its features.
    """
    if not family_of(config).has_llama_layers:
        raise TargetError(
            f"the layers of {config.model_type} cannot run on the output of a drafter (target "
            "layer inference). Leave --target-layers and --target-layer-inference at 0."
        )
    if config.hidden_act != "silu":
        raise TargetError(
            f"target layer inference supports only the hidden_act silu, not {config.hidden_act!r}. "
            "Leave --target-layer-inference at 0."
        )
    sizes = target_sizes(config)
    has_bias = bool(getattr(config, "attention_bias", False))
    return DecoderBlockSizes(
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
