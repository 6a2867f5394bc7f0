"""Copies of batches to a CUDA device, beside the step that is under way."""

from collections import deque
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from .batch import Batch


class SideCopies:
    """Starts copies on a stream of their own, and holds the host's memory until each of them is done.

    A copy that does not block reads its source later. Buffers of a pool are free again when nothing refers to them, so
    without a reference held here the next batch would overwrite one that is being copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._held: deque[tuple[torch.cuda.Event, Batch]] = deque()

    def start(self, batch: Batch) -> Batch:
        """Start copying a batch; call :func:`await_copy` before using it."""
        while self._held and self._held[0][0].query():
            self._held.popleft()
        with torch.cuda.stream(self._stream):
            moved, done = batch.to(self._device, non_blocking=True), torch.cuda.Event()
            done.record(self._stream)
        self._held.append((done, batch))
        return replace(moved, copied=done)


def await_copy(batch: Batch) -> Batch:
    """Have the current stream of a batch's device wait until the batch has arrived; the host goes on at once."""
    if batch.copied is None:
        return batch
    stream = torch.cuda.current_stream(batch.inputs.tokens.device)
    stream.wait_event(batch.copied)
    for tensor in _tensors(batch):
        # The allocator must not give it away before this stream is done with it.
        tensor.record_stream(stream)
    return replace(batch, copied=None)


def _tensors(item: Any) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, dict):
        return [tensor for value in item.values() for tensor in _tensors(value)]
    if isinstance(item, tuple):
        return [tensor for value in item for tensor in _tensors(value)]
    if hasattr(item, "__dataclass_fields__"):
        return [tensor for entry in fields(item) for tensor in _tensors(getattr(item, entry.name))]
    return []
