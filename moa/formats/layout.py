"""A layout of another program's drafter folders, ``config.json`` and ``model.safetensors``, and what layouts share.

Layouts (:mod:`.moa`, :mod:`.eagle`, :mod:`.block`) say how names of tensors, sizes and config.json follow from a
drafter and the other way; :mod:`.checkpoint` reads and writes folders by them.
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
from ..targets.families import norm_eps, rope_parameters

EMBEDDINGS = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
Weights = dict[str, Tensor]  # tensors by name, of a file or of a drafter's state dict
ForeignConfig = Mapping[str, Any]  # the content of a config.json that somebody else wrote
NO_CONFIG: ForeignConfig = MappingProxyType({})


def _unchanged(given: Any, sizes: Any = None) -> Any:
    return given


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout of one kind of drafter. Its functions take the drafter's sizes; names are those of tensors."""

    name: str  # the name of the layout on the command line
    kind: str  # the kind of drafter that it holds, see ``registry.DRAFTERS``
    reader: str  # the program that loads it, for messages
    # what it holds of the target: ``config``, and tensors by their names in the file
    needs: tuple[str, ...] = ()
    # Tensors that are not read: copies of the target's, whose own are used here.
    ignored: tuple[str, ...] = (EMBEDDINGS, LM_HEAD)
    # Name of a size -> the values with which the reading program runs a drafter as it was trained.
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # lists further reasons why it would run it differently
    unfit: Callable[[Any], Iterable[str]] = lambda sizes: []
    # lists what to know before using the folder
    notes: Callable[[Any], list[str]] = lambda sizes: []
    # (sizes, the target's transformers config or None) -> config.json
    config: Callable[[Any, Any], dict[str, Any]]
    # a name in the drafter's state dict -> in the file
    file_name: Callable[[str], str] = _unchanged
    # a name in a file of any version -> in the drafter's state dict
    own_name: Callable[[str], str] = _unchanged
    # adapts tensors, before they are renamed, to be written
    pack: Callable[[Weights, Any], Weights] = _unchanged
    unpack: Callable[[Weights, Any], Weights] = _unchanged  # undoes it, after they are renamed
    # Of folders that this package did not write: whether they have the layout, by the file's names
    # without ``model.``,
    # and their sizes, by the renamed tensors.
    recognises: Callable[[set[str], ForeignConfig], bool] = lambda names, config: False
    read_sizes: Callable[[Weights, ForeignConfig], DrafterSizes]

    @property
    def holds_embeddings(self) -> bool:
        """Whether the folder has embeddings, so that its reader does not take those of the target."""
        return EMBEDDINGS in self.needs or EMBEDDINGS not in self.ignored

    def refusals(self, sizes: Any) -> list[str]:
        """List why the reading program would run a drafter differently; empty if it would not."""
        found = [
            f"{name} is {getattr(sizes, name)}, and it runs {' or '.join(map(str, values))}"
            for name, values in self.requires.items()
            if getattr(sizes, name) not in values
        ]
        return found + list(self.unfit(sizes))


def target_keys(sizes: DrafterSizes) -> dict[str, Any]:
    """List the keys of config.json that say what the target is like."""
    return {
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.n_heads,
        "max_position_embeddings": sizes.max_position_embeddings,
        "rms_norm_eps": sizes.norm_eps,
        "vocab_size": sizes.vocab_size,
    } | rope_keys(sizes)


