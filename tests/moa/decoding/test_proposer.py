"""Shapes of drafts, the order of candidates, early stops of unsure chains, and prompt lookup."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moa_data.errors import DrafterError
from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer, PromptLookupProposer
from moa_data.moa.decoding.sampling import GREEDY, SamplingConfig
from moa_data.moa.decoding.tree import DraftTree, TreeShape, most_likely
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build_drafter, build_eagle, build_glide
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.variants import quick_rows

LENGTH = 6
N_NEW = 13
ALONE, BATCH = [[5, 6, 7]], [[5, 6, 7], [9, 9, 9], [31, 12, 4]]


def first_round(
    target: Target, drafter: Drafter, prompts: list[list[int]], shape: TreeShape
) -> DraftTree:
    """Draft after prompts of equal length and the target's next token."""
    cache = target.new_cache(len(prompts))
    hidden = target.forward(torch.tensor(prompts), cache)
    kept = [range(len(prompts[0]))] * len(prompts)
    cache.commit(kept)
    proposer = DrafterProposer(FrozenTarget.from_model(target.model, 0), drafter)
    proposer.begin(cache)
    proposer.observe(hidden, kept)
    roots = target.logits(hidden[:, -1]).argmax(dim=-1).tolist()
    return proposer.propose(
        [[*prompt, root] for prompt, root in zip(prompts, roots, strict=True)], shape
    )


@pytest.mark.parametrize(
    ("build", "prompts"),
    quick_rows(
        itertools.product((build_drafter, build_eagle, build_glide), (ALONE, BATCH)),
        [(build_drafter, BATCH), (build_eagle, BATCH), (build_glide, ALONE)],
    ),
)
def test_a_chain_stops_behind_the_first_draft_that_makes_it_too_unlikely(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., Drafter], prompts: list[list[int]]
) -> None:
    model = build_model(eos_token_id=None, num_hidden_layers=2)
    target, drafter = Target(model), build(model)
    said, logits_of = [], drafter.draft_logits

    def noting(frozen: FrozenTarget, features: torch.Tensor) -> torch.Tensor:
        said.append(logits_of(frozen, features))
        return said[-1]

    monkeypatch.setattr(drafter, "draft_logits", noting)
    full = first_round(target, drafter, prompts, TreeShape(LENGTH))
    assert full.n_nodes == LENGTH
    likeliest = torch.stack(said).log_softmax(dim=-1).amax(dim=-1)  # [LENGTH, B]
    probability = likeliest.cumsum(dim=0).exp().mean(dim=1)
    assert 0 < probability[-1] < probability[0] < 1
    for level in range(LENGTH):
        for factor, expected in ((0.999, level + 2), (1.001, level + 1)):
            shape = TreeShape(LENGTH, stop_below=float(probability[level]) * factor)
            found = first_round(target, drafter, prompts, shape)
            assert found.n_nodes == min(expected, LENGTH)
            assert found.tokens.tolist() == full.tokens[:, : found.n_nodes].tolist()


@pytest.mark.parametrize("text", ["5", "10@0.2", "7c0.3", "6x8x62"])
def test_shapes_are_read_from_text(text: str) -> None:
    assert str(TreeShape.parse(text)) == text
    assert TreeShape.parse("2X3X4") == TreeShape(2, 3, 4)
    assert TreeShape.parse("5@0") == TreeShape(5)
    assert TreeShape.parse("6@0.2").cut(3) == TreeShape.parse("3@0.2")


@pytest.mark.parametrize(
    "text",
    ["six", "6x8", "static:16", "²", "0", "3x-1x5", "6x8x5", "99x99x999", "5@", "5c", "5c0.2@0.3",
     "5c1", "6x8x62c0.2", "@0.5", "5@often", "5@1", "5@-0.1", "5@nan", "6x8x62@0.2"],
)  # fmt: skip
def test_shapes_without_a_meaning_are_refused(text: str) -> None:
    with pytest.raises(DrafterError):
        TreeShape.parse(text)
    with pytest.raises(DrafterError):
        TreeShape(5, stop_below=0.1, cut_below=0.1)


def test_equal_scores_stand_in_the_order_of_their_indices() -> None:
    scores = torch.randint(0, 4, (3, 5, 40), generator=torch.Generator().manual_seed(2)).float()
    values, indices = most_likely(scores, 12)
    for row, found, at in zip(
        *(one.flatten(0, 1).tolist() for one in (scores, values, indices)), strict=True
    ):
        assert found == sorted(row, reverse=True)[:12]
        assert [row[index] for index in at] == found
        assert all(
            one < other
            for one, other, a, b in zip(at, at[1:], found, found[1:], strict=False)
            if a == b
        )


# Prompt lookup


def proposed(*rows: list[int], length: int = 3) -> list[list[int]]:
    return (
        PromptLookupProposer(torch.device("cpu")).propose(rows, TreeShape(length)).tokens.tolist()
    )


def test_the_longest_and_latest_occurrence_wins() -> None:
    assert proposed([1, 2, 3, 9, 9, 3, 4, 1, 2, 3]) == [[9, 9, 3]]
    assert proposed([5, 1, 7, 5, 2, 8, 5]) == [[2, 8, 5]]
    assert proposed([5, 1, 5]) == [[1, 5]]
    assert proposed([1, 2, 3]) == [[]]
    assert proposed([1, 2, 3], [4, 6, 4]) == [[-1, -1], [6, 4]]


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(0.8, top_k=3), SamplingConfig(repetition_penalty=1.1), GREEDY],
    ids=str,
)
def test_a_row_is_in_a_batch_what_it_is_alone(sampling: SamplingConfig) -> None:
    """A row has the same result in a batch, also if it finds fewer drafts than others, or none."""
    target = Target(build_model(eos_token_id=None, num_hidden_layers=2))
    prompts = [[9, 10, 11], [5, 6, 7, 8, 5, 6], [3, 4, 3, 4, 3, 4, 3], [20, 21, 22, 23, 24, 25]]
    settings: dict[str, Any] = {
        "max_new_tokens": N_NEW, "proposer": PromptLookupProposer(target.device), "tree": TreeShape(4),
        "sampling": sampling,
    }  # fmt: skip
    together = generate_batch(target, prompts, seed=range(5, 9), **settings)
    for seed, prompt, found in zip(range(5, 9), prompts, together, strict=True):
        (alone,) = generate_batch(target, [prompt], seed=seed, **settings)
        assert found.tokens == alone.tokens
        assert found.stats.committed_per_call == alone.stats.committed_per_call
        # Greedy decoding cuts drafts to the longest chain that any row can use.
        if sampling.temperature:
            assert found.stats.n_drafted == alone.stats.n_drafted
        else:
            assert (
                found.tokens
                == plain_generate(target, prompt, max_new_tokens=N_NEW, sampling=sampling).tokens
            )
    # Greedy decoding of a small random model soon repeats itself.
    n_calls = sum(one.stats.n_target_calls for one in together)
    assert sampling.temperature or n_calls < 4 * (N_NEW - 1)
