"""Copies of batches from a CUDA device to host memory, made beside the next forward.

A device copies asynchronously only to pinned memory, which is slow to allocate and never given back. So there are as
many slots of it as batches can be in flight, and each slot serves one batch after the other::

    main thread    forward 4 | forward 5 | forward 6 |
    copy stream      copy 3  |   copy 4  |   copy 5  |      waits for the forward, then for nothing
    writer thread    write 2 |   write 3 |   write 4 |      waits for the copy, then gives the slot back

A slot belongs to its batch until the writer has encoded all of it. Handing it out again earlier would let the device
write a later batch over values that are still being read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ...moa.targets.live import DeviceClock

Copies = list[tuple[Tensor, Tensor]]
"""Sources on the device, and their targets in host memory."""


class CopyEngine(Protocol):
    """What the slots need of a device."""

    def allocate(self, n_bytes: int) -> Tensor:
        """Return pinned host memory, uint8 [n_bytes]."""
        ...

    def copy(self, copies: Copies) -> Callable[[], float]:
        """Start copies after all work queued so far; returns what waits for them and gives the device's seconds."""
        ...


class CudaCopies:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._clock = DeviceClock(device)

    def allocate(self, n_bytes: int) -> Tensor:
        """Return pinned host memory, uint8 [n_bytes]."""
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, copies: Copies) -> Callable[[], float]:
        """Start copies after all work that is queued on the current stream, without waiting."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            began = self._clock.mark()
            for source, target in copies:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)  # its memory is not given to others before the copy is done
            return partial(DeviceClock.seconds, began, self._clock.mark())


class HostSlot:
    """Pinned memory for the copies of one batch at a time."""

    def __init__(self, engine: CopyEngine, free: deque[HostSlot]) -> None:
        self._engine, self._free = engine, free
        self._buffers: list[Tensor] = []
        self._copies: Copies = []
        self._arrival: Callable[[], float] | None = None

    def place(self, source: Tensor) -> Tensor:
        """Return the host memory that a tensor will be copied to, of its shape and dtype."""
        index, n_bytes = len(self._copies), source.numel() * source.element_size()
        if index == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[index].numel() < n_bytes:
            # Rounded up as torch's own allocator of pinned memory does, so that nothing of it lies idle.
            self._buffers[index] = self._engine.allocate(1 << (n_bytes - 1).bit_length())
        target = self._buffers[index][:n_bytes].view(source.dtype).view(source.shape)
        self._copies.append((source, target))
        return target

    def start(self) -> None:
        """Start all copies."""
        self._arrival = self._engine.copy(self._copies)

    def wait(self) -> float:
        """Wait until they are complete; return the seconds that the device copied."""
        return 0.0 if self._arrival is None else self._arrival()

    def release(self) -> None:
        """Free the slot for another batch; the values in it must not be read afterwards."""
        self.wait()
        self._copies.clear()
        self._arrival = None
        self._free.append(self)


class HostSlots:
    """Host memory for the batches in flight.

    Args:
        engine: copies on a stream of its own; None where activations are in host memory already.
        n_slots: batches that can be in flight at once.
    """

    def __init__(self, engine: CopyEngine | None, n_slots: int) -> None:
        self._free: deque[HostSlot] = deque()
        if engine is not None:
            self._free += [HostSlot(engine, self._free) for _ in range(n_slots)]
        self._is_needed = engine is not None

    @classmethod
    def of(cls, device: torch.device, n_slots: int) -> HostSlots:
        """Make the slots for the activations of a device."""
        return cls(CudaCopies(device) if device.type == "cuda" else None, n_slots)

    def take(self) -> HostSlot | None:
        """Take a free slot, until it is released; None where none is needed. Raises IndexError if there is none."""
        return self._free.popleft() if self._is_needed else None
