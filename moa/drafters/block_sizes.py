"""Sizes of block-parallel drafters, and the layers of the target that they read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from ...errors import DrafterError
from ..targets.bundle import target_sizes
from .layer_memory import MemorySizes

CONTEXTS = ("hidden", "kv", "memory")
"""What a drafter can know of verified positions."""
N_READ_LAYERS = 5
"""Target layers whose outputs are read by default, as in DSpark and DFlash."""


@dataclass(frozen=True, kw_only=True)
class BlockDrafterSizes(MemorySizes):
    """The sizes that block-parallel drafters share; those of the memory are 0 with another context."""

    module_counts: ClassVar[tuple[str, ...]] = ("block_layers",)
    may_be_zero: ClassVar[tuple[str, ...]] = ("n_layers", "mask_token")

    self_attention_kv_heads: int
    """KV heads of each layer; with the context kv those of the target."""
    self_attention_mlp_width: int
    """MLP width of each layer."""
    mask_token: int
    """The token whose embedding stands for an unknown one."""
    block_size: int
    """G, slots of a block."""
    sample_from_anchor: bool
    """The slot of the anchor drafts the token behind it; without, each further slot drafts its own token."""
    context: str = "hidden"
    """What the layers see of verified positions, see :mod:`.block`: hidden, kv or memory."""
    fused_layers: tuple[int, ...] = ()
    """Target layers that are read: those whose outputs ``fc`` takes, in this order, where -1 is the embedding; with the
    context kv those whose keys and values the layers see, as many for each (:meth:`seen_layers`); none with the context
    memory."""
    block_layers: int = 5
    """Decoder layers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fused_layers", tuple(self.fused_layers))  # JSON knows lists alone
        self.check_kv_heads("self_attention_kv_heads")
        self.check_at_least_one("block_layers", "block_size")
        check_context(self, self.n_layers or 1 + max(self.fused_layers, default=0))
        if self.context == "memory" and (problems := self.memory_problems()):
            raise DrafterError("sizes of the memory do not fit: " + "; ".join(problems) + ".")
        if self.context == "kv":
            self._check_seen_heads()
        if self.n_drafts < 1:
            raise DrafterError("a block of 1 slot drafts nothing but from its anchor; give a block_size from 2 up.")
        if not 0 <= self.mask_token < self.vocab_size:
            raise DrafterError(f"mask_token must be one of the {self.vocab_size} tokens, got {self.mask_token}.")

    def _check_seen_heads(self) -> None:
        """Refuse KV heads that are not the target's, and more seen layers than a group of query heads can share."""
        n_kv_heads = self.kv_width // (2 * self.head_dim)
        if self.self_attention_kv_heads != n_kv_heads:
            raise DrafterError(
                f"with the context kv a layer has the KV heads of the target, {n_kv_heads}, got "
                f"self_attention_kv_heads {self.self_attention_kv_heads}."
            )
        if self.n_heads % (self.n_seen_layers * n_kv_heads):
            raise DrafterError(
                f"each layer sees the keys and values of {self.n_seen_layers} layers of the target, {n_kv_heads} KV "
                f"heads each, which {self.n_heads} query heads cannot share evenly; give other fused_layers."
            )

    @property
    def n_seen_layers(self) -> int:
        """Target layers whose keys and values each layer sees with the context kv."""
        return len(self.fused_layers) // self.block_layers

    def seen_layers(self, index: int) -> tuple[int, ...]:
        """The target layers whose keys and values a layer sees with the context kv, the first layer the lowest."""
        return self.fused_layers[index * self.n_seen_layers : (index + 1) * self.n_seen_layers]

    @property
    def n_drafts(self) -> int:
        """K, drafts of a block."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The first slot that drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    @override
    def max_depth(self) -> int:
        return self.n_drafts

    @classmethod
    @override
    def defaults(cls, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        facts, context = target_sizes(config), given.get("context", cls.context)
        found = {
            "self_attention_kv_heads": facts["n_kv_heads"],
            "self_attention_mlp_width": config.intermediate_size,
            "mask_token": facts["vocab_size"] - 1,
        }
        if context == "kv":
            found["kv_width"] = 2 * facts["n_kv_heads"] * facts["head_dim"]
        if context == "memory":
            found |= cls.memory_defaults(config, given)
        elif "fused_layers" not in given:  # small targets have no default
            n_read = given.get("block_layers", cls.block_layers) if context == "kv" else N_READ_LAYERS
            found["fused_layers"] = default_read_layers(facts["n_layers"], n_read)
        return found


def read_layers(settings: Any, n_layers: int) -> tuple[int, ...]:
    """The target layers that a drafter with some settings or sizes reads, with -1 for the embedding.

    Raises:
        DrafterError: the settings name none, and the target is so small that there is no default; or others than it
            can read.
    """
    if settings.fused_layers is None and settings.context != "memory":
        return default_read_layers(n_layers, settings.block_layers if settings.context == "kv" else N_READ_LAYERS)
    check_context(settings, n_layers)
    return tuple(settings.fused_layers or ())


def default_read_layers(n_layers: int, n_read: int = N_READ_LAYERS) -> tuple[int, ...]:
    """The layers that are read by default, from 1 to L - 3, evenly spread; a single one is the middle.

    Raises:
        DrafterError: the target is so small that these are not so many layers.
    """
    if n_read == 1:
        return (n_layers // 2,)
    layers = tuple(round(1 + index * (n_layers - 4) / (n_read - 1)) for index in range(n_read))
    if list(layers) != sorted(set(layers)):
        count = "five" if n_read == 5 else str(n_read)
        raise DrafterError(
            f"the drafter reads {count} layers of the target, by default from the second to the third from the end; "
            f"this one has {n_layers}. Choose them: --fused-layers {','.join(map(str, range(min(n_read, n_layers))))}."
        )
    return layers


def check_context(settings: Any, n_layers: int) -> None:
    """Refuse a context that there is not, and layers that do not suit it or that a target of ``n_layers`` lacks."""
    context, layers = settings.context, tuple(settings.fused_layers or ())
    if context not in CONTEXTS:
        raise DrafterError(f"context is {context!r}, expected one of {', '.join(CONTEXTS)}.")
    if context == "memory":
        if layers:
            raise DrafterError("the memory is made of all layers; leave fused_layers out, or give another context.")
        return
    check_read_layers(layers, n_layers)
    if context == "kv" and (len(layers) % settings.block_layers or layers[0] == -1):
        given = ",".join(map(str, layers))
        raise DrafterError(
            f"with the context kv each of the {settings.block_layers} block_layers sees the keys and values of as many "
            f"layers of the target; give a multiple of so many fused_layers, from 0 up, got {given}."
        )


def check_read_layers(layers: Sequence[int], n_layers: int) -> None:
    """Refuse layers that a target of ``n_layers`` does not have or that do not ascend; -1, the embedding, may lead."""
    real = [layer for layer in layers if layer != -1]
    if not real or list(layers) != sorted(set(layers)) or layers[0] < -1 or layers[-1] >= n_layers:
        given = ",".join(map(str, layers))
        raise DrafterError(
            f"fused_layers must be ascending decoder layers between 0 and {n_layers - 1}, where -1, the embedding, may "
            f"come first, got {given or 'none'}."
        )
