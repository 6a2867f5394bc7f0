"""Decoder layers of a target in fewer operations, for decoding on a CPU, see :mod:`..nn.joined`.

Shapes: B rows, n tokens, E width, H query heads, H_kv key/value heads, d head dim.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from typing_extensions import override

from ..nn.joined import JOINED, Joined, Weights, join, normed, prepared_norm
from ..nn.packed import pack
from .families import decoder_layers, text_model

# Of the largest value: float32 rounds by some 1e-6 in another order, a layer of another form is
# wrong by about 1.
_MAX_ERROR = 1e-4
_FAR = 1 << 17  # a position at which layers that scale by positions do so
_ATTENTION: Any = AttentionInterface()
_LOG = logging.getLogger(__name__)

RunLayers = Callable[[Tensor, Tensor, Tensor, list[Weights]], list[Tensor]]
"""Takes x [B, n, E], cosines and sines [B or 1, n, 1, d], and weights; returns the output [B, n, E] of each layer."""


class _FusedLayer(nn.Module):
    """A decoder layer that computes what its class does, while its weights are what they were."""

    @override
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        joined: Joined | None = vars(self).get("joined")
        if joined is None or args or torch.is_grad_enabled() or not joined.is_current():
            return super().forward(hidden_states, *args, **kwargs)
        # a part of each head is rotated
        if kwargs["position_embeddings"][0].shape[-1] != joined.attention.head_dim:
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
    n_wrong = 0
    for layer in decoder_layers(model):
        known: Joined | None = vars(layer).pop("joined", None)
        joined = known if known is not None and known.is_current() else join(layer)
        if joined is None:
            continue
        if joined is not known and not _is_right(layer, joined):
            n_wrong += 1
            continue
        own = type(layer)
        if not isinstance(layer, _FusedLayer):
            layer.__class__ = fused.setdefault(
                own, type(f"Fused{own.__name__}", (_FusedLayer, own), {})
            )
        vars(layer)["joined"] = joined
        for name in itertools.chain(*JOINED):
            vars(layer.get_submodule(name)).pop("packed", None)
    if n_wrong:
        _LOG.warning(
            "decoding is slower than it could be: %d layers give other results when they are fused",
            n_wrong,
        )


class FusedBody:
    """The text model of a target whose layers are all fused, without what transformers does around them.

    It makes no masks: which tokens see which is up to the attention function and what that is given.
    """

    def __init__(self, model: Any) -> None:
        body: Any = text_model(model)
        self._embed = body.get_input_embeddings()
        self._rotary = body.rotary_emb
        self._norm = body.norm
        self._layers: list[Joined] = [vars(layer)["joined"] for layer in decoder_layers(model)]
        own = {
            (one.n_kv_heads, one.attention.head_dim, one.attention.scaling) for one in self._layers
        }
        # in query heads too
        is_alike = len({one.attention.o_proj.weight.shape for one in self._layers}) == 1
        # H_kv, d, scale of scores, if of all layers
        self.heads = own.pop() if is_alike and len(own) == 1 else None
        self._weights = [(joined.norms, joined.products) for joined in self._layers]
        self._last_norm = prepared_norm(self._norm)

    @classmethod
    def of(cls, model: Any) -> "FusedBody | None":
        """Make it of a model, if it gives for a few tokens what the model itself gives; None for others."""
        tokens = positions = torch.arange(3)[None]
        try:
            own = cls(model)
            with torch.inference_mode():
                given = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
                expected, (found, _) = (
                    text_model(model)(**given).last_hidden_state,
                    own(tokens, positions),
                )
            is_right = torch.allclose(
                found, expected, rtol=0, atol=_MAX_ERROR * float(expected.abs().max())
            )
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
        x = self._embed(tokens)
        outputs = {}
        rotation = _rotation(*self._rotary(x, position_ids=positions))
        if run_layers is not None:
            every = run_layers(x, *rotation, self._weights)
            x = every[-1]
            outputs = {index: every[index] for index in watched_layers}
        for index, joined in enumerate(self._layers if run_layers is None else ()):
            x = _forward(
                joined,
                x,
                rotation,
                wanted=wanted if index == len(self._layers) - 1 else None,
                **kwargs,
            )
            if index in watched_layers:
                outputs[index] = x
        return normed(x, self._last_norm), outputs


@torch.inference_mode()
def _is_right(layer: Any, joined: Joined) -> bool:
    width = layer.self_attn.q_proj.in_features
    head_dim = layer.self_attn.head_dim
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, width, generator=generator)
    angles = torch.randn(1, 3, head_dim, generator=generator)
    rotation = angles.cos(), angles.sin()
    given: dict[str, Any] = {"attention_mask": None, "past_key_values": None}
    given["position_ids"] = torch.arange(3)[None] + _FAR
    try:
        expected = layer(x, position_embeddings=rotation, **given)
        found = _forward(joined, x, _rotation(*rotation), **given)
        return torch.allclose(
            found, expected, rtol=0, atol=_MAX_ERROR * float(expected.abs().max())
        )
    except Exception:  # noqa: BLE001 - a layer of another form may fail in any way, each of which means no
        return False


def _rotation(cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Prepare cosines and sines [B or 1, n, d] for heads whose halves are swapped: each [B or 1, n, 1, d]."""
    left, right = sines.chunk(2, dim=-1)
    return cosines.unsqueeze(2), torch.cat((-left, right), dim=-1).unsqueeze(2)


def _forward(
    joined: Joined,
    x: Tensor,  # [B, n, E]
    position_embeddings: tuple[Tensor, Tensor],  # of _rotation
    attention_mask: Any = None,
    past_key_values: Any = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    # [m] int64, tokens whose output is needed; of others keys and values alone are
    wanted: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    attention = joined.attention
    q, k, v = joined.project(x, *position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, attention.layer_idx)
    attend = _ATTENTION[attention.config._attn_implementation]
    attended, _ = attend(
        attention, q, k, v, attention_mask, dropout=0.0, scaling=attention.scaling, **kwargs
    )
    attended = attended.reshape(*x.shape[:-1], -1)
    if wanted is not None:
        attended = attended.index_select(1, wanted)
        x = x.index_select(1, wanted)
    return joined.finish(attended, x)
