"""Facts about a target that follow from its config: sizes, KV shapes, windows, scales.

:func:`load_facts` reads and checks the config.json of a model folder, and computes the facts from
it. :meth:`TargetFacts.of_model` computes the facts from a loaded model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto import modeling_auto

from ...errors import DrafterError, TargetError
from ...files import parsing
from ..nn.layers import ROPE_TYPES, DecoderBlockSizes, Rotary
from ..nn.masks import Chunk
from .families import (
    FAMILIES,
    OTHER,
    Family,
    empty_model,
    first_attribute,
    text_model,
    transformers_config,
)
from .model_files import FLOATS, check_model_folder, quantised_by, read_config

# Upper limits of the sizes in a config.json. The limits are far above the sizes of the largest
# models.
_LARGEST = {
    "num_hidden_layers": 1 << 10, "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12, "hidden_size": 1 << 18, "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22, "max_position_embeddings": 1 << 26, "sliding_window": 1 << 26,
}  # fmt: skip
# The soft cap of the logits has one of these names in a config. RecurrentGemma uses the second
# name, xLSTM the third.
_CAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Maximum number of positions of a target whose config states no maximum.
_MANY_POSITIONS = 1 << 20


class KVShape(NamedTuple):
    """The shape of the keys and values that one layer caches for one token."""

    n_heads: int
    # Width of a key in one head.
    key_width: int
    # Width of a value in one head.
    value_width: int

    @property
    def width(self) -> int:
        """Number of elements of the keys and values of all heads together, per token."""
        return self.n_heads * (self.key_width + self.value_width)


class KVGroup(NamedTuple):
    """Layers whose keys and values have the same shape. A store keeps their KV in one field."""

    # Name of the field in a store. The name is "kv" if the group contains all layers of the target.
    # Otherwise the name also has the kind of attention, as in "kv/full_attention".
    field: str
    layers: tuple[int, ...]  # Indices of the group's layers in the target, ascending.
    shape: KVShape


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Facts about a target, computed once from the transformers config of its text model.

    If layers have different heads, ``n_heads``, ``n_kv_heads`` and ``head_dim`` are those of the
    first layer. If no layer has attention, these facts describe heads with about 64 dimensions,
    which drafters use.
    """

    config: Any = field(repr=False)
    family: Family
    n_layers: int  # L, number of decoder layers
    n_heads: int  # number of query heads
    n_kv_heads: int
    head_dim: int
    hidden_size: int  # width E of the hidden states
    vocab_size: int  # size V of the vocabulary
    # Maximum length of a sequence. With RoPE of the type longrope, the maximum is the original
    # length in the config. If a sequence exceeds this length, longrope rotates all keys in another
    # way, so keys that were cached before would be wrong.
    max_position_embeddings: int
    # Width of the dense MLPs. If layers have different widths, it is the largest width. If the
    # config states no width, it is four times the hidden size.
    mlp_width: int
    norm_eps: float  # epsilon of the norms
    # RoPE parameters for drafters of this target; see :func:`rope_parameters`.
    rope_parameters: dict[str, Any]
    logit_scale: float  # factor that the target applies to the outputs of its LM head
    # Soft cap of the logits: a tanh keeps the logits between -cap and cap. None if the target has
    # no cap.
    logit_cap: float | None
    # Kind of attention of each layer. The kinds have transformers' names, such as
    # "sliding_attention".
    layer_kinds: tuple[str, ...]
    # Attention window of each layer: the number of tokens to which a token attends, including
    # itself. The window of a layer with full attention is None.
    layer_windows: tuple[int | None, ...]
    # KV shape of each layer. If a layer has a recurrent state instead of KV, the shape is None.
    kv_shapes: tuple[KVShape | None, ...]
    # The layers that have a KV cache of their own, in groups. The layers of a group have the same
    # kind of attention and the same KV shape. The groups are in the order of their first layers.
    kv_groups: tuple[KVGroup, ...]

    @classmethod
    def of(cls, config: Any) -> "TargetFacts":
        """Compute the facts about a target from the transformers config of its text model."""
        family = FAMILIES.get(config.model_type, OTHER)
        first_layer = _layer_configs(config)[0]
        n_heads = getattr(first_layer, "num_attention_heads", None) or max(
            1, config.hidden_size // 64
        )
        layer_kinds = _layer_kinds(config, family)
        kv_shapes = _kv_shapes(config, layer_kinds)
        return cls(
            config=config,
            family=family,
            n_layers=config.num_hidden_layers,
            n_heads=n_heads,
            n_kv_heads=getattr(first_layer, "num_key_value_heads", None) or n_heads,
            head_dim=getattr(first_layer, "head_dim", None) or config.hidden_size // n_heads,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=_n_positions(config),
            mlp_width=_mlp_width(config),
            norm_eps=_norm_eps(config),
            rope_parameters=rope_parameters(config),
            logit_scale=logit_scale(config),
            logit_cap=first_attribute(config, _CAP_NAMES),
            layer_kinds=layer_kinds,
            layer_windows=_layer_windows(config, layer_kinds),
            kv_shapes=kv_shapes,
            kv_groups=_kv_groups(config, layer_kinds, kv_shapes),
        )

    @classmethod
    def of_model(cls, model: Any) -> "TargetFacts":
        """Compute the facts about a target from its loaded causal LM."""
        return cls.of(text_model(model).config)

    @property
    def model_type(self) -> str:
        """Model type of the text model, such as ``llama``. It is the name of the family."""
        return str(self.config.model_type)

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the target that a store records.

        ``kv_width`` is one of them only if stores keep the KV in several fields.
        """
        sizes: dict[str, Any] = {
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "architecture": self.model_type,
        }
        if self.splits_kv:
            sizes["kv_width"] = self.kv_width
        return sizes

    @property
    def has_uniform_kv(self) -> bool:
        """Whether the KV of all layers has the same shape, and keys are as wide as values."""
        return len(self.kv_groups) == 1 and self.kv_groups[0].field == "kv"

    @property
    def splits_kv(self) -> bool:
        """Whether stores need several fields for KV, because layers have different KV shapes."""
        return self.family.keeps_kv and bool(self.kv_groups) and not self.has_uniform_kv

    @property
    def kv_width(self) -> int:
        """Number of elements of the widest layer's keys and values, per token."""
        if self.splits_kv:
            return max(group.shape.width for group in self.kv_groups)
        return 2 * self.n_kv_heads * self.head_dim

    @property
    def cache_width(self) -> int:
        """Number of elements of all keys and values that all layers cache together, per token."""
        return sum(len(group.layers) * group.shape.width for group in self.kv_groups)

    @property
    def has_states(self) -> bool:
        """Whether some layers carry a recurrent state instead of KV."""
        return None in self.kv_shapes

    @property
    def rotates_as_llama(self) -> bool:
        """Whether all layers have keys of the same shape, which RoPE rotates as in drafters."""
        rope = dict(getattr(self.config, "rope_parameters", None) or {})
        is_whole = (rope.get("partial_rotary_factor") or 1.0) == 1
        is_supported = rope.get("rope_type", "default") in ROPE_TYPES
        return self.family.rotates_halves and is_supported and is_whole and self.has_uniform_kv

    @property
    def attention(self) -> str:
        """Name of transformers' attention implementation that supports the target fully."""
        model_class: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self.config), None)
        # Older model classes of transformers support only eager attention.
        is_plain = model_class is not None and not model_class._supports_sdpa
        return "eager" if is_plain else self.family.attention

    @property
    def attention_sizes(self) -> dict[str, int]:
        """The largest number of KV heads and the largest head dim among all layers.

        Layers with multi-head latent attention cache a latent, and compute keys and values from the
        latent. For such layers, the sizes are those of the computed keys and values.
        """
        config = self.config
        if getattr(config, "kv_lora_rank", None) is not None:
            key_width = config.qk_nope_head_dim + config.qk_rope_head_dim
            return {"n_kv_heads": self.n_heads, "head_dim": max(key_width, config.v_head_dim)}
        shapes = [shape for shape in self.kv_shapes if shape is not None]
        return {
            "n_kv_heads": max(kv_shape.n_heads for kv_shape in shapes),
            "head_dim": max(kv_shape.key_width for kv_shape in shapes),
        }

    @cached_property
    def n_weights(self) -> int:
        """Number of weights of the text model. Two tied matrices count as one.

        For families with Llama's layers, biases and norms are not counted.
        """
        if not self.family.has_llama_layers:
            return sum(weight.numel() for weight in empty_model(self.config).parameters())
        heads = self.n_heads + self.n_kv_heads
        layer = self.hidden_size * (2 * heads * self.head_dim + 3 * self.mlp_width)
        return self.vocab_size * self.hidden_size + self.n_layers * layer

    @cached_property
    def embedding_scale(self) -> float:
        """Factor by which the embedding layer multiplies embeddings, as in Gemma. Usually 1."""
        table = empty_model(self.config).get_input_embeddings()
        return float(getattr(table, "scalar_embed_scale", getattr(table, "embed_scale", 1.0)))

    def check_kv(self) -> None:
        """Raise TargetError if a store cannot contain the target's keys and values."""
        if not self.family.keeps_kv:
            raise TargetError(
                f"moa-data does not know what the layers of {self.model_type} cache, so it cannot "
                "store their keys and values. Store hidden states instead, with "
                "`activations=hidden:last,hidden:layer:1,...`."
            )

    def check_rotation(self) -> None:
        """Raise DrafterError if the target does not rotate its keys as drafters do.

        Call this for drafters whose queries attend to the target's own keys.
        """
        if not self.rotates_as_llama:
            raise DrafterError(
                "this drafter needs keys that have the same shape in all layers and are rotated by "
                f"RoPE as in Llama, but the keys of {self.model_type} are different. Train a "
                "drafter that accepts any keys, such as moa, or a drafter that reads hidden states."
            )

    def layer_sizes(self) -> DecoderBlockSizes:
        """Return the sizes of the target's decoder layers. Drafters build layers of these sizes.

        Raises:
            TargetError: drafters cannot run the target's layers on features of a drafter.
        """
        config = self.config
        if not self.family.has_llama_layers:
            raise TargetError(
                f"the layers of {self.model_type} cannot run on the output of a drafter, as target "
                "layer inference requires. Leave `target_layers` and `target_layer_inference` at 0."
            )
        if config.hidden_act != "silu":
            raise TargetError(
                "target layer inference supports only the hidden_act silu, not "
                f"{config.hidden_act!r}. Leave `target_layer_inference` at 0."
            )
        has_bias = bool(getattr(config, "attention_bias", False))
        return DecoderBlockSizes(
            width=self.hidden_size,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            mlp_width=self.mlp_width,
            norm_eps=self.norm_eps,
            qkv_bias=has_bias or self.model_type == "qwen2",
            output_bias=has_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            query_key_norm=self.model_type == "qwen3",
        )


