"""The chunked loss equals the plain loss and never holds the logits of a whole batch."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moa_data.moa.nn import losses
from moa_data.moa.nn.losses import Divergence, chunked_losses
from moa_data.tests.kit.drafters import forward_kl
from moa_data.tests.kit.memory import LiveBytes


def kl_through(
    head: Tensor, features: Tensor, hidden: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Sum the forward KL of features [N, E] through a frozen head, with weights of 1 by default."""
    weights = torch.ones(len(features)) if weight is None else weight
    return chunked_losses(features[:, None], hidden, head, weights[:, None, None])[0]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks of one position, without a limit on how often the head is read."""
    monkeypatch.setattr(losses, "LOGITS_BYTES", 1)
    monkeypatch.setattr(losses, "MAX_CHUNKS", 1000)


def plain_terms(
    logits: Tensor, target: Tensor, divergence: Divergence, labels: Tensor | None
) -> Tensor:
    """Compute the terms [N, J, 1 or 3] by their definition.

    Inputs are a draft's logits and the target's probabilities, both [N, J, V_d].
    """
    log_draft = logits.log_softmax(dim=-1)
    accepted, kl = (
        torch.minimum(target, log_draft.exp()).sum(dim=-1),
        -(target * log_draft).sum(dim=-1),
    )
    share = torch.exp(-divergence.decay * accepted).detach()
    tv = 0.1 * kl + 0.9 * (1 - accepted)
    kinds = {
        "kl": kl,
        "lk": -accepted.log(),
        "lk-hybrid": share * kl + (1 - share) * (1 - accepted),
        "tv": tv,
    }
    found = [kinds[divergence.kind]]
    if labels is not None:
        found += [
            (log_draft.exp() - target).abs().sum(dim=-1),
            -log_draft.gather(-1, labels[..., None])[..., 0],
        ]
    return torch.stack(found, dim=-1)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 31 * 3, 1 << 26])
@pytest.mark.parametrize(
    "form", ["frozen head", "own head", "draft vocabulary", "labels", "correction"]
)
@pytest.mark.parametrize("kind", ["kl", "lk", "lk-hybrid", "tv"])
def test_chunked_losses_equal_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch, kind: str, form: str, chunk_bytes: int
) -> None:
    """Values and gradients are equal, for one and several steps; a weight of 0 skips a step."""
    monkeypatch.setattr(losses, "LOGITS_BYTES", chunk_bytes)
    torch.manual_seed(3)
    has_own, has_labels = form in ("own head", "draft vocabulary"), form in ("labels", "correction")
    n_steps, random = (
        3 if has_own else 1,
        partial(torch.randn, dtype=torch.float32 if has_labels else torch.float64),
    )
    features, hidden, head = random(9, n_steps, 6), random(9, 6), random(20, 6)
    options: dict[str, Any] = {"divergence": Divergence(kind, 2.0)}
    if has_own:
        options["own_head"] = random(7 if form == "draft vocabulary" else 20, 6)
    if form == "draft vocabulary":
        options["tokens"] = torch.randperm(20)[:7].sort().values
    if has_labels:
        options["labels"] = torch.randint(20, (9, 1))
    if form == "correction":
        options |= {"code": random(9, 1, 3), "correction": random(20, 3)}
    inputs = [
        features,
        *(options[name] for name in ("own_head", "code", "correction") if name in options),
    ]
    for tensor in inputs:
        tensor.requires_grad_()
    weights = torch.rand(9, n_steps, 3 if has_labels else 1) * (torch.rand(9, n_steps, 1) > 0.3)
    got, terms = chunked_losses(features, hidden, head, weights.to(features.dtype), **options)

    logits = features @ options.get("own_head", head).T
    if form == "correction":
        logits = logits + options["code"] @ options["correction"].T
    target = (hidden @ head.T).softmax(dim=-1)[:, None, options.get("tokens", slice(None))]
    plain = plain_terms(logits, target, options["divergence"], options.get("labels"))
    torch.testing.assert_close(terms, plain.detach().float(), rtol=1e-5, atol=1e-5)
    expected = (plain * weights).sum()
    assert float(got.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    found = torch.autograd.grad(2 * got, inputs)
    for one, other in zip(found, torch.autograd.grad(2 * expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if has_labels:
        code, correction = options.get("code"), options.get("correction")
        alone = losses.chunked_cross_entropy(
            features[:, 0],
            options["labels"][:, 0],
            head,
            None if code is None else code[:, 0],
            correction,
        )
        torch.testing.assert_close(alone, plain[:, 0, 2].detach())


def test_chunked_under_autocast_equals_plain_within_bfloat16(small_chunks: None) -> None:
    torch.manual_seed(0)
    head, hidden, features = (
        torch.randn(31, 16),
        torch.randn(10, 16),
        torch.randn(10, 16, requires_grad=True),
    )
    plain = forward_kl(features @ head.T, hidden @ head.T).sum()
    (expected,) = torch.autograd.grad(plain, features)
    with torch.autocast("cpu", torch.bfloat16):
        low = kl_through(head, features, hidden)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, plain, rtol=0.02, atol=0.05)
    (got,) = torch.autograd.grad(low, features)
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_logits_that_overflow_count_for_nothing(small_chunks: None) -> None:
    """float16 is the only dtype in which a head and features of ordinary sizes give -inf."""
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
    """Count the values that are copied to the host. Each copy waits for the device."""

    n = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.n += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_chunks_wait_for_nothing(small_chunks: None) -> None:
    head, hidden, features = (
        torch.randn(31, 6),
        torch.randn(10, 6),
        torch.randn(10, 6, requires_grad=True),
    )
    with Waits() as waits:  # type: ignore[no-untyped-call]  # of torch
        kl_through(head, features, hidden).backward()
    assert waits.n == 0


def test_peak_memory_does_not_grow_with_rows_times_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds if the head may be read often enough."""
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
    assert peak_bytes(plain, 1024) > 1024 * vocab * 4 > 5 * large, (
        "the measure must see the plain loss's logits"
    )
    # With Llama 3's vocabulary 64 MiB hold 130 positions. 2,048 positions would read 1 GB of head
    # 16 times.
    monkeypatch.undo()
    assert [losses.chunk_rows(n, 128_256) for n in (2048, 1_000, 0)] == [256, 130, 130]


