"""Layouts of drafter folders for other programs, and functions that several layouts share.

A folder contains ``config.json`` and ``model.safetensors``. A layout (in :mod:`.moa`,
:mod:`.eagle`, :mod:`.block` and others) converts between a drafter and the tensor names, sizes and
config.json of such a folder. :mod:`.checkpoint` reads and writes the folders.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from ...errors import DrafterError
from ...files import parsing
from ..drafters.sizes import DrafterSizes
from ..targets.facts import rope_parameters

EMBEDDINGS = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
ACTIVATION = "silu"  # All drafters have this activation function. The name is from transformers.
Weights = dict[str, Tensor]  # Tensors by name, from a file or a drafter's state dict.
ForeignConfig = Mapping[str, Any]  # The content of a config.json that another program wrote.
NO_CONFIG: ForeignConfig = MappingProxyType({})


def _unchanged(given: Any, sizes: Any = None) -> Any:
    return given


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How another program stores one kind of drafter.

    In the functions, ``sizes`` are the drafter's sizes, and ``names`` are the names of its tensors.
    """

    name: str  # Name of the layout on the command line.
    # Kind of drafter that this layout stores, a key of ``registry.DRAFTERS``.
    kind: str
    reader: str  # Name of the program that reads the layout, for messages.
    # What a written folder needs from the target. The tuple contains the names of target tensors
    # that are copied into the file. It contains ``config`` if the target's transformers config is
    # needed.
    needs: tuple[str, ...] = ()
    # Names of tensors in the other program's file that are not read, because they are copies of
    # target tensors.
    ignored: tuple[str, ...] = (EMBEDDINGS, LM_HEAD)
    # Name of a size -> allowed values. If a size has another value, the program that reads the
    # layout would not run the drafter as it was trained.
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Returns further reasons why the program that reads the layout would not run the drafter as it
    # was trained, in addition to the sizes in ``requires``.
    unfit: Callable[[Any], Iterable[str]] = lambda sizes: []
    # Returns notes for the user about a written folder.
    notes: Callable[[Any], list[str]] = lambda sizes: []
    # Makes config.json from the drafter's sizes and the target's transformers config. The target's
    # config may be None.
    config: Callable[[Any, Any], dict[str, Any]]
    # Converts the name of a tensor in the drafter's state dict to its name in the other program's
    # file.
    file_name: Callable[[str], str] = _unchanged
    # Converts the name of a tensor in the other program's file to its name in the drafter's state
    # dict. This works for the files of all versions of the other program.
    own_name: Callable[[str], str] = _unchanged
    # Converts the drafter's tensors to the tensors of the other program's file. Afterwards
    # ``file_name`` renames these tensors.
    pack: Callable[[Weights, Any], Weights] = _unchanged
    # Converts the tensors of the other program's file to the drafter's tensors. Before that,
    # ``own_name`` has renamed the tensors.
    unpack: Callable[[Weights, Any], Weights] = _unchanged
    # The next two functions are for folders that this package did not write. ``recognises`` takes
    # the tensor names of the file, without the prefix ``model.``, and config.json. It returns
    # whether the folder has this layout. ``read_sizes`` takes the renamed tensors and config.json.
    # It returns the drafter's sizes.
    recognises: Callable[[set[str], ForeignConfig], bool] = lambda names, config: False
    read_sizes: Callable[[Weights, ForeignConfig], DrafterSizes]

    @property
    def holds_embeddings(self) -> bool:
        """Whether the folder contains embeddings that are used in place of the target's."""
        return EMBEDDINGS in self.needs or EMBEDDINGS not in self.ignored

    def refusals(self, sizes: Any) -> list[str]:
        """List reasons why the program that reads the layout would not run a drafter as trained."""
        reasons: list[str] = []
        for name, values in self.requires.items():
            size = getattr(sizes, name)
            if size not in values:
                reasons.append(
                    f"{name} is {size}, but this format supports only "
                    f"{' or '.join(map(str, values))}"
                )
        return reasons + list(self.unfit(sizes))


def target_keys(sizes: DrafterSizes) -> dict[str, Any]:
    """Return the keys of config.json that describe the target."""
    return {
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.n_heads,
        "max_position_embeddings": sizes.max_position_embeddings,
        "rms_norm_eps": sizes.norm_eps,
        "vocab_size": sizes.vocab_size,
    } | rope_keys(sizes)


