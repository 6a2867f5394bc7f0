"""Each worker has a device of its own, and more workers than devices are refused."""

import pytest
import torch

from moa_data.errors import OptionInvalid
from moa_data.pipeline.workers.devices import worker_devices


def test_workers_share_the_cpu() -> None:
    assert worker_devices("cpu", 3) == ["cpu"] * 3


def test_each_worker_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert worker_devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert worker_devices("cuda:2", 1) == ["cuda:2"]
    with pytest.raises(OptionInvalid, match=r"This machine has 4 of cuda, and each of 5 workers .* Lower --workers"):
        worker_devices("cuda", 5)
    with pytest.raises(OptionInvalid, match=r"--device cuda:1 is one device"):
        worker_devices("cuda:1", 2)
    with pytest.raises(OptionInvalid, match=r"This machine has 1 of mps"):
        worker_devices("mps", 2)
