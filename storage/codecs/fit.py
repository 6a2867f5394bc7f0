"""Fits a transform codec to a sample: stored components, their quantisers, and the layout of codes.

*Allocation.* Every component has a list of options (step, rounding, number of levels), each with
its bits and squared error on a sample. :func:`allocate` chooses one option per component, which
minimises error + multiplier * bits. It finds the multiplier by bisection. The result is the optimum
of all allocations that spend as many bits. The budget counts stored bytes, not entropy: the codes
of the sample are packed and go through the byte chain, and the budget of the estimated bits is
corrected until the stored bytes meet the given budget.

*Quantiser.* ``q = sign(x) * floor(|x| / step + rounding)``, clipped to the levels. A rounding below
0.5 widens the interval of zero. If most codes are zero, this saves many bits and adds little error.
The decoded value is ``sign(q) * (|q| - shift) * step``. One shift applies to ``|q| = 1``, and
another one to all larger codes. Both are fitted to the sample.

*Sample.* The sequences of the sample are split into two sets. The basis is learned from one set.
The cost of its components is measured on the other set, so that it is valid for unseen sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..chunk import encode_chunk
from . import coding
from .calibration import (
    Kept,
    Place,
    Sample,
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
"""Steps to try, relative to the step of high-rate theory, in ratios of 2^(1/3)."""

DROPPED = 1  # Number of levels of a component that is not stored.

_HUFFMAN_REDUNDANCY_BITS = 0.03
# Range of magnitudes, in units of the base step, that the finest step can represent. It leaves room
# for values beyond those of the sample.
_WIDEST_SPAN = 0.8 * (coding.WIDE_LEVELS // 2) * STEP_RATIOS[0]
# Cost of one more stored array, in bits per inner chunk. The Huffman table, headers, checksum and
# index entry take about 120 bytes. The other 80 bytes stand for the time to read one more chunk.
_ARRAY_PENALTY_BITS = 8 * 200
_MAX_SEGMENTS = 64

CHUNK_TOKENS = 512
"""Assumed number of tokens of an inner chunk when codes are split into arrays.

