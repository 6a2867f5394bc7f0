"""Grids: chunks of one layer for real targets, of all layers for small ones.

A part has few shards, which follow those of the previous part.
"""

import math

import pytest

from moa_data.errors import StoreDamaged
from moa_data.storage.codecs.field import LosslessCodec
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.grid import (
    MAX_CHUNK_BYTES,
    MAX_SHARD_BYTES,
    MIN_CHUNK_BYTES,
    array_grid,
    chunk_tokens,
    grid_from_metadata,
    zarr_metadata,
)
from moa_data.storage.schema import (
    FieldSpec,
    StoredArray,
    hidden_field,
    kv_field,
    response_mask_field,
    tokens_field,
)
from moa_data.tests.kit.errors import raises_naming


def stored(spec: FieldSpec) -> StoredArray:
    (array,) = LosslessCodec(spec).arrays
    return array


@pytest.mark.parametrize(
    ("sizes", "n_layers"),
    [
        ((32, 8, 128), 1),
        ((16, 8, 64), 1),
        ((8, 2, 64), 4),
        ((80, 8, 128), 1),
        ((28, 2, 128), 2),
        ((30, 3, 64), 3),
        ((36, 1, 64), 9),
        ((7, 4, 64), 7),
    ],
)
def test_layers_per_chunk(sizes: tuple[int, int, int], n_layers: int) -> None:
    grid = array_grid(stored(kv_field(*sizes)), 3, 65536)
    assert grid.chunk_shape == (64, n_layers, sizes[1], 2, sizes[2])
    chunk_bytes = math.prod(grid.chunk_shape) * 2
    assert chunk_bytes <= MAX_CHUNK_BYTES
    assert chunk_bytes >= MIN_CHUNK_BYTES or n_layers == sizes[0]
    # One layer is larger than the limit.
    assert array_grid(stored(kv_field(4, 64, 256)), 1, 1024).chunk_layers == 1


def test_shards_span_all_layers_and_parts_follow_each_other() -> None:
    grid = array_grid(stored(kv_field(32, 8, 128)), 3772, 65_000)
    assert (grid.shape[0], grid.part_rows, grid.shards_per_part) == (3772 * 65536, 65536, 4)
    assert grid.shard_shape == (16384, 32, 8, 2, 128)
    assert (grid.chunks_per_row, grid.rows_per_shard) == (32, 256)
    assert grid.shard_key(0, 3) == "c.3.0.0.0.0"
    assert grid.shard_key(5, 1) == "c.21.0.0.0.0"
    assert array_grid(stored(hidden_field("last", 4096)), 2, 65536).shards_per_part == 1
    assert array_grid(stored(tokens_field()), 2, 1).shard_shape == (8192,)


@pytest.mark.parametrize("longest_part", [1, 64, 8192, 8256, 65536, 11 * 8192, 1 << 20])
def test_a_part_is_a_whole_number_of_equal_shards(longest_part: int) -> None:
    for spec in (kv_field(32, 8, 128), hidden_field("last", 4096), tokens_field()):
        grid = array_grid(stored(spec), 3, longest_part)
        assert grid.part_rows >= longest_part
        assert grid.part_rows % grid.shard_shape[0] == grid.shard_shape[0] % grid.chunk_tokens == 0
        assert grid.shard_shape[0] * spec.token_bytes <= MAX_SHARD_BYTES


@pytest.mark.parametrize(
    ("token_bytes", "n_tokens"),
    [(1, 4096), (4, 2048), (128, 512), (768, 256), (1536, 128), (8192, 64), (1 << 17, 64)],
)
def test_narrow_arrays_have_more_tokens_per_chunk(token_bytes: int, n_tokens: int) -> None:
    assert chunk_tokens(token_bytes) == n_tokens


def test_rows_that_stand_for_blocks_make_chunks_of_as_many_tokens() -> None:
    scales = StoredArray(
        "kv/key_scale", "uint16", (8, 2, 64), ("block", "layer", "kv_head", "head_dim"), 64, 1
    )
    grid = array_grid(scales, 2, 65536)
    assert grid.shape == (2048, 8, 2, 64)
    assert grid.part_rows == 1024
    assert grid.chunk_shape == (16, 8, 2, 64)
    assert grid.shard_shape == (1024, 8, 2, 64)


LLAMA_3_8B = (
    tokens_field(),
    response_mask_field(),
    kv_field(32, 8, 128),
    hidden_field("last", 4096),
)
EAGLE_3 = tuple(hidden_field(f"layer_{layer}", 4096) for layer in (2, 16, 29))


@pytest.mark.parametrize("codec", ["lossless", "int8"])
@pytest.mark.parametrize("fields", [LLAMA_3_8B, (*LLAMA_3_8B, *EAGLE_3)], ids=["last", "eagle-3"])
def test_a_full_part_of_an_8b_takes_at_most_16_files(
    codec: str, fields: tuple[FieldSpec, ...]
) -> None:
    grids = [array_grid(array, 3772, 65_536) for array in StoreCodec(codec, fields).arrays]
    assert sum(grid.shards_per_part for grid in grids) <= 16


KV = stored(kv_field(4, 2, 8))


def test_metadata_reads_back_and_any_other_meaning_is_refused() -> None:
    array, grid = KV, array_grid(KV, 3, 320)
    text = zarr_metadata([(array, grid)])["kv/zarr.json"]
    assert grid_from_metadata(text, array, "kv") == grid
    for old, new in [
        (b'"separator": "."', b'"separator": "_"'),
        (b'"uint16"', b'"float16"'),
        (b'"bfloat16"', b'"float16"'),
        (b'"end"', b'"start"'),
        (b'"zstd"', b'"lz4"'),
        (b'"little"', b'"big"'),
        (b"sharding_indexed", b"sharding"),
    ]:
        with raises_naming(StoreDamaged, "kv", "store.json"):
            grid_from_metadata(text.replace(old, new, 1), array, "kv")
    with raises_naming(StoreDamaged, "kv", "row_shape"):
        grid_from_metadata(text, stored(kv_field(4, 2, 4)), "kv")
    with raises_naming(StoreDamaged, "kv"):
        grid_from_metadata(b"{}", array, "kv")
