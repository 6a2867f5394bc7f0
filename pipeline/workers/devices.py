"""Which device each worker of a machine computes on, and how many workers a machine has room for."""

from __future__ import annotations

import torch

from ...errors import OptionInvalid
from ...machine import usable_cores
from ..config import ScaleSettings


def worker_devices(device: str, n_workers: int) -> list[str]:
    """Return the device of each worker: on an accelerator one of its own, on the CPU all the same.

    Args:
        device: what ``--device`` gave, resolved: cpu, cuda, mps, or one of several such as cuda:1.

    Raises:
        OptionInvalid: the machine has fewer devices.
    """
    kind = torch.device(device)
    if kind.type == "cpu":
        return [device] * n_workers
    n_devices = torch.cuda.device_count() if kind.type == "cuda" and kind.index is None else 1
    if n_workers > n_devices:
        has = f"This machine has {n_devices} of {device}" if kind.index is None else f"--device {device} is one device"
        raise OptionInvalid(
            f"{has}, and each of {n_workers} workers needs one of its own. Lower --workers, or leave out --device."
        )
    return [f"{kind.type}:{index}" for index in range(n_workers)] if kind.index is None else [device]


def devices_here(device: str, scale: ScaleSettings) -> int:
    """Return how many of Ray's workers a machine like this one holds, by its GPUs or its cores; at least one."""
    if torch.device(device).type == "cpu":
        return max(1, usable_cores() // scale.cpus_per_worker)
    return max(1, int(torch.cuda.device_count() / (scale.gpus_per_worker or 1.0)))
