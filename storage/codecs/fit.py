"""Fits a transform codec to a sample: which components are kept, how finely each is quantised, what lies together.

Every component has a list of options (step, rounding, number of levels), each with its bits and squared error on a
sample. :func:`allocate` takes one option per component: the exact minimum of error + multiplier * bits, with the
multiplier found by bisection, which is the optimum over all allocations for the bits that it spends. The budget is met
in stored bytes, not in entropy: codes of the sample are packed and go through the byte chain, and the budget is
corrected until the two agree.

Quantiser: ``q = sign(x) * floor(|x| / step + rounding)``, clipped to the levels. A rounding below 0.5 widens the zone
around zero, which costs little error and many fewer bits where most codes are zero. Decoded value:
``sign(q) * (|q| - shift) * step``, with one shift for ``|q| = 1`` and one for all others, fitted to the sample.

The sample's sequences are split in two: the basis comes from the first, the cost of its components from the second, so
that it holds for sequences that the basis never saw.
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
"""Steps tried, relative to the one of high-rate theory: a third of an octave apart."""

DROPPED = 1  # number of levels of a component that is not stored

_HUFFMAN_REDUNDANCY_BITS = 0.03
# Magnitudes that the finest step of a component far above the others spans, with room for values
# beyond the sample's.
_WIDEST_SPAN = 0.8 * (coding.WIDE_LEVELS // 2) * STEP_RATIOS[0]
# Bits of one more stored array for each inner chunk: Huffman's table, headers, checksum and index
# entry take about 120
# bytes; the rest stands for the time of reading one more chunk.
_ARRAY_PENALTY_BITS = 8 * 200
_MAX_SEGMENTS = 64

CHUNK_TOKENS = 512
"""Tokens of one inner chunk that the choice of arrays is made for; arrays of some 50 bytes a token get that many."""

_STATISTICS_EVERY = 4
_FIT_ROUNDS = 5
_INDEX_ENTRY_BYTES = 16
_RATE_TOLERANCE = 0.002
# components this far below the water level stay at zero bits whatever the shape of their
# distribution
_HOPELESS = 0.1
_PREDICTION_RIDGE = 1e-4
_SPLIT_ROUNDS = 60


@dataclass(frozen=True)
class Quantisers:
    """Quantisers of components, or options of them, and what they cost; arrays of one shape."""

    levels: np.ndarray  # int32; ``DROPPED`` where the component is not stored
    step: np.ndarray  # float32, width of a level in the component's units
    rounding: np.ndarray  # float32, 0.5 for the nearest level
    # float32, how far values of code 1 or -1 lie towards zero on average, in steps
    shift_one: np.ndarray
    shift_more: np.ndarray  # float32, likewise for all larger codes
    bits: np.ndarray  # float64, per token after packing and Huffman coding
    error: np.ndarray  # float64, mean square times the component's weight

    def chosen(self, index: np.ndarray) -> "Quantisers":
        """Take option ``index[c]`` of component ``c``: arrays [n_components, n_options] -> [n_components]."""
        return Quantisers(
            *(np.take_along_axis(own, index[:, None], axis=1)[:, 0] for own in vars(self).values())
        )


def water_level(variances: np.ndarray, bits: float) -> float:
    """Return the error per component at which Gaussian components take ``bits`` in all (reverse water-filling)."""
    ordered = np.sort(variances[variances > 0])[::-1]
    if not len(ordered):
        return 1.0
    levels = np.exp2((np.cumsum(np.log2(ordered)) - 2 * bits) / np.arange(1, len(ordered) + 1))
    kept = int(np.flatnonzero(levels <= ordered)[-1])
    return float(levels[kept])


def measure_options(sample: np.ndarray, weights: np.ndarray, base_step: float) -> Quantisers:
    """Measure bits and error of every option of every component: arrays [n_components, n_options].

    Args:
        sample: float32 [n_tokens, n_components], components around their means.
        weights: [n_components], of their errors.
        base_step: step of a component with weight 1; others use ``base_step / sqrt(weight)``.
    """
    scales = np.sqrt(weights)
    columns = [
        _measure_component(np.abs(sample[:, i]) * scale, base_step)
        for i, scale in enumerate(scales)
    ]
    levels, step, rounding, bits, error, one, more = (
        np.stack(parts) for parts in zip(*columns, strict=True)
    )
    step, rounding, one, more = (
        part.astype(np.float32) for part in (step / scales[:, None], rounding, one, more)
    )
    return Quantisers(levels.astype(np.int32), step, rounding, one, more, bits, error)


def _measure_component(magnitude: np.ndarray, base_step: float) -> tuple[np.ndarray, ...]:
    """Measure the options of one component, the first being not to store it: arrays [n_options] of seven figures."""
    n = len(magnitude)
    # Magnitudes in order, with running sums, give the moments of every interval of every option by
    # two look-ups.
    ordered = np.sort(magnitude).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    squares = np.concatenate([[0.0], np.cumsum(ordered**2)])
    # A component far above the others gets as fine a step as its levels can span.
    base_step = max(base_step, ordered[-1] / _WIDEST_SPAN)
    steps = np.repeat(STEP_RATIOS * base_step, len(ROUNDINGS))
    roundings = np.tile(np.array(ROUNDINGS), len(STEP_RATIOS))
    zeros = np.zeros(len(steps))
    columns = [[np.array([value]) for value in (DROPPED, 1.0, 0.5, 0.0, squares[-1] / n, 0.0, 0.0)]]
    most = min(int(ordered[-1] / steps.min() + 0.5), (coding.WIDE_LEVELS - 1) // 2)
    edges = (np.arange(1, most + 1) - roundings[:, None]) * steps[:, None]
    at = np.searchsorted(ordered, edges)  # [option, level - 1]: first value of that level
    start = np.concatenate(
        [np.zeros((len(steps), 1), np.int64), at, np.full((len(steps), 1), n)], axis=1
    )
    for levels in LEVELS:
        top = (levels - 1) // 2
        useful = most >= 1 and (
            levels == LEVELS[0] or (LEVELS[LEVELS.index(levels) - 1] - 1) // 2 < most
        )
        if not useful:
            columns.append(
                [zeros + levels, steps, roundings, zeros + np.inf, zeros + np.inf, zeros, zeros]
            )
            continue
        cut = start if top >= most else np.concatenate([start[:, : top + 1], start[:, -1:]], axis=1)
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
    """Compute bits, error and the two shifts of options from the moments [n_options, n_magnitudes] of magnitudes."""
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
    """Estimate the bits per code that Huffman coding of packed bytes takes above the entropy, by the share of zeros."""
    if levels == coding.WIDE_LEVELS:
        return np.full(zero.shape, np.log2(256 / coding.LOW_LEVELS) + 0.2)
    per_byte = coding.CODES_PER_BYTE[levels]
    most_likely = zero**per_byte
    inner = np.clip(most_likely, 1e-12, 1 - 1e-12)
    binary_entropy = -inner * np.log2(inner) - (1 - inner) * np.log2(1 - inner)
    # A symbol above one half gets a code of one bit; the others are coded as if it did not exist.
    loss = np.where(most_likely > 0.5, 1 - binary_entropy, 0.0) + _HUFFMAN_REDUNDANCY_BITS
    return np.asarray(loss / per_byte)


def allocate(options: Quantisers, budget_bits: float) -> np.ndarray:
    """Choose one option per component, whose bits per token are at most the budget: int64 [n_components]."""
    # More bits never cost error, so the bits spent fall with the multiplier: bisection, on a
    # logarithmic scale.
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
    """Cut a row of bytes into runs with a Huffman code each, with the fewest bits in all: returns the runs' ends.

    ``counts``: [n_bytes, 256], how often each byte takes each value per token; neighbours should be alike.
    """
    # Dynamic programming over the ends of the last run.
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
    at = len(ends) - 1
    while at > 0:
        cuts.append(int(ends[at]))
        at = int(previous[at])
    return cuts[::-1]


def _code_bits(counts: np.ndarray) -> np.ndarray:
    """Estimate the bits of Huffman codes for histograms [n, 256]: entropy and loss, [n]."""
    totals = np.maximum(counts.sum(1), 1e-12)
    probability = counts / totals[:, None]
    entropy = -(probability * np.log2(np.where(counts > 0, probability, 1.0))).sum(1)
    top = np.clip(probability.max(1), 1e-12, 1 - 1e-12)
    loss = np.where(top > 0.5, 1 + top * np.log2(top) + (1 - top) * np.log2(1 - top), 0.0)
    return np.asarray(totals * np.minimum(entropy + loss + _HUFFMAN_REDUNDANCY_BITS, 8.0))


class _FittedPart(NamedTuple):
    """One part of one group with its basis, and components [n_tokens, n_components] of sequences not learned from."""

    regression: np.ndarray | None
    basis: coding.Basis
    components: Kept
    variances: np.ndarray
    energy: float


def fit_groups(
    sample: Sample,
    n_layers: Sequence[int],
    n_parts: int,
    bits_per_token: float,
    metrics: Sequence[Sequence[np.ndarray]] | None = None,
    features: Sequence[np.ndarray] | None = None,
    learning: Learning | None = None,
) -> list[coding.GroupFit]:
    """Fit all groups of a field together, so that the bits leave the least relative error.

    The error is the sum over parts and layers of squared error / sum of squares; with metrics it is the sum of the
    errors in these. One part of one group is in memory at a time, or the components of one group.

    Args:
        n_layers: layers of each group.
        n_parts: parts of each group.
        bits_per_token: bytes of the stored arrays times 8, of all groups together.
        metrics: of each part of each group, see ``learn_basis``.
        features: float32 [n_tokens, n_features] of each sequence, to predict the values from; None to do without.

    Returns:
        One fit per group; unused components are gone from its bases.
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
    # Reverse water-filling says which components can be worth bits; only their options are
    # measured.
    level = water_level(np.concatenate(variances), bits_per_token)
    hopeful = [np.union1d(np.flatnonzero(v > _HOPELESS * level), np.argmax(v)) for v in variances]
    kept = [_hopeful_components(sample, parts, h) for parts, h in zip(fitted, hopeful, strict=True)]
    measured = [
        measure_options(sample.read(k), w[h], float(np.sqrt(12 * level)))
        for k, w, h in zip(kept, weights, hopeful, strict=True)
    ]
    options = Quantisers(
        *map(np.concatenate, zip(*(vars(m).values() for m in measured), strict=True))
    )
    ends = np.cumsum([len(h) for h in hopeful])[:-1]
    # Estimated bits differ from stored ones by some percent, so the budget is scaled until the
    # stored ones fit.
    budget = bits_per_token
    for fit_round in range(_FIT_ROUNDS):
        learning.progress(n_bases + 1 + fit_round, n_steps, f"learn: bytes, round {fit_round + 1}")
        index = np.split(allocate(options, budget), ends)
        placed = [
            _place_codes(sample.read(k), m.chosen(i), h, [len(p.variances) for p in parts])
            for k, m, i, h, parts in zip(kept, measured, index, hopeful, fitted, strict=True)
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
    """Learn a basis from most sequences, and keep the components of the others on disk."""
    n = len(sample.lengths)
    others = range(0, n, _STATISTICS_EVERY)
    most = [i for i in range(n) if i % _STATISTICS_EVERY] or list(range(n))
    place = learning.place
    regression = None
    rows = sample.rows(group, part, most)
    scale = layer_scale(rows, n_layers)
    if features is not None:
        regression = learn_regression([features[i] for i in most], rows, place)
        for i, values in zip(most, rows.sequences, strict=True):
            values -= features[i] @ regression
    basis = learn_basis(rows, metric, scale, place)
    del rows  # before the next ones are read: only one part is in memory
    rows = sample.rows(group, part, others)
    energy = float(
        sum(np.square(s, dtype=np.float64).sum() for s in rows.sequences) / len(rows.values)
    )
    for i, values in zip(others, rows.sequences, strict=True):
        if features is not None and regression is not None:
            values -= features[i] @ regression
        values -= basis.mean[coding.mean_rows(0, len(values))]
    components = on_host(place(rows.values) @ place(np.ascontiguousarray(basis.analysis)))
    variances = (components.astype(np.float64) ** 2).mean(0)
    return _FittedPart(regression, basis, sample.keep(components), variances, energy)


def _weights(
    fitted: Sequence[Sequence[_FittedPart]],
    n_layers: Sequence[int],
    metrics: Sequence[Sequence[np.ndarray]] | None,
) -> list[np.ndarray]:
    """Weigh the error of each component of each group, part after part."""
    weights = []
    for group, parts in enumerate(fitted):
        # Components are of values over the scale of their layers, whose mean square is the energy
        # of a layer.
        own = [n_layers[group] / max(part.energy, 1e-30) for part in parts]
        if metrics is not None:
            own = [metric_scale(metric) for metric in metrics[group]]  # which is not in the basis
        weights.append(np.repeat(own, [len(part.variances) for part in parts]))
    return weights


def _hopeful_components(sample: Sample, parts: Sequence[_FittedPart], hopeful: np.ndarray) -> Kept:
    """Keep on disk the components that may get bits: float32 [n_tokens, len(hopeful)], part after part."""
    first = 0
    chosen = []
    for part in parts:
        own = hopeful[(hopeful >= first) & (hopeful < first + len(part.variances))] - first
        chosen.append(sample.read(part.components)[:, own])
        first += len(part.variances)
    return sample.keep(np.concatenate(chosen, axis=1))


def _place_codes(
    sample: np.ndarray, quantisers: Quantisers, component: np.ndarray, part_sizes: list[int]
) -> tuple[coding.CodeColumns, float]:
    """Put the codes of chosen quantisers into stored arrays; also returns the bits per token that these take.

    Components are indexed over the whole group, part after part.
    """
    # every group stores something, from which readers know the device
    if (quantisers.levels == DROPPED).all():
        quantisers = replace(
            quantisers, levels=np.where(np.arange(len(component)) == 0, 3, DROPPED)
        )
    limits = (quantisers.levels - 1) // 2  # codes are symmetric around zero
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
        # Neighbours should be alike, so sort by how often a code is zero; high digits nearly always
        # are.
        columns.sort(key=lambda entry: (-2.0 if entry[1] else -zero_share[entry[0]], entry[0]))
        ids, high_flags = (np.array(x, np.int64) for x in zip(*columns, strict=True))
        packed = coding.pack(np.where(high_flags > 0, high[:, ids], low[:, ids]), levels)
        counts = np.stack(
            [np.bincount(packed[:, i], minlength=256) for i in range(packed.shape[1])]
        ) / len(packed)
        start = 0
        # Each run of bytes with statistics of its own gets its own Huffman code, and so its own
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
    # components of all parts are numbered in one row
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
    """Measure the bits per token of packed codes, uint8 [n_tokens, n_bytes], after the byte chain, index included."""
    chunks = [rows[start : start + CHUNK_TOKENS] for start in range(0, len(rows), CHUNK_TOKENS)]
    return 8.0 * sum(len(encode_chunk(chunk)) + _INDEX_ENTRY_BYTES for chunk in chunks) / len(rows)


def _compact(parts: Sequence[_FittedPart], columns: coding.CodeColumns) -> coding.GroupFit:
    component = columns.component.copy()
    compacted = []
    for part, fitted in enumerate(parts):
        own = columns.part == part
        used, renumbered = np.unique(columns.component[own], return_inverse=True)
        component[own] = renumbered
        basis = fitted.basis
        compacted.append(
            replace(basis, synthesis=basis.synthesis[used], analysis=basis.analysis[:, used])
        )
    regressions = tuple(part.regression for part in parts if part.regression is not None)
    return coding.GroupFit(tuple(compacted), replace(columns, component=component), regressions)


# Joint hidden states: each is predicted from the one below it. A decoder layer adds little, so that
# the lowest state
# takes most bits. They are split so that all err alike: a component of a Gaussian state with
# variance v takes
# log2(v / d) / 2 bits at the error d, nothing where v is smaller. What is left of a state after its
# prediction has,
# besides its own variance, the error of the state below, which is d too: log2((v + d) / d) / 2.
# Variances and errors
# are shares of each state's energy.


def left_variances(
    values: np.ndarray, known: np.ndarray | None = None, place: Place = np.asarray
) -> np.ndarray:
    """Compute the variances of what a linear prediction leaves of a state, as shares of its energy: float64 [width].

    The state is float32 [n_tokens, width], what it is predicted from float32 [n_tokens, n]; None for nothing.
    """
    own = place(values - values.mean(0))
    left = on_host(own.T @ own).astype(np.float64)
    energy = float(np.square(values, dtype=np.float64).sum())
    if known is not None:
        other = place(known - known.mean(0))
        gram, cross = (
            on_host(product).astype(np.float64) for product in (other.T @ other, other.T @ own)
        )
        ridge = _PREDICTION_RIDGE * np.trace(gram) / len(gram)
        gram += ridge * np.eye(len(gram)) + np.finfo(np.float64).tiny * np.eye(len(gram))
        left -= cross.T @ np.linalg.solve(gram, cross)
    return np.asarray(np.maximum(np.linalg.eigvalsh(left), 0) / max(energy, 1e-30))


def split_bits(variances: Sequence[np.ndarray], bits_per_token: float) -> list[float]:
    """Split the bits of a token among states, the lowest first, so that all err alike; see :func:`left_variances`."""

    def spent(error: float) -> list[float]:
        lowest = [np.log2(np.maximum(variances[0] / error, 1))]
        return [
            float(bits.sum() / 2)
            for bits in lowest + [np.log2(1 + own / error) for own in variances[1:]]
        ]

    low = 1e-12
    high = max(float(own.max(initial=0)) for own in variances) + 1e-9
    for _ in range(_SPLIT_ROUNDS):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if sum(spent(middle)) > bits_per_token else (low, middle)
    found = np.maximum(spent(high), 1e-9)
    return [float(share) for share in found / found.sum() * bits_per_token]
