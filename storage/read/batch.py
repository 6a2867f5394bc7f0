"""Many ranges of stored arrays at once, at the speed of the disk.

Reading a batch has three steps. *Plan*: which inner chunks are wanted, each once even if several ranges share it, and
which of them lie next to each other in a file. *Fetch*: the kernel is asked to read all of it ahead before the first
chunk is decoded (a remote file system gets all requests of a window at once). *Decode*: threads take reads from one
queue, check the checksum of each chunk and decode it, straight into the caller's array wherever the chunk's values lie
there contiguously. Reading and decoding run outside Python's interpreter lock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from ...errors import StoreDamaged
from ..backend import MISSING, scratch_bytes
from ..read_cache import RemoteFile, fetch_ranges
from ..schema import StoredArray
from .shards import PartShards, ShardReader

REMOTE_WINDOW_BYTES = 64 << 20
"""Stored bytes that are fetched from a remote file system before they are decoded."""

MAX_SHARDS_AT_ONCE = 128
"""Files that one call has read ahead before it decodes; more than are held open would be opened twice."""

_MAX_HELPERS = 32


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a stored array, and where they go.

    Attributes:
        start: first row, counted from the beginning of the part.
        out: [at least stop - start, *row_shape] (axis 1 of ``len(layers)`` if given), the array's dtype. Rows
            beyond ``stop - start`` may be overwritten: with room for the whole last chunk it is decoded in place.
        layers: non-negative indices along the layer (or piece) axis, in the order wanted; None for all.
    """

    part: int
    array: StoredArray
    start: int
    stop: int
    out: np.ndarray
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
    """A column of inner chunks, and which of its layers go where.

    Attributes:
        span: first and last + 1 layer of ``out`` that the whole chunk fills in order, or None.
        pairs: (layer within the chunk, layer of ``out``) where there is no such span.
    """

    number: int
    span: tuple[int, int] | None
    pairs: list[tuple[int, int]]


@dataclass
class _Read:
    """Neighbouring inner chunks of one shard, fetched by one read.

    Attributes:
        chunks: (bytes from ``offset`` on, bytes, row, column, destinations) of each.
        data: the bytes, where they were fetched before.
    """

    reader: ShardReader
    offset: int
    n_bytes: int
    chunks: list[tuple[int, int, int, _Column, list[_Destination]]]
    data: np.ndarray | None = None


def read_ranges(shards: PartShards, ranges: Iterable[RowRange], n_threads: int = 1) -> None:
    """Fill the ``out`` of every range, no two of which may share memory, by so many threads, the caller's included.

    Raises:
        StoreDamaged: a file is gone, or a checksum or a size is wrong.
    """
    plans = _plan_shards(shards, ranges)
    for start in range(0, len(plans), MAX_SHARDS_AT_ONCE):
        reads = [read for plan in plans[start : start + MAX_SHARDS_AT_ONCE] for read in _plan_reads(shards, plan)]
        for window in _windows(reads):
            _fetch_ahead(window)
            run_in_threads([partial(_decode, read) for read in window], n_threads)
            shards.n_bytes_read += sum(read.n_bytes for read in window)


def run_in_threads(work: Sequence[Callable[[], None]], n_threads: int) -> None:
    """Call every item of ``work``, in any order and at the same time; the first error ends the others and is raised.

    Args:
        n_threads: threads that take part, the caller's included. Helpers that are busy elsewhere are not waited for.
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

    helpers = [_helpers().submit(take_turns) for _ in range(min(n_threads, len(queue)) - 1)]
    try:
        take_turns()
    finally:
        # One that has not begun yet is not needed any more; the others still write into the caller's arrays.
        begun = [helper for helper in helpers if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()


_pool: tuple[int, ThreadPoolExecutor] | None = None


def _helpers() -> ThreadPoolExecutor:
    """Return this process's helper threads; they start on first use, and anew after a fork."""
    global _pool
    if _pool is None or _pool[0] != os.getpid():
        # Two threads that meet here make two pools; the threads of the one that loses end with their work.
        _pool = (os.getpid(), ThreadPoolExecutor(_MAX_HELPERS, thread_name_prefix="store-reader"))
    return _pool[1]


def _plan_shards(shards: PartShards, ranges: Iterable[RowRange]) -> list[_ShardPlan]:
    # By layers too: columns of chunks are planned for a whole shard at a time.
    plans: dict[tuple[int, str, int, tuple[int, ...] | None], _ShardPlan] = {}
    for item in ranges:
        grid = shards.grid(item.array)
        shard_rows, chunk_rows = grid.shard_shape[0], grid.chunk_tokens
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
        return [_Column(c, (c * chunk_layers, (c + 1) * chunk_layers), []) for c in range(n_columns)]
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
            if read and offset == read.offset + read.n_bytes and read.n_bytes + n_bytes <= reader.file.max_read_bytes:
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
            window, n_bytes = [], 0
        window.append(read)
        n_bytes += read.n_bytes
    if window:
        yield window


def _fetch_ahead(reads: list[_Read]) -> None:
    """Request all bytes before the first chunk is decoded."""
    remote: list[tuple[_Read, RemoteFile]] = []
    for read in reads:
        file = read.reader.file
        if isinstance(file, RemoteFile):
            remote.append((read, file))
        elif len(reads) > 1:
            with suppress(*MISSING):  # whoever reads it says that it is missing
                file.prefetch(read.offset, read.offset + read.n_bytes)
    if remote:
        try:
            found = fetch_ranges([(file, read.offset, read.offset + read.n_bytes) for read, file in remote])
        except FileNotFoundError as error:
            raise StoreDamaged(f"{error} is missing since the store was opened. Restore it.") from error
        for (read, _), data in zip(remote, found, strict=True):
            read.data = np.frombuffer(data, np.uint8)


def _decode(read: _Read) -> None:
    """Read a run of chunks and put their values where they are wanted."""
    raw = read.reader.read_bytes(read.offset, read.n_bytes) if read.data is None else read.data
    for at, n_bytes, row, column, destinations in read.chunks:
        _place(read.reader, raw[at : at + n_bytes], row, column, destinations)
    read.data = None


def _place(reader: ShardReader, data: np.ndarray, row: int, column: _Column, destinations: list[_Destination]) -> None:
    grid = reader.grid
    row_start, chunk_rows = row * grid.chunk_tokens, grid.chunk_tokens
    if len(destinations) == 1 and column.span is not None and destinations[0].low <= row_start:
        at = row_start - destinations[0].low
        target = destinations[0].out[at : at + chunk_rows]
        if grid.chunks_per_row > 1 or target.ndim > 1:
            target = target[:, column.span[0] : column.span[1]]
        if target.shape == grid.chunk_shape and target.flags.c_contiguous:
            reader.decode(data, row, column.number, target)
            return
    dtype = destinations[0].out.dtype
    chunk = scratch_bytes("chunk", reader.chunk_size * dtype.itemsize).view(dtype).reshape(grid.chunk_shape)
    reader.decode(data, row, column.number, chunk)
    for destination in destinations:
        low, high = max(destination.low, row_start), min(destination.high, row_start + chunk_rows)
        target = destination.out[low - destination.low : high - destination.low]
        values = chunk[low - row_start : high - row_start]
        if column.span is not None:
            target = target if target.ndim == 1 else target[:, column.span[0] : column.span[1]]
            target[...] = values
        for inner, position in column.pairs if column.span is None else ():
            target[:, position] = values[:, inner]
