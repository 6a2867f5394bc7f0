"""Copies between a GPU and host memory are complete before they are read.

This covers captured activations and training batches. `benchmarks/gpu/gpu.sh --part train` runs
these tests; the tests on the simulated device show that they can fail.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.pipeline.config import ActivationSpec
from moa_data.pipeline.forwards.capture import capture
from moa_data.tests.kit.device import Counts
from moa_data.tests.kit.models import build_text_model
from moa_data.tests.kit.training import build_store
from moa_data.tests.trainer.test_on_device import KINDS, Run

pytestmark = pytest.mark.gpu


def test_captured_activations_are_those_of_the_cpu() -> None:
    """Each batch is read after its copies are done, in host memory that torch reuses."""
    spec, random = ActivationSpec(kv=True, last=True, layers=(0,)), np.random.default_rng(0)
    batches = [
        [random.integers(4, 300, n).astype(np.int32) for n in (90, 40, 200)] for _ in range(6)
    ]
    found: list[list[Any]] = []
    for kind in ("cpu", "cuda"):
        model, rows = build_text_model().to(kind), list[Any]()
        for sequences in batches:
            host = capture(model, sequences, spec, torch.float32).to_host()
            host.wait()
            rows += [
                np.array(host.rows(name, index))
                for name in host.fields
                for index in range(len(sequences))
            ]
        found.append(rows)
    for own, expected in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_the_cpu(tmp_path: Path, kind: str) -> None:
    """The losses equal the CPU's, with prefetched batches whose host memory is reused."""
    path = build_store(
        tmp_path / "store", activations=("kv", "hidden:last", "hidden:layer:0", "hidden:layer:1")
    )
    steps = [
        list(Run(path, kind, one, prefetch_batches=4).steps(Counts(), 6)) for one in ("cuda", "cpu")
    ]
    assert [step.loss for step in steps[0]] == pytest.approx(
        [step.loss for step in steps[1]], rel=1e-3
    )
