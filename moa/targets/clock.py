"""Timing of work on its own device: the parts of decoding, and forward passes.

A CUDA device runs behind the CPU that queues its work: a CPU clock read between draft and verification would count most
of the drafting as verification, and waiting for the device there would make decoding slower.
"""

import time

import torch

Mark = float | torch.cuda.Event
"""A moment: seconds of the CPU's clock, or an event in the device's queue."""


class DeviceClock:
    """Marks moments without waiting for the device; waits when their distance is asked for.

    Args:
        device: the device whose work is timed; CUDA events on a CUDA device, else the CPU's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """Mark this moment, on the device behind all work queued so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def seconds(began: Mark, ended: Mark) -> float:
        """Measure the seconds between two marks of one clock, waiting for the second one."""
        if isinstance(began, float) or isinstance(ended, float):
            assert isinstance(began, float)
            assert isinstance(ended, float)
            return ended - began
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
