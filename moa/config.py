"""Sizes of drafters: what all have in common, and those of a Mixture of Attentions."""

import math
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from .bundle import rope_parameters, target_sizes
from .errors import DrafterError
from .layers import BlockSizes


@dataclass(frozen=True, kw_only=True)
class DrafterSizes:
    """What every drafter records of its target, and how it travels as JSON."""

    kind: ClassVar[str]
    """Name of the drafter that has these sizes, see ``registry.DRAFTERS``."""

    hidden_size: int
    """E, width of the target."""
    n_heads: int
    """Query heads of the target, which the drafter's self- and cross-attention have too."""
    head_dim: int
    """Head dim of the target, likewise."""
    n_layers: int
    """L, decoder layers of the target; 0 where a checkpoint of another project does not say."""
    vocab_size: int
    """V, vocabulary of the target."""
    max_position_embeddings: int
    """Positions of the target."""
    norm_eps: float
    """Epsilon of every RMSNorm, as in the target."""
    rope_parameters: dict[str, Any]
    """RoPE of the target (``rope_theta``, ``rope_type``, ...), used by all blocks."""
    qkv_bias: bool = False
    """Biases on q, k, v of blocks that look at tokens or layers (Qwen2 targets)."""
    target: dict[str, str] = field(default_factory=dict)
    """Identity of the target: weights_sha256 and config_sha256."""

    @property
    def target_layer_inference(self) -> int:
        """N, how many of the target's last layers the drafted features pass through; 0 unless a drafter says so."""
        return 0

    @property
    def max_depth(self) -> int | None:
        """Most levels of drafts that the drafter can make; None for any number."""
        return None

    def check_depth(self, depth: int) -> None:
        """Refuse drafts that are deeper than ``max_depth``.

        Raises:
            DrafterError: they are; the message names the most.
        """
        if self.max_depth is not None and depth > self.max_depth:
            raise DrafterError(
                f"this {self.kind} drafter drafts {self.max_depth} levels, drafts of {depth} levels were asked for; "
                f"give a shape of at most {self.max_depth} levels, or a drafter trained for more."
            )

    def check_kv_heads(self, *names: str) -> None:
        """Refuse numbers of KV heads, named by their fields, that don't divide the query heads.

        Raises:
            DrafterError: naming all that don't.
        """
        wrong = [name for name in names if getattr(self, name) < 1 or self.n_heads % getattr(self, name)]
        if wrong:
            given = " and ".join(f"{name} ({getattr(self, name)})" for name in wrong)
            raise DrafterError(f"{given} must divide the {self.n_heads} query heads of the target.")

    def check_at_least_one(self, *names: str) -> None:
        """Refuse fields below 1.

        Raises:
            DrafterError: naming the first.
        """
        for name in names:
            if getattr(self, name) < 1:
                raise DrafterError(f"{name} must be at least 1, got {getattr(self, name)}.")

    @classmethod
    def from_target(cls, config: Any, target: dict[str, str] | None = None, **sizes: Any) -> Self:
        """Sizes for a target.

        Args:
            config: the target's transformers config.
            target: the target's identity.
            **sizes: any drafter size by field name; None means the default.

        Raises:
            DrafterError: sizes that do not fit together.
        """
        raise NotImplementedError

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild from :meth:`to_dict`; unknown or missing keys raise, a kind that is not this one's too."""
        kind = values.get("kind", cls.kind)
        if kind != cls.kind:
            raise DrafterError(f"these are the sizes of a drafter of kind {kind!r}, expected {cls.kind!r}.")
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known - {"kind"})
        if unknown:
            raise DrafterError(
                f"drafter.json has unknown keys {', '.join(unknown)}; was it written by a newer release?"
            )
        for item in fields(cls):
            if item.name in values and not _is_of_type(values[item.name], item):
                raise DrafterError(
                    f"{item.name} of the drafter is {str(values[item.name])[:60]!r}, which cannot be. Restore its "
                    "drafter.json or config.json."
                )
        try:
            return cls(**{name: value for name, value in values.items() if name != "kind"})
        except TypeError as error:
            raise DrafterError(f"drafter.json is incomplete: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the ``kind``."""
        return {"kind": self.kind, **asdict(self)}

    def block(self, kv_heads: int, mlp_width: int, qkv_bias: bool) -> BlockSizes:
        """Sizes of a block with the target's width and query heads."""
        return BlockSizes(
            self.hidden_size, self.n_heads, kv_heads, self.head_dim, mlp_width, self.norm_eps, qkv_bias=qkv_bias
        )


_MOST_MODULES = 128
_LARGEST_SIZE = 1 << 26
_MODULE_COUNTS = ("eagle_layers", "independent_layers", "medusa_heads", "medusa_layers")
_MAY_BE_ZERO = ("n_layers", "target_layer_inference")


def _is_of_type(value: Any, item: Field[Any]) -> bool:
    """Whether a value of drafter.json is of its field's type, and of a size that can be."""
    if item.type is int:
        largest = _MOST_MODULES if item.name in _MODULE_COUNTS else _LARGEST_SIZE
        return type(value) is int and (item.name not in _MAY_BE_ZERO) <= value <= largest
    if item.type is float:
        return type(value) in (int, float) and math.isfinite(value)
    if item.type is bool:
        return type(value) is bool
    if item.type == tuple[int, ...]:
        return isinstance(value, list | tuple) and all(type(one) is int and 0 <= one <= _LARGEST_SIZE for one in value)
    return isinstance(value, dict)


def target_facts(config: Any, target: dict[str, str] | None) -> dict[str, Any]:
    """The fields of :class:`DrafterSizes`, from the target's transformers config and identity."""
    facts = target_sizes(config)
    names = ("hidden_size", "n_heads", "head_dim", "n_layers", "vocab_size", "max_position_embeddings")
    return {name: facts[name] for name in names} | {
        "norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_parameters(config),
        "qkv_bias": config.model_type == "qwen2",
        "target": dict(target or {}),
    }


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(DrafterSizes):
    """Everything needed to rebuild a Mixture of Attentions and to know which target it belongs to."""

    kind: ClassVar[str] = "moa"

    kv_width: int
    """D = 2 * target KV heads * target head dim; width of layer self-attention, which runs over all L layers."""
    self_attention_kv_heads: int
    """KV heads of the causal self-attention."""
    self_attention_mlp_width: int
    """MLP width of the causal self-attention."""
    cross_attention_kv_heads: int
    """KV heads of the cross-attention."""
    cross_attention_mlp_width: int
    """MLP width of the cross-attention."""
    layer_attention_heads: int
    """Query heads of layer self-attention; must divide kv_width."""
    layer_attention_head_dim: int
    """Head dim of layer self-attention."""
    layer_attention_kv_heads: int
    """KV heads of layer self-attention."""
    layer_attention_mlp_width: int
    """MLP width of layer self-attention."""
    layer_attention: bool = True
    """Whether there is a layer self-attention; without it only the KV of the target's last layer is encoded."""
    target_layer_inference: int = 0
    """N, how many of the target's last layers the drafted features pass through."""
    cross_attention_drafts: bool = False
    """Whether cross-attention sees, behind the memory, the drafts of its round too; in the paper it does not."""
    layer_groups: int = 1
    """Groups of consecutive layers, whose means after layer self-attention stand side by side in what the memory is
    made from; in the paper one mean of all. Of no meaning without layer self-attention."""
    unrotated_keys: bool = False
    """Whether the memory is made from the target's keys before RoPE; in the paper it is made from those after it."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("self_attention", "cross_attention"):
            kv_heads = getattr(self, f"{name}_kv_heads")
            if kv_heads < 1 or self.n_heads % kv_heads:
                problems.append(f"{name}_kv_heads ({kv_heads}) must divide the {self.n_heads} query heads")
        if self.layer_attention_kv_heads < 1 or self.layer_attention_heads % self.layer_attention_kv_heads:
            problems.append(
                f"layer_attention_kv_heads ({self.layer_attention_kv_heads}) must divide "
                f"layer_attention_heads ({self.layer_attention_heads})"
            )
        if self.layer_attention_head_dim % 2:
            problems.append(f"layer_attention_head_dim ({self.layer_attention_head_dim}) must be even")
        if not 0 <= self.target_layer_inference <= self.n_layers:
            problems.append(
                f"target_layer_inference ({self.target_layer_inference}) must be between 0 and the target's "
                f"{self.n_layers} layers"
            )
        if not 1 <= self.layer_groups <= max(1, self.n_layers):
            problems.append(f"layer_groups ({self.layer_groups}) must be between 1 and the {self.n_layers} layers")
        if problems:
            raise DrafterError("drafter sizes do not fit: " + "; ".join(problems) + ".")

    @classmethod
    def from_target(cls, config: Any, target: dict[str, str] | None = None, **sizes: Any) -> Self:
        """Sizes for a target, in the proportions of the official Llama-3-8B drafter where not given.

        Args:
            config: the target's transformers config.
            target: the target's identity.
            **sizes: any drafter size by field name; None means the default.

        Raises:
            DrafterError: sizes that do not fit together, or layer_attention_heads that do not divide kv_width.
        """
        facts = target_sizes(config)
        kv_width = 2 * facts["n_kv_heads"] * facts["head_dim"]
        given = {name: value for name, value in sizes.items() if value is not None}
        half_kv_heads = next(h for h in range(max(1, facts["n_kv_heads"] // 2), 0, -1) if facts["n_heads"] % h == 0)
        mlp_width = multiple_of_32(config.intermediate_size * 3 / 7)
        heads = given.get("layer_attention_heads") or _layer_attention_heads(kv_width, facts["n_heads"])
        # The official code gives layer self-attention the target's heads and rounds their dim down.
        if kv_width % heads and (heads != facts["n_heads"] or kv_width // heads % 2):
            raise DrafterError(
                f"layer_attention_heads ({heads}) must divide the KV width {kv_width}; try "
                f"{_layer_attention_heads(kv_width, facts['n_heads'])}."
            )
        defaults: dict[str, Any] = {
            "self_attention_kv_heads": half_kv_heads,
            "self_attention_mlp_width": mlp_width,
            "cross_attention_kv_heads": half_kv_heads,
            "cross_attention_mlp_width": mlp_width,
            "layer_attention_heads": heads,
            "layer_attention_head_dim": kv_width // heads,
            "layer_attention_kv_heads": next(
                h for h in range(min(heads, facts["n_kv_heads"]), 0, -1) if heads % h == 0
            ),
            "layer_attention_mlp_width": multiple_of_32(kv_width * 1.5),
        }
        return cls(kv_width=kv_width, **target_facts(config, target), **(defaults | given))

    @property
    def self_attention(self) -> BlockSizes:
        """Sizes of the causal self-attention block."""
        return self.block(self.self_attention_kv_heads, self.self_attention_mlp_width, self.qkv_bias)

    @property
    def cross_attention(self) -> BlockSizes:
        """Sizes of the cross-attention block, which never has biases."""
        return self.block(self.cross_attention_kv_heads, self.cross_attention_mlp_width, False)

    @property
    def layer_self_attention(self) -> BlockSizes:
        """Sizes of the layer self-attention block."""
        return BlockSizes(
            width=self.kv_width,
            n_heads=self.layer_attention_heads,
            n_kv_heads=self.layer_attention_kv_heads,
            head_dim=self.layer_attention_head_dim,
            mlp_width=self.layer_attention_mlp_width,
            norm_eps=self.norm_eps,
            qkv_bias=self.qkv_bias,
        )


def multiple_of_32(width: float) -> int:
    """The multiple of 32 that is nearest to a width, at least 32."""
    return max(32, round(width / 32) * 32)


def _layer_attention_heads(kv_width: int, n_heads: int) -> int:
    """The largest head count up to the target's that divides kv_width with an even head dim."""
    return next(h for h in range(min(n_heads, kv_width), 0, -1) if kv_width % h == 0 and (kv_width // h) % 2 == 0)
