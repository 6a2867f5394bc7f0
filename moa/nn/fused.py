"""Fused decoder layers of the Llama architecture, for calls of a few tokens on a CPU.

If a layer processes only a few tokens, half of its time is spent outside its matrix products. This
module reduces this time. It computes Q, K and V as one product, and the gate and up projections as
another product. It rotates queries and keys together, and runs the code before and after attention
with TorchScript. Only float32 layers are fused. In other dtypes, the fused operations would round
intermediate results in another way than the original operations.

Shapes: B rows, n tokens, E width, H query heads, H_kv key/value heads, d head dim,
D = (H + 2 * H_kv) * d.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .packed import Laid, PackedLinear, laid_out, product, scripted, state_of

PRODUCTS = ("self_attn.o_proj", "mlp.down_proj")
FUSED_PRODUCTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")

Norm = tuple[Tensor, Tensor]
"""An RMS norm of width E, prepared for :func:`normed`: the floor sqrt(E * eps), and the scale [E].

:func:`normed` divides each row by ``sqrt(l2_norm**2 + floor**2)``, and multiplies the result by the
scale.
"""
Weights = tuple[tuple[Norm, Norm], tuple[Laid, Laid, Laid, Laid]]
"""Norms and packed weights of a layer.

The first norm comes before attention, the second norm before the MLP. The packed weights have the
order of ``FusedWeights.products``.
"""


@dataclass
class FusedWeights:
    """The fused weights of a decoder layer."""

    # The packed weights of four products, in this order: Q, K and V (fused); gate and up (fused);
    # output projection; down projection.
    products: tuple[Laid, Laid, Laid, Laid]
    norms: tuple[Norm, Norm]
    # All weights and biases of the layer at the time of fusing.
    weights: list[Tensor]
    # Address and version of each weight at the time of fusing. A changed weight has another address
    # or version.
    states: list[tuple[int, int]]
    # References that keep the memory of the weights allocated. Otherwise a new weight could get the
    # address of a freed weight, and would be mistaken for the freed weight.
    held: list[Tensor]
    # The next two fields are copies of attributes of the layer. Looking up an attribute of a module
    # takes as long as a small tensor operation, so they are looked up only once.
    attention: Any
    n_kv_heads: int

    def is_current(self) -> bool:
        """Whether all weights are the same as when they were fused."""
        return [state_of(weight) for weight in self.weights] == self.states

    def project(
        self, x: Tensor, cosines: Tensor, sines: Tensor, is_normed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run :func:`before_attention` with the fused weights.

        If ``is_normed`` is true, x has already been normed, and the norm is skipped.
        """
        norm = None if is_normed else self.norms[0]
        return before_attention(
            x, norm, self.products[0], cosines, sines, self.n_kv_heads, self.attention.head_dim
        )

    def finish(self, attended: Tensor, x: Tensor) -> Tensor:
        """Run :func:`after_attention` with the fused weights."""
        return after_attention(attended, x, self.norms[1], *self.products[1:])


@torch.inference_mode()
def fuse_weights(layer: Any, is_exact: bool = True) -> FusedWeights | None:
    """Fuse the weights of a layer of the Llama architecture.

    Args:
        layer: A decoder layer whose linear layers were packed by :func:`.packed.pack`.
        is_exact: If true, weights that float16 cannot represent exactly stay in float32. False is
            for drafters: rounded weights may change their drafts, but not the decoded text.

    Returns:
        The fused weights. None if the layer has another architecture than Llama, is not float32, or
        is not packed.
    """
    try:
        o, down = _submodules(layer, PRODUCTS)
        heads = _submodules(layer, FUSED_PRODUCTS[0])
        gates = _submodules(layer, FUSED_PRODUCTS[1])
        norms = _submodules(layer, _NORMS)
        first, second = map(prepared_norm, norms)
        n_kv_heads = layer.self_attn.k_proj.out_features // layer.self_attn.head_dim
    except AttributeError:
        return None
    for module in (o, down, *gates):
        if type(module) is not PackedLinear or module.weight.dtype != torch.float32:
            return None
    for module in heads:
        if type(module) not in (PackedLinear, nn.Linear):
            return None
    if norms[0].weight.dtype != torch.float32:
        return None
    for group in (heads, gates):
        if len({module.bias is None for module in group}) > 1:
            return None
    fused_heads = _fused(heads, is_exact)
    fused_gates = _fused(gates, is_exact)
    layers = [*heads, *gates, o, down]
    weights: list[Tensor] = []
    for module in (*layers, *norms):
        weights.extend(module.parameters())
    states = [state_of(weight) for weight in weights]
    held = [weight.detach() for weight in weights]
    return FusedWeights(
        (fused_heads, fused_gates, o.packed, down.packed),
        (first, second),
        weights,
        states,
        held,
        layer.self_attn,
        n_kv_heads,
    )


def _submodules(layer: Any, names: Sequence[str]) -> list[Any]:
    return [layer.get_submodule(name) for name in names]


def _fused(linears: Sequence[Any], is_exact: bool) -> Laid:
    """Pack several linear layers as one product. All of these layers have the same input.

    Either all of the layers have a bias, or none of them has one.
    """
    weight = torch.cat([linear.weight for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias for linear in linears])
    return laid_out(weight, bias, is_exact)


def prepared_norm(norm: Any) -> Norm:
    """Convert an RMS norm to the form that :func:`normed` takes.

    :func:`normed` divides by the root of the sum of squares, but an RMS norm divides by the root of
    the mean of squares. So the scale is multiplied by sqrt(E).
    """
    width = norm.weight.numel()
    epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return torch.tensor((width * epsilon) ** 0.5), norm.weight.detach() * width**0.5


@scripted
def normed(x: Tensor, norm: Norm) -> Tensor:
    """Apply an RMS norm to rows [B, n, E].

    PyTorch's RMS norm takes three times as many operations.
    """
    floor, scale = norm
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x / length.hypot(floor)).mul_(scale)


@scripted
def before_attention(
    x: Tensor,
    norm: Optional[Norm],  # noqa: UP045 - TorchScript does not support `Norm | None`
    qkv: Laid,
    cosines: Tensor,  # [B or 1, n, 1, d], cosines of RoPE.
    sines: Tensor,  # [B or 1, n, 1, d], sines of RoPE, negated in the first half of d.
    n_kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, keys and values from the input of a layer [B, n, E].

    Returns:
        Rotated queries [B, H, n, d], rotated keys [B, H_kv, n, d], and values [B, H_kv, n, d].
    """
    if norm is not None:
        x = normed(x, norm)
    heads = product(x, qkv).unflatten(-1, (-1, head_dim))
    rotated = heads[:, :, :-n_kv_heads]
    v = heads[:, :, -n_kv_heads:].transpose(1, 2)
    rotated = torch.addcmul(rotated * cosines, rotated.roll(head_dim // 2, -1), sines).transpose(
        1, 2
    )
    return rotated[:, :-n_kv_heads], rotated[:, -n_kv_heads:], v


@scripted
def after_attention(
    attended: Tensor, x: Tensor, norm: Norm, gates: Laid, o: Laid, down: Laid
) -> Tensor:
    """Run the operations of a layer that follow attention.

    Args:
        attended: The output of attention [B, n, H * d], before the output projection.
        x: The input of the layer [B, n, E].
        norm: The norm before the MLP.
        gates: The fused gate and up projections.
        o: The output projection of attention.
        down: The down projection of the MLP.
    """
    x = x + product(attended, o)
    gate, up = product(normed(x, norm), gates).chunk(2, dim=-1)
    return x + product(F.silu(gate).mul_(up), down)
