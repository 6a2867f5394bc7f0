"""Greedy decoding with drafts gives the tokens of plain decoding for a thousand prompts.

All families and shapes are tested, with each kind of drafter that needs no deep target, and with
drafters that are often right, so that deep branches are accepted.
"""

import random

import pytest

from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build, build_drafter, teach
from moa_data.tests.kit.models import FAMILIES, build_model, random_prompts

from .test_loop import bigram_target, silence

SHAPES = (TreeShape(1), TreeShape(5), TreeShape(3, 2, 6), TreeShape(6, 8, 62), TreeShape(2, 8, 16))
N_PROMPTS = 1000


@pytest.mark.slow
def test_a_thousand_prompts() -> None:
    """Batches have 1 to 8 rows."""
    chance, sometimes, often = random.Random(0), [], []
    for index, family in enumerate(FAMILIES):
        target, bigrams = Target(build_model(family)), bigram_target(frozenset({3, 24}))
        sometimes += [
            (target, build(kind, target.model))
            for kind in ("medusa", "independent", "eagle3", "eagle", "glide")
        ]
        sometimes.append((target, build_drafter(target.model, index % 3, seed=index)))
        often.append((bigrams, silence(build_drafter(bigrams.model, index % 3, seed=index))))
    target = Target(build_model(num_hidden_layers=2))
    often.append(
        (
            target,
            teach(
                build("eagle3", target.model, test_time_steps=3), target, random_prompts(7, 7), 60
            ),
        )
    )
    committed: list[int] = []
    n_done = 0
    while n_done < N_PROMPTS:
        is_often = chance.random() < 0.4
        target, drafter = chance.choice(often if is_often else sometimes)
        target.eos_token_ids, shape, n_new = (
            frozenset({3, 24}),
            chance.choice(SHAPES),
            chance.randint(1, 30),
        )
        prompts = [
            [chance.randrange(4, 60) for _ in range(chance.randint(1, 40))]
            for _ in range(chance.choice((1, 1, 3, 8)))
        ]
        proposer = DrafterProposer(target, drafter)
        found = generate_batch(target, prompts, max_new_tokens=n_new, proposer=proposer, tree=shape)
        for prompt, generation in zip(prompts, found, strict=True):
            plain = plain_generate(target, prompt, max_new_tokens=n_new)
            assert generation.tokens == plain.tokens, (n_done, drafter.kind, shape, prompt)
            committed += generation.stats.committed_per_call if is_often else []
        n_done += len(prompts)
    assert max(committed) >= 6
    assert sum(committed) / len(committed) > 1.3
