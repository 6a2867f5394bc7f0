"""Training from encoded activations: codes travel, and are decoded on the training device to what the store reads."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.runs import run, settings
from moa_data.tests.kit.training import build_store
from moa_data.trainer.data import Batch, BatchReader, TrainingStream, ValidationBatches, draw


@pytest.fixture(scope="module")
def int8_path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_store(tmp_path_factory.mktemp("int8") / "store", n_sequences=30, dtype="bfloat16", codec="int8")


def test_codes_decode_to_what_the_store_reads(int8_path: Any) -> None:
    rows = np.array([4, 0, 11])
    store = ActivationStore(int8_path)
    config = settings(int8_path, batch_size=3, target_layer_inference=1)
    inputs, encoded = BatchReader(store, config, torch.device("cpu")).read(rows, store.lengths[rows])
    batch = Batch(inputs, draw(config, 0, 10), 1.0, 0, encoded=encoded)
    assert batch.inputs.kv is not None
    assert batch.inputs.kv.numel() == 0
    assert batch.encoded["kv"].rows["kv/key_codes"].dtype == torch.int8
    n_code_bytes = sum(rows.nbytes for item in batch.encoded.values() for rows in item.rows.values())
    inputs = batch.to(torch.device("cpu")).decode().inputs
    assert inputs.kv is not None
    assert inputs.entering_hidden is not None
    decoded = {"kv": inputs.kv, "hidden/last": inputs.hidden, "hidden/layer_1": inputs.entering_hidden}
    assert n_code_bytes < 0.75 * sum(values.nbytes for values in decoded.values())
    longest = int(store.lengths[rows].max())
    for field, values in decoded.items():
        assert values.dtype == torch.bfloat16
        assert values.shape[:2] == (3, longest)
        for row, sequence in enumerate(rows.tolist()):
            n = int(store.lengths[sequence])
            expected = store.read(sequence, field).reshape(n, *values.shape[2:])
            np.testing.assert_array_equal(values[row, :n].contiguous().view(torch.uint16).numpy(), expected)
            assert not values[row, n:].any()


def test_a_drafter_trains_from_codes(tmp_path: Path) -> None:
    store = build_store(tmp_path / "store", n_sequences=40, codec="int8")
    report = run(store, tmp_path / "run", max_steps=3, validate_every=3)
    assert report.n_steps == 3
    assert np.isfinite(report.best_expected_acceptance_length)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_who_decodes(int8_path: Any, device: str) -> None:
    """On a CPU the thread that reads; elsewhere the training device, so that codes are what travels."""
    store = ActivationStore(int8_path)
    config = settings(int8_path, batch_size=4, target_layer_inference=1)
    reader = BatchReader(store, config, torch.device(device))
    rows = np.arange(8)
    (batch,) = itertools.islice(TrainingStream(reader, rows, store.lengths[rows].astype(np.int64), 10, 0, 1), 1)
    (held_out,) = itertools.islice(ValidationBatches(reader, rows, store.lengths[rows].astype(np.int64), 4), 1)
    for item in (batch, held_out):
        assert bool(item.encoded) == (device != "cpu")
        kv = item.decode().inputs.kv
        assert kv is not None
        assert kv.numel() > 0
