"""One Zarr v3 shard (``sharding_indexed``): encoded inner chunks in the order written, then the index.

``kv/c/0/0/0/0/0`` of Llama-3-8B, that is 1,024 tokens of 32 layers with 8 KV heads of 128 (134 MB raw, 93 MB stored)::

    | chunk 0,0 | chunk 0,1 | ... | chunk 0,31 | chunk 1,0 | ... | chunk 15,31 | index 8,192 | crc32c 4 |
      layer 0     layer 1           layer 31     layer 0           layer 31
      tokens 0 to 63                             64 to 127         960 to 1,023

A chunk of it: 64 tokens x 1 layer x 8 heads x 2 x 128 in bfloat16, 262,144 raw bytes in about 181,000 ::

    | header 16 | block at byte 20: 4 | size 4 | low bytes 131,072 | size 4 | high bytes, coded 50,000 | crc32c 4 |
    +------------------------------------ a blosc frame ------------------------------------------------+

The index: 16 rows x 32 columns of (offset uint64, n_bytes uint64), in C order. A reader of one layer of 64 tokens reads
the index once, then one chunk.

An index entry of 2**64 - 1 twice means "no chunk", which only positions beyond the end of the array have here: a chunk
of zeros is written like any other, so that a lost chunk never reads as zeros.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..chunks.chunk import CRC_BYTES, encode_chunk
from ..disk.durable import crc32c, disk_full_guard, write_all
from .grid import ArrayGrid

_ABSENT = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class FileRecord:
    """Size and ``zlib.crc32`` of a file in a commit (see ``durable.file_crc32`` for why not CRC-32C)."""

    bytes: int
    crc32: int


class ShardWriter:
    """Writes one shard front to back; nothing is held in memory but the index."""

    def __init__(self, path: Path, grid: ArrayGrid) -> None:
        self._path = path
        self._grid = grid
        self._index = np.full((grid.rows_per_shard, grid.chunks_per_row, 2), _ABSENT, "<u8")
        self._row = 0
        self._n_bytes = 0
        self._crc = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk_full_guard(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    @property
    def is_full(self) -> bool:
        """Whether every row of inner chunks has been written."""
        return self._row == self._grid.rows_per_shard

    def append_row(self, values: np.ndarray) -> None:
        """Encode and write the inner chunks of the next tokens: [chunk_tokens, *token_shape], storage dtype."""
        step = self._grid.chunk_layers
        for column in range(self._grid.chunks_per_row):
            chunk = values[:, column * step : (column + 1) * step] if values.ndim > 1 else values
            data = encode_chunk(chunk)
            self._index[self._row, column] = self._n_bytes, len(data)
            self._write(data)
        self._row += 1

    def finish(self) -> FileRecord:
        """Write the index, sync and close."""
        index = self._index.tobytes()
        self._write(index + crc32c(index).to_bytes(CRC_BYTES, "little"))
        with disk_full_guard(self._path):
            os.fsync(self._fd)
        self.abort()
        return FileRecord(self._n_bytes, self._crc)

    def abort(self) -> None:
        """Close the file without an index; the caller deletes it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        with disk_full_guard(self._path):
            write_all(self._fd, data)
        self._n_bytes += len(data)
        self._crc = zlib.crc32(data, self._crc)
