"""Batches are a pure function of store, settings and step; what is read is what was stored."""

import numpy as np
import pytest
import torch

from moa_data.moa.objective import Draws
from moa_data.storage.reader import ActivationStore
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.data import (
    BatchReader,
    TrainingStream,
    count_loss_positions,
    draw,
    epoch_order,
    split_sequences,
)

from .conftest import build_store


def config(**changes):
    return TrainConfig(store="", out="", **({"batch_size": 4, "reader_threads": 2} | changes))


def stream_of(store, settings, max_steps=20, rank=0, n_ranks=1):
    lengths = store.sequences["n_tokens"].to_numpy().astype(np.int64)
    return TrainingStream(BatchReader(store, settings, False), np.arange(len(store)), lengths, max_steps, rank, n_ranks)


def test_batches_hold_what_the_store_holds(store_path):
    store = ActivationStore(store_path)
    reader = BatchReader(store, config(target_layer_inference=1), False)
    lengths = store.sequences["n_tokens"].to_numpy().astype(np.int64)
    rows = np.array([5, 0, 17])
    inputs = reader.read(rows, lengths[rows])
    for row, sequence in enumerate(rows.tolist()):
        n = lengths[sequence]
        assert torch.equal(inputs.tokens[row, :n], torch.from_numpy(store.read(sequence, "tokens").astype(np.int64)))
        assert np.array_equal(inputs.kv[row, :n].numpy(), store.read(sequence, "kv").reshape(n, 3, -1))
        assert np.array_equal(inputs.hidden[row, :n].numpy(), store.read(sequence, "hidden/last"))
        assert np.array_equal(inputs.entering_hidden[row, :n].numpy(), store.read(sequence, "hidden/layer_1"))
        for padding in (
            inputs.kv[row, n:],
            inputs.hidden[row, n:],
            inputs.tokens[row, n:],
            inputs.response_mask[row, n:],
        ):
            assert not padding.any(), "padding must be zero, not left-over memory"


def test_bfloat16_bits_arrive_unchanged(tmp_path):
    store = ActivationStore(build_store(tmp_path / "store", n_sequences=6, dtype="bfloat16"))
    n = store.sequences["n_tokens"].to_numpy().astype(np.int64)
    inputs = BatchReader(store, config(), False).read(np.array([2]), n[[2]])
    assert inputs.kv.dtype == torch.bfloat16
    assert np.array_equal(inputs.kv[0].view(torch.uint16).numpy(), store.read(2, "kv").reshape(n[2], 3, -1))


def test_a_stream_started_later_goes_on_as_the_first_would(store_path):
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
        assert one.denominator == other.denominator


def test_micro_batches_make_up_the_batch(store_path):
    store = ActivationStore(store_path)
    whole = next(iter(stream_of(store, config())))
    iterator = iter(stream_of(store, config(micro_batch_size=1)))
    parts = [next(iterator) for _ in range(4)]
    assert sum(part.n_tokens for part in parts) == whole.n_tokens
    n_positions = [count_loss_positions(part.inputs.response_mask, part.draws, config()) for part in parts]
    assert sum(n_positions) == whole.denominator
    assert all(part.denominator == whole.denominator / 4 for part in parts)


@pytest.mark.parametrize("official", [False, True])
def test_devices_share_one_batch_and_its_denominator(store_path, official):
    """Gradients are averaged over devices and micro-batches, so each divides by its share of ALL loss positions."""
    store, settings = ActivationStore(store_path), config(official_quirks=official)
    whole = next(iter(stream_of(store, settings)))
    parts = []
    for rank in range(2):
        iterator = iter(stream_of(store, config(official_quirks=official, micro_batch_size=1), rank=rank, n_ranks=2))
        parts += [next(iterator) for _ in range(2)]
    assert sum(part.n_tokens for part in parts) == whole.n_tokens
    assert all(part.denominator == whole.denominator / 4 for part in parts)


def test_an_epoch_visits_every_sequence_about_once():
    lengths = np.random.default_rng(0).integers(10, 500, 1003)
    order = epoch_order(lengths, 8, seed=3, epoch=0)
    assert order.shape == (125, 8)
    assert len(np.unique(order)) == 1000
    spread = np.mean([np.ptp(lengths[batch]) for batch in order])
    assert spread < 0.3 * np.ptp(lengths), "batches are grouped by length"
    assert not np.array_equal(order, epoch_order(lengths, 8, seed=3, epoch=1))
    assert not np.array_equal(order, epoch_order(lengths, 8, seed=4, epoch=0))
    assert np.array_equal(order, epoch_order(lengths, 8, seed=3, epoch=0))


def test_the_split_follows_content_not_order():
    ids = [f"{value:08x}" for value in np.random.default_rng(0).integers(0, 2**32, 4000)]
    train, held_out = split_sequences(ids, 0.1)
    assert 300 < len(held_out) < 500
    assert not set(train) & set(held_out)
    shuffled = ids[::-1]
    assert {ids[i] for i in held_out} == {shuffled[i] for i in split_sequences(shuffled, 0.1)[1]}


def test_draws_cover_their_range_and_the_curriculum():
    settings = config(batch_size=64)
    bounds = torch.cat([draw(settings, step, 100).step_bound for step in range(40)])
    assert set(bounds.tolist()) == set(range(5, 16)), "uniform over 5..15, both ends included"
    assert draw(settings, 0, 100).staircase_rows.all()
    assert not draw(settings, 50, 100).staircase_rows.any()
    drawn = draw(settings, 7, 100)
    assert isinstance(drawn, Draws)
    assert (drawn.offset < drawn.step_bound).all()
    assert not draw(config(batch_size=64, official_quirks=True), 7, 100).offset.any()
