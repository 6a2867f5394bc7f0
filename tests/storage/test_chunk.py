"""Chunks return any bits that they were given.

Any library reads them, any damage is noticed, and the number of threads does not matter.
"""

from pathlib import Path

import numcodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.errors import StoreDamaged
from moa_data.storage import chunk as chunk_module
from moa_data.storage.chunk import EncodePool, decode_chunk, encode_chunk, encode_frame
from moa_data.storage.grid import array_grid
from moa_data.storage.schema import StoredArray, bfloat16_bits
from moa_data.storage.write.part import ShardWriter
from moa_data.tests.kit.errors import raises_naming


def leave(fd: int, path: Path) -> None:
    """Skip the sync of a shard."""


def encoded() -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng(0).integers(0, 1 << 16, (64, 2, 8)).astype(np.uint16)
    return values, np.frombuffer(encode_chunk(values), np.uint8)


def test_flips_truncation_and_wrong_sizes_are_noticed() -> None:
    values, data = encoded()
    out = np.empty_like(values)
    for at in range(0, len(data), 37):
        damaged = data.copy()
        damaged[at] ^= 1
        with raises_naming(StoreDamaged, "checksum"):
            decode_chunk(damaged, out)
    for cut, room, facts in (
        (data[:-1], out, ("checksum",)),
        (data[:10], out, (10,)),
        (data, out[:32], (2048, 1024)),
    ):
        with raises_naming(StoreDamaged, *facts):
            decode_chunk(cut, room)


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
        values = np.repeat(
            np.frombuffer(rng.bytes(n_bytes), dtype).reshape(shape)[:1], shape[0], axis=0
        )
    else:
        normal = rng.normal(size=shape).astype(np.float32)
        bits = bfloat16_bits(normal).astype("<u2")
        values = (
            bits.view(dtype)
            if dtype.itemsize == 2
            else (normal * 8).astype(np.int8).view(np.uint8).astype(dtype)
        )
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
def test_numcodecs_reads_every_frame(
    kind: str, shape: tuple[int, ...], dtype: str, seed: int
) -> None:
    values = fill(kind, shape, np.dtype(dtype).newbyteorder("<"), seed)
    chunk = encode_chunk(values)
    assert numcodecs.Blosc().decode(chunk[:-4]) == values.tobytes()
    out = np.empty_like(values)
    decode_chunk(np.frombuffer(chunk, np.uint8), out)
    assert out.tobytes() == values.tobytes()
    assert len(chunk) <= values.nbytes + 64


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


def test_repeated_rows_are_left_to_the_matching_encoder() -> None:
    rng = np.random.default_rng(0)
    per_token = bfloat16_bits(rng.normal(size=(10, 1024)).astype(np.float32))
    values = per_token[rng.integers(0, 10, 64)]
    assert encode_frame(values) is None
    assert len(encode_chunk(values)) < 0.2 * values.nbytes
    assert encode_frame(fill("activations", (64, 1024), np.dtype("<u2"), 0)) is not None


# A chunk takes 256 KiB.
ARRAY = StoredArray("kv", "uint16", (4, 2048), ("token", "layer", "width"), layer_axis=1)


def draw_rows(n_rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 16, (n_rows * 64, 4, 2048)).astype(np.uint16)


def test_a_shard_holds_few_chunks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer waits for the oldest chunks, however slow the encoders are."""
    n_begun, n_written, most = 0, 0, 0

    def counted(chunk: np.ndarray) -> bytes:
        nonlocal n_begun, most
        n_begun += 1
        most = max(most, n_begun - n_written)
        return encode_chunk(chunk)

    class Counting(ShardWriter):
        def _write(self, data: bytes) -> None:
            nonlocal n_written
            n_written += 1
            super()._write(data)

    monkeypatch.setattr(chunk_module, "encode_chunk", counted)
    values = draw_rows(12)
    with EncodePool(2) as pool:
        shard = Counting(tmp_path / "shard", array_grid(ARRAY, 1, len(values)), pool, leave)
        for row in range(12):
            shard.append_row(values[row * 64 : (row + 1) * 64])
        shard.finish().result()
    assert n_written == 12 * 4 + 1
    assert most <= 4 * (pool.n_ahead + 1)  # A task encodes four chunks.


def test_an_error_of_an_encoder_reaches_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: np.ndarray) -> bytes:
        raise MemoryError("no room for a chunk")

    monkeypatch.setattr(chunk_module, "encode_chunk", fail)
    values = draw_rows(1)
    with EncodePool(2) as pool:
        shard = ShardWriter(tmp_path / "shard", array_grid(ARRAY, 1, len(values)), pool, leave)
        shard.append_row(values)
        with raises_naming(MemoryError, "no room for a chunk"):
            shard.finish()
        shard.abort()
