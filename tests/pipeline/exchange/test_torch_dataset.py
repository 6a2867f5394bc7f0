"""The torch datasets return the values of the store in any process.

An epoch has each sequence once, in an order that all processes agree on.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from moa_data.errors import OptionInvalid
from moa_data.pipeline.exchange.torch_dataset import (
    ActivationDataset,
    IterableActivationDataset,
    pad_collate,
)
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import to_float32
from moa_data.tests.kit.errors import raises_naming

FIELDS = ("tokens", "response_mask", "kv", "hidden/last")


def token_sums(items: list[dict[str, torch.Tensor]]) -> list[int]:
    return [int(item["tokens"].sum()) for item in items]


def test_items_are_the_stores_values(recipe_store: Path) -> None:
    store = ActivationStore(recipe_store)
    dataset = ActivationDataset(recipe_store, FIELDS)
    assert len(dataset) == len(store)
    assert dataset.lengths.tolist() == store.lengths.tolist()
    for i in (0, 5, -1):
        item = dataset[i]
        assert item["tokens"].dtype == torch.int64
        assert item["response_mask"].dtype == torch.bool
        assert item["kv"].dtype == torch.bfloat16
        np.testing.assert_array_equal(item["tokens"].numpy(), store.read(i, "tokens"))
        np.testing.assert_array_equal(item["response_mask"].numpy(), store.read(i, "response_mask"))
        np.testing.assert_array_equal(item["kv"].view(torch.uint16).numpy(), store.read(i, "kv"))
    chosen = ActivationDataset(store, ("kv", "hidden/last"), layers=[-1, 1], dtype=torch.float32)[2]
    np.testing.assert_array_equal(
        chosen["kv"].numpy(), to_float32(store.read(2, "kv", layers=[3, 1]), "bfloat16")
    )
    assert chosen["hidden/last"].dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ActivationDataset, {"fields": ("tokens", "hidden/layer_9")}),
        (ActivationDataset, {"fields": ("tokens",), "layers": [0]}),
        (IterableActivationDataset, {"rank": 2, "world_size": 2}),
        (IterableActivationDataset, {"batch_size": 0}),
    ],
)
def test_bad_arguments_are_refused(recipe_store: Path, kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(OptionInvalid):
        kind(recipe_store, **options)


@pytest.mark.parametrize("is_pickled", [False, True])
def test_workers_give_what_the_main_process_gives(recipe_store: Path, is_pickled: bool) -> None:
    dataset = ActivationDataset(recipe_store, FIELDS)
    dataset[0]  # so that an open file crosses the fork
    # A spawned worker gets a pickled copy.
    sent = pickle.loads(pickle.dumps(dataset)) if is_pickled else dataset
    batches = list(
        DataLoader(
            sent,
            batch_size=3,
            num_workers=2,
            collate_fn=pad_collate,
            multiprocessing_context="fork",
        )
    )
    assert len(batches) == 4
    for number, batch in enumerate(batches):
        for row in range(3):
            expected = dataset[3 * number + row]
            n = int(batch["n_tokens"][row])
            assert n == dataset.lengths[3 * number + row]
            for name in FIELDS:
                assert torch.equal(batch[name][row, :n], expected[name])
                assert not batch[name][row, n:].any()


def test_collate_pads_to_the_longest_and_counts() -> None:
    items = [{"x": torch.ones(n, 2, dtype=torch.bfloat16)} for n in (3, 1)]
    batch = pad_collate(items)
    assert batch["x"].shape == (2, 3, 2)
    assert batch["x"].dtype == torch.bfloat16
    assert batch["n_tokens"].tolist() == [3, 1]
    assert batch["x"][1].float().sum() == 2
    with raises_naming(OptionInvalid, "pad_collate"):
        pad_collate([])


def test_an_epoch_has_each_sequence_once_in_an_order_of_its_own(recipe_store: Path) -> None:
    dataset = IterableActivationDataset(recipe_store, ("tokens",), seed=3)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        orders.append(np.concatenate(dataset.epoch_groups(epoch)).tolist())
        assert token_sums(list(dataset)) == token_sums([dataset._items[i] for i in orders[-1]])
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    in_order = IterableActivationDataset(recipe_store, ("tokens",), shuffle=False)
    assert np.concatenate(in_order.epoch_groups(0)).tolist() == list(range(12))


def test_ranks_share_an_epoch_without_overlap_in_equal_steps(recipe_store: Path) -> None:
    for world_size, n_left_out in ((3, 0), (5, 2)):
        ranks = [
            IterableActivationDataset(recipe_store, ("tokens",), rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        shares = [np.concatenate(dataset.epoch_groups(4)).tolist() for dataset in ranks]
        assert {len(share) for share in shares} == {12 // world_size}
        assert len({i for share in shares for i in share}) == 12 - n_left_out


def test_buckets_put_like_lengths_together(recipe_store: Path) -> None:
    dataset = IterableActivationDataset(recipe_store, ("tokens",), batch_size=3, bucket_batches=4)
    lengths = ActivationStore(recipe_store).lengths
    groups = dataset.epoch_groups(0)
    assert sorted(np.concatenate(groups).tolist()) == list(range(12))
    padded = sum(3 * int(lengths[group].max()) for group in groups)
    by_length = np.sort(lengths)[::-1].reshape(4, 3)
    # One window holds all batches, so the padding is minimal.
    assert padded == int(3 * by_length[:, 0].sum())
    firsts = [int(lengths[group].max()) for group in groups]
    assert firsts != sorted(firsts, reverse=True)  # The groups are shuffled all the same.
    uneven = IterableActivationDataset(recipe_store, ("tokens",), batch_size=5, bucket_batches=1)
    for epoch in range(4):
        assert [len(group) for group in uneven.epoch_groups(epoch)] == [5, 5, 2]


def test_workers_deal_out_groups_and_see_the_next_epoch(recipe_store: Path) -> None:
    dataset = IterableActivationDataset(
        recipe_store, ("tokens",), batch_size=2, bucket_batches=2, seed=1
    )
    loader = DataLoader(
        dataset, batch_size=2, num_workers=2, collate_fn=pad_collate, persistent_workers=True,
        multiprocessing_context="fork",
    )  # fmt: skip
    for epoch in (0, 7):
        dataset.set_epoch(epoch)
        expected = [
            sorted(token_sums([dataset._items[i] for i in group]))
            for group in dataset.epoch_groups(epoch)
        ]
        assert sorted(sorted(batch["tokens"].sum(1).tolist()) for batch in loader) == sorted(
            expected
        )
