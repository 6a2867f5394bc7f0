"""Writing one part: fields arrive in token order, inner chunks are encoded as they fill, the commit comes last."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from .codec import Codec
from .commit import PartCommit, commit_path, part_path
from .durable import PARTIAL_SUFFIX, disk_full_guard, fsync_directory, write_atomic, write_file
from .errors import PartIncomplete, WriteInvalid
from .layout import array_layout, part_metadata
from .schema import FieldSpec
from .shard import FileRecord, ShardWriter


class ArrayWriter:
    """Streams one field of a part into shards; at most one row of inner chunks is buffered.

    Args:
        folder: the array's folder inside the part's group.
        spec: the field.
        codec: encodes the inner chunks.
        allocated_tokens: length of the token axis.
    """

    def __init__(self, folder: Path, spec: FieldSpec, codec: Codec, allocated_tokens: int) -> None:
        self.spec = spec
        self.files: dict[str, FileRecord] = {}
        self.written: list[list[int]] = []
        self._folder = folder
        self._codec = codec
        self._n_tokens = allocated_tokens
        self._layout = array_layout(spec, allocated_tokens)
        self._row = np.zeros((self._layout.chunk_tokens, *spec.token_shape), spec.storage_dtype)
        self._row_is_clean = True
        self._n_rows_done = 0
        self._cursor = 0
        self._shard: ShardWriter | None = None
        self._shard_index = -1

    def write(self, first_token: int, values: np.ndarray) -> None:
        """Write consecutive tokens; tokens skipped since the last call are zero.

        Args:
            first_token: position of ``values[0]`` on the part's token axis; not before the end of the last call.
            values: [n, *token_shape] in the storage dtype.

        Raises:
            WriteInvalid: wrong dtype, shape, order or range.
            DiskFull: no room.
        """
        self._check(first_token, values)
        if not len(values):
            return
        if self.written and self.written[-1][1] == first_token:
            self.written[-1][1] += len(values)
        else:
            self.written.append([first_token, first_token + len(values)])
        self._cursor = first_token + len(values)
        size = self._layout.chunk_tokens
        at = 0
        while at < len(values):
            row, offset = divmod(first_token + at, size)
            self._flush_rows(row)
            n = min(size - offset, len(values) - at)
            if n == size:
                self._append(values[at : at + n])
            else:
                self._row[offset : offset + n] = values[at : at + n]
                self._row_is_clean = False
            at += n

    def _check(self, first_token: int, values: np.ndarray) -> None:
        spec = self.spec
        if values.dtype != spec.storage_dtype or values.shape[1:] != spec.token_shape or values.ndim < 1:
            raise WriteInvalid(
                f"Field {spec.name!r} takes {spec.storage_dtype.name} arrays of shape [n, "
                f"{', '.join(map(str, spec.token_shape))}] ({spec.dtype}), got {values.dtype} {list(values.shape)}."
            )
        if first_token < self._cursor:
            raise WriteInvalid(
                f"Field {spec.name!r}: token {first_token} comes before {self._cursor}, the end of what "
                "is written. Write in increasing order."
            )
        if first_token + len(values) > self._n_tokens:
            raise WriteInvalid(
                f"Field {spec.name!r}: tokens {first_token} to {first_token + len(values)} lie beyond "
                f"the part's {self._n_tokens}."
            )

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
            path = self._folder / self._layout.shard_key(self._shard_index)
            self._shard = ShardWriter(path, self._layout, self._codec)
        self._shard.append_row(values)
        self._n_rows_done += 1
        if self._shard.is_full:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self.files[self._layout.shard_key(self._shard_index)] = self._shard.finish()
            self._shard = None

    def finish(self) -> None:
        """Fill up to the end of the array with zeros and sync the last shard.

        Raises:
            DiskFull: no room.
        """
        self._flush_rows(self._layout.n_rows)
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
        store: the store's folder.
        part: number of the part.
        specs: its fields.
        sequences: the plan's rows of this part.
        allocated_tokens: length of the token axis.
        codec: encodes the inner chunks.
        on_commit: called with the part's number once it is committed.
    """

    def __init__(
        self,
        store: Path,
        part: int,
        specs: Sequence[FieldSpec],
        sequences: pa.Table,
        allocated_tokens: int,
        codec: Codec,
        on_commit: Callable[[int], None],
    ) -> None:
        self.part = part
        self.sequences = sequences
        self.allocated_tokens = allocated_tokens
        self._store = store
        self._path = part_path(store, part)
        self._partial = self._path.with_name(self._path.name + PARTIAL_SUFFIX)
        self._on_commit = on_commit
        self._is_open = True
        with disk_full_guard(self._path):
            try:
                self._partial.mkdir()
            except FileExistsError as error:
                raise WriteInvalid(f"Part {part} is being written already; open each part once.") from error
            try:
                self._files = self._write_metadata(specs, codec)
            except BaseException:
                self.discard()
                raise
        self._arrays = {
            spec.name: ArrayWriter(self._partial / spec.name, spec, codec, allocated_tokens) for spec in specs
        }

    def _write_metadata(self, specs: Sequence[FieldSpec], codec: Codec) -> dict[str, FileRecord]:
        files = {}
        for name, content in part_metadata(specs, codec, self.allocated_tokens).items():
            path = self._partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content)
            files[name] = FileRecord(len(content), zlib.crc32(content))
        return files

    def write(self, field: str, first_token: int, array: np.ndarray) -> None:
        """Write consecutive tokens of a field.

        Args:
            field: its name, e.g. ``"kv"``.
            first_token: position of ``array[0]`` on the part's token axis (``first_token`` of the plan); within a
                field it only grows. Tokens that are skipped become zero.
            array: [n, *token_shape] in the storage dtype (uint16 bits for bfloat16).

        Raises:
            WriteInvalid: unknown field, or wrong dtype, shape, order or range.
            DiskFull: no room; leave the block, which discards the part.
        """
        if not self._is_open:
            raise WriteInvalid(f"Part {self.part} is closed; open it again with StoreWriter.part.")
        if field not in self._arrays:
            raise WriteInvalid(f"There is no field {field!r}; this store has {', '.join(self._arrays)}.")
        self._arrays[field].write(first_token, array)

    def commit(self) -> PartCommit:
        """Make the part exist: index and sync every shard, rename the folder, write the commit.

        Returns:
            What was committed.

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
            for root, _, _ in os.walk(self._partial):
                fsync_directory(Path(root))
            os.rename(self._partial, self._path)
            fsync_directory(self._path.parent)
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

    def _check_complete(self) -> None:
        first = self.sequences["first_token"].to_numpy()
        stop = first + self.sequences["n_tokens"].to_numpy()
        for name, array in self._arrays.items():
            ranges = np.array(array.written, np.int64).reshape(-1, 2)
            # The range that starts last at or before a sequence must reach its end.
            at = np.searchsorted(ranges[:, 0], first, side="right") - 1
            covered = at >= 0
            covered[covered] = ranges[at[covered], 1] >= stop[covered]
            if not covered.all():
                row = int(np.flatnonzero(~covered)[0])
                raise PartIncomplete(
                    f"Part {self.part}: {int((~covered).sum())} of {len(first)} sequences were not written to "
                    f"{name!r}, the first at tokens {first[row]} to {stop[row]}. Write them all before commit()."
                )

    def discard(self) -> None:
        """Delete what was written; the part stays pending."""
        self._is_open = False
        for array in getattr(self, "_arrays", {}).values():
            array.abort()
        if commit_path(self._store, self.part).exists():
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
        if self._is_open:
            self.discard()
