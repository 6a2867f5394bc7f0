"""Packs several codes with few levels into a byte, so that an entropy coder of bytes can go below one bit per code.

A Huffman code spends at least one bit on a symbol. Five codes of three levels are one symbol of 243 values, and cost
as little as 0.2 bit each. Of the numbers of levels that pack alike only the largest odd one is used, as levels that
never occur cost nothing in a Huffman code (7 or 9 levels pack as 15 do, 31 or 127 as 255 do).

A code ``q`` in ``-(levels - 1) / 2 .. (levels - 1) / 2`` is the digit ``q mod levels``, so that zero, the most frequent
one, is zero in the byte as well, as the padding between sequences is.

Codes of ``WIDE_LEVELS`` levels do not fit a byte. They are two digits: ``q = low + 255 * high``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

Array = Any
"""A NumPy array or a torch tensor."""

CODES_PER_BYTE: dict[int, int] = {3: 5, 5: 3, 15: 2, 255: 1}
"""Number of levels of a digit -> digits in one byte."""

LOW_LEVELS = 255
HIGH_LEVELS = 15
WIDE_LEVELS = LOW_LEVELS * HIGH_LEVELS
"""Levels of a code that is stored as two digits."""


def split_wide(codes: Array) -> tuple[Array, Array]:
    """Split codes of ``WIDE_LEVELS`` levels into two digits.

    Args:
        codes: integers from -1912 to 1912, any shape.

    Returns:
        Low (-127 to 127) and high (-7 to 7), with ``codes = low + 255 * high``.
    """
    half = LOW_LEVELS // 2
    high = (codes + half) // LOW_LEVELS
    return codes - high * LOW_LEVELS, high


def pack(codes: Array, levels: int) -> Array:
    """Pack codes into bytes.

    Args:
        codes: integers [n, n_codes] from -(levels - 1) / 2 to (levels - 1) / 2, NumPy or torch.
        levels: a key of ``CODES_PER_BYTE``.

    Returns:
        uint8 [n, ceil(n_codes / CODES_PER_BYTE[levels])]; the last byte of a row is filled up with zero codes.
    """
    xp = array_namespace(codes)
    per_byte = CODES_PER_BYTE[levels]
    digits = xp.astype(codes % levels, xp.uint8)
    packed = digits[:, 0::per_byte]
    for place in range(1, per_byte):
        more = digits[:, place::per_byte] * levels**place
        width = more.shape[1]
        packed = xp.concat([packed[:, :width] + more, packed[:, width:]], axis=1)
    return packed


def unpack_table(levels: int) -> np.ndarray:
    """Return the codes of every byte: int16 [256, CODES_PER_BYTE[levels]].

    Bytes that :func:`pack` never writes map to codes in range as well, so that no byte makes a reader fail.
    """
    per_byte = CODES_PER_BYTE[levels]
    digits = np.arange(256)[:, None] // levels ** np.arange(per_byte) % levels
    return np.where(digits > levels // 2, digits - levels, digits).astype(np.int16)


def unpack(packed: Array, levels: int, n_codes: int) -> Array:
    """Undo :func:`pack`.

    Args:
        packed: uint8 [n, n_bytes], NumPy or torch.
        levels: as given to ``pack``.
        n_codes: codes of one row.

    Returns:
        int16 [n, n_codes].
    """
    xp = array_namespace(packed)
    table = xp.asarray(unpack_table(levels), device=packed.device)
    flat = xp.take(table, xp.astype(xp.reshape(packed, (-1,)), xp.int32), axis=0)
    return xp.reshape(flat, (packed.shape[0], packed.shape[1] * CODES_PER_BYTE[levels]))[:, :n_codes]
