"""Lets codecs learn from a sample of the sequences, and the target's rotation, embeddings and LM head."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...errors import CodecUnknown, SchemaVersionError, StoreDamaged
from ...moa.targets.families import layer_kinds, target_sizes
from ...storage.codecs.calibration import logit_metric
from ...storage.codecs.field import Learning
from ...storage.codecs.fit import left_variances, split_bits
from ...storage.codecs.registry import StoreCodec
from ...storage.codecs.transform import Observation, Rope
from ...storage.commit import has_parts
from ...storage.paths import StorePath
from ...storage.read.store import read_manifest
from ...storage.schema import HIDDEN_LAST, TOKENS, StoreManifest
from ...text import Progress

SAMPLE_TOKENS = 30_000
"""Tokens that a codec learns from; in float32 they take 8 GB of disk at the sizes of Llama-3-8B, while it learns."""
METRIC_TOKENS = 4_096
"""Tokens of the sample over which the effect of an error on the next-token distribution is averaged."""


def sample_rows(lengths: np.ndarray, n_tokens: int = SAMPLE_TOKENS) -> list[int]:
    """Choose sequences of about so many tokens, spread evenly over the plan: ascending rows."""
    n_rows = min(len(lengths), max(1, round(n_tokens * len(lengths) / max(int(lengths.sum()), 1))))
    return list(np.unique(np.linspace(0, len(lengths) - 1, n_rows).round().astype(int)).tolist())


def learned_before(
    codec: StoreCodec, store: StorePath, manifest: StoreManifest
) -> StoreCodec | None:
    """Return the codec of a store that an earlier run began, with what it learned; None where there is none.

    The codec of a store that has no part and was begun from other inputs than ``manifest`` says is not used.
    """
    if not codec.learned or not (store / "store.json").exists():
        return None
    try:
        stored = read_manifest(store)
        if not has_parts(store) and replace(stored, codec=manifest.codec) != manifest:
            return None
        return StoreCodec.open(stored, store) if stored.codec.get("name") == codec.name else None
    except (StoreDamaged, CodecUnknown, SchemaVersionError):
        return None  # opening the store for writing names the damage, or repairs it


def learning_on(
    device: str | torch.device, folder: Path | None, progress: Progress | None
) -> Learning:
    """Return how codecs learn beside a target: on its device, by torch; the sample waits in a folder on disk.

    On a CPU torch decomposes a matrix in half the time that NumPy takes.
    """
    learning = Learning(folder, progress=progress) if progress else Learning(folder)
    return replace(
        learning, place=lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
    )


class _Float32Rows:
    """Rows of a tensor as float32 NumPy arrays, converted when they are asked for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self.shape = tuple(tensor.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: slice | np.ndarray) -> np.ndarray:
        chosen = (
            ids
            if isinstance(ids, slice)
            else torch.from_numpy(ids.astype(np.int64)).to(self._tensor.device)
        )
        return np.asarray(self._tensor[chosen].float().cpu())