@pytest.mark.parametrize("trains_head", [False, True])
def test_a_head_in_bfloat16_is_cast_in_blocks(
    trains_head: bool, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss equals that of a head cast at once, in value and gradient, with less memory."""
    torch.manual_seed(0)
    stored = (0.1 * torch.randn(1000, 64)).bfloat16()
    hidden, features = torch.randn(20, 64), torch.randn(20, 64, requires_grad=True)
    own = torch.randn(1000, 64, requires_grad=True) if trains_head else None
    inputs = [features] if own is None else [features, own]

    def loss(head: Tensor) -> tuple[Tensor, ...]:
        value, _ = chunked_losses(
            features[:, None], hidden, head, torch.ones(20, 1, 1), own_head=own
        )
        return value, *torch.autograd.grad(value, inputs)

    expected = loss(stored.float())
    monkeypatch.setattr(losses, "_CAST_BYTES", 4 * 64 * 130)
    with LiveBytes() as live:
        got = loss(stored)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert trains_head or live.peak < 3.2 * stored.numel()
    torch.testing.assert_close(
        losses.logits_of(hidden, stored), hidden @ stored.float().T, rtol=1e-4, atol=1e-5
    )


def test_drafts_that_are_never_accepted_have_finite_losses() -> None:
    draft, target = torch.tensor([[60.0, -60.0]], requires_grad=True), torch.tensor([[-60.0, 60.0]])
    loss, _ = chunked_losses(
        draft[:, None], target, torch.eye(2), torch.ones(1, 1, 1), divergence=Divergence("lk")
    )
    assert loss.item() == pytest.approx(13.8155, abs=1e-3)
    assert torch.autograd.grad(loss, draft)[0].isfinite().all()


def test_weights_of_d_pace_by_hand() -> None:
    wrong = -torch.tensor([0.8, 0.4, 0.1]).log()
    every = torch.ones(3, dtype=torch.bool)
    # The smoothed probabilities are 0.9, 0.7, 0.55. Those of reaching a draft are 0.9, 0.63,
    # 0.3465.
    assert losses.d_pace_weights(wrong, every, 0.5).tolist() == pytest.approx(
        [1.8765, 0.9765, 0.3465]
    )
    assert losses.d_pace_weights(
        wrong, torch.tensor([True, True, False]), 0.5
    ).tolist() == pytest.approx([1.53, 0.63, 0])
    assert losses.d_pace_weights(wrong, every, 1.0).tolist() == [3, 2, 1]
    assert losses.d_pace_weights(wrong, every, 0.0).tolist() == pytest.approx(
        [0.8 + 0.32 + 0.032, 0.352, 0.032]
    )