Arrays of about 50 bytes per token have this chunk size.
"""

_STATISTICS_EVERY = 4
_FIT_ROUNDS = 5
_INDEX_ENTRY_BYTES = 16
_RATE_TOLERANCE = 0.002
# Components with a variance below this share of the water level get zero bits, whatever the shape
# of their distribution.
_HOPELESS = 0.1
_PREDICTION_RIDGE = 1e-4
_SPLIT_ROUNDS = 60


@dataclass(frozen=True)
class Quantisers:
    """Quantisers of components, or the options for them, with their costs.

    All arrays have the same shape.
    """

    levels: np.ndarray  # int32; ``DROPPED`` if the component is not stored.
    step: np.ndarray  # float32, width of a level in the component's units.
    rounding: np.ndarray  # float32; 0.5 rounds to the nearest level.
    # float32, average distance of values with code 1 or -1 from the level towards zero, in steps.
    shift_one: np.ndarray
    shift_more: np.ndarray  # float32, the same distance for all larger codes.
    bits: np.ndarray  # float64, bits per token after packing and Huffman coding.
    error: np.ndarray  # float64, mean square error times the component's weight.

    def chosen(self, index: np.ndarray) -> "Quantisers":
        """Take option ``index[c]`` of each component ``c``.

        The shape changes from [n_components, n_options] to [n_components].
        """
        return Quantisers(
            *(
                np.take_along_axis(array, index[:, None], axis=1)[:, 0]
                for array in vars(self).values()
            )
        )


def water_level(variances: np.ndarray, bits: float) -> float:
    """Compute the error per component at which Gaussian components take ``bits`` in total.

    This is reverse water-filling.
    """
    ordered = np.sort(variances[variances > 0])[::-1]
    if not len(ordered):
        return 1.0
    levels = np.exp2((np.cumsum(np.log2(ordered)) - 2 * bits) / np.arange(1, len(ordered) + 1))
    last_coded = int(np.flatnonzero(levels <= ordered)[-1])
    return float(levels[last_coded])


def measure_options(sample: np.ndarray, weights: np.ndarray, base_step: float) -> Quantisers:
    """Measure bits and error of every option of every component: arrays [n_components, n_options].

    Args:
        sample: float32 [n_tokens, n_components], components with their means subtracted.
        weights: [n_components], weights of the components' errors.
        base_step: Step of a component with weight 1. Others use ``base_step / sqrt(weight)``.
    """
    scales = np.sqrt(weights)
    columns = [
        _measure_component(np.abs(sample[:, i]) * scale, base_step)
        for i, scale in enumerate(scales)
    ]
    levels, step, rounding, bits, error, shift_one, shift_more = (
        np.stack(parts) for parts in zip(*columns, strict=True)
    )
    step, rounding, shift_one, shift_more = (
        part.astype(np.float32)
        for part in (step / scales[:, None], rounding, shift_one, shift_more)
    )
    return Quantisers(levels.astype(np.int32), step, rounding, shift_one, shift_more, bits, error)


def _measure_component(magnitude: np.ndarray, base_step: float) -> tuple[np.ndarray, ...]:
    """Measure the options of one component. The first option is not to store it.

    Returns:
        Seven arrays [n_options]: levels, step, rounding, bits, error, and the two shifts.
    """
    n = len(magnitude)
    # With sorted magnitudes and their running sums, the moments of any interval of any option take
    # two lookups.
    ordered = np.sort(magnitude).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    squares = np.concatenate([[0.0], np.cumsum(ordered**2)])
    # A component with far larger values than the others gets the finest step whose levels span its
    # range.
    base_step = max(base_step, ordered[-1] / _WIDEST_SPAN)
    steps = np.repeat(STEP_RATIOS * base_step, len(ROUNDINGS))
    roundings = np.tile(np.array(ROUNDINGS), len(STEP_RATIOS))
    zeros = np.zeros(len(steps))
    columns = [[np.array([value]) for value in (DROPPED, 1.0, 0.5, 0.0, squares[-1] / n, 0.0, 0.0)]]
    max_code = min(int(ordered[-1] / steps.min() + 0.5), (coding.WIDE_LEVELS - 1) // 2)
    edges = (np.arange(1, max_code + 1) - roundings[:, None]) * steps[:, None]
    # [n_options, code - 1]: index of the first value with that code.
    first_index = np.searchsorted(ordered, edges)
    start = np.concatenate(
        [np.zeros((len(steps), 1), np.int64), first_index, np.full((len(steps), 1), n)], axis=1
    )
    for levels in LEVELS:
        top = (levels - 1) // 2
        useful = max_code >= 1 and (
            levels == LEVELS[0] or (LEVELS[LEVELS.index(levels) - 1] - 1) // 2 < max_code
        )
        if not useful:
            columns.append(
                [zeros + levels, steps, roundings, zeros + np.inf, zeros + np.inf, zeros, zeros]
            )
            continue
        cut = (
            start
            if top >= max_code
            else np.concatenate([start[:, : top + 1], start[:, -1:]], axis=1)
        )
        counts, s1, s2 = (
            np.diff(table[cut], axis=1) for table in (np.arange(n + 1.0), sums, squares)
        )
        columns.append(
            [zeros + levels, steps, roundings, *_bits_and_error(counts, s1, s2, steps, levels)]
        )
    return tuple(np.concatenate(parts) for parts in zip(*columns, strict=True))


def _bits_and_error(
    counts: np.ndarray, sums: np.ndarray, squares: np.ndarray, steps: np.ndarray, levels: int
) -> list[np.ndarray]:
    """Compute bits, error and the two shifts of options, each [n_options].

    ``counts``, ``sums`` and ``squares`` are moments of the magnitudes with each code,
    [n_options, n_codes].
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
    return [bits, np.maximum(error, 0.0), shift_one, shift_more]


