"""How an array is cut into inner chunks and shards, and the Zarr metadata that says so.

Inner chunks hold 64 tokens by as many layers as make 256 KiB to 1 MiB: large enough to compress well, and on real
targets exactly one layer, so that a drafter that needs one layer reads one layer's bytes. Arrays with one number per
token take 4096 tokens per chunk. A shard spans all layers and about 128 MiB of raw values, or the whole part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zarr
from zarr.storage import MemoryStore

from .codecs.chunk import zarr_codecs
from .codecs.field import StoredArray
from .errors import ShardCorrupt

CHUNK_TOKENS = 64
SCALAR_CHUNK_TOKENS = 4096
MIN_CHUNK_BYTES = 256 << 10
MAX_CHUNK_BYTES = 1 << 20
SHARD_BYTES = 128 << 20


@dataclass(frozen=True)
class ArrayLayout:
    """The grid of one array: axis 0 (tokens, or blocks of them) and the layers are the only axes that are cut.

    Attributes:
        shape: whole array.
        chunk_shape: one inner chunk.
        shard_shape: one shard, a multiple of ``chunk_shape`` along every axis.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    shard_shape: tuple[int, ...]

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
        """Inner chunks that share the same tokens."""
        return self.shard_shape[1] // self.chunk_shape[1] if len(self.shape) > 1 else 1

    @property
    def rows_per_shard(self) -> int:
        """Rows of inner chunks in one shard."""
        return self.shard_shape[0] // self.chunk_shape[0]

    @property
    def n_rows(self) -> int:
        """Rows of inner chunks in the whole array; the last one may reach beyond its end."""
        return math.ceil(self.shape[0] / self.chunk_tokens)

    @property
    def n_shards(self) -> int:
        """Shards of the whole array."""
        return math.ceil(self.shape[0] / self.shard_shape[0])

    def shard_key(self, shard: int) -> str:
        """Return a shard's path inside the array's folder, e.g. ``"c/3/0/0/0/0"``."""
        return "/".join(["c", str(shard)] + ["0"] * (len(self.shape) - 1))


def array_layout(array: StoredArray, n_tokens: int) -> ArrayLayout:
    """Choose the grid of a stored array in a part.

    Args:
        array: the array.
        n_tokens: length of the part's token axis, alignment padding included.
    """
    n_rows = array.n_rows(n_tokens)
    tokens = CHUNK_TOKENS if array.row_shape else SCALAR_CHUNK_TOKENS
    chunk_rows = max(1, tokens // array.block_tokens)
    chunk_shape = (chunk_rows, *array.row_shape)
    if array.layer_axis is not None:
        layers = _chunk_layers(array.row_shape[0], chunk_rows * array.row_bytes)
        chunk_shape = (chunk_rows, layers, *array.row_shape[1:])
    n_chunk_rows = min(max(1, SHARD_BYTES // (chunk_rows * array.row_bytes)), max(1, math.ceil(n_rows / chunk_rows)))
    return ArrayLayout((n_rows, *array.row_shape), chunk_shape, (n_chunk_rows * chunk_rows, *array.row_shape))


def _chunk_layers(n_layers: int, row_bytes: int) -> int:
    """Return the smallest divisor of ``n_layers`` that makes a chunk big enough, else the largest that fits."""
    layer_bytes = row_bytes // n_layers
    fitting = [
        d for d in range(1, n_layers + 1) if n_layers % d == 0 and (d == 1 or d * layer_bytes <= MAX_CHUNK_BYTES)
    ]
    return next((d for d in fitting if d * layer_bytes >= MIN_CHUNK_BYTES), fitting[-1])


def part_metadata(arrays: Iterable[StoredArray], n_tokens: int) -> dict[str, bytes]:
    """Return the metadata documents of a part's group.

    Args:
        arrays: its stored arrays.
        n_tokens: length of the token axis.

    Returns:
        Path inside the group (``"zarr.json"``, ``"kv/zarr.json"``, ...) -> content, written by zarr-python.
    """
    documents: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(store_dict=documents), zarr_format=3)
    for array in arrays:
        layout = array_layout(array, n_tokens)
        group.create_array(
            array.name,
            shape=layout.shape,
            chunks=layout.chunk_shape,
            shards=layout.shard_shape,
            dtype=array.storage_dtype,
            compressors=zarr_codecs(array.storage_dtype),
            filters=None,
            fill_value=0,
            dimension_names=array.axes,
            attributes={"logical_dtype": array.logical_dtype},
        )
    return {path: bytes(buffer.to_bytes()) for path, buffer in sorted(documents.items())}


def layout_from_metadata(text: bytes, array: StoredArray, source: str) -> ArrayLayout:
    """Read an array's grid from its zarr.json, refusing whatever this reader would misread.

    Args:
        text: content of zarr.json.
        array: the array that the manifest declares.
        source: path for messages.

    Raises:
        ShardCorrupt: not valid metadata, or another dtype, shape or codec chain than the manifest declares.
    """
    try:
        document = json.loads(text)
        sharding = document["codecs"][0]["configuration"]
        layout = ArrayLayout(
            shape=tuple(document["shape"]),
            chunk_shape=tuple(sharding["chunk_shape"]),
            shard_shape=tuple(document["chunk_grid"]["configuration"]["chunk_shape"]),
        )
        got = {
            "data_type": document["data_type"],
            "logical_dtype": document["attributes"]["logical_dtype"],
            "row_shape": layout.shape[1:],
            "codecs": [codec_entry["name"] for codec_entry in document["codecs"]],
            "inner codecs": sharding["codecs"],
            "index_location": sharding.get("index_location", "end"),
        }
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ShardCorrupt(f"{source} is not the metadata of a sharded Zarr v3 array ({error!r}).") from error
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
    }
    for key, value in expected.items():
        if got[key] != value:
            raise ShardCorrupt(f"{source}: {key} is {got[key]!r}, the manifest declares {value!r}.")
    return layout
