"""Reads sequences, fields, layers and token slices of a store as NumPy arrays.

Reading needs neither torch nor the target model.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import Literal, SupportsIndex

import numpy as np
import pyarrow as pa

from ...errors import SelectionInvalid, StoreDamaged, StoreError, StoreNotFound
from ...files import kind_of
from ..backend import MISSING, backend_of, download, open_path
from ..codecs.field import Codes, FieldCodec, Layers, LosslessCodec, Selection
from ..codecs.registry import StoreCodec
from ..commit import check_manifest, check_size, read_commits, read_file_records
from ..paths import StorePath
from ..plan import check_plan_of, numbers, part_counts, read_plan, rows_where
from ..read_cache import ReadCache, cache_at
from ..schema import (
    MANIFEST_NAME,
    PARTS_NAME,
    PLAN_NAME,
    TARGET_NAME,
    TOKENS,
    FieldSpec,
    StoredArray,
    StoreManifest,
    from_float32,
    target_commit_path,
    tokens_field,
)
from .batch import PartShards, RowRange, read_ranges, run_in_threads

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""A function that returns a new array with the given shape and dtype. The values of the array are
arbitrary.
"""

_TOKENS_ARRAY = LosslessCodec(tokens_field()).arrays[0]


class ActivationStore:
    """An activation store that is opened for reading.

    A store is divided into parts. A part is a range of sequences. The commit of a part is a JSON
    file that lists the files of the part. Values are read when they are requested. An
    ``ActivationStore`` can be used by several threads and after a fork. It can be pickled, and
    unpickling opens the store again.

    Opening checks the schema version, and compares the plan with the commits. It also checks that
    every file that a commit lists exists and has the right size. Reading verifies the checksum of
    each chunk. ``verify_store`` checks everything else.

    Args:
        path: the store's folder, or its URL (``s3://``, ``gs://``, ``az://``, ``file://``).
        require_complete: whether to raise an error if a planned part has no commit.
        parts: numbers of the parts to open. Other parts are not read, even if they are damaged. If
            the argument is None, all parts are opened.
        cache: cache on a local disk for the bytes that are read from a remote store. By default,
            the environment variable ``MOA_DATA_CACHE_DIR`` names the folder of the cache. If the
            argument is None, nothing is cached.
        checks_sizes: whether to compare the size of every file with its commit when the store is
            opened.

    Attributes:
        sequences: table of the sequences of the opened parts that have a commit. It is in the order
            of the plan, and has the columns of ``plan.PLAN_SCHEMA``.
        commits: number of each opened part that has a commit -> the commit.

    Raises:
        StoreError: the path is not a store, this release cannot read the store's schema version,
            the store is damaged, or it is incomplete and ``require_complete`` is set.

    Example::

        store = ActivationStore("store")
        tokens = store.read(0, "tokens")  # int32 [n_tokens]
        # uint16 [128, 1, n_kv_heads, 2, head_dim]
        kv = store.read(0, "kv", layers=[-1], tokens=slice(0, 128))
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | StorePath,
        *,
        require_complete: bool = False,
        parts: Collection[int] | None = None,
        cache: ReadCache | Literal["environment"] | None = "environment",
        checks_sizes: bool = True,
    ) -> None:
        self.path = open_path(path)
        self._selected = parts
        self.cache = cache_at() if cache == "environment" else cache
        self.manifest, self.codec = _open_manifest(self.path)
        self.fields: dict[str, FieldSpec] = {spec.name: spec for spec in self.manifest.fields}
        plan = read_plan(self.path / PLAN_NAME)
        check_plan_of(self.path, self.manifest, plan)
        self.commits = read_commits(
            self.path, range(self.manifest.n_parts) if parts is None else parts
        )
        planned = part_counts(plan, self.manifest.alignment_tokens)
        # For a remote store, get the sizes of all files with one request for a listing, and not
        # with one request per file.
        listed = backend_of(self.path / PARTS_NAME).listed_sizes() if checks_sizes else {}
        for part, commit in self.commits.items():
            # Compare the plan with the counts in the commit before any array is allocated. The
            # lengths of arrays come from the plan, so a damaged plan could lead to arrays of many
            # gigabytes.
            commit.check_counts(self.path, part, planned[part])
            if checks_sizes:
                for name, record in commit.files.items():
                    check_size(self.path / PARTS_NAME / name, record, listed.get(name))
        if require_complete and len(self.commits) < self.manifest.n_parts:
            pending = [part for part in range(self.manifest.n_parts) if part not in self.commits]
            raise StoreError(
                f"{self.path} is incomplete: {len(pending)} of {self.manifest.n_parts} parts are "
                f"not written yet, the first of them is part {pending[0]}. Run the same `moa-data "
                "extract` command again to write them."
            )
        committed = np.isin(
            numbers(plan, "part"), np.fromiter(self.commits, np.int32, len(self.commits))
        )
        self.sequences: pa.Table = rows_where(plan, committed)
        self._parts = numbers(self.sequences, "part")
        self._first_tokens = numbers(self.sequences, "first_token")
        self._n_tokens = numbers(self.sequences, "n_tokens")
        self._shards = PartShards(self.path, self.manifest, self.commits, self.cache)
        self._download: tempfile.TemporaryDirectory[str] | None = None

    def __reduce__(self) -> "tuple[Callable[[StorePath], ActivationStore], tuple[StorePath]]":
        return (partial(ActivationStore, parts=self._selected, cache=self.cache), (self.path,))

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Read all fields of one sequence. To read one field or some tokens, use :meth:`read`."""
        return {name: self.read(i, name) for name in self.fields}

    def __repr__(self) -> str:
        shapes: list[str] = []
        for spec in self.fields.values():
            sizes = ", ".join(map(str, ("n", *spec.token_shape)))
            shapes.append(f"{spec.name} {spec.dtype}[{sizes}]")
        return (
            f"ActivationStore({str(self.path)!r}: {len(self):,} sequences, "
            f"{self._n_tokens.sum():,} tokens, {len(self.commits)} of {self.manifest.n_parts} "
            f"parts; {'; '.join(shapes)})"
        )

    def __enter__(self) -> "ActivationStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def target_path(self) -> Path:
        """Local folder of the target bundle: config, tokenizer and frozen weights of the target.

        The target bundle of a remote store is downloaded on first use.
        """
        folder = self.path / TARGET_NAME
        if self._download is None:
            if isinstance(folder, Path):
                return folder
            self._download = tempfile.TemporaryDirectory(prefix="moa-data-target-")
            commit = target_commit_path(self.path)
            download(
                folder,
                Path(self._download.name),
                read_file_records(commit) if backend_of(commit).exists() else folder.names_below(),
            )
        return Path(self._download.name)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of every committed sequence, int32 [len(self)]."""
        return np.asarray(self._n_tokens)

    @property
    def n_bytes_read(self) -> int:
        """Number of bytes of stored (encoded) chunks that the calling thread has read so far."""
        return self._shards.n_bytes_read

    def refuse_groups(self, what: str) -> None:
        """Raise SelectionInvalid if the store has several fields of keys and values.

        If the layers of the target cache keys and values of different shapes, each group of layers
        with the same shapes has a field of its own.

        Args:
            what: name of the setting, in backticks, that does not support such stores. It is for
                the error message.
        """
        if any(spec.layers is not None for spec in self.fields.values()):
            raise SelectionInvalid(
                f"{self.path} has several fields of keys and values, one for each group of layers, "
                f"but {what} supports only stores with a single such field. Leave out {what}."
            )

    def read(
        self,
        i: int,
        field: str,
        layers: slice | Sequence[int] | None = None,
        tokens: slice | None = None,
    ) -> np.ndarray:
        """Read a field of one sequence.

        Args:
            i: index into ``sequences``. A negative index counts from the end.
            field: name of the field, e.g. ``"kv"``.
            layers: indices along the field's layer axis, in the requested order. If the argument is
                None, all layers are read. It must be None if the field has no layer axis.
            tokens: slice of the sequence's tokens, with step 1. If the argument is None, all tokens
                are read.

        Returns:
            Array [n_tokens, *token_shape] in the storage dtype. A bfloat16 value is returned as its
            bits in uint16, and ``schema.to_float32`` converts it.

        Raises:
            SelectionInvalid: the field, sequence or layer does not exist, or the step of ``tokens``
                is not 1.
            StoreDamaged: a checksum is wrong, a file is missing, or a token id is not in the
                target's vocabulary.
        """
        spec = self._field(field)
        codec = self.codec.fields[field]
        chosen = layer_indices(spec, layers)
        base, start, stop = self._span(i, codec, tokens)
        codes = self._read_codes(i, codec, base, stop, chosen)
        if codec.is_identity:
            return codes[codec.arrays[0].name]
        out = np.empty((stop - start, *token_shape(spec, chosen)), spec.storage_dtype)
        if stop > start:
            decode_tokens(codec, codes, base, start, stop, chosen, out)
        return out

    def read_stored(
        self,
        i: int,
        field: str,
        layers: slice | Sequence[int] | None = None,
        tokens: slice | None = None,
    ) -> dict[str, np.ndarray]:
        """Read a field of one sequence without decoding it.

        The arguments are the same as for :meth:`read`.

        Returns:
            Name of a stored array -> its rows. The mapping can be passed to
            ``codec.fields[field].decode`` as ``codes``. For a lossless codec, the rows start at the
            first requested token. For a lossy codec, they start at the last multiple of 64 that is
            not greater than the index of this token.
        """
        chosen = layer_indices(self._field(field), layers)
        codec = self.codec.fields[field]
        base, _, stop = self._span(i, codec, tokens)
        return self._read_codes(i, codec, base, stop, chosen)

    def _span(self, i: int, codec: FieldCodec, tokens: slice | None) -> tuple[int, int, int]:
        """Convert a token slice to the range of tokens to return and the range of tokens to read.

        A lossy codec can decode only from a multiple of 64 tokens on. So reading may have to start
        before the first requested token.

        Returns:
            The first token to read, the first requested token, and the end (exclusive) of the
            tokens to read and to return.
        """
        start, stop, step = (tokens or slice(None)).indices(int(self._n_tokens[self._sequence(i)]))
        if step != 1:
            raise SelectionInvalid(
                f"The token slice has step {step}, but only step 1 is supported. Slice the result "
                "instead."
            )
        # If the field is stored unchanged, reading can start at any token.
        base = start if codec.is_identity else start - start % self.manifest.alignment_tokens
        return base, start, max(start, stop)

    def _read_codes(
        self, i: int, codec: FieldCodec, base: int, stop: int, layers: Layers
    ) -> dict[str, np.ndarray]:
        i = self._sequence(i)
        codes, ranges = self._plan_codes(i, codec, base, stop, layers)
        read_ranges(self._shards, ranges)
        self._check_tokens([i], codes)
        return codes

    def read_batch(
        self,
        sequences: Sequence[int] | np.ndarray,
        fields: str | Sequence[str],
        *,
        out: Mapping[str, np.ndarray] | None = None,
        layers: slice | Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        n_threads: int = 1,
        decoded: bool = True,
        allocate: Allocate = np.empty,
    ) -> dict[str, np.ndarray]:
        """Read fields of several sequences into right-padded arrays.

        This is much faster than calling :meth:`read` for one sequence after another.

        Args:
            sequences: indices into the attribute ``sequences``, in the requested order. An index
                may be repeated.
            fields: name of a field, or names of several fields.
            out: field name -> buffer to fill. A buffer has the storage dtype and the shape
                [n_sequences, at least the longest sequence, *token_shape]. Reuse buffers for
                several batches, because allocating memory costs more than reading. If the argument
                is None, new arrays are allocated.
            layers: layers to read, as in :meth:`read`. They apply to all requested fields that have
                a layer axis. The argument may also be a mapping: field name -> layers to read.
            n_threads: number of threads that decode, including the calling thread.
            decoded: if False, return the rows of the stored arrays without decoding them. In this
                case, the keys of the result and of ``out`` are the names of the stored arrays.
            allocate: function that returns a new array of a shape and dtype. It is used if ``out``
                is None.

        Returns:
            Field name -> array. ``array[b, :n_tokens]`` is sequence b of the batch. The rest of
            ``array[b]`` is zero.

        Raises:
            SelectionInvalid: a field, a sequence or a layer does not exist, or a buffer in ``out``
                is missing or has the wrong dtype or shape.
            StoreDamaged: a checksum is wrong, a file is missing, or a token id is not in the
                target's vocabulary.
        """
        rows: list[int] = []
        lengths: list[int] = []
        for sequence in sequences:
            row = self._sequence(int(sequence))
            rows.append(row)
            lengths.append(int(self._n_tokens[row]))
        names = [fields] if isinstance(fields, str) else fields
        specs = [self._field(name) for name in names]
        has_layers = any(spec.layer_axis == 1 for spec in specs)
        batch: dict[str, np.ndarray] = {}
        ranges: list[RowRange] = []
        as_stored: list[tuple[FieldCodec, Layers]] = []
        decode_tasks: list[Callable[[], None]] = []
        for spec in specs:
            wanted = layers.get(spec.name) if isinstance(layers, Mapping) else layers
            chosen = layer_indices(spec, wanted if spec.layer_axis == 1 or not has_layers else None)
            codec = self.codec.fields[spec.name]
            if codec.is_identity or not decoded:
                as_stored.append((codec, chosen))
                continue
            shape = (len(rows), max(lengths, default=0), *token_shape(spec, chosen))
            buffer = batch[spec.name] = batch_buffer(
                out, allocate, spec.name, shape, spec.storage_dtype
            )
            for b, (i, n_tokens) in enumerate(zip(rows, lengths, strict=True)):
                codes, field_ranges = self._plan_codes(i, codec, 0, n_tokens, chosen)
                ranges += field_ranges
                decode_tasks.append(
                    partial(
                        decode_tokens, codec, codes, 0, 0, n_tokens, chosen, buffer[b, :n_tokens]
                    )
                )
        for array, indices in shared_arrays(as_stored).items():
            shape = (len(rows), array.n_rows(max(lengths, default=0)), *row_shape(array, indices))
            buffer = batch[array.name] = batch_buffer(
                out, allocate, array.name, shape, array.storage_dtype
            )
            for b, i in enumerate(rows):
                ranges.append(self._range(i, array, indices, 0, lengths[b], buffer[b]))
        # Read the rows of all fields in one call, so that the disk gets all requests at once.
        # Decode fields with lossy codecs afterwards.
        read_ranges(self._shards, ranges, n_threads)
        run_in_threads(decode_tasks, n_threads)
        block_tokens = {array.name: array.block_tokens for array in self.codec.arrays}
        for name, buffer in batch.items():
            # Set the padding to zero. The last chunk of a sequence may also contain rows of later
            # sequences. These rows may have been decoded into the padding.
            for b, n_tokens in enumerate(lengths):
                buffer[b, -(-n_tokens // block_tokens.get(name, 1)) :] = 0
        self._check_tokens(rows, batch)
        return batch

    def _check_tokens(self, sequences: Sequence[int], arrays: Mapping[str, np.ndarray]) -> None:
        """Raise StoreDamaged if a token id is not in the target's vocabulary."""
        # An embedding lookup of such an id would crash the process. On a GPU, the lookup would fail
        # a CUDA assertion, after which the process can no longer use the device.
        tokens = arrays.get(TOKENS)
        vocab_size = self.manifest.target.get("vocab_size", np.iinfo(np.int32).max)
        if tokens is None or not tokens.size or (tokens.min() >= 0 and tokens.max() < vocab_size):
            return
        for i, ids in zip(sequences, tokens.reshape(len(sequences), -1), strict=True):
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise StoreDamaged(
                    f"In {self.path}, sequence {self.sequences['sequence_id'][i]} (row "
                    f"{self.sequences['source_row'][i]} of the dataset) has token ids from "
                    f"{ids.min()} to {ids.max()}, but the vocabulary has only {vocab_size} tokens. "
                    "Run `moa-data verify`, and extract the store again."
                )

    def close(self) -> None:
        """Close all files. Delete the local copy of ``target/`` if the store is remote.

        The store stays usable: a later read opens the files again.
        """
        self._shards.close()
        if self._download is not None:
            self._download.cleanup()
            self._download = None

    def _field(self, name: str) -> FieldSpec:
        if name not in self.fields:
            raise SelectionInvalid(
                f"{self.path} has no field {name!r}; its fields are {', '.join(self.fields)}."
            )
        return self.fields[name]

    def _sequence(self, i: int) -> int:
        if not isinstance(i, SupportsIndex):
            raise SelectionInvalid(
                f"{i!r} is not the number of a sequence. Read a sequence by store[0], or a field "
                "of it by store.read(0, 'kv')."
            )
        if not -len(self) <= i < len(self):
            raise SelectionInvalid(
                f"{self.path} has {len(self)} sequences in finished parts, numbered from 0, so it "
                f"has no sequence {i}."
            )
        return i % len(self)

    def _plan_codes(
        self, i: int, codec: FieldCodec, start: int, stop: int, layers: Layers
    ) -> tuple[dict[str, np.ndarray], list[RowRange]]:
        """Allocate buffers for the stored rows of tokens [start, stop) of a sequence.

        Returns:
            A mapping (name of a stored array -> buffer), and the row ranges to read into the
            buffers.
        """
        arrays = codec.arrays_read(layers)
        if any(source.needs_tokens for source in codec.with_sources()):
            arrays[_TOKENS_ARRAY] = None
        codes: dict[str, np.ndarray] = {}
        ranges = []
        for array, indices in arrays.items():
            n_rows = array.n_rows(stop) - start // array.block_tokens
            codes[array.name] = np.empty((n_rows, *row_shape(array, indices)), array.storage_dtype)
            ranges.append(self._range(i, array, indices, start, stop, codes[array.name]))
        return codes, ranges

    def _range(
        self,
        i: int,
        array: StoredArray,
        indices: list[int] | None,
        start: int,
        stop: int,
        out: np.ndarray,
    ) -> RowRange:
        """Return the row range that reads tokens [start, stop) of a sequence into ``out``."""
        first_row = int(self._first_tokens[i]) // array.block_tokens
        rows = first_row + start // array.block_tokens, first_row + array.n_rows(stop)
        return RowRange(
            int(self._parts[i]), array, *rows, out, None if indices is None else tuple(indices)
        )


