"""The lossless byte chain of every stored array: an inner chunk's values to the bytes in the shard, and back.

A chain of codecs from the Zarr v3 specification, so that any Zarr library undoes it: ``bytes`` (little endian),
``blosc`` (zstd level 1, byte shuffle, one block of up to 1 MiB), ``crc32c``.

Most blosc frames are made by hand (``blosc_frame``), because zstd on its own spends its bits on short matches instead
of entropy-coding the exponents. Where blosc makes them, they are one block: its default of many small ones costs 0.78
of raw instead of 0.69, and three times the time to decode.
"""

from __future__ import annotations

import struct
from typing import Any

import numcodecs.blosc
import numpy as np
from zarr.codecs import BloscCodec, Crc32cCodec

from ..errors import StoreDamaged
from .backend import crc32c
from .blosc_frame import encode_frame

# Blosc's own threads would make the order of blocks depend on timing and do not survive a fork; callers run threads.
numcodecs.blosc.use_threads = False

BLOSC_BLOCK_BYTES = 1 << 20
CRC_BYTES = 4
BYTE_CHAIN = ("bytes:little", f"blosc:zstd:level=1:shuffle:blocksize={BLOSC_BLOCK_BYTES}", "crc32c")
"""The chain in words, as ``store.json`` records it."""

_BLOSC_HEADER = struct.Struct("<4xI4xI")
"""Raw bytes and frame bytes; what lies between them is blosc's own business."""
_CRC = struct.Struct("<I")
_CRC_OF_CHECKED = 0x48674BC7
"""CRC-32C of any bytes that end with their own CRC-32C, little endian: what makes a chunk whole."""


def zarr_codecs(dtype: np.dtype) -> tuple[BloscCodec, Crc32cCodec]:
    """Return the byte chain after ``bytes`` as zarr-python codecs, for an array's metadata."""
    blosc = BloscCodec(typesize=dtype.itemsize, cname="zstd", clevel=1, shuffle="shuffle", blocksize=BLOSC_BLOCK_BYTES)
    return blosc, Crc32cCodec()


def encode_chunk(values: np.ndarray) -> bytes:
    """Encode one inner chunk.

    Args:
        values: the whole chunk, storage dtype, any layout in memory.

    Returns:
        The chunk's bytes as they stand in the shard, checksum included.
    """
    contiguous = np.ascontiguousarray(values)
    little = contiguous.astype(contiguous.dtype.newbyteorder("<"), copy=False)
    pieces = encode_frame(little)
    if pieces is None:
        pieces = [
            numcodecs.blosc.compress(
                little, b"zstd", 1, shuffle=1, blocksize=BLOSC_BLOCK_BYTES, typesize=little.dtype.itemsize
            )
        ]
    crc = 0
    for piece in pieces:
        crc = crc32c(piece, crc)
    ending: list[Any] = [crc.to_bytes(CRC_BYTES, "little")]
    return b"".join(pieces + ending)


def decode_chunk(buffer: np.ndarray, out: np.ndarray) -> None:
    """Check and decode one inner chunk.

    Args:
        buffer: uint8 [n_bytes], the chunk's bytes, checksum included.
        out: C-contiguous array of the chunk's shape in the storage dtype; filled.

    Raises:
        StoreDamaged: the checksum does not match, or the frame holds another number of bytes than ``out``.
    """
    if len(buffer) < CRC_BYTES + _BLOSC_HEADER.size:
        raise StoreDamaged(f"chunk of {len(buffer)} bytes is shorter than its own header and checksum")
    n_bytes = len(buffer) - CRC_BYTES
    # Behind a big decompression all Python is cold, so this does with few steps: no slice, one checksum of the whole.
    if crc32c(buffer) != _CRC_OF_CHECKED:
        got, (expected,) = crc32c(buffer[:n_bytes]), _CRC.unpack_from(buffer.data, n_bytes)
        raise StoreDamaged(f"chunk checksum is {got:#010x}, expected {expected:#010x}")
    n_raw_bytes, n_frame_bytes = _BLOSC_HEADER.unpack_from(buffer.data)
    if n_raw_bytes != out.nbytes or n_frame_bytes != n_bytes:  # blosc believes its header
        raise StoreDamaged(
            f"chunk decodes {n_frame_bytes} bytes to {n_raw_bytes}, expected {n_bytes} bytes and {out.nbytes}"
        )
    try:
        numcodecs.blosc.decompress(buffer, out)
    except (RuntimeError, ValueError) as error:
        raise StoreDamaged(f"chunk cannot be decompressed: {error}") from error
