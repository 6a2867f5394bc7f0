"""Runs a target's decoder layers in fewer operations. This makes decoding on a CPU faster.

The fused operations are in :mod:`..nn.fused`.

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

from ..nn.fused import FUSED_PRODUCTS, FusedWeights, Weights, fuse_weights, normed, prepared_norm
from ..nn.packed import pack
from .families import decoder_layers, text_model

# Maximum error of the outputs of a fused layer, relative to the largest output. With a larger
# error, the layer is not fused. Fused layers execute the float32 operations in another order, which
# causes an error of about 1e-6. If the original layer computes another formula, the error is about
# 1.
_MAX_ERROR = 1e-4
# The test of a fused layer uses tokens from this position on. Some layers scale attention by a
# factor that depends on the position, which fused layers do not. At low positions the factor is 1,
# so the test would not detect these layers there.
_FAR = 1 << 17
_ATTENTION: Any = AttentionInterface()
_LOG = logging.getLogger(__name__)

RunLayers = Callable[[Tensor, Tensor, Tensor, list[Weights]], list[Tensor]]
"""A function that runs all layers, and returns the output [B, n, E] of each layer.

It takes the input x [B, n, E] of the first layer, the cosines and sines of RoPE [B or 1, n, 1, d],
and the weights of all layers.
"""


class _FusedLayer(nn.Module):
    """A decoder layer that gives the same results as its base class, but uses fused weights.

    If the weights have changed since they were fused, the layer runs the code of its base class.
    """

    @override
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        fused: FusedWeights | None = vars(self).get("fused")
        if (
            fused is None
            or args
            or torch.is_grad_enabled()
            or not fused.is_current()
            # If a layer applies RoPE to only a part of each head, it runs without fused operations.
            or kwargs["position_embeddings"][0].shape[-1] != fused.attention.head_dim
        ):
            return super().forward(hidden_states, *args, **kwargs)
        kwargs["position_embeddings"] = _rotation(*kwargs["position_embeddings"])
        return _forward(fused, hidden_states, **kwargs)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make copies and pickles of this layer as layers of the base class.

        Fused weights cannot be pickled.
        """
        state = vars(self).copy()
        state.pop("fused", None)
        return object.__new__, (type(self).__bases__[1],), state


def fuse(model: nn.Module) -> None:
    """Pack a model's weights with :func:`.pack`, and fuse the operations of layers like Llama's.

    A layer is fused only if it gives the same results for random inputs as before. The model's
    weights must not change afterwards, as for :func:`.pack`. If a weight is replaced by another
    tensor, this is not detected.
    """
    pack(model)
    fused_classes: dict[type, type] = {}
    n_wrong = 0
    for layer in decoder_layers(model):
        known: FusedWeights | None = vars(layer).pop("fused", None)
        fused = known if known is not None and known.is_current() else fuse_weights(layer)
        if fused is None:
            continue
        if fused is not known and not _is_right(layer, fused):
            n_wrong += 1
            continue
        layer_class = type(layer)
        if not isinstance(layer, _FusedLayer):
            layer.__class__ = fused_classes.setdefault(
                layer_class, type(f"Fused{layer_class.__name__}", (_FusedLayer, layer_class), {})
            )
        vars(layer)["fused"] = fused
        for name in itertools.chain(*FUSED_PRODUCTS):
            vars(layer.get_submodule(name)).pop("packed", None)
    if n_wrong:
        _LOG.warning(
            "decoding is slower than it could be, because fusing the weights of %d layers "
            "(computing them as one matrix product) would change the results",
            n_wrong,
        )