def _layer_configs(config: Any) -> Any:
    """Return a list of configs: one for each layer, or a single one if the layers do not differ."""
    return getattr(config, "per_layer_config", None) or [config]


def _n_positions(config: Any) -> int:
    n_positions: int = getattr(config, "max_position_embeddings", None) or _MANY_POSITIONS
    rope = dict(getattr(config, "rope_parameters", None) or {})
    # If a sequence exceeds the original length, RoPE of the type longrope rotates all keys in
    # another way. The keys that are already cached would then be wrong, so sequences may not exceed
    # this length.
    if rope.get("rope_type") == "longrope":
        n_positions = int(rope.get("original_max_position_embeddings") or n_positions)
    return n_positions


def _mlp_width(config: Any) -> int:
    width = getattr(config, "intermediate_size", None)
    # Some configs have a list with the MLP width of each layer. Use the largest width.
    width = max(width) if isinstance(width, list) else width
    return width if isinstance(width, int) else 4 * int(config.hidden_size)


def _norm_eps(config: Any) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    epsilon: float | None = first_attribute(config, names)
    return 1e-5 if epsilon is None else epsilon


def rope_parameters(config: Any) -> dict[str, Any]:
    """Return the RoPE parameters that drafters of a target use, such as ``rope_theta``.

    These are the parameters of the target's layers with full attention. If drafters do not support
    the rotation of these layers, the result is the default rotation with the target's
    ``rope_theta``.
    """
    by_kind = getattr(config, "rope_parameters", None) or {}
    parameters: dict[str, Any] = {}
    for key, value in dict(by_kind.get("full_attention") or by_kind).items():
        if value is not None:
            parameters[key] = value
    if FAMILIES.get(config.model_type, OTHER).has_llama_layers or (
        parameters.get("rope_type", "default") in ROPE_TYPES
        and parameters.get("rope_theta")
        and "partial_rotary_factor" not in parameters
    ):
        return parameters
    return {"rope_type": "default", "rope_theta": parameters.get("rope_theta") or 10_000.0}


