"""Muon's updates are orthogonal, equal for stacked and single matrices; others get AdamW's."""

import torch

from moa_data.trainer.muon import Muon, orthogonalize


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 16), (2, 8, 24), (2, 24, 8)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_other_parameters_follow_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.zeros(5))
    theirs.data.copy_(ours.data)
    optimizers = (
        Muon([], [ours], others_lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([theirs], lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    )
    for step in range(7):
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = torch.linspace(-1, 1, 5) * (step + 1) + weight.detach()
            optimizer.step()
        optimizers[0].load_state_dict(optimizers[0].state_dict())
    torch.testing.assert_close(ours, theirs)


def test_blocks_of_rows_are_orthogonalised_each() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(20, 12))
    weight.grad = torch.randn(20, 12)
    Muon([weight], lr=1.0, block_rows=8).step()
    # The first Nesterov direction is a multiple of the gradient, and orthogonalising ignores the scale.
    for block, grad in zip(weight.detach().split(8), weight.grad.split(8), strict=True):
        torch.testing.assert_close(-block, orthogonalize(grad[None])[0], rtol=1e-4, atol=1e-4)
