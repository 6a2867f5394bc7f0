"""Measures learned codecs on chats that they have not seen.

A codec learns from one lossless store. It then encodes and decodes the sequences of another store
of the same target. Both stores are small, and the second one is read one sequence at a time. For
each codec, the benchmark prints the bytes per token, the errors of keys, values, hidden states and
logits, and the KL divergence of the next-token distributions that decoded hidden states give. With
--target, the target also continues sequences from decoded keys and values, and the KL divergence of
its distributions is printed. `moa-data compare` does the same for two stores.

    python -m benchmarks.codecs.held_out STORE OTHER_STORE
        [--codecs transform:0.86,hidden=3.2,tokens@all] [--target M]
"""

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit.harness import run
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.pipeline.compare import (
    KEYS,
    VALUES,
    Errors,
    add_errors,
    compare_continued,
    compare_teachers,
)
from moa_data.pipeline.differences import Divergence, LayerDifferences
from moa_data.pipeline.forwards.calibrate import calibrate, learning_on
from moa_data.storage.chunk import encode_chunk
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import HIDDEN_LAST, TOKENS, to_float32
from moa_data.text import SILENT

CODECS = ("transform:0.86,hidden=3.2,tokens@all", "transform:0.43,hidden=1.85,tokens,from-kv@all")
CHUNK_TOKENS = 512
INDEX_ENTRY_BYTES = 16
TEACHER_POSITIONS = 128  # Number of positions per sequence at which distributions are compared.


def read(store: ActivationStore, index: int, codec: StoreCodec) -> dict[str, np.ndarray]:
    """Return the exact values of a sequence, and its tokens."""
    values = {
        name: to_float32(store.read(index, name), store.fields[name].dtype)
        for name in codec.learned
    }
    return values | {TOKENS: store.read(index, TOKENS)}


def learned(name: str, store: ActivationStore, frozen: FrozenTarget) -> StoreCodec:
    """Return a codec that has learned from a store."""
    codec = StoreCodec(name, store.manifest.fields)
    with tempfile.TemporaryDirectory() as folder:
        calibrate(
            codec, store.lengths, lambda row: read(store, row, codec), frozen.facts,
            frozen.lm_head_weight, frozen.embed_tokens.weight,
            learning_on("cpu", Path(folder), SILENT),
        )  # fmt: skip
    return codec


def chunk_bytes(rows: np.ndarray) -> int:
    """Return the stored bytes of an array's rows. Each chunk has its own Huffman code."""
    pieces = [rows] if rows.ndim == 2 else [rows[:, piece] for piece in range(rows.shape[1])]
    starts = range(0, len(rows), CHUNK_TOKENS)
    chunks = (
        np.ascontiguousarray(piece[start : start + CHUNK_TOKENS])
        for piece in pieces
        for start in starts
    )
    return sum(len(encode_chunk(chunk)) + INDEX_ENTRY_BYTES for chunk in chunks)


def measure_codec(
    name: str, store: ActivationStore, other: ActivationStore, target: Target | None
) -> dict[str, Any]:
    """Let a codec learn from one store, and measure it on the other."""
    frozen = FrozenTarget.load(store.target_path, sizes=store.manifest.target)
    began = time.process_time()
    codec = learned(name, store, frozen)
    learning_s = time.process_time() - began
    errors: Errors = defaultdict(LayerDifferences)
    teacher = Divergence()
    continued = Divergence()
    stored: dict[str, list[np.ndarray]] = defaultdict(list)
    for index in range(len(other)):
        exact = read(other, index, codec)
        tokens = exact.pop(TOKENS)
        codes = {TOKENS: tokens}
        for rows_of in codec.encode(exact, tokens).values():
            codes |= rows_of
            for array, rows in rows_of.items():
                stored[array].append(np.asarray(rows))
        pairs = {
            field: (values, codec.fields[field].decode(codes, 0, len(tokens)))
            for field, values in exact.items()
        }
        for field, (one, decoded) in pairs.items():
            add_errors(errors, other.fields[field], one, decoded)
        compare_teachers(frozen, *pairs[HIDDEN_LAST], TEACHER_POSITIONS, teacher)
        if target is not None:
            compare_continued(target, tokens, other.fields, pairs, continued)
    n_tokens = int(other.lengths.sum())
    n_bytes = sum(chunk_bytes(np.concatenate(rows)) for rows in stored.values()) / n_tokens
    figures = {
        "codec": name,
        # Token ids and masks are not counted. They take about 3 bytes per token.
        "bytes_per_token": n_bytes,
        "times_smaller": sum(other.fields[field].token_bytes for field in codec.learned) / n_bytes,
        "key_error": errors[KEYS].total.relative,
        "value_error": errors[VALUES].total.relative,
        "worst_layer_of_values": errors[VALUES].worst / errors[VALUES].median,
        "hidden_error": errors[HIDDEN_LAST].total.relative,
        "logits_error": teacher.relative,
        "teacher_kl": teacher.kl,
        "teacher_top1": teacher.top1_agreement,
        "learning_cpu_s": learning_s,
    }
    if target is not None:
        figures |= {"continued_kl": continued.kl, "continued_top1": continued.top1_agreement}
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every codec."""
    target = Target.load(options.target, device="cpu") if options.target else None
    with ActivationStore(options.store) as store, ActivationStore(options.other_store) as other:
        rows = [measure_codec(name, store, other, target) for name in options.codecs]
    return {"rows": rows}


if __name__ == "__main__":
    run("held-out", measure, "store", "other_store", codecs=CODECS, target="", threads=1)
