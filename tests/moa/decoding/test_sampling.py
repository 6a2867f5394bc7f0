"""Speculative sampling has the target's distribution.

Tests enumerate every draw, or compare whole runs by chi-square.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moa_data.errors import DrafterError
from moa_data.moa.decoding import sampling
from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import (
    GREEDY,
    SamplingConfig,
    accept_sampled,
    choose,
    distribution,
)
from moa_data.moa.decoding.tree import DraftTree, TreeShape
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.variants import quick, quick_rows

V = 4


Pick = Callable[[Sequence[float]], int]


def outcomes(
    monkeypatch: pytest.MonkeyPatch, procedure: Callable[[Pick], Any]
) -> Iterator[tuple[Any, float]]:
    """Yield every outcome of a procedure's draws, with its probability."""
    pending: list[list[int]] = [[]]  # prefixes of draws that are still to be run
    forced, taken, probability = list[int](), list[int](), 1.0

    def pick(weights: Sequence[float]) -> int:
        nonlocal probability
        if len(taken) == len(forced):
            first, *others = (index for index, weight in enumerate(weights) if weight > 0)
            pending.extend([*taken, index] for index in others)
            forced.append(first)
        taken.append(forced[len(taken)])
        probability *= weights[taken[-1]] / sum(weights)
        return taken[-1]

    monkeypatch.setattr(
        sampling, "_accepts", lambda ratio, _: pick([1 - min(1, ratio), min(1, ratio)]) == 1
    )
    monkeypatch.setattr(sampling, "draw_rows", lambda weights, _: pick(weights[0].tolist()))
    while pending:
        forced, taken, probability = pending.pop(), [], 1.0
        yield procedure(pick), probability


@pytest.fixture
def logits() -> Any:
    """Return logits for a chain or tree of up to 6 nodes over a vocabulary of 4."""
    return torch.randn(7, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2


CONFIGS = [
    SamplingConfig(1.0),
    SamplingConfig(0.7, top_p=0.8),
    SamplingConfig(1.3, top_k=2, repetition_penalty=1.5),
    SamplingConfig(
        1.2, min_p=0.1, presence_penalty=0.9, frequency_penalty=0.4, logit_bias=((3, 1.5),)
    ),
]


def chi_square(counts: torch.Tensor, probability: torch.Tensor) -> float:
    expected = probability * counts.sum()
    held = expected > 0
    assert not counts[~held].any()
    return float(((counts - expected)[held] ** 2 / expected[held]).sum())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_picked_trees_give_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch, logits: Any, config: Any
) -> None:
    # The root has two children; the first has two children, the second has one.
    tree = DraftTree(torch.tensor([[0, 2, 1, 3, 0]]), torch.tensor([[-1, -1, 0, 0, 1]]))
    got: Counter[Any] = Counter()
    for (accepted, bonus), probability in outcomes(
        monkeypatch, lambda _: accept_sampled(tree, 0, logits, [1, 2], config, None)
    ):
        got[(*(int(tree.tokens[0, node]) for node in accepted), bonus)[:2]] += probability  # type: ignore[assignment]
    # Each first token is expected, with each second token if a draft covers the first one.
    first = distribution(logits[0], [1, 2], config)
    wanted: dict[tuple[int, ...], float] = {(token,): float(first[token]) for token in (1, 3)}
    for token, node in ((0, 0), (2, 1)):
        second = distribution(logits[node + 1], [1, 2, token], config)
        wanted |= {(token, after): float(first[token] * second[after]) for after in range(V)}
    assert sum(got.values()) == pytest.approx(1)
    assert {path: got[path] for path in wanted} == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("config", CONFIGS[:2], ids=str)
def test_drawn_chains_give_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch, logits: Any, config: Any
) -> None:
    """The drafts themselves are drawn from q, so their draws are enumerated too."""
    proposal = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.0, 0.5, 0.4]], dtype=torch.float64)

    def first_token(pick: Pick) -> int:
        drafts = [pick(row.tolist()) for row in proposal]
        tree = DraftTree.chain(torch.tensor([drafts]), proposal[None])
        accepted, bonus = accept_sampled(tree, 0, logits, [1, 2], config, None)
        return [*(drafts[node] for node in accepted), bonus][0]

    first = [0.0] * V
    for token, probability in outcomes(monkeypatch, first_token):
        first[token] += probability
    assert first == pytest.approx(distribution(logits[0], [1, 2], config).tolist(), abs=1e-12)


