"""Fit ("calibrate") a store's codec to a sample of its sequences.

Depending on the field, fitting also uses the target's rotary embedding (RoPE), token embeddings or
LM head.
"""

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
from ...moa.targets.facts import TargetFacts
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
"""Number of tokens in the sample that a codec is fitted to.

At the sizes of Llama-3-8B, the sample takes 8 GB of disk in float32 during calibration.
"""
METRIC_TOKENS = 4_096
"""Number of sample tokens over which the metric for the last hidden state is averaged.

The metric measures how much an error in the last hidden state changes the next-token distribution.
"""


def sample_rows(lengths: np.ndarray, n_tokens: int = SAMPLE_TOKENS) -> list[int]:
    """Choose sequences that have about ``n_tokens`` tokens in total.

    The chosen sequences are spread evenly over the plan.

    Args:
        lengths: number of tokens of each planned sequence.

    Returns:
        The row numbers of the chosen sequences in the plan, in ascending order.
    """
    n_rows = min(len(lengths), max(1, round(n_tokens * len(lengths) / max(int(lengths.sum()), 1))))
    return list(np.unique(np.linspace(0, len(lengths) - 1, n_rows).round().astype(int)).tolist())


def learned_before(
    codec: StoreCodec, store: StorePath, manifest: StoreManifest
) -> StoreCodec | None:
    """Return the fitted codec that an earlier run has written to the store.

    The result is None if the store does not exist, is damaged or has another codec. It is also None
    if the store has no parts yet and was planned with other inputs than those in ``manifest``.

    Args:
        codec: the codec of this run.
        store: the store's path.
        manifest: the manifest that this run has planned.
    """
    if not codec.learned or not (store / "store.json").exists():
        return None
    try:
        stored = read_manifest(store)
        if not has_parts(store) and replace(stored, codec=manifest.codec) != manifest:
            return None
        return StoreCodec.open(stored, store) if stored.codec.get("name") == codec.name else None
    except (StoreDamaged, CodecUnknown, SchemaVersionError):
        # The store is damaged, so its codec is not used. The writer reports or repairs the damage
        # later.
        return None


def learning_on(device: str | torch.device, folder: Path | None, progress: Progress) -> Learning:
    """Return the settings of a calibration that runs with torch on the target's device.

    Even on a CPU, torch decomposes a matrix in half the time that NumPy needs.

    Args:
        device: device of the target.
        folder: folder for the sample on disk. If the argument is None, it is the system's temporary
            folder.
        progress: reports the steps of the calibration.
    """
    return Learning(
        folder,
        to_device=lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device),
        progress=progress.of("learn", "step"),
    )


def calibrate(
    codec: StoreCodec,
    lengths: np.ndarray,
    read: Callable[[int], Mapping[str, np.ndarray]],
    facts: TargetFacts,
    lm_head: torch.Tensor,
    embeddings: torch.Tensor,
    learning: Learning,
) -> None:
    """Fit a codec to a sample of the sequences.

    The values of the sample may not fit into memory, so they are written to disk sequence by
    sequence. Then the keys or the values of one group of layers at a time are read for fitting.

    Args:
        codec: the codec to fit.
        lengths: number of tokens of each planned sequence.
        read: maps a row of the plan to a dict of arrays. The arrays are the values of each field,
            float32 [n_tokens, *token_shape], and the token ids, int [n_tokens].
        facts: the sizes and other properties of the target.
        lm_head: the target's LM head, [vocab_size, width], of any dtype and on any device.
        embeddings: the target's embeddings, [vocab_size, width], of any dtype and on any device.
        learning: settings of the calibration.
    """
    rows = sample_rows(lengths)
    ends = np.cumsum(lengths[rows])
    of_metric = np.linspace(0, ends[-1] - 1, min(int(ends[-1]), METRIC_TOKENS)).astype(int)
    last: list[np.ndarray] = []
    joint = codec.joint if codec.sources else []
    with ExitStack() as stack:
        observations: dict[str, Observation] = {}
        for name, field in codec.learned.items():
            field.rope = target_rope(facts) if field.is_kv else None
            field.embeddings = embeddings.detach() if field.needs_tokens else None
            sources = [observations[source.spec.name] for source in field.sources]
            observation = Observation(field, learning, sources)
            observations[name] = stack.enter_context(closing(observation))
        for i, row in enumerate(rows):
            learning.progress(i, len(rows), f"sample {i + 1}/{len(rows)}")
            values = read(row)
            for name, observation in observations.items():
                observation.observe(values[name], values[TOKENS])
            if HIDDEN_LAST in observations:
                positions = of_metric - (ends[i] - lengths[row])
                last.append(
                    values[HIDDEN_LAST][positions[(positions >= 0) & (positions < lengths[row])]]
                )
        bits: dict[str, float] = {}
        for name, learned in codec.learned.items():
            if name in joint and not bits:
                bits = _joint_bits(codec, joint, observations, learning)
            if name == HIDDEN_LAST:
                learning.progress(0, 1, "effect of errors on the next token")
                head = lm_head.detach().float().cpu().numpy()
                metric = logit_metric(np.concatenate(last), head, learning.to_device)
                learned.metrics = [[metric]]
            observations[name].learn(bits.get(name))
            # Drop the references to the embeddings and to the matrices that weigh errors, so that
            # their memory is free while parts are written.
            learned.embeddings = learned.metrics = None


