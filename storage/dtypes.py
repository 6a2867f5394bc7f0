"""Logical dtypes (what the numbers mean) and storage dtypes (what NumPy and Zarr hold).

They differ only for bfloat16, which neither NumPy nor zarr-python has: its 16 bits are stored as uint16 and the array
carries the attribute ``{"logical_dtype": "bfloat16"}``. No bit is changed: NaN payloads, -0.0 and subnormals survive.
"""

from __future__ import annotations

import numpy as np

STORAGE_DTYPES: dict[str, str] = {
    "bfloat16": "uint16",
    "float16": "float16",
    "float32": "float32",
    "int32": "int32",
    "uint8": "uint8",
}
"""Logical dtype name -> NumPy dtype name on disk (always little endian)."""

FLOAT_DTYPES = frozenset({"bfloat16", "float16", "float32"})
"""Logical dtypes that can hold NaN or infinity."""

# All exponent bits set means infinity or NaN; testing the bits needs no conversion.
_BFLOAT16_EXPONENT = np.uint16(0x7F80)


def storage_dtype(logical_dtype: str) -> np.dtype:
    """Return the NumPy dtype in which a logical dtype is stored."""
    name = STORAGE_DTYPES.get(logical_dtype)
    if name is None:
        raise ValueError(f"Cannot store dtype {logical_dtype!r}. Use one of: {', '.join(sorted(STORAGE_DTYPES))}.")
    return np.dtype(name).newbyteorder("<")


def to_float32(array: np.ndarray, logical_dtype: str) -> np.ndarray:
    """Convert stored values to float32.

    Args:
        array: values in the storage dtype, any shape.
        logical_dtype: what they mean, e.g. ``"bfloat16"``.

    Returns:
        float32 array of the same shape; exact for bfloat16 and float16.

    Raises:
        ValueError: the array's dtype is not the storage dtype of ``logical_dtype``.
    """
    expected = storage_dtype(logical_dtype)
    if array.dtype != expected:
        raise ValueError(f"{logical_dtype} is stored as {expected}, got an array of {array.dtype}.")
    if logical_dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def from_float32(array: np.ndarray, logical_dtype: str) -> np.ndarray:
    """Round float32 values to a float dtype as it is stored.

    Args:
        array: float32, any shape.
        logical_dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    """
    if logical_dtype == "bfloat16":
        return bfloat16_bits(array)
    return array.astype(storage_dtype(logical_dtype), copy=False)


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """Round float32 values to bfloat16 (to nearest, ties to even) and return the bits.

    Returns:
        uint16 array of the same shape; NaN stays NaN, values beyond the range become infinity.
    """
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(array), quiet_nan, rounded).astype(np.uint16).reshape(array.shape)


def is_finite(array: np.ndarray, logical_dtype: str) -> np.ndarray:
    """Say for each stored value whether it is neither NaN nor infinite; all true for integer dtypes."""
    if logical_dtype == "bfloat16":
        return np.asarray((array & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT)
    if logical_dtype in FLOAT_DTYPES:
        return np.asarray(np.isfinite(array))
    return np.ones(array.shape, bool)
