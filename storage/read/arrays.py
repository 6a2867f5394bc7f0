"""The stored arrays of all parts: their grids and the indexes of their shards, each read once and kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, TypeVar

from ...errors import StoreDamaged
from ..chunks.field import StoredArray
from ..disk.checking import MISSING
from ..disk.files import CachedAs
from ..disk.read_cache import ReadCache
from ..documents import read_bounded
from ..names import ZARR_NAME, part_folder
from ..parts.commit import PartCommit
from ..parts.grid import ArrayGrid, grid_from_metadata
from ..paths import StorePath
from ..schema import StoreManifest
from .shard import ShardReader

_MAX_GRIDS = 1 << 16
_MAX_INDEX_BYTES = 256 << 20
"""A reader keeps its shard's index, which has 16 bytes per inner chunk: 128 KiB for a shard of 2 GiB."""

K = TypeVar("K")
V = TypeVar("V")


class PartArrays:
    """Finds stored arrays' shards and counts stored bytes read of them; safe in threads and after a fork."""

    def __init__(
        self,
        store: StorePath,
        manifest: StoreManifest,
        commits: Mapping[int, PartCommit],
        cache: ReadCache | None = None,
    ) -> None:
        self._store, self._manifest, self._commits = store, manifest, commits
        self._cache = cache
        self._has_part_groups = manifest.schema_version == 1
        self._longest_part = max((commit.allocated_tokens for commit in commits.values()), default=0)
        self.n_bytes_read = 0
        self._grids = _Cache[tuple[int, str], ArrayGrid](_MAX_GRIDS, lambda grid: 1)
        self._shards = _Cache[tuple[int, str, int], ShardReader](_MAX_INDEX_BYTES, lambda shard: shard.index.nbytes)

    def grid(self, part: int, array: StoredArray) -> ArrayGrid:
        """Return the grid of an array in a part.

        Raises:
            StoreDamaged: its metadata is gone.
            StoreDamaged: its metadata is not what the manifest and the commit declare.
        """
        key = (part if self._has_part_groups else 0, array.name)
        return self._grids.get(key, partial(self._read_grid, part, array))

    def shard(self, part: int, array: StoredArray, number: int) -> ShardReader:
        """Return the shard of that number, its index read and checked."""
        return self._shards.get((part, array.name, number), partial(self._open, part, array, number))

    def close(self) -> None:
        """Close all files; asking for a shard opens it again."""
        self._shards.clear()

    def _read_grid(self, part: int, array: StoredArray) -> ArrayGrid:
        path = self._folder(part) / array.name / ZARR_NAME
        try:
            text = read_bounded(path)
        except MISSING as error:
            raise StoreDamaged(f"{path} is missing. Run extract again: it writes what is missing.") from error
        except ValueError as error:
            raise StoreDamaged(f"{path} is no metadata of an array: {error}.") from error
        grid = grid_from_metadata(text, array, str(path))
        unit, shared = array.axes[0], not self._has_part_groups
        n_rows = array.n_rows(self._longest_part if shared else self._commits[part].allocated_tokens)
        if (grid.part_rows > 0) != shared or (shared and grid.part_rows < n_rows):
            raise StoreDamaged(f"{path} has room for {grid.part_rows} {unit}s of each part, the longest has {n_rows}.")
        n_rows = self._manifest.n_parts * grid.part_rows if shared else n_rows
        if grid.shape[0] != n_rows:
            raise StoreDamaged(f"{path} has {grid.shape[0]} {unit}s, expected {n_rows}.")
        return grid

    def _open(self, part: int, array: StoredArray, number: int) -> ShardReader:
        grid = self.grid(part, array)
        commit = self._commits[part]
        name = f"{array.name}/{grid.shard_key(part, number)}"
        n_chunk_rows = grid.n_chunk_rows(array.n_rows(commit.allocated_tokens))
        n_rows = min(grid.rows_per_shard, n_chunk_rows - number * grid.rows_per_shard)
        record = commit.files.get(name)
        path = self._folder(part) / name
        if record is None:
            return ShardReader(path, grid, n_rows)
        cached = None if self._cache is None else CachedAs(self._cache, f"{path} {record.bytes} {record.crc32:08x}")
        return ShardReader(path, grid, n_rows, record.bytes, cached)

    def _folder(self, part: int) -> StorePath:
        return part_folder(self._store, part, self._manifest.schema_version)


class _Cache(Generic[K, V]):
    """Bounded cache that drops the oldest entries; its lock is made anew in a forked child.

    Args:
        size: of all entries together at most, each counted by ``size_of``.
    """

    def __init__(self, size: int, size_of: Callable[[V], int]) -> None:
        self._size, self._size_of = size, size_of
        self._n_used = 0
        self._entries: dict[K, V] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the entry, made on first use (possibly twice when threads meet)."""
        value = self._entries.get(key)  # without the lock: a lookup in a dict is atomic
        if value is not None:
            return value
        value = make()
        with self._own_lock():
            if key in self._entries:
                return self._entries[key]
            self._n_used += self._size_of(value)
            while self._n_used > self._size and self._entries:
                # A reader in use by another thread stays open until that thread lets go of it.
                self._n_used -= self._size_of(self._entries.pop(next(iter(self._entries))))
            self._entries[key] = value
            return value

    def clear(self) -> None:
        """Drop every entry."""
        with self._own_lock():
            self._entries.clear()
            self._n_used = 0

    def _own_lock(self) -> threading.Lock:
        if self._pid != os.getpid():
            # Another thread of the parent may have held the lock at the moment of the fork.
            self._lock, self._pid = threading.Lock(), os.getpid()
        return self._lock
