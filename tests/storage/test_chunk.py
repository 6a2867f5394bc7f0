"""One chunk: any bits come back, any damage is noticed."""

import numpy as np
import pytest

from moa_data.errors import StoreDamaged
from moa_data.storage.chunk import decode_chunk, encode_chunk


def encoded() -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng(0).integers(0, 1 << 16, (64, 2, 8)).astype(np.uint16)
    return values, np.frombuffer(encode_chunk(values), np.uint8)


def test_encodes_views_in_any_memory_order() -> None:
    values = np.arange(64 * 6, dtype=np.uint16).reshape(64, 6)
    assert encode_chunk(values[:, 2:4]) == encode_chunk(values[:, 2:4].copy())


def test_every_flipped_byte_is_noticed() -> None:
    values, data = encoded()
    out = np.empty_like(values)
    for at in range(0, len(data), 37):
        damaged = data.copy()
        damaged[at] ^= 1
        with pytest.raises(StoreDamaged, match="chunk checksum is"):
            decode_chunk(damaged, out)


def test_truncation_and_wrong_size_are_noticed() -> None:
    values, data = encoded()
    with pytest.raises(StoreDamaged, match="checksum"):
        decode_chunk(data[:-1], np.empty_like(values))
    with pytest.raises(StoreDamaged, match="shorter than its own header"):
        decode_chunk(data[:10], np.empty_like(values))
    with pytest.raises(StoreDamaged, match=r"to 2048, expected \d+ bytes and 1024"):
        decode_chunk(data, np.empty((32, 2, 8), np.uint16))
