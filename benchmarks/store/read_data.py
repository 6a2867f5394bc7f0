"""Inputs of ``read.py``: the same sequences for every format.

The sequences come from a real store, or are drawn at random with the statistics of a real store.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.kit.made import recipe
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import (
    FieldSpec,
    bfloat16_bits,
    hidden_field,
    kv_field,
    response_mask_field,
    tokens_field,
)
from moa_data.storage.write.store import StoreWriter

SHAPES = {"small": (8, 2, 64, 384), "llama-3-8b": (32, 8, 128, 4096)}
"""Maps a name to (layers, KV heads, head dim, width) of activations that are drawn at random."""

MEAN_TOKENS = 208
"""Mean length of sequences that are drawn at random. GSM8K's chats have the same mean length."""


@dataclass(frozen=True)
class Data:
    """Sequences in the store's order, concatenated without padding.

    Attributes:
        kv: Bits [n_tokens, layers, KV heads, 2, head dim].
        hidden: Bits [n_tokens, width].
        lengths: Tokens of each sequence.
    """

    kv: np.ndarray
    hidden: np.ndarray
    lengths: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """Index of each sequence's first token."""
        first: np.ndarray = np.cumsum(self.lengths) - self.lengths
        return first

    @property
    def fields(self) -> tuple[FieldSpec, FieldSpec]:
        """Fields of the two arrays."""
        n_layers, n_heads, _, head_dim = self.kv.shape[1:]
        return kv_field(n_layers, n_heads, head_dim), hidden_field("last", self.hidden.shape[1])


def load(store: Path, n_bytes: int) -> Data:
    """Load the first sequences of a store, in the order that a new store would give them."""
    with ActivationStore(store) as source:
        token_bytes = source.fields["kv"].token_bytes + source.fields["hidden/last"].token_bytes
        n = int(np.searchsorted(np.cumsum(source.lengths.astype(np.int64)), n_bytes // token_bytes))
        if not n:
            raise SystemExit(f"The first sequence of {store} is larger than --mb; raise --mb.")
        chosen = np.argsort(-source.lengths[:n], kind="stable")
        kv, hidden = (
            np.concatenate([source.read(i, name) for i in chosen.tolist()])
            for name in ("kv", "hidden/last")
        )
        return Data(kv, hidden, source.lengths[chosen].astype(np.int64))


def draw(shape: str, n_bytes: int) -> Data:
    """Draw random values with a different scale for each channel.

    The exponents of the values have an entropy of about 2.7 bits, as in real keys and values.
    """
    n_layers, n_heads, head_dim, width = SHAPES[shape]
    rng = np.random.default_rng(0)
    n_tokens = n_bytes // (2 * (n_layers * n_heads * 2 * head_dim + width))
    lengths = rng.integers(MEAN_TOKENS // 2, MEAN_TOKENS * 3 // 2, max(1, n_tokens // MEAN_TOKENS))
    lengths = -np.sort(-lengths)
    n_tokens = int(lengths.sum())

    def values(*row: int) -> np.ndarray:
        out = np.empty((n_tokens, *row), np.uint16)
        scale = np.exp(0.7 * rng.normal(size=row)).astype(np.float32)
        for start in range(0, n_tokens, 256):
            block = out[start : start + 256]
            block[...] = bfloat16_bits(rng.standard_normal(block.shape, dtype=np.float32) * scale)
        return out

    return Data(values(n_layers, n_heads, 2, head_dim), values(width), lengths)


def write_store(data: Data, path: Path) -> None:
    """Write the sequences as a store.

    A store sorts the sequences of a part by length. These sequences are sorted already and fill one
    part, so the store has the same order.
    """
    fields = (tokens_field(), response_mask_field(), *data.fields)
    manifest, plan = recipe(fields, data.lengths.tolist(), target={"vocab_size": 32_000})
    with StoreWriter.create_or_resume(path, manifest, plan) as writer, writer.part(0) as out:
        for row, start in zip(out.sequences.to_pylist(), data.starts.tolist(), strict=True):
            span = slice(start, start + row["n_tokens"])
            out.write("tokens", row["first_token"], np.zeros(row["n_tokens"], np.int32))
            out.write(
                "response_mask",
                row["first_token"],
                (np.arange(row["n_tokens"]) > 0).astype(np.uint8),
            )
            out.write("kv", row["first_token"], data.kv[span])
            out.write("hidden/last", row["first_token"], data.hidden[span])
        out.commit()


def files_below(folder: Path) -> list[Path]:
    """List every file below a folder."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def read_all(folder: Path) -> None:
    """Read every file, so that it is in the page cache."""
    buffer = bytearray(8 << 20)
    for path in files_below(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