def _packing_loss(zero: np.ndarray, levels: int) -> np.ndarray:
    """Estimate how many bits per code Huffman coding of packed bytes takes above the entropy.

    ``zero`` is the share of codes that are zero.
    """
    if levels == coding.WIDE_LEVELS:
        return np.full(zero.shape, np.log2(256 / coding.LOW_LEVELS) + 0.2)
    per_byte = coding.CODES_PER_BYTE[levels]
    most_likely = zero**per_byte
    inner = np.clip(most_likely, 1e-12, 1 - 1e-12)
    binary_entropy = -inner * np.log2(inner) - (1 - inner) * np.log2(1 - inner)
    # A symbol with a probability above one half gets a code of one bit. The other symbols are coded
    # as if it did not exist.
    loss = np.where(most_likely > 0.5, 1 - binary_entropy, 0.0) + _HUFFMAN_REDUNDANCY_BITS
    return np.asarray(loss / per_byte)


def allocate(options: Quantisers, budget_bits: float) -> np.ndarray:
    """Choose one option per component with the least error, within a budget of bits per token.

    Returns:
        Index of each component's option, int64 [n_components].
    """
    # A larger multiplier never leads to more bits. So bisect, on a logarithmic scale.
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
    """Cut a row of bytes into runs with one Huffman code each, so that they take the fewest bits.

    Args:
        counts: [n_bytes, 256], how often each byte has each value, per token. Neighbours should
            have similar statistics.
        chunk_tokens: Number of tokens of an inner chunk.

    Returns:
        The ends of the runs.
    """
    # Dynamic programming over the end of the last run.
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
    """Estimate the bits of Huffman codes for histograms [n, 256], as entropy plus loss: [n]."""
    totals = np.maximum(counts.sum(1), 1e-12)
    probability = counts / totals[:, None]
    entropy = -(probability * np.log2(np.where(counts > 0, probability, 1.0))).sum(1)
    top = np.clip(probability.max(1), 1e-12, 1 - 1e-12)
    loss = np.where(top > 0.5, 1 + top * np.log2(top) + (1 - top) * np.log2(1 - top), 0.0)
    return np.asarray(totals * np.minimum(entropy + loss + _HUFFMAN_REDUNDANCY_BITS, 8.0))


class _FittedPart(NamedTuple):
    """One part of one group: its basis, and components of sequences that the basis has not seen."""

    regression: np.ndarray | None
    basis: coding.Basis
    components: Kept  # [n_tokens, n_components]
    variances: np.ndarray  # [n_components]
    energy: float  # Mean over tokens of the sum of squares of the part.


