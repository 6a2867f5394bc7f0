"""Calls of static shapes give what others give, and a few graphs serve all rounds."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from moa_data.moa.decode import draft_session, generate_batch
from moa_data.moa.target import Target
from moa_data.moa.tree import Shape, TreeShape, ancestors

from .conftest import build_drafter, build_model

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: object, n_slots: int = 64) -> tuple[Target, CompileCounter]:
    counter = CompileCounter()
    target = Target(model)
    target.compile(n_slots, backend=counter)
    return target, counter


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_call_gives_what_a_call_of_its_own_shape_gives(family: str) -> None:
    model = build_model(family)
    static, counter = compiled(model)
    plain = Target(model)
    prompts = torch.tensor([[5, 6, 7, 8, 9], [3, 4, 5, 0, 0]])
    parents = torch.tensor([[-1, -1, 0, 0, 1], [-1, 0, 1, 2, 3]])
    tree = torch.randint(4, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    found = []
    for target in (plain, static):
        cache = target.new_cache(2)
        target.forward(prompts, cache)
        cache.commit([range(5), range(3)])
        hidden = [target.forward(tree, cache, ancestors(parents))]
        cache.commit([[0, 1, 3], [0, 1, 2, 3]])
        hidden.append(target.forward(tree[:, :3], cache))
        cache.commit([[0], [0, 1, 2]])
        hidden.append(target.forward(tree[:, :1], cache))
        found.append((hidden, cache.packed([0, 0], 8)))
    assert counter.frame_count == 3  # six tokens, three and one
    for one, other in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0][1][:, :8], found[1][1][:, :8], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [None, TreeShape(5), TreeShape(3, 2, 6)])
def test_a_few_graphs_serve_all_rounds(shape: Shape | None) -> None:
    model = build_model(eos_token_id=None)
    target, counter = compiled(model)
    session = draft_session(target, build_drafter(model)) if shape else None
    found = [generate_batch(target, [p], max_new_tokens=40, open_session=session, tree=shape)[0] for p in PROMPTS[:1]]
    n_graphs = counter.frame_count
    assert 1 <= n_graphs <= 4  # rounds near the end are shallower
    found += [generate_batch(target, [p], max_new_tokens=40, open_session=session, tree=shape)[0] for p in PROMPTS[1:]]
    assert counter.frame_count == n_graphs
    expected = generate_batch(Target(model), PROMPTS, max_new_tokens=40)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_a_batch_is_lossless_and_a_longer_text_makes_the_cache_grow() -> None:
    model = build_model(eos_token_id=None)
    target, counter = compiled(model, n_slots=16)
    session = draft_session(target, build_drafter(model))
    found = generate_batch(target, PROMPTS, max_new_tokens=40, open_session=session, tree=TreeShape(2, 2, 4))
    expected = generate_batch(Target(model), PROMPTS, max_new_tokens=40)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert counter.frame_count > 1
