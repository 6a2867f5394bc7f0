"""Products with weights that stay as they are, laid out once as the kernels of a CPU want them.

With a matrix as PyTorch keeps it a product of six rows takes two to four times as long as one of a single row; with
oneDNN's layout it takes about as long, so that verifying a chain of drafts costs what a plain step does. It is a copy,
which takes as much memory as the weights. ``benchmarks/decoding/products.py`` measures both.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...machine import free_memory

_ROWS = 8  # that the layout is for; with fewer and with more it is nearly as fast
_DTYPES = (torch.float32, torch.bfloat16)
_NAME = "_moa_packed"
_OPERATIONS: Any = torch.ops.mkldnn


class _Packed(NamedTuple):
    values: Tensor  # of no layout that PyTorch knows
    state: tuple[int, int]  # of the weight that it is a copy of: its address and the number of its changes


def pack(module: nn.Module) -> None:
    """Lay out the weights of linear layers on a CPU for products that need no gradient, if memory suffices.

    A weight that changes afterwards is used as it is.
    """
    layers = [one for one in module.modules() if type(one) is nn.Linear]
    weights = [layer.weight for layer in layers if _takes(layer.weight)]
    for weight in weights if _fits(weights) else ():
        _pack(weight)
    for layer in layers:
        if hasattr(layer.weight, _NAME):
            vars(layer)["forward"] = functools.partial(_forward, layer)


def pack_weight(weight: Tensor, like: Tensor | None = None) -> None:
    """Lay out a weight [V, E] for :func:`linear`, or give it the layout of another one that shares its memory."""
    shared = None if like is None else getattr(like, _NAME, None)
    if shared is not None and shared.state == _state(weight):
        setattr(weight, _NAME, shared)
    elif _takes(weight) and _fits([weight]):
        _pack(weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [..., E] with a weight [V, E] as ``F.linear`` does: [..., V]."""
    # The first question spares plain steps the others: with one row PyTorch's own product is as fast.
    if x.numel() <= x.shape[-1] or (packed := getattr(weight, _NAME, None)) is None:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() or x.dtype != weight.dtype or packed.state != _state(weight):
        return F.linear(x, weight, bias)
    return _product(x, packed.values, bias)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _product(rows: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = _OPERATIONS._linear_pointwise(rows, values, bias, "none", [], "")
    return product


def _pack(weight: Tensor) -> None:
    values = _OPERATIONS._reorder_linear_weight(weight.detach(), _ROWS)
    setattr(weight, _NAME, _Packed(values, _state(weight)))


def _state(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def _takes(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or weight.is_inference():
        return False
    packed: _Packed | None = getattr(weight, _NAME, None)
    return (packed is None or packed.state != _state(weight)) and _works(weight.dtype)


def _fits(weights: list[Tensor]) -> bool:
    n_free = free_memory()
    return n_free is None or 2 * sum(weight.nbytes for weight in weights) <= n_free


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch has the products, and they are right."""
    # They are its compiler's own, without a promise for other versions, so they are tried.
    x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((5, 32), (48, 32), (48,)))
    try:
        with torch.inference_mode():
            own: Any = _product(x, _OPERATIONS._reorder_linear_weight(weight, _ROWS), bias)
            return torch.allclose(own, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    except (RuntimeError, AttributeError, TypeError):
        return False
