"""Frames made by hand are blosc frames: other libraries read them bit for bit."""

import json
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.storage.blosc_frame import encode_frame
from moa_data.storage.chunk import decode_chunk, encode_chunk
from moa_data.storage.dtypes import bfloat16_bits
from moa_data.storage.encoding import EncodePool
from moa_data.storage.grid import array_grid, zarr_metadata
from moa_data.storage.schema import StoredArray
from moa_data.storage.shard import ShardWriter
from moa_data.tests.kit.stores import read_by_zarr

SHAPES = st.one_of(
    st.tuples(st.integers(1, 70), st.integers(1, 40)),
    st.tuples(st.sampled_from([1, 2, 63, 64]), st.integers(1, 4), st.sampled_from([1, 3, 8, 24])),
    st.tuples(st.integers(1, 300)),
)


def fill(kind: str, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    if kind == "noise":
        values = np.frombuffer(rng.bytes(n_bytes), dtype).reshape(shape).copy()
    elif kind == "constant":
        values = np.full(shape, 1, dtype)
    elif kind == "zero":
        values = np.zeros(shape, dtype)
    elif kind == "repeated rows":
        values = np.repeat(np.frombuffer(rng.bytes(n_bytes), dtype).reshape(shape)[:1], shape[0], axis=0)
    else:
        normal = rng.normal(size=shape).astype(np.float32)
        bits = bfloat16_bits(normal).astype("<u2")
        values = bits.view(dtype) if dtype.itemsize == 2 else (normal * 8).astype(np.int8).view(np.uint8).astype(dtype)
    if kind == "padded":
        values[shape[0] // 2 :] = 0
    return values


KINDS = ("noise", "constant", "zero", "repeated rows", "activations", "padded")


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    shape=SHAPES,
    dtype=st.sampled_from(["uint8", "int8", "uint16", "float16", "int32", "float32"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_numcodecs_reads_every_frame(kind: str, shape: tuple[int, ...], dtype: str, seed: int) -> None:
    values = fill(kind, shape, np.dtype(dtype).newbyteorder("<"), seed)
    chunk = encode_chunk(values)
    assert numcodecs.Blosc().decode(chunk[:-4]) == values.tobytes()
    out = np.empty_like(values)
    decode_chunk(np.frombuffer(chunk, np.uint8), out)
    assert out.tobytes() == values.tobytes()
    assert len(chunk) <= values.nbytes + 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16"])
def test_zarr_and_tensorstore_read_every_kind(tmp_path: Path, kind: str, dtype: str) -> None:
    array = StoredArray("codes", dtype, (4, 24), ("token", "layer", "width"), layer_axis=1)
    values = fill(kind, (512, 4, 24), array.storage_dtype, 0)
    grid = array_grid(array, 1, 512)
    for path, content in zarr_metadata([(array, grid)]).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    shard = ShardWriter(tmp_path / "codes" / grid.shard_key(0, 0), grid, EncodePool())
    shard.append_row(values)
    shard.finish()
    np.testing.assert_array_equal(bits(read_by_zarr(tmp_path, "codes", 0, 512)), bits(values))
    opened = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "codes")}}).result()
    np.testing.assert_array_equal(bits(opened[:512].read().result()), bits(values))
    (chain,) = json.loads((tmp_path / "codes/zarr.json").read_text())["codecs"]
    assert [codec["name"] for codec in chain["configuration"]["codecs"]] == ["bytes", "blosc", "crc32c"]


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)


def order0_bits(plane: np.ndarray) -> float:
    counts = np.bincount(plane.reshape(-1), minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


@pytest.mark.parametrize("shape", [(64, 8, 2, 2, 64), (256, 384), (64, 1, 8, 2, 128)])
def test_activations_come_within_two_percent_of_their_entropy(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(size=shape[1:])).astype(np.float32)
    values = bfloat16_bits(rng.normal(size=shape).astype(np.float32) * scale)
    planes = values.view(np.uint8).reshape(-1, 2)
    floor_bytes = values.size / 8 * (order0_bits(planes[:, 0]) + order0_bits(planes[:, 1]))
    assert len(encode_chunk(values)) < 1.02 * floor_bytes


def test_padding_costs_next_to_nothing() -> None:
    values = fill("activations", (64, 512), np.dtype("<u2"), 0)
    half = values.copy()
    half[32:] = 0
    assert len(encode_chunk(half)) < 0.53 * len(encode_chunk(values))


def test_repeated_rows_are_left_to_the_matching_encoder() -> None:
    rng = np.random.default_rng(0)
    per_token = bfloat16_bits(rng.normal(size=(10, 1024)).astype(np.float32))
    values = per_token[rng.integers(0, 10, 64)]
    assert encode_frame(values) is None
    assert len(encode_chunk(values)) < 0.2 * values.nbytes
    assert encode_frame(fill("activations", (64, 1024), np.dtype("<u2"), 0)) is not None
