"""Keys of packed KV, turned back to what they were before RoPE."""

from typing import Any

import pytest
import torch

from moa_data.moa.nn import kv as kv_layout
from moa_data.moa.nn.layers import Rotary, rotate

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_the_inverse_rotation_gives_the_keys_before_rope(rope: Any) -> None:
    rotary, at = Rotary(12, ROPES[rope], 256), torch.tensor([0, 3, 77, 200])
    assert (rotary.scaling != 1) == (rope == "yarn")
    keys, values = torch.randn(2, 3, 2, 4, 12, dtype=torch.float64).unbind()  # [L, H_kv, n, d]
    rotated = rotate(keys, rotary(at[None]))
    before, after = (kv_layout.pack_kv(list(k[:, None]), list(values[:, None]))[0] for k in (keys, rotated))
    got = kv_layout.rotate_packed_keys(after, rotary.inverse(at))
    torch.testing.assert_close(got, before, rtol=0, atol=2e-6)  # the angles are float32
    torch.testing.assert_close(kv_layout.rotate_packed_keys(before, rotary(at)), after, rtol=0, atol=2e-6)
    assert torch.equal(got.unflatten(-1, (2, 2, 12))[..., 1, :], before.unflatten(-1, (2, 2, 12))[..., 1, :])
    assert not torch.allclose(after, before, atol=0.1)


def test_keys_keep_their_dtype() -> None:
    packed = torch.randn(5, 3, 2 * 2 * 8).bfloat16()
    rotary = Rotary(8, ROPES["default"], 64)
    assert kv_layout.rotate_packed_keys(packed, rotary.inverse(torch.arange(5))).dtype == torch.bfloat16