def read_manifest(store: StorePath) -> StoreManifest:
    """Read store.json.

    Raises:
        StoreNotFound: the folder is not a store.
        StoreDamaged: the file is not a valid manifest.
    """
    path = store / MANIFEST_NAME
    try:
        text = backend_of(path).read()
    except MISSING as error:
        reason = f"it has no {MANIFEST_NAME}" if store.exists() else "the folder does not exist"
        if isinstance(error, NotADirectoryError) and isinstance(store, Path):
            reason = f"it is {kind_of(store)}"
        raise StoreNotFound(
            f"{store} is not an activation store: {reason}. Make a store with `moa-data extract`."
        ) from error
    except ValueError as error:
        raise StoreDamaged(
            f"{path} cannot be read as the manifest of an activation store ({error}). Restore the "
            "file from a copy."
        ) from error
    return StoreManifest.from_json(text, str(path))


def _open_manifest(store: StorePath) -> tuple[StoreManifest, StoreCodec]:
    """Read the manifest (store.json) and the learned state of the store's codec."""
    # The learned state is in the basis file. A process that adds fields replaces store.json, and
    # then the basis file. If this happens between the reads of the two files below, the files do
    # not match. In this case, read both files again.
    while True:
        manifest = read_manifest(store)
        check_manifest(store)
        try:
            return manifest, StoreCodec.open(manifest, store)
        except StoreDamaged:
            # The basis file does not match store.json. If store.json has changed in the meantime,
            # the basis file may be undamaged, so read both files again. Otherwise, it is damaged.
            if read_manifest(store) == manifest:
                raise


