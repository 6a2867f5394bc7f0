"""Writes one part of a store, a range of sequences that has a commit of its own.

The caller passes the sequences in the order of the plan. An inner chunk is encoded as soon as all
its rows have been passed. The commit, a file that lists all files of the part, is written last.
Each array is stored in Zarr v3 shards (``sharding_indexed``). A shard contains its encoded inner
chunks, followed by an index of their offsets and sizes.

For example, the shard ``kv/c.0.0.0.0.0`` of Llama-3-8B contains 16,384 tokens of 32 layers. Each
layer has 8 KV heads of size 128. The raw values have 2.1 GB, and the shard has 1.5 GB. Numbers
without a unit in these diagrams are sizes in bytes::

    | chunk 0,0 | chunk 0,1 | ... | chunk 0,31 | chunk 1,0 | ... | chunk 255,31 | index   | crc32c |
      layer 0     layer 1           layer 31     layer 0           layer 31       131,072   4
      tokens 0 to 63                             64 to 127         16,320 to 16,383

One chunk contains 64 tokens x 1 layer x 8 heads x 2 x 128 values in bfloat16. Its 262,144 raw
bytes are encoded in about 181,000 bytes::

    | header | offset of the block: 20 | size | low bytes | size | coded high bytes | crc32c |
      16       4                         4      131,072     4      50,000             4
    +------------------------------- blosc frame -----------------------------------+

The index is an array of 256 x 32 pairs (offset uint64, n_bytes uint64) in C order. To read one
layer of 64 tokens, a reader reads the index once and then one chunk.

If both numbers of a pair are ``2**64 - 1``, the shard does not contain the chunk. This is the case
only for chunks after the end of the part. Zarr libraries read a missing chunk as zeros. Even so, a
chunk of zeros is written like any other chunk. Otherwise, a lost chunk could not be distinguished
from a chunk of zeros.
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
from ..schema import StoredArray
from .publish import PartFiles

_ABSENT = np.uint64(2**64 - 1)
TASK_BYTES = 1 << 20
"""Number of raw bytes that a thread encodes in one task.

