"""Fits a transform codec to a sample: chooses the components to store and their quantisers.

A *group* consists of consecutive layers. A *part* is the keys of a group or the values of a group.
A hidden state is one group with one part. Each part has a basis of principal axes. For each token,
a part is a vector. A *component* is the coordinate of this vector along one axis. The *error* of a
component is its mean squared quantisation error.

*Quantiser.* A component x is stored as the integer ``q = sign(x) * floor(|x| / step + rounding)``,
its code. The number of levels is the number of different codes that are possible. It limits the
magnitude of codes. A rounding below 0.5 widens the interval of values with code zero. If most codes
are zero, a wider interval saves many bits and adds little error. The decoded value is ``sign(q) *
(|q| - shift) * step``. There is one shift for ``|q| = 1``, and another shift for all larger codes.
Both shifts are fitted to the sample.

*Allocation.* A quantiser consists of a step, a rounding and a number of levels. For each component,
several quantisers are options. Their bits and errors are measured on the sample. :func:`allocate`
chooses for each component the option with the smallest ``error + multiplier * bits``. It finds the
multiplier by bisection, so that the total of the bits meets a budget. No other allocation with the
same total of bits has a smaller total error.

*Budget.* The caller gives a budget of stored bits, but the measured bits are only estimates of the
stored bits. So the codes of the sample are packed and compressed as in a store (``storage.chunk``).
Then the budget of the estimated bits is scaled, and the options are chosen again, until the stored
bits meet the caller's budget.

*Sample.* The sequences of the sample are split into two sets. The basis is learned from the first
set. Bits and errors are measured on the second set. So the measured bits and errors are also valid
for sequences from which the basis was not learned.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..chunk import encode_chunk
from . import coding
from .calibration import (
    Kept,
    Sample,
    ToDevice,
    layer_scale,
    learn_basis,
    learn_regression,
    metric_scale,
    on_host,
)
from .field import Learning

LEVELS = (*coding.CODES_PER_BYTE, coding.WIDE_LEVELS)
ROUNDINGS = (0.5, 0.4, 0.3)
STEP_RATIOS = 2.0 ** (np.arange(-5, 6) / 3)
"""The quantisation steps to try are the base step (see ``measure_options``) times these factors.

The factors are from ``2**(-5/3)`` to ``2**(5/3)``.
"""

# A component with this number of levels is not stored, and is decoded as zero.
DROPPED = 1

_HUFFMAN_REDUNDANCY_BITS = 0.03
# The number of levels is limited, so a fine step cannot cover large components. This is the largest
# magnitude, in base steps, that even the finest step covers. If a component has a larger magnitude
# in the sample, its base step is increased. Other sequences may have larger values than the sample,
# so the factor of 0.8 leaves room for them.
_WIDEST_SPAN = 0.8 * (coding.WIDE_LEVELS // 2) * STEP_RATIOS[0]
# Cost of an additional stored array, in bits per inner chunk of this array. The Huffman table, the
# headers, the checksum and the index entry of a chunk take about 120 bytes. The time to read one
# more chunk is counted as another 80 bytes.
_ARRAY_PENALTY_BITS = 8 * 200
_MAX_SEGMENTS = 64

CHUNK_TOKENS = 512
"""Assumed number of tokens per inner chunk, to estimate the stored bytes of codes.

