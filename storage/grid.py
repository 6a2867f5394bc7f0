"""Cuts an array into inner chunks and shards, and writes and reads the Zarr metadata of both.

Tokens of an inner chunk: each chunk costs a reader some fixed time, and of the first and last chunk of a sequence it
needs only a part. ``chunk_tokens`` weighs one against the other: 64 tokens for wide arrays, more for narrow ones (256
at 768 bytes per token, 2048 for token ids).

Layers of an inner chunk: as many as make 128 KiB to 1 MiB, large enough to decode fast, and on real targets exactly
one, so that a drafter that needs one layer reads one layer's bytes. The checksum and the entropy code are those of the
whole chunk, so a reader of one layer decodes all layers of it. An array of pieces (of transform codes) has one piece in
a chunk, and as many tokens as suit a piece's width.

All parts share one array: part k owns the rows from ``k * part_rows`` on, in shards of its own. ``kv`` of Llama-3-8B in
parts of 65,536 tokens, where four shards of 2 GiB make a part::

    row    0          16,384       32,768       49,152       65,536       81,920    ...
           | c.0.0.0.0.0 | c.1.0.0.0.0 | c.2.0.0.0.0 | c.3.0.0.0.0 | c.4.0.0.0.0 |
           +------------------------ part 0 -----------------------+---- part 1 ---...

A shard spans all layers. It is large because each costs a file, a sync and, on object stores, a request; not larger,
since a reader of one chunk reads the shard's whole index: 128 KiB for those 2 GiB.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zarr
from zarr.storage import MemoryStore

from ..errors import StoreDamaged
from ..files import parse_object, whole_number, whole_numbers
from .backend import MISSING, read_file
from .chunk import zarr_codecs
from .paths import StorePath
from .schema import PIECE_AXIS, ZARR_NAME, StoredArray

MIN_CHUNK_TOKENS = 64
CHUNK_OVERHEAD_BYTES = 64 << 10
"""Fixed cost of a chunk (index, checksum, calls) in raw bytes that decode in the same time: about 25 microseconds."""
SEQUENCE_TOKENS = 512
"""Length of the sequence for which ``chunk_tokens`` is chosen; twice or half of it changes the choice by one step."""
MIN_CHUNK_BYTES = 128 << 10
MAX_CHUNK_BYTES = 1 << 20
MAX_SHARD_BYTES = 2 << 30  # raw bytes of a shard, where a part has more than that in an array
PART_STEP_TOKENS = 8192
"""Parts have room for a multiple of so many tokens: the longest chunk that :func:`chunk_tokens` chooses."""
MAX_READABLE_CHUNK_BYTES = 256 << 20
MAX_SHARD_CHUNKS = 1 << 28
_RESTORE = "Restore the file from a copy."


@dataclass(frozen=True)
class ArrayGrid:
    """The grid of one array: axis 0 (tokens, or blocks of them) and the layers are the only axes that are cut."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    shard_shape: tuple[int, ...]  # a multiple of ``chunk_shape`` along every axis
    part_rows: int  # rows that each part owns, a multiple of a shard's

    @property
    def chunk_tokens(self) -> int:
        """Size of one inner chunk along axis 0."""
        return self.chunk_shape[0]

    @property
    def chunk_layers(self) -> int:
        """Size of one inner chunk along the axis after the tokens (1 where there is none)."""
        return self.chunk_shape[1] if len(self.chunk_shape) > 1 else 1

    @property
    def chunks_per_row(self) -> int:
        """Inner chunks of the same tokens."""
        return self.shard_shape[1] // self.chunk_shape[1] if len(self.shape) > 1 else 1

    @property
    def rows_per_shard(self) -> int:
        """Rows of inner chunks in one shard."""
        return self.shard_shape[0] // self.chunk_shape[0]

    def n_chunk_rows(self, n_rows: int) -> int:
        """Count the rows of inner chunks that hold the first ``n_rows`` of axis 0; the last may reach beyond them."""
        return math.ceil(n_rows / self.chunk_tokens)

    def shard_key(self, part: int, number: int) -> str:
        """Return the path of a part's shard, counted from 0, inside the array's folder, e.g. ``"c.7.0.0.0.0"``."""
        rest = ["0"] * (len(self.shape) - 1)
        return ".".join(["c", str(part * self.shards_per_part + number), *rest])

    @property
    def shards_per_part(self) -> int:
        """Shards in the rows of one part."""
        return self.part_rows // self.shard_shape[0]


