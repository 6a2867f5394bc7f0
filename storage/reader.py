"""Reading a store: sequences, fields, layers and token slices as NumPy arrays. Needs neither torch nor the target."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Generic, Literal, TypeVar, overload

import numpy as np
import pyarrow as pa

from .codecs.field import FieldCodec, StoredArray
from .codecs.registry import StoreCodec
from .commit import (
    MANIFEST_NAME,
    PLAN_NAME,
    TARGET_NAME,
    PartCommit,
    commit_path,
    find_size_damage,
    part_path,
    read_part_commit,
)
from .dtypes import from_float32
from .errors import (
    ManifestInvalid,
    PartUncommitted,
    ShardCorrupt,
    ShardMissing,
    SliceInvalid,
    StoreNotFound,
    UnknownField,
)
from .layout import ArrayLayout, layout_from_metadata
from .plan import read_plan
from .schema import FieldSpec, StoreManifest
from .shard import ShardReader

_MAX_OPEN_SHARDS = 256

K = TypeVar("K")
V = TypeVar("V")


class ActivationStore:
    """A store opened for reading: lazy, safe in threads and after a fork, and picklable (it opens itself again).

    Opening checks the schema version and that every committed file exists with its committed size; reading checks the
    checksum of each chunk. ``verify_store`` checks the rest.

    Args:
        path: the store's folder.
        require_complete: refuse a store of which planned parts have no commit.
        parts: see only these parts; the others may be damaged. None for all.

    Attributes:
        path: the store's folder.
        manifest: what shapes its data.
        fields: name -> field.
        codec: the codec of each field.
        sequences: the committed sequences in plan order (columns of ``plan.PLAN_SCHEMA``).
        commits: part -> its commit, for committed parts.

    Raises:
        StoreNotFound: not a store.
        SchemaVersionError: another schema version.
        ManifestInvalid: damaged manifest, plan or commit.
        ShardMissing: a committed file is gone.
        ShardCorrupt: a committed file has another size.
        PartUncommitted: with ``require_complete``.

    Example::

        store = ActivationStore("store")
        tokens = store.read(0, "tokens")                                # int32 [n_tokens]
        kv = store.read(0, "kv", layers=[-1], tokens=slice(0, 128))     # uint16 [128, 1, n_kv_heads, 2, head_dim]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        require_complete: bool = False,
        parts: Collection[int] | None = None,
    ) -> None:
        self.path = Path(path)
        self._selected = parts
        self.manifest = read_manifest(self.path)
        self.fields: dict[str, FieldSpec] = {spec.name: spec for spec in self.manifest.fields}
        plan = read_plan(self.path / PLAN_NAME)
        self._check_plan(plan)
        self.commits = read_commits(self.path, range(self.manifest.n_parts) if parts is None else parts)
        for part, commit in self.commits.items():
            for _, error in find_size_damage(part_path(self.path, part), commit.files):
                raise error
        if require_complete and len(self.commits) < self.manifest.n_parts:
            pending = [part for part in range(self.manifest.n_parts) if part not in self.commits]
            raise PartUncommitted(
                f"{self.path} is incomplete: {len(pending)} of {self.manifest.n_parts} parts have no commit, the first "
                f"is part {pending[0]}. Run the same extract command again to write them."
            )
        committed = np.isin(plan["part"].to_numpy(), np.fromiter(self.commits, np.int32, len(self.commits)))
        self.sequences: pa.Table = plan.filter(pa.array(committed))
        self._parts = self.sequences["part"].to_numpy()
        self._first_tokens = self.sequences["first_token"].to_numpy()
        self._n_tokens = self.sequences["n_tokens"].to_numpy()
        self.codec = StoreCodec(str(self.manifest.codec["name"]), self.manifest.fields, self.manifest.target)
        self._layouts = _Cache[tuple[int, str], ArrayLayout](1 << 16)
        self._shards = _Cache[tuple[int, str, int], ShardReader](_MAX_OPEN_SHARDS)

    def _check_plan(self, plan: pa.Table) -> None:
        manifest = self.manifest
        if plan.num_rows != manifest.n_sequences:
            raise ManifestInvalid(
                f"{self.path / PLAN_NAME} has {plan.num_rows} sequences, {MANIFEST_NAME} says {manifest.n_sequences}. "
                "Restore the two files from one copy."
            )

    def __reduce__(self) -> tuple[Callable[[Path], ActivationStore], tuple[Path]]:
        return (partial(ActivationStore, parts=self._selected), (self.path,))

    def __len__(self) -> int:
        return len(self._parts)

    def __enter__(self) -> ActivationStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def n_parts_committed(self) -> int:
        """Parts that a reader sees."""
        return len(self.commits)

    @property
    def target_path(self) -> Path:
        """Folder of the target bundle: config, tokenizer and frozen weights."""
        return self.path / TARGET_NAME

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every committed sequence: int32 [len(self)]."""
        return self._n_tokens

    @overload
    def read(
        self,
        i: int,
        field: str,
        layers: slice | Sequence[int] | None = ...,
        tokens: slice | None = ...,
        decoded: Literal[True] = ...,
    ) -> np.ndarray: ...

    @overload
    def read(
        self,
        i: int,
        field: str,
        layers: slice | Sequence[int] | None = ...,
        tokens: slice | None = ...,
        *,
        decoded: Literal[False],
    ) -> dict[str, np.ndarray]: ...

    def read(
        self,
        i: int,
        field: str,
        layers: slice | Sequence[int] | None = None,
        tokens: slice | None = None,
        decoded: bool = True,
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Read a field of one sequence.

        Args:
            i: index into ``sequences``; negative counts from the end.
            field: name, e.g. ``"kv"``.
            layers: layers to read, in the order given; None for all. Only for fields with a layer axis.
            tokens: slice of the sequence's tokens with step 1; None for all.
            decoded: False for what is stored instead: the arguments of ``codec.fields[field].decode``.

        Returns:
            [n_tokens, *token_shape] in the storage dtype (uint16 bits for bfloat16, see ``dtypes.to_float32``). With
            ``decoded=False`` the rows of each stored array that cover the tokens, from the last multiple of 64 tokens
            at or before the first one; arrays with a layer axis have the chosen layers only.

        Raises:
            UnknownField: no such field, or it has no layers.
            SliceInvalid: no such sequence or layer, or a step other than 1.
            ShardCorrupt: a checksum is wrong.
            ShardMissing: a file vanished since the store was opened.
        """
        spec = self._field(field)
        i = self._sequence(i)
        chosen = _layer_indices(spec, layers)
        start, stop, step = (tokens or slice(None)).indices(int(self._n_tokens[i]))
        if step != 1:
            raise SliceInvalid(f"Token slices must have step 1, got {step}. Slice the result instead.")
        stop = max(start, stop)
        codec = self.codec.fields[field]
        if not decoded:
            base = 0 if codec.is_identity else start % self.manifest.alignment_tokens
            return self._read_codes(i, codec, start - base, stop, chosen)
        out = np.empty((stop - start, *_shape(spec, chosen)), spec.storage_dtype)
        self._read(i, codec, start, stop, chosen, out)
        return out

    def read_into(self, i: int, field: str, out: np.ndarray, layers: slice | Sequence[int] | None = None) -> int:
        """Decode a field of one sequence into ``out[:n_tokens]``; the rest of ``out`` is left as it is.

        Args:
            i: index into ``sequences``; negative counts from the end.
            field: name, e.g. ``"kv"``.
            out: [at least n_tokens, *token_shape] in the storage dtype; any strides, fastest if C-contiguous.
            layers: layers to read, in the order given; None for all.

        Returns:
            n_tokens.

        Raises:
            SliceInvalid: ``out`` has another dtype or shape; otherwise as :meth:`read`.
        """
        spec = self._field(field)
        i = self._sequence(i)
        chosen = _layer_indices(spec, layers)
        n_tokens = int(self._n_tokens[i])
        shape = _shape(spec, chosen)
        if out.dtype != spec.storage_dtype or out.shape[1:] != shape or out.ndim < 1 or len(out) < n_tokens:
            raise SliceInvalid(
                f"Sequence {i} of {field!r} needs an out array of {spec.storage_dtype.name} with shape "
                f"{[f'>={n_tokens}', *shape]}, got {out.dtype} {list(out.shape)}."
            )
        self._read(i, self.codec.fields[field], 0, n_tokens, chosen, out[:n_tokens])
        return n_tokens

    def close(self) -> None:
        """Close all files; reading opens them again."""
        self._shards.clear()

    def _field(self, name: str) -> FieldSpec:
        if name not in self.fields:
            raise UnknownField(f"{self.path} has no field {name!r}; it has {', '.join(self.fields)}.")
        return self.fields[name]

    def _sequence(self, i: int) -> int:
        if not -len(self) <= i < len(self):
            raise SliceInvalid(f"{self.path} has {len(self)} committed sequences, there is no sequence {i}.")
        return i % len(self)

    def _read(
        self, i: int, codec: FieldCodec, start: int, stop: int, layers: list[int] | None, out: np.ndarray
    ) -> None:
        """Fill ``out`` with the decoded tokens [start, stop) of a sequence."""
        if codec.is_identity:
            self.read_rows(i, codec.arrays[0], start, stop, out, layers)
        elif stop > start:
            base = start - start % self.manifest.alignment_tokens
            codes = self._read_codes(i, codec, base, stop, layers)
            values = codec.decode(codes, base, stop - base, layers)[start - base :]
            out[...] = from_float32(values, codec.spec.dtype)

    def _read_codes(
        self, i: int, codec: FieldCodec, start: int, stop: int, layers: list[int] | None
    ) -> dict[str, np.ndarray]:
        """Return the rows of a field's stored arrays that cover the tokens [start, stop) of a sequence."""
        codes = {}
        for array in codec.arrays:
            chosen = layers if array.layer_axis is not None else None
            first_row, end_row = start // array.block_tokens, array.n_rows(stop)
            shape = array.row_shape if chosen is None else (len(chosen), *array.row_shape[1:])
            codes[array.name] = np.empty((end_row - first_row, *shape), array.storage_dtype)
            self.read_rows(i, array, first_row, end_row, codes[array.name], chosen)
        return codes

    def read_rows(
        self, i: int, array: StoredArray, start: int, stop: int, out: np.ndarray, layers: list[int] | None = None
    ) -> None:
        """Read rows of one stored array, as they are stored.

        Args:
            i: index into ``sequences``, not negative.
            array: one of ``codec.fields[field].arrays``.
            start: first row, counted from the sequence's first; a row stands for ``array.block_tokens`` tokens.
            stop: end.
            out: [stop - start, *row_shape] (layer axis of ``len(layers)`` if given), the array's dtype; filled.
            layers: non-negative indices along the layer axis, in the order wanted; None for all.

        Raises:
            ShardCorrupt: a checksum is wrong.
            ShardMissing: a file vanished since the store was opened.
        """
        part = int(self._parts[i])
        layout = self._layouts.get((part, array.name), partial(self._read_layout, part, array))
        first = int(self._first_tokens[i]) // array.block_tokens + start
        shard_rows = layout.shard_shape[0]
        at, end = first, first + stop - start
        while at < end:
            shard = at // shard_rows
            base = shard * shard_rows
            until = min(end, base + shard_rows)
            reader = self._shards.get((part, array.name, shard), partial(self._open, part, array, layout, shard))
            reader.read(at - base, until - base, out[at - first : until - first], layers)
            at = until

    def _read_layout(self, part: int, array: StoredArray) -> ArrayLayout:
        path = part_path(self.path, part) / array.name / "zarr.json"
        try:
            text = path.read_bytes()
        except FileNotFoundError as error:
            raise ShardMissing(f"{path} is missing. Run extract again: it redoes that part only.") from error
        layout = layout_from_metadata(text, array, str(path))
        n_rows = array.n_rows(self.commits[part].allocated_tokens)
        if layout.shape[0] != n_rows:
            unit = array.axes[0]
            raise ShardCorrupt(f"{path} has {layout.shape[0]} {unit}s, its commit says {n_rows}.")
        return layout

    def _open(self, part: int, array: StoredArray, layout: ArrayLayout, shard: int) -> ShardReader:
        path = part_path(self.path, part) / array.name / layout.shard_key(shard)
        n_rows = min(layout.rows_per_shard, layout.n_rows - shard * layout.rows_per_shard)
        return ShardReader(path, layout, n_rows)


