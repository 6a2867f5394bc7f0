"""Bits to components: against an exact search, the rate-distortion bound, and the codes themselves."""

import itertools

import numpy as np
import pytest

from moa_data.storage.codecs.coding import quantise
from moa_data.storage.codecs.fit import Quantisers, allocate, measure_options, split_by_statistics, water_level


@pytest.mark.parametrize("bits", [0.3, 2.0, 9.0, 40.0])
def test_water_level_spends_the_bits(bits: float) -> None:
    variances = np.array([100.0, 30.0, 5.0, 1.0, 0.5, 0.01, 0.0])
    level = water_level(variances, bits)
    assert np.log2(np.maximum(variances / level, 1)).sum() / 2 == pytest.approx(bits)


def test_allocation_is_the_optimum_of_all_choices() -> None:
    rng, n_components, n_options = np.random.default_rng(0), 5, 5
    # Convex enough that the optimum is unique.
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
            one = Quantisers(*(values[component : component + 1] for values in vars(q).values()))
            x = sample[:, component : component + 1]
            codes = quantise(x / one.step, one.rounding, (one.levels - 1) // 2)
            shift = np.where(np.abs(codes) == 1, one.shift_one, one.shift_more)
            error = (((codes - np.sign(codes) * shift) * one.step - x) ** 2).mean() * weights[component]
            assert options.error[component, option] == pytest.approx(error, rel=2e-3)
            share = np.unique(codes, return_counts=True)[1] / len(codes)
            assert -0.02 < options.bits[component, option] + (share * np.log2(share)).sum() < 0.6, "above the entropy"


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
