"""From values to the bytes of one inner chunk and back, in two stages.

1. *Transform* (may lose precision): values -> codes. Identity in the ``lossless`` codec.
2. *Bytes* (lossless): a chain of codecs from the Zarr v3 specification, so that any Zarr library undoes it:
   ``bytes`` (little endian), ``blosc`` (zstd level 1, byte shuffle, one block of up to 1 MiB), ``crc32c``.

Blosc's default block size splits a chunk into small blocks, in which zstd spends its bits on short matches instead of
entropy-coding the exponents: 0.78 of raw instead of 0.66, and decoding takes three times as long.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numcodecs.blosc
import numpy as np
from zarr.codecs import BloscCodec, Crc32cCodec

from .durable import crc32c
from .errors import ShardCorrupt

# Blosc's own threads would make the order of blocks depend on timing and do not survive a fork; callers run threads.
numcodecs.blosc.use_threads = False

BLOSC_BLOCK_BYTES = 1 << 20
CRC_BYTES = 4
_BLOSC_HEADER = struct.Struct("<BBBBIII")


class Transform(Protocol):
    """First stage: values in the storage dtype <-> codes of the same shape."""

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Turn values into codes."""

    def decode(self, codes: np.ndarray, out: np.ndarray) -> None:
        """Write the values of ``codes`` into ``out``."""


class Identity:
    """The transform of the lossless codec: codes are the values."""

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Return the values themselves."""
        return values

    def decode(self, codes: np.ndarray, out: np.ndarray) -> None:
        """Copy the codes."""
        np.copyto(out, codes)


_TRANSFORMS: dict[str, Transform] = {"lossless": Identity()}


@dataclass(frozen=True)
class Codec:
    """A named pair of transform and byte chain.

    Attributes:
        name: ``"lossless"``.

    Raises:
        ValueError: unknown name.
    """

    name: str = "lossless"

    def __post_init__(self) -> None:
        """Refuse an unknown name."""
        if self.name not in _TRANSFORMS:
            raise ValueError(f"Unknown codec {self.name!r}. Use one of: {', '.join(_TRANSFORMS)}.")

    @property
    def transform(self) -> Transform:
        """The first stage."""
        return _TRANSFORMS[self.name]

    def describe(self) -> dict[str, Any]:
        """Return what ``store.json`` records about the codec; a change of any value changes the bytes."""
        return {
            "name": self.name,
            "transform": "identity",
            "bytes": ["bytes:little", f"blosc:zstd:level=1:shuffle:blocksize={BLOSC_BLOCK_BYTES}", "crc32c"],
        }

    def zarr_codecs(self, dtype: np.dtype) -> tuple[BloscCodec, Crc32cCodec]:
        """Return the byte chain after ``bytes`` as zarr-python codecs, for the array's metadata."""
        blosc = BloscCodec(
            typesize=dtype.itemsize, cname="zstd", clevel=1, shuffle="shuffle", blocksize=BLOSC_BLOCK_BYTES
        )
        return blosc, Crc32cCodec()

    def encode_chunk(self, values: np.ndarray) -> bytes:
        """Encode one inner chunk.

        Args:
            values: the whole chunk, storage dtype, any layout in memory.

        Returns:
            The chunk's bytes as they stand in the shard, checksum included.
        """
        codes = np.ascontiguousarray(self.transform.encode(values))
        little = codes.astype(codes.dtype.newbyteorder("<"), copy=False)
        frame = numcodecs.blosc.compress(
            little, b"zstd", 1, shuffle=1, blocksize=BLOSC_BLOCK_BYTES, typesize=little.dtype.itemsize
        )
        return bytes(frame) + crc32c(frame).to_bytes(CRC_BYTES, "little")

    def decode_chunk(self, buffer: np.ndarray, out: np.ndarray) -> None:
        """Check and decode one inner chunk.

        Args:
            buffer: uint8 [n_bytes], the chunk's bytes, checksum included.
            out: C-contiguous array of the chunk's shape in the storage dtype; filled.

        Raises:
            ShardCorrupt: the checksum does not match, or the frame holds another number of bytes than ``out``.
        """
        if len(buffer) < CRC_BYTES + _BLOSC_HEADER.size:
            raise ShardCorrupt(f"chunk of {len(buffer)} bytes is shorter than its own header and checksum")
        frame = buffer[:-CRC_BYTES]
        expected = int.from_bytes(buffer[-CRC_BYTES:].tobytes(), "little")
        if (got := crc32c(frame)) != expected:
            raise ShardCorrupt(f"chunk checksum is {got:#010x}, expected {expected:#010x}")
        n_raw_bytes = _BLOSC_HEADER.unpack(frame[: _BLOSC_HEADER.size].tobytes())[4]
        if n_raw_bytes != out.nbytes:
            raise ShardCorrupt(f"chunk decodes to {n_raw_bytes} bytes, expected {out.nbytes}")
        if isinstance(self.transform, Identity):
            numcodecs.blosc.decompress(frame, out)
            return
        codes = np.empty_like(out)
        numcodecs.blosc.decompress(frame, codes)
        self.transform.decode(codes, out)
