"""One Zarr v3 shard (``sharding_indexed``): encoded inner chunks in the order written, then the index.

``kv/c.0.0.0.0.0`` of Llama-3-8B: 16,384 tokens of 32 layers with 8 KV heads of 128 (2.1 GB raw, 1.5 GB stored)::

    | chunk 0,0 | chunk 0,1 | ... | chunk 0,31 | chunk 1,0 | ... | chunk 255,31 | index 131,072 | crc32c 4 |
      layer 0     layer 1           layer 31     layer 0           layer 31
      tokens 0 to 63                             64 to 127         16,320 to 16,383

One chunk: 64 tokens x 1 layer x 8 heads x 2 x 128 in bfloat16, 262,144 raw bytes in about 181,000 ::

    | header 16 | block at byte 20: 4 | size 4 | low bytes 131,072 | size 4 | high bytes, coded 50,000 | crc32c 4 |
    +------------------------------------ a blosc frame ------------------------------------------------+

The index: 256 rows x 32 columns of (offset uint64, n_bytes uint64), in C order. A reader of one layer of 64 tokens
reads the index once, then one chunk.

An index entry of 2**64 - 1 twice means "no chunk", which only positions beyond the end of a part have here: a chunk
of zeros is written like any other, so that a lost chunk never reads as zeros.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files import PARTIAL_SUFFIX, disk_full_guard, write_all
from .backend import crc32c
from .chunk import CRC_BYTES, EncodePool
from .grid import ArrayGrid

_ABSENT = np.uint64(2**64 - 1)
TASK_BYTES = 1 << 20
"""Raw bytes that a thread encodes at a time: about 1.5 ms of work, long against the time to hand it over."""


@dataclass(frozen=True)
class FileRecord:
    """Size and ``zlib.crc32`` of a file in a commit (see ``backend.file_crc32`` for why not CRC-32C)."""

    bytes: int
    crc32: int


def record_of(content: bytes) -> FileRecord:
    """Return the record of a file with this content."""
    return FileRecord(len(content), zlib.crc32(content))


def new_attempt() -> str:
    """Return a name for a writer, or for what it writes at once, that no other has."""
    return secrets.token_hex(4)


def partial_name(name: str, attempt: str) -> str:
    """Return what a file is called until it is published: after its writer."""
    return f"{name}.{attempt}{PARTIAL_SUFFIX}"


def sync_file(fd: int, path: Path) -> None:
    """Make a file durable where it is."""
    with disk_full_guard(path):
        os.fsync(fd)


class ShardWriter:
    """Writes one shard front to back; memory holds the index and the chunks that are being encoded.

    Args:
        pool: encodes the chunks, and syncs the file.
        make_durable: makes the finished file durable, given its descriptor and path, on the pool's thread for that.
    """

    def __init__(
        self, path: Path, grid: ArrayGrid, pool: EncodePool, make_durable: Callable[[int, Path], None] = sync_file
    ) -> None:
        self._path = path
        self._make_durable = make_durable
        self._grid = grid
        self._pool = pool
        self._encoding: deque[Future[list[bytes]]] = deque()
        self._index = np.full((grid.rows_per_shard, grid.chunks_per_row, 2), _ABSENT, "<u8")
        self._row = 0
        self._n_chunks = 0
        self._n_bytes = 0
        self._crc = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk_full_guard(path):
            # O_EXCL: no two writers have a partial name in common, and a link in its place is not followed.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    @property
    def is_full(self) -> bool:
        """Whether every row of inner chunks has been given."""
        return self._row == self._grid.rows_per_shard

    def append_row(self, values: np.ndarray) -> None:
        """Encode the inner chunks of the next tokens, and write those that are ready.

        Args:
            values: [chunk_tokens, *token_shape], storage dtype; must not change until :meth:`settle` or :meth:`finish`.
        """
        step = self._grid.chunk_layers
        columns = range(self._grid.chunks_per_row)
        chunks = [values[:, column * step : (column + 1) * step] if values.ndim > 1 else values for column in columns]
        n_per_task = max(1, TASK_BYTES // chunks[0].nbytes)
        for first in range(0, len(chunks), n_per_task):
            self._encoding.append(self._pool.encode(chunks[first : first + n_per_task]))
        self._row += 1
        while len(self._encoding) > self._pool.n_ahead:
            self._write_oldest()

    def settle(self) -> None:
        """Wait until all given values are encoded; they may then change."""
        for task in self._encoding:
            task.result()

    def finish(self) -> tuple[FileRecord, Future[None]]:
        """Write the remaining chunks and the index; return the file's record, and a future of its sync and closing."""
        while self._encoding:
            self._write_oldest()
        index = self._index.tobytes()
        # At the end, as its entries are known only then; so a shard is written front to back, and synced once.
        self._write(index + crc32c(index).to_bytes(CRC_BYTES, "little"))
        return FileRecord(self._n_bytes, self._crc), self._pool.sync(self._sync)

    def _sync(self) -> None:
        try:
            self._make_durable(self._fd, self._path)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the file without an index; the caller deletes it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_oldest(self) -> None:
        """Write the chunks of the oldest task, waiting for them."""
        for data in self._encoding[0].result():
            self._index[divmod(self._n_chunks, self._grid.chunks_per_row)] = self._n_bytes, len(data)
            self._n_chunks += 1
            self._write(data)
        self._encoding.popleft()

    def _write(self, data: bytes) -> None:
        with disk_full_guard(self._path):
            write_all(self._fd, data)
        self._n_bytes += len(data)
        self._crc = zlib.crc32(data, self._crc)