def test_rows_are_drawn_in_proportion_each_with_its_own_numbers() -> None:
    """Draws from unnormalised rows pass chi-square; a row draws the same alone and in a batch."""
    weights = torch.tensor(
        [[0.0, 3.0, 1.0, 0.0, 4.0], [5.0, 0.0, 0.0, 0.0, 0.1]], dtype=torch.float64
    )
    generators, n_draws = [torch.Generator().manual_seed(seed) for seed in (1, 2)], 4000
    drawn = torch.stack([sampling.draw_rows(weights, generators) for _ in range(n_draws)])
    for row, weight in enumerate(weights):
        counts = torch.bincount(drawn[:, row], minlength=5)
        # With at most two degrees of freedom, p = 5e-5.
        assert chi_square(counts, weight / weight.sum()) < 20
        again = torch.Generator().manual_seed(row + 1)
        assert [int(sampling.draw_rows(weight[None], [again])) for _ in range(9)] == drawn[
            :9, row
        ].tolist()


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.5, 2), (1 - 2**-53, 2)])
def test_the_ends_of_the_unit_interval_give_tokens_with_mass(
    monkeypatch: pytest.MonkeyPatch, uniform: float, token: int
) -> None:
    monkeypatch.setattr(
        torch, "rand", lambda *_args, **_kwargs: torch.tensor([uniform], dtype=torch.float64)
    )
    for total in (1.0, 1.7, 1 / 3):
        assert (
            int(
                sampling.draw_rows(
                    torch.tensor([[0.0, 0.5, 0.5, 0.0]], dtype=torch.float64) * total, [None]
                )
            )
            == token
        )


@pytest.mark.parametrize(
    ("n_words", "scale"), [(50, 1.0), (3000, 0.0), (3000, 0.3), (3000, 3.0)], ids=str
)  # few tokens of a large vocabulary hold the mass, or nearly all tokens do
def test_distribution_follows_transformers(n_words: int, scale: float) -> None:
    logits = scale * torch.randn(
        n_words, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    logits += torch.linspace(0, 1e-6, n_words, dtype=torch.float64)  # avoids ties
    given, previous = logits.clone(), [3, 9, 9, 14]
    for temperature, top_k, top_p, penalty in itertools.product(
        (0.6, 1.7), (0, 8), (0.5, 0.9, 1.0), (1.0, 1.4)
    ):
        warpers = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        chain = LogitsProcessorList(warpers)
        expected = chain(torch.LongTensor([previous]), logits[None].clone())[0].softmax(-1)
        got = distribution(logits, previous, SamplingConfig(temperature, top_p, top_k, penalty))
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(logits, given)


def test_bias_penalties_and_min_p_as_vllm_defines_them() -> None:
    logits, previous, n_prompt = logits_of(4), [1, 2, 2, 5, 2, 5, 7], 3
    bias, repetition, presence, frequency = {7: -3.0, 0: 2.5}, 1.4, 0.8, 0.3
    config = SamplingConfig(
        0.7, min_p=0.05, repetition_penalty=repetition, presence_penalty=presence,
        frequency_penalty=frequency, logit_bias=tuple(bias.items()),
    )  # fmt: skip
    scores = [float(value) + bias.get(token, 0.0) for token, value in enumerate(logits.tolist())]
    scores = [
        (value / repetition if value > 0 else value * repetition) if token in previous else value
        for token, value in enumerate(scores)
    ]
    times = Counter(previous[n_prompt:])
    scores = [
        value - presence * (times[token] > 0) - frequency * times[token]
        for token, value in enumerate(scores)
    ]
    p = (torch.tensor(scores, dtype=torch.float64) / 0.7).softmax(-1)
    p = torch.where(p >= 0.05 * p.max(), p, 0.0)
    torch.testing.assert_close(
        distribution(logits, previous, config, n_prompt), p / p.sum(), rtol=1e-6, atol=1e-9
    )
    greedy = replace(config, temperature=0.0)
    assert choose(logits, previous, greedy, 0, 0, n_prompt) == int(torch.tensor(scores).argmax())
    assert not greedy.is_argmax


@pytest.mark.parametrize(
    "tree", quick([TreeShape(3), TreeShape(2, 2, 5)], [TreeShape(2, 2, 5)]), ids=str
)
def test_whole_runs_have_the_targets_distribution(tree: Any) -> None:
    """The answers of many runs match the exact distribution by chi-square."""
    target = Target(build_model(num_hidden_layers=2))
    target.eos_token_ids = frozenset()
    drafter = build_drafter(target.model)
    config, n_runs, prompt = SamplingConfig(1.0, top_k=3, presence_penalty=1.0), 1500, [7, 8, 9]
    runs = generate_batch(
        target, [prompt] * n_runs, max_new_tokens=3,
        proposer=DrafterProposer(target, drafter, config), tree=tree, sampling=config, seed=11,
    )  # fmt: skip
    counts, exact = (
        Counter(tuple(run.tokens) for run in runs),
        exact_answers(target, prompt, config, 3),
    )
    assert counts.keys() <= exact.keys()
    found = chi_square(
        torch.tensor([counts[answer] for answer in exact]), torch.tensor(list(exact.values()))
    )
    # Chi-square has mean n - 1 and variance 2 (n - 1); allow five standard deviations.
    assert found < len(exact) - 1 + 5 * (2 * (len(exact) - 1)) ** 0.5


def exact_answers(target: Any, prompt: Any, config: Any, n_tokens: Any) -> Any:
    """Return every answer of that length with its probability."""
    answers = {(): 1.0}
    for _ in range(n_tokens):
        longer: dict[Any, Any] = {}
        for answer, probability in answers.items():
            path = [*prompt, *answer]
            hidden = target.forward(torch.tensor([path]), target.new_cache())
            following = distribution(target.logits(hidden[0, -1]), path, config, len(prompt))
            longer |= {
                (*answer, t): probability * float(p)
                for t, p in enumerate(following.tolist())
                if p > 0
            }
        answers = longer
    return answers


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.2},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"min_p": 1.1},
    ],
)
def test_settings_without_a_meaning_are_refused(
    settings: dict[str, float] | dict[str, int],
) -> None:
    with raises_naming(DrafterError, *settings, *settings.values()):
        SamplingConfig(**settings)


