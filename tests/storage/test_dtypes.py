"""bfloat16 bits pass unchanged and mean what torch says they mean."""

import numpy as np
import pytest
import torch

from moa_data.storage.dtypes import bfloat16_bits, is_finite, storage_dtype, to_float32


def all_bits() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16)


def test_every_bfloat16_converts_as_in_torch() -> None:
    expected = torch.from_numpy(all_bits().view(np.int16)).view(torch.bfloat16).float().numpy()
    got = to_float32(all_bits(), "bfloat16")
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_rounding_to_bfloat16_equals_torch() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(bfloat16_bits(values)[~nan], expected[~nan])
    assert np.isnan(to_float32(bfloat16_bits(values)[nan], "bfloat16")).all()


def test_finite_bits_equal_numpy() -> None:
    np.testing.assert_array_equal(is_finite(all_bits(), "bfloat16"), np.isfinite(to_float32(all_bits(), "bfloat16")))
    assert is_finite(np.array([1, 2], np.int32), "int32").all()
    assert is_finite(np.array([1, np.nan], np.float16), "float16").tolist() == [True, False]


def test_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match=r"Cannot store dtype 'complex64'. Use one of: bfloat16"):
        storage_dtype("complex64")
    with pytest.raises(ValueError, match="bfloat16 is stored as uint16, got an array of float32"):
        to_float32(np.zeros(2, np.float32), "bfloat16")
