"""Chooses the grid of an array: how the array is divided into inner chunks and shards.

The module also makes and reads the Zarr metadata of arrays. The metadata describes the grid.

*Tokens per inner chunk.* Reading a chunk has a fixed cost, so chunks should be long. But a reader
of a sequence also decodes tokens of other sequences in the first and the last chunk, so chunks
should be short. ``chunk_tokens`` minimises the sum of the two costs. The result is 64 tokens for
wide arrays, and more for narrow arrays (256 at 768 bytes per token, 2048 for token ids).

*Layers per inner chunk.* Chunks of 128 KiB to 1 MiB decode fast. For targets of the usual sizes, a
chunk of one layer has this size. A reader of one layer then reads only the bytes of this layer.
With several layers per chunk, the reader would have to decode all layers of the chunk, because a
chunk has one checksum and one entropy code.

*Pieces.* A transform codec may cut its codes into pieces (see ``codecs.coding``). In an array of
pieces, a chunk contains one piece, and the number of tokens depends on the width of a piece.

*Shards.* All parts of a store share one Zarr array per stored array. Part k has the rows from
``k * part_rows`` on, in separate shards. For ``kv`` of Llama-3-8B in parts of 65,536 tokens, each
part has four shards of 2 GiB::

    row    0          16,384       32,768       49,152       65,536       81,920    ...
           | c.0.0.0.0.0 | c.1.0.0.0.0 | c.2.0.0.0.0 | c.3.0.0.0.0 | c.4.0.0.0.0 |
           +------------------------ part 0 -----------------------+---- part 1 ---...

A shard contains all layers. Shards are large, because each shard takes a file, a sync and, in an
object store, a request. But a reader of a single chunk must read the whole index of the shard. For
a shard with 2 GiB of raw values, the index has 128 KiB. So a shard has at most 2 GiB of raw values.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zarr
from zarr.codecs import BytesCodec, ShardingCodec
from zarr.core.metadata import ArrayV3Metadata
from zarr.storage import MemoryStore

from ..errors import StoreDamaged
from ..files import parse_object, parsing, whole_number
from .backend import MISSING, backend_of
from .chunk import zarr_codecs
from .paths import StorePath
from .schema import PIECE_AXIS, ZARR_NAME, StoredArray

MIN_CHUNK_TOKENS = 64
CHUNK_OVERHEAD_BYTES = 64 << 10
"""Fixed cost of reading a chunk (index, checksum, calls), about 25 microseconds.

The cost is expressed as the number of raw bytes that can be decoded in this time.
"""
SEQUENCE_TOKENS = 512
"""Sequence length for which ``chunk_tokens`` is optimal.

For sequences of twice or half this length, the best number of tokens per chunk would differ by a
factor of two at most.
"""
MIN_CHUNK_BYTES = 128 << 10
MAX_CHUNK_BYTES = 1 << 20
MAX_SHARD_BYTES = 2 << 30  # Upper bound on the raw bytes of a shard.
PART_STEP_TOKENS = 8192
"""Each part has room for a multiple of this number of tokens.

The largest chunks have this number of tokens (see :func:`chunk_tokens`), and the number of tokens
of any chunk is a power of two. So every part consists of whole chunks.
"""
MAX_READABLE_CHUNK_BYTES = 256 << 20
MAX_SHARD_CHUNKS = 1 << 28
_RESTORE = "Restore the file from a copy."


@dataclass(frozen=True)
class ArrayGrid:
    """The shapes of an array, of its inner chunks and of its shards.

    Chunks and shards divide only axis 0 (tokens or blocks of tokens) and axis 1 (layers, or pieces
    of the encoded bytes).
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    # Shape of a shard. It is a multiple of ``chunk_shape`` along every axis.
    shard_shape: tuple[int, ...]
    # Number of rows of each part of the store, a multiple of the number of rows of a shard.
    part_rows: int

    @property
    def chunk_tokens(self) -> int:
        """Size of one inner chunk along axis 0."""
        return self.chunk_shape[0]

    @property
    def chunk_layers(self) -> int:
        """Size of one inner chunk along axis 1, or 1 if the array has only axis 0."""
        return self.chunk_shape[1] if len(self.chunk_shape) > 1 else 1

    @property
    def chunks_per_row(self) -> int:
        """Number of inner chunks of a shard along axis 1 (layers or pieces)."""
        return self.shard_shape[1] // self.chunk_shape[1] if len(self.shape) > 1 else 1

    @property
    def rows_per_shard(self) -> int:
        """Number of inner chunks of a shard along axis 0."""
        return self.shard_shape[0] // self.chunk_shape[0]

    def n_chunk_rows(self, n_rows: int) -> int:
        """Return the number of inner chunks along axis 0 that are needed for ``n_rows`` rows."""
        return math.ceil(n_rows / self.chunk_tokens)

    def shard_key(self, part: int, number: int) -> str:
        """Return the path of a shard inside the folder of the array, e.g. ``"c.7.0.0.0.0"``.

        Args:
            part: number of the part of the store.
            number: number of the shard in this part, counted from 0.
        """
        rest = ["0"] * (len(self.shape) - 1)
        return ".".join(["c", str(part * self.shards_per_part + number), *rest])

    @property
    def shards_per_part(self) -> int:
        """Number of shards in one part."""
        return self.part_rows // self.shard_shape[0]


