"""The chunked loss equals the plain one; no logits of the whole batch are ever held."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moa_data.moa.nn.losses import (
    Divergence,
    chunk_rows,
    chunked_cross_entropy,
    chunked_forward_kl,
    chunked_head_kl,
    chunked_token_losses,
    d_pace_weights,
    feature_loss,
    forward_kl,
    logits_of,
)
from moa_data.tests.kit.memory import LiveBytes


@pytest.mark.parametrize("chunk_bytes", [4 * 31, 4 * 31 * 3, 1 << 26])
def test_chunked_equals_plain_in_value_and_gradient(chunk_bytes: Any) -> None:
    head = torch.randn(31, 6, dtype=torch.float64)
    hidden = torch.randn(10, 6, dtype=torch.float64)
    features = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(10, dtype=torch.float64)
    plain = forward_kl(features @ head.T, hidden @ head.T)
    chunked = chunked_forward_kl(features, hidden, head, chunk_bytes)
    torch.testing.assert_close(chunked.double(), plain, rtol=1e-5, atol=1e-5)
    (expected,) = torch.autograd.grad((plain * weight).sum(), features)
    (got,) = torch.autograd.grad((chunked * weight).sum(), features)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_chunked_under_autocast_equals_plain_within_bfloat16() -> None:
    torch.manual_seed(0)
    head, hidden, features = torch.randn(31, 16), torch.randn(10, 16), torch.randn(10, 16, requires_grad=True)
    plain = forward_kl(features @ head.T, hidden @ head.T)
    (expected,) = torch.autograd.grad(plain.sum(), features)
    with torch.autocast("cpu", torch.bfloat16):
        low = chunked_forward_kl(features, hidden, head, 4 * 31 * 3)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, plain, rtol=0.02, atol=0.05)
    (got,) = torch.autograd.grad(low.sum(), features)
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_logits_that_overflow_count_for_nothing() -> None:
    """In float16, the one dtype in which a head and features of ordinary sizes give -inf."""
    torch.manual_seed(0)
    head = torch.randn(31, 6).half()
    head[3] = torch.tensor([-60000.0, 0, 0, 0, 0, 0])
    hidden, features = torch.rand(5, 6).half() * 0.01, torch.rand(5, 6).half()
    features[1:4, 0] = 3.0
    features.requires_grad_(True)
    logits = torch.nn.functional.linear(features, head)
    assert torch.isinf(logits[:, 3]).tolist() == [False, True, True, True, False]
    goal = torch.nn.functional.linear(hidden, head)
    plain = forward_kl(logits.float(), goal.float())
    chunked = chunked_forward_kl(features, hidden, head, 4 * 31 * 2)
    torch.testing.assert_close(chunked, plain)
    given = (features.detach().float() @ head.float().T).requires_grad_(True)
    draft = given.masked_fill(torch.isinf(logits), -torch.inf)
    (expected,) = torch.autograd.grad(forward_kl(draft, goal.float()).sum(), given)
    (got,) = torch.autograd.grad(chunked.sum(), features)
    torch.testing.assert_close(got, expected.half() @ head, rtol=5e-3, atol=5e-3)


class Waits(TorchDispatchMode):
    """Counts the values that are brought to the host, each of which waits for the device."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.n += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_chunks_wait_for_nothing() -> None:
    head, hidden, features = torch.randn(31, 6), torch.randn(10, 6), torch.randn(10, 6, requires_grad=True)
    with Waits() as waits:  # type: ignore[no-untyped-call]  # of torch
        chunked_forward_kl(features, hidden, head, 4 * 31 * 3).sum().backward()
    assert waits.n == 0


def test_no_rows_give_no_loss() -> None:
    head, hidden, features = torch.randn(31, 6), torch.randn(0, 6), torch.randn(0, 6, requires_grad=True)
    value = chunked_forward_kl(features, hidden, head)
    assert value.shape == (0,)
    value.sum().backward()
    assert features.grad is not None
    assert features.grad.shape == (0, 6)


