"""Sizes of a Mixture of Attentions, and their defaults in proportion to the target's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from ..errors import DrafterError
from ..nn.layers import BlockSizes
from ..targets.bundle import target_sizes
from .sizes import DrafterSizes, multiple_of_32


@dataclass(frozen=True, kw_only=True)
class MoASizes(DrafterSizes):
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
    """Whether there is layer self-attention; without it only the KV of the target's last layer is encoded."""
    target_layer_inference: int = 0
    """N, how many of the target's last layers the drafted features pass through."""
    cross_attention_drafts: bool = True
    """Whether cross-attention sees, behind the memory, the drafts of its round too; in the paper it does not."""
    layer_groups: int = 2
    """Groups of consecutive layers; the memory is made from the mean of layer self-attention over each group,
    concatenated. The paper has one group. Not used without layer self-attention."""
    unrotated_keys: bool = True
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
    @override
    def defaults(cls, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Choose sizes in the proportions of the official Llama-3-8B drafter."""
        facts = target_sizes(config)
        kv_width = 2 * facts["n_kv_heads"] * facts["head_dim"]
        half_kv_heads = next(h for h in range(max(1, facts["n_kv_heads"] // 2), 0, -1) if facts["n_heads"] % h == 0)
        mlp_width = multiple_of_32(config.intermediate_size * 3 / 7)
        heads = given.get("layer_attention_heads") or _layer_attention_heads(kv_width, facts["n_heads"])
        # The official code gives layer self-attention the target's heads and rounds their dim down.
        if kv_width % heads and (heads != facts["n_heads"] or kv_width // heads % 2):
            raise DrafterError(
                f"layer_attention_heads ({heads}) must divide the KV width {kv_width}; try "
                f"{_layer_attention_heads(kv_width, facts['n_heads'])}."
            )
        return {
            "kv_width": kv_width,
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


def _layer_attention_heads(kv_width: int, n_heads: int) -> int:
    """The largest head count up to the target's that divides kv_width with an even head dim."""
    return next(h for h in range(min(n_heads, kv_width), 0, -1) if kv_width % h == 0 and (kv_width // h) % 2 == 0)
