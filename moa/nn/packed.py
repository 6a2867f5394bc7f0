"""Linear layers whose weights stay as they are, laid out once as the kernels of a CPU want them.

With a matrix as PyTorch keeps it a product of six rows takes two to four times as long as one of a single row; with
oneDNN's layout it takes about as long, so that verifying a chain of drafts costs little more than a plain step. It is a
copy, which takes as much memory as the weights. ``benchmarks/decoding/products.py`` measures both.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ...machine import free_memory

_FEWEST_VALUES = 1 << 17  # of fewer values a product takes no longer than asking what to do with it
_ROWS = 8  # that the layout is for; with fewer and with more it is nearly as fast
_DTYPES = (torch.float32, torch.bfloat16)
OPERATIONS: Any = torch.ops.mkldnn


class PackedLinear(nn.Linear):
    """A linear layer with a copy of its weight for products of two rows and more that need no gradient."""

    packed: Tensor | None  # in no layout that PyTorch knows
    packed_state: tuple[int, int]  # of the weight, when it was copied

    @override
    def forward(self, x: Tensor) -> Tensor:
        # The first question spares plain steps the others: with one row PyTorch's own product is as fast.
        if x.numel() <= x.shape[-1] or torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        weight, packed = self.weight, vars(self).get("packed")
        if packed is None or x.dtype != weight.dtype or self.packed_state != state_of(weight):
            return F.linear(x, weight, self.bias)
        return product(x, packed, self.bias)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the copy out, which cannot be pickled, nor copied with its layer."""
        return {name: value for name, value in vars(self).items() if not name.startswith("packed")}


def pack(module: nn.Module) -> None:
    """Lay out the large weights of linear layers for decoding, on a CPU with AVX2, if memory holds the copy twice.

    For weights that don't change any more. A copy of a weight that changed in place is not used, and made anew by the
    next call; changes behind PyTorch's back (``weight.data``, fused optimizers) are not seen.
    """
    found = (one for one in module.modules() if isinstance(one, nn.Linear))
    layers = [one for one in found if type(one) in (nn.Linear, PackedLinear) and _takes(one)]
    n_free = free_memory()
    if n_free is not None and 2 * sum(layer.weight.nbytes for layer in layers) > n_free:
        return
    for layer in layers:
        layer.__class__ = PackedLinear
        vars(layer).update(packed=laid_out(layer.weight.detach()), packed_state=state_of(layer.weight))


def _takes(layer: nn.Linear) -> bool:
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or weight.is_inference():
        return False
    is_new = vars(layer).get("packed_state") != state_of(weight)
    return is_new and weight.numel() >= _FEWEST_VALUES and _works(weight.dtype)


def state_of(weight: Tensor) -> tuple[int, int]:
    """What changes when a weight does."""
    return weight.data_ptr(), weight._version


def laid_out(weight: Tensor) -> Tensor:
    """Copy a weight to the layout of products."""
    packed: Tensor = OPERATIONS._reorder_linear_weight(weight, _ROWS)
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by a laid out weight."""
    found: Tensor = OPERATIONS._linear_pointwise(x, packed, bias, "none", [], "")
    return found


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Whether this machine gains by the products, and this build of PyTorch has them and they are right."""
    # They are the compiler's own, without a promise for other versions, so they are tried.
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 32), (48, 32), (48,)
    x, weight, bias = (torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
    try:
        with torch.inference_mode():
            own = product(x, laid_out(weight), bias)
            return torch.allclose(own, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    except (RuntimeError, AttributeError, TypeError):
        return False
