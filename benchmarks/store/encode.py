"""Measures how fast the bytes of a part are encoded and written by one and by several threads.

At the shapes of a large target (by default Llama-3-8B: 32 layers of 8 KV heads of 128, in bfloat16) the values are
normal noise, which no codec can shorten as it does activations, so that sizes mean nothing here; with STORE the values
are a store's. Timed are the encoding alone, into memory, and a part from its opening to its commit, the disk and the
writer's own thread included. Numbers of threads alternate. The arithmetic of a lossy codec, which runs on the target's
device before this, stands outside the clock.

Besides the clock, seconds of CPU are kept: on a machine that others use too, bytes per second of CPU say what threads
cost, and cores say how many of them the measurement was given.

    python -m benchmarks.store.encode [--store STORE] [--threads 1 2] [--tokens 1024] [--repeats 15] [--work FOLDER]
"""

import argparse
import statistics
import tempfile
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit.harness import quartiles, run
from benchmarks.kit.stores import recipe
from moa_data.machine import keep_freed_memory
from moa_data.storage.chunk import EncodePool
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.grid import array_grid
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import FieldSpec, bfloat16_bits, hidden_field, kv_field, to_float32
from moa_data.storage.shard import TASK_BYTES
from moa_data.storage.write.store import StoreWriter

CODECS = ("lossless", "int8")
Values = list[dict[str, np.ndarray]]
"""Field -> bits of bfloat16 [n_tokens, *token_shape], for each sequence."""


def noise(fields: tuple[FieldSpec, ...], n_tokens: int, n_sequences: int = 4) -> Values:
    """Normal noise in bfloat16."""
    draw = np.random.default_rng(0)
    length = n_tokens // n_sequences
    return [
        {spec.name: bfloat16_bits(draw.standard_normal((length, *spec.token_shape), np.float32)) for spec in fields}
        for _ in range(n_sequences)
    ]


def stored(path: Path, n_tokens: int) -> tuple[tuple[FieldSpec, ...], Values]:
    """Activations of a lossless store, as many sequences as make the tokens."""
    with ActivationStore(path) as store:
        fields = tuple(spec for spec in store.manifest.fields if spec.token_shape)
        n_sequences = max(1, int(np.searchsorted(np.cumsum(store.lengths), n_tokens)))
        return fields, [{spec.name: store.read(i, spec.name) for spec in fields} for i in range(n_sequences)]


def encode_part(folder: Path, codec_name: str, fields: tuple[FieldSpec, ...], values: Values, n_threads: int) -> None:
    """Write and commit a store of one part, and then encode the same chunks again into memory; both are timed."""
    lengths = [len(next(iter(item.values()))) for item in values]
    manifest, plan = recipe(fields, lengths, codec=codec_name)
    codec = StoreCodec(codec_name, fields)
    codes = [
        {
            name: bits if codec.fields[name].is_identity else codec.fields[name].encode(to_float32(bits, "bfloat16"))
            for name, bits in item.items()
        }
        for item in values
    ]
    rows = {row["source_row"]: row["first_token"] for row in plan.to_pylist()}
    with StoreWriter.create_or_resume(folder, manifest, plan) as writer, EncodePool(n_threads) as pool:
        with _CLOCKS["write"], writer.part(0, pool) as out:
            for index in sorted(range(len(values)), key=rows.__getitem__):
                for name, encoded in codes[index].items():
                    out.write(name, rows[index], encoded)
            out.commit()
        chunks = [chunk for item in codes for name, rows in item.items() for chunk in _chunks(codec, name, rows)]
        with _CLOCKS["encode"]:
            _encode(chunks, pool)


def _chunks(codec: StoreCodec, name: str, rows: np.ndarray | dict[str, np.ndarray]) -> list[np.ndarray]:
    """Cut a sequence into chunks as a part does."""
    chunks = []
    for array in codec.fields[name].arrays:
        values = rows[array.name] if isinstance(rows, dict) else rows
        grid = array_grid(array, 1, len(values))
        size, step = grid.chunk_tokens, grid.chunk_layers
        for at in range(0, len(values), size):
            row = values[at : at + size]
            chunks += [row[:, column * step : (column + 1) * step] for column in range(grid.chunks_per_row)]
    return chunks


def _encode(chunks: list[np.ndarray], pool: EncodePool) -> None:
    """Encode as a shard's writer does, a megabyte a task, and drop the bytes."""
    under_way: deque[Future[list[bytes]]] = deque()
    n_per_task = max(1, TASK_BYTES // chunks[0].nbytes)
    for first in range(0, len(chunks), n_per_task):
        under_way.append(pool.encode(chunks[first : first + n_per_task]))
        while len(under_way) > pool.n_ahead:
            under_way.popleft().result()
    for task in under_way:
        task.result()


class _Clock:
    """Seconds of the wall and of CPU inside of its ``with``."""

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def __exit__(self, *_error: object) -> None:
        self.taken = time.perf_counter() - self._began[0], time.process_time() - self._began[1]


_CLOCKS = {"encode": _Clock(), "write": _Clock()}


def measure_codec(
    codec: str, fields: tuple[FieldSpec, ...], values: Values, options: argparse.Namespace
) -> dict[str, Any]:
    """Rates of each number of threads, and the ratios of the last to the first, pair by pair."""
    raw = sum(bits.nbytes for item in values for bits in item.values())
    taken: dict[str, dict[int, list[tuple[float, float]]]] = {
        what: {n: [] for n in options.threads} for what in _CLOCKS
    }
    for repeat in range(options.repeats + 1):
        for n_threads in options.threads:
            with tempfile.TemporaryDirectory(prefix="moa-data-bench-", dir=options.work) as folder:
                encode_part(Path(folder) / "store", codec, fields, values, n_threads)
            if repeat:  # the first one warms up
                for what, clock in _CLOCKS.items():
                    taken[what][n_threads].append(clock.taken)
    return {"raw_mb": raw / 1e6} | {what: _rates(raw, runs) for what, runs in taken.items()}


def _rates(raw: int, taken: dict[int, list[tuple[float, float]]]) -> dict[str, Any]:
    first, *_, last = taken.values()
    ratios = [one[0] / many[0] for one, many in zip(first, last, strict=True)]
    rates = {
        f"{n}_threads": {
            "gb_per_s": raw / statistics.median(wall for wall, _ in runs) / 1e9,
            "best_gb_per_s": raw / min(wall for wall, _ in runs) / 1e9,
            "gb_per_core_s": raw / statistics.median(core for _, core in runs) / 1e9,
            "cores": statistics.median(core / wall for wall, core in runs),
        }
        for n, runs in taken.items()
    }
    best = min(wall for wall, _ in first) / min(wall for wall, _ in last)
    return rates | {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": quartiles(ratios)[1:],
        "ratio_of_the_best": best,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the codecs on a store's values, or on noise."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as extraction does
    if options.store:
        fields, values = stored(options.store, options.tokens)
    else:
        fields = (kv_field(32, 8, 128, "bfloat16"), hidden_field("last", 4096, "bfloat16"))
        values = noise(fields, options.tokens)
    return {"figures": {codec: measure_codec(codec, fields, values, options) for codec in CODECS}}


if __name__ == "__main__":
    run("encode", measure, store=Path, tokens=1024, threads=[1, 2], repeats=15, work=Path)