Encoding this number of bytes takes about 1.5 ms. Passing a task to a thread takes much less time.
"""


class ShardWriter:
    """Writes one shard sequentially. Only the index and the unwritten chunks are in memory.

    Args:
        path: path of the new file.
        grid: grid of the array.
        pool: thread pool that encodes the chunks and syncs the file.
        make_durable: function that syncs or uploads the finished file. It is called on the pool's
            sync thread with the file descriptor and the path.
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
            # With O_EXCL, opening fails if a file or a symbolic link with this temporary name
            # exists already.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    @property
    def is_full(self) -> bool:
        """Whether all inner chunks of the shard have been passed to :meth:`append_row`."""
        return self._row == self._grid.rows_per_shard

    def append_row(self, values: np.ndarray) -> None:
        """Start to encode the next row of inner chunks, and write chunks that are encoded already.

        Args:
            values: values of all inner chunks with the next index along axis 0, in one array. They
                must not change until the shard is finished.
        """
        chunks = [values]
        if values.ndim > 1:
            chunks = np.split(values, self._grid.chunks_per_row, axis=1)
        n_per_task = max(1, TASK_BYTES // chunks[0].nbytes)
        for first in range(0, len(chunks), n_per_task):
            self._encoding.append(self._pool.encode(chunks[first : first + n_per_task]))
        self._row += 1
        while len(self._encoding) > self._pool.n_ahead:
            self._write_oldest()

    def finish(self) -> Future[FileRecord]:
        """Write the remaining chunks and the index of the shard.

        Returns:
            A future. It is done when the shard is synced or uploaded, and its file is closed. The
            result of the future is the size and checksum of the file.
        """
        while self._encoding:
            self._write_oldest()
        index = self._index.tobytes()
        # The index contains the sizes of the encoded chunks, which are known only now. Because the
        # index is at the end of the file, the shard is written sequentially and synced once.
        self._write(index + crc32c(index).to_bytes(CRC_BYTES, "little"))
        return self._pool.sync(self._sync)

    def _sync(self) -> FileRecord:
        try:
            self._make_durable(self._fd, self._path)
        finally:
            self.abort()
        return FileRecord(self._n_bytes, self._crc)

    def abort(self) -> None:
        """Close the file of an unfinished shard. The caller then deletes the file."""
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
    """Writes the rows of one stored array of a part to shards.

    Rows are buffered only until their inner chunks are full.

    Args:
        array: the stored array.
        counts: counts of the part (an item of ``plan.part_counts``).
        grid: grid of the array.
        pool: thread pool that encodes chunks and syncs files.
        files: the ``PartFiles`` of the part. This object determines the paths of the shards.
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
        # One future for each finished shard. The future is done when the shard is synced or
        # uploaded. Its result is the shard's size and checksum.
        self.records: dict[str, Future[FileRecord]] = {}
        self._part = counts["part"]
        self._grid = grid
        self._pool = pool
        self._files = files
        self._n_rows = array.n_rows(counts["allocated_tokens"])
        self.is_written = np.zeros(self._n_rows, bool)
        # Index of the first row after all written rows. Rows with a smaller index cannot be written
        # any more.
        self._next_row = 0
        self._row = np.zeros((grid.chunk_tokens, *array.row_shape), array.storage_dtype)
        self._row_is_clean = True
        self._n_rows_done = 0
        self._shard: ShardWriter | None = None
        self._n_shards = 0

    def write(self, first_row: int, values: np.ndarray) -> None:
        """Write consecutive rows. Rows that are skipped between two calls become zero.

        Args:
            first_row: index of the first row, counted from the beginning of the part.
            values: the rows, [n_rows, *row_shape] in the array's dtype.
        """
        self._check(first_row, values)
        if not len(values):
            return
        self._next_row = first_row + len(values)
        self.is_written[first_row : self._next_row] = True
        size = self._grid.chunk_tokens
        n_written = 0
        while n_written < len(values):
            row, offset = divmod(first_row + n_written, size)
            self._flush_rows(row)
            n = min(size - offset, len(values) - n_written)
            if n == size:
                # The values fill whole chunks, so they are encoded without a copy.
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
                f"{array.name!r} takes arrays of dtype {array.storage_dtype.name} (for values of "
                f"{array.logical_dtype}) and shape [n, {', '.join(map(str, array.row_shape))}], "
                f"but the array has dtype {values.dtype} and shape {list(values.shape)}."
            )
        if first_row < self._next_row or end > self._n_rows:
            raise StoreError(
                f"Cannot write the {unit}s {first_row} to {end} of {array.name!r}. The part has "
                f"{self._n_rows} {unit}s, and those before {self._next_row} are written already. "
                f"Write the {unit}s in increasing order."
            )

    def _flush_rows(self, row: int) -> None:
        """Append the buffered rows, then chunks of zeros, until chunk ``row`` is the next chunk.

        ``row`` is the index of a chunk along axis 0.
        """
        while self._n_rows_done < row:
            self._append(self._row)
            if not self._row_is_clean:
                # Allocate a new buffer, because a thread may still be encoding the old one.
                self._row = np.zeros_like(self._row)
                self._row_is_clean = True

    def _append(self, values: np.ndarray) -> None:
        if self._shard is None:
            path = self._files.new_path(self._shard_name(self._n_shards))
            self._shard = ShardWriter(path, self._grid, self._pool, self._files.make_durable)
            self._n_shards += 1
        self._shard.append_row(values)
        self._n_rows_done += 1
        if self._shard.is_full:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self.records[self._shard_name(self._n_shards - 1)] = self._shard.finish()
            self._shard = None

    def _shard_name(self, number: int) -> str:
        return f"{self.array.name}/{self._grid.shard_key(self._part, number)}"

    def finish(self) -> None:
        """Fill the rest of the part with zeros, and finish the last shard."""
        self._flush_rows(self._grid.n_chunk_rows(self._n_rows))
        self._finish_shard()

    def abort(self) -> None:
        """Close the open shard."""
        if self._shard is not None:
            self._shard.abort()
            self._shard = None


class PartWriter(AbstractContextManager["PartWriter"]):
    """Writes a part of a store, or adds fields to a part.

    Use this object in a ``with`` statement. If the block ends before :meth:`commit` was called, the
    written files are deleted. A PartWriter must not be used by several threads at once. Different
    threads may write different parts of the same store.

    Args:
        sequences: the sequences of the part, in plan order.
        counts: counts that the part's commit must contain (an item of ``plan.part_counts``).
        codec: codec of the fields to write.
        grids: array name -> grid.
        files: the part's files.
        on_close: function that is called after the part was committed or discarded. The argument of
            the function is whether the part is committed.
        pool: thread pool that encodes. With a pool, values must not change until :meth:`commit` has
            returned. If the argument is None, the calling thread encodes.
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
        # Whether the part is open. After the part was committed or discarded, the value is False.
        self.is_open = True
        # If `commit` has found that another writer committed the part first, the value is False.
        # Otherwise, it is True.
        self.was_first = True
        self.codec = codec  # Codec of the fields to write.
        self._counts = counts
        self._files = files
        self._on_close = on_close
        starts = sequences["first_token"].to_pylist()
        lengths = sequences["n_tokens"].to_pylist()
        self._planned: dict[int, int] = dict(zip(starts, lengths, strict=True))
        pool = pool or EncodePool()
        self._arrays: dict[str, ArrayWriter] = {}
        for array in codec.arrays:
            grid = grids[array.name]
            self._arrays[array.name] = ArrayWriter(array, counts, grid, pool, files)

    def write(
        self, field: str, first_token: int, values: np.ndarray | Mapping[str, np.ndarray]
    ) -> None:
        """Write consecutive tokens of a field.

        The values must not change until the part is committed, because threads encode them later.
        If the field has a lossy codec, each call must write exactly one encoded sequence.

        Args:
            field: name of the field.
            first_token: position of the first token on the part's token axis (``first_token`` in
                the plan). For each field, the position must increase from call to call. Tokens that
                are skipped become zero.
            values: values of the tokens, [n_tokens, *token_shape] in the storage dtype. A bfloat16
                value is passed as its bits in uint16. For a field with a lossy codec, pass the
                result of ``StoreCodec.encode`` for the field: name of a stored array -> its rows.

        Raises:
            StoreError: the store does not have the field, the values have the wrong dtype or shape,
                or the tokens are out of order or beyond the end of the part. For a lossy codec, the
                error is also raised if the values are not the rows of one planned sequence.
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
                f"{field!r} is stored as the arrays {', '.join(names)}. Pass the rows of all of "
                "them for one planned sequence per call, as StoreCodec.encode returns them. The "
                f"plan has {n_tokens or 'no'} tokens for a sequence that starts at token "
                f"{first_token}."
            )
        for array in codec.arrays:
            rows = values[array.name]
            if len(rows) != array.n_rows(n_tokens):
                raise StoreError(
                    f"The array {array.name!r} has {len(rows)} rows for a sequence of {n_tokens} "
                    f"tokens, expected {array.n_rows(n_tokens)} rows."
                )
            self._arrays[array.name].write(first_token // array.block_tokens, rows)

    def _check_open(self) -> None:
        if not self.is_open:
            raise StoreError(
                f"Part {self.part} is closed already. Open it again with StoreWriter.part."
            )

    def commit(self) -> PartCommit:
        """Finish and sync all shards, rename them to their final names and write the commit.

        If another writer has committed the part in the meantime, the files of this writer are
        deleted. The commit and the files of the other writer stay.

        Returns:
            The commit that the part now has.

        Raises:
            StoreError: a planned sequence was not written to every field.
        """
        self._check_open()
        self._check_complete()
        with disk_full_guard(self._files.commit_path):
            for array in self._arrays.values():
                array.finish()
            records: dict[str, FileRecord] = {}
            for array in self._arrays.values():
                for name, record in array.records.items():
                    records[name] = record.result()
            commit = PartCommit(
                **self._counts, files=dict(sorted({**self._files.existing, **records}.items()))
            )
            commit, self.was_first = self._files.publish(commit, records)
        self.is_open = False
        self._on_close(True)
        return commit

    def _check_complete(self) -> None:
        for name, array in self._arrays.items():
            missing: list[int] = []
            for first_token, n_tokens in self._planned.items():
                first = first_token // array.array.block_tokens
                if not array.is_written[first : first + array.array.n_rows(n_tokens)].all():
                    missing.append(first_token)
            if missing:
                raise StoreError(
                    f"Part {self.part} cannot be committed, because {len(missing)} of its "
                    f"{len(self._planned)} sequences were not written to {name!r}. The first of "
                    f"them has the tokens {missing[0]} to "
                    f"{missing[0] + self._planned[missing[0]]}. Write all sequences first."
                )

    def discard(self) -> None:
        """Delete the files that this object has written, unless the part was committed.

        Afterwards, a new part has no commit. If the writer was adding fields, the part still has
        its old fields.
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
