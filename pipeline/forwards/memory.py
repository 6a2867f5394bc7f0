"""Compute the memory of forwards from the target's sizes alone, and refuse forwards that do not fit.

The device that computes holds for each batch: the cache that the forward fills, the intermediate values of one layer,
the kept activations in the storage dtype, and two copies of these while they are gathered and checked. Host memory
holds the batches that wait for the writer. A target is loaded in host memory before it moves to a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import NotEnoughMemory
from ...machine import free_memory
from ...text import format_bytes
from .parts import N_HOST_SLOTS

_COPIES_GATHERED = 3
"""Copies of a batch's kept values while they are gathered: in the storage dtype, packed, and for the finite check."""


@dataclass(frozen=True)
class ForwardMemory:
    """The memory that the forwards of a target take, an upper estimate.

    Attributes:
        sizes: sizes of the target (``target_sizes``), and its ``intermediate_size``.
        n_weights: weights of the whole target, shared ones counted once.
        kept_bytes: bytes that are kept for each token, before compression.
        compute_dtype: dtype of weights and forward.
        batch_tokens: padded tokens of a batch; a longer sequence makes a batch of its own.
        longest_tokens: tokens of the longest sequence.
        device: the device that computes.
        n_workers: processes of this machine that do so at once, on an accelerator each with a device of its own.
    """

    sizes: Mapping[str, Any]
    n_weights: int
    kept_bytes: int
    compute_dtype: str
    batch_tokens: int
    longest_tokens: int
    device: str
    n_workers: int = 1

    @property
    def _itemsize(self) -> int:
        dtype: torch.dtype = getattr(torch, self.compute_dtype)
        return dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in the compute dtype."""
        return self.n_weights * self._itemsize

    @property
    def _largest_batch(self) -> int:
        return max(self.batch_tokens, self.longest_tokens)

    @property
    def _forward_bytes(self) -> int:
        """Bytes of one batch where it is computed, without the weights."""
        sizes = self.sizes
        cache = 2 * sizes["n_layers"] * sizes["n_kv_heads"] * sizes["head_dim"]
        queries = sizes["n_heads"] * sizes["head_dim"]
        layer = 4 * sizes["hidden_size"] + 2 * queries + 3 * sizes["intermediate_size"]
        values: int = cache + layer
        return self._largest_batch * (values * self._itemsize + _COPIES_GATHERED * self.kept_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory; 0 where the device computes in host memory."""
        if torch.device(self.device).type != "cuda":
            return 0
        # The batch before stays until its copy has ended.
        return self.weight_bytes + self._forward_bytes + self._largest_batch * self.kept_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory, of all workers."""
        waiting = N_HOST_SLOTS * self._largest_batch * self.kept_bytes
        if self.device_bytes:
            return self.n_workers * max(self.weight_bytes, waiting)
        return self.n_workers * (self.weight_bytes + self._forward_bytes + waiting)

    def describe(self) -> str:
        """Return the need as text."""
        device = f" and {format_bytes(self.device_bytes)} on {self.device}" if self.device_bytes else ""
        each = f" for {self.n_workers} workers" if self.n_workers > 1 else ""
        return (
            f"{format_bytes(self.host_bytes)} of host memory{each}{device}: weights {format_bytes(self.weight_bytes)} "
            f"in {self.compute_dtype}, batches of {self._largest_batch:,} tokens"
        )

    def check(self) -> None:
        """Refuse forwards that do not fit in free memory, naming options with which they do."""
        host, device = free_memory(), free_device_memory(self.device)
        if self._fits(host, device):
            return
        is_device = device is not None and self.device_bytes > device
        free, place = (device, self.device) if is_device else (host, "host memory")
        raise NotEnoughMemory(
            f"The target's forwards need {self.describe()}. Free in {place} are {format_bytes(free or 0)}.",
            self._smaller(host, device),
        )

    def _fits(self, host: int | None, device: int | None) -> bool:
        return (host is None or self.host_bytes <= host) and (device is None or self.device_bytes <= device)

    def _smaller(self, host: int | None, device: int | None) -> str:
        """Name the options that fit: fewer workers, else smaller batches, else bfloat16 with these."""
        for n_workers in range(self.n_workers - 1, 0, -1):
            if replace(self, n_workers=n_workers)._fits(host, device):
                return f"Use --workers {n_workers}."
        for dtype in (self.compute_dtype, "bfloat16"):
            n_tokens = self.batch_tokens
            while n_tokens >= min(self.longest_tokens, self.batch_tokens):
                smaller = replace(self, compute_dtype=dtype, batch_tokens=n_tokens, n_workers=1)
                if smaller.weight_bytes <= self.weight_bytes and smaller._fits(host, device):
                    options = f" --compute-dtype {dtype}" * (dtype != self.compute_dtype)
                    return f"Use{options}{f' --batch-tokens {n_tokens}' * (n_tokens != self.batch_tokens)}."
                n_tokens //= 2
        return "No option makes it fit; use a larger machine, a smaller target, or free memory."


def free_device_memory(device: str) -> int | None:
    """Return the free bytes of a CUDA device; None for any other device."""
    if torch.device(device).type != "cuda":
        return None
    n_free, _ = torch.cuda.mem_get_info(torch.device(device))
    return int(n_free)
