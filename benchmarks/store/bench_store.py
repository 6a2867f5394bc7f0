"""Measures the store on this machine: writing, reading whole sequences, reading one layer, verifying.

Values are drawn with the statistics of a model's, so that they compress about as well; the figures in docs/results/
come from real activations. Writes one JSON file to runs/benchmarks.

    python -m benchmarks.store.bench_store [--shape small] [--mb 300] [--out FOLDER]
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kit.harness import in_turn, run
from benchmarks.store.read_data import SHAPES, draw, files_below, write_store
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store

REPEATS = 5


def seconds(work: Callable[[], object]) -> list[float]:
    """Wall-clock seconds of each of REPEATS calls, after one that isn't counted."""
    return in_turn({"": work}, REPEATS, on_the_wall=True)[""]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write, read and verify a store."""
    data = draw(options.shape, options.mb * 10**6)
    kv_mb, raw_mb = data.kv.nbytes / 1e6, (data.kv.nbytes + data.hidden.nbytes) / 1e6
    with tempfile.TemporaryDirectory(prefix="moa-data-bench-") as folder:
        stores = iter(Path(folder) / str(number) for number in range(REPEATS + 1))
        taken = {"write": (seconds(lambda: write_store(data, next(stores))), raw_mb)}
        path = Path(folder) / "0"
        stored_mb = sum(file.stat().st_size for file in files_below(path / "parts")) / 1e6
        with ActivationStore(path) as store:
            rows, layer_mb = range(len(store)), kv_mb / data.kv.shape[1]
            taken["read"] = seconds(lambda: [store.read(i, "kv") for i in rows]), kv_mb
            taken["read_one_layer"] = seconds(lambda: [store.read(i, "kv", layers=[-1]) for i in rows]), layer_mb
        taken["verify"] = seconds(lambda: verify_store(path)), raw_mb
    figures = {"raw_mb": raw_mb, "stored_mb": stored_mb, "ratio": stored_mb / raw_mb}
    for name, (each, mb) in taken.items():
        figures[f"{name}_mb_per_s"] = mb / statistics.median(each)
        figures[f"{name}_spread"] = (max(each) - min(each)) / statistics.median(each)
    return {"figures": figures}


if __name__ == "__main__":
    run("store", measure, shape={"choices": SHAPES, "default": "small"}, mb=300)