def logit_scale(config: Any) -> float:
    """Return the factor that a target applies to the outputs of its LM head."""
    # Granite divides its logits by ``logits_scaling``.
    divisor = getattr(config, "logits_scaling", None)
    return float(1 / divisor if divisor else getattr(config, "logit_scale", None) or 1.0)


def _layer_kinds(config: Any, family: Family) -> tuple[str, ...]:
    slides = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) if family.mixes_layers else None
    return tuple(
        kinds or ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    )


def _layer_windows(config: Any, layer_kinds: Sequence[str]) -> tuple[int | None, ...]:
    chunk = getattr(config, "attention_chunk_size", None)
    windows = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": None if chunk is None else Chunk(chunk),
    }
    return tuple(map(windows.get, layer_kinds))


def _kv_shapes(config: Any, layer_kinds: Sequence[str]) -> tuple[KVShape | None, ...]:
    layer_configs = getattr(config, "per_layer_config", None) or [config] * len(layer_kinds)
    shapes = list[KVShape | None]()
    for kind, layer_config in zip(layer_kinds, layer_configs, strict=True):
        if (
            kind == "linear_attention"
            or (n_heads := getattr(layer_config, "num_attention_heads", None)) is None
        ):
            shapes.append(None)
        # For each token, multi-head latent attention caches a latent (compressed keys and values),
        # and one rotated key that all heads share.
        elif (rank := getattr(layer_config, "kv_lora_rank", None)) is not None:
            shapes.append(KVShape(1, rank, layer_config.qk_rope_head_dim))
        else:
            width = getattr(layer_config, "head_dim", None) or config.hidden_size // n_heads
            shapes.append(
                KVShape(getattr(layer_config, "num_key_value_heads", None) or n_heads, width, width)
            )
    return tuple(shapes)


