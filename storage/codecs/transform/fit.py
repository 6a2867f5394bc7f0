"""Fits a transform codec to a sample: bases, quantisers, and which codes are stored together.

The budget is met in stored bytes, not in entropy: codes of the sample are packed and go through the byte chain, and the
budget of the allocation is corrected until the two agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...chunks.chunk import encode_chunk
from ...chunks.field import Learning
from .allocation import DROPPED, Options, Quantisers, allocate, measure_options, split_by_statistics, water_level
from .calibration import Basis, learn_basis, learn_regression, mean_rows, metric_scale, on_host
from .packing import CODES_PER_BYTE, HIGH_LEVELS, LOW_LEVELS, WIDE_LEVELS, pack, split_wide
from .sample import Kept, Sample, Scratch

CHUNK_TOKENS = 512
"""Tokens of one inner chunk that the choice of arrays is made for; arrays of some 50 bytes a token get that many."""

_STATISTICS_EVERY = 4
_FIT_ROUNDS = 5
_INDEX_ENTRY_BYTES = 16
_RATE_TOLERANCE = 0.002
# Components this far below the water level stay at zero bits whatever the shape of their distribution.
_HOPELESS = 0.1


@dataclass(frozen=True)
class Columns:
    """The codes of one token in one group of layers, in the order in which they are stored.

    Attributes:
        part: int32 [n_columns], which part of the field (0 keys, 1 values; 0 for hidden states).
        component: int32 [n_columns], row of the part's basis. Two columns of one component are its two digits.
        array: int32 [n_columns], which stored array; not falling.
        levels: int32 [n_columns], levels of the digit.
        step: float32 [n_columns], step of the component's quantiser.
        is_high: float32 [n_columns], 1 for the high digit of a wide code.
        rounding, shift_one, shift_more: float32 [n_columns], see ``allocation``.
    """

    part: np.ndarray
    component: np.ndarray
    array: np.ndarray
    levels: np.ndarray
    step: np.ndarray
    is_high: np.ndarray
    rounding: np.ndarray
    shift_one: np.ndarray
    shift_more: np.ndarray

    def table(self) -> np.ndarray:
        """Return all columns as one float32 array [n_columns, 9]."""
        return np.stack([getattr(self, name) for name in self.__dataclass_fields__], axis=1).astype(np.float32)

    @classmethod
    def from_table(cls, table: np.ndarray) -> Columns:
        """Undo :meth:`table`."""
        integers = ("part", "component", "array", "levels")
        return cls(
            **{
                name: table[:, i].astype(np.int32 if name in integers else np.float32)
                for i, name in enumerate(cls.__dataclass_fields__)
            }
        )

    @property
    def limit(self) -> np.ndarray:
        """The largest magnitude of the component's code: int32 [n_columns]."""
        wide = (self.is_high > 0) | np.isin(
            self.part * (1 << 20) + self.component, (self.part * (1 << 20) + self.component)[self.is_high > 0]
        )
        return np.where(wide, (WIDE_LEVELS - 1) // 2, (self.levels - 1) // 2).astype(np.int32)


@dataclass(frozen=True)
class GroupFit:
    """What is learned for one group of layers.

    Attributes:
        bases: one per part.
        columns: the codes of all parts.
        regressions: for each part, float32 [n_features, width]: token features times this are subtracted from the
            values before the basis. Empty where tokens are not used.
    """

    bases: tuple[Basis, ...]
    columns: Columns
    regressions: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class _FittedPart:
    """One part of one group with its basis, and components [n_tokens, n_components] of sequences not learned from."""

    regression: np.ndarray | None
    basis: Basis
    components: Kept
    variances: np.ndarray
    energy: float


def fit_groups(
    sample: Sample,
    groups: Sequence[int],
    bits_per_token: float,
    metrics: Sequence[Sequence[np.ndarray]] | None = None,
    features: Sequence[np.ndarray] | None = None,
    learning: Learning | None = None,
) -> list[GroupFit]:
    """Fit all groups of a field together, so that the bits leave the least relative error.

    The error is the sum over parts of squared error / sum of squares, over all layers; with metrics it is the sum of
    the errors in these. One part of one group is in memory at a time, or the components of one group.

    Args:
        sample: sequences of the field.
        groups: parts of each group.
        bits_per_token: bytes of the stored arrays times 8, of all groups together.
        metrics: of each part of each group, see ``learn_basis``.
        features: float32 [n_tokens, n_features] of each sequence, to predict the values from; None to do without.
        learning: where products run, and the progress callback.

    Returns:
        One fit per group; unused components are gone from its bases.
    """
    learning = learning or Learning()
    n_steps = sum(groups) + _FIT_ROUNDS + 1
    fitted: list[list[_FittedPart]] = []
    for group, n_parts in enumerate(groups):
        fitted.append([])
        for part in range(n_parts):
            n_done = sum(map(len, fitted))
            learning.progress(n_done, n_steps, f"learn: basis {n_done + 1}/{sum(groups)}")
            metric = None if metrics is None else metrics[group][part]
            fitted[-1].append(_fit_part(sample, group, part, metric, features, learning))
    learning.progress(sum(groups), n_steps, "learn: quantisers")
    part_weights = _part_weights(fitted, metrics)
    weights = [
        np.concatenate([np.full(len(p.variances), weight) for p, weight in zip(parts, own, strict=True)])
        for parts, own in zip(fitted, part_weights, strict=True)
    ]
    variances = [np.concatenate([p.variances for p in parts]) * w for parts, w in zip(fitted, weights, strict=True)]
    level = water_level(np.concatenate(variances), bits_per_token)
    hopeful = [np.union1d(np.flatnonzero(v > _HOPELESS * level), np.argmax(v)) for v in variances]
    kept = [_hopeful_components(sample.scratch, parts, h) for parts, h in zip(fitted, hopeful, strict=True)]
    measured = [
        measure_options(sample.scratch.read(k), w[h], float(np.sqrt(12 * level)))
        for k, w, h in zip(kept, weights, hopeful, strict=True)
    ]
    options = _concatenated(measured)
    ends = np.cumsum([len(h) for h in hopeful])[:-1]
    budget = bits_per_token
    for fit_round in range(_FIT_ROUNDS):
        learning.progress(sum(groups) + 1 + fit_round, n_steps, f"learn: bytes, round {fit_round + 1}")
        index = np.split(allocate(options, budget), ends)
        placed = [
            _place_codes(sample.scratch.read(k), m.quantisers.chosen(i), h, [len(p.variances) for p in parts])
            for k, m, i, h, parts in zip(kept, measured, index, hopeful, fitted, strict=True)
        ]
        stored = sum(bits for _, bits in placed)
        if abs(stored / bits_per_token - 1) < _RATE_TOLERANCE:
            break
        budget *= bits_per_token / stored
    return [_compact(parts, columns) for parts, (columns, _) in zip(fitted, placed, strict=True)]


def _part_weights(
    fitted: Sequence[Sequence[_FittedPart]], metrics: Sequence[Sequence[np.ndarray]] | None
) -> list[list[float]]:
    """Weigh the squared errors of the components of each part of each group.

    One over the sum of squares; with metrics the scale of each, which is not in its basis.
    """
    if metrics is not None:
        return [[metric_scale(metric) for metric in parts] for parts in metrics]
    energies = [max(sum(part.energy for part in parts), 1e-30) for parts in zip(*fitted, strict=True)]
    return [[1 / energy for energy in energies]] * len(fitted)


def _fit_part(
    sample: Sample,
    group: int,
    part: int,
    metric: np.ndarray | None,
    features: Sequence[np.ndarray] | None,
    learning: Learning,
) -> _FittedPart:
    """Learn a basis from most sequences, and keep the components of the others on disk."""
    n = len(sample.lengths)
    others = range(0, n, _STATISTICS_EVERY)
    most = [i for i in range(n) if i % _STATISTICS_EVERY] or list(range(n))
    place, regression = learning.place, None
    rows = sample.rows(group, part, most)
    if features is not None:
        regression = learn_regression([features[i] for i in most], rows, place)
        for i, values in zip(most, rows.sequences, strict=True):
            values -= features[i] @ regression
    basis = learn_basis(rows, metric, place)
    del rows  # before the next ones are read
    rows = sample.rows(group, part, others)
    energy = float(sum(np.square(s, dtype=np.float64).sum() for s in rows.sequences) / len(rows.values))
    for i, values in zip(others, rows.sequences, strict=True):
        if features is not None and regression is not None:
            values -= features[i] @ regression
        values -= basis.mean[mean_rows(0, len(values))]
    components = on_host(place(rows.values) @ place(np.ascontiguousarray(basis.analysis)))
    variances = (components.astype(np.float64) ** 2).mean(0)
    return _FittedPart(regression, basis, sample.scratch.keep(components), variances, energy)


def _hopeful_components(scratch: Scratch, parts: Sequence[_FittedPart], hopeful: np.ndarray) -> Kept:
    """Keep on disk the components that may get bits: float32 [n_tokens, len(hopeful)], part after part."""
    first, chosen = 0, []
    for part in parts:
        own = hopeful[(hopeful >= first) & (hopeful < first + len(part.variances))] - first
        chosen.append(scratch.read(part.components)[:, own])
        first += len(part.variances)
    return scratch.keep(np.concatenate(chosen, axis=1))


def _concatenated(parts: Sequence[Options]) -> Options:
    def join(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)

    names = Quantisers.__dataclass_fields__
    quantisers = Quantisers(*(join([getattr(p.quantisers, name) for p in parts]) for name in names))
    return Options(quantisers, join([p.bits for p in parts]), join([p.error for p in parts]))


def quantise(scaled: np.ndarray, rounding: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Quantise components that are divided by their steps: float32 [n, n_components] -> int32 of the same shape."""
    codes = np.sign(scaled) * np.floor(np.abs(scaled) + rounding)
    return np.asarray(np.clip(codes, -limit, limit), np.int32)


def _place_codes(
    sample: np.ndarray, quantisers: Quantisers, component: np.ndarray, part_sizes: list[int]
) -> tuple[Columns, float]:
    """Put the codes of chosen quantisers into stored arrays; also returns the bits per token that these take.

    Args:
        sample: float32 [n_tokens, n_components].
        component: [n_components], index among all components of the group, part after part.
    """
    if (quantisers.levels == DROPPED).all():  # every group stores something, or readers could not tell its device
        quantisers = replace(quantisers, levels=np.where(np.arange(len(component)) == 0, 3, DROPPED))
    limits = (quantisers.levels - 1) // 2
    codes = quantise(sample / quantisers.step, quantisers.rounding, limits)
    low, high = split_wide(codes)
    is_wide = quantisers.levels == WIDE_LEVELS
    digits = {levels: np.flatnonzero(quantisers.levels == levels) for levels in CODES_PER_BYTE}
    wide = np.flatnonzero(is_wide)
    zero_share = (codes == 0).mean(0)
    order, arrays, levels_of, highs, bits, n_arrays = [], [], [], [], 0.0, 0
    for levels, narrow in digits.items():
        columns = [(c, 0) for c in narrow]
        columns += [(c, 0) for c in wide] if levels == LOW_LEVELS else []
        columns += [(c, 1) for c in wide] if levels == HIGH_LEVELS else []
        if not columns:
            continue
        # Neighbours should be alike, so sort by how often a code is zero; high digits nearly always are.
        columns.sort(key=lambda entry: (-2.0 if entry[1] else -zero_share[entry[0]], entry[0]))
        ids, high_flags = (np.array(x, np.int64) for x in zip(*columns, strict=True))
        packed = pack(np.where(high_flags > 0, high[:, ids], low[:, ids]), levels)
        counts = np.stack([np.bincount(packed[:, i], minlength=256) for i in range(packed.shape[1])]) / len(packed)
        start = 0
        for end in split_by_statistics(counts, CHUNK_TOKENS):
            first, last = start * CODES_PER_BYTE[levels], min(end * CODES_PER_BYTE[levels], len(ids))
            arrays += [n_arrays] * (last - first)
            bits += _stored_bits(packed[:, start:end])
            n_arrays += 1
            start = end
        order += ids.tolist()
        highs += high_flags.tolist()
        levels_of += [levels] * len(ids)
    chosen = np.array(order, np.int64)
    firsts = np.concatenate([[0], np.cumsum(part_sizes)])
    part = np.searchsorted(firsts, component[chosen], side="right") - 1
    columns_table = Columns(
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


def _compact(parts: Sequence[_FittedPart], columns: Columns) -> GroupFit:
    """Drop the components that no column uses."""
    component = columns.component.copy()
    compacted = []
    for part, fitted in enumerate(parts):
        own = columns.part == part
        used, renumbered = np.unique(columns.component[own], return_inverse=True)
        component[own] = renumbered
        basis = fitted.basis
        compacted.append(Basis(basis.mean, basis.synthesis[used], basis.analysis[:, used]))
    regressions = tuple(part.regression for part in parts if part.regression is not None)
    return GroupFit(tuple(compacted), replace(columns, component=component), regressions)