Arrays of about 50 bytes per token have this chunk size.
"""

_STATISTICS_EVERY = 4
_FIT_ROUNDS = 5
_INDEX_ENTRY_BYTES = 16
_RATE_TOLERANCE = 0.002
# Quantisers are measured for a component only if its variance, times its weight, is at least this
# fraction of the water level (``water_level``). Below this limit, the best allocation of bits gives
# the component zero bits, whatever the shape of its distribution is.
_HOPELESS = 0.1
_PREDICTION_RIDGE = 1e-4
_SPLIT_ROUNDS = 60


class Quantisers(NamedTuple):
    """Quantisers of principal components, with their bits and errors.

    All arrays have the same shape. It is [n_components] if there is one quantiser per component,
    and [n_components, n_options] if there are several to choose from.
    """

    # int32. Number of different codes (levels), or ``DROPPED`` if the component is not stored.
    levels: np.ndarray
    # float32. Distance between neighbouring quantised values, in the units of the component.
    step: np.ndarray
    # float32. A value x gets the code with the sign of x and the magnitude ``floor(|x| / step +
    # rounding)``. With a rounding of 0.5, values are rounded to the nearest level.
    rounding: np.ndarray
    # float32. Codes 1 and -1 are decoded to the magnitude ``(1 - shift_one) * step``. The decoded
    # magnitude is the average magnitude of the values with these codes.
    shift_one: np.ndarray
    # float32. A code q of magnitude 2 or more is decoded to the magnitude ``(|q| - shift_more) *
    # step``. ``shift_more`` is the average of ``|q| - |x| / step`` over all values x with such
    # codes.
    shift_more: np.ndarray
    # float64. Bits per token after packing and Huffman coding.
    bits: np.ndarray
    # float64. Mean squared error times the weight of the component.
    error: np.ndarray

    def chosen(self, index: np.ndarray) -> "Quantisers":
        """Take option ``index[c]`` for each component c.

        The shape of the arrays changes from [n_components, n_options] to [n_components].
        """
        columns = [np.take_along_axis(array, index[:, None], axis=1)[:, 0] for array in self]
        return Quantisers(*columns)


def water_level(variances: np.ndarray, bits: float) -> float:
    """Compute the error of the stored components if they share ``bits`` optimally.

    This error is the same for all stored components, and is called the water level. Reverse
    water-filling is the optimal way to divide bits among independent Gaussian variables. Variables
    with a variance above the water level get so many bits that their error equals the water level.
    All other variables get no bits. ``variances`` are the variances of the components,
    [n_components].
    """
    ordered = np.sort(variances[variances > 0])[::-1]
    if not len(ordered):
        return 1.0
    levels = np.exp2((np.cumsum(np.log2(ordered)) - 2 * bits) / np.arange(1, len(ordered) + 1))
    last_coded = int(np.flatnonzero(levels <= ordered)[-1])
    return float(levels[last_coded])


def measure_options(sample: np.ndarray, weights: np.ndarray, base_step: float) -> Quantisers:
    """Measure the bits and the error of several quantisers (options) for each component.

    The options have steps from ``2**(-5/3)`` to ``2**(5/3)`` times the component's base step.

    Args:
        sample: Components of the sample's tokens, float32 [n_tokens, n_components]. They were
            computed after the subtraction of the mean.
        weights: Factor for the squared error of each component, [n_components].
        base_step: Base step of a component with weight 1. The base step of any other component is
            ``base_step / sqrt(weight)``.
    """
    scales = np.sqrt(weights)
    components: list[Quantisers] = []
    for i, scale in enumerate(scales):
        components.append(_measure_component(np.abs(sample[:, i]) * scale, base_step))
    options = Quantisers(*map(np.stack, zip(*components, strict=True)))
    return options._replace(
        levels=options.levels.astype(np.int32),
        step=(options.step / scales[:, None]).astype(np.float32),
        rounding=options.rounding.astype(np.float32),
        shift_one=options.shift_one.astype(np.float32),
        shift_more=options.shift_more.astype(np.float32),
    )


def _measure_component(magnitude: np.ndarray, base_step: float) -> Quantisers:
    """Measure the bits and the error of several quantisers (options) for one component.

    The first option is not to store the component.

    Args:
        magnitude: Magnitudes of the component in the sample, times the square root of its weight,
            [n_tokens].
        base_step: The steps to try are multiples of this number.

    Returns:
        The options. All arrays are float64 [n_options].
    """
    n = len(magnitude)
    # Each option needs the sum of all magnitudes in many intervals. Sort the magnitudes and compute
    # cumulative sums, so that the sum over an interval takes only two lookups.
    ordered = np.sort(magnitude).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    squares = np.concatenate([[0.0], np.cumsum(ordered**2)])
    # If the largest magnitude is far above the base step, even WIDE_LEVELS may be too few levels.
    # Increase the base step so far that the levels cover all values even with the finest step.
    base_step = max(base_step, ordered[-1] / _WIDEST_SPAN)
    steps = np.repeat(STEP_RATIOS * base_step, len(ROUNDINGS))
    roundings = np.tile(np.array(ROUNDINGS), len(STEP_RATIOS))
    zeros = np.zeros(len(steps))
    dropped = np.array([DROPPED, 1.0, 0.5, 0.0, 0.0, 0.0, squares[-1] / n])
    options = [Quantisers(*np.split(dropped, len(dropped)))]
    max_code = min(int(ordered[-1] / steps.min() + 0.5), (coding.WIDE_LEVELS - 1) // 2)
    edges = (np.arange(1, max_code + 1) - roundings[:, None]) * steps[:, None]
    # ``first_index[option, code - 1]`` is the index in ``ordered`` of the smallest magnitude that
    # this option quantises to ``code``.
    first_index = np.searchsorted(ordered, edges)
    start = np.concatenate(
        [np.zeros((len(steps), 1), np.int64), first_index, np.full((len(steps), 1), n)], axis=1
    )
    fewer_levels_top = 0
    for levels in LEVELS:
        top = (levels - 1) // 2
        if max_code <= fewer_levels_top:
            # The next smaller number of levels already covers all codes. More levels would only
            # cost more bits. So exclude the options with this number of levels: set their bits and
            # errors to infinity.
            never = zeros + np.inf
            options.append(Quantisers(zeros + levels, steps, roundings, zeros, zeros, never, never))
            continue
        fewer_levels_top = top
        cut = np.concatenate([start[:, : min(top, max_code) + 1], start[:, -1:]], axis=1)
        counts = np.diff(np.arange(n + 1.0)[cut], axis=1)
        s1 = np.diff(sums[cut], axis=1)
        s2 = np.diff(squares[cut], axis=1)
        measured = _bits_and_error(counts, s1, s2, steps, levels)
        options.append(Quantisers(zeros + levels, steps, roundings, *measured))
    return _concatenated(options)


def _concatenated(quantisers: Iterable[Quantisers]) -> Quantisers:
    """Concatenate the arrays of several :class:`Quantisers` along axis 0."""
    return Quantisers(*map(np.concatenate, zip(*quantisers, strict=True)))


def _bits_and_error(
    counts: np.ndarray, sums: np.ndarray, squares: np.ndarray, steps: np.ndarray, levels: int
) -> list[np.ndarray]:
    """Compute bits, error and shifts of quantisers (options) with the same number of levels.

    Args:
        counts: Number of magnitudes with each code, [n_options, n_codes].
        sums: Sum of the magnitudes with each code, [n_options, n_codes].
        squares: Sum of the squares of the magnitudes with each code, [n_options, n_codes].
        steps: Step of each option, [n_options].
        levels: Number of levels.

    Returns:
        Four arrays [n_options], named as in :class:`Quantisers`: shift_one, shift_more, bits and
        error.
    """
    n = counts[0].sum()
    magnitude = np.arange(counts.shape[1])
    scaled = sums / steps[:, None]
    gap = counts * magnitude - scaled
    shift_one = gap[:, 1] / np.maximum(counts[:, 1], 1)
    shift_more = gap[:, 2:].sum(1) / np.maximum(counts[:, 2:].sum(1), 1)
    shifts = np.where(magnitude == 1, shift_one[:, None], shift_more[:, None]) * (magnitude > 0)
    decoded = magnitude - shifts
    error = (
        (squares / steps[:, None] ** 2 - 2 * decoded * scaled + counts * decoded**2).sum(1)
        * steps**2
        / n
    )
    probability = counts / n
    entropy = (
        -(probability * np.log2(np.where(counts > 0, probability, 1.0))).sum(1)
        + 1
        - probability[:, 0]
    )
    bits = entropy + _packing_loss(probability[:, 0], levels)
    return [shift_one, shift_more, bits, np.maximum(error, 0.0)]


def _packing_loss(zero: np.ndarray, levels: int) -> np.ndarray:
    """Estimate how many bits a code takes beyond its entropy, after packing and Huffman coding.

    ``zero`` is the share of codes that are zero, for each quantiser.
    """
    if levels == coding.WIDE_LEVELS:
        return np.full(zero.shape, np.log2(256 / coding.LOW_LEVELS) + 0.2)
    per_byte = coding.CODES_PER_BYTE[levels]
    most_likely = zero**per_byte
    inner = np.clip(most_likely, 1e-12, 1 - 1e-12)
    binary_entropy = -inner * np.log2(inner) - (1 - inner) * np.log2(1 - inner)
    # The most likely byte consists of zeros only. If the probability of this byte is above one
    # half, its Huffman code has one bit, although the byte contains less than one bit of
    # information. The Huffman codes of all other bytes start with the other value of this bit. So
    # for every byte, this bit is stored, but carries only ``binary_entropy`` bits of information.
    loss = np.where(most_likely > 0.5, 1 - binary_entropy, 0.0) + _HUFFMAN_REDUNDANCY_BITS
    return np.asarray(loss / per_byte)


def allocate(options: Quantisers, budget_bits: float) -> np.ndarray:
    """Choose one quantiser per component, with the smallest total error within a budget of bits.

    Args:
        options: Quantisers to choose from, [n_components, n_options].
        budget_bits: Upper bound on the total bits per token.

    Returns:
        Index of the option that is chosen for each component, int64 [n_components].
    """
    # The multiplier is the price of a bit in units of error. A larger multiplier never leads to
    # more bits. So find the smallest multiplier that keeps the bits within the budget, by bisection
    # on a logarithmic scale.
    low = 1e-30
    high = 1e30
    chosen = np.argmin(np.where(options.bits > 0, np.inf, options.error), axis=1)
    for _ in range(120):
        multiplier = np.sqrt(low * high)
        trial = np.argmin(options.error + multiplier * options.bits, axis=1)
        if np.take_along_axis(options.bits, trial[:, None], axis=1).sum() > budget_bits:
            low = multiplier
        else:
            high = multiplier
            chosen = trial
    return np.asarray(chosen)


def split_by_statistics(counts: np.ndarray, chunk_tokens: int) -> list[int]:
    """Split the packed bytes of a token into runs. Each run gets a separate Huffman code.

    With more runs, each Huffman code fits its bytes better, but each run costs additional bits for
    its array. The returned split has the smallest estimated total of bits.

    Args:
        counts: [n_bytes, 256]. Entry (i, v) is the share of tokens in which byte i has value v.
            Neighbouring bytes should have similar statistics.
        chunk_tokens: Number of tokens per inner chunk.

    Returns:
        The end (exclusive) of each run, as an index of a byte.
    """
    # Dynamic programming: ``best[i]`` is the smallest cost of all bytes before ``ends[i]``.
    n_bytes = len(counts)
    ends = np.unique(np.linspace(0, n_bytes, min(n_bytes, _MAX_SEGMENTS) + 1).astype(int))
    total = np.concatenate([np.zeros((1, 256)), np.cumsum(counts, axis=0)])[ends]
    best = np.zeros(len(ends))
    previous = np.zeros(len(ends), np.int64)
    for end in range(1, len(ends)):
        costs = (
            best[:end] + _code_bits(total[end] - total[:end]) + _ARRAY_PENALTY_BITS / chunk_tokens
        )
        previous[end] = int(np.argmin(costs))
        best[end] = costs[previous[end]]
    cuts = []
    index = len(ends) - 1
    while index > 0:
        cuts.append(int(ends[index]))
        index = int(previous[index])
    return cuts[::-1]


def _code_bits(counts: np.ndarray) -> np.ndarray:
    """Estimate how many bits the bytes of each histogram take after Huffman coding.

    Args:
        counts: Histograms of byte values, [n, 256]. The bytes of each histogram are encoded with a
            separate Huffman code.

    Returns:
        Estimated bits of each histogram, [n].
    """
    totals = np.maximum(counts.sum(1), 1e-12)
    probability = counts / totals[:, None]
    entropy = -(probability * np.log2(np.where(counts > 0, probability, 1.0))).sum(1)
    top = np.clip(probability.max(1), 1e-12, 1 - 1e-12)
    loss = np.where(top > 0.5, 1 + top * np.log2(top) + (1 - top) * np.log2(1 - top), 0.0)
    return np.asarray(totals * np.minimum(entropy + loss + _HUFFMAN_REDUNDANCY_BITS, 8.0))


class _FittedPart(NamedTuple):
    """The basis of the keys or the values of a layer group, or of a hidden state.

    The basis was learned from most sequences of the sample. Quantisers are later measured on the
    other sequences.
    """

    # float32 [n_features, width], or None if the values are not predicted.
    regression: np.ndarray | None
    basis: coding.Basis
    # Location of an array [n_tokens, n_components] in the file of the sample. Quantisers are
    # measured on this array. It contains the components of the sequences that were not used to
    # learn the basis.
    components: Kept
    # Variance of each component, [n_components].
    variances: np.ndarray
    # Factor by which the squared errors of all components are multiplied.
    weight: float


class _MeasuredGroup(NamedTuple):
    """The quantisers that were measured for the components of a layer group.

    Quantisers are measured only for components whose variance is so large that they may get bits.
    These are called the measured components. The measured components of the keys come first, then
    the measured components of the values.
    """

    # [n_measured]. Entry i is 0 if measured component i belongs to the keys or to a hidden state,
    # and 1 if it belongs to the values.
    part: np.ndarray
    # [n_measured]. Entry i is the index of measured component i among all components of the keys,
    # of the values, or of the hidden state.
    component: np.ndarray
    # Location of an array [n_tokens, n_measured] in the file of the sample. The array contains the
    # measured components.
    components: Kept
    options: Quantisers  # The measured quantisers, [n_measured, n_options].


def fit_groups(
    sample: Sample,
    n_layers: Sequence[int],
    n_parts: int,
    bits_per_token: float,
    metrics: Sequence[Sequence[np.ndarray]] | None,
    features: Sequence[np.ndarray] | None,
    learning: Learning,
) -> list[coding.GroupFit]:
    """Fit all groups of a field together, with the smallest error within a budget of bits.

    The squared error of a layer's keys is divided by the sum of squares of these keys. The error of
    a layer's values is divided by the sum of squares of these values. If ``metrics`` are given,
    errors are weighed with these matrices instead. At any time, only the keys or the values of one
    group, or the components of one group, are in memory.

    Args:
        sample: The sample of the field.
        n_layers: Number of layers of each group.
        n_parts: Number of parts of each group: 2 for keys and values, 1 for a hidden state.
        bits_per_token: Budget of stored bits per token for all groups together.
        metrics: In part p of group g, ``learn_basis`` weighs errors with the matrix
            ``metrics[g][p]``. If the argument is None, errors are relative, as described above.
        features: For each sequence, float32 [n_tokens, n_features]. The keys, values or hidden
            states are predicted from these features. If the argument is None, they are not
            predicted.
        learning: Settings of learning.

    Returns:
        One fit per group. The bases of a fit contain only the components that are stored.
    """
    n_bases = len(n_layers) * n_parts
    n_steps = n_bases + _FIT_ROUNDS + 1
    fitted: list[list[_FittedPart]] = []
    for group in range(len(n_layers)):
        fitted.append([])
        for part in range(n_parts):
            n_done = sum(map(len, fitted))
            learning.progress(n_done, n_steps, f"basis {n_done + 1}/{n_bases}")
            metric = None if metrics is None else metrics[group][part]
            fitted[-1].append(
                _fit_part(sample, group, part, n_layers[group], metric, features, learning)
            )
    learning.progress(n_bases, n_steps, "errors at each number of bits")
    groups = _measure_groups(sample, fitted, bits_per_token)
    options = _concatenated(group.options for group in groups)
    ends = np.cumsum([len(group.component) for group in groups])[:-1]
    # The estimated bits differ from the stored bits by a few percent, so the budget of the
    # estimated bits is scaled until the stored bits meet ``bits_per_token``.
    budget = bits_per_token
    for fit_round in range(_FIT_ROUNDS):
        learning.progress(n_bases + 1 + fit_round, n_steps, f"stored size, round {fit_round + 1}")
        columns_of_groups: list[coding.CodeColumns] = []
        stored = 0.0
        for measured, index in zip(groups, np.split(allocate(options, budget), ends), strict=True):
            columns, bits = _order_codes(
                sample.read(measured.components),
                measured.options.chosen(index),
                measured.part,
                measured.component,
            )
            columns_of_groups.append(columns)
            stored += bits
        if abs(stored / bits_per_token - 1) < _RATE_TOLERANCE:
            break
        budget *= bits_per_token / stored
    return [
        _compact(parts, columns) for parts, columns in zip(fitted, columns_of_groups, strict=True)
    ]


def _fit_part(
    sample: Sample,
    group: int,
    part: int,
    n_layers: int,
    metric: np.ndarray | None,
    features: Sequence[np.ndarray] | None,
    learning: Learning,
) -> _FittedPart:
    """Learn the basis of the keys or values of a group, or of a hidden state.

    The basis is learned from most sequences of the sample. The components of the other sequences
    are written to the file of the sample. Quantisers are later measured on these components.
    """
    n = len(sample.lengths)
    others = range(0, n, _STATISTICS_EVERY)
    learned_from = sorted(set(range(n)).difference(others)) or list(range(n))
    move = learning.to_device
    regression = None
    rows = sample.rows(group, part, learned_from)
    scale = layer_scale(rows, n_layers)
    if features is not None:
        regression = learn_regression([features[i] for i in learned_from], rows, move)
        for i, values in zip(learned_from, rows.sequences, strict=True):
            values -= features[i] @ regression
    basis = learn_basis(rows, metric, scale, move)
    del rows  # Free this memory before the other sequences are read.
    rows = sample.rows(group, part, others)
    if metric is None:
        # Errors are measured relative to the energy of a layer. The energy is the sum of squares of
        # a token's values, averaged over the tokens. All layers have the same energy, because the
        # basis was learned from values divided by the scale of their layer. So the energy of a
        # layer is the energy of all layers divided by the number of layers.
        square_sum = 0.0
        for values in rows.sequences:
            square_sum += np.square(values, dtype=np.float64).sum()
        weight = n_layers / max(float(square_sum / len(rows.values)), 1e-30)
    else:
        # ``learn_basis`` has divided the metric (the matrix that weighs errors) by the number
        # ``metric_scale(metric)``. So multiply the errors of components by this number.
        weight = metric_scale(metric)
    for i, values in zip(others, rows.sequences, strict=True):
        if features is not None and regression is not None:
            values -= features[i] @ regression
        values -= basis.mean[coding.mean_rows(0, len(values))]
    components = on_host(move(rows.values) @ move(np.ascontiguousarray(basis.analysis)))
    variances = (components.astype(np.float64) ** 2).mean(0)
    return _FittedPart(regression, basis, sample.keep(components), variances, weight)


def _measure_groups(
    sample: Sample, fitted: Sequence[Sequence[_FittedPart]], bits_per_token: float
) -> list[_MeasuredGroup]:
    """In each group, measure quantisers for the components that may get bits.

    A component may get bits if the product of its variance and its weight is above a tenth of the
    water level (``water_level``). The component with the largest product of a group is measured in
    any case.
    """
    variances: list[np.ndarray] = []
    for parts in fitted:
        variances.append(np.concatenate([part.variances * part.weight for part in parts]))
    level = water_level(np.concatenate(variances), bits_per_token)
    base_step = float(np.sqrt(12 * level))
    groups: list[_MeasuredGroup] = []
    for parts, group_variances in zip(fitted, variances, strict=True):
        is_hopeful = group_variances > _HOPELESS * level
        is_hopeful[np.argmax(group_variances)] = True
        ends = np.cumsum([len(part.variances) for part in parts])
        by_part = [np.flatnonzero(flags) for flags in np.split(is_hopeful, ends[:-1])]
        n_hopeful = [len(ids) for ids in by_part]
        values = [
            sample.read(part.components)[:, ids] for part, ids in zip(parts, by_part, strict=True)
        ]
        components = sample.keep(np.concatenate(values, axis=1))
        del values  # Free the memory of the components here. They are read again later.
        weights = np.repeat([part.weight for part in parts], n_hopeful)
        options = measure_options(sample.read(components), weights, base_step)
        part_of = np.repeat(np.arange(len(parts)), n_hopeful)
        groups.append(_MeasuredGroup(part_of, np.concatenate(by_part), components, options))
    return groups


def _order_codes(
    sample: np.ndarray, quantisers: Quantisers, part: np.ndarray, component: np.ndarray
) -> tuple[coding.CodeColumns, float]:
    """Order the digits of a group, and split them into runs of digits with similar statistics.

    A digit is the code of a component, or one of the two digits of a code that does not fit into a
    byte.

    Args:
        sample: Components of the sample's tokens, float32 [n_tokens, n_components].
        quantisers: The chosen quantiser of each component, [n_components].
        part: 0 for components of the keys or of a hidden state, and 1 for components of the values,
            [n_components].
        component: Index of each component among all components of its part, [n_components].

    Returns:
        The columns of digits, and the bits per token that they take in a store.
    """
    # Every group must store at least one component. Decoding runs on the device of the group's
    # codes, so there must be codes.
    if (quantisers.levels == DROPPED).all():
        quantisers = quantisers._replace(
            levels=np.where(np.arange(len(component)) == 0, 3, DROPPED)
        )
    # The largest code of each component. Codes are symmetric around zero, so the smallest code is
    # its negative.
    limits = (quantisers.levels - 1) // 2
    codes = coding.quantise(sample / quantisers.step, quantisers.rounding, limits).astype(np.int32)
    low, high = coding.split_wide(codes)
    is_wide = quantisers.levels == coding.WIDE_LEVELS
    # Each stored component has a low digit. If its code is wide (it has too many levels for a
    # byte), the component also has a high digit.
    stored = np.flatnonzero(quantisers.levels != DROPPED)
    wide = np.flatnonzero(is_wide)
    ids = np.concatenate([wide, stored])
    is_high = np.repeat([True, False], [len(wide), len(stored)])
    levels_of = np.where(is_wide, coding.LOW_LEVELS, quantisers.levels)[ids]
    levels_of[is_high] = coding.HIGH_LEVELS
    # Neighbouring columns of digits share a Huffman code, so they should have similar statistics.
    # Sort the digits by their number of levels, then by falling share of zeros. Among digits with
    # the same number of levels, high digits come first, because they are nearly always zero.
    falling_zeros = np.where(is_high, 0, -(codes == 0).mean(0)[ids])
    order = np.lexsort((falling_zeros, ~is_high, levels_of))
    ids = ids[order]
    is_high = is_high[order]
    levels_of = levels_of[order]
    digits = np.where(is_high, high[:, ids], low[:, ids])
    arrays: list[int] = []
    bits = 0.0
    n_arrays = 0
    for levels in np.unique(levels_of).tolist():
        packed = coding.pack(digits[:, levels_of == levels], levels)
        histograms = [np.bincount(column, minlength=256) for column in packed.T]
        counts = np.stack(histograms) / len(packed)
        per_byte = coding.CODES_PER_BYTE[levels]
        n_left = int((levels_of == levels).sum())
        # Bytes with different statistics need different Huffman codes. So split the bytes into
        # runs, which are ranges of neighbouring bytes with similar statistics.
        ends = split_by_statistics(counts, CHUNK_TOKENS)
        for run in np.split(packed, ends[:-1], axis=1):
            n_digits = min(run.shape[1] * per_byte, n_left)
            arrays += [n_arrays] * n_digits
            bits += _stored_bits(run)
            n_arrays += 1
            n_left -= n_digits
    columns = coding.CodeColumns(
        part=part[ids],
        component=component[ids],
        array=np.array(arrays),
        levels=levels_of,
        step=quantisers.step[ids],
        is_high=is_high,
        rounding=quantisers.rounding[ids],
        shift_one=np.where(is_wide, 0, quantisers.shift_one)[ids],
        shift_more=np.where(is_wide, 0, quantisers.shift_more)[ids],
    )
    # Convert the columns to the dtypes that they have after a store is loaded.
    return coding.CodeColumns.from_table(columns.table()), bits


def _stored_bits(rows: np.ndarray) -> float:
    """Measure the stored bits per token of packed codes, uint8 [n_tokens, n_bytes].

    The codes are compressed in chunks, as in a store. The entries of the chunks in the index of a
    shard are included.
    """
    n_bytes = 0
    for start in range(0, len(rows), CHUNK_TOKENS):
        chunk = rows[start : start + CHUNK_TOKENS]
        n_bytes += len(encode_chunk(chunk)) + _INDEX_ENTRY_BYTES
    return 8.0 * n_bytes / len(rows)


def _compact(parts: Sequence[_FittedPart], columns: coding.CodeColumns) -> coding.GroupFit:
    component = columns.component.copy()
    compacted: list[coding.Basis] = []
    regressions: list[np.ndarray] = []
    for part, fitted in enumerate(parts):
        is_of_part = columns.part == part
        used, renumbered = np.unique(columns.component[is_of_part], return_inverse=True)
        component[is_of_part] = renumbered
        basis = fitted.basis
        compacted.append(
            replace(basis, synthesis=basis.synthesis[used], analysis=basis.analysis[:, used])
        )
        if fitted.regression is not None:
            regressions.append(fitted.regression)
    return coding.GroupFit(
        tuple(compacted), columns._replace(component=component), tuple(regressions)
    )


# The functions below split a budget of bits among the hidden states of a store. With the codec
# option ``joint`` (as in the codec name ``transform:1.0,joint``), each hidden state is predicted
# from the next lower hidden state of the store. Only the residual, the difference to the
# prediction, is quantised. The residual is small, because a decoder layer changes its input little.
# So the lowest state takes most of the bits.
#
# The bits are split so that all components of all states have the same mean squared error ``d``.
# Variances and errors are divided by the energy (the sum of squares) of their state.
#
# - Lowest state: a Gaussian component with variance ``v`` takes ``0.5 * log2(v / d)`` bits, and
#   zero bits if ``v`` is below ``d``.
# - Other states: if the prediction used the exact state below, a component of the residual would
#   have a variance ``v``. The state below has the error ``d``, which adds to the residual. So the
#   component takes ``0.5 * log2((v + d) / d)`` bits.


def left_variances(values: np.ndarray, known: np.ndarray | None, to_device: ToDevice) -> np.ndarray:
    """Compute the variances of a hidden state after a linear prediction is subtracted from it.

    Args:
        values: The hidden state, float32 [n_tokens, width].
        known: The hidden state is predicted from these values, float32 [n_tokens, n]. If the
            argument is None, the hidden state is not predicted.
        to_device: Moves an array to the device that computes large matrix products.

    Returns:
        Variances of the residual (the difference to the prediction) along its principal axes,
        divided by the energy (the sum of squares) of the hidden state: float64 [width].
    """
    centred = to_device(values - values.mean(0))
    left = on_host(centred.T @ centred).astype(np.float64)
    energy = float(np.square(values, dtype=np.float64).sum())
    if known is not None:
        other = to_device(known - known.mean(0))
        gram = on_host(other.T @ other).astype(np.float64)
        cross = on_host(other.T @ centred).astype(np.float64)
        ridge = _PREDICTION_RIDGE * np.trace(gram) / len(gram)
        gram += ridge * np.eye(len(gram)) + np.finfo(np.float64).tiny * np.eye(len(gram))
        left -= cross.T @ np.linalg.solve(gram, cross)
    return np.asarray(np.maximum(np.linalg.eigvalsh(left), 0) / max(energy, 1e-30))


def split_bits(variances: Sequence[np.ndarray], bits_per_token: float) -> list[float]:
    """Split the bits of a token among the hidden states of a store.

    Each state is predicted from the state below it. With the returned split, all states have the
    same error relative to their energy.

    Args:
        variances: :func:`left_variances` of each state, the lowest state first.
        bits_per_token: Bits per token of all states together.

    Returns:
        The bits per token of each state.
    """

    def spent(error: float) -> list[float]:
        bits = [float(np.log2(np.maximum(variances[0] / error, 1)).sum() / 2)]
        for variance in variances[1:]:
            bits.append(float(np.log2(1 + variance / error).sum() / 2))
        return bits

    low = 1e-12
    high = max(float(variance.max(initial=0)) for variance in variances) + 1e-9
    for _ in range(_SPLIT_ROUNDS):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if sum(spent(middle)) > bits_per_token else (low, middle)
    state_bits = np.maximum(spent(high), 1e-9)
    scaled: list[float] = (state_bits / state_bits.sum() * bits_per_token).tolist()
    return scaled
