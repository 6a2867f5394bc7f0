"""Batches depend only on the store, the settings and the step.

They hold the stored values, and their memory is reused.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.moa.drafters.training import Draws, TrainingInputs
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.runs import run
from moa_data.tests.kit.training import build_store
from moa_data.trainer import data
from moa_data.trainer.batches import Batch, BatchReader, await_copy, fields_read, start_copy
from moa_data.trainer.config import PRESETS, TrainConfig
from moa_data.trainer.data import TrainingStream, draw


def config(**changes: Any) -> Any:
    return TrainConfig.of(store="", out="", **({"batch_size": 4, "reader_threads": 2} | changes))


def stream_of(
    store: Any, settings: Any, max_steps: int = 20, rank: int = 0, n_ranks: int = 1
) -> Any:
    return TrainingStream(
        BatchReader(store, settings, torch.device("cpu")),
        np.arange(len(store)),
        max_steps,
        rank,
        n_ranks,
    )


@pytest.fixture(scope="module")
def int8_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(
        tmp_path_factory.mktemp("int8") / "store", n_sequences=30, dtype="bfloat16", codec="int8"
    )


@pytest.mark.parametrize(
    ("dtype", "codec"), [("float32", "lossless"), ("bfloat16", "lossless"), ("bfloat16", "int8")]
)
def test_batches_hold_what_the_store_holds(tmp_path: Path, dtype: str, codec: str) -> None:
    """A batch carries codes, which decode to the values that the store reads."""
    store = ActivationStore(
        build_store(tmp_path / "store", n_sequences=12, dtype=dtype, codec=codec)
    )
    rows = np.array([5, 0, 11])
    reader = BatchReader(store, config(target_layer_inference=1), torch.device("meta"))
    batch = reader.batch(rows, Draws(None, torch.zeros(3, dtype=torch.bool)))
    assert len(batch.stored) == 3
    inputs: Any = batch.to(torch.device("cpu")).decode().inputs
    read = {"kv": inputs.kv, "hidden/last": inputs.hidden, "hidden/layer_1": inputs.entering_hidden}
    if codec == "int8":
        assert batch.rows["kv/key_codes"].dtype == torch.int8
        n_code_bytes = sum(rows.nbytes for rows in batch.rows.values())
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
    """On a CPU the reading thread decodes.

    Elsewhere the training device does, so that codes are copied to it.
    """
    store, rows = ActivationStore(int8_path), np.arange(8)
    reader = BatchReader(store, config(), torch.device(device))
    for batches in (
        TrainingStream(reader, rows, 10, 0, 1),
        data.ValidationBatches(reader, rows, 4),
    ):
        batch: Any = next(iter(batches))
        assert bool(batch.stored) == (device != "cpu")
        assert batch.decode().inputs.kv.numel() > 0


def test_a_drafter_trains_from_codes(int8_path: Path, tmp_path: Path) -> None:
    assert (
        run(
            int8_path, tmp_path / "run", max_steps=2, validate_every=2
        ).best_expected_acceptance_length
        >= 1
    )


def test_a_stream_started_later_goes_on_as_the_first_would(store_path: Path) -> None:
    store = ActivationStore(store_path)
    first, later = stream_of(store, config()), stream_of(store, config())
    later.start_step = 17  # This step is in the second epoch.
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
    """Gradients are averaged over devices and micro-batches.

    So each one divides by its share of the loss positions of the whole batch.
    """
    store, parts = ActivationStore(store_path), []
    whole = next(iter(stream_of(store, config())))
    for rank in range(n_ranks):
        iterator = iter(stream_of(store, config(micro_batch_size=1), rank=rank, n_ranks=n_ranks))
        parts += [next(iterator) for _ in range(4 // n_ranks)]
    assert sum(part.n_tokens for part in parts) == whole.n_tokens
    n_positions = [
        data.sum_loss_weights(part.inputs.response_mask, part.draws, config()) for part in parts
    ]
    assert sum(n_positions) == whole.denominator
    assert all(part.denominator == whole.denominator / 4 for part in parts)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_devices_read_their_own_sequences_alone(store_path: Path, n_ranks: int) -> None:
    """A device reads the chunks of its own sequences, and the response masks of the whole batch."""
    fields = ["tokens", *(item.name for item in fields_read(ActivationStore(store_path), config()))]
    for rank in range(n_ranks):
        store = ActivationStore(store_path)
        stream = stream_of(
            store, config(batch_size=8, prefetch_batches=1), rank=rank, n_ranks=n_ranks
        )
        for step, batch in zip(range(3), stream, strict=False):
            order = data.epoch_order(store.lengths.astype(np.int64), 8, 0, 0)[step]
            alone = ActivationStore(store_path)
            alone.read_batch(order, "response_mask")
            alone.read_batch(order[rank::n_ranks], fields)
            assert batch.n_bytes_read == alone.n_bytes_read
            assert batch.n_tokens == int(store.lengths[order[rank::n_ranks]].sum())
            assert batch.n_tokens_of_all == int(store.lengths[order].sum())


def test_an_epoch_visits_every_sequence_about_once() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 1003)
    order = data.epoch_order(lengths, 8, seed=3, epoch=0)
    assert order.shape == (125, 8)
    assert len(np.unique(order)) == 1000
    spread = np.mean([np.ptp(lengths[batch]) for batch in order])
    assert spread < 0.3 * np.ptp(lengths), "batches are grouped by length"
    assert not np.array_equal(order, data.epoch_order(lengths, 8, seed=3, epoch=1))
    assert not np.array_equal(order, data.epoch_order(lengths, 8, seed=4, epoch=0))
    assert np.array_equal(order, data.epoch_order(lengths, 8, seed=3, epoch=0))


def test_the_split_follows_content_not_order() -> None:
    ids = [f"{value:08x}" for value in np.random.default_rng(0).integers(0, 2**32, 4000)]
    train, held_out = data.split_sequences(ids, 0.1)
    assert 300 < len(held_out) < 500
    assert not set(train) & set(held_out)
    shuffled = ids[::-1]
    assert {ids[i] for i in held_out} == {
        shuffled[i] for i in data.split_sequences(shuffled, 0.1)[1]
    }


def test_draws_cover_their_range_and_the_curriculum() -> None:
    settings = config(batch_size=64)
    drawn: list[Any] = [draw(settings, step, 100) for step in range(51)]
    bounds = torch.cat([one.step_bound for one in drawn])
    assert set(bounds.tolist()) == set(range(5, 16)), "uniform over 5..15, both ends included"
    assert (torch.cat([one.offset for one in drawn]) < bounds).all()
    assert drawn[0].staircase_rows.all()
    assert not drawn[50].staircase_rows.any()


def test_draws_of_each_variant() -> None:
    response = torch.ones(8, 30, dtype=torch.bool)
    response[:, :5] = False
    usual = config(batch_size=8)
    assert draw(usual, 0, 10).staircase_rows.any()
    unbounded = draw(config(batch_size=8, step_bound=False), 0, 10)
    assert unbounded.step_bound is None
    assert torch.equal(unbounded.staircase_rows, draw(usual, 0, 10).staircase_rows)
    forced = draw(config(batch_size=8, on_policy=False), 0, 10)
    assert (forced.on_policy_weight, forced.teacher_forced_weight) == (0.0, 1.0)
    assert not forced.staircase_rows.any()
    for changes in ({"step_bound": False, "teacher_forced_weight": 0.0}, {"on_policy": False}):
        own = config(batch_size=8, **changes)
        assert data.sum_loss_weights(response, draw(own, 0, 10), own) == 8 * 25
    paper = config(batch_size=8, **PRESETS["paper"]["drafter"])
    on_policy = data.sum_loss_weights(response, draw(paper, 0, 10), paper)
    assert on_policy < 8 * 25
    assert data.sum_loss_weights(response, draw(usual, 0, 10), usual) == on_policy + 8 * 25
    both = config(batch_size=8, teacher_forced_weight=0.5)
    assert data.sum_loss_weights(response, draw(both, 0, 10), both) == on_policy + 0.5 * 8 * 25


def test_what_is_read_ahead_is_bounded_in_bytes() -> None:
    running = []

    def reads() -> Iterator[Any]:
        for i, n_bytes in enumerate([40, 40, 40, 500, 10, 10, 10, 10, 10]):
            running.append(i)
            yield n_bytes, partial(int, i)

    iterator: Any = data._read_ahead(reads(), max_batches=3, max_bytes=100)
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
        next(data._read_ahead(broken, 2, 10))


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5])
def test_validation_is_dealt_among_devices(store_path: Path, n_ranks: int) -> None:
    """All devices get equally many batches, since they synchronize between them.

    Together they have the batches of a single device, and the same ones in each pass.
    """
    store = ActivationStore(store_path)
    sequences = np.argsort(store.lengths, kind="stable")[:15]

    def batches(rank: int = 0, n_ranks: int = 1) -> list[Any]:
        reader = BatchReader(store, config(), torch.device("cpu"))
        return list(data.ValidationBatches(reader, sequences, 4, rank, n_ranks))

    whole, shares = batches(), [batches(rank, n_ranks) for rank in range(n_ranks)]
    assert [(batch.index, len(batch.inputs.tokens)) for batch in whole] == [
        (0, 4),
        (1, 4),
        (2, 4),
        (3, 3),
    ]
    assert {len(share) for share in shares} == {-(-4 // n_ranks)}
    assert {batch.index for share in shares for batch in share} == {0, 1, 2, 3}
    for batch in (batch for share in shares for batch in share):
        assert torch.equal(batch.inputs.kv, whole[batch.index].inputs.kv)
        assert torch.equal(batch.draws.offset, whole[batch.index].draws.offset)


class Event:
    """Stands in for an event of a slow device."""

    def record(self, stream: Any) -> None:
        self.stream = stream


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device without memory, so that no copied tensor refers to host memory."""
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return torch.device("meta")


def small_batch() -> Batch:
    hidden = torch.empty(2, 5, 8, dtype=torch.bfloat16)
    text = torch.zeros(2, 5, dtype=torch.int64)
    return Batch(
        TrainingInputs(text, text.bool(), None, hidden), Draws(None, text[:, 0].bool()), 1.0, 10
    )


def test_the_stream_of_the_step_waits_for_the_copy(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, recorded = [], []

    class Stream:
        def wait_event(self, event: Any) -> None:
            waited.append(event)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor.shape)
    )
    side: Any = SimpleNamespace(device=device)
    moved = start_copy(small_batch(), side)
    arrived = await_copy(moved)
    assert waited == [moved.copied]
    assert arrived.copied is None
    assert sorted(recorded) == [(2,), (2, 5), (2, 5), (2, 5, 8)], (
        "each tensor, or its memory is used again too early"
    )
    assert await_copy(arrived) is arrived
