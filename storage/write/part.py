"""Writes one part of a store.

Sequences arrive in order. An inner chunk is encoded as soon as it is full. The commit is written
last. Each array is stored in Zarr v3 shards (``sharding_indexed``). A shard holds its encoded inner
chunks in the order in which they were written, followed by its index.

Numbers in the following diagrams without a unit are sizes in bytes. The shard ``kv/c.0.0.0.0.0`` of
Llama-3-8B holds 16,384 tokens of 32 layers with 8 KV heads of size 128. It has 2.1 GB of raw values
and 1.5 GB of stored bytes::

    | chunk 0,0 | chunk 0,1 | ... | chunk 0,31 | chunk 1,0 | ... | chunk 255,31 | index   | crc32c |
      layer 0     layer 1           layer 31     layer 0           layer 31       131,072   4
      tokens 0 to 63                             64 to 127         16,320 to 16,383

One chunk holds 64 tokens x 1 layer x 8 heads x 2 x 128 values in bfloat16. Its 262,144 raw bytes
are encoded in about 181,000 bytes::

    | header | offset of the block: 20 | size | low bytes | size | coded high bytes | crc32c |
      16       4                         4      131,072     4      50,000             4
    +------------------------------- blosc frame -----------------------------------+

The index has 256 rows x 32 columns of (offset uint64, n_bytes uint64), in C order. To read one
layer of 64 tokens, a reader reads the index once and then one chunk.

An index entry of 2**64 - 1 twice means that the chunk does not exist. Only positions after the end
of a part have such entries. A chunk of zeros is written like any other chunk, so that a lost chunk
is never read as zeros.
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
"""Raw bytes that a thread encodes in one task.

A task takes about 1.5 ms, which is much longer than handing it to the thread.
"""


class ShardWriter:
    """Writes one shard sequentially. Only the index and unfinished chunks are held in memory.

    Args:
        path: path of the new file.
        grid: grid of the array.
        pool: thread pool that encodes the chunks and syncs the file.
        make_durable: function of the file descriptor and the path that makes the finished file
            durable. It is called on the pool's sync thread.
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
            # O_EXCL ensures that no two writers use the same partial name, and that a symbolic link
            # with this name is not followed.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    @property
    def is_full(self) -> bool:
        """Whether all rows of inner chunks have been appended."""
        return self._row == self._grid.rows_per_shard

    def append_row(self, values: np.ndarray) -> None:
        """Start encoding the next row of inner chunks, and write chunks that are encoded.

        Args:
            values: values of the row. They must not change until :meth:`settle` has returned.
        """
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
        """Wait until all appended values are encoded. The caller may change them afterwards."""
        for task in self._encoding:
            task.result()

    def finish(self) -> tuple[FileRecord, Future[None]]:
        """Write the remaining chunks and the index.

        Returns:
            The file's record, and a future that is done when the file is synced and closed.
        """
        while self._encoding:
            self._write_oldest()
        index = self._index.tobytes()
        # The index is at the end of the file, because its entries are known only now. This way a
        # shard is written sequentially and synced once.
        self._write(index + crc32c(index).to_bytes(CRC_BYTES, "little"))
        return FileRecord(self._n_bytes, self._crc), self._pool.sync(self._sync)

    def _sync(self) -> None:
        try:
            self._make_durable(self._fd, self._path)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the file without writing an index. The caller deletes the file."""
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
    """Streams one stored array of a part into shards. It buffers at most one row of chunks.

    Args:
        array: the stored array.
        counts: counts of the part (``plan.part_counts``).
        grid: grid of the array.
        pool: thread pool that encodes chunks and syncs files.
        files: the part's files, which determine the paths of the shards.
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
        self.records: dict[str, FileRecord] = {}  # Records of the finished shards, by file name.
        self.written: list[list[int]] = []  # Ranges [first, stop] of the rows that were written.
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
        """Write consecutive rows. Rows that are skipped since the last call become zero.

        Args:
            first_row: index of the first row in the part.
            values: [n, *row_shape] in the array's dtype.
        """
        self._check(first_row, values)
        if not len(values):
            return
        if self.written and self.written[-1][1] == first_row:
            self.written[-1][1] += len(values)
        else:
            self.written.append([first_row, first_row + len(values)])
        size = self._grid.chunk_tokens
        n_written = 0
        while n_written < len(values):
            row, offset = divmod(first_row + n_written, size)
            self._flush_rows(row)
            n = min(size - offset, len(values) - n_written)
            if n == size:
                # A complete row of chunks is encoded without a copy.
                self._append(values[n_written : n_written + n])
            else:
                self._row[offset : offset + n] = values[n_written : n_written + n]
                self._row_is_clean = False
            n_written += n

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
                f"[n, {', '.join(map(str, array.row_shape))}] ({array.logical_dtype}), got "
                f"{values.dtype} {list(values.shape)}."
            )
        if self.written and first_row < self.written[-1][1]:
            raise StoreError(
                f"{array.name!r}: {unit} {first_row} comes before {self.written[-1][1]}, the end "
                "of what is written. Write in increasing order."
            )
        if end > self._n_rows:
            raise StoreError(
                f"{array.name!r}: {unit}s {first_row} to {end} lie beyond the part's "
                f"{self._n_rows}."
            )

    def _flush_rows(self, row: int) -> None:
        """Append the buffered row of chunks, then rows of zeros, until ``row`` is the next row."""
        while self._n_rows_done < row:
            self._append(self._row)
            if not self._row_is_clean:
                # Allocate a new buffer, because an encoder may still read the old one.
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
        """Wait until all values passed to :meth:`write` are encoded."""
        if self._shard is not None:
            self._shard.settle()

    def finish(self) -> None:
        """Fill the rest of the part with zeros and finish the last shard.

        Call :meth:`wait_synced` afterwards.
        """
        self._flush_rows(self._grid.n_chunk_rows(self._n_rows))
        self._finish_shard()

    def wait_synced(self) -> None:
        """Wait until every shard is durable."""
        for synced in self._syncs:
            synced.result()

    def abort(self) -> None:
        """Close the open shard and delete local files that do not have their final name yet."""
        if self._shard is not None:
            self._shard.abort()
            self._shard = None
        for number in range(self._n_shards):
            self._files.path_of(self._shard_name(number)).unlink(missing_ok=True)


