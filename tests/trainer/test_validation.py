"""Validation figures and the schedule on hand-made cases."""

import math

import torch

from moa_data.trainer.step import agreement_runs, validation_metrics, zero_peak_constant


def test_runs_of_agreement_per_complete_round() -> None:
    drafted = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1]]).bool()
    agree = torch.tensor([[0, 0, 1, 0, 0, 1, 1, 0, 1]]).bool()
    assert agreement_runs(agree, drafted, 2).tolist() == [1, 2], "the cut-off round at the end does not count"
    agree = torch.tensor([[0, 0, 0, 1, 0, 1, 1, 0, 1]]).bool()
    assert agreement_runs(agree, drafted, 2).tolist() == [0, 2], "a later agreement does not undo a miss"
    assert agreement_runs(agree[:, :2], drafted[:, :2], 2).tolist() == []


def test_each_batch_counts_once_in_the_order_of_a_single_device() -> None:
    kls = [0.1, 0.2, 0.3, 0.7, 1e9]
    whole = validation_metrics([number, kl, 1, 2, 3, 1] for number, kl in enumerate(kls))
    dealt = [3, 1, 0, 4, 2, 4, 4]
    assert validation_metrics([number, kls[number], 1, 2, 3, 1] for number in dealt) == whole
    total = (((0.1 + 0.2) + 0.3) + 0.7) + 1e9  # to the last bit
    assert whole == {"kl": total / 10, "top1_agreement": 0.5, "expected_acceptance_length": 3.0}
    assert all(map(math.isnan, validation_metrics([]).values()))


def test_schedule() -> None:
    factors = [zero_peak_constant(step, 50, 20.0, 1000) for step in (0, 25, 50, 525, 1000, 5000)]
    assert factors == [0.0, 10.0, 20.0, 10.5, 1.0, 1.0]
    assert [zero_peak_constant(step, 50, 1.0, 0) for step in (25, 60)] == [0.5, 1.0]
    assert zero_peak_constant(0, 0, 3.0, 10) == 3.0
