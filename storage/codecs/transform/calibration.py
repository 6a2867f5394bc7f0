"""What a transform codec learns from a sample: means, principal components, and the metric that errors count in.

A *part* of a field is quantised on its own: the keys (rotation taken off), the values, or a hidden state. A *group* is
a run of layers that share one basis. The sample's sequences are split in two: the basis comes from the first, what its
components cost from the second, so that the figures hold for sequences that the basis never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EARLY_POSITIONS = 8
"""Positions with a mean of their own: attention sinks, and the constant beginning of a chat template."""

MAX_BASIS_WIDTH = 16_384
"""Widest part of one group. A basis takes up to ``width * MAX_COMPONENTS`` numbers; learning it, several times that."""

MAX_COMPONENTS = 4_096
"""Components kept of one part of one group."""

MAX_FEATURES = 512
"""Numbers that a token's keys and values are predicted from."""

_EXACT_WIDTH = 2_048
_OVERSAMPLING = 32
_POWER_ITERATIONS = 4
_METRIC_RIDGE = 0.2
_FEATURE_RIDGE = 1e-3


@dataclass(frozen=True)
class Basis:
    """A mean and axes for one part of one group.

    Attributes:
        mean: float32 [EARLY_POSITIONS + 1, width]; row p for position p, the last for all later ones.
        synthesis: float32 [n_components, width]; components times this, plus the mean, are the values.
        analysis: float32 [width, n_components]; values without the mean, times this, are the components.
    """

    mean: np.ndarray
    synthesis: np.ndarray
    analysis: np.ndarray


def mean_rows(first_position: int, n_tokens: int) -> np.ndarray:
    """Return the row of ``Basis.mean`` for consecutive positions: int32 [n_tokens]."""
    return np.minimum(np.arange(first_position, first_position + n_tokens), EARLY_POSITIONS).astype(np.int32)


