"""One Zarr v3 shard (``sharding_indexed``): encoded inner chunks in the order written, then the index.

::

    | chunk | chunk | ... | index: (offset uint64, n_bytes uint64) per inner chunk, C order | crc32c of the index |

An index entry of 2**64 - 1 twice means "no chunk", which only positions beyond the end of the array have here: a chunk
of zeros is written like any other, so that a lost chunk never reads as zeros.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .codecs.chunk import CRC_BYTES, decode_chunk, encode_chunk
from .durable import crc32c, disk_full_guard, write_all
from .errors import ShardCorrupt, ShardMissing
from .layout import ArrayLayout

_ABSENT = np.uint64(2**64 - 1)
# Neighbouring chunks are fetched by one read; beyond this size a longer read gains nothing.
_MAX_READ_BYTES = 16 << 20

_scratch = threading.local()


def _scratch_array(name: str, n_bytes: int) -> np.ndarray:
    """Return this thread's reusable uint8 buffer of that name, at least ``n_bytes`` long."""
    buffer: np.ndarray | None = getattr(_scratch, name, None)
    if buffer is None or len(buffer) < n_bytes:
        buffer = np.empty(n_bytes, np.uint8)
        setattr(_scratch, name, buffer)
    return buffer


@dataclass(frozen=True)
class FileRecord:
    """What a commit says about one file.

    Attributes:
        bytes: its size.
        crc32: ``zlib.crc32`` of its whole content (see ``durable.file_crc32`` for why not CRC-32C).
    """

    bytes: int
    crc32: int


