"""Packed KV, its keys before RoPE, and the growing buffer."""

from typing import Any

import pytest
import torch

from moa_data.errors import DrafterError
from moa_data.moa.nn import kv as kv_layout
from moa_data.moa.nn.kv import KVBuffer, slots_after, write_slots
from moa_data.moa.nn.layers import Rotary, rotate

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_the_inverse_rotation_gives_the_keys_before_rope(rope: Any) -> None:
    rotary, at = Rotary(12, ROPES[rope], 256), torch.tensor([0, 3, 77, 200])
    assert (rotary.scaling != 1) == (rope == "yarn")
    keys, values = torch.randn(2, 3, 2, 4, 12, dtype=torch.float64).unbind()  # [L, H_kv, n, d]
    rotated = rotate(keys, rotary(at[None]))
    before, after = (
        kv_layout.pack_kv(list(k[:, None]), list(values[:, None]))[0] for k in (keys, rotated)
    )
    got = kv_layout.rotate_packed_keys(after, rotary.inverse(at))
    torch.testing.assert_close(got, before, rtol=0, atol=2e-6)  # the angles are float32
    torch.testing.assert_close(
        kv_layout.rotate_packed_keys(before, rotary(at)), after, rtol=0, atol=2e-6
    )
    assert torch.equal(
        got.unflatten(-1, (2, 2, 12))[..., 1, :], before.unflatten(-1, (2, 2, 12))[..., 1, :]
    )
    assert not torch.allclose(after, before, atol=0.1)
    assert kv_layout.rotate_packed_keys(after.bfloat16(), rotary(at)).dtype == torch.bfloat16


def test_layers_are_committed_packed_taken_and_concatenated() -> None:
    """The buffer has two rows and two layers.

    Some of the pending tokens are committed, a row leaves, and a row joins.
    """
    # Each of the two layers has values of shape [B, H_kv, n, d].
    buffer, (first, second) = KVBuffer(2, 4, 2), torch.randn(2, 2, 3, 5, 4).unbind()
    for layer, values in enumerate((first, second)):
        buffer.reserve(5, values)
        write_slots(
            buffer.layer_view(layer, buffer.capacity),
            values,
            -values,
            slots_after(buffer.lengths, 5, values.device),
        )
    buffer.commit([[0, 1, 2], [0, 2, 4]])
    kept = [first[0, :, :3], first[1, :, [0, 2, 4]]]
    packed = buffer.packed([0, 0], 3)
    for row, keys in enumerate(kept):
        got, negative = kv_layout.unpack_kv(packed[row : row + 1, :, 0], 3)
        assert torch.equal(got[0], keys)
        assert torch.equal(negative[0], -keys)
    assert torch.equal(buffer.packed([1, 0], 2)[0], packed[0, 1:])
    empty = KVBuffer(1, 4, 2)
    empty.add_rows(buffer.take_rows([1]))
    assert empty.lengths == [0, 3]
    assert torch.equal(empty.packed([0, 0], 3, first_layer=1)[1], packed[1, :, 1:])


def test_kv_buffer_grows_crops_and_keeps_rows_of_different_lengths() -> None:
    buffer = KVBuffer(n_rows=2, n_slots=1)
    with pytest.raises(DrafterError):
        buffer.layer_view(0, 1)
    first = torch.arange(6.0).view(2, 1, 3, 1)
    buffer.append(first, first, counts=[3, 1])
    keys, values = buffer.append(first + 10, -first, counts=[1, 3])
    assert keys[0, 0, :, 0].tolist()[:4] == [0, 1, 2, 10]
    assert values[1, 0, :, 0].tolist() == [3, -3, -4, -5]
    buffer = buffer.take_rows([1])
    buffer.crop([2])
    buffer.append(first[:1], first[:1])
    assert buffer.lengths == [5]
    assert buffer.layer_view(0, 5)[0][0, 0, :, 0].tolist() == [3, 13, 0, 1, 2]
