"""What a copy still reads is not given away; the bookkeeping, with a device that copies when it is told to."""

import contextlib
from typing import Any

import pytest
import torch

from moa_data.moa.drafters.training import Draws, TrainingInputs
from moa_data.trainer.batches.batch import Batch
from moa_data.trainer.batches.buffers import BufferPool
from moa_data.trainer.batches.copies import SideCopies, await_copy


class Event:
    """Of a device that is slow."""

    is_done = False

    def record(self, stream: Any) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.is_done


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device without memory, so that nothing of what is moved refers to the host."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"side stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return torch.device("meta")


def batch_on(pool: BufferPool) -> Batch:
    hidden = pool.take((2, 5, 8), torch.bfloat16)
    text = torch.zeros(2, 5, dtype=torch.int64)
    return Batch(TrainingInputs(text, text.bool(), None, hidden), Draws(None, text[:, 0].bool()), 1.0, 10)


def test_memory_is_held_until_the_copy_is_done(device: torch.device) -> None:
    pool, copies = BufferPool(1 << 20), SideCopies(device)
    batch = batch_on(pool)
    first = batch.inputs.hidden.data_ptr()
    moved: Any = copies.start(batch)
    del batch
    assert moved.inputs.hidden.device.type == "meta"
    assert moved.copied.stream == "side stream of meta"
    other = batch_on(pool)
    assert other.inputs.hidden.data_ptr() != first, "the copy still reads it"
    moved.copied.is_done = True
    slow: Any = copies.start(other)
    del other
    assert batch_on(pool).inputs.hidden.data_ptr() == first
    assert not slow.copied.query()
    assert pool.n_allocations == 2


def test_the_stream_of_the_step_waits_for_the_copy(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    waited, recorded = [], []

    class Stream:
        def wait_event(self, event: Any) -> None:
            waited.append(event)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor.shape))
    moved = SideCopies(device).start(batch_on(BufferPool(1 << 20)))
    arrived = await_copy(moved)
    assert waited == [moved.copied]
    assert arrived.copied is None
    assert sorted(recorded) == [(2,), (2, 5), (2, 5), (2, 5, 8)], "each tensor, or its memory is used again too early"
    assert await_copy(arrived) is arrived
