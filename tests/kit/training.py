"""Builds a small store of a random Llama with the real capture and writer, to train drafters on."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from moa_data.moa.targets.bundle import save_target_bundle
from moa_data.moa.targets.facts import TargetFacts
from moa_data.pipeline.config import parse_activations
from moa_data.pipeline.estimate import field_specs
from moa_data.pipeline.forwards.capture import capture
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.plan import plan_parts
from moa_data.storage.schema import StoreManifest, to_float32
from moa_data.storage.write.store import StoreWriter

from .models import build_text_model

N_LAYERS, VOCABULARY = 3, 61


class NoTokenizer:
    """Stands in for a tokenizer in a test that only needs weights."""

    def save_pretrained(self, path: Path) -> None:
        """Save nothing."""


def tiny_model() -> Any:
    """Return the target of ``build_store``."""
    return build_text_model(num_hidden_layers=N_LAYERS, vocab_size=VOCABULARY, pad_token_id=None)


def build_store(
    path: Path,
    activations: tuple[str, ...] = ("kv", "hidden:last", "hidden:layer:1"),
    n_sequences: int = 60,
    dtype: str = "float32",
    codec: str = "lossless",
) -> Path:
    """Build a store of sequences of 12 to 40 tokens.

    The tokens follow a simple pattern, so that a drafter can learn something.
    """
    model, random = tiny_model(), np.random.default_rng(0)
    sequences: dict[str, Any] = {}
    for _ in range(n_sequences):
        start, stride, length = (
            random.integers(VOCABULARY),
            random.integers(1, 4),
            random.integers(12, 41),
        )
        tokens = ((start + stride * np.arange(length)) % VOCABULARY).astype(np.int32)
        response = (np.arange(length) >= random.integers(3, 6)).astype(np.uint8)
        sequences[hashlib.sha256(tokens.tobytes() + response.tobytes()).hexdigest()] = (
            tokens,
            response,
        )
    table = pa.table(
        {
            "sequence_id": list(sequences),
            "source_row": pa.array(range(len(sequences)), pa.int64()),
            "n_tokens": pa.array([len(t) for t, _ in sequences.values()], pa.int32()),
            "n_response_tokens": pa.array(
                [int(m.sum()) for _, m in sequences.values()], pa.int32()
            ),
        }
    )
    plan = plan_parts(table, 1024)
    spec = parse_activations(activations, 1, N_LAYERS)
    facts = TargetFacts.of_model(model)
    fields = field_specs(spec, facts, dtype)
    manifest = StoreManifest(
        fields=fields, target=facts.sizes, identities={"target.weights_sha256": "ab" * 32},
        extraction={}, n_sequences=len(sequences), n_parts=int(plan["part"].to_numpy().max()) + 1,
        n_tokens=int(plan["n_tokens"].to_numpy().sum()), codec=StoreCodec(codec, fields).describe(),
    )  # fmt: skip
    with StoreWriter.create_or_resume(path, manifest, plan) as writer:
        with writer.target() as folder:
            save_target_bundle(model, NoTokenizer(), folder, 1)
        for index in writer.pending_parts():
            with writer.part(index) as part:
                rows = writer.part_sequences(index).to_pylist()
                texts = [sequences[row["sequence_id"]] for row in rows]
                host = capture(
                    model, [tokens for tokens, _ in texts], spec, getattr(torch, dtype)
                ).to_host()
                for number, (row, (tokens, response)) in enumerate(zip(rows, texts, strict=True)):
                    part.write("tokens", row["first_token"], tokens)
                    part.write("response_mask", row["first_token"], response)
                    for name in spec.fields:
                        given, own = host.rows(name, number), part.codec.fields[name]
                        if not own.is_identity and isinstance(given, np.ndarray):
                            given = own.encode(to_float32(given, own.spec.dtype), tokens)
                        part.write(name, row["first_token"], given)
                part.commit()
    return path
