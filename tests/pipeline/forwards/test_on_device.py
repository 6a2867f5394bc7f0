"""Extraction on a simulated CUDA device gives the CPU's values and the writer's own errors."""

import errno
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
import torch

from moa_data.moa.targets.facts import TargetFacts
from moa_data.moa.targets.live import Target
from moa_data.pipeline.config import ActivationSpec
from moa_data.pipeline.estimate import field_specs
from moa_data.pipeline.forwards.capture import Capture, capture
from moa_data.pipeline.forwards.parts import CaptureSettings, Forwards, run_parts
from moa_data.pipeline.report import Timings
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.tests.kit.device import Counts
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_text_model

SPEC = ActivationSpec(kv=True, last=True, layers=(0,))


def test_a_batch_gives_what_the_cpu_gives(device: Counts) -> None:
    sequences = [np.arange(4, 4 + n).astype(np.int32) for n in (9, 4)]
    found: list[Any] = []
    for kind in ("cpu", "cuda"):
        captured = capture(build_text_model().to(kind), sequences, SPEC, torch.float32)
        host = captured.to_host()
        host.wait()
        found.append([host.rows(name, index) for name in host.fields for index in range(2)])
    for own, expected in zip(*found, strict=True):
        assert np.array_equal(own, expected)


def test_encoding_a_batch_waits_once_a_field(device: Counts) -> None:
    """It is the check that all values are finite. The number of sequences does not matter."""
    for n_sequences in (1, 8):
        model, sequences = (
            build_text_model().to("cuda"),
            [np.arange(4, 13).astype(np.int32)] * n_sequences,
        )
        captured = capture(model, sequences, SPEC, torch.float32)
        codec = StoreCodec("int8", field_specs(SPEC, TargetFacts.of_model(model), "float32"))
        device.reset()
        captured.encode(codec, [str(i) for i in range(n_sequences)])
        assert device.waits <= len(captured.fields), device.worst()


def test_copies_that_arrive_late_hold_the_values_of_their_batch(device: Counts) -> None:
    """The simulated device copies as late as it may, so values read before `wait` are not there."""
    batches = [[np.arange(4, 4 + n).astype(np.int32)] for n in (9, 5, 7)]
    expected = [
        capture(build_text_model(), tokens, SPEC, torch.bfloat16).to_host() for tokens in batches
    ]
    model = build_text_model().to("cuda")
    copied = [capture(model, tokens, SPEC, torch.bfloat16).to_host() for tokens in batches]

    def is_there(late: Capture, batch: Capture) -> bool:
        return all(
            np.array_equal(np.array(late.rows(name, 0)), np.array(batch.rows(name, 0)))
            for name in batch.fields
        )

    pairs = list(zip(copied, expected, strict=True))
    assert not any(is_there(late, batch) for late, batch in pairs)
    for late, batch in reversed(pairs):
        assert not is_there(late, batch)
        assert late.wait() > 0
        late.check_finite(["the only sequence"])
        assert is_there(late, batch)


class FullDisk:
    """Stands in for the writer of a part: the disk becomes full after some time."""

    part, codec, is_open, was_first = 0, SimpleNamespace(fields=("kv",)), True, True

    def __init__(self, sequences: pa.Table) -> None:
        self.sequences = sequences

    def write(self, *_: Any) -> None:
        time.sleep(0.2)
        raise OSError(errno.ENOSPC, "No space left on device")

    def discard(self) -> None: ...

    def commit(self) -> None: ...


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_full_disk_is_a_full_disk(device: Counts, kind: str) -> None:
    """The error is that of the disk, although the writer skips the remaining batches."""
    n, n_tokens = 12, 20
    text = {
        str(i): (np.full(n_tokens, 4 + i, np.int32), np.ones(n_tokens, np.uint8)) for i in range(n)
    }
    columns = {
        "n_tokens": pa.array([n_tokens] * n, pa.int32()),
        "first_token": [n_tokens * i for i in range(n)],
    }
    part = FullDisk(pa.table({"sequence_id": list(text), "source_row": list(range(n)), **columns}))
    target = Target(build_text_model().to(kind))
    spec = ActivationSpec(kv=True, last=False, layers=())
    codec = StoreCodec("lossless", field_specs(spec, target.facts, "float32"))
    settings = CaptureSettings(spec, codec, "float32", n_tokens, True, 1)
    forwards = Forwards(settings, target, text.__getitem__)

    class Store:
        n_parts = 1
        part_tokens: ClassVar = {0: n * n_tokens}

        def pending_parts(self) -> list[int]:
            return [0]

        def part(self, *_: Any) -> Any:
            return part

    with raises_naming(OSError, 28):
        run_parts(forwards, Store(), [0], Timings())  # type: ignore[arg-type]
