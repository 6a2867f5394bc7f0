"""Many ranges of stored arrays at once, at the speed of the disk; grids and indexes of shards are read once and kept.

Reading a batch has three steps. *Plan*: which inner chunks are wanted, each once even if several ranges share it, and
which of them lie next to each other in a file. *Fetch*: the kernel is asked to read all of it ahead before the first
chunk is decoded (a remote file system gets all requests of a window at once). *Decode*: threads take reads from one
queue, check the checksum of each chunk and decode it, straight into the caller's array wherever the chunk's values lie
there contiguously. Reading and decoding run outside Python's interpreter lock.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from threading import get_ident
from typing import NamedTuple

import numpy as np

from ...errors import StoreDamaged
from ..backend import MISSING, LocalFile, crc32c, scratch_bytes
from ..chunk import CRC_BYTES, decode_chunk
from ..commit import FileRecord, PartCommit
from ..grid import ArrayGrid, read_grid
from ..paths import RemotePath, StorePath, threads
from ..read_cache import ReadCache, RemoteFile, fetch_ranges
from ..schema import PARTS_NAME, StoredArray, StoreManifest

# stored bytes that are fetched from a remote file system before they are decoded
REMOTE_WINDOW_BYTES = 64 << 20

MAX_SHARDS_AT_ONCE = 128
"""Files that one call has read ahead before it decodes; more than are held open would be opened twice."""

_MAX_HELPERS = 32

MAX_SHARDS = 4096
"""Shards whose indexes a reader keeps: each has 16 bytes per inner chunk, 128 KiB for a shard of 2 GiB."""
_REPAIR = "Delete the part's file in commits/ and run extract again: it redoes that part only."


class ShardReader:
    """A shard and its index; safe in threads and after a fork. StoreDamaged for no such file, or a damaged index.

    Args:
        n_rows: rows of inner chunks that must be present (fewer than ``rows_per_shard`` in the last shard).
        record: size and checksum of the file, as its commit has them.
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
        # Int64 [n_rows, chunks_per_row, 2]: offset and bytes of each inner chunk.
        self.index = self._read_index(n_rows, record.bytes)

    def _read_index(self, n_rows: int, file_bytes: int) -> np.ndarray:
        shape = (self.grid.rows_per_shard, self.grid.chunks_per_row, 2)
        index_bytes = math.prod(shape) * 8
        data_bytes = file_bytes - index_bytes - CRC_BYTES
        if data_bytes < 0:
            raise StoreDamaged(
                f"{self.path} has {file_bytes} bytes, too few for its index. {_REPAIR}"
            )
        tail = np.empty(index_bytes + CRC_BYTES, np.uint8)
        if self._read_into(data_bytes, tail) < len(tail):
            raise StoreDamaged(f"{self.path} ends inside its index. {_REPAIR}")
        expected = int.from_bytes(tail[index_bytes:].tobytes(), "little")
        if (got := crc32c(tail[:index_bytes])) != expected:
            raise StoreDamaged(
                f"{self.path}: index checksum is {got:#010x}, expected {expected:#010x}. {_REPAIR}"
            )
        index = tail[:index_bytes].view("<u8").reshape(shape)[:n_rows]
        # Offsets are compared before they are added: a sum could wrap around.
        offset = index[..., 0]
        n_bytes = index[..., 1]
        if bool(((offset > data_bytes) | (n_bytes > data_bytes)).any()) or bool(
            (offset + n_bytes > data_bytes).any()
        ):
            raise StoreDamaged(
                f"{self.path}: the index names chunks outside the file or absent ones. {_REPAIR}"
            )
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
            raise StoreDamaged(
                f"{self.path} ends at byte {offset + n_read}, inside a chunk. {_REPAIR}"
            )
        return raw

    def decode(self, data: np.ndarray, row: int, column: int, out: np.ndarray) -> None:
        """Check one inner chunk as it is stored, uint8 [n_bytes], and decode it into a C-contiguous array."""
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
        self._folder = store / PARTS_NAME
        self._n_parts = manifest.n_parts
        self._commits = commits
        self._longest_part = max(
            (commit.allocated_tokens for commit in commits.values()), default=0
        )
        self._n_bytes_by_thread: dict[int, int] = defaultdict(int)
        self._grids: dict[str, tuple[StoredArray, ArrayGrid]] = {}
        # Not of a method, which would keep this object, and with it all open files, until the
        # garbage is collected.
        self._open = lru_cache(MAX_SHARDS)(
            partial(_open, self._folder, commits, self._grids, cache)
        )

    def grid(self, array: StoredArray) -> ArrayGrid:
        """Return the grid of an array, which all parts share; StoreDamaged where its metadata is not as declared."""
        if array.name not in self._grids:  # read twice where threads meet
            grid = read_grid(self._folder, array, self._n_parts, self._longest_part)
            self._grids[array.name] = array, grid
        return self._grids[array.name][1]

    def shard(self, part: int, array: StoredArray, number: int) -> ShardReader:
        """Return the shard of that number, its index read and checked."""
        self.grid(array)
        return self._open(part, array.name, number)

    @property
    def n_bytes_read(self) -> int:
        """Stored bytes of all chunks that the calling thread has read so far."""
        return self._n_bytes_by_thread[get_ident()]

    def count_bytes(self, n_bytes: int) -> None:
        """Add to what the calling thread has read."""
        self._n_bytes_by_thread[get_ident()] += n_bytes

    def close(self) -> None:
        """Close all files; asking for a shard opens it again."""
        self._open.cache_clear()


