"""The one definition of the KV tensor, and how it comes out of a cache of transformers.

Shapes: B batch, T tokens, n positions, L target layers, H_kv key/value heads, d head dim, D = 2 * H_kv * d.
The packed layout is, per token and layer, ``[k_0 v_0 k_1 v_1 ...]`` over the KV heads, keys after RoPE (official
``moa_spec/models/train/moa_spec.py``, lines 117-119). The activation store's ``kv`` field ``[T, L, H_kv, 2, d]`` is the
same layout before the last three axes are merged, so packing it is a view.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .layers import Rotation, rotate


def pack_kv(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Pack the KV of all layers for the drafter.

    Args:
        keys: L tensors [B, H_kv, T, d], after RoPE.
        values: L tensors [B, H_kv, T, d].

    Returns:
        [B, T, L, D], the input's dtype.
    """
    per_layer = [torch.cat((k, v), dim=-1) for k, v in zip(keys, values, strict=True)]  # [B, H_kv, T, 2d]
    stacked = torch.stack(per_layer, dim=1)  # [B, L, H_kv, T, 2d]
    return stacked.permute(0, 3, 1, 2, 4).flatten(3)  # [B, T, L, D]


def unpack_kv(packed: Tensor, n_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Undo :func:`pack_kv` for one layer.

    Args:
        packed: [B, T, D].
        n_kv_heads: H_kv.

    Returns:
        Keys and values, each [B, H_kv, T, d] (views).
    """
    per_head = packed.unflatten(-1, (n_kv_heads, 2, -1)).permute(3, 0, 2, 1, 4)  # [2, B, H_kv, T, d]
    return per_head[0], per_head[1]


def rotate_packed_keys(packed: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the keys of packed KV and leave the values; with the inverse rotation the keys are those before RoPE.

    Args:
        packed: [n, L, D], of n positions.
        rotation: of these positions, cos and signed sin, each [n, d].

    Returns:
        [n, L, D], the input's dtype.
    """
    cos, sin = rotation
    keys, values = packed.unflatten(-1, (-1, 2, cos.shape[-1])).unbind(-2)  # [n, L, H_kv, d]
    rotated = rotate(keys.permute(1, 2, 0, 3), (cos[None], sin[None])).permute(2, 0, 1, 3)
    return torch.stack((rotated, values), dim=-2).flatten(-3)


def new_cache() -> DynamicCache:
    """An empty target cache that keeps every position, also for sliding-window layers.

    A cache built from the model's config drops keys outside the window, and a drafter needs all of them.
    """
    return DynamicCache()


def cache_layers(cache: DynamicCache) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of every layer, each [B, H_kv, T, d], keys after RoPE. No copy."""
    layers: list[Any] = list(cache.layers)
    return [layer.keys for layer in layers], [layer.values for layer in layers]


def cache_kv(cache: DynamicCache, start: int, stop: int) -> Tensor:
    """Packed KV [B, stop - start, L, D] of the positions start..stop-1."""
    keys, values = cache_layers(cache)
    return pack_kv([k[:, :, start:stop] for k in keys], [v[:, :, start:stop] for v in values])
