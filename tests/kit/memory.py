"""Measures the memory of tensors while code runs."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Records the peak bytes of all tensors that operations create, and the size of the largest."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.peak = self.largest = 0
        self._live = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._live[leaf] = leaf.untyped_storage()
        storages = {storage.data_ptr(): storage.nbytes() for storage in self._live.values()}
        self.peak = max(self.peak, sum(storages.values()))
        self.largest = max(self.largest, *storages.values(), 0)
        return out
