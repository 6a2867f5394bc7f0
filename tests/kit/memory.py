"""What tensors take while something runs."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Records the peak of the bytes held by all tensors that operations made, and those of the largest one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
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
