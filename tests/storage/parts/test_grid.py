"""Chunks of one layer on real targets, of all layers on small ones; shards of about 128 MiB."""

import math

import pytest

from moa_data.storage.chunks.field import StoredArray
from moa_data.storage.codecs.lossless import LosslessCodec
from moa_data.storage.errors import ShardCorrupt
from moa_data.storage.parts.grid import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    array_grid,
    chunk_tokens,
    grid_from_metadata,
    part_metadata,
)
from moa_data.storage.schema import FieldSpec, hidden_field, kv_field, tokens_field


def stored(spec: FieldSpec) -> StoredArray:
    (array,) = LosslessCodec(spec).arrays
    return array


@pytest.mark.parametrize(
    ("sizes", "n_layers"),
    [((32, 8, 128), 1), ((8, 2, 64), 8), ((80, 8, 128), 1), ((28, 2, 128), 4), ((36, 1, 64), 18), ((7, 4, 64), 7)],
)
def test_layers_per_chunk(sizes: tuple[int, int, int], n_layers: int) -> None:
    grid = array_grid(stored(kv_field(*sizes)), 65536)
    assert grid.chunk_shape == (64, n_layers, sizes[1], 2, sizes[2])
    chunk_bytes = math.prod(grid.chunk_shape) * 2
    assert chunk_bytes <= MAX_CHUNK_BYTES
    assert chunk_bytes >= MIN_CHUNK_BYTES or n_layers == sizes[0]


def test_a_layer_beyond_the_limit_is_a_chunk_of_its_own() -> None:
    assert array_grid(stored(kv_field(4, 64, 256)), 1024).chunk_layers == 1


def test_shards_span_all_layers_and_stay_near_their_size() -> None:
    grid = array_grid(stored(kv_field(32, 8, 128)), 65536)
    assert grid.shard_shape == (1024, 32, 8, 2, 128)
    assert (grid.chunks_per_row, grid.rows_per_shard) == (32, 16)
    assert grid.shard_key(3) == "c/3/0/0/0/0"
    assert array_grid(stored(hidden_field("last", 4096)), 192).shard_shape == (192, 4096)
    assert array_grid(stored(tokens_field()), 65536).shard_shape == (65536,)


@pytest.mark.parametrize(
    ("token_bytes", "n_tokens"), [(1, 4096), (4, 2048), (128, 512), (768, 256), (1536, 128), (8192, 64), (1 << 17, 64)]
)
def test_narrow_arrays_have_more_tokens_per_chunk(token_bytes: int, n_tokens: int) -> None:
    assert chunk_tokens(token_bytes) == n_tokens


def test_rows_that_stand_for_blocks_make_chunks_of_as_many_tokens() -> None:
    scales = StoredArray("kv/key_scale", "uint16", (8, 2, 64), ("block", "layer", "kv_head", "head_dim"), 64, 1)
    grid = array_grid(scales, 65536)
    assert grid.shape == (1024, 8, 2, 64)
    assert grid.chunk_shape == (16, 8, 2, 64)
    assert grid.shard_shape == (1024, 8, 2, 64)


def test_metadata_reads_back_and_any_other_meaning_is_refused() -> None:
    array = stored(kv_field(4, 2, 8))
    text = part_metadata([array], 320)["kv/zarr.json"]
    assert grid_from_metadata(text, array, "kv") == array_grid(array, 320)
    for old, new in [
        (b'"uint16"', b'"float16"'),
        (b'"bfloat16"', b'"float16"'),
        (b'"end"', b'"start"'),
        (b'"zstd"', b'"lz4"'),
        (b'"little"', b'"big"'),
        (b"sharding_indexed", b"sharding"),
    ]:
        with pytest.raises(ShardCorrupt, match="the manifest declares"):
            grid_from_metadata(text.replace(old, new, 1), array, "kv")
    with pytest.raises(ShardCorrupt, match="row_shape"):
        grid_from_metadata(text, stored(kv_field(4, 2, 4)), "kv")
    with pytest.raises(ShardCorrupt, match="not the metadata"):
        grid_from_metadata(b"{}", array, "kv")