def _joint_bits(
    codec: StoreCodec,
    joint: Sequence[str],
    observations: Mapping[str, Observation],
    learning: Learning,
) -> dict[str, float]:
    """Split a budget of bits among the hidden states of several layers.

    The codec predicts each hidden state from the hidden state of the next lower layer, and encodes
    the difference between hidden state and prediction. A field gets more bits if the variance of
    its differences is larger.

    Args:
        joint: names of the fields of these hidden states, from the lowest layer to the highest.

    Returns:
        A dict from field name to bits per token.
    """
    learning.progress(0, 1, "bits of each hidden state")
    variances = list[np.ndarray]()
    below = list[np.ndarray]()
    for name in joint:
        values = observations[name].values()
        features = list[np.ndarray]()
        for source in codec.sources.get(name, ()):
            if source not in joint:
                features.append(np.concatenate(observations[source].features))
        features += below
        known = np.concatenate(features, axis=1) if features else None
        variances.append(left_variances(values, known, learning.to_device))
        below = [values]
    bits = sum(
        len(layer_variances) * codec.fields[name].expected_bits
        for name, layer_variances in zip(joint, variances, strict=True)
    )
    return dict(zip(joint, split_bits(variances, bits), strict=True))


def target_rope(facts: TargetFacts) -> Rope:
    """Return the RoPE rotation that a target applies to its keys.

    If different kinds of layers of the target have different RoPE parameters, the rotation has one
    entry per layer.
    """
    parameters = facts.config.rope_parameters
    if not parameters.keys() & set(facts.layer_kinds):
        return Rope(*_rotation(facts, parameters))
    rotations = [_rotation(facts, parameters[kind]) for kind in facts.layer_kinds]
    frequencies, scalings = zip(*rotations, strict=True)
    return Rope(np.stack(frequencies), np.stack(scalings))


def _rotation(facts: TargetFacts, parameters: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Compute a rotation from RoPE parameters.

    Returns:
        For each pair of dimensions, the angle by which the pair is rotated per position: float32
        [rotary_dim / 2]. Also the factor that scales the rotated values.
    """
    config = copy.copy(facts.config)
    config.rope_parameters = dict(parameters)
    rotated_share = parameters.get("partial_rotary_factor") or 1.0
    # ``partial_rotary_factor`` is the share of a head's dimensions that are rotated. For the
    # default RoPE type, transformers ignores this factor and rotates all ``head_dim`` dimensions. So
    # set ``head_dim`` to the number of rotated dimensions.
    if rotated_share != 1 and parameters["rope_type"] == "default":
        config.head_dim = int(facts.head_dim * rotated_share)
    with torch.device("cpu"):
        embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq.float().numpy(), np.asarray(embedding.attention_scaling, np.float32)