def _open(
    folder: StorePath,
    commits: Mapping[int, PartCommit],
    grids: Mapping[str, tuple[StoredArray, ArrayGrid]],
    cache: ReadCache | None,
    part: int,
    name: str,
    number: int,
) -> ShardReader:
    array, grid = grids[name]
    commit = commits[part]
    n_chunk_rows = grid.n_chunk_rows(array.n_rows(commit.allocated_tokens))
    n_rows = min(grid.rows_per_shard, n_chunk_rows - number * grid.rows_per_shard)
    file = f"{name}/{grid.shard_key(part, number)}"
    if (record := commit.files.get(file)) is None:
        raise StoreDamaged(f"{folder / file} is not listed by the commit of part {part}. {_REPAIR}")
    return ShardReader(folder / file, grid, n_rows, record, cache)


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a stored array, counted from the beginning of the part, and where they go."""

    part: int
    array: StoredArray
    start: int
    stop: int
    # [at least stop - start, *row_shape] (axis 1 of ``len(layers)`` if given), the array's dtype.
    # Rows beyond ``stop -
    # start`` may be overwritten: with room for the whole last chunk it is decoded in place.
    out: np.ndarray
    # along the layer (or piece) axis, not negative, as wanted; None for all
    layers: tuple[int, ...] | None = None


class _Destination(NamedTuple):
    """Where rows [low, high) of a shard go: to ``out[: high - low]``."""

    low: int
    high: int
    out: np.ndarray


@dataclass
class _ShardPlan:
    """What is wanted of one shard: row of inner chunks -> destinations of its rows."""

    part: int
    array: StoredArray
    number: int
    layers: tuple[int, ...] | None
    wanted: dict[int, list[_Destination]] = field(default_factory=dict)


@dataclass
class _Column:
    """A column of inner chunks, and which of its layers go where."""

    number: int
    # first and last + 1 layer of ``out`` that the whole chunk fills in order, or None
    span: tuple[int, int] | None
    pairs: list[tuple[int, int]]  # (layer within the chunk, layer of ``out``) if span is None


@dataclass
class _Read:
    """Neighbouring inner chunks of one shard, fetched by one read."""

    reader: ShardReader
    offset: int
    n_bytes: int
    # (bytes from ``offset`` on, bytes, row, column, destinations) of each.
    chunks: list[tuple[int, int, int, _Column, list[_Destination]]]
    data: np.ndarray | None = None  # the bytes, where they were fetched before


def read_ranges(shards: PartShards, ranges: Iterable[RowRange], n_threads: int = 1) -> None:
    """Fill the ``out`` of every range, no two of which may share memory, by so many threads, the caller's included."""
    plans = _plan_shards(shards, ranges)
    for start in range(0, len(plans), MAX_SHARDS_AT_ONCE):
        reads = [
            read
            for plan in plans[start : start + MAX_SHARDS_AT_ONCE]
            for read in _plan_reads(shards, plan)
        ]
        for window in _windows(reads):
            _fetch_ahead(window)
            run_in_threads([partial(_decode, read) for read in window], n_threads)
            shards.count_bytes(sum(read.n_bytes for read in window))


