"""Blosc frames made by hand: legal blosc-1 frames that any blosc decoder reads, smaller and faster than blosc's own.

::

    | version 2 | zstd format 1 | flags | typesize | n_bytes u32 | block_bytes u32 | frame_bytes u32 |     header
    | offset of the one block: u32 |
    | n_bytes u32, plane 0 | n_bytes u32, plane 1 | ...                                                  one block

The block is cut into one plane for each byte of the values (that is what shuffling does). A plane whose stored size is
its own size is stored as it is; any other is one zstd frame. The low byte of a bfloat16 or float16 activation is noise,
so it is stored as it is; the high byte (sign and exponent, or a quantised code) has no repeats worth a match but few
values, so zstd is told to do nothing but entropy-code it: matches of 7 bytes at least, a table of 64 entries.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import zstandard

_HEADER = struct.Struct("<BBBBIII")
_U32 = struct.Struct("<I")
_SHUFFLED_ZSTD = 0x81
_UNSPLIT_ZSTD = 0x90
# Blosc splits a block only where each plane has at least 128 bytes.
_MIN_PLANE_BYTES = 128
_WORD_BYTES = 8
_N_SAMPLE_COLUMNS, _N_SAMPLE_ROWS = 4, 64
# Matches cost speed, and cost size where they are few: a chunk of eight layers in which layer 0 repeats is below this.
_REPEATED_SHARE = 1 / 12

Piece = bytes | np.ndarray
"""Some bytes of a frame: bytes, or uint8 [n_bytes]."""

_local = threading.local()


def encode_frame(values: np.ndarray) -> list[Piece] | None:
    """Encode values as one frame.

    Args:
        values: C-contiguous, little endian, of one or two bytes each; axis 0 counts tokens or blocks of them.

    Returns:
        The frame in pieces, which are valid until the next call on this thread; or None where blosc's own encoder
        serves better: other item sizes, tiny or narrow arrays, and values that repeat from row to row, as those of
        layer 0 do, which depend on the token alone.
    """
    planes = _planes(values)
    if planes is None:
        return None
    low, high = planes
    repeated, is_noise = _sample(low, len(values))
    if repeated:
        return None
    if values.itemsize == 1:
        return _frame(values, _UNSPLIT_ZSTD, [_literals(low)])
    return _frame(values, _SHUFFLED_ZSTD, [low if is_noise else _literals(low), _literals(high)])


def _planes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return low and high bytes (the same array for one-byte values), or None for what is not encoded here."""
    if values.itemsize > 2 or values.ndim < 2 or not len(values):
        return None
    if values.size < _MIN_PLANE_BYTES or values.size // len(values) < _WORD_BYTES:
        return None
    if values.itemsize == 1:
        low = values.view(np.uint8).reshape(-1)
        return low, low
    words = values.view(np.uint16).reshape(-1)
    n = len(words)
    # Fresh arrays of this size would come from the kernel page by page, at more than the cost of coding them.
    scratch = _scratch(2 * n)
    low, high = scratch[:n], scratch[n:]
    np.copyto(low, words, casting="unsafe")
    # Words read from the second byte on have the high bytes below: half the time of shifting all of them.
    shifted = words.view(np.uint8)[1:-1].view("<u2")
    np.copyto(high[:-1], shifted, casting="unsafe")
    high[-1] = words[-1] >> 8
    return low, high


def _scratch(n_bytes: int) -> np.ndarray:
    """Return this thread's reusable uint8 buffer, ``n_bytes`` long."""
    buffer: np.ndarray | None = getattr(_local, "scratch", None)
    if buffer is None or len(buffer) < n_bytes:
        buffer = _local.scratch = np.empty(n_bytes, np.uint8)
    return buffer[:n_bytes]


def _sample(plane: np.ndarray, n_rows: int) -> tuple[bool, bool]:
    """Look at some words of a plane: whether they repeat, as where equal tokens have equal values, or are all noise.

    Args:
        plane: uint8 [n_rows * width], width at least 8.
    """
    width = len(plane) // n_rows
    n_words = width // _WORD_BYTES
    rows = plane.reshape(n_rows, width)[:: -(-n_rows // _N_SAMPLE_ROWS)]
    if width % _WORD_BYTES:
        rows = np.ascontiguousarray(rows[:, : n_words * _WORD_BYTES])
    step = -(-n_words // _N_SAMPLE_COLUMNS)
    sample = rows.view(np.uint64)[:, step // 2 :: step].tobytes()
    # Plain Python here: what a NumPy call costs where its code has left the caches, this costs in all.
    words = memoryview(sample).cast("Q").tolist()
    n_zeros = words.count(0)  # padding
    n_same = len(words) - n_zeros - len(set(words) - {0})
    # 256 bytes of noise have about 162 different values.
    n_values = len(set(sample[:: max(1, len(words) // 32)][:256]))
    is_noise = not n_zeros and n_values > 128 and plane[-_WORD_BYTES:].tobytes() != bytes(_WORD_BYTES)
    return n_same > _REPEATED_SHARE * len(words), is_noise


def _literals(plane: np.ndarray) -> Piece:
    """Entropy-code a plane, or return it where that does not make it smaller."""
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        parameters = zstandard.ZstdCompressionParameters(
            window_log=20, hash_log=6, chain_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST
        )
        compressor = _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    packed = compressor.compress(plane.data)
    return packed if len(packed) < len(plane) else plane


def _frame(values: np.ndarray, flags: int, planes: list[Piece]) -> list[Piece]:
    first_block = _HEADER.size + _U32.size
    n_bytes = first_block + sum(_U32.size + len(plane) for plane in planes)
    pieces: list[Piece] = [
        _HEADER.pack(2, 1, flags, values.itemsize, values.nbytes, values.nbytes, n_bytes),
        _U32.pack(first_block),
    ]
    for plane in planes:
        pieces += [_U32.pack(len(plane)), plane]
    return pieces
