"""The interface of other programs' checkpoint layouts: one class per layout, listed in ``table.LAYOUTS``.

A layout is a folder with ``config.json`` and ``model.safetensors``. Its list of tensors is that of the program that
reads it, written down from that program's sources, and not derived from the drafter of this package.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from transformers import LlamaConfig

from ...errors import CheckpointError
from ..drafters.sizes import DrafterSizes
from ..files.foreign import parsing
from ..files.tensor_list import TensorList
from ..targets.bundle import rope_parameters

OWN_KEY = "moa_data"
"""Key of config.json with what a layout has no place for; other programs do not look at it."""

Weights = dict[str, Tensor]


class DrafterLayout(ABC):
    """One layout of one kind of drafter."""

    name: ClassVar[str]
    """The name of the layout on the command line."""
    kind: ClassVar[str]
    """The kind of drafter that it holds, see ``registry.DRAFTERS``."""
    reader: ClassVar[str]
    """The program that loads it, for messages."""
    needs_target_config: ClassVar[bool] = False
    """Whether its config.json is the target's."""
    needs_embeddings: ClassVar[bool] = False
    """Whether it holds a copy of the target's embeddings."""
    needs_head: ClassVar[bool] = False
    """Whether it holds a copy of the target's LM head."""

    optional: ClassVar[frozenset[str]] = frozenset()
    """Tensors of the list that a folder that is not ours may lack: copies of the target's."""

    @abstractmethod
    def refusals(self, sizes: Any) -> list[str]:
        """List why the reading program would run a drafter of these sizes differently; empty if it would not."""

    @abstractmethod
    def tensors(self, sizes: Any) -> TensorList:
        """List all tensors of the file for a drafter of these sizes."""

    @abstractmethod
    def pack(self, weights: Weights, sizes: Any) -> Weights:
        """Turn the drafter's state dict into the file's tensors, without copies of the target's."""

    @abstractmethod
    def unpack(self, weights: Weights, sizes: Any) -> Weights:
        """Turn the file's tensors into the drafter's state dict."""

    @abstractmethod
    def config(self, sizes: Any, target_config: Any) -> dict[str, Any]:
        """Return the content of config.json; ``target_config`` is a transformers config, None if it isn't needed."""

    @abstractmethod
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Return whether a folder that is not ours holds this layout, by its tensors and its config.json."""

    @abstractmethod
    def read_sizes(self, weights: Weights, config: Mapping[str, Any]) -> DrafterSizes:
        """Read the sizes of the drafter of a folder that is not ours."""

    def canonical(self, weights: Weights) -> Weights:
        """Rename the tensors of a folder that is not ours to those of the list; leave out tensors that nobody reads."""
        return {name: value for name, value in weights.items() if not name.endswith("rotary_emb.inv_freq")}

    def notes(self, sizes: Any) -> list[str]:
        """List what to know before using the folder."""
        return []


def rope_keys(sizes: DrafterSizes) -> dict[str, Any]:
    """Return the rotation as transformers 4 and 5 write it; engines read one or the other."""
    parameters = dict(sizes.rope_parameters)
    keys: dict[str, Any] = {"rope_theta": parameters.get("rope_theta", 10_000.0), "rope_parameters": parameters}
    if parameters.get("rope_type", "default") != "default":
        scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
        keys["rope_scaling"] = scaling
    return keys


def is_rope_scaled(sizes: DrafterSizes) -> bool:
    """Return whether the target's RoPE is scaled."""
    return bool(sizes.rope_parameters.get("rope_type", "default") != "default")


def split_heads(sizes: DrafterSizes, who: str) -> list[str]:
    """Return a refusal where the heads do not fill the width, for programs whose head dim is width / heads."""
    if sizes.n_heads * sizes.head_dim == sizes.hidden_size:
        return []
    return [f"the head dim is {sizes.head_dim}, and {who} takes width / heads, {sizes.hidden_size} / {sizes.n_heads}"]


def drafter_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of :class:`DrafterSizes` from a drafter's own config.json; the target's layers are unknown (0)."""
    needed = ("hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    missing = [name for name in needed if not config.get(name)]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}; restore the checkpoint's own.")
    names = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", *needed)
    with parsing("config.json cannot be used", CheckpointError, "Restore the checkpoint's own."):
        known = LlamaConfig(**{name: config[name] for name in names if config.get(name) is not None})
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
    for name in ("hidden_size", "n_heads", "head_dim"):  # the others are looked at when the sizes are made
        if type(facts[name]) is not int or facts[name] < 1:
            raise CheckpointError(f"config.json gives {name} {str(facts[name])[:60]!r}; restore the checkpoint's own.")
    return facts


def rows(weights: Mapping[str, Tensor], name: str) -> int:
    """Count the rows of a tensor, which has to be there."""
    if name not in weights or not weights[name].dim():
        raise CheckpointError(f"the weights lack {name}.")
    return int(weights[name].shape[0])
