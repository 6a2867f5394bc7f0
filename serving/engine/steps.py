"""Run all layers of a target over several sequences, with one token per sequence, on a CPU.

With the Python interpreter, the time between two operations would be as long as a small operation.
The interpreter might also have to wait until the event loop's thread releases the GIL. So
TorchScript compiles the code and runs all operations without the interpreter. With eight concurrent
sequences of a small target, this gives 10 % more tokens/s.

Shapes: T sequences with one token each, E hidden size, H query heads, H_kv key/value heads, d head
dim, S scores per query, N slots of the pool. A slot holds the keys and values of one token.
"""

import torch
from torch import Tensor

from ...moa.nn.fused import Weights, after_attention, before_attention
from ...moa.nn.packed import scripted

SparseBuffers = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Buffers and indices that all layers share; :func:`attend_sparse` describes them."""


def attend_sparse(q: Tensor, keys: Tensor, values: Tensor, buffers: SparseBuffers) -> Tensor:
    """Compute the attention of T tokens, one per sequence. Each token attends to its sequence's KV.

    Args:
        q: [T, H, d], the queries.
        keys: [d, H_kv * N], the keys of all pool slots.
        values: [H_kv * N, d], the values of all pool slots.
        buffers: five tensors.
            1. A buffer [T, H, S] for the scores.
            2. A sparse CSR matrix [T * H, H_kv * N]. Its values use the memory of the scores.
            3. The additive mask [T, 1, S].
            4. The column of each score in the sparse matrix, [T * H * S].
            5. [T * H + 1]: the index of the first score of each row of the sparse matrix, and
               finally the number of all scores.

    Returns:
        The attention output [T * H, d].
    """
    scores, sparse, added, columns, starts = buffers
    # Write the scores in place, and add the mask below. PyTorch could add the mask while it
    # computes the scores, but only in a new sparse matrix. To create this matrix, it would copy the
    # column indices, which takes longer than adding the mask.
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
    buffers: SparseBuffers,
) -> list[Tensor]:
    """Run all layers of a target over T sequences, with one token per sequence.

    Args:
        x: [1, T, E], the embedded tokens.
        cosines: [1, T, 1, d], the cosines of the rotary embedding.
        sines: [1, T, 1, d], the sines of the rotary embedding.
        weights: the weights of each layer.
        planes: for each layer, its keys [H_kv, N, d] and its values [H_kv, N, d]. The new keys and
            values are written to these tensors.
        by_slot: for each layer, views of the same memory: keys [d, H_kv * N] and values
            [H_kv * N, d].
        pending: [T], the slots for the keys and values of the tokens.
        buffers: see :func:`attend_sparse`.

    Returns:
        The output [1, T, E] of each layer.
    """
    outputs: list[Tensor] = []
    for index, ((first, second), (before, gates, o, down)) in enumerate(weights):
        key_plane, value_plane = planes[index]
        keys, values = by_slot[index]
        q, k, v = before_attention(
            x, first, before, cosines, sines, key_plane.shape[0], key_plane.shape[2]
        )
        key_plane.index_copy_(1, pending, k[0])
        value_plane.index_copy_(1, pending, v[0])
        attended = attend_sparse(q[0].transpose(0, 1), keys, values, buffers)
        x = after_attention(attended.view(1, x.shape[1], -1), x, second, gates, o, down)
        outputs.append(x)
    return outputs
