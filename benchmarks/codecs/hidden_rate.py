"""Measures codecs of hidden states, alone or with keys and values: stored bits against errors, without training.

Codecs learn from sequences spread over the store, all figures come from others. The bits are those of the chunks as a
store would write them; the basis counts once per store and is given apart. Errors are relative (L2), the mean over
states, and that of each; the teacher's KL is that of the next-token distributions from the decoded last state.

Hidden states alone, each form at each rate::

    python -m benchmarks.codecs.hidden_rate STORE [--bits 0.4 0.8 1.6] [--forms "" ,joint ,tokens,joint]
        [--sequences 60]

Keys and values too, and beside them all vectors rotated at random and quantised with so many bits (``rotated.py``)::

    python -m benchmarks.codecs.hidden_rate STORE --codecs transform:0.43,hidden=0.95,tokens@all
        transform:0.43,hidden=0.95,tokens,from-kv@all transform:0.54,hidden=0.4,tokens,from-kv@all [--rotated 1 2 4]

STORE is a lossless store with hidden states, with ``--codecs`` also with keys and values.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.codecs import rotated
from benchmarks.codecs.transform_rate import stored_bits
from benchmarks.kit.harness import run
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.pipeline.forwards.calibrate import LAST, calibrate, sample_rows
from moa_data.storage.codecs.field import Learning
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform import TransformCodec
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import TOKENS, to_float32

Values = Mapping[str, np.ndarray]
"""Field -> float32 [n_tokens, *token_shape], and the tokens."""


def read(store: ActivationStore, names: list[str], i: int) -> dict[str, np.ndarray]:
    """One sequence: activations as float32, and tokens."""
    states = {name: to_float32(store.read(i, name), store.fields[name].dtype) for name in names}
    return states | {TOKENS: store.read(i, TOKENS)}


def figures(
    store: ActivationStore,
    frozen: FrozenTarget,
    bits: dict[str, float],
    sequences: Sequence[Values],
    decoded: Sequence[Values],
) -> dict[str, Any]:
    """What a codec with so many bits per value of each field stores and keeps."""
    wrong, energy = dict.fromkeys(bits, 0.0), dict.fromkeys(bits, 0.0)
    kl = []
    for exact, got in zip(sequences, decoded, strict=True):
        for name in bits:
            wrong[name] += float(np.square(got[name] - exact[name], dtype=np.float64).sum())
            energy[name] += float(np.square(exact[name], dtype=np.float64).sum())
        if LAST in bits:
            own, other = (frozen.logits(torch.from_numpy(states[LAST])).log_softmax(dim=-1) for states in (exact, got))
            kl.append((own.exp() * (own - other)).sum(dim=-1))
    errors = {name: (wrong[name] / energy[name]) ** 0.5 for name in bits}
    n_values = {name: math.prod(store.fields[name].token_shape) for name in bits}
    hidden = [name for name in bits if name != "kv"]
    stored, mean_bits = sum(bits[name] * n_values[name] for name in bits), float(np.mean([bits[one] for one in hidden]))
    return {
        "bits": bits, "bits_per_value": mean_bits, "bytes_per_token": stored / 8,
        "times_smaller": 16 * sum(n_values.values()) / stored,
        "errors": errors, "error": float(np.mean([errors[one] for one in hidden])),
        "teacher_kl": float(torch.cat(kl).mean()) if kl else None,
        "n_tokens": sum(len(one[TOKENS]) for one in sequences),
    }  # fmt: skip


def measure_codec(
    store: ActivationStore, frozen: FrozenTarget, names: list[str], codec_name: str, test: list[int]
) -> dict[str, Any]:
    """The figures of one codec."""
    codec = StoreCodec(codec_name, [store.fields[name] for name in (TOKENS, *names)])
    weights = frozen.lm_head_weight, frozen.embed_tokens.weight
    calibrate(codec, store.lengths, lambda i: read(store, names, i), frozen.config, *weights, Learning())
    sequences = [read(store, names, i) for i in test]
    encoded = [codec.encode({name: sequence[name] for name in names}, sequence[TOKENS]) for sequence in sequences]
    bits, decoded = {}, [dict[str, np.ndarray]() for _ in sequences]
    for name in names:
        field = codec.fields[name]
        assert isinstance(field, TransformCodec)
        bits[name] = stored_bits(field, [codes[name] for codes in encoded], store.manifest.alignment_tokens)
        for sequence, codes, got in zip(sequences, encoded, decoded, strict=True):
            rows = {key: value for one in codec.with_sources(name) for key, value in codes[one].items()}
            got[name] = field.decode(rows | {TOKENS: sequence[TOKENS]}, 0, len(sequence[TOKENS]))
    found = figures(store, frozen, bits, sequences, decoded)
    return {"codec": codec_name, "basis_bytes": sum(map(len, codec.files().values())), **found}


def measure_rotated(
    store: ActivationStore, frozen: FrozenTarget, names: list[str], n_bits: int, test: list[int]
) -> dict[str, Any]:
    """The figures of vectors that are rotated at random and quantised: keys and values of each head, hidden states."""
    bits = {name: rotated.stored_bits(store.fields[name].token_shape[-1], n_bits) for name in names}
    sequences = [read(store, names, i) for i in test]
    decoded = [{name: rotated.rotated_and_back(one[name], n_bits) for name in names} for one in sequences]
    found = figures(store, frozen, bits, sequences, decoded)
    return {"codec": f"random rotation, {n_bits} bits", "basis_bytes": 0, **found}


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all codecs."""
    store = ActivationStore(options.store)
    names = [name for name in store.fields if name.startswith("hidden/") or (options.codecs and name == "kv")]
    frozen = FrozenTarget.load(store.target_path, 0, sizes=store.manifest.target).float()
    others = np.setdiff1d(np.arange(len(store)), sample_rows(store.lengths))
    test = np.random.default_rng(0).choice(others, options.sequences, replace=False).tolist()
    codecs = options.codecs or [f"transform:1,hidden={bits:g}{form}" for bits in options.bits for form in options.forms]
    rows = [measure_codec(store, frozen, names, codec, test) for codec in codecs]
    return {"rows": rows + [measure_rotated(store, frozen, names, n_bits, test) for n_bits in options.rotated]}


if __name__ == "__main__":
    run(
        "hidden-rate", measure, "store", bits=[0.4, 0.8, 1.6], forms=["", ",joint", ",tokens,joint"], sequences=60,
        codecs={"nargs": "+"}, rotated={"nargs": "*", "type": int, "default": []},
    )  # fmt: skip
