"""The chunked loss equals the plain one; no logits of the whole batch are ever held."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moa_data.moa.nn import losses
from moa_data.moa.nn.losses import (
    Divergence,
    chunk_rows,
    chunked_cross_entropy,
    chunked_losses,
    d_pace_weights,
    feature_loss,
    logits_of,
)
from moa_data.tests.kit.drafters import forward_kl
from moa_data.tests.kit.memory import LiveBytes


def kl_through(head: Tensor, features: Tensor, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
    """The sum of the forward KL of features [N, E] through a frozen head, each weighing 1 or as given."""
    weights = torch.ones(len(features)) if weight is None else weight
    return chunked_losses(features[:, None], hidden, head, weights[:, None, None])[0]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one position, however often the head is read."""
    monkeypatch.setattr(losses, "LOGITS_BYTES", 1)
    monkeypatch.setattr(losses, "MAX_CHUNKS", 1000)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 31 * 3, 1 << 26])
@pytest.mark.parametrize("n_tokens", [0, None, 7], ids=["frozen head", "own head", "draft vocabulary"])
@pytest.mark.parametrize("kind", ["kl", "lk", "lk-hybrid"])
def test_chunked_losses_equal_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch, kind: str, n_tokens: int | None, chunk_bytes: int
) -> None:
    """In value and in every gradient, of one step and of several; a weight of 0 leaves a step out."""
    monkeypatch.setattr(losses, "LOGITS_BYTES", chunk_bytes)
    torch.manual_seed(3)
    divergence, n_steps = Divergence(kind, 2.0), 1 if n_tokens == 0 else 3
    tokens = torch.randperm(20)[:n_tokens].sort().values if n_tokens else None
    features = torch.randn(9, n_steps, 6, dtype=torch.float64, requires_grad=True)
    hidden, head = torch.randn(9, 6, dtype=torch.float64), torch.randn(20, 6, dtype=torch.float64)
    own = None if n_tokens == 0 else torch.randn(n_tokens or 20, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, n_steps, dtype=torch.float64) * (torch.rand(9, n_steps) > 0.3)
    got, terms = chunked_losses(
        features, hidden, head, weights[..., None], own_head=own, tokens=tokens, divergence=divergence
    )
    logits = features @ (head if own is None else own).T
    target = (hidden @ head.T).softmax(dim=-1)[:, None]
    target = target if tokens is None else target[..., tokens]
    log_draft = logits.log_softmax(dim=-1)
    accepted, kl = torch.minimum(target, log_draft.exp()).sum(dim=-1), -(target * log_draft).sum(dim=-1)
    share = torch.exp(-2.0 * accepted).detach()
    plain = {"kl": kl, "lk": -accepted.log(), "lk-hybrid": share * kl + (1 - share) * (1 - accepted)}[kind]
    if kind == "kl" and tokens is None:
        torch.testing.assert_close(plain, forward_kl(logits, (hidden @ head.T)[:, None]))
    torch.testing.assert_close(terms[..., 0].double(), plain.detach(), rtol=1e-5, atol=1e-5)
    expected = (plain * weights).sum()
    assert float(got.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    inputs = [features] if own is None else [features, own]
    found = torch.autograd.grad(2 * got, inputs)
    for one, other in zip(found, torch.autograd.grad(2 * expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_correction", [False, True])
@pytest.mark.parametrize("kind", ["kl", "lk-hybrid"])
def test_token_losses_equal_their_definition(monkeypatch: pytest.MonkeyPatch, kind: str, has_correction: bool) -> None:
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
    kl, l1 = -(target * draft).sum(dim=1), (draft.exp() - target).abs().sum(dim=1)
    if kind == "lk-hybrid":
        share = torch.exp(-3.0 * (1 - 0.5 * l1)).detach()
        kl = share * kl + (1 - share) * 0.5 * l1
    expected = torch.stack((kl, l1, -draft.gather(1, labels[:, None])[:, 0]), dim=1)
    inputs = [features, code, correction] if has_correction else [features]
    goals = torch.autograd.grad(2.0 * (expected * weights).sum(), inputs)
    own: dict[str, Any] = {"code": code[:, None], "correction": correction} if has_correction else {}
    for chunk_bytes in (1 << 26, 1, 4 * 2 * 11 * 4):
        monkeypatch.setattr(losses, "LOGITS_BYTES", chunk_bytes)
        total, terms = chunked_losses(
            features[:, None],
            hidden,
            head,
            weights[:, None],
            labels=labels[:, None],
            divergence=Divergence(kind),
            **own,
        )
        torch.testing.assert_close(terms[:, 0], expected)
        torch.testing.assert_close(total, (expected * weights).sum())
        for got, goal in zip(torch.autograd.grad(2.0 * total, inputs), goals, strict=True):
            torch.testing.assert_close(got, goal)
        own_code = code.detach() if has_correction else None
        cross_entropy = chunked_cross_entropy(features.detach(), labels, head, own_code, own.get("correction"))
        torch.testing.assert_close(cross_entropy, expected[:, 2].detach())


def test_chunked_under_autocast_equals_plain_within_bfloat16(small_chunks: None) -> None:
    torch.manual_seed(0)
    head, hidden, features = torch.randn(31, 16), torch.randn(10, 16), torch.randn(10, 16, requires_grad=True)
    plain = forward_kl(features @ head.T, hidden @ head.T).sum()
    (expected,) = torch.autograd.grad(plain, features)
    with torch.autocast("cpu", torch.bfloat16):
        low = kl_through(head, features, hidden)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, plain, rtol=0.02, atol=0.05)
    (got,) = torch.autograd.grad(low, features)
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_logits_that_overflow_count_for_nothing(small_chunks: None) -> None:
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
    chunked = kl_through(head, features, hidden)
    torch.testing.assert_close(chunked, forward_kl(logits.float(), goal.float()).sum())
    given = (features.detach().float() @ head.float().T).requires_grad_(True)
    draft = given.masked_fill(torch.isinf(logits), -torch.inf)
    (expected,) = torch.autograd.grad(forward_kl(draft, goal.float()).sum(), given)
    (got,) = torch.autograd.grad(chunked, features)
    torch.testing.assert_close(got, expected.half() @ head, rtol=5e-3, atol=5e-3)


class Waits(TorchDispatchMode):
    """Counts the values that are brought to the host, each of which waits for the device."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.n += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_chunks_wait_for_nothing(small_chunks: None) -> None:
    head, hidden, features = torch.randn(31, 6), torch.randn(10, 6), torch.randn(10, 6, requires_grad=True)
    with Waits() as waits:  # type: ignore[no-untyped-call]  # of torch
        kl_through(head, features, hidden).backward()
    assert waits.n == 0


def test_no_rows_give_no_loss() -> None:
    head, hidden, features = torch.randn(31, 6), torch.randn(0, 6), torch.randn(0, 6, requires_grad=True)
    value = kl_through(head, features, hidden)
    assert value.item() == 0
    value.backward()
    assert features.grad is not None
    assert features.grad.shape == (0, 6)


def test_feature_loss_is_smooth_l1_mean_over_width() -> None:
    got = feature_loss(torch.tensor([[0.0, 3.0]]), torch.tensor([[0.5, 0.0]]))
    assert got.tolist() == [pytest.approx((0.125 + 2.5) / 2)]


def test_peak_memory_does_not_grow_with_rows_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the head may be read often enough."""
    vocab, width, chunk_bytes = 4096, 8, 1 << 18
    monkeypatch.setattr(losses, "MAX_CHUNKS", 1000)
    monkeypatch.setattr(losses, "LOGITS_BYTES", chunk_bytes)
    head = torch.randn(vocab, width)

    def peak_bytes(loss: Any, rows: int) -> Any:
        hidden, features = torch.randn(rows, width), torch.randn(rows, width, requires_grad=True)
        with LiveBytes() as live:
            loss(features, hidden).backward()
        return live.peak

    def chunked(features: Tensor, hidden: Tensor) -> Tensor:
        return kl_through(head, features, hidden)

    def plain(features: Tensor, hidden: Tensor) -> Tensor:
        return forward_kl(features @ head.T, hidden @ head.T).sum()

    small, large = peak_bytes(chunked, 256), peak_bytes(chunked, 1024)
    per_row = 8 * 4 * width
    assert large - small < per_row * (1024 - 256)
    assert large < 12 * chunk_bytes + per_row * 1024
    assert peak_bytes(plain, 1024) > 1024 * vocab * 4 > 5 * large, "the measure must see the plain loss's logits"


def test_a_head_is_read_in_few_chunks() -> None:
    """Of Llama 3's vocabulary 64 MiB hold 130 positions, and 2,048 positions would read 1 GB of head 16 times."""
    assert chunk_rows(2048, 128_256) == 256
    assert chunk_rows(1_000, 128_256) == 130
    assert chunk_rows(100, 4096) == 4096
    assert chunk_rows(0, 128_256) == 130


@pytest.mark.parametrize("trains_head", [False, True])
def test_a_head_in_bfloat16_is_cast_in_blocks(
    trains_head: bool, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to the whole head cast at once, in value and gradient, and never cast at once."""
    torch.manual_seed(0)
    stored = (0.1 * torch.randn(1000, 64)).bfloat16()
    hidden, features = torch.randn(20, 64), torch.randn(20, 64, requires_grad=True)
    own = torch.randn(1000, 64, requires_grad=True) if trains_head else None
    inputs = [features] if own is None else [features, own]

    def loss(head: Tensor) -> tuple[Tensor, ...]:
        value, _ = chunked_losses(features[:, None], hidden, head, torch.ones(20, 1, 1), own_head=own)
        return value, *torch.autograd.grad(value, inputs)

    expected = loss(stored.float())
    monkeypatch.setattr(losses, "_CAST_BYTES", 4 * 64 * 130)
    with LiveBytes() as live:
        got = loss(stored)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert trains_head or live.peak < 3.2 * stored.numel()
    torch.testing.assert_close(logits_of(hidden, stored), hidden @ stored.float().T, rtol=1e-4, atol=1e-5)


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
    """Of 0.5, 0.3, 0.2 and a draft's 0.25, 0.25, 0.5: 0.7 is accepted, and the cross-entropy is 1.247665."""
    target, draft = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    weights, labels = torch.tensor([[[3.0, 0.0, 0.0]]]), torch.tensor([[1]])
    for options in ({}, {"own_head": torch.eye(3)}, {"labels": labels}):
        of_terms = weights if "labels" in options else weights[..., :1]
        total, terms = chunked_losses(draft[:, None], target, torch.eye(3), of_terms, divergence=divergence, **options)
        assert total.item() == pytest.approx(3 * expected, abs=1e-5)
        assert terms[0, 0].tolist() == pytest.approx([expected, 0.6, 1.386294][: len(terms[0, 0])], abs=1e-5)


def test_drafts_that_are_never_accepted_have_finite_losses() -> None:
    draft, target = torch.tensor([[60.0, -60.0]], requires_grad=True), torch.tensor([[-60.0, 60.0]])
    loss, _ = chunked_losses(draft[:, None], target, torch.eye(2), torch.ones(1, 1, 1), divergence=Divergence("lk"))
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
