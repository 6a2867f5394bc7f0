"""Torch datasets over a store: one sequence per item, by index or in a shuffled order that workers and ranks share.

Shapes: n tokens of one sequence, B sequences of a batch, T tokens of its longest one.
"""

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ...errors import OptionInvalid, SelectionInvalid
from ...storage.read.store import ActivationStore
from ...storage.schema import FLOAT_DTYPES
from ...text import add_command

DEFAULT_FIELDS = ("tokens", "response_mask", "hidden/last")


def check_fields(store: ActivationStore, names: Sequence[str], project: str) -> None:
    """Refuse a store that lacks fields which another project's format has, and name the command that adds them."""
    if missing := [name for name in names if name not in store.fields]:
        raise SelectionInvalid(
            f"{store.path} lacks {', '.join(missing)}, needed for {project}. Add with "
            f"{add_command(str(store.path), missing)}, or choose other --layers."
        )


class ActivationDataset(Dataset[dict[str, Tensor]]):
    """Map-style dataset over a store: ``dataset[i]`` is sequence ``i`` as a dict of tensors.

    Args:
        store: an open store, or its folder.
        layers: layers of the fields that have a layer axis, in the order given; None for all.
        dtype: dtype of activations; None keeps the stored one.

    Example::

        loader = DataLoader(ActivationDataset("store"), batch_size=8, shuffle=True, collate_fn=pad_collate)
    """

    def __init__(
        self,
        store: ActivationStore | str | os.PathLike[str],
        fields: Sequence[str] = DEFAULT_FIELDS,
        layers: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # A store opens its files anew in each process, so that forked and spawned workers can have
        # it.
        self.store = store if isinstance(store, ActivationStore) else ActivationStore(store)
        self.fields = tuple(fields)
        self._layers = None if layers is None else list(layers)
        self._dtype = dtype
        unknown = [name for name in self.fields if name not in self.store.fields]
        if unknown or not self.fields:
            raise OptionInvalid(
                f"fields {', '.join(unknown) or '(none)'} are not in {self.store.path}; "
                f"choose from {', '.join(self.store.fields)}."
            )
        if layers is not None and all(
            self.store.fields[name].layer_axis is None for name in self.fields
        ):
            raise OptionInvalid(
                f"layers are given, but none of the fields {', '.join(self.fields)} has layers."
            )

    def __len__(self) -> int:
        """Count the sequences of the store."""
        return len(self.store)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of every sequence, int [len(self)], for samplers that batch by length."""
        return self.store.lengths

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Read a sequence: field -> [n, *token_shape]; tokens int64, response_mask bool, activations in their dtype."""
        return {name: self._read(int(i), name) for name in self.fields}

    def _read(self, i: int, name: str) -> Tensor:
        spec = self.store.fields[name]
        layers = None if spec.layer_axis is None else self._layers
        values = torch.from_numpy(self.store.read(i, name, layers=layers))
        if spec.dtype == "bfloat16":
            values = values.view(torch.bfloat16)
        if spec.dtype in FLOAT_DTYPES:
            return values if self._dtype is None else values.to(self._dtype)
        return values.bool() if name == "response_mask" else values.long()


class IterableActivationDataset(IterableDataset[dict[str, Tensor]]):
    """Iterable dataset over a store: each epoch has its own order, the same on every machine, with each sequence once.

    Ranks and workers take turns in that order, so that no two of them read the same sequence. With several ranks each
    gets equally many groups; the few that are left over change from epoch to epoch. With ``bucket_batches``, each
    window of so many batches of the shuffled order is sorted by length and cut into groups of ``batch_size``, and the
    groups are shuffled. Give the ``DataLoader`` the same ``batch_size``, and its batches are these groups.

    Args:
        store: an open store, or its folder.
        layers: layers of the fields that have a layer axis; None for all.
        dtype: dtype of activations; None keeps the stored one.
        shuffle: shuffle anew in every epoch; otherwise in the store's order.
        batch_size: sequences of a group, the unit that is dealt out to ranks and workers.
        bucket_batches: groups of a window that is sorted by length; 0 for no bucketing.
        rank: rank of this process; None asks ``torch.distributed``, and is 0 without it.
        world_size: processes in all; None asks ``torch.distributed``, and is 1 without it.
    """

    def __init__(
        self,
        store: ActivationStore | str | os.PathLike[str],
        fields: Sequence[str] = DEFAULT_FIELDS,
        layers: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        batch_size: int = 1,
        bucket_batches: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._items = ActivationDataset(store, fields, layers, dtype)
        group = torch.distributed
        own, n = (
            (group.get_rank(), group.get_world_size())
            if group.is_available() and group.is_initialized()
            else (0, 1)
        )
        self.rank = own if rank is None else rank
        self.world_size = n if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise OptionInvalid(
                f"rank is {self.rank}, expected 0 to {self.world_size - 1} (world_size)."
            )
        if batch_size < 1 or bucket_batches < 0:
            raise OptionInvalid(
                f"batch_size is {batch_size}, expected at least 1; bucket_batches is {bucket_batches}, expected 0 "
                "or more."
            )
        self.shuffle = shuffle
        self.seed = seed
        self.batch_size = batch_size
        self.bucket_batches = bucket_batches
        # In shared memory, so that persistent workers see the next epoch.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch whose order comes next."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, also in workers that are already running."""
        self._epoch[0] = epoch

    def epoch_groups(self, epoch: int) -> list[np.ndarray]:
        """Compute the groups of sequences of this rank in their order, from seed, epoch, rank and world size.

        Returns:
            Indices of sequences, int64 [batch_size] each; the last one may be shorter.
        """
        n = len(self._items)
        draw = np.random.default_rng((self.seed, epoch))
        order = draw.permutation(n) if self.shuffle else np.arange(n)
        size = self.batch_size
        if self.bucket_batches:
            window = size * self.bucket_batches
            by_length = [
                part[np.argsort(self._items.lengths[part], kind="stable")[::-1]]
                for part in (order[at : at + window] for at in range(0, n, window))
            ]
            order = np.concatenate(by_length) if by_length else order
        groups = [order[at : at + size] for at in range(0, n, size)]
        if self.bucket_batches and self.shuffle:
            # an incomplete group stays last, or it would shift the batches of the loader
            n_whole = n // size
            groups = [groups[k] for k in draw.permutation(n_whole)] + groups[n_whole:]
        if self.world_size > 1:
            groups = groups[: len(groups) // self.world_size * self.world_size]
        return groups[self.rank :: self.world_size]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's, and in a worker this worker's, sequences of the epoch."""
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for group in self.epoch_groups(self.epoch)[first::step]:
            for i in group.tolist():
                yield self._items[i]


def pad_collate(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack B sequences (field -> [n, *token_shape]) of different length, padded on the right with zeros.

    Returns:
        Field -> [B, T, *token_shape], and ``n_tokens`` int64 [B], the lengths without padding.
    """
    if not items:
        raise OptionInvalid("pad_collate got no items; a batch needs at least one sequence.")
    n_tokens = torch.tensor([len(next(iter(item.values()))) for item in items])
    batch = {
        name: pad_sequence([item[name] for item in items], batch_first=True) for name in items[0]
    }
    return batch | {"n_tokens": n_tokens}
