"""Target layer inference: drafted features through the target's last N decoder layers, in training and in decoding.

Shapes: B batch, T tokens, Q queries, L target layers, D packed KV width, E width, H_kv key/value heads, d head dim, b
nodes of one level, S slots.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..nn import masks
from ..nn.kv import unpack_kv
from ..targets.bundle import FrozenTarget
from .rounds import Rounds


def mixed_target_layers(frozen: FrozenTarget, x: Tensor, kv: Tensor, rounds: Rounds) -> Tensor:
    """Run drafted features of many rounds through the layers, as in decoding.

    Query i sees the target's own KV up to s(i), and behind it keys and values of the drafted features of its round.

    Args:
        x: [B, Q, E], drafted features.
        kv: [B, T, >= N, D], packed target KV, the last N layers last.

    Returns:
        [B, Q, E], before the final norm.
    """
    queries, context = rounds.queries, rounds.context
    by_window = {
        window: masks.round_mask(queries, context, rounds.pass_index, kv.shape[1], window)
        for window in set(frozen.windows)
    }
    rotation = frozen.rotary(queries)
    first = kv.shape[2] - frozen.n_layers
    for offset, (layer, window) in enumerate(zip(frozen.blocks, frozen.windows, strict=True)):
        target_keys, target_values = unpack_kv(kv[:, :, first + offset].to(x.dtype), layer.self_attn.n_kv_heads)
        keys, values = layer.keys_values(x, rotation)
        keys = torch.cat((target_keys.to(keys.dtype), keys), dim=2)
        values = torch.cat((target_values.to(values.dtype), values), dim=2)
        x = layer(x, rotation, keys, values, by_window[window])
    return x


def drafted_target_layers(
    frozen: FrozenTarget,
    x: Tensor,
    positions: Tensor,
    views: Sequence[tuple[Tensor, Tensor]],
    before: Sequence[int],
    n_fed: int,
    by_window: Mapping[int | None, Tensor | None],
) -> Tensor:
    """Run the features of one draft step through the layers.

    Args:
        x: [B, b, E], features of the newest b tokens.
        positions: [B, b] int64.
        views: for each layer, keys and values [B, H_kv, S, d] of the target's cache.
        before: verified tokens of each row.
        n_fed: tokens of this round that were fed, the newest included; they stand behind the verified ones.
        by_window: a layer's window -> mask [B, b, S] bool, True where a query may attend; None for no mask.

    Returns:
        [B, b, E], before the final norm.
    """
    rotation = frozen.rotary(positions)
    for layer, view, window in zip(frozen.blocks, views, frozen.windows, strict=True):
        x = layer.attend_behind(x, rotation, partial(write_behind, view, before, n_fed), by_window[window])
    return x


def write_behind(
    view: tuple[Tensor, Tensor], before: Sequence[int], n_fed: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Put the drafter's own keys and values of the newest tokens behind the target's verified ones, in place.

    Nothing is copied of the context; the target's next call writes over these slots.
    """
    n_new = keys.shape[2]
    # Calls of longer rows, or over the whole cache, later read these slots under a mask, which stops no NaN.
    keys, values = keys.nan_to_num(), values.nan_to_num()
    for row, length in enumerate(before):
        stop = length + n_fed
        view[0][row, :, stop - n_new : stop] = keys[row]
        view[1][row, :, stop - n_new : stop] = values[row]
    return view
