"""Attention kernels agree in value and gradient, and none holds the scores of all queries."""

import itertools
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from moa_data.moa.drafters.training import Draws, Rounds, block_mask
from moa_data.moa.nn import attention, masks
from moa_data.moa.nn.attention import (
    attend,
    attend_blocks,
    attend_many_short,
    expand_heads,
    needs_equal_heads,
)
from moa_data.tests.kit.memory import LiveBytes
from moa_data.tests.kit.variants import quick_rows

N_TOKENS = 40


def training_masks() -> dict[str, masks.Mask]:
    """Return every mask of training over two rows.

    Both rows have a step bound and a teacher-forced pass after it. The first is a staircase row.
    """
    response = torch.zeros(2, N_TOKENS, dtype=torch.bool)
    response[0, 7:33], response[1, 12:19] = True, True
    draws = Draws(
        torch.tensor([5, 3]),
        torch.tensor([True, False]),
        torch.tensor([2, 0]),
        teacher_forced_weight=0.5,
    )
    rounds = Rounds.packed(draws, response)
    queries, context, passes = rounds.queries, rounds.context, rounds.pass_index
    return {
        "cross": masks.Mask.up_to(context, N_TOKENS),
        "self": masks.self_attention_mask(queries, context, rounds.staircase, N_TOKENS),
        "rounds": masks.round_mask(queries, context, passes, N_TOKENS),
        "window": masks.round_mask(queries, context, passes, N_TOKENS, window=6),
        "causal": masks.Mask.up_to(torch.arange(N_TOKENS)[None], N_TOKENS),
    }


def random_input(mask: masks.Mask) -> tuple[Tensor, Tensor, Tensor]:
    _, n_queries, n_keys = mask.shape
    torch.manual_seed(0)
    q = torch.randn(2, 6, n_queries, 8, requires_grad=True)
    k, v = (torch.randn(2, 2, n_keys, 8, requires_grad=True) for _ in "kv")
    return q, k, v


def with_gradients(attended: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    weight = torch.randn(attended.shape, generator=torch.Generator().manual_seed(1))
    return attended, *torch.autograd.grad((attended * weight).sum(), inputs)


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Compute the definition: softmax of the scores over the visible keys."""
    scores = q @ expand_heads(k, q.shape[1]).mT * q.shape[-1] ** -0.5
    weights: Tensor = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
    return weights @ expand_heads(v, q.shape[1])


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "_compiled", lambda function, rules: function)


@pytest.mark.parametrize(
    ("kernel", "name"),
    quick_rows(
        itertools.product(("chosen", "expanded", "blocks"), training_masks()),
        [*itertools.product(("chosen", "expanded"), training_masks()), ("blocks", "window")],
    ),
)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_kernels_equal_the_definition_in_value_and_gradient(
    kernel: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = training_masks()[name]
    inputs = random_input(mask)
    if kernel == "chosen":
        got = attend(*inputs, mask)
    elif kernel == "expanded":
        monkeypatch.setattr(attention, "needs_equal_heads", lambda *_: True)
        fused = Mock(side_effect=F.scaled_dot_product_attention)
        monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
        got = attend(*inputs, mask)
        assert fused.call_args.kwargs["enable_gqa"] is False
    else:
        # PyTorch refuses gradients of FlexAttention on a CPU, because it has no compiled kernel
        # there. The uncompiled form has gradients.
        uncompiled(monkeypatch)
        got = attend_blocks(*inputs, mask)
        assert mask.block_mask is not None
    expected = with_gradients(plain(*inputs, mask.dense), inputs)
    for one, other in zip(with_gradients(got, inputs), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_kernel_that_errs_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has a wrong value or gradient, or raises an exception."""
    real = flex.flex_attention
    uncompiled(monkeypatch)
    works, facts = attention._flex_works.__wrapped__, (torch.device("cpu"), torch.float32, 4, 2, 16)
    assert works(*facts)
    for wrong in (lambda *args, **options: 1.5 * real(*args, **options), lambda *_: 1 / 0):
        monkeypatch.setattr(flex, "flex_attention", wrong)
        with pytest.warns(UserWarning, match="FlexAttention"):
            assert not works(*facts)


@pytest.mark.slow  # compiles for most of a minute
# torch warns while it compiles.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_each_rule_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs serve batches of any shape.

    If a rule needs more graphs than torch keeps, an error is raised instead of silently holding the
    scores.
    """
    graphs: Counter[str] = Counter()

    def counting(function: Any, **options: Any) -> Any:
        def backend(module: Any, _: Any) -> Any:
            graphs[function.__name__] += 1
            return module.forward

        return compiler(function, backend=backend, **options)

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", counting)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    attention._compiled.cache_clear()
    torch._dynamo.reset()

    def call(n_rows: int, n_tokens: int, n_masks: int = 2) -> None:
        anchors = torch.arange(20, n_tokens - 10, 9).expand(n_rows, -1)
        blocks = block_mask(anchors, torch.ones_like(anchors, dtype=torch.bool), 7, n_tokens)
        for mask in (blocks, masks.Mask.up_to(torch.arange(n_tokens)[None], n_tokens))[:n_masks]:
            _, n_queries, n_keys = mask.shape
            q, k, v = (
                torch.randn(n_rows, h, n, 16) for h, n in ((4, n_queries), (2, n_keys), (2, n_keys))
            )
            torch.testing.assert_close(
                attend_blocks(q, k, v, mask), plain(q, k, v, mask.dense), rtol=1e-4, atol=1e-5
            )

    call(1, 90)
    call(2, 140)
    functions = ("create_block_mask", "flex_attention")
    assert {*graphs} == {
        f"{function}_{rule}" for function in functions for rule in ("block_mask", "Mask")
    }
    assert max(graphs.values()) <= 4
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    attention._compiled.cache_clear()
    torch._dynamo.reset()
    call(1, 90, n_masks=1)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        call(2, 140, n_masks=1)
    attention._compiled.cache_clear()


@pytest.mark.gpu
def test_a_gpu_takes_blocks_and_agrees() -> None:
    assert attention._flex_works(torch.device("cuda"), torch.bfloat16, 32, 8, 128)


def test_the_math_kernel_is_not_asked_for() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert needs_equal_heads(cuda, torch.bfloat16, has_mask=True), "flash takes no mask"
    assert needs_equal_heads(cuda, torch.float32, has_mask=False), "nor float32"
    assert not needs_equal_heads(cuda, torch.bfloat16, has_mask=False)
    assert not needs_equal_heads(cpu, torch.float32, has_mask=True)


def test_scores_are_never_held() -> None:
    mask = masks.Mask.up_to(torch.arange(512)[None], 512)
    q, k, v = (torch.randn(1, heads, 512, 8, requires_grad=True) for heads in (32, 8, 8))
    with LiveBytes() as live:
        attend(q, k, v, mask).sum().backward()
    assert live.peak < 4 * 32 * 512 * 512 / 3, "less than a third of the scores of all heads"


@pytest.mark.parametrize("n_heads", [2, 6])
def test_attention_of_many_short_sequences_equals_the_definition_in_value_and_gradient(
    n_heads: int,
) -> None:
    q = torch.randn(40, 4, n_heads, 8).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(40, 2, 4, 8, requires_grad=True) for _ in "kv")
    expected = with_gradients(plain(q, k, v, torch.ones(40, 4, 4).bool()), (q, k, v))
    for one, other in zip(
        with_gradients(attend_many_short(q, k, v), (q, k, v)), expected, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