def _kv_groups(
    config: Any, layer_kinds: Sequence[str], kv_shapes: Sequence[KVShape | None]
) -> tuple[KVGroup, ...]:
    sharing_modes = getattr(config, "kv_sharing_modes", None) or [None] * len(kv_shapes)
    first = kv_shapes[0]
    is_uniform = set(kv_shapes) == {first} and "reuse" not in sharing_modes
    if is_uniform and first is not None and first.key_width == first.value_width:
        return (KVGroup("kv", tuple(range(len(kv_shapes))), first),)
    is_latent = getattr(_layer_configs(config)[0], "kv_lora_rank", None) is not None
    layers_of: dict[tuple[str, KVShape], list[int]] = {}
    for layer, (kind, shape, mode) in enumerate(
        zip(layer_kinds, kv_shapes, sharing_modes, strict=True)
    ):
        # A layer with the mode "reuse" reads the KV cache of an earlier layer.
        if shape is not None and mode != "reuse":
            layers_of.setdefault(("latent" if is_latent else kind, shape), []).append(layer)
    groups: list[KVGroup] = []
    for (kind, shape), layers in layers_of.items():
        # Several groups may have the same kind of attention, but different KV shapes. Number these
        # groups, so that their names differ.
        n_before = sum(entry.field.startswith(f"kv/{kind}") for entry in groups)
        name = f"kv/{kind}{f'_{n_before + 1}' if n_before else ''}"
        groups.append(KVGroup(name, tuple(layers), shape))
    return tuple(groups)


def load_facts(folder: Path, with_weights: bool = True) -> TargetFacts:
    """Compute the facts about the text model of a folder, and check its config.json.

    Args:
        folder: the model folder.
        with_weights: whether the caller will use the weights. If true, quantised weights raise
            TargetError.
    """
    values = read_config(folder)
    check_model_folder(folder)
    return parse_facts(values, folder / "config.json", folder, with_weights)


