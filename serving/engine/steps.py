"""Plain steps of many texts through all layers, on a CPU, compiled by TorchScript.

Between the operations of a call the interpreter takes as long as some of them, and each time it has to wait until the
event loop's thread lets it go. TorchScript runs all of them without it: 10 % more tokens/s with eight streams of a
small target.

Shapes: T texts of one token each, H query heads, H_kv key/value heads, d head dim, S slots of a row, N of the pool.
"""

import torch
from torch import Tensor

from ...moa.nn.joined import Weights, after_attention, before_attention
from ...moa.nn.packed import scripted

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""What :func:`attend_rows` works with, of all layers: see there."""


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """Attend with queries [T, H, d] to keys [d, H_kv * N] and values [H_kv * N, d] -> [T * H, d].

    ``rows``: scores [T, H, S] to be overwritten; the sparse matrix [T * H, H_kv * N] of them; what is added to them,
    [T, 1, S]; their columns [T * H * S] and where each row begins, [T * H + 1].
    """
    scores, sparse, added, columns, starts = rows
    # In place, since copying the columns takes longer than adding what hides some of them.
    torch.sparse.sampled_addmm(
        sparse, q.flatten(0, 1), keys, beta=0.0, alpha=q.shape[2] ** -0.5, out=sparse
    )
    probability = (scores + added).softmax(dim=2).view(-1)
    return torch.embedding_bag(values, columns, starts, False, 0, False, probability, True)[0]


@scripted
def run_layers(
    x: Tensor,
    cosines: Tensor,
    sines: Tensor,
    weights: list[Weights],
    planes: list[tuple[Tensor, Tensor]],
    by_slot: list[tuple[Tensor, Tensor]],
    pending: Tensor,
    rows: Rows,
) -> list[Tensor]:
    """Run all layers of a target over x [1, T, E], as :data:`..fused.RunLayers` says; ``pending``, [T]: their slots."""
    outputs: list[Tensor] = []
    for index, ((first, second), (before, gates, o, down)) in enumerate(weights):
        key_plane, value_plane = planes[index]
        keys, values = by_slot[index]
        q, k, v = before_attention(
            x, first, before, cosines, sines, key_plane.shape[0], key_plane.shape[2]
        )
        key_plane.index_copy_(1, pending, k[0])
        value_plane.index_copy_(1, pending, v[0])
        attended = attend_rows(q[0].transpose(0, 1), keys, values, rows)
        x = after_attention(attended.view(1, x.shape[1], -1), x, second, gates, o, down)
        outputs.append(x)
    return outputs
