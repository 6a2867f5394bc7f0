"""What a learned codec learns from: a sample of the sequences, the target's rotation, embeddings and LM head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..moa.targets.live import Target
from ..storage.chunks.field import TOKENS
from ..storage.codecs.registry import StoreCodec
from ..storage.codecs.transform.calibration import logit_metric
from ..storage.codecs.transform.codec import TransformCodec
from ..storage.codecs.transform.rope import Rope
from ..storage.errors import ManifestInvalid, SchemaVersionError, ShardCorrupt, ShardMissing
from ..storage.read.store import read_manifest
from .capture import capture
from .config import ActivationSpec

SAMPLE_TOKENS = 30_000
"""Tokens that a codec learns from; in float32 they take 8 GB at the sizes of Llama-3-8B."""
METRIC_TOKENS = 4_096
"""Of these, the tokens over which the effect of an error on the next-token distribution is averaged."""

ReadSequence = Callable[[int], Mapping[str, np.ndarray]]
"""Row of the plan -> field -> float32 [n_tokens, *token_shape]; and the tokens, int [n_tokens]."""


def sample_rows(lengths: np.ndarray, n_tokens: int = SAMPLE_TOKENS) -> list[int]:
    """Choose sequences that lie evenly spread over the plan.

    Args:
        n_tokens: tokens wanted, roughly.

    Returns:
        Ascending rows; all of them where there are fewer tokens.
    """
    n_rows = min(len(lengths), max(1, round(n_tokens * len(lengths) / max(int(lengths.sum()), 1))))
    rows: list[int] = np.unique(np.linspace(0, len(lengths) - 1, n_rows).round().astype(int)).tolist()
    return rows


def learned_before(codec: StoreCodec, store: Path) -> StoreCodec | None:
    """Return the codec of a store that an earlier run began, with what it learned; None where there is none."""
    if not codec.learned or not (store / "store.json").exists():
        return None
    try:
        manifest = read_manifest(store)
        return StoreCodec.open(manifest, store) if manifest.codec.get("name") == codec.name else None
    except (ManifestInvalid, SchemaVersionError, ShardCorrupt, ShardMissing):
        return None  # what is wrong is said, or mended, when the store is opened for writing


def calibrate(
    codec: StoreCodec,
    lengths: np.ndarray,
    read: ReadSequence,
    model_config: Any,
    lm_head: torch.Tensor,
    embeddings: torch.Tensor,
) -> None:
    """Let a codec learn.

    Args:
        lengths: tokens of each planned sequence.
        read: gives the values of one of them.
        lm_head: [vocab_size, width], any dtype and device.
    """
    sequences = [read(row) for row in sample_rows(lengths)]
    for name, field in codec.learned.items():
        sample = [values[name] for values in sequences]
        if isinstance(field, TransformCodec):
            if field.is_kv:
                field.rope = target_rope(model_config)
                if field.needs_tokens:
                    field.embeddings = embeddings.detach().float().cpu().numpy()
            elif name == "hidden/last":
                rows = np.concatenate(sample)
                rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), METRIC_TOKENS)).astype(int)]
                field.metric = logit_metric(rows, lm_head.detach().float().cpu().numpy())
        field.calibrate(sample, [values[TOKENS] for values in sequences] if field.needs_tokens else None)


def learn_from_target(
    codec: StoreCodec,
    lengths: np.ndarray,
    tokens_of: Callable[[int], np.ndarray],
    target: Target,
    spec: ActivationSpec,
    dtype: str,
    uses_cache: bool | None = None,
) -> None:
    """Let a codec learn from forwards of the target over a sample of the sequences.

    Args:
        tokens_of: row of the plan -> token ids, int32 [n_tokens].
        spec, dtype, uses_cache: as for ``capture``.
    """
    model: Any = target.model

    def read(row: int) -> dict[str, np.ndarray]:
        tokens = tokens_of(row)
        fields = capture(model, [tokens], spec, getattr(torch, dtype), uses_cache).fields
        return {name: values[0].float().cpu().numpy() for name, values in fields.items()} | {TOKENS: tokens}

    lm_head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().get_parameter("weight")
    calibrate(codec, lengths, read, model.config, lm_head, embeddings)


def target_rope(model_config: Any) -> Rope:
    """Return the rotation that a target applies to its keys."""
    with torch.device("cpu"):
        embedding = LlamaRotaryEmbedding(model_config)
    return Rope(embedding.inv_freq.float().numpy(), np.asarray(embedding.attention_scaling, np.float32))
