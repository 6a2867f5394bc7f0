"""The chunked loss equals the plain one; no logits of the whole batch are ever held."""

import resource
import subprocess
import sys

import pytest
import torch

from moa_data.moa.losses import chunked_forward_kl, feature_loss, forward_kl


@pytest.mark.parametrize("chunk_bytes", [4 * 31, 4 * 31 * 3, 1 << 26])
def test_chunked_equals_plain_in_value_and_gradient(chunk_bytes):
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


def test_chunked_under_autocast_equals_plain_within_bfloat16():
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


def test_infinite_logits_give_finite_value_and_gradient():
    draft = torch.randn(3, 5)
    draft[:, 2] = -torch.inf
    draft.requires_grad_(True)
    target = torch.randn(3, 5)
    target[:, [0, 2]] = -torch.inf
    value = forward_kl(draft, target)
    value.sum().backward()
    assert value.isfinite().all()
    assert draft.grad[:, [0, 1, 3, 4]].isfinite().all()


def test_feature_loss_is_smooth_l1_mean_over_width():
    got = feature_loss(torch.tensor([[0.0, 3.0]]), torch.tensor([[0.5, 0.0]]))
    assert got.tolist() == [pytest.approx((0.125 + 2.5) / 2)]


MEMORY_PROBE = """
import resource, sys, torch
from moa_data.moa.losses import chunked_forward_kl, forward_kl
rows, vocab, width = int(sys.argv[1]), 131072, 64
torch.set_num_threads(1)
head, hidden = torch.randn(vocab, width), torch.randn(rows, width)
features = torch.randn(rows, width, requires_grad=True)
chunked_forward_kl(features[:8], hidden[:8], head).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
chunked_forward_kl(features, hidden, head).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_peak_memory_at_a_128k_vocabulary_does_not_grow_with_the_batch():
    def growth_mb(rows):
        out = subprocess.run(
            [sys.executable, "-c", MEMORY_PROBE, str(rows)], capture_output=True, text=True, check=True
        )
        return int(out.stdout) / 1024

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    small, large = growth_mb(256), growth_mb(1024)
    whole_logits_mb = 1024 * 131072 * 4 / 2**20
    assert large < 0.9 * whole_logits_mb, "one float32 [rows, vocab] tensor would already be more"
    assert large - small < 0.1 * whole_logits_mb