def layer_indices(spec: FieldSpec, layers: slice | Sequence[int] | None) -> Layers:
    """Convert a selection of layers to non-negative indices along the layer axis.

    The result is None if all layers are selected in order.

    Raises:
        SelectionInvalid: the field has no layer axis, or a layer does not exist.
    """
    if layers is None:
        return None
    if spec.layer_axis != 1:
        raise SelectionInvalid(
            f"Field {spec.name!r} has no layer axis, so layers cannot be selected. Leave out "
            "`layers`."
        )
    n_layers = spec.token_shape[0]
    try:
        if not isinstance(layers, slice):
            layers = [index(layer) for layer in layers]
        indices: list[int] = np.arange(n_layers)[layers].tolist()
    except TypeError as error:
        raise SelectionInvalid(
            f"`layers` is {layers!r:.60}, expected a slice or a list of numbers."
        ) from error
    except IndexError as error:  # NumPy's text names the wrong index.
        raise SelectionInvalid(
            f"Field {spec.name!r} has {n_layers} layers, numbered from 0. `layers` does not fit "
            f"them ({error})."
        ) from error
    return None if indices == list(range(n_layers)) else indices


def token_shape(spec: FieldSpec, layers: Layers) -> tuple[int, ...]:
    """Return the shape of one token's values for the selected layers."""
    return spec.token_shape if layers is None else (len(layers), *spec.token_shape[1:])


