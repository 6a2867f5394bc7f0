"""Reads many ranges of rows of stored arrays in one call, at the speed of the disk.

The grids of arrays and the indexes of shards are read once and then cached in memory.

Reading a batch has three steps:

1. *Plan*: list the inner chunks that the ranges need. A chunk that several ranges share is read
   once. Chunks that are adjacent in a file are merged into one read.
2. *Fetch*: for local files, ask the kernel to read all these bytes ahead before the first chunk is
   decoded. For a bucket, request many ranges at once. The reads that are requested at once are
   called a *window*. The number of bytes in a window is limited.
3. *Decode*: several threads take reads from one queue, verify the checksum of each chunk and decode
   the chunk. If the values of a chunk are contiguous in the caller's array, the chunk is decoded
   directly into this array.

Reading and decoding release Python's global interpreter lock.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import get_ident
from typing import NamedTuple

import numpy as np

from ...errors import StoreDamaged
from ..backend import MISSING, LocalFile, crc32c, scratch_bytes
from ..chunk import CRC_BYTES, decode_chunk
from ..commit import FileRecord, PartCommit
from ..grid import ArrayGrid, read_grid
from ..paths import RemotePath, StorePath
from ..read_cache import ReadCache, RemoteFile, fetch_ranges
from ..requests import threads
from ..schema import PARTS_NAME, StoredArray, StoreManifest

# Upper bound on the stored bytes of a window: the bytes that are fetched from a bucket at once.
REMOTE_WINDOW_BYTES = 64 << 20

MAX_SHARDS_AT_ONCE = 128
"""Number of shards that are prefetched before the first of them is decoded.

The number must not exceed ``backend.MAX_OPEN_FILES``. With more shards, some of them would be
closed after they were prefetched, and opened again to decode them.
"""

_MAX_HELPERS = 32

MAX_SHARDS = 4096
"""Largest number of shard indexes that an opened store caches.

