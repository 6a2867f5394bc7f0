"""Measures transform codecs on a store's own activations: stored bits against error, beside the Gaussian bound.

Bases and quantisers come from one half of the sequences, all figures from the other half. The bits are those of the
chunks as a store would write them: padded sequences, the store's chunk sizes, headers, checksums and index entries. The
basis counts once per store and is given apart. The bound is reverse water-filling over the variances of the second half
along the first half's axes: the bits that Gaussian components of these variances need for the same error.

    python -m benchmarks.codecs.transform_rate STORE [--sequences 240] [--scopes all layer] [--bits 0.3 0.6 1.0]
        [--out FOLDER]
        [--learn-tokens 937] [--components 128]

A basis of a large target sees fewer tokens for each of its dimensions, and keeps a smaller share of its components,
than one of a small target. --learn-tokens and --components give a small target the shares of a large one: a basis over
32 layers of 1,024 learns from 30,000 tokens and keeps 4,096 of 32,768 components; at 1/32 of that width these are 937
and 128.

STORE is a lossless store; `codecs.py` measures hidden states and prediction from tokens.
"""

import argparse
import math
from typing import Any

import numpy as np

from benchmarks.kit.harness import run
from moa_data.moa.targets.bundle import load_target_config
from moa_data.pipeline.forwards.calibrate import target_rope
from moa_data.storage.chunk import encode_chunk
from moa_data.storage.codecs import calibration
from moa_data.storage.codecs.transform import TransformCodec, TransformSettings
from moa_data.storage.grid import array_grid
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import to_float32

INDEX_ENTRY_BYTES = 16
BITS = {"all": (0.24, 0.53, 0.9, 1.85), "layer": (0.73, 1.4, 2.0, 3.35)}
"""Bits per value near relative errors of 15, 8, 5 and 2 % on the demo's kind of target."""

Sequences = list[np.ndarray]
Rows = list[dict[str, Any]]


def read_halves(store: ActivationStore, n_sequences: int, learn_tokens: int | None) -> tuple[Sequences, Sequences]:
    """Reads the keys and values of random sequences in two halves, as float32, and of the first some tokens at most."""
    chosen = np.random.default_rng(0).permutation(len(store))[:n_sequences]
    sequences = [to_float32(store.read(int(i), "kv"), store.fields["kv"].dtype) for i in chosen]
    first, second = sequences[: n_sequences // 2], sequences[n_sequences // 2 :]
    if learn_tokens is not None:
        starts = np.cumsum([0, *map(len, first)])
        first = [values[: learn_tokens - n] for values, n in zip(first, starts, strict=False) if n < learn_tokens]
    return first, second


def stored_bits(codec: TransformCodec, encoded: list[dict[str, np.ndarray]], alignment_tokens: int) -> float:
    """Bits per value of encoded sequences, as the chunks of a part."""
    n_tokens = sum(len(next(iter(codes.values()))) for codes in encoded)
    n_bytes = 0
    for array in codec.arrays:
        rows = [codes[array.name].reshape(-1, array.row_bytes) for codes in encoded]
        padded = np.concatenate([np.pad(part, ((0, -len(part) % alignment_tokens), (0, 0))) for part in rows])
        grid = array_grid(array, 1, len(padded))
        for start in range(0, len(padded), grid.chunk_tokens):
            chunk = padded[start : start + grid.chunk_tokens]
            chunk = np.pad(chunk, ((0, grid.chunk_tokens - len(chunk)), (0, 0)))
            pieces = np.split(chunk, grid.chunks_per_row if "piece" in array.axes else 1, axis=1)
            n_bytes += sum(len(encode_chunk(piece)) + INDEX_ENTRY_BYTES for piece in pieces)
    return 8 * n_bytes / n_tokens / math.prod(codec.spec.token_shape)


def relative_errors(truth: Sequences, decoded: Sequences, axis: int) -> list[float]:
    """Relative L2 errors, for each index of an axis."""
    other = tuple(i for i in range(truth[0].ndim) if i != axis)
    error = sum(np.square(a - b, dtype=np.float64).sum(axis=other) for a, b in zip(truth, decoded, strict=True))
    total = sum(np.square(a, dtype=np.float64).sum(axis=other) for a in truth)
    return [float(value) for value in np.sqrt(error / total)]


class Bound:
    """Bits per value that the Gaussian bound gives for an error, for each part of a field."""

    def __init__(self, codec: TransformCodec, calibration: Sequences, test: Sequences) -> None:
        self.variances: list[np.ndarray] = []
        by_half = [[codec.parts(values) for values in half] for half in (calibration, test)]
        for part in range(len(by_half[0][0][0])):
            variances = []
            for group in range(len(codec.groups)):
                first, second = (np.concatenate([parts[group][part] for parts in half]) for half in by_half)
                _, axes = np.linalg.eigh((first.T @ first).astype(np.float64))
                variances.append(np.square(second @ axes.astype(np.float32), dtype=np.float64).mean(0))
            self.variances.append(np.concatenate(variances))

    def bits(self, errors: list[float]) -> float:
        """Mean bits per value over the parts, given each part's relative error."""
        return float(np.mean([_bound(v, error) for v, error in zip(self.variances, errors, strict=True)]))


def _bound(variances: np.ndarray, error: float) -> float:
    """Reverse water-filling for one part."""
    low, high = 0.0, float(variances.max())
    for _ in range(100):
        level = (low + high) / 2
        if np.minimum(variances, level).sum() > error**2 * variances.sum():
            high = level
        else:
            low = level
    return float(np.log2(np.maximum(variances / max(low, 1e-30), 1)).sum() / 2 / len(variances))


def rates(
    store: ActivationStore, n_sequences: int, scopes: list[str], bits: list[float] | None, learn_tokens: int | None
) -> Rows:
    """Rates and errors of keys and values."""
    learned_from, test = read_halves(store, n_sequences, learn_tokens)
    rope = target_rope(load_target_config(store.target_path))
    rows: Rows = []
    for scope in scopes:
        bound = None
        for target_bits in bits or BITS.get(scope, BITS["all"]):
            codec = TransformCodec(
                store.fields["kv"], TransformSettings.parse(f"transform:{target_bits:g}@{scope}"), rope
            )
            bound = bound or Bound(codec, learned_from, test)
            codec.calibrate(learned_from)
            encoded = [codec.encode(values) for values in test]
            decoded = [codec.decode(codes, 0, len(values)) for codes, values in zip(encoded, test, strict=True)]
            errors = relative_errors(test, decoded, 3)
            row: dict[str, Any] = {
                "scope": scope,
                "asked_bits": target_bits,
                "stored_bits": stored_bits(codec, encoded, store.manifest.alignment_tokens),
                "key_error": errors[0],
                "value_error": errors[1],
                "layer_errors": relative_errors(test, decoded, 1),
                "bound_bits": bound.bits(errors),
                "n_arrays": len(codec.arrays),
                "basis_bytes": sum(array.nbytes for array in codec.state().values()),
            }
            row["above_bound"] = row["stored_bits"] - row["bound_bits"]
            rows.append(row)
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure transform codecs of keys and values."""
    if options.components is not None:
        calibration.MAX_COMPONENTS = options.components
    with ActivationStore(options.store) as store:
        return {"kv": rates(store, options.sequences, options.scopes, options.bits, options.learn_tokens)}


if __name__ == "__main__":
    run(
        "transform", measure, "store", sequences=240, scopes=["all", "layer"], bits={"nargs": "+", "type": float},
        learn_tokens=int, components=int,
    )  # fmt: skip