def llama_config(sizes: Any) -> dict[str, Any]:
    """List the keys of config.json that decoder layers of a drafter have in all engines."""
    return target_keys(sizes) | {
        "intermediate_size": sizes.self_attention_mlp_width,
        "num_key_value_heads": sizes.self_attention_kv_heads,
        "head_dim": sizes.head_dim,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def rope_keys(sizes: DrafterSizes) -> dict[str, Any]:
    """List the rotation as transformers 4 and 5 write it; engines read one or the other."""
    parameters = dict(sizes.rope_parameters)
    keys: dict[str, Any] = {
        "rope_theta": parameters.get("rope_theta", 10_000.0),
        "rope_parameters": parameters,
    }
    if is_rope_scaled(sizes):
        keys["rope_scaling"] = {
            name: value for name, value in parameters.items() if name != "rope_theta"
        }
    return keys


def is_rope_scaled(sizes: DrafterSizes) -> bool:
    """Whether the target's RoPE is scaled."""
    return bool(sizes.rope_parameters.get("rope_type", "default") != "default")


def unfilled_width(sizes: DrafterSizes) -> Iterator[str]:
    """Refuse other head dims than width / heads."""
    if sizes.n_heads * sizes.head_dim != sizes.hidden_size:
        yield f"the head dim is {sizes.head_dim}, and theirs width / heads, {sizes.hidden_size} / {sizes.n_heads}"


def drafter_facts(config: ForeignConfig) -> dict[str, Any]:
    """Read fields of :class:`DrafterSizes` from a drafter's own config.json; the target's layers are unknown (0)."""
    needed = ("hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    if missing := [name for name in needed if not config.get(name)]:
        raise DrafterError(f"config.json lacks {', '.join(missing)}; restore the checkpoint's own.")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise DrafterError("its layers have a sliding window, which these drafters lack.")
    names = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", *needed)
    with parsing("config.json cannot be used", DrafterError, "Restore the checkpoint's own."):
        known = LlamaConfig(
            **{name: config[name] for name in names if config.get(name) is not None}
        )
        facts: dict[str, Any] = {
            "hidden_size": known.hidden_size,
            "n_heads": known.num_attention_heads,
            "head_dim": config.get("head_dim") or known.hidden_size // known.num_attention_heads,
            "n_layers": 0,
            "vocab_size": known.vocab_size,
            "max_position_embeddings": known.max_position_embeddings,
            "norm_eps": norm_eps(known),
            "rope_parameters": rope_parameters(known),
        }
    for name in ("hidden_size", "n_heads", "head_dim"):  # the others are checked with the sizes
        if type(facts[name]) is not int or facts[name] < 1:
            raise DrafterError(
                f"config.json gives {name} {str(facts[name])[:60]!r}; restore the checkpoint's own."
            )
    return facts


def layer_facts(
    weights: Weights, head_dim: int, layer: str, config: ForeignConfig = NO_CONFIG
) -> dict[str, int]:
    """Read the sizes of a decoder layer from the shapes of its tensors, whose names begin with ``layer``.

    Refuses other sizes in the drafter's config.json.
    """
    keys = f"{layer}.self_attn.k_proj.weight"
    gate = f"{layer}.mlp.gate_proj.weight"
    n_kv_heads = rows(weights, keys) // head_dim
    mlp_width = rows(weights, gate)
    check_size(config, "num_key_value_heads", n_kv_heads, weights, keys)
    check_size(config, "intermediate_size", mlp_width, weights, gate)
    return {"self_attention_kv_heads": n_kv_heads, "self_attention_mlp_width": mlp_width}


def check_size(config: ForeignConfig, key: str, size: int, weights: Weights, name: str) -> None:
    """Refuse another value of a key of config.json, if it is there, than the size that a tensor has."""
    if (value := config.get(key)) is not None and value != size:
        raise DrafterError(
            f"config.json has {key} {str(value)[:60]}, and by {name} {list(weights[name].shape)} it is {size}; restore "
            "the checkpoint's own."
        )


def count_layers(weights: Weights, config: ForeignConfig = NO_CONFIG) -> int:
    """Count the numbered layers of a file; refuses another number in the drafter's config.json."""
    names = [name for name in weights if name.startswith("layers.")]
    n_layers = len({name.split(".")[1] for name in names})
    if names:
        check_size(config, "num_hidden_layers", n_layers, weights, max(names))
    return n_layers


def with_draft_vocabulary(weights: Weights, n_tokens: int) -> Weights:
    """Add ``t2d``, which marks the draft tokens in the target's vocabulary, to a file that has ``d2t`` alone."""
    if "d2t" in weights and "t2d" not in weights:
        tokens = weights["d2t"].long() + torch.arange(len(weights["d2t"]))
        marked = torch.zeros(n_tokens, dtype=torch.bool)
        # others are refused with the drafter's weights
        marked[tokens.clamp(0, n_tokens - 1)] = True
        return weights | {"t2d": marked}
    return weights


def rows(weights: Weights, name: str) -> int:
    """Count the rows of a tensor, which has to be there."""
    if name not in weights or not weights[name].dim():
        raise DrafterError(f"the weights lack {name}.")
    return int(weights[name].shape[0])


def nested(config: ForeignConfig, key: str) -> dict[str, Any]:
    """List what a config.json holds below a key; nothing where that is not a mapping."""
    found = config.get(key)
    return dict(found) if isinstance(found, Mapping) else {}


def read_layer_ids(*given: tuple[Any, int]) -> tuple[int, ...]:
    """Read the target's layers, from 0: lists in the order of preference, with the number of the first layer."""
    for ids, first in given:
        if ids:
            if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
                raise DrafterError(
                    f"config.json names the layers {str(ids)[:60]!r}, expected a list of numbers."
                )
            return tuple(layer - first for layer in ids)
    # They would have to be guessed from the target's depth.
    raise DrafterError(
        "config.json does not say which layers of the target are read; restore the checkpoint's own, with "
        "target_layer_ids or eagle_aux_hidden_state_layer_ids."
    )
