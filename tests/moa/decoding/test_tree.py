"""Shapes of drafts, and static trees drafted level by level."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moa_data.errors import DrafterError
from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import StaticTree, TreeShape, most_likely, parse_shape
from moa_data.moa.drafters.base import Drafter, DraftLevel
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build_drafter, build_eagle, build_glide
from moa_data.tests.kit.models import build_model


@pytest.mark.parametrize("text", ["5", "10@0.2", "7c0.3", "6x8x62", "static:16"])
def test_shapes_are_read_from_text(text: str) -> None:
    assert str(parse_shape(text)) == text
    assert parse_shape("2X3X4") == TreeShape(2, 3, 4)
    assert parse_shape("5@0") == TreeShape(5)


@pytest.mark.parametrize(
    "text",
    ["six", "6x8", "static:²", "static:x", "static:0", "0", "3x-1x5", "6x8x5", "99x99x999", "5@", "5c", "5c0.2@0.3",
     "5c1", "6x8x62c0.2", "@0.5", "5@often", "5@1", "5@-0.1", "5@nan", "6x8x62@0.2"],
)  # fmt: skip
def test_shapes_without_a_meaning_are_refused(text: str) -> None:
    with pytest.raises(DrafterError):
        parse_shape(text)


def paths(tree: StaticTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), rank))
    return set(found)


def test_a_static_tree_holds_the_likeliest_paths() -> None:
    """Against all paths of up to 3 levels in the order of their probability."""
    acceptance = (0.5, 0.3, 0.1)
    weights = {
        path: torch.tensor([acceptance[rank] for rank in path]).prod().item()
        for depth in (1, 2, 3)
        for path in itertools.product(range(3), repeat=depth)
    }
    for n_nodes in (1, 4, 9, 20):
        tree = StaticTree.likeliest(n_nodes, 3, acceptance)
        best = sorted(weights.values(), reverse=True)[:n_nodes]
        assert sorted((weights[path] for path in paths(tree)), reverse=True) == pytest.approx(best)
        assert list(tree.depths) == sorted(tree.depths)


def test_a_cut_tree_loses_whole_levels() -> None:
    tree = StaticTree.likeliest(20)
    assert tree.cut(2).depth == 2
    assert paths(tree.cut(2)) == {path for path in paths(tree) if len(path) <= 2}
    assert tree.cut(99) == tree
    assert TreeShape(6, stop_below=0.2).cut(3) == TreeShape(3, stop_below=0.2)


NEPHEW = StaticTree((-1, -1, 0, 1, 2), (0, 1, 0, 0, 0))
"""Two nodes are fed at the first level and one at the second, which must not see the other branch."""


@pytest.mark.parametrize("shape", [StaticTree.likeliest(12, 4), NEPHEW], ids=["likeliest", "nephew"])
@pytest.mark.parametrize("build", [build_drafter, build_eagle, build_glide])
def test_nodes_are_the_drafters_choices_of_their_rank(build: Callable[..., Drafter], shape: StaticTree) -> None:
    """Each node is the child of its rank when its path is drafted as a chain of its own."""
    model = build_model(eos_token_id=None)
    target, drafter = Target(model), build(model)
    seen = []
    real = DrafterProposer.propose

    class Watched(DrafterProposer):
        def propose(self, committed: Any, shape: Any) -> Any:
            seen.append((list(committed[0]), real(self, committed, shape)))
            return seen[-1][1]

    frozen = FrozenTarget.from_model(model, 0)
    plain = plain_generate(target, [5, 6, 7], max_new_tokens=16)
    found = generate_batch(
        target, [[5, 6, 7]], max_new_tokens=16, proposer=Watched(target, drafter, frozen), tree=shape
    )
    assert found[0].tokens == plain.tokens
    committed, tree = seen[0]
    tokens = tree.tokens[0].tolist()
    for node in range(tree.n_nodes):
        path: list[int] = []
        at = int(tree.parents[0, node])
        while at >= 0:
            path.insert(0, at)
            at = int(tree.parents[0, at])
        cache = target.new_cache()
        hidden = target.forward(torch.tensor([committed[:-1]]), cache)
        cache.commit([range(len(committed) - 1)])
        proposer = DrafterProposer(target, drafter, frozen)
        proposer.begin(cache)
        with torch.inference_mode():
            proposer.observe(hidden, [range(len(committed) - 1)])
            features = drafter.draft_root(proposer.state, frozen, [committed], cache)
            for level, step in enumerate(path, start=1):
                ones = torch.ones(1, 1, level + 1, dtype=torch.bool)
                nodes = DraftLevel(torch.tensor([[tokens[step]]]), features, ones, level)
                features = drafter.draft_level(proposer.state, frozen, nodes, cache)
            order = frozen.logits(features)[0, 0].argsort(descending=True)
        assert tokens[node] == int(order[shape.ranks[node]])


def test_static_trees_in_batches_and_with_small_vocabularies() -> None:
    model = build_model(eos_token_id=None, vocab_size=8, bos_token_id=1)
    target = Target(model)
    proposer = DrafterProposer(target, build_drafter(model))
    prompts = [[5, 6, 7], [2], [4, 4, 4, 4, 1]]
    found = generate_batch(
        target, prompts, max_new_tokens=12, proposer=proposer, tree=StaticTree((-1, -1, 0), (0, 11, 1))
    )
    for prompt, generation in zip(prompts, found, strict=True):
        assert generation.tokens == plain_generate(target, prompt, max_new_tokens=12).tokens


def test_equal_scores_stand_in_the_order_of_their_places() -> None:
    scores = torch.randint(0, 4, (3, 5, 40), generator=torch.Generator().manual_seed(2)).float()
    values, places = most_likely(scores, 12)
    for rows in zip(
        scores.flatten(0, 1).tolist(), values.flatten(0, 1).tolist(), places.flatten(0, 1).tolist(), strict=True
    ):
        row, found, at = rows
        assert found == sorted(row, reverse=True)[:12]
        assert [row[place] for place in at] == found
        assert all(one < other for one, other, a, b in zip(at, at[1:], found, found[1:], strict=False) if a == b)
