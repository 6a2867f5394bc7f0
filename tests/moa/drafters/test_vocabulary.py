"""Drafters that draft fewer tokens than their target has, and their default number of tokens."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.vocabulary import choose_draft_vocabulary, coverage, most_frequent
from moa_data.moa.formats.checkpoint import (
    LAYOUTS,
    export_problems,
    load_drafter,
    save_drafter,
    write_layout,
)
from moa_data.moa.nn import packed
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import PAPER, build, frozen_for, token_counts
from moa_data.tests.kit.models import build_model, random_prompts
from moa_data.tests.kit.variants import quick, quick_rows

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "moa": ("moa", {}),
    "eagle": ("eagle", {}),
    "glide": ("glide", {}),
    "medusa": ("medusa", {}),
    "independent": ("independent", {}),
    "dflash": ("dflash", {}),
    "dspark": ("dspark", {"markov_rank": 8}),
    "dspark without a Markov head": ("dspark", {"markov_head": "none"}),
}
N_DRAFTED = 30


def zipf_counts(n_tokens: int, n_counted: int, power: float = 1.2) -> torch.Tensor:
    """Return Zipf counts of two equal halves of a text.

    The token of rank r has a frequency proportional to r ** -power, and ids are ranks.
    """
    shares = torch.arange(1, n_tokens + 1, dtype=torch.float64) ** -power
    return (shares / shares.sum() * n_counted / 2).long().expand(2, -1)


@pytest.mark.parametrize(
    ("name", "is_prepared"),
    quick_rows(
        itertools.product(KINDS, (False, True)),
        [
            *((name, False) for name in KINDS),
            *((name, True) for name in ("moa", "medusa", "independent", "dspark")),
        ],
    ),
)
def test_the_most_frequent_tokens_are_drafted(
    name: str, is_prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their logits equal those of a drafter of all tokens, also after saving and loading.

    Other tokens are never drafted.
    """
    kind, sizes = KINDS[name]
    model = build_model(num_hidden_layers=2)
    of_all = build(kind, model, **sizes)
    frozen = frozen_for(of_all, model)
    own = build(kind, model, draft_vocabulary=N_DRAFTED, **sizes)
    save_drafter(own, tmp_path)
    chosen = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    chosen[list(own.config.draft_tokens)] = True
    counts = token_counts()
    assert int(chosen.sum()) == N_DRAFTED
    assert counts[chosen].min() >= counts[~chosen].max()

    features = torch.randn(2, 3, 48 + 8 * (name == "dspark"))
    if kind == "independent":
        features = features[..., : own.config.independent_width]
    expected = of_all.draft_logits(frozen, features)
    if is_prepared:
        monkeypatch.setattr(packed, "_FEWEST_VALUES", 1)
        frozen.prepare()
    for drafter in (own, load_drafter(tmp_path)):
        if is_prepared:
            drafter.prepare()
        with torch.inference_mode(is_prepared):
            logits = drafter.draft_logits(frozen, features)
        tolerance = 2e-2 if is_prepared else 1e-5  # prepared weights are rounded to float16
        torch.testing.assert_close(
            logits[..., chosen], expected[..., chosen], rtol=tolerance, atol=tolerance
        )
        assert bool(torch.isneginf(logits[..., ~chosen]).all())


@pytest.mark.parametrize("name", quick(KINDS, ("moa", "medusa", "independent", "dspark")))
def test_decoding_gives_the_same_tokens(name: str) -> None:
    kind, sizes = KINDS[name]
    target = Target(build_model(num_hidden_layers=2))
    drafter = build(kind, target.model, draft_vocabulary=N_DRAFTED, **sizes)
    prompt = random_prompts(7, 7)[0]
    expected = plain_generate(target, prompt, max_new_tokens=8)
    proposer = DrafterProposer(target, drafter)
    (found,) = generate_batch(
        target, [prompt], max_new_tokens=8, proposer=proposer, tree=TreeShape(3)
    )
    assert found.tokens == expected.tokens


