"""Measures transform codecs on a store's own activations: stored bits against error, beside the Gaussian bound.

Bases and quantisers come from one half of the sequences, all figures from the other half. The bits are those of the
chunks as a store would write them: padded sequences, the store's chunk sizes, headers, checksums and index entries. The
basis counts once per store and is given apart. The bound is reverse water-filling over the variances of the second half
along the first half's axes: the bits that Gaussian components of these variances need for the same error.

    python benchmarks/transform_rate.py STORE [--sequences 240] [--scopes all layer] [--bits 0.3 0.6 1.0] [--out FOLDER]

With --predict-from-tokens, what the target's embedding of a token says of its keys and values is predicted; the bound
stays the one without. STORE is a lossless store.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from records import add_out_option, settings_of, write_record
from safetensors import safe_open

from moa_data.moa.nn.layers import Rotary
from moa_data.moa.targets.bundle import FROZEN_FILE, load_target_config, rope_parameters
from moa_data.storage.chunks.chunk import encode_chunk
from moa_data.storage.codecs.transform.calibration import logit_metric
from moa_data.storage.codecs.transform.codec import TransformCodec
from moa_data.storage.codecs.transform.rope import Rope
from moa_data.storage.codecs.transform.settings import TransformSettings
from moa_data.storage.dtypes import to_float32
from moa_data.storage.parts.grid import array_grid
from moa_data.storage.read.store import ActivationStore

INDEX_ENTRY_BYTES = 16
BITS = {"all": (0.24, 0.53, 0.9, 1.85), "layer": (0.73, 1.4, 2.0, 3.35)}
"""Bits per value near relative errors of 15, 8, 5 and 2 % on the demo's kind of target."""

Sequences = list[np.ndarray]
Rows = list[dict[str, Any]]