# Tokens chosen by noise that depends on seed and position

N_WORDS, N_DRAWS = 12, 1000
SAMPLED = SamplingConfig(temperature=0.8, top_k=9, top_p=0.95, repetition_penalty=1.3)


def logits_of(seed: int) -> torch.Tensor:
    return 2 * torch.randn(N_WORDS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_choices_have_the_distribution_of_the_settings(over: str) -> None:
    logits, previous = logits_of(0), [1, 4, 4]
    chosen = [
        choose(
            logits,
            previous,
            SAMPLED,
            *((7, index) if over == "positions" else (index - N_DRAWS // 2, 7)),
        )
        for index in range(N_DRAWS)
    ]
    counts = torch.bincount(torch.tensor(chosen), minlength=N_WORDS).double()
    # This is the 99.9th percentile of chi-square with 11 degrees of freedom.
    assert chi_square(counts, distribution(logits, previous, SAMPLED)) < 31.3


def noise_of_all(seed: int, position: int, n_words: int) -> torch.Tensor:
    """Compute the noise of every token by its definition."""
    key = np.array([seed % 2**64, position], dtype=np.uint64)
    uniform = (
        (np.random.Philox(key=key).random_raw(n_words) >> np.uint64(12)).astype(np.float64) + 0.5
    ) * 2.0**-52
    return torch.from_numpy(-np.log(-np.log(uniform)))


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    # Client and server may have different versions of this package, so the numbers must not change.
    first = [-0.15990158959464357, -0.02969674489144777, -1.1937469859707905]
    assert sampling.noise(1, 2, np.arange(3)).tolist() == pytest.approx(first, rel=1e-12)
    kinds = [(3, 5), (3, 6), (4, 5), (-3, 5), (5, 3), (-(2**63), 5)]
    assert len({float(sampling.noise(*key, np.arange(1))[0]) for key in kinds}) == len(kinds)
    random = np.random.default_rng(0)
    for seed, position in kinds:
        every = noise_of_all(seed, position, 20_000)
        for n in (1, 2, 20, 40, 3000):
            tokens = np.sort(random.choice(20_000, n, replace=False))
            assert torch.equal(sampling.noise(seed, position, tokens), every[tokens])
    many = sampling.noise(0, 0, np.arange(200_000))
    assert many.isfinite().all()
    assert abs(float(many.mean()) - 0.5772) < 0.01, "Euler's constant, the mean of Gumbel noise"
    assert abs(float(many.var()) - 1.6449) < 0.03, "pi^2 / 6, its variance"


def some_logits(index: int, n_words: int) -> torch.Tensor:
    """Return logits whose kind depends on the index.

    They are flat, steep, with ties as in bfloat16, with impossible tokens, or all equal.
    """
    logits = torch.randn(n_words, generator=torch.Generator().manual_seed(index))
    kinds = [
        logits,
        8 * logits,
        (3 * logits).bfloat16(),
        logits.masked_fill(logits < 0.5, -torch.inf),
        0 * logits,
    ]
    return kinds[index % len(kinds)].float()


@pytest.mark.parametrize(
    ("n_words", "n_plain"),
    quick_rows(
        itertools.product((12, 250, 1100, 5000), (0, 8192)),
        [(12, 0), (250, 0), (1100, 0), (5000, 0), (12, 8192), (5000, 8192)],
    ),
)
def test_the_choice_is_that_of_noise_for_every_token(
    n_words: int, n_plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all settings, the token with the largest log p + noise is chosen, the first of ties."""
    monkeypatch.setattr(sampling, "_N_PLAIN", n_plain)
    settings = itertools.product(
        (0.02, 0.7, 1.0, 50.0), (0, 1, 50, 900), (0.3, 0.95, 1.0), (1.0, 1.3)
    )
    for index, (temperature, top_k, top_p, penalty) in enumerate(settings, start=1):
        config = SamplingConfig(temperature, top_p, top_k, penalty)
        logits, seed, position = (
            some_logits(index, n_words),
            977 * index * (-1) ** (index // 2),
            index % 300,
        )
        log_p = distribution(logits, [3, 7, 7], config).log()
        expected = int((log_p + noise_of_all(seed, position, n_words)).argmax())
        assert choose(logits, [3, 7, 7], config, seed, position) == expected, (config, index)


def test_the_choice_is_that_of_noise_for_every_token_of_a_large_vocabulary() -> None:
    for index in range(20):
        logits, config = (
            some_logits(index, 128_256),
            SamplingConfig(0.8, 1.0, 0 if index % 3 else 400),
        )
        log_p = distribution(logits, [], config).log()
        expected = int((log_p + noise_of_all(index, 2 * index, 128_256)).argmax())
        assert choose(logits, [], config, index, 2 * index) == expected


@pytest.mark.parametrize("n_plain", [0, 8192])
def test_logits_that_are_no_numbers_give_a_token(
    n_plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_N_PLAIN", n_plain)
    for config in (SamplingConfig(1.0), SamplingConfig(1.0, top_p=0.5)):
        assert choose(torch.full((300,), torch.nan), [], config, 1, 2) == 0


def test_two_models_agree_more_often_than_by_independent_draws() -> None:
    sampling = SamplingConfig(temperature=1.0)
    for gap in (0.1, 2.0):
        target = logits_of(1)
        drafter = target + gap * logits_of(2) / 2
        p, q = (distribution(logits, [], sampling) for logits in (target, drafter))
        n_agreed = sum(
            choose(target, [], sampling, 0, position) == choose(drafter, [], sampling, 0, position)
            for position in range(N_DRAWS)
        )
        agreed = n_agreed / N_DRAWS
        overlap = float(torch.minimum(p, q).sum())
        assert agreed > float((p * q).sum()) + 0.1, "independent draws"
        assert overlap / (2 - overlap) - 0.03 < agreed <= overlap + 0.03, (
            "the known bounds of the Gumbel coupling"
        )


def test_without_temperature_it_is_the_argmax() -> None:
    logits = logits_of(3)
    best, second = logits.topk(2).indices.tolist()
    assert {choose(logits, [], GREEDY, seed, seed) for seed in range(9)} == {best}
    assert choose(logits, [best], SamplingConfig(repetition_penalty=50.0), 0, 0) == second
