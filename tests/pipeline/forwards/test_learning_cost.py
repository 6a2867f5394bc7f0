"""What learning a codec is predicted to take, against what it takes."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_data.pipeline.forwards.learning_cost import learning_cost
from moa_data.storage.codecs.calibration import Scratch
from moa_data.storage.codecs.field import Learning
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform import TransformCodec
from moa_data.storage.schema import hidden_field, kv_field, tokens_field

SIZES_8B = {"vocab_size": 128_256, "hidden_size": 4096}


def test_memory_and_disk_of_learning_are_those_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_bytes = 0
    keep = Scratch.keep

    def counting(scratch: Scratch, array: np.ndarray) -> Any:
        nonlocal kept_bytes
        kept_bytes += array.nbytes
        return keep(scratch, array)

    monkeypatch.setattr(Scratch, "keep", counting)
    rng = np.random.default_rng(0)
    store_codec = StoreCodec("transform:1@group4", (tokens_field(), kv_field(8, 2, 32)))
    codec = store_codec.learned["kv"]
    assert isinstance(codec, TransformCodec)
    tracemalloc.start()
    try:
        sequences = (rng.standard_normal((200, 8, 2, 2, 32), dtype=np.float32) for _ in range(20))
        codec.calibrate(sequences, learning=Learning(tmp_path))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    predicted = learning_cost(store_codec, {"vocab_size": 100, "hidden_size": 256}, 4_000, 1e11)
    assert predicted is not None
    assert 0.5 < peak_bytes / predicted.memory_bytes < 1.2
    assert 0.7 < kept_bytes / predicted.disk_bytes <= 1.01


@pytest.mark.parametrize(("name", "most_gb"), [("transform:1", 4), ("transform:1,tokens@all", 5)])
def test_learning_for_llama_3_8b_is_bounded(name: str, most_gb: float) -> None:
    fields = (tokens_field(), kv_field(32, 8, 128), hidden_field("last", 4096))
    costs = [learning_cost(StoreCodec(name, fields), SIZES_8B, n, 1e11) for n in (240_000_000, 30_000)]
    assert costs[0] == costs[1]
    assert costs[0] is not None
    assert 1e9 < costs[0].memory_bytes < most_gb * 1e9
    assert 8e9 < costs[0].disk_bytes < 13e9


def test_what_learns_nothing_costs_nothing() -> None:
    assert learning_cost(StoreCodec("int8", (kv_field(2, 1, 8),)), SIZES_8B, 1000, 1e11) is None
