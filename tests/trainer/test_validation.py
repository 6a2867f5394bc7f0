"""Validation figures on hand-made cases."""

import torch

from moa_data.trainer.step import zero_peak_constant
from moa_data.trainer.validation import (
    ValidationSums,
    agreement_runs,
    sum_in_order,
)


def test_runs_of_agreement_per_complete_round() -> None:
    drafted = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1]]).bool()
    agree = torch.tensor([[0, 0, 1, 0, 0, 1, 1, 0, 1]]).bool()
    assert agreement_runs(agree, drafted, 2).tolist() == [1, 2], "the cut-off round at the end does not count"
    agree = torch.tensor([[0, 0, 0, 1, 0, 1, 1, 0, 1]]).bool()
    assert agreement_runs(agree, drafted, 2).tolist() == [0, 2], "a later agreement does not mend a miss"
    assert agreement_runs(agree[:, :2], drafted[:, :2], 2).tolist() == []


def test_sums_reduce_at_the_end() -> None:
    sums = ValidationSums()
    sums.add(ValidationSums(kl=2.0, agreements=3, positions=4, committed=5, rounds=2))
    sums.add(ValidationSums(kl=0.0, agreements=1, positions=12, committed=1, rounds=1))
    assert sums.metrics() == {"kl": 0.125, "top1_agreement": 0.25, "expected_acceptance_length": 2.0}
    assert all(value != value for value in ValidationSums().metrics().values())


def test_each_batch_counts_once_whoever_had_it() -> None:
    kls = [0.1, 0.2, 0.3, 0.7, 1e9]
    whole = sum_in_order([number, kl, 1, 2, 3, 1] for number, kl in enumerate(kls))
    dealt = [3, 1, 0, 4, 2, 4, 4]
    assert sum_in_order([number, kls[number], 1, 2, 3, 1] for number in dealt) == whole
    assert whole.kl == ((((0.1 + 0.2) + 0.3) + 0.7) + 1e9), "in the order of a single device, to the last bit"
    assert (whole.agreements, whole.positions, whole.committed, whole.rounds) == (5, 10, 15, 5)
    assert isinstance(whole.positions, int)


def test_schedule() -> None:
    factors = [zero_peak_constant(step, 50, 20.0, 1000) for step in (0, 25, 50, 525, 1000, 5000)]
    assert factors == [0.0, 10.0, 20.0, 10.5, 1.0, 1.0]
    assert [zero_peak_constant(step, 50, 1.0, 0) for step in (25, 60)] == [0.5, 1.0]
    assert zero_peak_constant(0, 0, 3.0, 10) == 3.0