An index has 16 bytes per inner chunk. For a shard of 2 GiB of raw values, the index has 128 KiB.
"""
_REPAIR = (
    "Delete the commit file of this part in commits/ and run the same `moa-data extract` command "
    "again: it rewrites only this part."
)


class ShardReader:
    """An open shard and its index. Several threads can use the object, also after a fork.

    Args:
        path: path of the shard.
        grid: grid of the array.
        n_rows: number of inner chunks along axis 0 that the shard must contain. The last shard of a
            part may have fewer chunks than ``grid.rows_per_shard``.
        record: size and checksum that the commit lists for the file.
        cache: local cache of remote files, if there is one.

    Raises:
        StoreDamaged: the file is missing, or its index is damaged.
    """

    def __init__(
        self,
        path: StorePath,
        grid: ArrayGrid,
        n_rows: int,
        record: FileRecord,
        cache: ReadCache | None = None,
    ) -> None:
        self.path = path
        self.grid = grid
        self.chunk_size = math.prod(grid.chunk_shape)
        self.file: LocalFile | RemoteFile = (
            RemoteFile(path, record, cache) if isinstance(path, RemotePath) else LocalFile(path)
        )
        # int64 [n_rows, chunks_per_row, 2]. Offset and size in bytes of each inner chunk.
        self.index = self._read_index(n_rows, record.bytes)

    def _read_index(self, n_rows: int, file_bytes: int) -> np.ndarray:
        shape = (self.grid.rows_per_shard, self.grid.chunks_per_row, 2)
        index_bytes = math.prod(shape) * 8
        data_bytes = file_bytes - index_bytes - CRC_BYTES
        if data_bytes < 0:
            raise StoreDamaged(
                f"{self.path} is truncated: it has {file_bytes} bytes, too few for its index. "
                f"{_REPAIR}"
            )
        tail = np.empty(index_bytes + CRC_BYTES, np.uint8)
        if self._read_into(data_bytes, tail) < len(tail):
            raise StoreDamaged(f"{self.path} is truncated: it ends inside its index. {_REPAIR}")
        expected = int.from_bytes(tail[index_bytes:].tobytes(), "little")
        if (got := crc32c(tail[:index_bytes])) != expected:
            raise StoreDamaged(
                f"{self.path} is damaged: the checksum of its index is {got:#010x}, expected "
                f"{expected:#010x}. {_REPAIR}"
            )
        index = tail[:index_bytes].view("<u8").reshape(shape)[:n_rows]
        # Check that each chunk ends inside the shard. Also check offset and size separately,
        # because the sum of two uint64 numbers could overflow.
        if (index > data_bytes).any() or (index.sum(axis=-1) > data_bytes).any():
            raise StoreDamaged(
                f"{self.path} is damaged: its index lists chunks that are missing or outside the "
                f"file. {_REPAIR}"
            )
        return index.astype(np.int64)

    def _read_into(self, offset: int, out: np.ndarray) -> int:
        try:
            return self.file.read_into(offset, out)
        except MISSING as error:
            raise StoreDamaged(f"{self.path} is missing. {_REPAIR}") from error

    def read_bytes(self, offset: int, n_bytes: int) -> np.ndarray:
        """Read bytes of the shard into a buffer that this thread reuses.

        The returned array is valid until the same thread calls this method again.
        """
        raw = scratch_bytes("raw", n_bytes)
        if (n_read := self._read_into(offset, raw)) < n_bytes:
            raise StoreDamaged(
                f"{self.path} is truncated: it ends at byte {offset + n_read}, inside a chunk. "
                f"{_REPAIR}"
            )
        return raw

    def decode(self, data: np.ndarray, row: int, column: int, out: np.ndarray) -> None:
        """Verify one inner chunk and decode it.

        Args:
            data: the stored bytes of the chunk, uint8 [n_bytes].
            row: index of the chunk along axis 0 of the shard, for error messages.
            column: index of the chunk along axis 1 of the shard, for error messages.
            out: C-contiguous array that receives the values.
        """
        try:
            decode_chunk(data, out)
        except StoreDamaged as error:
            grid = self.grid
            layers = f", layer {column * grid.chunk_layers}" if len(grid.shape) > 2 else ""
            position = f"the chunk starts at token {row * grid.chunk_tokens} of the shard{layers}"
            raise StoreDamaged(
                f"{self.path} is damaged: {error} ({position}). {_REPAIR}"
            ) from error


class PartShards:
    """Opens the shards of a store on demand, and counts the bytes that are read from them.

    An object can be used by several threads and after a fork.
    """

    def __init__(
        self,
        store: StorePath,
        manifest: StoreManifest,
        commits: Mapping[int, PartCommit],
        cache: ReadCache | None = None,
    ) -> None:
        self._folder = store / PARTS_NAME
        self._n_parts = manifest.n_parts
        self._commits = commits
        self._longest_part = max(
            (commit.allocated_tokens for commit in commits.values()), default=0
        )
        self._n_bytes_by_thread: dict[int, int] = defaultdict(int)
        self._grids: dict[StoredArray, ArrayGrid] = {}
        # Cache the results of a function and not of a method. The cache of a method would refer to
        # this object, and this object would refer to the cache. This cycle would keep all files
        # open until the garbage collector runs.
        self._open = lru_cache(MAX_SHARDS)(
            partial(_open, self._folder, commits, self._grids, cache)
        )

    def grid(self, array: StoredArray) -> ArrayGrid:
        """Return the grid of an array. All parts of the store share this grid.

        Raises:
            StoreDamaged: the array's Zarr metadata contradicts the manifest.
        """
        # No lock is needed. If two threads read the metadata at the same time, they get equal
        # grids.
        if array not in self._grids:
            self._grids[array] = read_grid(self._folder, array, self._n_parts, self._longest_part)
        return self._grids[array]

    def shard(self, part: int, array: StoredArray, number: int) -> ShardReader:
        """Return a shard of a part.

        If the shard is not cached, it is opened, and its index is read and verified.

        Args:
            part: number of the part of the store.
            array: the stored array.
            number: number of the shard in the part, counted from 0.
        """
        self.grid(array)
        return self._open(part, array, number)

    @property
    def n_bytes_read(self) -> int:
        """Number of bytes of stored (encoded) chunks that the calling thread has read so far."""
        return self._n_bytes_by_thread[get_ident()]

    def count_bytes(self, n_bytes: int) -> None:
        """Add ``n_bytes`` to the number of bytes that the calling thread has read."""
        self._n_bytes_by_thread[get_ident()] += n_bytes

    def close(self) -> None:
        """Close all files. A later call of :meth:`shard` opens the requested file again."""
        self._open.cache_clear()


def _open(
    folder: StorePath,
    commits: Mapping[int, PartCommit],
    grids: Mapping[StoredArray, ArrayGrid],
    cache: ReadCache | None,
    part: int,
    array: StoredArray,
    number: int,
) -> ShardReader:
    grid = grids[array]
    commit = commits[part]
    n_chunk_rows = grid.n_chunk_rows(array.n_rows(commit.allocated_tokens))
    n_rows = min(grid.rows_per_shard, n_chunk_rows - number * grid.rows_per_shard)
    file = f"{array.name}/{grid.shard_key(part, number)}"
    if (record := commit.files.get(file)) is None:
        raise StoreDamaged(
            f"{folder / file} belongs to part {part}, but the commit of this part does not list "
            f"it. {_REPAIR}"
        )
    return ShardReader(folder / file, grid, n_rows, record, cache)


@dataclass(frozen=True)
class RowRange:
    """A request for the rows [start, stop) of a stored array, and the buffer that receives them.

    Rows are counted from the first row of ``part``.
    """

    part: int
    array: StoredArray
    start: int
    stop: int
    # Buffer in the array's dtype, [at least stop - start, *row_shape]. If ``layers`` is given, axis
    # 1 has length ``len(layers)``. If the buffer has room for all rows of the last chunk, the whole
    # chunk is decoded into the buffer. So rows of the buffer from ``stop - start`` on may be
    # overwritten.
    out: np.ndarray
    # Layers (or pieces) to read: non-negative indices along axis 1 of the array, in the requested
    # order. If the value is None, all layers (or pieces) are read.
    layers: tuple[int, ...] | None = None


class _Destination(NamedTuple):
    """Rows [low, high) of a shard, which are copied to ``out[: high - low]``."""

    low: int
    high: int
    out: np.ndarray


class _Shard(NamedTuple):
    """A shard of a part of the store, and the layers to read from it.

    If ``layers`` is None, all layers are read.
    """

    part: int
    array: StoredArray
    number: int
    layers: tuple[int, ...] | None


# The chunks of a shard that must be read. Maps the index of a chunk along axis 0 of the shard to
# the buffers that receive rows of this chunk.
_Wanted = dict[int, list[_Destination]]


@dataclass
class _Column:
    """All inner chunks of a shard with the same index along axis 1.

    These chunks contain the same layers of different tokens. The layers are copied to the caller's
    buffer, to the indices in ``outer``.
    """

    # Index of these chunks along axis 1 of the shard.
    number: int
    # ``inner`` contains the layers to copy, as indices in the chunk. The layers are copied to the
    # caller's buffer. ``outer`` contains their indices along the layer axis of this buffer. Both
    # are slices if all layers of the chunk are copied in order.
    inner: slice | list[int]
    outer: slice | list[int]


@dataclass
class _Read:
    """Inner chunks that are adjacent in the file of a shard and are read together."""

    reader: ShardReader
    offset: int
    n_bytes: int
    # One tuple for each chunk, with five items:
    # - the position of the chunk's first byte in the bytes of this read
    # - the size of the chunk in bytes
    # - the index of the chunk along axis 0 of the shard
    # - the column of the chunk
    # - the buffers that receive rows of the chunk
    chunks: list[tuple[int, int, int, _Column, list[_Destination]]]
    # For a remote file, the fetched bytes. For a local file, the value is None, because the thread
    # that decodes the chunks also reads the file.
    data: np.ndarray | None = None


def read_ranges(shards: PartShards, ranges: Iterable[RowRange], n_threads: int = 1) -> None:
    """Read all ranges, and fill their buffers (``RowRange.out``).

    Args:
        shards: the shards of the store.
        ranges: the rows to read. The buffers of different ranges must not share memory.
        n_threads: number of threads that decode, including the calling thread.
    """
    plans = list(_plan_shards(shards, ranges).items())
    for start in range(0, len(plans), MAX_SHARDS_AT_ONCE):
        reads: list[_Read] = []
        for shard, wanted in plans[start : start + MAX_SHARDS_AT_ONCE]:
            reads.extend(_plan_reads(shards, shard, wanted))
        for window in _windows(reads):
            _fetch_ahead(window)
            run_in_threads([partial(_decode, read) for read in window], n_threads)
            shards.count_bytes(sum(read.n_bytes for read in window))


def run_in_threads(work: Sequence[Callable[[], None]], n_threads: int) -> None:
    """Call every function in ``work`` in a thread pool, in any order.

    If a function raises an error, this error is raised, and functions that have not started are not
    called. The calling thread takes part in the work. So the work is done even if all threads of
    the pool are busy with the work of other callers.

    Args:
        work: functions that may run at the same time.
        n_threads: number of threads to use, including the calling thread.
    """
    queue = deque(work)

    def take_turns() -> None:
        while True:
            try:
                item = queue.popleft()
            except IndexError:
                return
            try:
                item()
            except BaseException:
                queue.clear()
                raise

    pool = threads("store-reader", _MAX_HELPERS)
    helpers = [pool.submit(take_turns) for _ in range(min(n_threads, len(queue)) - 1)]
    try:
        take_turns()
    finally:
        # The queue of reads is empty now. Tasks on other threads that have not started have nothing
        # to do, so cancel them. Wait for the other tasks, because they write into the caller's
        # arrays.
        started: list[Future[None]] = []
        for helper in helpers:
            if not helper.cancel():
                started.append(helper)
        wait(started)
    for helper in started:
        helper.result()


def _plan_shards(shards: PartShards, ranges: Iterable[RowRange]) -> dict[_Shard, _Wanted]:
    # Maps a shard, together with the layers to read from it, to the wanted chunks. If two ranges
    # need different layers of the same shard, the shard has two entries.
    plans: dict[_Shard, _Wanted] = defaultdict(lambda: defaultdict(list))
    for item in ranges:
        grid = shards.grid(item.array)
        shard_rows = grid.shard_shape[0]
        chunk_rows = grid.chunk_tokens
        position = item.start
        while position < item.stop:
            number = position // shard_rows
            base = number * shard_rows
            next_position = min(item.stop, base + shard_rows)
            wanted = plans[_Shard(item.part, item.array, number, item.layers)]
            destination = _Destination(
                position - base, next_position - base, item.out[position - item.start :]
            )
            for row in range(destination.low // chunk_rows, -(-destination.high // chunk_rows)):
                wanted[row].append(destination)
            position = next_position
    return plans


def _columns(layers: tuple[int, ...] | None, chunk_layers: int, n_columns: int) -> list[_Column]:
    """Return the columns that contain the requested layers.

    A column consists of the chunks of a shard that have the same index along axis 1.

    Args:
        layers: the requested layers. If the argument is None, all columns are returned.
        chunk_layers: number of layers in a chunk.
        n_columns: number of chunks along axis 1 of the shard.
    """
    columns: list[_Column] = []
    if layers is None:
        for number in range(n_columns):
            outer = slice(number * chunk_layers, (number + 1) * chunk_layers)
            columns.append(_Column(number, slice(None), outer))
        return columns
    # The keys are indices of chunks along axis 1. The value for a chunk is a list with one pair for
    # each requested layer of the chunk: the index of the layer in the chunk, and its index along
    # the layer axis of the caller's buffer.
    pairs_by_column: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for position, layer in enumerate(layers):
        number, inner = divmod(layer, chunk_layers)
        pairs_by_column[number].append((inner, position))
    for number, pairs in sorted(pairs_by_column.items()):
        first = pairs[0][1]
        if pairs == list(enumerate(range(first, first + chunk_layers))):
            columns.append(_Column(number, slice(None), slice(first, first + chunk_layers)))
        else:
            inner_layers = [pair[0] for pair in pairs]
            columns.append(_Column(number, inner_layers, [pair[1] for pair in pairs]))
    return columns


def _plan_reads(shards: PartShards, shard: _Shard, wanted: _Wanted) -> Iterator[_Read]:
    """Open a shard, and merge its wanted chunks into reads. A read consists of adjacent chunks."""
    reader = shards.shard(shard.part, shard.array, shard.number)
    columns = _columns(shard.layers, reader.grid.chunk_layers, reader.grid.chunks_per_row)
    if not columns:
        return
    # Visit the chunks in file order, so that adjacent chunks can be merged.
    rows = sorted(wanted)
    chunk_ranges = reader.index[np.ix_(rows, [column.number for column in columns])].tolist()
    read: _Read | None = None
    for row, row_chunk_ranges in zip(rows, chunk_ranges, strict=True):
        destinations = wanted[row]
        for column, (offset, n_bytes) in zip(columns, row_chunk_ranges, strict=True):
            if (
                read
                and offset == read.offset + read.n_bytes
                and read.n_bytes + n_bytes <= reader.file.max_read_bytes
            ):
                read.chunks.append((read.n_bytes, n_bytes, row, column, destinations))
                read.n_bytes += n_bytes
                continue
            if read:
                yield read
            read = _Read(reader, offset, n_bytes, [(0, n_bytes, row, column, destinations)])
    if read:
        yield read


def _windows(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Split reads into windows. The remote bytes of one window are in memory at the same time.

    Local reads are not limited, because a thread has only the bytes of one local read in memory.
    """
    window: list[_Read] = []
    n_bytes = 0
    for read in reads:
        is_remote = isinstance(read.reader.file, RemoteFile)
        if window and is_remote and n_bytes + read.n_bytes > REMOTE_WINDOW_BYTES:
            yield window
            window = []
            n_bytes = 0
        window.append(read)
        n_bytes += read.n_bytes
    if window:
        yield window


