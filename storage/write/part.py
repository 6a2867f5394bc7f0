"""Writing one part: sequences arrive in order, inner chunks are encoded as they fill, the commit comes last."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from ..chunks.field import FieldCodec, StoredArray
from ..codecs.registry import StoreCodec
from ..disk.checking import exists
from ..disk.durable import PARTIAL_SUFFIX, disk_full_guard, fsync_directory, walk, write_atomic, write_file
from ..dtypes import to_float32
from ..errors import PartIncomplete, WriteInvalid
from ..names import commit_path, part_path
from ..parts.commit import PartCommit
from ..parts.grid import array_grid, part_metadata
from ..parts.shard import FileRecord, ShardWriter


class ArrayWriter:
    """Streams one stored array of a part of ``allocated_tokens`` into shards, one row of chunks buffered at most."""

    def __init__(self, folder: Path, array: StoredArray, allocated_tokens: int) -> None:
        self.array = array
        self.files: dict[str, FileRecord] = {}
        self.written: list[list[int]] = []
        self._folder = folder
        self._n_rows = array.n_rows(allocated_tokens)
        self._grid = array_grid(array, allocated_tokens)
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

        Raises:
            WriteInvalid: wrong dtype, shape, order or range.
            DiskFull: no room.
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
                self._append(values[at : at + n])  # a whole row of chunks is encoded where it lies
            else:
                self._row[offset : offset + n] = values[at : at + n]
                self._row_is_clean = False
            at += n

    def _check(self, first_row: int, values: np.ndarray) -> None:
        array = self.array
        unit = array.axes[0]
        if values.dtype != array.storage_dtype or values.shape[1:] != array.row_shape or values.ndim < 1:
            raise WriteInvalid(
                f"{array.name!r} takes {array.storage_dtype.name} arrays of shape [n, "
                f"{', '.join(map(str, array.row_shape))}] ({array.logical_dtype}), got {values.dtype} "
                f"{list(values.shape)}."
            )
        if first_row < self._cursor:
            raise WriteInvalid(
                f"{array.name!r}: {unit} {first_row} comes before {self._cursor}, the end of what is written. "
                "Write in increasing order."
            )
        if first_row + len(values) > self._n_rows:
            end = first_row + len(values)
            raise WriteInvalid(f"{array.name!r}: {unit}s {first_row} to {end} lie beyond the part's {self._n_rows}.")

    def _flush_rows(self, row: int) -> None:
        """Write out the buffered row and rows of zeros until ``row`` is the next one."""
        while self._n_rows_done < row:
            self._append(self._row)
            if not self._row_is_clean:
                self._row[...] = 0
                self._row_is_clean = True

    def _append(self, values: np.ndarray) -> None:
        if self._shard is None:
            self._shard_index += 1
            path = self._folder / self._grid.shard_key(self._shard_index)
            self._shard = ShardWriter(path, self._grid)
        self._shard.append_row(values)
        self._n_rows_done += 1
        if self._shard.is_full:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self.files[self._grid.shard_key(self._shard_index)] = self._shard.finish()
            self._shard = None

    def finish(self) -> None:
        """Fill up to the end of the array with zeros and sync the last shard."""
        self._flush_rows(self._grid.n_rows)
        self._finish_shard()

    def abort(self) -> None:
        """Close what is open; the caller deletes the files."""
        if self._shard is not None:
            self._shard.abort()
            self._shard = None


class PartWriter:
    """One part in the making. Leaving the ``with`` block without :meth:`commit` discards it.

    Not safe for several threads at once; different parts of one store may be written by different threads.

    Args:
        on_commit: called with the part's number once it is committed.
    """

    def __init__(
        self,
        store: Path,
        part: int,
        sequences: pa.Table,
        allocated_tokens: int,
        codec: StoreCodec,
        on_commit: Callable[[int], None],
    ) -> None:
        self.part = part
        self.sequences = sequences
        self.allocated_tokens = allocated_tokens
        self._store = store
        self._path = part_path(store, part)
        self._codec = codec
        self._partial = self._path.with_name(self._path.name + PARTIAL_SUFFIX)
        self._on_commit = on_commit
        self._is_open = True
        starts, lengths = (sequences[name].to_pylist() for name in ("first_token", "n_tokens"))
        self._planned: dict[int, int] = dict(zip(starts, lengths, strict=True))
        with disk_full_guard(self._path):
            try:
                self._partial.mkdir()
            except FileExistsError as error:
                raise WriteInvalid(f"Part {part} is being written already; open each part once.") from error
            try:
                self._files = self._write_metadata()
                self._arrays = {
                    array.name: ArrayWriter(self._partial / array.name, array, allocated_tokens)
                    for array in codec.arrays
                }
            except BaseException:
                self.discard()
                raise

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that are to be written."""
        return tuple(self._codec.fields)

    def _write_metadata(self) -> dict[str, FileRecord]:
        files = {}
        for name, content in part_metadata(self._codec.arrays, self.allocated_tokens).items():
            path = self._partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content)
            files[name] = FileRecord(len(content), zlib.crc32(content))
        return files

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
            values: [n, *token_shape] in the storage dtype (uint16 bits for bfloat16), or what the field's codec made of
                them: the rows of each stored array.
            tokens: int32 [n], the sequence's token ids; only for values whose codec ``needs_tokens``.

        Raises:
            WriteInvalid: unknown field, wrong dtype, shape, order or range; with a lossy codec also a value that is not
                finite, something else than one planned sequence, or no tokens where they are needed.
            DiskFull: no room; leave the block, which discards the part.
        """
        codec = self._field_codec(field)
        if codec.is_identity and not isinstance(values, Mapping):
            self._arrays[codec.arrays[0].name].write(first_token, values)
            return
        n_tokens = self._planned.get(first_token)
        if n_tokens is None or (not isinstance(values, Mapping) and len(values) != n_tokens):
            n_given = "" if isinstance(values, Mapping) else f" to {first_token + len(values)}"
            raise WriteInvalid(
                f"{field!r}: tokens {first_token}{n_given} are not one sequence of the plan (it has "
                f"{n_tokens or 'none'} there). This codec encodes whole sequences: write one sequence per call."
            )
        codes = values if isinstance(values, Mapping) else _encoded(codec, values, tokens)
        if codes.keys() != {array.name for array in codec.arrays}:
            raise WriteInvalid(
                f"{field!r} is stored as {', '.join(array.name for array in codec.arrays)}, got {', '.join(codes)}."
            )
        for array in codec.arrays:
            rows = codes[array.name]
            if len(rows) != array.n_rows(n_tokens):
                raise WriteInvalid(
                    f"{array.name!r}: {n_tokens} tokens make {array.n_rows(n_tokens)} rows, got {len(rows)}."
                )
            self._arrays[array.name].write(first_token // array.block_tokens, rows)

    def _field_codec(self, field: str) -> FieldCodec:
        if not self._is_open:
            raise WriteInvalid(f"Part {self.part} is closed; open it again with StoreWriter.part.")
        if field not in self._codec.fields:
            raise WriteInvalid(f"There is no field {field!r}; this store has {', '.join(self._codec.fields)}.")
        return self._codec.fields[field]

    def commit(self) -> PartCommit:
        """Make the part exist: index and sync every shard, rename the folder, write the commit.

        Raises:
            PartIncomplete: a planned sequence was not written to every field.
            DiskFull: no room; leave the block, which discards the part.
        """
        if not self._is_open:
            raise WriteInvalid(f"Part {self.part} is closed; open it again with StoreWriter.part.")
        self._check_complete()
        with disk_full_guard(self._path):
            for name, array in self._arrays.items():
                array.finish()
                self._files |= {f"{name}/{key}": record for key, record in array.files.items()}
            for root, _, _ in walk(self._partial):
                fsync_directory(root)
            self._move_into_place()
        commit = PartCommit(
            part=self.part,
            n_sequences=self.sequences.num_rows,
            n_tokens=int(self.sequences["n_tokens"].to_numpy().sum(dtype=np.int64)),
            allocated_tokens=self.allocated_tokens,
            files=dict(sorted(self._files.items())),
        )
        write_atomic(commit_path(self._store, self.part), commit.to_json())
        self._is_open = False
        self._on_commit(self.part)
        return commit

    def _move_into_place(self) -> None:
        """Rename the synced folder to its final name."""
        os.rename(self._partial, self._path)
        fsync_directory(self._path.parent)

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
                raise PartIncomplete(
                    f"Part {self.part}: {n_missing} of {len(first)} sequences were not written to {name!r}, the first "
                    f"at tokens {first_token[row]} to {stop_token[row]}. Write them all before commit()."
                )

    def discard(self) -> None:
        """Delete what was written, unless it is committed; the part stays pending."""
        if not self._is_open:
            return
        self._is_open = False
        for array in getattr(self, "_arrays", {}).values():
            array.abort()
        try:
            is_committed = exists(commit_path(self._store, self.part))
        except OSError:
            return  # it can't be told; whoever opens the store next deletes what has no commit
        if is_committed:
            # An interrupt can arrive right after the commit appeared: the part is finished and stays.
            self._on_commit(self.part)
            return
        for path in (self._partial, self._path):
            shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def _encoded(codec: FieldCodec, values: np.ndarray, tokens: np.ndarray | None) -> dict[str, np.ndarray]:
    spec = codec.spec
    if values.dtype != spec.storage_dtype or values.shape[1:] != spec.token_shape:
        shape = ", ".join(map(str, spec.token_shape))
        raise WriteInvalid(
            f"{spec.name!r} takes {spec.storage_dtype.name} arrays of shape [n, {shape}] ({spec.dtype}), "
            f"got {values.dtype} {list(values.shape)}."
        )
    if codec.needs_tokens and (tokens is None or tokens.shape != (len(values),)):
        raise WriteInvalid(
            f"{spec.name!r} is predicted from tokens: give `write` the {len(values)} token ids of the sequence, "
            f"got {'none' if tokens is None else list(tokens.shape)}."
        )
    return codec.encode(to_float32(values, spec.dtype), tokens)
