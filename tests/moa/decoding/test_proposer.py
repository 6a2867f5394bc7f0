"""Chains that stop where the drafter itself no longer believes in them."""

from collections.abc import Callable

import pytest
import torch

from moa_data.errors import DrafterError
from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.decoding.tree import DraftTree, TreeShape
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build_drafter, build_eagle, build_glide
from moa_data.tests.kit.models import build_model

LENGTH = 6


def first_round(target: Target, drafter: Drafter, prompts: list[list[int]], shape: TreeShape) -> DraftTree:
    """Drafts behind prompts of equal length and the target's next token."""
    cache = target.new_cache(len(prompts))
    hidden = target.forward(torch.tensor(prompts), cache)
    kept = [range(len(prompts[0]))] * len(prompts)
    cache.commit(kept)
    proposer = DrafterProposer(target, drafter, FrozenTarget.from_model(target.model, 0))
    proposer.begin(cache)
    proposer.observe(hidden, kept)
    roots = target.logits(hidden[:, -1]).argmax(dim=-1).tolist()
    return proposer.propose([[*prompt, root] for prompt, root in zip(prompts, roots, strict=True)], shape)


@pytest.mark.parametrize("build", [build_drafter, build_eagle, build_glide])
@pytest.mark.parametrize("prompts", [[[5, 6, 7]], [[5, 6, 7], [9, 9, 9], [31, 12, 4]]], ids=["alone", "batch"])
def test_a_chain_stops_behind_the_first_draft_that_makes_it_too_unlikely(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., Drafter], prompts: list[list[int]]
) -> None:
    model = build_model(eos_token_id=None)
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


def test_chains_that_are_drawn_do_not_stop() -> None:
    model = build_model()
    target, sampling = Target(model), SamplingConfig(temperature=1.0)
    proposer = DrafterProposer(target, build_drafter(model), None, sampling)
    with pytest.raises(DrafterError, match=r"6@0\.1 stop by their probability in greedy decoding only"):
        generate_batch(
            target, [[5, 6]], max_new_tokens=4, proposer=proposer, tree=TreeShape(6, stop_below=0.1),
            sampling=sampling,
        )  # fmt: skip
