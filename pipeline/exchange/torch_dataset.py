"""Torch datasets over a store, with one sequence per item.

`ActivationDataset` reads by index. `IterableActivationDataset` iterates in a shuffled order, and
divides the sequences among ranks and workers.

Shapes: n tokens of one sequence, B sequences of a batch, T tokens of the longest sequence in a
batch.
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
    """Refuse a store if it lacks fields that the format of another project needs.

    The error message names the command that adds the fields.
    """
    missing = [name for name in names if name not in store.fields]
    if missing:
        raise SelectionInvalid(
            f"{store.path} lacks {', '.join(missing)}, which {project} needs. Add these fields "
            f"with {add_command(str(store.path), missing)}, or choose other `layers`."
        )


class ActivationDataset(Dataset[dict[str, Tensor]]):
    """Map-style dataset over a store: ``dataset[i]`` is sequence ``i`` as a dict of tensors.

    Args:
        store: an open store, or its folder.
        fields: names of the fields to read.
        layers: layers to read from each field with a layer axis, in the given order. If the
            argument is None, all layers are read.
        dtype: dtype of the activations. If the argument is None, they keep the stored dtype.

    Example::

        dataset = ActivationDataset("store")
        loader = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=pad_collate)
    """

    def __init__(
        self,
        store: ActivationStore | str | os.PathLike[str],
        fields: Sequence[str] = DEFAULT_FIELDS,
        layers: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # Forked and spawned workers can use the same store object, because each process opens the
        # store's files for itself.
        self.store = store if isinstance(store, ActivationStore) else ActivationStore(store)
        self.fields = tuple(fields)
        self._layers = None if layers is None else list(layers)
        self._dtype = dtype
        unknown = [name for name in self.fields if name not in self.store.fields]
        if unknown or not self.fields:
            raise OptionInvalid(
                f"fields has {', '.join(unknown) or 'no entry'}, expected one or more of the fields "
                f"of {self.store.path}, which are {', '.join(self.store.fields)}."
            )
        has_layers = any(self.store.fields[name].layer_axis is not None for name in self.fields)
        if layers is not None and not has_layers:
            raise OptionInvalid(
                f"`layers` was given, but the fields {', '.join(self.fields)} do not have layers. "
                "Leave out `layers`."
            )

    def __len__(self) -> int:
        """Return the number of sequences in the store."""
        return len(self.store)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of every sequence, int [len(self)].

        Samplers that group sequences by length can use these numbers.
        """
        return self.store.lengths

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Read a sequence. The dict maps each field to its values, [n, *token_shape].

        Tokens are int64, and the response mask is bool. Activations have the dtype that was given
        to the dataset, or the stored dtype.
        """
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
    """Iterable dataset over a store, with a different order in each epoch.

    In an epoch, all machines compute the same order of the sequences. The order is divided into
    groups of ``batch_size`` sequences, and each group is read by one worker of one rank. So no
    sequence is read twice. All ranks get the same number of groups. If the number of groups is not
    a multiple of the number of ranks, the last groups are skipped. With ``shuffle``, different
    sequences are skipped in every epoch.

    If ``bucket_batches`` is set, the sequences of a group have similar lengths. For this, the
    shuffled order is divided into windows of ``bucket_batches`` groups. The sequences of each
    window are sorted by length before the window is divided into groups. The groups are then
    shuffled. If the ``DataLoader`` has the same ``batch_size``, its batches are these groups.

    Args:
        store: an open store, or its folder.
        fields: names of the fields to read.
        layers: layers to read from each field with a layer axis. If the argument is None, all
            layers are read.
        dtype: dtype of the activations. If the argument is None, they keep the stored dtype.
        shuffle: if true, shuffle in every epoch; if false, keep the store's order.
        seed: seed of the shuffling.
        batch_size: number of sequences in a group.
        bucket_batches: number of groups in a window that is sorted by length. With 0, there are no
            windows, and the sequences are not sorted.
        rank: rank of this process. If the argument is None, ``torch.distributed`` gives the rank.
            If ``torch.distributed`` is not initialized, the rank is 0.
        world_size: number of processes. If the argument is None, ``torch.distributed`` gives the
            number. If ``torch.distributed`` is not initialized, the number is 1.
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
        group_rank, group_size = (
            (group.get_rank(), group.get_world_size())
            if group.is_available() and group.is_initialized()
            else (0, 1)
        )
        self.rank = group_rank if rank is None else rank
        self.world_size = group_size if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise OptionInvalid(
                f"rank is {self.rank}, expected a number from 0 to {self.world_size - 1}, which is "
                "world_size - 1."
            )
        if batch_size < 1 or bucket_batches < 0:
            raise OptionInvalid(
                f"batch_size is {batch_size} and bucket_batches is {bucket_batches}, expected a "
                "batch_size of at least 1 and a bucket_batches of at least 0."
            )
        self.shuffle = shuffle
        self.seed = seed
        self.batch_size = batch_size
        self.bucket_batches = bucket_batches
        # The epoch number is in shared memory, so that persistent workers see its changes.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads. Running workers use the new epoch, too."""
        self._epoch[0] = epoch

    def epoch_groups(self, epoch: int) -> list[np.ndarray]:
        """Compute the groups of sequences that this rank reads in an epoch, in reading order.

        The groups depend only on the store, the settings, the epoch, the rank and the world size.

        Returns:
            One array per group, int64 [batch_size]. It contains the indices of the group's
            sequences. The last group may be shorter.
        """
        n = len(self._items)
        draw = np.random.default_rng((self.seed, epoch))
        order = draw.permutation(n) if self.shuffle else np.arange(n)
        size = self.batch_size
        if self.bucket_batches:
            window = size * self.bucket_batches
            by_length = list[np.ndarray]()
            for start in range(0, n, window):
                part = order[start : start + window]
                by_length.append(part[np.argsort(self._items.lengths[part], kind="stable")[::-1]])
            order = np.concatenate(by_length) if by_length else order
        groups = [order[start : start + size] for start in range(0, n, size)]
        if self.bucket_batches and self.shuffle:
            # Do not shuffle an incomplete group, but keep it last. The ``DataLoader`` makes batches
            # of ``batch_size`` sequences. After an incomplete group, each batch would consist of
            # sequences of two groups.
            n_whole = n // size
            groups = [groups[k] for k in draw.permutation(n_whole)] + groups[n_whole:]
        if self.world_size > 1:
            groups = groups[: len(groups) // self.world_size * self.world_size]
        return groups[self.rank :: self.world_size]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's sequences of the epoch.

        If the ``DataLoader`` has several worker processes, they divide the rank's groups among
        themselves, and each worker yields the sequences of its own groups.
        """
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for group in self.epoch_groups(self.epoch)[first::step]:
            for i in group.tolist():
                yield self._items[i]


def pad_collate(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack B sequences of different lengths, padded with zeros on the right.

    Args:
        items: one dict per sequence. It maps the name of each field to values, [n, *token_shape].

    Returns:
        A dict that maps the name of each field to values, [B, T, *token_shape]. The additional key
        ``n_tokens`` has the lengths without padding, int64 [B].
    """
    if not items:
        raise OptionInvalid("pad_collate got no items, but a batch needs at least one sequence.")
    lengths: list[int] = []
    for item in items:
        values = next(iter(item.values()))
        lengths.append(len(values))
    batch: dict[str, Tensor] = {}
    for name in items[0]:
        batch[name] = pad_sequence([item[name] for item in items], batch_first=True)
    batch["n_tokens"] = torch.tensor(lengths)
    return batch
