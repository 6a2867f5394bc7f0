"""Measures the store on this machine: writing, reading whole sequences and reading one layer.

Keys and values come from a smooth random process, so that they compress about as well as a model's; the figures in
docs/results.md come from real activations. Writes one JSON file to runs/benchmarks.

    python benchmarks/bench_store.py [--tokens 16384] [--layers 16] [--kv-heads 8] [--head-dim 64] [--out FOLDER]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from records import add_out_option, settings_of, write_record

from moa_data.storage.care.verify import verify_store
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.dtypes import bfloat16_bits
from moa_data.storage.parts.plan import plan_parts
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import StoreManifest, kv_field, response_mask_field, tokens_field
from moa_data.storage.write.store import StoreWriter

REPEATS = 5


def make_inputs(n_tokens: int, n_layers: int, n_kv_heads: int, head_dim: int) -> tuple[StoreManifest, pa.Table]:
    """A manifest and a plan for sequences of 512 tokens."""
    n = max(n_tokens // 512, 1)
    columns = {
        "sequence_id": [f"bench-{row}" for row in range(n)],
        "source_row": pa.array(range(n), pa.int64()),
        "n_tokens": pa.array([512] * n, pa.int32()),
        "n_response_tokens": pa.array([256] * n, pa.int32()),
    }
    plan = plan_parts(pa.table(columns), 65_536, 64)
    manifest = StoreManifest(
        fields=(tokens_field(), response_mask_field(), kv_field(n_layers, n_kv_heads, head_dim)),
        target={"n_layers": n_layers, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "vocab_size": 32_000},
        identities={},
        extraction={},
        n_sequences=n,
        n_parts=int(plan["part"].to_numpy().max()) + 1,
        n_tokens=512 * n,
        codec=StoreCodec("lossless", ()).describe(),
    )
    return manifest, plan


def smooth_values(shape: tuple[int, ...]) -> np.ndarray:
    """bfloat16 bits of values whose scale differs by channel, as it does in keys and values."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(size=shape[1:])).astype(np.float32)
    return bfloat16_bits(rng.standard_normal(shape, dtype=np.float32) * scale)


def write(path: Path, manifest: StoreManifest, plan: pa.Table, kv: np.ndarray) -> None:
    """Writes every sequence with the same activations."""
    tokens = np.arange(len(kv), dtype=np.int32)
    mask = (np.arange(len(kv)) < 256).astype(np.uint8)
    with StoreWriter.create_or_resume(path, manifest, plan) as writer:
        for part in writer.pending_parts():
            with writer.part(part) as out:
                for row in out.sequences.to_pylist():
                    for name, array in (("tokens", tokens), ("response_mask", mask), ("kv", kv)):
                        out.write(name, row["first_token"], array)
                out.commit()


def seconds(work: Callable[[], object]) -> list[float]:
    """Wall-clock seconds of each of REPEATS calls, after one that isn't counted."""
    work()
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken


def main() -> None:
    """Runs the benchmark, prints the figures and writes them."""
    parser = argparse.ArgumentParser(description="Measure the store on this machine.")
    for name, default in (("tokens", 16_384), ("layers", 16), ("kv-heads", 8), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    add_out_option(parser)
    options = parser.parse_args()
    manifest, plan = make_inputs(options.tokens, options.layers, options.kv_heads, options.head_dim)
    kv = smooth_values((512, options.layers, options.kv_heads, 2, options.head_dim))
    raw_mb = manifest.n_sequences * kv.nbytes / 1e6

    with tempfile.TemporaryDirectory(prefix="moa-data-bench-") as folder:
        stores = iter(Path(folder) / str(number) for number in range(REPEATS + 1))
        write_s = seconds(lambda: write(next(stores), manifest, plan, kv))
        path = Path(folder) / "0"
        stored_mb = sum(file.stat().st_size for file in (path / "parts").rglob("*") if file.is_file()) / 1e6
        with ActivationStore(path) as store:
            whole_s = seconds(lambda: [store.read(i, "kv") for i in range(len(store))])
            layer_s = seconds(lambda: [store.read(i, "kv", layers=[-1]) for i in range(len(store))])
        verify_s = seconds(lambda: verify_store(path))

    figures = {"raw_mb": raw_mb, "stored_mb": stored_mb, "ratio": stored_mb / raw_mb}
    for name, taken, mb in (
        ("write", write_s, raw_mb),
        ("read", whole_s, raw_mb),
        ("read_one_layer", layer_s, raw_mb / options.layers),
        ("verify", verify_s, raw_mb),
    ):
        figures[f"{name}_mb_per_s"] = mb / statistics.median(taken)
        figures[f"{name}_spread"] = (max(taken) - min(taken)) / statistics.median(taken)
    for name, value in figures.items():
        print(f"{name:24} {value:10.3f}")
    print(write_record(options.out, "store", {"figures": figures, "settings": settings_of(options)}))


if __name__ == "__main__":
    main()
