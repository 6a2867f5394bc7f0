"""Sizes of a Mixture of Attentions, and their defaults in proportion to the target's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from ...errors import DrafterError
from ..nn.layers import BlockSizes
from ..targets.bundle import target_sizes
from .layer_memory import MemorySizes
from .sizes import multiple_of_32


@dataclass(frozen=True, kw_only=True)
class MoASizes(MemorySizes):
    """Everything needed to rebuild a Mixture of Attentions and to know which target it belongs to."""

    kind: ClassVar[str] = "moa"

    self_attention_kv_heads: int
    """KV heads of the causal self-attention."""
    self_attention_mlp_width: int
    """MLP width of the causal self-attention."""
    cross_attention_kv_heads: int
    """KV heads of the cross-attention."""
    cross_attention_mlp_width: int
    """MLP width of the cross-attention."""
    target_layer_inference: int = 0
    """N, how many of the target's last layers the drafted features pass through."""
    cross_attention_drafts: bool = True
    """Whether cross-attention sees, behind the memory, the drafts of its round too; in the paper it does not."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("self_attention", "cross_attention"):
            kv_heads = getattr(self, f"{name}_kv_heads")
            if kv_heads < 1 or self.n_heads % kv_heads:
                problems.append(f"{name}_kv_heads ({kv_heads}) must divide the {self.n_heads} query heads")
        problems += self.memory_problems()
        if not 0 <= self.target_layer_inference <= self.n_layers:
            problems.append(
                f"target_layer_inference ({self.target_layer_inference}) must be between 0 and the target's "
                f"{self.n_layers} layers"
            )
        if problems:
            raise DrafterError("drafter sizes do not fit: " + "; ".join(problems) + ".")

    @classmethod
    @override
    def defaults(cls, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Choose sizes in the proportions of the official Llama-3-8B drafter."""
        facts = target_sizes(config)
        half_kv_heads = next(h for h in range(max(1, facts["n_kv_heads"] // 2), 0, -1) if facts["n_heads"] % h == 0)
        mlp_width = multiple_of_32(config.intermediate_size * 3 / 7)
        return {
            "self_attention_kv_heads": half_kv_heads,
            "self_attention_mlp_width": mlp_width,
            "cross_attention_kv_heads": half_kv_heads,
            "cross_attention_mlp_width": mlp_width,
        } | cls.memory_defaults(config, given)

    @property
    def self_attention(self) -> BlockSizes:
        """Sizes of the causal self-attention block."""
        return self.block(self.self_attention_kv_heads, self.self_attention_mlp_width, self.qkv_bias)

    @property
    def cross_attention(self) -> BlockSizes:
        """Sizes of the cross-attention block, which never has biases."""
        return self.block(self.cross_attention_kv_heads, self.cross_attention_mlp_width, False)
