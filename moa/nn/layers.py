"""The Llama decoder block in plain torch.

Drafters, frozen target layers and decoding all use this definition. If the keys of a block come
from the block's own input, the block computes self-attention. If the keys come from encoded KV, the
block computes cross-attention. The same norm is applied to the input of the queries and to the
input of the keys (lines 139-203 of ``train/cross_attention.py`` in the MoA authors' code).

Shapes: B batch, T tokens, Q queries, S keys, E block width, H query heads, H_kv key/value heads,
d head dim, G groups.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...errors import DrafterError
from ...files import parsing
from .attention import attend
from .fused import FusedWeights, fuse_weights
from .masks import AnyMask

Rotation = tuple[Tensor, Tensor]
"""Cosine and signed sine of the angles of RoPE, each [..., d] float32. The sine is negated in the
first half of d, so that rotating is ``x * cos + x.roll(d / 2) * sin``.
"""

KeysValues = tuple[Tensor, Tensor]
"""Keys and values, each [B, H_kv, S, d]."""

AppendKV = Callable[[Tensor, Tensor], KeysValues]
"""A function that appends keys and values of new tokens, each [B, H_kv, Q, d], to a cache.

The function returns the keys and values of all tokens in the cache, each [B, H_kv, S, d].
"""


def no_cache(keys: Tensor, values: Tensor) -> KeysValues:
    """Return keys and values unchanged. This is the :data:`AppendKV` of an empty cache."""
    return keys, values


@dataclass(frozen=True)
class DecoderBlockSizes:
    """Sizes of one decoder block."""

    width: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_width: int
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    input_norm: bool = True
    # Input width of the query, key and value projections. If None, it equals the width of the
    # block.
    input_width: int | None = None


# If only the output of the last token is needed, K and V are needed for all tokens, but Q only for
# the last token. There are two ways to compute them: one fused product of Q, K and V for all
# tokens, or one product of K and V for all tokens and a second product of Q for the last token. The
# fused product is faster for at most this number of tokens.
_FEW_TOKENS = 32

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported RoPE types. Their angles do not depend on the length of the sequence, so cached keys
stay valid when a sequence grows.
"""