def fit_groups(
    sample: Sample,
    n_layers: Sequence[int],
    n_parts: int,
    bits_per_token: float,
    metrics: Sequence[Sequence[np.ndarray]] | None = None,
    features: Sequence[np.ndarray] | None = None,
    learning: Learning | None = None,
) -> list[coding.GroupFit]:
    """Fit all groups of a field together, with the least relative error for a budget of bits.

    The error is the sum over parts and layers of squared error / sum of squares. With metrics it is
    the sum of the errors in these metrics. At any time, only one part of one group, or the
    components of one group, are in memory.

    Args:
        sample: The sample.
        n_layers: Number of layers of each group.
        n_parts: Number of parts of each group.
        bits_per_token: Budget of all groups together: bytes of the stored arrays times 8.
        metrics: A metric per part of each group, see ``learn_basis``; None for relative errors.
        features: float32 [n_tokens, n_features] per sequence, to predict the values from. None for
            no prediction.
        learning: Settings of learning; None for the defaults.

    Returns:
        One fit per group. Its bases hold only the components that are stored.
    """
    learning = learning or Learning()
    n_bases = len(n_layers) * n_parts
    n_steps = n_bases + _FIT_ROUNDS + 1
    fitted: list[list[_FittedPart]] = []
    for group in range(len(n_layers)):
        fitted.append([])
        for part in range(n_parts):
            n_done = sum(map(len, fitted))
            learning.progress(n_done, n_steps, f"learn: basis {n_done + 1}/{n_bases}")
            metric = None if metrics is None else metrics[group][part]
            fitted[-1].append(
                _fit_part(sample, group, part, n_layers[group], metric, features, learning)
            )
    learning.progress(n_bases, n_steps, "learn: quantisers")
    weights = _weights(fitted, n_layers, metrics)
    variances = [
        np.concatenate([p.variances for p in parts]) * w
        for parts, w in zip(fitted, weights, strict=True)
    ]
    # Reverse water-filling tells which components may get bits. Only their options are measured.
    level = water_level(np.concatenate(variances), bits_per_token)
    hopeful = [np.union1d(np.flatnonzero(v > _HOPELESS * level), np.argmax(v)) for v in variances]
    components = [
        _hopeful_components(sample, parts, h) for parts, h in zip(fitted, hopeful, strict=True)
    ]
    measured = [
        measure_options(sample.read(k), w[h], float(np.sqrt(12 * level)))
        for k, w, h in zip(components, weights, hopeful, strict=True)
    ]
    options = Quantisers(
        *map(np.concatenate, zip(*(vars(m).values() for m in measured), strict=True))
    )
    ends = np.cumsum([len(h) for h in hopeful])[:-1]
    # Estimated bits differ from stored bits by a few percent. So the budget is scaled until the
    # stored bits fit.
    budget = bits_per_token
    for fit_round in range(_FIT_ROUNDS):
        learning.progress(n_bases + 1 + fit_round, n_steps, f"learn: bytes, round {fit_round + 1}")
        index = np.split(allocate(options, budget), ends)
        placed = [
            _place_codes(sample.read(k), m.chosen(i), h, [len(p.variances) for p in parts])
            for k, m, i, h, parts in zip(components, measured, index, hopeful, fitted, strict=True)
        ]
        stored = sum(bits for _, bits in placed)
        if abs(stored / bits_per_token - 1) < _RATE_TOLERANCE:
            break
        budget *= bits_per_token / stored
    return [_compact(parts, columns) for parts, (columns, _) in zip(fitted, placed, strict=True)]


def _fit_part(
    sample: Sample,
    group: int,
    part: int,
    n_layers: int,
    metric: np.ndarray | None,
    features: Sequence[np.ndarray] | None,
    learning: Learning,
) -> _FittedPart:
    """Learn a basis from most sequences, and write the components of the others to disk."""
    n = len(sample.lengths)
    others = range(0, n, _STATISTICS_EVERY)
    learned_from = [i for i in range(n) if i % _STATISTICS_EVERY] or list(range(n))
    move = learning.place
    regression = None
    rows = sample.rows(group, part, learned_from)
    scale = layer_scale(rows, n_layers)
    if features is not None:
        regression = learn_regression([features[i] for i in learned_from], rows, move)
        for i, values in zip(learned_from, rows.sequences, strict=True):
            values -= features[i] @ regression
    basis = learn_basis(rows, metric, scale, move)
    del rows  # Free the memory before the next rows are read.
    rows = sample.rows(group, part, others)
    energy = float(
        sum(np.square(s, dtype=np.float64).sum() for s in rows.sequences) / len(rows.values)
    )
    for i, values in zip(others, rows.sequences, strict=True):
        if features is not None and regression is not None:
            values -= features[i] @ regression
        values -= basis.mean[coding.mean_rows(0, len(values))]
    components = on_host(move(rows.values) @ move(np.ascontiguousarray(basis.analysis)))
    variances = (components.astype(np.float64) ** 2).mean(0)
    return _FittedPart(regression, basis, sample.keep(components), variances, energy)


def _weights(
    fitted: Sequence[Sequence[_FittedPart]],
    n_layers: Sequence[int],
    metrics: Sequence[Sequence[np.ndarray]] | None,
) -> list[np.ndarray]:
    """Return the weights of the errors of each group's components, part after part."""
    weights = []
    for group, parts in enumerate(fitted):
        # Components are those of values divided by the scale of their layer. So the sum of squares
        # of each layer is the part's energy divided by the number of layers.
        part_weights = [n_layers[group] / max(part.energy, 1e-30) for part in parts]
        if metrics is not None:
            # The basis was learned in the metric divided by this scale.
            part_weights = [metric_scale(metric) for metric in metrics[group]]
        weights.append(np.repeat(part_weights, [len(part.variances) for part in parts]))
    return weights


