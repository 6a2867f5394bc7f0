"""Codes of few levels in bytes: every code comes back, in NumPy and in torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moa_data.storage.codecs.transform.packing import (
    CODES_PER_BYTE,
    WIDE_LEVELS,
    pack,
    split_wide,
    unpack,
    unpack_table,
)


@given(levels=st.sampled_from(sorted(CODES_PER_BYTE)), n_codes=st.integers(1, 17), seed=st.integers(0, 99))
def test_packing_round_trips_on_both_libraries(levels: int, n_codes: int, seed: int) -> None:
    top = levels // 2
    codes = np.random.default_rng(seed).integers(-top, top + 1, (5, n_codes)).astype(np.int16)
    packed = pack(codes, levels)
    assert packed.dtype == np.uint8
    assert packed.shape == (5, -(-n_codes // CODES_PER_BYTE[levels]))
    np.testing.assert_array_equal(unpack(packed, levels, n_codes), codes)
    on_torch = pack(torch.from_numpy(codes), levels)
    np.testing.assert_array_equal(on_torch.numpy(), packed)
    np.testing.assert_array_equal(unpack(on_torch, levels, n_codes).numpy(), codes)


@pytest.mark.parametrize("levels", sorted(CODES_PER_BYTE))
def test_zero_codes_are_zero_bytes_and_every_byte_decodes_in_range(levels: int) -> None:
    assert not pack(np.zeros((2, 7), np.int16), levels).any()
    table = unpack_table(levels)
    assert np.abs(table).max() == levels // 2
    assert levels ** CODES_PER_BYTE[levels] <= 256 < (levels + 2) ** CODES_PER_BYTE[levels]


def test_wide_codes_are_two_digits() -> None:
    top = WIDE_LEVELS // 2
    codes = np.arange(-top, top + 1)
    low, high = split_wide(codes)
    np.testing.assert_array_equal(low + 255 * high, codes)
    assert (np.abs(low).max(), np.abs(high).max()) == (127, 7)
