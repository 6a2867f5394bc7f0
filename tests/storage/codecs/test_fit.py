"""A transform codec learns means, axes, a metric and the bits of components.

The tests also cover the layout of its codes in bytes.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.storage.codecs import calibration
from moa_data.storage.codecs.calibration import early_means, logit_metric, principal_axes
from moa_data.storage.codecs.coding import (
    CODES_PER_BYTE,
    EARLY_POSITIONS,
    WIDE_LEVELS,
    Pieces,
    mean_rows,
    pack,
    piece_bytes,
    quantise,
    split_wide,
    unpack_table,
)
from moa_data.storage.codecs.fit import (
    Quantisers,
    allocate,
    measure_options,
    split_by_statistics,
    water_level,
)
from moa_data.storage.schema import StoredArray


def test_subspace_iteration_finds_the_exact_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.standard_normal((60, 5)))[0]
    rows = rng.standard_normal((300, 5)) * np.arange(
        5, 0, -1
    ) @ axes.T + 0.01 * rng.standard_normal((300, 60))
    rows = rows.astype(np.float32)
    exact = principal_axes(rows)[:, :5]
    monkeypatch.setattr(calibration, "EXACT_WIDTH", 10)
    monkeypatch.setattr(calibration, "MAX_COMPONENTS", 5)
    np.testing.assert_allclose(principal_axes(rows), exact, atol=1e-4)


def test_early_positions_have_their_own_mean() -> None:
    sequences = [np.arange(n * 3, dtype=np.float32).reshape(n, 3) for n in (2, 20, 20)]
    means = early_means(sequences)
    np.testing.assert_allclose(means[:EARLY_POSITIONS], sequences[1][:EARLY_POSITIONS])
    np.testing.assert_allclose(means[-1], sequences[1][EARLY_POSITIONS:].mean(0))
    assert mean_rows(6, 5).tolist() == [6, 7, 8, 8, 8]
    unreached = early_means([np.ones((2, 3), np.float32), 3 * np.ones((2, 3), np.float32)])
    np.testing.assert_allclose(unreached, 2.0)


def test_logit_metric_predicts_the_divergence_of_small_errors() -> None:
    rng = np.random.default_rng(4)
    head = rng.standard_normal((40, 6)).astype(np.float32)
    hidden = rng.standard_normal((500, 6)).astype(np.float32)
    error = (0.02 * rng.standard_normal(hidden.shape)).astype(np.float32)

    def log_softmax(x: np.ndarray) -> np.ndarray:
        logits: np.ndarray = (x @ head.T).astype(np.float64)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        return logits

    p, q = log_softmax(hidden), log_softmax(hidden + error)
    divergence = (np.exp(p) * (p - q)).sum(1).mean()
    metric = logit_metric(hidden, head, np.asarray, batch_tokens=64)
    assert np.einsum("ni,ij,nj->n", error, metric, error).mean() / 2 == pytest.approx(
        divergence, rel=0.1
    )


@pytest.mark.parametrize("bits", [0.3, 2.0, 9.0, 40.0])
def test_water_level_spends_the_bits(bits: float) -> None:
    variances = np.array([100.0, 30.0, 5.0, 1.0, 0.5, 0.01, 0.0])
    level = water_level(variances, bits)
    assert np.log2(np.maximum(variances / level, 1)).sum() / 2 == pytest.approx(bits)


def test_allocation_is_the_optimum_of_all_choices() -> None:
    rng, n_components, n_options = np.random.default_rng(0), 5, 5
    # The errors are convex enough for a unique optimum.
    bits = np.sort(rng.integers(0, 8, (n_components, n_options)), axis=1).astype(float)
    bits[:, 0] = 0
    error = rng.uniform(1, 50, (n_components, 1)) * 4.0**-bits * rng.uniform(0.9, 1.1, bits.shape)
    filler, at = np.zeros_like(bits), np.arange(n_components)
    options = Quantisers(filler, filler, filler, filler, filler, bits, error)
    every = np.array(list(itertools.product(range(n_options), repeat=n_components)))
    all_bits, all_errors = (own[at, every].sum(1) for own in (bits, error))
    for budget in range(0, 30, 3):
        chosen = allocate(options, budget)
        spent, got = (own[at, chosen].sum() for own in (bits, error))
        assert spent <= budget
        assert got == pytest.approx(all_errors[all_bits <= spent].min())
        assert got <= all_errors[all_bits <= max(0, budget - 7)].min() * (1 + 1e-9)


def test_measured_bits_and_errors_are_those_of_the_codes() -> None:
    rng = np.random.default_rng(1)
    sample = rng.laplace(size=(4000, 3)).astype(np.float32) * np.array([0.4, 3.0, 90.0], np.float32)
    weights = np.array([1.0, 4.0, 0.25])
    options = measure_options(sample, weights, 0.9)
    for component in range(3):
        for option in np.flatnonzero(np.isfinite(options.bits[component]))[17::17]:
            q = options.chosen(np.full(3, option))
            one = Quantisers(*(values[component : component + 1] for values in q))
            x = sample[:, component : component + 1]
            codes = quantise(x / one.step, one.rounding, (one.levels - 1) // 2)
            shift = np.where(np.abs(codes) == 1, one.shift_one, one.shift_more)
            error = (((codes - np.sign(codes) * shift) * one.step - x) ** 2).mean() * weights[
                component
            ]
            assert options.error[component, option] == pytest.approx(error, rel=2e-3)
            share = np.unique(codes, return_counts=True)[1] / len(codes)
            assert -0.02 < options.bits[component, option] + (share * np.log2(share)).sum() < 0.6, (
                "above the entropy"
            )


@pytest.mark.parametrize("bits", [1.0, 3.0])
def test_gaussian_components_come_near_the_bound(bits: float) -> None:
    rng = np.random.default_rng(2)
    variances = 10.0 ** rng.uniform(-2, 2, 24)
    sample = (rng.standard_normal((3000, 24)) * np.sqrt(variances)).astype(np.float32)
    level = water_level(variances, bits * 24)
    options = measure_options(sample, np.ones(24), float(np.sqrt(12 * level)))
    chosen = allocate(options, bits * 24)[:, None]
    error = np.take_along_axis(options.error, chosen, 1).sum()
    low, high = level, variances.max()
    for _ in range(60):
        level = (low + high) / 2
        low, high = (low, level) if np.minimum(variances, level).sum() > error else (level, high)
    assert bits - np.log2(np.maximum(variances / level, 1)).sum() / 2 / 24 < 0.3


def test_bytes_of_other_statistics_are_stored_apart() -> None:
    rare, busy = np.zeros(256), np.full(256, 1 / 256)
    rare[:2] = 0.95, 0.05
    assert split_by_statistics(np.stack([rare] * 8 + [busy] * 8), 1024) == [8, 16]
    assert split_by_statistics(np.stack([busy] * 16), 1024) == [16]


def test_a_component_far_above_the_others_is_not_clipped() -> None:
    rng = np.random.default_rng(3)
    sample = (rng.standard_normal((2000, 2)) * np.array([1e5, 1.0])).astype(np.float32)
    options = measure_options(sample, np.ones(2), 0.1)
    chosen = options.chosen(allocate(options, 18.0))
    assert chosen.step[0] * (chosen.levels[0] // 2) > np.abs(sample[:, 0]).max()
    assert options.error[0].min() < 1e-6 * (sample[:, 0] ** 2).mean()


# Codes in bytes, and runs of bytes in pieces


@settings(max_examples=40)
@given(
    levels=st.sampled_from(sorted(CODES_PER_BYTE)),
    n_codes=st.integers(1, 17),
    seed=st.integers(0, 99),
)
def test_packing_round_trips_on_both_libraries(levels: int, n_codes: int, seed: int) -> None:
    top = levels // 2
    codes = np.random.default_rng(seed).integers(-top, top + 1, (5, n_codes)).astype(np.int16)
    packed = pack(codes, levels)
    assert packed.dtype == np.uint8
    assert packed.shape == (5, -(-n_codes // CODES_PER_BYTE[levels]))
    np.testing.assert_array_equal(unpack_table(levels)[packed].reshape(5, -1)[:, :n_codes], codes)
    np.testing.assert_array_equal(pack(torch.from_numpy(codes), levels).numpy(), packed)
    assert not pack(np.zeros_like(codes), levels).any(), "as the padding between sequences"
    assert np.abs(unpack_table(levels)).max() == top, "every byte decodes in range"


def test_wide_codes_are_two_digits() -> None:
    top = WIDE_LEVELS // 2
    codes = np.arange(-top, top + 1)
    low, high = split_wide(codes)
    np.testing.assert_array_equal(low + 255 * high, codes)
    assert (np.abs(low).max(), np.abs(high).max()) == (127, 7)


WIDTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=30)
@given(widths=WIDTHS, n_bytes=st.integers(1, 50), seed=st.integers(0, 99), data=st.data())
def test_runs_come_back_from_the_pieces_of_their_groups(
    widths: list[list[int]], n_bytes: int, seed: int, data: st.DataObject
) -> None:
    runs = [
        [
            StoredArray(f"kv/codes_{g:02d}_{r:02d}", "uint8", (width,), ("token", "byte"))
            for r, width in enumerate(own)
        ]
        for g, own in enumerate(widths)
    ]
    pieces = Pieces("kv/codes", runs, n_bytes)
    rng = np.random.default_rng(seed)
    codes = {
        run.name: rng.integers(0, 256, (3, run.row_bytes), np.uint8)
        for group in runs
        for run in group
    }
    whole = pieces.join(codes)
    assert whole.shape == (3, *pieces.array.row_shape)
    on_torch = pieces.join({name: torch.from_numpy(rows) for name, rows in codes.items()})
    np.testing.assert_array_equal(on_torch.numpy(), whole)
    groups = data.draw(st.lists(st.sampled_from(range(len(widths))), unique=True, min_size=1))
    rows = whole[:, pieces.of_groups(groups)]
    expected = {run.name: codes[run.name] for group in groups for run in runs[group]}
    for split in (pieces.split(rows, groups), pieces.split(torch.from_numpy(rows), groups)):
        assert list(split) == list(expected)
        for name, part in split.items():
            np.testing.assert_array_equal(np.asarray(part), expected[name])


def test_narrow_groups_keep_their_runs_apart() -> None:
    assert piece_bytes([1100, 900]) == piece_bytes([1000, 1047])
    assert [piece_bytes([width]) for width in (1, 1023, 1024, 2047, 2048, 9000)] == [
        0,
        0,
        96,
        96,
        192,
        192,
    ]
