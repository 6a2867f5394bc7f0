"""Measures how fast codecs encode and decode on one core; `codecs.py` measures bytes and errors.

With a STORE, it measures the byte chain, which compresses the chunks of an array. The library blosc
and this package's own frames compress the same chunks of the store's activations. With a --shape,
it measures whole codecs, from values to codes and back. The candidates take turns several times,
and the figures are medians. ::

    python -m benchmarks.codecs.codec_speed STORE [--sequences 12] [--repeats 5]
    python -m benchmarks.codecs.codec_speed --shape 32 8 128 [--codecs lossless int8 transform:1]
        [--tokens 256] [--learn-tokens 6144] [--threads 1 2]

--shape takes LAYERS HEADS HEAD_DIM. The benchmark makes keys and values of this shape, which are
bfloat16 numbers from 512 directions and noise. The figures show speeds at the shape, and the bytes
and errors of these numbers. They do not show the bits per value of a real target's activations.
--learn-tokens must be at least 4/3 of the width of a basis. With fewer tokens, the basis gets fewer
components than that of a real target. Seconds are CPU seconds with one thread. With more threads,
and for learning, they are wall-clock seconds. With a --device, the host is measured as well.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numcodecs.blosc
import numpy as np
import torch

from benchmarks.kit.accelerator import device_name
from benchmarks.kit.harness import in_turn, run
from moa_data.pipeline.forwards.calibrate import learning_on
from moa_data.storage.chunk import BLOSC_BLOCK_BYTES, CRC_BYTES, decode_chunk, encode_chunk
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform import Observation, TransformCodec
from moa_data.storage.grid import array_grid
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import FieldSpec, StoredArray, kv_field
from moa_data.text import SILENT

FIELDS = ("kv", "hidden/last")
CODECS = ("lossless", "int8", "transform:1")
CHUNK_BYTES = 256 << 10

Rows = list[dict[str, Any]]


def order0_bits(plane: np.ndarray) -> float:
    """Return the order-0 entropy of the bytes of a plane, in bits per byte."""
    counts = np.bincount(plane.reshape(-1), minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def floor_bits(values: np.ndarray) -> float:
    """Return the order-0 entropy of 16-bit values, coded byte by byte, in bits per value."""
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, 2)
    return order0_bits(planes[:, 0]) + order0_bits(planes[:, 1])


def medians_in_turn(
    works: dict[str, Callable[[], object]],
    repeats: int,
    device: str = "cpu",
    on_the_wall: bool = False,
) -> dict[str, float]:
    """Return the median seconds of each piece of work. The pieces take turns."""
    taken = in_turn(works, repeats, device, on_the_wall)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def blosc_chunk(values: np.ndarray) -> bytes:
    """Compress a chunk with the library blosc, with the same settings as in a store."""
    return bytes(
        numcodecs.blosc.compress(
            values, b"zstd", 1, shuffle=1, blocksize=BLOSC_BLOCK_BYTES, typesize=2
        )
    )


def encode_each(encode: Callable[[np.ndarray], bytes], chunks: list[np.ndarray]) -> list[bytes]:
    """Encode the chunks one by one."""
    return [encode(chunk) for chunk in chunks]


def measure_bytes(values: np.ndarray, repeats: int) -> dict[str, dict[str, float]]:
    """Measure the byte chain with chunks of about 256 KiB."""
    rows = min(len(values), max(1, CHUNK_BYTES // values[0].nbytes))
    chunks = [
        np.ascontiguousarray(values[at : at + rows])
        for at in range(0, len(values) - rows + 1, rows)
    ]
    encoders = {"blosc": blosc_chunk, "hand-made": encode_chunk}
    encoded = {name: [encode(chunk) for chunk in chunks] for name, encode in encoders.items()}
    buffers = {
        name: [np.frombuffer(chunk, np.uint8) for chunk in encoded[name]] for name in encoders
    }
    out = np.empty_like(chunks[0])

    def decode_all_chunks() -> None:
        for chunk in buffers["hand-made"]:
            decode_chunk(chunk, out)

    works: dict[str, Callable[[], object]] = {
        f"{name} encode": partial(encode_each, encode, chunks) for name, encode in encoders.items()
    }
    works["blosc decode"] = lambda: [
        numcodecs.blosc.decompress(chunk, out) for chunk in buffers["blosc"]
    ]
    works["hand-made decode"] = decode_all_chunks
    # Blosc verifies no checksum. For a fair comparison, also time our frames without their
    # checksums.
    frames = [chunk[:-CRC_BYTES] for chunk in buffers["hand-made"]]
    works["frame decode"] = lambda: [numcodecs.blosc.decompress(frame, out) for frame in frames]
    seconds = medians_in_turn(works, repeats)
    raw = sum(chunk.nbytes for chunk in chunks)
    found = {
        name: {
            "ratio": sum(map(len, encoded[name])) / raw,
            "encode_gb_per_s": raw / seconds[f"{name} encode"] / 1e9,
            "decode_gb_per_s": raw / seconds[f"{name} decode"] / 1e9,
        }
        for name in encoders
    }
    found["hand-made"]["decode_unchecked_gb_per_s"] = raw / seconds["frame decode"] / 1e9
    return found


def made_up(spec: FieldSpec, n_tokens: int, n_sequences: int) -> list[np.ndarray]:
    """Make float32 sequences from 512 directions of falling variance and noise.

    The values are rounded to bfloat16.
    """
    rng, width = np.random.default_rng(0), math.prod(spec.token_shape)
    directions = (
        rng.standard_normal((512, width), dtype=np.float32)
        * np.arange(1, 513, dtype=np.float32)[:, None] ** -0.5
    )
    made = []
    for _ in range(n_sequences):
        values = rng.standard_normal((n_tokens, 512), dtype=np.float32) @ directions
        values += 0.5 * rng.standard_normal((n_tokens, width), dtype=np.float32)
        rounded = torch.from_numpy(values.reshape(n_tokens, *spec.token_shape)).bfloat16().float()
        made.append(rounded.numpy())
    return made


def inner_chunks(array: StoredArray, rows: np.ndarray) -> list[np.ndarray]:
    """Cut the rows of a stored array into the inner chunks that a part with these rows has."""
    n_rows, n_second, *_ = array_grid(array, 1, len(rows) * array.block_tokens).chunk_shape
    return [
        np.ascontiguousarray(rows[at : at + n_rows, second : second + n_second])
        for at in range(0, len(rows), n_rows)
        for second in range(0, rows.shape[1], n_second)
    ]


def decode_each(encoded: list[bytes], chunks: list[np.ndarray]) -> None:
    """Decode each chunk into a new array."""
    for buffer, chunk in zip(encoded, chunks, strict=True):
        decode_chunk(np.frombuffer(buffer, np.uint8), np.empty_like(chunk))


def relative_error(values: np.ndarray, other: np.ndarray) -> float:
    """Return the L2 norm of the difference, relative to the norm of the values."""
    return float(np.linalg.norm((values - other).ravel()) / np.linalg.norm(values.ravel()))


def measure_shape(name: str, shape: list[int], options: argparse.Namespace) -> Rows:
    """Measure bytes, errors and speed of one codec on made-up keys and values.

    Returns a row for each number of threads, and one for the device. On the host, the byte chain is
    timed separately from the rest of the codec. A lossless codec has only the byte chain.
    """
    n_layers, n_kv_heads, head_dim = shape
    spec = kv_field(n_layers, n_kv_heads, head_dim)
    codec = StoreCodec(name, (spec,)).fields["kv"]
    is_learned = isinstance(codec, TransformCodec)
    n_sequences = -(-options.learn_tokens // options.tokens) if is_learned else 0
    sample = made_up(spec, options.tokens, n_sequences + 1)
    values = sample.pop()
    bits = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    started = time.perf_counter()
    if isinstance(codec, TransformCodec):
        with closing(Observation(codec, learning_on(options.device, None, SILENT))) as observation:
            for one in sample:
                observation.observe(one)
            observation.learn()
    learn_s = time.perf_counter() - started
    del sample
    codes = {} if codec.is_identity else codec.encode(torch.from_numpy(values))
    decoded = values if codec.is_identity else codec.decode(codes, 0, len(values)).numpy()
    rows_of = (
        {codec.arrays[0].name: bits}
        if codec.is_identity
        else {key: rows.numpy() for key, rows in codes.items()}
    )
    chunks = [chunk for array in codec.arrays for chunk in inner_chunks(array, rows_of[array.name])]
    encoded = encode_each(encode_chunk, chunks)
    n_bytes = sum(map(len, encoded))
    known = {
        "codec": name,
        "bytes_per_token": n_bytes / len(values),
        "of_raw": n_bytes / bits.nbytes,
        "key_error": relative_error(values[:, :, :, 0], decoded[:, :, :, 0]),
        "value_error": relative_error(values[:, :, :, 1], decoded[:, :, :, 1]),
        "learn_s": learn_s,
    }
    rows: Rows = []
    for device, n_threads in devices_and_threads(
        options.device, options.threads, codec.is_identity
    ):
        torch.set_num_threads(n_threads)
        works: dict[str, Callable[[], object]] = {}
        if device == "cpu":
            works["chunks"] = partial(encode_each, encode_chunk, chunks)
            works["chunks_decode"] = partial(decode_each, encoded, chunks)
        if not codec.is_identity:
            on_device = {key: part.to(device) for key, part in codes.items()}
            works["encode"] = partial(codec.encode, torch.from_numpy(values).to(device))
            works["decode"] = partial(codec.decode, on_device, 0, len(values))
        seconds = medians_in_turn(works, options.repeats, device, on_the_wall=n_threads > 1)
        speeds = {f"{work}_gb_per_s": bits.nbytes / taken / 1e9 for work, taken in seconds.items()}
        rows.append(known | {"device": device_name(device), "threads": n_threads, **speeds})
    return rows


def devices_and_threads(
    device: str, threads: list[int], is_host_only: bool
) -> list[tuple[str, int]]:
    """List the device and the number of torch threads of each measurement of a codec.

    A codec is timed on the host, and also on a device if there is one.
    """
    hosts = [("cpu", n_threads) for n_threads in threads]
    return hosts if is_host_only or device == "cpu" else [*hosts, (device, threads[0])]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure codecs at a shape, or the byte chain on a store."""
    if (options.store is None) == (options.shape is None):
        raise SystemExit("Give either a STORE or a --shape, not both.")
    if options.shape is not None:
        return {
            "codecs": [
                row
                for name in options.codecs
                for row in measure_shape(name, options.shape, options)
            ]
        }
    torch.set_num_threads(1)
    report: dict[str, Any] = {"bytes": {}}
    with ActivationStore(options.store) as store:
        chosen = np.linspace(0, len(store) - 1, options.sequences).astype(int).tolist()
        for field in FIELDS:
            values = np.concatenate([store.read(i, field) for i in chosen])
            report["bytes"][field] = {"floor": floor_bits(values) / 16} | measure_bytes(
                values, options.repeats
            )
    return report


if __name__ == "__main__":
    run(
        lambda options: "codec-shape" if options.shape else "codec-speed", measure, "store?",
        shape={"type": int, "nargs": 3, "metavar": ("LAYERS", "HEADS", "HEAD_DIM")}, tokens=256,
        learn_tokens=6144, threads=[1, 2], codecs=CODECS, sequences=12, repeats=5, device="cpu",
    )  # fmt: skip
