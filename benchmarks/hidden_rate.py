"""Measures codecs of several hidden states: stored bits against error, each coded alone and all coded jointly.

Codecs learn from sequences spread over the store, all figures come from others. The bits are those of the chunks as a
store would write them; the basis counts once per store and is given apart. Errors are relative (L2), the mean over
states, and that of each; the teacher's KL is that of the next-token distributions from the decoded last state. ::

    python benchmarks/hidden_rate.py STORE [--bits 0.4 0.8 1.6] [--forms "" ,joint ,tokens,joint] [--sequences 60]

STORE is a lossless store with hidden states.
"""

import argparse
from typing import Any

import numpy as np
import torch
from records import add_out_option, settings_of, write_record
from transform_rate import stored_bits

from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.pipeline.forwards.calibrate import LAST, calibrate, sample_rows
from moa_data.storage.chunks.field import TOKENS, Learning
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform.codec import TransformCodec
from moa_data.storage.dtypes import to_float32
from moa_data.storage.read.store import ActivationStore


def read(store: ActivationStore, names: list[str], i: int) -> dict[str, np.ndarray]:
    """One sequence: hidden states as float32, and tokens."""
    states = {name: to_float32(store.read(i, name), store.fields[name].dtype) for name in names}
    return states | {TOKENS: store.read(i, TOKENS)}


def measure(
    store: ActivationStore, frozen: FrozenTarget, names: list[str], codec_name: str, test: list[int]
) -> dict[str, Any]:
    """The figures of one codec."""
    specs = [store.fields[name] for name in (TOKENS, *names)]
    codec = StoreCodec(codec_name, specs)
    weights = frozen.lm_head_weight, frozen.embed_tokens.weight
    calibrate(codec, store.lengths, lambda i: read(store, names, i), frozen.config, *weights, Learning())
    sequences = [read(store, names, i) for i in test]
    encoded = [codec.encode({name: sequence[name] for name in names}, sequence[TOKENS]) for sequence in sequences]
    bits, errors, kl = {}, {}, []
    for name in names:
        field = codec.fields[name]
        assert isinstance(field, TransformCodec)
        bits[name] = stored_bits(field, [codes[name] for codes in encoded], store.manifest.alignment_tokens)
        wrong = energy = 0.0
        for sequence, codes in zip(sequences, encoded, strict=True):
            rows = {key: value for one in codec.with_bases(name) for key, value in codes[one].items()}
            decoded = field.decode(rows | {TOKENS: sequence[TOKENS]}, 0, len(sequence[TOKENS]))
            wrong += float(np.square(decoded - sequence[name]).sum())
            energy += float(np.square(sequence[name]).sum())
            if name == LAST:
                own, other = (
                    frozen.logits(torch.from_numpy(states)).log_softmax(dim=-1) for states in (sequence[name], decoded)
                )
                kl.append((own.exp() * (own - other)).sum(dim=-1))
        errors[name] = (wrong / energy) ** 0.5
    mean_bits = float(np.mean(list(bits.values())))
    return {
        "codec": codec_name, "bits": bits, "bits_per_value": mean_bits, "times_smaller": 16 / mean_bits,
        "errors": errors, "error": float(np.mean(list(errors.values()))),
        "teacher_kl": float(torch.cat(kl).mean()) if kl else None,
        "basis_bytes": sum(map(len, codec.files().values())), "n_tokens": sum(len(one[TOKENS]) for one in sequences),
    }  # fmt: skip


def main() -> None:
    """Measure all forms at all rates, print and write them."""
    parser = argparse.ArgumentParser(description="Stored bits against error of hidden states, alone and joint.")
    parser.add_argument("store")
    parser.add_argument("--bits", type=float, nargs="+", default=[0.4, 0.8, 1.6], help="per value")
    parser.add_argument("--forms", nargs="+", default=["", ",joint", ",tokens,joint"], help="behind the bits")
    parser.add_argument("--sequences", type=int, default=60, help="that figures come from")
    add_out_option(parser)
    options = parser.parse_args()
    store = ActivationStore(options.store)
    names = [name for name in store.fields if name.startswith("hidden/")]
    frozen = FrozenTarget.load(store.target_path, 0, sizes=store.manifest.target).float()
    others = np.setdiff1d(np.arange(len(store)), sample_rows(store.lengths))
    test = np.random.default_rng(0).choice(others, options.sequences, replace=False).tolist()
    rows = []
    with torch.inference_mode():
        for bits in options.bits:
            for form in options.forms:
                rows.append(measure(store, frozen, names, f"transform:1,hidden={bits:g}{form}", test))
                each = ", ".join(f"{name.split('/')[1]} {error:.1%}" for name, error in rows[-1]["errors"].items())
                print(
                    f"{rows[-1]['codec']:40} {rows[-1]['bits_per_value']:.3f} bits, error {rows[-1]['error']:.2%} "
                    f"({each}), teacher KL {rows[-1]['teacher_kl']:.4f}",
                    flush=True,
                )
    print(write_record(options.out, "hidden-rate", {"rows": rows, "settings": settings_of(options)}))


if __name__ == "__main__":
    main()