def early_means(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Return the means of whole sequences: [n_tokens, width] each -> float32 [EARLY_POSITIONS + 1, width].

    A position that no sequence reaches takes the mean of all later ones.
    """
    width = sequences[0].shape[1]
    sums = np.zeros((EARLY_POSITIONS + 1, width))
    counts = np.zeros(EARLY_POSITIONS + 1)
    for values in sequences:
        n_early = min(len(values), EARLY_POSITIONS)
        sums[:n_early] += values[:n_early]
        sums[-1] += values[n_early:].sum(0, dtype=np.float64)
        counts[:n_early] += 1
        counts[-1] += len(values) - n_early
    general = sums[-1] / counts[-1] if counts[-1] else sums.sum(0) / counts.sum()
    means = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], general)
    means[-1] = general
    return means.astype(np.float32)


def learn_basis(sequences: Sequence[np.ndarray], metric: np.ndarray | None = None) -> Basis:
    """Learn the mean and the principal components of a part.

    Args:
        sequences: float32 [n_tokens, width], each a sequence from position 0 on.
        metric: symmetric and not negative [width, width]; an error ``e`` counts ``e @ metric @ e``. None for the sum
            of squares. The components are the principal ones in this metric.

    Returns:
        Components from the largest variance down, at most ``MAX_COMPONENTS``.

    Raises:
        ValueError: the part is wider than ``MAX_BASIS_WIDTH``.
    """
    width = sequences[0].shape[1]
    if width > MAX_BASIS_WIDTH:
        raise ValueError(
            f"A basis of width {width} is above the limit of {MAX_BASIS_WIDTH}. "
            "Let fewer layers share one: name the codec transform:<bits>@group<layers> or transform:<bits>@layer."
        )
    means = early_means(sequences)
    rows = np.concatenate([values - means[mean_rows(0, len(values))] for values in sequences])
    if metric is None:
        axes = principal_axes(rows)
        # Half precision in the store: analysis must use the same rounded axes as synthesis.
        axes = axes.astype(np.float16).astype(np.float32)
        return Basis(means, np.ascontiguousarray(axes.T), axes)
    root, inverse = _matrix_roots(metric)
    axes = principal_axes(rows @ root.astype(np.float32)).astype(np.float64)
    synthesis = (axes.T @ inverse).astype(np.float16).astype(np.float32)
    return Basis(means, synthesis, (root @ axes).astype(np.float16).astype(np.float32))


def token_features(embeddings: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return what of a token's identity its keys and values are predicted from.

    The first layer's keys and values are a function of the normalised embedding of the token, and those of the other
    layers lean on it.

    Args:
        embeddings: float32 [vocab_size, width], the target's input embeddings.
        tokens: int [n], tokens of the sample; the features are those that differ most among them.

    Returns:
        float32 [vocab_size, min(width, MAX_FEATURES)], rounded to half precision.
    """
    scale = np.sqrt(np.square(embeddings).mean(1, keepdims=True))
    features = embeddings / np.maximum(scale, 1e-12)
    if features.shape[1] > MAX_FEATURES:
        features = features @ principal_axes(features[tokens])[:, :MAX_FEATURES]
    return np.asarray(features.astype(np.float16), np.float32)


def learn_regression(features: Sequence[np.ndarray], sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Return the linear prediction of a part from token features, by ridge regression.

    Args:
        features: float32 [n_tokens, n_features] of each sequence.
        sequences: float32 [n_tokens, width] each.

    Returns:
        float32 [n_features, width], rounded to half precision.
    """
    n_features, n_tokens = features[0].shape[1], sum(len(values) for values in sequences)
    gram = np.zeros((n_features, n_features))
    product = np.zeros((n_features, sequences[0].shape[1]))
    mean = np.concatenate(sequences).mean(0)
    for x, values in zip(features, sequences, strict=True):
        gram += x.T @ x
        product += x.T @ (values - mean)
    gram += _FEATURE_RIDGE * np.trace(gram) / n_features * np.eye(n_features) + 1e-9 * n_tokens * np.eye(n_features)
    return np.linalg.solve(gram, product).astype(np.float16).astype(np.float32)


def principal_axes(rows: np.ndarray) -> np.ndarray:
    """Return the principal axes of rows around zero, by falling variance.

    Exact up to a width of 2,048, beyond it by subspace iteration from a fixed start.

    Args:
        rows: float32 [n, width].

    Returns:
        float32 [width, min(width, MAX_COMPONENTS)], or ``min(n, ...)`` columns for wide parts; orthonormal. Signs are
        fixed: the largest entry of each axis is positive.
    """
    n, width = rows.shape
    if width <= _EXACT_WIDTH:
        _, vectors = np.linalg.eigh((rows.T @ rows).astype(np.float64))
        axes = vectors[:, ::-1][:, :MAX_COMPONENTS]
    else:
        n_axes = min(width, MAX_COMPONENTS, n)
        start = np.random.default_rng(0).standard_normal((width, min(width, n_axes + _OVERSAMPLING)), dtype=np.float32)
        subspace = np.linalg.qr(start)[0]
        for _ in range(_POWER_ITERATIONS):
            subspace = np.linalg.qr(rows.T @ (rows @ subspace))[0]
        projected = rows @ subspace
        _, vectors = np.linalg.eigh((projected.T @ projected).astype(np.float64))
        axes = subspace.astype(np.float64) @ vectors[:, ::-1][:, :n_axes]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(0)[None], axis=0)
    return np.asarray(axes * np.where(largest < 0, -1.0, 1.0), dtype=np.float32)


def _matrix_roots(metric: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric square root of a metric, made safe to invert, and its inverse: float64 [width, width]."""
    width = len(metric)
    scale = np.trace(metric) / width
    even = (1 - _METRIC_RIDGE) * np.asarray(metric, np.float64) / max(scale, 1e-30) + _METRIC_RIDGE * np.eye(width)
    variances, vectors = np.linalg.eigh((even + even.T) / 2)
    root = np.sqrt(np.maximum(variances, _METRIC_RIDGE / 2))
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def logit_metric(hidden: np.ndarray, head: np.ndarray, batch_tokens: int = 256) -> np.ndarray:
    """Return how errors of the last hidden state change the target's next-token distribution.

    To second order, a small error ``e`` of the hidden state costs ``e @ metric @ e / 2`` nats of Kullback-Leibler
    divergence on average: the metric is the mean over tokens of ``head.T @ (diag(p) - p p.T) @ head``.

    Args:
        hidden: float32 [n_tokens, width], inputs of the LM head (after the final norm).
        head: float32 [vocab_size, width].
        batch_tokens: tokens whose distributions are in memory at a time.

    Returns:
        float64 [width, width].
    """
    mean_probability = np.zeros(len(head))
    outer = np.zeros((head.shape[1], head.shape[1]))
    for start in range(0, len(hidden), batch_tokens):
        logits = hidden[start : start + batch_tokens] @ head.T
        logits -= logits.max(axis=1, keepdims=True)
        probability = np.exp(logits)
        probability /= probability.sum(axis=1, keepdims=True)
        mean_probability += probability.sum(0, dtype=np.float64)
        expected = probability @ head
        outer += expected.T @ expected
    weighted = (head * (mean_probability / len(hidden)).astype(np.float32)[:, None]).T @ head
    return np.asarray(weighted - outer / len(hidden), dtype=np.float64)