def read_manifest(store: Path) -> StoreManifest:
    """Read a store's manifest.

    Raises:
        StoreNotFound: the folder is not a store.
        SchemaVersionError: another schema version.
        ManifestInvalid: damaged.
    """
    path = store / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "there is no such folder" if not store.exists() else f"it has no {MANIFEST_NAME}"
        raise StoreNotFound(f"{store} is not an activation store: {reason}. Make one with extract.") from error
    return StoreManifest.from_json(text, str(path))


def read_commits(store: Path, parts: Iterable[int]) -> dict[int, PartCommit]:
    """Read the commits of those parts that have one, in order of parts.

    Raises:
        ManifestInvalid: a commit is damaged or names another part.
    """
    commits: dict[int, PartCommit] = {}
    for part in sorted(parts):
        path = commit_path(store, part)
        if not path.exists():
            continue
        commit = read_part_commit(path)
        if commit.part != part:
            raise ManifestInvalid(f"{path} is the commit of part {commit.part}. Delete it and run extract again.")
        commits[part] = commit
    return commits


def _layer_indices(spec: FieldSpec, layers: slice | Sequence[int] | None) -> list[int] | None:
    """Return non-negative layer indices, or None for all layers in order."""
    if layers is None:
        return None
    if spec.layer_axis != 1:
        raise UnknownField(f"Field {spec.name!r} has no layers; leave `layers` out.")
    n_layers = spec.token_shape[0]
    if isinstance(layers, slice):
        chosen = list(range(n_layers))[layers]
    else:
        chosen = [int(layer) for layer in layers]
        for layer in chosen:
            if not -n_layers <= layer < n_layers:
                raise SliceInvalid(f"Field {spec.name!r} has {n_layers} layers, there is no layer {layer}.")
        chosen = [layer % n_layers for layer in chosen]
    return None if chosen == list(range(n_layers)) else chosen


def _shape(spec: FieldSpec, layers: list[int] | None) -> tuple[int, ...]:
    return spec.token_shape if layers is None else (len(layers), *spec.token_shape[1:])


class _Cache(Generic[K, V]):
    """Bounded cache that drops the oldest entry; its lock is made anew in a forked child."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[K, V] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the entry, made on first use (possibly twice when threads meet)."""
        if self._pid != os.getpid():
            # Another thread of the parent may have held the lock at the moment of the fork.
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            if key in self._entries:
                return self._entries[key]
        value = make()
        with self._lock:
            while len(self._entries) >= self._size:
                # A reader in use by another thread stays open until that thread lets go of it.
                del self._entries[next(iter(self._entries))]
            return self._entries.setdefault(key, value)

    def clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            self._entries.clear()
