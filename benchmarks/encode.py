"""Measures how fast the bytes of a part are encoded and written by one and by several threads.

At the shapes of a large target (by default Llama-3-8B: 32 layers of 8 KV heads of 128, in bfloat16) the values are
normal noise, which no codec can shorten as it does activations, so that sizes mean nothing here; with STORE the values
are a store's. What is timed is a part from its opening to its commit, the disk included. Numbers of threads alternate.

Besides the clock, seconds of CPU are kept: on a machine that others use too, bytes per second of CPU say what threads
cost, and cores say how many of them the measurement was given.

    python benchmarks/encode.py [--store STORE] [--threads 1 2] [--tokens 1024] [--repeats 5] [--work FOLDER]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from records import add_out_option, settings_of, write_record

from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.dtypes import bfloat16_bits, to_float32
from moa_data.storage.parts.encoding import EncodePool
from moa_data.storage.parts.plan import plan_parts
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import ALIGNMENT_TOKENS, FieldSpec, StoreManifest, hidden_field, kv_field
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
    """Write and commit a store of one part."""
    lengths = [len(next(iter(item.values()))) for item in values]
    columns = {"sequence_id": [str(i) for i in range(len(values))], "source_row": range(len(values))}
    counts = {name: pa.array(lengths, pa.int32()) for name in ("n_tokens", "n_response_tokens")}
    table = pa.table({"sequence_id": columns["sequence_id"], "source_row": pa.array(columns["source_row"])} | counts)
    plan = plan_parts(table, 1 << 20, ALIGNMENT_TOKENS)
    codec = StoreCodec(codec_name, fields)
    manifest = StoreManifest(
        fields=fields, target={}, identities={}, extraction={}, n_sequences=len(values), n_parts=1,
        n_tokens=sum(lengths), codec=codec.describe(),
    )  # fmt: skip
    codes = [
        {
            name: bits if codec.fields[name].is_identity else codec.fields[name].encode(to_float32(bits, "bfloat16"))
            for name, bits in item.items()
        }
        for item in values
    ]
    rows = {row["sequence_id"]: row["first_token"] for row in plan.to_pylist()}
    with StoreWriter.create_or_resume(folder, manifest, plan) as writer, EncodePool(n_threads) as pool:
        _CLOCK.start()
        with writer.part(0, pool) as out:
            for index in sorted(range(len(values)), key=lambda index: rows[str(index)]):
                for name, encoded in codes[index].items():
                    out.write(name, rows[str(index)], encoded)
            out.commit()
        _CLOCK.stop()


class _Clock:
    """Seconds of the wall and of CPU between start and stop."""

    def start(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall_s = time.perf_counter() - self._began[0]
        self.core_s = time.process_time() - self._began[1]


_CLOCK = _Clock()


def measure(codec: str, fields: tuple[FieldSpec, ...], values: Values, options: argparse.Namespace) -> dict[str, Any]:
    """Rates of each number of threads, and the ratios of the last to the first, pair by pair."""
    raw = sum(bits.nbytes for item in values for bits in item.values())
    taken: dict[int, list[tuple[float, float]]] = {n: [] for n in options.threads}
    for repeat in range(options.repeats + 1):
        for n_threads in options.threads:
            with tempfile.TemporaryDirectory(prefix="moa-data-bench-", dir=options.work) as folder:
                encode_part(Path(folder) / "store", codec, fields, values, n_threads)
            if repeat:  # the first one warms up
                taken[n_threads].append((_CLOCK.wall_s, _CLOCK.core_s))
    first, last = taken[options.threads[0]], taken[options.threads[-1]]
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
        "raw_mb": raw / 1e6,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "ratio_of_the_best": best,
    }


def main() -> None:
    """Runs the benchmark, prints the figures and writes them."""
    parser = argparse.ArgumentParser(description="Measure encoding with several threads.")
    parser.add_argument("--store", type=Path, help="a lossless store whose values are encoded; default: noise")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", default=None, help="folder on the disk to write to; default: a temporary one")
    add_out_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.store:
        fields, values = stored(options.store, options.tokens)
    else:
        kv = kv_field(options.layers, options.kv_heads, options.head_dim, "bfloat16")
        fields = (kv, hidden_field("last", options.width, "bfloat16"))
        values = noise(fields, options.tokens)
    figures = {codec: measure(codec, fields, values, options) for codec in CODECS}
    for codec, found in figures.items():
        for n in options.threads:
            rate = found[f"{n}_threads"]
            print(
                f"{codec:10} {n} threads {rate['gb_per_s']:.3f} GB/s (best {rate['best_gb_per_s']:.3f}), "
                f"{rate['gb_per_core_s']:.3f} GB per second of CPU, {rate['cores']:.2f} cores"
            )
        print(
            f"{codec:10} ratio {found['ratio']:.2f} ({found['ratio_range'][0]:.2f} to {found['ratio_range'][1]:.2f}), "
            f"of the best runs {found['ratio_of_the_best']:.2f}"
        )
    print(write_record(options.out, "encode", {"figures": figures, "settings": settings_of(options)}))


if __name__ == "__main__":
    main()
