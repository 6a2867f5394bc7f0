"""Batches are a pure function of store, settings and step; what is read is what was stored."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.errors import TrainingError
from moa_data.moa.drafters.training import Draws
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.runs import run
from moa_data.tests.kit.training import build_store
from moa_data.trainer import data as data_module
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.data import (
    BatchReader,
    TrainingStream,
    ValidationBatches,
    device_share,
    draw,
    epoch_order,
    needed_fields,
    split_sequences,
    sum_loss_weights,
)


def config(**changes: Any) -> Any:
    return TrainConfig.of(store="", out="", **({"batch_size": 4, "reader_threads": 2} | changes))


def stream_of(store: Any, settings: Any, max_steps: int = 20, rank: int = 0, n_ranks: int = 1) -> Any:
    lengths = store.sequences["n_tokens"].to_numpy().astype(np.int64)
    return TrainingStream(
        BatchReader(store, settings, torch.device("cpu")), np.arange(len(store)), lengths, max_steps, rank, n_ranks
    )


@pytest.fixture(scope="module")
def int8_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("int8") / "store", n_sequences=30, dtype="bfloat16", codec="int8")


@pytest.mark.parametrize(("dtype", "codec"), [("float32", "lossless"), ("bfloat16", "lossless"), ("bfloat16", "int8")])
def test_batches_hold_what_the_store_holds(tmp_path: Path, dtype: str, codec: str) -> None:
    """Codes travel, and are decoded to what the store reads."""
    store = ActivationStore(build_store(tmp_path / "store", n_sequences=12, dtype=dtype, codec=codec))
    rows = np.array([5, 0, 11])
    reader = BatchReader(store, config(target_layer_inference=1), torch.device("meta"))
    batch = reader.batch(rows, store.lengths[rows].astype(np.int64), Draws(None, torch.zeros(3, dtype=torch.bool)))
    assert bool(batch.encoded) == (codec == "int8")
    inputs: Any = batch.to(torch.device("cpu")).decode().inputs
    read = {"kv": inputs.kv, "hidden/last": inputs.hidden, "hidden/layer_1": inputs.entering_hidden}
    if batch.encoded:
        assert batch.encoded["kv"].rows["kv/key_codes"].dtype == torch.int8
        n_code_bytes = sum(rows.nbytes for item in batch.encoded.values() for rows in item.rows.values())
        assert n_code_bytes < 0.75 * sum(values.nbytes for values in read.values())
    read |= {"tokens": inputs.tokens, "response_mask": inputs.response_mask}
    for name, values in read.items():
        assert values.dtype == getattr(torch, dtype) or name in ("tokens", "response_mask")
        bits = values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
        for row, sequence in enumerate(rows.tolist()):
            n = int(store.lengths[sequence])
            expected = store.read(sequence, name).reshape(n, *bits.shape[2:])
            np.testing.assert_array_equal(bits[row, :n].numpy(), expected)
            assert not bits[row, n:].any(), "padding must be zero, not left-over memory"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_who_decodes(int8_path: Path, device: str) -> None:
    """On a CPU the thread that reads; elsewhere the training device, so that codes are what travels."""
    store, rows = ActivationStore(int8_path), np.arange(8)
    reader = BatchReader(store, config(), torch.device(device))
    lengths = store.lengths[rows].astype(np.int64)
    for batches in (TrainingStream(reader, rows, lengths, 10, 0, 1), ValidationBatches(reader, rows, lengths, 4)):
        batch: Any = next(iter(batches))
        assert bool(batch.encoded) == (device != "cpu")
        assert batch.decode().inputs.kv.numel() > 0


def test_a_drafter_trains_from_codes(int8_path: Path, tmp_path: Path) -> None:
    assert run(int8_path, tmp_path / "run", max_steps=2, validate_every=2).best_expected_acceptance_length >= 1


def test_a_stream_started_later_goes_on_as_the_first_would(store_path: Path) -> None:
    store = ActivationStore(store_path)
    first, later = stream_of(store, config()), stream_of(store, config())
    later.start_step = 17  # in the second epoch
    iterator, resumed = iter(first), iter(later)
    for _ in range(17):
        next(iterator)
    for _ in range(5):
        one, other = next(iterator), next(resumed)
        assert torch.equal(one.inputs.tokens, other.inputs.tokens)
        assert torch.equal(one.draws.step_bound, other.draws.step_bound)
        assert torch.equal(one.draws.staircase_rows, other.draws.staircase_rows)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_micro_batches_of_all_devices_make_up_the_batch(store_path: Path, n_ranks: int) -> None:
    """Gradients are averaged over devices and micro-batches, so each divides by its share of ALL loss positions."""
    store, parts = ActivationStore(store_path), []
    whole = next(iter(stream_of(store, config())))
    for rank in range(n_ranks):
        iterator = iter(stream_of(store, config(micro_batch_size=1), rank=rank, n_ranks=n_ranks))
        parts += [next(iterator) for _ in range(4 // n_ranks)]
    assert sum(part.n_tokens for part in parts) == whole.n_tokens
    n_positions = [sum_loss_weights(part.inputs.response_mask, part.draws, config()) for part in parts]
    assert sum(n_positions) == whole.denominator
    assert all(part.denominator == whole.denominator / 4 for part in parts)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_devices_read_their_own_sequences_alone(store_path: Path, n_ranks: int) -> None:
    """Bytes are those of the chunks that hold them, and of the response masks of the whole batch."""
    fields = ["tokens", *needed_fields(ActivationStore(store_path), config()).values()]
    for rank in range(n_ranks):
        store = ActivationStore(store_path)
        stream = stream_of(store, config(batch_size=8, prefetch_batches=1), rank=rank, n_ranks=n_ranks)
        for step, batch in zip(range(3), stream, strict=False):
            order = epoch_order(store.lengths.astype(np.int64), 8, 0, 0)[step]
            alone = ActivationStore(store_path)
            alone.read_batch(order, "response_mask")
            alone.read_batch(order[rank::n_ranks], fields)
            assert batch.n_bytes_read == alone.n_bytes_read
            assert batch.n_tokens == int(store.lengths[order[rank::n_ranks]].sum())
            assert batch.n_tokens_of_all == int(store.lengths[order].sum())


def test_an_epoch_visits_every_sequence_about_once() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 1003)
    order = epoch_order(lengths, 8, seed=3, epoch=0)
    assert order.shape == (125, 8)
    assert len(np.unique(order)) == 1000
    spread = np.mean([np.ptp(lengths[batch]) for batch in order])
    assert spread < 0.3 * np.ptp(lengths), "batches are grouped by length"
    assert not np.array_equal(order, epoch_order(lengths, 8, seed=3, epoch=1))
    assert not np.array_equal(order, epoch_order(lengths, 8, seed=4, epoch=0))
    assert np.array_equal(order, epoch_order(lengths, 8, seed=3, epoch=0))


def test_the_split_follows_content_not_order() -> None:
    ids = [f"{value:08x}" for value in np.random.default_rng(0).integers(0, 2**32, 4000)]
    train, held_out = split_sequences(ids, 0.1)
    assert 300 < len(held_out) < 500
    assert not set(train) & set(held_out)
    shuffled = ids[::-1]
    assert {ids[i] for i in held_out} == {shuffled[i] for i in split_sequences(shuffled, 0.1)[1]}


def test_draws_cover_their_range_and_the_curriculum() -> None:
    settings = config(batch_size=64)
    drawn: list[Any] = [draw(settings, step, 100) for step in range(51)]
    bounds = torch.cat([one.step_bound for one in drawn])
    assert set(bounds.tolist()) == set(range(5, 16)), "uniform over 5..15, both ends included"
    assert (torch.cat([one.offset for one in drawn]) < bounds).all()
    assert drawn[0].staircase_rows.all()
    assert not drawn[50].staircase_rows.any()


def test_what_is_read_ahead_is_bounded_in_bytes() -> None:
    running = []

    def reads() -> Iterator[Any]:
        for i, n_bytes in enumerate([40, 40, 40, 500, 10, 10, 10, 10, 10]):
            running.append(i)
            yield n_bytes, partial(int, i)

    iterator: Any = data_module._read_ahead(reads(), max_batches=3, max_bytes=100)
    assert next(iterator) == 0
    assert len(running) == 3, "40 + 40 fit, the third waits"
    assert [next(iterator), next(iterator)] == [1, 2]
    assert len(running) == 4, "500 waits until nothing else is ahead"
    assert [next(iterator), next(iterator)] == [3, 4]
    assert len(running) == 8, "three batches at most, and one looked at"
    assert list(iterator) == [5, 6, 7, 8]


def test_errors_of_the_reading_thread_arrive() -> None:
    broken: Any = iter([(1, lambda: 1 // 0)])
    with pytest.raises(ZeroDivisionError):
        next(data_module._read_ahead(broken, 2, 10))


def test_micro_batches_divide_the_share_of_a_device() -> None:
    assert device_share(config(batch_size=32, micro_batch_size=8), 2) == 16
    with pytest.raises(TrainingError, match="--micro-batch-size 3 does not divide the 16 sequences"):
        device_share(config(batch_size=32, micro_batch_size=3), 2)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5])
def test_validation_is_dealt_among_devices(store_path: Path, n_ranks: int) -> None:
    """Equally many batches each, for devices meet between them; together those of one device, the same in each pass."""
    store = ActivationStore(store_path)
    sequences = np.argsort(store.lengths, kind="stable")[:15]

    def batches(rank: int = 0, n_ranks: int = 1) -> list[Any]:
        reader = BatchReader(store, config(), torch.device("cpu"))
        return list(ValidationBatches(reader, sequences, store.lengths[sequences], 4, rank, n_ranks))

    whole, shares = batches(), [batches(rank, n_ranks) for rank in range(n_ranks)]
    assert [(batch.index, len(batch.inputs.tokens)) for batch in whole] == [(0, 4), (1, 4), (2, 4), (3, 3)]
    assert {len(share) for share in shares} == {-(-4 // n_ranks)}
    assert {batch.index for share in shares for batch in share} == {0, 1, 2, 3}
    for batch in (batch for share in shares for batch in share):
        assert torch.equal(batch.inputs.kv, whole[batch.index].inputs.kv)
        assert torch.equal(batch.draws.offset, whole[batch.index].draws.offset)
