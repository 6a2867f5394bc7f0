"""Decoder layers like Llama's in fewer operations, for decoding on a CPU.

Calls of a few tokens spend as long between the products as in them. So the products before attention are one, those of
a gate and what it gates too, norms lend them their weights, residuals are added with a product, and queries and keys
are rotated together. That is done in float32 alone: elsewhere results would be rounded in other places than the model
rounds them.

Shapes: B rows, n tokens, E width, H query heads, H_kv key/value heads, d head dim, D = (H + 2 * H_kv) * d.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from typing_extensions import override

from ..nn.packed import OPERATIONS, PackedLinear, laid_out, pack, product, state_of
from .families import decoder_layers, text_model

# Of the largest value: float32 rounds by some 1e-6 in another order, a layer of another form is wrong by about 1.
_MAX_ERROR = 1e-4
_FAR = 1 << 17  # a position at which layers that scale by positions do so
_PRODUCTS = ("self_attn.o_proj", "mlp.down_proj")
_JOINED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
_ATTENTION: Any = AttentionInterface()
_NORMS = ("input_layernorm", "post_attention_layernorm")


Product = tuple[Tensor, Tensor | None]
"""A laid out weight and a bias."""


Weights = tuple[tuple[Tensor, Tensor], tuple[Product, Product, Product, Product]]
"""Of a layer: what :func:`before_attention` and :func:`after_attention` take as floors, and their products."""
RunLayers = Callable[[Tensor, Tensor, Tensor, list[Weights]], list[Tensor]]
"""Takes x [B, n, E], cosines and sines [B or 1, n, 1, d], and weights; returns the output [B, n, E] of each layer."""


@dataclass
class _Joined:
    """A layer's products, some of them as one."""

    products: tuple[Product, Product, Product, Product]  # of _JOINED and _PRODUCTS
    weights: list[Tensor]  # of the whole layer
    states: list[tuple[int, int]]  # of the weights, when they were joined
    # What else the layer computes with, since asking modules for it takes as long as a small operation.
    attention: Any
    n_kv_heads: int
    floors: tuple[Tensor, Tensor]  # of _NORMS, what a row's length is not less than; their weights are in the products

    def is_current(self) -> bool:
        """Whether the weights are what they were."""
        return [state_of(weight) for weight in self.weights] == self.states


class _FusedLayer(nn.Module):
    """A decoder layer that computes what its class does, while its weights are what they were."""

    @override
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        joined: _Joined | None = vars(self).get("joined")
        if joined is None or args or torch.is_grad_enabled() or not joined.is_current():
            return super().forward(hidden_states, *args, **kwargs)
        if kwargs["position_embeddings"][0].shape[-1] != joined.attention.head_dim:  # a part of each head is rotated
            return super().forward(hidden_states, *args, **kwargs)
        kwargs["position_embeddings"] = _rotation(*kwargs["position_embeddings"])
        return _forward(joined, hidden_states, **kwargs)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a layer of the model's own class: joined weights cannot be."""
        state = {name: value for name, value in vars(self).items() if name != "joined"}
        return object.__new__, (type(self).__bases__[1],), state


def fuse(model: nn.Module) -> None:
    """Lay out a model's weights as :func:`.pack` does, and compute layers like Llama's in fewer operations.

    A layer is taken if its result for random tokens stays what it was. For weights that don't change any more, as
    :func:`.pack` says it; a weight that is replaced by another one is not seen.
    """
    pack(model)
    fused: dict[type, type] = {}
    for layer in decoder_layers(model):
        known: _Joined | None = vars(layer).pop("joined", None)
        joined = known if known is not None and known.is_current() else _join(layer)
        if joined is None or not (joined is known or _is_right(layer, joined)):
            continue
        own = type(layer)
        if not isinstance(layer, _FusedLayer):
            layer.__class__ = fused.setdefault(own, type(f"Fused{own.__name__}", (_FusedLayer, own), {}))
        vars(layer)["joined"] = joined
        for name in itertools.chain(*_JOINED):
            vars(layer.get_submodule(name)).pop("packed", None)


