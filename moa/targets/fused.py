"""Decoder layers like Llama's in fewer operations, for decoding on a CPU.

Calls of a few tokens spend as long between the products as in them. So the products before attention are one, what
follows a product (SiLU, a gate, the residual) is computed with it, and queries and keys are rotated together. That is
done in float32 alone: elsewhere results would be rounded in other places than the model rounds them.

Shapes: B rows, n tokens, E width, H query heads, H_kv key/value heads, d head dim, D = (H + 2 * H_kv) * d.
"""

from collections.abc import Sequence
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
_PRODUCTS = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_JOINED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION: Any = AttentionInterface()
_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass
class _Joined:
    """The products before attention as one."""

    packed: Tensor
    bias: Tensor | None  # [D]
    weights: list[Tensor]  # of the whole layer
    states: list[tuple[int, int]]  # of the weights, when they were joined

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
        return _forward(self, joined, hidden_states, **kwargs)

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
        for name in _JOINED:
            vars(layer.get_submodule(name)).pop("packed", None)


class FusedBody:
    """The text model of a target whose layers are all fused, without what transformers does around them.

    It makes no masks: which tokens see which is up to the attention function and what that is given.
    """

    def __init__(self, model: Any) -> None:
        body: Any = text_model(model)
        self._embed, self._rotary, self._norm = body.get_input_embeddings(), body.rotary_emb, body.norm
        self._layers = [(layer, vars(layer)["joined"]) for layer in decoder_layers(model)]

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
        self, tokens: Tensor, positions: Tensor, watched_layers: Sequence[int] = (), **kwargs: Any
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run tokens [B, n] at positions [B, n]: hidden states [B, n, E], and the outputs of watched layers."""
        x, outputs = self._embed(tokens), {}
        rotation = self._rotary(x, position_ids=positions)
        for index, (layer, joined) in enumerate(self._layers):
            x = _forward(layer, joined, x, rotation, **kwargs)
            if index in watched_layers:
                outputs[index] = x
        return F.rms_norm(x, x.shape[-1:], self._norm.weight, self._norm.variance_epsilon), outputs


@torch.inference_mode()
def _join(layer: Any) -> _Joined | None:
    """Join the products before attention of a layer of Llama's form; None for others, and where nothing is gained."""
    try:
        products = [layer.get_submodule(name) for name in _PRODUCTS]
        joined = [layer.get_submodule(name) for name in _JOINED]
        norms = [layer.get_submodule(name).weight for name in _NORMS]
    except AttributeError:
        return None
    if any(type(one) is not PackedLinear or one.weight.dtype != torch.float32 for one in products):
        return None
    if any(type(one) not in (PackedLinear, nn.Linear) for one in joined) or norms[0].dtype != torch.float32:
        return None
    biases = [one.bias for one in joined]
    if len({bias is None for bias in biases}) > 1:
        return None
    bias = None if biases[0] is None else torch.cat(biases)
    weights = [one.weight for one in (*joined, *products)]
    return _Joined(laid_out(torch.cat(weights[:3])), bias, weights, [state_of(weight) for weight in weights])


@torch.inference_mode()
def _is_right(layer: Any, joined: _Joined) -> bool:
    width, head_dim = layer.self_attn.q_proj.in_features, layer.self_attn.head_dim
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, width, generator=generator)
    angles = torch.randn(1, 3, head_dim, generator=generator)
    given: dict[str, Any] = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
    given |= {"past_key_values": None, "position_ids": torch.arange(3)[None] + _FAR}
    try:
        expected, found = layer(x, **given), _forward(layer, joined, x, **given)
        return torch.allclose(found, expected, rtol=0, atol=_MAX_ERROR * float(expected.abs().max()))
    except Exception:  # noqa: BLE001 - a layer of another form may fail in any way, each of which means no
        return False


def _forward(
    layer: Any,
    joined: _Joined,
    x: Tensor,  # [B, n, E]
    position_embeddings: tuple[Tensor, Tensor],  # cosines and sines [B or 1, n, d]
    attention_mask: Any = None,
    past_key_values: Any = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> Tensor:
    attention, mlp, width = layer.self_attn, layer.mlp, x.shape[-1:]
    first, second, head_dim = layer.input_layernorm, layer.post_attention_layernorm, attention.head_dim
    normed = F.rms_norm(x, width, first.weight, first.variance_epsilon)
    heads = product(normed, joined.packed, joined.bias).unflatten(-1, (-1, head_dim))  # [B, n, H + 2 * H_kv, d]
    n_kv_heads = attention.k_proj.out_features // head_dim
    rotated, v = heads[:, :, :-n_kv_heads], heads[:, :, -n_kv_heads:].transpose(1, 2)
    cosines, sines = (each.unsqueeze(2) for each in position_embeddings)
    left, right = rotated.chunk(2, dim=-1)
    rotated = torch.addcmul(rotated * cosines, torch.cat((-right, left), dim=-1), sines)
    q, k = rotated[:, :, :-n_kv_heads].transpose(1, 2), rotated[:, :, -n_kv_heads:].transpose(1, 2)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, attention.layer_idx)
    attend = _ATTENTION[attention.config._attn_implementation]
    attended, _ = attend(attention, q, k, v, attention_mask, dropout=0.0, scaling=attention.scaling, **kwargs)
    attended = attended.reshape(*x.shape[:-1], -1)
    x = _with(attended, attention.o_proj, x, "add")
    normed = F.rms_norm(x, width, second.weight, second.variance_epsilon)
    gate = product(normed, mlp.gate_proj.packed, mlp.gate_proj.bias, "swish")
    return _with(_with(normed, mlp.up_proj, gate, "mul"), mlp.down_proj, x, "add")


def _with(x: Tensor, layer: Any, other: Tensor, operation: str) -> Tensor:
    """Multiply by a layer's weight, and add the result to another tensor or multiply it by that."""
    result: Tensor = OPERATIONS._linear_pointwise.binary(x, other, layer.packed, layer.bias, operation)
    return result