class ShardWriter:
    """Writes one shard front to back; nothing is held in memory but the index.

    Args:
        path: file to create.
        layout: grid of the array.
    """

    def __init__(self, path: Path, layout: ArrayLayout) -> None:
        self._path = path
        self._layout = layout
        self._index = np.full((layout.rows_per_shard, layout.chunks_per_row, 2), _ABSENT, "<u8")
        self._row = 0
        self._n_bytes = 0
        self._crc = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk_full_guard(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    @property
    def is_full(self) -> bool:
        """Whether every row of inner chunks has been written."""
        return self._row == self._layout.rows_per_shard

    def append_row(self, values: np.ndarray) -> None:
        """Encode and write all inner chunks of the next ``chunk_tokens`` tokens.

        Args:
            values: [chunk_tokens, *token_shape], storage dtype.

        Raises:
            DiskFull: no room.
        """
        step = self._layout.chunk_layers
        for column in range(self._layout.chunks_per_row):
            chunk = values[:, column * step : (column + 1) * step] if values.ndim > 1 else values
            data = encode_chunk(chunk)
            self._index[self._row, column] = self._n_bytes, len(data)
            self._write(data)
        self._row += 1

    def finish(self) -> FileRecord:
        """Write the index, sync and close.

        Raises:
            DiskFull: no room.
        """
        index = self._index.tobytes()
        self._write(index + crc32c(index).to_bytes(CRC_BYTES, "little"))
        with disk_full_guard(self._path):
            os.fsync(self._fd)
        self.abort()
        return FileRecord(self._n_bytes, self._crc)

    def abort(self) -> None:
        """Close the file without an index; the caller deletes it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        with disk_full_guard(self._path):
            write_all(self._fd, data)
        self._n_bytes += len(data)
        self._crc = zlib.crc32(data, self._crc)


class ShardReader:
    """Reads inner chunks of one shard into the caller's array; safe in threads and after a fork.

    The file is only read with ``pread``, which shares no position. It closes when the reader is garbage.

    Args:
        path: the shard.
        layout: grid of the array.
        n_rows: rows of inner chunks that must be present (fewer than ``rows_per_shard`` in the last shard).

    Raises:
        ShardMissing: no such file.
        ShardCorrupt: the index is damaged.
    """

    def __init__(self, path: Path, layout: ArrayLayout, n_rows: int) -> None:
        self.path = path
        self._layout = layout
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ShardMissing(f"{path} is missing. {_REPAIR}") from error
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        self._index = self._read_index(n_rows)

    def _read_index(self, n_rows: int) -> np.ndarray:
        shape = (self._layout.rows_per_shard, self._layout.chunks_per_row, 2)
        index_bytes = int(np.prod(shape)) * 8
        file_bytes = os.fstat(self._fd).st_size
        data_bytes = file_bytes - index_bytes - CRC_BYTES
        if data_bytes < 0:
            raise ShardCorrupt(f"{self.path} has {file_bytes} bytes, too few for its index. {_REPAIR}")
        tail = os.pread(self._fd, index_bytes + CRC_BYTES, data_bytes)
        expected = int.from_bytes(tail[index_bytes:], "little")
        if (got := crc32c(tail[:index_bytes])) != expected:
            raise ShardCorrupt(f"{self.path}: index checksum is {got:#010x}, expected {expected:#010x}. {_REPAIR}")
        index = np.frombuffer(tail, "<u8", count=index_bytes // 8).reshape(shape)[:n_rows]
        # Offsets are compared before they are added: a sum could wrap around.
        offset, n_bytes = index[..., 0], index[..., 1]
        if bool(((offset > data_bytes) | (n_bytes > data_bytes)).any()) or bool((offset + n_bytes > data_bytes).any()):
            raise ShardCorrupt(f"{self.path}: the index names chunks outside the file or absent ones. {_REPAIR}")
        return index.astype(np.int64)

    def read(self, start: int, stop: int, out: np.ndarray, layers: Sequence[int] | None = None) -> None:
        """Decode tokens ``[start, stop)`` of the shard.

        Args:
            start: first token, counted from the shard's beginning.
            stop: end.
            out: [stop - start, *token_shape] (layer axis of ``len(layers)`` if given), storage dtype; filled.
            layers: indices along the layer axis, in the order wanted; None for all.

        Raises:
            ShardCorrupt: a chunk's checksum or size is wrong.
        """
        rows = range(start // self._layout.chunk_tokens, -(-stop // self._layout.chunk_tokens))
        columns = self._columns(layers)
        wanted = [(row, column) for row in rows for column in columns]
        for group in self._coalesce(wanted):
            first_byte = self._index[group[0]][0]
            last = self._index[group[-1]]
            raw = self._pread(int(first_byte), int(last[0] + last[1] - first_byte))
            for row, column in group:
                offset, n_bytes = self._index[row, column]
                at = int(offset - first_byte)
                self._place(raw[at : at + int(n_bytes)], row, start, stop, out, columns[column], column)

    def _columns(self, layers: Sequence[int] | None) -> dict[int, list[tuple[int, int]] | None]:
        """Return chunk column -> [(layer within the chunk, layer in out)], or None for a whole column in place."""
        if layers is None:
            return dict.fromkeys(range(self._layout.chunks_per_row))
        columns: dict[int, list[tuple[int, int]] | None] = {}
        for position, layer in enumerate(layers):
            column, inner = divmod(layer, self._layout.chunk_layers)
            pairs = columns.setdefault(column, [])
            assert pairs is not None
            pairs.append((inner, position))
        return dict(sorted(columns.items()))

    def _coalesce(self, wanted: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Group chunks that lie next to each other in the file."""
        groups: list[list[tuple[int, int]]] = []
        end = begin = -1
        for row, column in wanted:
            offset, n_bytes = (int(value) for value in self._index[row, column])
            if offset == end and offset + n_bytes - begin <= _MAX_READ_BYTES:
                groups[-1].append((row, column))
            else:
                groups.append([(row, column)])
                begin = offset
            end = offset + n_bytes
        if len(groups) > 1 and hasattr(os, "posix_fadvise"):
            for group in groups:
                offset = int(self._index[group[0]][0])
                stop = int(self._index[group[-1]].sum())
                os.posix_fadvise(self._fd, offset, stop - offset, os.POSIX_FADV_WILLNEED)
        return groups

    def _pread(self, offset: int, n_bytes: int) -> np.ndarray:
        raw = _scratch_array("raw", n_bytes)[:n_bytes]
        n_read = 0
        while n_read < n_bytes:
            got = os.preadv(self._fd, [raw[n_read:].data], offset + n_read)
            if got == 0:
                raise ShardCorrupt(f"{self.path} ends at byte {offset + n_read}, inside a chunk. {_REPAIR}")
            n_read += got
        return raw

    def _place(
        self,
        data: np.ndarray,
        row: int,
        start: int,
        stop: int,
        out: np.ndarray,
        pairs: list[tuple[int, int]] | None,
        column: int,
    ) -> None:
        """Decode one chunk and copy what is wanted of it; straight into ``out`` where all of it is wanted."""
        row_start = row * self._layout.chunk_tokens
        low, high = max(start, row_start), min(stop, row_start + self._layout.chunk_tokens)
        target = out[low - start : high - start]
        step = self._layout.chunk_layers
        if pairs is None and out.ndim > 1:
            target = target[:, column * step : (column + 1) * step]
        try:
            if pairs is None and target.shape == self._layout.chunk_shape and target.flags.c_contiguous:
                decode_chunk(data, target)
                return
            n_bytes = int(np.prod(self._layout.chunk_shape)) * out.dtype.itemsize
            chunk = _scratch_array("chunk", n_bytes)[:n_bytes].view(out.dtype).reshape(self._layout.chunk_shape)
            decode_chunk(data, chunk)
        except ShardCorrupt as error:
            where = f"tokens from {row_start} of the shard" + (f", layers from {column * step}" if out.ndim > 2 else "")
            raise ShardCorrupt(f"{self.path}: {error} ({where}). {_REPAIR}") from error
        values = chunk[low - row_start : high - row_start]
        if pairs is None:
            target[...] = values
            return
        for inner, position in pairs:
            target[:, position] = values[:, inner]

    def close(self) -> None:
        """Close the file now; reading again is an error."""
        self._finalizer()


_REPAIR = "Delete the part's file in commits/ and run extract again: it redoes that part only."