def test_infinite_logits_give_finite_value_and_gradient() -> None:
    draft = torch.randn(3, 5)
    draft[:, 2] = -torch.inf
    draft.requires_grad_(True)
    target = torch.randn(3, 5)
    target[:, [0, 2]] = -torch.inf
    value = forward_kl(draft, target)
    value.sum().backward()
    assert value.isfinite().all()
    assert draft.grad is not None
    assert draft.grad[:, [0, 1, 3, 4]].isfinite().all()


def test_feature_loss_is_smooth_l1_mean_over_width() -> None:
    got = feature_loss(torch.tensor([[0.0, 3.0]]), torch.tensor([[0.5, 0.0]]))
    assert got.tolist() == [pytest.approx((0.125 + 2.5) / 2)]


def test_peak_memory_does_not_grow_with_rows_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the head may be read often enough."""
    monkeypatch.setattr("moa_data.moa.nn.losses.MAX_CHUNKS", 1000)
    vocab, width, chunk_bytes = 4096, 8, 1 << 18
    head = torch.randn(vocab, width)

    def peak_bytes(loss: Any, rows: Any) -> Any:
        hidden, features = torch.randn(rows, width), torch.randn(rows, width, requires_grad=True)
        with LiveBytes() as live:
            loss(features, hidden).sum().backward()
        return live.peak

    def chunked(features: Any, hidden: Any) -> Any:
        return chunked_forward_kl(features, hidden, head, chunk_bytes)

    def plain(features: Any, hidden: Any) -> Any:
        return forward_kl(features @ head.T, hidden @ head.T)

    small, large = peak_bytes(chunked, 256), peak_bytes(chunked, 1024)
    per_row = 8 * 4 * width
    assert large - small < per_row * (1024 - 256)
    assert large < 12 * chunk_bytes + per_row * 1024
    assert peak_bytes(plain, 1024) > 1024 * vocab * 4 > 5 * large, "the measure must see the plain loss's logits"


@pytest.mark.parametrize("n_tokens", [None, 7])
def test_chunked_head_kl_equals_the_plain_one(n_tokens: int | None) -> None:
    """In value and in both gradients, with chunks of one position; a weight of 0 leaves a step out."""
    torch.manual_seed(3)
    tokens = None if n_tokens is None else torch.randperm(20)[:n_tokens].sort().values
    features = torch.randn(9, 3, 8, dtype=torch.float64, requires_grad=True)
    head = torch.randn(n_tokens or 20, 8, dtype=torch.float64, requires_grad=True)
    hidden, target_head = torch.randn(9, 6, dtype=torch.float64), torch.randn(20, 6, dtype=torch.float64)
    weights = torch.rand(9, 3, dtype=torch.float64) * (torch.rand(9, 3) > 0.3)
    got, by_step = chunked_head_kl(features, hidden, head, target_head, weights, tokens, chunk_bytes=1)
    logits = features @ head.T
    if tokens is not None:
        logits = torch.full((9, 3, 20), -torch.inf, dtype=torch.float64).index_copy(-1, tokens, logits)
    kl = forward_kl(logits, (hidden @ target_head.T)[:, None])
    expected = (kl * weights).sum()
    assert float(got.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(by_step.double(), (kl * (weights > 0)).sum(dim=0), rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(2 * got, (features, head))
    for one, other in zip(found, torch.autograd.grad(2 * expected, (features, head)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_head_is_read_in_few_chunks() -> None:
    """Of Llama 3's vocabulary 64 MiB hold 130 positions, and 2,048 positions would read 1 GB of head 16 times."""
    assert chunk_rows(2048, 128_256) == 256
    assert chunk_rows(1_000, 128_256) == 130
    assert chunk_rows(100, 4096) == 4096
    assert chunk_rows(0, 128_256) == 130