def read_halves(store: ActivationStore, field: str, n_sequences: int) -> tuple[Sequences, Sequences]:
    """Reads random sequences of a field in two halves, activations as float32."""
    chosen = np.random.default_rng(0).permutation(len(store))[:n_sequences]
    raw = [store.read(int(i), field) for i in chosen]
    dtype = store.fields[field].dtype
    sequences = raw if dtype == "int32" else [to_float32(values, dtype) for values in raw]
    return sequences[: n_sequences // 2], sequences[n_sequences // 2 :]


def target_rope(store: ActivationStore) -> Rope:
    """The target's rotation."""
    config = load_target_config(store.target_path)
    sizes = store.manifest.target
    rotary = Rotary(sizes["head_dim"], rope_parameters(config), sizes["max_position_embeddings"])
    return Rope(rotary.inv_freq.numpy(), np.asarray(rotary.scaling, np.float32))


def target_weight(store: ActivationStore, name: str) -> np.ndarray:
    """A matrix of the target, e.g. ``lm_head.weight``: float32 [vocab_size, width]."""
    with safe_open(store.target_path / FROZEN_FILE, "pt") as file:
        weight: np.ndarray = file.get_tensor(name).float().numpy()
    return weight


def stored_bits(codec: TransformCodec, encoded: list[dict[str, np.ndarray]], alignment_tokens: int) -> float:
    """Bits per value of encoded sequences, as the chunks of a part."""
    n_tokens = sum(len(next(iter(codes.values()))) for codes in encoded)
    n_bytes = 0
    for array in codec.arrays:
        rows = [codes[array.name] for codes in encoded]
        padded = np.concatenate([np.pad(part, ((0, -len(part) % alignment_tokens), (0, 0))) for part in rows])
        chunk_rows = array_grid(array, len(padded)).chunk_tokens
        for start in range(0, len(padded), chunk_rows):
            chunk = padded[start : start + chunk_rows]
            chunk = np.pad(chunk, ((0, chunk_rows - len(chunk)), (0, 0)))
            n_bytes += len(encode_chunk(chunk)) + INDEX_ENTRY_BYTES
    return 8 * n_bytes / n_tokens / math.prod(codec.spec.token_shape)


def relative_errors(truth: Sequences, decoded: Sequences, axis: int | None) -> list[float]:
    """Relative L2 errors, for each index of an axis (None: of all values)."""
    other = None if axis is None else tuple(i for i in range(truth[0].ndim) if i != axis)
    error = sum(np.square(a - b, dtype=np.float64).sum(axis=other) for a, b in zip(truth, decoded, strict=True))
    total = sum(np.square(a, dtype=np.float64).sum(axis=other) for a in truth)
    return [float(value) for value in np.sqrt(np.atleast_1d(error / total))]


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


def measure_kv(
    store: ActivationStore, n_sequences: int, scopes: list[str], bits: list[float] | None, from_tokens: bool
) -> Rows:
    """Rates and errors of keys and values."""
    calibration, test = read_halves(store, "kv", n_sequences)
    rope = target_rope(store)
    embeddings, calibration_tokens = None, None
    test_tokens: Sequence[np.ndarray | None] = [None] * len(test)
    if from_tokens:
        embeddings = target_weight(store, "embed_tokens.weight")
        calibration_tokens, test_tokens = read_halves(store, "tokens", n_sequences)
    rows: list[dict[str, Any]] = []
    for scope in scopes:
        bound = None
        for target_bits in bits or BITS.get(scope, BITS["all"]):
            settings = TransformSettings.parse(f"transform:{target_bits:g}{',tokens' * from_tokens}@{scope}")
            codec = TransformCodec(store.fields["kv"], settings, rope, embeddings=embeddings)
            bound = bound or Bound(codec, calibration, test)
            codec.calibrate(calibration, calibration_tokens)
            encoded = [codec.encode(values, ids) for values, ids in zip(test, test_tokens, strict=True)]
            decoded = [
                codec.decode(codes if ids is None else codes | {"tokens": ids}, 0, len(values))
                for codes, values, ids in zip(encoded, test, test_tokens, strict=True)
            ]
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
            print(json.dumps({key: value for key, value in row.items() if key != "layer_errors"}), flush=True)
            rows.append(row)
    return rows


def measure_hidden(store: ActivationStore, n_sequences: int, bits: list[float]) -> Rows:
    """Rates of ``hidden/last`` and what its errors do to the next-token distribution, plain and in its metric."""
    calibration, test = read_halves(store, "hidden/last", n_sequences)
    head = target_weight(store, "lm_head.weight")
    metric = logit_metric(np.concatenate(calibration)[::4], head)
    rows: list[dict[str, Any]] = []
    for target_bits in bits:
        for name, given in (("plain", None), ("logits", metric)):
            settings = TransformSettings(kv_bits=1.0, hidden_bits=target_bits)
            codec = TransformCodec(store.fields["hidden/last"], settings, metric=given)
            codec.calibrate(calibration)
            encoded = [codec.encode(values) for values in test]
            decoded = [codec.decode(codes, 0, len(values)) for codes, values in zip(encoded, test, strict=True)]
            divergence, overlap = teacher_change(np.concatenate(test)[::8], np.concatenate(decoded)[::8], head)
            row = {
                "metric": name,
                "asked_bits": target_bits,
                "stored_bits": stored_bits(codec, encoded, store.manifest.alignment_tokens),
                "error": relative_errors(test, decoded, None)[0],
                "kl_nats": divergence,
                "overlap": overlap,
                "basis_bytes": sum(array.nbytes for array in codec.state().values()),
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def teacher_change(truth: np.ndarray, decoded: np.ndarray, head: np.ndarray) -> tuple[float, float]:
    """Mean KL(true || decoded) in nats of the next-token distributions, and the mean of sum(min(p, q))."""
    logs = []
    for hidden in (truth, decoded):
        logits = hidden @ head.T
        logits -= logits.max(1, keepdims=True)
        logs.append(logits - np.log(np.exp(logits).sum(1, keepdims=True)))
    p = np.exp(logs[0])
    return float((p * (logs[0] - logs[1])).sum(1).mean()), float(np.minimum(p, np.exp(logs[1])).sum(1).mean())


def markdown(kv: Rows, hidden: Rows) -> str:
    """The two tables."""
    lines = ["| basis | stored bits | x bf16 | K error | V error | bound, bits | above it | arrays | basis MB |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in kv:
        lines.append(
            f"| {row['scope']} | {row['stored_bits']:.3f} | {16 / row['stored_bits']:.1f} | {row['key_error']:.2%} | "
            f"{row['value_error']:.2%} | {row['bound_bits']:.3f} | {row['above_bound']:+.3f} | {row['n_arrays']} | "
            f"{row['basis_bytes'] / 1e6:.2f} |"
        )
    lines += ["", "| hidden/last, metric | stored bits | error | KL, nats | overlap |", "|---|---|---|---|---|"]
    for row in hidden:
        lines.append(
            f"| {row['metric']} | {row['stored_bits']:.3f} | {row['error']:.2%} | {row['kl_nats']:.5f} | "
            f"{row['overlap']:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the measurements and writes them."""
    parser = argparse.ArgumentParser(description="Measure transform codecs against the rate-distortion bound.")
    parser.add_argument("store", type=Path)
    parser.add_argument("--sequences", type=int, default=240)
    parser.add_argument("--scopes", nargs="+", default=["all", "layer"], help="all, layer or group<g>")
    parser.add_argument("--bits", nargs="+", type=float, default=None, help="bits per value of keys and values")
    parser.add_argument("--hidden-bits", nargs="*", type=float, default=[0.8, 1.2, 1.6, 2.0, 3.0])
    parser.add_argument("--predict-from-tokens", action="store_true", help="of keys and values, what tokens say")
    add_out_option(parser)
    options = parser.parse_args()
    with ActivationStore(options.store) as store:
        kv = measure_kv(store, options.sequences, options.scopes, options.bits, options.predict_from_tokens)
        hidden = measure_hidden(store, options.sequences, options.hidden_bits)
    print(markdown(kv, hidden))
    document = {"kv": kv, "hidden": hidden, "settings": settings_of(options, "store")}
    print(write_record(options.out, "transform", document))


if __name__ == "__main__":
    main()
