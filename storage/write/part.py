"""Writes one part: sequences arrive in order, inner chunks are encoded as they fill, the commit comes last.

Each array goes into Zarr v3 shards (``sharding_indexed``): encoded inner chunks in the order written, then the index.

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

import os
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow as pa

from ...errors import StoreError
from ...files import FILE_MODE, disk_full_guard, naming, write_all
from ..backend import crc32c
from ..chunk import CRC_BYTES, EncodePool
from ..codecs.registry import StoreCodec
from ..commit import FileRecord, PartCommit
from ..grid import ArrayGrid
from ..plan import numbers
from ..schema import StoredArray
from .publish import PartFiles

_ABSENT = np.uint64(2**64 - 1)
TASK_BYTES = 1 << 20
"""Raw bytes that a thread encodes at a time: about 1.5 ms of work, long against the time to hand it over."""


class ShardWriter:
    """Writes one shard front to back; memory holds the index and the chunks that are being encoded.

    Args:
        pool: encodes the chunks, and syncs the file.
        make_durable: makes the finished file durable, given its descriptor and path, on the pool's thread for that.
    """

    def __init__(
        self,
        path: Path,
        grid: ArrayGrid,
        pool: EncodePool,
        make_durable: Callable[[int, Path], None],
    ) -> None:
        self._path = path
        self._grid = grid
        self._pool = pool
        self._make_durable = make_durable
        self._encoding: deque[Future[list[bytes]]] = deque()
        self._index = np.full((grid.rows_per_shard, grid.chunks_per_row, 2), _ABSENT, "<u8")
        self._row = 0
        self._n_chunks = 0
        self._n_bytes = 0
        self._crc = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk_full_guard(path):
            # O_EXCL: no two writers have a partial name in common, and a link in its place is not
            # followed.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    @property
    def is_full(self) -> bool:
        """Whether every row of inner chunks has been given."""
        return self._row == self._grid.rows_per_shard

    def append_row(self, values: np.ndarray) -> None:
        """Encode the next row of inner chunks, which must not change until :meth:`settle`, and write what is ready."""
        step = self._grid.chunk_layers
        columns = range(self._grid.chunks_per_row)
        chunks = [
            values[:, column * step : (column + 1) * step] if values.ndim > 1 else values
            for column in columns
        ]
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
        # At the end, as its entries are known only then; so a shard is written front to back, and
        # synced once.
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
        for data in self._encoding[0].result():
            self._index[divmod(self._n_chunks, self._grid.chunks_per_row)] = (
                self._n_bytes,
                len(data),
            )
            self._n_chunks += 1
            self._write(data)
        self._encoding.popleft()

    def _write(self, data: bytes) -> None:
        with disk_full_guard(self._path), naming(self._path):
            write_all(self._fd, data)
        self._n_bytes += len(data)
        self._crc = zlib.crc32(data, self._crc)


class ArrayWriter:
    """Streams one stored array of a part into shards, buffering at most one row of chunks.

    Args:
        counts: of the part (``plan.part_counts``).
        files: where the shards are written.
    """

    def __init__(
        self,
        array: StoredArray,
        counts: Mapping[str, int],
        grid: ArrayGrid,
        pool: EncodePool,
        files: PartFiles,
    ) -> None:
        self.array = array
        self.records: dict[str, FileRecord] = {}  # of the shards that are finished
        self.written: list[list[int]] = []  # [first, stop] of each run of rows that was given
        self._part = counts["part"]
        self._grid = grid
        self._pool = pool
        self._files = files
        self._syncs: list[Future[None]] = []
        self._n_rows = array.n_rows(counts["allocated_tokens"])
        self._row = np.zeros((grid.chunk_tokens, *array.row_shape), array.storage_dtype)
        self._row_is_clean = True
        self._n_rows_done = 0
        self._shard: ShardWriter | None = None
        self._n_shards = 0

    def write(self, first_row: int, values: np.ndarray) -> None:
        """Write consecutive rows, [n, *row_shape] in the array's dtype; rows skipped since the last call are zero."""
        self._check(first_row, values)
        if not len(values):
            return
        if self.written and self.written[-1][1] == first_row:
            self.written[-1][1] += len(values)
        else:
            self.written.append([first_row, first_row + len(values)])
        size = self._grid.chunk_tokens
        at = 0
        while at < len(values):
            row, offset = divmod(first_row + at, size)
            self._flush_rows(row)
            n = min(size - offset, len(values) - at)
            if n == size:
                self._append(values[at : at + n])  # a whole row of chunks is encoded without a copy
            else:
                self._row[offset : offset + n] = values[at : at + n]
                self._row_is_clean = False
            at += n

    def _check(self, first_row: int, values: np.ndarray) -> None:
        array = self.array
        unit = self.array.axes[0]
        end = first_row + len(values)
        if (
            values.dtype != array.storage_dtype
            or values.shape[1:] != array.row_shape
            or values.ndim < 1
        ):
            raise StoreError(
                f"{array.name!r} takes {array.storage_dtype.name} arrays of shape "
                f"[n, {', '.join(map(str, array.row_shape))}] ({array.logical_dtype}), got {values.dtype} "
                f"{list(values.shape)}."
            )
        if self.written and first_row < self.written[-1][1]:
            raise StoreError(
                f"{array.name!r}: {unit} {first_row} comes before {self.written[-1][1]}, the end of what is written. "
                "Write in increasing order."
            )
        if end > self._n_rows:
            raise StoreError(
                f"{array.name!r}: {unit}s {first_row} to {end} lie beyond the part's {self._n_rows}."
            )

    def _flush_rows(self, row: int) -> None:
        """Write out the buffered row and rows of zeros until ``row`` is the next one."""
        while self._n_rows_done < row:
            self._append(self._row)
            if not self._row_is_clean:
                # a new one: an encoder may still read the other
                self._row = np.zeros_like(self._row)
                self._row_is_clean = True

    def _append(self, values: np.ndarray) -> None:
        if self._shard is None:
            path = self._files.path_of(self._shard_name(self._n_shards))
            self._shard = ShardWriter(path, self._grid, self._pool, self._files.make_durable)
            self._n_shards += 1
        self._shard.append_row(values)
        self._n_rows_done += 1
        if self._shard.is_full:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            record, synced = self._shard.finish()
            self.records[self._shard_name(self._n_shards - 1)] = record
            self._syncs.append(synced)
            self._shard = None

    def _shard_name(self, number: int) -> str:
        return f"{self.array.name}/{self._grid.shard_key(self._part, number)}"

    def settle(self) -> None:
        """Wait until all values given to :meth:`write` are encoded."""
        if self._shard is not None:
            self._shard.settle()

    def finish(self) -> None:
        """Fill up to the end of the part with zeros and end the last shard; :meth:`wait_synced` comes after it."""
        self._flush_rows(self._grid.n_chunk_rows(self._n_rows))
        self._finish_shard()

    def wait_synced(self) -> None:
        """Wait until every shard is durable."""
        for synced in self._syncs:
            synced.result()

    def abort(self) -> None:
        """Close the open shard and delete the local files of shards that have no final name."""
        if self._shard is not None:
            self._shard.abort()
            self._shard = None
        for number in range(self._n_shards):
            self._files.path_of(self._shard_name(number)).unlink(missing_ok=True)