class Rotary(nn.Module):
    """Rotary position embedding (RoPE). It pairs element i of a head with element i + d / 2.

    The frequencies are always float32, because bfloat16 would round them.
    """

    frequencies: Tensor  # [d]. Rotation in radians per position, negated in the first half of d.

    def __init__(
        self, head_dim: int, rope_parameters: dict[str, Any], max_position_embeddings: int
    ) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise DrafterError(
                f"RoPE needs an even head dim, got {head_dim}. Choose another number of heads."
            )
        rope_type = rope_parameters.get("rope_type", "default")
        self.scaling = 1.0
        if rope_type == "default":
            theta: Any = rope_parameters.get("rope_theta")
            if type(theta) not in (int, float) or not 0 < theta < math.inf:
                raise DrafterError(
                    f"rope_theta is {theta!r}, expected a number above 0. Restore it in "
                    "config.json, or in the drafter.json of a drafter."
                )
            exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            inv_freq = 1.0 / (float(theta) ** exponent)
        elif rope_type in ROPE_TYPES:
            from transformers import LlamaConfig

            with parsing(
                f"the rotary embedding (RoPE) cannot be made from {rope_parameters}",
                DrafterError,
                "Restore them in config.json, or in the drafter.json of a drafter.",
            ):
                config = LlamaConfig(
                    hidden_size=head_dim,
                    num_attention_heads=1,
                    num_key_value_heads=1,
                    head_dim=head_dim,
                    max_position_embeddings=max_position_embeddings,
                    rope_parameters=dict(rope_parameters),
                )
                inv_freq, self.scaling = ROPE_INIT_FUNCTIONS[rope_type](config)
        else:
            raise DrafterError(
                f"rope_type {rope_type!r} is not supported, because its angles change with the "
                "length of the input. Choose a target with one of the types "
                f"{', '.join(ROPE_TYPES)}."
            )
        if not inv_freq.is_meta and not math.isfinite(float(inv_freq.sum()) * self.scaling):
            raise DrafterError(
                f"the rotary embedding (RoPE) of {rope_parameters} has angles that are not "
                "finite. Restore them in config.json, or in the drafter.json of a drafter."
            )
        inv_freq = inv_freq.float()
        # [d] frequencies. They are negative in the first half, because RoPE multiplies the sine by
        # -1 there.
        self.register_buffer("frequencies", torch.cat((-inv_freq, inv_freq)), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Rotation:
        """Compute cos and signed sin [..., d] of integer positions [...].

        They are computed in float32, and then cast to ``dtype``.
        """
        angles = positions[..., None] * self.frequencies
        cos = angles.cos()
        sin = angles.sin()
        if self.scaling != 1.0:
            cos = cos * self.scaling
            sin = sin * self.scaling
        return cos.to(dtype), sin.to(dtype)

    def inverse(self, positions: Tensor) -> Rotation:
        """Compute the rotation that undoes :meth:`forward`, including its scaling."""
        cos, sin = self(-positions)
        return (cos, sin) if self.scaling == 1.0 else (cos / self.scaling**2, sin / self.scaling**2)

    def _apply(self, fn: Any, recurse: bool = True) -> "Rotary":
        exact = self.frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = exact.to(self.frequencies.device)
        return self


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x [B, heads, T, d] by cos and signed sin [B or 1, T, d].

    The rotation is computed in the dtype of x, as transformers does.
    """
    cos, sin = rotation
    cos = cos.to(x.dtype).unsqueeze(1)
    sin = sin.to(x.dtype).unsqueeze(1)
    if torch.is_grad_enabled():
        # PyTorch declares no types for `apply`, so tell mypy to ignore this call.
        rotated: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return rotated
    # Use few operations. A draft step has few tokens, so it spends most of its time launching
    # kernels.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class _Rotate(torch.autograd.Function):
    """Computes x * cos + rotate_half(x) * sin in three passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient is multiplied by the transpose of the rotation, which is the rotation by the
        # negative angle.
        cos, sin = ctx.saved_tensors
        return _rotated(grad_outputs[0], cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm.

    For training on a CPU, it has its own autograd function, because PyTorch's norm makes many
    passes over memory there.
    """

    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., E] over the last axis."""
        trains = torch.is_grad_enabled() and x.device.type == "cpu"
        if trains and x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64):
            # PyTorch declares no types for `apply`, so tell mypy to ignore this call.
            normed: Tensor = _RMSNorm.apply(  # type: ignore[no-untyped-call]
                x, self.weight, self.eps
            )
            return normed
        return super().forward(x)


class _RMSNorm(torch.autograd.Function):
    """Computes y = w * x / rms(x), and saves x / rms(x) for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        unit: Tensor = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.mul(grad_outputs[0], unit).flatten(0, -2).sum(dim=0)
        if ctx.needs_input_grad[0]:
            grad_unit = grad_outputs[0] * weight
            along = torch.linalg.vecdot(grad_unit, unit).unsqueeze(-1).div_(unit.shape[-1])
            grad_x = grad_unit.addcmul_(unit, along, value=-1).mul_(scale)
        return grad_x, grad_weight, None


class Attention(nn.Module):
    """Grouped-query attention, with scores scaled by 1/sqrt(d).

    The weights have the same names as in a Llama layer of transformers.
    """

    def __init__(self, sizes: DecoderBlockSizes) -> None:
        super().__init__()
        query_width = sizes.n_heads * sizes.head_dim
        key_width = sizes.n_kv_heads * sizes.head_dim
        input_width = sizes.input_width or sizes.width
        self.head_dim = sizes.head_dim
        self.n_heads = sizes.n_heads
        self.n_kv_heads = sizes.n_kv_heads
        self.q_proj = nn.Linear(input_width, query_width, bias=sizes.qkv_bias)
        self.k_proj = nn.Linear(input_width, key_width, bias=sizes.qkv_bias)
        self.v_proj = nn.Linear(input_width, key_width, bias=sizes.qkv_bias)
        self.o_proj = nn.Linear(query_width, sizes.width, bias=sizes.output_bias)
        if sizes.query_key_norm:
            self.q_norm = RMSNorm(sizes.head_dim, eps=sizes.norm_eps)
            self.k_norm = RMSNorm(sizes.head_dim, eps=sizes.norm_eps)

    def _heads(self, name: str, normed: Tensor, scale: Tensor | None = None) -> Tensor:
        """Project [B, T, E] to heads without rotating them: [B, H or H_kv, T, d].

        ``name`` is ``"q"``, ``"k"`` or ``"v"``. If ``scale`` [E] is given, the input ``normed`` is
        multiplied by it. A scale is allowed only if the input needs no gradient.
        """
        layer: nn.Linear = getattr(self, f"{name}_proj")
        if scale is None:
            projected = layer(normed)
        else:
            # Multiply the columns of the weight by the scale. The result is the same as if the
            # input were multiplied.
            projected = F.linear(normed, layer.weight * scale, layer.bias)
        heads = projected.unflatten(-1, (-1, self.head_dim))
        norm = getattr(self, f"{name}_norm", None)
        normed_heads: Tensor = heads if norm is None else norm(heads)
        return normed_heads.transpose(1, 2)

    def queries(
        self, normed: Tensor, rotation: Rotation | None, scale: Tensor | None = None
    ) -> Tensor:
        """Project [B, Q, E] to queries [B, H, Q, d].

        Args:
            normed: [B, Q, E], the output of the norm.
            rotation: The rotation of the queries. If None, they are not rotated.
            scale: [E], factors by which the input is multiplied. If None, it is not multiplied.
        """
        heads = self._heads("q", normed, scale)
        return heads if rotation is None else rotate(heads, rotation)

    def keys_values(
        self, normed: Tensor, rotation: Rotation, scale: Tensor | None = None
    ) -> KeysValues:
        """Project [B, S, E] to rotated keys and to values, each [B, H_kv, S, d].

        If ``scale`` [E] is given, the input is multiplied by it.
        """
        return rotate(self._heads("k", normed, scale), rotation), self._heads("v", normed, scale)

    def project(self, normed: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Project [B, T, E] to rotated queries, rotated keys, and values."""
        if torch.is_grad_enabled():
            return self.queries(normed, rotation), *self.keys_values(normed, rotation)
        # Rotate queries and keys together to save kernel launches. A draft step spends most of its
        # time launching kernels.
        q = self._heads("q", normed)
        k = self._heads("k", normed)
        v = self._heads("v", normed)
        q, k = rotate(torch.cat((q, k), dim=1), rotation).split((q.shape[1], k.shape[1]), dim=1)
        return q, k, v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AnyMask) -> Tensor:
        """Attend, and apply the output projection.

        Args:
            q: [B, H, Q, d].
            k: [B, H_kv, S, d].
            v: [B, H_kv, S, d].
            mask: Which keys each query may attend to; see :func:`.attention.attend`.
        """
        out: Tensor = self.o_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return out


