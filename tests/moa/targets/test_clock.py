"""Moments are marked on the device whose work is timed."""

from typing import Any

import pytest
import torch

from moa_data.moa.targets.live import DeviceClock


def test_a_second_device_is_timed_by_its_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any = "the queue of the current device") -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the queue of {device}")
    DeviceClock(torch.device("cuda:1")).mark()
    assert recorded == ["the queue of cuda:1"]


def test_a_cpu_is_timed_by_its_clock() -> None:
    clock = DeviceClock(torch.device("cpu"))
    began, ended = clock.mark(), clock.mark()
    assert 0 <= DeviceClock.seconds(began, ended) < 60
