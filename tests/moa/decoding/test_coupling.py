"""Tokens chosen by keyed noise have the distribution that they should, and those of two models agree often."""

import pytest
import torch

from moa_data.moa.decoding.sampling import GREEDY, SamplingConfig, choose, distribution, noise

V = 12
N = 4000
SAMPLED = SamplingConfig(temperature=0.8, top_k=9, top_p=0.95, repetition_penalty=1.3)


def logits_of(seed: int) -> torch.Tensor:
    return 2 * torch.randn(V, generator=torch.Generator().manual_seed(seed))


def chi_square(counts: torch.Tensor, probability: torch.Tensor) -> float:
    expected = probability * counts.sum()
    held = expected > 0
    assert not counts[~held].any()
    return float(((counts - expected)[held] ** 2 / expected[held]).sum())


@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_choices_have_the_distribution_of_the_settings(over: str) -> None:
    logits, previous = logits_of(0), [1, 4, 4]
    chosen = [
        choose(logits, previous, SAMPLED, *((7, index) if over == "positions" else (index - N // 2, 7)))
        for index in range(N)
    ]
    counts = torch.bincount(torch.tensor(chosen), minlength=V).double()
    # The 99.9th percentile of chi-square with 11 degrees of freedom.
    assert chi_square(counts, distribution(logits, previous, SAMPLED)) < 31.3


def test_noise_is_a_function_of_seed_and_position() -> None:
    assert torch.equal(noise(3, 5, V), noise(3, 5, V))
    kinds = [noise(3, 5, V), noise(3, 6, V), noise(4, 5, V), noise(-3, 5, V), noise(5, 3, V), noise(-(2**63), 5, V)]
    assert len({float(one[0]) for one in kinds}) == len(kinds)
    assert torch.equal(noise(3, 5, 2 * V)[:V], noise(3, 5, V)), "a larger vocabulary changes nothing for the others"
    many = noise(0, 0, 200_000)
    assert many.dtype == torch.float64
    assert many.isfinite().all()
    assert abs(float(many.mean()) - 0.5772) < 0.01, "Euler's constant, the mean of Gumbel noise"
    assert abs(float(many.var()) - 1.6449) < 0.03, "pi^2 / 6, its variance"


def test_the_first_draws_are_those_of_philox() -> None:
    """Client and server may be of different versions of this package: the numbers must stay."""
    assert noise(1, 2, 3).tolist() == pytest.approx(
        [-0.15990158959464357, -0.02969674489144777, -1.1937469859707905], rel=1e-12
    )


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    one = torch.stack([noise(seed, position, V) for seed in range(40) for position in range(40)])
    for other in (one.roll(1, 0), one.roll(40, 0)):
        pair = torch.stack((one.flatten(), other.flatten()))
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.03


def test_two_models_agree_more_often_than_by_independent_draws() -> None:
    sampling = SamplingConfig(temperature=1.0)
    for gap in (0.1, 0.5, 2.0):
        target = logits_of(1)
        drafter = target + gap * logits_of(2) / 2
        p, q = (distribution(logits, [], sampling) for logits in (target, drafter))
        agreed = sum(choose(target, [], sampling, 0, at) == choose(drafter, [], sampling, 0, at) for at in range(N)) / N
        overlap = float(torch.minimum(p, q).sum())
        assert agreed > float((p * q).sum()) + 0.1, "independent draws"
        assert overlap / (2 - overlap) - 0.03 < agreed <= overlap + 0.03, "the known bounds of the Gumbel coupling"


def test_without_temperature_it_is_the_argmax() -> None:
    logits = logits_of(3)
    assert {choose(logits, [], GREEDY, seed, seed) for seed in range(9)} == {int(logits.argmax())}
    penalised = SamplingConfig(repetition_penalty=50.0)
    best = int(logits.argmax())
    assert choose(logits, [best], penalised, 0, 0) == int(logits.topk(2).indices[1])


def test_tokens_that_cannot_come_are_never_chosen() -> None:
    logits = torch.full((V,), -torch.inf)
    logits[[2, 5]] = 0.0
    chosen = {choose(logits, [], SamplingConfig(temperature=1.0), seed, 0) for seed in range(50)}
    assert chosen == {2, 5}
    likeliest = SamplingConfig(temperature=3.0, top_k=1)
    assert {choose(logits_of(4), [], likeliest, seed, 0) for seed in range(50)} == {int(logits_of(4).argmax())}