class GatedMLP(nn.Module):
    """The MLP of Llama: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, mlp_width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, mlp_width, bias=bias)
        self.up_proj = nn.Linear(width, mlp_width, bias=bias)
        self.down_proj = nn.Linear(mlp_width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to x [..., E]."""
        out: Tensor = self.down_proj(self.gated(x))
        return out

    def gated(self, x: Tensor) -> Tensor:
        """Compute the input of the down projection, [..., MLP width], from x [..., E]."""
        gated: Tensor = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return gated


class DecoderBlock(nn.Module):
    """Pre-norm decoder block: x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, sizes: DecoderBlockSizes) -> None:
        super().__init__()
        self.self_attn = Attention(sizes)
        self.mlp = GatedMLP(sizes.width, sizes.mlp_width, sizes.mlp_bias)
        self.input_layernorm = (
            RMSNorm(sizes.width, eps=sizes.norm_eps) if sizes.input_norm else nn.Identity()
        )
        self.post_attention_layernorm = RMSNorm(sizes.width, eps=sizes.norm_eps)

    def normed(self, x: Tensor) -> Tensor:
        """Normalise the input [..., E] of the QKV projections."""
        return self.input_layernorm(x)

    def residual(self, x: Tensor) -> Tensor:
        """Return the residual [..., E], to which the output of attention is added."""
        return x

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Normalise x [B, Q, E] and project it to rotated queries [B, H, Q, d]."""
        return self.self_attn.queries(self.normed(x), rotation)

    def keys_values(self, source: Tensor, rotation: Rotation) -> KeysValues:
        """Normalise ``source`` [B, S, E] and project it to rotated keys and to values.

        Keys and values have the shape [B, H_kv, S, d].
        """
        return self.self_attn.keys_values(self.normed(source), rotation)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        mask: AnyMask,
    ) -> Tensor:
        """Run the block on x [B, Q, E]. Its queries attend to the given keys and values.

        Args:
            x: [B, Q, E], the source of the queries.
            rotation: Rotation of the queries' positions, [B or 1, Q, d].
            keys: [B, H_kv, S, d], rotated.
            values: [B, H_kv, S, d].
            mask: Which keys each query may attend to; see :func:`.attention.attend`.
        """
        return self.finish(x, self.self_attn(self.queries(x, rotation), keys, values, mask))

    def attend_cached(
        self, x: Tensor, rotation: Rotation, append: AppendKV, mask: AnyMask
    ) -> Tensor:
        """Run the block on x [B, Q, E]. Its tokens attend to a KV cache and to each other.

        ``append`` adds the keys and values of x to the cache, and returns the keys and values of
        all tokens in the cache. ``mask`` says which of these tokens each query may attend to.
        """
        if (fused := self._current(x)) is None:
            queries, keys, values = self.self_attn.project(self.normed(x), rotation)
            return self.finish(x, self.self_attn(queries, *append(keys, values), mask))
        return self._attend_fused(fused, x, rotation, append, mask)

    def attend_last(self, x: Tensor, rotation: Rotation, append: AppendKV) -> Tensor:
        """Compute the output of :meth:`attend_cached`, without a mask, for the last token only.

        The input x is [B, Q, E], and the result is [B, 1, E]. The keys and values of all Q tokens
        are added to the cache.
        """
        fused = self._current(x) if x.shape[1] <= _FEW_TOKENS else None
        if fused is not None:
            return self._attend_fused(fused, x, rotation, append, None, n_last=1)
        keys, values = append(*self.keys_values(x, rotation))
        cosines, sines = rotation
        return self.forward(x[:, -1:], (cosines[:, -1:], sines[:, -1:]), keys, values, None)

    def _attend_fused(
        self,
        fused: FusedWeights,
        x: Tensor,
        rotation: Rotation,
        append: AppendKV,
        mask: AnyMask,
        # The output is computed only for this number of tokens at the end of x. If 0, the output is
        # computed for all tokens.
        n_last: int = 0,
    ) -> Tensor:
        has_own_norms = type(self).normed is not DecoderBlock.normed
        block_input = self.normed(x) if has_own_norms else x
        cosines, sines = rotation
        queries, keys, values = fused.project(
            block_input, cosines.unsqueeze(2), sines.unsqueeze(2), has_own_norms
        )
        chosen = queries[:, :, -n_last:]
        attended = attend(chosen, *append(keys, values), mask).transpose(1, 2).flatten(2)
        return fused.finish(attended, self.residual(x[:, -n_last:]))

    def fuse(self) -> None:
        """Prepare fused products (:mod:`.fused`) for drafting, if the weights are packed.

        The fused products may use rounded weights, because drafts need not be exact.
        """
        known: FusedWeights | None = vars(self).get("fused")
        if known is not None and known.is_current():
            return
        has_head_norms = hasattr(self.self_attn, "q_norm")
        vars(self)["fused"] = None if has_head_norms else fuse_weights(self, is_exact=False)

    def _current(self, x: Tensor) -> FusedWeights | None:
        fused: FusedWeights | None = vars(self).get("fused")
        if (
            fused is None
            or torch.is_grad_enabled()
            or x.dtype != torch.float32
            or not fused.is_current()
        ):
            return None
        return fused

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy or a pickle of this block gets.

        The fused products are left out, because they cannot be copied.
        """
        return {name: value for name, value in vars(self).items() if name != "fused"}

    def attend_self_means(self, x: Tensor, rotation: Rotation, n_groups: int = 1) -> Tensor:
        """Run the block on x [B, T, E] without a mask and a cache, and average groups of outputs.

        Each of the G groups consists of consecutive tokens. The result is [B, G, E].
        """
        norm: Any = self.input_layernorm
        has_own_norms = type(self).normed is not DecoderBlock.normed
        if has_own_norms or x.requires_grad or not torch.is_grad_enabled():
            normed = self.normed(x)
            scale = None
        else:
            # The input x is read from a store, so it needs no gradient. Multiply the norm's weight
            # into the projections and not into x. Then the normalised x needs no gradient either.
            normed = F.rms_norm(x, norm.normalized_shape, eps=norm.eps)
            scale = norm.weight
        keys, values = self.self_attn.keys_values(normed, rotation, scale)
        queries = self.self_attn.queries(normed, rotation, scale)
        # The down projection and the addition of the residual are linear. So they can be applied to
        # the mean of each group, which takes less time than applying them to each token.
        x = self.residual(x) + self.self_attn(queries, keys, values, None)
        # MLP activations, [B, T, MLP width].
        gated = self.mlp.gated(self.post_attention_layernorm(x))
        out: Tensor = group_means(x, n_groups) + self.mlp.down_proj(group_means(gated, n_groups))
        return out

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run the operations of the block that follow attention. The result is [B, Q, E].

        Args:
            x: [B, Q, E], the input of the block.
            attended: [B, Q, E], the output of attention.
        """
        x = self.residual(x) + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def group_means(x: Tensor, n_groups: int) -> Tensor:
    """Average groups of consecutive tokens: [B, T, E] becomes [B, n_groups, E].

    If T is not a multiple of ``n_groups``, each of the first groups has one token more.
    """
    return torch.stack([group.mean(dim=1) for group in x.tensor_split(n_groups, dim=1)], dim=1)