def array_grid(array: StoredArray, n_parts: int, longest_part: int) -> ArrayGrid:
    """Choose the grid of a stored array for all parts, the longest of so many tokens, padding included."""
    chunk_shape = _chunk_shape(array)
    room = -(-longest_part // PART_STEP_TOKENS) * PART_STEP_TOKENS
    n_chunk_rows = math.ceil(array.n_rows(room) / chunk_shape[0])
    most = max(1, MAX_SHARD_BYTES // (chunk_shape[0] * array.row_bytes))
    # Equal shards: the Zarr grid is regular, so that a part must be a whole number of them.
    shards = next(
        n for n in range(1, n_chunk_rows + 1) if n_chunk_rows % n == 0 and n_chunk_rows // n <= most
    )
    part_rows = n_chunk_rows * chunk_shape[0]
    shard_shape = (part_rows // shards, *array.row_shape)
    return ArrayGrid((n_parts * part_rows, *array.row_shape), chunk_shape, shard_shape, part_rows)


def _chunk_shape(array: StoredArray) -> tuple[int, ...]:
    if array.axes[1:2] == (PIECE_AXIS,):
        # Pieces of the same tokens lie side by side and are read at once: one costs less than a
        # chunk that lies alone.
        return (chunk_tokens(2 * array.row_bytes / array.row_shape[0]), 1, *array.row_shape[1:])
    chunk_rows = max(1, chunk_tokens(array.row_bytes / array.block_tokens) // array.block_tokens)
    if array.layer_axis is None:
        return (chunk_rows, *array.row_shape)
    layers = _chunk_layers(array.row_shape[0], chunk_rows * array.row_bytes)
    return (chunk_rows, layers, *array.row_shape[1:])


def chunk_tokens(token_bytes: float) -> int:
    """Choose how many tokens of so many raw bytes an inner chunk holds: 64 times the power of two that costs least.

    A sequence of ``SEQUENCE_TOKENS`` tokens that starts anywhere at a multiple of 64 lies in
    ``1 + (SEQUENCE_TOKENS - 64) / n`` chunks of n tokens on average. Reading it costs that many times the chunk's bytes
    and ``CHUNK_OVERHEAD_BYTES``.
    """
    choices = [MIN_CHUNK_TOKENS << step for step in range(8)]

    def cost(n: int) -> float:
        return (1 + (SEQUENCE_TOKENS - MIN_CHUNK_TOKENS) / n) * (
            CHUNK_OVERHEAD_BYTES + n * token_bytes
        )

    return min(choices, key=cost)


def _chunk_layers(n_layers: int, row_bytes: int) -> int:
    """Return the smallest divisor of ``n_layers`` that makes a chunk big enough, else the largest that fits."""
    layer_bytes = row_bytes // n_layers
    fitting = [
        d
        for d in range(1, n_layers + 1)
        if n_layers % d == 0 and (d == 1 or d * layer_bytes <= MAX_CHUNK_BYTES)
    ]
    return next((d for d in fitting if d * layer_bytes >= MIN_CHUNK_BYTES), fitting[-1])


def zarr_metadata(grids: Iterable[tuple[StoredArray, ArrayGrid]]) -> dict[str, bytes]:
    """Return the metadata of a group with these arrays: path inside the group -> content, made by zarr-python."""
    documents: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(store_dict=documents), zarr_format=3)
    for array, grid in grids:
        group.create_array(
            array.name,
            shape=grid.shape,
            chunks=grid.chunk_shape,
            shards=grid.shard_shape,
            dtype=array.storage_dtype,
            compressors=zarr_codecs(array.storage_dtype),
            filters=None,
            fill_value=0,
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=array.axes,
            attributes={"logical_dtype": array.logical_dtype, "part_rows": grid.part_rows},
        )
    return {path: bytes(buffer.to_bytes()) for path, buffer in sorted(documents.items())}


def read_grid(parts: StorePath, array: StoredArray, n_parts: int, longest_part: int) -> ArrayGrid:
    """Read the grid of an array that all parts share; StoreDamaged where it is not for so many parts and tokens."""
    path = parts / array.name / ZARR_NAME
    unit = array.axes[0]
    try:
        text = read_file(path)
    except MISSING as error:
        raise StoreDamaged(
            f"{path} is missing. Run extract again: it writes what is missing."
        ) from error
    except ValueError as error:
        raise StoreDamaged(
            f"{path} is not the metadata of an array: {error}. {_RESTORE}"
        ) from error
    grid = grid_from_metadata(text, array, str(path))
    n_rows = max(1, array.n_rows(longest_part))
    if grid.part_rows < n_rows or grid.shape[0] != n_parts * grid.part_rows:
        raise StoreDamaged(
            f"{path} has {grid.shape[0]} {unit}s, {grid.part_rows} for each part; there are {n_parts} parts, the "
            f"longest of {n_rows}. {_RESTORE}"
        )
    return grid


def grid_from_metadata(text: bytes, array: StoredArray, source: str) -> ArrayGrid:
    """Read an array's grid from its zarr.json, and refuse metadata that this reader would misread."""
    try:
        document = parse_object(text)
        sharding = document["codecs"][0]["configuration"]
        grid = ArrayGrid(
            shape=whole_numbers(document["shape"], "shape"),
            chunk_shape=whole_numbers(sharding["chunk_shape"], "the inner chunk's shape"),
            shard_shape=whole_numbers(
                document["chunk_grid"]["configuration"]["chunk_shape"], "the shard's shape"
            ),
            part_rows=whole_number(document["attributes"]["part_rows"], "part_rows", 1),
        )
        key_encoding = document["chunk_key_encoding"]
        got = {
            "data_type": document["data_type"],
            "logical_dtype": document["attributes"]["logical_dtype"],
            "row_shape": grid.shape[1:],
            "codecs": [codec_entry["name"] for codec_entry in document["codecs"]],
            "inner codecs": sharding["codecs"],
            "index_location": sharding.get("index_location", "end"),
            "chunk keys": (
                key_encoding["name"],
                key_encoding.get("configuration", {}).get("separator", "/"),
            ),
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise StoreDamaged(
            f"{source} is not the metadata of a sharded Zarr v3 array ({error!r}). {_RESTORE}"
        ) from error
    chain = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if array.storage_dtype.itemsize == 1:
        chain = [{"name": "bytes"}]
    expected = {
        "data_type": array.storage_dtype.name,
        "logical_dtype": array.logical_dtype,
        "row_shape": array.row_shape,
        "codecs": ["sharding_indexed"],
        "inner codecs": chain + [item.to_dict() for item in zarr_codecs(array.storage_dtype)],
        "index_location": "end",
        "chunk keys": ("default", "."),
    }
    for key, value in expected.items():
        if got[key] != value:
            raise StoreDamaged(
                f"{source}: {key} is {got[key]!r}, the manifest declares {value!r}. {_RESTORE}"
            )
    if not _is_usable(grid, array.storage_dtype.itemsize):
        shapes = f"shards of {grid.shard_shape} cannot be cut into chunks {grid.chunk_shape}"
        raise StoreDamaged(f"{source}: {shapes}. {_RESTORE}")
    return grid


def _is_usable(grid: ArrayGrid, itemsize: int) -> bool:
    """Whether only axis 0 and the layers are cut, evenly, into chunks and shards of sizes that can be allocated."""
    shape = grid.shape
    chunk = grid.chunk_shape
    shard = grid.shard_shape
    return (
        len(shape) == len(chunk) == len(shard)
        and shard[1:] == shape[1:]
        and chunk[2:] == shape[2:]
        and all(outer % inner == 0 for outer, inner in zip(shard, chunk, strict=True))
        and grid.part_rows % shard[0] == 0
        and shape[0] % grid.part_rows == 0
        and math.prod(chunk) * itemsize <= MAX_READABLE_CHUNK_BYTES
        and grid.rows_per_shard * grid.chunks_per_row <= MAX_SHARD_CHUNKS
    )