def _fetch_ahead(reads: list[_Read]) -> None:
    """Fetch remote bytes, and ask the kernel to read local bytes ahead."""
    remote_reads: list[_Read] = []
    remote_ranges: list[tuple[RemoteFile, int, int]] = []
    # Ignore a missing local file here. When the file is read later, an error with the file's name
    # is raised.
    with suppress(*MISSING):
        for read in reads:
            file = read.reader.file
            stop = read.offset + read.n_bytes
            if isinstance(file, RemoteFile):
                remote_reads.append(read)
                remote_ranges.append((file, read.offset, stop))
            elif len(reads) > 1:
                file.prefetch(read.offset, stop)
    if remote_reads:
        try:
            fetched = fetch_ranges(remote_ranges)
        except FileNotFoundError as error:
            raise StoreDamaged(
                f"{error} was deleted after the store was opened. Restore the file from a copy."
            ) from error
        for read, data in zip(remote_reads, fetched, strict=True):
            read.data = np.frombuffer(data, np.uint8)


def _decode(read: _Read) -> None:
    raw = read.reader.read_bytes(read.offset, read.n_bytes) if read.data is None else read.data
    for start, n_bytes, row, column, destinations in read.chunks:
        _decode_chunk(read.reader, raw[start : start + n_bytes], row, column, destinations)
    read.data = None