def calibrate(
    codec: StoreCodec,
    lengths: np.ndarray,
    read: Callable[[int], Mapping[str, np.ndarray]],
    model_config: Any,
    lm_head: torch.Tensor,
    embeddings: torch.Tensor,
    learning: Learning,
) -> None:
    """Let a codec learn; one sequence of the sample is in memory at a time, then one part of one group of layers.

    Args:
        lengths: tokens of each planned sequence.
        read: row of the plan -> each field, float32 [n_tokens, *token_shape], and the tokens, int [n_tokens].
        lm_head, embeddings: [vocab_size, width], any dtype and device.
    """
    rows = sample_rows(lengths)
    ends = np.cumsum(lengths[rows])
    of_metric = np.linspace(0, ends[-1] - 1, min(int(ends[-1]), METRIC_TOKENS)).astype(int)
    last: list[np.ndarray] = []
    joint = codec.joint if codec.sources else []
    with ExitStack() as stack:
        observations: dict[str, Observation] = {}
        for name, field in codec.learned.items():
            field.rope = target_rope(model_config) if field.is_kv else None
            field.embeddings = _Float32Rows(embeddings) if field.needs_tokens else None
            observations[name] = stack.enter_context(closing(Observation(field, learning)))
        for i, row in enumerate(rows):
            learning.progress(i, len(rows), f"learn: sample {i + 1}/{len(rows)}")
            values = read(row)
            for name, observation in observations.items():
                observation.observe(values[name], values[TOKENS])
            if HIDDEN_LAST in observations:
                own = of_metric - (ends[i] - lengths[row])
                last.append(values[HIDDEN_LAST][own[(own >= 0) & (own < lengths[row])]])
        bits: dict[str, float] = {}
        offered: dict[str, list[np.ndarray]] = {}
        used = {name for names in codec.sources.values() for name in names}
        for name in (name for name in codec.in_order if name in observations):
            observation = observations[name]
            learned = codec.learned[name]
            if name in joint and not bits:
                bits = _joint_bits(codec, joint, observations, offered, learning)
            if name == HIDDEN_LAST:
                learning.progress(0, 1, "learn: metric of the next-token distribution")
                head = lm_head.detach().float().cpu().numpy()
                learned.metrics = [[logit_metric(np.concatenate(last), head, place=learning.place)]]
            observation.learn(_features(codec, name, offered), bits.get(name))
            if name in used:
                offered[name] = observation.as_features()
            # else they would stay in memory while parts are written
            learned.embeddings = learned.metrics = None


def _features(
    codec: StoreCodec, name: str, offered: Mapping[str, Sequence[np.ndarray]]
) -> list[np.ndarray] | None:
    """Join what a field is predicted from, sequence by sequence; None where it is predicted from no other field."""
    found = [offered[source] for source in codec.sources.get(name, ())]
    return [np.concatenate(own, axis=1) for own in zip(*found, strict=True)] if found else None


def _joint_bits(
    codec: StoreCodec,
    joint: Sequence[str],
    observations: Mapping[str, Observation],
    offered: Mapping[str, Sequence[np.ndarray]],
    learning: Learning,
) -> dict[str, float]:
    """Split the bits of joint hidden states, given the lowest first: field -> bits per token."""
    learning.progress(0, 1, "learn: bits of joint hidden states")
    variances = list[np.ndarray]()
    below = list[np.ndarray]()
    for name in joint:
        values = observations[name].values()
        others = [
            np.concatenate(offered[source])
            for source in codec.sources.get(name, ())
            if source not in joint
        ]
        features = [*others, *below]
        known = np.concatenate(features, axis=1) if features else None
        variances.append(left_variances(values, known, learning.place))
        below = [values]
    bits = sum(
        len(own) * codec.fields[name].expected_bits
        for name, own in zip(joint, variances, strict=True)
    )
    return dict(zip(joint, split_bits(variances, bits), strict=True))


def target_rope(model_config: Any) -> Rope:
    """Return the rotation that a target applies to its keys, of each layer where kinds of layers differ."""
    kinds = layer_kinds(model_config)
    parameters = model_config.rope_parameters
    if not parameters.keys() & set(kinds):
        return Rope(*_rotation(model_config, parameters))
    own = {kind: _rotation(model_config, parameters[kind]) for kind in set(kinds)}
    frequencies, scalings = zip(*(own[kind] for kind in kinds), strict=True)
    return Rope(np.stack(frequencies), np.stack(scalings))


def _rotation(model_config: Any, parameters: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Compute the angles of a position, [rotary_dim / 2], and the scaling of a target's RoPE parameters."""
    config = copy.copy(model_config)
    config.rope_parameters = dict(parameters)
    part = parameters.get("partial_rotary_factor") or 1.0
    if part != 1 and parameters["rope_type"] == "default":  # which alone does not heed it
        config.head_dim = int(target_sizes(model_config)["head_dim"] * part)
    with torch.device("cpu"):
        embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq.float().numpy(), np.asarray(embedding.attention_scaling, np.float32)