class FusedBody:
    """The text model of a target whose layers are all fused, without what transformers does around them.

    It makes no masks: which tokens see which is up to the attention function and what that is given.
    """

    def __init__(self, model: Any) -> None:
        body: Any = text_model(model)
        self._embed, self._rotary, self._norm = body.get_input_embeddings(), body.rotary_emb, body.norm
        self._layers: list[_Joined] = [vars(layer)["joined"] for layer in decoder_layers(model)]
        own = {(one.n_kv_heads, one.attention.head_dim, one.attention.scaling) for one in self._layers}
        is_alike = len({one.attention.o_proj.weight.shape for one in self._layers}) == 1  # in query heads too
        self.heads = own.pop() if is_alike and len(own) == 1 else None  # H_kv, d, scale of scores, if of all layers
        self._weights = [(joined.floors, joined.products) for joined in self._layers]
        width = self._norm.weight.numel()
        self._floor = torch.tensor((width * self._norm.variance_epsilon) ** 0.5)
        self._scale = self._norm.weight * width**0.5

    @classmethod
    def of(cls, model: Any) -> "FusedBody | None":
        """Make it of a model, if it gives for a few tokens what the model itself gives; None for others."""
        tokens = positions = torch.arange(3)[None]
        try:
            own = cls(model)
            with torch.inference_mode():
                given = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
                expected, (found, _) = text_model(model)(**given).last_hidden_state, own(tokens, positions)
            is_right = torch.allclose(found, expected, rtol=0, atol=_MAX_ERROR * float(expected.abs().max()))
        except Exception:  # noqa: BLE001 - a model of another form may fail in any way, each of which means no
            return None
        return own if is_right else None

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        watched_layers: Sequence[int] = (),
        wanted: Tensor | None = None,
        run_layers: RunLayers | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run tokens [B, n] at positions [B, n]: hidden states [B, n, E], and the outputs of watched layers.

        Args:
            wanted: [m] int64, tokens of which alone hidden states [B, m, E] are given; the last layer must be no
                watched one.
            run_layers: computes all layers in place of the attention function; see :data:`RunLayers`.
        """
        x, outputs = self._embed(tokens), {}
        rotation = _rotation(*self._rotary(x, position_ids=positions))
        if run_layers is not None:
            every = run_layers(x, *rotation, self._weights)
            x, outputs = every[-1], {index: every[index] for index in watched_layers}
        for index, joined in enumerate(self._layers if run_layers is None else ()):
            x = _forward(joined, x, rotation, wanted=wanted if index == len(self._layers) - 1 else None, **kwargs)
            if index in watched_layers:
                outputs[index] = x
        return _unit(x, self._floor) * self._scale, outputs


@torch.inference_mode()
def _join(layer: Any) -> _Joined | None:
    """Join products of a layer of Llama's form; None for others, and where nothing is gained."""
    try:
        products = [layer.get_submodule(name) for name in _PRODUCTS]
        joined = [[layer.get_submodule(name) for name in names] for names in _JOINED]
        norms = [(one.weight, one.variance_epsilon) for one in map(layer.get_submodule, _NORMS)]
        n_kv_heads = layer.self_attn.k_proj.out_features // layer.self_attn.head_dim
    except AttributeError:
        return None
    if any(type(one) is not PackedLinear or one.weight.dtype != torch.float32 for one in (*products, *joined[1])):
        return None
    if any(type(one) not in (PackedLinear, nn.Linear) for one in joined[0]) or norms[0][0].dtype != torch.float32:
        return None
    if any(len({one.bias is None for one in group}) > 1 for group in joined):
        return None
    # A norm divides by the root of the squares' mean: that of their sum, over a root that joins the norm's weight.
    width = norms[0][0].numel()
    laid = [
        (
            laid_out(torch.cat([one.weight for one in group]) * (weight * width**0.5)),
            None if group[0].bias is None else torch.cat([one.bias for one in group]),
        )
        for group, (weight, _) in zip(joined, norms, strict=True)
    ]
    laid += [(one.packed, one.bias) for one in products]
    before, gates, o, down = laid
    weights = [one.weight for one in itertools.chain(*joined, products)] + [weight for weight, _ in norms]
    first, second = (torch.tensor((width * epsilon) ** 0.5) for _, epsilon in norms)
    states = [state_of(weight) for weight in weights]
    return _Joined((before, gates, o, down), weights, states, layer.self_attn, n_kv_heads, (first, second))


