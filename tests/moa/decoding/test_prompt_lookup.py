"""Prompt lookup proposes what followed the last words before, and decoding with it is lossless."""

from typing import Any

import pytest
import torch

from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import PromptLookupProposer
from moa_data.moa.decoding.sampling import GREEDY, SamplingConfig
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.models import build_model


def proposed(*rows: list[int], length: int = 3) -> list[list[int]]:
    return PromptLookupProposer(torch.device("cpu")).propose(rows, TreeShape(length)).tokens.tolist()


def test_the_longest_and_latest_occurrence_wins() -> None:
    assert proposed([1, 2, 3, 9, 9, 3, 4, 1, 2, 3]) == [[9, 9, 3]]
    assert proposed([5, 1, 7, 5, 2, 8, 5]) == [[2, 8, 5]]
    assert proposed([5, 1, 5]) == [[1, 5]]


def test_rows_without_an_occurrence() -> None:
    assert proposed([1, 2, 3]) == [[]]
    assert proposed([1, 2, 3], [4, 6, 4]) == [[-1, -1], [6, 4]]


def test_decoding_is_lossless_and_saves_calls_on_repetitive_text() -> None:
    target = Target(build_model(eos_token_id=None))
    prompts = [[5, 6, 7, 8, 5, 6], [9, 10, 11], [3, 4, 3, 4, 3, 4, 3]]
    found = generate_batch(
        target, prompts, max_new_tokens=40, proposer=PromptLookupProposer(target.device), tree=TreeShape(4)
    )
    plain = [plain_generate(target, prompt, max_new_tokens=40) for prompt in prompts]
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    # Greedy decoding of a small random model soon goes in circles.
    assert sum(one.stats.n_target_calls for one in found) < sum(one.stats.n_target_calls for one in plain)


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(0.8, top_k=3), SamplingConfig(repetition_penalty=1.1), GREEDY], ids=str
)
def test_a_row_is_in_a_batch_what_it_is_alone(sampling: SamplingConfig) -> None:
    """Also where it finds fewer drafts than its neighbours, or none."""
    target = Target(build_model(eos_token_id=None))
    prompts = [[9, 10, 11], [5, 6, 7, 8, 5, 6], [3, 4, 3, 4, 3, 4, 3], [20, 21, 22, 23, 24, 25]]
    settings: dict[str, Any] = {
        "max_new_tokens": 30, "proposer": PromptLookupProposer(target.device), "tree": TreeShape(4),
        "sampling": sampling,
    }  # fmt: skip
    together = generate_batch(target, prompts, seed=range(5, 9), **settings)
    for seed, prompt, found in zip(range(5, 9), prompts, together, strict=True):
        (alone,) = generate_batch(target, [prompt], seed=seed, **settings)
        assert found.tokens == alone.tokens
        assert found.stats.committed_per_call == alone.stats.committed_per_call
        if sampling.temperature:  # greedy decoding cuts drafts to what any row has use for
            assert found.stats.n_drafted == alone.stats.n_drafted
