"""Stores of made-up sequences whose fields are predicted from each other: they are encoded together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moa_data.storage.chunks.field import TOKENS
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.dtypes import to_float32
from moa_data.storage.write.store import StoreWriter

from .stores import Recipe

Stored = Mapping[str, np.ndarray]
"""Field -> a sequence's values as a store has them: bfloat16 bits, and the tokens."""


def exact(sequence: Stored, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return some fields of a sequence as float32."""
    return {name: to_float32(sequence[name], "bfloat16") for name in names}


def decoded(codec: StoreCodec, sequence: Stored, name: str) -> np.ndarray:
    """Encode a sequence and decode one field of it, from its own codes and those that it is predicted from."""
    encoded = codec.encode(exact(sequence, codec.learned), sequence[TOKENS])
    rows = {key: value for one in codec.with_sources(name) for key, value in encoded[one].items()}
    values: np.ndarray = codec.fields[name].decode(rows | {TOKENS: sequence[TOKENS]}, 0, len(sequence[TOKENS]))
    return values


def relative_error(codec: StoreCodec, sequences: Sequence[Stored], name: str) -> float:
    """The relative L2 error of a field over some sequences."""
    pairs = [(decoded(codec, sequence, name), exact(sequence, [name])[name]) for sequence in sequences]
    wrong = sum(np.square(got - own).sum() for got, own in pairs)
    return float((wrong / sum(np.square(own).sum() for _, own in pairs)) ** 0.5)


def write_store(path: Path, recipe: Recipe, codec: StoreCodec, sequence_of: Callable[[dict[str, Any]], Stored]) -> Path:
    """Write a store of the sequences that a function makes of the plan's rows; returns its path."""
    manifest = replace(recipe.manifest, codec=codec.describe())
    with StoreWriter.create_or_resume(path, manifest, recipe.plan, codec.files()) as writer:
        for part in writer.pending_parts():
            with writer.part(part) as out:
                for row in out.sequences.to_pylist():
                    sequence = sequence_of(row)
                    for name, rows in codec.encode(exact(sequence, codec.learned), sequence[TOKENS]).items():
                        out.write(name, row["first_token"], rows)
                    for name in (TOKENS, "response_mask"):
                        out.write(name, row["first_token"], sequence[name])
                out.commit()
    return path
