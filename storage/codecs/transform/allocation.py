"""Chooses how finely each component is quantised, so that a given number of bits leaves the least error.

Every component has a list of options (step, rounding, number of levels), each with its bits and squared error on a
sample. :func:`allocate` takes one option per component: the exact minimum of error + multiplier * bits, with the
multiplier found by bisection. This is the optimum over all allocations for the bits that it spends, and within one
component's smallest change of the optimum for any other budget.

Quantiser: ``q = sign(x) * floor(|x| / step + rounding)``, clipped to the levels. A rounding below 0.5 widens the zone
around zero, which costs little error and many fewer bits where most codes are zero. Decoded value:
``sign(q) * (|q| - shift) * step``, with one shift for ``|q| = 1`` and one for all others, fitted to the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .packing import CODES_PER_BYTE, LOW_LEVELS, WIDE_LEVELS

LEVELS = (*CODES_PER_BYTE, WIDE_LEVELS)
ROUNDINGS = (0.5, 0.4, 0.3)
STEP_RATIOS = 2.0 ** (np.arange(-5, 6) / 3)
"""Steps tried, relative to the one of high-rate theory: a third of an octave apart."""

DROPPED = 1
"""Number of levels of a component that is not stored."""

_HUFFMAN_REDUNDANCY_BITS = 0.03
# Magnitudes that the finest step of a component far above the others spans, with room for values beyond the sample's.
_WIDEST_SPAN = 0.8 * (WIDE_LEVELS // 2) * STEP_RATIOS[0]
# Bits of one more stored array for each inner chunk: Huffman's table, headers, checksum and index entry take about 120
# bytes; the rest stands for the time of reading one more chunk.
_ARRAY_PENALTY_BITS = 8 * 200
_MAX_SEGMENTS = 64


@dataclass(frozen=True)
class Quantisers:
    """One quantiser per component (or option); arrays of one shape.

    Attributes:
        levels: int32; 1 where the component is dropped.
        step: float32, width of a level in the component's units.
        rounding: float32, 0.5 for the nearest level.
        shift_one: float32, how far values of code 1 or -1 lie towards zero on average, in steps.
        shift_more: float32, likewise for all larger codes.
    """

    levels: np.ndarray
    step: np.ndarray
    rounding: np.ndarray
    shift_one: np.ndarray
    shift_more: np.ndarray

    def chosen(self, index: np.ndarray) -> Quantisers:
        """Take option ``index[c]`` of component ``c``: arrays [n_components, n_options] -> [n_components]."""
        return Quantisers(
            *(
                np.take_along_axis(getattr(self, name), index[:, None], axis=1)[:, 0]
                for name in self.__dataclass_fields__
            )
        )


@dataclass(frozen=True)
class Options:
    """The cost of each option of each component.

    Attributes:
        quantisers: arrays [n_components, n_options].
        bits: float64 [n_components, n_options], bits per token after packing and Huffman coding.
        error: float64 [n_components, n_options], mean squared error, times the component's weight.
    """

    quantisers: Quantisers
    bits: np.ndarray
    error: np.ndarray


def water_level(variances: np.ndarray, bits: float) -> float:
    """Return the error per component at which Gaussian components take ``bits`` in all (reverse water-filling).

    Args:
        variances: [n_components], not negative.
        bits: total over all components, positive.
    """
    ordered = np.sort(variances[variances > 0])[::-1]
    if not len(ordered):
        return 1.0
    levels = np.exp2((np.cumsum(np.log2(ordered)) - 2 * bits) / np.arange(1, len(ordered) + 1))
    kept = int(np.flatnonzero(levels <= ordered)[-1])
    return float(levels[kept])


def measure_options(sample: np.ndarray, weights: np.ndarray, base_step: float) -> Options:
    """Measure bits and error of every option of every component.

    Args:
        sample: float32 [n_tokens, n_components], components around their means.
        weights: [n_components], weight of a component's error.
        base_step: step of a component with weight 1; others use ``base_step / sqrt(weight)``.
    """
    scales = np.sqrt(weights)
    columns = [_measure_component(np.abs(sample[:, i]) * scale, base_step) for i, scale in enumerate(scales)]
    levels, step, rounding, bits, error, one, more = (np.stack(parts) for parts in zip(*columns, strict=True))
    step = step / scales[:, None]
    quantisers = Quantisers(levels.astype(np.int32), *(part.astype(np.float32) for part in (step, rounding, one, more)))
    return Options(quantisers, bits, error)


def _measure_component(magnitude: np.ndarray, base_step: float) -> tuple[np.ndarray, ...]:
    """Measure the options of one component, the first being not to store it.

    Returns:
        levels, step, rounding, bits, error, shift_one, shift_more: arrays [1 + len(LEVELS) * steps * roundings].
    """
    n = len(magnitude)
    ordered = np.sort(magnitude).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    squares = np.concatenate([[0.0], np.cumsum(ordered**2)])
    # A component far above the others gets as fine a step as its levels can span.
    base_step = max(base_step, ordered[-1] / _WIDEST_SPAN)
    steps = np.repeat(STEP_RATIOS * base_step, len(ROUNDINGS))
    roundings = np.tile(np.array(ROUNDINGS), len(STEP_RATIOS))
    zeros = np.zeros(len(steps))
    columns = [[np.array([value]) for value in (DROPPED, 1.0, 0.5, 0.0, squares[-1] / n, 0.0, 0.0)]]
    most = min(int(ordered[-1] / steps.min() + 0.5), (WIDE_LEVELS - 1) // 2)
    edges = (np.arange(1, most + 1) - roundings[:, None]) * steps[:, None]
    at = np.searchsorted(ordered, edges)  # [option, level - 1]: first value of that level
    start = np.concatenate([np.zeros((len(steps), 1), np.int64), at, np.full((len(steps), 1), n)], axis=1)
    for levels in LEVELS:
        top = (levels - 1) // 2
        useful = most >= 1 and (levels == LEVELS[0] or (LEVELS[LEVELS.index(levels) - 1] - 1) // 2 < most)
        if not useful:
            columns.append([zeros + levels, steps, roundings, zeros + np.inf, zeros + np.inf, zeros, zeros])
            continue
        cut = start if top >= most else np.concatenate([start[:, : top + 1], start[:, -1:]], axis=1)
        counts, s1, s2 = (np.diff(table[cut], axis=1) for table in (np.arange(n + 1.0), sums, squares))
        columns.append([zeros + levels, steps, roundings, *_bits_and_error(counts, s1, s2, steps, levels)])
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
    error = (squares / steps[:, None] ** 2 - 2 * decoded * scaled + counts * decoded**2).sum(1) * steps**2 / n
    probability = counts / n
    entropy = -(probability * np.log2(np.where(counts > 0, probability, 1.0))).sum(1) + 1 - probability[:, 0]
    bits = entropy + _packing_loss(probability[:, 0], levels)
    return [bits, np.maximum(error, 0.0), shift_one, shift_more]


def _packing_loss(zero: np.ndarray, levels: int) -> np.ndarray:
    """Estimate the bits per code that Huffman coding of packed bytes takes above the entropy, by the share of zeros."""
    if levels == WIDE_LEVELS:
        return np.full(zero.shape, np.log2(256 / LOW_LEVELS) + 0.2)
    per_byte = CODES_PER_BYTE[levels]
    most_likely = zero**per_byte
    inner = np.clip(most_likely, 1e-12, 1 - 1e-12)
    binary_entropy = -inner * np.log2(inner) - (1 - inner) * np.log2(1 - inner)
    # A symbol above one half gets a code of one bit; the others are coded as if it did not exist.
    loss = np.where(most_likely > 0.5, 1 - binary_entropy, 0.0) + _HUFFMAN_REDUNDANCY_BITS
    return np.asarray(loss / per_byte)


def allocate(options: Options, budget_bits: float) -> np.ndarray:
    """Choose one option per component.

    Args:
        budget_bits: bits per token over all components.

    Returns:
        int64 [n_components], index of the chosen option. The bits spent are at most the budget.
    """
    low, high = 1e-30, 1e30
    chosen = np.argmin(np.where(options.bits > 0, np.inf, options.error), axis=1)
    for _ in range(120):
        multiplier = np.sqrt(low * high)
        trial = np.argmin(options.error + multiplier * options.bits, axis=1)
        if np.take_along_axis(options.bits, trial[:, None], axis=1).sum() > budget_bits:
            low = multiplier
        else:
            high, chosen = multiplier, trial
    return np.asarray(chosen)


def split_by_statistics(counts: np.ndarray, chunk_tokens: int) -> list[int]:
    """Cut a row of bytes into runs that are stored apart, each with a Huffman code of its own.

    Args:
        counts: [n_bytes, 256], how often each byte takes each value per token; neighbours should be alike.
        chunk_tokens: tokens of one inner chunk.

    Returns:
        Ends of the runs, the last one ``n_bytes``: the cut with the fewest bits in all, by dynamic programming.
    """
    n_bytes = len(counts)
    ends = np.unique(np.linspace(0, n_bytes, min(n_bytes, _MAX_SEGMENTS) + 1).astype(int))
    total = np.concatenate([np.zeros((1, 256)), np.cumsum(counts, axis=0)])[ends]
    best = np.zeros(len(ends))
    previous = np.zeros(len(ends), np.int64)
    for end in range(1, len(ends)):
        costs = best[:end] + _code_bits(total[end] - total[:end]) + _ARRAY_PENALTY_BITS / chunk_tokens
        previous[end] = int(np.argmin(costs))
        best[end] = costs[previous[end]]
    cuts, at = [], len(ends) - 1
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