@pytest.mark.parametrize("trains_head", [False, True])
def test_a_head_in_bfloat16_is_cast_in_blocks(trains_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the whole head cast at once, in value and gradient, and never cast at once."""
    torch.manual_seed(0)
    stored = (0.1 * torch.randn(1000, 64)).bfloat16()
    hidden, features = torch.randn(20, 64), torch.randn(20, 64, requires_grad=True)
    own, weights = torch.randn(1000, 64, requires_grad=True), torch.ones(20, 1)

    def loss(head: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if trains_head:
            value, _ = chunked_head_kl(features[:, None], hidden, own, head, weights, chunk_bytes=1)
            return value, *torch.autograd.grad(value, (features, own))
        value = chunked_forward_kl(features, hidden, head, chunk_bytes=1).sum()
        return value, *torch.autograd.grad(value, features)

    expected = loss(stored.float())
    monkeypatch.setattr("moa_data.moa.nn.losses._CAST_BYTES", 4 * 64 * 130)
    monkeypatch.setattr("moa_data.moa.nn.losses.MAX_CHUNKS", 1000)
    with LiveBytes() as live:
        got = loss(stored)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert trains_head or live.peak < 3.2 * stored.numel()
    torch.testing.assert_close(logits_of(hidden, stored), hidden @ stored.float().T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_correction", [False, True])
def test_token_losses_equal_their_definition(has_correction: bool) -> None:
    """In value and in every gradient, whatever the chunks."""
    generator = torch.Generator().manual_seed(0)
    features, code = (torch.randn(9, width, generator=generator).requires_grad_() for width in (6, 3))
    correction = torch.randn(11, 3, generator=generator).requires_grad_()
    hidden, head = torch.randn(9, 6, generator=generator), torch.randn(11, 6, generator=generator)
    labels, weights = torch.randint(11, (9,), generator=generator), torch.rand(9, 3, generator=generator)
    logits = features @ head.T
    if has_correction:
        logits = logits + code @ correction.T
    draft, target = logits.log_softmax(dim=-1), (hidden @ head.T).softmax(dim=-1)
    expected = torch.stack(
        (-draft.gather(1, labels[:, None])[:, 0], (draft.exp() - target).abs().sum(1), -(target * draft).sum(1)), dim=1
    )
    inputs = [features, code, correction] if has_correction else [features]
    goals = torch.autograd.grad(2.0 * (expected * weights).sum(), inputs)
    own = (code, correction) if has_correction else (None, None)
    for chunk_bytes in (None, 1, 4 * 2 * 11 * 4):
        total, terms = chunked_token_losses(
            features, hidden, labels, head, weights, code=own[0], correction=own[1], chunk_bytes=chunk_bytes
        )
        torch.testing.assert_close(terms, expected)
        torch.testing.assert_close(total, (expected * weights).sum())
        for got, goal in zip(torch.autograd.grad(2.0 * total, inputs), goals, strict=True):
            torch.testing.assert_close(got, goal)


P, Q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.25, 0.25, 0.5]])
"""Distributions of target and drafter: 0.25 + 0.25 + 0.2 = 0.7 is accepted, and the cross-entropy is 1.247665."""


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (Divergence(), 1.247665),
        (Divergence("lk"), 0.356675),  # -log 0.7
        (Divergence("lk-hybrid", 3.0), 0.416047),  # exp(-2.1) * 1.247665 + (1 - exp(-2.1)) * 0.3
        (Divergence("lk-hybrid", 0.0), 1.247665),
    ],
)
def test_divergences_by_hand(divergence: Divergence, expected: float) -> None:
    """In each of the losses, which have one definition of it."""
    draft, target, head = Q.log(), P.log(), torch.eye(3)
    assert chunked_forward_kl(draft, target, head, divergence=divergence).item() == pytest.approx(expected, abs=1e-5)
    total, by_step = chunked_head_kl(draft[:, None], target, head, head, torch.full((1, 1), 2.0), divergence=divergence)
    assert total.item() == pytest.approx(2 * expected, abs=1e-5)
    assert by_step.item() == pytest.approx(expected, abs=1e-5)
    weights, label = torch.tensor([[0.0, 0.0, 3.0]]), torch.tensor([1])
    total, terms = chunked_token_losses(draft, target, label, head, weights, divergence=divergence)
    assert total.item() == pytest.approx(3 * expected, abs=1e-5)
    assert terms[0].tolist() == pytest.approx([1.386294, 0.6, expected], abs=1e-5)
    assert chunked_cross_entropy(draft, label, head).item() == pytest.approx(1.386294, abs=1e-5)


@pytest.mark.parametrize("divergence", [Divergence("lk"), Divergence("lk-hybrid", 2.0)], ids=lambda one: one.kind)
def test_gradients_of_lk_losses(divergence: Divergence) -> None:
    """Those that autograd finds, also of drafts over a part of the vocabulary, in chunks of one position."""
    generator = torch.Generator().manual_seed(3)
    features, hidden = (torch.randn(5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    head, own = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (11, 6))
    labels, tokens = torch.randint(11, (5,), generator=generator), torch.tensor([0, 2, 3, 5, 8, 10])
    weights = torch.rand(5, 3, generator=generator)

    def plain(x: Tensor, matrix: Tensor, chosen: Tensor) -> Tensor:
        target = (hidden @ head.T).softmax(dim=-1)[:, chosen]
        log_draft = (x @ matrix.T).log_softmax(dim=-1)
        accepted = torch.minimum(target, log_draft.exp()).sum(dim=-1)
        if divergence.kind == "lk":
            return -accepted.log()
        share = torch.exp(-divergence.decay * accepted).detach()
        return -share * (target * log_draft).sum(dim=-1) + (1 - share) * (1 - accepted)

    def check(got: Tensor, expected: Tensor, *leaves: Tensor) -> None:
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
        for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    x, matrix, every = features.requires_grad_(), own.requires_grad_(), torch.arange(11)
    check(chunked_forward_kl(x, hidden, head, 1, divergence).sum(), plain(x, head, every).sum(), x)
    total, _ = chunked_head_kl(x[:, None], hidden, matrix, head, weights[:, :1], tokens, 1, divergence)
    check(total, (plain(x, matrix, tokens) * weights[:, 0]).sum(), x, matrix)
    total, _ = chunked_token_losses(x, hidden, labels, head, weights, None, None, 1, divergence)
    logits = x @ head.T
    distance = (logits.softmax(dim=-1) - (hidden @ head.T).softmax(dim=-1)).abs().sum(dim=-1)
    terms = torch.nn.functional.cross_entropy(logits, labels, reduction="none"), distance, plain(x, head, every)
    check(total, (torch.stack(terms, dim=1) * weights).sum(), x)


def test_drafts_that_are_never_accepted_have_finite_losses() -> None:
    draft, target = torch.tensor([[60.0, -60.0]], requires_grad=True), torch.tensor([[-60.0, 60.0]])
    loss = chunked_forward_kl(draft, target, torch.eye(2), divergence=Divergence("lk")).sum()
    assert loss.item() == pytest.approx(13.8155, abs=1e-3)
    assert torch.autograd.grad(loss, draft)[0].isfinite().all()


def test_weights_of_d_pace_by_hand() -> None:
    wrong = -torch.tensor([0.8, 0.4, 0.1]).log()
    every = torch.ones(3, dtype=torch.bool)
    # Smoothed 0.9, 0.7, 0.55; reached 0.9, 0.63, 0.3465.
    assert d_pace_weights(wrong, every, 0.5).tolist() == pytest.approx([1.8765, 0.9765, 0.3465])
    assert d_pace_weights(wrong, torch.tensor([True, True, False]), 0.5).tolist() == pytest.approx([1.53, 0.63, 0])
    assert d_pace_weights(wrong, every, 1.0).tolist() == [3, 2, 1]
    assert d_pace_weights(wrong, every, 0.0).tolist() == pytest.approx([0.8 + 0.32 + 0.032, 0.352, 0.032])
