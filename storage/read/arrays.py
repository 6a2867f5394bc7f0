"""The stored arrays of all parts: their grids and the indexes of their shards, each read once and kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from ..chunks.field import StoredArray
from ..disk.checking import MISSING
from ..documents import read_bounded
from ..errors import ShardCorrupt, ShardMissing
from ..names import part_path
from ..parts.commit import PartCommit
from ..parts.grid import ArrayGrid, grid_from_metadata
from .shard import ShardReader

_MAX_GRIDS = 1 << 16
# A reader keeps its shard's index, which has 16 bytes per inner chunk: about 8 KiB for a shard of 128 MiB.
_MAX_SHARDS = 1 << 13

K = TypeVar("K")
V = TypeVar("V")


class PartArrays:
    """Finds stored arrays' shards and counts stored bytes read of them; safe in threads and after a fork."""

    def __init__(self, store: Path, commits: Mapping[int, PartCommit]) -> None:
        self._store, self._commits = store, commits
        self.n_bytes_read = 0
        self._grids = _Cache[tuple[int, str], ArrayGrid](_MAX_GRIDS)
        self._shards = _Cache[tuple[int, str, int], ShardReader](_MAX_SHARDS)

    def grid(self, part: int, array: StoredArray) -> ArrayGrid:
        """Return the grid of an array in a part.

        Raises:
            ShardMissing: its metadata is gone.
            ShardCorrupt: its metadata is not what the manifest and the commit declare.
        """
        return self._grids.get((part, array.name), partial(self._read_grid, part, array))

    def shard(self, part: int, array: StoredArray, number: int) -> ShardReader:
        """Return the shard of that number, its index read and checked."""
        return self._shards.get((part, array.name, number), partial(self._open, part, array, number))

    def close(self) -> None:
        """Close all files; asking for a shard opens it again."""
        self._shards.clear()

    def _read_grid(self, part: int, array: StoredArray) -> ArrayGrid:
        path = part_path(self._store, part) / array.name / "zarr.json"
        try:
            text = read_bounded(path)
        except MISSING as error:
            raise ShardMissing(f"{path} is missing. Run extract again: it redoes that part only.") from error
        except ValueError as error:
            raise ShardCorrupt(f"{path} is no metadata of an array: {error}.") from error
        grid = grid_from_metadata(text, array, str(path))
        n_rows = array.n_rows(self._commits[part].allocated_tokens)
        if grid.shape[0] != n_rows:
            unit = array.axes[0]
            raise ShardCorrupt(f"{path} has {grid.shape[0]} {unit}s, its commit says {n_rows}.")
        return grid

    def _open(self, part: int, array: StoredArray, number: int) -> ShardReader:
        grid = self.grid(part, array)
        path = part_path(self._store, part) / array.name / grid.shard_key(number)
        n_rows = min(grid.rows_per_shard, grid.n_rows - number * grid.rows_per_shard)
        return ShardReader(path, grid, n_rows)


class _Cache(Generic[K, V]):
    """Bounded cache that drops the oldest entry; its lock is made anew in a forked child."""

    def __init__(self, size: int) -> None:
        self._size = size
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
            while len(self._entries) >= self._size:
                # A reader in use by another thread stays open until that thread lets go of it.
                del self._entries[next(iter(self._entries))]
            return self._entries.setdefault(key, value)

    def clear(self) -> None:
        """Drop every entry."""
        with self._own_lock():
            self._entries.clear()

    def _own_lock(self) -> threading.Lock:
        if self._pid != os.getpid():
            # Another thread of the parent may have held the lock at the moment of the fork.
            self._lock, self._pid = threading.Lock(), os.getpid()
        return self._lock
