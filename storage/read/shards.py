"""The shards of a store's parts, opened for reading: grids and indexes, each read once and kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial

import numpy as np

from ...errors import StoreDamaged
from ..backend import MISSING, LocalFile, crc32c, read_file, scratch_bytes
from ..chunk import CRC_BYTES, decode_chunk
from ..commit import FileRecord, PartCommit
from ..grid import ArrayGrid, grid_from_metadata
from ..paths import RemotePath, StorePath
from ..read_cache import ReadCache, RemoteFile
from ..schema import PARTS_NAME, ZARR_NAME, StoredArray, StoreManifest

MAX_SHARDS = 4096
"""Shards whose indexes a reader keeps: each has 16 bytes per inner chunk, 128 KiB for a shard of 2 GiB."""
_REPAIR = "Delete the part's file in commits/ and run extract again: it redoes that part only."


class ShardReader:
    """A shard and its index; safe in threads and after a fork. The file is closed when the reader is garbage.

    Args:
        n_rows: rows of inner chunks that must be present (fewer than ``rows_per_shard`` in the last shard).
        record: size and checksum of the file, as its commit has them.
        cache: keeps on a disk what is read of a remote file.

    Attributes:
        index: int64 [n_rows, chunks_per_row, 2]: offset and bytes of each inner chunk.

    Raises:
        StoreDamaged: no such file, or its index is damaged.
    """

    def __init__(
        self, path: StorePath, grid: ArrayGrid, n_rows: int, record: FileRecord, cache: ReadCache | None = None
    ) -> None:
        self.path = path
        self.grid = grid
        self.chunk_size = math.prod(grid.chunk_shape)
        self.file: LocalFile | RemoteFile = (
            RemoteFile(path, record, cache) if isinstance(path, RemotePath) else LocalFile(path)
        )
        self.index = self._read_index(n_rows, record.bytes)

    def _read_index(self, n_rows: int, file_bytes: int) -> np.ndarray:
        shape = (self.grid.rows_per_shard, self.grid.chunks_per_row, 2)
        index_bytes = math.prod(shape) * 8
        data_bytes = file_bytes - index_bytes - CRC_BYTES
        if data_bytes < 0:
            raise StoreDamaged(f"{self.path} has {file_bytes} bytes, too few for its index. {_REPAIR}")
        tail = np.empty(index_bytes + CRC_BYTES, np.uint8)
        if self._read_into(data_bytes, tail) < len(tail):
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

    def _read_into(self, offset: int, out: np.ndarray) -> int:
        try:
            return self.file.read_into(offset, out)
        except MISSING as error:
            raise StoreDamaged(f"{self.path} is missing. {_REPAIR}") from error

    def read_bytes(self, offset: int, n_bytes: int) -> np.ndarray:
        """Return bytes of the file in this thread's scratch memory: valid until the thread's next call."""
        raw = scratch_bytes("raw", n_bytes)
        if (n_read := self._read_into(offset, raw)) < n_bytes:
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


class PartShards:
    """Finds stored arrays' shards and counts stored bytes read of them; safe in threads and after a fork."""

    def __init__(
        self,
        store: StorePath,
        manifest: StoreManifest,
        commits: Mapping[int, PartCommit],
        cache: ReadCache | None = None,
    ) -> None:
        self._folder, self._n_parts, self._commits = store / PARTS_NAME, manifest.n_parts, commits
        self._longest_part = max((commit.allocated_tokens for commit in commits.values()), default=0)
        self.n_bytes_read = 0
        self._grids: dict[str, tuple[StoredArray, ArrayGrid]] = {}
        # Not of a method, which would keep this object, and with it all open files, until the garbage is collected.
        self._open = lru_cache(MAX_SHARDS)(partial(_open, self._folder, commits, self._grids, cache))

    def grid(self, array: StoredArray) -> ArrayGrid:
        """Return the grid of an array, which all parts share; StoreDamaged where its metadata is not as declared."""
        found = self._grids.get(array.name)
        if found is None:  # read twice where threads meet
            found = self._grids[array.name] = (array, self._read_grid(array))
        return found[1]

    def shard(self, part: int, array: StoredArray, number: int) -> ShardReader:
        """Return the shard of that number, its index read and checked."""
        self.grid(array)
        return self._open(part, array.name, number)

    def close(self) -> None:
        """Close all files; asking for a shard opens it again."""
        self._open.cache_clear()

    def _read_grid(self, array: StoredArray) -> ArrayGrid:
        path = self._folder / array.name / ZARR_NAME
        try:
            text = read_file(path)
        except MISSING as error:
            raise StoreDamaged(f"{path} is missing. Run extract again: it writes what is missing.") from error
        except ValueError as error:
            raise StoreDamaged(f"{path} is no metadata of an array: {error}.") from error
        grid = grid_from_metadata(text, array, str(path))
        unit, n_rows = array.axes[0], array.n_rows(self._longest_part)
        if grid.part_rows < max(n_rows, 1):
            raise StoreDamaged(f"{path} has room for {grid.part_rows} {unit}s of each part, the longest has {n_rows}.")
        if grid.shape[0] != self._n_parts * grid.part_rows:
            raise StoreDamaged(f"{path} has {grid.shape[0]} {unit}s, expected {self._n_parts * grid.part_rows}.")
        return grid


def _open(
    folder: StorePath,
    commits: Mapping[int, PartCommit],
    grids: Mapping[str, tuple[StoredArray, ArrayGrid]],
    cache: ReadCache | None,
    part: int,
    name: str,
    number: int,
) -> ShardReader:
    (array, grid), commit = grids[name], commits[part]
    n_chunk_rows = grid.n_chunk_rows(array.n_rows(commit.allocated_tokens))
    n_rows = min(grid.rows_per_shard, n_chunk_rows - number * grid.rows_per_shard)
    file = f"{name}/{grid.shard_key(part, number)}"
    if (record := commit.files.get(file)) is None:
        raise StoreDamaged(f"{folder / file} is not listed by the commit of part {part}. {_REPAIR}")
    return ShardReader(folder / file, grid, n_rows, record, cache)
