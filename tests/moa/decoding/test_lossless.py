"""Greedy decoding with drafts gives the tokens of plain decoding: a thousand prompts, all families, all shapes.

Mixture of Attentions on every target, Medusa and the independent model on every family.
"""

import random

import pytest

from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build_drafter, build_eagle3, build_independent, build_medusa, teach
from moa_data.tests.kit.models import FAMILIES, build_model, random_prompts

from .test_loop import bigram_target, silence

SHAPES = (TreeShape(1), TreeShape(5), TreeShape(3, 2, 6), TreeShape(6, 8, 62), TreeShape(2, 8, 16))
N_PROMPTS = 1000


@pytest.mark.slow
def test_a_thousand_prompts() -> None:
    """Many of them with a drafter that is often right, so that deep branches are accepted; in batches of 1 to 8."""
    chance = random.Random(0)
    targets = [Target(build_model(family)) for family in FAMILIES] + [bigram_target(frozenset({3, 24}))] * len(FAMILIES)
    for target in targets:
        target.eos_token_ids = frozenset({3, 24})
    proposers = []
    for index, target in enumerate(targets):
        n_target_layers = (0, 1, 2)[index % 3]
        drafter = build_drafter(target.model, n_target_layers, seed=index)
        is_bigram = index >= len(FAMILIES)
        proposers.append((target, DrafterProposer(target, silence(drafter) if is_bigram else drafter)))
    for target in targets[: len(FAMILIES)]:
        proposers += [
            (target, DrafterProposer(target, build(target.model)))
            for build in (build_medusa, build_independent, build_eagle3)
        ]
    eagle3_target = Target(build_model(num_hidden_layers=2))
    eagle3_target.eos_token_ids = frozenset({3, 24})
    taught = teach(build_eagle3(eagle3_target.model, test_time_steps=3), eagle3_target, random_prompts(7, 7), 60)
    proposers.append((eagle3_target, DrafterProposer(eagle3_target, taught)))
    often_right = {*range(len(FAMILIES), 2 * len(FAMILIES)), len(proposers) - 1}
    done, committed = 0, []
    while done < N_PROMPTS:
        place, shape = chance.randrange(len(proposers)), chance.choice(SHAPES)
        target, proposer = proposers[place]
        prompts = [
            [chance.randrange(4, 60) for _ in range(chance.randint(1, 40))] for _ in range(chance.choice((1, 1, 3, 8)))
        ]
        n_new = chance.randint(1, 30)
        found = generate_batch(target, prompts, max_new_tokens=n_new, proposer=proposer, tree=shape)
        for prompt, generation in zip(prompts, found, strict=True):
            plain = plain_generate(target, prompt, max_new_tokens=n_new)
            assert generation.tokens == plain.tokens, (done, place, shape, prompt)
            committed += generation.stats.committed_per_call if place in often_right else []
        done += len(prompts)
    assert max(committed) >= 6
    assert sum(committed) / len(committed) > 1.3
