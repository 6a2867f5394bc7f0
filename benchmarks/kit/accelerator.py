"""Measures how work uses a device: share of its peak speed, operations, and attention kernels."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moa_data.moa.drafters import eagle3
from moa_data.moa.nn import attention

PEAK_TFLOPS = {
    "H200 NVL": 835.0, "H200": 989.0, "GH200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0,
    "H100": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0,
}  # fmt: skip
"""Maps words of a device's name to the dense bfloat16 TFLOP/s that its maker states.

The first entry counts whose words are all in the name of the device.
"""


def peak_flops(device: str | torch.device, given_tflops: float | None) -> float | None:
    """Return the peak operations per second of a device.

    Returns None if no figure is given and the device's name is not known.
    """
    if given_tflops:
        return given_tflops * 1e12
    words = set(device_name(device).replace("-", " ").split())
    known = (tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if set(name.split()) <= words)
    return next(known, None)


def device_name(device: str | torch.device) -> str:
    """Return the maker's name of a CUDA device, and the type of any other device."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def synchronize(device: str | torch.device) -> None:
    """Wait for all queued work of a CUDA device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def utilisation(flops: float, seconds: float, peak: float | None) -> float | None:
    """Return the share of a device's peak that was used, or None if the peak is unknown."""
    return None if peak is None else flops / seconds / peak


def body_flops(config: Any, lengths: Sequence[int]) -> int:
    """Count the operations of the decoder layers over sequences of these lengths.

    Padding and the LM head are not counted. Each weight of a matrix costs two operations per token,
    and attention counts only the tokens that a token sees.
    """
    wide, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    kv_wide = config.num_key_value_heads * head_dim
    n_weights = 2 * wide * wide + 2 * wide * kv_wide + 3 * wide * config.intermediate_size
    tokens = np.asarray(lengths, np.int64)
    pairs = tokens * (tokens + 1) // 2
    return int(config.num_hidden_layers * (2 * n_weights * tokens.sum() + 4 * wide * pairs.sum()))


def executed_flops(work: Callable[[], object]) -> int:
    """Count the operations of the matrix products that some work executes, recomputation included.

    During the count, attention runs as plain matrix products of all queries and all keys. So the
    result also counts masked pairs, which a fused or compiled kernel would skip.
    """
    flex = mock.patch.object(attention, "_takes_flex", return_value=False)
    with FlopCounterMode(display=False) as counter, flex, sdpa_kernel(SDPBackend.MATH):
        work()
    n_flops: int = counter.get_total_flops()
    return n_flops


@contextlib.contextmanager
def watched_attention() -> Iterator[Counter[str]]:
    """Count the calls of each attention kernel by name while the context is open."""
    found: Counter[str] = Counter()
    fused = F.scaled_dot_product_attention

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            found[name] += 1
            return call(*arguments, **options)

        return counted

    def counted_fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        found[fused_kernel(q, k, v, **options)] += 1
        attended: Tensor = fused(q, k, v, **options)
        return attended

    with (
        mock.patch.object(F, "scaled_dot_product_attention", counted_fused),
        mock.patch.object(attention, "attend_blocks", counting("flex", attention.attend_blocks)),
        mock.patch.object(
            attention, "attend_many_short", counting("short products", attention.attend_many_short)
        ),
        mock.patch.object(eagle3, "_attend", counting("products with own steps", eagle3._attend)),
    ):
        yield found


def fused_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> str:
    """Name the kernel of PyTorch's fused attention for these tensors, e.g. ``flash_attention``."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):  # Autocast casts tensors before PyTorch picks a kernel.
        q, k, v = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (q, k, v))
    choice = torch._fused_sdp_choice(q, k, v, attn_mask, enable_gqa=enable_gqa, **options)
    return SDPBackend(choice).name.lower()