class PartWriter(AbstractContextManager["PartWriter"]):
    """Writes a part, or more fields of one. Leaving the ``with`` block without :meth:`commit` discards it.

    Not safe for several threads at once; different parts of one store may be written by different threads.

    Args:
        counts: what its commit must say (``plan.part_counts``).
        grids: array name -> its grid.
        on_close: called once nothing more is written, with whether the part is committed.
        pool: encodes on threads of its own; values must then not change until :meth:`settle` or :meth:`commit`.
            Without one the caller's thread encodes, and they may change as soon as :meth:`write` returns.
    """

    def __init__(
        self,
        sequences: pa.Table,
        counts: Mapping[str, int],
        codec: StoreCodec,
        grids: Mapping[str, ArrayGrid],
        files: PartFiles,
        on_close: Callable[[bool], None],
        pool: EncodePool | None = None,
    ) -> None:
        self.sequences = sequences
        self.part = counts["part"]
        self.allocated_tokens = counts["allocated_tokens"]
        self.is_open = True  # neither committed nor discarded yet
        # the committed part is this one; no longer once commit() found another writer's
        self.was_first = True
        self.codec = codec  # of the fields to write
        self._counts = counts
        self._files = files
        self._on_close = on_close
        starts, lengths = (sequences[name].to_pylist() for name in ("first_token", "n_tokens"))
        self._planned: dict[int, int] = dict(zip(starts, lengths, strict=True))
        pool = pool or EncodePool()
        self._arrays = {
            array.name: ArrayWriter(array, counts, grids[array.name], pool, files)
            for array in codec.arrays
        }

    def write(
        self, field: str, first_token: int, values: np.ndarray | Mapping[str, np.ndarray]
    ) -> None:
        """Write consecutive tokens of a field; with a lossy codec exactly one sequence, encoded.

        Args:
            first_token: position of the first of them on the part's token axis (``first_token`` of the plan); within a
                field it only grows. Tokens that are skipped become zero.
            values: [n, *token_shape] in the storage dtype (uint16 bits for bfloat16); of a field with a lossy codec the
                rows of each stored array, as ``StoreCodec.encode`` makes them.

        Raises:
            StoreError: unknown field, wrong dtype, shape, order or range; with a lossy codec also something else than
                the rows of one planned sequence.
        """
        self._check_open()
        if (codec := self.codec.fields.get(field)) is None:
            raise StoreError(
                f"{field!r} is not a field of this store, which has {', '.join(self.codec.fields)}."
            )
        if codec.is_identity and isinstance(values, np.ndarray):
            self._arrays[codec.arrays[0].name].write(first_token, values)
            return
        n_tokens = self._planned.get(first_token)
        names = [array.name for array in codec.arrays]
        if n_tokens is None or isinstance(values, np.ndarray) or values.keys() != set(names):
            raise StoreError(
                f"{field!r} is stored as {', '.join(names)}: write the rows of one sequence of the plan per call, as "
                f"StoreCodec.encode makes them. At token {first_token} the plan has {n_tokens or 'none'}."
            )
        for array in codec.arrays:
            rows = values[array.name]
            if len(rows) != array.n_rows(n_tokens):
                raise StoreError(
                    f"{array.name!r}: {n_tokens} tokens make {array.n_rows(n_tokens)} rows, got {len(rows)}."
                )
            self._arrays[array.name].write(first_token // array.block_tokens, rows)

    def _check_open(self) -> None:
        if not self.is_open:
            raise StoreError(f"Part {self.part} is closed; open it again with StoreWriter.part.")

    def settle(self) -> None:
        """Wait until all values given to :meth:`write` are encoded; they may then change."""
        for array in self._arrays.values():
            array.settle()

    def commit(self) -> PartCommit:
        """Make the part exist: finish and sync every shard, give it its name, write the commit.

        Where another writer has committed the part meanwhile, that commit stays, and this one's files are deleted.
        StoreError where a planned sequence was not written to every field.
        """
        self._check_open()
        self._check_complete()
        with disk_full_guard(self._files.commit_path):
            for array in self._arrays.values():
                array.finish()
            for array in self._arrays.values():
                array.wait_synced()
            records = {
                name: record
                for array in self._arrays.values()
                for name, record in array.records.items()
            }
            commit = PartCommit(
                **self._counts, files=dict(sorted({**self._files.existing, **records}.items()))
            )
            commit, self.was_first = self._files.publish(commit, records)
        self.is_open = False
        self._on_close(True)
        return commit

    def _check_complete(self) -> None:
        first_token = numbers(self.sequences, "first_token")
        stop_token = first_token + numbers(self.sequences, "n_tokens")
        for name, array in self._arrays.items():
            first = first_token // array.array.block_tokens
            stop = -(-stop_token // array.array.block_tokens)
            ranges = np.array(array.written, np.int64).reshape(-1, 2)
            # The range that starts last at or before a sequence must reach its end.
            at = np.searchsorted(ranges[:, 0], first, side="right") - 1
            covered = at >= 0
            covered[covered] = ranges[at[covered], 1] >= stop[covered]
            if not covered.all():
                row = int(np.flatnonzero(~covered)[0])
                n_missing = int((~covered).sum())
                raise StoreError(
                    f"Part {self.part}: {n_missing} of {len(first)} sequences were not written to {name!r}, the first "
                    f"at tokens {first_token[row]} to {stop_token[row]}. Write them all before commit()."
                )

    def discard(self) -> None:
        """Delete the files of an uncommitted part: it stays pending, or without the new fields."""
        if not self.is_open:
            return
        self.is_open = False
        for array in self._arrays.values():
            array.abort()
        is_committed = False
        try:
            is_committed = self._files.withdraw()
        finally:
            self._on_close(is_committed)

    def __exit__(self, *_: object) -> None:
        self.discard()