def _decode_chunk(
    reader: ShardReader,
    data: np.ndarray,
    row: int,
    column: _Column,
    destinations: list[_Destination],
) -> None:
    grid = reader.grid
    row_start = row * grid.chunk_tokens
    chunk_rows = grid.chunk_tokens
    is_whole = isinstance(column.outer, slice)
    if len(destinations) == 1 and is_whole and destinations[0].low <= row_start:
        first_row = row_start - destinations[0].low
        target = destinations[0].out[first_row : first_row + chunk_rows]
        if target.ndim > 1:
            target = target[:, column.outer]
        if target.shape == grid.chunk_shape and target.flags.c_contiguous:
            reader.decode(data, row, column.number, target)
            return
    dtype = destinations[0].out.dtype
    chunk = (
        scratch_bytes("chunk", reader.chunk_size * dtype.itemsize)
        .view(dtype)
        .reshape(grid.chunk_shape)
    )
    reader.decode(data, row, column.number, chunk)
    for destination in destinations:
        low = max(destination.low, row_start)
        high = min(destination.high, row_start + chunk_rows)
        target = destination.out[low - destination.low : high - destination.low]
        values = chunk[low - row_start : high - row_start]
        if target.ndim == 1:
            target[...] = values
        elif isinstance(column.inner, list) and isinstance(column.outer, list):
            # Copy layer by layer, because indexing with lists would copy the values twice.
            for inner, outer in zip(column.inner, column.outer, strict=True):
                target[:, outer] = values[:, inner]
        else:
            target[:, column.outer] = values[:, column.inner]
