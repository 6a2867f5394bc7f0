"""One shard opened for reading: its index, and the decoding of its inner chunks. ``parts.shard`` draws the format."""

from __future__ import annotations

import math

import numpy as np

from ...errors import StoreDamaged
from ..chunks.chunk import CRC_BYTES, decode_chunk
from ..disk.checking import MISSING
from ..disk.durable import crc32c
from ..disk.files import CachedAs, LocalFile, RemoteFile, open_file, scratch_bytes
from ..parts.grid import ArrayGrid
from ..paths import StorePath

_REPAIR = "Delete the part's file in commits/ and run extract again: it redoes that part only."


class ShardReader:
    """A shard and its index; safe in threads and after a fork. The file is closed when the reader is garbage.

    Args:
        n_rows: rows of inner chunks that must be present (fewer than ``rows_per_shard`` in the last shard).
        n_bytes: the file's bytes, where its commit tells them: to ask a server costs a request for each shard.
        cached: keeps on a disk what is read of a remote file.

    Attributes:
        index: int64 [n_rows, chunks_per_row, 2]: offset and bytes of each inner chunk.

    Raises:
        StoreDamaged: no such file.
        StoreDamaged: the index is damaged.
    """

    def __init__(
        self,
        path: StorePath,
        grid: ArrayGrid,
        n_rows: int,
        n_bytes: int | None = None,
        cached: CachedAs | None = None,
    ) -> None:
        self.path = path
        self.grid = grid
        self.chunk_size = math.prod(grid.chunk_shape)
        try:
            self.file: LocalFile | RemoteFile = open_file(path, n_bytes, cached)
            self.index = self._read_index(n_rows)
        except MISSING as error:
            raise self._missing() from error

    def _missing(self) -> StoreDamaged:
        return StoreDamaged(f"{self.path} is missing. {_REPAIR}")

    def _read_index(self, n_rows: int) -> np.ndarray:
        shape = (self.grid.rows_per_shard, self.grid.chunks_per_row, 2)
        index_bytes = int(np.prod(shape)) * 8
        file_bytes = self.file.n_bytes
        data_bytes = file_bytes - index_bytes - CRC_BYTES
        if data_bytes < 0:
            raise StoreDamaged(f"{self.path} has {file_bytes} bytes, too few for its index. {_REPAIR}")
        tail = np.empty(index_bytes + CRC_BYTES, np.uint8)
        if self.file.read_into(data_bytes, tail) < len(tail):
            raise StoreDamaged(f"{self.path} ends inside its index. {_REPAIR}")
        expected = int.from_bytes(tail[index_bytes:].tobytes(), "little")
        if (got := crc32c(tail[:index_bytes])) != expected:
            raise StoreDamaged(f"{self.path}: index checksum is {got:#010x}, expected {expected:#010x}. {_REPAIR}")
        index = tail[:index_bytes].view("<u8").reshape(shape)[:n_rows]
        # Offsets are compared before they are added: a sum could wrap around.
        offset, n_bytes = index[..., 0], index[..., 1]
        if bool(((offset > data_bytes) | (n_bytes > data_bytes)).any()) or bool((offset + n_bytes > data_bytes).any()):
            raise StoreDamaged(f"{self.path}: the index names chunks outside the file or absent ones. {_REPAIR}")
        return index.astype(np.int64)

    def prefetch(self, offset: int, n_bytes: int) -> None:
        """Ask for bytes of the file to be read ahead; returns at once."""
        try:
            self.file.prefetch(offset, offset + n_bytes)
        except MISSING as error:
            raise self._missing() from error

    def read_bytes(self, offset: int, n_bytes: int) -> np.ndarray:
        """Return bytes of the file in this thread's scratch memory: valid until the thread's next call."""
        raw = scratch_bytes("raw", n_bytes)
        try:
            n_read = self.file.read_into(offset, raw)
        except MISSING as error:
            raise self._missing() from error
        if n_read < n_bytes:
            raise StoreDamaged(f"{self.path} ends at byte {offset + n_read}, inside a chunk. {_REPAIR}")
        return raw

    def decode(self, data: np.ndarray, row: int, column: int, out: np.ndarray) -> None:
        """Check and decode one inner chunk.

        Args:
            data: uint8 [n_bytes], the chunk as it is stored.
            out: C-contiguous, of the chunk's shape; filled.
        """
        try:
            decode_chunk(data, out)
        except StoreDamaged as error:
            grid = self.grid
            layers = f", layers from {column * grid.chunk_layers}" if len(grid.shape) > 2 else ""
            where = f"tokens from {row * grid.chunk_tokens} of the shard{layers}"
            raise StoreDamaged(f"{self.path}: {error} ({where}). {_REPAIR}") from error
