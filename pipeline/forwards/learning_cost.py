"""Predicts from shapes alone what learning a codec costs, for the plan, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...moa.targets.live import DeviceClock
from ...storage.codecs.calibration import EXACT_WIDTH, MAX_COMPONENTS, MAX_FEATURES, POWER_ITERATIONS
from ...storage.codecs.registry import StoreCodec
from ...storage.codecs.transform import KV_PARTS, TransformCodec
from .calibrate import METRIC_TOKENS, SAMPLE_TOKENS

# A symmetric eigendecomposition in float64 (a QR) takes as long as so many floating point operations of a product, in
# units of width^3 (width * columns^2): measured with OpenBLAS on one core, widths of 2,048 to 4,096.
_EIGH = 22
_QR = 8
# Seconds of one core to measure quantisers and to place codes, per token of the statistics and component.
_QUANTISER_S = 7e-7
# Bytes of a component's 166 options: those that are kept, and those needed while they are measured. Then the arrays of
# the size of a group's components that placing codes needs at once.
_OPTION_BYTES, _MEASURING_BYTES = 2 * 36 * 166, 3 * 56 * 166
_N_CODE_ARRAYS = 6
_STATISTICS = 0.25
_BLOCK = 1 << 16


@dataclass(frozen=True)
class LearningCost:
    """What learning costs.

    Attributes:
        n_tokens: tokens of the sample; the target runs over them once more.
        memory_bytes: peak memory, beside the target.
        disk_bytes: peak disk space, freed at the end.
        seconds: time without the forwards.
    """

    n_tokens: int
    memory_bytes: int
    disk_bytes: int
    seconds: float


def learning_cost(
    codec: StoreCodec, sizes: Mapping[str, Any], n_tokens: int, flops_per_s: float
) -> LearningCost | None:
    """Predict what learning costs; None where nothing is learned.

    Args:
        sizes: the target's ``vocab_size`` and ``hidden_size``.
        n_tokens: tokens of the plan; the sample is at most about 30,000 of them.
        flops_per_s: speed of a float32 product on the device where codecs learn.

    Returns:
        The cost, within a factor of two on an idle machine; the memory is rather too high.
    """
    fields = [field for field in codec.learned.values() if isinstance(field, TransformCodec)]
    if not fields:
        return None
    n = min(n_tokens, SAMPLE_TOKENS)
    vocabulary, width = int(sizes["vocab_size"]), int(sizes["hidden_size"])
    costs = [_field_cost(field, n) for field in fields]
    memory, disk = max(c.memory_bytes for c in costs), sum(c.disk_bytes for c in costs)
    seconds, flops = sum(c.seconds for c in costs), sum(c.flops for c in costs)
    if any(field.needs_tokens for field in fields):
        flops += _axes_flops(n, width, MAX_FEATURES) + 2 * vocabulary * width * MAX_FEATURES
        rows = 3 * max(n, min(vocabulary, _BLOCK)) * width
        memory = max(memory, 4 * rows + 2 * vocabulary * min(width, MAX_FEATURES))
    if "hidden/last" in codec.learned:
        flops += 4 * min(n, METRIC_TOKENS) * vocabulary * width + 2 * vocabulary * width**2
        memory = max(memory, 4 * width * (vocabulary + min(vocabulary, _BLOCK)) + 3 * 4 * 256 * vocabulary)
    return LearningCost(n, memory, disk, seconds + flops / flops_per_s)


@dataclass(frozen=True)
class _FieldCost:
    memory_bytes: int
    disk_bytes: int
    seconds: float
    flops: float


def _field_cost(field: TransformCodec, n: int) -> _FieldCost:
    n_parts = len(KV_PARTS) if field.is_kv else 1
    n_layers = sum(map(len, field.groups))
    layer_width = math.prod(field.spec.token_shape) // n_parts // n_layers
    widths = [len(layers) * layer_width for layers in field.groups]
    kept = [min(width, MAX_COMPONENTS) for width in widths]
    n_statistics, n_basis = n * _STATISTICS, n * (1 - _STATISTICS)
    n_given = sum(source.n_features for source in field.sources)
    n_features = n_given or (MAX_FEATURES if field.needs_tokens else 0)
    flops = n_parts * sum(
        _axes_flops(n_basis, w, c) + 2 * n_statistics * w * c + 4 * n * w * n_features
        for w, c in zip(widths, kept, strict=True)
    )
    bases = 4 * n_parts * sum(w * c for w, c in zip(widths, kept, strict=True))
    of_part = max(4 * n_basis * w + 12 * w * c + 24 * c * c for w, c in zip(widths, kept, strict=True))
    n_components = n_parts * sum(kept)
    of_group = n_parts * max(kept)
    of_codes: float = _OPTION_BYTES * n_components
    of_codes += max(4 * n_statistics * _N_CODE_ARRAYS, 4 * n_statistics + _MEASURING_BYTES) * of_group
    return _FieldCost(
        memory_bytes=int(bases + max(of_part, of_codes) + 12 * n * n_given),
        disk_bytes=int(4 * (n * n_parts * sum(widths) + 2 * n_statistics * n_components)),
        seconds=_QUANTISER_S * n_statistics * n_components,
        flops=flops,
    )


def _axes_flops(n: float, width: int, n_axes: int) -> float:
    """Count the operations of ``principal_axes``, with decompositions as the product that takes as long."""
    if width <= EXACT_WIDTH:
        return 2 * n * width**2 + _EIGH * width**3
    products = 2 * (2 * POWER_ITERATIONS + 1) * n * width * n_axes
    return products + (POWER_ITERATIONS + 1) * _QR * width * n_axes**2 + _EIGH * n_axes**3


def product_speed(device: str) -> float:
    """Measure a float32 matrix product on a device for a tenth of a second: floating point operations per second."""
    size = 4096 if torch.device(device).type == "cuda" else 768
    left, clock = torch.randn(size, size, device=device), DeviceClock(torch.device(device))
    torch.mm(left, left)
    n_products, began = 0, clock.mark()
    while (elapsed := clock.seconds(began, clock.mark())) < 0.1:
        torch.mm(left, left)
        n_products += 1
    return 2.0 * size**3 * n_products / elapsed
