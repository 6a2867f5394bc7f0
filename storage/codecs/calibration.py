"""Learns the state of a transform codec from a sample of sequences.

The state consists of means, principal axes, and matrices of linear predictions. A *group* consists
of consecutive layers. The keys (before RoPE) of a group have one basis of principal axes, and the
values of the group have another basis. The keys or the values of a group are called a *part*. A
hidden state is one group with one part.

The sample may be too large for the memory. So the sample is on disk, and only one part of one group
is in memory at a time. For 16 layers of an 8B target and 30,000 tokens, learning then takes 2 GB of
memory instead of 8 GB::

    one sequence                 [n_tokens, *token_shape]
    -> parts of each group       float32 [n_tokens, width] each
    -> disk                      a temporary file without a name
    -> memory, part by part      the rows of all sequences
"""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import array_api_compat
import numpy as np
from array_api_compat import array_namespace

from ..schema import Array
from .coding import EARLY_POSITIONS, Basis, mean_rows
from .field import to_device_of

# A function that copies a NumPy array to another device. Large matrix products run on this device
# (see ``codecs.field.Learning``).
ToDevice = Callable[[np.ndarray], Array]

# Largest number of principal axes in a basis. The keys of a layer group have one basis, and the
# values of the group have another. A hidden state has one basis.
MAX_COMPONENTS = 4_096
# Keys and values may be predicted from features of the token id. This is the largest number of
# features of one token id.
MAX_FEATURES = 512
# Up to this width, the principal axes of keys, values or a hidden state are computed from their
# covariance matrix. For larger widths, they are computed by subspace iteration.
EXACT_WIDTH = 8_192
# Up to this width, covariance matrices are decomposed in float64. For larger widths, float32 is
# used, which takes half the time.
_PRECISE_WIDTH = 2_048
_POWER_ITERATIONS = 4  # Number of subspace iterations for wide arrays.
_OVERSAMPLING = 32
_METRIC_RIDGE = 0.2
_FEATURE_RIDGE = 1e-3
_VOCABULARY_BLOCK = 1 << 16


class Kept(NamedTuple):
    """The offset and the shape of a float32 array in the temporary file of a :class:`Sample`."""

    offset_bytes: int
    shape: tuple[int, ...]