def run_in_threads(work: Sequence[Callable[[], None]], n_threads: int) -> None:
    """Call every item of ``work``, in any order and at the same time; the first error ends the others and is raised.

    ``n_threads``: threads that take part, the caller's included. Helpers that are busy elsewhere are not waited for.
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
        # One that has not begun yet is not needed any more; the others still write into the
        # caller's arrays.
        begun = [helper for helper in helpers if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()


def _plan_shards(shards: PartShards, ranges: Iterable[RowRange]) -> list[_ShardPlan]:
    # By layers too: columns of chunks are planned for a whole shard at a time.
    plans: dict[tuple[int, str, int, tuple[int, ...] | None], _ShardPlan] = {}
    for item in ranges:
        grid = shards.grid(item.array)
        shard_rows = grid.shard_shape[0]
        chunk_rows = grid.chunk_tokens
        at = item.start
        while at < item.stop:
            number = at // shard_rows
            base = number * shard_rows
            until = min(item.stop, base + shard_rows)
            key = (item.part, item.array.name, number, item.layers)
            plan = plans.get(key)
            if plan is None:
                plan = plans[key] = _ShardPlan(item.part, item.array, number, item.layers)
            destination = _Destination(at - base, until - base, item.out[at - item.start :])
            for row in range(destination.low // chunk_rows, -(-destination.high // chunk_rows)):
                plan.wanted.setdefault(row, []).append(destination)
            at = until
    return list(plans.values())


def _columns(layers: tuple[int, ...] | None, chunk_layers: int, n_columns: int) -> list[_Column]:
    """Say which columns hold the layers, and where each layer goes."""
    if layers is None:
        return [
            _Column(c, (c * chunk_layers, (c + 1) * chunk_layers), []) for c in range(n_columns)
        ]
    columns: dict[int, _Column] = {}
    for position, layer in enumerate(layers):
        number, inner = divmod(layer, chunk_layers)
        columns.setdefault(number, _Column(number, None, [])).pairs.append((inner, position))
    for column in columns.values():
        first = column.pairs[0][1]
        if column.pairs == [(inner, first + inner) for inner in range(chunk_layers)]:
            column.span = (first, first + chunk_layers)
    return sorted(columns.values(), key=lambda column: column.number)


def _plan_reads(shards: PartShards, plan: _ShardPlan) -> Iterator[_Read]:
    """Open the shard and group chunks that lie next to each other in it."""
    reader = shards.shard(plan.part, plan.array, plan.number)
    columns = _columns(plan.layers, reader.grid.chunk_layers, reader.grid.chunks_per_row)
    if not columns:
        return
    # In the order of the file, so that neighbours become one read.
    rows = sorted(plan.wanted)
    places = reader.index[np.ix_(rows, [column.number for column in columns])].tolist()
    read: _Read | None = None
    for row, row_places in zip(rows, places, strict=True):
        destinations = plan.wanted[row]
        for column, (offset, n_bytes) in zip(columns, row_places, strict=True):
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
    """Cut the reads where fetched bytes would take too much memory; local files need no windows."""
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
    """Request all bytes before the first chunk is decoded."""
    remote: list[tuple[_Read, RemoteFile]] = []
    with suppress(*MISSING):  # a local file that is missing is named when it is read
        for read in reads:
            file = read.reader.file
            if isinstance(file, RemoteFile):
                remote.append((read, file))
            elif len(reads) > 1:
                file.prefetch(read.offset, read.offset + read.n_bytes)
    if remote:
        try:
            found = fetch_ranges(
                [(file, read.offset, read.offset + read.n_bytes) for read, file in remote]
            )
        except FileNotFoundError as error:
            raise StoreDamaged(
                f"{error} is missing since the store was opened. Restore it."
            ) from error
        for (read, _), data in zip(remote, found, strict=True):
            read.data = np.frombuffer(data, np.uint8)


def _decode(read: _Read) -> None:
    raw = read.reader.read_bytes(read.offset, read.n_bytes) if read.data is None else read.data
    for at, n_bytes, row, column, destinations in read.chunks:
        _place(read.reader, raw[at : at + n_bytes], row, column, destinations)
    read.data = None


def _place(
    reader: ShardReader,
    data: np.ndarray,
    row: int,
    column: _Column,
    destinations: list[_Destination],
) -> None:
    grid = reader.grid
    row_start = row * grid.chunk_tokens
    chunk_rows = grid.chunk_tokens
    if len(destinations) == 1 and column.span is not None and destinations[0].low <= row_start:
        at = row_start - destinations[0].low
        target = destinations[0].out[at : at + chunk_rows]
        if grid.chunks_per_row > 1 or target.ndim > 1:
            target = target[:, column.span[0] : column.span[1]]
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
        if column.span is not None:
            target = target if target.ndim == 1 else target[:, column.span[0] : column.span[1]]
            target[...] = values
        for inner, position in column.pairs if column.span is None else ():
            target[:, position] = values[:, inner]