def parse_facts(
    values: Mapping[str, Any], source: object, folder: Path | None = None, with_weights: bool = True
) -> TargetFacts:
    """Compute the facts about a target's text model from the values of its config.json.

    Args:
        values: the content of config.json.
        source: name of the config file in error messages.
        folder: the folder that holds the config file. None if the values are not from a file.
        with_weights: whether the caller will use the weights. If true, quantised weights raise
            TargetError.

    Raises:
        TargetError: the config is not supported, or its sizes are not plausible.
    """
    _check_loads(values, source)
    if with_weights and (problem := quantisation_problem(values, folder)):
        raise TargetError(f"{source}: {problem}.")
    text_config = values.get("text_config")
    # Check counts such as the number of layers before transformers reads the values. transformers
    # allocates lists with these numbers of items, so a huge number would take all memory.
    _check_counts(text_config if isinstance(text_config, dict) else values, source)
    with parsing(f"cannot read {source}", TargetError):
        config = transformers_config(values, folder)
        dtype = config.dtype
        config = config.get_text_config(decoder=True)
        config.dtype = config.dtype or dtype
    name = config.model_type
    with parsing(
        f"{source}: the config of the model type {name} cannot be used",
        TargetError,
        "Choose another target.",
    ):
        _check_config(config, source)
        facts = TargetFacts.of(config)
        _check_facts(facts, source)
        try:
            Rotary(facts.head_dim, facts.rope_parameters, facts.max_position_embeddings)
        except DrafterError as error:
            raise TargetError(f"{source}: {error}") from error
    return facts


def quantisation_problem(values: Mapping[str, Any], folder: Path | None = None) -> str:
    """Return the reason why quantised weights cannot be used. Empty if they are not quantised."""
    method = quantised_by(values, folder)
    return method and (
        f"the weights are quantised by {method!r}. Give the folder of the weights before "
        "quantisation, or save them dequantised with transformers"
    )


def _check_loads(values: Mapping[str, Any], source: object) -> None:
    """Raise TargetError if transformers has no text model for the model type in a config."""
    # In a damaged config, the model type may be a list, which is not hashable. So convert the model
    # type to a text.
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
        raise TargetError(
            f"{source}: transformers {transformers.__version__} has no text-only causal language "
            f"model for the model type {model_type[:60]!r}. "
            "Choose another target, save the text part of a model with images as a causal language "
            "model, or install a release of transformers that supports it."
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
    """Raise TargetError if sizes in a config are missing or not plausible.

    If the config.json lacks a size, transformers fills in a default. Such sizes are checked, too.
    """
    needed = ("hidden_size", "num_hidden_layers", "vocab_size")
    if lacking := [name for name in needed if getattr(config, name, None) is None]:
        raise TargetError(
            f"{source}: the config of {config.model_type} lacks {' and '.join(lacking)}, which "
            "stores and drafters need. Choose another target."
        )
    for layer_config in _layer_configs(config):
        _check_counts({name: getattr(layer_config, name, None) for name in _LARGEST}, source)


def _check_facts(facts: TargetFacts, source: object) -> None:
    """Raise TargetError if facts about a target contradict each other, or are not plausible."""
    config = facts.config
    keeps_kv = facts.family.keeps_kv
    known_kinds = {"full_attention", "sliding_attention", "chunked_attention"}
    known_kinds |= {"linear_attention"} if facts.family.carries_state else set()
    epsilon = facts.norm_eps
    if keeps_kv and facts.n_heads % facts.n_kv_heads:
        trouble = (
            f"the number of query heads ({facts.n_heads}) is not a multiple of the number of KV "
            f"heads ({facts.n_kv_heads})"
        )
    elif type(epsilon) not in (int, float) or not 0 <= epsilon <= 1:
        trouble = f"the epsilon of its norms is {epsilon!r}, expected a number from 0 to 1"
    elif config.dtype not in (None, *FLOATS):
        trouble = f"dtype is {str(config.dtype)[:60]!r}, expected a dtype of floating-point numbers"
    elif keeps_kv and set(facts.layer_kinds) - known_kinds:
        trouble = (
            "layer_types contains other kinds of layers than "
            f"{' and '.join(sorted(known_kinds - {'chunked_attention'}))}"
        )
    elif "sliding_attention" in facts.layer_kinds and not getattr(config, "sliding_window", None):
        trouble = "some layers have sliding_attention, but sliding_window is missing"
    else:
        return
    raise TargetError(f"{source}: {trouble}. Restore the file.")