class PartWriter(AbstractContextManager["PartWriter"]):
    """Writes a part, or additional fields of a part.

    If the ``with`` block ends without a call of :meth:`commit`, the part is discarded. A PartWriter
    must not be used by several threads at once. Different threads may write different parts of the
    same store.

    Args:
        sequences: the sequences of the part, in plan order.
        counts: counts of the part, which the commit must have (``plan.part_counts``).
        codec: codec of the fields to write.
        grids: the grid of each array, by array name.
        files: the part's files.
        on_close: called when the part is closed. Its argument says whether the part is committed.
        pool: thread pool that encodes. Values must then not change until :meth:`settle` or
            :meth:`commit` has returned. Without a pool the caller's thread encodes, and values may
            change as soon as :meth:`write` returns.
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
        self.is_open = True  # Whether the part is neither committed nor discarded yet.
        # False if commit() found that another writer has committed the part.
        self.was_first = True
        self.codec = codec  # Codec of the fields to write.
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
        """Write consecutive tokens of a field.

        If the field has a lossy codec, each call writes exactly one encoded sequence.

        Args:
            field: name of the field.
            first_token: position of the first token on the part's token axis (``first_token`` in
                the plan). It must increase from call to call within a field. Skipped tokens become
                zero.
            values: [n, *token_shape] in the storage dtype (a bfloat16 value is passed as its bits
                in uint16). For a field with a lossy codec, the rows of each stored array, as
                ``StoreCodec.encode`` returns them.

        Raises:
            StoreError: the field is unknown, or the values have a wrong dtype, shape, order or
                range. With a lossy codec also if they are not the rows of one planned sequence.
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
                f"{field!r} is stored as {', '.join(names)}. Write the rows of one planned "
                "sequence per call, as StoreCodec.encode returns them. Tokens of the planned "
                f"sequence that starts at token {first_token}: {n_tokens or 'none'}."
            )
        for array in codec.arrays:
            rows = values[array.name]
            if len(rows) != array.n_rows(n_tokens):
                raise StoreError(
                    f"{array.name!r}: {n_tokens} tokens make {array.n_rows(n_tokens)} rows, got "
                    f"{len(rows)}."
                )
            self._arrays[array.name].write(first_token // array.block_tokens, rows)

    def _check_open(self) -> None:
        if not self.is_open:
            raise StoreError(f"Part {self.part} is closed; open it again with StoreWriter.part.")

    def settle(self) -> None:
        """Wait until all values passed to :meth:`write` are encoded.

        The caller may change them afterwards.
        """
        for array in self._arrays.values():
            array.settle()

    def commit(self) -> PartCommit:
        """Finish and sync all shards, rename them to their final names and write the commit.

        If another writer has committed the part in the meantime, its commit stays, and the files of
        this writer are deleted.

        Returns:
            The part's commit.

        Raises:
            StoreError: a planned sequence was not written to every field.
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
            # For each sequence, find the last range that starts at or before it. This range must
            # reach the end of the sequence.
            position = np.searchsorted(ranges[:, 0], first, side="right") - 1
            covered = position >= 0
            covered[covered] = ranges[position[covered], 1] >= stop[covered]
            if not covered.all():
                row = int(np.flatnonzero(~covered)[0])
                n_missing = int((~covered).sum())
                raise StoreError(
                    f"Part {self.part}: {n_missing} of {len(first)} sequences were not written to "
                    f"{name!r}, the first at tokens {first_token[row]} to {stop_token[row]}. Write "
                    "them all before commit()."
                )

    def discard(self) -> None:
        """Delete the files of an uncommitted part.

        A new part stays pending. An existing part keeps its old fields.
        """
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