def array_grid(array: StoredArray, n_parts: int, longest_part: int) -> ArrayGrid:
    """Choose the grid of a stored array.

    Args:
        array: the stored array.
        n_parts: number of parts in the store.
        longest_part: number of tokens of the longest part, including padding.
    """
    chunk_shape = _chunk_shape(array)
    room = -(-longest_part // PART_STEP_TOKENS) * PART_STEP_TOKENS
    n_chunk_rows = math.ceil(array.n_rows(room) / chunk_shape[0])
    max_chunk_rows = max(1, MAX_SHARD_BYTES // (chunk_shape[0] * array.row_bytes))
    # Zarr requires that all shards of an array have the same shape. So divide a part into equal
    # shards. Choose the smallest number of shards with at most MAX_SHARD_BYTES each.
    shards = next(
        n
        for n in range(1, n_chunk_rows + 1)
        if n_chunk_rows % n == 0 and n_chunk_rows // n <= max_chunk_rows
    )
    part_rows = n_chunk_rows * chunk_shape[0]
    shard_shape = (part_rows // shards, *array.row_shape)
    return ArrayGrid((n_parts * part_rows, *array.row_shape), chunk_shape, shard_shape, part_rows)


def _chunk_shape(array: StoredArray) -> tuple[int, ...]:
    if array.axes[1:2] == (PIECE_AXIS,):
        # Axis 1 of this array divides the encoded bytes of a token into pieces. The pieces of the
        # same tokens are adjacent in the file and are read together. So assume that reading a chunk
        # of a piece has half the usual fixed cost. The fixed cost is not a parameter of
        # ``chunk_tokens``. But only the ratio of fixed cost and bytes matters, so pass twice the
        # bytes per token instead.
        return (chunk_tokens(2 * array.row_bytes / array.row_shape[0]), 1, *array.row_shape[1:])
    chunk_rows = max(1, chunk_tokens(array.row_bytes / array.block_tokens) // array.block_tokens)
    if array.layer_axis is None:
        return (chunk_rows, *array.row_shape)
    layers = _chunk_layers(array.row_shape[0], chunk_rows * array.row_bytes)
    return (chunk_rows, layers, *array.row_shape[1:])


def chunk_tokens(token_bytes: float) -> int:
    """Choose the number of tokens of an inner chunk, 64 times a power of two.

    The choice minimises the cost of reading a sequence of ``SEQUENCE_TOKENS`` tokens. Sequences
    start at multiples of 64. So a sequence of ``SEQUENCE_TOKENS`` tokens overlaps ``1 +
    (SEQUENCE_TOKENS - 64) / n`` chunks of n tokens on average. The cost of a chunk is its number of
    raw bytes plus ``CHUNK_OVERHEAD_BYTES``.

    Args:
        token_bytes: raw bytes per token.
    """
    choices = [MIN_CHUNK_TOKENS << step for step in range(8)]

    def cost(n: int) -> float:
        return (1 + (SEQUENCE_TOKENS - MIN_CHUNK_TOKENS) / n) * (
            CHUNK_OVERHEAD_BYTES + n * token_bytes
        )

    return min(choices, key=cost)


def _chunk_layers(n_layers: int, row_bytes: int) -> int:
    """Return the number of layers of an inner chunk, a divisor of ``n_layers``.

    The candidates are 1 and the divisors for which a chunk has at most ``MAX_CHUNK_BYTES``. The
    result is the smallest candidate for which a chunk has at least ``MIN_CHUNK_BYTES``. If no
    candidate is large enough, the result is the largest candidate.
    """
    layer_bytes = row_bytes // n_layers
    divisors = [1]
    for divisor in range(2, n_layers + 1):
        if n_layers % divisor == 0 and divisor * layer_bytes <= MAX_CHUNK_BYTES:
            divisors.append(divisor)
    return next((n for n in divisors if n * layer_bytes >= MIN_CHUNK_BYTES), divisors[-1])


def zarr_metadata(grids: Iterable[tuple[StoredArray, ArrayGrid]]) -> dict[str, bytes]:
    """Make the zarr.json files of arrays, and of the Zarr groups that contain them.

    The files are made by zarr-python.

    Returns:
        Path relative to the group -> content of the file.
    """
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
    """Read the grid of an array from its zarr.json.

    Args:
        parts: path of the Zarr group that contains all arrays (``parts/``).
        array: the stored array.
        n_parts: number of parts in the store.
        longest_part: number of tokens of the longest part, including padding.

    Raises:
        StoreDamaged: zarr.json is missing or invalid, or does not fit the number and length of the
            parts.
    """
    path = parts / array.name / ZARR_NAME
    unit = array.axes[0]
    try:
        text = backend_of(path).read()
    except MISSING as error:
        raise StoreDamaged(
            f"{path} is missing. Run the same `moa-data extract` command again: it writes missing "
            "files."
        ) from error
    except ValueError as error:
        raise StoreDamaged(
            f"{path} cannot be read as the metadata of an array ({error}). {_RESTORE}"
        ) from error
    grid = grid_from_metadata(text, array, str(path))
    n_rows = max(1, array.n_rows(longest_part))
    if grid.part_rows < n_rows or grid.shape[0] != n_parts * grid.part_rows:
        raise StoreDamaged(
            f"{path} says that the array has {grid.shape[0]} {unit}s, {grid.part_rows} for each "
            f"part. But the store has {n_parts} parts, and the longest of them has {n_rows} "
            f"{unit}s. {_RESTORE}"
        )
    return grid


def grid_from_metadata(text: bytes, array: StoredArray, source: str) -> ArrayGrid:
    """Convert the content of an array's zarr.json to the grid of the array.

    Args:
        text: content of zarr.json.
        array: the stored array.
        source: name of the file in error messages.

    Raises:
        StoreDamaged: the metadata is invalid, or this module cannot read an array with this
            metadata correctly.
    """
    with parsing(
        f"{source} does not describe an array that fits the manifest (store.json)",
        StoreDamaged,
        _RESTORE,
    ):
        metadata: Any = ArrayV3Metadata.from_dict(parse_object(text))
        sharding = metadata.codecs[0]
        grid = ArrayGrid(
            shape=metadata.shape,
            chunk_shape=sharding.chunk_shape,
            shard_shape=metadata.chunk_grid.chunk_shape,
            part_rows=whole_number(metadata.attributes["part_rows"], "part_rows", 1),
        )
        dtype = array.storage_dtype
        chain = (BytesCodec(endian=None if dtype.itemsize == 1 else "little"), *zarr_codecs(dtype))
        comparisons = {
            "data_type": (metadata.dtype.to_native_dtype(), dtype),
            "logical_dtype": (metadata.attributes["logical_dtype"], array.logical_dtype),
            "row_shape": (grid.shape[1:], array.row_shape),
            "codecs": (
                metadata.codecs,
                (ShardingCodec(chunk_shape=grid.chunk_shape, codecs=chain),),
            ),
            "the name of shard 0": (
                metadata.encode_chunk_key((0,) * len(grid.shape)),
                grid.shard_key(0, 0),
            ),
        }
        for name, (got, expected) in comparisons.items():
            if got != expected:
                # Cut the value, because a damaged file may contain a very long value.
                raise ValueError(f"{name} is {repr(got)[:300]}, expected {expected!r}")
        if not _is_usable(grid, dtype.itemsize):
            raise ValueError(
                f"shards of shape {grid.shard_shape} and chunks of shape {grid.chunk_shape} do not "
                "fit together, or are too large"
            )
    return grid


def _is_usable(grid: ArrayGrid, itemsize: int) -> bool:
    """Whether readers can use a grid.

    Chunks and shards may divide only axis 0 and axis 1 (layers, or pieces of the encoded bytes). A
    part must consist of whole shards. Chunks and shard indexes must be small enough to be
    allocated. zarr-python has already checked that a shard consists of whole chunks.
    """
    shape = grid.shape
    chunk = grid.chunk_shape
    shard = grid.shard_shape
    return (
        shard[1:] == shape[1:]
        and chunk[2:] == shape[2:]
        and grid.part_rows % shard[0] == 0
        and shape[0] % grid.part_rows == 0
        and math.prod(chunk) * itemsize <= MAX_READABLE_CHUNK_BYTES
        and grid.rows_per_shard * grid.chunks_per_row <= MAX_SHARD_CHUNKS
    )