class FusedBody:
    """A target's text model that runs only fused layers, without the overhead of transformers.

    The fused body does not build attention masks. The caller chooses the arguments of the attention
    function, and these arguments decide to which tokens each token attends.
    """

    def __init__(self, model: Any) -> None:
        body: Any = text_model(model)
        self._embed = body.get_input_embeddings()
        self._rotary = body.rotary_emb
        self._layers: list[FusedWeights] = [vars(layer)["fused"] for layer in decoder_layers(model)]
        # The shape of ``o_proj.weight`` depends on the number of query heads. So if the shapes are
        # equal, so are the numbers of query heads.
        sizes: set[tuple[int, int, float, torch.Size]] = set()
        for fused in self._layers:
            attention = fused.attention
            shape = attention.o_proj.weight.shape
            sizes.add((fused.n_kv_heads, attention.head_dim, attention.scaling, shape))
        # A tuple of the number of KV heads, the head dim and the scale of attention scores, which
        # are the same in all layers. None if layers differ.
        self.heads = sizes.pop()[:3] if len(sizes) == 1 else None
        self._weights = [(fused.norms, fused.products) for fused in self._layers]
        self._last_norm = prepared_norm(body.norm)

    @classmethod
    def of(cls, model: Any) -> "FusedBody | None":
        """Make the fused body of a model. Returns None if its hidden states would be wrong."""
        tokens = positions = torch.arange(3)[None]
        try:
            fused_body = cls(model)
            with torch.inference_mode():
                inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
                expected = text_model(model)(**inputs).last_hidden_state
                hidden, _ = fused_body(tokens, positions)
            is_right = torch.allclose(
                hidden, expected, rtol=0, atol=_MAX_ERROR * float(expected.abs().max())
            )
        except Exception:  # noqa: BLE001 - a model of another form may raise any error
            return None
        if not is_right:
            _LOG.warning(
                "decoding is slower than it could be, because the faster code of moa-data would "
                "change the results, so transformers runs the target's layers"
            )
            return None
        return fused_body

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        watched_layers: Sequence[int] = (),
        wanted: Tensor | None = None,
        run_layers: RunLayers | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute hidden states of tokens [B, n] at positions [B, n].

        Args:
            tokens: [B, n] token ids.
            positions: [B, n] positions.
            watched_layers: indices of the layers whose outputs are returned.
            wanted: [m] int64, indices of the tokens whose hidden states are needed. The result is
                then [B, m, E], and the last layer must not be watched. If None, all tokens are
                needed.
            run_layers: a function that computes all layers at once, instead of one after another;
                see :data:`RunLayers`.
            **kwargs: arguments of the attention function.

        Returns:
            The hidden states [B, n, E], and a dict from the index of a watched layer to its output.
        """
        x = self._embed(tokens)
        outputs = {}
        rotation = _rotation(*self._rotary(x, position_ids=positions))
        if run_layers is not None:
            layer_states = run_layers(x, *rotation, self._weights)
            x = layer_states[-1]
            outputs = {index: layer_states[index] for index in watched_layers}
        for index, fused in enumerate(self._layers if run_layers is None else ()):
            x = _forward(
                fused,
                x,
                rotation,
                wanted=wanted if index == len(self._layers) - 1 else None,
                **kwargs,
            )
            if index in watched_layers:
                outputs[index] = x
        return normed(x, self._last_norm), outputs


@torch.inference_mode()
def _is_right(layer: Any, fused: FusedWeights) -> bool:
    width = layer.self_attn.q_proj.in_features
    head_dim = layer.self_attn.head_dim
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, width, generator=generator)
    angles = torch.randn(1, 3, head_dim, generator=generator)
    rotation = angles.cos(), angles.sin()
    arguments: dict[str, Any] = {"attention_mask": None, "past_key_values": None}
    arguments["position_ids"] = torch.arange(3)[None] + _FAR
    try:
        expected = layer(x, position_embeddings=rotation, **arguments)
        output = _forward(fused, x, _rotation(*rotation), **arguments)
        return torch.allclose(
            output, expected, rtol=0, atol=_MAX_ERROR * float(expected.abs().max())
        )
    except Exception:  # noqa: BLE001 - a layer of another form may raise any error
        return False


def _rotation(cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Prepare cosines and sines of RoPE for the fused layers.

    The shape changes from [B or 1, n, d] to [B or 1, n, 1, d]. RoPE multiplies the sines with
    (-right half, left half) of a head. The fused layers multiply the sines with (right half, left
    half). So this function negates the first half of the sines.
    """
    left, right = sines.chunk(2, dim=-1)
    return cosines.unsqueeze(2), torch.cat((-left, right), dim=-1).unsqueeze(2)


def _forward(
    fused: FusedWeights,
    x: Tensor,  # hidden states [B, n, E]
    position_embeddings: tuple[Tensor, Tensor],  # The result of `_rotation`.
    attention_mask: Any = None,
    past_key_values: Any = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    # [m] int64, indices of the tokens whose output is needed. For all other tokens, only keys and
    # values are computed.
    wanted: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    attention = fused.attention
    q, k, v = fused.project(x, *position_embeddings)
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
    return fused.finish(attended, x)
