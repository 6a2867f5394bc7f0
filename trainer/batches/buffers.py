"""Host memory for batches, used again and again: fresh memory costs a page fault per 4 KiB, pinned memory more."""

import weakref
from collections import deque

import numpy as np
import torch

_ALIGNMENT_BYTES = 64


class BufferPool:
    """Hands out memory that comes back by itself when the last tensor on it is gone.

    Free memory is kept only as long as everything together stays below ``max_bytes``. Nothing waits here: the caller
    bounds how much is in use by bounding what is read ahead.

    Args:
        max_bytes: most bytes that are kept, in use and free together.
        pin_memory: whether memory is page-locked, which a GPU copies from at full speed.
    """

    def __init__(self, max_bytes: int, pin_memory: bool = False) -> None:
        self._max_bytes, self._pin_memory = max_bytes, pin_memory
        self._free: list[np.ndarray] = []
        self._in_use: dict[int, int] = {}
        # Filled by destructors, which may run at any moment and in any thread: appending takes no lock.
        self._returned: deque[np.ndarray] = deque()
        self.n_allocations = 0
        """Times that memory was asked from the system."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes in use and free."""
        return sum(self._in_use.values()) + sum(len(buffer) for buffer in self._free)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with arbitrary content; its memory is free again once no tensor shares it."""
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        buffer = self._find(n_bytes)
        self._in_use[id(buffer)] = len(buffer)
        # torch keeps this view alive as long as the storage, whoever shares it; so its end is the end of the use.
        view = buffer[:n_bytes]
        weakref.finalize(view, self._returned.append, buffer).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def _find(self, n_bytes: int) -> np.ndarray:
        """Return the smallest free buffer that is large enough but not twice so, or a new one."""
        while self._returned:
            buffer = self._returned.popleft()
            del self._in_use[id(buffer)]
            self._free.append(buffer)
        self._free.sort(key=len)
        for i, buffer in enumerate(self._free):
            if n_bytes <= len(buffer) <= 2 * max(n_bytes, _ALIGNMENT_BYTES):
                return self._free.pop(i)
        new_bytes = -(-max(n_bytes, 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        while self._free and self.allocated_bytes + new_bytes > self._max_bytes:
            self._free.pop(0)
        self.n_allocations += 1
        return torch.empty(new_bytes, dtype=torch.uint8, pin_memory=self._pin_memory).numpy()
