"""Writes one part: sequences arrive in order, inner chunks are encoded as they fill, the commit comes last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import numpy as np
import pyarrow as pa

from ...errors import StoreError
from ...files import disk_full_guard
from ..chunk import EncodePool
from ..codecs.field import FieldCodec
from ..codecs.registry import StoreCodec
from ..commit import PartCommit
from ..grid import ArrayGrid
from ..schema import StoredArray, to_float32
from ..shard import FileRecord, ShardWriter
from .publish import PartFiles


class ArrayWriter:
    """Streams one stored array of a part into shards, buffering at most one row of chunks.

    Args:
        part: number of the part, which names the shards.
        allocated_tokens: tokens of the part, padding included.
        files: where the shards are written.
    """

    def __init__(
        self,
        array: StoredArray,
        part: int,
        allocated_tokens: int,
        grid: ArrayGrid,
        pool: EncodePool,
        files: PartFiles,
    ) -> None:
        self.array = array
        self.records: dict[str, FileRecord] = {}
        self.written: list[list[int]] = []
        self._part = part
        self._files = files
        self._pool = pool
        self._syncs: list[Future[None]] = []
        self._n_rows = array.n_rows(allocated_tokens)
        self._grid = grid
        self._row = np.zeros((self._grid.chunk_tokens, *array.row_shape), array.storage_dtype)
        self._row_is_clean = True
        self._n_rows_done = 0
        self._cursor = 0
        self._shard: ShardWriter | None = None
        self._shard_index = -1

    def write(self, first_row: int, values: np.ndarray) -> None:
        """Write consecutive rows; rows skipped since the last call are zero.

        Args:
            first_row: position of ``values[0]`` on the array's axis 0; not before the end of the last call.
            values: [n, *row_shape] in the array's dtype.
        """
        self._check(first_row, values)
        if not len(values):
            return
        if self.written and self.written[-1][1] == first_row:
            self.written[-1][1] += len(values)
        else:
            self.written.append([first_row, first_row + len(values)])
        self._cursor = first_row + len(values)
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
        unit = array.axes[0]
        if values.dtype != array.storage_dtype or values.shape[1:] != array.row_shape or values.ndim < 1:
            raise _wrong_values(array.name, array.storage_dtype, array.row_shape, array.logical_dtype, values)
        if first_row < self._cursor:
            raise StoreError(
                f"{array.name!r}: {unit} {first_row} comes before {self._cursor}, the end of what is written. "
                "Write in increasing order."
            )
        if first_row + len(values) > self._n_rows:
            end = first_row + len(values)
            raise StoreError(f"{array.name!r}: {unit}s {first_row} to {end} lie beyond the part's {self._n_rows}.")

    def _flush_rows(self, row: int) -> None:
        """Write out the buffered row and rows of zeros until ``row`` is the next one."""
        while self._n_rows_done < row:
            self._append(self._row)
            if not self._row_is_clean:
                self._row = np.zeros_like(self._row)  # a new one: an encoder may still read the other
                self._row_is_clean = True

    def _append(self, values: np.ndarray) -> None:
        if self._shard is None:
            self._shard_index += 1
            path = self._files.path_of(self._shard_name(self._shard_index))
            self._shard = ShardWriter(path, self._grid, self._pool, self._files.make_durable)
        self._shard.append_row(values)
        self._n_rows_done += 1
        if self._shard.is_full:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            record, synced = self._shard.finish()
            self.records[self._shard_name(self._shard_index)] = record
            self._syncs.append(synced)
            self._shard = None

    def _shard_name(self, index: int) -> str:
        return f"{self.array.name}/{self._grid.shard_key(self._part, index)}"

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
        for index in range(self._shard_index + 1):
            self._files.path_of(self._shard_name(index)).unlink(missing_ok=True)


class PartWriter:
    """Writes a part, or more fields of one. Leaving the ``with`` block without :meth:`commit` discards it.

    Not safe for several threads at once; different parts of one store may be written by different threads.

    Args:
        counts: what its commit must say (``plan.part_counts``).
        grids: array name -> its grid.
        on_close: called once nothing more is written, with whether the part is committed.
        pool: encodes on threads of its own; values must then not change until :meth:`settle` or :meth:`commit`.
            Without one the caller's thread encodes, and they may change as soon as :meth:`write` returns.

    Attributes:
        was_first: whether the committed part is this one; no longer once :meth:`commit` found another writer's.
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
        self.part, self.allocated_tokens = counts["part"], counts["allocated_tokens"]
        self.was_first = True
        self._counts, self._codec, self._files, self._on_close = counts, codec, files, on_close
        self._is_open = True
        starts, lengths = (sequences[name].to_pylist() for name in ("first_token", "n_tokens"))
        self._planned: dict[int, int] = dict(zip(starts, lengths, strict=True))
        pool = pool or EncodePool()
        self._arrays = {
            array.name: ArrayWriter(array, self.part, self.allocated_tokens, grids[array.name], pool, files)
            for array in codec.arrays
        }

    @property
    def is_open(self) -> bool:
        """Whether it is neither committed nor discarded yet."""
        return self._is_open

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields to write."""
        return tuple(self._codec.fields)

    def write(
        self,
        field: str,
        first_token: int,
        values: np.ndarray | Mapping[str, np.ndarray],
        tokens: np.ndarray | None = None,
    ) -> None:
        """Write consecutive tokens of a field; with a lossy codec exactly one sequence.

        Args:
            first_token: position of the first of them on the part's token axis (``first_token`` of the plan); within a
                field it only grows. Tokens that are skipped become zero.
            values: [n, *token_shape] in the storage dtype (uint16 bits for bfloat16), or what the field's codec encoded
                them to: the rows of each stored array.
            tokens: int32 [n], the sequence's token ids; only for values whose codec ``needs_tokens``.

        Raises:
            StoreError: unknown field, wrong dtype, shape, order or range; with a lossy codec also a value that is not
                finite, something else than one planned sequence, or no tokens where they are needed.
        """
        codec = self._field_codec(field)
        if codec.is_identity and not isinstance(values, Mapping):
            self._arrays[codec.arrays[0].name].write(first_token, values)
            return
        n_tokens = self._planned.get(first_token)
        if n_tokens is None or (not isinstance(values, Mapping) and len(values) != n_tokens):
            n_given = "" if isinstance(values, Mapping) else f" to {first_token + len(values)}"
            raise StoreError(
                f"{field!r}: tokens {first_token}{n_given} are not one sequence of the plan (it has "
                f"{n_tokens or 'none'} there). This codec encodes whole sequences: write one sequence per call."
            )
        codes = values if isinstance(values, Mapping) else _encoded(codec, values, tokens)
        if codes.keys() != {array.name for array in codec.arrays}:
            raise StoreError(
                f"{field!r} is stored as {', '.join(array.name for array in codec.arrays)}, got {', '.join(codes)}."
            )
        for array in codec.arrays:
            rows = codes[array.name]
            if len(rows) != array.n_rows(n_tokens):
                raise StoreError(
                    f"{array.name!r}: {n_tokens} tokens make {array.n_rows(n_tokens)} rows, got {len(rows)}."
                )
            self._arrays[array.name].write(first_token // array.block_tokens, rows)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreError(f"Part {self.part} is closed; open it again with StoreWriter.part.")

    def _field_codec(self, field: str) -> FieldCodec:
        self._check_open()
        if field not in self._codec.fields:
            raise StoreError(f"There is no field {field!r}; this store has {', '.join(self._codec.fields)}.")
        return self._codec.fields[field]

    def settle(self) -> None:
        """Wait until all values given to :meth:`write` are encoded; they may then change."""
        for array in self._arrays.values():
            array.settle()

    def commit(self) -> PartCommit:
        """Make the part exist: finish and sync every shard, give it its name, write the commit.

        Where another writer has committed the part meanwhile, this one's files are deleted: the first commit stays.

        Returns:
            The part's commit, of whichever writer.

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
            records = {name: record for array in self._arrays.values() for name, record in array.records.items()}
            commit = PartCommit(**self._counts, files=dict(sorted({**self._files.existing, **records}.items())))
            commit, self.was_first = self._files.publish(commit, records)
        self._is_open = False
        self._on_close(True)
        return commit

    def _check_complete(self) -> None:
        first_token = self.sequences["first_token"].to_numpy()
        stop_token = first_token + self.sequences["n_tokens"].to_numpy()
        for name, array in self._arrays.items():
            first, stop = first_token // array.array.block_tokens, -(-stop_token // array.array.block_tokens)
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
        if not self._is_open:
            return
        self._is_open = False
        for array in self._arrays.values():
            array.abort()
        is_committed = False
        try:
            is_committed = self._files.withdraw()
        finally:
            self._on_close(is_committed)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _wrong_values(name: str, dtype: np.dtype, shape: tuple[int, ...], meaning: str, got: np.ndarray) -> StoreError:
    sizes = ", ".join(map(str, shape))
    return StoreError(
        f"{name!r} takes {dtype.name} arrays of shape [n, {sizes}] ({meaning}), got {got.dtype} {list(got.shape)}."
    )


def _encoded(codec: FieldCodec, values: np.ndarray, tokens: np.ndarray | None) -> dict[str, np.ndarray]:
    spec = codec.spec
    if values.dtype != spec.storage_dtype or values.shape[1:] != spec.token_shape:
        raise _wrong_values(spec.name, spec.storage_dtype, spec.token_shape, spec.dtype, values)
    if codec.needs_tokens and (tokens is None or tokens.shape != (len(values),)):
        raise StoreError(
            f"{spec.name!r} is predicted from tokens: give `write` the {len(values)} token ids of the sequence, "
            f"got {'none' if tokens is None else list(tokens.shape)}."
        )
    if codec.sources:
        names = " and ".join(repr(source.spec.name) for source in codec.sources)
        raise StoreError(
            f"{spec.name!r} is predicted from {names}: encode the sequence by StoreCodec.encode, and give `write` the "
            "rows."
        )
    return codec.encode(to_float32(values, spec.dtype), tokens)