def llama_config(sizes: Any) -> dict[str, Any]:
    """Return the keys of config.json that describe a drafter's decoder layers.

    All engines read these keys.
    """
    return target_keys(sizes) | {
        "hidden_act": ACTIVATION,
        "intermediate_size": sizes.self_attention_mlp_width,
        "num_key_value_heads": sizes.self_attention_kv_heads,
        "head_dim": sizes.head_dim,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def rope_keys(sizes: DrafterSizes) -> dict[str, Any]:
    """Return the RoPE keys of config.json.

    The result has the keys of transformers 4 and the keys of transformers 5. Each engine reads the
    keys of one of these two versions.
    """
    parameters = dict(sizes.rope_parameters)
    keys: dict[str, Any] = {
        "rope_theta": parameters.get("rope_theta", 10_000.0),
        "rope_parameters": parameters,
    }
    if is_rope_scaled(sizes):
        scaling = dict(parameters)
        scaling.pop("rope_theta", None)
        keys["rope_scaling"] = scaling
    return keys


def is_rope_scaled(sizes: DrafterSizes) -> bool:
    """Whether the target's RoPE is scaled."""
    return bool(sizes.rope_parameters.get("rope_type", "default") != "default")


def unfilled_width(sizes: DrafterSizes) -> Iterator[str]:
    """Yield a reason against a layout if the target's head dim is not width / number of heads.

    Some programs always compute the head dim as this quotient. This function is for their layouts.
    """
    if sizes.n_heads * sizes.head_dim != sizes.hidden_size:
        yield (
            f"the target's head dim is {sizes.head_dim}, but this format supports only the width "
            f"divided by the number of heads ({sizes.hidden_size} / {sizes.n_heads})"
        )


def drafter_facts(config: ForeignConfig) -> dict[str, Any]:
    """Read fields of :class:`DrafterSizes` from a config.json that another program wrote.

    Such a config.json does not state the number of the target's layers, so ``n_layers`` is 0.
    """
    needed = ("hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    if missing := [name for name in needed if not config.get(name)]:
        raise DrafterError(
            f"config.json lacks {', '.join(missing)}. Restore the original config.json."
        )
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise DrafterError(
            "config.json describes layers with a sliding window, which is not supported for "
            "drafters. Choose another drafter."
        )
    # In transformers, "swish" is another name of "silu", so accept both names.
    if (activation := config.get("hidden_act")) not in (ACTIVATION, "swish", None):
        raise DrafterError(
            f"config.json has hidden_act {str(activation)[:60]}, but only {ACTIVATION} is "
            "supported. Choose another drafter."
        )
    names = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", *needed)
    with parsing("config.json cannot be used", DrafterError, "Restore the original file."):
        stated: dict[str, Any] = {}
        for name in names:
            if config.get(name) is not None:
                stated[name] = config[name]
        known = LlamaConfig(**stated)
        facts: dict[str, Any] = {
            "hidden_size": known.hidden_size,
            "n_heads": known.num_attention_heads,
            "head_dim": config.get("head_dim") or known.hidden_size // known.num_attention_heads,
            "n_layers": 0,
            "vocab_size": known.vocab_size,
            "max_position_embeddings": known.max_position_embeddings,
            "norm_eps": known.rms_norm_eps,
            "rope_parameters": rope_parameters(known),
        }
    # Check the width, the number of heads and the head dim here. :class:`DrafterSizes` checks the
    # other fields.
    for name in ("hidden_size", "n_heads", "head_dim"):
        if type(facts[name]) is not int or facts[name] < 1:
            raise DrafterError(
                f"config.json has {name} {str(facts[name])[:60]!r}, expected a whole number above "
                "0. Restore the original config.json."
            )
    return facts


def layer_facts(
    weights: Weights, head_dim: int, layer: str, config: ForeignConfig = NO_CONFIG
) -> dict[str, int]:
    """Read the sizes of a decoder layer from the shapes of its tensors.

    Args:
        layer: prefix of the names of the layer's tensors, without the dot at its end.
        config: the drafter's config.json. A config.json that contradicts the tensors is refused.
    """
    keys = f"{layer}.self_attn.k_proj.weight"
    gate = f"{layer}.mlp.gate_proj.weight"
    n_kv_heads = rows(weights, keys) // head_dim
    mlp_width = rows(weights, gate)
    check_size(config, "num_key_value_heads", n_kv_heads, weights, keys)
    check_size(config, "intermediate_size", mlp_width, weights, gate)
    queries = f"{layer}.self_attn.q_proj.bias"
    check_bias(config, "qkv_bias", weights, queries)
    check_bias(config, "attention_bias", weights, queries)
    check_bias(config, "mlp_bias", weights, f"{layer}.mlp.gate_proj.bias")
    return {"self_attention_kv_heads": n_kv_heads, "self_attention_mlp_width": mlp_width}


def check_size(config: ForeignConfig, key: str, size: int, weights: Weights, name: str) -> None:
    """Refuse a config.json in which a size contradicts the shape of a tensor.

    Args:
        key: the key of the size in config.json. A config.json without this key is accepted.
        size: the value of the size that follows from the shape of the tensor.
        name: name of the tensor.
    """
    if (value := config.get(key)) is not None and value != size:
        raise DrafterError(
            f"config.json has {key} {str(value)[:60]}, but the tensor {name} of shape "
            f"{list(weights[name].shape)} implies {size}. Restore the original config.json."
        )


def check_bias(config: ForeignConfig, key: str, weights: Weights, name: str) -> None:
    """Refuse a config.json in which a key requires a bias that is not in the file of weights."""
    if config.get(key) and name not in weights:
        raise DrafterError(
            f"config.json sets {key} to true, but the tensor {name} is missing. Restore the "
            "original files."
        )


def check_shape(weights: Weights, name: str, shape: list[int]) -> None:
    """Raise DrafterError if a tensor is missing, or if its shape is not the expected shape."""
    if name not in weights:
        raise DrafterError(f"the tensor {name} {shape} is missing. Restore the file of weights.")
    found = list(weights[name].shape)
    if found != shape:
        raise DrafterError(
            f"the tensor {name} has the shape {found}, expected {shape}. Restore the file of "
            "weights."
        )


def count_layers(weights: Weights, config: ForeignConfig = NO_CONFIG) -> int:
    """Count the numbered layers of a file. Refuse a config.json with a different number."""
    names = [name for name in weights if name.startswith("layers.")]
    n_layers = len({name.split(".")[1] for name in names})
    if names:
        check_size(config, "num_hidden_layers", n_layers, weights, max(names))
    return n_layers


def with_draft_vocabulary(weights: Weights, n_tokens: int) -> Weights:
    """Add the tensor ``t2d`` to weights that contain only ``d2t``.

    ``d2t`` has one entry per draft token: the difference between its id in the target's vocabulary
    and its index in the draft vocabulary. ``t2d`` has one bool for each of the target's
    ``n_tokens`` tokens, true if the token is a draft token.
    """
    if "d2t" in weights:
        check_shape(weights, "d2t", [weights["d2t"].numel()])
    if "d2t" in weights and "t2d" not in weights:
        tokens = weights["d2t"].long() + torch.arange(len(weights["d2t"]))
        marked = torch.zeros(n_tokens, dtype=torch.bool)
        # Clamp ids that are outside the vocabulary, to avoid an IndexError here.
        # ``Drafter.check_weights`` refuses such a ``d2t`` later.
        marked[tokens.clamp(0, n_tokens - 1)] = True
        return weights | {"t2d": marked}
    return weights


def rows(weights: Weights, name: str) -> int:
    """Return the number of rows of a tensor. Raise DrafterError if the tensor is missing."""
    if name not in weights or not weights[name].dim():
        raise DrafterError(f"the tensor {name} is missing. Restore the file of weights.")
    return int(weights[name].shape[0])


def nested(config: ForeignConfig, key: str) -> dict[str, Any]:
    """Return the mapping under a key of config.json. If the value is not a mapping, return {}."""
    value = config.get(key)
    return dict(value) if isinstance(value, Mapping) else {}


def read_layer_ids(*given: tuple[Any, int]) -> tuple[int, ...]:
    """Return the target layers that a drafter reads, counted from 0.

    Args:
        given: pairs of a list of layer ids, and the number from which this list counts target
            layers (0 or 1). The first pair whose list is not empty is used.
    """
    for ids, first in given:
        if ids:
            if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
                raise DrafterError(
                    f"config.json has {str(ids)[:60]!r} as the list of target layers that the "
                    "drafter reads, expected a list of whole numbers. Restore the original "
                    "config.json."
                )
            return tuple(layer - first for layer in ids)
    # config.json does not name the layers. Refuse it instead of guessing the layers.
    raise DrafterError(
        "config.json does not say which layers of the target the drafter reads. Restore the "
        "original config.json, which has target_layer_ids or eagle_aux_hidden_state_layer_ids."
    )
