"""Host memory belongs to a batch until it is released: copies that arrive late never land in another batch's values."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from moa_data.pipeline.config import ActivationSpec
from moa_data.pipeline.forwards.capture import Capture, capture
from moa_data.pipeline.forwards.host_copy import HostSlots
from moa_data.tests.kit.models import build_text_model

from .test_capture import rows


class LateCopies:
    """Copies only when somebody waits for it, as late as any device could, and counts what is allocated."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.n_waiting = 0

    def allocate(self, n_bytes: int) -> Tensor:
        self.allocated.append(n_bytes)
        return torch.full((n_bytes,), 0xA5, dtype=torch.uint8)

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> Callable[[], float]:
        left = [list(copies)]
        self.n_waiting += 1

        def arrive() -> float:
            for source, target in left.pop() if left else ():
                target.copy_(source)
            self.n_waiting -= 1
            return 0.5

        return arrive


SPEC = ActivationSpec(kv=True, last=True, layers=())


@pytest.fixture(scope="module")
def run() -> Callable[[int], Capture]:
    model = build_text_model("llama")

    def forward(seed: int) -> Capture:
        draw = np.random.default_rng(seed)
        tokens = [draw.integers(0, 400, n).astype(np.int32) for n in (17 + seed, 5)]
        return capture(model, tokens, SPEC, torch.bfloat16)

    return forward


def same(copied: Capture, batch: Capture) -> bool:
    plain = batch.to_host()
    return all(
        np.array_equal(rows(copied, name, index), rows(plain, name, index))
        for name in batch.fields
        for index in range(len(batch.n_tokens))
    )


def test_copies_that_arrive_late_hold_the_values_of_their_batch(run: Callable[[int], Capture]) -> None:
    slots = HostSlots(LateCopies(), n_slots=3)
    batches = [run(seed) for seed in range(3)]
    copied = [batch.to_host(slots) for batch in batches]
    assert not any(same(late, batch) for late, batch in zip(copied, batches, strict=True))  # nothing has arrived yet
    for late, batch in reversed(list(zip(copied, batches, strict=True))):
        assert late.wait() == 0.5
        late.check_finite(["first", "second"])
        assert same(late, batch)


def test_memory_is_used_again_only_after_its_release(run: Callable[[int], Capture]) -> None:
    engine = LateCopies()
    slots = HostSlots(engine, n_slots=2)
    first, second = run(3), run(2)
    one, two = first.to_host(slots), second.to_host(slots)
    with pytest.raises(IndexError):
        run(1).to_host(slots)
    one.wait()
    two.wait()
    n_buffers = len(engine.allocated)
    one.release()
    third = run(1)
    again = third.to_host(slots)
    again.wait()
    assert same(again, third)
    assert same(two, second)  # its memory is its own still
    assert again.fields["kv"].data_ptr() == one.fields["kv"].data_ptr()
    assert len(engine.allocated) == n_buffers  # a smaller batch fits where a larger one was


def test_a_release_waits_for_its_copies(run: Callable[[int], Capture]) -> None:
    """A slot that is given back while the device still writes to it would spoil the next batch."""
    engine = LateCopies()
    slots = HostSlots(engine, n_slots=1)
    first, second = run(0), run(1)
    copied = first.to_host(slots)
    assert engine.n_waiting == 1
    copied.release()
    assert engine.n_waiting == 0
    again = second.to_host(slots)
    again.wait()
    assert same(again, second)


def test_what_lies_in_host_memory_is_not_copied(run: Callable[[int], Capture]) -> None:
    batch = run(0)
    slots = HostSlots.of(torch.device("cpu"), n_slots=1)
    for _ in range(3):  # nothing runs out
        host = batch.to_host(slots)
        host.wait()
        host.release()
        assert host.fields["kv"].data_ptr() == batch.fields["kv"].data_ptr()