def row_shape(array: StoredArray, indices: list[int] | None) -> tuple[int, ...]:
    """Return the shape of one row of a stored array, for the selected indices along axis 1.

    If ``indices`` is None, the whole row is selected.
    """
    return array.row_shape if indices is None else (len(indices), *array.row_shape[1:])


def shared_arrays(fields: Iterable[tuple[FieldCodec, Layers]]) -> Selection:
    """Select the stored arrays that are needed to decode the chosen layers of several fields."""
    selection: Selection = {}
    for codec, layers in fields:
        for array, indices in codec.arrays_read(layers).items():
            selection[array] = indices if selection.get(array, indices) == indices else None
    return selection


def decode_tokens(
    codec: FieldCodec,
    codes: Codes,
    base: int,
    start: int,
    stop: int,
    layers: Layers,
    out: np.ndarray,
) -> None:
    """Decode tokens [start, stop) of a sequence into ``out``.

    The first row in ``codes`` belongs to token ``base``, which is a multiple of 64.
    """
    if layers == []:
        return
    values = codec.decode(codes, base, stop - base, layers)[start - base :]
    out[...] = from_float32(values, codec.spec.dtype)


def batch_buffer(
    out: Mapping[str, np.ndarray] | None,
    allocate: Allocate,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> np.ndarray:
    """Return the caller's buffer for a field or stored array. If ``out`` is None, allocate it.

    Args:
        out: name of a field or stored array -> buffer of the caller.
        allocate: function that returns a new array of a shape and dtype.
        name: name of the field or stored array.
        shape: required shape, [n_sequences, n_rows, ...]. A buffer of the caller may have more
            rows.
        dtype: required dtype.

    Raises:
        SelectionInvalid: ``out`` has no buffer with this name, or the buffer has another dtype or
            shape.
    """
    if out is None:
        return allocate(shape, dtype)
    if name not in out:
        raise SelectionInvalid(
            f"`out` has no buffer for field {name!r}, but only for {', '.join(out) or 'no field'}."
        )
    buffer = out[name]
    fits = (
        buffer.ndim == len(shape) and buffer.shape[0] == shape[0] and buffer.shape[2:] == shape[2:]
    )
    if not fits or buffer.shape[1] < shape[1] or buffer.dtype != dtype:
        raise SelectionInvalid(
            f"The batch of {name!r} needs a buffer of dtype {dtype.name} with the shape "
            f"{[shape[0], f'>={shape[1]}', *shape[2:]]}, but the buffer in `out` has dtype "
            f"{buffer.dtype} and shape {list(buffer.shape)}."
        )
    return buffer
