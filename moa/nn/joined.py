"""Decoder layers of Llama's form in few operations, for calls of a few tokens on a CPU.

Such a call spends as long between the products as in them. So the products before attention are one, those of a gate
and what it gates too, queries and keys are rotated together, and TorchScript runs what comes before and after
attention. That is done in float32 alone: elsewhere results would be rounded in other places.

Shapes: B rows, n tokens, E width, H query heads, H_kv key/value heads, d head dim, D = (H + 2 * H_kv) * d.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .packed import Laid, PackedLinear, laid_out, product, scripted, state_of

PRODUCTS = ("self_attn.o_proj", "mlp.down_proj")
JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")

Norm = tuple[Tensor, Tensor]
"""The floor of a row's length, and what the row is multiplied with [E] once it is divided by its length."""
Weights = tuple[tuple[Norm, Norm], tuple[Laid, Laid, Laid, Laid]]
"""Of a layer: the norms of :func:`before_attention` and :func:`after_attention`, and their products."""


@dataclass
class Joined:
    """A layer's products, some of them as one."""

    products: tuple[Laid, Laid, Laid, Laid]  # of JOINED and PRODUCTS
    norms: tuple[Norm, Norm]
    weights: list[Tensor]  # of the whole layer, and biases
    states: list[tuple[int, int]]  # of the weights, when they were joined
    held: list[Tensor]  # they, since others could be where they were once they are gone
    # What else the layer computes with, since asking modules for it takes as long as a small
    # operation.
    attention: Any
    n_kv_heads: int

    def is_current(self) -> bool:
        """Whether the weights are what they were."""
        return [state_of(weight) for weight in self.weights] == self.states

    def project(
        self, x: Tensor, cosines: Tensor, sines: Tensor, is_normed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run :func:`before_attention`; ``is_normed``: x is past the norm."""
        norm = None if is_normed else self.norms[0]
        return before_attention(
            x, norm, self.products[0], cosines, sines, self.n_kv_heads, self.attention.head_dim
        )

    def finish(self, attended: Tensor, x: Tensor, n_groups: int = 0) -> Tensor:
        """Run :func:`after_attention`, or, with groups, :func:`means_after_attention`."""
        if n_groups:
            return means_after_attention(attended, x, self.norms[1], *self.products[1:], n_groups)
        return after_attention(attended, x, self.norms[1], *self.products[1:])


@torch.inference_mode()
def join(layer: Any, is_exact: bool = True) -> Joined | None:
    """Join products of a layer of Llama's form, see :func:`.packed.pack`; None for others, and where none is gained."""
    try:
        products = [layer.get_submodule(name) for name in PRODUCTS]
        joined = [[layer.get_submodule(name) for name in names] for names in JOINED]
        norms = [layer.get_submodule(name) for name in _NORMS]
        first, second = map(prepared_norm, norms)
        n_kv_heads = layer.self_attn.k_proj.out_features // layer.self_attn.head_dim
    except AttributeError:
        return None
    if any(
        type(one) is not PackedLinear or one.weight.dtype != torch.float32
        for one in (*products, *joined[1])
    ):
        return None
    if (
        any(type(one) not in (PackedLinear, nn.Linear) for one in joined[0])
        or norms[0].weight.dtype != torch.float32
    ):
        return None
    if any(len({one.bias is None for one in group}) > 1 for group in joined):
        return None
    before, gates = (
        laid_out(
            torch.cat([one.weight for one in group]),
            None if group[0].bias is None else torch.cat([one.bias for one in group]),
            is_exact,
        )
        for group in joined
    )
    o, down = (one.packed for one in products)
    layers = [*itertools.chain(*joined, products)]
    weights = [one.weight for one in (*layers, *norms)] + [
        one.bias for one in layers if one.bias is not None
    ]
    states = [state_of(weight) for weight in weights]
    held = [weight.detach() for weight in weights]
    return Joined(
        (before, gates, o, down),
        (first, second),
        weights,
        states,
        held,
        layer.self_attn,
        n_kv_heads,
    )


def prepared_norm(norm: Any) -> Norm:
    """What :func:`normed` takes of a norm; it divides by the root of the squares' sum in place of their mean."""
    width = norm.weight.numel()
    epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return torch.tensor((width * epsilon) ** 0.5), norm.weight.detach() * width**0.5


@scripted
def normed(x: Tensor, norm: Norm) -> Tensor:
    """Apply a norm to rows [B, n, E]; PyTorch's own takes three times as many operations."""
    floor, scale = norm
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x / length.hypot(floor)).mul_(scale)


@scripted
def before_attention(
    x: Tensor,
    norm: Optional[Norm],  # noqa: UP045 - TorchScript knows no other
    joined: Laid,
    cosines: Tensor,  # [B or 1, n, 1, d]
    sines: Tensor,  # the same, those of the first half negative
    n_kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make rotated queries [B, H, n, d], rotated keys and values [B, H_kv, n, d] of a layer's input [B, n, E]."""
    if norm is not None:
        x = normed(x, norm)
    heads = product(x, joined).unflatten(-1, (-1, head_dim))
    rotated = heads[:, :, :-n_kv_heads]
    v = heads[:, :, -n_kv_heads:].transpose(1, 2)
    rotated = torch.addcmul(rotated * cosines, rotated.roll(head_dim // 2, -1), sines).transpose(
        1, 2
    )
    return rotated[:, :-n_kv_heads], rotated[:, -n_kv_heads:], v


@scripted
def _gated(attended: Tensor, x: Tensor, norm: Norm, gates: Laid, o: Laid) -> tuple[Tensor, Tensor]:
    x = x + product(attended, o)
    gate, up = product(normed(x, norm), gates).chunk(2, dim=-1)
    return x, F.silu(gate).mul_(up)


@scripted
def group_means(x: Tensor, n_groups: int) -> Tensor:
    """Average groups of consecutive tokens, [B, T, E] -> [B, G, E]; where they can't be equal the first are longer."""
    return torch.stack([group.mean(dim=1) for group in x.tensor_split(n_groups, dim=1)], dim=1)


@scripted
def after_attention(
    attended: Tensor, x: Tensor, norm: Norm, gates: Laid, o: Laid, down: Laid
) -> Tensor:
    """Compute the rest of a layer, of what was attended [B, n, H * d] and the layer's input [B, n, E]."""
    x, gated = _gated(attended, x, norm, gates, o)
    return x + product(gated, down)


@scripted
def means_after_attention(
    attended: Tensor, x: Tensor, norm: Norm, gates: Laid, o: Laid, down: Laid, n_groups: int
) -> Tensor:
    """Average :func:`after_attention` over groups of consecutive tokens, see :func:`group_means`: [B, n_groups, E]."""
    x, gated = _gated(attended, x, norm, gates, o)
    return group_means(x, n_groups) + product(group_means(gated, n_groups), down)