class PackedSequences(NamedTuple):
    """The keys or the values of one layer group, or a hidden state, for several sequences.

    ``values`` is float32 [n_tokens, width]. It has one row per token: first the tokens of the first
    sequence, then the tokens of the second sequence, and so on. ``lengths`` contains the number of
    tokens of each sequence.
    """

    values: np.ndarray
    lengths: Sequence[int]

    @property
    def sequences(self) -> list[np.ndarray]:
        """The rows of each sequence, as views of ``values``."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1])


class Sample:
    """A sample of sequences of one field, in a temporary file without a name.

    Each sequence is split into groups of layers, and each group into two parts: its keys and its
    values. A hidden state is one group with one part. The file is deleted when it is closed.
    """

    def __init__(self, folder: Path | None) -> None:
        self.lengths: list[int] = []
        # Token ids of each sequence, int [n_tokens]. The list is empty if the codec does not use
        # token ids.
        self.tokens: list[np.ndarray] = []
        self._kept: list[list[list[Kept]]] = []
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (`close` closes it)

    def add(self, groups: Sequence[Sequence[np.ndarray]], tokens: np.ndarray | None) -> None:
        """Add a sequence to the sample.

        ``groups[g][p]`` holds the keys (p = 0) or values (p = 1) of layer group g, float32
        [n_tokens, width]. A hidden state is ``groups[0][0]``.
        """
        self.lengths.append(len(groups[0][0]))
        entries: list[list[Kept]] = []
        for parts in groups:
            entries.append([self.keep(part) for part in parts])
        self._kept.append(entries)
        if tokens is not None:
            self.tokens.append(np.asarray(tokens))

    def rows(self, group: int, part: int, chosen: Sequence[int]) -> PackedSequences:
        """Read one part (keys, values or a hidden state) of one layer group.

        Only the sequences with the indices ``chosen`` are read.
        """
        entries = [self._kept[i][group][part] for i in chosen]
        lengths = [self.lengths[i] for i in chosen]
        rows = PackedSequences(np.empty((sum(lengths), entries[0].shape[1]), np.float32), lengths)
        for entry, out in zip(entries, rows.sequences, strict=True):
            out[...] = self.read(entry)
        return rows

    def sequence(self, index: int) -> list[list[np.ndarray]]:
        """Read one sequence. The result has the form of the argument ``groups`` of :meth:`add`."""
        groups: list[list[np.ndarray]] = []
        for entries in self._kept[index]:
            groups.append([self.read(entry) for entry in entries])
        return groups

    def keep(self, array: np.ndarray) -> Kept:
        """Append a float32 array to the temporary file. Return its offset and shape."""
        entry = Kept(self._file.seek(0, os.SEEK_END), array.shape)
        self._file.write(np.ascontiguousarray(array, np.float32).data.cast("B"))
        return entry

    def read(self, kept: Kept) -> np.ndarray:
        """Read an array that :meth:`keep` wrote."""
        self._file.seek(kept.offset_bytes)
        return np.fromfile(self._file, np.float32, math.prod(kept.shape)).reshape(kept.shape)

    def close(self) -> None:
        """Close the temporary file, which frees its disk space."""
        self._file.close()


def on_host(array: Array) -> np.ndarray:
    """Copy an array from any device to a NumPy array."""
    return np.asarray(array_api_compat.to_device(array, "cpu"))


def early_means(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Compute the mean row of sequences at each early position, and over all later positions.

    The first ``EARLY_POSITIONS`` positions of a sequence are the early positions.

    If all sequences are too short to have a certain early position, the mean of the later positions
    is used for this position.

    Args:
        sequences: Whole sequences, [n_tokens, width] each.

    Returns:
        float32 [EARLY_POSITIONS + 1, width]. Row p is the mean at position p. The last row is the
        mean of all later positions.
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


def layer_scale(sample: PackedSequences, n_layers: int) -> np.ndarray:
    """Compute the scale of each layer.

    The scale of a layer is the root mean square of the layer's values, divided by the root mean
    square of the values of all layers.

    Values are divided by the scale of their layer before quantisation errors are measured. So the
    error of each layer is measured relative to the size of the layer's values. Without the
    division, layers with small values would lose more precision than the others.

    Args:
        sample: The keys or the values of a layer group, or a hidden state.
        n_layers: Number of layers of the group.

    Returns:
        float32 [width]. Column i of the values belongs to one layer. Entry i is the scale of this
        layer.
    """
    energies = np.zeros(n_layers)
    for values in sample.sequences:
        energies += np.square(values.reshape(len(values), n_layers, -1), dtype=np.float64).sum(
            (0, 2)
        )
    mean = energies.mean()
    scale = (
        np.sqrt(np.where(energies > 0, energies, mean) / mean) if mean > 0 else np.ones(n_layers)
    )
    return np.repeat(scale, sample.values.shape[1] // n_layers).astype(np.float32)


def learn_basis(
    sample: PackedSequences, metric: np.ndarray | None, scale: np.ndarray, to_device: ToDevice
) -> Basis:
    """Learn means and principal axes of the keys or values of a layer group, or of a hidden state.

    The axes are chosen so that quantisation errors cost little. They are sorted by the variance of
    the sample along each axis, from large to small.

    Args:
        sample: Whole sequences, from position 0 on. Their values are changed in place.
        metric: Matrix [width, width] that weighs quantisation errors, symmetric and positive
            semidefinite: an error ``e`` costs ``e @ metric @ e``. If the argument is None, the cost
            is the sum of squares of ``e / scale``.
        scale: Result of :func:`layer_scale`, [width]. Column i of the values belongs to one layer,
            and entry i is the scale of this layer.
        to_device: Moves an array to the device that computes large matrix products.
    """
    means = early_means(sample.sequences)
    for values in sample.sequences:
        values -= means[mean_rows(0, len(values))]
    if metric is None:
        np.divide(sample.values, scale, out=sample.values)
        axes = principal_axes(to_device(sample.values)).T * scale
        # The store contains the axes in float16. So round the axes to float16 before the analysis
        # matrix is computed from them. Encoding and decoding then use the same axes.
        return Basis.scaled(means, axes.astype(np.float16).astype(np.float32), scale)
    factor = _metric_factor(metric, to_device)
    weighted = to_device(sample.values) @ to_device(on_host(factor).astype(np.float32))
    axes = to_device(principal_axes(weighted).astype(np.float64))
    analysis = on_host(factor @ axes)
    synthesis = on_host(array_namespace(axes).linalg.solve(factor.T, axes)).T
    return Basis(
        means,
        synthesis.astype(np.float16).astype(np.float32),
        analysis.astype(np.float16).astype(np.float32),
    )


def metric_scale(metric: np.ndarray) -> float:
    """Compute the mean diagonal entry of a matrix that weighs errors.

    The mean diagonal entry is the mean cost of an error of 1 in one dimension. :func:`learn_basis`
    divides the matrix by this number, so that the effect of the regularisation does not depend on
    the scale of the matrix.
    """
    return max(float(np.trace(metric)) / len(metric), 1e-30)


def token_features(embeddings: Array, tokens: np.ndarray, to_device: ToDevice) -> np.ndarray:
    """Compute features of every token id. Keys and values are later predicted from the features.

    In the first layer, a token's keys (before RoPE) and values are a function of its normalised
    embedding. In the other layers, keys and values partly depend on this embedding. So the features
    are the normalised embedding, or a projection of the normalised embedding.

    Args:
        embeddings: The target's input embeddings, [vocab_size, width], of any float dtype and on
            any device.
        tokens: Token ids of the sample, int [n_tokens]. If the embeddings are wider than
            ``MAX_FEATURES``, they are projected on ``MAX_FEATURES`` directions. These are the
            directions in which the embeddings of the sample's tokens have the largest variance.
        to_device: Moves an array to the device that computes large matrix products.

    Returns:
        float16 [vocab_size, n_features].
    """
    axes = None
    if embeddings.shape[1] > MAX_FEATURES:
        rows = array_namespace(embeddings).take(
            embeddings, to_device_of(tokens, embeddings), axis=0
        )
        sample = to_device(_normalised(rows))
        axes = to_device(principal_axes(sample, MAX_FEATURES))
    blocks = []
    # Convert the embeddings in blocks: all of them in float32 would take 2 GB for Llama-3-8B.
    for start in range(0, len(embeddings), _VOCABULARY_BLOCK):
        unit = _normalised(embeddings[start : start + _VOCABULARY_BLOCK])
        blocks.append(
            (unit if axes is None else on_host(to_device(unit) @ axes)).astype(np.float16)
        )
    return np.concatenate(blocks)


def _normalised(embeddings: Array) -> np.ndarray:
    xp = array_namespace(embeddings)
    values = on_host(xp.astype(embeddings, xp.float32))
    scale = np.sqrt(np.square(values).mean(1, keepdims=True))
    return np.asarray(values / np.maximum(scale, 1e-12))


def learn_regression(
    features: Sequence[np.ndarray], sample: PackedSequences, to_device: ToDevice
) -> np.ndarray:
    """Learn a linear prediction of keys, values or a hidden state by ridge regression.

    Args:
        features: Features of each sequence of the sample, float32 [n_tokens, n_features].
        sample: The values to predict.
        to_device: Moves an array to the device that computes large matrix products.

    Returns:
        The matrix of the prediction ``features @ matrix``, float32 [n_features, width]. Its entries
        are rounded to float16.
    """
    n_features = features[0].shape[1]
    n_tokens, width = sample.values.shape
    gram = np.zeros((n_features, n_features))
    product = np.zeros((n_features, width))
    mean = sample.values.mean(0)
    for x, values in zip(features, sample.sequences, strict=True):
        moved = to_device(x)
        gram += on_host(moved.T @ moved)
        product += on_host(moved.T @ to_device(values - mean))
    gram += _FEATURE_RIDGE * np.trace(gram) / n_features * np.eye(
        n_features
    ) + 1e-9 * n_tokens * np.eye(n_features)
    return np.linalg.solve(gram, product).astype(np.float16).astype(np.float32)


def principal_axes(rows: Array, max_axes: int | None = None) -> np.ndarray:
    """Compute the principal axes of rows [n, width], sorted by variance from large to small.

    The mean of the rows is not subtracted. The computation runs on the device of the rows. The axes
    are exact if the width is at most ``EXACT_WIDTH``. For wider rows, at most n axes are computed,
    and they are approximated by subspace iteration from a fixed start.

    Returns:
        float32 [width, n_axes]. The axes are orthonormal. The entry of each axis with the largest
        magnitude is positive.
    """
    n, width = rows.shape
    max_axes = min(width, MAX_COMPONENTS if max_axes is None else max_axes)
    axes = (
        _exact_axes(rows, max_axes)
        if width <= EXACT_WIDTH
        else _leading_axes(rows, min(max_axes, n))
    )
    largest = np.take_along_axis(axes, np.abs(axes).argmax(0)[None], axis=0)
    return np.asarray(axes * np.where(largest < 0, -1.0, 1.0).astype(axes.dtype), dtype=np.float32)


def _exact_axes(rows: Array, n_axes: int) -> np.ndarray:
    xp = array_namespace(rows)
    dtype = xp.float64 if rows.shape[1] <= _PRECISE_WIDTH else xp.float32
    _, vectors = xp.linalg.eigh(xp.astype(rows.T @ rows, dtype))
    return on_host(vectors)[:, ::-1][:, :n_axes]


def _leading_axes(rows: Array, n_axes: int) -> np.ndarray:
    width = rows.shape[1]
    start = np.random.default_rng(0).standard_normal(
        (width, min(width, n_axes + _OVERSAMPLING)), dtype=np.float32
    )
    xp = array_namespace(rows)
    subspace = xp.linalg.qr(to_device_of(start, rows))[0]
    for _ in range(_POWER_ITERATIONS):
        subspace = xp.linalg.qr(rows.T @ (rows @ subspace))[0]
    projected = rows @ subspace
    _, vectors = xp.linalg.eigh(xp.astype(projected.T @ projected, xp.float64))
    ordered = np.ascontiguousarray(on_host(vectors)[:, ::-1][:, :n_axes], np.float32)
    return on_host(subspace @ to_device_of(ordered, rows))


def _metric_factor(metric: np.ndarray, to_device: ToDevice) -> Array:
    """Compute the Cholesky factor of a matrix that weighs quantisation errors.

    First, ``metric`` is divided by its mean diagonal entry. Then the result is regularised: it is
    multiplied by ``1 - _METRIC_RIDGE``, and ``_METRIC_RIDGE`` times the identity matrix is added.

    Returns:
        The factor, float64 [width, width], lower triangular. ``factor @ factor.T`` is the
        regularised metric.
    """
    # An eigendecomposition would also give a factor. But for a width of 16,384, it would take about
    # ten minutes and three times the memory of a Cholesky decomposition.
    even = (1 - _METRIC_RIDGE) / metric_scale(metric) * np.asarray(metric, np.float64)
    even += even.T
    even /= 2
    even.flat[:: len(even) + 1] += _METRIC_RIDGE
    moved = to_device(even)
    return array_namespace(moved).linalg.cholesky(moved)


def logit_metric(
    hidden: np.ndarray, head: np.ndarray, to_device: ToDevice, batch_tokens: int = 256
) -> np.ndarray:
    """Compute how errors of the last hidden state change the target's next-token distribution.

    The result is a matrix, the metric. If a hidden state has a small error ``e``, the distribution
    changes on average by a Kullback-Leibler divergence of ``e @ metric @ e / 2`` nats (to second
    order). The metric is the mean of ``head.T @ (diag(p) - outer(p, p)) @ head`` over all tokens.
    ``p`` is the next-token distribution after the token.

    Args:
        hidden: Inputs of the LM head (after the final norm), float32 [n_tokens, width].
        head: Weight of the LM head, float32 [vocab_size, width].
        to_device: Moves an array to the device that computes large matrix products.
        batch_tokens: Number of tokens per batch. The logits of one batch are in memory at once.

    Returns:
        The metric, float64 [width, width].
    """
    moved = to_device(head)
    xp = array_namespace(moved)
    mean_probability = np.zeros(len(head))
    outer = np.zeros((head.shape[1], head.shape[1]))
    for start in range(0, len(hidden), batch_tokens):
        logits = to_device(hidden[start : start + batch_tokens]) @ moved.T
        logits -= xp.max(logits, axis=1, keepdims=True)
        probability = xp.exp(logits)
        probability /= xp.sum(probability, axis=1, keepdims=True)
        mean_probability += on_host(xp.sum(probability, axis=0, dtype=xp.float64))
        expected = probability @ moved
        outer += on_host(expected.T @ expected)
    share = to_device((mean_probability / len(hidden)).astype(np.float32))
    weighted = np.zeros_like(outer)
    for start in range(0, len(head), _VOCABULARY_BLOCK):
        block = slice(start, start + _VOCABULARY_BLOCK)
        weighted += on_host((moved[block] * share[block, None]).T @ moved[block])
    return np.asarray(weighted - outer / len(hidden), dtype=np.float64)
