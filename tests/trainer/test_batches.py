"""Memory comes back when the last tensor on it is gone, and not while a copy still reads it."""

import contextlib
from typing import Any

import pytest
import torch

from moa_data.moa.drafters.training import Draws, TrainingInputs
from moa_data.trainer.data import Batch, BufferPool, SideCopies, await_copy


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


def test_memory_is_used_again_only_when_nothing_shares_it() -> None:
    pool = BufferPool(1 << 20)
    first = pool.take((10, 20), torch.bfloat16)
    address = first.data_ptr()
    row = first[3].float().requires_grad_()[:5]
    view = first.flatten()[7:]
    first.fill_(1)
    del first
    other = pool.take((10, 20), torch.bfloat16)
    assert other.data_ptr() != address, "a view still shares the memory"
    del view, row
    assert pool.take((10, 19), torch.bfloat16).data_ptr() == address
    assert pool.n_allocations == 2


def test_what_is_kept_is_bounded() -> None:
    pool = BufferPool(10_000)
    for n in (1000, 3000, 7000, 9000, 100, 9000):
        del_me = pool.take((n,), torch.uint8)
        assert del_me.numel() == n
        del del_me
        assert pool.allocated_bytes <= 10_000 + 64
    held = [pool.take((9000,), torch.uint8) for _ in range(3)]
    assert pool.allocated_bytes >= 27_000, "what is in use is never refused"
    del held
    pool.take((5000,), torch.uint8)
    assert pool.allocated_bytes <= 10_000 + 2 * 9000
