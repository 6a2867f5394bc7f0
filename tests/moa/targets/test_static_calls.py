"""Calls with static shapes give the same results, and a few graphs serve all rounds."""

import copy
from typing import Any

import pytest
import torch

from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape, ancestors
from moa_data.moa.targets.cache import TargetCache
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.device import Counts
from moa_data.tests.kit.drafters import build_drafter, build_glide
from moa_data.tests.kit.families import build_family
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.variants import quick

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def static_target(model: Any, n_slots: int = 64) -> Target:
    target = Target(model)
    target.use_static_calls(n_slots)
    return target


def n_graphs(target: Target) -> int:
    assert target._static is not None
    return len(target._static._graphs)


@pytest.mark.parametrize("watched", [(), (0, 1)], ids=str)
@pytest.mark.parametrize("family", quick(["llama", "mistral"], ["llama"]))
def test_a_call_gives_what_a_call_of_its_own_shape_gives(
    family: str, watched: tuple[int, ...]
) -> None:
    model = build_model(family, num_hidden_layers=2)
    static = static_target(model)
    prompts = torch.tensor([[5, 6, 7, 8, 9], [3, 4, 5, 0, 0]])
    parents = torch.tensor([[-1, -1, 0, 0, 1], [-1, 0, 1, 2, 3]])
    tree = torch.randint(4, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    found = []
    for target in (Target(model), static):
        cache = target.new_cache(2)
        cache.watched_layers = watched
        target.forward(prompts, cache)
        cache.commit([range(5), range(3)])
        given = [target.forward(tree, cache, ancestors(parents))]
        cache.commit([[0, 1, 3], [0, 1, 2, 3]])
        given.append(target.forward(tree[:, :1], cache))
        given += [cache.take_layer_outputs()] if watched else []
        cache.commit([[0], [0]])
        found.append([*given, cache.packed([0, 0], 8)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape", quick([None, TreeShape(5), TreeShape(3, 2, 6)], [TreeShape(3, 2, 6)]), ids=str
)
def test_a_few_graphs_serve_all_rounds(device: Counts, shape: TreeShape | None) -> None:
    model = build_model(eos_token_id=None, num_hidden_layers=1)
    target = static_target(copy.deepcopy(model).to("cuda"))
    session = DrafterProposer(target, build_drafter(model).to("cuda")) if shape else None
    found = [
        generate_batch(target, [p], max_new_tokens=10, proposer=session, tree=shape)[0]
        for p in PROMPTS[:1]
    ]
    n_before = n_graphs(target)
    assert 1 <= n_before <= 4  # rounds near the end are shallower
    found += [
        generate_batch(target, [p], max_new_tokens=10, proposer=session, tree=shape)[0]
        for p in PROMPTS[1:]
    ]
    assert n_graphs(target) == n_before
    expected = generate_batch(Target(model), PROMPTS, max_new_tokens=10)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_generations_share_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs are recorded for fixed addresses.

    A buffer per generation would record all graphs again.
    """
    model = build_model(eos_token_id=None, num_hidden_layers=1)
    target = static_target(model)
    addresses: set[int] = set()
    real = TargetCache.layer_view

    def noted(cache: TargetCache, layer: int, n_slots: int) -> Any:
        keys, values = real(cache, layer, n_slots)
        addresses.add(keys.data_ptr())
        return keys, values

    monkeypatch.setattr(TargetCache, "layer_view", noted)
    # GLIDE reads the target's KV in each round.
    session = DrafterProposer(target, build_glide(model))
    for prompt in PROMPTS * 2:
        generate_batch(target, [prompt], max_new_tokens=12, proposer=session, tree=TreeShape(3))
    assert len(addresses) == 1


def test_caches_that_live_at_once_share_nothing() -> None:
    target = static_target(build_model(num_hidden_layers=1))
    caches = [target.new_cache() for _ in range(2)]
    for cache, prompt in zip(caches, PROMPTS[::2], strict=True):
        target.forward(torch.tensor([prompt]), cache)
        cache.commit([range(len(prompt))])
    before = caches[0].packed([0], 3).clone()
    target.forward(torch.tensor([[1]]), caches[1])
    assert torch.equal(caches[0].packed([0], 3), before)
    assert not torch.equal(caches[0].packed([0], 3), caches[1].packed([0], 3))


def test_a_batch_is_lossless_and_a_longer_text_makes_the_cache_grow() -> None:
    model = build_model(eos_token_id=None, num_hidden_layers=1)
    target = static_target(model, n_slots=16)
    session = DrafterProposer(target, build_drafter(model))
    found = generate_batch(
        target, PROMPTS, max_new_tokens=24, proposer=session, tree=TreeShape(2, 2, 4)
    )
    expected = generate_batch(Target(model), PROMPTS, max_new_tokens=24)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_only_layers_of_llama_on_a_gpu_become_graphs(device: Counts) -> None:
    for family, where, is_static in (
        ("llama", "cuda", True),
        ("llama", "cpu", False),
        ("qwen3_moe", "cuda", False),
    ):
        target = Target(build_family(family).to(where))
        target.prepare()
        assert (target._static is not None) == is_static, (family, where)