def _hopeful_components(sample: Sample, parts: Sequence[_FittedPart], hopeful: np.ndarray) -> Kept:
    """Write the components that may get bits to disk, part after part.

    The array is float32 [n_tokens, len(hopeful)].
    """
    first = 0
    chosen = []
    for part in parts:
        ids = hopeful[(hopeful >= first) & (hopeful < first + len(part.variances))] - first
        chosen.append(sample.read(part.components)[:, ids])
        first += len(part.variances)
    return sample.keep(np.concatenate(chosen, axis=1))


def _place_codes(
    sample: np.ndarray, quantisers: Quantisers, component: np.ndarray, part_sizes: list[int]
) -> tuple[coding.CodeColumns, float]:
    """Assign the codes of the chosen quantisers to stored arrays.

    Args:
        sample: float32 [n_tokens, n_components].
        quantisers: The chosen quantisers, [n_components].
        component: [n_components], number of each component in the group, part after part.
        part_sizes: Number of components of each part.

    Returns:
        The columns, and the bits per token that their stored arrays take.
    """
    # Every group must store at least one component, because readers take the device from its codes.
    if (quantisers.levels == DROPPED).all():
        quantisers = replace(
            quantisers, levels=np.where(np.arange(len(component)) == 0, 3, DROPPED)
        )
    limits = (quantisers.levels - 1) // 2  # Codes are symmetric around zero.
    codes = coding.quantise(sample / quantisers.step, quantisers.rounding, limits).astype(np.int32)
    low, high = coding.split_wide(codes)
    is_wide = quantisers.levels == coding.WIDE_LEVELS
    wide = np.flatnonzero(is_wide)
    zero_share = (codes == 0).mean(0)
    order = []
    arrays = []
    levels_of = []
    highs = []
    bits = 0.0
    n_arrays = 0
    for levels in coding.CODES_PER_BYTE:
        columns = [(c, 0) for c in np.flatnonzero(quantisers.levels == levels)]
        columns += [(c, 0) for c in wide] if levels == coding.LOW_LEVELS else []
        columns += [(c, 1) for c in wide] if levels == coding.HIGH_LEVELS else []
        if not columns:
            continue
        # Neighbours should have similar statistics, so sort by the share of zeros. High digits are
        # nearly always zero.
        columns.sort(key=lambda entry: (-2.0 if entry[1] else -zero_share[entry[0]], entry[0]))
        ids, high_flags = (np.array(x, np.int64) for x in zip(*columns, strict=True))
        packed = coding.pack(np.where(high_flags > 0, high[:, ids], low[:, ids]), levels)
        counts = np.stack(
            [np.bincount(packed[:, i], minlength=256) for i in range(packed.shape[1])]
        ) / len(packed)
        start = 0
        # Bytes with different statistics need different Huffman codes, so each run has its own
        # array or pieces.
        for end in split_by_statistics(counts, CHUNK_TOKENS):
            arrays += [n_arrays] * (
                min(end * coding.CODES_PER_BYTE[levels], len(ids))
                - start * coding.CODES_PER_BYTE[levels]
            )
            bits += _stored_bits(packed[:, start:end])
            n_arrays += 1
            start = end
        order += ids.tolist()
        highs += high_flags.tolist()
        levels_of += [levels] * len(ids)
    chosen = np.array(order, np.int64)
    # Components are numbered across all parts of the group.
    firsts = np.concatenate([[0], np.cumsum(part_sizes)])
    part = np.searchsorted(firsts, component[chosen], side="right") - 1
    columns_table = coding.CodeColumns(
        part=part.astype(np.int32),
        component=(component[chosen] - firsts[part]).astype(np.int32),
        array=np.array(arrays, np.int32),
        levels=np.array(levels_of, np.int32),
        step=quantisers.step[chosen],
        is_high=np.array(highs, np.float32),
        rounding=quantisers.rounding[chosen],
        shift_one=np.where(is_wide, 0, quantisers.shift_one)[chosen].astype(np.float32),
        shift_more=np.where(is_wide, 0, quantisers.shift_more)[chosen].astype(np.float32),
    )
    return columns_table, bits