@pytest.mark.parametrize(
    ("kind", "name"), [("eagle", "vllm-eagle"), ("moa", "moa-vllm"), ("dflash", "dflash")]
)
def test_formats_of_other_programs_hold_it_all_the_same(
    kind: str, name: str, tmp_path: Path
) -> None:
    """Readers of these formats draft all tokens with the target's head.

    So the files hold the weights of a drafter of all tokens.
    """
    model, sizes = build_model(), PAPER if kind == "moa" else {}
    of_all = build(kind, model, **sizes)
    own = build(kind, model, draft_vocabulary=N_DRAFTED, **sizes)
    assert export_problems(own.config)[name] == export_problems(of_all.config)[name] == []
    found = []
    for drafter, folder in ((of_all, tmp_path / "all"), (own, tmp_path / "own")):
        write_layout(drafter, LAYOUTS[name], folder)
        config = json.loads((folder / "config.json").read_text())
        del config["moa_data"]
        found.append((config, load_file(folder / "model.safetensors")))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)
    assert load_drafter(tmp_path / "own").config.draft_tokens == own.config.draft_tokens


def test_rows_follow_a_head_that_moves() -> None:
    """A head that moves in memory, as to another device, is noticed."""
    model = build_model()
    drafter, features = build("eagle", model, draft_vocabulary=N_DRAFTED), torch.randn(1, 1, 48)
    frozen = frozen_for(drafter, model)
    before = drafter.draft_logits(frozen, features)
    frozen.lm_head_weight.data = -2 * frozen.lm_head_weight.data
    after = drafter.draft_logits(frozen, features)
    tokens = list(drafter.config.draft_tokens)
    torch.testing.assert_close(after[..., tokens], -2 * before[..., tokens])


def test_small_vocabularies_are_drafted_whole() -> None:
    chosen = choose_draft_vocabulary(zipf_counts(4096, 1_000_000), 400, 1_600_000, 16_000_000)
    assert chosen.n_tokens == 0


def test_large_heads_are_drafted_in_part() -> None:
    """With SmolLM2-135M and EAGLE-2, the head takes most of the time of a draft."""
    counts = zipf_counts(49_152, 100_000)
    chosen = choose_draft_vocabulary(counts, 576, 4_200_000, 134_500_000)
    assert 4096 <= chosen.n_tokens <= 8192
    assert f"{coverage(counts, chosen.n_tokens):.1%}" in chosen.why


def test_a_head_that_is_a_small_part_is_drafted_whole() -> None:
    counts = zipf_counts(32_000, 1_000_000)
    assert choose_draft_vocabulary(counts, 8192, 2_000_000_000, 70_000_000_000).n_tokens == 0


def test_text_of_many_different_tokens_needs_more_of_them() -> None:
    few = choose_draft_vocabulary(
        zipf_counts(128_256, 10_000_000, 1.5), 4096, 250_000_000, 8_000_000_000
    )
    many = choose_draft_vocabulary(
        zipf_counts(128_256, 10_000_000, 0.9), 4096, 250_000_000, 8_000_000_000
    )
    assert 0 < few.n_tokens < (many.n_tokens or 128_256)


def test_at_most_as_many_tokens_as_a_drafter_has_rows_for() -> None:
    counts = zipf_counts(49_152, 1_000_000, 0.8)
    assert choose_draft_vocabulary(
        counts, 576, 4_200_000, 134_500_000, most_tokens=6000
    ).n_tokens in (0, 4096)


def test_coverage_is_that_of_further_text() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = (1 + torch.randperm(20_000, generator=generator, dtype=torch.float64)) ** -1.1
    draws = [
        torch.multinomial(shares, 5000, replacement=True, generator=generator) for _ in range(3)
    ]
    counts, *halves = (torch.bincount(one, minlength=20_000) for one in draws)
    for n_tokens in (500, 2000, 8000):
        real = float(halves[0][most_frequent(counts, n_tokens)].sum()) / 5000
        assert coverage(torch.stack(halves), n_tokens) == pytest.approx(real, abs=0.02)
    assert coverage(torch.stack(halves), 20_000) == 1.0
