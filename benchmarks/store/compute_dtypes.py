"""Compares extraction in bfloat16 with extraction in float32: speed, and how values differ.

    python -m benchmarks.store.compute_dtypes MODEL CHATS [--max-sequences 20] [--repeats 3]

Both types take turns. The speed is measured from the first forward to the last commit. The
difference of a field is the L2 norm of the differences of all its values, divided by the L2 norm of
its values in float32.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.harness import run
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.differences import Difference
from moa_data.pipeline.extract import extract
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import to_float32

DTYPES = ("float32", "bfloat16")


def differences(exact: ActivationStore, other: ActivationStore) -> dict[str, float]:
    """Return the relative difference of each field of activations.

    Args:
        exact: the store that was extracted in float32.
        other: the store of the same sequences in another type.
    """
    activations = [name for name in exact.fields if name.startswith(("kv", "hidden/"))]
    found = {name: Difference() for name in activations}
    for index in range(len(exact)):
        for name, difference in found.items():
            dtype = exact.fields[name].dtype
            reference = to_float32(exact.read(index, name), dtype)
            values = to_float32(other.read(index, name), dtype)
            difference.add(torch.from_numpy(reference), torch.from_numpy(values))
    return {name: difference.relative for name, difference in found.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Extract the same chats in both types, in turns, and compare the stores."""
    speeds: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for dtype in DTYPES:
                config = ExtractConfig.of(
                    model=options.model, dataset=options.chats, device="cpu", compute_dtype=dtype,
                    out=f"{folder}/{dtype}-{repeat}", max_sequences=options.max_sequences,
                    activations=tuple(options.activations.split(",")),
                )  # fmt: skip
                speeds[dtype].append(extract(config).timings.tokens_per_s)
        stores = {dtype: ActivationStore(Path(folder) / f"{dtype}-0") for dtype in DTYPES}
        relative = differences(stores["float32"], stores["bfloat16"])
    ratios = []
    for exact, rounded in zip(speeds["float32"], speeds["bfloat16"], strict=True):
        ratios.append(rounded / exact)
    return {
        "tokens_per_s": speeds,
        "speed_ratio": statistics.median(ratios),
        "speed_ratios": ratios,
        "relative_difference": relative,
    }


if __name__ == "__main__":
    run(
        "compute-dtypes", measure, "model", "chats",
        max_sequences=20, repeats=3, activations="kv,hidden:last", threads=int,
    )  # fmt: skip