@torch.inference_mode()
def _is_right(layer: Any, joined: _Joined) -> bool:
    width, head_dim = layer.self_attn.q_proj.in_features, layer.self_attn.head_dim
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, width, generator=generator)
    angles = torch.randn(1, 3, head_dim, generator=generator)
    rotation = angles.cos(), angles.sin()
    given: dict[str, Any] = {"attention_mask": None, "past_key_values": None}
    given["position_ids"] = torch.arange(3)[None] + _FAR
    try:
        expected = layer(x, position_embeddings=rotation, **given)
        found = _forward(joined, x, _rotation(*rotation), **given)
        return torch.allclose(found, expected, rtol=0, atol=_MAX_ERROR * float(expected.abs().max()))
    except Exception:  # noqa: BLE001 - a layer of another form may fail in any way, each of which means no
        return False


def _rotation(cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Prepare cosines and sines [B or 1, n, d] for heads whose halves are swapped: each [B or 1, n, 1, d]."""
    left, right = sines.chunk(2, dim=-1)
    return cosines.unsqueeze(2), torch.cat((-left, right), dim=-1).unsqueeze(2)


def _forward(
    joined: _Joined,
    x: Tensor,  # [B, n, E]
    position_embeddings: tuple[Tensor, Tensor],  # of _rotation
    attention_mask: Any = None,
    past_key_values: Any = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    wanted: Tensor | None = None,  # [m] int64, tokens whose output is needed; of others keys and values alone are
    **kwargs: Any,
) -> Tensor:
    attention, n_kv_heads, (first, second) = joined.attention, joined.n_kv_heads, joined.floors
    before, gates, o, down = joined.products
    q, k, v = before_attention(x, first, before, *position_embeddings, n_kv_heads, attention.head_dim)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, attention.layer_idx)
    attend = _ATTENTION[attention.config._attn_implementation]
    attended, _ = attend(attention, q, k, v, attention_mask, dropout=0.0, scaling=attention.scaling, **kwargs)
    attended = attended.reshape(*x.shape[:-1], -1)
    if wanted is not None:
        attended, x = attended.index_select(1, wanted), x.index_select(1, wanted)
    return after_attention(attended, x, second, gates, o, down)


# TorchScript compiles these too (serving/engine/steps.py), so they keep to what it knows.


def before_attention(
    x: Tensor, floor: Tensor, joined: Product, cosines: Tensor, sines: Tensor, n_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Make rotated queries [B, H, n, d], rotated keys and values [B, H_kv, n, d] of a layer's input [B, n, E]."""
    heads = product(_unit(x, floor), *joined).unflatten(-1, (-1, head_dim))
    rotated, v = heads[:, :, :-n_kv_heads], heads[:, :, -n_kv_heads:].transpose(1, 2)
    rotated = torch.addcmul(rotated * cosines, rotated.roll(head_dim // 2, -1), sines).transpose(1, 2)
    return rotated[:, :-n_kv_heads], rotated[:, -n_kv_heads:], v


def after_attention(attended: Tensor, x: Tensor, floor: Tensor, gates: Product, o: Product, down: Product) -> Tensor:
    """Compute the rest of a layer, of what was attended [B, n, H * d] and the layer's input [B, n, E]."""
    x = _added(attended, x, *o)
    gate, up = product(_unit(x, floor), *gates).chunk(2, dim=-1)
    return _added(F.silu(gate).mul_(up), x, *down)


def _unit(x: Tensor, floor: Tensor) -> Tensor:
    """Divide rows [B, n, E] by their length; PyTorch's own norm takes three times as many operations."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.hypot(floor)


def _added(x: Tensor, other: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by a laid out weight, and add the result to another tensor."""
    result: Tensor = OPERATIONS._linear_pointwise(x, other, packed, bias, "add")
    return result