def _stored_bits(rows: np.ndarray) -> float:
    """Measure the stored bits per token of packed codes, uint8 [n_tokens, n_bytes].

    The codes go through the byte chain. The bits include the entries of the index.
    """
    chunks = [rows[start : start + CHUNK_TOKENS] for start in range(0, len(rows), CHUNK_TOKENS)]
    return 8.0 * sum(len(encode_chunk(chunk)) + _INDEX_ENTRY_BYTES for chunk in chunks) / len(rows)


def _compact(parts: Sequence[_FittedPart], columns: coding.CodeColumns) -> coding.GroupFit:
    component = columns.component.copy()
    compacted = []
    for part, fitted in enumerate(parts):
        is_of_part = columns.part == part
        used, renumbered = np.unique(columns.component[is_of_part], return_inverse=True)
        component[is_of_part] = renumbered
        basis = fitted.basis
        compacted.append(
            replace(basis, synthesis=basis.synthesis[used], analysis=basis.analysis[:, used])
        )
    regressions = tuple(part.regression for part in parts if part.regression is not None)
    return coding.GroupFit(tuple(compacted), replace(columns, component=component), regressions)


# Joint hidden states: each hidden state is predicted from the one of the layer below. A decoder
# layer adds little, so the lowest state takes most of the bits. The bits are split so that all
# states have the same error d. A component of a Gaussian state with variance v takes
# 0.5 * log2(v / d) bits, and none if v is below d. The residual of a predicted state also contains
# the error of the state below, which is d too. So its components take 0.5 * log2((v + d) / d) bits.
# Variances and errors are shares of each state's energy.


def left_variances(
    values: np.ndarray, known: np.ndarray | None = None, place: Place = np.asarray
) -> np.ndarray:
    """Compute the variances of the residual of a state after a linear prediction.

    Args:
        values: The state, float32 [n_tokens, width].
        known: The values to predict from, float32 [n_tokens, n]; None for no prediction.
        place: Moves an array to the device of large products.

    Returns:
        Variances as shares of the state's energy, float64 [width].
    """
    centred = place(values - values.mean(0))
    left = on_host(centred.T @ centred).astype(np.float64)
    energy = float(np.square(values, dtype=np.float64).sum())
    if known is not None:
        other = place(known - known.mean(0))
        gram, cross = (
            on_host(product).astype(np.float64) for product in (other.T @ other, other.T @ centred)
        )
        ridge = _PREDICTION_RIDGE * np.trace(gram) / len(gram)
        gram += ridge * np.eye(len(gram)) + np.finfo(np.float64).tiny * np.eye(len(gram))
        left -= cross.T @ np.linalg.solve(gram, cross)
    return np.asarray(np.maximum(np.linalg.eigvalsh(left), 0) / max(energy, 1e-30))


def split_bits(variances: Sequence[np.ndarray], bits_per_token: float) -> list[float]:
    """Split the bits of a token among joint hidden states, so that all have the same error.

    Args:
        variances: :func:`left_variances` of each state, the lowest state first.
        bits_per_token: The bits to split.
    """

    def spent(error: float) -> list[float]:
        lowest = [np.log2(np.maximum(variances[0] / error, 1))]
        return [
            float(bits.sum() / 2)
            for bits in lowest + [np.log2(1 + variance / error) for variance in variances[1:]]
        ]

    low = 1e-12
    high = max(float(variance.max(initial=0)) for variance in variances) + 1e-9
    for _ in range(_SPLIT_ROUNDS):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if sum(spent(middle)) > bits_per_token else (low, middle)
    state_bits = np.maximum(spent(high), 1e-9)
    return [float(share) for share in state_bits / state_bits.sum() * bits_per_token]
